from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from privtune.ledger import Ledger
from privtune.strategies import STRATEGIES
from privtune.study import StudySpec
from privtune.study.rows import Results, StoredStudy, StudyRow, StudyStore
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
        storage = ledger.log.storage
        row = StudyRow("toy", "uid", {}, tmp_path / "files", storage.identity().uid)
        StudyStore(storage).create(row, [])
        yield StoredStudy(storage, "toy").results.within("sealed/arm")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of S3's, empty but for a bucket; skipped where s3fs or moto is not installed."""
    with serve_s3(monkeypatch):
        yield


@contextmanager
def serve_s3(patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Serve an empty bucket; yield the variables by which other processes find it, as they are set here."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    for name, value in environment.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").makedirs("s3://bucket", exist_ok=True)
    yield environment
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
