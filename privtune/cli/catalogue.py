"""``privtune strategies`` and ``privtune tasks``: what there is to choose from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from privtune.cli._common import AsJson, console, emit_json

Which = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="A strategy or method: its options.")
]


def strategies(name: Which = None, as_json: AsJson = False) -> None:
    """List strategies and in-run methods, those of installed packages too; or the options of one."""
    if name is not None:
        _show(name, as_json=as_json)
        return
    from rich.markup import escape
    from rich.padding import Padding

    from privtune.strategies import STRATEGIES, registered
    from privtune.training.methods import METHODS

    rows: list[dict[str, Any]] = [_row(s, "privtune") for s in STRATEGIES.values()]
    for found in registered():
        if found.strategy is not None:
            rows.append(_row(found.strategy, found.source))
        else:
            rows.append({"name": found.name, "from": found.source, "what": found.problem})
    rows += [
        {
            "name": m.name,
            "from": "privtune",
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
        source = "" if row["from"] == "privtune" else f" (from {row['from']})"
        line = f"[bold]{escape(row['name'])}[/]{escape(source)}: {escape(row['what'])}"
        console().print(line, highlight=False)
        details = {
            "adapts": ", ".join(row.get("adapts", ())),
            "you set": ", ".join(row.get("needs", ())),
            "one step releases": row.get("releases", ""),
            "needs": ", ".join(row.get("requires", ())),
        }
        said = "; ".join(f"{what} {value}" for what, value in details.items() if value)
        if said:
            console().print(Padding(said, (0, 0, 0, 2)), style="dim", highlight=False)


def _show(name: str, *, as_json: bool) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    from privtune.strategies.describe import describe

    found = describe(name)
    if as_json:
        emit_json(found)
        return
    console().print(f"[bold]{escape(name)}[/]: {escape(found['what'])}", highlight=False)
    if found["parameters"]:
        needed = ", ".join(found["parameters"])
        console().print(Padding(f"parameters: {needed}: you set them, or the space", (0, 0, 0, 2)))
    for option in found["options"]:
        default = "required" if option["required"] else f"{option['default']!r} unless given"
        head = f"{option['name']} ({option['type']}; {default})"
        console().print(Padding(f"[bold]{escape(head)}[/]", (1, 0, 0, 2)), highlight=False)
        if option["what"]:
            console().print(Padding(escape(option["what"]), (0, 0, 0, 4)), highlight=False)


def _row(strategy: type[Any], source: str) -> dict[str, Any]:
    return {
        "name": strategy.name,
        "from": source,
        "what": strategy.summary,
        "adapts": [],
        "needs": [],
        "requires": list(strategy.needs.words),
        "releases": "",
    }


def tasks(as_json: AsJson = False) -> None:
    """List the built-in tasks."""
    from rich.table import Table

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
    table = Table("task", "what it is", "train", "validation", "test", title="Tasks")
    for task in built:
        table.add_row(
            task.name,
            task.description,
            str(task.train_records),
            f"{task.validation_records} ({'public' if task.public_validation else 'private'})",
            f"{task.test_records} ({'public' if task.public_test else 'private'})",
        )
    console().print(table)
