"""The arms of the study: methods at a σ, and the rates that are tried."""

from __future__ import annotations

from typing import Any

from privtune.training.methods import ADADP, DPAdam, FixedDPSGD, PublicRate
from studies.adadp_figures.task import CONV, EVEN, POOLED, SOFTMAX, UNEVEN

EPOCHS = 10
DECAY = 0.1 * 100 / EPOCHS  # (5.1) over as many decays as in the paper's 100 epochs
HALF = {"type": "decay", "start": 0.5, "decay": DECAY}
ADAPTIVE, DECAYED = "ADADP to the end", "ADADP, then (5.1)"
DEFAULT = "ADADP as it is by default"  # fixed after a third of the steps, then 0.1 an epoch
TIGHT = "ADADP with τ = 0.3, then (5.1)"
ADAM, SGD, FALLING = "DP-Adam", "DP-SGD", "DP-SGD with (5.1), rate of σ = 2"
PUBLIC = "public-rate"
EARLY = {t: f"ADADP with τ = {t:g}, fixed after 1 epoch, (5.1) after 5" for t in (0.3, 1.0)}
WHY = (DEFAULT, FALLING, TIGHT, *EARLY.values())  # experiments beside the paper's figures
GRIDS = {
    (ADAM, POOLED): range(-7, -2),
    (ADAM, CONV): range(-7, -2),
    (SGD, POOLED): range(-3, 2),
    (SGD, CONV): range(-3, 2),
    (SGD, SOFTMAX): range(-2, 4),
    (SGD, EVEN): range(-2, 2),
    (SGD, UNEVEN): range(-2, 2),
    (FALLING, POOLED): (-1,),
}
TOLERANCES = (0.1, 0.3, 1.0)
SMALL = [f"τ = {t:g}{rule}" for t in TOLERANCES for rule in ("", ", discard")]


def method_of(arm: str, sigma: float) -> Any:
    """Return the method of an arm."""
    if arm in SMALL:
        tolerance, _, rule = arm.removeprefix("τ = ").partition(", ")
        return ADADP(sigma, tolerance=float(tolerance), acceptance=bool(rule), adapt_share=1.0)
    return {
        ADAPTIVE: ADADP(sigma, tolerance=1.0, adapt_share=1.0),
        DECAYED: ADADP(sigma, tolerance=1.0, adapt_share=0.5, decay=DECAY),
        TIGHT: ADADP(sigma, tolerance=0.3, adapt_share=0.5, decay=DECAY),
        DEFAULT: ADADP(sigma),
        FALLING: FixedDPSGD(sigma, schedule=HALF),
        ADAM: DPAdam(sigma),
        SGD: FixedDPSGD(sigma),
        PUBLIC: PublicRate(sigma),
        **{
            name: ADADP(sigma, tolerance=t, adapt_epochs=1.0, decay=0.0, schedule=HALF)
            for t, name in EARLY.items()
        },
    }[arm]
