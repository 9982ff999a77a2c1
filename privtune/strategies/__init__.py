"""Strategies: ways of choosing hyperparameters, each with ``plan`` and ``run``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from privtune.errors import InvalidInputError
from privtune.strategies._base import (
    PRUNED,
    Outcome,
    Round,
    Strategy,
    StrategyError,
    TrialResult,
)
from privtune.strategies._options import check_types, reject_unknown_options
from privtune.strategies.arms import plan_arm
from privtune.strategies.everything import Everything, selection_instead
from privtune.strategies.in_run import Fixed, InRun
from privtune.strategies.linear_scaling import LinearScaling
from privtune.strategies.liu_talwar import LiuTalwar
from privtune.strategies.non_private import NonPrivateError, NonPrivateGrid
from privtune.strategies.plan import Plan, PlanningContext, SearchPlan, TrainingPlan
from privtune.strategies.release import Cost, Release
from privtune.strategies.scoring import ScorePlan, Scoring, validation_metric
from privtune.strategies.selection import NoRunFitsError, PapernotSteinke
from privtune.strategies.subsampled import SubsampledTuningStrategy as SubsampledTuning
from privtune.training.methods import METHODS

__all__ = [
    "PRUNED",
    "STRATEGIES",
    "Cost",
    "Everything",
    "Fixed",
    "InRun",
    "LinearScaling",
    "LiuTalwar",
    "NoRunFitsError",
    "NonPrivateError",
    "NonPrivateGrid",
    "Outcome",
    "PapernotSteinke",
    "Plan",
    "PlanningContext",
    "Release",
    "Round",
    "ScorePlan",
    "Scoring",
    "SearchPlan",
    "Strategy",
    "StrategyError",
    "SubsampledTuning",
    "TrainingPlan",
    "TrialResult",
    "make_strategy",
    "plan_arm",
    "selection_instead",
    "validation_metric",
]

STRATEGIES: Mapping[str, type[Any]] = {
    strategy.name: strategy
    for strategy in (
        Fixed,
        LiuTalwar,
        PapernotSteinke,
        SubsampledTuning,
        LinearScaling,
        Everything,
        NonPrivateGrid,
    )
}
"""Strategies by name. Every in-run method is a strategy under its own name as well."""


def make_strategy(name: str, *, arm: str, options: Mapping[str, Any]) -> Strategy:
    """Build a strategy from its name and the options that stand in a spec.

    Args:
        name: One of :data:`STRATEGIES`, or the name of an in-run method.
        arm: Name of the arm.
        options: The strategy's own options.

    Returns:
        The strategy.

    Raises:
        InvalidInputError: If the name or an option is unknown.
    """
    where = f"arm {arm!r}"
    if name in STRATEGIES:
        cls = STRATEGIES[name]
        fields = [f.name for f in dataclasses.fields(cls) if f.name != "arm"]
        reject_unknown_options(name, options, fields)
        check_types(cls, options, where=where)
        method = str(options.get("method", ""))
        if method in METHODS:
            check_types(METHODS[method], options.get("options", {}), where=where)
        strategy: Strategy = cls(arm=arm, **options)
        return strategy
    if name in METHODS:
        own = dict(options)
        parameters = own.pop("parameters", {})
        check_types(InRun, {"parameters": parameters}, where=where)
        check_types(METHODS[name], own, where=where)
        return InRun(arm=arm, method=name, parameters=parameters, options=own)
    known = ", ".join(sorted({*STRATEGIES, *METHODS}))
    raise InvalidInputError("strategy", name, f"must be one of {known}")
