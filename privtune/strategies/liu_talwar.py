"""Random stopping, and selection up to a known score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from privtune.accounting import Event, RunLaw, ThresholdSelection
from privtune.errors import InvalidInputError
from privtune.strategies._base import Outcome, Round
from privtune.strategies.context import PlanningContext
from privtune.strategies.laws import MeanRuns, law_of_runs, unused_price
from privtune.strategies.plan import Plan
from privtune.strategies.selection import Selection


@dataclass(frozen=True, kw_only=True)
class LiuTalwar(Selection):
    """Random stopping: after every run stop with probability γ, then release the best so far.

    With a known threshold the release is the first candidate whose score reaches it, or "nothing",
    and the round ends there: later candidates are not run, and would have no part in the release.
    That is cheaper than the best of all: 2ε in place of 3ε for a pure run. With a fewest or a most
    number of runs it is charged as the selection under the order that knows only "reached" and
    "not reached": given that some run reached the threshold, the first one and a uniformly drawn
    one have the same law. How many did run stays sealed, and the plan's expectations are those of a
    round that runs them all.

    Args:
        gamma: Probability of stopping after a run, in (0, 1]; or give ``mean_runs``.
        mean_runs: 1/γ; 10 unless either is given. ``auto``: the largest, up to 1000 (and to
            ``maximum``), with which the arm stays within its target while each run costs
            ``training_epsilon``.
        training_epsilon: What each run costs alone, at the study's δ; only with
            ``mean_runs: auto``.
        maximum: Hard cap on the number of runs.
        min_runs: Fewest runs: stopping begins after that many. The mean is then
            ``min_runs − 1 + 1/gamma``.
        threshold: A score known in advance without looking at the data.

    References:
        Liu and Talwar 2019, arXiv 1811.07971, Algorithm 1 (threshold) and Section 4 (best).

    Example:
        >>> from privtune.accounting import Gaussian
        >>> best, first = LiuTalwar(gamma=0.1), LiuTalwar(gamma=0.1, threshold=0.9)
        >>> round(best.run_law().expected_runs)  # 1 / γ
        10
        >>> [s.whole(Gaussian(8.0), s.run_law()).type for s in (best, first)]
        ['private_selection', 'threshold_selection']
    """

    name: ClassVar[str] = "liu-talwar"
    summary: ClassVar[str] = "private selection by random stopping, or up to a known score"

    arm: str = "liu-talwar"
    gamma: float | None = None
    mean_runs: MeanRuns = None
    training_epsilon: float | None = None
    maximum: int | None = None
    min_runs: int | None = None
    threshold: float | None = None

    def run_law(self) -> RunLaw:
        """Return the geometric law of the number of runs.

        Raises:
            InvalidInputError: If neither or both of ``gamma`` and ``mean_runs`` are given.
        """
        if self.training_epsilon is not None:
            raise unused_price(self.training_epsilon)
        if self.gamma is not None and self.mean_runs is not None:
            raise InvalidInputError("gamma", self.gamma, "and mean_runs say the same: give one")
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise InvalidInputError("gamma", self.gamma, "must lie in (0, 1]")
        mean = self.mean_runs
        if self.gamma is not None:
            mean = 1 / self.gamma + (0 if self.min_runs is None else self.min_runs - 1)
        return self._law(10.0 if mean is None else mean)

    def _law(self, mean: float | str) -> RunLaw:
        fields: dict[str, Any] = {"law": "geometric", "mean": mean}
        bounds = {"maximum": self.maximum, "minimum": self.min_runs}
        return law_of_runs(fields | {k: v for k, v in bounds.items() if v is not None})

    def whole(self, base: Event, law: RunLaw) -> Event:
        """Return what the selection costs; Algorithm 1 has a known threshold, and K is unbounded."""
        if self.threshold is None or law.cap is not None or law.sure_runs:
            return super().whole(base, law)
        return ThresholdSelection(base, 1.0 / law.expected_runs)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan a random stopping of at most ``epsilon`` as a whole. Touches no data."""
        details = {} if self.threshold is None else {"threshold": self.threshold}
        if self.mean_runs == "auto" and self.gamma is None:
            self.check(context)
            return self.plan_largest(
                context,
                self._law,
                least=float(self.min_runs or 1),
                training_epsilon=self.training_epsilon,
                epsilon=epsilon,
                details=details,
            )
        law = self.run_law()
        self.check(context)
        return self.plan_selection(context, law, epsilon=epsilon, details=details)

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Draw K, train K candidates, release the best, or the first that reaches the threshold."""
        if self.threshold is None:
            return super().run(plan, trials)
        # In the order of the rows: not in that of time, which differs from machine to machine.
        for result in trials.select(plan):
            if result.score is not None and result.score >= self.threshold:
                return Outcome(result)
        return Outcome(
            None, note=f"No run reached the score {self.threshold:g}: the release is nothing."
        )
