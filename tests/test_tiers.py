"""Every room has a quick test, and a suite that lost files does not pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import ROOT

pytestmark = pytest.mark.quick

MARK = "pytest.mark.quick"


def packages() -> list[str]:
    found = (ROOT / "privtune").rglob("__init__.py")
    return sorted(path.parent.relative_to(ROOT / "privtune").as_posix() for path in found)


@pytest.mark.parametrize("room", [*packages(), "studies", "docs"])
def test_every_package_has_a_quick_test(room: str) -> None:
    folder = ROOT / "tests" / ("study" if room == "docs" else room)
    while not folder.is_dir():  # the tests of a small package stand with those of the one above
        folder = folder.parent
    files = [folder / "test_docs.py"] if room == "docs" else folder.rglob("test_*.py")
    assert any(MARK in file.read_text(encoding="utf-8") for file in files), folder


def test_the_walk_sees_packages() -> None:
    assert {"accounting", "training/mechanism", "training/engine", "cli"} <= set(packages())


CONFTEST = """
import pytest
from tests.tiers import check_floor

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(session, items):
    collected = len(items)
    yield
    items += check_floor(session, collected, 3)
"""


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ([], False),
        (["-n", "2"], False),
        (["-k", "one"], False),  # counted before anything is deselected
        (["here/test_it.py"], True),
        (["--ignore", "here/test_other.py"], True),
    ],
)
def test_a_whole_run_that_lost_files_fails_and_a_part_does_not(
    tmp_path: Path, options: list[str], passes: bool
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = here\npythonpath = {ROOT}\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is passes, said
    assert ("2 tests were collected and 3 are the fewest" in said) is not passes, said
