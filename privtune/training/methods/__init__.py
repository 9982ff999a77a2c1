"""Training methods, one paper a file.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from privtune.training.methods._base import Candidate, Method, MethodState
from privtune.training.methods.dpsgd import DPSGD
from privtune.training.methods.hyfreedp import HyFreeDP

__all__ = ["DPSGD", "METHODS", "Candidate", "HyFreeDP", "Method", "MethodState"]

METHODS: Mapping[str, type[Method[Any]]] = MappingProxyType(
    {method.name: method for method in (DPSGD, HyFreeDP)}
)
"""Every method by its name in specs."""
