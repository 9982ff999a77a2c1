"""What fails is no release: the curator sees all of it, everybody else one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.launchers import WorkersDiedError, WorkerStoppedError, run_in_processes
from privtune.ledger import Ledger, LedgerConnectionError, RoundStuckError
from privtune.strategies import Everything, Fixed, PapernotSteinke, StrategyError
from privtune.study import Study, StudyInterruptedError
from privtune.study._objects import DamagedResultError
from privtune.study.failures import ArmStoppedError
from privtune.study.lifecycle import Life
from privtune.study.workers import serve
from privtune.tasks import Task, TaskData, TaskDataError
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.transcript import TranscriptMismatchError
from tests.cli.conftest import Cli, cli
from tests.study.conftest import FIXED, toy_spec
from tests.study.elsewhere import OWN as RECORDS
from tests.study.elsewhere import TERMS, conditional
from tests.study.test_optimize import make, started
from tests.toy import blobs, curated

__all__ = ["cli"]

SECRET = "the record of Alice, 4711"


class Switches(dict[str, Any]):
    """What goes wrong next: no setting of the task, whose code stays the same."""


MISTAKE = Switches()
"""What the task of this file does wrong, and how often it does it right before."""


def _model() -> nn.Module:
    if MISTAKE.get("where") == "model" and MISTAKE.get("started") == "selection":
        if MISTAKE["left"] == 0:
            raise MISTAKE["error"]
        MISTAKE["left"] -= 1
    return blobs().model()


def _load() -> TaskData:
    if MISTAKE.get("where") == "load":
        raise MISTAKE["error"]
    data = blobs().load()
    return replace(data, **MISTAKE.get("data", {}))


def flawed() -> Task:
    if MISTAKE.get("where") == "factory":
        raise MISTAKE["error"]
    return replace(blobs(), name="flawed", load=_load, model=_model)


@pytest.fixture(autouse=True)
def _nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    MISTAKE.clear()
    start = Life.start

    def started(life: Life, plan: Any) -> None:
        start(life, plan)
        MISTAKE["started"] = plan.arm  # after the charge, and after every look at the records

    monkeypatch.setattr(Life, "start", started)
    yield
    MISTAKE.clear()


def spec() -> Any:
    arms = [
        FIXED,
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
    ]
    return toy_spec(task="tests.study.test_failures:flawed", seed=5, arms=arms, epochs=1)


def outcome(releases: Any) -> list[Any]:
    return [(r.arm, r.params, r.score, r.note, r.weights.tolist(), r.utility) for r in releases]


def undisturbed(tmp_path: Any) -> list[Any]:
    return outcome(Study.create(spec(), f"sqlite:///{tmp_path / 'other.db'}").run())


OWN = (
    PrivTuneError(SECRET),
    InvalidInputError("target", SECRET, "must be one of the declared classes"),
    TaskDataError(SECRET),
    StrategyError(SECRET),
    TranscriptMismatchError(SECRET),
    RoundStuckError(SECRET),
    WorkersDiedError(SECRET),
)
"""Errors of PrivTune's own that may be raised while data is touched."""

THEIRS = (RuntimeError, KeyError, AttributeError, MemoryError, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    "error", [*(kind(SECRET) for kind in THEIRS), *OWN], ids=lambda error: type(error).__name__
)
def test_every_exception_is_the_same_sentence(storage: str, error: Exception) -> None:
    life = Study.create(spec(), storage)._life
    with (
        pytest.raises(ArmStoppedError) as stopped,
        life.stopping("selection"),
    ):
        raise error
    assert str(stopped.value) == str(ArmStoppedError("toy", "selection"))
    assert stopped.value.__context__ is stopped.value.__cause__ is None
    assert f"{type(error).__name__}: " in life.failures("selection")[-1]["traceback"]
    assert SECRET in life.failures("selection")[-1]["traceback"]


@pytest.mark.parametrize(
    "error", [DamagedResultError, LedgerConnectionError, StudyInterruptedError]
)
def test_what_hangs_on_no_record_is_said(storage: str, error: type[Exception]) -> None:
    life = Study.create(spec(), storage)._life
    with (
        pytest.raises(error, match="away"),
        life.stopping("selection"),
    ):
        raise error("away")
    assert not life.failures("selection")


def test_a_failure_that_cannot_be_kept_is_not_told_either(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*_: object) -> None:
        raise LedgerConnectionError("away")

    monkeypatch.setattr(Life, "record_failure", record)
    life = Study.create(spec(), storage)._life
    with pytest.raises(ArmStoppedError) as stopped, life.stopping("selection"):
        raise ValueError(SECRET)
    assert stopped.value.__context__ is stopped.value.__cause__ is None


@pytest.mark.parametrize("error", [RuntimeError(SECRET), OWN[1]])
def test_an_error_in_mid_arm_stops_it_and_the_mended_run_is_the_undisturbed_one(
    storage: str, tmp_path: Any, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    study = Study.create(spec(), storage)
    MISTAKE.update(where="model", error=error, left=1)
    with pytest.raises(ArmStoppedError) as stopped:
        study.run()
    assert stopped.value.__suppress_context__
    assert stopped.value.__cause__ is None
    said = str(stopped.value)
    assert "goes on with the same seeds" in said
    assert SECRET not in said
    assert type(error).__name__ not in said
    assert capfd.readouterr() == ("", "")
    kept = [f for arm in study.arms for f in curated(study).failures(arm)]
    assert SECRET in kept[-1]["traceback"], "the curator sees all of it"
    assert "in _model" in kept[-1]["traceback"]
    assert SECRET not in json.dumps(study.export())
    with Ledger(storage) as ledger:
        charged = [(c.id, c.event) for c in ledger.charges("toy")]
    MISTAKE.clear()
    assert outcome(study.run()) == undisturbed(tmp_path)
    with Ledger(storage) as ledger:
        assert [(c.id, c.event) for c in ledger.charges("toy")] == charged


@pytest.mark.parametrize("where", ["load", "model"])
def test_no_public_place_tells_what_stopped_a_charged_arm(
    storage: str, tmp_path: Any, where: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The command line, its views, MLflow and a worker: for an error of PrivTune's own, after the charge."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    Study.create(spec(), storage)
    MISTAKE.update(where=where, error=OWN[1], left=1)
    at = ("--storage", storage)
    ran = cli("study", "run", "toy", *at)
    said = [ran.out, ran.err]
    assert ran.code == 1
    assert "--curator" in " ".join(ran.err.split())
    for view in (["show", "toy"], ["show", "toy", "--json"], ["compare", "toy"]):
        shown = cli("study", *view, *at)
        said += [shown.out, shown.err]
    MISTAKE["left"] = 0
    if where == "model":  # the round is open
        with pytest.raises(ArmStoppedError) as stopped:
            serve(storage, study="toy", idle_exit=0.0)
        said.append(str(stopped.value))
        before = len(said)
        assert serve(storage, idle_exit=0.0, notify=said.append) == 0
        assert len(said) == before + 1
    client = MlflowClient(tracking_uri=uri)
    for experiment in client.search_experiments():
        said += [repr(run) for run in client.search_runs([experiment.experiment_id])]
    assert SECRET not in "".join(said)
    assert "InvalidInputError" not in "".join(said)
    assert SECRET in cli("study", "show", "toy", *at, "--curator").out


@pytest.mark.parametrize("code", [0, "a word"])
@pytest.mark.parametrize("where", ["factory", "load", "model"])
def test_a_task_that_ends_the_program_is_one_sentence(
    storage: str, tmp_path: Path, where: str, code: Any, cli: Cli
) -> None:
    """An exit passes every handler of errors: with code 0 a command that did nothing would succeed."""
    Study.create(spec(), storage).close()
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec().model_dump(mode="json")))
    MISTAKE.update(where=where, error=SystemExit(code), left=0, started="selection")
    commands = [("study", "run", "toy", "--storage", storage, "--no-mlflow")]
    if where != "model":
        commands.append(("study", "plan", str(file), "--curator"))
    for command in commands:
        done = cli(*command)
        assert (done.code, done.out) == (1, ""), command
        assert done.err.count("\n") == 1, done.err
        assert "Traceback" not in done.err
    with Ledger(storage) as ledger:
        assert ledger.spent("toy").epsilon == 0.0


def test_an_exit_after_the_charge_stops_the_arm(storage: str, cli: Cli) -> None:
    study = Study.create(spec(), storage)
    MISTAKE.update(where="model", error=SystemExit(0), left=1)
    with pytest.raises(ArmStoppedError):
        study.run()
    kept = [f for arm in study.arms for f in curated(study).failures(arm)]
    assert "ends the program (exit 0)" in kept[-1]["traceback"]


def _raises(*_: object) -> None:
    from privtune.execution.launchers import STOPPED

    raise SystemExit(STOPPED)


def test_a_worker_that_an_error_stopped_is_not_started_again() -> None:
    with pytest.raises(WorkerStoppedError):
        run_in_processes(_raises, (), slots=[None], open_count=lambda: 1)


@pytest.mark.parametrize("strategy", [PapernotSteinke(mean_runs=4), Everything(trials=3), Fixed()])
def test_a_build_that_raises_in_mid_round_goes_on_as_if_it_had_not(
    tmp_path: Any, strategy: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    begun: list[bool] = []

    def flaky(trial: privtune.Trial) -> privtune.Candidate:
        if begun:
            calls.append(trial.number)
            if len(calls) == (1 if isinstance(strategy, Fixed) else 2):
                raise ValueError(SECRET)
        return conditional(trial)

    studies = [make(f"sqlite:///{tmp_path / name}.db", seed=11) for name in ("a", "b")]
    with pytest.raises(ArmStoppedError) as stopped:
        studies[0].optimize(
            privtune.make_task(flaky, **RECORDS),
            strategy=strategy,
            epsilon=5.0,
            observer=started(begun),
            **TERMS,
        )
    assert SECRET not in str(stopped.value)
    assert not studies[0].releases()
    found, expected = (
        study.optimize(privtune.make_task(own, **RECORDS), strategy=strategy, epsilon=5.0, **TERMS)
        for study, own in zip(studies, (flaky, conditional), strict=True)
    )
    assert outcome([found]) == outcome([expected])
    assert capfd.readouterr() == ("", "")


def test_a_record_that_cannot_be_used_changes_no_outcome_at_all(
    storage: str, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the same seeds, to the bit that of the neighbour in which it is marked as no record."""
    part = blobs().load().train
    MISTAKE["data"] = {"train": TensorData(part.x, part.y.index_fill(0, torch.tensor(5), 3))}
    study = Study.create(spec(), storage)
    found = outcome(study.run())
    counts = [t.user_attrs["unusable"] for t in study._life.trials.of("selection")]
    assert max(counts) > 0, "the curator sees how many there were"
    assert b'"unusable": 0' in study.model_path("selection").read_bytes().replace(b"\\", b"")
    MISTAKE["data"] = {"train": part.marked(torch.arange(len(part)) == 5)}
    assert found == undisturbed(tmp_path)
    assert capfd.readouterr() == ("", "")
