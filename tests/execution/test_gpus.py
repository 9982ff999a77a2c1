"""Which GPU each process sees: a machine of GPUs that a test only says is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.execution import launchers
from privtune.execution.executor import Executor
from privtune.execution.launchers import run_in_processes
from privtune.ledger import Ledger
from privtune.study import Study
from privtune.study.workers import serve
from privtune.training.engine.compute import check_device
from tests.execution.seen import note
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.quick


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show three GPUs, of which the environment names those that may be used."""

    def count() -> int:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 3 if named is None else len([name for name in named.split(",") if name])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: count() > 0)
    monkeypatch.setattr("torch.cuda.device_count", count)


@pytest.mark.parametrize(
    ("jobs", "share", "device", "visible", "expected"),
    [
        (4, 0, "auto", None, ["0", "1", "2", "0"]),
        (2, 0, "cuda", "GPU-a1,GPU-b2", ["GPU-a1", "GPU-b2"]),
        (2, 0, "cpu", None, [None, None]),
        (2, 0, "cuda:1", None, [None, None]),
        (2, 0, "auto", "", [None, None]),
        (4, 0.5, "auto", None, ["0", "1", "2", "0"]),
        (3, 1 / 3, "cuda", "2", ["2", "2", "2"]),
        (3, 1, "cuda", None, ["0", "1", "2"]),
        (1, 2, "cuda", None, ["0,1"]),
        (1, 3, "cuda", None, ["0,1,2"]),
    ],
)
def test_gpus_are_given_out_in_turn(
    gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    jobs: int,
    share: float,
    device: str,
    visible: str | None,
    expected: list[str | None],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Executor("processes", jobs, share).slots(device) == expected


@pytest.mark.parametrize(
    ("jobs", "share", "device"),
    [(4, 1, "auto"), (2, 2, "cuda"), (7, 0.5, "cuda"), (1, 4, "auto"), (1, 0.5, "cpu")],
)
def test_more_than_there_are_is_refused(gpus: None, jobs: int, share: float, device: str) -> None:
    with pytest.raises(InvalidInputError, match="needs more GPUs than"):
        Executor("processes", jobs, share).slots(device)


def test_devices_that_are_not_there(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check_device(d) for d in ("auto", "cuda", "cuda:2", "cpu")] == [
        "cuda",
        "cuda",
        "cuda:2",
        "cpu",
    ]
    with pytest.raises(InvalidInputError, match=r"this machine shows 3, cuda:0 to cuda:2"):
        check_device("cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_device("auto") == "cpu"
    with pytest.raises(InvalidInputError, match=r"none here\. CUDA_VISIBLE_DEVICES is ''"):
        check_device("cuda")
    for name in ("cuda:", "cuda:-1", "cuda:01", "CUDA", "mps", "cuda:1,2", None, 0):
        with pytest.raises(InvalidInputError, match="must be one of auto, cpu, cuda, or cuda:N"):
            check_device(name, here=False)  # type: ignore[arg-type]
    assert check_device("cuda:77", here=False) == "cuda:77"


def test_a_device_that_is_missing_is_said_before_the_charge(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    url = f"sqlite:///{tmp_path / 'p.db'}"
    study = Study.create(toy_spec(device="cuda:1"), url)
    for options in (
        {},
        {"device": "cuda"},
        {"device": "cpu", "executor": {"type": "processes", "gpus": 1}},
    ):
        with pytest.raises(InvalidInputError, match="needs"):
            study.run(**options)
    with pytest.raises(InvalidInputError, match="needs a CUDA device"):
        serve(url, device="cuda:1", idle_exit=0.0)
    with Ledger(url) as ledger:
        assert not ledger.charges("toy")


def test_a_process_that_died_gives_its_gpu_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launchers, "_GRACE", 0.1)  # those at work would stay for a minute

    def left() -> int:
        return 0 if {"0-1", "1-2"} <= {path.name for path in tmp_path.iterdir()} else 2

    run_in_processes(note, (str(tmp_path),), slots=["0", "1"], open_count=left)
    assert {"0-1", "1-1", "1-2"} <= {path.name for path in tmp_path.iterdir()}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
