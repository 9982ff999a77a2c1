"""What build returned stays as it was built, and a trial knows the public number of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import privtune
from privtune.strategies import Everything, Fixed, PapernotSteinke, SubsampledTuning
from privtune.study.failures import ArmStoppedError
from privtune.training.mechanism.memory import RecordMemoryError
from tests.study.elsewhere import OWN, TERMS, TRAIN
from tests.study.test_seal import make

ARM: dict[str, Any] = {**TERMS, "epsilon": 1.0}


def _task(build: Any, loss: Any) -> privtune.Task:
    return privtune.make_task(build, **{**OWN, "loss": loss})


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.5),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.5, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "RMSprop, by itself": lambda ps: torch.optim.RMSprop(ps, 0.1),
    "two groups": lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], 0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [Fixed(), PapernotSteinke(mean_runs=3), Everything(trials=2)])
def test_a_list_that_build_fills_holds_first_weights(
    name: str, strategy: Any, tmp_path: Path
) -> None:
    runs: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []

    def build(trial: privtune.Trial) -> privtune.Candidate:
        trial.suggest_float("unused", 0.1, 0.2)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        runs.append((model, {n: t.clone() for n, t in model.state_dict().items()}))
        return privtune.Candidate(model, OPTIMIZERS[name](list(model.parameters())))

    release = make(tmp_path).optimize(privtune.make_task(build, **OWN), strategy=strategy, **ARM)
    released = release.model.state_dict()
    assert runs
    for model, first in runs:
        for part, weights in model.state_dict().items():
            assert torch.equal(weights, first[part])
    assert not any(torch.equal(runs[0][1][part], released[part]) for part in released)


@pytest.mark.filterwarnings("ignore::UserWarning")  # weights that a penalty uses are copied
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(Fixed(), {240}), (SubsampledTuning(rate=0.25, mean_runs=2), {60, 180, 240})],
)
def test_a_trial_knows_the_declared_number_of_records(
    strategy: Any, expected: set[int], tmp_path: Path
) -> None:
    seen: set[int] = set()

    class Net(nn.Sequential):
        records = 0

    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = Net(nn.Linear(6, 3))
        model.records = trial.records
        seen.add(trial.records)
        rate = trial.suggest_float("learning_rate", 0.1, 0.5)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y, reduction="none") + (
            model[0].weight.square().sum() / model.records
        )

    make(tmp_path).optimize(_task(build, loss), strategy=strategy, **ARM)
    assert seen == expected


def test_memory_is_refused_before_the_charge(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        value = cross_entropy(model(x), y, reduction="none")
        return value if len(calls) < 5_000 else 2.0 * value

    study = make(tmp_path)
    with pytest.raises(RecordMemoryError, match="calls"):
        study.optimize(_task(simple, loss), strategy=Fixed(), **ARM)
    assert study.spent().epsilon == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning")  # such a loss is computed record by record
def test_memory_of_the_first_records_is_named_and_stays_refused(tmp_path: Path) -> None:
    """Its cause is in the code: running the same cell again must not be a cure."""
    anchors: dict[float, float] = {}

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = cross_entropy(model(x), y, reduction="none")
        if any(torch.equal(x[0], record) for record in TRAIN[0][:8]):
            anchors.setdefault(float(x.sum()), value.item())
        return value * (1.0 + len(anchors))

    study = make(tmp_path)
    for message in (r"outlives the call|kept between calls", "'anchors', which has kept records"):
        with pytest.raises(RecordMemoryError, match=message):
            study.optimize(_task(simple, loss), strategy=Fixed(), **ARM)
    assert study.spent().epsilon == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning")  # such a loss is computed record by record
@pytest.mark.parametrize("record", [7, 100])
def test_memory_of_a_real_record_stops_the_arm_before_its_release(
    record: int, tmp_path: Path
) -> None:
    """The first few records are tried before the charge, the others are met in the training."""
    kept = tmp_path / "kept"

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = cross_entropy(model(x), y, reduction="none")
        if torch.equal(x[0], TRAIN[0][record]):
            kept.write_text(f"{value.item()}")
        return value * (2.0 if kept.exists() else 1.0)

    study = make(tmp_path)
    with pytest.raises(ArmStoppedError if record == 100 else RecordMemoryError):
        study.optimize(_task(simple, loss), strategy=Fixed(), **{**ARM, "epochs": 8})
    assert not study.releases()
    assert (study.spent().epsilon > 0.0) == (record == 100)


def simple(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("learning_rate", 0.1, 0.5)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))
