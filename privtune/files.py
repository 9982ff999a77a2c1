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
_MOST = 16 << 20  # bytes of a spec, an event, a certificate, a key
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def regular_file(path: Path, *, most: int | None = None) -> Path:
    """Refuse, before it is opened, a path of a user's that is no regular file, or too large.

    Raises:
        OSError: ``strerror`` says what it is.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # opening a pipe waits, and a device never ends
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(0, f"it is {kind}, not a regular file")
    if most is not None and found.st_size > most:
        raise OSError(0, f"it has {found.st_size:,} bytes; {most:,} are the most that is read")
    return path


def read_bounded(path: Path, *, most: int = _MOST) -> bytes:
    """Read a small file that a user named.

    Raises:
        OSError: If it cannot be read, as of :func:`regular_file`.
    """
    with regular_file(path, most=most).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:  # files of /proc say that they hold nothing
        raise OSError(0, f"it holds more than {most:,} bytes, the most that is read")
    return content


def read_private(path: Path) -> bytes:
    """Read a file that must be its owner's alone, such as a private key."""
    try:
        mode = regular_file(path).stat().st_mode & 0o777
        content = read_bounded(path)
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


def private_folder(path: Path) -> Path:
    """Make a folder and its missing parents with mode 0700; one that is there keeps its mode."""
    for part in (*reversed(path.parents), path):
        if not part.is_dir():
            try:
                part.mkdir(0o700)
            except FileExistsError:  # another process was faster, or a file is in the way
                if not part.is_dir():
                    raise
    return path


def made_private(path: Path) -> bool:
    """Set owner-only permissions where this user may; return whether others can still open the path."""
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


def create_private(path: Path) -> bool:
    """Create an empty file with mode 0600; return whether it was not there before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def open_private(path: Path, mode: str = "w", encoding: str | None = "utf-8") -> IO[Any]:
    """Open a file as ``open`` does; a new one is made with mode 0600."""
    return open(path, mode, encoding=encoding, opener=lambda p, flags: os.open(p, flags, 0o600))


class OwnFolder:
    """A folder whose owner deletes the files that it made there, and no others.

    A list in the folder, ``.privtune``, names each file before it is made: a process that is killed
    leaves no file that is not listed. A line is JSON: the owner's id and the file's path in the folder.

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

        A name that ends in ``/`` is a folder that a library fills: the files directly in it are listed.
        """
        path = self.path / name
        private_folder(path if name.endswith("/") else path.parent)
        if name not in self._noted:
            # A line break before it, too: half a line of a killed process spoils no other.
            line = f"\n{json.dumps([self._owner, name])}\n"
            with open_private(self.path / self.LIST, "ab", None) as file:
                file.write(line.encode())
            forget_times(self.path / self.LIST)
            self._noted.add(name)
        return path

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there whole or not at all."""
        partial = self.file(f"{name}.partial-{os.getpid()}")
        with open_private(partial, "wb", None) as file:
            file.write(content)
        partial.replace(self.file(name))

    def forget_times(self, name: str) -> None:
        """Set when a folder in it, and all in that, was written to the day."""
        forget_times(self.path / name, within=True)

    def names(self) -> list[str]:
        """Return the names that this owner has listed, of files that may be gone."""
        return [name for owner, name in self.listed(self.path) if owner == self._owner]

    @classmethod
    def listed(cls, path: Path) -> list[tuple[str, str]]:
        """Return owners and names in the list of a folder, without those that lead out of it."""
        try:
            lines = (path / cls.LIST).read_bytes().splitlines()
        except OSError:
            return []
        found: dict[tuple[str, str], None] = {}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # half a line of a killed process
                owner, name = json.loads(line)
                if ".." not in Path(name).parts and not Path(name).is_absolute():
                    found[str(owner), str(name)] = None
        return list(found)

    def remove(self, within: str = "") -> list[Path]:
        """Delete the listed files of a part (``ARM/``) or of all, then the folders that this leaves empty.

        Returns:
            What stays: a listed name that is a folder now, or that a link leads away from here.
        """
        left, folders = [], {self.path / within} if within else set[Path]()
        names = [name for name in self.names() if name.startswith(within)]
        for name in names:
            path, of_library = self.path / name, name.endswith("/")
            inside = [self.path / part for part in Path(name).parents if part != Path(".")]
            if any(part.is_symlink() for part in (*inside, *([path] if of_library else []))):
                left += [path] if path.exists() else []
                continue
            folders.update(inside, [path] if of_library else [])
            for file in path.glob("*") if of_library else [path]:
                if file.is_symlink() or not file.is_dir():
                    file.unlink(missing_ok=True)
                elif not of_library:
                    left.append(file)
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):  # it holds files of others, or is gone
                folder.rmdir()
        if within:
            self._forget(names)
        elif not left:
            if names:
                (self.path / self.LIST).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        return left

    def _forget(self, names: Collection[str]) -> None:
        """Blank the lines of files that are gone: their number is the secret number of a round's trials."""
        gone = {json.dumps([self._owner, name]).encode() for name in names}
        with contextlib.suppress(OSError), (self.path / self.LIST).open("rb+") as file:
            place = 0
            for line in file.read().splitlines(keepends=True):
                if line.strip() in gone:  # in place: other processes append meanwhile
                    os.pwrite(file.fileno(), b" " * len(line.strip()), place)
                place += len(line)
        forget_times(self.path / self.LIST)
        self._noted.difference_update(names)


def cache_folder() -> Path | None:
    """Return where this package keeps what it can make anew; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "privtune"
    except RuntimeError:
        return None


def midnight() -> int:
    """Return this day's 00:00 UTC in seconds, the only time that is public."""
    # The moment of a release tells how long the sealed round took, and so how many trials it ran.
    return int(time.time()) // _DAY * _DAY


def forget_times(path: Path, *, within: bool = False) -> None:
    """Set when a file or folder (with ``within``, all in it, too) was written to the day."""
    day = midnight()
    for part in (path, *(path.rglob("*") if within else ())):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            os.utime(part, (day, day))
