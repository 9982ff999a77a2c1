"""What installed packages add by entry points: strategies and training methods, found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import ByName, users_code

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class EntryPointError(PrivTuneError):
    """An installed package registers a strategy or a method that cannot be used."""


@dataclass(frozen=True)
class Registered:
    """What an installed package registers under a name; without a class, what the problem is."""

    name: str
    source: str
    found: type[Any] | None
    problem: str = ""


class Registry(ByName[T]):
    """Classes by name: those built in, which it iterates over, and those of installed packages.

    A package registers a class by an entry point of the ``group``, under its name. It is loaded when the
    name is asked for; what cannot be used raises ``EntryPointError``.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        homes: Mapping[str, str],
        *,
        lacking: Callable[[type[Any]], str],
        taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__(homes)
        self.kind, self.group, self._lacking, self._taken = kind, group, lacking, taken

    def is_built_in(self, name: str) -> bool:
        """Say whether a name is of this package."""
        return super().__contains__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name in self._points())

    def __getitem__(self, name: str) -> T:
        if self.is_built_in(name):
            return super().__getitem__(name)
        found: T = self._load(name, self._points()[name])
        return found

    def names(self) -> list[str]:
        """Return all names, those of installed packages included."""
        return sorted({*self, *self._points()})

    def registered(self) -> Iterator[Registered]:
        """Load and yield what installed packages register, in the order of names."""
        for name, points in sorted(self._points().items()):
            source = ", ".join(sorted(map(_source, points)))
            try:
                yield Registered(name, source, self._load(name, points))
            except EntryPointError as error:
                yield Registered(name, source, None, str(error))

    def _points(self) -> dict[str, list[EntryPoint]]:
        from importlib.metadata import entry_points

        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.group):
            known = found.setdefault(point.name, [])
            # The same one is found twice where a path is given twice.
            if all((point.value, _source(point)) != (k.value, _source(k)) for k in known):
                known.append(point)
        return found

    def _load(self, name: str, points: list[EntryPoint]) -> Any:
        who = " and ".join(sorted(map(_source, points)))
        what = f"{self.kind.capitalize()} {name!r} of {who}"
        if self.is_built_in(name) or self._taken(name):
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
                found = point.load()
        except InvalidInputError as error:
            raise EntryPointError(
                f"{what} cannot be used: {error} Mend or uninstall the package."
            ) from error
        if lacking := _lacking(name, found, self.kind) or self._lacking(found):
            raise EntryPointError(f"{what} cannot be used: {point.value} {lacking}.")
        return found


def _lacking(name: str, cls: object, kind: str) -> str:
    """Return what a class lacks to be found and described under a name; empty if nothing."""
    if not isinstance(cls, type) or not is_dataclass(cls):
        return f"must be a frozen dataclass of the {kind}'s options"
    if getattr(cls, "name", None) != name:
        return f"must have the name it is registered under, name = {name!r}"
    if not isinstance(getattr(cls, "summary", None), str):
        return "must have a summary, one line of text"
    try:
        get_type_hints(cls)
    except Exception as error:
        return f"must have types that can be read when it runs ({type(error).__name__}: {error})"
    return ""


def _source(point: EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
