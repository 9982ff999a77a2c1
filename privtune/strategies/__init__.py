"""Strategies: ways of choosing hyperparameters, each with ``plan`` and ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.plugins import EntryPointError
    from privtune.strategies._base import Needs, Round, Strategy, StrategyError
    from privtune.strategies.arms import plan_arm
    from privtune.strategies.auto import Auto
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.everything import Everything, NonPrivateError, NonPrivateGrid
    from privtune.strategies.in_run import Fixed, InRun
    from privtune.strategies.plan import Plan, SearchPlan, TrainingPlan
    from privtune.strategies.registry import STRATEGIES, make_strategy, registered
    from privtune.strategies.release import Cost, Ending, Outcome, Release, Repetition, TrialResult
    from privtune.strategies.scoring import Reporting, ScorePlan, Scoring
    from privtune.strategies.selection import LiuTalwar, NoRunFitsError, PapernotSteinke
    from privtune.strategies.tuning import DPHyper, LinearScaling
    from privtune.strategies.tuning import SubsampledTuningStrategy as SubsampledTuning

__all__ = [
    "STRATEGIES",
    "Auto",
    "Cost",
    "DPHyper",
    "Ending",
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
    "Repetition",
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
]

__getattr__ = lazily(__name__, __file__)
