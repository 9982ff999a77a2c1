"""The comparison of a study: as a document, which ``--json`` prints, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from privtune.numbers import json_ready, show_epsilon, show_seconds
from privtune.plots._study import ranked
from privtune.strategies.spread import Spread, probability_above, values_of
from privtune.training.mechanism.estimates import NO_INFORMATION
from privtune.training.mechanism.metrics import lower_is_better
from privtune.views.text import (
    draws_of,
    first_metric,
    metric_of,
    show_params,
    spread_notes,
    stage_line,
    utility_column,
)

if TYPE_CHECKING:
    from privtune.strategies import TrialResult
    from privtune.study import ArmStatus, Study

_COLUMNS = (
    "arm", "strategy", "state", "epsilon", "delta", "bound", "sealed", "score", "score_of",
    "score_metric", "draws", "gradient_evaluations", "wall_seconds", "wall_seconds_expected",
)  # fmt: skip


def comparison_document(study: Study, arms: Sequence[ArmStatus] | None = None) -> dict[str, Any]:
    """Return a study's comparison as JSON-ready data, of its arms' states if they were read."""
    budget, spent = study.spec.budget, study.spent()
    read = study.status() if arms is None else arms
    return {
        "study": study.name,
        "task": study.spec.task_name,
        "arms": [_arm_document(status) for status in read],
        "order": {"metric": first_metric(read), "better": order_of(read)},
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
        "repetitions_charged": plan.repeats_charged if plan.repeats > 1 else None,
        "params": None,
        "score": None,
        "score_of": plan.scored,
        "score_metric": None if plan.score is None else plan.score.metric,
        "note": "",
        "trials": [],
        "utility": None,
        "estimates": None,
        "draws": None,
        "spread": None,
        "repetitions": [],
        "gradient_evaluations": plan.expected_gradient_evaluations,
        "wall_seconds": None,
        "wall_seconds_expected": plan.is_private,
    }
    if release is not None:
        trials = [_trial_document(trial) for trial in release.trials]
        document |= {
            "params": json_ready(release.params),
            "score": release.score,
            "note": release.note,
            "trials": [finite(json_ready(trial)) for trial in trials],
            "utility": dict(release.utility),
            "estimates": {name: score.to_shown() for name, score in release.scores.items()},
            "draws": len(release.repetitions) or 1,
            "spread": spreads(status),
            "repetitions": [finite(json_ready(asdict(run))) for run in release.repetitions],
            "wall_seconds": release.cost.wall_seconds,
            "wall_seconds_expected": release.cost.expected,
        }
    return finite(document)


def _trial_document(trial: TrialResult) -> dict[str, Any]:
    """Return a trial that is paid for: its hyperparameters, its score and the score's interval."""
    return {
        "number": trial.index,
        "params": trial.params,
        "score": trial.score,
        "estimate": None if trial.estimate is None else trial.estimate.to_shown(),
    }


def spreads(arm: ArmStatus) -> dict[str, dict[str, Any]]:
    """Return mean, standard error and number of values of each metric of a repeated arm; none of one draw."""
    if arm.release is None or not arm.release.repetitions:
        return {}
    found = ((name, Spread.of(row)) for name, row in values_of(arm.release).items())
    return {name: {} if spread is None else asdict(spread) for name, spread in found}


def order_of(arms: Sequence[ArmStatus]) -> dict[str, dict[str, float | None]]:
    """Return how probable it is that the mean of an arm is better than that of another; the best arm first.

    Arms of one draw are left out: nothing is known of their spread.
    """
    metric = first_metric(arms)
    rows = {
        status.plan.arm: values_of(status.release)[metric]
        for status, value in ranked(arms, metric)
        if value is not None and status.release is not None and status.release.repetitions
    }
    if lower_is_better(metric_of(metric)):
        rows = {arm: [None if v is None else -v for v in row] for arm, row in rows.items()}
    return {
        arm: {other: probability_above(row, rows[other]) for other in rows if other != arm}
        for arm, row in rows.items()
    }


def better_than_next(arms: Sequence[ArmStatus]) -> dict[str, str]:
    """Return the probability that an arm is better than the next by mean, as text; the best arm first."""
    order = order_of(arms)
    names = [*order]
    last = dict.fromkeys(names[-1:], "")
    return {a: show_probability(order[a][b]) for a, b in pairwise(names)} | last


def show_probability(value: float | None) -> str:
    """Return a probability in percent, which never reads as certainty.

    Example:
        >>> show_probability(0.873), show_probability(0.9999), show_probability(None)
        ('87%', '>99%', 'not known')
    """
    if value is None:
        return "not known"
    return ">99%" if value > 0.99 else "<1%" if value < 0.01 else f"{value:.0%}"


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
        for name, score in (arm["estimates"] or {}).items():
            row[name] = score["value"] if score["informative"] else NO_INFORMATION
            row |= {f"{name}_low": score["low"], f"{name}_high": score["high"]}
        for name, spread in (arm["spread"] or {}).items():
            row |= {f"{name}_{part}": value for part, value in spread.items()}
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


def table_of(arms: Sequence[ArmStatus]) -> list[dict[str, str]]:
    """Return the comparison as people read it: a row an arm with its cells by title, the best first."""
    utility, values = utility_column(arms)
    behind, better, rows = draws_of(arms), better_than_next(arms), []
    for arm, _ in ranked(arms, first_metric(arms)):
        plan, release = arm.plan, arm.release
        row = {
            "arm": plan.arm,
            "strategy": plan.strategy,
            "ε": show_epsilon(arm.guarantee.epsilon) if plan.is_private else "∞ NOT PRIVATE",
            f"{utility}, {behind}" if behind else utility: values.get(plan.arm, arm.state),
            "better than next": better.get(plan.arm, ""),
            "gradient evaluations": f"{plan.expected_gradient_evaluations:,.0f}",
            "seconds": show_seconds(None if release is None else release.cost.wall_seconds),
            "released parameters": show_params({} if release is None else release.params) or "—",
        }
        if not better:
            del row["better than next"]
        rows.append(row)
    return rows


def to_markdown(study: Study) -> str:
    """Return the comparison as a table of Markdown."""
    arms = study.status()
    rows = table_of(arms)
    columns = [*rows[0]] if rows else ["arm"]
    lines = [_line(columns), _line(["---"] * len(columns)), *(_line(row.values()) for row in rows)]
    notes = [*spread_notes(arms), *map(stage_line, study.stages)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
