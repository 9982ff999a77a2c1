"""What more than one folder of tests uses. Heavy imports stay inside the fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# The same examples in every run: a failure can be repeated, and a green run stays green.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

if TYPE_CHECKING:
    from tests.tracked import Tracked


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A small study that was run and logged to MLflow; for reading only."""
    from tests.tracked import run_tracked

    return run_tracked(tmp_path_factory.mktemp("tracked"))
