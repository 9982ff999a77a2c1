"""What stops an arm: told to the curator whole, to everybody else as one sentence without data.

Whether a program fails, and how, may depend on the records, and so may which of PrivTune's own refusals it
meets: no message, class or traceback leaves. Errors of storage, time limit and source depend on no record.
"""

from __future__ import annotations

from privtune.errors import PrivTuneError
from privtune.ledger import LedgerBusyError, LedgerConnectionError
from privtune.ledger.errors import LedgerFullError, LedgerReadOnlyError
from privtune.study._objects import DamagedResultError
from privtune.tasks._facts import TaskChangedError


class StudyInterruptedError(PrivTuneError):
    """The time was over before the arm was; its charge stays, nothing was released."""


class NotLoadedError(PrivTuneError):
    """What an arm is trained with cannot be loaded on this machine: its task, its data, its function."""


WITHOUT_DATA = (
    DamagedResultError,
    LedgerBusyError,
    LedgerConnectionError,
    LedgerFullError,
    LedgerReadOnlyError,
    NotLoadedError,
    StudyInterruptedError,
    TaskChangedError,
)


class StageRefusedError(PrivTuneError):
    """A stage released a result on which the study stops."""

    def __init__(self, study: str, refusal: str) -> None:
        super().__init__(
            f"{refusal}. So study {study!r} stops here: no arm was started, and what was charged stays "
            "charged. Go on all the same, at no further charge: --anyway (in Python run(anyway=True))."
        )


class UnreadableRecordsError(PrivTuneError):
    """The program that reads the records failed before anything was charged."""

    def __init__(self, study: str) -> None:
        super().__init__(
            f"Study {study!r} was stopped before anything was charged: its records could not be read. See "
            f"what happened, inside the trust boundary: privtune study show {study} --curator."
        )


class UnusableRecordsError(PrivTuneError, ValueError):
    """The records do not fit what is declared of them, so that a budget would be spent for nothing."""

    def __init__(self, study: str, reason: str = "") -> None:
        why = f": {reason}" if reason else ""
        see = "" if reason else " See why, inside the trust boundary: the same with --curator."
        super().__init__(
            f"Study {study!r} was stopped before anything was charged, for its records do not fit what is "
            f"declared of them{why}.{see} Correct the data or the spec; or run it all the same, which may "
            "spend the budget for nothing: --anyway (in Python run(anyway=True))."
        )


class ArmStoppedError(PrivTuneError):
    """A charged arm was stopped by the program, its data or the machine. Nothing was released."""

    def __init__(self, study: str, arm: str) -> None:
        super().__init__(
            f"Arm {arm!r} of study {study!r} was stopped by an error of the program, the data or the "
            "machine; nothing was released and its charge stays. See what happened, inside the trust "
            f"boundary: privtune study show {study} --curator. Mend it and run the study again: it "
            "goes on with the same seeds."
        )
