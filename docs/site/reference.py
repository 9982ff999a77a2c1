"""Pages of reference, generated from the code: commands, fields of specs, options, classes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

import privtune
from privtune import accounting, sklearn
from privtune.accounting import events
from privtune.cli._app import mount
from privtune.strategies import STRATEGIES, Reporting, Scoring
from privtune.strategies.options import argument_texts
from privtune.study.spec import ArmSpec, BudgetSpec, StudySpec
from privtune.tasks import TASKS
from privtune.training.methods import METHODS


def pages() -> dict[str, str]:
    """Return the text of every page of reference, by its name."""
    return {
        "cli": _commands(),
        "spec": _spec(),
        "strategies": _strategies(),
        "python": _python(),
        "events": _events(),
    }


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(head), line(tuple("---" for _ in head)), *map(line, rows)]) + "\n"


def _commands() -> str:
    parts = ["# The command line\n"]

    def walk(command: Any, path: str, above: Any) -> None:
        context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=above)
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                walk(command.get_command(context, name), f"{path} {name}", context)
            return
        parts.append(f"## {path}\n\n{inspect.cleandoc(command.help or '')}\n")
        rows = []
        for parameter in command.params:
            said, text = (parameter.get_help_record(context) or ("", ""))[:2]
            if said and "--help" not in said:
                rows.append((f"`{said}`", text))
        if rows:
            parts.append(_table(("argument", "what it is"), rows))

    walk(typer.main.get_command(mount()), "privtune", None)
    return "\n".join(parts)


def _spec() -> str:
    parts = ["# Fields of a spec\n\nSee [the study spec](../spec.md) for an example of each.\n"]
    for model, where in (
        (StudySpec, "The file"),
        (BudgetSpec, "`budget:`"),
        (ArmSpec, "Each of `arms:`"),
    ):
        said = argument_texts(model)
        rows = [
            (
                f"`{name}`",
                said.get(name, field.description or ""),
                "required"
                if field.is_required()
                else _value(field.get_default(call_default_factory=True)),
            )
            for name, field in model.model_fields.items()
        ]
        parts.append(f"## {where}\n\n{_table(('field', 'what it is', 'default'), rows)}")
    for terms, where in ((Scoring, "`scoring:`"), (Reporting, "`report:`")):
        said = argument_texts(terms)
        own = [field for field in dataclasses.fields(terms) if field.name != "folds"]
        rows = [(f"`{field.name}`", said.get(field.name, ""), _default(field)) for field in own]
        parts.append(f"## {where}\n\n{_table(('field', 'what it is', 'default'), rows)}")
    rows = [(f"`{name}`", make().description) for name, make in TASKS.items()]
    parts.append(f"## Built-in tasks\n\n{_table(('task', 'what it is'), rows)}")
    return "\n".join(parts)


def _strategies() -> str:
    parts = [
        "# Strategies and methods\n\nEvery in-run method is a strategy under its own name, too; its "
        "options stand beside it in an arm.\n"
    ]
    for kind, known in (("Strategies", STRATEGIES), ("In-run methods", METHODS)):
        parts.append(f"## {kind}\n")
        for name, found in known.items():
            said = argument_texts(found)
            rows = [
                (f"`{field.name}`", said.get(field.name, ""), _default(field))
                for field in dataclasses.fields(found)
                if field.init and not field.name.startswith("_")
            ]
            parts.append(f"### {name}\n\n{found.summary}\n")
            if rows:
                parts.append(_table(("option", "what it is", "default"), rows))
    return "\n".join(parts)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return _value(field.default_factory())
    return "required"


def _value(value: object) -> str:
    value = getattr(value, "value", value)
    return "" if value is None or value in ({}, (), []) else f"`{value}`"


def _python() -> str:
    parts = ["# Python\n"]
    for name in privtune.__all__:
        found = getattr(privtune, name)
        if inspect.ismodule(found):
            continue
        parts.append(f"::: {found.__module__}.{found.__qualname__}\n")
    parts += ["# scikit-learn\n", *(f"::: privtune.sklearn.{name}\n" for name in sklearn.__all__)]
    parts += ["# Accounting\n"]
    for name in accounting.__all__:
        found = getattr(accounting, name)
        if inspect.isfunction(found):
            parts.append(f"::: {found.__module__}.{found.__qualname__}\n")
    return "\n".join(parts)


def _events() -> str:
    parts = [
        "# Events\n\nWhat touched the data, as data: what ledgers, certificates and commands speak.\n"
    ]
    for name in sorted(accounting.__all__):
        found = getattr(accounting, name)
        if inspect.isclass(found) and issubclass(found, events.Event) and found is not events.Event:
            parts.append(f"::: {found.__module__}.{found.__qualname__}\n")
    return "\n".join(parts)
