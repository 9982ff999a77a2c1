"""The listener to a table that is being read, apart from the readers, which import pyarrow and pandas."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

ON_READ: ContextVar[Callable[[float], None] | None] = ContextVar("ON_READ", default=None)
"""Listener to the share of a table that has been read, or None."""
