"""Errors that stop an arm, detailed for the curator alone and without data for everybody else.

Whether a program fails, and how, may depend on the records, and so may which of PrivTune's own refusals it
meets: no message, class or traceback leaves. Errors of storage, time limit and source depend on no record.
"""

from __future__ import annotations

from privtune.errors import PrivTuneError
from privtune.facts import TaskChangedError
from privtune.files import UntrustedPathError, UnwrittenFileError
from privtune.ledger.errors import OUT_OF_REACH, LedgerCorruptedError, StudyCorruptedError


class StudyInterruptedError(PrivTuneError):
    """The timeout ended before the arm did; its charge stays and nothing was released."""


class NotLoadedError(PrivTuneError):
    """The task, data or function of an arm cannot be loaded on this machine."""


# Errors that say nothing of a record, and are shown as they are; any other is kept for the curator.
WITHOUT_DATA = (
    *OUT_OF_REACH,
    LedgerCorruptedError,
    NotLoadedError,
    StudyCorruptedError,
    StudyInterruptedError,
    TaskChangedError,
    UntrustedPathError,
    UnwrittenFileError,
)


class StageRefusedError(PrivTuneError):
    """A stage's release is a reason to stop the study before any arm starts.

    Args:
        study: The study's name.
        refusal: What the release says, in a sentence; it is paid for.
    """

    def __init__(self, study: str, refusal: str) -> None:
        super().__init__(
            f"{refusal}. So study {study!r} stops here: no arm was started, and what was charged stays "
            "charged. Go on all the same, at no further charge: --force (in Python run(force=True))."
        )


class UnreadableRecordsError(PrivTuneError):
    """The program that reads the records failed before anything was charged.

    Args:
        study: The study's name.
    """

    def __init__(self, study: str) -> None:
        super().__init__(
            f"Study {study!r} was stopped before anything was charged: its records could not be read. See "
            f"what happened, inside the trust boundary: privtune study show {study} --curator."
        )


class UnusableRecordsError(PrivTuneError, ValueError):
    """The records do not fit what is declared of them, so the study stopped before the charge.

    Args:
        study: The study's name.
        reason: Why, for the curator alone; empty for everybody else.
    """

    def __init__(self, study: str, reason: str = "") -> None:
        why = (
            ". See why, inside the trust boundary: the same with --curator (in Python with the variable "
            "PRIVTUNE_CURATOR=1)."
        )
        if reason:
            why = f": {reason}."
        super().__init__(
            f"Study {study!r} was stopped before anything was charged: its records do not fit what is "
            f"declared{why} Correct the data or the spec; or run it all the same, which may "
            "spend the budget for nothing: --force (in Python force=True)."
        )


class ArmStoppedError(PrivTuneError):
    """An error of the program, the data or the machine stopped a charged arm before its release.

    Args:
        study: The study's name.
        arm: The arm's name.
    """

    def __init__(self, study: str, arm: str) -> None:
        super().__init__(
            f"Arm {arm!r} of study {study!r} was stopped by an error of the program, the data or the "
            "machine; nothing was released and its charge stays. See what happened, inside the trust "
            f"boundary: privtune study show {study} --curator. Mend it and run the study again: it "
            "goes on with the same seeds."
        )
