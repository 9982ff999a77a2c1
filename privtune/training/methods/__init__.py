"""DP training methods, registered by their names in specs.

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.imports import lazily
from privtune.plugins import Registry

if TYPE_CHECKING:
    from privtune.training.methods.adaclip import AdaCliP
    from privtune.training.methods.adadp import ADADP
    from privtune.training.methods.fixed_rates import (
        AutomaticClipping,
        DPAdam,
        FixedDPSGD,
        NormBound,
    )
    from privtune.training.methods.free import DAdaptation, DoG, DoWG, Prodigy, PublicRate
    from privtune.training.methods.hyfreedp import HyFreeDP
    from privtune.training.methods.method import (
        Candidate,
        Method,
        by_layer_option,
        candidate_column,
    )
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
    "NormBound",
    "PURConstant",
    "Prodigy",
    "PublicRate",
    "QuantileClipping",
    "by_layer_option",
    "candidate_column",
]


def _lacking(cls: type[Any]) -> str:
    """Say what a class of an installed package lacks to be a training method; empty if nothing."""
    from privtune.training.methods.method import Method

    if not issubclass(cls, Method):
        return "must inherit from privtune.training.methods.Method"
    if missing := sorted(cls.__abstractmethods__):
        return f"must have the method {' and '.join(missing)}"
    return ""


METHODS: Registry[type[Method]] = Registry(
    "method",
    "privtune.methods",
    {
        "dpsgd": "privtune.training.methods.fixed_rates:FixedDPSGD",
        "dp-adam": "privtune.training.methods.fixed_rates:DPAdam",
        "automatic-clipping": "privtune.training.methods.fixed_rates:AutomaticClipping",
        "quantile-clipping": "privtune.training.methods.quantile_clip:QuantileClipping",
        "norm-bound": "privtune.training.methods.fixed_rates:NormBound",
        "adaclip": "privtune.training.methods.adaclip:AdaCliP",
        "adadp": "privtune.training.methods.adadp:ADADP",
        "hyfreedp": "privtune.training.methods.hyfreedp:HyFreeDP",
        "public-rate": "privtune.training.methods.free:PublicRate",
        "dog": "privtune.training.methods.free:DoG",
        "dowg": "privtune.training.methods.free:DoWG",
        "prodigy": "privtune.training.methods.free:Prodigy",
        "d-adaptation": "privtune.training.methods.free:DAdaptation",
        "pur": "privtune.training.methods.pur:PUR",
        "pur-constant": "privtune.training.methods.pur:PURConstant",
    },
    lacking=_lacking,
)
"""Methods by their names in specs."""

__getattr__ = lazily(__name__, __file__)
