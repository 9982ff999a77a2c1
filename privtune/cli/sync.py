"""``privtune study sync``: what is not in MLflow yet gets there."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, console, emit_json


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

    with closing(Study(name, storage)) as study:
        logged = sync_study(study, uri=tracking_uri)
        models = {
            arm: log_model(study, arm, register=register, uri=tracking_uri) for arm in model or ()
        }
    if as_json:
        emit_json({"study": name, "logged": list(logged), "models": models})
        return
    for arm, address in models.items():
        console().print(f"Logged the model of {arm}: {address}", soft_wrap=True, highlight=False)
    console().print(f"Logged {', '.join(logged)}." if logged else "Nothing to log.", soft_wrap=True)
