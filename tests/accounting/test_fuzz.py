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

from privtune.accounting import (
    ZCDP,
    Adjacency,
    ApproximateDP,
    Binomial,
    Composed,
    Gaussian,
    Geometric,
    Joint,
    Laplace,
    Logarithmic,
    NonPrivate,
    Parallel,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    TruncatedNegativeBinomial,
    WorstOf,
    calibrate,
    delta,
    epsilon,
    event_from_dict,
    event_from_json,
    lower_bound,
)
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
            lambda: Geometric(mean, maximum=cap),
            lambda: Logarithmic(mean, maximum=cap),
            lambda: TruncatedNegativeBinomial(rng.choice([-0.9, -0.5, 0.5, 2, 50]), mean, cap),
            lambda: Poisson(mean, maximum=cap),
            lambda: Geometric(mean + 3.0, minimum=rng.choice([1, 2, 4])),
            lambda: Poisson(mean + 50.0, maximum=2000, minimum=rng.choice([1, 50])),
            lambda: Binomial(max(int(mean), 1), rng.uniform(0.1, 1.0) * max(int(mean), 1)),
            lambda: Binomial(max(int(mean), 1), float(max(int(mean), 1))),
        ]
    )()


def leaf(rng):
    single = [
        lambda: Gaussian(noise(rng)),
        lambda: Laplace(noise(rng)),
        lambda: Joint([Gaussian(noise(rng)), Laplace(noise(rng))]),
    ]
    rate = number(rng, 1e-4, 1.0, [1e-300, 1e-9, 1.0, 1 - 1e-16])
    return rng.choice(
        [
            *single,
            *[lambda: PoissonSampled(rate, rng.choice(single)())] * 4,
            lambda: ZCDP(number(rng, 1e-3, 2.0, [0.0, 1e-12, 1500.0, 1e100, 1e300])),
            lambda: ApproximateDP(
                number(rng, 0.01, 3.0, [0.0, 50.0, 800.0, 1e100]),
                rng.choice([0.0, 1e-16, 1e-9, 1e-6, 0.5, 0.999999]),
            ),
            lambda: Composed([]),
            *[NonPrivate] * (rng.random() < 0.1),
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
            lambda: Repeated(int(number(rng, 1, 3000, [1, 10**6, 10**9])), inner()),
            lambda: Composed([inner() for _ in range(many)]),
            lambda: WorstOf([inner() for _ in range(many)]),
            lambda: WorstOf([inner() for _ in range(many)], [1.0 / many] * many),
            lambda: Parallel([inner() for _ in range(many)]),
            lambda: PrivateSelection(inner(), law(rng)),
            lambda: ThresholdSelection(inner(), number(rng, 0.01, 1.0, [1e-6, 1.0])),
            lambda: SubsampledTuning(
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
    answer = epsilon(event, level, adjacency=adjacency)
    assert answer.epsilon >= 0.0
    if math.isinf(answer.epsilon):
        assert answer.method in ("none", "non_private") or answer.bounds[answer.method] == math.inf
    low = lower_bound(event, level, adjacency=adjacency)
    assert low <= answer.epsilon * (1 + 1e-9), (low, dict(answer.bounds))
    back = delta(event, min(answer.epsilon, 1e3), adjacency=adjacency)
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
        adjacency = Adjacency.REPLACE_ONE if rng.random() < 0.25 else Adjacency.ADD_REMOVE
        event = None
        try:
            event = tree(rng, rng.randint(0, 6))
            assert event_from_json(event.to_json()) == event
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


SAMPLED = PoissonSampled(0.0032477961486523403, Gaussian(4.645702175530403))
NOTHING = PrivateSelection(PoissonSampled(1e-300, Laplace(0.556)), Logarithmic(8.18, maximum=50))
EMPTY = Repeated(10**9, PrivateSelection(Composed([]), Poisson(8.1, maximum=100_000)))

ONCE = Logarithmic(17.924239420463888, maximum=1), Logarithmic(31.119691371605146, maximum=1)
RELEASED = Repeated(61, Laplace(23.902886571814047))
EITHER = WorstOf(
    [
        PoissonSampled(0.0042, Joint([Gaussian(8.2), Laplace(0.424)])),
        PoissonSampled(0.0219, Laplace(0.334)),
    ],
    [0.5, 0.5],
)
ALONE = PrivateSelection(PrivateSelection(RELEASED, ONCE[0]), ONCE[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("event", "level"),
    [
        # The instance of a lone selection had the pair of a threshold, which is a bound alone.
        (
            PrivateSelection(Repeated(40, ThresholdSelection(SAMPLED, 0.0124)), Binomial(31, 24.7)),
            2e-5,
        ),
        # What a selection took off for safety was divided by the probability to give up.
        (ThresholdSelection(ThresholdSelection(NOTHING, 1e-6), 0.174), 1.66e-7),
        # No mass was left after so many convolutions.
        (PrivateSelection(EMPTY, Logarithmic(3.42, maximum=2)), 2e-13),
        # What was left was nothing from one end and something from the other.
        (Repeated(10**9, Repeated(2970, ALONE)), 3.778378324384121e-06),
        # What is chosen from had masses on the safe side of a cost, which sum to a half and to three.
        (ThresholdSelection(PrivateSelection(EITHER, Geometric(17.4, maximum=50)), 0.0235), 2.8e-7),
    ],
)
def test_instances_that_once_were_none(event, level):
    ask(event, level, Adjacency.ADD_REMOVE)


@pytest.mark.parametrize("level", [1e-3, 1e-5, 1e-9])
def test_the_instance_is_near_where_the_bound_is_tight(level):
    """It must be able to tell a wrong bound: within a percent of a right one for a plain training."""
    event = Repeated(400, PoissonSampled(0.05, Gaussian(2.0)))
    answer = epsilon(event, level).epsilon
    assert 0.99 * answer <= lower_bound(event, level) <= answer
    mixed = Composed([event, Repeated(3, Laplace(4.0)), PoissonSampled(0.1, Laplace(1.0))])
    assert 0.98 * epsilon(mixed, level).epsilon <= lower_bound(mixed, level)


MOST_AT_A_CORNER = 2**27  # points of Fourier transforms: five seconds of them

CORNERS = list(itertools.product((1e-6, 1e-3, 0.9, 1.0), (0.3, 100.0), (1, 10**6)))
RUNS = {
    "one run": None,
    "geometric": Geometric(10),
    "logarithmic": Logarithmic(1e4),
    "poisson": Poisson(1e4),
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
    event = base if law is None else PrivateSelection(base, law)
    with counted() as work:
        loose, tight = epsilon(event, 1e-3), epsilon(event, 1e-12)
    assert work.transformed <= MOST_AT_A_CORNER
    for answer in (loose, tight):
        assert answer.epsilon >= 0.0
        assert not math.isnan(answer.epsilon)
        assert answer.epsilon <= answer.bounds.get("rdp", math.inf)
    assert loose.epsilon <= tight.epsilon
    if law is not None and tight.epsilon > 1e-6 and law.mean > 1:
        assert tight.epsilon >= epsilon(base, 1e-12).epsilon * (1 - 2e-3) * 0.9


@pytest.mark.parametrize("shape", [-0.98, -0.9, -0.5, 0.0, 50.0])
@pytest.mark.parametrize("mean", [1 + 1e-9, 5.0, 50.0, 1e4])
def test_every_shape_has_a_valid_selection(shape, mean):
    event = PrivateSelection(steps(0.01, 1.1, 1000), TruncatedNegativeBinomial(shape, mean))
    answer = epsilon(event, 1e-5)
    assert set(answer.bounds) - {"rearrangement"} == {"rdp", "profile", "envelope"}
    lower = lower_bound(event, 1e-5)
    assert all(lower <= bound < math.inf for bound in answer.bounds.values())
    assert answer.epsilon >= epsilon(event.event, 1e-5).epsilon * (1 - 1e-3)
    if mean < 1.1:
        assert answer.epsilon == pytest.approx(epsilon(event.event, 1e-5).epsilon, rel=1e-3)


@pytest.mark.parametrize(
    ("base", "runs", "level"),
    [
        (steps(1e-3, 1.0, 1000), Binomial(10_000, 10_000), 1e-12),
        (steps(1e-6, 1.0, 1000), Binomial(1000, 500), 1e-12),
        (steps(1e-3, 5.0, 10**5), Poisson(1e4), 1e-8),
    ],
)
def test_thousands_of_runs_at_tiny_deltas(base, runs, level):
    """Differences of φ near 1 are rounding alone; the lower bound must not count them."""
    event = PrivateSelection(base, runs)
    answer = epsilon(event, level)
    assert 0.0 <= lower_bound(event, level) <= answer.epsilon < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [1e-9, 1e-7])
@pytest.mark.parametrize("count", [60, 1000])
def test_calibration_at_tiny_rates_warns_of_nothing(rate, count):
    """Losses so rare leave the tilt of the composition without an end of its own."""
    answer = calibrate(steps(rate, 1.0, count), epsilon=4.0, delta=1e-5)
    assert answer.guarantee.epsilon <= 4.0


def nested(event, times, around):
    for _ in range(times):
        event = around(event)
    return event


TRAINING = steps(0.05, 2.0, 400)
ANSWERED = {
    "mass at infinity in company": Composed(
        [PrivateSelection(ApproximateDP(1, 1e-6), Geometric(10)), Gaussian(3)]
    ),
    "nested selections in company": Composed(
        [PrivateSelection(PrivateSelection(TRAINING, Geometric(5)), Geometric(3)), Gaussian(3)]
    ),
    "losses above 709": Composed([Laplace(0.001), Gaussian(1)]),
    "approximate DP of 800": Composed([ApproximateDP(800, 0), Gaussian(1)]),
    "tiny noise": Composed([Gaussian(0.002), Laplace(1)]),
    "zCDP of 1500": Composed([ZCDP(1500), Gaussian(1), Laplace(1)]),
    "tiny joint noise": Composed([PoissonSampled(0.5, Joint([Gaussian(0.02), Laplace(0.02)])), Gaussian(1)]),
    "nothing, selected": PrivateSelection(Composed([]), Geometric(10)),
    "nothing, to a threshold": ThresholdSelection(Composed([]), 0.1),
    "nothing, beside": Parallel([Composed([])]),
    "nothing, tuned on": SubsampledTuning(1, 0.1, Composed([]), Gaussian(1)),
    "nothing, trained": SubsampledTuning(1, 0.1, Gaussian(1), Composed([])),
    "nothing, in a mixture": WorstOf([Composed([]), Gaussian(1)], [0.5, 0.5]),
    "nothing, selected in company": Composed([PrivateSelection(Composed([]), Poisson(2)), Gaussian(2)]),
    "the least noise": PrivateSelection(Gaussian(1e-100), Geometric(10)),
    "the most noise": PoissonSampled(0.5, Joint([Gaussian(1e100), Laplace(1e100)])),
    "sixty-four deep": nested(Gaussian(10), 64, lambda e: PrivateSelection(e, Geometric(2))),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", list(ANSWERED))
def test_every_event_is_answered(what):
    event = ANSWERED[what]
    for level in (1e-4, 0.9):
        answer = epsilon(event, level)
        assert lower_bound(event, level) <= answer.epsilon < math.inf
        assert set(answer.bounds).isdisjoint(answer.reasons)
        for reason in answer.reasons.values():
            assert reason.startswith("beyond the lattice: ")
            assert "\n" not in reason
        assert 0.0 <= delta(event, min(answer.epsilon, 300.0)).delta <= 1.0


def test_what_is_beyond_the_lattice_says_so():
    event = Composed([Gaussian(1e-4), Laplace(1)])
    answer = epsilon(event, 1e-5)
    assert answer.method == "rdp"
    assert answer.to_dict()["bounds"]["pld"] == answer.reasons["pld"]
    alone = epsilon(event, 1e-5, method="pld")
    assert math.isinf(alone.epsilon)
    assert alone.method == "none"
    assert alone.reasons["pld"].startswith("beyond the lattice: ")
    many = Composed([ApproximateDP(0.01 + i / 1e4, 1e-9) for i in range(65)] + [Gaussian(5)])
    assert "more than 64 different parts" in epsilon(many, 1e-5).reasons["pld"]


def test_a_bound_that_is_no_number_is_an_error():
    with pytest.raises(PrivTuneError, match="no number"):
        Bounds().add("pld", lambda: math.nan)


REFUSED = {
    "1e-320": lambda: Gaussian(1e-320),
    "1e300": lambda: Laplace(1e300),
    "an integer of 400 digits": lambda: Gaussian(10**400),
    "an integer of 5,000 digits": lambda: Repeated(10**5000, Gaussian(1)),
    "the same as text": lambda: event_from_json(
        '{"type": "repeated", "event": {"type": "non_private"}, "count": 1' + "0" * 5000 + "}"
    ),
    "zCDP of 1e300": lambda: ZCDP(1e300),
    "counts of 1e360": lambda: epsilon(nested(Gaussian(1), 40, lambda e: Repeated(10**9, e)), 1e-5),
    "three thousand deep": lambda: nested(Gaussian(1), 3000, lambda e: Composed([e])),
    "deep text": lambda: event_from_json('{"type": "composed", "events": [' * 50_000),
    "deep lists": lambda: event_from_dict(nested({}, 5000, lambda e: {"type": e})),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_refused_is_refused_in_one_sentence(what):
    with pytest.raises(PrivTuneError) as caught:
        REFUSED[what]()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


CAPPED = [
    Geometric(20, maximum=100_000),
    TruncatedNegativeBinomial(-0.5, 1000, maximum=100_000),
    Poisson(1000, maximum=100_000),
    Binomial(100_000, 1000, maximum=100_000),
]


@pytest.mark.parametrize("law", CAPPED, ids=lambda law: law.law)
def test_a_cap_of_100000_runs_costs_no_sum(law):
    """One over all runs at every level would be of billions of terms, and minutes."""
    event = PrivateSelection(TRAINING, law)
    with counted() as work:
        assert lower_bound(event, 1e-5) <= epsilon(event, 1e-5).epsilon < math.inf
    assert work.summed == 0


@pytest.mark.parametrize("each", [5, *([15] if FULL else [])])
def test_parts_of_every_kind_are_answered_in_seconds(each):
    """As many points a part as there are, whatever their number: twenty of them, or sixty."""
    some = [1 + 0.01 * i for i in range(each)]
    event = Composed(
        [
            *[PrivateSelection(steps(0.01, s, 100), Geometric(5)) for s in some],
            *[PoissonSampled(0.01, Joint([Gaussian(s), Laplace(3.0)])) for s in some],
            *[WorstOf([steps(0.01, s, 100), Gaussian(4 + s)]) for s in some],
            *[Parallel([steps(0.01, s, 100), Gaussian(4 + s)]) for s in some],
        ]
    )
    with counted() as work:
        answer = epsilon(event, 1e-5)
        assert answer.method == "pld"
        assert lower_bound(event, 1e-5) <= answer.epsilon
    assert 0 < work.transformed <= each * 2**22
    assert 0 < work.convolved <= each * 2**29


@pytest.mark.parametrize("method", ["best", "rdp"])
@pytest.mark.parametrize("level", [37.8, 38.0, 40.0, 1e4])
def test_a_delta_that_underflows_is_not_zero(level: float, method: str) -> None:
    """Of a Gaussian no ε has a δ of 0: what has no float is rounded up to one."""
    with mpmath.workdps(60):
        tails = (mpmath.erfc((level + side) / mpmath.sqrt(2)) / 2 for side in (-0.5, 0.5))
        exact = next(tails) - mpmath.exp(level) * next(tails)
        assert 0 < exact <= delta(Gaussian(1.0), level, method=method).delta < 1e-300


def test_a_pure_epsilon_has_no_delta() -> None:
    event = Composed([Laplace(2.0), Laplace(1.0)])
    assert delta(event, 1.51).delta == delta(event, 1e300).delta == 0.0
    assert delta(event, 1.49).delta > 0.0
