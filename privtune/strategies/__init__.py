"""Strategies: ways of choosing hyperparameters, each with ``plan`` and ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.plugins import EntryPointError
    from privtune.strategies.arms import plan_arm
    from privtune.strategies.auto import Auto
    from privtune.strategies.catalog import STRATEGIES, make_strategy, registered
    from privtune.strategies.context import PlanningContext
    from privtune.strategies.everything import Everything, NonPrivateError, NonPrivateGrid
    from privtune.strategies.in_run import Fixed, InRun
    from privtune.strategies.plan import Plan, SearchPlan, TrainingPlan
    from privtune.strategies.release import Cost, Ending, Outcome, Release, Repetition, TrialResult
    from privtune.strategies.requests import (
        NamedTraining,
        NumberedTrials,
        Request,
        SealedRound,
        StrategyRun,
        advance,
    )
    from privtune.strategies.score_plan import Reporting, ScorePlan, Scoring
    from privtune.strategies.selection import LiuTalwar, NoRunFitsError, PapernotSteinke
    from privtune.strategies.strategy import Needs, Round, Strategy, StrategyError
    from privtune.strategies.subset_search import SubsetSearch
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
    "NamedTraining",
    "Needs",
    "NoRunFitsError",
    "NonPrivateError",
    "NonPrivateGrid",
    "NumberedTrials",
    "Outcome",
    "PapernotSteinke",
    "Plan",
    "PlanningContext",
    "Release",
    "Repetition",
    "Reporting",
    "Request",
    "Round",
    "ScorePlan",
    "Scoring",
    "SealedRound",
    "SearchPlan",
    "Strategy",
    "StrategyError",
    "StrategyRun",
    "SubsampledTuning",
    "SubsetSearch",
    "TrainingPlan",
    "TrialResult",
    "advance",
    "make_strategy",
    "plan_arm",
    "registered",
]

__getattr__ = lazily(__name__, __file__)
