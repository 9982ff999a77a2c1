"""Plants each mistake of the table in a copy of the project, and runs the tests that must find it."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import MUTANTS, ROOT, Mutant

COPIED = ("privtune", "tests", "docs", "studies", "conftest.py", "pyproject.toml", "README.md")
SECONDS = 300  # for the tests of one mutant; who needs longer has not found it
HEAVY = (
    *("torch.func", "opacus", "scipy.stats", "pandas", "optuna", "dp_accounting.pld"),
    *("sqlalchemy", "pydantic", "mlflow", "hypothesis", "pytest"),
)
LOADED = "ignore::pytest.PytestAssertRewriteWarning"  # pytest would rewrite plugins that it imports
NO_TESTS = (4, 5)  # pytest: wrong usage, nothing collected


def main() -> int:
    """Run all mutants, or those whose file or reason holds one of the words given."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose file or reason holds one")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.file} {m.why}" for w in words)]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in HEAVY:  # once, not in every child; nothing of the project itself
        importlib.import_module(name)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        project.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, project / name)
        survivors = [mutant for mutant in chosen if not _killed(mutant, project)]
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    sys.stdout.write(
        f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed, "
        f"{time.perf_counter() - begin:.0f} s, {cpu:.0f} s of CPU\n"
    )
    return 1 if survivors or not chosen else 0


def _killed(mutant: Mutant, project: Path) -> bool:
    """Plant a mutant, run its tests, take it out again, and print its row."""
    path = project / mutant.file
    before = path.read_text(encoding="utf-8")
    if before.count(mutant.old) != 1:
        return _row(mutant, "its text is not there exactly once", 0.0)
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    said, started = project.parent / "said", time.perf_counter()
    child = multiprocessing.get_context("fork").Process(target=_test, args=(mutant, project, said))
    try:
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
    finally:
        path.write_text(before, encoding="utf-8")
    code, lines = child.exitcode, said.read_text(errors="replace").splitlines()
    found = [line.split(" - ")[0].removeprefix("FAILED ") for line in lines if "FAILED " in line]
    verdict = found[-1] if code == 1 and found else ""
    if not verdict:
        verdict = "no such test" if code in NO_TESTS else f"SURVIVED ({code})"
        sys.stdout.write("\n".join(lines[-12:]) + "\n")
    return _row(mutant, verdict, time.perf_counter() - started, killed=code == 1 and bool(found))


def _test(mutant: Mutant, project: Path, said: Path) -> None:
    """Run the tests of a mutant, in a child, on the copy."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(project)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "privtune")]:
        del sys.modules[name]
    sys.path.insert(0, str(project))
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(project)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.pop("PRIVTUNE_TEST_POSTGRES_URL", None)
    import pytest

    base = f"--basetemp={project.parent / 'tmp'}"
    code = pytest.main(["-x", "-p", "no:xdist", "-W", LOADED, base, *mutant.tests])
    import privtune

    if not str(privtune.__file__).startswith(str(project)):
        code = 3
    os._exit(int(code))


def _row(mutant: Mutant, verdict: str, seconds: float, *, killed: bool = False) -> bool:
    file = mutant.file.removeprefix("privtune/")
    sys.stdout.write(f"| {file} | {mutant.why} | {verdict} | {seconds:.0f} s |\n")
    sys.stdout.flush()
    return killed


if __name__ == "__main__":
    sys.exit(main())
