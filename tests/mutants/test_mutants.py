"""The table of mutants cannot rot: every one still applies, and its tests are still there."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants.table import MUTANTS, ROOT, Mutant

pytestmark = pytest.mark.quick

CONTRACT = ROOT / "tests" / "ledger" / "test_contract.py"
GUARANTEE = (
    "privtune/training/mechanism/",
    "privtune/study/seal.py",
    "privtune/study/lifecycle.py",
    "privtune/ledger/",
    "privtune/accounting/registry.py",
)


def test_there_are_as_many_as_there_should_be() -> None:
    assert len(MUTANTS) >= 60
    assert max(Counter((m.file, m.old, m.new) for m in MUTANTS).values()) == 1
    assert max(Counter(m.why for m in MUTANTS).values()) == 1
    for place in GUARANTEE:
        assert sum(m.file.startswith(place) for m in MUTANTS) >= 5, place


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.why)
def test_a_mutant_applies(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    for test in mutant.tests:
        file, *names = test.split("::")
        source = (ROOT / file).read_text(encoding="utf-8") + CONTRACT.read_text(encoding="utf-8")
        for name in names:
            assert f"def {name.split('[')[0]}(" in source or f"class {name}" in source, test


def test_the_parameters_of_their_tests_are_there(request: pytest.FixtureRequest) -> None:
    tests = {test for mutant in MUTANTS for test in mutant.tests if "[" in test}
    tests -= {
        item.nodeid for item in request.session.items
    }  # collected as it is, by the whole suite
    if not tests:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *sorted(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
