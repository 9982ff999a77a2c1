"""What every test runs under, doctests and the README's included."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch: one thread a process, so that numbers are the same on every machine
# and the workers of pytest-xdist do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hints of earlier plans are shared by the workers of a run and by its commands, and end with it.
run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or tempfile.mkdtemp(prefix="privtune-cache-")
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / run)
# Files of studies on PostgreSQL, of a run of the suite alone.
os.environ["XDG_DATA_HOME"] = str(Path(tempfile.mkdtemp(prefix="privtune-data-")))

SHOWN_ON_A_STUDY = ("privtune.plots.", "privtune.study.", "privtune.strategies.", "privtune.audit.")


@pytest.fixture(autouse=True)
def _own_folder(request: pytest.FixtureRequest) -> None:
    """Run an example in a folder of its own, so that its default storage is a fresh one."""
    if isinstance(
        request.node, pytest.DoctestItem
    ):  # other tests make no folder that they do not ask for
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
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


@pytest.fixture(autouse=True)
def _same_path() -> None:
    """Forget what a command that was called in this process said to the processes it would start."""
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Start the global generators anew: a test's numbers are the same in any order, on any worker."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Read Optuna's migrations once, not for every database: they are half of what a small study takes."""
    if (made := sys.modules.get("optuna.storages._rdb.storage")) is not None:
        kept: list[Any] = []
        read = made._VersionManager._create_alembic_script

        def read_once(manager: Any) -> Any:
            if not kept:
                kept.append(read(manager))
            return kept[0]

        made._VersionManager._create_alembic_script = read_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from run to run: parallel workers must collect the same ones."""
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a test's name holds an address, so give it ids: {addresses[0]}")
