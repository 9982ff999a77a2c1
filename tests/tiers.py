"""The tiers of the suite.

`make test-quick` runs what is marked ``quick``: some tests of every room, two minutes of CPU at most.
`make test` runs everything on all cores. A package without a quick test fails `test_tiers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

ROOT = Path(__file__).parents[1]

FULL = os.environ.get("PRIVTUNE_CAMPAIGN") == "full"
"""Whether sweeps and races run at full length, for hours, and not a sample of them."""

campaign = pytest.mark.skipif(not FULL, reason="one of many alike: `make campaigns` runs it")
"""What takes long and has a sibling of its kind in `make test`."""


def some(cases: Iterable[T], one_in: int) -> list[T]:
    """Return one in so many cases of a product; all of them in `make campaigns`.

    Give a number that has no factor in common with the sizes of the product, so that each side is met.
    """
    return list(cases)[:: 1 if FULL else one_in]


PATIENCE = 1200.0
"""Seconds after which a test gives up on another process: it ends what would never end, and no
machine is so busy that it ends anything else."""
