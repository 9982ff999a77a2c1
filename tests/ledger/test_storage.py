"""What storages do wrong, and how the ledger says it: one clear error, nothing half-written."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import MagicMock

import psycopg
import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerBusyError,
    LedgerConnectionError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerReadOnlyError,
    verify,
)
from privtune.ledger.chain import Kind
from privtune.ledger.engines import translated
from privtune.ledger.places import artifact_root, checked_url, database_path
from privtune.ledger.rounds import Rounds, Submission
from privtune.ledger.storage import Storage
from privtune.ledger.urls import masked, masked_url
from privtune.study.trials import StudyTrials

ASKED = ChargeRequest(Gaussian(9.0))


@pytest.fixture
def sqlite_path(sqlite_url: str) -> Path:
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        ledger.reserve("b", [ASKED])
    return Path(sqlite_url.removeprefix("sqlite:///"))


def intact(url: str, charges: int = 1) -> None:
    with Ledger(url) as ledger:
        verify(ledger.log.storage, "b")
        assert len(ledger.charges("b")) == charges


@pytest.mark.parametrize(
    "url",
    ["", "privtune", "sqlite:///a\0b.db", "sqlite:///\udcff.db", "sqlite:///file::memory:?uri=true",
     "sqlite:///file:x?mode=memory&uri=true", "mysql://localhost/x", "sqlite://", "sqlite:///:memory:", "sqlite:////no/such/folder/x.db"],
)  # fmt: skip
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="storage"):
        Ledger(url)


@pytest.mark.parametrize(
    "text", ["runs/p.db", "runs/p.sqlite", "{folder}/a b%41.sqlite3", "~/p.db"]
)
def test_a_path_is_as_good_as_a_url(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = text.format(folder=tmp_path)
    named = Path(text).expanduser().absolute()
    for given in (text, Path(text)):
        assert database_path(checked_url(given)) == named
        assert artifact_root(given) == named.with_name(f"{named.stem}-artifacts")
    with Ledger(text) as ledger:
        ledger.create_budget(Budget(1.0, 1e-5, name="one"))
    assert named.is_file()
    with Ledger(ledger.url) as ledger:
        assert ledger.budget("one").epsilon == 1.0


@pytest.mark.parametrize("text", ["runs/p", "p.yaml", "bob:hunter2@host/p.db", "p.db?mode=ro"])
def test_what_is_no_path_of_a_database_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"runs/p.db") as caught:
        checked_url(text)
    assert "hunter2" not in str(caught.value)


def test_a_missing_server_is_one_error() -> None:
    with pytest.raises(LedgerConnectionError, match="connection failed") as caught:
        Ledger("postgresql://nobody:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgres:/bob:hunter2@host/db",
        "postgresql://bob:h/hunter2@127.0.0.1:1/db",
        "postgresql://bob:hunter2@127.0.0.1:1/db?sslmode=disable&sslpassword=hunter2",
        "mysql://bób:pässwörd hunter2 ü@host/db",
        "postgresql//bob:a//b hunter2@host/db",
        "postgresql://bob:hunter2\0@127.0.0.1:1/db",
        "postgresql://bob:hunter2\ud83d@127.0.0.1:1/db",
        "mysql://127.0.0.1/db?password=my hunter2&user=bob",
    ],
)
def test_no_message_shows_a_password(url: str) -> None:
    with pytest.raises(PrivTuneError) as caught:
        Ledger(url)
    assert "hunter2" not in f"{caught.value} {caught.value.args} {vars(caught.value)}"
    assert "***" in str(caught.value)


SHOWN = [
    "sqlite:///privtune.db",
    "postgresql://bob@host:5432/db",
    "http://127.0.0.1:5000",
    "MLflow at 'http://127.0.0.1:5000' failed: 403",
]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *[(text, text) for text in SHOWN],
        ("https://hunter2@h/api, twice", "https://***@h/api, twice"),
        (
            "tried postgres://a:hunter2 x@h and 'http://b:hu@nter2@h2/p?token=hunter2': FATAL: x",
            "tried postgres://a:***@h and 'http://b:***@h2/p?token=***': FATAL: x",
        ),
    ],
)
def test_passwords_and_nothing_else_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    if " " not in text:
        assert masked_url(text) == shown


@pytest.mark.parametrize("password", ["a b", "a@b", "a/b", "a%b", "ä", "a:b?c#d"])
def test_a_password_that_was_percent_encoded_is_masked_and_used(password: str) -> None:
    url = sa.URL.create("postgresql", "bob", password, "host", 1, "db")
    text = url.render_as_string(hide_password=False)
    assert masked_url(text) == "postgresql://bob:***@host:1/db"
    assert checked_url(text).password == password


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_text("no database" * 1000)
    with pytest.raises(LedgerCorruptedError):
        Ledger(f"sqlite:///{path}")
    with pytest.raises(InvalidInputError, match="is a folder"):
        Ledger(f"sqlite:///{tmp_path}")


def test_sqlite_begins_before_it_reads(sqlite_url: str) -> None:
    """On Python 3.11 the driver's own BEGIN comes after the first SELECT."""
    storage = Storage(sqlite_url)
    statements: list[str] = []
    with storage.write() as connection:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_trace_callback(statements.append)
        assert raw.in_transaction
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous")
        ]
        assert settings == ["wal", 1, 2]
        # Another writer is kept out from the start, not from the first write on.
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
    storage.close()


@pytest.mark.postgres
def test_postgres_answers_whatever_the_server_defaults_to(postgres_url: str) -> None:
    """Texts would be bytes, times none, numbers short of their last digits, and a long wait cut off."""
    settings = (
        "client_encoding=SQL_ASCII", "datestyle=German", "timezone=Asia/Tokyo", "extra_float_digits=-10",
        "statement_timeout=50", "idle_session_timeout=50", "default_transaction_isolation=serializable",
    )  # fmt: skip
    parsed = sa.make_url(postgres_url)
    options = " -c".join((str(parsed.query["options"]), *settings))
    url = parsed.update_query_dict({"options": options}).render_as_string(hide_password=False)
    score = 0.1 + 0.2
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b", dataset="Klinik Süd, ε"))
        [charge] = ledger.reserve("b", [ASKED])
        rounds = Rounds(ledger)
        rounds.open(charge.id, count=1)
        rounds.complete_some([Submission(*rounds.lease_some(charge.id, "w", most=1), score, {})])
        assert [result.score for result in rounds.results(charge.id)] == [score]
        with ledger.log.storage.read() as connection:
            connection.exec_driver_sql("SELECT pg_sleep(0.1)")
            # REPEATABLE READ takes its snapshot before it waits for the lock, and overspends.
            level = connection.exec_driver_sql("SHOW transaction_isolation").scalar()
            assert level == "read committed"
        rounds = MagicMock(get=lambda _: None)  # no sealed round
        assert StudyTrials(ledger.log.storage, "s", rounds).of("arm") == []
        assert ledger.settle(charge.id).state == "settled"
    with Ledger(postgres_url) as ledger:
        assert ledger.budget("b").dataset == "Klinik Süd, ε"
    intact(postgres_url)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("55P03", LedgerBusyError),
        ("40P01", LedgerBusyError),
        ("40001", LedgerBusyError),
        ("25006", LedgerReadOnlyError),
        ("53100", LedgerFullError),
        ("42501", LedgerError),
        ("23505", LedgerError),
    ],
)
def test_errors_are_known_in_every_language(code: str, kind: type[LedgerError]) -> None:
    """What PostgreSQL says depends on the server's language, its codes do not."""
    error = psycopg.errors.lookup(code)("(charge, number)=(b-1, 40001): breche Anweisung ab")
    with pytest.raises(LedgerError) as caught, translated("postgresql://host/x"):
        raise sa.exc.ProgrammingError("SELECT 1", None, error)
    assert type(caught.value) is kind


def test_a_full_disk(sqlite_path: Path) -> None:
    """A limit on the size of files is what the kernel gives a process on a full disk."""
    code = f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from privtune.accounting import Gaussian
        from privtune.ledger import ChargeRequest, Ledger, LedgerFullError
        ledger = Ledger("sqlite:///{sqlite_path}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
        done = 0
        try:
            while True:
                ledger.reserve("b", [ChargeRequest(Gaussian(90.0), note="x" * 2000)])
                done += 1
        except LedgerFullError as error:
            print(done, error)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "disk is full" in result.stdout, result.stderr
    intact(f"sqlite:///{sqlite_path}", charges=1 + int(result.stdout.split()[0]))


def test_a_locked_database(sqlite_path: Path) -> None:
    """Nobody waits for ever, and readers do not wait at all."""
    url = f"sqlite:///{sqlite_path}"
    holder = sqlite3.connect(sqlite_path)
    holder.execute("BEGIN IMMEDIATE")
    with Ledger(url, patience=0.3) as ledger:
        with pytest.raises(LedgerBusyError, match="nothing was written"):
            ledger.reserve("b", [ASKED])  # or it would wait for the holder, who never lets go
        assert len(ledger.charges("b")) == 1
        holder.rollback()
        ledger.reserve("b", [ASKED])
    holder.close()
    intact(url, charges=2)


@pytest.mark.postgres
def test_a_locked_row(postgres_url: str) -> None:
    with Ledger(postgres_url, patience=0.3) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        with Ledger(postgres_url) as other, other.log.storage.write() as connection:
            connection.execute(sa.text("SELECT * FROM privtune_budgets FOR UPDATE"))
            with pytest.raises(LedgerBusyError, match="nothing was written"):
                ledger.reserve("b", [ASKED])
            assert ledger.charges("b") == ()
        ledger.reserve("b", [ASKED])
    intact(postgres_url)


@pytest.mark.postgres
def test_a_connection_that_is_lost_in_mid_transaction(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        append = ledger.log._append

        def cut(connection: sa.Connection, *rest: object) -> object:
            written = append(connection, *rest)  # type: ignore[arg-type]
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            with Ledger(postgres_url) as other, other.log.storage.read() as killer:
                killer.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
            return written

        ledger.log._append = cut  # type: ignore[method-assign, assignment]
        with pytest.raises(LedgerConnectionError, match="rolled back"):
            ledger.reserve("b", [ASKED])
        ledger.log._append = append  # type: ignore[method-assign]
        assert ledger.charges("b") == ()
        ledger.reserve("b", [ASKED])  # the next one has a new connection
    intact(postgres_url)


def test_an_error_in_mid_transaction_writes_nothing(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))

        def fail(*_: object) -> None:
            raise PrivTuneError("in between")

        with pytest.raises(PrivTuneError, match="in between"):
            ledger.reserve("b", [ASKED], work=fail)
        assert ledger.charges("b") == ()
        [charge] = ledger.reserve("b", [ASKED])
        with pytest.raises(PrivTuneError, match="in between"):
            ledger.move(charge.id, Kind.STARTED, work=fail)
        assert ledger.charge(charge.id).state == "reserved"
    intact(ledger_url)


class Clock:
    def __init__(self) -> None:
        self.offset = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.offset


@pytest.mark.parametrize("years", [1000, -20])
def test_one_wrong_clock_locks_nobody_out(ledger_url: str, years: int) -> None:
    """Every entry has its own clock's time; the order is that of the numbers, and verify tells."""
    clock = Clock()
    with Ledger(ledger_url, clock=clock) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        before = datetime.now(UTC)
        [first] = ledger.reserve("b", [ASKED])
        clock.offset = timedelta(days=365 * years)
        [wrong] = ledger.reserve("b", [ASKED])
        clock.offset = timedelta()
        [honest] = ledger.reserve("b", [ASKED])
        assert ledger.settle(ledger.start(honest.id).id).state == "settled"
        assert before <= first.created_at <= honest.created_at <= datetime.now(UTC)
        assert abs(wrong.created_at - before) > timedelta(days=364 * abs(years))
        [warning] = verify(ledger.log.storage, "b").warnings
    assert f"Entry {4 if years > 0 else 3} has an earlier date than the entry before it" in warning
    intact(ledger_url, charges=3)


def test_a_forked_child_is_told(sqlite_path: Path) -> None:
    with Ledger(f"sqlite:///{sqlite_path}") as ledger:
        ledger.log.storage._pid -= 1
        with pytest.raises(LedgerError, match="open the ledger again"):
            ledger.charges("b")


def test_many_open_a_new_file_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Ledger(url) as ledger:
                ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    intact(url, charges=0)


@pytest.mark.parametrize("option", ["sslkey", "options", "access_token", "PASSWORD", "pass%77ord"])
@pytest.mark.parametrize("place", ["postgresql://bob@h/db", "https://h/api", "h/db"])
def test_of_options_those_alone_are_shown_that_are_known(option: str, place: str) -> None:
    for url in (
        f"{place}?mode=ro&{option}=hunter2&timeout=3",
        f"{place}?timeout=3;{option}=hun;{option}=hunter2#hunter2",
        f"{place}?hunter2",
        f"{place}?{option}=hun?ter2=hunter2",
    ):
        assert "hunter2" not in masked_url(url), url
        if "://" in place:
            assert masked(f"{url}: cannot be reached").endswith("cannot be reached")
            assert "hunter2" not in masked(f"{url}: cannot be reached"), url
    shown = masked_url(f"{place}?mode=ro&{option}=hunter2&sslmode=require")
    assert shown == f"{place}?mode=ro&{option}=***&sslmode=require"
