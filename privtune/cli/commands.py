"""Commands that stand alone: ``strategies``, ``tasks``, ``demo``, ``doctor``, ``ui`` and ``worker``."""

from __future__ import annotations

import contextlib
import importlib.resources
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, emit_json, say, show_table
from privtune.errors import PrivTuneError
from privtune.files import private_folder


def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A strategy or method: its options.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List strategies and in-run methods, those of installed packages too; or the options of one."""
    if name is not None:
        _options(name, as_json=as_json)
        return
    from privtune.strategies import STRATEGIES, registered
    from privtune.training.methods import METHODS, Method

    rows: list[dict[str, Any]] = [_row(strategy, "privtune") for strategy in STRATEGIES.values()]
    for found in registered():
        if found.found is None:
            rows.append({"name": found.name, "from": found.source, "what": found.problem})
        else:
            method = issubclass(found.found, Method)
            rows.append((_method_row if method else _row)(found.found, found.source))
    rows += [_method_row(method, "privtune") for method in METHODS.values()]
    if as_json:
        emit_json(rows)
        return
    for row in rows:
        source = "" if row["from"] == "privtune" else f" (from {row['from']})"
        say(f"{row['name']}{source}: {row['what']}")
        details = {
            "adapts": ", ".join(row.get("adapts", ())),
            "you set": ", ".join(row.get("needs", ())),
            "one step releases": row.get("releases", ""),
            "needs": ", ".join(row.get("requires", ())),
        }
        if said := "; ".join(f"{what} {value}" for what, value in details.items() if value):
            say(f"  {said}")


def _method_row(method: Any, source: str) -> dict[str, Any]:
    return {
        "name": method.name,
        "from": source,
        "what": method.summary,
        "adapts": list(method.adapts),
        "needs": list(method.parameters),
        "releases": method.releases,
    }


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


def _options(name: str, *, as_json: bool) -> None:
    from privtune.strategies.registry import describe

    found = describe(name)
    if as_json:
        emit_json(found)
        return
    say(f"{name}: {found['what']}")
    if found["parameters"]:
        say(f"  parameters: {', '.join(found['parameters'])}: you set them, or the space")
    for option in found["options"]:
        default = "required" if option["required"] else f"{option['default']!r} unless given"
        say(f"\n  {option['name']} ({option['type']}; {default})")
        if option["what"]:
            say(f"    {option['what']}")


def tasks(as_json: AsJson = False) -> None:
    """List the built-in tasks."""
    from privtune.tasks import TASKS

    built = [factory() for factory in TASKS.values()]
    names = (
        "name", "description", "train_records", "validation_records", "test_records", "public_test",
        "public_validation",
    )  # fmt: skip
    if as_json:
        emit_json([{name: getattr(task, name) for name in names} for task in built])
        return
    rows = [
        (
            task.name,
            task.description,
            f"{task.train_records}",
            f"{task.validation_records} ({'public' if task.public_validation else 'private'})",
            f"{task.test_records} ({'public' if task.public_test else 'private'})",
        )
        for task in built
    ]
    show_table(("task", "what it is", "train", "validation", "test"), rows, title="Tasks")


def demo(
    folder: Annotated[Path, typer.Option(help="Where the study is kept.")] = Path("demo-output"),
) -> None:
    """Compare three strategies on handwritten digits under one budget of ε = 8."""
    from privtune.cli._run import made, run_study
    from privtune.cli._tables import print_comparison
    from privtune.study import StudySpec

    private_folder(folder)
    storage = f"sqlite:///{folder / 'privtune.db'}"
    text = importlib.resources.files("privtune.tasks") / "digits-demo.yaml"
    with importlib.resources.as_file(text) as path:
        spec = StudySpec.from_file(path)
    say(
        f"Planning study {spec.name}: {len(spec.arms)} arms on {spec.task}, one budget of "
        f"ε = {spec.budget.epsilon:g}, δ = {spec.budget.delta:g}."
    )
    study, others = made(spec, storage)
    if others:
        study.close()
        raise PrivTuneError(
            f"{folder} holds a study that was created with other {', '.join(others)} than this version's "
            f"demo has. Remove {folder}, or choose another --folder."
        )
    try:
        if study.finished:
            say(
                f"This study is finished and its budget spent; nothing was run. Remove {folder} to start "
                "over with a new budget (these records are public: on private ones a new budget would "
                "not make the spent one whole)."
            )
        else:
            run_study(study, mlflow=True, quiet=False)
    finally:
        print_comparison(study)
        study.close()


def doctor(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Look at libraries, database, files and launchers; exit with 1 where a guarantee would break."""
    from privtune.execution.doctor import check_engines
    from privtune.ledger.doctor import check_artifacts, check_machine, check_storage
    from privtune.ledger.places import artifact_root
    from privtune.study._study import check_studies

    checks = [*check_machine(), *check_engines(), *check_storage(storage)]
    with contextlib.suppress(PrivTuneError):  # a storage that is none is among the checks already
        checks.append(check_artifacts(artifact_root(storage)))
        checks += check_studies(storage)
    healthy = all(check.state != "fail" for check in checks)
    if as_json:
        emit_json({"healthy": healthy, "checks": [check.to_dict() for check in checks]})
    else:
        rows = [(check.state, check.name, check.says) for check in checks]
        show_table(("", "", ""), rows)
    if not healthy:
        raise typer.Exit(1)


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
    say(f"MLflow: {address}")
    if not knows_view(running):
        say(
            f"This MLflow is {running}; the view was tested with {', '.join(VIEW_VERSIONS)}, so the "
            'link is to the plain list of runs. Try "Privacy budget" under Views there.'
        )
    say("MLflow's assistant opens at the first visit; close it once. Stop the server with Ctrl-C.")
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

    say("Working on open rounds; what they hold is sealed. Leave with Ctrl-C.")
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
