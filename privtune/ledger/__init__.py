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
    from privtune.ledger.page import render_certificate, write_file
    from privtune.ledger.rounds import (
        SKIPPED,
        Finished,
        Lease,
        OpenRound,
        RoundNotFinishedError,
        Rounds,
        RoundStuckError,
        TaskResult,
    )
    from privtune.ledger.values import (
        RECORD,
        Admission,
        Budget,
        BudgetExceededError,
        Charge,
        ChargeRequest,
        ChargeState,
        check_unit,
        refuse_other_unit,
        show_adjacency,
    )

__all__ = [
    "RECORD",
    "SKIPPED",
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
    "Finished",
    "Lease",
    "Ledger",
    "LedgerBusyError",
    "LedgerConnectionError",
    "LedgerCorruptedError",
    "LedgerError",
    "LedgerFullError",
    "LedgerReadOnlyError",
    "LedgerSchemaError",
    "OpenRound",
    "RoundNotFinishedError",
    "RoundStuckError",
    "Rounds",
    "TaskResult",
    "UnitMismatchError",
    "UnknownBudgetError",
    "UnknownChargeError",
    "Verification",
    "backup",
    "check_unit",
    "export_certificate",
    "refuse_other_unit",
    "render_certificate",
    "show_adjacency",
    "verify",
    "verify_certificate",
    "write_file",
]

__getattr__ = lazily(__name__, __file__)
