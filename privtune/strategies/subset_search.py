"""The strategy that shows every trial of a search on a part of the data, and then trains once.

A record is in the part with a public probability, so trials that are all charged to it cost little, and the
last training keeps most of ε. How the noise is split between trials and last training is decided here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import privtune.accounting as acc
from privtune.accounting import delta as account_delta
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.numbers import ceil_to, is_number, show_epsilon
from privtune.strategies.arms import SearchThenFinal, check_given, meet
from privtune.strategies.context import PlanningContext
from privtune.strategies.everything import STARTUP_TRIALS, Everything
from privtune.strategies.in_run import budgeted, method_class, require_suited
from privtune.strategies.plan import SEALED_STEPS, Plan, SearchPlan, TrainingPlan
from privtune.strategies.release import Ending
from privtune.strategies.requests import NamedTraining, StrategyRun
from privtune.strategies.searching import CHANGING
from privtune.strategies.strategy import Needs, Round, StrategyError
from privtune.strategies.tuning import SCALE, check_subset, rule_of, warn_of_few
from privtune.training.mechanism.schedule import Schedule

FINAL_NOISE = 1.1
"""The most noise of the final training over that of one training at the same ε, where the plan decides."""

_SEARCHED = FINAL_NOISE / 1.004  # the calibration of the whole moves the noise a little
_LEAST_RATIO = 0.25
_RATIO_STEP = 1.02
_RATIOS = 211  # so that the largest ratio is 16


@dataclass(frozen=True, kw_only=True)
class SubsetSearch(Everything):
    """Search by shown trials on a Poisson subset of the data, then train once with the best candidate.

    Every trial is charged to the records of the subset, and a record is in it with probability ``rate``. So
    the number of trials is public, any of Optuna's samplers may learn from one trial for the next, and all
    trials may be seen.

    Args:
        trials: Trials of the search; public, and each is charged.
        variant: 1 trains the final model on the records that were not searched on, 2 on all.
        rate: Probability that a record is searched on, in (0, 1).
        trial_noise: Noise multiplier of a trial over that of the final training, above 0. Unless given
            the least with which the final training has at most 1.1 times the noise of one training at
            this ε.
        trial_epochs: Passes of a trial over the subset; the study's unless given.
        startup_trials: Trials that ``tpe`` and ``gp`` draw at random before they learn from scores, at
            least 1; unless given a third of the trials, and Optuna's 10 at most. On digits, 5 of ten
            trials and all of them at random were each 2.3 ± 2.2 points (one standard error) better
            than 3, which shows no difference.
        extrapolation: As for ``subsampled-tuning``: ``scale-learning-rate`` (a candidate of rate η is
            tried on m of n records at η·m/n), ``keep``, or ``auto``.

    References:
        Koskela and Kulkarni 2023, arXiv 2301.11989, Theorem 3, whose tuning may be any mechanism: here
        the adaptive composition of all trials.

    Example:
        >>> strategy = SubsetSearch(trials=3, parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(study.spec.planning_context(), epsilon=4.0)
        >>> plan.search.trials, plan.is_sealed, plan.final
        (3, False, True)
        >>> plan.details["final_noise_ratio"] <= 1.1
        True
    """

    name: ClassVar[str] = "subset-search"
    summary: ClassVar[str] = (
        "shown trials on a random part of the data, then one training; any sampler"
    )
    needs: ClassVar[Needs] = Needs(
        score=True,
        parameters={"learning_rate": ("extrapolation", SCALE)},
    )

    arm: str = "subset-search"
    variant: int = 2
    rate: float = 0.3
    trial_noise: float | None = None
    trial_epochs: float | None = None
    startup_trials: int | None = None
    extrapolation: str = "auto"

    def __post_init__(self) -> None:
        rule = rule_of(self.extrapolation, self.method)
        object.__setattr__(self, "extrapolation", rule)

    def _check_options(self, context: PlanningContext) -> None:
        """Refuse options outside their ranges, and a space that changes what a candidate costs."""
        super()._check_options(context)
        check_subset(variant=self.variant, rate=self.rate, extrapolation=self.extrapolation)
        for name in ("trial_noise", "trial_epochs"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0.0):
                raise InvalidInputError(name, value, "must be finite and above 0")
        if self.startup_trials is not None and self.startup_trials < 1:
            allowed = "must be a whole number of at least 1"
            raise InvalidInputError("startup_trials", self.startup_trials, allowed)
        changing = [name for name in CHANGING if name in context.space]
        if changing:
            raise StrategyError(
                f"Arm {self.arm!r} searches {', '.join(changing)}, which changes what a candidate "
                "costs, but all of its trials cost the same. Take it out of the space, or use "
                "subsampled-tuning."
            )

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan all trials and the final training at ``epsilon`` together, without touching data."""
        self._check_options(context)
        require_suited(self.arm, method_class(self.method), self.options, context)
        one = self._one_training(context, epsilon)
        trained = self._split(context, one, epsilon)

        # A validation record is in no subset: it meets every trial's score, and no training.
        cost = partial(acc.Repeated, self.trials)
        trained, score, event = meet(trained, self._event, cost, context=context, epsilon=epsilon)
        final = trained.final
        trial = trained.search.trainings[0]
        details = {
            "sampler": self.sampler,
            "batch": self.batch,
            "liar": self._is_liar(context),
            "startup_trials": self.startup_trials or min(STARTUP_TRIALS, max(1, self.trials // 3)),
            "variant": self.variant,
            "extrapolation": self.extrapolation,
            **_facts(one, trial, final, context),
        }
        details["advice"] = _words(details, trial.schedule.records)
        if self.extrapolation == SCALE:
            factor = trial.schedule.records / final.schedule.records
            trial = replace(trial, rate_factor=factor)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=final,
            params=dict(self.parameters),
            score=score,
            released=(
                "every trial: model, hyperparameters, noised score",
                "the number of trials",
                "the final model",
                "its hyperparameters",
            ),
            sealed=(*SEALED_STEPS, "which records were searched on"),
            search=SearchPlan((trial,), trials=self.trials),
            rate=self.rate,
            details=details,
        )

    def _one_training(self, context: PlanningContext, epsilon: float) -> TrainingPlan:
        """Return the final training as it would be if nothing were searched: alone at ``epsilon``.

        Args:
            context: Public facts.
            epsilon: Target of the whole arm.

        Returns:
            The training, on the records that the variant leaves to it: all, or the rest.
        """
        schedule = context.schedule
        part = "all"
        if self.variant == 1:
            subset_records = self._subset_records(schedule)
            schedule = replace(schedule, records=max(1, schedule.records - subset_records))
            part = "rest"
        method = budgeted(context, self.method, self.options, epsilon=epsilon)
        return TrainingPlan(schedule, method, part)

    def _subset_records(self, schedule: Schedule) -> int:
        """Return the expected number of records of the subset."""
        return max(1, round(self.rate * schedule.records))

    def _split(
        self,
        context: PlanningContext,
        one: TrainingPlan,
        epsilon: float,
    ) -> SearchThenFinal:
        """Return trials and final training, whose noise has the ratio that was given or that is the best.

        The best ratio is the least, of a grid in steps of 2%, with which all together meet ``epsilon`` while
        the final training has at most `FINAL_NOISE` times the noise of ``one``. Where no ratio of the grid
        leaves it that, the largest is taken, and the calibration of the whole gives all more noise.

        Args:
            context: Public facts.
            one: The final training alone at ``epsilon``.
            epsilon: Target of the whole arm.
        """
        schedule = context.schedule
        steps = schedule.steps
        if self.trial_epochs is not None:
            # A quotient that rounding lifts just above a whole number is that number of steps.
            steps = max(1, math.ceil(self.trial_epochs / schedule.sample_rate - 1e-9))
        records = self._subset_records(schedule)
        trial_schedule = replace(schedule, records=records, steps=steps)
        trial = replace(one, schedule=trial_schedule, part="subset")
        final = one.scaled(_SEARCHED)

        def split_at(ratio: float) -> SearchThenFinal:
            search = SearchPlan((trial.scaled(_SEARCHED * ratio),))
            return SearchThenFinal(search, final)

        def fits(place: int) -> bool:
            event = self._event(split_at(_ratio(place)))
            spent = account_delta(event, epsilon, adjacency=context.adjacency)
            return spent.delta <= context.delta

        if self.trial_noise is not None:
            return split_at(self.trial_noise)
        place = bisect_left(range(_RATIOS - 1), True, key=fits)
        return split_at(_ratio(place))

    def _event(self, trained: SearchThenFinal) -> acc.Event:
        """Return the joint event of all trials on the subset and of the final training.

        The trials are composed first and sampled once: a record is in the subset of all trials or of none.
        """
        trials = acc.Repeated(self.trials, trained.search.trainings[0].event)
        return acc.SubsampledTuning(self.variant, self.rate, trials, trained.final.event)

    def run(self, plan: Plan, trials: Round) -> StrategyRun:
        """Draw, train and score every trial on the subset, then train once with the best candidate."""
        search = yield from super().run(plan, trials)
        best = search.result
        if best is None or best.ended is Ending.PRUNED or best.score == -math.inf:
            note = "No candidate reached a finite score; nothing more was trained."
            return replace(search, note=note)
        check_given(self, best.params)  # a function may suggest it to some candidates alone
        (result,) = yield NamedTraining("final", plan.training, best.params)
        # The score of the best trial was paid for; the final model has none of its own.
        final = replace(result, score=best.score, estimate=best.estimate)
        return replace(search, result=final)


def _ratio(place: int) -> float:
    """Return a ratio of noise on the grid that is searched; a fixed one, so that platforms agree on it."""
    return float(_LEAST_RATIO * _RATIO_STEP**place)


def _noise(training: TrainingPlan) -> float:
    """Return the first noise multiplier of a training; all of them are scaled together."""
    for name, value in training.to_dict()["method"].items():
        if name.endswith("noise_multiplier") and value is not None:
            return float(value)
    return math.nan


def _facts(
    one: TrainingPlan,
    trial: TrainingPlan,
    final: TrainingPlan,
    context: PlanningContext,
) -> dict[str, float]:
    """Return how much noise trials and final training have, and what one trial costs its records.

    Args:
        one: The final training alone at the arm's ε.
        trial: A trial as it is planned.
        final: The final training as it is planned.
        context: Public facts: δ and adjacency.

    Returns:
        By name, rounded up to four decimal places: the noise of the final training over that of ``one``; the
        noise multiplier of a trial over that of the final training; likewise of their mean gradients, whose
        noise is divided by the expected batch size; and ε of a trial for a record of the subset.
    """
    trial_ratio = _noise(trial) / _noise(final)
    fewer = final.schedule.expected_batch_size / trial.schedule.expected_batch_size
    alone = account(trial.event, context.delta, adjacency=context.adjacency)
    ratios = {
        "final_noise_ratio": _noise(final) / _noise(one),
        "trial_noise_ratio": trial_ratio,
        "trial_gradient_noise_ratio": trial_ratio * fewer,
        "trial_epsilon": alone.epsilon,
    }
    return {name: ceil_to(value, 4) for name, value in ratios.items()}


def _words(details: Mapping[str, Any], subset_records: int) -> str:
    """Return in words what the search takes from the final training, and what trials are worth.

    Args:
        details: Those of the plan, with the numbers of `_facts`.
        subset_records: Expected number of records of the subset.
    """
    final = details["final_noise_ratio"]
    sentences = [
        f"The final training has {final:.2f} times the noise of one training at this ε; a trial's mean "
        f"gradient, of about {subset_records:,} records, has "
        f"{details['trial_gradient_noise_ratio']:.1f} times the noise of the final training's. "
        f"Each trial costs a record of that part ε = {show_epsilon(details['trial_epsilon'], 2)}."
    ]
    if final > FINAL_NOISE:
        sentences.append("Fewer trials, a smaller rate or a larger trial_noise leave it less.")
    warning = warn_of_few(subset_records)
    if warning:
        sentences.append(warning)
    return " ".join(sentences)
