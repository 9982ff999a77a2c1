"""``privtune strategies`` and ``privtune tasks``: what there is to choose from."""

from __future__ import annotations

from rich.padding import Padding
from rich.table import Table

from privtune.cli import app
from privtune.cli._common import AsJson, console, emit_json

__all__ = ["strategies", "tasks"]


@app.command()
def strategies(as_json: AsJson = False) -> None:
    """List the strategies and in-run methods."""
    from privtune.strategies import STRATEGIES
    from privtune.training.methods import METHODS

    rows = [
        {"name": s.name, "what": s.summary, "adapts": [], "needs": [], "releases": ""}
        for s in STRATEGIES.values()
    ] + [
        {
            "name": m.name,
            "what": m.summary,
            "adapts": list(m.adapts),
            "needs": list(m.parameters),
            "releases": m.releases,
        }
        for m in METHODS.values()
    ]
    if as_json:
        emit_json(rows)
        return
    for row in rows:
        console.print(f"[bold]{row['name']}[/]: {row['what']}", highlight=False)
        details = {
            "adapts": ", ".join(row["adapts"]),
            "you set": ", ".join(row["needs"]),
            "one step releases": row["releases"],
        }
        said = "; ".join(f"{what} {value}" for what, value in details.items() if value)
        if said:
            console.print(Padding(said, (0, 0, 0, 2)), style="dim", highlight=False)


@app.command()
def tasks(as_json: AsJson = False) -> None:
    """List the built-in tasks."""
    from privtune.tasks import TASKS

    built = [factory() for factory in TASKS.values()]
    if as_json:
        emit_json(
            [
                {
                    "name": task.name,
                    "description": task.description,
                    "train_records": task.train_records,
                    "validation_records": task.validation_records,
                    "test_records": task.test_records,
                    "public_test": task.public_test,
                    "public_validation": task.public_validation,
                }
                for task in built
            ]
        )
        return
    table = Table(title="Tasks")
    for column in ("task", "what it is", "train", "validation", "test"):
        table.add_column(column)
    for task in built:
        table.add_row(
            task.name,
            task.description,
            str(task.train_records),
            f"{task.validation_records} ({'public' if task.public_validation else 'private'})",
            f"{task.test_records} ({'public' if task.public_test else 'private'})",
        )
    console.print(table)
