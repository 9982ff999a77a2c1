"""Random small mechanisms against every bound on a selection, by exact enumeration.

All orders of six pieces, all sets of pieces that pass a threshold; both directions, ε of both signs.
A few mechanisms by default; with `PRIVTUNE_CAMPAIGN=full` 5,000 for each bound, 1,000 for the pair. The
rearrangement has its own such attack in `test_rearrangement.py`. A planted mistake must be found.
"""

import itertools
import logging
import math
from dataclasses import replace

import numpy as np
import pytest

import privtune.accounting as dp
from privtune.accounting.best_of_k import Table, Threshold, Tuner
from privtune.accounting.pairs import tuner_pair
from privtune.accounting.pmf import LossPmf
from privtune.accounting.runs import RunLaw
from tests.accounting.test_rearrangement import LAWS, small_mechanism, worst_order
from tests.tiers import FULL

POINTS = (-1.5, -0.3, 0.0, 0.4, 1.0, 2.0, 4.0, 7.0)
FEW = (
    dp.Poisson(0.7),
    dp.Binomial(2, 1.0),
    dp.Binomial(2, 2),
    dp.Geometric(2),
)  # few runs, or none
ALL = tuple(law for pair in itertools.zip_longest(LAWS, FEW) for law in pair if law is not None)
STOPS = (1e-3, 0.02, 0.1, 0.3, 0.7, 1.0)
PASSING = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
BATCHES, EACH, PAIRS = (50, 100, 20) if FULL else (1, 20, 20)


def swapped(p, q, pair):
    """The lattice pair of (Q, P), where `pair` is that of (P, Q)."""
    masses = (pair.masses * np.exp(-pair.losses))[::-1]
    highest = pair.lowest + pair.masses.size - 1
    return LossPmf(pair.step, -highest, masses, float(q[p == 0.0].sum()))


def of_any_order(p, q, runs):
    """The largest δ of all orders, with the symbol that is released when nothing ran."""
    nothing = float(runs.pmf(0.0))
    symbol = np.array([max(1.0 - math.exp(e), 0.0) * nothing for e in POINTS])
    return worst_order(p, q, runs, POINTS) + symbol


def of_any_threshold(p, q, stop):
    """The largest δ of all sets of pieces that pass."""

    def tuned(masses):
        passed = PASSING @ masses
        scale = stop + (1.0 - stop) * passed
        kept = PASSING * masses / scale[:, None]
        return np.column_stack([kept, stop * (1.0 - passed) / scale])

    a, b = tuned(p), tuned(q)
    return np.array([np.maximum(a - math.exp(e) * b, 0.0).sum(axis=1).max() for e in POINTS])


def mechanisms(seed, count):
    rng = np.random.default_rng(seed)
    for number in range(count):
        p, q, pair = small_mechanism(rng)
        runs, stop = ALL[number % len(ALL)], STOPS[number % len(STOPS)]
        yield p, q, pair, swapped(p, q, pair), runs, stop


def excess_of_envelope(seed, count):
    """How far δ is above the bound on the best of K at most."""
    worst = -math.inf
    for p, q, pair, back, runs, _ in mechanisms(seed, count):
        for first, second, base in ((p, q, pair), (q, p, back)):
            bound = np.array([Tuner(base, runs).delta(e) for e in POINTS])
            worst = max(worst, float((of_any_order(first, second, runs) - bound).max()))
    return worst


def excess_of_pair(seed, count):
    """The same for the pair that composes with other releases, both directions at once."""
    worst = -math.inf
    for p, q, pair, back, runs, _ in mechanisms(seed, count):
        whole = tuner_pair(Tuner(pair, runs), Tuner(back, runs), 200)
        for first, second, bound in ((p, q, whole.remove), (q, p, whole.add)):
            gap = of_any_order(first, second, runs) - bound.delta(np.array(POINTS))
            worst = max(worst, float(gap.max()))
    return worst


def excess_of_threshold(seed, count):
    """The same for the first run past a known threshold."""
    worst = -math.inf
    for p, q, pair, back, _, stop in mechanisms(seed, count):
        for first, second, base in ((p, q, pair), (q, p, back)):
            bound = np.array([Threshold(base, stop).delta(e) for e in POINTS])
            worst = max(worst, float((of_any_threshold(first, second, stop) - bound).max()))
    return worst


ATTACKS = {"envelope": excess_of_envelope, "pair": excess_of_pair, "threshold": excess_of_threshold}


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("bound", ATTACKS)
def test_no_small_mechanism_costs_more_than_its_bound(bound, batch):
    count = EACH if bound != "pair" else PAIRS
    excess = ATTACKS[bound](100 + batch, count)
    logging.getLogger(__name__).info("%s: %d mechanisms, excess %.1e", bound, count, excess)
    assert excess <= 1e-9


real_vertices, real_support, real_table = Tuner.vertices.func, Tuner.support, Table.delta
real_init, real_profile = Threshold.__init__, Tuner.profile


def lower_curve(self):
    level, _, slope = real_vertices(self)
    return level, np.append(level[:-1], 1.0), slope


def sooner(self, base, stop):
    real_init(self, base, min(3.0 * stop, 1.0))


def q_for_p(self, base, stop):
    real_init(self, base, stop)
    self._pass_p = np.minimum(self._pass_p, self._pass_q)


def without_infinity(self, size):
    lost = Tuner(replace(self.base, infinite=0.0), self.runs)
    return real_profile(lost, size)


FEWEST = {"envelope": 13, "pair": 6, "threshold": 60}
MUTANTS = {
    "no test gains anything": (Tuner, "vertices", property(lower_curve), "envelope"),
    "outcomes pay a fifth less": (Tuner, "support", lambda self, z: 0.8 * real_support(self, z), "envelope"),
    "nothing ran shows nothing": (RunLaw, "zero_probability", 0.0, "envelope"),
    "twice what Q has is taken off": (
        dp.best_of_k, "tangents",
        lambda value, slope, points: (2.0 * value(points[:-1]), 2.0 * value(points[1:])), "envelope",
    ),
    "a profile is read too far right": (
        Table, "delta", lambda self, e: real_table(self, np.asarray(e) + 0.3), "pair"
    ),
    "what shows the record is left out": (Tuner, "profile", without_infinity, "pair"),
    "chords between a few bounds, a point too low": (
        dp.pairs, "under_chords",
        lambda values, places, lower, step: np.append(values[1:], values[-1]), "pair",
    ),
    "it gives up three times as often": (Threshold, "__init__", sooner, "threshold"),
    "passing is as likely with the record": (Threshold, "__init__", q_for_p, "threshold"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_found(name, monkeypatch):
    owner, attribute, mutant, attack = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    assert ATTACKS[attack](100, FEWEST[attack]) > 1e-6


def test_one_direction_for_both_is_found(monkeypatch):
    real = tuner_pair
    monkeypatch.setitem(globals(), "tuner_pair", lambda a, b, size: real(a, a, size))
    assert excess_of_pair(100, 6) > 1e-6


def test_what_is_ranked_lowest_for_nothing_has_a_pair():
    """Where φ'(0) is nearly 0 a little is paid at level 0 however large ε is: once no pair was built."""
    selection = dp.PrivateSelection(dp.Gaussian(2.0), dp.Binomial(2, 2))
    answer = dp.epsilon(dp.Composed([selection, dp.Gaussian(5.0)]), 1e-5)
    assert answer.method == "pld"
    assert dp.lower_bound(selection, 1e-5) <= answer.epsilon < 3.2
