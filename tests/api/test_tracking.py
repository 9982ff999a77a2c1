"""Python studies and estimators log their releases by one argument."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import privtune
from privtune import Budget
from privtune.errors import InvalidInputError
from privtune.sklearn import PrivateClassifier
from privtune.strategies import Fixed
from privtune.study import study_names
from tests.study.conftest import FIXED
from tests.study.elsewhere import OWN, TERMS, simple

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

DECLARED: dict[str, Any] = {
    "task": "tests.toy:blobs",
    "arms": [FIXED],
    "epochs": 1,
    "expected_batch_size": 24,
}


def logged(uri: str) -> list[str]:
    """Return the names of the runs of a store."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    return sorted(run.info.run_name for run in client.search_runs(ids))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_study_is_logged_where_mlflow_s_own_variable_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{folder / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    budget = Budget(6.0, 1e-5, name="toy")
    with closing(
        privtune.create_study("mine", budget=budget, tracking="mlflow", **DECLARED)
    ) as study:
        study.run()
    assert logged(uri) == ["defaults"]


def test_a_loaded_study_logs_with_its_next_release_what_was_released_before(folder: Path) -> None:
    budget = Budget(100.0, 1e-5, name="open")
    with closing(privtune.create_study("open", budget=budget)) as study:
        study.optimize(
            privtune.make_task(simple, **OWN), strategy=Fixed(), epsilon=0.5, arm="first", **TERMS
        )
    assert list(folder.rglob("mlflow.db")) == [], "nothing is logged unless it is asked for"
    with closing(privtune.load_study("open", tracking="mlflow")) as study:
        study.optimize(
            privtune.make_task(simple, **OWN), strategy=Fixed(), epsilon=0.5, arm="second", **TERMS
        )
    [store] = folder.rglob("mlflow.db")
    assert logged(f"sqlite:///{store}") == ["first", "second"]


def test_a_fit_is_logged(folder: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = np.clip(rng.normal(y[:, None], 0.5, (200, 3)), -1, 2)
    budget = Budget(4.0, 1e-5, name="fit")
    terms: dict[str, Any] = {"classes": [0, 1], "bounds": (-1, 2), "epochs": 1, "records": 200}
    PrivateClassifier(budget, tracking="mlflow", **terms).fit(x, y)
    [store] = folder.rglob("mlflow.db")
    assert logged(f"sqlite:///{store}") == ["fit"]


@pytest.mark.parametrize("name", ["ml-flow", "MLFLOW", "wandb"])
def test_an_unknown_tracker_is_refused_before_anything_is_stored(folder: Path, name: str) -> None:
    budget = Budget(6.0, 1e-5, name="toy")
    with pytest.raises(InvalidInputError, match=r"tracking = .*mlflow"):
        privtune.create_study("mine", budget=budget, tracking=name, **DECLARED)
    assert not (folder / "privtune.db").exists() or study_names(folder / "privtune.db") == []
