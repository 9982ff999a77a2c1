"""Fields of plans that those of earlier versions lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["without"]


def without(fields: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields without those that say what their absence stands for.

    So plans of before there was such a field keep their digests, and their meaning.
    """
    return {n: v for n, v in fields.items() if n not in absent or v != absent[n]}
