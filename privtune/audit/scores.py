"""Score functions of which a canary changes a selection the most, and what they make of a winner.

They are those of the explicit instance behind ``accounting.lower_bound``: outcomes of a training,
sorted by their likelihood ratio, are preferred in the order that a canary moves the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import stats

from privtune.accounting import Event, RunLaw
from privtune.accounting.instances import outcomes_of
from privtune.accounting.lower import Outcomes, Scores, worst_order

if TYPE_CHECKING:
    from privtune.audit.claims import Claim

Floats = npt.NDArray[np.float64]
_AIMS = (1e-3, 1e-2, 0.05, 0.2)  # δ at which scores pay most: what happens often is known best


@dataclass(frozen=True, eq=False)
class WorstScore:
    """A score of a training's likelihood ratio, and the ratio of what is then released.

    Args:
        ratios: Likelihood ratios of the outcomes, ascending.
        ranks: Their scores.
        released: Log-likelihood ratio of "the best has this outcome".
        nothing: Likewise of "nothing was released".
        law: The masses of what is released, "nothing" the last, from those of the outcomes.
    """

    ratios: Floats
    ranks: Floats
    released: Floats
    law: Callable[[Floats], Floats]
    nothing: float = 0.0

    def score(self, ratio: Floats) -> Floats:
        """Return the scores of trainings.

        Args:
            ratio: Their likelihood ratios.
        """
        return self.ranks[self._place(ratio)]

    def evidence(self, ratio: Floats) -> Floats:
        """Return what it tells that these trainings won.

        Args:
            ratio: Their likelihood ratios; NaN where nothing was released.
        """
        found = self.released[self._place(np.nan_to_num(ratio))]
        return np.where(np.isnan(ratio), self.nothing, found)

    @property
    def edges(self) -> Floats:
        """Where one outcome ends and the next begins."""
        return np.asarray(0.5 * (self.ratios[1:] + self.ratios[:-1]))

    def _place(self, ratio: Floats) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.edges, ratio)


def worst_score(base: Event, runs: RunLaw, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the score that an audit of so many rounds finds out most by.

    Args:
        base: What one run costs; releases of one kind after another.
        runs: The law of the number of runs.
        claim: What the selection is held against.
        rounds: Rounds on each side.

    Returns:
        Of the instances tried, the one with the largest bound that is to be expected.
    """
    outcomes = outcomes_of(base, claim.delta)

    def tried() -> Iterator[tuple[WorstScore, Outcomes]]:
        for flip in (False, True):
            for aim in (claim.delta, *_AIMS):
                one = outcomes.flipped() if flip else outcomes
                instance, order = worst_order(one, runs, aim, scores=Scores.RANKED, cut=False)
                p, q = (np.maximum(part, 1e-300) for part in instance.tuned(order))
                tuned = Outcomes(p, q).flipped() if flip else Outcomes(p, q)
                ratios = (-1.0 if flip else 1.0) * instance.losses[order]
                ranks = np.arange(len(order), dtype=np.float64)
                yield _sorted(ratios, ranks, np.log(tuned.p / tuned.q), runs), tuned

    return _best(tried(), claim, rounds)


def worst_threshold(base: Event, stop: float, *, claim: Claim, rounds: int) -> WorstScore:
    """Return the likewise best rule of which runs reach a known score: their score is 1, else 0.

    Args:
        base: What one run costs.
        stop: Probability with which every run that fails is the last.
        claim: What the selection is held against.
        rounds: Rounds on each side.
    """
    outcomes = outcomes_of(base, claim.delta)
    order = np.argsort(outcomes.losses)
    p, q, losses = outcomes.p[order], outcomes.q[order], outcomes.losses[order]

    def tried() -> Iterator[tuple[WorstScore, Outcomes]]:
        cuts = np.searchsorted(np.cumsum(q), np.linspace(0.0, 1.0, 12))
        tops = np.searchsorted(np.cumsum(p), 1.0 - np.geomspace(1e-3, 0.5, 12))
        for low in np.unique(cuts):
            for high in np.unique(tops):
                keep = np.ones(p.size)
                keep[min(low, high) : high] = 0.0

                def law(m: Floats, keep: Floats = keep) -> Floats:
                    passed, failed = keep * m, ((1.0 - keep) * m).sum()
                    whole = stop + (1.0 - stop) * passed.sum()
                    return np.asarray(np.append(passed, stop * failed) / whole)

                tuned = Outcomes(law(p), law(q))
                told = np.log(np.maximum(tuned.p, 1e-300) / np.maximum(tuned.q, 1e-300))
                yield WorstScore(losses, keep, told[:-1], law, float(told[-1])), tuned

    return _best(tried(), claim, rounds)


def _sorted(ratios: Floats, ranks: Floats, released: Floats, runs: RunLaw) -> WorstScore:
    order = np.argsort(ratios, kind="stable")
    places = np.argsort(ranks[order])  # of the outcomes, from worst to best score

    def law(masses: Floats) -> Floats:
        below = np.minimum(np.append(0.0, np.cumsum(masses[places])), 1.0)
        found = np.empty(len(masses) + 1)
        found[places] = np.diff(runs.pgf(below))
        found[-1] = runs.zero_probability
        return found

    return WorstScore(ratios[order], ranks[order], released[order], law)


def _best(tried: Iterator[tuple[WorstScore, Outcomes]], claim: Claim, rounds: int) -> WorstScore:
    """Return the instance with the largest margin that so many rounds are expected to show."""
    best, most = None, -np.inf
    for score, tuned in tried:
        for flip in (False, True):
            ends = tuned.flipped() if flip else tuned
            order = np.argsort(-(np.log(ends.p + 1e-300) - np.log(ends.q + 1e-300)))
            tpr, fpr = np.cumsum(ends.p[order]), np.cumsum(ends.q[order])
            some = np.unique(
                np.searchsorted(tpr, np.linspace(0.002, 0.998, 200)).clip(0, len(tpr) - 1)
            )
            wide = stats.norm.ppf(0.975) / np.sqrt(rounds)
            upper, lower = (
                rate[some] + sign * wide * np.sqrt(rate[some] * np.maximum(1.0 - rate[some], 0.0))
                for rate, sign in ((fpr, 1.0), (tpr, -1.0))
            )
            found = float(claim.margin(upper + 1.0 / rounds, lower, 1.25).max())
            if found > most:
                best, most = score, found
    assert best is not None  # noqa: S101 (there are always some)
    return best
