"""Hints of earlier searches for noise, kept between commands in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from privtune.accounting import hints
from privtune.files import cache_folder, open_private, private_folder

__all__ = ["searches_begin_at_hints"]

_MOST = 1 << 20  # bytes of the file, some ten thousand hints; a fuller one begins anew


class _Kept(dict[str, float]):
    """The lines of a file, a digest and a number each; what is set is added to it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in path.read_text("ascii").splitlines():
                with contextlib.suppress(ValueError):
                    key, number = line.split()
                    super().__setitem__(key, float(number))

    def __setitem__(self, key: str, place: float) -> None:
        super().__setitem__(key, place)
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            private_folder(self._path.parent)
            full = self._path.exists() and self._path.stat().st_size > _MOST
            with open_private(self._path, "w" if full else "a", "ascii") as file:
                file.write(f"{key} {place!r}\n")


def _file() -> Path | None:
    """Return where hints of these versions are kept; other accounts end their searches elsewhere."""
    if (folder := cache_folder()) is None:
        return None
    versions = " ".join(version(name) for name in ("privtune", "numpy", "scipy"))
    name = f"noise-{hashlib.sha256(versions.encode()).hexdigest()[:16]}.txt"
    return folder / name


@contextlib.contextmanager
def searches_begin_at_hints() -> Iterator[None]:
    """Let the searches within begin where those of earlier commands ended.

    They are kept in ``$XDG_CACHE_HOME/privtune``, a number by a digest of public facts each, and are
    checked by the accountant before they count. Whoever deletes them loses seconds.
    """
    path = _file()
    if path is None:
        yield
        return
    with hints.given(_Kept(path)):
        yield
