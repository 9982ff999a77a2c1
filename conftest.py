"""Fixtures for doctests, the README's included."""

from __future__ import annotations

from pathlib import Path

import pytest

# Alembic runs these itself; they cannot be imported.
collect_ignore_glob = ["privtune/ledger/migrations/*"]


@pytest.fixture(autouse=True)
def _own_folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an example in a folder of its own, so that its default storage is a fresh one."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)
