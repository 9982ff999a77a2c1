"""Two parts of a study spec: the budget it draws on, and one of its arms."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from privtune.accounting import Adjacency
from privtune.ledger import RECORD, Budget, check_unit
from privtune.names import check_name
from privtune.strategies import Strategy, make_strategy
from privtune.study._spec_words import NUMBER, checked

Name = Annotated[str, AfterValidator(partial(checked, check_name))]


class BudgetSpec(BaseModel):
    """The budget that a study draws on; created with the study if it does not exist.

    Args:
        name: Name of the budget.
        epsilon: ε, above 0.
        delta: δ, in (0, 1).
        adjacency: ``add-remove`` or ``replace-one``.
        unit: What is protected, in a word: ``record``, or what the task groups its rows by.

    Example:
        >>> BudgetSpec(name="digits", epsilon=8.0, delta=1e-5).to_budget().adjacency
        <Adjacency.ADD_REMOVE: 'add-remove'>
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    epsilon: Annotated[float, NUMBER] = Field(gt=0, allow_inf_nan=False)
    delta: Annotated[float, NUMBER] = Field(gt=0, lt=1)
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    unit: Annotated[str, AfterValidator(partial(checked, check_unit))] = RECORD

    def to_budget(self) -> Budget:
        """Return the ledger's budget."""
        return Budget(
            self.epsilon, self.delta, name=self.name, adjacency=self.adjacency, unit=self.unit
        )


class ArmSpec(BaseModel):
    """One arm: its name, its strategy, and the strategy's own options beside them.

    Args:
        name: Name of the arm.
        strategy: How it chooses.
        weight: The arm's target ε in proportion to those of the other arms; equal unless given.

    Example:
        >>> arm = ArmSpec(name="selection", strategy="papernot-steinke", mean_runs=20)
        >>> arm.to_strategy().mean_runs
        20
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Name
    strategy: str
    weight: Annotated[float, NUMBER] = Field(default=1.0, gt=0, allow_inf_nan=False)

    def to_strategy(self) -> Strategy:
        """Build the strategy; its options are checked here.

        Returns:
            The strategy, of this arm's name.
        """
        return make_strategy(self.strategy, arm=self.name, options=dict(self.model_extra or {}))
