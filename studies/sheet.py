"""A study as a sheet: a line a result, kept as soon as it is there, so that a stopped run goes on.

A folder's ``run.py`` says which cells there are, how one is filled, which figures the whole shows
and what is drawn. The command line, the file, the comparison with ``expected.json`` (what the paper
says, what was measured here, how far a run may be from that) and the README's tables are here.

    python -m studies.NAME.run --data mnist.npz          # runs what is missing, prints the tables
    python -m studies.NAME.run --minutes 20 ...          # stops after the cell that passes that time
    python -m studies.NAME.run --only arm=adadp seed=0   # some of the cells
    python -m studies.NAME.run --renew                   # what other code recorded is run anew
    python -m studies.NAME.run --smoke --out FILE        # seconds, on public stand-ins
    python -m studies.NAME.run --no-run --check          # the file as it is against expected.json
    python -m studies.NAME.run --no-run --charts DIR     # the charts, as HTML
    python -m studies.NAME.run --no-run --record 2.0     # new expectations, 2.0 where none was

A line carries the stamp of the code that made it; see evidence.py.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import privtune
from privtune.accounting import epsilon as account
from privtune.errors import interruptible
from studies.evidence import code_of, environment, stamp

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "STRATEGY_OF",
    "Again",
    "Options",
    "Sheet",
    "by",
    "error",
    "floats",
    "last",
    "markdown",
    "mean",
    "most_spent",
    "pm",
    "release_of",
    "releases_of",
    "seed_of",
]

Row = Mapping[str, str]
CODE = "code"  # the column with the stamp of the code that made a line; empty where nobody knows
STRATEGY_OF = {
    "ADADP to the end": "adadp",
    "ADADP, one training": "adadp",
    "a given rate": "fixed",
    "all": "everything",
    "all, ours": "everything",
    "best, ours": "papernot-steinke",
    "best, Liu–Talwar": "liu-talwar",
    "defaults": "fixed",
    "guess": "fixed",
    "hyfreedp K=5": "hyfreedp",
    "public rate": "public-rate",
    "random, every trial charged": "everything",
    "selection": "papernot-steinke",
    "subsampled tuning": "subsampled-tuning",
    "subsampled-1": "subsampled-tuning",
    "subset search": "subset-search",
}
"""The strategy of a chart's line, by which it has its colour; lines named after theirs need none."""
BY = "recorded by"  # in ``expected.json``: for each stamp the number of lines, and the environment


@dataclass(frozen=True)
class Options:
    """What a cell may ask about the run that it belongs to.

    Attributes:
        data: The file that ``--data`` names, ``None`` where none was given.
        smoke: Whether this is a run of seconds on public stand-ins.
    """

    data: Path | None
    smoke: bool


@dataclass(frozen=True)
class Again:
    """What of a study is run again, cheaply and without MNIST, to see that its results still stand.

    Attributes:
        lines: Columns and values of its lines, which are draws of one law.
        value: The column that they are compared by.
        stand_in: Whether they are of the smoke run, kept in ``stand-in.csv``: the cells need MNIST.
        error: A line's own standard error, where each line is a mean.
    """

    lines: Mapping[str, str]
    value: str
    stand_in: bool = False
    error: Callable[[Row], float] | None = None


@dataclass(frozen=True)
class Sheet:
    """A study: its cells, how one is filled, what all of them show.

    Attributes:
        name: The folder under ``studies``.
        key: The columns that name a cell.
        values: The columns that a run fills. A cell may have several lines.
        cells: Every cell in the order in which they run, those first that say most.
        fill: Runs one cell and returns its lines, without the columns of the key.
        figures: What the file shows, by name: what ``expected.json`` is compared with.
        tables: The README's tables, from the file's lines.
        charts: The README's charts by file name, from the file's lines.
        again: What is run again: see :mod:`studies.evidence`.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    cells: Callable[[Options], Iterable[Mapping[str, Any]]]
    fill: Callable[[Mapping[str, Any], Options], Sequence[Mapping[str, Any]]]
    figures: Callable[[Sequence[Row]], Mapping[str, float]]
    tables: Callable[[Sequence[Row]], Sequence[str]]
    charts: Callable[[Sequence[Row]], Mapping[str, go.Figure]]
    again: Again

    @property
    def folder(self) -> Path:
        """Where the study's files are."""
        return Path(__file__).parent / self.name

    @property
    def expected(self) -> dict[str, dict[str, Any]]:
        """For each figure ``measured`` and ``tolerance``, and ``paper`` where the paper has one."""
        path = self.folder / "expected.json"
        text = path.read_text(encoding="utf-8") if path.exists() else "{}"
        found: dict[str, dict[str, Any]] = json.loads(text)
        return found

    def stamps(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return how many lines each code made, and in which environment, where that is known."""
        known = {stamp(): environment()} | {
            code: each["environment"] for code, each in self.expected.get(BY, {}).items()
        }
        counts = Counter(row.get(CODE) or "" for row in rows)
        return {
            code: {"lines": counts[code], "environment": known.get(code, "")}
            for code in sorted(counts)
        }

    def record(self, rows: Sequence[Row], tolerance: float) -> None:
        """Write what the lines show to ``expected.json``; papers and tolerances there stay."""
        known, found = self.expected, self.figures(rows)
        order = [*(name for name in known if name in found), *(n for n in found if n not in known)]
        new: dict[str, Any] = {BY: self.stamps(rows)}
        for name in order:
            old = {"tolerance": tolerance, **known.get(name, {})}
            new[name] = {**old, "measured": round(found[name], 6)}
        text = json.dumps(new, indent=1, ensure_ascii=False)
        (self.folder / "expected.json").write_text(text + "\n", encoding="utf-8")

    def read(self, path: Path) -> list[dict[str, str]]:
        """Return the lines of a results file."""
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def compare(self, rows: Sequence[Row]) -> list[str]:
        """Return where the lines deviate from what is expected, one sentence each."""
        found, problems = self.figures(rows), []
        for name, known in self.expected.items():
            if name == BY:
                continue
            value = found.get(name, math.nan)
            # What is not a number deviates as well.
            if not abs(value - known["measured"]) <= known["tolerance"]:
                problems.append(f"{name}: {value:.4g}, not {known['measured']:.4g}")
        return problems

    def summary(self, rows: Sequence[Row]) -> str:
        """Return the tables of the README: the paper's numbers beside these, then the study's own."""
        found = self.figures(rows)
        beside = [
            (name, f"{known['paper']:g}", f"{found[name]:.4g}")
            for name, known in self.expected.items()
            if known.get("paper") is not None and name in found
        ]
        first = [markdown(("figure", "paper", "here"), beside)] if beside else []
        return "\n\n".join([*first, *self.tables(rows)])

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run what is not in the results file yet, and print the tables; Ctrl-C stops it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # A program in the background begins without a handler of SIGINT.
            signal.signal(number, signal.default_int_handler)
        try:
            with interruptible():
                return self._main(argv)
        except KeyboardInterrupt:
            print("Stopped. What is done stays; the same command goes on.", file=sys.stderr)
            return 130

    def _main(self, argv: Sequence[str] | None) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m studies.{self.name}.run")
        parser.add_argument("--data", type=Path, help="mnist.npz")
        parser.add_argument("--out", type=Path, help="results (default: the study's results.csv)")
        parser.add_argument("--only", nargs="+", default=[], metavar="COLUMN=VALUE")
        parser.add_argument("--minutes", type=float, default=math.inf)
        parser.add_argument("--renew", action="store_true", help="what other code recorded, too")
        parser.add_argument("--no-run", action="store_true", help="read the results alone")
        parser.add_argument("--smoke", action="store_true", help="seconds, on public stand-ins")
        parser.add_argument("--check", action="store_true", help="compare with expected.json")
        parser.add_argument("--record", type=float, metavar="TOLERANCE", help="write expected.json")
        parser.add_argument("--charts", type=Path, metavar="DIR", help="write the charts there")
        given = parser.parse_args(argv)
        if given.smoke and given.out is None:
            given.out = Path(tempfile.mkdtemp()) / "results.csv"
        out = given.out or self.folder / "results.csv"
        if given.smoke:
            os.environ.pop("PRIVTUNE_DATA", None)
        elif given.data is not None:
            os.environ["PRIVTUNE_DATA"] = str(given.data.absolute())
        if not given.no_run:
            only = dict(pair.split("=", 1) for pair in given.only)
            if unknown := set(only) - set(self.key):
                parser.error(f"--only {', '.join(sorted(unknown))}: columns are {self.key}.")
            options, seconds = Options(given.data, given.smoke), 60.0 * given.minutes
            self._run(out, options, only, seconds, renew=given.renew)
        rows = self.read(out)
        if given.record is not None:
            self.record(rows, given.record)
        print(self.summary(rows))
        if given.charts:
            given.charts.mkdir(parents=True, exist_ok=True)
            for name, figure in self.charts(rows).items():
                page = given.charts / f"{name}.html"
                figure.write_html(page, config={"displayModeBar": False})
        problems = self.compare(rows) if given.check else []
        for problem in problems:
            print(f"DEVIATION: {problem}", file=sys.stderr)
        return 1 if problems else 0

    def _name(self, cell: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(cell[column]) for column in self.key)

    def _run(
        self, out: Path, options: Options, only: Mapping[str, str], seconds: float, *, renew: bool
    ) -> None:
        import torch

        torch.set_num_threads(1)
        columns = [*self.key, *self.values, CODE]
        rows = self.read(out)
        done = {
            self._name(row)
            for row in rows
            if not renew or code_of(row.get(CODE)) == code_of(stamp())
        }
        began = time.monotonic()
        for cell in self.cells(options):
            if self._name(cell) in done or any(str(cell[c]) != value for c, value in only.items()):
                continue
            lines = self.fill(cell, options)
            place = os.open(out.parent, os.O_RDONLY)
            fcntl.flock(place, fcntl.LOCK_EX)  # another run may be at other cells
            rows = self.read(out)
            old = [n for n, row in enumerate(rows) if self._name(row) == self._name(cell)]
            first = min(old, default=len(rows))
            kept = [row for n, row in enumerate(rows) if n not in old]
            kept[first:first] = [{**cell, **line, CODE: stamp()} for line in lines]
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
            # The file is another at once: a run that is stopped leaves whole cells.
            new = out.with_suffix(".new")
            with new.open("w", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())
            new.replace(out)
            os.close(place)
            if time.monotonic() - began > seconds:
                print(f"Stopped after {seconds / 60:g} minutes; the same command goes on.")
                return


def releases_of(
    arm: Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    repeats: int,
    seed: int = 0,
    values: Sequence[str] = ("accuracy",),
    **terms: Any,
) -> list[dict[str, Any]]:
    """Run one arm as a study of its own, with a budget of its own, and return a line a repetition.

    Args:
        arm: The arm as a spec has it, without its name.
        epsilon: The whole budget, which the arm may spend; on public records, each repetition.
        delta: Its delta.
        repeats: How often the arm runs, each time on random numbers of its own, in one stack. Public
            records have selections draw their numbers of candidates by strata of the law, which
            several studies of one repetition do not.
        seed: The study's seed.
        values: The columns of metrics on the test set, which the task or the report has.
        **terms: The rest of the spec: ``task``, ``epochs``, ``expected_batch_size``, ``space``, ...

    Returns:
        ``seed``, the repetition's number; ``values`` on the test set; ``spent``; ``claimed`` (the
        epsilon of the released model's training alone: what is usually claimed); expected
        ``gradient_evaluations`` of one run.
    """
    with tempfile.TemporaryDirectory() as folder:
        study = privtune.create_study(
            "study",
            budget=privtune.Budget(epsilon, delta, name="data"),
            arms=[{"name": "arm", **arm}],
            seed=seed,
            repeats=repeats,
            storage=f"sqlite:///{folder}/study.db",
            **terms,
        )
        (plan,) = study.plans
        (release,) = study.run()
        study.close()
    shared = {
        "spent": round(release.guarantee.epsilon, 4),
        "claimed": round(account(plan.training.event, delta).epsilon, 4),
        "gradient_evaluations": round(plan.expected_gradient_evaluations),
    }
    draws = release.repetitions or (release,)
    lines = []
    for seed_number, draw in enumerate(draws):
        scores = {name: draw.values.get(f"test_{name}", math.nan) for name in values}
        rounded = {name: round(score, 4) for name, score in scores.items()}
        lines.append({"seed": seed_number, **rounded, **shared})
    return lines


def seed_of(*names: object) -> int:
    """Return the seed of a study's cells of these names: other cells draw other numbers of candidates."""
    return zlib.crc32(" ".join(map(str, names)).encode())


def release_of(arm: Mapping[str, Any], *, seed: int, **terms: Any) -> dict[str, Any]:
    """Run an arm once with a seed, and return its line: see :func:`releases_of`."""
    (found,) = releases_of(arm, repeats=1, seed=seed, **terms)
    return {**found, "seed": seed}


def by(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """Return lines by the values of some columns, in the order of their first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in columns)].append(row)
    return dict(groups)


def last(rows: Iterable[Row], column: str, *names: str) -> list[Row]:
    """Return of every group by some columns the lines with its largest number in another."""
    found: list[Row] = []
    for group in by(rows, *names).values():
        end = max(floats(group, column))
        found += [row for row in group if float(row[column]) == end]
    return found


def floats(rows: Iterable[Row], column: str) -> list[float]:
    """Return one column as numbers."""
    return [float(row[column]) for row in rows]


def mean(rows: Iterable[Row], column: str) -> float:
    """Return the mean of a column."""
    return statistics.mean(floats(rows, column))


def error(rows: Iterable[Row], column: str) -> float:
    """Return the standard error of a column's mean; 0 of a single line."""
    values = floats(rows, column)
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def most_spent(rows: Iterable[Row]) -> dict[str, float]:
    """Return, as a figure, the largest share of its budget that a line spent; some spend nothing."""
    shares = (float(row["spent"]) / float(row["epsilon"]) for row in rows if row["spent"])
    return {"spent of the budget, at most": max(shares, default=0.0)}


def pm(rows: Sequence[Row], column: str, *, scale: float = 1.0, digits: int = 1) -> str:
    """Return mean ± standard error of a column, for a table."""
    spread = f" ± {scale * error(rows, column):.{digits}f}" if len(rows) > 1 else ""
    return f"{scale * mean(rows, column):.{digits}f}{spread}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
