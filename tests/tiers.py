"""The tiers of the suite.

`make test-quick` runs what is marked ``quick``: some tests of every room, two minutes of CPU at most.
`make test` runs everything on all cores. A package without a quick test fails `test_tiers.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FULL = os.environ.get("PRIVTUNE_CAMPAIGN") == "full"
"""Whether sweeps and races run at full length, for hours, and not a sample of them."""

campaign = pytest.mark.skipif(not FULL, reason="one of many alike: `make campaigns` runs it")
"""What takes long and has a sibling of its kind in `make test`."""

PATIENCE = 1200.0
"""Seconds after which a test gives up on another process: it ends what would never end, and no
machine is so busy that it ends anything else."""
