"""``privtune study sync`` and the page of ``privtune study compare --html``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, console, emit_json
from privtune.cli.study import app

if TYPE_CHECKING:
    from privtune.study import Study

__all__ = ["write_report"]


@app.command()
def sync(
    name: Annotated[str, typer.Argument(help="Name of the study.")],
    *,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow's store or server; beside the study's database unless given.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Log this arm's released model in MLflow's own format; repeatable."),
    ] = None,
    register: Annotated[
        str | None, typer.Option(help="Register those models under this name.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Log releases to MLflow that are not there yet, such as those of a study run while it was down."""
    from privtune.study import Study
    from privtune.tracking.mlflow import sync_study
    from privtune.tracking.models import log_model

    study = Study(name, storage)
    try:
        logged = sync_study(study, uri=tracking_uri)
        models = {
            arm: log_model(study, arm, register=register, uri=tracking_uri) for arm in model or ()
        }
    finally:
        study.close()
    if as_json:
        emit_json({"study": name, "logged": list(logged), "models": models})
        return
    for arm, address in models.items():
        console.print(f"Logged the model of {arm}: {address}", soft_wrap=True, highlight=False)
    console.print(f"Logged {', '.join(logged)}." if logged else "Nothing to log.", soft_wrap=True)


def write_report(study: Study, path: Path) -> None:
    """Write the self-contained page of a study."""
    from privtune.ledger import write_file
    from privtune.tracking.report import render_study

    write_file(path, render_study(study))
    console.print(f"Wrote {path}: it opens in any browser, without a network.", soft_wrap=True)
