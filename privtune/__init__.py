"""PrivTune: hyperparameter tuning under differential privacy, with one budget for everything.

Names are imported when they are first used: ``import privtune`` alone loads no heavy library.
"""

# No line of this file imports anything when it is run, not even `from __future__`: `python -m privtune` runs
# it while the working folder is the first place where modules are looked for, and `__main__` ends that.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from privtune import accounting, strategies
    from privtune.api import answer, create_study, delete_study, load_study, make_task
    from privtune.errors import InvalidInputError, PrivTuneError
    from privtune.ledger import Budget, Dataset, Ledger
    from privtune.rehearsal import rehearse_study
    from privtune.spaces import LogNormal, Mixture
    from privtune.study import Mechanism, Study, StudySpec, Trial
    from privtune.tasks import Candidate, Score, Task
    from privtune.training.engine.watch import norms_of
    from privtune.training.mechanism.schedule import NoiseOptions

__all__ = [
    "Budget",
    "Candidate",
    "Dataset",
    "InvalidInputError",
    "Ledger",
    "LogNormal",
    "Mechanism",
    "Mixture",
    "NoiseOptions",
    "PrivTuneError",
    "Score",
    "Study",
    "StudySpec",
    "Task",
    "Trial",
    "accounting",
    "answer",
    "create_study",
    "delete_study",
    "load_study",
    "make_task",
    "norms_of",
    "rehearse_study",
    "strategies",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    if name in __all__:
        from privtune.imports import lazily

        return lazily(__name__, __file__)(name)
    from privtune.study.familiar_names import unknown

    raise unknown(f"module {__name__!r}", name)


def __dir__() -> list[str]:
    return sorted(__all__)
