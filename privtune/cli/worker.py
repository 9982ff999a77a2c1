"""``privtune worker``: trains the rows of open rounds, wherever the database can be reached from."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from privtune.cli._common import DEFAULT_STORAGE, Storage, console


def worker(  # noqa: PLR0917 (the command line passes them by name)
    study: Annotated[str | None, typer.Argument(help="Work for this study alone.")] = None,
    arm: Annotated[str | None, typer.Option(help="Work for this arm alone.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda or cuda:N; what the study says unless given."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Candidates trained in one pass: a number or auto; changes no result."),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Leave after this many trainings.")
    ] = None,
    idle_exit: Annotated[
        float | None, typer.Option(min=0, help="Leave after this many seconds without work.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Train what open rounds wait for; any number of workers, anywhere. Charges nothing.

    Whoever runs the study charges it, waits and releases: privtune study run NAME --executor
    external. Both need the same database, the same task or function, and the task's data. A study that
    cannot be loaded here is skipped, with a word; one that is named is an error, and ends the worker
    when it is finished.
    """
    from privtune.study.workers import serve
    from privtune.training.engine.compute import check_stack

    console().print("Working on open rounds; what they hold is sealed. Leave with Ctrl-C.")
    serve(
        storage,
        study=study,
        arm=arm,
        device=device,
        stack=None if stack is None else check_stack(stack),
        most=max_rows,
        idle_exit=math.inf if idle_exit is None else idle_exit,
        tell=lambda text: typer.echo(text, err=True),
    )
