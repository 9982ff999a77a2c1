"""The curve of a study's schedule: noise and work of other batches and epochs, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.cli._common import say, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from privtune.strategies.schedule_rule import ScheduleCurve, SchedulePoint

_COLUMNS = ("batch", "epochs", "steps", "σ", "noise / signal", "shortfall", "")


def curve_document(curve: ScheduleCurve) -> dict[str, Any]:
    """Return a curve as JSON-ready data, for ``study plan --curve --json``.

    Args:
        curve: The schedules, with the one of the plan.
    """
    lines = []
    for factor, points in curve.lines.items():
        lines.append({"work": factor, "points": [point.to_dict() for point in points]})
    return {
        "chosen": curve.chosen.to_dict(),
        "by_batch": lines,
        "by_work": [point.to_dict() for point in curve.by_work],
        "twice_the_work": curve.gain,
    }


def print_curve(curve: ScheduleCurve) -> None:
    """Print the schedules of equal work, those of other amounts of work, and what twice the work buys.

    Args:
        curve: The schedules, with the one of the plan.
    """
    chosen = curve.chosen
    say(f"Schedules of {chosen.work:,} gradient evaluations, as the plan has", bold=True)
    show_table(_COLUMNS, _rows(curve.by_batch, chosen), numeric=_COLUMNS[:-1], keep_lines=True)
    say("The best schedule of less and of more work", bold=True)
    columns = ("work", *_COLUMNS)
    rows = []
    for point, row in zip(curve.by_work, _rows(curve.by_work, chosen), strict=True):
        rows.append((f"{point.work:,}", *row))
    show_table(columns, rows, numeric=columns[:-1], keep_lines=True)
    say(
        f"Twice the work would lower the shortfall by {100.0 * curve.gain:.2g}%. The shortfall is noise and "
        "missing steps together, the smaller the better. All numbers are public, and no data was touched."
    )


def _rows(points: Sequence[SchedulePoint], chosen: SchedulePoint) -> list[tuple[str, ...]]:
    """Return the cells of a table of schedules, with a mark on the plan's."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        is_chosen = (point.batch, point.steps) == (chosen.batch, chosen.steps)
        rows.append(
            (
                f"{point.batch:,}",
                f"{point.epochs:.4g}",
                f"{point.steps:,}",
                f"{point.noise_multiplier:.3g}",
                f"{point.noise_to_signal:.3g}",
                f"{point.shortfall:.3g}",
                "<- the plan" if is_chosen else "",
            )
        )
    return rows
