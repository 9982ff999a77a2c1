"""What two accounts say of one planned selection."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from typing import Any

import privtune
from privtune.accounting import ApproximateDP, Geometric, PrivateSelection
from privtune.accounting import epsilon as account

__all__ = ["by_theorem", "of_pure_runs", "rounded_up"]


def by_theorem(arm: Mapping[str, Any], *, epsilon: float, delta: float, **terms: Any) -> float:
    """Return what Liu and Talwar's theorem says that an arm costs which is planned at an epsilon."""
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "study",
            budget=privtune.Budget(epsilon, delta, name="data"),
            arms=[{"name": "arm", **arm}],
            storage=f"sqlite:///{folder}/study.db",
            **terms,
        )
        (plan,) = study.plans
        study.close()
    return account(plan.event, delta).bounds["liu-talwar"]


def of_pure_runs(mean_runs: float, delta: float) -> float:
    """Return what a selection costs of which each run is (1, 0)-private; the theorem says 3."""
    selection = PrivateSelection(ApproximateDP(1.0, 0.0), Geometric(mean_runs))
    return account(selection, delta).epsilon


def rounded_up(value: str) -> str:
    """Return an epsilon for a table."""
    return f"{math.ceil(100.0 * float(value) - 1e-9) / 100.0:.2f}"
