"""Strategies by name: built-in ones, in-run methods, and ones that installed packages register."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from privtune.errors import InvalidInputError
from privtune.names import refuse_name
from privtune.plugins import Registration, Registry
from privtune.strategies.options import check_types, options_of, reject_unknown_options
from privtune.strategies.strategy import Needs, Strategy
from privtune.training.methods import METHODS


def _lacking(cls: type[Any]) -> str:
    """Return what a class of an installed package lacks to be a strategy, or an empty text."""
    if not isinstance(getattr(cls, "needs", None), Needs):
        return "must declare what it needs, as privtune.strategies.Needs"
    if "arm" not in {field.name for field in dataclasses.fields(cls)}:
        return "must have a field arm, the name of the arm"
    missing: list[str] = []
    for name in ("plan", "run"):
        if not callable(getattr(cls, name, None)):
            missing.append(name)
    if missing:
        return f"must have the method {' and '.join(missing)}"
    if not inspect.isgeneratorfunction(cls.run):
        return "must have a method run that yields what shall be trained"
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
        "subset-search": "privtune.strategies.subset_search:SubsetSearch",
        "linear-scaling": "privtune.strategies.tuning:LinearScaling",
        "dp-hyper": "privtune.strategies.tuning:DPHyper",
        "everything": "privtune.strategies.everything:Everything",
        "non-private-grid": "privtune.strategies.everything:NonPrivateGrid",
    },
    lacking=_lacking,
    is_reserved=METHODS.__contains__,
)
"""Strategies by name, without the in-run methods, which are strategies under their own names."""


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
    if _is_method(name):
        return _make_in_run(name, arm, options)
    cls = _find_class(name)
    fields = [field for field in dataclasses.fields(cls) if field.name != "arm"]
    reject_unknown_options(name, options, [field.name for field in fields])
    missing: list[str] = []
    for field in fields:
        if _is_required(field) and field.name not in options:
            missing.append(field.name)
    if missing:
        raise InvalidInputError(
            f"options of {where}",
            sorted(options),
            f"strategy {name!r} also needs {', '.join(missing)}",
        )
    check_types(cls, options, where=where)
    if "method" in options and options["method"] in METHODS:
        method = METHODS[options["method"]]
        method_options = options.get("options", {})
        check_types(method, method_options, where=where)
    strategy: Strategy = cls(arm=arm, **options)
    return strategy


def _is_method(name: str) -> bool:
    """Return whether a name is that of an in-run method, and of no built-in strategy."""
    return not STRATEGIES.is_built_in(name) and name in METHODS


def _make_in_run(name: str, arm: str, options: Mapping[str, Any]) -> Strategy:
    """Return the strategy that trains once with an in-run method, made from its options in a spec."""
    from privtune.strategies.in_run import InRun

    where = f"arm {arm!r}"
    method_options = dict(options)
    parameters = method_options.pop("parameters", {})
    check_types(InRun, {"parameters": parameters}, where=where)
    check_types(METHODS[name], method_options, where=where)
    return InRun(arm=arm, method=name, parameters=parameters, options=method_options)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    has_default = field.default is not dataclasses.MISSING
    has_factory = field.default_factory is not dataclasses.MISSING
    return not has_default and not has_factory


def _find_class(name: str) -> type[Any]:
    """Return a strategy's class, or refuse an unknown name with a list of strategies and methods."""
    if name not in STRATEGIES:
        names = {*STRATEGIES.names(), *METHODS.names()}
        refuse_name("strategy", name, sorted(names))
    return STRATEGIES[name]


def registered() -> list[Registration]:
    """Return the entries of installed packages, strategies and then methods, faulty ones included.

    Example:
        >>> [entry.name for entry in registered() if entry.problem]
        []
    """
    return [*STRATEGIES.registered(), *METHODS.registered()]


def describe(name: str) -> dict[str, Any]:
    """Return name, summary, hyperparameters and options of a strategy or an in-run method."""
    cls: Any
    if _is_method(name):
        cls = METHODS[name]
        parameters = list(cls.parameters)
        # A plan finds the noise for the arm's target.
        options = options_of(cls, without=("noise_multiplier",))
    else:
        cls = _find_class(name)
        parameters = []
        options = options_of(cls, without=("arm",))
    return {"name": name, "what": cls.summary, "parameters": parameters, "options": options}
