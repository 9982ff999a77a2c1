"""Subsampled tuning: tune on a Poisson subset, then train once (Koskela and Kulkarni 2023)."""

from __future__ import annotations

from privtune.accounting.events import SubsampledTuning
from privtune.errors import PrivTuneError

__all__ = ["refuse"]


def refuse(event: SubsampledTuning) -> PrivTuneError:
    """Return the error that says that this event has no account yet."""
    return PrivTuneError(f"{event.type} is not accounted yet.")
