"""The tiers of the suite, and the check that none of it silently vanishes.

`make test-quick` runs what is marked ``quick``: some tests of every room, three minutes of CPU at most.
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

FEWEST = 3000
"""A whole run collects at least so many tests. Whoever deletes tests on purpose lowers it."""


class TooFew(pytest.Item):
    """A test that fails, in every process of a run that lost files."""

    said: str

    def runtest(self) -> None:
        pytest.fail(self.said, pytrace=False)


def check_floor(session: pytest.Session, collected: int, fewest: int = FEWEST) -> list[pytest.Item]:
    """Return a failing test for a run of everything that has lost whole files, else nothing.

    Runs of a part are let alone.
    """
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    narrowed = config.getoption("ignore") or config.getoption("ignore_glob")
    if not whole or narrowed or collected >= fewest:
        return []
    failing = TooFew.from_parent(session, name="floor")
    failing.said = (
        f"{collected} tests were collected and {fewest} are the fewest that there may be: whole "
        "files are missing. If they were deleted on purpose, lower FEWEST in tests/tiers.py."
    )
    return [failing]
