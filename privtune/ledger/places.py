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
from privtune.files import create_private
from privtune.ledger.errors import LedgerCorruptedError, LedgerError
from privtune.ledger.urls import masked_url
from privtune.names import check_text

STORE = ("", "-wal", "-shm", "-journal", "-heads", "-turn")
"""How the files of a SQLite store end: the database, SQLite's own beside it, and ours."""

_HEAD = re.compile(rb".+ \d+ [0-9a-f]{64}")
"""A line of the heads that are noted beside a SQLite ledger: budget, entry, digest."""

_EXAMPLES = "Examples: runs/p.db, sqlite:///privtune.db, postgresql://user@host/database."
_FILE = re.compile(r"[^:@?#]+\.(db|sqlite3?)")
"""A path to a SQLite file: an ending tells it from a URL that lacks its scheme, which may hold a password."""


class Witness:
    """The heads of a SQLite ledger's logs, noted in a file beside the database."""

    def __init__(self, database: Path | None) -> None:
        # A copy without its write-ahead log, or an old one, is sound in itself and has forgotten charges.
        self.path = None if database is None else database.with_name(f"{database.name}-heads")

    def forget(self) -> None:
        """Delete the heads that were noted beside a database that is gone."""
        if self.path is None or not os.path.lexists(self.path):
            return
        # The last line may have broken off in a crash.
        lines = [] if self.path.is_symlink() else self.path.read_bytes().splitlines()[:-1]
        if self.path.is_symlink() or not all(_HEAD.fullmatch(line) for line in lines):
            raise LedgerError(
                f"{self.path} holds no heads of a ledger's logs: it is in the way, so remove it."
            )
        self.path.unlink()

    def note(self, budget: str, seq: int, head: str) -> None:
        """Note a head that was committed. What cannot be written is not noted: the log is whole."""
        if self.path is None:
            return
        with suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(file, "wb", buffering=0) as opened:
                # One small write to a file that only grows: lines of two processes do not mix.
                opened.write(f"{budget} {seq} {head}\n".encode())

    def seen(self, budget: str) -> Mapping[int, str]:
        """Return the heads noted for a budget, by number of the entry; read before the log is."""
        if self.path is None or not self.path.is_file():
            return {}
        text = self.path.read_text(encoding="utf-8", errors="replace")
        # Whole lines alone: one that broke off in a crash says nothing.
        lines = re.findall(rf"^{re.escape(budget)} (\d+) ([0-9a-f]{{64}})$", text, re.MULTILINE)
        return {int(seq): head for seq, head in lines}

    def check(self, budget: str, seen: Mapping[int, str], hashes: Mapping[int, str]) -> None:
        """Hold a log against the heads that were noted before it was read."""
        for seq, head in sorted(seen.items()):
            if hashes.get(seq) == head:
                continue
            why = (
                f"entry {seq} is not the one noted there: the log was rewritten, or another put in its "
                "place"
                if seq in hashes
                else f"it holds {len(hashes)} of {max(seen)} entries: the database was copied without "
                "its write-ahead log (the file that ends in -wal), or an older copy was put back"
            )
            raise LedgerCorruptedError(
                f"the log of budget {budget!r} is not what was noted in {self.path}; {why}. Use the "
                "newest whole copy; to go on from this one is to forget what was spent, and needs "
                "that file removed."
            )


def checked_url(url: str | Path) -> URL:
    """Return the URL, with its driver, of a storage given by URL or path; refuse what names no store."""
    url = str(url) if isinstance(url, Path) else url
    shown = masked_url(str(url))

    def wrong(allowed: str, remedy: str = _EXAMPLES) -> InvalidInputError:
        return InvalidInputError("storage", shown, allowed, remedy)

    try:
        check_text(url, "storage")
        parsed = (
            URL.create("sqlite", database=os.path.expanduser(url))
            if _FILE.fullmatch(url)
            else make_url(url)
        )
        backend = parsed.get_backend_name()
        if backend == "sqlite" and parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
            raise ValueError
        if backend == "sqlite":
            # Reads the parameters, as a number; it warns of those of a URI where it is told of none.
            parsed.get_dialect()().create_connect_args(parsed.update_query_dict({"uri": "true"}))
    except InvalidInputError as error:
        raise wrong(error.allowed) from None
    except (sa.exc.ArgumentError, AttributeError, ValueError):
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
        folder = path.parent.is_dir()
    except OSError as error:
        raise wrong(f"names no file that can be had here ({error.strerror})") from None
    if not folder:
        raise wrong(f"the folder {path.parent} does not exist", "")
    return parsed


def artifact_root(url: str | Path) -> Path:
    """Return the folder for models and trackers' files."""
    if given := os.environ.get("PRIVTUNE_ARTIFACTS"):
        return Path(given).absolute()
    checked = checked_url(url)
    if checked.get_backend_name() == "sqlite":
        path = Path(str(checked.database)).absolute()
        return path.with_name(f"{path.stem}-artifacts")
    return Path(f"{checked.database or 'postgres'}-artifacts").absolute()


def database_path(url: URL) -> Path | None:
    """Return the file of a SQLite database, also of one named by a ``file:`` URI; else None."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:"):
        return None
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
        return Path(name).absolute() if name not in ("", ":memory:") else None
    return Path(name).absolute()


def read_only_url(url: URL) -> URL:
    """Return a URL by which SQLite reads a file that it may not write, with no file beside it."""
    path = database_path(url)
    if path is None or not path.is_file() or "immutable" in url.query:
        return url
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    if writable and url.query.get("mode") != "ro":
        return url
    query = {key: value for key, value in url.query.items() if key != "mode"} | {"uri": "true"}
    if not Path(
        f"{path}-wal"
    ).exists():  # nobody has it open: it is read as one that does not change
        query["immutable"] = "1"
    return url.set(database=f"file:{quote(str(path))}", query={**query, "mode": "ro"})


def create_database(url: URL) -> None:
    """Create a SQLite database's file, for its owner alone; SQLite's own files take its mode."""
    path = database_path(url)
    if path is None or "mode" in url.query or path.exists():
        return
    with suppress(OSError):  # SQLite says why it cannot be created here
        Witness(
            path
        ).forget()  # what was noted beside a database that is gone is not about this one
        create_private(path)
