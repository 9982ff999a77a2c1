"""Strategies by name: those built in, in-run methods, and those that installed packages register."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from privtune.errors import InvalidInputError
from privtune.plugins import Registered, Registry
from privtune.strategies._base import Needs, Strategy
from privtune.strategies.options import check_types, options_of, reject_unknown_options
from privtune.training.methods import METHODS


def _lacking(cls: type[Any]) -> str:
    """Return what a dataclass of an installed package lacks to be a strategy."""
    if not isinstance(getattr(cls, "needs", None), Needs):
        return "must declare what it needs, as privtune.strategies.Needs"
    if "arm" not in {field.name for field in dataclasses.fields(cls)}:
        return "must have a field arm, the name of the arm"
    if missing := [n for n in ("plan", "run") if not callable(getattr(cls, n, None))]:
        return f"must have the method {' and '.join(missing)}"
    return ""


STRATEGIES: Registry[type[Any]] = Registry(
    "strategy",
    "privtune.strategies",
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
    },
    lacking=_lacking,
    taken=METHODS.__contains__,
)
"""Strategies by name. Every in-run method is a strategy under its own name as well."""


def make_strategy(name: str, *, arm: str, options: Mapping[str, Any]) -> Strategy:
    """Return the strategy of a name, with the options that stand in a spec.

    Args:
        name: One of :data:`STRATEGIES`, or of the in-run methods; installed packages may register more.
        arm: Name of the arm.
        options: The strategy's own options.

    Raises:
        InvalidInputError: If the name or an option is unknown, or an option is missing.

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
    if not STRATEGIES.is_built_in(name) and name in METHODS:
        from privtune.strategies.in_run import InRun

        own = dict(options)
        parameters = own.pop("parameters", {})
        check_types(InRun, {"parameters": parameters}, where=where)
        check_types(METHODS[name], own, where=where)
        return InRun(arm=arm, method=name, parameters=parameters, options=own)
    cls = _named(name)
    fields = [field for field in dataclasses.fields(cls) if field.name != "arm"]
    reject_unknown_options(name, options, [field.name for field in fields])
    none = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is none and f.default_factory is none]
    if missing := [name for name in needed if name not in options]:
        raise InvalidInputError(
            f"options of {where}",
            sorted(options),
            f"strategy {name!r} also needs {', '.join(missing)}",
        )
    check_types(cls, options, where=where)
    if "method" in options and options["method"] in METHODS:
        check_types(METHODS[options["method"]], options.get("options", {}), where=where)
    strategy: Strategy = cls(arm=arm, **options)
    return strategy


def _named(name: str) -> type[Any]:
    if name not in STRATEGIES:
        known = ", ".join(sorted({*STRATEGIES.names(), *METHODS.names()}))
        raise InvalidInputError("strategy", name, f"must be one of {known}")
    return STRATEGIES[name]


def registered() -> list[Registered]:
    """Return what installed packages register, strategies and then methods; problems included.

    Example:
        >>> [found.name for found in registered() if found.problem]
        []
    """
    return [*STRATEGIES.registered(), *METHODS.registered()]


def describe(name: str) -> dict[str, Any]:
    """Return what a strategy, or an in-run method, does and can be told."""
    if not STRATEGIES.is_built_in(name) and name in METHODS:
        cls: Any = METHODS[name]
        # A plan finds the noise for the arm's target.
        parameters, options = list(cls.parameters), options_of(cls, without=("noise_multiplier",))
    else:
        cls = _named(name)
        parameters, options = [], options_of(cls, without=("arm",))
    return {"name": name, "what": cls.summary, "parameters": parameters, "options": options}
