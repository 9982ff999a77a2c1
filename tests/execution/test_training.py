"""Training failures are results; a subset's size divides nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.execution import training as module
from privtune.execution.files import read_result, write_result
from privtune.execution.training import noised_score, part_of, train_trials
from privtune.strategies import ScorePlan, TrainingPlan, TrialResult
from privtune.training.compute import CompileError, Compute
from privtune.training.engine import train
from privtune.training.methods import DPSGD
from privtune.training.streams import Streams
from privtune.training.transcript import TranscriptMismatchError
from tests.strategies.world import context
from tests.toy import blobs

TASK = blobs()
DATA = TASK.load()
SCHEDULE = context().schedule
TRAINING = TrainingPlan(SCHEDULE, DPSGD(noise_multiplier=1.0))
PARAMS = {"learning_rate": 0.5, "max_grad_norm": 1.0}


ON_CPU = Compute("cpu")


def run(
    trials: dict,
    training: TrainingPlan = TRAINING,
    records: object = DATA.train,
    compute: Compute = ON_CPU,
) -> list[TrialResult]:
    return train_trials(
        training,
        task=TASK,
        data=DATA,
        records=records,
        score=ScorePlan(60, 1.0),
        trials=trials,
        secrets={n: bytes([n]) * 32 for n in trials},
        compute=compute,
    )


def test_a_machine_without_a_compiler_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="leave compile off"):
        run({0: PARAMS}, compute=Compute("cpu", compiled=True))


def test_one_failure_in_a_stack_is_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._train

    def fails(plan: object, *, trials: dict, **rest: object) -> list[TrialResult]:
        if 1 in trials:
            raise torch.OutOfMemoryError("candidate 1")
        return real(plan, trials=trials, **rest)

    alone = [*run({0: PARAMS}), *run({2: PARAMS})]
    monkeypatch.setattr(module, "_train", fails)
    results = run({0: PARAMS, 1: PARAMS, 2: PARAMS})
    assert [r.failed for r in results] == ["", "OutOfMemoryError", ""]
    assert results[1].score == -math.inf
    for before, after in zip(alone, (results[0], results[2]), strict=True):
        assert torch.equal(before.weights, after.weights), "no candidate answers for another"


def test_a_defect_of_the_account_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*_: object, **__: object) -> list[TrialResult]:
        raise TranscriptMismatchError("more than was charged")

    monkeypatch.setattr(module, "_train", more)
    with pytest.raises(TranscriptMismatchError):
        run({0: PARAMS})


@pytest.mark.statistical
@pytest.mark.parametrize(("mechanism", "factor"), [("gaussian", 1.0), ("laplace", math.sqrt(2.0))])
@pytest.mark.parametrize(("metric", "bound"), [("accuracy", 1.0), ("loss", 3.0)])
def test_the_noise_of_a_score_has_the_planned_scale(
    mechanism: str, factor: float, metric: str, bound: float
) -> None:
    # 1000 draws: the relative error of a standard deviation is 2.2 % (Laplace: 3.5 %), tested at 5.
    weights = run({0: PARAMS})[0].weights
    plan = ScorePlan(60, 2.0, mechanism, metric, bound)
    exact_plan = replace(plan, noise_multiplier=None)
    exact = noised_score(exact_plan, TASK, weights, DATA.validation, bytes(32))
    scores = [
        noised_score(plan, TASK, weights, DATA.validation, n.to_bytes(32, "big"))
        for n in range(1000)
    ]
    noise = torch.tensor(scores, dtype=torch.float64) - exact
    scale = 2.0 * bound / 60 * factor
    assert noise.std().item() == pytest.approx(scale, rel=0.18)
    assert abs(noise.mean().item()) < 5 * scale / math.sqrt(1000)


def test_a_score_is_bounded_whatever_the_model_says() -> None:
    plan = ScorePlan(60, None, "gaussian", "loss", 3.0)
    wild = torch.full_like(run({0: PARAMS})[0].weights, 1e30)
    assert noised_score(plan, TASK, wild, DATA.validation, bytes(32)) >= -3.0
    broken = torch.full_like(wild, math.nan)
    assert noised_score(plan, TASK, broken, DATA.validation, bytes(32)) == -math.inf


def test_subset_and_rest_are_disjoint_and_whole() -> None:
    streams = Streams(bytes(32))
    subset = part_of(DATA.train, "subset", 0.3, streams)
    rest = part_of(DATA.train, "rest", 0.3, streams)
    assert len(subset) + len(rest) == 240
    assert 40 < len(subset) < 110
    both = torch.cat([subset.x, rest.x])
    assert torch.equal(both.sort(dim=0).values, DATA.train.x.sort(dim=0).values)
    assert part_of(DATA.train, "all", 0.3, streams) is DATA.train


def test_only_a_sealed_size_may_differ_from_the_schedule() -> None:
    subset = part_of(DATA.train, "subset", 0.3, Streams(bytes(32)))
    assert subset.sealed_size
    assert subset.to(torch.device("cpu")).sealed_size
    assert run({0: PARAMS}, TRAINING, subset)[0].failed == ""
    told = replace(subset, sealed_size=False)
    with pytest.raises(InvalidInputError, match="records of the schedule"):
        train(
            TRAINING.method,
            SCHEDULE,
            model=TASK.model,
            loss=TASK.loss,
            data=told,
            candidates=[PARAMS],
            secrets=[bytes(32)],
            device="cpu",
        )


def test_an_empty_subset_trains_on_noise_alone() -> None:
    empty = part_of(DATA.train, "subset", 1e-12, Streams(bytes(32)))
    assert empty.sealed_size
    training = replace(TRAINING, schedule=replace(SCHEDULE, records=24), part="subset")
    (result,) = run({0: PARAMS}, training, empty)
    assert result.failed == ""
    assert bool(result.weights.isfinite().all())


def test_the_average_divides_by_the_expected_size_of_the_subset() -> None:
    # One full step without noise to speak of: ten times the expected size, a tenth of the step.
    subset = part_of(DATA.train, "subset", 0.5, Streams(bytes(32)))

    def moved(records: int) -> float:
        schedule = replace(SCHEDULE, records=records, sample_rate=1.0, steps=1)
        training = TrainingPlan(schedule, DPSGD(noise_multiplier=1e-6), "subset")
        first, second = (
            run({0: {**PARAMS, "learning_rate": rate}}, training, subset)[0].weights.double()
            for rate in (1e-1, 1e-30)
        )
        return float((first - second).norm())

    assert moved(120) / moved(1200) == pytest.approx(10.0, rel=0.01)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    (result,) = run({0: PARAMS})
    for shapes in ({}, {"a": (3,), "b": (len(result.weights) - 3,)}):
        write_result(replace(result, shapes=shapes), tmp_path / "r.safetensors")
        again = read_result(tmp_path / "r.safetensors")
        assert torch.equal(again.weights, result.weights)
        assert again.params == result.params
        assert again.score == result.score
    nothing = TrialResult(index=0, params={}, weights=torch.empty(0), score=None)
    write_result(nothing, tmp_path / "n.safetensors")
    assert read_result(tmp_path / "n.safetensors").weights.numel() == 0
