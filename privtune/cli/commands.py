"""Commands that stand alone, such as ``strategies``, ``tasks``, ``demo``, ``doctor``, ``ui`` and ``worker``.

A command's docstring is its help text. Each imports what it needs when it runs: to print the help of one must
not load torch or MLflow for another.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import AsJson, Storage, emit_json, say, show_table
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import private_folder
from privtune.names import DEFAULT_STORAGE

if TYPE_CHECKING:
    from privtune.tasks import Task
    from privtune.tracking.process import Experiment
    from privtune.training.mechanism.metrics import Metric


def strategies(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show the options of this strategy or method."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List strategies and in-run methods, or the options of one.

    Those that installed packages bring are among them.
    """
    if name is not None:
        _print_options(name, as_json=as_json)
        return
    rows = _strategy_rows()
    if as_json:
        emit_json(rows)
        return
    for row in rows:
        say(f"{row['name']}{_origin(row)}: {row['what']}")
        details = {
            "adapts": ", ".join(row.get("adapts", ())),
            "you set": ", ".join(row.get("needs", ())),
            "one step releases": row.get("releases", ""),
            "needs": ", ".join(row.get("requires", ())),
        }
        sentence = "; ".join(f"{label} {value}" for label, value in details.items() if value)
        if sentence:
            say(f"  {sentence}")


def _strategy_rows() -> list[dict[str, Any]]:
    """Return a row for each strategy and method: this package's own, and those of installed packages.

    What a package registers and cannot be loaded gets a row, too, with the problem in place of a summary:
    left out, it would look as if it were not installed.
    """
    from privtune.strategies import STRATEGIES, registered
    from privtune.training.methods import METHODS, Method

    rows = [_strategy_row(strategy, "privtune") for strategy in STRATEGIES.values()]
    for extension in registered():
        if extension.cls is None:
            rows.append(
                {"name": extension.name, "from": extension.source, "what": extension.problem}
            )
        elif issubclass(extension.cls, Method):
            rows.append(_method_row(extension.cls, extension.source))
        else:
            rows.append(_strategy_row(extension.cls, extension.source))
    rows += [_method_row(method, "privtune") for method in METHODS.values()]
    return rows


def _method_row(method: Any, source: str) -> dict[str, Any]:
    """Return an in-run method as JSON-ready data.

    Args:
        method: Its class.
        source: The package that brings it, by its distribution's name.
    """
    return {
        "name": method.name,
        "from": source,
        "what": method.summary,
        "adapts": list(method.adapts),
        "needs": list(method.parameters),
        "releases": method.releases,
    }


def _strategy_row(strategy: type[Any], source: str) -> dict[str, Any]:
    """Return a strategy as JSON-ready data, with empty values for keys that only methods have.

    Args:
        strategy: Its class.
        source: The package that brings it, by its distribution's name.
    """
    return {
        "name": strategy.name,
        "from": source,
        "what": strategy.summary,
        "adapts": [],
        "needs": [],
        "requires": list(strategy.needs.words),
        "releases": "",
    }


def _print_options(name: str, *, as_json: bool) -> None:
    """Print the options and parameters of one strategy or method that a spec can set.

    Raises:
        InvalidInputError: If none has this name.
    """
    from privtune.strategies.catalog import describe

    description = describe(name)
    if as_json:
        emit_json(description)
        return
    say(f"{name}: {description['what']}")
    if description["parameters"]:
        parameters = ", ".join(description["parameters"])
        say(f"  parameters: {parameters}: you set them, or the space")
    for option in description["options"]:
        default = "required" if option["required"] else f"{option['default']!r} unless given"
        say(f"\n  {option['name']} ({option['type']}; {default})")
        if option["what"]:
            say(f"    {option['what']}")


def metrics(as_json: AsJson = False) -> None:
    """List the metrics that scoring and report of a study can name.

    Those that installed packages bring are among them.
    """
    rows = _metric_rows()
    if as_json:
        emit_json(rows)
        return
    for row in rows:
        say(f"{row['name']}{_origin(row)}: {row['what']}")
        details = {"takes": row.get("takes", ""), "options": ", ".join(row.get("options", ()))}
        sentence = "; ".join(f"{label} {value}" for label, value in details.items() if value)
        if sentence:
            say(f"  {sentence}")


def _metric_rows() -> list[dict[str, Any]]:
    """Return a row for each metric, with the problem in it if a package's metric cannot be used."""
    from privtune.training.mechanism.metrics import METRICS, OwnScore, registered_metrics

    built_in = [*METRICS.values(), OwnScore]
    rows = [_metric_row(metric, "privtune") for metric in built_in]
    for entry in registered_metrics():
        if entry.cls is None:
            rows.append({"name": entry.name, "from": entry.source, "what": entry.problem})
        else:
            rows.append(_metric_row(entry.cls, entry.source))
    return rows


def _metric_row(metric: type[Metric], source: str) -> dict[str, Any]:
    """Return a metric as JSON-ready data.

    Args:
        metric: Its class.
        source: The package that brings it, by its distribution's name.
    """
    from privtune.training.mechanism.metrics import options_of

    return {
        "name": metric.name,
        "from": source,
        "what": metric.summary,
        "takes": metric.takes,
        "lower_is_better": metric.lower_is_better,
        "options": options_of(metric),
    }


def _origin(row: Mapping[str, Any]) -> str:
    """Return a row's package in brackets, or an empty text if it is this package."""
    return "" if row["from"] == "privtune" else f" (from {row['from']})"


_TASK_FACTS = (
    "name", "description", "train_records", "validation_records", "test_records", "public_test",
    "public_validation",
)  # fmt: skip
"""What ``tasks --json`` says of a task, by the names of its attributes."""


def tasks(as_json: AsJson = False) -> None:
    """List built-in tasks and those of installed packages."""
    sources, problems = _find_tasks()
    if as_json:
        documents = []
        for task, source in sources:
            facts = {name: getattr(task, name) for name in _TASK_FACTS}
            documents.append({**facts, "from": source, "lacks": problems.get(task.name)})
        emit_json(documents)
        return
    rows = []
    for task, source in sources:
        validation = "public" if task.public_validation else "private"
        test = "public" if task.public_test else "private"
        rows.append(
            (
                f"{task.name}{_origin({'from': source})}",
                task.description,
                f"{task.train_records}",
                f"{task.validation_records} ({validation})",
                f"{task.test_records} ({test})",
            )
        )
    show_table(("task", "what it is", "train", "validation", "test"), rows, title="Tasks")
    # Several tasks may lack the same library, which is said once.
    for problem in dict.fromkeys(problems.values()):
        say(problem)


def _find_tasks() -> tuple[list[tuple[Task, str]], dict[str, str]]:
    """Return each task with the package that brings it, and by the task's name what is missing here.

    One that a package registers and that cannot be made is among the problems alone.
    """
    from privtune.tasks.built_in import TASKS, get_task, registered_tasks

    sources = [(factory(), "privtune") for factory in TASKS.values()]
    problems = {}
    for entry in registered_tasks():
        if entry.problem:
            problems[entry.name] = entry.problem
            continue
        try:
            sources.append((get_task(entry.name), entry.source))
        except PrivTuneError as error:
            problems[entry.name] = str(error)
    for task, _ in sources:
        problem = _problem_of(task)
        if problem:
            problems[task.name] = problem
    return sources, problems


def _problem_of(task: Task) -> str:
    """Return why a task cannot run here, such as a missing library, or an empty text if it can."""
    try:
        task.header()
    except PrivTuneError as error:
        return str(error)
    return ""


def demo(
    folder: Annotated[Path, typer.Option(help="Where the study is kept.")] = Path("demo-output"),
) -> None:
    """Compare three strategies on digits at ε = 8, five times each."""
    from privtune.cli._progress import create_or_load, run_study
    from privtune.cli._tables import print_comparison
    from privtune.study import StudySpec

    private_folder(folder)
    storage = f"sqlite:///{folder / 'privtune.db'}"
    resource = importlib.resources.files("privtune.tasks") / "digits-demo.yaml"
    with importlib.resources.as_file(resource) as path:
        spec = StudySpec.from_file(path)
    say(
        f"Planning study {spec.name}: {len(spec.arms)} arms on {spec.task}, {spec.repeats} times each, one "
        f"budget of ε = {spec.budget.epsilon:g}, δ = {spec.budget.delta:g}."
    )
    study, others = create_or_load(spec, storage)
    if others:
        study.close()
        raise PrivTuneError(
            f"{folder} holds a study that was created with other {', '.join(others)} than this version's "
            f"demo has. Remove {folder}, or choose another --folder."
        )
    try:
        if study.finished:
            say(
                f"This study is finished and its budget is spent, so nothing was run. To start over with a "
                f"new budget, remove {folder}. (The records are public. On private records a new budget "
                "would not undo what the old one spent.)"
            )
        else:
            run_study(study, mlflow=True, quiet=False)
    finally:
        print_comparison(study)
        study.close()


def doctor(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Check libraries, database, files and launchers. Exits with 1 if a guarantee could break."""
    from privtune.execution.environment import check_engines
    from privtune.ledger.doctor import check_artifacts, check_machine, check_storage
    from privtune.ledger.places import artifact_root
    from privtune.study.facade import check_studies

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


_PATIENCE = 60.0
"""Seconds that MLflow's server may take to answer, before the browser is left closed."""

_STOPPED = (0, 130, -2, -15)
"""Exit codes of a server that somebody stopped: by Ctrl-C (130, or -2 of the signal) or by SIGTERM."""


def ui(
    storage: Storage = DEFAULT_STORAGE,
    study: Annotated[str | None, typer.Option(help="Show this study first.")] = None,
    port: Annotated[int, typer.Option(help="Port of the server on this machine.")] = 5000,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Open MLflow's UI on the releases, on this machine alone.

    It opens in the view "Privacy budget". The printed address holds a key, new at each start. Whoever
    has the address may read and write.
    """
    from importlib.metadata import version

    from privtune.imports import find_extra
    from privtune.ledger.places import artifact_root
    from privtune.tracking import guard
    from privtune.tracking.process import TrackingProcess
    from privtune.tracking.store import local_uri
    from privtune.tracking.view import VIEW_VERSIONS, knows_view
    from privtune.tracking.writer import TrackingPlace

    if not (artifact_root(storage) / "mlflow.db").exists():
        raise PrivTuneError(f"Nothing has been logged for this storage yet. {_way_to_log(storage)}")
    _check_port(port)
    find_extra("flask", extra="ui", what="privtune ui (MLflow's server)")
    guard.check_app()
    uri = local_uri(storage)
    with TrackingProcess() as process, process.opened(TrackingPlace(storage, uri)) as store:
        experiments = store.experiments()
    experiment = _experiment_of(study, storage, experiments)
    base = f"http://127.0.0.1:{port}"
    mlflow_version = version("mlflow")
    key = guard.new_key()
    address = guard.add_key(_address(base, experiment, mlflow_version), key)
    say(f"MLflow: {address}")
    if not knows_view(mlflow_version):
        say(
            f"This MLflow is {mlflow_version}; the view was tested with {', '.join(VIEW_VERSIONS)}, so the "
            'link opens the plain list of runs. There, try "Privacy budget" under Views.'
        )
    say(
        "At the first visit MLflow shows its assistant, which you can close. Ctrl-C stops the server."
    )
    command = _server_command(uri, port)
    environment = {
        **os.environ,
        guard.VARIABLE: key,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONSAFEPATH": "1",  # -m would put the working folder first on the path
    }
    # Uvicorn imports from the folder that it works in: it gets one that nobody else writes to.
    with TemporaryDirectory(prefix="privtune-ui-") as folder:
        if browser:
            page = guard.write_door(Path(folder), address).as_uri()
            threading.Thread(target=_open_when_up, args=(base, page), daemon=True).start()
        code = _serve(command, environment, folder)
    if code not in _STOPPED:
        raise PrivTuneError(
            f"MLflow's server ended with code {code}. If port {port} is taken, give another: --port."
        )


def _server_command(uri: str, port: int) -> list[str]:
    """Return the command that starts MLflow's server on this machine alone.

    Args:
        uri: The store of the releases.
        port: Where it listens, on the loopback address: nobody reaches it from another machine.
    """
    from privtune.tracking import guard

    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    command += ["--app-name", guard.APP]
    command += ["--uvicorn-opts=--no-access-log"]  # it would show the key
    return command


def _check_port(port: int) -> None:
    """Refuse a port that another program uses, before MLflow's server is started.

    The server takes seconds to start, and would say it in its own words, among others.

    Raises:
        InvalidInputError: If there is no port of this number.
        PrivTuneError: If it is taken, or not allowed to this user.
    """
    with socket.socket() as listener:
        # As the server does: a port whose last connections are only just closed is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OverflowError:
            allowed = "must be a whole number from 0 to 65535"
            raise InvalidInputError("port", port, allowed) from None
        except OSError as error:
            raise PrivTuneError(
                f"Port {port} cannot be had ({error.strerror}): another program may have it. Give "
                "another: --port 5001."
            ) from None


def _serve(command: list[str], environment: dict[str, str], folder: str) -> int:
    """Run MLflow's server in a folder, pass SIGTERM on to it, and return its exit code.

    Without that, a scheduler's SIGTERM would leave a server behind that holds the port and the key.

    Args:
        command: The program and its arguments.
        environment: Its variables, the key among them: arguments could be read by other users.
        folder: The folder that it works in.

    Returns:
        The server's exit code; of a signal its number below 0.
    """
    with subprocess.Popen(command, env=environment, cwd=folder) as server:  # noqa: S603
        previous_handler = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            return server.wait()
        finally:
            signal.signal(signal.SIGTERM, previous_handler)


def _experiment_of(
    study: str | None, storage: str, experiments: Mapping[str, Experiment]
) -> Experiment | None:
    """Return a study's experiment, or without a study the only one, or None if there are several.

    A study's experiment is the one that carries its owner's id: names can be changed in MLflow.

    Args:
        study: The study that is shown first; None where the user named none.
        storage: The database that the study is in.
        experiments: Those of this storage's MLflow, by their names there.

    Raises:
        PrivTuneError: If the study has logged nothing.
    """
    from privtune.ledger import Ledger
    from privtune.study.rows import StudyStore

    if study is None:
        only_one = len(experiments) == 1
        return next(iter(experiments.values())) if only_one else None
    with Ledger(storage) as ledger:
        owner = StudyStore(ledger.log.storage).study(study).owner.id
    for experiment in experiments.values():
        if experiment.owner == owner:
            return experiment
    names = ", ".join(sorted(experiments)) or "none"
    raise PrivTuneError(
        f"Study {study!r} has logged nothing; these have: {names}. If it has run, log it: "
        f"privtune study sync {study}."
    )


def _way_to_log(storage: str) -> str:
    """Return a sentence with the command that logs a released study, or runs one if there is none."""
    from privtune.study.rows import list_studies

    studies = [study.name for study in list_studies(storage) if study.released]
    if not studies:
        return "Run a study first: privtune study run NAME."
    names = ", ".join(studies[:3])
    if len(studies) > 3:
        names += ", ..."
    return f"Log a study that has run ({names}): privtune study sync {studies[0]}."


def _address(base: str, experiment: Experiment | None, mlflow_version: str) -> str:
    """Return the link to an experiment's saved view, or to its plain page if MLflow lacks the view.

    Args:
        base: The server's address, without a slash at its end.
        experiment: The experiment; None is the list of all.
        mlflow_version: The MLflow that is installed. It does not document saved views, so the link leads to
            one only in versions that were tested.
    """
    from privtune.tracking.view import experiment_url, knows_view

    if experiment is None:
        return base
    has_view = experiment.has_view and knows_view(mlflow_version)
    return experiment_url(base, experiment.number, view=has_view)


def _open_when_up(base: str, address: str) -> None:
    """Wait until the server answers, at most a minute, and open the browser.

    Args:
        base: The server's address.
        address: What is opened, which leads to the server with the key.
    """
    import webbrowser

    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if _answers(base):
            webbrowser.open(address)
            return
        time.sleep(0.5)


def _answers(base: str) -> bool:
    """Return whether MLflow's server is up."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{base}/health", timeout=2):  # noqa: S310 - our own server
            return True
    except (urllib.error.URLError, OSError):
        return False


def worker(  # noqa: PLR0917 (the command line passes them by name)
    study: Annotated[str | None, typer.Argument(help="Train for this study alone.")] = None,
    arm: Annotated[str | None, typer.Option(help="Train for this arm alone.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda or cuda:N. By default as in the study's spec."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            help="How many candidates are trained at once: a number or auto. Changes no result."
        ),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many trainings.")
    ] = None,
    idle_exit: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many seconds without work.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
) -> None:
    """Train trials for studies that wait for workers. Charges nothing.

    Start as many as you like. A study waits for workers if it is run with: privtune study run NAME
    --executor external. That process charges the budget and releases the results. It and the workers
    need the same database, the same task or function, and the task's data. A worker skips studies
    that it cannot load, and says so. A worker for one study fails if that cannot be loaded, and stops
    when it is finished.
    """
    from privtune.study.workers import serve
    from privtune.training.engine.compute import check_stack

    say("Waiting for trials to train. Their results stay secret. Stop with Ctrl-C.")
    serve(
        storage,
        study=study,
        arm=arm,
        device=device,
        stack=None if stack is None else check_stack(stack),
        most=max_rows,
        idle_exit=math.inf if idle_exit is None else idle_exit,
        notify=lambda text: say(text, err=True),
    )
