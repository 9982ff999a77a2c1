"""Strategies: ways of choosing hyperparameters, each with ``plan`` and ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.strategies._base import (
        PRUNED,
        Outcome,
        Round,
        Strategy,
        StrategyError,
        TrialResult,
    )
    from privtune.strategies.arms import plan_arm
    from privtune.strategies.auto import Auto
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.dp_hyper import DPHyper
    from privtune.strategies.everything import Everything, selection_instead
    from privtune.strategies.in_run import Fixed, InRun
    from privtune.strategies.linear_scaling import LinearScaling
    from privtune.strategies.liu_talwar import LiuTalwar
    from privtune.strategies.needs import Needs
    from privtune.strategies.non_private import NonPrivateError, NonPrivateGrid
    from privtune.strategies.plan import Plan
    from privtune.strategies.registry import STRATEGIES, EntryPointError, make_strategy, registered
    from privtune.strategies.release import Cost, Release
    from privtune.strategies.score_plan import ScorePlan, validation_metric
    from privtune.strategies.scoring import Reporting, Scoring
    from privtune.strategies.selection import NoRunFitsError, PapernotSteinke
    from privtune.strategies.subsampled import SubsampledTuningStrategy as SubsampledTuning
    from privtune.strategies.trainings import SearchPlan, TrainingPlan

__all__ = [
    "PRUNED",
    "STRATEGIES",
    "Auto",
    "Cost",
    "DPHyper",
    "EntryPointError",
    "Everything",
    "Fixed",
    "InRun",
    "LinearScaling",
    "LiuTalwar",
    "Needs",
    "NoRunFitsError",
    "NonPrivateError",
    "NonPrivateGrid",
    "Outcome",
    "PapernotSteinke",
    "Plan",
    "PlanningContext",
    "Release",
    "Reporting",
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
    "registered",
    "selection_instead",
    "validation_metric",
]

__getattr__ = lazily(__name__, __file__)
