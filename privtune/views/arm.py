"""The record of one arm for a tracker: plain values, which another process reads without any library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LEDGER_TABLE = "privacy/ledger.json"

Point = tuple[str, float, int]
Sample = tuple[float, dict[str, float]]


@dataclass(frozen=True)
class ArmRecord:
    """The record of one arm, as a tracker's run holds it.

    Args:
        arm: Name of the arm; the run's name.
        digest: Digest of its plan; the run's identity.
        tags: Short texts.
        params: Parameters, written once.
        points: Metrics as (name, value, step), finite values only.
        note: Markdown; the first line is the budget.
        number: The arm's place in its study.
        samples: System metrics as (seconds since the start, values).
        documents: Artifacts by path, as JSON text.
        report: The arm's page.
        model: The released model's file.
        children: One record a trial, where every trial is paid for; else empty.
    """

    arm: str
    digest: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    points: tuple[Point, ...]
    note: str
    number: int = 0
    samples: tuple[Sample, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    report: str = ""
    model: Path | None = None
    children: tuple[ArmRecord, ...] = ()
