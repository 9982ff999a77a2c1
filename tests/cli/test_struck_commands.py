"""Commands that write are killed, or meet a full disk, anywhere, and run again: nothing is lost or doubled.

``study run`` and workers have such tests of their own, in ``tests/study``. CI strikes some of these once;
``PRIVTUNE_CAMPAIGN=full`` as often as ``PRIVTUNE_KILLS`` says.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import product
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import fsspec
import psycopg
import pytest
import sqlalchemy as sa
import yaml

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger, backup
from privtune.study import Study
from tests.cli import struck
from tests.ledger.campaigns import processes
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.ledger.damages import put_back
from tests.study.conftest import serve_s3, toy_spec
from tests.tiers import FULL, PATIENCE, some

pytestmark = pytest.mark.slow

LOG = logging.getLogger("campaign")
STRIKES = int(os.environ.get("PRIVTUNE_KILLS", "10" if FULL else "1"))
SEED = int(os.environ.get("PRIVTUNE_KILLS_SEED", "24"))
LARGE = 100  # bytes of a model from which on it is a file, or an object

ARMS = [
    {"name": name, "strategy": "fixed", "parameters": {"learning_rate": 0.5, "max_grad_norm": norm}}
    for name, norm in (("first", 1.0), ("second", 2.0))
]

COMMANDS = {
    "create a budget": "budget create other --epsilon 1 --delta 1e-6",
    "charge": "budget charge open event.json --note new",
    "settle": "budget settle open-2",
    "void": "budget void open-1 --yes",
    "close": "budget close open",
    "backup": "budget backup copies/new.db",
    "restore": "budget restore --yes",
    "export": "budget export done --no-witnesses --output c.json --html c.html",
    "create a study": "study create new.yaml",
    "run": "study run half --no-mlflow",
    "run objects": "study run far --no-mlflow",
    "sync": "study sync done",
    "delete": "study delete done --yes",
    "delete objects": "study delete objects --yes",
    "compare": "study compare done --html page.html",
    "model": "model export done first --to model",
    "model of objects": "model export objects first --to model",
}
"""Every command that writes to a store, to its files, or where it is told to."""

WITH_OBJECTS = {"restore", "run objects", "delete objects", "model of objects"}
"""Those that also read or write what an object store holds."""

TWICE = {"charge"}
"""What is done once more when it is asked for again."""


def _start_processes() -> ForkServerContext:
    return processes("tests.study.warmed", "tests.cli.struck")


class Bench:
    """A folder with a store, put back as it was built before each strike."""

    def __init__(self, folder: Path, url: str, environment: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.url = url
        self.environment = environment
        self._kept = folder.with_name(f"{folder.name}-as-built")
        self._context = _start_processes()
        self._build()
        self._rows = self._read_tables()
        shutil.copytree(folder, self._kept)

    def words(self, name: str) -> list[str]:
        """Return the words of a command, with the storage that it is about."""
        words = COMMANDS[name].split()
        if words[1] == "restore":
            return [*words, "--storage", str(self.folder / "copies" / "old.db")]
        return (
            words
            if words[0] == "model" and "--storage" in words
            else [*words, "--storage", self.url]
        )

    def url_of(self, name: str) -> str:
        return self.words(name)[-1]

    def run(
        self, name: str, point: int | None = None, strike: str = struck.KILL
    ) -> tuple[list[str], int, str]:
        """Run a command, struck at a point; return the points met, how it ended, and what it said."""
        notes = self.folder.with_name("notes")
        notes.unlink(missing_ok=True)
        said = Path(f"{notes}.said")
        said.unlink(missing_ok=True)
        words = self.words(name)
        args = (words, str(self.folder), str(notes), point, strike, LARGE, self.environment)
        process = self._context.Process(target=struck.take_strike, args=args)
        process.start()
        process.join(PATIENCE)
        met = notes.read_text().splitlines() if notes.exists() else []
        if not said.exists():
            assert process.exitcode == -signal.SIGKILL, process.exitcode
            return met, -signal.SIGKILL, ""
        code, _, err = said.read_text().partition("\n")
        return met, int(code), err

    def state(self, name: str, *, models: bool = True) -> dict[str, Any]:
        return struck.state_of(self.url_of(name), self.folder, models=models)

    def put_back(self) -> None:
        """Put everything back; a database stays the same file, as a copy it would be another store."""
        put_back(self._kept, self.folder)
        self._write_tables()

    def _build(self) -> None:
        folder, url = self.folder, self.url
        budget = {"name": "done", "epsilon": 20.0, "delta": 1e-5}
        options: dict[str, Any] = {"arms": ARMS, "epochs": 1, "budget": budget, "epsilon": 4.0}
        with closing(Study.create(toy_spec(name="done", **options), url)) as study:
            study.run()
        stored = {"name": "objects", "artifacts": self._object_store(), **options}
        with closing(Study.create(toy_spec(**stored), url)) as study:
            study.run()
        Study.create(toy_spec(name="half", **options), url).close()
        Study.create(toy_spec(**{**stored, "name": "far"}), url).close()
        spec = toy_spec(name="new", **options).model_dump(mode="json", exclude_unset=True)
        (folder / "new.yaml").write_text(yaml.safe_dump(spec))
        (folder / "event.json").write_text(json.dumps({"type": "zcdp", "rho": 0.001}))
        (folder / "copies").mkdir()
        with Ledger(url) as ledger:
            ledger.create_budget(Budget(5.0, 1e-5, name="open"))
            ledger.reserve("open", [ChargeRequest(Gaussian(50.0), note="held")])
            ledger.reserve("open", [ChargeRequest(Gaussian(50.0), note="begun")], start=True)
        if url.startswith("sqlite"):
            with Ledger(url) as ledger:
                backup(ledger.log.storage, folder / "copies" / "old.db")

    def _object_store(self) -> str:
        """Return where the objects of a study go."""
        (self.folder / "objects").mkdir()
        return f"file://{self.folder / 'objects'}"

    def _read_tables(self) -> dict[str, bytes]:
        return {}

    def _write_tables(self) -> None:
        return None


class ServedBench(Bench):
    """The same with a store on PostgreSQL; its tables keep their numbers, which tell it from a copy."""

    def _connect(self) -> Any:
        url = sa.make_url(self.url)
        words = url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(words, autocommit=True)

    def _read_tables(self) -> dict[str, bytes]:
        with self._connect() as connection:
            query = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
            names = [name for (name,) in connection.execute(query)]
            kept = {}
            for name in names:
                with connection.cursor().copy(f'COPY "{name}" TO STDOUT') as rows:
                    kept[name] = b"".join(map(bytes, rows))
        return kept

    def _write_tables(self) -> None:
        with self._connect() as connection:
            query = (
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' "
                "AND query ILIKE '%privtune%'"
            )
            connection.execute(query)
            connection.execute("SET session_replication_role = replica")
            names = ", ".join(f'"{name}"' for name in self._rows)
            connection.execute(f"TRUNCATE {names}")
            for name, content in self._rows.items():
                with connection.cursor().copy(f'COPY "{name}" FROM STDIN') as rows:
                    rows.write(content)


class S3Bench(Bench):
    """The same with the objects of a study in a bucket."""

    BUCKET = "s3://bucket"

    def state(self, name: str, *, models: bool = True) -> dict[str, Any]:
        state = super().state(name, models=models)
        objects = [struck.RANDOM.sub("ID", path) for path in self._files().find(self.BUCKET)]
        return {**state, "files": sorted([*state["files"], *objects])}

    def _files(self) -> Any:
        return fsspec.filesystem("s3", use_listings_cache=False)

    def _object_store(self) -> str:
        return f"{self.BUCKET}/objects"

    def _read_tables(self) -> dict[str, bytes]:
        files = self._files()
        return {path: files.cat_file(path) for path in files.find(self.BUCKET)}

    def _write_tables(self) -> None:
        files = self._files()
        for path in files.find(self.BUCKET):
            files.rm_file(path)
        for path, content in self._rows.items():
            files.pipe_file(path, content)


@pytest.fixture(
    scope="module", params=["sqlite", "s3", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param) / "here"
    folder.mkdir()
    _start_processes()  # before they are told of a folder of studies: they warm up with some
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("privtune.study.rows._LARGE", LARGE)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        if request.param == "sqlite":
            yield Bench(folder, f"sqlite:///{folder / 'privtune.db'}")
            return
        if request.param == "s3":
            if not FULL:
                pytest.skip("files stand for all objects: `make campaigns` runs this")
            with serve_s3(patch) as environment:
                yield S3Bench(folder, f"sqlite:///{folder / 'privtune.db'}", environment)
            return
        if not POSTGRES:
            pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
        if not FULL:
            pytest.skip("SQLite stands for both: `make campaigns` runs this")
        patch.setenv("PRIVTUNE_ARTIFACTS", str(folder / "studies"))
        with PostgresSchemas() as schemas:
            yield ServedBench(folder, schemas.fresh())


def charges_of(state: dict[str, Any]) -> Counter[tuple[str, tuple[Any, ...]]]:
    return Counter(
        (name, charge) for name, (charges, _) in state["budgets"].items() for charge in charges
    )


def once(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without how often a charge of the same words stands there."""
    budgets = {
        name: (sorted(set(charges)), closed) for name, (charges, closed) in state["budgets"].items()
    }
    return {**state, "budgets": budgets}


def error_of(said: str) -> str:
    """Return what a command said, but for how far it has come, and the note that a store is a copy."""
    lines = said.splitlines(keepends=True)
    beside = ("charged there since\n", " ...\n")
    return "".join(line for line in lines if not line.endswith(beside))


def is_left_over(path: str) -> bool:
    """Return whether a killed command may leave a file of this name: part of one, or an object of no row.

    The key of an object stands in its row alone, and a deletion of its study finds it by its folder.
    """
    if "privtune-partial-" in path or ".staged-" in path:
        return True
    return re.fullmatch(r"(bucket/)?objects/ID/(ID|check)/ID", path) is not None


@pytest.mark.parametrize(
    ("name", "strike"), some(product(COMMANDS, [struck.KILL, struck.FULL_DISK]), 3)
)
def test_a_command_that_is_struck_is_run_again(bench: Bench, name: str, strike: str) -> None:
    """To the same end as without the strike; between them the store is sound, with at most one change.

    A process that is killed may leave a file under a name that nobody takes for a result.
    """
    if bench.url.startswith("postgres") and COMMANDS[name].split()[1] in ("backup", "restore"):
        pytest.skip("copies of SQLite files")
    if isinstance(bench, S3Bench) and name not in WITH_OBJECTS:
        pytest.skip("no command that reads or writes objects")
    bench.put_back()
    before = bench.state(name)
    points, code, said = bench.run(name)
    assert (code, len(points) > 1) == (0, True), said
    after = bench.state(name)
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    rng = random.Random(f"{SEED} {name} {strike}")
    for point in rng.sample(range(len(points)), min(STRIKES, len(points))):
        bench.put_back()
        at, code, said = bench.run(name, point, strike)
        where = (name, strike, point, at, code, said)
        ends[said.strip()[:100] or str(code)] += 1
        if not at:
            continue  # it has fewer points than the first time
        kinds[at[0]] += 1
        if strike == struck.KILL:
            assert code == -signal.SIGKILL, where
        else:
            assert "Traceback" not in said, where
            assert code in (0, 1), where
            assert code == 0 or error_of(said).count("\n") == 1, where
        between = bench.state(name, models=not name.startswith("delete"))
        assert between["budgets"].keys() <= after["budgets"].keys(), where
        if not name.startswith("run"):  # whose charges go through states
            assert not charges_of(between) - charges_of(before) - charges_of(after), where
        _, code, said = bench.run(name)
        assert "Traceback" not in said, (where, said)
        assert code == 0 or (code == 1 and error_of(said).count("\n") == 1), (where, said)
        end = bench.state(name)
        if name in TWICE:
            assert charges_of(end).total() == charges_of(between).total() + 1, where
            end, expected = once(end), once(after)
        else:
            expected = after
        assert {**end, "files": None} == {**expected, "files": None}, (where, said)
        missing = Counter(expected["files"]) - Counter(end["files"])
        more = Counter(end["files"]) - Counter(expected["files"])
        left = [path for path in more if is_left_over(path)]
        assert left == [] or strike == struck.KILL, (where, said)
        assert (missing, set(more) - set(left)) == ({}, set()), (where, said)
    LOG.info(
        f"{bench.url[:8]} {name}, {strike}: {kinds.total()} of {len(points)} points: {dict(kinds)}"
    )
    LOG.info(f"{bench.url[:8]} {name}, {strike}: {dict(ends)}")
