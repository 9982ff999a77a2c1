"""The comparison of a study: as a document, which ``--json`` prints, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from privtune.numbers import finite
from privtune.plots.study_charts import ranked
from privtune.study.arm_row import COLUMNS, ArmRow
from privtune.training.mechanism.estimates import NO_INFORMATION
from privtune.views.headline import constant_notes, headline
from privtune.views.order import better_than_next, order_of
from privtune.views.text import (
    ONE_DRAW,
    draws_of,
    first_metric,
    show_params,
    spread_notes,
    stage_line,
    utility_column,
)

if TYPE_CHECKING:
    from privtune.study import Study
    from privtune.study.observer import Arms


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def comparison_document(study: Study, arms: Arms | None = None) -> dict[str, Any]:
    """Return a study's comparison as JSON-ready data: what ``privtune study compare --json`` prints.

    Args:
        study: The study.
        arms: What ``study.status()`` returned, if it was read already.
    """
    budget = study.spec.budget
    spent = study.spent()
    statuses = study.status() if arms is None else arms
    document: dict[str, Any] = {
        "study": study.name,
        "task": study.spec.task_name,
        "headline": asdict(headline(study, statuses)),
        "arms": [ArmRow.of(status).to_dict() for status in statuses],
        "order": {
            "metric": str(first_metric(statuses)),
            "better": order_of(statuses),
        },
    }
    if study.stages:
        document["stages"] = [finite(stage.to_dict()) for stage in study.stages]
    document["budget"] = {
        "name": budget.name,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adjacency": str(budget.adjacency),
        "unit": budget.unit,
        "charged": spent.epsilon,
        "bound": spent.method,
        "left": study.remaining(),
    }
    return document


def to_csv(study: Study) -> str:
    """Return a study's comparison as CSV, one line an arm; an infinite ε is an empty cell."""
    rows = map(ArmRow.of, study.status())
    return write_csv(list(rows))


def write_csv(arms: Sequence[ArmRow]) -> str:
    """Return rows of arms as CSV, with no cell that a spreadsheet takes for a formula.

    Columns are those that some arm has, in the order in which they first occur; without any arm the
    header alone is written.
    """
    rows = []
    names: dict[str, None] = {}
    for arm in arms:
        row = finite(arm.to_flat(no_information=NO_INFORMATION))
        rows.append(row)
        names |= dict.fromkeys(row)
    if not names:
        names = dict.fromkeys(column.name for column in COLUMNS)
    columns = list(names)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_no_formula, columns))
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        writer.writerow(map(_no_formula, cells))
    return file.getvalue()


def _no_formula(cell: Any) -> Any:
    """Return a cell, with a quotation mark before a text that a spreadsheet would take for a formula.

    Source: OWASP, CSV injection; a quotation mark before the text makes it a text.
    """
    if not isinstance(cell, str):
        return cell
    text = cell.replace("\r", " ")  # which ends a row for some readers, and is not quoted
    if text.lstrip(" ").startswith(_FORMULA_STARTS):
        return f"'{text}"
    return text


def table_of(arms: Arms) -> list[dict[str, str]]:
    """Return the comparison as a row of texts for each arm, by column title, the best arm first.

    Returns:
        Rows with equal keys in equal order. Of an arm without a release the utility's cell says how
        far it is.
    """
    utility, values = utility_column(arms)
    behind = draws_of(arms)
    better = better_than_next(arms)
    title = utility
    if behind not in ("", ONE_DRAW):
        title = f"{utility}, {behind}"
    rows = []
    metric = first_metric(arms)
    for arm, _ in ranked(arms, metric):
        row = ArmRow.of(arm)
        name = arm.plan.arm
        value = values.get(name, arm.state)
        compared = {title: value}
        if better:
            compared["better than next"] = better.get(name, "")
        cells = row.to_cells()
        # Behind the cost: what was reached, and how surely.
        first_cells = {head: cells.pop(head) for head in ("arm", "strategy", "ε")}
        parameters = show_params(row.params or {}) or "—"
        rows.append(
            {
                **first_cells,
                **compared,
                **cells,
                "released parameters": parameters,
            }
        )
    return rows


def to_markdown(study: Study) -> str:
    """Return the comparison as a Markdown table, with the study's answer above it and notes below."""
    arms = study.status()
    rows = table_of(arms)
    columns = list(rows[0]) if rows else ["arm"]
    rule = ["---"] * len(columns)
    table = [columns, rule]
    table += [list(row.values()) for row in rows]
    notes = constant_notes(arms)
    notes += spread_notes(arms)
    notes += map(stage_line, study.stages)
    lines = [
        *headline(study, arms).lines,
        "",
        *map(_table_line, table),
        "",
        *(f"- {note}" for note in notes),
        "",
    ]
    return "\n".join(lines)


def _table_line(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table, with bars inside of cells escaped."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
