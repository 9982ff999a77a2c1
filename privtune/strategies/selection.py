"""Private selection: run a secret number of i.i.d. candidates, release the best alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from privtune.accounting import Event, Parallel, PrivateSelection, RunLaw, ThresholdSelection
from privtune.accounting import epsilon as account
from privtune.accounting.checks import check_number
from privtune.errors import InvalidInputError
from privtune.strategies import laws
from privtune.strategies.arms import factor_for, require_independent
from privtune.strategies.context import PlanningContext
from privtune.strategies.plan import SEALED_TRIALS, Plan, SearchPlan
from privtune.strategies.release import Outcome
from privtune.strategies.requests import SealedRound, StrategyRun
from privtune.strategies.score_plan import ScorePlan
from privtune.strategies.searching import IndependentDrawing, check_listed, listed_plan
from privtune.strategies.strategy import Needs, Round, StrategyError, best_of
from privtune.training.mechanism.metrics import label


class NoRunFitsError(StrategyError):
    """Not even the smallest mean number of runs fits the arm's target ε.

    Args:
        message: One sentence.
        smallest: The event of the arm with a mean of 1 run, its least.
        target: The target ε that was too small.
    """

    def __init__(self, message: str, *, smallest: Event, target: float) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.target = target


@dataclass(frozen=True, kw_only=True)
class Selection(IndependentDrawing):
    """Base class of private selections: a sealed round, of which the best trial is released.

    Args:
        candidates: What a trial may be, in place of ``method``: a list of ``{method: ...}`` with
            ``parameters``, ``options`` and a ``name`` where wanted. Each trial draws one entry,
            uniformly, and from the space what its method needs besides. All are trained at the same
            ε; their pointwise worst is charged.
    """

    needs: ClassVar[Needs] = Needs(score=True, independent=True)

    candidates: Sequence[Mapping[str, Any]] = ()

    def _check(self, context: PlanningContext) -> None:
        """Refuse samplers, pruners and candidates that a private selection cannot have."""
        if not self.candidates:
            super()._check(context)
            return
        superfluous = [
            name for name in ("parameters", "options", "guarantee") if getattr(self, name)
        ]
        if superfluous:
            raise InvalidInputError(
                "candidates",
                list(self.candidates),
                f"have their own: leave out {', '.join(superfluous)}",
            )
        require_independent(self.arm, sampler=self.sampler, pruner=self.pruner)
        check_listed(self.arm, self.candidates, context)

    def _search(
        self,
        context: PlanningContext,
        *,
        epsilon: float,
        part: str = "all",
        final_records: int | None = None,
    ) -> SearchPlan:
        """Plan the trainings of candidates, each at about ``epsilon``, from the list of methods if any."""
        if self.candidates:
            return listed_plan(context, self.candidates, epsilon=epsilon, part=part)
        return super()._search(context, epsilon=epsilon, part=part, final_records=final_records)

    def _run_event(self, search: SearchPlan, score: ScorePlan) -> Event:
        """Return the event of one run: training and score in parallel, since their records are disjoint."""
        training = self._trial_event(search)
        if score.event is None:
            return training
        return Parallel((training, score.event))

    def _selection_event(self, base: Event, law: RunLaw) -> Event:
        """Return the event of the whole selection, over all its runs."""
        return PrivateSelection(base, law)

    def _law(self, mean: float) -> RunLaw:
        """Return the law of the number of runs with this mean."""
        raise NotImplementedError

    def _plan_selection(
        self,
        context: PlanningContext,
        law: RunLaw,
        *,
        epsilon: float,
        **details: object,
    ) -> Plan:
        """Plan a selection with a given law of its number of runs, at ``epsilon`` as a whole.

        A first guess for one run at half the target fixes the ratio of training to score noise; all noise
        is then scaled by one factor until the selection meets the target.
        """
        search = self._search(context, epsilon=epsilon / 2)
        score = context.plan_score(epsilon / 2)
        run_event = self._run_event(search, score)
        event = self._selection_event(run_event, law)
        scale = factor_for(event, context, epsilon)
        scaled_search = search.scaled(scale)
        scaled_score = score.scaled(scale)
        return self._plan(scaled_search, scaled_score, law, details)

    def _plan_largest(
        self,
        context: PlanningContext,
        training_epsilon: float | None,
        *,
        least: float,
        epsilon: float,
        **details: object,
    ) -> Plan:
        """Plan a selection with the largest mean number of runs that fits, each at a given ε.

        Args:
            context: Public facts.
            training_epsilon: What each run costs alone, at the study's δ; None where the user did not say.
            least: The smallest mean number of runs that the options allow.
            epsilon: Target of the selection.
            **details: What else the plan says.

        Raises:
            InvalidInputError: If there is no price.
            NoRunFitsError: If even the smallest mean is beyond the target.
        """
        if training_epsilon is None:
            raise InvalidInputError(
                "mean_runs",
                "auto",
                "needs training_epsilon, what each run costs alone",
                "Give it, or the mean number of runs, to which the noise is then fitted.",
            )
        price = check_number("training_epsilon", training_epsilon, above=0.0)
        terms: dict[str, Any] = {"delta": context.delta, "adjacency": context.adjacency}
        search = self._search(context, epsilon=price)
        score = context.plan_score(price)
        scale = factor_for(self._run_event(search, score), context, price)
        search = search.scaled(scale)
        score = score.scaled(scale)
        base = self._run_event(search, score)
        law = laws.largest_mean(
            base,
            self._law,
            selection=self._selection_event,
            least=least,
            epsilon=epsilon,
            **terms,
        )
        if law is None:
            smallest = self._selection_event(base, self._law(least))
            cost = account(smallest, **terms).epsilon
            fewest = "a single run" if least == 1.0 else f"{least:g} runs"
            raise NoRunFitsError(
                f"Arm {self.arm!r}: mean_runs: auto with training_epsilon = {price:g} costs "
                f"epsilon = {cost:.4g} at a mean of {fewest}, but "
                f"the arm's target is {epsilon:.4g}. Lower training_epsilon, or give the arm more of "
                "the budget (weight).",
                smallest=smallest,
                target=epsilon,
            )
        details["mean_runs_auto"] = {"training_epsilon": price, "mean_runs": law.expected_runs}
        return self._plan(search, score, law, details)

    def _plan(
        self,
        search: SearchPlan,
        score: ScorePlan,
        law: RunLaw,
        details: Mapping[str, object],
    ) -> Plan:
        """Return the plan of a selection from its search, score and law, with their noise unchanged."""
        score_words = "its noised validation score"
        if score.event is None:
            score_words = "its public score"
        run_event = self._run_event(search, score)
        return Plan(
            arm=self.arm,
            strategy=getattr(self, "name", "selection"),
            event=self._selection_event(run_event, law),
            training=search.trainings[0],
            params=dict(self.parameters),
            runs=law,
            score=score,
            released=("the best model", "its hyperparameters", score_words),
            sealed=SEALED_TRIALS,
            search=search,
            final=False,
            details=details,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Draw K, train K candidates, release the best."""
        results = yield SealedRound()
        if not results:
            return Outcome(None, note=laws.NOTHING)
        return Outcome(best_of(results, trials.streams))


@dataclass(frozen=True, kw_only=True)
class PapernotSteinke(laws.OptionsOfLaw, Selection):
    """Release the best of K i.i.d. candidates, with K drawn from a law and never shown.

    Args:
        law: ``geometric`` (the default: it gives the most for its price), ``logarithmic``,
            ``truncated_negative_binomial`` (with ``shape``), ``poisson`` (K = 0 possible: the
            release is then "nothing"), ``binomial`` (with ``n``), or ``auto``: the law and mean
            that find a top-10% candidate with probability ``power`` at the least noise.
        mean_runs: Mean number of runs; 10 unless given. ``auto``: the largest, up to 1000 (and to
            ``n`` and ``maximum``), with which the selection stays within the arm's target while
            each run costs ``training_epsilon``.
        min_runs: Fewest runs: that many candidates are drawn whatever the law says. It has a price,
            which the plan shows. Unless given 2, but for laws with K = 0, for means and caps below 6,
            and for ``law: auto``; 1 takes the law as it is.
        power: Only with ``law: auto``; 0.6 unless given.

    References:
        Papernot and Steinke 2022, arXiv 2110.03620; Liu and Talwar 2019, arXiv 1811.07971.

    Example:
        >>> law = PapernotSteinke(mean_runs=20).run_law()
        >>> round(law.expected_runs), law.quantile(0.99)  # the secret number of candidates
        (20, 87)
    """

    name: ClassVar[str] = "papernot-steinke"
    summary: ClassVar[str] = "private selection: the best of a secret number of random candidates"

    arm: str = "papernot-steinke"

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan a selection of at most ``epsilon`` as a whole, without touching data."""
        if self.law == "auto":
            return self._plan_with_best_law(context, epsilon=epsilon)
        # Options are refused before the space: a law that is none has nothing to do with the study.
        law = None if self.mean_runs == "auto" else self.run_law()
        self._check(context)
        if law is not None:
            return self._plan_selection(context, law, epsilon=epsilon)
        return self._plan_largest(
            context,
            self.training_epsilon,
            least=self._least_mean,
            epsilon=epsilon,
        )

    def _plan_with_best_law(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan a selection by the law that finds a top-10% candidate at the least noise."""
        names = ("mean_runs", "training_epsilon", "shape", "n", "maximum", "min_runs")
        superfluous = [name for name in names if getattr(self, name)]
        if superfluous:
            raise InvalidInputError(
                "law",
                "auto",
                f"chooses by itself, so leave out {', '.join(superfluous)}",
            )
        self._check(context)
        power = 0.6 if self.power is None else self.power
        search = self._search(context, epsilon=1.0)
        score = context.plan_score(1.0)
        law, trade = laws.choose_law(
            self._run_event(search, score),
            epsilon=epsilon,
            delta=context.delta,
            adjacency=context.adjacency,
            power=power,
        )
        auto = {"power": power, "trade": trade}
        return self._plan_selection(context, law, epsilon=epsilon, law_auto=auto)


def check_threshold(threshold: float, context: PlanningContext) -> None:
    """Refuse a threshold that every score or none would reach: the arm would be charged for nothing.

    Args:
        threshold: The known score, as scores are compared: of a loss, its negative.
        context: Public facts; the metric of its scoring says what a score can be.

    Raises:
        InvalidInputError: If the threshold is outside the metric's range, with what was meant where a sign or
            a percentage explains it.
    """
    value = check_number("threshold", threshold)
    metric = context.scoring.make(context.task.target_range)
    least, most = metric.range
    if metric.lower_is_better:
        # As scores are compared: more is better.
        least, most = -most, -least
    if least < value <= most:
        return
    name = label(context.scoring.metric or metric.name)
    best = f"{most:g}, the best score that {name} can give"
    worst = f"{least:g}, the worst score that {name} can give"
    outcome = f"is not above {worst}, so any candidate reaches it"
    if value > most:
        outcome = f"is above {best}, so no candidate reaches it"
    remedy = f"Scores by {name} go from {least:g} to {most:g}."
    if metric.lower_is_better:
        remedy += " Higher scores are better, so the score of a loss is its negative."
        if least < -value <= most:
            remedy += f" Write {-value:g}."
    elif metric.range == (0.0, 1.0) and 1.0 < value <= 100.0:
        remedy += f" {value:g} is no share: write {value / 100.0:g}."
    raise InvalidInputError("threshold", threshold, outcome, remedy)


@dataclass(frozen=True, kw_only=True)
class LiuTalwar(Selection):
    """Random stopping: after every run stop with probability γ, then release the best so far.

    With a known threshold the release is the first candidate whose score reaches it, or "nothing": 2ε
    in place of 3ε for a pure run. How many candidates did reach it stays sealed.

    Args:
        gamma: Probability of stopping after a run, in (0, 1]; or give ``mean_runs``.
        mean_runs: 1/γ; 10 unless either is given. ``auto``: the largest, up to 1000 (and to
            ``maximum``), with which the arm stays within its target while each run costs
            ``training_epsilon``.
        training_epsilon: What each run costs alone, at the study's δ; only with ``mean_runs: auto``.
        maximum: Hard cap on the number of runs.
        min_runs: Fewest runs: stopping begins after that many. The mean is then
            ``min_runs − 1 + 1/gamma``. Unless given 2, but for means and caps below 6, with ``gamma``
            (the mean is 1/γ) and with ``threshold`` (whose 2ε holds without a floor); 1 stops after
            any run.
        threshold: A score known in advance without looking at the data, within what the metric can be;
            a loss, where less is better, counts with a minus.

    References:
        Liu and Talwar 2019, arXiv 1811.07971, Algorithm 1 (threshold) and Section 4 (best).

    Example:
        >>> from privtune.accounting import Gaussian
        >>> best, first = LiuTalwar(gamma=0.1), LiuTalwar(gamma=0.1, threshold=0.9)
        >>> round(best.run_law().expected_runs)  # 1 / γ
        10
        >>> [s._selection_event(Gaussian(8.0), s.run_law()).type for s in (best, first)]
        ['private_selection', 'threshold_selection']
    """

    name: ClassVar[str] = "liu-talwar"
    summary: ClassVar[str] = "private selection that stops at random, or at a known score"

    arm: str = "liu-talwar"
    gamma: float | None = None
    mean_runs: laws.MeanRuns = None
    training_epsilon: float | None = None
    maximum: int | None = None
    min_runs: int | None = None
    threshold: float | None = None
    floor: ClassVar[int] = laws.OptionsOfLaw.floor

    def run_law(self) -> RunLaw:
        """Return the geometric law of the number of runs.

        Raises:
            InvalidInputError: If neither or both of ``gamma`` and ``mean_runs`` are given.
        """
        if self.training_epsilon is not None:
            raise laws.unused_price(self.training_epsilon)
        if self.gamma is not None and self.mean_runs is not None:
            raise InvalidInputError("gamma", self.gamma, "and mean_runs say the same: give one")
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise InvalidInputError("gamma", self.gamma, "must lie in (0, 1]")
        if self.gamma is not None:
            sure_runs = 0 if self.min_runs is None else self.min_runs - 1
            return self._law(1 / self.gamma + sure_runs)
        return self._law(10.0 if self.mean_runs is None else self.mean_runs)

    def _law(self, mean: float | str) -> RunLaw:
        """Return the geometric law with a given mean number of runs, and a minimum if there is room."""
        fields: dict[str, Any] = {"law": "geometric", "mean": mean}
        if self.maximum is not None:
            fields["maximum"] = self.maximum
        if self.min_runs is not None:
            fields["minimum"] = self.min_runs
        law = laws.law_of_runs(fields)
        if self.min_runs is None and self.gamma is None and self.threshold is None:
            return laws.with_floor(law, self.floor)
        return law

    def _selection_event(self, base: Event, law: RunLaw) -> Event:
        """Return the event of the selection: Algorithm 1's event for a known threshold and unbounded K.

        Bounded, it is charged as a selection by "reached" or not: given that some run reached it, the first
        that did and a uniformly drawn one have the same law.
        """
        if self.threshold is None or law.cap is not None or law.sure_runs:
            return super()._selection_event(base, law)
        return ThresholdSelection(base, 1.0 / law.expected_runs)

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan a random stopping of at most ``epsilon`` as a whole, without touching data."""
        details = {}
        if self.threshold is not None:
            check_threshold(self.threshold, context)
            details["threshold"] = self.threshold
        is_auto = self.mean_runs == "auto" and self.gamma is None
        law = None if is_auto else self.run_law()
        self._check(context)
        if law is not None:
            return self._plan_selection(context, law, epsilon=epsilon, **details)
        least = float(self.min_runs or 1)
        return self._plan_largest(
            context,
            self.training_epsilon,
            least=least,
            epsilon=epsilon,
            **details,
        )

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Draw K, train K candidates, release the best, or the first that reaches the threshold."""
        if self.threshold is None:
            return (yield from super().run(plan, trials))
        # In the order of the rows: not in that of time, which differs from machine to machine.
        results = yield SealedRound()
        for result in results:
            if result.score is not None and result.score >= self.threshold:
                return Outcome(result)
        note = f"No run reached the score {self.threshold:g}: the release is nothing."
        return Outcome(None, note=note)
