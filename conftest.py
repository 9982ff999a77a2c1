"""What every test runs under, doctests and the README's included."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.tiers import check_floor

# Before anything imports torch: one thread a process, so that numbers are the same on every machine
# and the workers of pytest-xdist do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Alembic runs these itself; they cannot be imported.
collect_ignore_glob = ["privtune/ledger/migrations/*"]


@pytest.fixture(autouse=True)
def _own_folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an example in a folder of its own, so that its default storage is a fresh one."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Start the global generators anew: a test's numbers are the same in any order, on any worker."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, items: list[pytest.Item]
) -> Generator[None]:
    """Count what was collected, before any of it is deselected."""
    collected = len(items)
    yield
    items += check_floor(session, collected)
