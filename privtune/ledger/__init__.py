"""The privacy ledger: budgets and their charges, durable in a log that can be verified."""

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
    from privtune.ledger.certificate_page import render_certificate
    from privtune.ledger.datasets import Dataset
    from privtune.ledger.errors import (
        BudgetClosedError,
        BudgetExistsError,
        ChargeStateError,
        DatasetMismatchError,
        DeclarationClosedError,
        LedgerBusyError,
        LedgerConnectionError,
        LedgerCorruptedError,
        LedgerError,
        LedgerFullError,
        LedgerReadOnlyError,
        LedgerSchemaError,
        StoreCopyError,
        UnitMismatchError,
        UnknownBudgetError,
        UnknownChargeError,
    )
    from privtune.ledger.ledger import Ledger
    from privtune.ledger.rounds import RoundNotFinishedError, RoundStuckError
    from privtune.ledger.values import (
        RECORD,
        Admission,
        Budget,
        BudgetExceededError,
        Charge,
        ChargeRequest,
        ChargeState,
        Spending,
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
    "Dataset",
    "DatasetMismatchError",
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
    "Spending",
    "StoreCopyError",
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
