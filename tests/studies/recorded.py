"""What recorded results promise of a run that repeats them."""

from __future__ import annotations

from collections.abc import Sequence

from studies import evidence
from studies.sheet import Row, Sheet


def check_recorded(study: Sheet, found: Sequence[Row]) -> None:
    """Check equal digits of the code and machine that recorded a cell, and the same law of others."""
    known = evidence.kept(study)
    said = evidence.verdict(known, found, study.again)
    is_same = known[0].get("code") == evidence.stamp()
    assert said in ((evidence.EQUAL,) if is_same else (evidence.EQUAL, evidence.ALIKE))
