"""Damage campaigns: what a store says when its rows, its bytes or its end are not what was written.

A storage with a study that is finished and one that is half way is damaged in one place, and every command
that reads it is run. A traceback, a hang, or a number other than the truth is counted.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import random
import re
import shutil
import signal
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.main import get_command

from privtune.audit import audit
from privtune.cli._app import mount
from privtune.errors import PrivTuneError
from privtune.study import Study, keep_audit
from privtune.study.lifecycle import Life
from privtune.study.workers import serve
from privtune.views.record import arm_record, budget_view
from tests.study.conftest import toy_spec
from tests.study.test_stages import staged
from tests.tasks.test_stages import people

DONE, HALF = "done", "half"
URL = "sqlite:///privtune.db"

_DATABASE = "privtune.db"
_PATIENCE = 60  # seconds of a command that takes less than one
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[-+]?\d+)?(?![\w.])")
_MOMENT = re.compile(r"seconds|GiB| ms\b")  # measured, and free on the disk
_WORD_FOR_WORD = "privtune_failures.traceback"  # the column whose text is shown as it is
_TRIGGERS = (
    "DROP TRIGGER IF EXISTS privtune_entries_no_UPDATE",
    "DROP TRIGGER IF EXISTS privtune_entries_no_DELETE",
)


def build(folder: Path) -> None:
    """Make the storage in a folder, which is the working one: a finished study, and one half way."""
    people().to_csv("people.csv", index=False)
    people().head(5).to_csv("asked.csv", index=False)
    spec = staged(Path("people.csv"))
    arms = [*(arm.model_dump(mode="json") for arm in spec.arms)]
    everything = {"name": "every", "strategy": "everything", "trials": 2}
    fixed = {"parameters": {"max_grad_norm": 1.0}}
    changes: dict[str, Any] = {"name": DONE, "seed": 3, "report": {"metric": "accuracy"}}
    changes["arms"] = [*arms, {**everything, **fixed}]
    with closing(Study.create(staged(Path("people.csv"), **changes), URL)) as study:
        study.run(force=True)
        budget = study.spec.budget
        report = audit(study.plans[0], delta=budget.delta, published=budget.epsilon, runs=100)
        keep_audit(study, report.to_dict())
    selection = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 6}
    Study.create(toy_spec(name=HALF, seed=1, arms=[selection]), URL).close()
    with closing(Life(HALF, URL)) as life:
        [plan] = life.plans().values()
        life.charge([plan])
        life.start(plan)
        life.record_failure(plan.arm, RuntimeError("a disk was full"))
    serve(URL, study=HALF, most=1, idle_exit=0.0)
    (folder / "artifacts-of-mlflow").mkdir(exist_ok=True)
    with sqlite3.connect(_DATABASE) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


@dataclass(frozen=True)
class Damage:
    """One place of a database that is not what was written there."""

    name: str
    do: Callable[[Path], None]
    forged: bool = False  # well-typed: only what binds it can tell


@dataclass
class Verdict:
    """What the campaign counted."""

    cells: int = 0
    refused: int = 0
    same: int = 0
    tracebacks: dict[str, list[str]] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.cells} cells: {self.same} as before, {self.refused} refused in a sentence, "
            f"{sum(self.other.values())} with other words, "
            f"{sum(map(len, self.tracebacks.values()))} tracebacks of {len(self.tracebacks)} damages, "
            f"{len(self.hangs)} hangs, {sum(map(len, self.wrong.values()))} wrong numbers of "
            f"{len(self.wrong)} damages, {sum(map(len, self.lost.values()))} without a number of "
            f"{len(self.lost)} damages"
        )


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended; ``trace`` where it ended in no way of its own."""

    code: int
    out: str
    err: str
    trace: str = ""


def run_command(*words: str) -> Answer:
    """Run the command line in this process, as ``privtune.cli.main`` does."""
    out, err, trace = io.StringIO(), io.StringIO(), ""
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            _COMMANDS(list(words))
        except SystemExit as stop:
            code = stop.code or 0
        except (PrivTuneError, OSError) as error:
            err.write(f"{error}\n")
            code = 1
        except Exception:
            trace = traceback.format_exc()
    return Answer(int(code), out.getvalue(), err.getvalue(), trace)


_COMMANDS = get_command(mount())


def ask_in_python(ask: Callable[[Study], object], name: str) -> Answer:
    """Ask the Python interface of a study; what it returns is printed."""
    try:
        with closing(Study(name, URL, curator=True)) as study:
            return Answer(0, repr(ask(study)), "")
    except PrivTuneError as error:
        return Answer(1, "", f"{error}\n")
    except Exception:
        return Answer(1, "", "", traceback.format_exc())


def _records(study: Study) -> object:
    view = budget_view(study)
    documents = []
    for plan in study.plans:
        record = arm_record(study, plan, study.release(plan.arm), view)
        children = [(child.params, child.points) for child in record.children]
        documents.append((record.arm, record.params, record.points, record.note, children))
    return documents


def _models(study: Study) -> object:
    return [float(release.weights.sum()) for release in study.releases()]


_QUESTIONS: dict[str, Callable[[Study], object]] = {
    "status": lambda study: [(s.plan.arm, s.state, s.guarantee.epsilon) for s in study.status()],
    "stages": lambda study: [stage.to_dict() for stage in study.stages],
    "trials": lambda study: [(t.number, t.params, t.value) for t in study.trials],
    "shown": lambda study: [
        [(t.params, t.value, t.intermediate_values) for t in release.to_optuna().trials]
        for release in study.releases()
        if release.trials
    ],
    "releases": lambda study: [(r.arm, r.params, r.score, r.values) for r in study.releases()],
    "models": _models,
    "failures": lambda study: [study.failures(arm) for arm in study.arms],
    "spent": lambda study: (study.spent().epsilon, study.remaining(), study.finished),
    "records": _records,
}

READING: dict[str, tuple[str, ...]] = {
    " ".join(words): words
    for words in (
        ("budget", "list", "--json"),
        ("budget", "show", "clinic"),
        ("budget", "charges", "clinic", "--json"),
        ("budget", "charges", "toy"),
        ("budget", "verify", "clinic"),
        ("budget", "verify", "toy"),
        ("budget", "export", "clinic", "--no-witnesses", "--json"),
        ("study", "list"),
        ("study", "show", DONE, "--curator"),
        ("study", "show", HALF, "--curator", "--json"),
        ("study", "compare", DONE),
        ("study", "compare", DONE, "--json"),
        ("study", "compare", HALF, "--csv"),
        ("study", "export", DONE),
        ("study", "export", DONE, "--sp800-226"),
        ("study", "run", DONE, "--no-mlflow"),
        ("doctor",),
        ("predict", DONE, "one", "asked.csv", "--alone"),
        ("worker", DONE, "--idle-exit", "0"),
    )
}
"""Commands that write nothing, and so may follow each other on one damaged copy."""

WRITING: dict[str, tuple[str, ...]] = {
    " ".join(words): words
    for words in (
        ("worker", HALF, "--max-rows", "1", "--idle-exit", "0"),
        ("worker", "--max-rows", "1", "--idle-exit", "0"),
        ("study", "run", HALF, "--no-mlflow"),
        ("study", "delete", HALF, "--yes"),
        ("study", "delete", DONE, "--yes"),
    )
}
"""Commands that write; each gets a damaged copy of its own."""

RARE: dict[str, tuple[str, ...]] = {
    " ".join(words): words
    for words in (
        ("model", "export", DONE, "one", "--to", "exported"),
        ("study", "sync", DONE, "--json"),
        ("audit", DONE, "--arm", "one", "--runs", "100", "--json"),
    )
}
"""Commands that take seconds: some damages meet them."""


def put_back(kept: Path, folder: Path) -> None:
    """Make a folder hold what another one holds; a file that both have stays the same file."""
    for path in sorted(folder.rglob("*"), reverse=True):
        inside = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink():
            if not (kept / inside).is_dir():
                shutil.rmtree(path)
        elif not (kept / inside).exists():
            path.unlink()
    for path in sorted(kept.rglob("*")):
        target = folder / path.relative_to(kept)
        if path.is_dir():
            target.mkdir(exist_ok=True)
            target.chmod(path.stat().st_mode)
        elif not target.exists():
            shutil.copy2(path, target)
        elif target.read_bytes() != path.read_bytes():
            target.write_bytes(path.read_bytes())


class Bench:
    """A storage that was built once, its damaged copies, and what is said of them."""

    def __init__(self, built: Path) -> None:
        self.built = built
        self.keep = built.parent / f"{built.name}-as-built"
        if not self.keep.exists():
            shutil.copytree(built, self.keep)
        self.truth: dict[str, Answer] = {}

    def restore(self) -> None:
        """Put everything back: a database stays the same file, as a copy it would be another store."""
        gc.collect()  # a connection that a refused command left open would write to the file when it ends
        put_back(self.keep, self.built)

    def tables(self) -> dict[str, list[str]]:
        """Return the columns of every table, Optuna's included."""
        with closing(sqlite3.connect(self.keep / _DATABASE)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {
                table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                for (table,) in sorted(names)
                if not table.startswith("sqlite_")
            }

    def count(
        self,
        damages: Sequence[Damage],
        *,
        rare: bool = False,
        each: int | None = None,
        tell: Callable[[str], None] = print,
    ) -> Verdict:
        """Damage copies, run commands and questions, and count.

        Args:
            damages: What is damaged, one at a time.
            rare: Whether to run the commands that change nothing that is read, too.
            each: How many commands and questions meet each damage, drawn at random; all of them unless given.
            tell: Takes a line every fifty damages.
        """
        verdict = Verdict()
        rng = random.Random(len(damages))
        commands = {**READING, **WRITING, **(RARE if rare else {})}
        for name, words in commands.items():
            self.restore()
            self.truth[name] = run_command(*words)
        self.restore()
        for name, ask in _QUESTIONS.items():
            self.truth[f"Study.{name}"] = ask_in_python(ask, DONE)
        assert not any(truth.trace or truth.code for truth in self.truth.values()), self.truth
        for number, damage in enumerate(damages):
            fresh = False
            names = [*self.truth]
            asked = set(names if each is None else rng.sample(names, each))
            for name, words in commands.items():
                if name not in asked:
                    continue
                if not fresh or name not in READING:
                    self.restore()
                    damage.do(Path(_DATABASE))
                    fresh = name in READING
                answer = _in_time(lambda words=words: run_command(*words))
                self._judge(verdict, damage, name, answer)
            self.restore()
            damage.do(Path(_DATABASE))
            for name, ask in _QUESTIONS.items():
                if f"Study.{name}" not in asked:
                    continue
                answer = _in_time(lambda ask=ask: ask_in_python(ask, DONE))
                self._judge(verdict, damage, f"Study.{name}", answer)
            if number % 50 == 49:
                tell(f"{number + 1} of {len(damages)} damages: {verdict}")
        self.restore()
        return verdict

    def _judge(self, verdict: Verdict, damage: Damage, name: str, answer: Answer | None) -> None:
        verdict.cells += 1
        truth = self.truth[name]
        cell = f"{damage.name} | {name}"
        if answer is None:
            verdict.hangs.append(cell)
        elif answer.trace or answer.code not in (0, 1, 2):
            last = answer.trace.strip().splitlines()[-1] if answer.trace else str(answer.code)
            where = [line for line in answer.trace.splitlines() if "/privtune/" in line]
            verdict.tracebacks.setdefault(damage.name, []).append(
                f"{name}: {last[:150]} {where[-1].strip() if where else ''}"
            )
        elif answer.code != 0:
            verdict.refused += 1
            verdict.said[answer.err.strip()[-300:]] += 1
            if truth.code == 0 and (wrong := _wrong_numbers(damage, answer, truth)):
                verdict.wrong.setdefault(damage.name, []).append(f"{name}: {sorted(wrong)[:3]}")
        elif answer.out == truth.out:
            verdict.same += 1
        elif wrong := _wrong_numbers(damage, answer, truth):
            verdict.wrong.setdefault(damage.name, []).append(f"{name}: {sorted(wrong)[:3]}")
        elif lost := _numbers(truth.out) - _numbers(answer.out):
            verdict.lost.setdefault(damage.name, []).append(f"{name}: {sorted(lost)[:3]}")
        else:
            verdict.other[cell] += 1


def _wrong_numbers(damage: Damage, answer: Answer, truth: Answer) -> set[str]:
    """Return the numbers of an answer that the undamaged store does not give.

    The text of a failure is shown to the curator word for word, a forged one too: no number of it is an
    answer of the product.
    """
    if damage.name.startswith(_WORD_FOR_WORD):
        return set()
    return _numbers(answer.out) - _numbers(truth.out)


def _numbers(text: str) -> set[str]:
    """Return the numbers with a point in a text, but for those that hang on the moment."""
    lines = (line for line in text.splitlines() if not _MOMENT.search(line))
    return {number for line in lines for number in _NUMBER.findall(line)}


class _TooLongError(BaseException):
    """A command did not end."""


def _in_time(do: Callable[[], Answer]) -> Answer | None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_PATIENCE)
    try:
        return do()
    except _TooLongError:
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_DEEP = "[" * 10_000 + "]" * 10_000
WRONG_VALUES: dict[str, object] = {
    "NULL": None,
    "an integer": 7,
    "a negative": -3,
    "a huge text": str(2**70),
    "a float": 0.5,
    "infinity": float("inf"),
    "nothing": "",
    "a long text": "x" * 100_000,
    "a blob": b"\x00\xff\xfe",
    "bytes that are no text": None,  # CAST(X'ff' AS TEXT)
    "a list": "[]",
    "an object": "{}",
    "a deep nest": _DEEP,
    "NaN": "NaN",
    "twice a name": '{"a": 1, "a": 2}',
}


def wrong_values(tables: Mapping[str, Sequence[str]]) -> list[Damage]:
    """Return damages of each column: values of wrong types and shapes, and those of another row."""
    damages = []
    for table, columns in tables.items():
        for column in columns:
            for what, value in WRONG_VALUES.items():
                name = f"{table}.{column} = {what}"
                damages.append(Damage(name, _setting(table, column, value, what)))
            damages.append(Damage(f"{table}.{column} = another row's", _swapping(table, column)))
    return damages


def _setting(table: str, column: str, value: object, what: str) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        raw = "CAST(X'61ff' AS TEXT)" if what == "bytes that are no text" else "?"
        given = () if raw != "?" else (value,)
        _execute(path, table, f"UPDATE {table} SET {column} = {raw}", given)

    return do


def _swapping(table: str, column: str) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        other = f"(SELECT {column} FROM {table} ORDER BY rowid DESC LIMIT 1)"
        _execute(path, table, f"UPDATE {table} SET {column} = {other}", ())

    return do


def _execute(path: Path, table: str, statement: str, given: tuple[object, ...]) -> None:
    """Change a table's rows whatever forbids it; of rows that must differ, the first alone."""
    with closing(sqlite3.connect(path)) as connection:
        for trigger in _TRIGGERS:
            connection.execute(trigger)
        connection.execute("PRAGMA ignore_check_constraints = ON")
        _unlock(connection, table)
        with contextlib.suppress(sqlite3.IntegrityError):  # equal keys
            connection.execute(statement, given)
            connection.commit()
            return
        connection.rollback()
        first = f"{statement} WHERE rowid = (SELECT min(rowid) FROM {table})"
        with contextlib.suppress(sqlite3.IntegrityError):
            connection.execute(first, given)
            connection.commit()


def _unlock(connection: sqlite3.Connection, table: str) -> None:
    """Take NOT NULL from a table's columns."""
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(
        "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = ?", (table,)
    )
    connection.commit()
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute(f"PRAGMA schema_version = {version + 1}")
    connection.execute("PRAGMA writable_schema = OFF")


def _rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def _changing_json(
    table: str, column: str, which: str, change: Callable[[Any], Any]
) -> Callable[[Path], None]:
    """Return what parses the texts of some rows, changes them, and writes them back."""

    def do(path: Path) -> None:
        for rowid, text in _rows(path, f"SELECT rowid, {column} FROM {table} WHERE {which}"):
            is_bytes = isinstance(text, bytes)
            if not (document := json.loads(text)):
                continue  # nothing is in it that could be changed
            changed = json.dumps(change(document))
            value: object = changed.encode() if is_bytes else changed
            statement = f"UPDATE {table} SET {column} = ? WHERE rowid = {rowid}"
            _execute(path, table, statement, (value,))

    return do


def _edited(edit: Callable[[Any], None]) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        edit(document)
        return document

    return change


def _moved_numbers(document: Any) -> Any:
    """Return a document with each of its floats moved by a hundredth."""
    if isinstance(document, float):
        return document + 0.01
    if isinstance(document, dict):
        return {name: _moved_numbers(value) for name, value in document.items()}
    if isinstance(document, list):
        return [_moved_numbers(value) for value in document]
    return document


def forged_values() -> list[Damage]:
    """Return damages that have the right types and shapes."""
    forged: dict[str, Callable[[Path], None]] = {}

    def document(
        name: str, table: str, column: str, which: str, edit: Callable[[Any], Any]
    ) -> None:
        forged[name] = _changing_json(table, column, which, edit)

    def sql(name: str, table: str, statement: str) -> None:
        forged[name] = lambda path: _execute(path, table, statement, ())

    arms = "privtune_arms"
    plans = "plan NOT LIKE '%\"stage\"%'"
    stages = "plan LIKE '%\"stage\"%'"
    drop = _edited(lambda found: found.pop(next(iter(found))))
    rename = _edited(lambda found: found.update(renamed=found.pop(next(iter(found)))))
    for table, column, which in (
        (arms, "plan", "1"),
        (arms, "release", "release IS NOT NULL"),
        ("privtune_studies", "spec", "1"),
        ("privtune_entries", "body", "1"),
        ("privtune_entries", "sealed", "1"),
        ("privtune_tasks", "result", "result IS NOT NULL"),
        ("privtune_blobs", "data", "name LIKE '_audits/%'"),
    ):
        what = f"{table}.{column}"
        document(f"{what}: floats moved", table, column, which, _moved_numbers)
        document(f"{what}: a key missing", table, column, which, drop)
        document(f"{what}: a key renamed", table, column, which, rename)
        document(f"{what}: lists for objects", table, column, which, lambda found: [found])
        texts = _edited(lambda found: found.update({k: str(v) for k, v in found.items()}))
        document(f"{what}: texts for numbers", table, column, which, texts)
        nulls = _edited(lambda found: found.update(dict.fromkeys(found)))
        document(f"{what}: null for all", table, column, which, nulls)
        more = _edited(lambda found: found.update(more=1))
        document(f"{what}: a key more", table, column, which, more)

    def training(change: Callable[[Any], None]) -> Callable[[Any], Any]:
        return _edited(lambda plan: change(plan["training"]))

    document(
        "the noise of a plan halved",
        arms,
        "plan",
        plans,
        training(lambda t: t["method"].update(noise_multiplier=0.5)),
    )
    document(
        "the steps of a plan",
        arms,
        "plan",
        plans,
        training(lambda t: t["schedule"].update(steps=t["schedule"]["steps"] + 1)),
    )
    document("the scale of a stage", arms, "plan", stages, _edited(lambda p: p.update(scale=1e-3)))
    document(
        "a metric of a release",
        arms,
        "release",
        "release LIKE '%estimates%'",
        _edited(lambda r: [e.update(value=0.99) for e in r["estimates"].values()]),
    )
    document(
        "the δ of a spec",
        "privtune_studies",
        "spec",
        "1",
        _edited(lambda s: s["budget"].update(delta=1e-7)),
    )
    document(
        "the ε of a spec",
        "privtune_studies",
        "spec",
        "1",
        _edited(lambda s: s["budget"].update(epsilon=9.0)),
    )
    sql("a release taken away", arms, f"UPDATE {arms} SET release = NULL")
    sql("announced before released", arms, f"UPDATE {arms} SET announced = 1")
    sql("an arm of another name", arms, f"UPDATE {arms} SET name = 'other' WHERE name = 'one'")
    sql(
        "plans exchanged",
        arms,
        f"UPDATE {arms} SET plan = (SELECT plan FROM {arms} WHERE name='every') WHERE name='one'",
    )
    sql(
        "releases exchanged",
        arms,
        f"UPDATE {arms} SET release = (SELECT release FROM {arms} WHERE name='every') WHERE name='one'",
    )
    sql("no secret", arms, f"UPDATE {arms} SET secret = ''")
    sql("another secret", arms, f"UPDATE {arms} SET secret = '{'ab' * 32}' WHERE secret <> ''")
    sql("a short secret", arms, f"UPDATE {arms} SET secret = 'ab' WHERE secret <> ''")
    sql("an uneven secret", arms, f"UPDATE {arms} SET secret = 'abc'")
    sql("a secret that is no hex", arms, f"UPDATE {arms} SET secret = '{'zz' * 32}'")
    sql("the order of arms", arms, f"UPDATE {arms} SET number = -number")
    sql("another digest", arms, f"UPDATE {arms} SET digest = '{'0' * 64}'")
    tasks = "privtune_tasks"
    sql("scores moved", tasks, f"UPDATE {tasks} SET score = score + 0.01")
    sql("done without a result", tasks, f"UPDATE {tasks} SET done = 1")
    sql("open with a result", tasks, f"UPDATE {tasks} SET done = 0")
    sql("a task missing", tasks, f"DELETE FROM {tasks} WHERE number = 0")
    sql(
        "the last task missing",
        tasks,
        f"DELETE FROM {tasks} WHERE number = (SELECT max(number) FROM {tasks})",
    )
    sql("tasks numbered otherwise", tasks, f"UPDATE {tasks} SET number = number + 1000")
    sql(
        "another file of a task",
        tasks,
        f'UPDATE {tasks} SET result = \'{{"file": "trial-000099.safetensors"}}\' WHERE result IS NOT NULL',
    )
    sql("K", "privtune_rounds", "UPDATE privtune_rounds SET tasks = tasks + 1")
    sql("no secret of a round", "privtune_rounds", "UPDATE privtune_rounds SET secret = ''")
    sql(
        "another secret of a round",
        "privtune_rounds",
        f"UPDATE privtune_rounds SET secret = '{'cd' * 32}'",
    )
    sql("no round", "privtune_rounds", "DELETE FROM privtune_rounds")
    blobs = "privtune_blobs"
    sql("models gone", blobs, f"DELETE FROM {blobs} WHERE name LIKE '%model%'")
    sql(
        "models exchanged",
        blobs,
        f"UPDATE {blobs} SET data = (SELECT data FROM {blobs} WHERE name = 'every/model.safetensors')"
        " WHERE name = 'one/model.safetensors'",
    )
    sql("trials gone", blobs, f"DELETE FROM {blobs} WHERE name LIKE '%trial%'")
    sql("an audit gone", blobs, f"DELETE FROM {blobs} WHERE name LIKE '_audits/%'")
    sql("objects without a store", blobs, f"UPDATE {blobs} SET data = NULL, place = '{{}}'")
    for name, at in {"header": 30, "metadata": 200, "weights": -5}.items():
        forged[f"a bit of a model's {name}"] = _flipping_blob("name LIKE '%model%'", at)
        forged[f"a bit of a sealed {name}"] = _flipping_blob("name LIKE 'sealed/%'", at)
    forged["a bit of a sealed round"] = _flipping_blob("name LIKE 'trials/%'", 30)
    forged["a sealed trial's score moved"] = _move_sealed_score
    for table in ("privtune_studies", arms, blobs, "privtune_entries", "privtune_budgets"):
        sql(f"{table} emptied", table, f"DELETE FROM {table}")
    sql("trials' values moved", "trial_values", "UPDATE trial_values SET value = value + 0.01")
    sql(
        "trials' parameters moved",
        "trial_params",
        "UPDATE trial_params SET param_value = param_value * 1.01",
    )
    sql("trials' values gone", "trial_values", "DELETE FROM trial_values")
    sql("trials' states", "trials", "UPDATE trials SET state = 'FAIL'")
    sql("trials gone from Optuna", "trials", "DELETE FROM trials")
    return [Damage(name, do, forged=True) for name, do in forged.items()]


def _move_sealed_score(path: Path) -> None:
    """Change the score of a sealed trial, and the digest that stands in its row."""
    rows = _rows(path, "SELECT rowid, data FROM privtune_blobs WHERE name LIKE 'trials/%'")
    for rowid, data in rows:
        document = json.loads(data)
        document["trials"][0]["score"] = 0.125
        changed = json.dumps(document).encode()
        digest = hashlib.sha256(changed).hexdigest()
        statement = f"UPDATE privtune_blobs SET data = ?, digest = ? WHERE rowid = {rowid}"
        _execute(path, "privtune_blobs", statement, (changed, digest))


def _flipping_blob(which: str, at: int) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        for rowid, data in _rows(path, f"SELECT rowid, data FROM privtune_blobs WHERE {which}"):
            changed = bytearray(data)
            changed[at] ^= 1
            statement = f"UPDATE privtune_blobs SET data = ? WHERE rowid = {rowid}"
            _execute(path, "privtune_blobs", statement, (bytes(changed),))

    return do


def flipped_bytes(count: int, *, seed: int, most: int = 20) -> list[Damage]:
    """Return damages of the file itself: bytes that are others, at random places."""

    def flipping(number: int) -> Callable[[Path], None]:
        def do(path: Path) -> None:
            rng = random.Random(f"{seed}/{number}")
            content = bytearray(path.read_bytes())
            for _ in range(rng.randint(1, most)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)

        return do

    return [Damage(f"flipped bytes {number}", flipping(number)) for number in range(count)]


def cut_files(count: int, *, seed: int) -> list[Damage]:
    """Return damages of the file's end: it breaks off at a random place."""

    def cutting(number: int) -> Callable[[Path], None]:
        def do(path: Path) -> None:
            content = path.read_bytes()
            path.write_bytes(content[: random.Random(f"{seed}-{number}").randrange(len(content))])

        return do

    return [Damage(f"cut file {number}", cutting(number)) for number in range(count)]


@contextlib.contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    """Build the storage in a folder, which is the working one meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.delenv("PRIVTUNE_CURATOR", raising=False)
        if not (folder / _DATABASE).exists():
            build(folder)
        yield Bench(folder)
