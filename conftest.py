"""Fixtures for doctests, the README's included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Alembic runs these itself; they cannot be imported.
collect_ignore_glob = ["privtune/ledger/migrations/*"]

SHOWN_ON_A_STUDY = ("privtune.plots.", "privtune.study.", "privtune.strategies.")


@pytest.fixture(autouse=True)
def _own_folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an example in a folder of its own, so that its default storage is a fresh one."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)
        if request.node.name.startswith(SHOWN_ON_A_STUDY):
            namespace = request.getfixturevalue("doctest_namespace")
            namespace["study"] = request.getfixturevalue("finished_study")


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The small study that examples call ``study``; for reading only."""
    import privtune

    study = privtune.create_study(
        "shown",
        budget=privtune.Budget(6.0, 1e-5, name="shown"),
        task="iris-logistic",
        space={"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}},
        arms=[
            {
                "name": "defaults",
                "strategy": "fixed",
                "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
            },
            {
                "name": "selection",
                "strategy": "papernot-steinke",
                "mean_runs": 4,
                "parameters": {"max_grad_norm": 1.0},
            },
        ],
        epochs=1,
        expected_batch_size=30,
        device="cpu",
        storage=f"sqlite:///{tmp_path_factory.mktemp('shown') / 'privtune.db'}",
    )
    study.run()
    return study
