"""Says to a model, in torch's own words, that it is traced; to nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()


class _OfThread(threading.local):
    """True in a thread that traces, false in every other.

    torch keeps one flag for the process. Others look at it, too: Adam computes with steps in single
    precision where it stands. Candidates train in threads, so a flag that one thread raises, or puts
    back as it found it while another holds it up, would change what the others compute.
    """

    inside = 0

    def __bool__(self) -> bool:
        return self.inside > 0

    # In the place of a bool, which libraries also combine with others.
    def __or__(self, other: object) -> bool:
        return bool(self) or bool(other)

    def __and__(self, other: object) -> bool:
        return bool(self) and bool(other)

    __ror__, __rand__ = __or__, __and__


_FLAG = _OfThread()
_threads = 0
_stood: bool = False


@contextmanager
def traced() -> Iterator[None]:
    """Say to a model that this thread runs that it is traced.

    Libraries whose models look at values to go a shorter way (Hugging Face's leave out a mask that
    masks nothing) then go the way that is right for all values. The check takes records one by one
    without this, each by the way of its own values.
    """
    global _threads, _stood  # noqa: PLW0603 (as the flag: one for the process)
    with _LOCK:
        if _threads == 0:
            _stood = torch.compiler._is_compiling_flag
            torch.compiler._is_compiling_flag = _FLAG  # type: ignore[assignment]
        _threads += 1
    _FLAG.inside += 1
    try:
        yield
    finally:
        _FLAG.inside -= 1
        with _LOCK:
            _threads -= 1
            if _threads == 0:
                torch.compiler._is_compiling_flag = _stood
