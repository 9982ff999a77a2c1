"""Strategies, methods, tasks and metrics that installed packages add by entry points, found by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import ByName, users_code

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class EntryPointError(PrivTuneError):
    """An installed package registers a strategy, a method, a task or a metric that cannot be used."""


@dataclass(frozen=True)
class Registration:
    """A class that an installed package registers under a name, or the reason why it cannot be used.

    Attributes:
        name: The name that studies give.
        source: The package and its version.
        cls: The class, or of a task the function that makes it; None where it cannot be used.
        problem: Why it cannot be used, as a sentence.
    """

    name: str
    source: str
    cls: Any
    problem: str = ""


class Registry(ByName[T]):
    """A registry of classes by name: built-in ones, over which it iterates, and those of other packages.

    A package registers a class by an entry point of the ``group``, under its name. It is loaded when the
    name is asked for; what cannot be used raises ``EntryPointError``.

    Args:
        kind: What the classes are, as messages call one: ``strategy``.
        group: The group of entry points.
        homes: The path of each class that is built in, by its name.
        lacking: Returns what a class lacks to be one of the kind; an empty text if nothing.
        is_reserved: Whether a name is one of another registry, which must not be given twice.
        of_classes: False where functions are registered and no classes: nothing is looked for on them.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        homes: Mapping[str, str],
        *,
        lacking: Callable[[type[Any]], str],
        is_reserved: Callable[[str], bool] = lambda _: False,
        of_classes: bool = True,
    ) -> None:
        super().__init__(homes)
        self.kind = kind
        self.group = group
        self._lacking = lacking
        self._is_reserved = is_reserved
        self._of_classes = of_classes

    def is_built_in(self, name: str) -> bool:
        """Return whether a built-in class is registered under a name."""
        return super().__contains__(name)

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return isinstance(name, str) and name in self._points()

    def __getitem__(self, name: str) -> T:
        if self.is_built_in(name):
            return self._built_in(name)
        points = self._points()[name]
        cls: T = self._load(name, points)
        return cls

    def _built_in(self, name: str) -> T:
        """Return the built-in class of a name, imported from its path."""
        return super().__getitem__(name)

    def names(self) -> list[str]:
        """Return all names, those of installed packages included."""
        return sorted({*self, *self._points()})

    def registered(self) -> Iterator[Registration]:
        """Load and yield the registrations of installed packages, sorted by name."""
        for name, points in sorted(self._points().items()):
            source = ", ".join(_sources(points))
            try:
                yield Registration(name, source, self._load(name, points))
            except EntryPointError as error:
                yield Registration(name, source, None, str(error))

    def _points(self) -> dict[str, list[EntryPoint]]:
        """Return the entry points of installed packages by name: one, unless two packages share a name."""
        return _read_points(self.group, _state_of_path())

    def _load(self, name: str, points: list[EntryPoint]) -> Any:
        """Import and return the class that the entry point of a name registers.

        Raises:
            EntryPointError: It cannot be imported, is no class of this kind, or its name is another's, too.
        """
        who = " and ".join(_sources(points))
        what = f"{self.kind.capitalize()} {name!r} of {who}"
        if self.is_built_in(name) or self._is_reserved(name):
            raise EntryPointError(
                f"{what} is refused: the name is built in, so register it under another one."
            )
        if len(points) > 1:
            raise EntryPointError(
                f"{what} is refused: the name is registered twice; uninstall one."
            )
        (point,) = points
        try:
            with users_code(self.kind, point.value, "cannot be loaded"):
                cls = point.load()
        except InvalidInputError as error:
            raise EntryPointError(
                f"{what} cannot be used: {error} Mend or uninstall the package."
            ) from error
        problem = _find_problem(name, cls, self.kind) if self._of_classes else ""
        problem = problem or self._lacking(cls)
        if problem:
            raise EntryPointError(f"{what} cannot be used: {point.value} {problem}.")
        return cls


def _state_of_path() -> tuple[tuple[str, int], ...]:
    """Return each folder of ``sys.path`` with its time of change, by which a new package is noticed.

    An installer puts a folder of metadata there, or takes one away, and that changes the time.
    """
    state = []
    for folder in sys.path:
        try:
            changed = os.stat(folder or os.curdir).st_mtime_ns
        except OSError:  # there is no such folder, or it may not be looked at
            changed = 0
        state.append((folder, changed))
    return tuple(state)


@lru_cache(maxsize=32)
def _read_points(group: str, _state: tuple[tuple[str, int], ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name; the answer is cached for one state of ``sys.path``.

    To read them takes tens of milliseconds, and a page asks for the same metric many times.
    """
    from importlib.metadata import entry_points

    # The same one is found twice where a path is given twice, so each has its path and package as a key.
    by_name: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=group):
        key = (point.value, _source(point))
        of_name = by_name.setdefault(point.name, {})
        of_name.setdefault(key, point)
    return {name: list(points.values()) for name, points in by_name.items()}


def _find_problem(name: str, cls: object, kind: str) -> str:
    """Return why a class cannot be registered under a name, as a text; empty if it can."""
    if not isinstance(cls, type) or not is_dataclass(cls):
        return f"must be a frozen dataclass of the {kind}'s options"
    if getattr(cls, "name", None) != name:
        return f"must have the name it is registered under, name = {name!r}"
    if not isinstance(getattr(cls, "summary", None), str):
        return "must have a summary, one line of text"
    try:
        get_type_hints(cls)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        return f"must have types that can be read when it runs ({cause})"
    return ""


def _source(point: EntryPoint) -> str:
    """Return the name and version of an entry point's package, for messages."""
    package = point.dist
    if package is None:
        return "an unnamed package"
    return f"{package.name} {package.version}"


def _sources(points: list[EntryPoint]) -> list[str]:
    return sorted(map(_source, points))
