"""The durable budget: charge first, never refund, always able to show the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.ledger.admission import FilterState
    from privtune.ledger.backups import backup
    from privtune.ledger.certificate import (
        Verification,
        export_certificate,
        verify,
        verify_certificate,
    )
    from privtune.ledger.errors import (
        BudgetClosedError,
        BudgetExistsError,
        ChargeStateError,
        DeclarationClosedError,
        LedgerBusyError,
        LedgerConnectionError,
        LedgerCorruptedError,
        LedgerError,
        LedgerFullError,
        LedgerReadOnlyError,
        LedgerSchemaError,
        UnitMismatchError,
        UnknownBudgetError,
        UnknownChargeError,
    )
    from privtune.ledger.ledger import Ledger
    from privtune.ledger.page import render_certificate
    from privtune.ledger.rounds import RoundNotFinishedError, RoundStuckError
    from privtune.ledger.values import (
        RECORD,
        Admission,
        Budget,
        BudgetExceededError,
        Charge,
        ChargeRequest,
        ChargeState,
    )

__all__ = [
    "RECORD",
    "Admission",
    "Budget",
    "BudgetClosedError",
    "BudgetExceededError",
    "BudgetExistsError",
    "Charge",
    "ChargeRequest",
    "ChargeState",
    "ChargeStateError",
    "DeclarationClosedError",
    "FilterState",
    "Ledger",
    "LedgerBusyError",
    "LedgerConnectionError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerReadOnlyError",
    "LedgerSchemaError",
    "RoundNotFinishedError",
    "RoundStuckError",
    "UnitMismatchError",
    "UnknownBudgetError",
    "UnknownChargeError",
    "Verification",
    "backup",
    "export_certificate",
    "render_certificate",
    "verify",
    "verify_certificate",
]

__getattr__ = lazily(__name__, __file__)
