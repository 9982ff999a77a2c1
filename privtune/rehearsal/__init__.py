"""Rehearsals of a whole study on public records: generated ones, a benchmark, or those of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.rehearsal.study_rehearsal import Rehearsal, rehearse_study

__all__ = ["Rehearsal", "rehearse_study"]

__getattr__ = lazily(__name__, __file__)
