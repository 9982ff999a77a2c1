"""The whole domain: a number that is a valid bound, infinity with a reason, or one sentence; never minutes.

Twenty-four random trees of events by default; 5,000 with `PRIVTUNE_CAMPAIGN=full`. Each answer is held
against an explicit instance, composed without transforms and rounded down.
"""

import itertools
import logging
import math
import random
import time

import mpmath
import pytest

import privtune.accounting as dp
from privtune.accounting.accountant import Bounds
from privtune.errors import PrivTuneError
from privtune.ledger.weights import weigh
from tests.accounting.helpers import counted, steps
from tests.tiers import FULL

BATCHES, EACH = (50, 100) if FULL else (4, 6)
# Of one tree, for all questions about it: points of transforms, and products of other convolutions.
MOST_TRANSFORMED, MOST_CONVOLVED = 2**29, 2**36


def number(rng, low, high, extremes):
    """A number of a usual size, mostly; sometimes one from the ends of its range."""
    if rng.random() < 0.15:
        return rng.choice(extremes)
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def noise(rng):
    return number(rng, 0.2, 30.0, [1e-320, 1e-100, 1e-8, 0.01, 0.05, 1e3, 1e8, 1e100, 1e300])


def law(rng):
    mean = number(rng, 1.0, 100.0, [1.0, 1 + 1e-9, 1e4, 1e6])
    cap = rng.choice([None, None, 1, 2, 50, 100_000])
    return rng.choice(
        [
            lambda: dp.Geometric(mean, maximum=cap),
            lambda: dp.Logarithmic(mean, maximum=cap),
            lambda: dp.TruncatedNegativeBinomial(rng.choice([-0.9, -0.5, 0.5, 2, 50]), mean, cap),
            lambda: dp.Poisson(mean, maximum=cap),
            lambda: dp.Geometric(mean + 3.0, minimum=rng.choice([1, 2, 4])),
            lambda: dp.Poisson(mean + 50.0, maximum=2000, minimum=rng.choice([1, 50])),
            lambda: dp.Binomial(max(int(mean), 1), rng.uniform(0.1, 1.0) * max(int(mean), 1)),
            lambda: dp.Binomial(max(int(mean), 1), float(max(int(mean), 1))),
        ]
    )()


def leaf(rng):
    single = [
        lambda: dp.Gaussian(noise(rng)),
        lambda: dp.Laplace(noise(rng)),
        lambda: dp.Joint([dp.Gaussian(noise(rng)), dp.Laplace(noise(rng))]),
    ]
    rate = number(rng, 1e-4, 1.0, [1e-300, 1e-9, 1.0, 1 - 1e-16])
    return rng.choice(
        [
            *single,
            *[lambda: dp.PoissonSampled(rate, rng.choice(single)())] * 4,
            lambda: dp.ZCDP(number(rng, 1e-3, 2.0, [0.0, 1e-12, 1500.0, 1e100, 1e300])),
            lambda: dp.ApproximateDP(
                number(rng, 0.01, 3.0, [0.0, 50.0, 800.0, 1e100]),
                rng.choice([0.0, 1e-16, 1e-9, 1e-6, 0.5, 0.999999]),
            ),
            lambda: dp.Composed([]),
            *[dp.NonPrivate] * (rng.random() < 0.1),
        ]
    )()


def tree(rng, depth):
    if depth == 0 or rng.random() < 0.15:
        return leaf(rng)

    def inner():
        return tree(rng, depth - 1)

    many = rng.choice([1, 2, 2, 3, 3, 60 if depth == 1 else 3])
    return rng.choice(
        [
            lambda: dp.Repeated(int(number(rng, 1, 3000, [1, 10**6, 10**9])), inner()),
            lambda: dp.Composed([inner() for _ in range(many)]),
            lambda: dp.WorstOf([inner() for _ in range(many)]),
            lambda: dp.WorstOf([inner() for _ in range(many)], [1.0 / many] * many),
            lambda: dp.Parallel([inner() for _ in range(many)]),
            lambda: dp.PrivateSelection(inner(), law(rng)),
            lambda: dp.ThresholdSelection(inner(), number(rng, 0.01, 1.0, [1e-6, 1.0])),
            lambda: dp.SubsampledTuning(
                rng.choice([1, 2]), number(rng, 0.01, 0.9, [1e-300, 1 - 1e-12]), inner(), inner()
            ),
        ]
    )()


def one_sentence(error):
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 700


def ask(event, level, adjacency):
    """Ask everything about one tree; return whether it has a finite bound."""
    answer = dp.epsilon(event, level, adjacency=adjacency)
    assert answer.epsilon >= 0.0
    if math.isinf(answer.epsilon):
        assert answer.method in ("none", "non_private") or answer.bounds[answer.method] == math.inf
    low = dp.lower_bound(event, level, adjacency=adjacency)
    assert low <= answer.epsilon * (1 + 1e-9), (low, dict(answer.bounds))
    back = dp.delta(event, min(answer.epsilon, 1e3), adjacency=adjacency)
    assert 0.0 <= back.delta <= 1.0
    weight = weigh(event, 8.0, adjacency, 1e-10)
    assert weight.divergence >= 0.0
    assert weight.delta >= 0.0
    return math.isfinite(answer.epsilon)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_tree_has_an_answer(batch):
    rng = random.Random(f"trees {batch}")
    finite = answered = 0
    slowest = 0.0
    for _ in range(EACH):
        started = time.process_time()
        level = 10.0 ** rng.uniform(-15, -3)
        adjacency = dp.Adjacency.REPLACE_ONE if rng.random() < 0.25 else dp.Adjacency.ADD_REMOVE
        event = None
        try:
            event = tree(rng, rng.randint(0, 6))
            assert dp.event_from_json(event.to_json()) == event
            with counted() as work:
                finite += ask(event, level, adjacency)
            assert work.transformed <= MOST_TRANSFORMED
            assert work.convolved <= MOST_CONVOLVED
            answered += 1
        except PrivTuneError as error:
            one_sentence(error)
        except Exception as error:
            shown = event.to_json()[:2000] if event is not None else "while it was made"
            raise AssertionError(f"{shown} at {level!r} under {adjacency}") from error
        slowest = max(slowest, time.process_time() - started)
    logging.getLogger(__name__).info(
        "batch %d: %d trees, %d refused, %d with a finite bound, slowest %.1f s of CPU",
        *(batch, EACH, EACH - answered, finite, slowest),
    )
    assert answered >= 0.2 * EACH
    assert finite >= 0.1 * EACH


SAMPLED = dp.PoissonSampled(0.0032477961486523403, dp.Gaussian(4.645702175530403))
NOTHING = dp.PrivateSelection(
    dp.PoissonSampled(1e-300, dp.Laplace(0.556)), dp.Logarithmic(8.18, maximum=50)
)
EMPTY = dp.Repeated(10**9, dp.PrivateSelection(dp.Composed([]), dp.Poisson(8.1, maximum=100_000)))

ONCE = dp.Logarithmic(17.924239420463888, maximum=1), dp.Logarithmic(31.119691371605146, maximum=1)
RELEASED = dp.Repeated(61, dp.Laplace(23.902886571814047))
EITHER = dp.WorstOf(
    [
        dp.PoissonSampled(0.0042, dp.Joint([dp.Gaussian(8.2), dp.Laplace(0.424)])),
        dp.PoissonSampled(0.0219, dp.Laplace(0.334)),
    ],
    [0.5, 0.5],
)
ALONE = dp.PrivateSelection(dp.PrivateSelection(RELEASED, ONCE[0]), ONCE[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("event", "level"),
    [
        # The instance of a lone selection had the pair of a threshold, which is a bound alone.
        (
            dp.PrivateSelection(
                dp.Repeated(40, dp.ThresholdSelection(SAMPLED, 0.0124)), dp.Binomial(31, 24.7)
            ),
            2e-5,
        ),
        # What a selection took off for safety was divided by the probability to give up.
        (dp.ThresholdSelection(dp.ThresholdSelection(NOTHING, 1e-6), 0.174), 1.66e-7),
        # No mass was left after so many convolutions.
        (dp.PrivateSelection(EMPTY, dp.Logarithmic(3.42, maximum=2)), 2e-13),
        # What was left was nothing from one end and something from the other.
        (dp.Repeated(10**9, dp.Repeated(2970, ALONE)), 3.778378324384121e-06),
        # What is chosen from had masses on the safe side of a cost, which sum to a half and to three.
        (
            dp.ThresholdSelection(
                dp.PrivateSelection(EITHER, dp.Geometric(17.4, maximum=50)), 0.0235
            ),
            2.8e-7,
        ),
    ],
)
def test_instances_that_once_were_none(event, level):
    ask(event, level, dp.Adjacency.ADD_REMOVE)


@pytest.mark.parametrize("level", [1e-3, 1e-5, 1e-9])
def test_the_instance_is_near_where_the_bound_is_tight(level):
    """It must be able to tell a wrong bound: within a percent of a right one for a plain training."""
    event = dp.Repeated(400, dp.PoissonSampled(0.05, dp.Gaussian(2.0)))
    answer = dp.epsilon(event, level).epsilon
    assert 0.99 * answer <= dp.lower_bound(event, level) <= answer
    mixed = dp.Composed(
        [event, dp.Repeated(3, dp.Laplace(4.0)), dp.PoissonSampled(0.1, dp.Laplace(1.0))]
    )
    assert 0.98 * dp.epsilon(mixed, level).epsilon <= dp.lower_bound(mixed, level)


MOST_AT_A_CORNER = 2**27  # points of Fourier transforms: five seconds of them

CORNERS = list(itertools.product((1e-6, 1e-3, 0.9, 1.0), (0.3, 100.0), (1, 10**6)))
RUNS = {
    "one run": None,
    "geometric": dp.Geometric(10),
    "logarithmic": dp.Logarithmic(1e4),
    "poisson": dp.Poisson(1e4),
}
# Every corner with every law; by default with one of them, in turn, each law at every noise and count.
CHOSEN = [
    (*corner, runs)
    for number, corner in enumerate(CORNERS)
    for place, runs in enumerate(RUNS)
    if FULL or place == (number + number // 4 + 1) % 4
]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise", "count", "runs"), CHOSEN)
def test_corners_of_the_domain(rate, noise, count, runs):
    law = RUNS[runs]
    base = steps(rate, noise, count)
    event = base if law is None else dp.PrivateSelection(base, law)
    with counted() as work:
        loose, tight = dp.epsilon(event, 1e-3), dp.epsilon(event, 1e-12)
    assert work.transformed <= MOST_AT_A_CORNER
    for answer in (loose, tight):
        assert answer.epsilon >= 0.0
        assert not math.isnan(answer.epsilon)
        assert answer.epsilon <= answer.bounds.get("rdp", math.inf)
    assert loose.epsilon <= tight.epsilon
    if law is not None and tight.epsilon > 1e-6 and law.mean > 1:
        assert tight.epsilon >= dp.epsilon(base, 1e-12).epsilon * (1 - 2e-3) * 0.9


@pytest.mark.parametrize("shape", [-0.98, 0.0, 50.0])
@pytest.mark.parametrize("mean", [1 + 1e-9, 1e4])
def test_every_shape_has_a_valid_selection(shape, mean):
    event = dp.PrivateSelection(steps(0.01, 1.1, 1000), dp.TruncatedNegativeBinomial(shape, mean))
    answer = dp.epsilon(event, 1e-5)
    assert set(answer.bounds) - {"rearrangement"} == {"rdp", "profile", "envelope"}
    lower = dp.lower_bound(event, 1e-5)
    assert all(lower <= bound < math.inf for bound in answer.bounds.values())
    assert answer.epsilon >= dp.epsilon(event.event, 1e-5).epsilon * (1 - 1e-3)
    if mean < 1.1:
        assert answer.epsilon == pytest.approx(dp.epsilon(event.event, 1e-5).epsilon, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "runs", "level"),
    [
        (steps(1e-3, 1.0, 1000), dp.Binomial(10_000, 10_000), 1e-12),
        (steps(1e-3, 5.0, 10**5), dp.Poisson(1e4), 1e-8),
    ],
)
def test_thousands_of_runs_at_tiny_deltas(base, runs, level):
    """Differences of φ near 1 are rounding alone; the lower bound must not count them."""
    event = dp.PrivateSelection(base, runs)
    answer = dp.epsilon(event, level)
    assert 0.0 <= dp.lower_bound(event, level) <= answer.epsilon < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("rate", "count"), [(1e-9, 60), (1e-7, 1000)])
def test_calibration_at_tiny_rates_warns_of_nothing(rate, count):
    """Losses so rare leave the tilt of the composition without an end of its own."""
    answer = dp.calibrate(steps(rate, 1.0, count), epsilon=4.0, delta=1e-5)
    assert answer.guarantee.epsilon <= 4.0


def nested(event, times, around):
    for _ in range(times):
        event = around(event)
    return event


TRAINING = steps(0.05, 2.0, 400)
ANSWERED = {
    "mass at infinity in company": dp.Composed(
        [dp.PrivateSelection(dp.ApproximateDP(1, 1e-6), dp.Geometric(10)), dp.Gaussian(3)]
    ),
    "nested selections in company": dp.Composed(
        [
            dp.PrivateSelection(dp.PrivateSelection(TRAINING, dp.Geometric(5)), dp.Geometric(3)),
            dp.Gaussian(3),
        ]
    ),
    "losses above 709": dp.Composed([dp.Laplace(0.001), dp.Gaussian(1)]),
    "approximate DP of 800": dp.Composed([dp.ApproximateDP(800, 0), dp.Gaussian(1)]),
    "tiny noise": dp.Composed([dp.Gaussian(0.002), dp.Laplace(1)]),
    "zCDP of 1500": dp.Composed([dp.ZCDP(1500), dp.Gaussian(1), dp.Laplace(1)]),
    "tiny joint noise": dp.Composed(
        [dp.PoissonSampled(0.5, dp.Joint([dp.Gaussian(0.02), dp.Laplace(0.02)])), dp.Gaussian(1)]
    ),
    "nothing, selected": dp.PrivateSelection(dp.Composed([]), dp.Geometric(10)),
    "nothing, to a threshold": dp.ThresholdSelection(dp.Composed([]), 0.1),
    "nothing, beside": dp.Parallel([dp.Composed([])]),
    "nothing, tuned on": dp.SubsampledTuning(1, 0.1, dp.Composed([]), dp.Gaussian(1)),
    "nothing, trained": dp.SubsampledTuning(1, 0.1, dp.Gaussian(1), dp.Composed([])),
    "nothing, in a mixture": dp.WorstOf([dp.Composed([]), dp.Gaussian(1)], [0.5, 0.5]),
    "nothing, selected in company": dp.Composed(
        [dp.PrivateSelection(dp.Composed([]), dp.Poisson(2)), dp.Gaussian(2)]
    ),
    "the least noise": dp.PrivateSelection(dp.Gaussian(1e-100), dp.Geometric(10)),
    "the most noise": dp.PoissonSampled(0.5, dp.Joint([dp.Gaussian(1e100), dp.Laplace(1e100)])),
    "sixty-four deep": nested(
        dp.Gaussian(10), 64, lambda e: dp.PrivateSelection(e, dp.Geometric(2))
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", list(ANSWERED))
def test_every_event_is_answered(what):
    event = ANSWERED[what]
    for level in (1e-4, 0.9):
        answer = dp.epsilon(event, level)
        assert answer.epsilon < math.inf
        if what != "sixty-four deep":  # of which an instance takes half a minute
            assert dp.lower_bound(event, level) <= answer.epsilon
        assert set(answer.bounds).isdisjoint(answer.reasons)
        for reason in answer.reasons.values():
            assert reason.startswith("beyond the lattice: ")
            assert "\n" not in reason
        assert 0.0 <= dp.delta(event, min(answer.epsilon, 300.0)).delta <= 1.0


def test_what_is_beyond_the_lattice_says_so():
    event = dp.Composed([dp.Gaussian(1e-4), dp.Laplace(1)])
    answer = dp.epsilon(event, 1e-5)
    assert answer.method == "rdp"
    assert answer.to_dict()["bounds"]["pld"] == answer.reasons["pld"]
    alone = dp.epsilon(event, 1e-5, method="pld")
    assert math.isinf(alone.epsilon)
    assert alone.method == "none"
    assert alone.reasons["pld"].startswith("beyond the lattice: ")
    many = dp.Composed(
        [dp.ApproximateDP(0.01 + i / 1e4, 1e-9) for i in range(65)] + [dp.Gaussian(5)]
    )
    assert "more than 64 different parts" in dp.epsilon(many, 1e-5).reasons["pld"]


def test_a_bound_that_is_no_number_is_an_error():
    with pytest.raises(PrivTuneError, match="no number"):
        Bounds().add("pld", lambda: math.nan)


REFUSED = {
    "1e-320": lambda: dp.Gaussian(1e-320),
    "1e300": lambda: dp.Laplace(1e300),
    "an integer of 400 digits": lambda: dp.Gaussian(10**400),
    "an integer of 5,000 digits": lambda: dp.Repeated(10**5000, dp.Gaussian(1)),
    "the same as text": lambda: dp.event_from_json(
        '{"type": "repeated", "event": {"type": "non_private"}, "count": 1' + "0" * 5000 + "}"
    ),
    "zCDP of 1e300": lambda: dp.ZCDP(1e300),
    "counts of 1e360": lambda: dp.epsilon(
        nested(dp.Gaussian(1), 40, lambda e: dp.Repeated(10**9, e)), 1e-5
    ),
    "three thousand deep": lambda: nested(dp.Gaussian(1), 3000, lambda e: dp.Composed([e])),
    "deep text": lambda: dp.event_from_json('{"type": "composed", "events": [' * 50_000),
    "deep lists": lambda: dp.event_from_dict(nested({}, 5000, lambda e: {"type": e})),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_refused_is_refused_in_one_sentence(what):
    with pytest.raises(PrivTuneError) as caught:
        REFUSED[what]()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


CAPPED = [
    dp.Geometric(20, maximum=100_000),
    dp.TruncatedNegativeBinomial(-0.5, 1000, maximum=100_000),
    dp.Poisson(1000, maximum=100_000),
    dp.Binomial(100_000, 1000, maximum=100_000),
]


@pytest.mark.parametrize("law", CAPPED, ids=lambda law: law.law)
def test_a_cap_of_100000_runs_costs_no_sum(law):
    """One over all runs at every level would be of billions of terms, and minutes."""
    event = dp.PrivateSelection(TRAINING, law)
    with counted() as work:
        assert dp.lower_bound(event, 1e-5) <= dp.epsilon(event, 1e-5).epsilon < math.inf
    assert work.summed == 0


@pytest.mark.parametrize("each", [5, *([15] if FULL else [])])
def test_parts_of_every_kind_are_answered_in_seconds(each):
    """As many points a part as there are, whatever their number: twenty of them, or sixty."""
    some = [1 + 0.01 * i for i in range(each)]
    event = dp.Composed(
        [
            *[dp.PrivateSelection(steps(0.01, s, 100), dp.Geometric(5)) for s in some],
            *[dp.PoissonSampled(0.01, dp.Joint([dp.Gaussian(s), dp.Laplace(3.0)])) for s in some],
            *[dp.WorstOf([steps(0.01, s, 100), dp.Gaussian(4 + s)]) for s in some],
            *[dp.Parallel([steps(0.01, s, 100), dp.Gaussian(4 + s)]) for s in some],
        ]
    )
    with counted() as work:
        answer = dp.epsilon(event, 1e-5)
        assert answer.method == "pld"
        assert dp.lower_bound(event, 1e-5) <= answer.epsilon
    assert 0 < work.transformed <= each * 2**22
    assert 0 < work.convolved <= each * 2**29


@pytest.mark.parametrize("method", ["best", "rdp"])
@pytest.mark.parametrize("level", [37.8, 38.0, 40.0, 1e4])
def test_a_delta_that_underflows_is_not_zero(level: float, method: str) -> None:
    """Of a Gaussian no ε has a δ of 0: what has no float is rounded up to one."""
    with mpmath.workdps(60):
        tails = (mpmath.erfc((level + side) / mpmath.sqrt(2)) / 2 for side in (-0.5, 0.5))
        exact = next(tails) - mpmath.exp(level) * next(tails)
        assert 0 < exact <= dp.delta(dp.Gaussian(1.0), level, method=method).delta < 1e-300


def test_a_pure_epsilon_has_no_delta() -> None:
    event = dp.Composed([dp.Laplace(2.0), dp.Laplace(1.0)])
    assert dp.delta(event, 1.51).delta == dp.delta(event, 1e300).delta == 0.0
    assert dp.delta(event, 1.49).delta > 0.0
