"""What a sealed function starts and leaves behind: it could speak after the seal, once a trial."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import privtune
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import SealedError, Study
from privtune.study.failures import ArmStoppedError
from privtune.study.seal import sealed
from tests import toy
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, simple
from tests.study.test_optimize import started

KEPT: list[Any] = []
"""What keeps things alive after a trial, and how tests end them."""

ARM: dict[str, Any] = {**OWN, "epsilon": 1.0}


class Thing:
    """Something that a finaliser can watch."""


def _wait(event: threading.Event) -> None:
    event.wait()


def _thread() -> None:
    event = threading.Event()
    threading.Thread(target=_wait, args=(event,), name="late", daemon=True).start()
    KEPT.append(event.set)


def _timer() -> None:
    timer = threading.Timer(3600.0, print, ("late",))
    timer.start()
    KEPT.append(timer.cancel)


def _pool() -> None:
    event, pool = threading.Event(), ThreadPoolExecutor(1)
    pool.submit(_wait, event)
    KEPT.append(pool.shutdown)
    KEPT.append(event.set)


def _thread_of_a_thread() -> None:
    starter = threading.Thread(target=_thread)
    starter.start()
    starter.join()


def _handler() -> None:
    atexit.register(print, "late")
    KEPT.append(lambda: atexit.unregister(print))


register = atexit.register


def _handler_by_another_name() -> None:
    register(print, "late")
    KEPT.append(lambda: atexit.unregister(print))


def _finaliser() -> None:
    thing = Thing()
    finaliser = weakref.finalize(thing, print, "late")
    KEPT.append(thing)
    KEPT.append(finaliser.detach)


def _late(*_: object) -> None:
    raise AssertionError


LEFT: dict[str, tuple[Callable[[], None], str]] = {
    "thread": (_thread, "thread 'late'"),
    "timer": (_timer, "thread 'Thread-"),
    "pool": (_pool, "thread 'ThreadPoolExecutor-"),
    "thread of a thread": (_thread_of_a_thread, "thread 'late'"),
    "handler": (_handler, "atexit handler print"),
    "handler by another name": (_handler_by_another_name, "an atexit handler"),
    "finaliser": (_finaliser, "finaliser print"),
}


def _ended() -> None:
    """Start one of each and end it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int)
    atexit.register(_late)
    atexit.unregister(_late)
    subprocess.run(["true"], check=True)
    with suppress(FileNotFoundError):
        subprocess.Popen(["/no/such/program"])
    weakref.finalize(Thing(), int)
    thread = threading.Thread(target=int)
    thread.start()
    # It ends by itself, within the time that the seal gives.
    threading.Timer(0.05, int).start()


@pytest.fixture(autouse=True)
def _all_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("privtune.study.seal._GRACE", 0.2)
    yield
    while KEPT:
        if callable(end := KEPT.pop()):
            end()


def make(folder: Path) -> Study:
    budget = privtune.Budget(6.0, 1e-5, name="open")
    storage = f"sqlite:///{folder / 'privtune.db'}"
    return privtune.create_study("open", budget=budget, storage=storage, seed=1)


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_refused_by_name(what: str, tmp_path: Path) -> None:
    start, says = LEFT[what]
    with pytest.raises(SealedError, match="has left") as refused, sealed(tmp_path / "log"):
        start()
    assert says in str(refused.value)
    with sealed(tmp_path / "log"):
        _ended()


def test_what_is_left_at_exit_is_not_called(tmp_path: Path) -> None:
    """In a process of its own: the handlers are gone when it ends, and so is what they would say."""
    program = f"""
import atexit, sys, weakref
from pathlib import Path
from privtune.study.seal import sealed
class Thing: pass
thing = Thing()
try:
    with sealed(Path({str(tmp_path / "log")!r})):
        atexit.register(print, "one line a trial")
        weakref.finalize(thing, print, "one line a trial")
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "SealedError\n"
    assert done.stderr == ""


def test_another_error_is_not_hidden_by_what_is_left(tmp_path: Path) -> None:
    def fails() -> None:
        _handler()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), sealed(tmp_path / "log"):
        fails()


def test_a_thread_beside_the_round_may_go_on(tmp_path: Path) -> None:
    """Another study of this process, in a thread that is not under the seal."""
    event, go = threading.Event(), threading.Event()

    def beside() -> None:
        go.wait()
        threading.Thread(target=_wait, args=(event,)).start()
        done.set()

    done = threading.Event()
    thread = threading.Thread(target=beside)
    thread.start()
    with sealed(tmp_path / "log"):
        go.set()
        done.wait()
    event.set()
    thread.join()


def test_a_library_may_start_its_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "helping.py").write_text(
        "import atexit, threading\n"
        "event = threading.Event()\n"
        "def start():\n"
        "    threading.Thread(target=event.wait, daemon=True).start()\n"
        "    atexit.register(event.set)\n"
    )
    monkeypatch.syspath_prepend(folder)
    import helping

    with sealed(tmp_path / "log"):
        helping.start()
    helping.event.set()


@pytest.mark.parametrize("what", ["thread", "handler"])
def test_a_rehearsal_refuses_before_the_charge(what: str, tmp_path: Path) -> None:
    def leaving(trial: privtune.Trial) -> privtune.Candidate:
        LEFT[what][0]()
        return simple(trial)

    study = make(tmp_path)
    with pytest.raises(SealedError, match="has left"):
        study.optimize(leaving, strategy=PapernotSteinke(mean_runs=3), **ARM)
    assert not study._life.charges()
    study.optimize(leaving, strategy=Fixed(), **ARM)  # whose trials are paid for


def test_a_round_that_leaves_something_is_stopped_for_the_curator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the charge, nothing is told but to the curator; once mended, the same seeds go on."""

    begun: list[bool] = []

    def leaving(trial: privtune.Trial) -> privtune.Candidate:
        if begun:
            _handler()
        return simple(trial)

    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    study, whole = map(make, folders)
    strategy = PapernotSteinke(mean_runs=3)
    with pytest.raises(ArmStoppedError) as stopped:
        study.optimize(leaving, strategy=strategy, observer=started(begun), **ARM)
    assert "atexit" not in str(stopped.value)
    assert not study.releases()
    (charge,) = study._life.charges().values()
    assert charge.state == "started"
    (failure,) = study._life.failures("papernot-steinke")
    assert "atexit handler print" in str(failure)
    released = study.optimize(simple, strategy=strategy, **ARM)
    expected = whole.optimize(simple, strategy=strategy, **ARM)
    assert released.params == expected.params
    assert released.weights.tolist() == expected.weights.tolist()
    assert capfd.readouterr() == ("", "")


def leaving_model() -> Any:
    """A model as a task makes it, with a thread that is left. Of this module, so that workers find it."""
    if os.environ.get("LEAVING"):
        threading.Thread(target=signal.pause, name="late", daemon=True).start()
    return toy._model()


def leaving_blobs() -> Any:
    from dataclasses import replace

    return replace(toy.blobs(), model=leaving_model)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tasks_and_workers_are_under_the_same_seal(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 3}
    spec = toy_spec(task=f"{__name__}:leaving_blobs", arms=[arm], seed=1)
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(spec, storage)
    monkeypatch.setenv("LEAVING", "1")
    with pytest.raises(SealedError, match="thread 'late'"):
        study.run(n_jobs=jobs)
    assert not study._life.charges()
    rehearse = "privtune.study.run.TaskTrainer.rehearse"
    monkeypatch.setattr(rehearse, lambda *_: 0.0)
    with pytest.raises(ArmStoppedError):
        study.run(n_jobs=jobs)
    assert "thread 'late'" in study._life.failures("selection")[-1]["traceback"]
    monkeypatch.delenv("LEAVING")
    (release,) = study.run()
    assert not release.is_nothing
