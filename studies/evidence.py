"""Which code decided a recorded result, and whether today's code still says the same.

A line of ``results.csv`` carries the stamp of the code and of the environment that made it. One cheap
cell of each study is run again: equal digits where the stamp is today's, the same law where it is not.
That the means of two sets of draws differ is found in one of a thousand pairs of one law.

    python -m studies.evidence        # runs the cells again, and marks the studies in studies/README.md
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import privtune

if TYPE_CHECKING:
    from studies.sheet import Again, Options, Row, Sheet

__all__ = [
    "BESIDE",
    "DECIDES",
    "NAMES",
    "again_of",
    "code_of",
    "digest_of",
    "environment",
    "kept",
    "marks",
    "plain",
    "rerun",
]
__all__ += ["same_law", "sheet", "stamp", "verdict"]

PACKAGE = Path(privtune.__file__).parent
DECIDES = (
    "accounting",  # how much noise an ε is
    "spaces.py",  # what a search draws
    "strategies",
    "tables",
    "tasks",
    "stages",
    "facts.py",
    "training",  # methods, mechanism with its random streams, engine
    "execution/trial_training.py",
    "study/arm_rounds.py",
)
"""What decides a result, in the package: modules, and folders of them."""
BESIDE = ("strategies/auto.py",)  # no study trains by its rule: ``auto`` asks what it would take
FOLDER = Path(__file__).parent
NAMES = sorted(
    path.parent.name
    for path in FOLDER.glob("*/run.py")
    if "SHEET = Sheet(" in path.read_text("utf-8")
)
"""The studies that are sheets."""
ALPHA = 1e-3  # how often two sets of draws of one law are taken for two laws
CLOSE = 1e-3  # of a number without chance
EQUAL, ALIKE, OTHER = "equal digits", "the same law", "ANOTHER LAW"
DRAWS = 5  # cells that are run again where each holds one draw
LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn", "optuna")


def plain(node: Any) -> Any:
    """Return a syntax tree as nested tuples, without comments, docstrings and places.

    Example:
        >>> one, other = "def f(x):\\n 'Doubles.'\\n return 2*x", "def f(x): return 2 * x  # doubles"
        >>> plain(ast.parse(one)) == plain(ast.parse(other))
        True
    """
    if isinstance(node, ast.AST):
        # What is empty is left out: a later Python has more fields.
        fields = ((name, plain(value)) for name, value in ast.iter_fields(node))
        return type(node).__name__, *(field for field in fields if field[1] not in (None, ()))
    if isinstance(node, list):
        return tuple(plain(each) for each in node if not _is_text(each))
    return None if node is None else repr(node)


def _is_text(node: Any) -> bool:
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def digest_of(*places: Path) -> str:
    """Return eight digits for the code in files and folders, whatever its layout, but ``BESIDE``."""
    found = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if path.relative_to(PACKAGE).as_posix() in BESIDE:
                continue
            found.update(path.relative_to(PACKAGE).as_posix().encode())
            found.update(repr(plain(ast.parse(path.read_text(encoding="utf-8")))).encode())
    return found.hexdigest()[:8]


@cache
def environment() -> str:
    """Return what decides digits beside the code: Python, libraries, processor."""
    import torch

    found = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    python = ".".join(platform.python_version_tuple()[:2])
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(models, processor)
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([f"Python {python}", *found, f"{processor} ({capability})"])


@cache
def stamp() -> str:
    """Return what stands beside a result: the digest of the deciding code, and of the environment."""
    code = digest_of(*(PACKAGE / name for name in DECIDES))
    return f"{code}-{hashlib.sha256(environment().encode()).hexdigest()[:4]}"


def code_of(stamped: str | None) -> str:
    """Return the digest of the code in a stamp, without that of the machine; empty where none is known."""
    return (stamped or "").partition("-")[0]


def sheet(name: str) -> Sheet:
    """Return a study."""
    found: Sheet = importlib.import_module(f"studies.{name}.run").SHEET
    return found


def _chosen(rows: Sequence[Row], again: Again) -> list[Row]:
    return [row for row in rows if all(row[c] == value for c, value in again.lines.items())]


def kept(study: Sheet) -> list[Row]:
    """Return the recorded lines that are compared."""
    name = "stand-in.csv" if study.again.stand_in else "results.csv"
    return _chosen(study.read(study.folder / name), study.again)


def rerun(study: Sheet) -> list[Row]:
    """Run the cells of these lines, a few at most, and return them as a file would."""
    import torch

    torch.set_num_threads(1)
    options = _options(study)
    found: list[dict[str, Any]] = []
    with mock.patch.dict(os.environ):  # a study may say there where its data are
        os.environ.pop("PRIVTUNE_DATA", None)
        for cell in _cells(study):
            found += [{**cell, **line} for line in study.fill(cell, options)]
    return _chosen([{c: str(value) for c, value in line.items()} for line in found], study.again)


def again_of(study: Sheet, rows: Sequence[Row]) -> list[Row]:
    """Return the lines that :func:`rerun` would, of a run that has them."""
    names = [[str(cell[column]) for column in study.key] for cell in _cells(study)]
    of_cells = [row for row in rows if [row[column] for column in study.key] in names]
    return _chosen(of_cells, study.again)


def _options(study: Sheet) -> Options:
    from studies.sheet import Options

    return Options(None, smoke=study.again.stand_in)


def _cells(study: Sheet) -> list[Mapping[str, Any]]:
    """Return the cells that are run again."""
    named = {c: value for c, value in study.again.lines.items() if c in study.key}
    cells = [
        cell
        for cell in study.cells(_options(study))
        if all(str(cell[column]) == value for column, value in named.items())
    ]
    return cells[:DRAWS]


def same_law(known: Sequence[Row], found: Sequence[Row], again: Again) -> bool:
    """Return whether a difference of the means is within what chance explains, but in ``ALPHA``.

    By Student's law with the pooled variance; by the normal law where lines have errors of their own.
    """
    from scipy import stats

    values = [[float(row[again.value]) for row in rows] for rows in (known, found)]
    means, counts = [statistics.mean(v) for v in values], [len(v) for v in values]
    free = float(sum(counts) - 2)
    if again.error is not None:
        squares = [sum(again.error(row) ** 2 for row in rows) for rows in (known, found)]
        error, free = (
            math.sqrt(sum(s / n**2 for s, n in zip(squares, counts, strict=True))),
            math.inf,
        )
    elif free > 0:
        around = sum((x - m) ** 2 for v, m in zip(values, means, strict=True) for x in v)
        error = math.sqrt(around / free * sum(1.0 / n for n in counts))
    else:
        error, free = 0.0, math.inf
    most = error * float(stats.t.isf(ALPHA / 2.0, free)) or CLOSE * abs(means[0])
    return abs(means[0] - means[1]) <= most


def verdict(known: Sequence[Row], found: Sequence[Row], again: Again) -> str:
    """Return how lines that were run again compare with the recorded ones."""
    if not known or not found:
        return OTHER
    both = [[row[again.value] for row in rows[: len(found)]] for rows in (known, found)]
    if both[0] == both[1]:
        return EQUAL
    return ALIKE if same_law(known, found, again) else OTHER


def mark(study: Sheet, said: str) -> str:
    """Return a study's line in the table of marks."""
    rows = study.read(study.folder / "results.csv")
    today = sum(code_of(row.get("code")) == code_of(stamp()) for row in rows)
    which = ", ".join(study.again.lines.values()) + ", stand-in" * study.again.stand_in
    name = f"[{study.name}]({study.name}/README.md)"
    return f"| {name} | {today} | {len(rows) - today} | {which} | {said} |"


def marks(said: dict[str, str]) -> str:
    """Return the table of marks, given how the cells that were run again compare."""
    head = "| study | lines by this code | by other code | run again | and recorded |"
    code = f"Code `{code_of(stamp())}`; {environment()}."
    return "\n".join(
        [code, "", head, "|" + " --- |" * 5, *(mark(sheet(n), said[n]) for n in NAMES)]
    )


BEGIN, END = "<!-- marks: python -m studies.evidence -->\n", "<!-- end of marks -->\n"


def main() -> int:
    """Run the cells again, write the marks, and return whether a law is another one."""
    said = {}
    for name in NAMES:
        study = sheet(name)
        said[name] = verdict(kept(study), rerun(study), study.again)
        print(f"{name}: {said[name]}", flush=True)
    path = FOLDER / "README.md"
    before, _, rest = path.read_text("utf-8").partition(BEGIN)
    path.write_text(
        before + BEGIN + marks(said) + "\n" + END + rest.partition(END)[2], encoding="utf-8"
    )
    return int(OTHER in said.values())


if __name__ == "__main__":
    sys.exit(main())
