from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from privtune.ledger import Ledger
from privtune.strategies import STRATEGIES
from privtune.study import StudySpec
from privtune.study.rows import Results, StudyRow, StudyStore
from privtune.training.methods import METHODS

PARAMETERS = {"learning_rate": 0.5, "max_grad_norm": 1.0}
FIXED = {"name": "defaults", "strategy": "fixed", "parameters": PARAMETERS}


def toy_spec(**changes: object) -> StudySpec:
    spec: dict = {
        "name": "toy",
        "task": "tests.toy:blobs",
        "budget": {"name": "toy", "epsilon": 6.0, "delta": 1e-5},
        "space": {
            "learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True},
            "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
        },
        "arms": [
            FIXED,
            {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
            {"name": "hyfree", "strategy": "hyfreedp"},
        ],
        "epochs": 2,
        "expected_batch_size": 24,
        "device": "cpu",
    }
    whole = {**spec, **changes}
    if "space" not in changes and not any(searches(arm) for arm in whole["arms"]):
        del whole["space"]  # no arm draws from it
    return StudySpec.parse(whole)


def searches(arm: Mapping[str, Any]) -> bool:
    """Return whether an arm may draw from the space of its study."""
    name = arm["strategy"]
    built_in = STRATEGIES.is_built_in(name) or METHODS.is_built_in(name)
    return not built_in or (name in STRATEGIES and STRATEGIES[name].needs.draws)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'privtune.db'}"


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    """Return the sealed results of an arm of a study that is stored."""
    with Ledger(f"sqlite:///{tmp_path / 'rows.db'}") as ledger:
        row = StudyRow("toy", "uid", {}, tmp_path / "files")
        StudyStore(ledger.log.storage).create(row, [])
        yield Results(ledger.log.storage, row, "sealed/arm/")
