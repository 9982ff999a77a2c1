"""A second memory of the heads of a SQLite ledger's logs, in a file beside the database.

Whoever copies ``privtune.db`` without its write-ahead log, or puts an old copy back, has a log that
is sound in itself and has forgotten charges. The file ``privtune.db-heads`` gets one line for each
commit, after it: budget, number of the last entry, its hash. So it never says more than the log
once held, it may say less after a crash, and a log that lacks what it says has lost something.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from privtune.ledger.errors import LedgerCorruptedError, LedgerError

Seen = Mapping[int, str]
_LINE = re.compile(rb".+ [0-9]+ [0-9a-f]{64}")


def forget_heads(database: Path) -> None:
    """Delete the heads that were noted beside a database that is gone.

    Raises:
        LedgerError: If the file of that name holds something else.
    """
    path = database.with_name(f"{database.name}-heads")
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    # The last line may have broken off in a crash.
    if not all(_LINE.fullmatch(line) for line in lines[:-1]) or path.is_symlink():
        raise LedgerError(
            f"{path} holds no heads of a ledger's logs: it is in the way, so remove it."
        )
    path.unlink()


class Witness:
    """The heads that were noted beside a database.

    Args:
        database: The database's file; None where there is none, as with PostgreSQL.
    """

    def __init__(self, database: Path | None) -> None:
        self.path = None if database is None else database.with_name(f"{database.name}-heads")

    def note(self, budget: str, seq: int, head: str) -> None:
        """Note a head that was committed. What cannot be written is not noted: the log is whole."""
        if self.path is None:
            return
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            # One small write to a file that only grows: lines of two processes do not mix.
            os.write(file, f"{budget} {seq} {head}\n".encode())
        except OSError:
            return
        finally:
            os.close(file)

    def seen(self, budget: str) -> Seen:
        """Return the heads noted for a budget, by number of the entry; read before the log is."""
        if self.path is None or not self.path.is_file():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            parts = line.split(" ")
            # A line that broke off in a crash says nothing.
            if (
                len(parts) == 3
                and parts[0] == budget
                and parts[1].isdecimal()
                and len(parts[2]) == 64
            ):
                found[int(parts[1])] = parts[2]
        return found

    def check(self, budget: str, seen: Seen, hashes: Mapping[int, str]) -> None:
        """Hold a log against the heads that were noted before it was read.

        Args:
            budget: The budget's name.
            seen: What :meth:`seen` returned.
            hashes: The hash of every entry of the log, by number.

        Raises:
            LedgerCorruptedError: The log lacks an entry, or has another in its place.
        """
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
