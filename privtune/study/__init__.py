"""Studies: create, load, run, resume, compare."""

from privtune.study._study import Study, StudyFinishedError
from privtune.study.observer import ArmStatus, NullObserver, Observer
from privtune.study.planning import StudyPlan, plan_study
from privtune.study.spec import ArmSpec, BudgetSpec, SpecError, StudySpec

__all__ = [
    "ArmSpec",
    "ArmStatus",
    "BudgetSpec",
    "NullObserver",
    "Observer",
    "SpecError",
    "Study",
    "StudyFinishedError",
    "StudyPlan",
    "StudySpec",
    "plan_study",
]
