"""PostgreSQL is restarted while a study runs: the driver waits like workers, charges and releases once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from privtune.ledger import Ledger, LedgerConnectionError, verify
from privtune.strategies import Plan, Release
from privtune.study import Observer, Study
from privtune.study.lifecycle import StudyBusyError
from tests.cli.conftest import Cli, cli
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.study.conftest import FIXED, toy_spec
from tests.study.proxy import Proxy
from tests.tiers import FULL

__all__ = ["cli"]

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SPEC = toy_spec(
    arms=[
        FIXED,
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
        {"name": "all", "strategy": "everything", "trials": 2},
    ],
    epochs=1,
    seed=1,
)


@pytest.fixture
def schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresSchemas]:
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / "artifacts"))
    with PostgresSchemas() as made:
        yield made


def released(url: str) -> dict[str, Any]:
    """All that a study has released, and how often each of its arms was charged."""
    with closing(Study("toy", url)) as study, Ledger(url) as ledger:
        verify(ledger.log.storage, "toy")
        charges = [(charge.arm, str(charge.state)) for charge in ledger.charges("toy")]
        arms = {
            release.arm: (
                dict(release.params),
                release.score,
                release.utility,
                release.guarantee.to_dict(),
                {
                    name: part.tolist()
                    for name, part in load_file(study.model_path(release.arm)).items()
                },
            )
            for release in study.releases()
        }
        assert study.finished
        return {"arms": arms, "charges": charges}


class Counting(Observer):
    """Counts what is heard of each arm."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def released(self, plan: Plan, release: Release) -> None:
        self.heard.append(plan.arm)


def check_same(disturbed: dict[str, Any], expected: dict[str, Any], cuts: tuple[int, ...]) -> None:
    """Fail unless a study released and was charged what the undisturbed one was.

    Weights are compared up to rounding: once in some forty studies, on a loaded machine, they were not
    equal to the last bit, and why is not known.
    """
    assert disturbed["charges"] == expected["charges"], cuts
    assert disturbed["arms"].keys() == expected["arms"].keys(), cuts
    for arm, (*facts, weights) in expected["arms"].items():
        *others, other_weights = disturbed["arms"][arm]
        assert others == facts, (arm, cuts)
        assert other_weights.keys() == weights.keys(), (arm, cuts)
        for name, values in weights.items():
            difference = np.abs(np.array(other_weights[name]) - np.array(values)).max()
            assert difference < 1e-4, (arm, name, difference, cuts)


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_a_server_that_goes_away_at_any_moment(schemas: PostgresSchemas, executor: str) -> None:
    how: dict[str, Any] = {"executor": executor, "n_jobs": 1 if executor == "inline" else 2}
    quiet = schemas.fresh()
    with Proxy(quiet) as proxy:
        Study.create(SPEC, quiet).close()
        with closing(Study("toy", proxy.url)) as study:
            before = proxy.messages
            study.run(**how)
        messages = proxy.messages
    expected = released(quiet)
    assert expected["charges"] == [(arm.name, "settled") for arm in SPEC.arms]

    rng = random.Random(executor)
    times_cut = 0
    for attempt in range(10 if FULL else 1):
        disturbed = schemas.fresh()
        Study.create(SPEC, disturbed).close()
        cuts = tuple(sorted(rng.sample(range(before + 1, messages + 1), 8)))
        with Proxy(disturbed, cuts=cuts, seed=attempt) as proxy:
            with closing(Study("toy", proxy.url)) as study:
                observer = Counting()
                releases = study.run(observer, **how)
            times_cut += proxy.times_cut
        assert [release.arm for release in releases] == [arm.name for arm in SPEC.arms]
        assert observer.heard == [arm.name for arm in SPEC.arms], cuts
        check_same(released(disturbed), expected, cuts)
    assert times_cut >= 4, "each loss shifts the messages that follow"


def test_a_connection_that_is_lost_while_a_release_is_read_is_no_damage(
    schemas: PostgresSchemas,
) -> None:
    """At each message by which it is read."""
    url = schemas.fresh()
    Study.create(SPEC, url).close()
    with closing(Study("toy", url)) as study:
        study.run()
    with Proxy(url) as proxy, closing(Study("toy", proxy.url)) as study:
        before = proxy.messages
        study.releases()
        messages = proxy.messages
    for cut in range(before + 1, messages + 1, 7):
        with Proxy(url, cuts=(cut,), away=0.0) as proxy, closing(Study("toy", proxy.url)) as study:
            try:
                releases = study.releases()
            except LedgerConnectionError:
                continue
            assert [release.arm for release in releases] == [arm.name for arm in SPEC.arms]


def test_the_command_outlasts_a_server_that_is_away(schemas: PostgresSchemas, cli: Cli) -> None:
    url = schemas.fresh()
    Study.create(SPEC, url).close()
    with Proxy(url, cuts=(300, 500, 700, 900), away=1.0, seed=3) as proxy:
        done = cli("study", "run", "toy", "--no-mlflow", "--json", "--storage", proxy.url)
        assert proxy.times_cut == 4
    assert done.code == 0, done.err
    assert [arm["state"] for arm in json.loads(done.out)["arms"]] == ["settled"] * 3


def test_who_was_taken_over_meanwhile_stops(schemas: PostgresSchemas) -> None:
    """The lock dies with its session: whoever takes it then goes on alone."""
    url = schemas.fresh()
    Study.create(SPEC, url).close()

    with Proxy(url) as proxy, closing(Study("toy", url)) as other:

        class TakesOver(Observer):
            def released(self, plan: Plan, release: Release) -> None:
                proxy.cut(0.0)
                self.held = other._life.alone()
                while True:
                    try:
                        self.held.__enter__()
                        return
                    except StudyBusyError:  # the server has not noticed yet
                        continue

        observer = TakesOver()
        with (
            closing(Study("toy", proxy.url)) as study,
            pytest.raises(StudyBusyError, match=r"taken over by another process .* show toy"),
        ):
            study.run(observer)
        observer.held.__exit__(None, None, None)
        with Ledger(url) as ledger:
            assert [str(charge.state) for charge in ledger.charges("toy")] == [
                "settled",
                "reserved",
                "reserved",
            ]
        other.run()
    assert released(url)["charges"] == [(arm.name, "settled") for arm in SPEC.arms]


def test_a_lock_that_a_lost_session_still_has_is_waited_for(
    schemas: PostgresSchemas, tmp_path: Path
) -> None:
    """Of a machine that was cut off the server hears nothing for a while, and keeps its lock."""
    url = schemas.fresh()
    with Ledger(url) as ledger, Ledger(url) as other:
        storage = ledger.log.storage
        with storage.hold("toy", lambda name: tmp_path / name):
            with storage.read() as connection:
                pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            hold = storage._held.hold
            assert hold is not None
            left_behind = hold.connection
            hold.connection = storage._connect()  # as after a loss that the server has not noticed
            assert not hold.take()
            assert hold.is_left_behind()
            with other.log.storage.hold("toy", lambda name: tmp_path / name) as theirs:
                assert not theirs
            with other.log.storage.read() as killer:
                killer.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
            storage._hold_again(hold)
            left_behind.invalidate()
            with other.log.storage.hold("toy", lambda name: tmp_path / name) as theirs:
                assert not theirs


def test_a_lock_is_taken_though_the_server_goes_away_meanwhile(
    schemas: PostgresSchemas, tmp_path: Path
) -> None:
    """At each message by which it is taken, whether the message or its answer is lost."""
    url = schemas.fresh()
    with Ledger(url) as other:
        with Proxy(url) as proxy, Ledger(proxy.url) as ledger:
            before = proxy.messages
            with ledger.log.storage.hold("toy", lambda name: tmp_path / name):
                messages = proxy.messages
        assert messages - before >= 2
        times_cut = 0
        for cut in range(before + 1, messages + 1):
            for seed in range(2):  # whether the message or its answer is lost
                with (
                    Proxy(url, cuts=(cut,), away=0.1, seed=seed) as proxy,
                    Ledger(proxy.url) as ledger,
                ):
                    storage = ledger.log.storage
                    with (
                        storage.outlasting(30.0),
                        storage.hold("toy", lambda name: tmp_path / name) as is_held,
                    ):
                        assert is_held, (cut, seed)
                        with other.log.storage.hold(
                            "toy", lambda name: tmp_path / name
                        ) as is_theirs:
                            assert not is_theirs, (cut, seed)
                    times_cut += proxy.times_cut
    assert times_cut >= messages - before, "a pooled connection needs fewer messages"


def test_a_server_that_stays_away_is_one_sentence(
    schemas: PostgresSchemas, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = schemas.fresh()
    Study.create(SPEC, url).close()
    program = (
        "import sys\n"
        "from privtune.study import lifecycle\n"
        "from privtune.execution import table\n"
        "lifecycle.PATIENCE = table.PATIENCE = 1.0\n"
        "from privtune.cli import main\n"
        "main()\n"
    )
    with Proxy(url, cuts=(300,), away=3_600.0) as proxy:
        command = ["study", "run", "toy", "--no-mlflow", "--storage", proxy.url]
        done = subprocess.run(
            [sys.executable, "-c", program, *command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    assert done.returncode == 1
    assert "the connection failed" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
