"""Trainings that a strategy names: independent noise under every name, and one result for each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from privtune.accounting import Composed
from privtune.errors import InvalidInputError
from privtune.ledger.rounds import OpenRound
from privtune.strategies import (
    NamedTraining,
    Needs,
    NumberedTrials,
    Outcome,
    Plan,
    PlanningContext,
    Request,
    Round,
    SealedRound,
    SearchPlan,
    StrategyError,
    StrategyRun,
    TrainingPlan,
    TrialResult,
)
from privtune.study import Study
from privtune.study.arm_rounds import Batch, StudyRound, TrainingRequest
from privtune.study.workers import make_files
from privtune.tasks import Task
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS
from tests import toy
from tests.strategies.test_entry_points import lay_out
from tests.study.conftest import toy_spec

NAMES = (
    *(
        "0",
        "1",
        "00",
        "-0",
        "third-0",
        "fourth-0",
        "trial-3",
        "trial-03",
        "trial-3 ",
        "final",
        "Final",
    ),
    *("a/b", "a\\b", "..", ".", "", "/etc/passwd", "con", "x" * 10_000, "é", "e\u0301", "シ"),
    *("trial-000003.safetensors", "checkpoint", "training/0", '["0", 1]'),
)
"""Names that a parser of names, a file system or an encoding may take for one another."""

ONE_STEP = {"space": {}, "epochs": 1, "expected_batch_size": 240, "seed": 11}
"""One step on all records: what differs between two trainings is their noise."""


def _zeros() -> nn.Module:
    model = nn.Linear(6, 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def zeros() -> Task:
    return replace(toy.blobs(), name="zeros", model=_zeros)


@dataclass(frozen=True, kw_only=True)
class Cancelling:
    """Two trainings that each hide the gradient, unless their noise is the same.

    Args:
        arm: Name of the arm.
        names: Names of the two.
    """

    name: ClassVar[str] = "cancelling"
    summary: ClassVar[str] = "two trainings with clipping norms 50 and 100"
    needs: ClassVar[Needs] = Needs(task=True)

    arm: str = "cancelling"
    names: tuple[str, str] = ("0", "1")

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        method = METHODS["dpsgd"].for_budget(
            context.schedule, epsilon=epsilon / 2, delta=context.delta / 2
        )
        training = TrainingPlan(context.schedule, method)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=Composed((training.event,) * 2),
            training=training,
            params={},
            runs=None,
            score=None,
            released=("both models",),
            sealed=(),
            search=SearchPlan((training,), trials=2),
            final=False,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        both = []
        for name, norm in zip(self.names, (50.0, 100.0), strict=True):
            params = {"learning_rate": 1.0, "max_grad_norm": norm}
            (result,) = yield NamedTraining(name, plan.training, params)
            both.append(result)
        return Outcome(both[0], trials=tuple(both))


@pytest.mark.parametrize("names", [("0", "1"), ("trial-3", "trial-03")])
def test_the_noise_of_two_named_trainings_does_not_cancel(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    """Of independent noise in 21 dimensions, the cosine exceeds 0.75 once in 10**4; the seed is fixed."""
    path = f"{Cancelling.__module__}:{Cancelling.__name__}"
    lay_out(tmp_path / "site", "attack", {"cancelling": path})
    monkeypatch.syspath_prepend(tmp_path / "site")
    arm = {"name": "arm", "strategy": "cancelling", "names": list(names)}
    budget = {"name": "toy", "epsilon": 1.0, "delta": 1e-5}
    spec = toy_spec(task=f"{__name__}:zeros", arms=[arm], budget=budget, **ONE_STEP)
    with closing(Study.create(spec, storage)) as study:
        (release,) = study.run()
    fifty, hundred = (trial.weights.double() for trial in release.trials)
    assert [trial.index for trial in release.trials] == [0, 1]
    data, model = zeros().load().train, _zeros()
    nn.functional.cross_entropy(model(data.x), data.y).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()  # type: ignore[union-attr]
    free = -(2 * fifty - hundred)
    assert torch.cosine_similarity(free, gradient, dim=0) < 0.75


@pytest.fixture
def opened(storage: str) -> Iterator[tuple[Study, Plan, Callable[[], StudyRound]]]:
    """Return a study, its plan, and what opens its round as a process does that goes on with it."""
    arm = {
        "name": "arm",
        "strategy": "everything",
        "trials": 4,
        "parameters": {"learning_rate": 1.0, "max_grad_norm": 1.0},
    }
    spec = toy_spec(task=f"{__name__}:zeros", arms=[arm], **ONE_STEP)
    with closing(Study.create(spec, storage)) as study:
        life, (plan,), task = study._life, study.plans, zeros()

        def open_round() -> StudyRound:
            files = make_files(life, plan, task=task, data=task.load(), compute=spec.placement)
            return StudyRound(life, files)

        yield study, plan, open_round


def ask(trials: StudyRound, *requests: Request) -> list[TrialResult]:
    """Return what a strategy is sent that asks for these, one after the other."""
    results: list[TrialResult] = []

    def run(plan: Plan, trials: Round) -> StrategyRun:
        for request in requests:
            results.extend((yield request))
        return Outcome(None)

    strategy: Any = SimpleNamespace(run=run)
    trials.run(strategy)
    return results


def test_all_names_numbers_and_rows_have_independent_noise(opened: Any) -> None:
    """A correlation beyond 0.9 in 21 dimensions: once in 10**8 pairs; the seed is fixed."""
    study, plan, open_round = opened
    trials, params = open_round(), dict(plan.params)
    named = [NamedTraining(name, plan.training, params) for name in NAMES]
    found = ask(trials, *named, NumberedTrials(dict.fromkeys(range(4), params)))
    rows = OpenRound("toy-1", 4, study._life.secret(plan))
    secrets = {n: rows.seed(n) for n in range(4)}
    candidates = dict.fromkeys(secrets, params)
    batch = Batch(training=plan.training, trials=candidates, secrets=secrets)
    found += trials.files.train(batch)
    noise = np.stack([result.weights.double().numpy() for result in found])
    assert len({row.tobytes() for row in noise}) == len(found)
    noise -= noise.mean(axis=0)  # the gradient, which all have in common
    correlation = np.corrcoef(noise)
    assert np.abs(correlation - np.eye(len(found))).max() < 0.9
    assert not [name for name in trials.files.results.names() if len(name) > 100]


def test_secrets_differ_with_anything_that_is_asked(opened: Any) -> None:
    _, plan, _ = opened
    training, other = plan.training, plan.training.scaled(2.0)
    params: list[Mapping[str, Any]] = [{}, {"a": 1.0}, {"a": 2.0}, {"a": "1.0"}, {"b": 1.0}]
    asked = [
        TrainingRequest(key, train, candidate, scored)
        for key, train, candidate, scored in itertools.product(
            (*NAMES, *range(12)), (training, other), params, (False, True)
        )
    ]
    secrets = {each.secret(Streams(bytes(32))) for each in asked}
    assert len(secrets) == len(asked)
    files = {each.file for each in asked}
    assert len(files) == len(NAMES) + 12
    assert all(Path(file).name == file for file in files)


def test_a_name_has_one_result(opened: Any) -> None:
    _, plan, open_round = opened
    params = dict(plan.params)
    (first,) = ask(open_round(), NamedTraining("one", plan.training, params))
    (again,) = ask(open_round(), NamedTraining("one", plan.training, params))
    assert torch.equal(first.weights, again.weights)
    for asked in (
        {"params": {**params, "max_grad_norm": 2.0}},
        {"training": plan.training.scaled(2.0)},
        {"scored": True},
    ):
        wanted: Any = {"training": plan.training, "params": params, **asked}
        with pytest.raises(StrategyError, match="'one' was trained before"):
            ask(open_round(), NamedTraining("one", **wanted))
    ask(open_round(), NumberedTrials({2: params}))
    with pytest.raises(StrategyError, match="Trial 2 was trained before"):
        ask(open_round(), NumberedTrials({2: {**params, "max_grad_norm": 2.0}}))


@pytest.mark.parametrize("name", [b"final", 3, None, "half \ud800", "a\0b"])
def test_what_is_no_text_is_no_name(opened: Any, name: Any) -> None:
    _, plan, open_round = opened
    with pytest.raises(InvalidInputError, match="name"):
        ask(open_round(), NamedTraining(name, plan.training, plan.params))


def test_what_is_no_request_is_refused(opened: Any) -> None:
    with pytest.raises(StrategyError, match="yields str, which is no request"):
        ask(opened[2](), "final")  # type: ignore[arg-type]


def test_an_arm_has_sealed_rows_or_shown_trials(storage: str, opened: Any) -> None:
    """Both are numbered from 0: a row's noise is not a shown trial's."""
    _, _, open_round = opened
    with pytest.raises(StrategyError, match="no law of runs"):
        ask(open_round(), SealedRound())
    sealed_spec = toy_spec(
        name="other", arms=[{"name": "arm", "strategy": "papernot-steinke", "mean_runs": 4}]
    )
    with closing(Study.create(sealed_spec, storage)) as study:
        life, (sealed,), task = study._life, study.plans, toy.blobs()
        files = make_files(life, sealed, task=task, data=task.load(), compute=sealed_spec.placement)
        trials = StudyRound(life, files)
        params = {"learning_rate": 1.0, "max_grad_norm": 1.0}
        with pytest.raises(StrategyError, match="sealed selection"):
            ask(trials, NumberedTrials({0: params}))
        with pytest.raises(StrategyError, match="sealed selection"):
            trials.ask(0, lambda _: None)  # type: ignore[arg-type, return-value]
