"""The ledger's errors: one class for each thing that a caller can do about an error."""

from __future__ import annotations

from dataclasses import dataclass

from privtune.errors import PrivTuneError

SENSELESS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises where somebody else's document has another shape than ours, whichever that is."""

_LOG = (
    "privtune_budgets",
    "privtune_entries",
    "privtune_rounds",
    "privtune_schema",
    "privtune_tasks",
)
_REMEDY = (
    "It was changed outside of PrivTune, or the file is damaged: put a copy in its place "
    "(privtune budget backup makes one), and verify it"
)


@dataclass(frozen=True)
class Place:
    """A column of a table, and the row's key in words where it is known."""

    table: str
    column: str
    key: str = ""

    def __str__(self) -> str:
        row = f", row {self.key}" if self.key else ""
        return f"table {self.table}, column {self.column}{row}"

    def error(self, why: str) -> LedgerCorruptedError | StudyCorruptedError:
        """Return the error for damaged content in this column and row, in a ledger or in a study."""
        kind = LedgerCorruptedError if self.table in _LOG else StudyCorruptedError
        error = kind(f"{self} {why}. {_REMEDY}.")
        error.place = self
        error.why = why
        return error


class LedgerError(PrivTuneError):
    """Root of the ledger's own errors."""


class UnitMismatchError(LedgerError):
    """A request counts another unit of privacy than the budget protects."""


class DatasetMismatchError(LedgerError):
    """A request is for another dataset than the budget protects."""


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
    """The present state of the charge does not allow the operation."""


class LedgerSchemaError(LedgerError):
    """The storage holds another version of the ledger's schema than this program."""


class LedgerCorruptedError(LedgerError):
    """The log contradicts itself, or a row of it is damaged: it was edited, removed, or put elsewhere."""

    place: Place | None = None
    why: str = ""


class StudyCorruptedError(LedgerError):
    """A stored row of a study was changed, or contradicts the ledger."""

    place: Place | None = None
    why: str = ""


class LedgerBusyError(LedgerError):
    """Another process held the ledger's lock for longer than the deadline. Nothing was written."""


class LedgerReadOnlyError(LedgerError):
    """The storage can be read but not written. Nothing was written."""


class LedgerFullError(LedgerError):
    """The disk under the storage is full. Nothing was written."""


class StoreCopyError(LedgerError):
    """The database is a copy of a store, which can be read, but written to only once it is restored."""


class HoldLostError(LedgerError):
    """Another process took a named lock of this one, while this one could not reach the database."""


class LedgerConnectionError(LedgerError):
    """The connection to the storage failed, or could not be made."""


OUT_OF_REACH = (
    HoldLostError,
    LedgerBusyError,
    LedgerConnectionError,
    LedgerFullError,
    LedgerReadOnlyError,
)
"""What reading or writing a store meets that says nothing about its content: it may be whole."""
