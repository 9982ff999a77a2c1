"""Studies: create, load, run, resume, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.study.arm_audits import audits_of, keep_audit
    from privtune.study.declared_arms import DeclaredError, DeclaredTrial, Mechanism
    from privtune.study.facade import Study, delete_study
    from privtune.study.failures import StudyInterruptedError
    from privtune.study.lifecycle import StudyBusyError
    from privtune.study.observer import ArmStatus, Observer
    from privtune.study.planning import StudyPlan, plan_study
    from privtune.study.rehearsal import DependentTrialsError
    from privtune.study.rows import StudyExistsError, StudyNotFoundError, study_names
    from privtune.study.seal import SealedError, SealedTrialsError
    from privtune.study.spec import ArmSpec, BudgetSpec, SpecError, StudySpec
    from privtune.study.trial import Trial

__all__ = [
    "ArmSpec",
    "ArmStatus",
    "BudgetSpec",
    "DeclaredError",
    "DeclaredTrial",
    "DependentTrialsError",
    "Mechanism",
    "Observer",
    "SealedError",
    "SealedTrialsError",
    "SpecError",
    "Study",
    "StudyBusyError",
    "StudyExistsError",
    "StudyInterruptedError",
    "StudyNotFoundError",
    "StudyPlan",
    "StudySpec",
    "Trial",
    "audits_of",
    "delete_study",
    "keep_audit",
    "plan_study",
    "study_names",
]

__getattr__ = lazily(__name__, __file__)
