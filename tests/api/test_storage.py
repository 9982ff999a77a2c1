"""Python finds the database that commands find."""

from __future__ import annotations

from pathlib import Path

import pytest

import privtune
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]


def test_the_variable_names_the_storage_in_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVTUNE_STORAGE", f"sqlite:///{tmp_path / 'team.db'}")
    budget = privtune.Budget(4.0, 1e-5, name="customers")
    with_variable = privtune.create_study("anna", budget=budget)
    assert privtune.load_study("anna").remaining() == 4.0
    assert "anna" in cli("study", "list").out
    assert with_variable.storage.endswith("team.db")
    assert not (tmp_path / "privtune.db").exists()
