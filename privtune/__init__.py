"""PrivTune: hyperparameter tuning under differential privacy, with one budget for everything.

Names are imported when they are first used: ``import privtune`` alone loads no heavy library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune import accounting, strategies
    from privtune.api import create_study, delete_study, load_study
    from privtune.ledger import Budget, Ledger
    from privtune.spaces import LogNormal, Mixture
    from privtune.study import Mechanism, Study, StudySpec, Trial, rehearse_study
    from privtune.tasks import Candidate, Score, Task
    from privtune.training.engine.watch import norms_of
    from privtune.training.mechanism.schedule import NoiseOptions

__all__ = [
    "Budget",
    "Candidate",
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
    "create_study",
    "delete_study",
    "load_study",
    "norms_of",
    "rehearse_study",
    "strategies",
]
__version__ = "0.1.0"

_import = lazily(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _import(name)
    from privtune.study._familiar import unknown

    raise unknown(f"module {__name__!r}", name)


def __dir__() -> list[str]:
    return sorted(__all__)
