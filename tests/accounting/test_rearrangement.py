"""The rearrangement bound against every order of small mechanisms, and against its own mutants."""

import itertools
import math

import numpy as np
import pytest

from privtune.accounting import (
    Binomial,
    Gaussian,
    Geometric,
    Poisson,
    PrivateSelection,
    epsilon,
    lower_bound,
)
from privtune.accounting.best_of_k import Tuner
from privtune.accounting.lower import Instance
from privtune.accounting.pld import fine_pair
from privtune.accounting.pmf import LossPmf
from privtune.accounting.rearrangement import Blocks, Cells, Items, Rearranged
from tests.accounting.helpers import attained, steps
from tests.tiers import FULL

LAWS = (
    Binomial(3, 3),
    Binomial(10, 10),
    Binomial(40, 40),
    Binomial(12, 8),
    Poisson(5),
    Poisson(20),
    Poisson(60),
    Geometric(30),
    Geometric(20, maximum=12),
)
POINTS = (0.0, 0.4, 1.0, 2.0, 4.0, 7.0)
ORDERS = np.array(list(itertools.permutations(range(6))))


def small_mechanism(rng):
    """Return masses of six pieces of few outcomes, P and Q, and their exact lattice pair."""
    step = float(rng.choice([0.1, 0.3, 1.0]))
    places = np.sort(rng.choice(np.arange(-6, 7), size=int(rng.integers(2, 5)), replace=False))
    p = rng.dirichlet(np.full(places.size, rng.choice([0.3, 1.0, 3.0])))
    infinite = float(rng.choice([0.0, 0.0, 1e-3])) * rng.random()
    p = np.maximum(p, 1e-9)
    p *= (1.0 - infinite) / p.sum()
    while (p * np.exp(-places * step)).sum() > 1.0:
        places = places + 1
    masses = np.zeros(places[-1] - places[0] + 1)
    masses[places - places[0]] = p
    pair = LossPmf(step, int(places[0]), masses, infinite)
    q = p * np.exp(-places * step)
    outcomes = [*zip(p, q, strict=True), (infinite, 0.0), (0.0, max(1.0 - q.sum(), 0.0))]
    pieces = [piece for piece in outcomes if max(piece) > 0.0]
    while len(pieces) < 6:
        largest = max(range(len(pieces)), key=lambda i: max(pieces[i]))
        a, b = pieces.pop(largest)
        cut = rng.random()
        pieces += [(a * cut, b * cut), (a * (1.0 - cut), b * (1.0 - cut))]
    return (*np.array(pieces).T, pair)


def worst_order(p, q, runs, points):
    """Return δ at each ε of the worst of all orders of the pieces, without the symbol for K = 0."""

    def tuned(masses):
        sums = np.cumsum(masses[ORDERS], axis=1)
        return np.diff(runs.pgf(np.minimum(sums, 1.0)), axis=1, prepend=runs.pgf(0.0))

    a, b = tuned(p), tuned(q)
    return np.array([np.maximum(a - math.exp(e) * b, 0.0).sum(axis=1).max() for e in points])


def excess(seed, count):
    """Return how far the bound is exceeded at most, over so many mechanisms."""
    rng = np.random.default_rng(seed)
    largest = -math.inf
    for number in range(count):
        p, q, pair = small_mechanism(rng)
        runs = LAWS[number % len(LAWS)]
        bound = Rearranged(Tuner(pair, runs))
        if number % 4:
            promised = np.array([bound.delta(e) for e in POINTS])
        else:  # with prices that are chosen at few of them
            promised = bound.deltas(np.array(POINTS))
        gap = worst_order(p, q, runs, POINTS) - promised
        largest = max(largest, float(gap.max()))
    return largest


def test_no_order_of_small_mechanisms_costs_more():
    """Five thousand of them with PRIVTUNE_CAMPAIGN=full."""
    assert excess(2, 5000 if FULL else 60) <= 1e-9


below, charged, pay = Cells.below, Cells.charged, Items.pay


def tangents_missed(self, taken, depth):
    """A chord of the concave curve at the left end of each cell, where a tangent belongs."""
    right = np.minimum(self.level + taken[:, None], 1.0)
    curve = np.minimum(np.interp(right, self.level, self.roc) - depth[:, None], self.roc)
    curve = np.clip(curve, 0.0, 1.0)
    return curve[:, :-1], curve[:, 1:]


def free_of_price(self, z, cost):
    """Twice the price is taken off what pays more than it."""
    return pay(self, z, None if cost is None else 0.5 * cost)


MUTANTS = {
    "no lower losses": (Blocks, "_most_paid", lambda self, by_points, by_groups: by_points),
    "twice the depth": (Cells, "below", lambda self, above, depth: below(self, above, 2.0 * depth)),
    "no mass above": (Cells, "below", lambda self, above, depth: below(self, 0.0 * above, depth)),
    "no tangents": (Cells, "below", tangents_missed),
    "levels are free": (Cells, "charged", lambda self, z: 0.0),
    "half the price": (Cells, "charged", lambda self, z: 0.5 * charged(self, z)),
    "twice the price": (Items, "pay", free_of_price),
    "what pays is not charged": (Items, "pay", lambda self, z, cost: 0.8 * pay(self, z, cost)),
}


def least_of_the_theorem(ranked, runs, point):
    """Return the theorem's sum without a price, on a few levels, an outcome's depth where it begins."""
    p, q = ranked.masses, np.exp(np.log(ranked.masses) - ranked.losses)
    above_p, above_q = np.append(0.0, np.cumsum(p)), np.append(0.0, np.cumsum(q))
    u = 1.0 - np.geomspace(1e-6, 1.0, 400)
    floor = runs.pgf_derivative(u)
    total = 0.0
    for first, depth in enumerate(above_p[:-1]):
        largest = 0.0
        for i in range(first, p.size):
            taken = above_q[i + 1] - np.interp(above_p[i + 1] - depth, above_p, above_q)
            f, moved = (np.interp(v, above_q, above_p, right=1.0) for v in (u, u + taken))
            level = np.clip(np.minimum(f, moved - depth), 0.0, 1.0)
            z = math.exp(point - ranked.losses[i])
            largest = max(largest, float((runs.pgf_derivative(level) - z * floor).max()))
        total += largest * p[first]
    return total


def short_of_the_theorem():
    """Return how far the code falls below the theorem at most, relative; it may not."""
    worst = -math.inf
    for runs, point in ((Poisson(40), 6.0), (Poisson(40), 12.0), (Binomial(10, 10), 4.0)):
        pair = fine_pair(Gaussian(1.0)).remove
        bound = Rearranged(Tuner(pair.coarsen(math.ceil(pair.masses.size / 60)), runs))
        blocks = np.arange(bound.ranked.masses.size + 1)
        whole = Blocks(bound.ranked, Cells(bound.tuner, 0.05), blocks, priced=False)
        found = whole.sharpened(point, 20).delta(point)
        worst = max(worst, least_of_the_theorem(bound.ranked, runs, point) / found - 1.0)
    return worst


def below_the_lines():
    """Return how far a line is on the wrong side of what it bounds at most, on wide cells."""
    rng = np.random.default_rng(5)
    worst = -math.inf
    for runs in (Poisson(40), Binomial(10, 10), Geometric(30)):
        pair = fine_pair(Gaussian(1.0)).remove
        tuner = Tuner(pair.coarsen(math.ceil(pair.masses.size / 60)), runs)
        cells = Cells(tuner, 1.0)
        taken = np.append(0.0, 10.0 ** rng.uniform(-4.0, 0.0, 20))
        depth = np.interp(taken, cells.level, cells.roc) * rng.uniform(0.3, 1.0, taken.size)
        left, right = cells.below(taken, depth)
        for share in np.linspace(0.0, 1.0, 9):
            u = cells.level[:-1] + share * np.diff(cells.level)
            f, moved = (np.interp(v, cells.level, cells.roc) for v in (u, u + taken[:, None]))
            curve = np.minimum(f, moved - depth[:, None])
            worst = max(worst, float((curve - (1.0 - share) * left - share * right).max()))
            floor = (1.0 - share) * cells.floor[0] + share * cells.floor[1]
            wrong = floor / np.maximum(runs.pgf_derivative(u), 1e-300) - 1.0
            worst = max(worst, float(wrong[floor > 1e-12].max()))
    return worst


def test_lines_are_on_the_right_side():
    assert -0.1 < below_the_lines() <= 1e-9


def test_the_code_is_not_below_the_theorem():
    assert -0.1 < short_of_the_theorem() <= 1e-9


def share_of_the_bound():
    """Return the largest δ of an explicit instance over the bound, on two Gaussian releases."""
    shares = []
    for sigma, runs, point in (
        (10.0, Binomial(10, 10), 0.85),
        (1.0, Poisson(40), 15.4),
        (1.0, Binomial(100, 100), 14.0),
    ):
        pair = fine_pair(Gaussian(sigma)).remove
        pair = pair.coarsen(math.ceil(pair.masses.size / 500))
        paid = attained(Instance(pair, runs), point)
        shares.append(paid / Rearranged(Tuner(pair, runs)).delta(point))
    return max(shares)


def test_an_explicit_instance_comes_close():
    assert 0.8 < share_of_the_bound() < 1.0


@pytest.mark.parametrize(("runs", "most"), [(Binomial(10, 10), 1.025), (Poisson(200), 1.04)])
def test_reported_over_lower_where_many_run(runs, most):
    event = PrivateSelection(steps(1.0, 20.0, 100), runs)
    answer, lower = epsilon(event, 1e-5), lower_bound(event, 1e-5)
    assert answer.method == "rearrangement"
    assert lower < answer.epsilon < most * lower


@pytest.mark.parametrize(
    ("base", "runs", "most"),
    [
        # What a bound with the smallest loss that pays, and every level a cell, charged, nearly.
        (steps(0.02, 20.0, 1), Poisson(20), 0.003343424),
        (steps(0.005, 2.0, 100), Geometric(100), 0.1411),
        (steps(0.005, 5.0, 10), Binomial(30, 30), 0.01830044),
    ],
)
def test_cells_of_levels_are_narrow_enough_for_weak_bases(base, runs, most):
    assert epsilon(PrivateSelection(base, runs), 1e-3).epsilon < most


def test_what_pays_is_shuffled_in_the_best_way():
    """Every shuffle of what pays, by rising loss, and of what does not, by falling loss."""
    rng = np.random.default_rng(3)
    for runs in (Binomial(6, 6), Poisson(10), Geometric(5)):
        p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
        pair = LossPmf(1.0, 0, p[np.argsort(p / q)], 0.0)
        instance = Instance(pair, runs, q[np.argsort(p / q)], cut=False)
        instance.losses = np.sort(np.log(p / q))[::-1]
        assert instance.p.sum() == pytest.approx(1.0)
        for count in range(1, 6):
            pays = np.arange(6) < count

            def paid(order, pays=pays, instance=instance, runs=runs):
                a, b = (
                    np.diff(runs.pgf(np.append(0.0, np.minimum(np.cumsum(m[order]), 1.0))))
                    for m in (instance.p, instance.q)
                )
                return float((a - math.e * b)[pays[order]].sum())

            def sorted_kinds(order, count=count):
                up, down = order[order < count], order[order >= count]
                return (np.diff(up) < 0).all() and (np.diff(down) > 0).all()

            best = max(paid(order) for order in ORDERS if sorted_kinds(order))
            assert paid(instance.shuffled(1.0, pays)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_is_noticed(name, monkeypatch):
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    measures = (
        below_the_lines,
        short_of_the_theorem,
        lambda: share_of_the_bound() - 1.0,
        lambda: excess(1, 40),
    )
    assert any(measure() > 1e-6 for measure in measures)
