"""Strategies by name: those built in, and those that installed packages register.

A package registers a strategy by an entry point of the group ``privtune.strategies``, whose name is
the strategy's and whose object is its class. It is loaded when a study names it, or for a list.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import ByName, users_code
from privtune.strategies._base import Needs, Strategy
from privtune.strategies.options import check_types, reject_unknown_options
from privtune.training.methods import METHODS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "privtune.strategies"

STRATEGIES: Mapping[str, type[Any]] = ByName(
    {
        "auto": "privtune.strategies.auto:Auto",
        "fixed": "privtune.strategies.in_run:Fixed",
        "liu-talwar": "privtune.strategies.selection:LiuTalwar",
        "papernot-steinke": "privtune.strategies.selection:PapernotSteinke",
        "subsampled-tuning": "privtune.strategies.tuning:SubsampledTuningStrategy",
        "linear-scaling": "privtune.strategies.tuning:LinearScaling",
        "dp-hyper": "privtune.strategies.tuning:DPHyper",
        "everything": "privtune.strategies.everything:Everything",
        "non-private-grid": "privtune.strategies.everything:NonPrivateGrid",
    }
)
"""Built-in strategies by name. Every in-run method is a strategy under its own name as well."""

_IDLE: Mapping[str, tuple[str, ...]] = {
    "linear-scaling": ("guarantee",),
    "non-private-grid": ("guarantee", "sampler", "pruner"),
}
"""Options that stored specs may hold and that never said anything."""


class EntryPointError(PrivTuneError):
    """An installed package registers a strategy that cannot be used."""


@dataclass(frozen=True)
class Registered:
    """A strategy of an installed package.

    Args:
        name: The name that it is registered under.
        source: Package and version.
        strategy: Its class; None if it cannot be used.
        problem: Why it cannot be used, in one sentence; else empty.
    """

    name: str
    source: str
    strategy: type[Any] | None
    problem: str = ""


def make_strategy(name: str, *, arm: str, options: Mapping[str, Any]) -> Strategy:
    """Build a strategy from its name and the options that stand in a spec.

    Args:
        name: One of :data:`STRATEGIES`, the name of an in-run method, or a name that an installed
            package registers.
        arm: Name of the arm.
        options: The strategy's own options.

    Returns:
        The strategy.

    Raises:
        InvalidInputError: If the name or an option is unknown.
        EntryPointError: If an installed package registers the name, but nothing that can be used.

    Example:
        >>> options = {"mean_runs": 20, "parameters": {"max_grad_norm": 1.0}}
        >>> strategy = make_strategy("papernot-steinke", arm="selection", options=options)
        >>> strategy.run_law().law
        'geometric'
        >>> make_strategy("papernot-steinke", arm="selection", options={"mean_run": 20})
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: options of strategy 'papernot-steinke' = ...
    """
    where = f"arm {arm!r}"
    if name in METHODS and name not in STRATEGIES:
        own = dict(options)
        parameters = own.pop("parameters", {})
        from privtune.strategies.in_run import InRun

        check_types(InRun, {"parameters": parameters}, where=where)
        check_types(METHODS[name], own, where=where)
        return InRun(arm=arm, method=name, parameters=parameters, options=own)
    cls = STRATEGIES[name] if name in STRATEGIES else _installed(name)
    said = {key: value for key, value in options.items() if key not in _IDLE.get(name, ())}
    fields = [field.name for field in dataclasses.fields(cls) if field.name != "arm"]
    reject_unknown_options(name, said, fields)
    if missing := [field for field in _required(cls) if field not in said]:
        raise InvalidInputError(
            f"options of {where}",
            sorted(said),
            f"strategy {name!r} also needs {', '.join(missing)}",
        )
    check_types(cls, said, where=where)
    method = str(said.get("method", ""))
    if method in METHODS:
        check_types(METHODS[method], said.get("options", {}), where=where)
    strategy: Strategy = cls(arm=arm, **said)
    return strategy


def registered() -> Iterator[Registered]:
    """Load and yield what installed packages register, in the order of names; problems included.

    Returns:
        One entry a name.

    Example:
        >>> [found.name for found in registered() if found.problem]
        []
    """
    for name, points in sorted(_entry_points().items()):
        source = ", ".join(sorted(map(_source, points)))
        try:
            yield Registered(name, source, _load(name, points))
        except EntryPointError as error:
            yield Registered(name, source, None, str(error))


def _required(cls: type[Any]) -> list[str]:
    """Return the options without a default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.name != "arm" and field.default is missing and field.default_factory is missing
    ]


def _entry_points() -> dict[str, list[EntryPoint]]:
    """Return entry points by name; the same one is found twice where a path is given twice."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        known = found.setdefault(point.name, [])
        if all((point.value, _source(point)) != (k.value, _source(k)) for k in known):
            known.append(point)
    return found


def _source(point: EntryPoint) -> str:
    return "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _installed(name: str) -> type[Any]:
    found = _entry_points()
    if name in found:
        return _load(name, found[name])
    known = ", ".join(sorted({*STRATEGIES, *METHODS, *found}))
    raise InvalidInputError("strategy", name, f"must be one of {known}")


def _load(name: str, points: list[EntryPoint]) -> type[Any]:
    """Load a strategy's class, or say what is wrong with it.

    Raises:
        EntryPointError: In one sentence that names the package.
    """
    who = " and ".join(sorted(map(_source, points)))
    what = f"Strategy {name!r} of {who}"
    if name in STRATEGIES or name in METHODS:
        raise EntryPointError(
            f"{what} is refused: the name is built in, so register it under another one."
        )
    if len(points) > 1:
        raise EntryPointError(f"{what} is refused: the name is registered twice; uninstall one.")
    (point,) = points
    try:
        with users_code("strategy", point.value, "cannot be loaded"):
            cls = point.load()
    except InvalidInputError as error:
        raise EntryPointError(
            f"{what} cannot be used: {error} Mend or uninstall the package."
        ) from error
    if lacking := _lacking(name, cls):
        raise EntryPointError(f"{what} cannot be used: {point.value} {lacking}.")
    strategy: type[Any] = cls
    return strategy


def _lacking(name: str, cls: object) -> str:
    """Return what a class lacks to be a strategy of this name; empty if nothing."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return "must be a frozen dataclass of the strategy's options"
    if getattr(cls, "name", None) != name:
        return f"must have the name it is registered under, name = {name!r}"
    if not isinstance(getattr(cls, "summary", None), str):
        return "must have a summary, one line of text"
    if not isinstance(getattr(cls, "needs", None), Needs):
        return "must declare what it needs, as privtune.strategies.Needs"
    if "arm" not in {field.name for field in dataclasses.fields(cls)}:
        return "must have a field arm, the name of the arm"
    try:
        typing.get_type_hints(cls)
    except Exception as error:
        return f"must have types that can be read when it runs ({type(error).__name__}: {error})"
    if missing := [n for n in ("plan", "run") if not callable(getattr(cls, n, None))]:
        return f"must have the method {' and '.join(missing)}"
    return ""
