"""``privtune ui``: MLflow's server on a study's store."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from privtune.cli import app
from privtune.cli._common import DEFAULT_STORAGE, Storage, console
from privtune.errors import PrivTuneError

__all__ = ["ui"]


@app.command()
def ui(
    storage: Storage = DEFAULT_STORAGE,
    study: Annotated[str | None, typer.Option(help="Open at this study.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 5000,
) -> None:
    """Open MLflow's UI on the releases, on this machine only."""
    from mlflow import MlflowClient

    from privtune.study._store import artifact_root
    from privtune.tracking.mlflow import experiment_url, tracking_uri

    if not (artifact_root(storage) / "mlflow.db").exists():
        raise PrivTuneError(
            f"Nothing has been logged for {storage} yet. Run a study first: privtune study run NAME."
        )
    uri = tracking_uri(storage)
    base = f"http://127.0.0.1:{port}"
    client = MlflowClient(tracking_uri=uri)
    experiments = {e.name: str(e.experiment_id) for e in client.search_experiments()}
    if study is not None and study not in experiments:
        known = ", ".join(sorted(set(experiments) - {"Default"})) or "none"
        raise PrivTuneError(f"Study {study!r} has logged nothing; these have: {known}.")
    address = base if study is None else experiment_url(base, experiments[study])
    console.print(f"MLflow: {address}", soft_wrap=True, highlight=False)
    console.print("Stop it with Ctrl-C.")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
    if code not in (0, 130, -2, -15):
        raise PrivTuneError(
            f"MLflow's server ended with code {code}. If port {port} is taken, give another: --port."
        )
