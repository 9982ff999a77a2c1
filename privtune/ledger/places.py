"""Where a storage is: its URL, its file, its folder of artifacts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from privtune.errors import InvalidInputError
from privtune.files import (
    UntrustedPathError,
    check_own,
    create_private,
    is_strangers,
    open_append,
    own_target,
    owner_of,
    read_own,
    store_problem,
)
from privtune.ledger.errors import LedgerConnectionError, LedgerCorruptedError, LedgerError
from privtune.ledger.urls import masked_url
from privtune.names import STORAGE_EXAMPLES, check_text

STORE = ("", "-wal", "-shm", "-journal", "-heads", "-turn")
"""How the files of a SQLite store end: the database, SQLite's own beside it, and ours."""

_HEAD = re.compile(rb".+ \d+ [0-9a-f]{64}")
"""A line of the heads that are noted beside a SQLite ledger: budget, entry, digest."""

_FILE = re.compile(r"[^:@?#]+\.(db|sqlite3?)")
"""A path to a SQLite file: an ending tells it from a URL that lacks its scheme, which may hold a password."""


class Witness:
    """A file beside a SQLite ledger, with the hashes of its logs' last entries, which exposes old copies.

    A copy without its write-ahead log, or an old one, is sound in itself and has forgotten charges: what was
    noted elsewhere tells.

    Args:
        database: The file; None for PostgreSQL, whose heads are noted nowhere.
    """

    def __init__(self, database: Path | None) -> None:
        self._database = database
        self.path: Path | None = None
        if database is not None:
            self.path = database.with_name(f"{database.name}-heads")

    def forget(self) -> None:
        """Delete the file of noted hashes beside a database that no longer exists."""
        if self.path is None or not os.path.lexists(self.path):
            return
        # The last line may have broken off in a crash.
        lines = read_own(self.path).splitlines()
        complete_lines = lines[:-1]
        if not all(_HEAD.fullmatch(line) for line in complete_lines):
            raise LedgerError(
                f"{self.path} holds no heads of a ledger's logs: it is in the way, so remove it."
            )
        self.path.unlink()

    def note(self, budget: str, seq: int, head: str) -> None:
        """Append the hash of a log's last committed entry to the file, if that can be written."""
        if self.path is None:
            return
        with (
            suppress(OSError, UntrustedPathError),
            open_append(self.path, owner=self._owner()) as file,
        ):
            # One small write to a file that only grows: lines of two processes do not mix.
            file.write(f"{budget} {seq} {head}\n".encode())

    def read_heads(self, budget: str) -> Mapping[int, str]:
        """Return the hashes noted for a budget's log, by the number of the entry."""
        if self.path is None or not self.path.is_file():
            return {}
        content = read_own(self.path, owner=self._owner())
        text = content.decode(errors="replace")
        # Whole lines alone: one that broke off in a crash says nothing.
        pattern = rf"^{re.escape(budget)} (\d+) ([0-9a-f]{{64}})$"
        lines = re.findall(pattern, text, re.MULTILINE)
        return {int(seq): head for seq, head in lines}

    def _owner(self) -> int | None:
        """Return the user id of the owner of the database's file, None without a file."""
        return None if self._database is None else owner_of(self._database)

    def check(
        self,
        budget: str,
        noted_heads: Mapping[int, str],
        hashes: Mapping[int, str],
    ) -> None:
        """Refuse a log that lacks an entry whose hash was noted, or has another entry in its place.

        Args:
            budget: The budget's name.
            noted_heads: The heads that were noted, by number of the entry.
            hashes: Those of the log's entries, by number.

        Raises:
            LedgerCorruptedError: The log lacks a noted entry, or has another one in its place.
        """
        for seq, head in sorted(noted_heads.items()):
            if hashes.get(seq) == head:
                continue
            if seq in hashes:
                why = (
                    f"entry {seq} is not the one noted there: the log was rewritten, or another put in its "
                    "place"
                )
            else:
                why = (
                    f"it holds {len(hashes)} of {max(noted_heads)} entries: the database was copied without "
                    "its write-ahead log (the file that ends in -wal), or an older copy was put back"
                )
            raise LedgerCorruptedError(
                f"the log of budget {budget!r} is not what was noted in {self.path}; {why}. Use the "
                "newest whole copy; to go on from this one is to forget what was spent, and needs "
                "that file removed."
            )


def checked_url(url: str | Path) -> URL:
    """Return the URL, with its driver, of a storage given by URL or path, and refuse any other.

    Args:
        url: ``file.db``, ``sqlite:///file.db`` or ``postgresql://user@host/database``.

    Returns:
        The URL of a SQLite file, which need not exist yet, or of a PostgreSQL database. A link to a file is
        followed: of two names of one file each would have a write-ahead log, heads and turns of its own.

    Raises:
        InvalidInputError: It names no database that can be one.
        LedgerConnectionError: It is a link that a stranger may have made.
    """
    url = str(url) if isinstance(url, Path) else url
    shown_url = masked_url(str(url))

    def wrong(allowed: str, remedy: str = STORAGE_EXAMPLES) -> InvalidInputError:
        return InvalidInputError("storage", shown_url, allowed, remedy)

    try:
        parsed = _parse_url(url)
        backend = parsed.get_backend_name()
    except InvalidInputError as error:
        raise wrong(error.allowed) from None
    except (sa.exc.ArgumentError, AttributeError, ValueError):
        if "://" not in url and Path(url).is_dir():
            raise wrong("is a folder", f"Name a file in it: {Path(url) / 'privtune.db'}.") from None
        raise wrong("is no database URL") from None
    if backend == "postgresql":
        if "@" in (parsed.host or ""):
            raise wrong(
                "has an '@' in its host",
                "Percent-encode what is special in a password: @ is %40, / is %2F.",
            )
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise wrong("must be SQLite or PostgreSQL")
    path = database_path(parsed)
    if path is None or parsed.query.get("mode") == "memory":
        raise wrong("must name a file: a budget that is kept in memory is forgotten")
    try:
        Path(f"{path}-journal").exists()  # the longest name of SQLite's and ours beside it
        has_folder = path.parent.is_dir()
    except OSError as error:
        raise wrong(f"names no file that can be had here ({error.strerror})") from None
    if not has_folder:
        raise wrong(f"the folder {path.parent} does not exist", "Make it first.")
    if path.is_dir():
        raise wrong("is a folder", f"Name a file in it: {path / 'privtune.db'}.")
    if not path.is_symlink():
        return parsed
    try:
        target = own_target(path)
    except UntrustedPathError as error:
        raise LedgerConnectionError(str(error)) from None
    is_uri = (parsed.database or "").startswith("file:")
    return parsed.set(database=_file_uri(target) if is_uri else str(target))


def _file_uri(path: Path) -> str:
    """Return the ``file:`` URI of a path, by which SQLite opens the file."""
    return f"file:{quote(str(path))}"


def _parse_url(url: str) -> URL:
    """Parse the URL or the path of a database, without opening the database."""
    check_text(url, "storage")
    if _FILE.fullmatch(url):
        parsed = URL.create("sqlite", database=os.path.expanduser(url))
    else:
        parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
            raise ValueError
        # Reads the parameters, as a number; it warns of those of a URI where it is told of none.
        as_uri = parsed.update_query_dict({"uri": "true"})
        parsed.get_dialect()().create_connect_args(as_uri)
    return parsed


def artifact_root(url: str | Path) -> Path:
    """Return the folder for the models and trackers' files of a storage.

    ``PRIVTUNE_ARTIFACTS`` names it; else it lies beside a SQLite database, and for PostgreSQL in the user's
    folder of data, ``$XDG_DATA_HOME/privtune`` or ``~/.local/share/privtune``, by server and database.

    Raises:
        InvalidInputError: The storage names no store, or this user has no home.
    """
    folder = os.environ.get("PRIVTUNE_ARTIFACTS")
    if folder:
        return Path(folder).absolute()
    database = checked_url(url)
    path = database_path(database)
    if path is not None:
        return path.with_name(f"{path.stem}-artifacts")
    server = database.host or "local"
    port = database.port or 5432
    database_name = database.database or "postgres"
    name = f"{server}-{port}-{database_name}"
    # A host may be a folder of sockets, and a database may have any name.
    return data_folder() / f"{quote(name, safe='')}-artifacts"


def data_folder() -> Path:
    """Return the user's folder for files of this package, as ``~/.local/share/privtune``.

    Raises:
        InvalidInputError: The user has no home.
    """
    folder = os.environ.get("XDG_DATA_HOME")
    if folder:
        return Path(folder) / "privtune"
    try:
        home = Path.home()
    except RuntimeError:
        raise InvalidInputError(
            "storage",
            "PostgreSQL's",
            "needs a folder for files, and this user has no home",
            "Name one: PRIVTUNE_ARTIFACTS=FOLDER.",
        ) from None
    return home / ".local" / "share" / "privtune"


def database_path(url: URL) -> Path | None:
    """Return the absolute path of a SQLite database's file, None for any other database."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:"):
        return None
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
        return Path(name).absolute() if name not in ("", ":memory:") else None
    return Path(name).absolute()


def read_only_url(url: URL) -> URL:
    """Return a read-only URL of a SQLite file that cannot be written to, else the URL as it is."""
    path = database_path(url)
    if path is None or not path.is_file() or "immutable" in url.query:
        return url
    is_writable = all(os.access(place, os.W_OK) for place in (path, path.parent))
    if is_writable and url.query.get("mode") != "ro":
        return url
    query = dict(url.query)
    query.pop("mode", None)
    query["uri"] = "true"
    has_log = Path(f"{path}-wal").exists()
    if not has_log:  # nobody has it open: it is read as one that does not change
        query["immutable"] = "1"
    query["mode"] = "ro"
    return url.set(database=_file_uri(path), query=query)


def check_store(url: URL) -> None:
    """Refuse a SQLite store if a stranger may have put its database, or a file beside it, there.

    SQLite would play a log or a journal beside the database into it, and wait for a pipe without an end.

    Raises:
        LedgerConnectionError: One is no regular file, has another name, too, or belongs to another user
            than this one, root, or the owner of the database.
    """
    path = database_path(url)
    if path is None:
        return
    owner = owner_of(path)
    for end in STORE:
        file = Path(f"{path}{end}")
        try:
            check_own(file, owner=owner)
        except UntrustedPathError as error:
            raise LedgerConnectionError(str(error)) from None


def write_problem(url: URL) -> str | None:
    """Return why a SQLite store must not be written to, None if it may be."""
    path = database_path(url)
    return None if path is None else store_problem(path)


def is_of_stranger(url: URL) -> bool:
    """Return whether a SQLite store's file belongs to another user than this one and root."""
    path = database_path(url)
    return path is not None and is_strangers(path)


def is_missing(url: str | Path) -> bool:
    """Return whether a storage is a SQLite file that does not exist: to open the storage would create it.

    Raises:
        InvalidInputError: It names no database.
    """
    checked = checked_url(url)
    path = database_path(checked)
    if path is None or "mode" in checked.query:  # a mode says that the file is there
        return False
    return not path.exists()


def create_database(url: URL) -> None:
    """Create a SQLite database's file, readable by its owner alone, if there is none yet.

    Raises:
        LedgerConnectionError: Others may write to its folder.
    """
    path = database_path(url)
    if path is None or "mode" in url.query or path.exists():
        return
    problem = store_problem(path)
    if problem is not None:
        raise LedgerConnectionError(problem)
    with suppress(OSError):  # SQLite says why it cannot be created here
        # What was noted beside a database that is gone is not about this one.
        Witness(path).forget()
        create_private(path)
