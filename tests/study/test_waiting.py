"""A driver says what it waits for; a worker skips what it cannot load, says so, and serves the rest."""

from __future__ import annotations

import importlib
import io
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from privtune import Budget, PrivTuneError, create_study, load_study
from privtune.execution import launchers
from privtune.ledger import ChargeState, Ledger
from privtune.study import Study, StudyNotFoundError, delete_study, study_names
from privtune.study.lifecycle import Life
from privtune.study.workers import _how_to_start, serve
from tests.cli.conftest import Cli, cli
from tests.study.conftest import toy_spec

__all__ = ["cli"]
ARM = {"name": "arm", "strategy": "papernot-steinke", "mean_runs": 2}


def started(name: str, storage: str, task: str) -> None:
    """Leave a study whose round is open, as its driver does before it waits."""
    spec = toy_spec(name=name, task=task, arms=[ARM], seed=3, epochs=1, epsilon=1.0)
    Study.create(spec, storage).close()
    with closing(Life(name, storage)) as life:
        (plan,) = life.plans().values()
        life.charge([plan])
        life.start(plan)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of this host, which is gone after it was planned."""
    (tmp_path / "of_this_host.py").write_text("from tests.toy import blobs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "of_this_host.py"
    sys.modules.pop("of_this_host", None)


BROKEN = {
    "no module": None,
    "its own import": "import no_such_library_of_mine",
    "data": "from privtune.tasks import TaskDataError\ndef blobs():\n raise TaskDataError('no data here')",
}


@pytest.mark.parametrize("broken", list(BROKEN))
def test_a_study_that_cannot_be_loaded_here_is_skipped_and_others_are_served(
    broken: str, storage: str, own: Path
) -> None:
    started("a-first", storage, "of_this_host:blobs")
    started("b-other", storage, "tests.toy:blobs")
    sys.modules.pop("of_this_host")
    own.unlink()
    if (source := BROKEN[broken]) is not None:
        own.write_text(source)
    said: list[str] = []
    assert serve(storage, idle_exit=2.5, notify=said.append) > 0, "the other one was served"
    (text,) = said  # once, however often it was asked
    assert "a-first" in text
    assert "skipped here" in text
    assert "\n" not in text
    with closing(Study("b-other", storage)) as study:
        assert len(study.run(executor="external")) == 1
    with pytest.raises(PrivTuneError):
        serve(storage, study="a-first", idle_exit=0.0)
    with Ledger(storage) as ledger:
        states = {charge.study: charge.state for charge in ledger.charges("toy")}
    assert states == {"a-first": ChargeState.STARTED, "b-other": ChargeState.SETTLED}


MISSING = "def blobs():\n def load(): raise FileNotFoundError('/data/alice.csv')\n"


@pytest.mark.parametrize(
    "broken",
    [
        "raise SystemExit(0)",
        f"{MISSING} return dataclasses.replace(toy.blobs(), load=load)",
    ],
    ids=["exits", "no data"],
)
def test_a_worker_that_cannot_load_a_study_leaves_its_driver_waiting(
    storage: str, own: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    """Another machine may lack a file: that is no failure of the arm, which others train."""
    heard, said, ran = io.StringIO(), list[str](), list[int]()
    monkeypatch.setattr(sys, "stderr", heard)
    source = own.read_text()

    def elsewhere(text: str | None) -> None:
        sys.modules.pop("of_this_host", None)
        own.unlink(missing_ok=True)
        if text is not None:
            own.write_text(f"import dataclasses, sys\nfrom tests import toy\n{text}")
            importlib.invalidate_caches()
        ran.append(serve(storage, idle_exit=0.0, notify=said.append))

    def sleep(seconds: float) -> None:
        if not ran:
            elsewhere(broken)
        elif len(ran) < 3:
            time.sleep(seconds)
            ran.append(0)  # the driver has looked for failures since
        else:
            elsewhere(source)

    monkeypatch.setattr(launchers, "time", _Clock(sleep))
    spec = toy_spec(task="of_this_host:blobs", arms=[ARM], epochs=1, seed=3)
    with closing(Study.create(spec, storage)) as study:
        (release,) = study.run(executor="external")
        assert not study._life.failures("arm")
    assert not release.is_nothing
    assert ran[0] == 0
    assert ran[-1] > 0
    (text,) = said
    assert "skipped here" in text
    assert "alice" not in text, "what a load says may come from a record"


def test_a_worker_of_a_finished_study_leaves(storage: str, cli: Cli) -> None:
    with closing(Study.create(toy_spec(arms=[ARM], epochs=1), storage)) as study:
        study.run()
    done = cli("worker", "toy", "--storage", storage)  # without --idle-exit
    assert (done.code, "is finished" in done.err) == (0, True)
    ran = cli("study", "run", "toy", "--storage", storage, "--no-mlflow")
    assert (ran.code, ran.err) == (0, "")
    assert "nothing was run and nothing was spent" in ran.out
    assert "arm" in ran.out
    as_json = cli("study", "run", "toy", "--storage", storage, "--json")
    assert (as_json.code, "nothing was spent" in as_json.err) == (0, True)
    assert json.loads(as_json.out)["study"] == "toy"


def test_a_worker_of_a_study_that_is_deleted_leaves(storage: str) -> None:
    Study.create(toy_spec(arms=[ARM]), storage).close()
    waits = iter([None])

    def sleep(_: float) -> None:
        if next(waits, "over") is None:
            delete_study("toy", storage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privtune.study.workers.time", _Clock(sleep))
        with pytest.raises(StudyNotFoundError):
            serve(storage, study="toy")


class _Clock:
    """The time, whose sleep is given."""

    def __init__(self, sleep: object) -> None:
        self.sleep, self.monotonic = sleep, time.monotonic


def test_a_driver_says_what_it_waits_for_and_how_to_start_it(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and again after a minute without any worker; from inside of the seal."""
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setattr(launchers, "_LONELY", 0.6)
    said: list[str] = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        said[:] = heard.getvalue().splitlines()
        if len(said) == 2:  # now a worker comes
            assert serve(storage, study="toy", idle_exit=0.0) > 0

    monkeypatch.setattr(launchers, "time", _Clock(sleep))
    with closing(Study.create(toy_spec(arms=[ARM], epochs=1, seed=3), storage)) as study:
        assert len(study.run(executor="external")) == 1
    first, second = said
    command = f"privtune worker toy --storage {storage}"
    assert "Arm 'arm' of study 'toy' waits for workers" in first
    assert "No worker has worked" in second
    assert command in first
    assert command in second


def test_a_worker_that_is_at_work_is_not_missed() -> None:
    reminded: list[int] = []
    left = iter([3] * 40 + [0] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "_LONELY", 0.0)
        patch.setattr(launchers, "_POLL", 0.0)
        launchers.wait_for(
            lambda: next(left),
            lambda: False,
            at_work=lambda: True,
            remind=lambda: reminded.append(1),
        )
    assert reminded == []


def test_a_path_is_a_storage_wherever_a_url_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    budget = Budget(4.0, 1e-5, name="toy")
    with closing(create_study("mine", budget=budget, storage=tmp_path / "p.db")) as study:
        assert study.storage == str(tmp_path / "p.db")
    with closing(load_study("mine", storage="p.db")) as study:
        said = _how_to_start(study._life)
        shown = repr(study)
    assert "on this machine: privtune worker mine --storage p.db" in said
    assert shown == (
        "<Study 'mine' of a build function: no arm yet; budget 'toy' (ε = 4, δ = 1e-05), sqlite:///p.db>"
    )
    assert "no arm yet" in cli("study", "list", "--storage", "p.db").out
    monkeypatch.setenv("PRIVTUNE_STORAGE", "p.db")
    assert "no arm yet" in cli("study", "list").out
    delete_study("mine", tmp_path / "p.db")
    assert study_names("sqlite:///p.db") == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://bob:hunter2@host/db",
        "postgresql://host/db?user=bob&password=hunter2",
        "postgresql://host/db?sslkey=/hunter2&sslpassword=hunter2",
    ],
)
def test_the_command_shows_no_password(url: str, storage: str) -> None:
    Study.create(toy_spec(arms=[ARM]), storage).close()
    with closing(Life("toy", storage)) as life:
        life.url = url
        said = _how_to_start(life)
        life.url = storage
        plain = _how_to_start(life)
    assert "hunter2" not in said
    assert "PRIVTUNE_STORAGE" in said
    assert shlex.split(plain.partition(": ")[2]) == [
        "privtune",
        "worker",
        "toy",
        "--storage",
        storage,
    ]
