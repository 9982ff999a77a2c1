"""The durable budget: charge first, never refund, always able to show the log."""

from privtune.ledger.admission import BudgetExceededError
from privtune.ledger.errors import (
    BudgetClosedError,
    BudgetExistsError,
    ChargeStateError,
    ClockError,
    DeclarationClosedError,
    LedgerBusyError,
    LedgerConnectionError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerReadOnlyError,
    LedgerSchemaError,
    UnknownBudgetError,
    UnknownChargeError,
)
from privtune.ledger.ledger import Ledger
from privtune.ledger.values import Admission, Budget, Charge, ChargeRequest, ChargeState

__all__ = [
    "Admission",
    "Budget",
    "BudgetClosedError",
    "BudgetExceededError",
    "BudgetExistsError",
    "Charge",
    "ChargeRequest",
    "ChargeState",
    "ChargeStateError",
    "ClockError",
    "DeclarationClosedError",
    "Ledger",
    "LedgerBusyError",
    "LedgerConnectionError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerReadOnlyError",
    "LedgerSchemaError",
    "UnknownBudgetError",
    "UnknownChargeError",
]
