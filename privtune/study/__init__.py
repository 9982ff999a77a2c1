"""Studies: create, load, run, resume, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.study._store import StudyExistsError, StudyNotFoundError
    from privtune.study._study import SealedTrialsError, Study, delete_study, study_names
    from privtune.study.lifecycle import StudyBusyError, StudyFinishedError
    from privtune.study.objective import StudyInterruptedError
    from privtune.study.observer import ArmStatus, NullObserver, Observer
    from privtune.study.planning import StudyPlan, plan_study
    from privtune.study.seal import SealedError
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
    "SealedError",
    "SealedTrialError",
    "SealedTrialsError",
    "SpecError",
    "Study",
    "StudyBusyError",
    "StudyExistsError",
    "StudyFinishedError",
    "StudyInterruptedError",
    "StudyNotFoundError",
    "StudyPlan",
    "StudySpec",
    "Trial",
    "Validation",
    "delete_study",
    "plan_study",
    "study_names",
]

__getattr__ = lazily(
    __name__,
    {
        "privtune.study._store": (
            "StudyExistsError",
            "StudyNotFoundError",
        ),
        "privtune.study._study": (
            "SealedTrialsError",
            "Study",
            "delete_study",
            "study_names",
        ),
        "privtune.study.lifecycle": (
            "StudyBusyError",
            "StudyFinishedError",
        ),
        "privtune.study.objective": ("StudyInterruptedError",),
        "privtune.study.observer": (
            "ArmStatus",
            "NullObserver",
            "Observer",
        ),
        "privtune.study.planning": (
            "StudyPlan",
            "plan_study",
        ),
        "privtune.study.seal": ("SealedError",),
        "privtune.study.spec": (
            "ArmSpec",
            "BudgetSpec",
            "SpecError",
            "StudySpec",
        ),
        "privtune.study.trial": (
            "SealedTrialError",
            "Trial",
        ),
        "privtune.study.user_training": (
            "DPSGD",
            "Validation",
        ),
    },
)
