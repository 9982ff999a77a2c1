"""Odd input, made by the thousand: one sentence each, no traceback, and no 10 seconds of CPU.

``PRIVTUNE_CAMPAIGN=full`` makes 750 inputs instead of 42, ``PRIVTUNE_FUZZ_SEED`` others.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from privtune.accounting import Gaussian
from privtune.cli import main
from privtune.errors import PrivTuneError
from privtune.ledger import Budget, ChargeRequest, Ledger, export_certificate
from privtune.tasks import get_task
from tests.study.conftest import toy_spec

LOG = logging.getLogger("campaign")
FULL = os.environ.get("PRIVTUNE_CAMPAIGN") == "full"
SEED = int(os.environ.get("PRIVTUNE_FUZZ_SEED", "7"))
CPU_SECONDS = 10

# How many of each kind: the whole campaign, and every day.
COUNTS = {"spec": (200, 12), "event": (300, 18), "certificate": (150, 8), "csv": (100, 4)}

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 10**9, -(10**9), 10**400, 0.5, -0.0, 1e-308, 1e-200, 1e200, 1e308,
    -1e308, math.nan, math.inf, -math.inf, 800, 360.0, "", " ", ":", "a:b", "..:x", "os:sep", "nan", "1e3",
    "\ud83d", "é" * 3, "x" * 5000, "../../x", "/abs", "mlflow", "a\nb", "\x1b[31m", [], {}, [[]], {"": {}},
    [1, "a", None], {"type": "gaussian"}, {"type": "composed", "events": []}, {"type": "non_private"},
    "gaussian", "[bold]",
]  # fmt: skip

GAUSSIAN = {"type": "gaussian", "noise_multiplier": 3.0}
TRAINING = {
    "type": "repeated",
    "count": 100,
    "event": {"type": "poisson_sampled", "rate": 0.01, "event": GAUSSIAN},
}
EVENTS: list[dict[str, Any]] = [
    TRAINING,
    {"type": "laplace", "noise_multiplier": 2.0},
    {"type": "joint", "events": [GAUSSIAN, GAUSSIAN]},
    {"type": "composed", "events": [TRAINING, {"type": "zcdp", "rho": 0.1}]},
    {"type": "worst_of", "events": [GAUSSIAN, TRAINING], "weights": [0.5, 0.5]},
    {"type": "parallel", "events": [TRAINING, {"type": "laplace", "noise_multiplier": 3.0}]},
    {"type": "approximate_dp", "epsilon": 1.0, "delta": 1e-6},
    {"type": "private_selection", "event": TRAINING, "runs": {"law": "geometric", "mean": 10}},
    {"type": "private_selection", "event": GAUSSIAN,
     "runs": {"law": "truncated_negative_binomial", "shape": 1.0, "mean": 20, "maximum": 100}},
    {"type": "private_selection", "event": {"type": "zcdp", "rho": 0.1},
     "runs": {"law": "poisson", "mean": 5}},
    {"type": "threshold_selection", "event": GAUSSIAN, "stop": 0.1},
    {"type": "subsampled_tuning", "variant": 1, "rate": 0.1, "training": TRAINING,
     "tuning": {"type": "private_selection", "event": TRAINING, "runs": {"law": "geometric", "mean": 5}}},
]  # fmt: skip


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every part of a JSON value."""
    yield prefix
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*prefix, key))


def mutated(rng: random.Random, value: Any) -> Any:
    """Change one to three places of a JSON value: replace, remove, double, rename, or wrap deeply."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        way = rng.choice(list(places(value)))
        if not way:
            if rng.random() < 0.1:
                return rng.choice(ODD)
            continue
        parent = value
        for step in way[:-1]:
            parent = parent[step]
        what = rng.random()
        if what < 0.65:
            parent[way[-1]] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.75:
            del parent[way[-1]]
        elif what < 0.85 and isinstance(parent, dict):
            parent[str(rng.choice(ODD))[:50]] = parent.pop(way[-1])
        elif what < 0.95 and isinstance(parent[way[-1]], int | float):
            parent[way[-1]] = parent[way[-1]] * 10.0 ** rng.choice([-200, -30, -3, 3, 30, 200])
        else:
            inner = parent[way[-1]]
            for _ in range(rng.choice([3, 40, 300])):
                inner = (
                    [inner]
                    if rng.random() < 0.5
                    else {"type": "repeated", "count": 2, "event": inner}
                )
            parent[way[-1]] = inner
    return value


def garbled(rng: random.Random, text: str) -> bytes:
    """Return a text as bytes, now and then cut off or with bytes that do not belong there."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.2 and data:
        for _ in range(rng.choice([1, 3])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.05:
        del data[rng.randrange(len(data) + 1) :]
    if rng.random() < 0.03:
        data = bytearray(b"[" * 100_000 if rng.random() < 0.5 else b'{"event":' * 50_000)
    return bytes(data)


class TooSlowError(BaseException):
    """More CPU than an odd input may take."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {CPU_SECONDS} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Fuzz:
    """Runs commands and calls, and keeps what went wrong."""

    def __init__(self, kind: str) -> None:
        self.rng = random.Random(f"{SEED} {kind}")
        self.count = COUNTS[kind][0 if FULL else 1]
        self.kind, self.tried, self.slowest = kind, 0, 0.0
        self.wrong: list[str] = []
        self.refused = 0

    def command(self, *args: str, note: object = "") -> None:
        """Run a command in this process; a refusal is exit 1 with one sentence, or 2 for usage."""

        def run() -> None:
            out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
            code: object = 0
            with (
                mock.patch.object(sys, "argv", ["privtune", *args]),
                redirect_stdout(out),
                redirect_stderr(err),
            ):
                try:
                    main()
                except SystemExit as stop:
                    code = stop.code
            err.seek(0)
            said = err.read()
            if code not in (None, 0, 1, 2) or (code == 1 and said.count("\n") != 1):
                raise AssertionError(f"exit {code}, {said!r}")
            self.refused += code not in (None, 0)

        self.call(run, note=f"{' '.join(args)[:300]!r} {str(note)[:600]!r}")

    def call(self, run: Callable[[], object], *, note: str) -> None:
        self.tried += 1
        begin = time.process_time()
        try:
            with warnings.catch_warnings(), limited():
                warnings.simplefilter("ignore")
                run()
        except PrivTuneError as error:
            self.refused += 1
            if "\n" in str(error).strip() or not str(error).strip():
                self.wrong.append(f"{note}\n  not one sentence: {error}")
        except (Exception, TooSlowError) as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = [
                f"{f.filename.split('privtune/')[-1]}:{f.lineno}"
                for f in frames
                if "privtune/" in f.filename
            ]
            self.wrong.append(
                f"{note}\n  {type(error).__name__}: {error} at {' < '.join(where[-1:-5:-1])}"
            )
        finally:
            self.slowest = max(self.slowest, time.process_time() - begin)

    def done(self) -> None:
        LOG.info(
            f"{self.kind}, seed {SEED}: {self.tried} inputs, {self.refused} refused, {len(self.wrong)} "
            f"wrong, the slowest {self.slowest:.1f} s of CPU"
        )
        assert not self.wrong, f"{len(self.wrong)} of {self.count}:\n" + "\n".join(self.wrong)
        assert self.refused > self.count / 4, "inputs are meant to be odd"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVTUNE_STORAGE", f"sqlite:///{tmp_path}/p.db")
    return tmp_path


def test_specs(here: Path) -> None:
    fuzz = Fuzz("spec")
    base = {
        **toy_spec().model_dump(mode="json"),
        "task": "iris-logistic",
        "scoring": {"metric": "accuracy"},
        "epsilon": 3.0,
        "seed": 5,
    }
    path = here / "spec.yaml"
    for number in range(fuzz.count):
        spec = mutated(fuzz.rng, base)
        try:
            text = yaml.safe_dump(spec)
        except (yaml.YAMLError, RecursionError):
            text = json.dumps(spec)
        path.write_bytes(garbled(fuzz.rng, text))
        command = "create" if number % 4 == 0 else "plan"
        fuzz.command("study", command, str(path), note=text)
    fuzz.done()


def test_events(here: Path) -> None:
    fuzz = Fuzz("event")
    url = os.environ["PRIVTUNE_STORAGE"]
    path = here / "event.json"
    names = []
    for number in range(fuzz.count):
        text = json.dumps(mutated(fuzz.rng, fuzz.rng.choice(EVENTS)))
        path.write_bytes(garbled(fuzz.rng, text))
        if number % 3 == 2:
            delta = str(fuzz.rng.choice([1e-5, 1e-5, 1e-300, 0.9, 0.0, 1.0, math.nan]))
            fuzz.command("account", "epsilon", str(path), "--delta", delta, note=text)
            continue
        if number % 9 == 0:
            # A recorded release may break a budget, and then nothing more is computed for it.
            names.append(f"b{number}")
            with Ledger(url) as ledger:
                ledger.create_budget(
                    Budget(fuzz.rng.choice([0.1, 4.0, 400.0]), 1e-5, name=names[-1])
                )
        released = ["--already-released"] if number % 9 == 7 else []
        fuzz.command("budget", "charge", names[-1], str(path), "--note", "x", *released, note=text)
    for name in names:
        for command in ("show", "charges", "verify", "export"):
            fuzz.command("budget", command, name)
    fuzz.done()


def test_certificates(here: Path) -> None:
    fuzz = Fuzz("certificate")
    with Ledger(os.environ["PRIVTUNE_STORAGE"]) as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
        [charge] = ledger.reserve("b", [ChargeRequest(Gaussian(4.0))])
        ledger.settle(ledger.start(charge.id).id)
        ledger.reserve("b", [ChargeRequest(Gaussian(9.0))])
        base = export_certificate(ledger.log.storage, "b")
    path = here / "certificate.json"
    for _ in range(fuzz.count):
        text = json.dumps(mutated(fuzz.rng, base))
        path.write_bytes(garbled(fuzz.rng, text))
        fuzz.command("budget", "verify", "--certificate", str(path), note=text)
    fuzz.done()


def test_tables(here: Path) -> None:
    fuzz = Fuzz("csv")
    rows = [["age", "dose", "ill"], *([str(20 + n), f"{n / 7:.3f}", str(n % 2)] for n in range(40))]
    base = {
        "type": "tabular", "path": "t.csv", "target": "ill", "classes": [0, 1],
        "train": 24, "validation": 8, "test": 8, "bounds": {"age": [0, 100], "dose": [0.0, 10.0]},
    }  # fmt: skip
    cells = [
        "",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "x",
        "\ud83d",
        "2",
        "-1",
        "0x10",
        '"',
        "1,5",
        "true",
        "1_0",
        "\0",
    ]
    for _ in range(fuzz.count):
        table = copy.deepcopy(rows)
        for _ in range(fuzz.rng.choice([0, 1, 3])):
            fuzz.rng.choice(table)[fuzz.rng.randrange(3)] = fuzz.rng.choice(cells)
        if fuzz.rng.random() < 0.2:
            fuzz.rng.choice(table).append("more")
        out = io.StringIO()
        csv.writer(out, quoting=csv.QUOTE_NONE, escapechar="\\").writerows(table)
        (here / "t.csv").write_bytes(garbled(fuzz.rng, out.getvalue()))
        task = mutated(fuzz.rng, base) if fuzz.rng.random() < 0.5 else base
        if not isinstance(task, str | dict):
            continue
        fuzz.call(
            lambda task=task: get_task(task).load_checked(),
            note=f"{task!r} {out.getvalue()[-200:]!r}",
        )
    fuzz.done()
