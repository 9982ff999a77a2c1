"""Recorded results and the code that made them; a run that is stopped."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time

import pytest

from studies.evidence import DECIDES, PACKAGE, digest_of, plain
from studies.selection_against_adaptation.run import SHEET
from tests.tiers import PATIENCE, ROOT


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
    command = [sys.executable, "-m", "studies.selection_against_adaptation.run", "--out", str(out)]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + PATIENCE
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.1)
    running.send_signal(number)
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130
    assert said == "Stopped. What is done stays; the same command goes on.\n"
    before = SHEET.read(out)
    assert SHEET.main(["--out", str(out), "--minutes", "0"]) == 0  # one cell more
    after = SHEET.read(out)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1
