"""Training methods, one paper a file.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from privtune.training.methods._base import Candidate, Method, MethodState
from privtune.training.methods.adaclip import AdaCliP
from privtune.training.methods.adadp import ADADP
from privtune.training.methods.automatic import AutomaticClipping
from privtune.training.methods.d_adaptation import DAdaptation
from privtune.training.methods.dog import DoG
from privtune.training.methods.dowg import DoWG
from privtune.training.methods.dp_adam import DPAdam
from privtune.training.methods.dpsgd import FixedDPSGD
from privtune.training.methods.hyfreedp import HyFreeDP
from privtune.training.methods.norm_bound import NormBound
from privtune.training.methods.prodigy import Prodigy
from privtune.training.methods.pur import PUR, PURConstant
from privtune.training.methods.quantile_clip import QuantileClipping

__all__ = [
    "ADADP",
    "METHODS",
    "PUR",
    "AdaCliP",
    "AutomaticClipping",
    "Candidate",
    "DAdaptation",
    "DPAdam",
    "DoG",
    "DoWG",
    "FixedDPSGD",
    "HyFreeDP",
    "Method",
    "MethodState",
    "NormBound",
    "PURConstant",
    "Prodigy",
    "QuantileClipping",
]

_METHODS: tuple[type[Method[Any]], ...] = (
    FixedDPSGD,
    DPAdam,
    AutomaticClipping,
    QuantileClipping,
    NormBound,
    AdaCliP,
    ADADP,
    HyFreeDP,
    DoG,
    DoWG,
    Prodigy,
    DAdaptation,
    PUR,
    PURConstant,
)

METHODS: Mapping[str, type[Method[Any]]] = MappingProxyType({m.name: m for m in _METHODS})
"""Every method by its name in specs. ``PUROracle`` has none: it is private under no budget."""
