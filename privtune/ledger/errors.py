"""What the ledger refuses: one class for each thing that the caller can do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    from privtune.ledger.values import Budget

SENSELESS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading raises where somebody else's document has another shape than ours, whichever that is."""


class LedgerError(PrivTuneError):
    """Root of the ledger's own errors."""


class UnitMismatchError(LedgerError):
    """What is asked counts another unit of privacy than the budget protects."""


class UnknownBudgetError(LedgerError):
    """No budget of that name is in this ledger."""


class UnknownChargeError(LedgerError):
    """No charge of that id is in this ledger."""


class BudgetExistsError(LedgerError):
    """A budget of that name exists, with other terms: a budget never changes after its creation."""


class BudgetClosedError(LedgerError):
    """The budget was closed for good: it admits nothing any more."""


class DeclarationClosedError(LedgerError):
    """A declared budget has started: nothing can be declared any more."""


class BudgetExceededError(LedgerError):
    """The budget does not hold what was asked of it. Nothing was reserved.

    Attributes:
        budget: The budget's terms.
        requested: ε of the request alone, at the budget's δ.
        spent: ε of what is charged already, by the odometer.
        remaining: ε that the odometer leaves.
        used: Which part of the filter's room is used, once it is in force; else None.
        fitting: What would fit, in words; may be empty.

    Example:
        >>> from privtune.ledger import Budget
        >>> refusal = BudgetExceededError(Budget(3.0, 1e-5), requested=2.5, spent=1.0, remaining=2.0)
        >>> refusal.remaining, refusal.with_fitting(["noise multiplied by 1.3"]).fitting
        (2.0, ('noise multiplied by 1.3',))
    """

    def __init__(
        self,
        budget: Budget,
        *,
        requested: float,
        spent: float,
        remaining: float,
        used: float | None = None,
        fitting: Sequence[str] = (),
    ) -> None:
        self.budget = budget
        self.requested = requested
        self.spent = spent
        self.remaining = remaining
        self.used = used
        self.fitting = tuple(fitting)
        message = (
            f"budget {budget.name!r} (ε = {budget.epsilon:g}, δ = {budget.delta:g}) does not hold "
            f"this: it asks for ε = {show_epsilon(requested)} on its own; "
            f"ε = {show_epsilon(spent)} is spent, ε = {show_left(remaining)} is left"
        )
        if used is not None:
            message += (
                f" by the odometer. What is asked after a release weighs more than its ε: "
                f"the filter decides, of which {used:.1%} is used"
            )
        message += "."
        if fitting:
            message += f" What fits: {'; '.join(fitting)}."
        super().__init__(message)

    def with_fitting(self, fitting: Sequence[str]) -> BudgetExceededError:
        """Return the same refusal, with what would fit.

        Args:
            fitting: What would fit, in words.

        Returns:
            A new error, with the same numbers.
        """
        return BudgetExceededError(
            self.budget,
            requested=self.requested,
            spent=self.spent,
            remaining=self.remaining,
            used=self.used,
            fitting=fitting,
        )


class ChargeStateError(LedgerError):
    """The charge is not in a state from which the operation may go on."""


class LedgerSchemaError(LedgerError):
    """The storage holds another version of the ledger's schema than this program."""


class LedgerCorruptedError(LedgerError):
    """The log contradicts itself: an entry was edited, removed, or put elsewhere."""


class LedgerBusyError(LedgerError):
    """Another process held the ledger's lock for longer than the deadline. Nothing was written."""


class LedgerReadOnlyError(LedgerError):
    """The storage can be read but not written. Nothing was written."""


class LedgerFullError(LedgerError):
    """The disk under the storage is full. Nothing was written."""


class LedgerConnectionError(LedgerError):
    """The connection to the storage failed, or could not be made."""
