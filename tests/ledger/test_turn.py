"""Waiting for one's turn to write: nobody gives up while it goes round, and nobody waits for the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from privtune.files import OwnFolder
from privtune.ledger import Budget, Ledger, LedgerBusyError
from privtune.ledger.engines import Turn, open_session
from privtune.ledger.storage import Storage
from privtune.study.trials import StudyTrials

fcntl = pytest.importorskip("fcntl")


@pytest.mark.slow
def test_nobody_gives_up_while_others_come_and_go(ledger_url: str) -> None:
    """The last of eight waits for longer than its patience, and for no one holder of the lock."""
    with Ledger(ledger_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))

    def write(_: int) -> None:
        with Ledger(ledger_url, patience=1.0) as ledger:
            gate.wait()
            ledger.log.write("b", lambda *_: time.sleep(0.25) or [])

    gate = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))


@pytest.fixture
def held(tmp_path: Path) -> Any:
    """A turn that another process has, and a function that gives it to a third."""
    (tmp_path / "a.db").touch()
    path = tmp_path / "a.db-turn"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield SimpleNamespace(
            turn=Turn(tmp_path / "a.db", 1.0, "busy"),
            passes=lambda: os.utime(path),
            ends=lambda: fcntl.flock(file, fcntl.LOCK_UN),
        )


def test_one_who_keeps_the_turn_is_waited_for_no_longer_than_patience(held: Any) -> None:
    with pytest.raises(LedgerBusyError, match="busy"), held.turn.taken():
        pass
    held.ends()
    with held.turn.taken():
        pass


def test_a_turn_that_goes_round_is_waited_for(held: Any) -> None:
    def go_round() -> None:
        for _ in range(20):
            time.sleep(0.1)
            held.passes()
        held.ends()

    thread = threading.Thread(target=go_round)
    thread.start()
    with held.turn.taken():
        pass
    thread.join()


def test_the_turn_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from privtune.ledger.engines import Turn\n"
        f"with Turn(Path({str(tmp_path / 'a.db')!r}), 1.0, 'busy').taken():\n"
        "    os.fork() or os._exit(0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0
    with Turn(tmp_path / "a.db", 1.0, "busy").taken():
        pass


def test_where_no_file_can_be_threads_still_wait(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "none" / "a.db", 1.0, "busy")
    with turn.taken(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: turn.taken().__enter__())
        assert isinstance(other.exception(), LedgerBusyError)


_RECOVERING = """
import fcntl, sys, time
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 3, 120)  # SQLite's locks to write, checkpoint and recover
    file.write(bytes(96))  # a header that was not written to its end
    file.flush()
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_reader_waits_while_another_recovers_the_log(tmp_path: Path) -> None:
    """After a death in mid-commit, whoever comes next recovers the write-ahead log."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        other = subprocess.Popen(
            [sys.executable, "-c", _RECOVERING, str(tmp_path / "a.db-shm")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert other.stdout is not None
        other.stdout.readline()
        threading.Timer(1.0, other.communicate).start()
        assert ledger.charges("b") == ()


def test_what_is_lent_is_the_lenders_alone(ledger_url: str) -> None:
    """Another library makes its tables once, however many open them at the same time."""
    Ledger(ledger_url).close()

    def open_trials(number: int) -> int:
        storage = Storage(ledger_url)
        trials = StudyTrials(storage, "toy", MagicMock())
        gate.wait()
        try:
            return len(trials.shown(f"arm-{number}", MagicMock(names=list))._told)
        finally:
            trials.close()
            storage.close()

    gate = threading.Barrier(6)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(open_trials, range(6))) == [0] * 6


def test_a_full_server_is_waited_for() -> None:
    class Full(Exception):
        pass

    said = ["FATAL: sorry, too many clients already", "remaining connection slots are reserved"]

    session = MagicMock()

    def connect() -> MagicMock:
        if said:
            raise Full(said.pop())
        return session

    dialect = SimpleNamespace(connect=connect, loaded_dbapi=SimpleNamespace(OperationalError=Full))
    assert open_session(dialect, 60.0) is session
    said.append("password authentication failed")
    with pytest.raises(Full, match="password"):
        open_session(dialect, 60.0)
    said += ["too many clients"] * 10**6
    with pytest.raises(Full, match="too many"):
        open_session(dialect, 0.1)


@pytest.mark.postgres
def test_one_connection_holds_a_name_and_works(postgres_url: str, tmp_path: Path) -> None:
    """Processes that each held a connection and waited for another could wait for each other."""
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        storage = ledger.log.storage
        with storage.hold("toy", OwnFolder(tmp_path, "id").file) as alone:
            assert alone
            ledger.create_budget(Budget(3.0, 1e-5, name="b"))
            with storage.write():
                assert storage.engine.pool.checkedout() == 1  # type: ignore[attr-defined]
            with other.log.storage.hold("toy", OwnFolder(tmp_path, "id").file) as second:
                assert not second
        with other.log.storage.hold("toy", OwnFolder(tmp_path, "id").file) as alone:
            assert alone


@pytest.mark.postgres
def test_threads_let_go_of_names_in_any_order(postgres_url: str, tmp_path: Path) -> None:
    """Two threads run an arm each of one study: whoever began first and ended first works on."""
    with Ledger(postgres_url) as ledger, ThreadPoolExecutor(2) as pool:
        storage, meet = ledger.log.storage, threading.Barrier(2, timeout=60)

        def first() -> None:
            with storage.hold("one", OwnFolder(tmp_path, "id").file):
                meet.wait()
                meet.wait()  # both hold a name
            meet.wait()
            meet.wait()  # the second has let go of its name, too
            ledger.create_budget(Budget(3.0, 1e-5, name="b"))

        def second() -> None:
            meet.wait()
            with storage.hold("two", OwnFolder(tmp_path, "id").file):
                meet.wait()
                meet.wait()  # the first has let go of its name
            meet.wait()

        for done in [pool.submit(first), pool.submit(second)]:
            done.result(120)


@pytest.mark.postgres
def test_a_name_is_held_by_a_connection_that_may_be_lost(postgres_url: str, tmp_path: Path) -> None:
    """Servers end connections that are idle while an arm trains: its result is stored all the same."""
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        with ledger.log.storage.hold("toy", OwnFolder(tmp_path, "id").file):
            for _ in range(2):
                with ledger.log.storage.read() as connection:
                    pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
                with other.log.storage.read() as killer:
                    killer.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
                ledger.create_budget(Budget(3.0, 1e-5, name="b"))
