"""PrivTune: hyperparameter tuning under differential privacy, with one budget for everything."""

from privtune.errors import InvalidInputError, PrivTuneError

__all__ = ["InvalidInputError", "PrivTuneError"]
__version__ = "0.1.0"
