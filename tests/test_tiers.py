"""Every room has a quick test."""

from __future__ import annotations

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
