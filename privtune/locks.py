"""File locks among threads and processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from privtune.files import open_own


class FileLock:
    """A lock on a file, for threads and processes: one holds it, until it is closed or its process ends.

    ``filelock`` locks the descriptor alone: by itself it would trust whatever file has the name, and fall
    back to locks that outlive a process that was killed.

    Args:
        path: The file; it stays, empty.
        root: A folder of ours above it: none between may be a link.
        owner: A user whose files are trusted as well.

    Raises:
        UntrustedPathError: As of :func:`open_own`.
        OSError: It cannot be opened, or this system has no such locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     with FileLock(Path(name) / "lock") as first, FileLock(Path(name) / "lock") as second:
        ...         first.take(), second.take(), second.wait(0.0)
        (True, False, False)
    """

    def __init__(
        self,
        path: Path,
        *,
        root: Path | None = None,
        owner: int | None = None,
    ) -> None:
        self._file = open_own(path, os.O_RDWR | os.O_CREAT, root=root, owner=owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def take(self) -> bool:
        """Take the lock if nobody has it; return whether it is held now."""
        # Imported here: who only reads takes no lock.
        from filelock import lock_descriptor

        return lock_descriptor(self._file, blocking=False)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the lock, for some seconds or without limit; return whether it is held now."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.take():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def stamp(self) -> None:
        """Set the file's time to now."""
        os.utime(self._file)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._file)
