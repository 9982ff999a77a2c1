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
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.estimates import SumNoise
from privtune.training.mechanism.metrics import METRICS, make_metric
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
    """What every kind of record adds: of a tally, 1 to the count of its class and number."""
    data = data_of(name, universe(name))
    parts = metric.parts(data.x, data.y, loss_of(name))
    if not metric.is_tally:
        return parts
    known = parts.unique(dim=0)
    return (parts.unsqueeze(1) == known).all(dim=2).double()


def order_of(mechanism: str) -> int:
    return 1 if mechanism == "laplace" else 2


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", NAMES)
def test_no_record_adds_more_than_the_norm_and_one_reaches_it(
    name: str, mechanism: str, adjacency: Adjacency
) -> None:
    """Sums over records that are evaluated alone: a neighbour differs by one of these vectors."""
    metric = make_metric(name, mechanism=mechanism, adjacency=adjacency, **OPTIONS.get(name, {}))
    parts = parts_of(name, metric)
    assert bool(parts.isfinite().all())
    longest = float(torch.linalg.vector_norm(parts, ord=order_of(mechanism), dim=1).max())
    assert longest <= metric.norm * (1 + 1e-12)
    assert longest >= metric.norm * (1 - 1e-6)  # no looser than it must be


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
    (metric,) = plan.make_metrics()
    charged = plan.noises[0].scale / plan.noise_multiplier
    parts = parts_of(name, metric)
    parts = torch.cat([parts, torch.zeros_like(parts[:1])])
    furthest = float(torch.cdist(parts, parts, p=order_of(mechanism)).max())
    assert furthest <= charged * (1 + 1e-9)
    if name != "macro_f1":  # which takes four classes
        assert furthest >= charged * (1 - 1e-6)  # no looser than it must be
    assert ScorePlan(**plan.to_dict()).to_dict() == plan.to_dict()


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("share", [True, False])
def test_means_are_charged_for_every_number_that_a_record_can_have(
    share: bool, mechanism: str, adjacency: Adjacency
) -> None:
    """A fine grid of numbers and all of their pairs, by an oracle that knows no polynomial."""
    name = "accuracy" if share else "loss"
    metric = make_metric(name, mechanism=mechanism, adjacency=adjacency)
    values = np.array([0.0, 1.0]) if share else np.linspace(0.0, 1.0, 401)
    if share:
        outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        parts = metric.parts(outputs, torch.tensor([0, 0]), cross_entropy).numpy()
    else:
        numbers = torch.tensor(values)
        parts = metric.parts(numbers, numbers, lambda x, y: x).numpy()
    norms = np.linalg.norm(parts, ord=order_of(mechanism), axis=1)
    apart = parts[:, None] - parts[None]
    moves = np.linalg.norm(apart.reshape(-1, parts.shape[1]), ord=order_of(mechanism), axis=1)
    furthest = norms.max()
    if adjacency is Adjacency.REPLACE_ONE:
        furthest = max(furthest, moves.max())
    assert furthest == pytest.approx(metric.sensitivity, rel=1e-9)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_the_noise_of_accuracy_is_no_larger_than_that_of_a_sum_by_a_known_size(
    mechanism: str, adjacency: Adjacency
) -> None:
    """First order, at every accuracy; under replace-one the size costs 2/√3, with Laplace noise √2."""
    metric = make_metric("accuracy", mechanism=mechanism, adjacency=adjacency)
    noise = SumNoise(mechanism, 3.0 * metric.sensitivity)
    records = 10_000.0
    most = 1.0
    if adjacency is Adjacency.REPLACE_ONE:
        most = 2.0 / math.sqrt(3.0) if mechanism == "gaussian" else math.sqrt(2.0)
    for accuracy in np.linspace(0.0, 1.0, 21):
        right = metric.parts(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), cross_entropy)
        wrong = metric.parts(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), cross_entropy)
        sums = records * (accuracy * right + (1.0 - accuracy) * wrong)[0].numpy()
        gradient = [
            (metric.choice(sums + unit, noise) - metric.choice(sums - unit, noise)) / 2.0
            for unit in np.eye(len(sums))
        ]
        deviation = noise.deviation * float(np.linalg.norm(gradient))
        alone = SumNoise(mechanism, 3.0).deviation / records
        assert deviation <= most * alone * (1 + 1e-6)
        if adjacency is Adjacency.ADD_REMOVE and abs(accuracy - 0.5) < 0.01:
            assert deviation == pytest.approx(alone / math.sqrt(2.0), rel=1e-6)


def test_whatever_a_metric_says_a_record_adds_its_bound_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A metric that is wrong about itself is held to what was charged."""
    from privtune.training.mechanism import scoring

    metric = make_metric("loss", **OPTIONS["loss"])
    monkeypatch.setattr(
        type(metric), "parts", lambda self, outputs, targets, loss: 50.0 + outputs[:, :1]
    )
    data = data_of("loss", [([1.0, 2.0], 0)])
    added = scoring._sums(metric, Given(), data, cross_entropy)
    assert added.tolist() == pytest.approx([metric.norm])


@pytest.mark.parametrize(
    "name", ["balanced_accuracy", "f1", "auc", "macro_f1", "top_k", "accuracy"]
)
@pytest.mark.parametrize("bad", [-1, 7])
def test_a_class_that_is_none_adds_nothing(name: str, bad: int) -> None:
    records = universe(name)[::7]
    plan = plan_of(name, len(records))
    spoilt = [*records, ([0.0] * len(records[0][0]), bad)]

    def found(chosen: list[Any]) -> float:
        return score(plan, Given(), data_of(name, chosen), rng=Streams(bytes(32)).numpy("s")).score

    assert found(spoilt) == pytest.approx(found(records), abs=1e-12)


def exact(name: str, x: torch.Tensor, y: torch.Tensor, **options: Any) -> float:
    plan = plan_of(name, len(y))
    if options:
        plan = ScorePlan(len(y), None, metric=name, options=options)
    (found,) = measure_each(plan, Given(), TensorData(x, y), rng=np.random.default_rng(0)).values()
    return found.value


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
    assert exact("auc", two, of_two) == pytest.approx(area, abs=1e-4)
    assert exact("auc", -two, of_two) == pytest.approx(1.0 - area, abs=1e-4)

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


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_noise_a_score_and_its_interval_keep_to_the_metric_s_range(
    name: str, mechanism: str
) -> None:
    """Noise of any size: the value lies in its interval, and this in what the metric can be."""
    metric = make_metric(name, mechanism=mechanism, **OPTIONS.get(name, {}))
    least, most = metric.range
    length = 16 if metric.is_tally else parts_of(name, metric).shape[1]
    rng = np.random.default_rng(1)
    for scale in (1e-3, 1.0, 30.0, 1e4):
        for _ in range(20):
            sums = 30.0 * rng.random(length) + scale * rng.standard_normal(length)
            found = metric.estimate(sums, SumNoise(mechanism, scale))
            assert least <= found.low <= found.value <= found.high <= most
            assert (found.least, found.most) == (least, most)
            assert math.isfinite(metric.choice(sums, SumNoise(mechanism, scale)))


@pytest.mark.parametrize("name", ["accuracy", "top_k", "loss", "mae"])
def test_scores_beyond_an_end_do_not_tie(name: str) -> None:
    """All right, or no loss: half of the draws lie beyond, and keep their order."""
    y = torch.arange(30) % 2
    x = 90.0 * torch.eye(2)[y]
    if name == "mae":
        y = torch.linspace(*RANGE, 30)
        x = y[:, None]
    shown = plan_of(name, 30)
    plan = ScorePlan(30, 2.0, "gaussian", name, shown.options)
    raw = []
    for number in range(40):
        rng = Streams(number.to_bytes(32, "big")).numpy("report")
        scored = score(plan, Given(), TensorData(x, y), rng=rng)
        assert scored.estimate is not None
        raw.append(scored.score)
    assert len(set(raw)) == 40
    best = 0.0 if METRICS[name].lower_is_better else 1.0
    assert 5 < sum(value > best for value in raw) < 35


def test_perplexity_is_the_exponential_of_the_same_release_and_of_its_interval() -> None:
    x, y = torch.linspace(-3.0, 3.0, 40).view(20, 2), torch.arange(20) % 2
    data = TensorData(x, y)
    plans = [
        ScorePlan(20, 0.5, metric=name, options={"bound": 4.0}) for name in ("loss", "perplexity")
    ]
    for number in range(5):
        streams = Streams(number.to_bytes(32, "big"))
        (loss,), (perplexity,) = (
            measure_each(plan, Given(), data, rng=streams.numpy("report")).values()
            for plan in plans
        )
        for end in ("value", "low", "high"):
            assert getattr(perplexity, end) == pytest.approx(
                math.exp(getattr(loss, end)), rel=1e-12
            )
    assert plans[1].event == plans[0].event
    far = make_metric("perplexity", bound=5e3)
    assert math.isfinite(far.estimate(np.array([15.0, 30.0, 1.0]), SumNoise("gaussian", 0.0)).value)


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        ({"metric": "auc", "k": 3}, "takes bins"),
        ({"metric": "auc", "bins": 1}, "from 2 to 1000"),
        ({"metric": "top_k", "k": 0}, "from 1 to 1000"),
        ({"metric": "mae"}, "needs \\[low, high\\]"),
        ({"metric": "mse", "target_range": (1.0, 1.0)}, "low < high"),
        ({"metric": "nowhere:function"}, "cannot be imported"),
        ({"metric": "precision"}, "must be one of accuracy"),
        ({"metric": "f1", "bound": 3.0}, "takes no options"),
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
