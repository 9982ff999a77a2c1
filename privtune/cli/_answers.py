"""Answers of the accountant that commands which only show keep for each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from privtune.files import KeptLines, cache_folder

__all__ = ["answers_are_kept"]


@contextmanager
def answers_are_kept() -> Iterator[None]:
    """Let the account within look up what an earlier command has shown.

    Answers are kept in ``$XDG_CACHE_HOME/privtune``, each by the digest of what was asked and with one
    of its own: a damaged one is computed again. The file is that of these very sources and versions, so
    no other account's answers are read. Nothing that charges runs within: only what is shown is kept.
    """
    from privtune.accounting import answers

    if (folder := cache_folder()) is None:
        yield
        return
    account = _account()

    def check(text: str) -> str:
        return hashlib.sha256(f"{account} {text}".encode()).hexdigest()[:16]

    def parse(line: str) -> str:
        digest, text = line.split(" ", 1)
        if digest != check(text):
            raise ValueError("not as it was written")
        return text

    path = folder / f"answers-{account[:16]}.txt"
    with answers.given(KeptLines(path, parse, lambda text: f"{check(text)} {text}")):
        yield


def _account() -> str:
    """Return a digest of all that an answer hangs on beside what was asked."""
    import numpy
    import scipy

    from privtune import accounting, ledger

    found = hashlib.sha256(f"{numpy.__version__} {scipy.__version__}".encode())
    for package in (accounting, ledger):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
