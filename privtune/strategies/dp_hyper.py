"""DP-hyper: a part of ε for a search, the rest for one training with what it found.

The baseline of that name in Bu & Liu 2025 (HyFreeDP), after Liu & Talwar 2019 and Papernot & Steinke
2022. What differs: there the search is *simulated* in a narrow range about the best rate, and the
training has 85% of ε; here it runs, in the study's own space, and the two are charged together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from privtune.accounting import Composed, Event, PrivateSelection, RunLaw
from privtune.errors import InvalidInputError
from privtune.strategies._base import Outcome, Round, StrategyError, TrialResult
from privtune.strategies._calibrate import SearchThenFinal, factor_for, meet
from privtune.strategies.context import PlanningContext
from privtune.strategies.grid import CHANGING
from privtune.strategies.laws import OptionsOfLaw
from privtune.strategies.needs import Needs
from privtune.strategies.plan import Plan
from privtune.strategies.searching import IndependentDrawing, select_then


@dataclass(frozen=True, kw_only=True)
class DPHyper(OptionsOfLaw, IndependentDrawing):
    """Select hyperparameters at a share of ε, on all the data, then train once with the rest.

    Args:
        share: What the search may cost, as a share of ε, in (0, 1).
        law: As for ``papernot-steinke``, of the search.

    References:
        Bu and Liu 2025, Section 5 (the baseline DP-hyper); Papernot and Steinke 2022, arXiv 2110.03620.

    Example:
        >>> context = study.spec.planning_context()

        >>> strategy = DPHyper(mean_runs=3, parameters={"max_grad_norm": 1.0})
        >>> plan = strategy.plan(context, epsilon=2.0)
        >>> [part.type for part in plan.event.events], plan.final
        (['composed', 'private_selection'], True)
    """

    name: ClassVar[str] = "dp-hyper"
    summary: ClassVar[str] = "private selection at a share of ε, then one training at the rest"
    needs: ClassVar[Needs] = Needs(score=True, independent=True)

    arm: str = "dp-hyper"
    share: float = 0.15

    def plan(self, context: PlanningContext, *, epsilon: float) -> Plan:
        """Plan the search and the training of at most ``epsilon`` together. Touches no data."""
        if not 0.0 < self.share < 1.0:
            raise InvalidInputError("share", self.share, "must lie strictly between 0 and 1")
        if self.law == "auto" or self.mean_runs == "auto":
            raise StrategyError(
                f"Arm {self.arm!r}: auto weighs the noise of a selection that is the whole arm, but "
                "most of this arm's cost is its final training. Give law and mean_runs."
            )
        if changing := [name for name in CHANGING if name in context.space]:
            raise StrategyError(
                f"Arm {self.arm!r} searches {', '.join(changing)}, which changes what a candidate "
                "costs, but its final training costs the same whatever wins. Leave it out."
            )
        law = self.run_law()
        self.check(context)
        search = self.search(context, epsilon=epsilon * self.share)
        selection = PrivateSelection(self.trial_event(search), law)
        search = search.scaled(factor_for(selection, context, epsilon * self.share))
        final = self.search(context, epsilon=epsilon * (1.0 - self.share)).trainings[0]

        def cost(event: Event) -> Event:
            return PrivateSelection(event, law)

        event_of = partial(self._event, law=law)
        trained = SearchThenFinal(search, final)
        trained, score, event = meet(trained, event_of, cost, context=context, epsilon=epsilon)
        return Plan(
            arm=self.arm,
            strategy=self.name,
            event=event,
            training=trained.final,
            params=dict(self.parameters),
            runs=law,
            score=score,
            released=("the final model", "its hyperparameters", "the winner's score in the search"),
            sealed=(
                "every other candidate: hyperparameters, score, model",
                "the number of runs",
                "times and progress of the round",
            ),
            search=trained.search,
            details={"share": self.share},
        )

    def _event(self, trained: SearchThenFinal, law: RunLaw) -> Event:
        return Composed(
            (PrivateSelection(self.trial_event(trained.search), law), trained.final.event)
        )

    def run(self, plan: Plan, trials: Round) -> Outcome:
        """Select, then train once."""

        def final(found: Mapping[str, Any]) -> TrialResult:
            return trials.train(plan, plan.training, found, name="final")

        return select_then(plan, trials, final)
