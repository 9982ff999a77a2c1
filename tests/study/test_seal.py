"""The seal of a round, whoever drives it and whatever observes it."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import optuna
import pytest
from torch.nn.functional import cross_entropy

import privtune
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import Observer, Study
from privtune.study.seal import open_stream, sealed
from tests.study.elsewhere import OWN, TERMS, simple

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ARM: dict[str, Any] = {**TERMS, "epsilon": 1.0}
WORD = "label-of-record-17"


def make(folder: Path) -> Study:
    budget = privtune.Budget(6.0, 1e-5, name="open")
    storage = f"sqlite:///{folder / 'privtune.db'}"
    return privtune.create_study("open", budget=budget, storage=storage, seed=1)


def talk() -> None:
    """Say something in every way that a function may have."""
    sys.stdout.write(f"{WORD} print\n")
    sys.stderr.write(f"{WORD} stderr\n")
    os.write(1, f"{WORD} descriptor\n".encode())
    os.write(2, f"{WORD} descriptor 2\n".encode())
    subprocess.run(["echo", f"{WORD} child"], check=True)
    logging.getLogger("theirs").warning("%s logging", WORD)


def talking(trial: privtune.Trial) -> privtune.Candidate:
    talk()
    return simple(trial)


@pytest.fixture
def their_logging() -> Any:
    """A handler that was made before the round, with the stream of that time."""
    handler = logging.StreamHandler(os.fdopen(2, "w", closefd=False))
    logging.getLogger("theirs").addHandler(handler)
    yield
    logging.getLogger("theirs").removeHandler(handler)


def test_what_a_sealed_function_prints_goes_to_the_curators_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], their_logging: None
) -> None:
    study = make(tmp_path)
    release = study.optimize(
        privtune.make_task(talking, **OWN),
        strategy=PapernotSteinke(mean_runs=3),
        observer=Observer(),
        **ARM,
    )
    assert not release.is_nothing
    shown = "".join(capfd.readouterr())
    assert WORD not in shown
    log = study.folder / "sealed" / "papernot-steinke.log"
    assert log.stat().st_mode & 0o777 == 0o600
    for way in ("print", "stderr", "descriptor", "descriptor 2", "child", "logging"):
        assert f"{WORD} {way}\n" in log.read_text()
    sys.stdout.write("open again\n")
    assert "open again" in capfd.readouterr().out


@pytest.fixture
def their_file() -> Any:
    """A handler that writes where no seal of streams reaches, of somebody who hears Optuna, too."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger().addHandler(handler)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    optuna.logging.enable_propagation()
    yield heard
    optuna.logging.disable_propagation()
    optuna.logging.set_verbosity(before)
    logging.getLogger().removeHandler(handler)


def test_handlers_hear_nothing_of_a_sealed_function(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], their_file: io.StringIO
) -> None:
    study = make(tmp_path)
    study.optimize(privtune.make_task(talking, **OWN), strategy=PapernotSteinke(mean_runs=3), **ARM)
    assert WORD not in their_file.getvalue()
    for shown in (their_file.getvalue(), *capfd.readouterr()):
        assert "rial" not in shown
    logging.getLogger("theirs").warning("open again")
    assert "open again" in their_file.getvalue()


class Speaking(Observer):
    """An observer that tells how far a training is."""

    def step(self, plan: Any, done: int, steps: int) -> None:
        sys.stdout.write(f"step {done} of {steps}\n")


_LOSSES = "loss-of-a-record"


def telling(model: Any, x: Any, y: Any) -> Any:
    """A loss that says what it is, in every way, of real records and of made-up ones."""
    losses = cross_entropy(model(x), y, reduction="none")
    sys.stdout.write(f"{_LOSSES} {losses.item():.3f} print\n")
    logging.getLogger("theirs").warning("%s logging", _LOSSES)
    warnings.showwarning(f"{_LOSSES} warned", UserWarning, "a file", 1)
    os.write(2, f"{_LOSSES} descriptor\n".encode())
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning")  # such a loss is computed record by record
@pytest.mark.parametrize("benchmark", [False, True])
def test_what_a_training_prints_goes_to_the_curators_log(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    benchmark: bool,
) -> None:
    # Pytest keeps warnings; here they are printed, as in a user's program.
    monkeypatch.setattr(warnings, "showwarning", lambda said, *_: sys.stderr.write(f"{said}\n"))
    study = make(tmp_path)
    task = privtune.make_task(simple, **{**OWN, "loss": telling}, benchmark=benchmark)
    rehearsal: list[str] = []

    class Rehearsed(Speaking):
        def arm_started(self, plan: Any) -> None:
            rehearsal.append("".join(capfd.readouterr()))

    study.optimize(task, strategy=Fixed(), observer=Rehearsed(), **ARM)
    assert _LOSSES in rehearsal[0], "made-up records have no secrets"
    shown = capfd.readouterr()
    assert "step 1 of" in shown.out
    assert (_LOSSES in "".join(shown)) == benchmark
    log = study.folder / "sealed" / "fixed.log"
    assert log.exists() != benchmark
    if not benchmark:
        for way in ("print", "logging", "warned", "descriptor"):
            assert f"{way}\n" in log.read_text()


def test_a_function_whose_trials_are_paid_for_prints_in_rehearsals(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path).optimize(privtune.make_task(talking, **OWN), strategy=Fixed(), **ARM)
    said = capfd.readouterr().out.count(WORD)
    assert said >= 3
    assert said % 3 == 0


_LATE = """
import sys
from pathlib import Path
from privtune.study.seal import SealedError, sealed
assert not [name for name in sys.modules if name.split(".")[0] == "mlflow"]
folder = Path(sys.argv[1])
refused = 0
with sealed(folder / "log"):
    import mlflow
    for attempt in (
        lambda: mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'theirs.db'}"),
        lambda: mlflow.start_run(),
        lambda: mlflow.log_metric("late", 1.0),
        lambda: mlflow.set_experiment("late"),
    ):
        try:
            attempt()
        except SealedError:
            refused += 1
assert refused == 4, refused
assert not (folder / "theirs.db").exists()
client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'theirs.db'}")
client.create_experiment("afterwards")
"""


@pytest.mark.slow
def test_mlflow_that_is_imported_inside_is_sealed_too(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _LATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
def test_a_seal_imports_no_tracker(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from privtune.study.seal import sealed\n"
        f"with sealed(pathlib.Path({str(tmp_path / 'log')!r})): print('inside')\n"
        "sys.exit('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "log").read_text() == "inside\n"


@pytest.mark.quick
def test_what_is_printed_where_nobody_may_write_goes_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker of another user, or of a machine without that folder, trains all the same."""
    (tmp_path / "theirs").touch()
    with sealed(tmp_path / "theirs" / "log"):
        sys.stdout.write("inside\n")
        os.write(2, b"below\n")
    sys.stdout.write("outside\n")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("outside\n", "")
    assert (tmp_path / "theirs").read_bytes() == b""


@pytest.mark.quick
def test_seals_nest_and_open_with_the_last_even_after_an_error(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr, list(sys.meta_path), os.environ.get("MLFLOW_TRACKING_URI")

    def stops() -> None:
        with sealed(tmp_path / "log"):
            with sealed(tmp_path / "other"):
                sys.stdout.write("inner\n")
            sys.stdout.write("outer\n")
            raise ValueError("stops")

    with pytest.raises(ValueError, match="stops"):
        stops()
    assert (sys.stdout, sys.stderr) == before[:2]
    assert sys.meta_path == before[2]
    assert os.environ.get("MLFLOW_TRACKING_URI") == before[3]
    assert (tmp_path / "log").read_text() == "inner\nouter\n"


@pytest.mark.quick
@pytest.mark.parametrize("before", [None, "http://theirs"])
def test_a_child_of_a_round_inherits_no_address(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that a trial starts are not sealed by this one: they must not know a server."""
    name = "MLFLOW_TRACKING_URI"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with sealed(tmp_path / "log"):
        found = subprocess.run(
            [sys.executable, "-S", "-c", f"import os; print(os.environ['{name}'])"],
            check=True,
            capture_output=True,
            text=True,
        )
    assert found.stdout.startswith("privtune-sealed:")
    assert os.environ.get(name) == before


@pytest.mark.quick
def test_what_a_round_leaves_behind_does_not_stop_it(tmp_path: Path) -> None:
    """Whoever starts a thread ends it: it is not watched, as the page of pitfalls says."""
    event = threading.Event()
    with sealed(tmp_path / "log"):
        thread = threading.Thread(target=event.wait)
        thread.start()
    assert thread.is_alive()
    event.set()
    thread.join()


def test_a_stream_that_was_opened_before_stays_open(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = open_stream(os.fdopen(1, "w", closefd=False))
    with stream, sealed(tmp_path / "log"):
        sys.stdout.write(WORD)
        stream.write("a bar that says that it runs")
        stream.flush()
    shown = capfd.readouterr().out
    assert "a bar that says that it runs" in shown
    assert WORD not in shown


@pytest.mark.quick
def test_a_notebook_displays_nothing_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    publisher = types.SimpleNamespace(publish=shown.append)
    notebook = types.ModuleType("IPython")
    shell = types.SimpleNamespace(display_pub=publisher)
    notebook.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    with sealed(tmp_path / "log"):
        publisher.publish(WORD)
    publisher.publish("afterwards")
    assert shown == ["afterwards"]
