"""Fixtures for doctests, the README's included."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    """A storage of its own for an example."""
    return f"sqlite:///{tmp_path / 'privtune.db'}"
