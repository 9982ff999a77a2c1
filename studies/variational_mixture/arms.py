"""The arms of the study: methods at a σ, and the rates that are tried."""

from __future__ import annotations

import functools
from typing import Any

from privtune.training.methods import ADADP, DPAdam, FixedDPSGD

FALL = {"type": "decay", "start": 0.5, "decay": 0.1}  # (5.1), from half of the steps on
ADAPTIVE, KEPT, END = "ADADP", "ADADP, no discard", "ADADP, adapting to the end"
SGD, ADAM, EXACT = "DP-SGD", "DP-Adam", "SGD without noise"
TOLERANCES = [f"ADADP, τ = {t:g}{rule}" for t in (0.03, 0.3, 1.0) for rule in ("", ", no discard")]
GRIDS = {SGD: range(-4, 1), ADAM: range(-5, -1), EXACT: range(-1, 2), ADAPTIVE: (-4, -2, 0)}
LONGER = range(-2, 3)  # DP-SGD's grid at a tenth of the norm


def method_of(arm: str, sigma: float) -> Any:
    """Return the method of an arm; τ = 0.1 is the paper's for this model."""
    adadp = functools.partial(ADADP, sigma, tolerance=0.1, decay=0.1)
    if arm in TOLERANCES:
        tolerance, _, rule = arm.removeprefix("ADADP, τ = ").partition(", ")
        return adadp(tolerance=float(tolerance), acceptance=not rule, adapt_share=0.5)
    return {
        ADAPTIVE: adadp(acceptance=True, adapt_share=0.5),
        KEPT: adadp(acceptance=False, adapt_share=0.5),
        END: adadp(acceptance=True, adapt_share=1.0),
        SGD: FixedDPSGD(sigma, schedule=FALL),
        EXACT: FixedDPSGD(sigma, schedule=FALL),
        ADAM: DPAdam(sigma, schedule=FALL),
    }[arm]
