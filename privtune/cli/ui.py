"""``privtune ui``: MLflow's server on a study's store, opened at the comparison."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Annotated

import typer

from privtune.cli._common import DEFAULT_STORAGE, Storage, console
from privtune.errors import PrivTuneError

_PATIENCE = 60.0  # seconds that MLflow's server may take to answer


def ui(
    storage: Storage = DEFAULT_STORAGE,
    study: Annotated[str | None, typer.Option(help="Open at this study.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 5000,
    browser: Annotated[bool, typer.Option(help="Open a browser at the comparison.")] = True,
) -> None:
    """Open MLflow's UI on the releases, on this machine only, at the view "Privacy budget"."""
    from importlib.metadata import version

    from privtune.imports import find_extra
    from privtune.ledger.places import artifact_root
    from privtune.tracking.store import local_uri, open_client
    from privtune.tracking.view import VIEW_VERSIONS, knows_view

    if not (artifact_root(storage) / "mlflow.db").exists():
        raise PrivTuneError(
            "Nothing has been logged for this storage yet. Run a study first: privtune study run NAME."
        )
    find_extra("flask", extra="ui", what="privtune ui (MLflow's server)")
    uri = local_uri(storage)
    with open_client(storage, uri) as client:
        found = {e.name: e for e in client.search_experiments() if e.name != "Default"}
    if study is not None and study not in found:
        known = ", ".join(sorted(found)) or "none"
        raise PrivTuneError(f"Study {study!r} has logged nothing; these have: {known}.")
    if study is None and len(found) == 1:
        (study,) = found
    base = f"http://127.0.0.1:{port}"
    running = version("mlflow")
    address = _address(base, None if study is None else found[study], running)
    console().print(f"MLflow: {address}", soft_wrap=True, highlight=False)
    if not knows_view(running):
        console().print(
            f"This MLflow is {running}; the view was tested with {', '.join(VIEW_VERSIONS)}, so the "
            'link is to the plain list of runs. Try "Privacy budget" under Views there.',
            soft_wrap=True,
        )
    console().print("Stop it with Ctrl-C.")
    if browser:
        threading.Thread(target=_open_when_up, args=(base, address), daemon=True).start()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    code = _serve(command, environment)
    if code not in (0, 130, -2, -15):
        raise PrivTuneError(
            f"MLflow's server ended with code {code}. If port {port} is taken, give another: --port."
        )


def _serve(command: list[str], environment: dict[str, str]) -> int:
    """Run the server until it ends; whoever ends this command ends the server with it."""
    with subprocess.Popen(command, env=environment) as server:  # noqa: S603
        before = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            return server.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _address(base: str, experiment: object, running: str) -> str:
    """Return the link to an experiment's saved view, or its plain page if MLflow cannot show it."""
    from privtune.tracking.view import VIEW_TAG, experiment_url, knows_view

    if experiment is None:
        return base
    tags = getattr(experiment, "tags", {})
    return experiment_url(
        base,
        str(getattr(experiment, "experiment_id", "")),
        view=VIEW_TAG in tags and knows_view(running),
    )


def _open_when_up(base: str, address: str) -> None:
    import urllib.error
    import urllib.request
    import webbrowser

    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2):  # noqa: S310 - our own server
                break
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    else:
        return
    webbrowser.open(address)
