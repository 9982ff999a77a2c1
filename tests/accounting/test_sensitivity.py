"""What a change would cost is what the changed event costs, written out by hand."""

import math
from dataclasses import replace

import pytest

from privtune.accounting import (
    Adjacency,
    Binomial,
    Composed,
    Gaussian,
    Geometric,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    ThresholdSelection,
    epsilon,
)
from privtune.accounting.costs import sensitivity, shares_of_scores


def steps(noise):
    return Repeated(400, PoissonSampled(0.05, Gaussian(noise)))


def trial(score=20.0, noise=2.0):
    return Composed([steps(noise), Laplace(score)])


EVENT = PrivateSelection(trial(), Geometric(10))


def changes(event, **options):
    found = sensitivity(event, 1e-5, **options)
    return {change.text: change for change in found.changes}


def test_a_share_for_scores_is_traded_for_noise_of_the_rest():
    """At each share: the score costs that much of what stands beside it, and the whole what it did."""
    first, second = steps(2.0), Repeated(3000, PoissonSampled(0.002, Gaussian(0.9)))
    event = Composed([Parallel((first, Gaussian(9.0))), Parallel((second, Laplace(5.0)))])
    now = epsilon(event, 1e-5).epsilon
    found = shares_of_scores(event, epsilon(event, 1e-5))
    assert [row.share for row in found] == [0.05, 0.25, 0.5, 0.75, 0.9, 1.0]
    for row in found[1::2]:
        scores = Gaussian(row.noise_multipliers[0]), Laplace(row.noise_multipliers[1])
        for score, base in zip(scores, (first, second), strict=True):
            asked = row.share * epsilon(base, 1e-5).epsilon
            before = replace(score, noise_multiplier=score.noise_multiplier / row.noise_factor)
            assert epsilon(before, 1e-5).epsilon == pytest.approx(asked, rel=2e-3)
        rest = (
            steps(2.0 * row.noise_factor),
            Repeated(3000, PoissonSampled(0.002, Gaussian(0.9 * row.noise_factor))),
        )
        whole = Composed([Parallel(pair) for pair in zip(rest, scores, strict=True)])
        assert epsilon(whole, 1e-5).epsilon <= now * (1 + 2e-3)
        if row.noise_factor > 1.01:  # and no less noise would do
            scores = tuple(replace(s, noise_multiplier=0.99 * s.noise_multiplier) for s in scores)
            less = (
                steps(2.0 * row.noise_factor * 0.99),
                Repeated(3000, PoissonSampled(0.002, Gaussian(0.9 * row.noise_factor * 0.99))),
            )
            whole = Composed([Parallel(pair) for pair in zip(less, scores, strict=True)])
            assert epsilon(whole, 1e-5).epsilon > now
    factors = [row.noise_factor for row in found]
    assert factors == sorted(factors)
    assert factors[0] < 1.002 < 1.05 < factors[-1]
    assert shares_of_scores(first, epsilon(first, 1e-5)) == ()


def test_every_change_is_accounted_anew():
    by_hand = {
        "half the noise (the score)": PrivateSelection(trial(score=10.0), Geometric(10)),
        "twice the noise (the score)": PrivateSelection(trial(score=40.0), Geometric(10)),
        "half the noise (gaussian, noise multiplier 2)": PrivateSelection(
            trial(noise=1.0), Geometric(10)
        ),
        "twice the noise (gaussian, noise multiplier 2)": PrivateSelection(
            trial(noise=4.0), Geometric(10)
        ),
        "one run more on average (geometric, mean 10)": PrivateSelection(trial(), Geometric(11)),
        "at most 30 runs (geometric, mean 10)": PrivateSelection(
            trial(), Geometric(10, maximum=30)
        ),
        "one run more, charged by itself (geometric, mean 10)": Composed([EVENT, trial()]),
        "all of it once more": Repeated(2, EVENT),
    }
    found = changes(EVENT, names={Laplace(20.0): "the score"})
    assert set(found) == {*by_hand, "δ ten times smaller"}
    now = epsilon(EVENT, 1e-5).epsilon
    for words, event in by_hand.items():
        assert found[words].epsilon == epsilon(event, 1e-5).epsilon
        assert found[words].difference == found[words].epsilon - now
    assert found["δ ten times smaller"].epsilon == epsilon(EVENT, 1e-5 / 10).epsilon
    ordered = [change.difference for change in sensitivity(EVENT, 1e-5).changes]
    assert ordered == sorted(ordered)
    assert ordered[0] < 0 < ordered[-1]


def test_a_fixed_number_and_a_threshold():
    base = Gaussian(3.0)
    fixed, stopped = PrivateSelection(base, Binomial(5, 5.0)), ThresholdSelection(base, 0.2)
    both = changes(Composed([fixed, stopped]))
    more = Composed([PrivateSelection(base, Binomial(6, 6.0)), stopped])
    found = both["one run more on average (binomial, mean 5)"]
    assert found.epsilon == epsilon(more, 1e-5).epsilon
    later = Composed([fixed, ThresholdSelection(base, 1 / 6)])
    found = both["one more run on average, at most (a threshold, mean 5)"]
    assert found.epsilon == pytest.approx(epsilon(later, 1e-5).epsilon, rel=1e-9)
    assert not [words for words in both if words.startswith("at most")]


def test_what_costs_infinitely_much_costs_no_more():
    found = changes(Composed([NonPrivate(), Gaussian(1.0)]))
    assert {change.difference for change in found.values()} == {0.0}
    assert all(math.isinf(change.epsilon) for change in found.values())


def test_the_adjacency_is_the_question_s():
    found = changes(Gaussian(4.0), adjacency=Adjacency.REPLACE_ONE)
    twice = epsilon(Gaussian(8.0), 1e-5, adjacency=Adjacency.REPLACE_ONE).epsilon
    assert found["twice the noise (gaussian, noise multiplier 4)"].epsilon == twice


def test_a_change_that_no_event_can_have_is_left_out():
    found = changes(Repeated(10**9, Repeated(10**9, Gaussian(1e100))))
    assert "all of it once more" not in found
    assert "twice the noise (gaussian, noise multiplier 1e+100)" not in found
    assert "δ ten times smaller" in found
