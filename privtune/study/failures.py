"""What stops an arm: told to the curator whole, to everybody else as one sentence without data.

Whether a program fails, and how, may depend on the records. So nothing of it leaves: no message, no
class of an exception, no traceback on standard error. The traceback is kept in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from privtune.errors import PrivTuneError
from privtune.execution.supervise import WorkerStoppedError

__all__ = ["ArmStoppedError", "stopping"]


class ArmStoppedError(PrivTuneError):
    """An arm was stopped by a mistake of the program, or by the machine. Nothing was released."""

    def __init__(self, study: str, arm: str) -> None:
        super().__init__(
            f"Arm {arm!r} of study {study!r} was stopped by an error of the program or the machine; "
            "nothing was released and its charge stays. See what happened, inside the trust "
            f"boundary: privtune study show {study} --curator. Mend it and run the study again: it "
            "goes on with the same seeds."
        )


@contextmanager
def stopping(study: str, arm: str, record: Callable[[str, Exception], None]) -> Iterator[None]:
    """Turn whatever stops an arm into ``ArmStoppedError``; errors of PrivTune's own say enough.

    Args:
        study: The study's name.
        arm: The arm's name.
        record: Keeps what stopped the arm, for the curator alone.

    Raises:
        ArmStoppedError: Without cause or context: what raised is in the store.
    """
    stopped = False
    try:
        yield
    except PrivTuneError:
        raise
    except WorkerStoppedError:  # the worker has kept what stopped it
        stopped = True
    except Exception as error:
        record(arm, error)
        stopped = True
    if stopped:
        stop = ArmStoppedError(study, arm)
        try:
            raise stop from None
        finally:
            stop.__context__ = None  # it would show the failure to whoever looks at the error
