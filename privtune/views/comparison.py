"""The comparison of a study: as a document, which ``--json`` prints, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.numbers import json_ready, show_epsilon
from privtune.views.text import show_params, stage_line, utility_column

if TYPE_CHECKING:
    from privtune.study import ArmStatus, Study

_COLUMNS = (
    "arm", "strategy", "state", "epsilon", "delta", "bound", "sealed", "score", "score_of",
    "score_metric", "gradient_evaluations", "wall_seconds", "wall_seconds_expected",
)  # fmt: skip


def comparison_document(study: Study, arms: Sequence[ArmStatus] | None = None) -> dict[str, Any]:
    """Return a study's comparison as JSON-ready data, of its arms' states if they were read."""
    budget, spent = study.spec.budget, study.spent()
    read = study.status() if arms is None else arms
    return {
        "study": study.name,
        "task": study.spec.task_name,
        "arms": [_arm_document(status) for status in read],
        **({"stages": [finite(s.to_dict()) for s in study.stages]} if study.stages else {}),
        "budget": {
            "name": budget.name,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": str(budget.adjacency),
            "unit": budget.unit,
            "charged": spent.epsilon,
            "bound": spent.method,
            "left": study.remaining(),
        },
    }


def _arm_document(status: ArmStatus) -> dict[str, Any]:
    plan, release = status.plan, status.release
    document: dict[str, Any] = {
        "arm": plan.arm,
        "strategy": plan.strategy,
        "state": status.state,
        "epsilon": status.guarantee.epsilon,
        "delta": status.guarantee.delta,
        "bound": status.guarantee.method,
        "sealed": plan.is_sealed,
        "params": None,
        "score": None,
        "score_of": plan.scored,
        "score_metric": None if plan.score is None else plan.score.metric,
        "note": "",
        "trials": [],
        "utility": None,
        "intervals": None,
        "gradient_evaluations": plan.expected_gradient_evaluations,
        "wall_seconds": None,
        "wall_seconds_expected": plan.is_private,
    }
    if release is not None:
        trials = [{"number": t.index, "params": t.params, "score": t.score} for t in release.trials]
        document |= {
            "params": json_ready(release.params),
            "score": release.score,
            "note": release.note,
            "trials": [finite(json_ready(trial)) for trial in trials],
            "utility": dict(release.utility),
            "intervals": {name: list(ends) for name, ends in release.intervals.items()},
            "wall_seconds": release.cost.wall_seconds,
            "wall_seconds_expected": release.cost.expected,
        }
    return finite(document)


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities, which JSON lacks, by null: no ε at all is no guarantee."""
    return {
        key: finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in document.items()
    }


def to_csv(document: Mapping[str, Any]) -> str:
    """Return a comparison's document as CSV, a line an arm; no ε at all is an empty cell."""
    rows = []
    for arm in document["arms"]:
        row = {name: arm[name] for name in _COLUMNS}
        row |= arm["utility"] or {}
        for name, (low, high) in (arm["intervals"] or {}).items():
            row |= {f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {f"params.{name}": v for name, v in (arm["params"] or {}).items()})
    names = dict.fromkeys(name for row in rows for name in row)
    file = io.StringIO()
    columns = list(names) or list(_COLUMNS)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_no_formula, columns))
    writer.writerows([_no_formula(row.get(name, "")) for name in columns] for row in rows)
    return file.getvalue()


def _no_formula(cell: Any) -> Any:
    """Return a cell that spreadsheets do not compute: names and choices come from whoever wrote the spec.

    Source: OWASP, CSV injection; a quotation mark before the text makes it a text.
    """
    if isinstance(cell, str):
        cell = cell.replace("\r", " ")  # which ends a row for some readers, and is not quoted
    if not isinstance(cell, str) or not cell.lstrip(" ").startswith(
        ("=", "+", "-", "@", "\t", "\r")
    ):
        return cell
    return f"'{cell}"


def to_markdown(study: Study) -> str:
    """Return the comparison as a table of Markdown."""
    title, values = utility_column(study.status())
    head = ("arm", "strategy", "ε", title, "gradient evaluations", "released parameters")
    lines = [_line(head), _line(["---"] * len(head))]
    for status in study.status():
        plan, release = status.plan, status.release
        lines.append(
            _line(
                (
                    plan.arm,
                    plan.strategy,
                    show_epsilon(status.guarantee.epsilon),
                    values.get(plan.arm, status.state),
                    f"{plan.expected_gradient_evaluations:,.0f}",
                    show_params({} if release is None else release.params) or "—",
                )
            )
        )
    if study.stages:
        lines += ["", *(f"- {stage_line(stage)}" for stage in study.stages)]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
