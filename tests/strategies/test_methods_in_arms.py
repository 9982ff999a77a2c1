"""What a method's options mean in an arm: batch sizes, extrapolation, clipping, what trackers log."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.public_priors import public_guess
from privtune.strategies import STRATEGIES, Plan, TrainingPlan, make_strategy, plan_arm
from privtune.study import StudySpec
from privtune.study.spec import ArmSpec
from privtune.training.mechanism.clipping import EqualByLayer, Flat
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from privtune.views.record import _params
from tests.study.conftest import toy_spec

BATCHES = {"type": "categorical", "choices": [12, 48]}
RATES = {"learning_rate": {"type": "float", "low": 0.1, "high": 1.0}}
TUNED = {"rate": 0.25, "mean_runs": 2, "guarantee": "common"}


def planned(spec: StudySpec, arm: dict[str, Any], epsilon: float = 4.0) -> Plan:
    options = {k: v for k, v in arm.items() if k not in ("name", "strategy", "weight")}
    strategy = make_strategy(arm["strategy"], arm=arm["name"], options=options)
    return plan_arm(strategy, spec.planning_context(), epsilon=epsilon)


@pytest.mark.parametrize("variant", [1, 2])
def test_a_batch_size_on_the_grid_is_the_final_model_s(variant: int) -> None:
    """The paper keeps the ratio of a sample to its records, of the subset as of all."""
    spec = toy_spec(space={**RATES, "expected_batch_size": BATCHES})
    arm = {
        "name": "tuned",
        "strategy": "subsampled-tuning",
        "variant": variant,
        "parameters": {"max_grad_norm": 1.0},
        **TUNED,
    }
    plan = planned(spec, arm)
    assert plan.search is not None
    for training, point in zip(plan.search.trainings, plan.search.points, strict=True):
        batch = point["expected_batch_size"]
        final = 240 if variant == 2 else 180
        assert training.schedule.records == 60
        assert training.schedule.sample_rate == pytest.approx(batch / final)
    first = plan.search.points[0]["expected_batch_size"]
    assert plan.training.schedule.expected_batch_size == pytest.approx(first)


@pytest.mark.parametrize("fall", ["linear", "cosine", {"type": "linear", "start": 0.7}])
def test_a_public_rate_is_that_of_the_method_and_the_schedule(fall: Any) -> None:
    """What a plan says is what runs: the rate stands in it, whatever a later version ships."""
    arm = {"name": "guess", "strategy": "public-rate"}
    constant = planned(toy_spec(), arm).training.method
    assert (constant.share, constant.zero_share, constant.learning_rate) == (0.2, None, None)
    adam = planned(toy_spec(), {**arm, "method": "dp-adam", "schedule": fall}).training.method
    assert {"share": adam.share, "zero_share": adam.zero_share} == public_guess("dp-adam", fall)
    assert adam.share != constant.share
    sgd = planned(toy_spec(), {**arm, "method": "dpsgd", "schedule": fall})
    assert {"learning_rate": sgd.training.method.learning_rate} == public_guess("dpsgd", fall)
    assert isinstance(sgd.training.method.clipping_of(), Flat)
    assert sgd.details["advice"].startswith("The learning rate is ")
    assert sgd.event == planned(toy_spec(), arm).event
    given = planned(toy_spec(), {**arm, "schedule": fall, "share": 0.7}).training.method
    assert (given.share, given.zero_share) == (0.7, None)
    given = planned(toy_spec(), {**arm, "schedule": fall, "zero_share": 0.3}).training.method
    assert (given.share, given.zero_share) == (adam.share, 0.3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "dpsgd", "schedule": "step"}, "a public rate is measured for the schedules"),
        ({"method": "dpsgd", "share": 0.1}, "does not go with method dpsgd"),
        ({"method": "adadp"}, "must be one of dp-adam, dpsgd"),
    ],
)
def test_a_public_rate_that_was_not_measured_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        planned(toy_spec(), {"name": "guess", "strategy": "public-rate", **options})


def test_sgd_without_a_rate_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be given with method dpsgd"):
        METHODS["public-rate"](1.0, method="dpsgd").init(torch.zeros(1, 2), [{}])  # type: ignore[call-arg]


def test_a_batch_size_above_the_records_is_named() -> None:
    spec = toy_spec(
        space={**RATES, "expected_batch_size": {"type": "categorical", "choices": [12, 500]}}
    )
    arm = {
        "name": "all",
        "strategy": "everything",
        "trials": 2,
        "guarantee": "common",
        "parameters": {"max_grad_norm": 1.0},
    }
    with pytest.raises(InvalidInputError, match=r"space.expected_batch_size = 500: .* at most 240"):
        planned(spec, arm)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("dpsgd", "scale-learning-rate"),
        ("dp-adam", "keep"),
        ("automatic-clipping", "scale-learning-rate"),
    ],
)
def test_the_rule_of_extrapolation_goes_with_the_method_and_the_plan_says_it(
    method: str, rule: str
) -> None:
    needed = {"max_grad_norm": 1.0} if "max_grad_norm" in METHODS[method].parameters else {}
    arm = {
        "name": "tuned",
        "strategy": "subsampled-tuning",
        "method": method,
        "rate": 0.25,
        "mean_runs": 2,
        "parameters": needed,
    }
    assert planned(toy_spec(space=RATES), arm).details["extrapolation"] == rule
    said = planned(toy_spec(space=RATES), {**arm, "extrapolation": "keep"})
    assert said.details["extrapolation"] == "keep"


def test_clipping_by_layer_is_clipping_of_the_same_sensitivity() -> None:
    norms = torch.rand((3, 2, 50), generator=torch.Generator().manual_seed(0)) * 4
    whole = torch.tensor([1.0, 2.0])
    equal = EqualByLayer(whole)
    layers = Flat(whole / 3**0.5)
    assert torch.allclose(equal.factors(norms), layers.factors(norms))
    assert torch.allclose(equal.sensitivity(2), 3**0.5 * layers.sensitivity(2))
    assert torch.equal(equal.sensitivity(2), whole.double())
    clipped = (equal.factors(norms) * norms).square().sum(dim=0).sqrt()
    assert bool((clipped <= whole[:, None] * (1 + 1e-6)).all())


GIVEN = {"learning_rate": 0.5, "max_grad_norm": 1.0}
NORM = {"max_grad_norm": 1.0}


SCHEDULE = Schedule.from_epochs(records=240, expected_batch_size=24, epochs=2)
NEEDED: dict[str, Any] = {
    "noise_multiplier": 8.0,
    "count_noise_multiplier": 8.0,
    "gradient_noise_multiplier": 8.0,
    "loss_noise_multiplier": 8.0,
    "lipschitz": 1.0,
    "smoothness": 1.0,
    "dimension": 7,
    "strong_convexity": 0.5,
}
OTHER: dict[str, Any] = {
    "schedule": "cosine",
    "average": "ema",
    "clipping": "by-layer",
    "loss_batch": "separate",
    "loss_noise": "laplace",
    "optimizer": "sgd",
    "fit": "paper",
    "start": "paper",
    "spread": 7.0,
    "regime": "non-convex",
    "adjacency": "add-remove",
    "largest_factor": 1.2,
    "horizon": 1,
    "method": "dpsgd",
}


def another(name: str, value: Any) -> Any:
    """Return another value of a method's option."""
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 0.75 * value if value else 0.25


@pytest.mark.parametrize("method", list(METHODS))
def test_every_option_of_a_method_is_logged(method: str) -> None:
    """Of the plan alone, as loops of one's own have it: no spec tells what was asked."""
    cls = METHODS[method]
    names = [field.name for field in dataclasses.fields(cls)]
    given = {name: value for name, value in NEEDED.items() if name in names}
    logged = {}
    for name in (None, *names):
        changed = {} if name is None else {name: another(name, getattr(cls(**given), name))}
        plan = TrainingPlan(SCHEDULE, cls(**{**given, **changed}))
        fake = SimpleNamespace(
            **dict.fromkeys(("runs", "score", "report", "search", "rate")),
            arm="a",
            details={},
            strategy=method,
            training_of=lambda _, plan=plan: plan,
        )
        release = SimpleNamespace(params={}, guarantee=SimpleNamespace(delta=1e-5))
        study = SimpleNamespace(spec=SimpleNamespace(arms=()), stages=())
        logged[name] = _params(study, fake, release)
    for (one, first), (other, second) in itertools.combinations(logged.items(), 2):
        assert first != second, f"{one} and {other} are logged alike"


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_option_of_a_strategy_is_logged(strategy: str) -> None:
    fields = [field.name for field in dataclasses.fields(STRATEGIES[strategy])]
    plan = planned(toy_spec(), {"name": "a", "strategy": "fixed", "parameters": GIVEN}, 2.0)
    logged = []
    for name in (None, *(name for name in fields if name != "arm")):
        told = {"name": plan.arm, "strategy": strategy, **({} if name is None else {name: "other"})}
        study = SimpleNamespace(spec=SimpleNamespace(arms=(ArmSpec(**told),)), stages=())
        release = SimpleNamespace(params={}, guarantee=SimpleNamespace(delta=1e-5))
        logged.append(_params(study, plan, release))
    for one, other in itertools.combinations(logged, 2):
        assert one != other
