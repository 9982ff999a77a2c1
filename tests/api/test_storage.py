"""Python finds the database that commands find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch.utils.data import DataLoader, TensorDataset

import privtune
import privtune.opacus
from privtune.errors import InvalidInputError
from privtune.ledger import Budget
from privtune.names import DEFAULT_STORAGE, usual_storage
from privtune.sklearn import PrivateRegressor
from privtune.study import StudyNotFoundError
from privtune.study.rows import study_names
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

BUDGET = Budget(4.0, 1e-5, name="customers")


def test_the_variable_names_the_storage_in_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVTUNE_STORAGE", f"sqlite:///{tmp_path / 'team.db'}")
    with_variable = privtune.create_study("anna", budget=BUDGET)
    assert privtune.load_study("anna").remaining() == 4.0
    assert "anna" in cli("study", "list").out
    assert with_variable.storage.endswith("team.db")
    assert not (tmp_path / "privtune.db").exists()


def _note_storage(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a storage in a file for its owner alone, and the file in the environment."""
    note = folder / "note"
    note.write_text(f"{url}\n")
    note.chmod(0o600)
    monkeypatch.delenv("PRIVTUNE_STORAGE", raising=False)
    monkeypatch.setenv("PRIVTUNE_STORAGE_FILE", str(note))


def test_a_file_names_the_storage_in_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    url = f"sqlite:///{tmp_path / 'team.db'}"
    _note_storage(tmp_path, url, monkeypatch)
    assert usual_storage() == url
    privtune.create_study("anna", budget=BUDGET).close()
    assert privtune.load_study("anna").storage == url
    shown = cli("study", "compare", "anna")
    assert (shown.code, "--storage" in shown.out) == (0, False)
    assert not list(empty.iterdir())


def test_what_is_said_precedes_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    _note_storage(tmp_path, "sqlite:///file.db", monkeypatch)
    assert usual_storage(tmp_path / "here.db") == tmp_path / "here.db"
    privtune.create_study("typed", budget=BUDGET, storage=DEFAULT_STORAGE).close()
    assert "typed" in cli("study", "list", "--storage", DEFAULT_STORAGE).out
    monkeypatch.setenv("PRIVTUNE_STORAGE", "sqlite:///variable.db")
    assert usual_storage() == "sqlite:///variable.db"
    assert "typed" in cli("study", "list", "--storage", DEFAULT_STORAGE).out
    monkeypatch.setenv("PRIVTUNE_STORAGE", "")
    assert usual_storage() == "sqlite:///file.db"
    monkeypatch.delenv("PRIVTUNE_STORAGE_FILE")
    assert usual_storage() == DEFAULT_STORAGE


def test_a_file_without_a_storage_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    _note_storage(tmp_path, "", monkeypatch)
    with pytest.raises(
        InvalidInputError, match=r"PRIVTUNE_STORAGE_FILE.*names a file that is empty"
    ):
        privtune.load_study("anna")
    done = cli("study", "list")
    assert (done.code, "names a file that is empty" in done.err) == (1, True)


def test_estimators_and_opacus_scripts_find_the_usual_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    url = f"sqlite:///{tmp_path / 'team.db'}"
    _note_storage(tmp_path, url, monkeypatch)
    x = np.linspace(0.0, 1.0, 200)[:, None]
    regressor = PrivateRegressor(BUDGET, bounds=(0, 1), target_range=(0, 1), records=200, epochs=1)
    model = clone(regressor).fit(x, x[:, 0])
    assert (model.get_params()["storage"], study_names(url)) == (None, [model.study_])
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(100, 2)), batch_size=16)
    terms: dict[str, Any] = {"epochs": 1, "validation": None, "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(privtune.PrivTuneError):
        privtune.opacus.select(lambda trial: None, loader, **terms, declared_by="us")
    assert "opacus" in study_names(url)
    assert not list(empty.iterdir())


@pytest.mark.parametrize("storage", ["", 3, b"p.db"])
def test_a_fit_into_no_storage_is_a_sentence(storage: Any) -> None:
    x = np.linspace(0.0, 1.0, 200)[:, None]
    model = PrivateRegressor(
        BUDGET, bounds=(0, 1), target_range=(0, 1), records=200, storage=storage
    )
    with pytest.raises(InvalidInputError, match=r"storage = .* must be the URL of a database"):
        model.fit(x, x[:, 0])


def test_a_refused_storage_shows_no_password() -> None:
    url: Any = b"postgresql://ann:secret@host/clinic"
    with pytest.raises(InvalidInputError, match="storage = 'bytes'") as refused:
        privtune.load_study("toy", storage=url)
    assert "secret" not in str(refused.value)


def test_a_study_that_is_nowhere_leaves_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PRIVTUNE_STORAGE", "PRIVTUNE_STORAGE_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        StudyNotFoundError, match=r"no study named 'anna' in sqlite:///privtune\.db"
    ):
        privtune.load_study("anna")
    done = cli("study", "show", "anna")
    assert (done.code, "There is no study named 'anna'" in done.err) == (1, True)
    for group, words in (("study", "There is no study"), ("budget", "There is no budget")):
        assert words in cli(group, "list").out
        assert cli(group, "list", "--json").out.strip() == "[]"
    assert not list(tmp_path.iterdir())
    study = privtune.create_study("anna", budget=BUDGET, load_if_exists=True)
    assert study.remaining() == 4.0
