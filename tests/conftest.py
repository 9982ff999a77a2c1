"""What more than one folder of tests uses. Heavy imports stay inside the fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# Looking for doctests imports every module, and this one runs studies as it is imported.
collect_ignore = ["study/warmed.py"]

# The same examples in every run: a failure can be repeated, and a green run stays green.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

if TYPE_CHECKING:
    from tests.tracked import Tracked
    from tests.trackers import Lending


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A small study that was run and logged to MLflow; for reading only."""
    from tests.tracked import run_tracked

    return run_tracked(tmp_path_factory.mktemp("tracked"))


@pytest.fixture(scope="session", autouse=True)
def trackers() -> Iterator[Lending]:
    """Processes that write to MLflow are lent from test to test."""
    from tests.trackers import Lending

    lending = Lending()
    with pytest.MonkeyPatch.context() as patch:
        lending.patch(patch)
        yield lending
    lending.end()


@pytest.fixture
def new_trackers(trackers: Lending) -> Iterator[None]:
    """Every process that writes to MLflow is started for the test alone, and killed when it is closed."""
    trackers.pause()
    yield
    trackers.resume()
