"""The best order of a selection's outcomes that is found: the instance below every valid bound."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf
from privtune.accounting.runs import RunLaw
from privtune.accounting.selection import Tuner

Floats = NDArray[np.float64]
Kinds = NDArray[np.bool_]
ROUNDING = 1e-6  # of tuned masses, relative
_LARGE = 4e-10  # mass, for each run, from which a difference of φ is right to that
_SCORES = 512  # that an outcome which always happens would have
_SPREAD = 0.4  # by how much ε lies nearer to an outcome's loss
_CUTS = 128  # of what pays and of what does not, twice
_STARTS = (0.5, 0.2, 0.05)  # P-mass of what is to pay
_TURNS, _ROUNDS = 5, 6
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_HALVINGS, _NARROW = 60, 1e-12
_SUMMED = 200  # runs of a capped law whose φ, a sum over all of them, is asked for at every cut


class Instance:
    """Attainable δ of a private selection over one direction of a base pair.

    Args:
        base: One direction of the pair of a single run.
        runs: The law of the number of runs.
        q: The masses of the outcomes without the record; by default what their losses say.
        cut: Whether scores may be random: what is often is cut into outcomes of one loss, each with a
            score of its own. Else a score hangs on the loss alone.
    """

    def __init__(
        self, base: LossPmf, runs: RunLaw, q: Floats | None = None, *, cut: bool = True
    ) -> None:
        self.runs = runs
        keep = base.masses > 0.0
        self.losses = base.losses[keep][::-1]
        self.p = base.masses[keep][::-1]
        with np.errstate(over="ignore"):
            self.q = np.exp(np.log(self.p) - self.losses) if q is None else q[keep][::-1]
        if cut:
            # What has no mass without the record pays wherever it stands; its loss is no lattice point.
            self.losses = np.where(self.q > 0.0, self.losses, np.inf)
            often = np.maximum(np.maximum(self.p, self.q) * _SCORES, 1.0)
            pieces = np.ceil(often).astype(np.int64)
            self.losses = np.repeat(self.losses, pieces)
            self.p, self.q = (np.repeat(m / pieces, pieces) for m in (self.p, self.q))
        self.infinite = base.infinite
        self.tuner = Tuner(base, runs)
        # What rounding took away or added is given to an atom at the end: a legal pair again.
        self.levels = np.cumsum(self.q) - 0.5 * self.q

    def order(self, epsilon: float, threshold: float) -> NDArray[np.int64]:
        """Return the atoms from worst to best score; losses above `threshold` are moved."""
        key = np.minimum(self.levels, 1.0)
        moved = self.losses > threshold
        z = np.exp(np.minimum(epsilon - self.losses[moved], 700.0))
        key[moved] = self.tuner.best_level(z)
        return np.argsort(key, kind="stable")

    def spread(self, epsilon: float) -> NDArray[np.int64]:
        """Return the atoms from worst to best score, those of larger loss for a larger ε.

        What follows a selection asks about many ε at once: an outcome pays where the rest of the losses
        takes the sum above the ε of the question.
        """
        z = np.exp(np.minimum(_SPREAD * (epsilon - self.losses), 700.0))
        pays = self.tuner.support(z) > 0.0
        key = np.where(pays, self.tuner.best_level(z), np.minimum(self.levels, 1.0))
        return np.argsort(key, kind="stable")

    def shuffled(self, epsilon: float, pays: Kinds) -> NDArray[np.int64]:
        """Return the best order, from worst to best score, if these atoms are to pay.

        What pays is ranked by rising loss and what does not by falling loss, which is best for any
        choice of what pays; how the two are shuffled is found by dynamic programming.
        """
        up, down = np.flatnonzero(pays)[::-1], np.flatnonzero(~pays)
        (up_ends, up_p, up_q), (down_ends, down_p, down_q) = self._pieces(up), self._pieces(down)
        # What has been paid depends on how much of either kind is below, not on its order.
        below_p = np.minimum(down_p[:, None] + up_p, 1.0)
        below_q = np.minimum(down_q[:, None] + up_q, 1.0)
        paid = self.runs.pgf(below_p) - math.exp(min(epsilon, 700.0)) * self.runs.pgf(below_q)
        value, before = np.zeros(down_p.size), []
        for gain in np.diff(paid, axis=1).T:
            best = np.maximum.accumulate(value)
            places = np.where(value >= best, np.arange(value.size), 0)
            before.append(np.maximum.accumulate(places))
            value = best + gain
        place, key = int(np.argmax(value)), np.empty(self.p.size)
        key[down] = np.arange(down.size)
        for piece in reversed(range(len(before))):
            key[up[up_ends[piece] : up_ends[piece + 1]]] = down_ends[place] - 0.5
            place = int(before[piece][place])
        return np.lexsort((self.losses, key))

    def _pieces(self, atoms: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return where atoms are cut into pieces, and the masses up to each cut."""
        p = np.append(0.0, np.cumsum(self.p[atoms])) / (self.p.sum() + self.infinite)
        q = np.append(0.0, np.cumsum(self.q[atoms])) / self.q.sum()
        # Fine near the end, too: the best scores are those that φ' tells apart.
        whole = p + q
        marks = whole[-1] * np.append(
            np.linspace(0.0, 1.0, _CUTS), 1.0 - np.geomspace(1e-9, 1.0, _CUTS)
        )
        ends = np.unique(np.clip(np.searchsorted(whole, marks), 0, atoms.size))
        ends = np.unique(np.append(ends, [0, atoms.size]))
        return ends, p[ends], q[ends]

    def tuned(self, order: NDArray[np.int64], *, rough: bool = False) -> tuple[Floats, Floats]:
        """Return the masses of the tuned pair for one order of the atoms, on the safe side.

        The infinite atom of the base has the best score of all, which only helps. Differences of φ
        are exact for atoms of some size; with a cap they are integrals of φ'. Else φ' is convex: its
        mean over an atom is at least its value at the middle, and at most the mean of those at both
        ends. That is far off where atoms are wide, and then the safe side of a cost alone: what is
        chosen from once more needs masses that are right.

        Args:
            order: The atoms from worst to best score.
            rough: Whether the safe side of a cost is enough where the law has a cap.
        """
        p = self.p[order] / (self.p.sum() + self.infinite)
        q = self.q[order] / self.q.sum()
        below_p = np.minimum(np.concatenate([[0.0], np.cumsum(p)]), 1.0)
        below_q = np.minimum(np.concatenate([[0.0], np.cumsum(q)]), 1.0)
        slope = self.runs.pgf_derivative(below_q)
        gain_p = p * self.runs.pgf_derivative(0.5 * (below_p[1:] + below_p[:-1]))
        gain_q = q * 0.5 * (slope[1:] + slope[:-1])
        if self.runs.cap is None or not rough:
            enough = _LARGE * (1.0 + self.runs.expected_runs)
            exact_p, exact_q = self._gains(below_p), self._gains(below_q)
            gain_p = np.where(exact_p > enough, exact_p, gain_p)
            gain_q = np.where(exact_q > enough, exact_q, gain_q)
        return gain_p * (1.0 - ROUNDING), gain_q * (1.0 + ROUNDING)

    def _gains(self, ends: Floats) -> Floats:
        """Return how much φ rises from each end to the next."""
        if self.runs.cap is None:
            return np.diff(self.runs.pgf(ends))
        # By Gauss's rule on pieces across which φ'' moves by a factor of e at most: φ itself is a sum over
        # all numbers of runs.
        points, kept = ends, np.arange(ends.size)
        for _ in range(_HALVINGS):
            bend = np.log(np.maximum(self.runs.pgf_second_derivative(points), 1e-300))
            wide = (np.diff(bend) > 1.0) & (np.diff(points) > _NARROW * points[1:])
            if not wide.any():
                break
            middle = 0.5 * (points[:-1] + points[1:])[wide]
            kept = kept + np.append(0, np.cumsum(wide))[kept]
            points = np.insert(points, np.flatnonzero(wide) + 1, middle)
        half = 0.5 * np.diff(points)
        inside = (points[:-1] + half)[:, None] + half[:, None] * _NODES
        pieces = half * (self.runs.pgf_derivative(inside) @ _WEIGHTS)
        return np.asarray(np.add.reduceat(pieces, kept[:-1]))

    def best(self, epsilon: float) -> tuple[Floats, Floats]:
        """Return the tuned pair of the instance with the largest δ at this ε among those tried."""
        return self.tuned(self.best_order(epsilon))

    def best_order(
        self, epsilon: float, count: int = 12, *, shuffle: bool = True
    ) -> NDArray[np.int64]:
        """Return the order of the atoms, from worst to best score, with the largest δ of those."""
        z = np.exp(np.minimum(epsilon - self.losses, 700.0))
        pays = self.losses[self.tuner.support(z) > 0.0]
        lowest = float(pays[-1]) if pays.size else epsilon
        thresholds = (math.inf, *np.linspace(lowest, epsilon, count))
        tried = [self._tried(self.order(epsilon, float(t)), epsilon) for t in thresholds]
        best = max(tried, key=lambda found: found[0])
        starts: list[Kinds] = []
        if shuffle and (self.runs.cap is None or self.runs.cap <= _SUMMED):
            starts = [best[2], *(np.cumsum(self.p) <= share for share in _STARTS)]
        for start in starts:
            value, paying = 0.0, start
            for _ in range(_TURNS):
                if not paying.any() or paying.all():
                    break
                found = self._tried(self.shuffled(epsilon, paying), epsilon)
                best = max(best, found, key=lambda one: one[0])
                if found[0] <= value * (1.0 + 1e-3):
                    break
                value, paying = found[0], found[2]
        return best[1]

    def _tried(
        self, order: NDArray[np.int64], epsilon: float
    ) -> tuple[float, NDArray[np.int64], Kinds]:
        """Return δ of an order, the order, and which atoms pay."""
        p, q = self.tuned(order, rough=True)
        gain = p - math.exp(min(epsilon, 700.0)) * q
        pays = np.zeros(p.size, dtype=np.bool_)
        pays[order] = gain > 0.0
        return float(np.maximum(gain, 0.0).sum()), order, pays

    def delta(self, epsilon: float) -> float:
        """Return the largest δ at this ε among the instances that are tried."""
        return _delta(self.best(epsilon), epsilon)

    def epsilon(self, delta: float) -> float:
        """Return an ε at which some instance still has a δ above the target, nearly the largest."""
        point, found = self.tuner.epsilon(delta), 0.0
        highest = point  # the envelope is an upper bound
        if not math.isfinite(point):
            return 0.0
        for _ in range(_ROUNDS):
            pair = self.best(point)
            low, high = 0.0, highest
            if _delta(pair, low) <= delta:
                break
            while high - low > 1e-5 * max(low, 1e-3):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if _delta(pair, middle) > delta else (low, middle)
            # The instance that is best there costs at least as much.
            settled = low <= found * (1.0 + 1e-4)
            found, point = max(found, low), low
            if settled:
                break
        return found


def _delta(pair: tuple[Floats, Floats], epsilon: float) -> float:
    p, q = pair
    return float(np.maximum(p - math.exp(min(epsilon, 700.0)) * q, 0.0).sum())
