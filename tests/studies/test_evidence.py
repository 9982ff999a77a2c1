"""Recorded results and the code that made them; a run that is stopped."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from privtune.training.mechanism.noise import NoiseSource
from studies import evidence
from studies.evidence import ALIKE, DECIDES, FOLDER, NAMES, OTHER, PACKAGE, digest_of, plain
from studies.evidence import verdict as compared
from studies.price_of_honesty.run import SEEDS, SHEET
from tests.studies.recorded import check_recorded
from tests.tiers import PATIENCE, ROOT

STAND_IN = "mnist_strategies"
AGAIN = [
    name for name in NAMES if name == STAND_IN or not (FOLDER / name / "stand-in.csv").exists()
]


@pytest.mark.quick
def test_a_digest_is_of_what_code_does():
    assert all((PACKAGE / name).exists() for name in DECIDES)
    path = PACKAGE / "training/mechanism/noise.py"
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert plain(ast.parse(ast.unparse(tree))) == plain(tree)  # neither comments nor layout
    number = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == 2
    )
    number.value = 3
    assert plain(tree) != plain(ast.parse(text))
    assert digest_of(path) != digest_of(path.with_name("sampling.py"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_one_sentence_and_goes_on(number, tmp_path):
    out = tmp_path / "results.csv"
    command = [sys.executable, "-m", "studies.price_of_honesty.run", "--out", str(out)]
    command += ["--only", "task=table"]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + PATIENCE
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.1)
    running.send_signal(number)
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130, said
    assert said == "Stopped. What is done stays; the same command goes on.\n"
    before = SHEET.read(out)
    assert SHEET.main([*command[3:], "--minutes", "0"]) == 0  # one cell more
    after = SHEET.read(out)
    assert after[: len(before)] == before
    assert len({(row["arm"], row["trials"]) for row in after}) == 1 + len(before) / SEEDS


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_recorded_cell_comes_out_again(name, monkeypatch):
    """Equal digits from the code and on the machine that recorded it, the same law from others.

    Of a stand-in the smoke run in ``test_sheets.py`` says so; one is run here, too.
    """
    monkeypatch.delenv("PRIVTUNE_DATA", raising=False)
    study = evidence.sheet(name)
    check_recorded(study, evidence.rerun(study))


def test_another_seed_and_more_noise_are_noticed(monkeypatch):
    study = evidence.sheet("selection_against_adaptation")
    known = evidence.rerun(study)
    run = sys.modules["studies.selection_against_adaptation.run"]
    with monkeypatch.context() as planted:
        planted.setattr(run, "releases_of", partial(run.releases_of, seed=1))
        assert compared(known, evidence.rerun(study), study.again) == ALIKE
    gaussian = NoiseSource.gaussian
    monkeypatch.setattr(NoiseSource, "gaussian", lambda self, size: 1.5 * gaussian(self, size))
    assert compared(known, evidence.rerun(study), study.again) == OTHER


@pytest.mark.quick
def test_a_law_is_told_from_another_as_often_as_stated():
    again = evidence.sheet("adadp").again
    rng, told = np.random.default_rng(1), []
    for _ in range(4000):
        draws = rng.normal(90.0, 2.0, size=(2, 5))
        rows = [[{again.value: str(value)} for value in each] for each in draws]
        told.append(not evidence.same_law(*rows, again))
    assert 0 <= sum(told) <= 12  # 4 are expected


@pytest.mark.quick
def test_the_marks_are_of_this_code():
    """Whoever changes code that decides results runs ``python -m studies.evidence``."""
    text = (evidence.FOLDER / "README.md").read_text("utf-8")
    text = text.partition(evidence.BEGIN)[2].partition(evidence.END)[0]
    said = dict(re.findall(r"^\| \[(\w+)\].* \| ([^|]+) \|$", text, re.MULTILINE))
    for line in evidence.marks({name: said[name] for name in NAMES}).splitlines():
        # The environment is that of whoever marked.
        assert line.partition(";")[0] in text, "run python -m studies.evidence"
    assert OTHER not in text
