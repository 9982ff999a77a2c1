"""Training methods, one paper a file.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.imports import ByName, lazily

if TYPE_CHECKING:
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
    from privtune.training.methods.public_rate import PublicRate
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
    "PublicRate",
    "QuantileClipping",
]

METHODS: Mapping[str, type[Method[Any]]] = ByName(
    {
        "dpsgd": "privtune.training.methods.dpsgd:FixedDPSGD",
        "dp-adam": "privtune.training.methods.dp_adam:DPAdam",
        "automatic-clipping": "privtune.training.methods.automatic:AutomaticClipping",
        "quantile-clipping": "privtune.training.methods.quantile_clip:QuantileClipping",
        "norm-bound": "privtune.training.methods.norm_bound:NormBound",
        "adaclip": "privtune.training.methods.adaclip:AdaCliP",
        "adadp": "privtune.training.methods.adadp:ADADP",
        "hyfreedp": "privtune.training.methods.hyfreedp:HyFreeDP",
        "public-rate": "privtune.training.methods.public_rate:PublicRate",
        "dog": "privtune.training.methods.dog:DoG",
        "dowg": "privtune.training.methods.dowg:DoWG",
        "prodigy": "privtune.training.methods.prodigy:Prodigy",
        "d-adaptation": "privtune.training.methods.d_adaptation:DAdaptation",
        "pur": "privtune.training.methods.pur:PUR",
        "pur-constant": "privtune.training.methods.pur:PURConstant",
    }
)
"""Every method by its name in specs. ``PUROracle`` has none: it is private under no budget."""

__getattr__ = lazily(__name__, __file__)
