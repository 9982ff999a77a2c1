"""The one way to open PrivTune's own files: private to their owner, never put there by a stranger.

Whoever may write in a folder may plant a link, a pipe or a file of theirs under a name that we use. So
every lock, log, copy and export is opened here: by its folder's descriptor, without following a link,
without truncating what is there, and looked at once it is open. ``tests/test_files.py`` refuses other ways.

Folders and files are made with modes 0700 and 0600, whatever the umask. The exception is declared: where
``PRIVTUNE_ARTIFACTS`` names a folder of mode 3770 whose group is one of the user's, what lies below is
that group's, too (3770 and 0660), so that colleagues' workers can read each other's results.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from privtune.errors import InvalidInputError, PrivTuneError

if sys.platform != "win32":
    import grp
    import pwd

_DAY = 86_400
_MOST = 16 << 20  # bytes of a spec, an event, a certificate, a key
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_MOST_LINKS = 40
# setgid: what is made in it is the group's; sticky: nobody removes what others made.
_SHARED = 0o3770
# A link is refused, a pipe is not waited for, and a child that was forked inherits nothing.
_CAREFUL = 0
if os.name == "posix":
    _CAREFUL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY
_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
)
_REMEDIES = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Make room in your quota",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "Choose a folder that you may write to",
    errno.EPERM: "Choose a folder that you may write to",
    errno.EROFS: "Choose a folder that can be written to",
    errno.ENOENT: "Make its folder, or choose one that is there",
}


class UntrustedPathError(PrivTuneError):
    """A file or folder of PrivTune's own was made by another user, or can be changed by one."""


class UnwrittenFileError(PrivTuneError):
    """A file could not be written: all parts of it are removed, and an earlier version is unchanged."""

    def __init__(self, path: Path, error: OSError) -> None:
        cause = error.strerror or error
        remedy = _REMEDIES.get(error.errno or 0, "Mend that")
        super().__init__(
            f"{path} could not be written: {cause}. {remedy}, and run the command again."
        )


def _kind_in_words(status: os.stat_result, other: str = "a device") -> str:
    """Return the kind of a path that is no regular file, in words with an article.

    Args:
        status: Of the path, without following a link.
        other: What stands for kinds that have no word here.
    """
    kind = stat.S_IFMT(status.st_mode)
    return _KINDS.get(kind, other)


def regular_file(path: Path, *, most: int | None = None) -> Path:
    """Return a user's path if it is a regular file of allowed size; refuse it otherwise, before opening.

    Raises:
        OSError: ``strerror`` says what it is.
    """
    status = os.stat(path)
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):  # opening a pipe waits, and a device never ends
        kind = _kind_in_words(status)
        raise OSError(0, f"it is {kind}, not a regular file")
    if most is not None and size > most:
        raise OSError(0, f"it has {size:,} bytes; {most:,} are the most that is read")
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
        status = regular_file(path).stat()
        content = read_bounded(path)
    except OSError as error:
        raise InvalidInputError("file", str(path), f"cannot be read ({error.strerror})") from None
    mode = status.st_mode & 0o777
    if mode & 0o077:
        allowed = f"must be readable by its owner alone, and has mode {mode:04o}"
        raise InvalidInputError("file", str(path), allowed, f"Run: chmod 600 {path}")
    return content


def shared_group(path: Path) -> int | None:
    """Return the group of the folder in ``PRIVTUNE_ARTIFACTS`` if a path lies in it; None otherwise."""
    declared = os.environ.get("PRIVTUNE_ARTIFACTS")
    if not declared or os.name != "posix":
        return None
    root = Path(declared).absolute()
    if not path.absolute().is_relative_to(root):
        return None
    try:
        status = root.stat()
    except OSError:  # it is still to be made, for its owner alone
        return None
    group = status.st_gid
    memberships = {os.getegid(), *os.getgroups()}
    is_member = group in memberships
    is_shared = stat.S_IMODE(status.st_mode) == _SHARED
    if not is_member or not is_shared:
        return None
    return group


def private_folder(path: Path, *, root: Path | None = None) -> Path:
    """Make a folder and its missing parents with mode 0700; one that is there keeps its mode.

    Args:
        path: The folder.
        root: A folder of ours above it: none below that may be a link.
    """
    if root is None:
        folders = [*reversed(path.parents), path]
        for folder in folders:
            if not folder.is_dir():
                _make_folder(folder)
        return path
    private_folder(root)
    with _opened_folder(path, root, make=True):
        return path


def _make_folder(path: Path) -> None:
    """Make a folder with mode 0700, which another process may make at the same moment."""
    try:
        path.mkdir(0o700)
    except FileExistsError:  # another process was faster, or a file is in the way
        if not path.is_dir():
            raise


@contextlib.contextmanager
def _opened_folder(
    path: Path,
    root: Path | None,
    *,
    make: bool = False,
) -> Iterator[int | None]:
    """Yield the descriptor of a folder below a root, opened without following links; None if root is None.

    Without a root it is None: then names are looked up as ever, in the folder that the user named.
    """
    if root is None or os.name != "posix":
        yield None
        return
    is_folder = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    no_link = is_folder | os.O_NOFOLLOW
    group = shared_group(path)
    place = root
    folder = os.open(root, is_folder)  # the root itself may be a link of the user's
    try:
        for part in path.relative_to(root).parts:
            place = place / part
            try:
                if make:
                    _make_below(folder, part, group)
                below = os.open(part, no_link, dir_fd=folder)
            except OSError as error:
                _refuse_other_kinds(place, part, folder, stat.S_IFDIR)
                raise OSError(error.errno, error.strerror, str(place)) from None
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _make_below(folder: int, name: str, group: int | None) -> None:
    """Make a folder in an open one, unless it exists: private, or shared with a group."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
        if group is not None:
            os.chmod(name, _SHARED, dir_fd=folder)


def own_folder(path: Path, *, root: Path | None = None) -> Path:
    """Make a folder of studies, and refuse it if another user could put files in the place of ours.

    Args:
        path: The folder.
        root: A folder of ours above it: none below that may be a link.

    Raises:
        UntrustedPathError: It belongs to another user, or others may write to it, and no group was
            declared that shares it.
    """
    private_folder(path, root=root)
    problem = folder_problem(path)
    if problem is not None:
        raise UntrustedPathError(problem)
    return path


def folder_problem(path: Path) -> str | None:
    """Return why a folder of studies cannot be trusted, with the remedy, or None if it can."""
    try:
        link = path.lstat()
        status = path.stat()
    except FileNotFoundError:
        return None
    is_link = stat.S_ISLNK(link.st_mode)
    if is_link and not _is_trusted(link):
        return f"{path} is a link of another user (uid {link.st_uid}): remove it, and run the command again."
    mode = stat.S_IMODE(status.st_mode)
    if status.st_gid == shared_group(path) and not mode & 0o007:
        return None
    if not _is_trusted(status):
        return (
            f"{path} belongs to another user (uid {status.st_uid}), who may put files there in the place "
            "of yours. Keep your files in a folder of your own: export PRIVTUNE_ARTIFACTS=FOLDER."
        )
    if not mode & 0o022:
        return None
    share = ""
    if os.environ.get("PRIVTUNE_ARTIFACTS") and mode & 0o020:
        share = f" To share it with its group, of which you must be a member: chmod 3770 {path}"
    return (
        f"Others may write to {path} (mode {mode:04o}), and put files there in the place of yours. Look "
        f"through it, then run: chmod go-w {path}{share}"
    )


def store_problem(path: Path) -> str | None:
    """Return why a database's file must not be written to, with the remedy, or None if it may.

    Whoever owns it, or may rename files in its folder, can put another in its place: charges would be lost.

    Args:
        path: The file, which need not be there.
    """
    if os.name != "posix" or shared_group(path) is not None:
        return None
    if is_strangers(path):
        return (
            f"{path} belongs to another user (uid {path.stat().st_uid}): it is read, and not written to. "
            "Keep a database of your own (--storage FILE), or share one by PostgreSQL."
        )
    folder = path.parent
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if is_strangers(folder):
        who = f"{folder} belongs to another user (uid {status.st_uid}), who may"
        remedy = "Keep the database in a folder of your own: --storage FILE."
    else:
        # In a sticky folder nobody renames what is another's.
        if mode & stat.S_ISVTX or not _is_written_by_others(status):
            return None
        who = f"Others may write to {folder} (mode {mode:04o}), and"
        remedy = f"Run: chmod go-w {folder}"
    return f"{who} put another file in the place of {path.name}: nothing is written there. {remedy}"


def _is_written_by_others(status: os.stat_result) -> bool:
    """Return whether a folder's mode lets all users, or other members of its group, write to it.

    A group that some systems give each user alone has no others.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    return not _is_own_group(status.st_gid)


def is_strangers(path: Path) -> bool:
    """Return whether a path belongs to a user other than this one and root; always False for root."""
    if os.name != "posix" or os.geteuid() == 0:
        return False
    if not path.exists():
        return False
    return not _is_trusted(path.stat())


def is_private_group(folder: Path) -> bool:
    """Return whether this user is the only member of a folder's group, and strangers may not write to it."""
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        return False
    return _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group, as some systems give each user one."""
    if sys.platform == "win32":
        return True
    try:
        members = set(grp.getgrgid(group).gr_mem)
        for entry in pwd.getpwall():
            if entry.pw_gid == group:  # whose first group it is stands in no list of members
                members.add(entry.pw_name)
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return members <= {user.pw_name, "root"}


def _is_trusted(status: os.stat_result, owner: int | None = None) -> bool:
    """Return whether a file's owner is this user, root, or the given owner."""
    if os.name != "posix":
        return True
    return status.st_uid in (os.geteuid(), 0, owner)


def made_private(path: Path) -> bool:
    """Set owner-only permissions where this user may; return whether others can still open the path."""
    try:
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        if not mode & 0o077:
            return False
        if shared_group(path) == status.st_gid:
            return bool(mode & 0o007)
        # Windows has no owners by number: whoever may change the mode is one.
        user = getattr(os, "geteuid", lambda: status.st_uid)()
        if status.st_uid != user:
            return True
        path.chmod(mode & 0o700)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def owner_of(path: Path) -> int | None:
    """Return the id of the user whom a file belongs to, None if it is not there."""
    try:
        return path.stat().st_uid
    except OSError:
        return None


def open_own(
    path: Path,
    flags: int,
    *,
    root: Path | None = None,
    owner: int | None = None,
) -> int:
    """Open one of our files and return its descriptor; refuse one that a stranger may have put there.

    No link is followed, no pipe is waited for, nothing is truncated. A new file is its owner's alone.

    Args:
        path: The file.
        flags: As of :func:`os.open`; ``O_TRUNC`` is refused: :func:`write_whole` replaces a file.
        root: A folder of ours above it: none between may be a link.
        owner: A user whose files are trusted as well, such as the one whom the database beside it belongs to.

    Raises:
        UntrustedPathError: It is no regular file, belongs to another user, or has another name, too (a
            hard link), and is to be written to.
        OSError: It cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     (Path(name) / "log").symlink_to("/etc/passwd")
        ...     open_own(Path(name) / "log", os.O_RDONLY)
        Traceback (most recent call last):
            ...
        privtune.files.UntrustedPathError: ...log is a link, where a file of PrivTune's belongs...
    """
    if flags & os.O_TRUNC:
        raise ValueError("a file that is there is replaced, and never truncated")
    with _opened_folder(path.parent, root) as folder:
        # Without a descriptor the system is told the whole path.
        name = str(path) if folder is None else path.name
        return _open_in(folder, name, path, flags, owner)


def _open_in(
    folder: int | None,
    name: str,
    path: Path,
    flags: int,
    owner: int | None,
) -> int:
    """Open a file by its name in an open folder, check that it is ours, and return its descriptor.

    Args:
        folder: The folder's descriptor; None where ``name`` is the whole path.
        name: What the system calls the file in the folder.
        path: What messages call it.
        flags: As of :func:`os.open`.
        owner: A user whose files are trusted as well.
    """
    group = shared_group(path)
    try:
        file, is_new = _open_or_make(folder, name, flags | _CAREFUL)
    except FileExistsError:
        raise
    except OSError as error:
        _refuse_other_kinds(path, name, folder, stat.S_IFREG)
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        if is_new and group is not None:
            os.fchmod(file, 0o660)
        _check_own(path, os.fstat(file), flags, group, owner)
    except BaseException:
        os.close(file)
        raise
    return file


def _open_or_make(
    folder: int | None,
    name: str,
    flags: int,
) -> tuple[int, bool]:
    """Return the descriptor of a file, and whether it was made by this call."""
    if not flags & os.O_CREAT:
        return os.open(name, flags, dir_fd=folder), False
    new_only = flags | os.O_EXCL
    try:
        descriptor = os.open(name, new_only, 0o600, dir_fd=folder)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
    else:
        return descriptor, True
    # Linux lets nobody "create" another's file in a sticky folder, even one that is there.
    no_create = flags & ~os.O_CREAT
    try:
        return os.open(name, no_create, dir_fd=folder), False
    except FileNotFoundError:  # it was removed in between
        return _open_or_make(folder, name, flags)


def check_own(path: Path, *, owner: int | None = None) -> None:
    """Refuse a file that a library will open by name if a stranger may have put it there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    group = shared_group(path)
    _check_own(path, status, os.O_RDWR, group, owner)


def own_target(path: Path) -> Path:
    """Return where links of this user's or root's lead in the end; refuse a link of another user.

    Raises:
        UntrustedPathError: A link belongs to another user, or leads in a circle.
    """
    place = path
    for _ in range(_MOST_LINKS):
        try:
            status = place.lstat()
        except FileNotFoundError:
            return place
        if not stat.S_ISLNK(status.st_mode):
            return place
        if not _is_trusted(status):
            raise _untrusted(place, f"a link of another user (uid {status.st_uid})")
        place = place.parent.resolve() / place.readlink()
    raise _untrusted(path, "a link that leads in a circle")


def _check_own(
    path: Path,
    status: os.stat_result,
    flags: int,
    group: int | None,
    owner: int | None,
) -> None:
    """Refuse a file that is irregular, is another user's, or has a second hard link and is to be written."""
    if not stat.S_ISREG(status.st_mode):
        raise _untrusted(path, _kind_in_words(status))
    # In a folder that is shared nobody but a member of its group can have made it.
    is_shared = group is not None and status.st_gid == group
    if not (is_shared or _is_trusted(status, owner)):
        raise _untrusted(path, f"a file of another user (uid {status.st_uid})")
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    if is_written and status.st_nlink > 1:
        raise _untrusted(path, "a file that has another name, too (a hard link)")


def _refuse_other_kinds(path: Path, name: str, folder: int | None, kind: int) -> None:
    """Refuse a name that exists as another kind of file than the given one."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return
    if stat.S_IFMT(status.st_mode) == kind:
        return
    if kind == stat.S_IFREG:
        raise _untrusted(path, _kind_in_words(status))
    raise _untrusted(path, _kind_in_words(status, "no folder"), "folder")


def _untrusted(path: Path, what: str, expected: str = "file") -> UntrustedPathError:
    """Return the error that refuses a path where a stranger may have put something else than ours.

    Args:
        path: Where it is.
        what: What it is, with its article.
        expected: What belongs there, a file or a folder.
    """
    return UntrustedPathError(
        f"{path} is {what}, where a {expected} of PrivTune's belongs: it was not touched. Look who put it "
        "there, and move it out of the way."
    )


def create_private(path: Path) -> bool:
    """Create an empty file with mode 0600; return False if there was a file already."""
    try:
        file = open_own(path, _NEW)
    except FileExistsError:
        return False
    os.close(file)
    return True


def read_own(
    path: Path,
    *,
    root: Path | None = None,
    owner: int | None = None,
) -> bytes:
    """Return the content of one of our files; see :func:`open_own`."""
    descriptor = open_own(path, os.O_RDONLY, root=root, owner=owner)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def open_append(
    path: Path,
    *,
    root: Path | None = None,
    owner: int | None = None,
) -> IO[bytes]:
    """Open one of our files for appending, without a buffer; see :func:`open_own`."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = open_own(path, flags, root=root, owner=owner)
    return os.fdopen(descriptor, "wb", buffering=0)


@contextlib.contextmanager
def open_whole(
    path: Path,
    *,
    root: Path | None = None,
    replace: bool = True,
    partial: str | None = None,
) -> Iterator[IO[bytes]]:
    """Yield a draft file that gets its final name if the ``with`` block succeeds, and is removed if not.

    Args:
        path: Its name; only a regular file may be there.
        root: A folder of ours above it: none between may be a link.
        replace: Whether it may take the place of one that is there.
        partial: Its name until then, in the same folder; random if not given.

    Raises:
        UntrustedPathError: Something else than a regular file is there.
        FileExistsError: A file is there, and is not to be replaced.
        UnwrittenFileError: The file could not be written.
    """
    if not path.name:
        raise UnwrittenFileError(path, IsADirectoryError(errno.EISDIR, "it is a folder"))
    draft = partial or f".privtune-partial-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(_opened_folder(path.parent, root))
            place = path.parent if folder is None else Path()
            target = str(place / path.name)
            source = str(place / draft)
            _refuse_other_kinds(path, target, folder, stat.S_IFREG)
            descriptor = _open_in(folder, source, path.with_name(draft), _NEW, None)
        except OSError as error:
            raise UnwrittenFileError(path, error) from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if os.utime in os.supports_fd:
                    day = midnight()
                    os.utime(descriptor, (day, day))
                os.fsync(descriptor)
            name_file(source, target, replace=replace, folder=folder)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _DISK and error.filename is not None:
                raise  # of another file that the block reads
            raise UnwrittenFileError(path, error) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(source, dir_fd=folder)


def name_file(
    source: str | Path,
    target: str | Path,
    *,
    replace: bool,
    folder: int | None = None,
) -> None:
    """Move a written file to its final name, in the same folder or in one given as a descriptor."""
    if replace:
        os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)
        return
    try:  # unlike a rename, it fails where a file has come meanwhile
        os.link(source, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            problem = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, problem, target) from None
        os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder of ours to a new name or over an empty folder, completely or not at all.

    Raises:
        UnwrittenFileError: A file or the folder could not be written.
    """
    identifier = secrets.token_hex(8)
    draft = target.with_name(f".privtune-partial-{identifier}")
    private_folder(draft)
    try:
        for path in sorted(source.rglob("*")):
            place = draft / path.relative_to(source)
            if path.is_dir():
                private_folder(place)
                continue
            with path.open("rb") as content, open_whole(place) as file:
                shutil.copyfileobj(content, file)
        draft.rename(target)
    except UnwrittenFileError:
        raise
    except OSError as error:
        raise UnwrittenFileError(target, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_through(path: Path) -> None:
    """Force a file that a library wrote from the system's cache to the disk."""
    file = open_own(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(
    path: Path,
    content: str | bytes,
    *,
    root: Path | None = None,
    replace: bool = True,
    partial: str | None = None,
) -> None:
    """Write a file for its owner alone, completely or not at all; see :func:`open_whole`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     write_whole(Path(name) / "page.html", "ε = 1")
        ...     path = Path(name) / "page.html"
        ...     path.read_text(encoding="utf-8"), oct(path.stat().st_mode & 0o777)
        ('ε = 1', '0o600')
    """
    if isinstance(content, str):
        # Half of a surrogate pair, as a text of YAML may hold, is written as JSON escapes it.
        content = content.encode(errors="backslashreplace")
    with open_whole(path, root=root, replace=replace, partial=partial) as file:
        file.write(content)


def json_lines(document: Mapping[str, object]) -> str:
    """Return a document as JSON text of a line a key, and a line an item where a value is a list.

    Python indents JSON without its C code, which takes ten times as long: certificates hold all charges.

    Args:
        document: JSON-ready.

    Raises:
        ValueError: If a number in it is infinite or NaN, which JSON has no notation for.

    Example:
        >>> print(json_lines({"name": "clinic", "entries": [{"seq": 1}, {"seq": 2}]}), end="")
        {
        "name": "clinic",
        "entries": [
        {"seq": 1},
        {"seq": 2}
        ]
        }
    """
    encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n".join(map(encode, value))
            text = f"[\n{items}\n]"
        else:
            text = encode(value)
        lines.append(f"{encode(key)}: {text}")
    content = ",\n".join(lines)
    return f"{{\n{content}\n}}\n"


@dataclass(frozen=True)
class _Opened:
    """An open folder: its path, and its descriptor where the system has one."""

    path: Path
    descriptor: int | None

    def name(self, name: str) -> str:
        """Return an entry's name for system calls: bare with a descriptor, else with the folder's path."""
        if self.descriptor is None:
            return str(self.path / name)
        return name

    def names(self) -> list[str]:
        """Return the names of the folder's entries."""
        if self.descriptor is None:
            return os.listdir(self.path)
        return os.listdir(self.descriptor)

    def remove(self, name: str) -> bool:
        """Delete an entry other than a folder; return whether the name is free now.

        In a folder that is shared, another member's file stays.
        """
        place = self.name(name)
        try:
            status = os.stat(place, dir_fd=self.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                return False
            os.unlink(place, dir_fd=self.descriptor)
        except FileNotFoundError:
            return True
        except PermissionError:
            if _is_trusted(status):
                raise
            return False
        return True


class OwnFolder:
    """A folder whose owners list the files that they make there, so that each deletes only its own.

    A list in the folder, ``.privtune``, names each file before it is made: a process that is killed
    leaves no file that is not listed. A line is JSON: the owner's id and the file's path in the folder.
    One line more marks the folder itself: the owner's id, nothing, and the folder's id.

    Args:
        path: The folder; it is made with its first file.
        owner: The owner's id.
        note: Hears the folder's id before the first file is made there.

    Example:
        >>> import tempfile
        >>> folder = OwnFolder(Path(tempfile.mkdtemp()) / "toy", "an id")
        >>> _ = folder.write("arm/model", b"ours")
        >>> _ = (folder.path / "arm" / "notes").write_text("the user's")
        >>> folder.remove()
        []
        >>> [path.name for path in folder.path.rglob("*")]
        ['arm', 'notes']
    """

    LIST = ".privtune"

    def __init__(
        self,
        path: Path,
        owner: str,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self._owner = owner
        self._note = note
        self._names: set[str] = set()  # those that this object has listed

    def file(self, name: str) -> Path:
        """Return the path of a file that is to be made, after listing its name and making its folder.

        A name that ends in ``/`` is a folder that a library fills: the files directly in it are listed.
        """
        path = self.path / name
        if not self._names:
            self._begin()
        folder = path if name.endswith("/") else path.parent
        private_folder(folder, root=self.root)
        if name not in self._names:
            self._append([self._owner, name])
            self._names.add(name)
        return path

    def _begin(self) -> None:
        """Mark the folder with an id before its first file, and pass that id to the owner's ``note``."""
        own_folder(self.root)
        own_folder(self.path, root=self.root)
        mark = self.mark()
        if mark is None:
            mark = uuid.uuid4().hex
            self._append([self._owner, "", mark])
        if self._note is not None:
            self._note(mark)

    def _append(self, line: list[str]) -> None:
        """Append a line to the folder's list in one write, so that lines of two processes do not mix."""
        # A line break before it, too: half a line of a killed process spoils no other.
        text = f"\n{json.dumps(line)}\n"
        content = text.encode()
        path = self.path / self.LIST
        with open_append(path, root=self.root) as file:
            try:
                file.write(content)
            except OSError as error:  # which names no file
                raise UnwrittenFileError(path, error) from error
        forget_times(path)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file in the folder completely or not at all, and return its path."""
        identifier = secrets.token_hex(8)
        partial = self.file(f"{name}.partial-{identifier}")
        path = self.file(name)
        write_whole(path, content, root=self.root, partial=partial.name)
        return path

    def read(self, name: str) -> bytes:
        """Return the bytes of a file in the folder."""
        # The folder's owner was looked at when the study was opened.
        owner = owner_of(self.path)
        return read_own(self.path / name, root=self.root, owner=owner)

    @property
    def root(self) -> Path:
        """The parent folder, which holds the folders of all studies."""
        return self.path.parent

    def forget_times(self, name: str) -> None:
        """Set the times of a file, or a subfolder with everything in it, to today's 00:00 UTC.

        Those of the folder itself, too: they tell when something was last made in it.
        """
        forget_times(self.path / name, within=True)
        forget_times(self.path)

    def mark(self) -> str | None:
        """Return the folder's id from its list, or None if this owner has made no file in it."""
        for line in self._lines(self.path):
            if len(line) == 3 and line[0] == self._owner:
                return str(line[2])
        return None

    def names(self) -> list[str]:
        """Return the listed names of this owner's files, which may be deleted already."""
        return [name for owner, name in self.listed(self.path) if owner == self._owner]

    def files(self) -> Iterator[str]:
        """Yield this owner's listed files that exist, each by its path in the folder."""
        for name in self.names():
            path = self.path / name
            files = [path]
            if name.endswith("/"):
                files = sorted(path.glob("*"))
            for file in files:
                if file.is_symlink() or not file.is_file():
                    continue
                place = file.relative_to(self.path)
                yield str(place)

    @classmethod
    def listed(cls, path: Path) -> list[tuple[str, str]]:
        """Return the owners and names that a folder's list holds, except names that lead out of it."""
        names: dict[tuple[str, str], None] = {}
        for line in cls._lines(path):
            if len(line) != 2:  # the mark of the folder
                continue
            owner, name = map(str, line)
            place = Path(name)
            if ".." not in place.parts and not place.is_absolute():
                names[owner, name] = None
        return list(names)

    @classmethod
    def _lines(cls, path: Path) -> list[list[Any]]:
        """Return the complete lines of a folder's list, each parsed from JSON."""
        try:
            content = read_own(
                path / cls.LIST,
                root=path.parent,
                owner=owner_of(path),
            )
        except OSError:
            return []
        lines: list[list[Any]] = []
        for text in content.splitlines():
            with contextlib.suppress(ValueError):  # half a line of a killed process
                line = json.loads(text)
                if isinstance(line, list):
                    lines.append(line)
        return lines

    def remove(self, within: str = "") -> list[Path]:
        """Delete this owner's listed files, of one part (``ARM/``) or all, and folders that become empty.

        Returns:
            What stays: a listed name that is a folder now, or that a link leads away from here.
        """
        remainder: list[Path] = []
        folders = {Path(within)} if within else set()
        names = [name for name in self.names() if name.startswith(within)]
        for name in names:
            place = Path(name)
            folders.update(place.parents)
            if name.endswith("/"):  # a library fills it
                folders.add(place)
                remainder += self._remove_files(place)
            else:
                remainder += self._remove_file(place)
        folders.discard(Path())  # the folder itself, which goes last
        self._remove_folders(folders)
        if within:
            self._forget(names)
        elif not remainder:
            if names or self.mark() is not None:
                (self.path / self.LIST).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        return remainder

    def _remove_folders(self, folders: Collection[Path]) -> None:
        """Delete the empty ones of the given folders, innermost first."""
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            # It holds files of others, or is gone.
            with (
                contextlib.suppress(OSError, UntrustedPathError),
                self._opened(folder.parent) as parent,
            ):
                os.rmdir(parent.name(folder.name), dir_fd=parent.descriptor)

    @contextlib.contextmanager
    def _opened(self, part: Path) -> Iterator[_Opened]:
        """Yield a subfolder that is held open, so that one put in its place later is not touched."""
        path = self.path / part
        with _opened_folder(path, self.root) as descriptor:
            yield _Opened(path, descriptor)

    def _remove_file(self, file: Path) -> list[Path]:
        """Delete a listed file; return its path in a list if it could not be deleted, else an empty list."""
        path = self.path / file
        try:
            with self._opened(file.parent) as folder:
                is_gone = folder.remove(file.name)
        except FileNotFoundError:
            return []
        except UntrustedPathError:  # a link leads away from here
            is_gone = not path.exists()
        return [] if is_gone else [path]

    def _remove_files(self, folder: Path) -> list[Path]:
        """Delete the files directly in a listed folder; return its path in a list if a link stands for it."""
        path = self.path / folder
        try:
            with self._opened(folder) as place:
                for name in place.names():
                    place.remove(name)
        except FileNotFoundError:
            return []
        except UntrustedPathError:
            return [path] if path.exists() else []
        return []

    def _forget(self, names: Collection[str]) -> None:
        """Blank the list's lines of deleted files: their number is the secret number of a round's trials."""
        lines: set[bytes] = set()
        for name in names:
            line = json.dumps([self._owner, name])
            lines.add(line.encode())
        path = self.path / self.LIST
        with contextlib.suppress(OSError):
            descriptor = open_own(path, os.O_RDWR, root=self.root)
            self._blank(descriptor, lines)
        forget_times(path)
        self._names.difference_update(names)

    @staticmethod
    def _blank(descriptor: int, lines: Collection[bytes]) -> None:
        """Overwrite lines of a list with blanks, in place: other processes append meanwhile."""
        with os.fdopen(descriptor, "rb+") as file:
            place = 0
            for line in file.read().splitlines(keepends=True):
                text = line.strip()
                if text in lines:
                    blanks = b" " * len(text)
                    os.pwrite(descriptor, blanks, place)
                place += len(line)


def cache_folder() -> Path | None:
    """Return the folder of this package's cache, or None for a user without a home folder."""
    variable = os.environ.get("XDG_CACHE_HOME")
    if variable:
        return Path(variable) / "privtune"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "privtune"


def midnight() -> int:
    """Return today's 00:00 UTC in seconds since 1970: any more exact time is secret."""
    # The moment of a release tells how long the sealed round took, and so how many trials it ran.
    days = int(time.time()) // _DAY
    return days * _DAY


def forget_times(path: Path, *, within: bool = False) -> None:
    """Set the times of a file or folder (and, if ``within``, of everything in it) to today's 00:00 UTC."""
    day = midnight()
    paths = [path]
    if within:
        paths.extend(path.rglob("*"))
    for part in paths:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            os.utime(part, (day, day))
