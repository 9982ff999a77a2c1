"""Files and folders that are the curator's alone from their first byte, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import IO, Any

from privtune.errors import InvalidInputError

__all__ = [
    "cache_folder",
    "create_private",
    "forget_times",
    "midnight",
    "open_private",
    "private_folder",
    "read_private",
]

_DAY = 86_400


def private_folder(path: Path) -> Path:
    """Return a folder, made with mode 0700 if it is not there; so is every parent that is missing.

    A folder that is there keeps its mode: ``privtune doctor`` says when others may enter it.
    """
    for part in (*reversed(path.parents), path):
        if not part.is_dir():
            try:
                part.mkdir(0o700)
            except FileExistsError:  # somebody else was faster, or a file is in the way
                if not part.is_dir():
                    raise
    return path


def cache_folder() -> Path | None:
    """Return where this package keeps what it can make anew; None for who has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privtune"
    except RuntimeError:
        return None


def create_private(path: Path) -> bool:
    """Create an empty file with mode 0600; return whether it was not there before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def open_private(path: Path, mode: str = "w", encoding: str | None = "utf-8") -> IO[Any]:
    """Open a file as ``open`` does; if that creates it, then with mode 0600.

    Args:
        path: The file; its folder exists.
        mode: As for ``open``.
        encoding: As for ``open``; None for bytes.
    """
    return open(path, mode, encoding=encoding, opener=_opener)


def read_private(path: Path) -> bytes:
    """Read a file that must be its owner's alone, such as a private key.

    Raises:
        InvalidInputError: It cannot be read, or others may read or write it too.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read()
    except OSError as error:
        raise InvalidInputError("file", str(path), f"cannot be read ({error.strerror})") from None
    if mode & 0o077:
        raise InvalidInputError(
            "file",
            str(path),
            f"must be readable by its owner alone, and has mode {mode:04o}",
            f"Run: chmod 600 {path}",
        )
    return content


def midnight() -> int:
    """Return this day's 00:00 UTC, in seconds: no public time says more than the day.

    The exact moment at which something was published tells how long the sealed round before it
    took, and so how many trials it ran.
    """
    return int(time.time()) // _DAY * _DAY


def forget_times(path: Path, *, within: bool = False) -> None:
    """Set when a file or folder was written to the day; somebody else's stays as it is.

    Args:
        path: The file or folder.
        within: Whether to do so with all that is in the folder.
    """
    day = midnight()
    for part in (path, *(path.rglob("*") if within else ())):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            os.utime(part, (day, day))


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
