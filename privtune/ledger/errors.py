"""What the ledger refuses: one class for each thing that the caller can do about it."""

from __future__ import annotations

from privtune.errors import PrivTuneError

SENSELESS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
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
