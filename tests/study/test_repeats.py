"""Repetitions of arms: what they cost, how independent they are, and how they go on after a stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import privtune
from privtune.accounting import Adjacency, Repeated
from privtune.errors import InvalidInputError
from privtune.facts import declared_note
from privtune.ledger import Charge, Ledger
from privtune.plots.study_charts import costs_at_other_means
from privtune.strategies import (
    Everything,
    Fixed,
    NamedTraining,
    NumberedTrials,
    Outcome,
    Plan,
    Release,
    StrategyError,
    StrategyRun,
)
from privtune.strategies.everything import selection_instead
from privtune.strategies.plan import epsilon_spent
from privtune.study import Study
from privtune.study.arm_rounds import StudyRound, TrainingRequest, TrialFiles
from privtune.study.lifecycle import Life
from privtune.study.planning import plan_arms, plan_study
from privtune.study.workers import make_files
from privtune.training.mechanism.streams import Streams
from tests import toy
from tests.study import elsewhere
from tests.study.conftest import FIXED, PARAMETERS, toy_spec

BENCHMARK = "tests.toy:benchmark_blobs"
SELECTION = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4}
SUBSAMPLED = {
    "name": "subsampled",
    "strategy": "subsampled-tuning",
    "variant": 2,
    "rate": 0.3,
    "mean_runs": 2,
}
TPE = {"name": "tpe", "strategy": "everything", "trials": 3, "sampler": "tpe"}


def run(storage: str, *, jobs: int = 1, **changes: Any) -> dict[str, Release]:
    with closing(Study.create(toy_spec(**changes), storage)) as study:
        return {release.arm: release for release in study.run(n_jobs=jobs)}


def charges_of(storage: str) -> Sequence[Charge]:
    with Ledger(storage) as ledger:
        return ledger.charges("toy")


def test_each_repetition_on_private_records_is_charged() -> None:
    spec = toy_spec(arms=[FIXED], repeats=5)
    (plan,), total = (planned := plan_study(spec)).plans, planned.total
    assert plan.charged == Repeated(5, plan.event)
    assert plan.public_facts["repetitions"] == "5, each charged"
    assert total.epsilon <= 6.0
    # All steps of all repetitions, by another library: no less than what is reported, up to its own slack.
    schedule, noise = plan.training.schedule, plan.training.method.noise_multiplier
    step = dp_accounting.PoissonSampledDpEvent(
        schedule.sample_rate, dp_accounting.GaussianDpEvent(noise)
    )
    accountant = PLDAccountant().compose(
        dp_accounting.SelfComposedDpEvent(step, 5 * schedule.steps)
    )
    assert total.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)
    (once,) = plan_study(toy_spec(arms=[FIXED])).plans
    assert noise > 1.3 * once.training.method.noise_multiplier


def test_views_price_a_selection_with_all_of_its_repetitions(storage: str) -> None:
    random = {"name": "random", "strategy": "everything", "trials": 3, "sampler": "random"}
    arms = [SELECTION, random, FIXED]
    with closing(Study.create(toy_spec(arms=arms, repeats=3), storage)) as study:
        selection, everything, fixed = study.plans
        costs = costs_at_other_means(study, selection)
        asked, known = (study._life.guarantee(plan).epsilon for plan in (selection, fixed))
    (same,) = (cost for mean, cost in costs if mean == pytest.approx(4.0))
    assert same == pytest.approx(asked, rel=1e-6)
    assert selection.released[-1].startswith("of each further repetition")
    terms: Any = {"delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
    assert epsilon_spent(fixed, **terms)[-1][1] == pytest.approx(known, rel=1e-6)
    three, one = (
        selection_instead(everything, **terms),
        selection_instead(replace(everything, repeats=1), **terms),
    )
    assert three is not None
    assert one is not None
    assert three.epsilon > 1.3 * one.epsilon


def test_what_a_benchmark_spares_is_noted_in_the_ledger(storage: str) -> None:
    with closing(Study.create(toy_spec(task=BENCHMARK, arms=[FIXED], repeats=2), storage)) as study:
        study.run()
        (charge,) = study.certificate()["charges"]
    said = "since all records are declared public (a benchmark)"
    assert charge["note"] == f"not charged repetitions beyond the first, {said}"
    context = toy_spec(arms=[FIXED]).planning_context()
    for public, note in (
        (True, ""),
        (False, f"not charged exact scores on the test split, {said}"),
    ):
        task = replace(toy.benchmark_blobs(), public_test=public)
        (plan,) = plan_arms(
            [Fixed(parameters=PARAMETERS)], replace(context, task=task), epsilon=2.0
        ).plans
        assert declared_note(plan.public_facts) == note


def test_repetitions_on_public_records_cost_what_one_costs(storage: str) -> None:
    once = plan_study(toy_spec(task=BENCHMARK)).plans
    spec = toy_spec(
        task=BENCHMARK, repeats=3, seed=1
    )  # few test records: others may agree by chance
    with closing(Study.create(spec, storage)) as study:
        releases = study.run()
        for plan, before in zip(study.plans, once, strict=True):
            assert plan.charged == plan.event == before.event
            assert plan.public_facts["repetitions"] == "3, of public records: one is charged"
        assert study.spent().epsilon <= 6.0
        charges = charges_of(storage)
        assert [charge.event for charge in charges] == [plan.event for plan in once]
    for release in releases:
        assert len(release.repetitions) == 3
        assert release.repetitions[0].utility == release.utility
        assert release.repetitions[0].params == release.params
        if release.arm != "defaults":
            assert len({str(each) for each in release.repetitions}) > 1, release.arm


def test_one_draw_has_no_repetitions(storage: str) -> None:
    assert run(storage, arms=[FIXED], task=BENCHMARK)["defaults"].repetitions == ()


def numbers(plan: Plan) -> np.ndarray:
    return np.array([plan.drawn_runs(Streams(bytes([seed] * 32))) for seed in range(250)])


@pytest.mark.parametrize("public", [False, True], ids=["private", "public"])
def test_each_repetition_draws_its_own_number_of_runs(public: bool) -> None:
    """Independent of each other where each repetition is charged, by strata on public records."""
    task = {"task": BENCHMARK} if public else {}
    (plan,) = plan_study(toy_spec(arms=[SELECTION], repeats=4, **task)).plans
    assert plan.repeats_charged != public
    assert plan.runs is not None
    drawn = numbers(plan)
    assert drawn.shape == (250, 4)
    # A geometric law of mean 4 has a deviation of 3.5: five of its standard errors, and of a correlation's.
    assert abs(drawn.mean(axis=0) - 4.0).max() < 5 * 3.5 / 250**0.5
    off = np.corrcoef(drawn.T)[~np.eye(4, dtype=bool)]
    if public:
        assert off.max() < 0.0
    else:
        assert abs(off).max() < 5 / 250**0.5
    # One number of every quarter of the law, whichever repetition has it.
    middle = plan.runs.quantile(0.5)
    low = (drawn <= middle).sum(axis=1)
    assert (low.min() >= 2) == public


def test_one_run_draws_the_number_that_is_charged() -> None:
    """A single repetition has no strata: what is drawn is the charged law's own sample."""
    (plan,) = plan_study(toy_spec(task=BENCHMARK, arms=[SELECTION])).plans
    assert plan.runs is not None
    for seed in range(20):
        streams = Streams(bytes([seed] * 32))
        assert plan.drawn_runs(streams) == (plan.runs.sample(streams.numpy("runs", 0)),)


class Stopped(Exception):
    """Stands for a machine that fails."""


@pytest.mark.parametrize("arm", [FIXED, SELECTION, SUBSAMPLED, TPE], ids=lambda arm: arm["name"])
def test_stopped_repetitions_go_on_to_the_same_release(
    arm: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = {"arms": [arm], "task": BENCHMARK, "repeats": 3, "seed": 5, "stack": 2}
    whole = run(f"sqlite:///{tmp_path / 'whole.db'}", **terms)[arm["name"]]
    storage, train, calls = f"sqlite:///{tmp_path / 'stopped.db'}", TrialFiles.train, []

    def stopping(self: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) in (1, 3):
            raise Stopped
        return train(self, batch)

    monkeypatch.setattr(TrialFiles, "train", stopping)
    with closing(Study.create(toy_spec(**terms), storage)) as study:
        for _ in range(3):
            try:
                (release,) = study.run()
                break
            except privtune.PrivTuneError:
                continue
        (charge,) = charges_of(storage)
    assert len(calls) >= 2
    assert release.repetitions == whole.repetitions
    assert bool((release.weights == whole.weights).all())
    assert charge.event == study.plans[0].event


def test_stacks_of_repetitions_are_repetitions_one_by_one(tmp_path: Path) -> None:
    arms = [FIXED, SUBSAMPLED]
    terms = {"arms": arms, "task": BENCHMARK, "repeats": 3, "seed": 2}
    one, many = (
        run(f"sqlite:///{tmp_path / f'{stack}.db'}", stack=stack, **terms) for stack in (1, 16)
    )
    for arm in ("defaults", "subsampled"):
        for first, second in zip(one[arm].repetitions, many[arm].repetitions, strict=True):
            assert first.params == second.params
            assert first.utility == pytest.approx(second.utility, abs=1 / 60 + 1e-9)


def test_no_two_repetitions_share_noise() -> None:
    (plan,) = plan_study(toy_spec(task=BENCHMARK, arms=[SUBSAMPLED], repeats=3)).plans
    files: Any = TrialFiles(
        plan=plan, secret=bytes(32), results=None, space={}, task=None, data=None
    )
    secrets = {
        TrainingRequest("final", plan.training, {}, repetition=number).secret(streams)
        for number in range(3)
        for streams in {
            files.streams_of(n).key("x"): files.streams_of(n) for n in range(3)
        }.values()
    }
    assert len(secrets) == 9
    subsets = [
        files.streams_of(number).numpy("subset", 0).random(1000) < 0.3 for number in range(3)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # Independent: 90 records in both, with a deviation of 9.
        assert abs(int((subsets[one] & subsets[other]).sum()) - 90) < 50


@pytest.fixture
def opened(storage: str) -> Iterator[tuple[Plan, StudyRound]]:
    """Return a plan of three trials, run twice, and its round."""
    spec, task = toy_spec(task=BENCHMARK, arms=[TPE], repeats=2, epochs=1), toy.benchmark_blobs()
    with closing(Study.create(spec, storage)) as study:
        (plan,), life = study.plans, study._life
        files = make_files(life, plan, task=task, data=task.load(), compute=spec.placement)
        yield plan, StudyRound(life, files)


def test_each_repetition_runs_its_strategy_once_and_they_train_together(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    stacks: list[int] = []
    train = TrialFiles.train

    def counting(self: Any, batch: Any) -> Any:
        stacks.append(len(batch.trials))
        return train(self, batch)

    def run(plan: Plan, trials: StudyRound) -> StrategyRun:
        steps.append(f"{trials.repetition} begins")
        (first,) = yield NamedTraining("first", plan.training, PARAMETERS)
        steps.append(f"{trials.repetition} goes on")
        (last,) = yield NamedTraining("last", plan.training, PARAMETERS)
        return Outcome(last, trials=(first, last))

    strategy: Any = SimpleNamespace(run=run)
    monkeypatch.setattr(TrialFiles, "train", counting)
    outcomes = opened[1].run(strategy)
    assert steps == ["0 begins", "1 begins", "0 goes on", "1 goes on"]
    assert stacks == [2, 2]
    again = opened[1].run(strategy)
    assert stacks == [2, 2], "what is stored answers a second run"
    for outcome, stored in zip(outcomes, again, strict=True):
        for result, same in zip(outcome.trials, stored.trials, strict=True):
            assert bool((result.weights == same.weights).all())
    weights = {result.weights.numpy().tobytes() for each in outcomes for result in each.trials}
    assert len(weights) == 4


def test_an_error_of_a_training_ends_the_run(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that handles its errors does not handle this one."""

    def fail(self: Any, batch: Any) -> Any:
        raise Stopped

    def run(plan: Plan, trials: StudyRound) -> StrategyRun:
        try:
            (result,) = yield NamedTraining("final", plan.training, PARAMETERS)
        except Exception:
            return Outcome(None)
        return Outcome(result)

    strategy: Any = SimpleNamespace(run=run)
    monkeypatch.setattr(TrialFiles, "train", fail)
    with pytest.raises(Stopped):
        opened[1].run(strategy)


@pytest.mark.parametrize("number", [-1, 3])
def test_no_trial_beyond_the_plan_s_is_trained(opened: Any, number: int) -> None:
    def run(plan: Plan, trials: StudyRound) -> StrategyRun:
        (result,) = yield NumberedTrials({number: PARAMETERS})
        return Outcome(result)

    strategy: Any = SimpleNamespace(run=run)
    with pytest.raises(StrategyError, match=f"pays for 3 trials.*asks for trial {number}"):
        opened[1].run(strategy)


@pytest.mark.parametrize("strategy", [Fixed(), Everything(trials=2, sampler="random")])
def test_functions_see_the_numbers_of_one_repetition(storage: str, strategy: Any) -> None:
    seen = set()

    def build(trial: Any) -> privtune.Candidate:
        seen.add(trial.number)
        return elsewhere.linear(trial)

    budget = privtune.Budget(4.0, 1e-5, name="b")
    with closing(privtune.create_study("s", budget=budget, storage=storage, repeats=3)) as study:
        release = study.optimize(
            privtune.make_task(build, benchmark=True, **elsewhere.PATHS),
            strategy=strategy,
            **elsewhere.TERMS,
        )
    assert release.utility == {}, "there is no test split"
    # What is built to be looked at alone has a random number below 2**31, as in a seal.
    assert {n for n in seen if n < 100} == set(range(getattr(strategy, "trials", 1)))


def test_workers_train_the_rows_of_all_repetitions(tmp_path: Path) -> None:
    terms = {"arms": [SELECTION, TPE], "task": BENCHMARK, "repeats": 2, "seed": 4}
    here = run(f"sqlite:///{tmp_path / 'here.db'}", **terms)
    there = run(f"sqlite:///{tmp_path / 'there.db'}", jobs=2, **terms)
    for arm in ("selection", "tpe"):
        assert there[arm].repetitions == here[arm].repetitions


def test_trials_of_repetitions_are_apart_and_deleted(storage: str) -> None:
    with closing(Study.create(toy_spec(arms=[TPE], task=BENCHMARK, repeats=2), storage)) as study:
        (release,) = study.run()
        assert len(release.trials) == 3
        study.delete()
    again = toy_spec(budget={"name": "another", "epsilon": 6.0, "delta": 1e-5})
    with closing(Study.create(again, storage)), closing(Life("toy", storage)) as life:
        # Optuna would say that the study is there.
        assert life.trials.of("tpe/1") == []


def test_what_repetitions_cannot_have_is_refused(storage: str) -> None:
    with pytest.raises(privtune.PrivTuneError, match=r"repeats: must be at least 1, not 0\."):
        toy_spec(repeats=0)
    study = privtune.create_study(
        "open", budget=privtune.Budget(4.0, 1e-5, name="b"), repeats=2, storage=storage
    )
    mechanism = privtune.Mechanism(
        event=privtune.accounting.Gaussian(2.0), records=100, declared_by="tests"
    )
    with closing(study), pytest.raises(InvalidInputError, match="a mechanism is declared"):
        study.optimize_declared(
            lambda trial: None, mechanism=mechanism, strategy=privtune.strategies.Fixed()
        )
