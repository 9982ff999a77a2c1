"""Linear scaling: two cheap searches at small ε, extrapolated to the final ε (Panda et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from privtune.accounting import Composed, Event, Repeated
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError
from privtune.strategies._base import Outcome, Round, StrategyError, best_of
from privtune.strategies._calibrate import SearchThenFinal, meet
from privtune.strategies._check_needs import require_independent
from privtune.strategies.context import PlanningContext
from privtune.strategies.in_run import budgeted
from privtune.strategies.needs import Needs
from privtune.strategies.plan import Plan
from privtune.strategies.searching import Searching
from privtune.strategies.trainings import SearchPlan, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Searching):
    """Find the best learning rate at two small ε, follow the line through them to the final ε.

    Every trial of both searches is charged, with the final training, by composition.

    Args:
        trials: Trials of each of the two searches.
        fractions: What one trial of the first and of the second search may cost, as fractions of
            what the final training costs.
        steps: How many steps it takes, as fractions, in (0, 1], of those of the final training. What
            is extrapolated is the paper's r = ηT, rate times steps: a trial of T' steps runs at
            T / T' times the rate that the space has drawn, which is that of the final training.
        sampler: ``random``: candidates are drawn independently of earlier scores.
        pruner: Refused: it compares a trial with others.

    References:
        Panda et al. 2024, arXiv 2212.04486, Algorithm 1 and Section 3 (r = ηT).

    Example:
        >>> context = study.spec.planning_context()

        >>> plan = LinearScaling(trials=2, parameters={"max_grad_norm": 1.0}).plan(context, epsilon=4.0)
        >>> [part.type for part in plan.event.events], plan.final
        (['composed', 'repeated'], True)
    """

    name: ClassVar[str] = "linear-scaling"
    summary: ClassVar[str] = "two cheap searches at small ε, extrapolated to the final ε"
    needs: ClassVar[Needs] = Needs(
        task=True, score=True, independent=True, parameters={"learning_rate": None}
    )

    arm: str = "linear-scaling"
    trials: int = 4
    fractions: tuple[float, float] = (0.1, 0.2)
    steps: tuple[float, float] = (1.0, 1.0)
    sampler: str = "random"
    pruner: str | None = None

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan both searches and the final training at ``epsilon`` together. Touches no data."""
        require_independent(self.arm, sampler=self.sampler, pruner=self.pruner)
        self.check_parameters(context)
        if list(context.space) != ["learning_rate"]:
            raise StrategyError(
                f"Arm {self.arm!r} extrapolates the learning rate alone, but the space holds "
                f"{', '.join(context.space) or 'nothing'}. Leave learning_rate in the space and "
                "give the others as parameters of the arm, in a study of its own if need be."
            )
        low, high = (float(fraction) for fraction in self.fractions)
        if not 0 < low < high < 1:
            raise InvalidInputError("fractions", self.fractions, "must be 0 < first < second < 1")
        if self.trials < 1:
            raise InvalidInputError("trials", self.trials, "must be a whole number of at least 1")
        shares = tuple(float(share) for share in self.steps)
        if not all(0 < share <= 1 for share in shares):
            raise InvalidInputError("steps", self.steps, "must be two fractions in (0, 1]")
        guess = epsilon / 2
        trainings = tuple(
            self._training(context, guess * fraction, share)
            for fraction, share in zip((low, high, 1.0), (*shares, 1.0), strict=True)
        )
        search = SearchPlan(trainings[:2], ({"search": 0}, {"search": 1}), 2 * self.trials)
        trained = SearchThenFinal(search, trainings[2])

        def cost(event: Event) -> Event:
            return Repeated(2 * self.trials, event)

        trained, score, event = meet(trained, self._event, cost, context=context, epsilon=epsilon)
        law = context.space["learning_rate"]
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=trained.final,
            params=dict(self.parameters),
            runs=None,
            score=score,
            released=("every trial of both searches", "the final model", "its hyperparameters"),
            sealed=("samples and their sizes", "un-noised gradients and losses"),
            search=trained.search,
            details={
                "epsilons": [
                    account(t.event, context.delta, adjacency=context.adjacency).epsilon
                    for t in (*trained.search.trainings, trained.final)
                ],
                "bounds": [float(getattr(law, "low", 0.0)), float(getattr(law, "high", math.inf))],
            },
        )

    def _training(self, context: PlanningContext, epsilon: float, share: float) -> TrainingPlan:
        steps = max(1, round(share * context.schedule.steps))
        context = replace(context, schedule=replace(context.schedule, steps=steps))
        method = budgeted(context, self.method, self.options, epsilon=epsilon)
        return TrainingPlan(context.schedule, method)

    def _event(self, trained: SearchThenFinal) -> Event:
        searches = [Repeated(self.trials, t.event) for t in trained.search.trainings]
        return Composed((*searches, trained.final.event))

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Search twice, extrapolate, train once."""
        if plan.search is None:
            raise InvalidInputError("plan.search", None, "linear scaling needs two searches")
        results = []
        best: list[float] = []
        for which, training in enumerate(plan.search.trainings):
            found, longer = [], plan.training.schedule.steps / training.schedule.steps
            for trial in range(self.trials):
                number = which * self.trials + trial
                drawn = trials.space.draw(trials.streams, number)
                params: dict[str, Any] = {**plan.params, **drawn}
                params["learning_rate"] *= longer
                found.append(
                    trials.train(plan, training, params, name=f"trial-{number}", scored=True)
                )
            results += found
            rate = float(best_of(found, trials.streams).params["learning_rate"])
            best.append(rate / longer)
        rate = extrapolate(plan.details["epsilons"], best, plan.details["bounds"])
        params = {**plan.params, "learning_rate": rate}
        result = trials.train(plan, plan.training, params, name="final")
        return Outcome(result, trials=tuple(results))


def extrapolate(epsilons: list[float], best: list[float], bounds: list[float]) -> float:
    """Follow the line through (ε₁, best₁) and (ε₂, best₂) to ε₃, inside the space's bounds."""
    first, second, final = epsilons
    slope = (best[1] - best[0]) / (second - first) if second > first else 0.0
    return min(max(best[0] + slope * (final - first), bounds[0]), bounds[1])
