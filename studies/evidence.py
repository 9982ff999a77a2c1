"""Which code decided a recorded result, and whether today's code still says the same.

A line of ``results.csv`` carries the stamp of the code and of the environment that made it. One cheap
cell of each study is run again: equal digits where the stamp is today's, the same law where it is not.

    python -m studies.evidence        # runs the cells again, and marks the studies in studies/README.md
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path
from typing import Any

import privtune

__all__ = ["DECIDES", "digest_of", "environment", "plain", "stamp"]

PACKAGE = Path(privtune.__file__).parent
DECIDES = (
    "accounting",  # how much noise an ε is
    "spaces.py",  # what a search draws
    "strategies",
    "tasks",
    "training",  # methods, mechanism with its random streams, engine
    "execution/training.py",
    "study/rounds.py",
)
"""What decides a result, in the package: modules, and folders of them."""
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
    """Return eight digits that stand for the code in files and folders, whatever its layout."""
    found = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
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
