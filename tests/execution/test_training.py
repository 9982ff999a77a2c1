"""What fails is no result; a subset's size divides nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.execution.trial_training import TrialWork, part_of, seconds_per_step, train_trials
from privtune.strategies import ScorePlan, TrainingPlan, TrialResult
from privtune.training.engine.compute import Compute
from privtune.training.engine.train import Training
from privtune.training.mechanism import noise
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.scoring import released_sums
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import TranscriptMismatchError
from privtune.training.methods import FixedDPSGD
from studies.harness import train
from tests.strategies.world import context
from tests.toy import blobs

pytestmark = pytest.mark.quick

TASK = blobs()
DATA = TASK.load()
SCHEDULE = context().schedule
TRAINING = TrainingPlan(SCHEDULE, FixedDPSGD(noise_multiplier=1.0))
PARAMS = {"learning_rate": 0.5, "max_grad_norm": 1.0}


ON_CPU = Compute("cpu")


def run(
    trials: dict,
    training: TrainingPlan = TRAINING,
    records: object = DATA.train,
    compute: Compute = ON_CPU,
) -> list[TrialResult]:
    return train_trials(
        TrialWork(
            training=training,
            task=TASK,
            data=DATA,
            records=records,
            score=ScorePlan(60, 1.0),
            compute=compute,
        ),
        trials=trials,
        secrets={n: bytes([n]) * 32 for n in trials},
    )


def test_a_training_on_a_subset_steps_at_its_share_of_the_rate() -> None:
    """The result is that of a tenth of the rate, and says the rate that was drawn."""
    (less,) = run({0: {**PARAMS, "learning_rate": 0.1 * PARAMS["learning_rate"]}})
    (found,) = run({0: PARAMS}, replace(TRAINING, rate_factor=0.1))
    (full,) = run({0: PARAMS})
    assert torch.equal(found.weights, less.weights)
    assert not torch.equal(found.weights, full.weights)
    assert found.params == PARAMS


@pytest.mark.parametrize(
    ("factor", "squares", "bound"), [(1.0, True, 0.3), (7.0, True, 50.0), (7.0, False, 0.3)]
)
def test_the_metric_loss_is_the_tasks_own_clipped(
    factor: float, squares: bool, bound: float
) -> None:
    """Against NumPy on the weights that came of it, without noise."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if squares:
            wanted = torch.nn.functional.one_hot(targets, 3)
            return factor * (outputs - wanted).square().sum(dim=1)
        return factor * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    task = replace(TASK, loss=loss, model=lambda: torch.nn.Linear(6, 3))
    (found,) = train_trials(
        TrialWork(
            training=TRAINING,
            task=task,
            data=DATA,
            records=DATA.train,
            score=ScorePlan(60, None, metric="loss", options={"bound": bound}),
            compute=ON_CPU,
        ),
        trials={0: PARAMS},
        secrets={0: bytes(32)},
    )
    weights = found.weights.double().numpy()
    x, y = DATA.validation.x.double().numpy(), DATA.validation.y.numpy()
    outputs = x @ weights[:18].reshape(3, 6).T + weights[18:]
    if squares:
        losses = factor * ((outputs - np.eye(3)[y]) ** 2).sum(axis=1)
    else:
        losses = factor * (np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(60), y])
    assert found.score == pytest.approx(-np.clip(losses, 0.0, bound).mean(), rel=1e-5)


def test_what_stops_the_program_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (torch.OutOfMemoryError("no"), RuntimeError("a mistake"), KeyError("typo")):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Training, "of", fails)
        with pytest.raises(type(error)):
            run({0: PARAMS, 1: PARAMS})


def test_a_defect_of_the_account_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*_: object, **__: object) -> list[TrialResult]:
        raise TranscriptMismatchError("more than was charged")

    monkeypatch.setattr(Training, "of", more)
    with pytest.raises(TranscriptMismatchError):
        run({0: PARAMS})


def test_weights_that_are_not_finite_are_a_result() -> None:
    (result,) = run({0: {**PARAMS, "learning_rate": 1e38, "max_grad_norm": 1e3}})
    assert not bool(result.weights.isfinite().all())
    assert result.score == -math.inf


def test_a_score_is_that_of_the_trial_s_own_stream() -> None:
    """Exact: the trials of a stack have noise of their own, each from its secret."""
    results = run({0: PARAMS, 1: PARAMS})
    for result in results:
        model = TASK.model()
        load_params(model, result.weights)
        rng = Streams(bytes(32)).numpy("")
        (sums,) = released_sums(ScorePlan(60, None), model, DATA.validation, rng) or []
        own = Streams(bytes([result.index]) * 32).numpy("score", 0)
        hits, misses = sums + noise.exact_gaussian(own.random, 2)
        assert result.score == pytest.approx(hits / (hits + misses))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("label", [3, -1])
def test_a_class_that_was_not_declared_is_no_record(
    split: str, label: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the same seeds: exactly what comes out when the record is marked as no record."""
    part = getattr(DATA, split)
    y = part.y.clone()
    y[5] = label
    bad, absent = TensorData(part.x, y), part.marked(torch.arange(len(part)) == 5)
    found, expected = (
        train_trials(
            TrialWork(
                training=TRAINING,
                task=TASK,
                data=replace(DATA, **{split: own}),
                records=own if split == "train" else DATA.train,
                score=ScorePlan(60, 1.0),
                compute=ON_CPU,
            ),
            trials={0: PARAMS, 1: PARAMS},
            secrets={0: bytes(32), 1: bytes([1]) * 32},
        )
        for own in (bad, absent)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.weights, other.weights)
        assert one.score == other.score
    assert capfd.readouterr() == ("", "")


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
    assert len(run({0: PARAMS}, TRAINING, subset)) == 1
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
    assert bool(result.weights.isfinite().all())


def test_the_average_divides_by_the_expected_size_of_the_subset() -> None:
    # One full step without noise to speak of: ten times the expected size, a tenth of the step.
    subset = part_of(DATA.train, "subset", 0.5, Streams(bytes(32)))

    def moved(records: int) -> float:
        schedule = replace(SCHEDULE, records=records, sample_rate=1.0, steps=1)
        training = TrainingPlan(schedule, FixedDPSGD(noise_multiplier=1e-6), "subset")
        first, second = (
            run({0: {**PARAMS, "learning_rate": rate}}, training, subset)[0].weights.double()
            for rate in (1e-1, 1e-30)
        )
        return float((first - second).norm())

    assert moved(120) / moved(1200) == pytest.approx(10.0, rel=0.01)


def test_the_plans_noise_is_what_runs() -> None:
    secure = dataclasses.replace(TRAINING, noise=NoiseOptions.of("secure"))
    (plain,), (other,) = run({0: PARAMS}), run({0: PARAMS}, secure)
    assert not torch.equal(plain.weights, other.weights)
    direct = train(
        TRAINING.method,
        SCHEDULE,
        model=TASK.model,
        loss=TASK.loss,
        data=DATA.train,
        candidates=[PARAMS],
        secrets=[bytes(32)],
        device="cpu",
        noise=NoiseOptions(source="chacha20", floating_point="grid"),
    )
    assert torch.equal(other.weights, direct.params[0])


def test_a_step_is_timed_with_all_that_runs_beside_it() -> None:
    alone = [0.0, 9.0, 10.0, 11.0, 12.0, 13.0]  # the first captures
    assert seconds_per_step(alone, steps=5, threads=2) == 1.0
    turns = [0.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert seconds_per_step(turns, steps=3, threads=1) == 2.0  # two stacks, one after the other
    abreast = [0.0, *(step + late for step in range(1, 6) for late in (0.0, 0.25))]
    assert seconds_per_step(abreast, steps=5, threads=2) == 1.0
    four = [0.0, *(step + late for step in range(1, 9) for late in (0.0, 0.25))]
    assert seconds_per_step(four, steps=4, threads=2) == 2.0  # and then two more
