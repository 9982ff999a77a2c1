"""The pages of the decisions: dated, listed, and about files that exist."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(FOLDER.glob("0*.md"))
FILE = re.compile(r"`((?:privtune|tests|studies)/[\w/.]+)`")


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_decision_has_a_number_a_date_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    number = int(page.name[:4])
    assert text.startswith(f"# {number}. ")
    written = re.search(r"^\*\*Date\.\*\* (\S+)\.$", text, re.MULTILINE)
    assert written is not None, "the date follows the title"
    date.fromisoformat(written[1])
    missing = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.quick
def test_the_list_names_every_decision_in_order() -> None:
    text = (FOLDER / "README.md").read_text()
    listed = re.findall(r"^\| \[(\d+)\]\((\S+)\) \|", text, re.MULTILINE)
    assert listed == [(str(int(page.name[:4])), page.name) for page in PAGES]
