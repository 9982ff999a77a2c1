"""Studies: create, load, run, resume, compare."""

from privtune.study._study import SealedTrialsError, Study, StudyFinishedError, delete_study
from privtune.study.objective import StudyInterruptedError
from privtune.study.observer import ArmStatus, NullObserver, Observer
from privtune.study.planning import StudyPlan, plan_study
from privtune.study.spec import ArmSpec, BudgetSpec, SpecError, StudySpec
from privtune.study.trial import SealedTrialError, Trial
from privtune.study.user_training import DPSGD, Validation

__all__ = [
    "DPSGD",
    "ArmSpec",
    "ArmStatus",
    "BudgetSpec",
    "NullObserver",
    "Observer",
    "SealedTrialError",
    "SealedTrialsError",
    "SpecError",
    "Study",
    "StudyFinishedError",
    "StudyInterruptedError",
    "StudyPlan",
    "StudySpec",
    "Trial",
    "Validation",
    "delete_study",
    "plan_study",
]
