"""A claim about one known mechanism: a selection by known scores, whose outcomes' law is computed."""

from __future__ import annotations

import math

import numpy as np
from scipy import fft, stats

from privtune.accounting import (
    Adjacency,
    Event,
    lower_bound,
    scale_noise,
)
from privtune.accounting.mechanisms.entry import UnknownEventError
from privtune.accounting.registry import looks
from privtune.audit.claims import Claim, Floats
from privtune.audit.scores import WorstScore

_SLOPES = 200  # at which the trade-off curve is held against the rates
_STEEP = 12.0  # ε of the steepest
_CELLS = 4000  # of one release
_REACH = 11.0  # standard deviations of it
_FINE = 200.0  # lattice points in a standard deviation of all releases together


class InstanceClaim(Claim):
    """That a selection is the explicit instance: these scores, this law of runs, this noise or more.

    A profile holds for every score function; the audit's is known, and what a round then releases has
    a law that can be computed. Noise enters by the trainings alone, whose likelihood ratio is a sum
    over their steps: exact without sampling, else on a lattice of a two hundredth of its deviation.

    Claims are searched in the order of their noise, so less noise must tell more. That is so of the best
    of a round; of the first above a threshold it is not: with little noise nobody may reach it, on either
    side, and "nothing" tells nothing.

    Args:
        event: What is charged.
        delta: At which δ its ε is asked for.
        base: What one training costs.
        score: The audit's, of the trainings' log-likelihood ratio.
    """

    def __init__(self, event: Event, delta: float, *, base: Event, score: WorstScore) -> None:
        super().__init__(event, delta, Adjacency.ADD_REMOVE)
        self._steps = _steps(base) or []
        self._edges, self._law = score.edges, score.law
        self._known: dict[float, tuple[Floats, Floats]] = {}

    @staticmethod
    def fits(base: Event) -> bool:
        """Say whether the law of a training's likelihood ratio is computed here."""
        return _steps(base) is not None

    def best_test(self, runs: int, risk: float) -> tuple[float, float]:
        """See ``Claim``: of what is released, by its likelihood ratio.

        Args:
            runs: On each side.
            risk: Of the test.
        """
        p, q = (np.maximum(self._law(masses), 1e-300) for masses in self._bins(1.0))
        told = np.log(p / q)
        order = np.argsort(-told)
        tpr, fpr = np.cumsum(p[order]), np.cumsum(q[order])
        rates = np.linspace(0.005, 0.995, _SLOPES)
        some = np.unique(np.searchsorted(tpr, rates).clip(0, len(p) - 2))
        cuts = 0.5 * (told[order][some] + told[order][some + 1])
        return self._best_of(
            cuts, fpr[some].clip(0.0, 1.0), tpr[some].clip(0.0, 1.0), runs=runs, risk=risk
        )

    def _epsilon(self, factor: float) -> float:
        return lower_bound(scale_noise(self.event, factor), self.delta, adjacency=self.adjacency)

    def _profile(self, factor: float) -> tuple[Floats, Floats]:
        if factor not in self._known:
            p, q = (self._law(masses) for masses in self._bins(factor))
            # Lines above the whole curve: of slopes below 1, too, as what is released has no mirror.
            epsilons = np.linspace(-_STEEP, _STEEP, _SLOPES)
            deltas = [np.maximum(p - math.exp(e) * q, 0.0).sum() for e in epsilons]
            self._known[factor] = epsilons, np.array(deltas)
        return self._known[factor]

    def _bins(self, factor: float) -> list[Floats]:
        """Return the masses of the bins with the canary and without it."""
        [deviation] = np.sqrt([sum(t * count for _, t, count in self._steps)])
        width = factor * deviation / _FINE
        both = [_laws(rate, t, factor, width) for rate, t, _ in self._steps]
        counts = [count for *_, count in self._steps]
        lowest = sum(first * count for (first, _), count in zip(both, counts, strict=True))
        size = 1 + sum(
            (masses.shape[1] - 1) * n for (_, masses), n in zip(both, counts, strict=True)
        )
        room = fft.next_fast_len(size, real=True)
        total = np.ones((2, room // 2 + 1), dtype=complex)
        for (_, masses), count in zip(both, counts, strict=True):
            total *= fft.rfft(masses, room, axis=1) ** count
        masses = np.maximum(fft.irfft(total, room, axis=1)[:, :size], 0.0)
        ends = (lowest + np.arange(size + 1) - 0.5) * width
        below = np.pad(
            np.cumsum(masses / masses.sum(axis=1, keepdims=True), axis=1), ((0, 0), (1, 0))
        )
        return [
            np.diff(np.concatenate([[0.0], np.interp(self._edges, ends, side), [1.0]]))
            for side in below
        ]


def _steps(base: Event) -> list[tuple[float, float, int]] | None:
    """Return rate, precision and number of the releases of a training; None where some are no Gaussian."""
    try:
        found = looks(base)
    except UnknownEventError:
        return None
    if any(kind != "gaussian" for _, atoms in found for kind, _ in atoms):
        return None
    return [
        (rate, math.fsum(noise**-2.0 for _, noise in atoms), count)
        for (rate, atoms), count in found.items()
    ]


def _laws(rate: float, precision: float, factor: float, width: float) -> tuple[int, Floats]:
    """Return the law of one step's log-likelihood ratio, as the plan has it, at other noise.

    A value's mass goes to the two lattice points beside it, so that means stay what they are.
    """
    deviation = factor * math.sqrt(precision)
    edges = np.linspace(
        -precision / 2 - _REACH * deviation, precision / 2 + _REACH * deviation, _CELLS
    )
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    out, there = (
        np.diff(stats.norm.cdf(ends, sign * precision / 2, deviation)) for sign in (-1.0, 1.0)
    )
    middles = np.concatenate([edges[:1], 0.5 * (edges[1:] + edges[:-1]), edges[-1:]])
    missed = math.log1p(-rate) if rate < 1.0 else -math.inf
    places = np.logaddexp(missed, math.log(rate) + middles) / width
    low = np.floor(places).astype(np.int64)
    over = places - low
    first = int(low[0])
    masses = np.zeros((2, int(low[-1]) - first + 2))
    for side, mass in enumerate(((1.0 - rate) * out + rate * there, out)):
        np.add.at(masses[side], low - first, mass * (1.0 - over))
        np.add.at(masses[side], low - first + 1, mass * over)
    return first, masses
