"""Files and folders that are the curator's alone from their first byte, whatever the umask."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from privtune.errors import InvalidInputError

_DAY = 86_400
_READ = 16 << 20  # bytes of a spec, an event, a certificate, a key
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def regular_file(path: Path, *, most: int | None = None) -> Path:
    """Return the path of a regular file, before it is opened: a pipe would block, a device never ends.

    Args:
        path: A path that a user gave.
        most: The most bytes that it may hold; None for any number.

    Raises:
        OSError: If it is not there, no regular file, or too large; ``strerror`` says which.
    """
    found = os.stat(path)
    for is_one, name in _KINDS:
        if is_one(found.st_mode):
            raise OSError(0, f"it is {name}, not a regular file")
    if most is not None and found.st_size > most:
        raise OSError(0, f"it has {found.st_size:,} bytes; {most:,} are the most that is read")
    return path


def read_bounded(path: Path, *, most: int = _READ) -> bytes:
    """Read a regular file of a bounded size.

    Args:
        path: A path that a user gave.
        most: The most bytes that it may hold.

    Raises:
        OSError: If it cannot be read, as of :func:`regular_file`.
    """
    with regular_file(path, most=most).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:  # some systems' files say that they hold nothing
        raise OSError(0, f"it holds more than {most:,} bytes, the most that is read")
    return content


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


def made_private(path: Path) -> bool:
    """Set owner-only permissions on a file or folder that belongs to this user.

    Args:
        path: The file or folder; it need not be there.

    Returns:
        Whether others still have it, since it is somebody else's or cannot be changed.
    """
    try:
        found = path.stat()
        if not found.st_mode & 0o077:
            return False
        if found.st_uid != getattr(os, "geteuid", lambda: found.st_uid)():
            return True
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class OwnFolder:
    """A folder whose owner deletes the files that it made there, and no others.

    A list in the folder, ``.privtune``, names each file before it is made: a process that is killed
    leaves no file that is not listed. A line is JSON: the owner's id and the file's path in the folder.

    Args:
        path: The folder; it is made with the first file.
        owner: An id that no other owner has.

    Example:
        >>> import tempfile
        >>> folder = OwnFolder(Path(tempfile.mkdtemp()) / "toy", "an id")
        >>> folder.write("arm/model", b"ours")
        >>> _ = (folder.path / "arm" / "notes").write_text("the user's")
        >>> folder.remove()
        []
        >>> [path.name for path in folder.path.rglob("*")]
        ['arm', 'notes']
    """

    LIST = ".privtune"

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self._owner = path, owner
        self._noted: set[str] = set()

    def file(self, name: str) -> Path:
        """List a file before it is made, make its folder, and return its path.

        Args:
            name: Its path in the folder. One that ends in ``/`` is a folder that a library fills:
                every file in it is listed with it, those in folders of it are not.
        """
        path = self.path / name
        private_folder(path if name.endswith("/") else path.parent)
        if name not in self._noted:
            # The line begins anew: what a killed process wrote of one before it spoils no other.
            line = f"\n{json.dumps([self._owner, name])}\n"
            with open_private(self.path / self.LIST, "ab", None) as file:
                file.write(line.encode())
            forget_times(self.path / self.LIST)
            self._noted.add(name)
        return path

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there whole or not at all, and for its owner alone."""
        partial = self.file(f"{name}.partial-{os.getpid()}")
        with open_private(partial, "wb", None) as file:
            file.write(content)
        partial.replace(self.file(name))

    def names(self) -> list[str]:
        """Return the names that this owner has listed, of files that may be gone."""
        return [name for owner, name in self.listed(self.path) if owner == self._owner]

    def _forget(self, names: Collection[str]) -> None:
        """Blank the lines of files that are gone: how many trials a round had is told by no list.

        Others add lines at the end meanwhile, so no line moves.
        """
        gone = {json.dumps([self._owner, name]).encode() for name in names}
        with contextlib.suppress(OSError), (self.path / self.LIST).open("rb+") as file:
            place = 0
            for line in file.read().splitlines(keepends=True):
                if line.strip() in gone:
                    os.pwrite(file.fileno(), b" " * len(line.strip()), place)
                place += len(line)
        forget_times(self.path / self.LIST)
        self._noted.difference_update(names)

    @classmethod
    def listed(cls, path: Path) -> list[tuple[str, str]]:
        """Return the owners and the names in the list of a folder, those alone that lie in it."""
        try:
            lines = (path / cls.LIST).read_bytes().splitlines()
        except OSError:
            return []
        found: dict[tuple[str, str], None] = {}
        for line in lines:
            with contextlib.suppress(
                ValueError, TypeError
            ):  # a line that is not whole, or was edited
                owner, name = json.loads(line)
                inside = Path(name).parts
                if isinstance(owner, str) and ".." not in inside and not Path(name).is_absolute():
                    found[owner, str(name)] = None
        return list(found)

    def remove(self, within: str = "") -> list[Path]:
        """Delete the listed files, then the folders that this leaves empty, the folder itself at last.

        Args:
            within: The part of the folder to empty; ends in ``/``.

        Returns:
            What is not deleted: a listed name that is a folder now, or that a link leads away from here.

        Raises:
            OSError: If a file cannot be deleted; those before it are.
        """
        left, folders = [], {self.path / within} if within else set[Path]()
        names = [name for name in self.names() if name.startswith(within)]
        for name in names:
            path = self.path / name
            inside = [self.path / part for part in Path(name).parents if part != Path(".")]
            if any(
                part.is_symlink() for part in (*inside, *([path] if name.endswith("/") else []))
            ):
                left += [path] if path.exists() else []
                continue
            folders.update(inside)
            files = [path]
            if name.endswith("/"):
                folders.add(path)
                files = [file for file in path.glob("*") if file.is_symlink() or not file.is_dir()]
            for file in files:
                if file.is_dir() and not file.is_symlink():
                    left.append(file)
                else:
                    file.unlink(missing_ok=True)
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):  # it holds what is not ours, or is not there
                folder.rmdir()
        if within:
            self._forget(names)
        if not within and not left:
            if names:
                (self.path / self.LIST).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        return left


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
        with regular_file(path, most=_READ).open("rb") as file:
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
