"""Metrics: what one record can change, by enumeration; values against scikit-learn; intervals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies import ScorePlan, Scoring
from privtune.strategies.scoring import validation_metric
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.metrics import METRICS, is_mean, make_metric
from privtune.training.mechanism.scoring import cross_entropy, measure_each, score
from privtune.training.mechanism.streams import Streams

pytestmark = pytest.mark.quick

RANGE = (-1.0, 3.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"k": 2},
    "auc": {"bins": 4},
    "loss": {"bound": 0.7},
    "mae": {"target_range": RANGE},
    "mse": {"target_range": RANGE},
    "r2": {"target_range": RANGE},
    "tests.training.mechanism.test_metrics:wild": {"bound": 2.0},
}
NAMES = (*METRICS, "tests.training.mechanism.test_metrics:wild")


def wild(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A function of one's own that keeps to no bound."""
    return 1e6 * outputs[:, 0]


def signed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A function of the model and a record that takes both signs."""
    return outputs[:, 0]


def loss_of(name: str) -> Any:
    return signed if name in ("cost", "value") else cross_entropy


class Given(nn.Module):
    """Outputs are the inputs, so that a dataset of inputs is one of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def universe(name: str) -> list[tuple[list[float], float]]:
    """Every kind of record: all classes, all predictions, ties, ends, what is no number."""
    takes = METRICS[name].takes if name in METRICS else "any"
    if takes == "numbers":
        outputs = [[-9.0], [-1.0], [0.5], [3.0], [math.inf], [math.nan]]
        return list(itertools.product(outputs, [-5.0, -1.0, 0.0, 0.3, 1.0, 3.0, 7.0]))
    classes = 3 if takes == "classes" else 2
    values = [-math.inf, -2.0, 0.0, 1.0, math.inf, math.nan]
    outputs = [list(o) for o in itertools.product(values, repeat=classes)]
    return list(itertools.product(outputs, range(classes)))


def data_of(name: str, records: list[tuple[list[float], float]]) -> TensorData:
    whole = name not in METRICS or METRICS[name].takes != "numbers"
    x = torch.tensor([x for x, _ in records])
    return TensorData(
        x, torch.tensor([y for _, y in records], dtype=torch.int64 if whole else None)
    )


def plan_of(name: str, records: int, mechanism: str = "gaussian") -> ScorePlan:
    scoring = Scoring(metric=name, mechanism=mechanism, **OPTIONS.get(name, {}))
    terms: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
    return scoring.plan(records=records, public=True, **terms)


def parts_of(name: str, metric: Any) -> torch.Tensor:
    data = data_of(name, universe(name))
    return metric.parts(data.x, data.y, loss_of(name))


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", NAMES)
def test_no_record_adds_more_than_the_norm_and_one_reaches_it(name: str, mechanism: str) -> None:
    """Sums over records that are evaluated alone: a neighbour differs by one of these vectors."""
    plan = plan_of(name, 1, mechanism)
    metric = make_metric(name, **OPTIONS.get(name, {}))
    order = 1 if mechanism == "laplace" else 2
    parts = parts_of(name, metric)
    assert bool(parts.isfinite().all())
    longest = float(torch.linalg.vector_norm(parts, ord=order, dim=1).max())
    assert longest <= plan.bound * (1 + 1e-12)
    assert longest >= plan.bound * (1 - 1e-6)  # no looser than it must be


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", NAMES)
def test_no_record_that_is_replaced_moves_the_sums_further_than_is_charged(
    name: str, mechanism: str
) -> None:
    """All pairs of records; a record that contributes nothing is one of them."""
    scoring = Scoring(metric=name, mechanism=mechanism, **OPTIONS.get(name, {}))
    plan = scoring.plan(
        records=10, public=False, epsilon=1.0, delta=1e-5, adjacency=Adjacency.REPLACE_ONE
    )
    assert plan.noise_multiplier is not None
    charged = plan.standard_deviation * plan.records / plan.noise_multiplier
    metric = make_metric(name, **OPTIONS.get(name, {}))
    parts = parts_of(name, metric)
    parts = torch.cat([parts, torch.zeros_like(parts[:1])])
    furthest = float(torch.cdist(parts, parts, p=1 if mechanism == "laplace" else 2).max())
    assert furthest <= charged * (1 + 1e-9)
    if name != "macro_f1":  # which takes four classes
        assert furthest >= charged * (1 - 1e-6)  # no looser than it must be
    assert ScorePlan(**plan.to_dict()).to_dict() == plan.to_dict()


def test_whatever_a_metric_says_a_record_adds_its_bound_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A metric that is wrong about itself is held to what was charged."""
    from privtune.training.mechanism import scoring

    plan, metric = plan_of("loss", 1), make_metric("loss", **OPTIONS["loss"])
    monkeypatch.setattr(
        type(metric), "parts", lambda self, outputs, targets, loss: 50.0 + outputs[:, :1]
    )
    data = data_of("loss", [([1.0, 2.0], 0)])
    added = scoring._sums(plan, metric, Given(), data, cross_entropy)
    assert added.tolist() == pytest.approx([plan.bound])


@pytest.mark.parametrize(
    "name", ["balanced_accuracy", "f1", "auc", "macro_f1", "top_k", "accuracy"]
)
@pytest.mark.parametrize("bad", [-1, 7])
def test_a_class_that_is_none_adds_nothing(name: str, bad: int) -> None:
    records = universe(name)[::7]
    plan = plan_of(name, len(records))
    spoilt = [*records, ([0.0] * len(records[0][0]), bad)]

    def found(chosen: list[Any]) -> float:
        return score(plan, Given(), data_of(name, chosen), rng=Streams(bytes(32)).numpy("s"))

    assert found(spoilt) == pytest.approx(found(records), abs=1e-12)


def exact(name: str, x: torch.Tensor, y: torch.Tensor, **options: Any) -> float:
    plan = plan_of(name, len(y))
    if options:
        plan = ScorePlan(len(y), None, metric=name, bound=plan.bound, options=options)
    value = score(plan, Given(), TensorData(x, y), rng=Streams(bytes(32)).numpy("s"))
    return -value if name in METRICS and METRICS[name].lower_is_better else value


@pytest.mark.parametrize("seed", range(3))
def test_values_against_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.choice(3, 400, p=[0.7, 0.2, 0.1])
    x = rng.standard_normal((400, 3)) + np.eye(3)[y]
    many, of_many = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    predicted = many.argmax(dim=1).numpy()
    assert exact("balanced_accuracy", many, of_many) == pytest.approx(
        reference.balanced_accuracy_score(y, predicted)
    )
    assert exact("macro_f1", many, of_many) == pytest.approx(
        reference.f1_score(y, predicted, average="macro")
    )
    assert exact("top_k", many, of_many) == pytest.approx(
        reference.top_k_accuracy_score(y, many.numpy(), k=2)
    )
    two, of_two = many[:, :2], (of_many > 0).long()
    assert exact("f1", two, of_two) == pytest.approx(
        reference.f1_score(of_two.numpy(), two.argmax(dim=1).numpy())
    )
    margin = (two[:, 1] - two[:, 0]).numpy()
    area = reference.roc_auc_score(of_two.numpy(), margin)
    assert exact("auc", two, of_two, bins=1000) == pytest.approx(area, abs=2e-3)
    assert exact("auc", two, of_two, bins=20) == pytest.approx(area, abs=2e-2)
    assert exact("auc", -two, of_two, bins=1000) == pytest.approx(1.0 - area, abs=2e-3)

    target = rng.uniform(*RANGE, 400)
    given = np.clip(target + 0.5 * rng.standard_normal(400), *RANGE)
    numbers = torch.tensor(given, dtype=torch.float32)[:, None]
    known = torch.tensor(target, dtype=torch.float32)
    for name, theirs in (
        ("mae", reference.mean_absolute_error),
        ("mse", reference.mean_squared_error),
        ("r2", reference.r2_score),
    ):
        assert exact(name, numbers, known) == pytest.approx(theirs(target, given), rel=1e-5)


def test_what_is_far_from_the_truth_keeps_to_the_metric_s_range() -> None:
    """Noise of any size: ratios stay in their range, whatever sums it gives."""
    for name in NAMES:
        metric = make_metric(name, **OPTIONS.get(name, {}))
        length = metric.parts(
            *data_of(name, universe(name)[:2]).take(torch.arange(2)), cross_entropy
        )
        rng = np.random.default_rng(1)
        for _ in range(200):
            value = metric.value(10.0 * rng.standard_normal(length.shape[1]))
            assert math.isfinite(value)
            if name in ("balanced_accuracy", "f1", "macro_f1", "auc"):
                assert 0.0 <= value <= 1.0
            if name == "r2":
                assert -1.0 <= value <= 1.0


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("name", "noise"), [("accuracy", 4.0), ("f1", 4.0), ("auc", 2.0), ("mae", 4.0)]
)
def test_intervals_hold_the_truth(name: str, noise: float) -> None:
    """Fewer than 105 of 120 has probability 3e-4 at a coverage of 95%, and 0.98 at one of 80%."""
    rng = np.random.default_rng(3)

    def draw(records: int) -> TensorData:
        y = (rng.random(records) < 0.4).astype(int)
        if name == "mae":
            target = rng.uniform(*RANGE, records)
            off = np.where(rng.random(records) < 0.5, 4.0, 0.0)  # as spread as a range allows
            given = np.where(target > 1.0, target - off, target + off)
            return TensorData(
                torch.tensor(given, dtype=torch.float32)[:, None],
                torch.tensor(target, dtype=torch.float32),
            )
        x = rng.standard_normal((records, 2)) + 0.8 * np.eye(2)[y]
        return TensorData(torch.tensor(x, dtype=torch.float32), torch.tensor(y))

    truth = exact(name, *draw(50_000).take(torch.arange(50_000)))
    shown = plan_of(name, 300)
    plan = ScorePlan(300, noise, metric=name, bound=shown.bound, options=shown.options)
    held = 0
    for number in range(120):
        streams = Streams(number.to_bytes(32, "big"))
        (found,) = measure_each(plan, Given(), draw(300), rng=streams.numpy("report")).values()
        held += found.low <= truth <= found.high
    assert held >= 105


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [*((name, "gaussian") for name in sorted(METRICS)), ("accuracy", "laplace"), ("r2", "laplace")],
)
def test_what_is_shown_lies_within_what_the_metric_can_be(name: str, mechanism: str) -> None:
    """Projected, no estimate is farther from the truth: fewer than 34 of 40 has probability 3e-3."""
    y = torch.arange(30) % 2
    x = 9.0 * torch.eye(2)[y]  # all right
    if METRICS[name].takes == "numbers":
        y = torch.linspace(*RANGE, 30)
        x = y[:, None]
    shown = plan_of(name, 30)
    plan = ScorePlan(30, 6.0, mechanism, name, shown.bound, shown.options)
    signs = (-shown.bound, shown.bound)
    ends = {"r2": (-1.0, 1.0), "loss": (0.0, shown.bound), "cost": signs, "value": signs}
    ends["perplexity"] = (1.0, math.exp(shown.bound))
    low, high = ends.get(name, (0.0, 1.0))
    if name in ("mae", "mse"):
        high = shown.bound
    truth = exact(name, x, y)
    held, beyond, raw = 0, 0, []
    for number in range(40):
        streams = Streams(number.to_bytes(32, "big"))
        (found,) = measure_each(
            plan, Given(), TensorData(x, y), rng=streams.numpy("report")
        ).values()
        assert low <= found.low <= found.value <= found.high <= high
        assert found.low < found.high
        held += found.low <= truth <= found.high
        raw.append(score(plan, Given(), TensorData(x, y), rng=streams.numpy("report")))
        beyond += abs(raw[-1]) > high
        shown_score = plan.held(raw[-1])
        assert shown_score is not None
        assert low <= abs(shown_score) <= high
        assert validation_metric(plan, shown_score).popitem()[1] == found.value
    if name in ("accuracy", "top_k"):
        assert beyond > 10  # scores that decide are as they were drawn
        assert len(set(raw)) == 40
    assert held >= 34 or not is_mean(name)


def test_perplexity_is_the_exponential_of_the_same_release_and_of_its_interval() -> None:
    x, y = torch.linspace(-3.0, 3.0, 40).view(20, 2), torch.arange(20) % 2
    data, bounds = TensorData(x, y), {"bound": 4.0}
    plans = [ScorePlan(20, 2.0, metric=name, **bounds) for name in ("loss", "perplexity")]
    for number in range(5):
        streams = Streams(number.to_bytes(32, "big"))
        (loss,), (perplexity,) = (
            measure_each(plan, Given(), data, rng=streams.numpy("report")).values()
            for plan in plans
        )
        # Quantiles lie between two draws, so they are not mapped to the last digit.
        assert perplexity.value == pytest.approx(math.exp(loss.value), rel=1e-12)
        assert perplexity.low == pytest.approx(math.exp(loss.low), rel=0.02)
        assert perplexity.high == pytest.approx(math.exp(loss.high), rel=0.02)
    assert plans[1].event == plans[0].event
    assert math.isfinite(make_metric("perplexity", bound=5e3).value(np.array([4e3])))


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        ({"metric": "auc", "k": 3}, "it takes bins"),
        ({"metric": "auc", "bins": 1}, "from 2 to 1000"),
        ({"metric": "top_k", "k": 0}, "from 1 to 1000"),
        ({"metric": "mae"}, "needs \\[low, high\\]"),
        ({"metric": "mse", "target_range": (1.0, 1.0)}, "low < high"),
        ({"metric": "nowhere:function"}, "cannot be imported"),
        ({"metric": "precision"}, "must be one of accuracy"),
        ({"metric": "f1", "bound": 3.0}, "it takes none"),
    ],
)
def test_what_does_not_fit_is_refused(scoring: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Scoring(**scoring).make()


def test_a_metric_of_other_targets_is_refused() -> None:
    for scoring, classes, range_, said in (
        (Scoring(metric="auc"), 3, None, "of two classes, and the task has 3"),
        (Scoring(metric="accuracy"), None, RANGE, "must be of numbers in a declared range: loss"),
        (Scoring(metric="mae", target_range=RANGE), 3, None, "must be of classes: accuracy"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            scoring.check(classes=classes, target_range=range_)
    Scoring().check(classes=None, target_range=RANGE)
    Scoring(metric="mae", target_range=RANGE).check(classes=None, target_range=None)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("os:getcwd", "takes other arguments, and must give one number a record"),
        ("os.path:join", r"fails on made-up outputs of shape \(1, 3\) with TypeError"),
        ("operator:is_", "returns bool, and must give one number a record"),
        ("operator:add", r"returns shape \(1, 3\) for one record, and must"),
    ],
)
def test_a_function_that_scores_no_record_is_refused_while_planning(path: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Scoring(metric=path).check(classes=3, target_range=None)
