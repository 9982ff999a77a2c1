"""The comparison of a study as CSV and as Markdown, made of the document that ``--json`` prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.numbers import show_epsilon
from privtune.views.text import show_params, stage_line, utility_column

if TYPE_CHECKING:
    from privtune.study import Study

_COLUMNS = (
    "arm", "strategy", "state", "epsilon", "delta", "bound", "sealed", "score", "score_of",
    "score_metric", "gradient_evaluations", "wall_seconds", "wall_seconds_expected",
)  # fmt: skip


def to_csv(document: Mapping[str, Any]) -> str:
    """Return one line an arm: what it cost and reached, its intervals, its released parameters.

    Args:
        document: The comparison as ``privtune study compare --json`` prints it. No ε at all, of an
            arm without a guarantee, is an empty cell.
    """
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
    """Return the comparison as a table of Markdown.

    Args:
        study: A study.
    """
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
