"""Random trees of events with extreme numbers: a bound, infinity with a reason, or one sentence.

Twenty-four trees by default; 5,000 with `PRIVTUNE_CAMPAIGN=full`. Each answer is held against an explicit
instance, composed without transforms and rounded down.
"""

import logging
import math
import random
import time

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
    delta,
    epsilon,
    event_from_json,
    lower_bound,
)
from privtune.errors import PrivTuneError
from privtune.ledger.weights import weigh
from tests.accounting.helpers import counted
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
