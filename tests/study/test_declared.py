"""Declared mechanisms: another library trains, the user declares its event."""

from __future__ import annotations

import html
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import privtune
from privtune.accounting import ApproximateDP, Gaussian, PoissonSampled, Repeated, epsilon
from privtune.audit import audit
from privtune.errors import InvalidInputError
from privtune.ledger import Ledger, verify_certificate
from privtune.strategies import (
    Everything,
    Fixed,
    LiuTalwar,
    PapernotSteinke,
    Plan,
    Release,
    StrategyError,
    SubsampledTuning,
)
from privtune.study import Study, keep_audit
from privtune.study.declared_arms import DeclaredError, DeclaredTrial, Mechanism
from privtune.study.failures import ArmStoppedError
from privtune.views.officer import to_markdown, to_yaml
from privtune.views.record import arm_record, budget_view
from privtune.views.report import render_study

RNG = np.random.default_rng(7)
X = RNG.normal(size=(300, 3))
Y = (X[:, 0] > 0).astype(np.int64)
VALIDATION = X[240:], Y[240:]
MECHANISM = Mechanism.dpsgd(
    records=240, epochs=2, expected_batch_size=40, declared_by="the statistics group"
)
SELECTION = PapernotSteinke(mean_runs=3)
Objective = Callable[[DeclaredTrial], Any]


def descend(trial: DeclaredTrial, rate: float) -> np.ndarray:
    """Logistic regression by noisy gradients, in NumPy."""
    plan, rng = trial.plan, np.random.default_rng(trial.seed)
    w, x, sign = np.zeros(3), X[:240], 2 * Y[:240] - 1
    for _ in range(plan.steps):
        there = rng.random(240) < plan.sample_rate
        gradients = -(sign / (1 + np.exp(sign * (x @ w))))[there, None] * x[there]
        gradients /= np.maximum(1, np.linalg.norm(gradients, axis=1, keepdims=True))
        noise = plan.noise_multiplier * rng.normal(size=3)
        w -= rate * (gradients.sum(axis=0) + noise) / (240 * plan.sample_rate)
    return w


def objective(trial: DeclaredTrial) -> Any:
    w = descend(trial, trial.suggest_float("rate", 0.1, 5.0, log=True))
    return trial.result({"w": w}, score=trial.score(lambda x: (x @ w > 0).astype(int)))


def make(storage: str, epsilon: float = 6.0, **options: Any) -> Study:
    budget = privtune.Budget(epsilon, 1e-5, name="declared")
    return privtune.create_study("declared", budget=budget, storage=storage, **options)


def optimize(study: Study, function: Objective = objective, **options: Any) -> Release:
    asked: dict[str, Any] = {
        "mechanism": MECHANISM,
        "strategy": SELECTION,
        "validation": VALIDATION,
        **options,
    }
    return study.optimize_declared(function, **asked)


def failure(study: Study) -> str:
    return str(study._life.failures("papernot-steinke")[-1]["traceback"])


def spent(storage: str) -> int:
    with Ledger(storage) as ledger:
        return len(ledger.charges("declared"))


@pytest.mark.parametrize(
    "strategy",
    [
        SELECTION,
        LiuTalwar(gamma=0.4, maximum=4),
        Everything(trials=2),
        Fixed(parameters={"rate": 1.0}),
    ],
    ids=lambda strategy: strategy.name,
)
def test_every_strategy_meets_its_epsilon_with_the_noise_that_runs(
    strategy: Any, storage: str
) -> None:
    noises = []

    def noted(trial: DeclaredTrial) -> Any:
        rate = trial.suggest_float("rate", 0.1, 5.0, log=True)
        noises.append(trial.plan)
        w = descend(trial, rate)
        return trial.result({"w": w}, score=trial.score(lambda x: (x @ w > 0).astype(int)))

    study = make(storage)
    release = optimize(study, noted, strategy=strategy)
    assert 5.9 < release.guarantee.epsilon <= 6.0
    assert release.state_dict()["w"].shape == (3,)
    (plan,) = study.plans
    assert Plan.from_dict(plan.to_dict()) == plan
    charged = {t.event for t in (plan.training, *(plan.search.trainings if plan.search else ()))}
    assert {ran.event for ran in noises} <= charged
    one = noises[0]
    assert one.event == Repeated(12, PoissonSampled(1 / 6, Gaussian(one.noise_multiplier)))
    # An independent check of the simplest arm: its ε by the event that its training was handed.
    if isinstance(strategy, Fixed):
        assert release.guarantee.epsilon == epsilon(one.event, 1e-5).epsilon
    assert optimize(study, noted, strategy=strategy).params == release.params, "not run again"


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(
    "event", [ApproximateDP(0.5, 0.0), Repeated(9, Gaussian(20.0))], ids=["pure", "gaussians"]
)
def test_an_event_that_is_not_calibrated_stays_as_it_was_declared(
    event: Any, public: bool, storage: str
) -> None:
    def only(trial: DeclaredTrial) -> Any:
        trial.suggest_float("rate", 0.1, 5.0)
        assert trial.plan.event == event
        return trial.result({"w": np.ones(1)}, score=trial.score(lambda x: np.zeros(len(x), int)))

    split = {"validation": None, "public": {"validation": VALIDATION}} if public else {}
    study = make(storage, 20.0)
    fixed = Mechanism(event, "the statistics group", records=240, calibrate=False)
    release = optimize(study, only, mechanism=fixed, **split)
    assert release.guarantee.epsilon > epsilon(event, 1e-5).epsilon
    assert (study.plans[0].score.event is None) is public  # type: ignore[union-attr]
    with pytest.raises(InvalidInputError, match="costs what the declared event costs"):
        optimize(study, only, mechanism=fixed, epsilon=2.0, arm="other")
    with pytest.raises(InvalidInputError, match="has no noise multiplier to scale"):
        optimize(
            study,
            only,
            mechanism=Mechanism(ApproximateDP(0.5, 0.0), "the lab", records=240),
            arm="other",
            strategy=Fixed(parameters={"rate": 1.0}),
            epsilon=2.0,
        )


def test_what_is_released_says_that_it_is_declared(storage: str) -> None:
    study = make(storage)
    release = optimize(study)
    said = "training declared by the statistics group; not enforced by PrivTune"
    certificate = study.certificate()
    verify_certificate(certificate)
    (charge,) = certificate["charges"]
    assert charge["note"] == said
    assert release.checked == ""
    record = arm_record(study, study.plans[0], release, budget_view(study))
    assert record.tags["privtune.weakened"] == said
    assert "not enforced by PrivTune." in record.note
    for document in (render_study(study), to_markdown(study), to_yaml(study)):
        assert "declared by the statistics group; not enforced by PrivTune" in str(document)


def opacus_loop(
    noise: float = 1.0, steps: int = 0, check: bool = True
) -> tuple[Mechanism, Objective]:
    """Return a small Opacus loop, and what it declares; other noise or steps are a mistake."""
    from opacus import PrivacyEngine

    from privtune.opacus import mechanism

    data = TensorDataset(torch.tensor(X[:240], dtype=torch.float32), torch.tensor(Y[:240]))
    loader = DataLoader(data, batch_size=40)

    def train(trial: DeclaredTrial) -> Any:
        model: Any = nn.Linear(3, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), trial.suggest_float("rate", 0.1, 2.0))
        engine = PrivacyEngine()
        model, optimizer, private = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise * trial.plan.noise_multiplier,
            max_grad_norm=1.0,
        )
        for _ in range(2 + steps):
            for x, y in private:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        if check:
            trial.check(engine)
        return trial.result(model, score=trial.score(model))

    return mechanism(loader, epochs=2, declared_by="the imaging group"), train


def test_opacus_is_checked_and_the_certificate_says_so(storage: str) -> None:
    mechanism, train = opacus_loop()
    assert mechanism.event == Repeated(12, PoissonSampled(1 / 6, Gaussian(1.0)))
    study = make(storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        release = optimize(study, train, mechanism=mechanism)
    checked = (
        "checked: Opacus sampled the declared data set at the charged rate, and its noise, steps and "
        "batches equal the charge"
    )
    assert release.checked == checked
    assert study.release(release.arm).checked == checked
    certificate = study.certificate()
    verify_certificate(certificate)
    assert certificate["charges"][0]["note"].endswith(f"not enforced by PrivTune; {checked}")
    assert checked in html.unescape(render_study(study))
    model = nn.Linear(3, 2)
    model.load_state_dict(release.state_dict())


@pytest.mark.parametrize("wrong", [{"noise": 0.5}, {"steps": 1}], ids=["half the noise", "steps"])
def test_opacus_that_did_something_else_stops_the_arm(wrong: dict[str, Any], storage: str) -> None:
    mechanism, train = opacus_loop(**wrong)
    study = make(storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArmStoppedError):
            optimize(study, train, mechanism=mechanism)
    assert "Opacus' accountant has noted" in failure(study)


GRID = itertools.cycle([0.1, 0.5, 2.0])
SEEN: list[float] = []


def from_a_grid(trial: DeclaredTrial) -> Any:
    rate = trial.suggest_categorical("rate", [next(GRID)])
    return trial.result({"w": descend(trial, rate)})


def narrowed(trial: DeclaredTrial) -> Any:
    rate = trial.suggest_float("rate", 0.1, min([5.0, *SEEN]))
    SEEN.append(rate)
    return trial.result({"w": descend(trial, rate)})


@pytest.mark.parametrize("function", [from_a_grid, narrowed])
def test_candidates_that_depend_on_each_other_are_refused_before_the_charge(
    function: Objective, storage: str
) -> None:
    SEEN.clear()
    with pytest.raises(DeclaredError, match="remembers earlier trials"):
        optimize(make(storage), function)
    assert spent(storage) == 0


def never_reads(trial: DeclaredTrial) -> Any:
    trial.suggest_float("rate", 0.1, 5.0)
    return trial.result({"w": np.zeros(3)})


def catches_everything(trial: DeclaredTrial) -> Any:
    try:
        descend(trial, trial.suggest_float("rate", 0.1, 5.0))
    except BaseException:
        return None
    return None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (never_reads, "without reading trial.plan"),
        (catches_everything, "catch Exception"),
    ],
)
def test_a_rehearsal_ends_at_the_plan(function: Objective, words: str, storage: str) -> None:
    with pytest.raises(DeclaredError, match=words):
        optimize(make(storage), function)
    assert spent(storage) == 0


def late(trial: DeclaredTrial) -> Any:
    trial.suggest_float("rate", 0.1, 5.0)
    trial.plan  # noqa: B018
    trial.suggest_float("decay", 0.0, X.max())


def seeded(trial: DeclaredTrial) -> Any:
    trial.suggest_float("rate", 0.1, 5.0)
    trial.plan  # noqa: B018
    torch.default_generator.manual_seed(0)
    return trial.result({"w": torch.randn(3)}, score=trial.score(lambda x: np.zeros(len(x), int)))


def own_score(trial: DeclaredTrial) -> Any:
    w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
    return trial.result({"w": w}, score=float(((X[240:] @ w > 0) == Y[240:]).mean()))


def scored_twice(trial: DeclaredTrial) -> Any:
    w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
    trial.score(lambda x: (x @ w > 0).astype(int))
    return trial.result({"w": w}, score=trial.score(lambda x: (x @ -w > 0).astype(int)))


def bare_number(trial: DeclaredTrial) -> Any:
    w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
    return trial.score(lambda x: (x @ w > 0).astype(int))


def object_released(trial: DeclaredTrial) -> Any:
    w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
    return trial.result({"w": object()}, score=trial.score(lambda x: (x @ w > 0).astype(int)))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (late, "after it has read trial.plan"),
        (seeded, "seeded torch's global generator"),
        (own_score, "a score that trial.score did not give"),
        (scored_twice, "trial.score was called twice"),
        (bare_number, "must return what trial.result"),
        (object_released, "real floating-point numbers"),
    ],
)
def test_a_wrong_trial_stops_the_arm(function: Objective, words: str, storage: str) -> None:
    study = make(storage)
    with pytest.raises(ArmStoppedError):
        optimize(study, function)
    assert words in failure(study)


def test_trials_have_generators_of_their_own_and_leave_the_global_ones(storage: str) -> None:
    drawn: dict[str, list[float]] = {"torch": [], "numpy": [], "python": []}

    def draw(trial: DeclaredTrial) -> Any:
        trial.suggest_float("rate", 0.1, 5.0)
        trial.plan  # noqa: B018
        for seed in (torch.manual_seed, np.random.seed, random.seed):  # as scripts and Trainers do
            seed(0)
        drawn["torch"].append(float(torch.rand(())))
        drawn["numpy"].append(float(np.random.rand()))
        drawn["python"].append(random.random())
        return trial.result({"w": np.zeros(3)}, score=trial.score(lambda x: np.zeros(len(x), int)))

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    optimize(make(storage), draw, strategy=Everything(trials=3))
    assert torch.equal(torch.rand(2), expected)
    assert torch.manual_seed(5).initial_seed() == 5
    assert all(len(set(values)) == 3 for values in drawn.values())


@pytest.mark.parametrize("masked", [False, True])
def test_the_noise_of_a_score_and_a_trial_repeat_from_the_secret(
    storage: str, masked: bool
) -> None:
    """A trial that is interrupted ends with the same result when it is run again.

    A library that is between two states may fail with an error of its own on the way out.
    """
    stop = [True]

    def dies(trial: DeclaredTrial) -> Any:
        trial.suggest_float("rate", 0.1, 5.0, log=True)
        result = trial.plan, torch.rand(3)
        if stop:
            stop.pop()
            seen.append(result[1])
            try:
                raise KeyboardInterrupt
            finally:
                if masked:
                    raise RuntimeError("between two states")
        seen.append(result[1])
        return trial.result({"w": result[1]}, score=trial.score(lambda x: np.zeros(len(x), int)))

    seen: list[torch.Tensor] = []
    study = make(storage)
    with pytest.raises(KeyboardInterrupt):
        optimize(study, dies)
    optimize(study, dies)
    assert torch.equal(seen[0], seen[1])


def test_another_validation_split_stops_an_arm_that_goes_on(storage: str) -> None:
    interruptions = [True]

    def dies_once(trial: DeclaredTrial) -> Any:
        trial.suggest_float("rate", 0.1, 5.0)
        trial.plan  # noqa: B018
        if interruptions:
            interruptions.clear()
            raise KeyboardInterrupt
        return objective(trial)

    study = make(storage)
    with pytest.raises(KeyboardInterrupt):
        optimize(study, dies_once)
    with pytest.raises(ArmStoppedError):
        optimize(study, dies_once, validation=(X[:60], Y[:60]))
    assert "scored on other validation records" in failure(study)
    optimize(study, dies_once)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"strategy": SubsampledTuning(mean_runs=2)}, StrategyError, "subset of the records"),
        ({"n_jobs": 2}, TypeError, "n_jobs"),
        ({"strategy": PapernotSteinke(method="hyfreedp")}, InvalidInputError, "is the method"),
        ({"validation": None}, StrategyError, "no validation split"),
        ({"score": "loss"}, InvalidInputError, "does not tell"),
        ({"validation": 3}, InvalidInputError, "tensors or arrays"),
        ({"public": {"test": VALIDATION}}, InvalidInputError, "in the place of"),
        ({"mechanism": "dpsgd"}, InvalidInputError, "privtune.Mechanism"),
        ({"epsilon": -1.0}, InvalidInputError, "above 0"),
        (
            {"strategy": replace(SELECTION, parameters={"rat": 1.0})},
            InvalidInputError,
            "rehearsals",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_charge(
    options: dict[str, Any], error: type[Exception], words: str, storage: str
) -> None:
    with pytest.raises(error, match=words):
        optimize(make(storage), **options)
    assert spent(storage) == 0


@pytest.mark.parametrize("wrong", [{"event": "gaussian"}, {"declared_by": " "}, {"records": 0}])
def test_a_mechanism_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        Mechanism(**{"event": Gaussian(1.0), "declared_by": "the lab", "records": 1, **wrong})


def test_functions_of_a_record_score_any_model(storage: str) -> None:
    """The released score is the mean of a clipped function, to its noise; a public one is exact."""

    def cost(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x).squeeze(-1) - x[:, 0]).abs()

    def train(trial: DeclaredTrial) -> Any:
        w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
        return trial.result({"w": w}, score=trial.score(lambda x: x @ w))

    release = optimize(
        make(storage),
        train,
        validation=None,
        public={"validation": VALIDATION},
        score=privtune.Score(cost, bound=0.5),
    )
    w = release.state_dict()["w"].numpy()
    expected = np.minimum(np.abs(X[240:] @ w - X[240:, 0]), 0.5).mean()
    assert release.score == pytest.approx(-expected, rel=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["the charged noise", "half of it"])
def test_an_audit_finds_a_false_declaration(share: float, storage: str) -> None:
    """The canary is one more record, on an axis of its own; the release is a noisy sum of records."""

    def train(trial: DeclaredTrial, records: np.ndarray) -> Any:
        trial.suggest_float("rate", 0.1, 5.0)
        noise = share * trial.plan.noise_multiplier
        w = records.sum(axis=0) + noise * np.random.default_rng(trial.seed).normal(size=3)
        return trial.result({"w": w}, score=trial.score(lambda x: (x @ w > 0).astype(int)))

    def canary(trial: DeclaredTrial, inside: bool) -> float:
        records = np.array([[0.0, 0.6, 0.8], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
        return float(train(trial, records[: 2 + inside]).weights[0])

    study = make(storage)
    optimize(
        study,
        lambda trial: train(trial, X[:240] / np.linalg.norm(X[:240], axis=1, keepdims=True)),
        mechanism=Mechanism(Gaussian(1.0), "the statistics group", records=240),
    )
    (plan,) = study.plans
    report = audit(plan, delta=1e-5, canary=canary, published=6.0, runs=400)
    row = report.rows[0]
    assert row.reported == epsilon(plan.training.event, 1e-5).epsilon
    assert (row.epsilon > row.reported) is (share < 1.0)
    assert report.passed is (share == 1.0)
    keep_audit(study, report.to_dict())
    assert len(study.certificate()["audits"]) == 1
    with pytest.raises(InvalidInputError, match="declared mechanism"):
        audit(plan, delta=1e-5, runs=100)
