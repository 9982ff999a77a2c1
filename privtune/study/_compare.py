"""A study's arms side by side, as a pandas frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.imports import find_extra
from privtune.strategies import validation_metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from privtune.study.observer import ArmStatus


def comparison(arms: Sequence[ArmStatus]) -> pd.DataFrame:
    """Return one row an arm: public facts and releases only.

    Args:
        arms: How each arm of the study stands.

    Returns:
        Columns: ``strategy``, ``state``, ``epsilon``, ``delta``, ``bound``, ``sealed``, ``score``
        (higher is better; a loss is negated), ``gradient_evaluations`` (expected), ``wall_seconds``
        (expected), ``validation_accuracy`` or ``validation_loss``, each utility, each
        released hyperparameter as ``params.NAME``; the index is the arm.
    """
    rows: list[dict[str, Any]] = []
    for status in arms:
        release = status.release
        row: dict[str, Any] = {
            "arm": status.plan.arm,
            "strategy": status.plan.strategy,
            "state": status.state,
            "epsilon": status.guarantee.epsilon,
            "delta": status.guarantee.delta,
            "bound": status.guarantee.method,
            "sealed": status.plan.is_sealed,
            "score": None if release is None else release.score,
            "gradient_evaluations": status.plan.expected_gradient_evaluations,
            "wall_seconds": None if release is None else release.cost.wall_seconds,
        }
        if release is not None:
            of = status.plan.scored
            row |= validation_metric(status.plan.score, release.score, of=of)
            row |= release.utility
            row |= {f"params.{name}": value for name, value in release.params.items()}
        rows.append(row)
    columns = ["arm"] if not rows else None
    frames = find_extra("pandas", extra="ui", what="A study's table")
    table: pd.DataFrame = frames.DataFrame(rows, columns=columns).set_index("arm")
    return table
