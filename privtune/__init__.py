"""PrivTune: hyperparameter tuning under differential privacy, with one budget for everything.

Names are imported when they are first used: ``import privtune`` alone loads no heavy library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError

if TYPE_CHECKING:
    from privtune import accounting, strategies
    from privtune.api import create_study, delete_study, load_study
    from privtune.ledger import Budget, Ledger
    from privtune.priors import LogNormal, Mixture
    from privtune.study import DPSGD, Study, StudySpec, Trial, Validation
    from privtune.training.mechanism.noise_options import NoiseOptions

__all__ = [
    "DPSGD",
    "Budget",
    "InvalidInputError",
    "Ledger",
    "LogNormal",
    "Mixture",
    "NoiseOptions",
    "PrivTuneError",
    "Study",
    "StudySpec",
    "Trial",
    "Validation",
    "accounting",
    "create_study",
    "delete_study",
    "load_study",
    "strategies",
]
__version__ = "0.1.0"

_HOMES = {
    "Budget": "privtune.ledger",
    "DPSGD": "privtune.study",
    "LogNormal": "privtune.priors",
    "Mixture": "privtune.priors",
    "NoiseOptions": "privtune.training.mechanism.noise_options",
    "Trial": "privtune.study",
    "Validation": "privtune.study",
    "delete_study": "privtune.api",
    "Ledger": "privtune.ledger",
    "Study": "privtune.study",
    "StudySpec": "privtune.study",
    "accounting": "privtune.accounting",
    "create_study": "privtune.api",
    "load_study": "privtune.api",
    "strategies": "privtune.strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'privtune' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if module.__name__ == f"privtune.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
