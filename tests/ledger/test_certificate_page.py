"""The page on certificates: its program finds every edit, its formulas give the certificate's numbers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.ledger import Budget, ChargeRequest, Ledger, export_certificate

PAGE = (Path(__file__).parents[2] / "docs/certificates.md").read_text("utf-8")
DELTA = 1e-5


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Any]:
    """A certificate of a budget without a declared block: each charge came after the start of another."""
    with Ledger(tmp_path / "p.db") as ledger:
        ledger.create_budget(Budget(4.0, DELTA, name="clinic"))
        for noise_multiplier in (2.0, 3.0):
            event = Repeated(100, PoissonSampled(0.01, Gaussian(noise_multiplier)))
            ledger.reserve("clinic", [ChargeRequest(event, note="a training")], start=True)
        document = export_certificate(ledger.log.storage, "clinic")
    return json.loads(json.dumps(document))


def run_program(certificate: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    path = folder / "certificate.json"
    path.write_text(json.dumps(certificate))
    return subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )


def test_the_program_of_the_page_accepts_what_was_exported(
    certificate: dict[str, Any], tmp_path: Path
) -> None:
    done = run_program(certificate, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 charges: ")


@pytest.mark.parametrize("edit", ["digest", "body", "sealed", "removed"])
def test_the_program_of_the_page_refuses_an_edit(
    certificate: dict[str, Any], tmp_path: Path, edit: str
) -> None:
    entries = certificate["entries"]
    if edit == "digest":
        certificate["within_budget"] = False
    elif edit == "body":
        entries[1]["body"]["note"] = "another"
    elif edit == "sealed":
        entries[1]["sealed"] = "0" * 64
    else:
        del entries[-1]
    done = run_program(certificate, tmp_path)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_the_formulas_of_the_page_give_the_filter(tmp_path: Path) -> None:
    """Of a block that costs next to nothing the capacity is the usual conversion's."""
    with Ledger(tmp_path / "p.db") as ledger:
        ledger.create_budget(Budget(4.0, DELTA, name="clinic"))
        ledger.reserve("clinic", [ChargeRequest(Gaussian(1e6), note="nearly nothing")], start=True)
        sampled = PoissonSampled(0.01, Gaussian(2.0))
        later = ChargeRequest(Repeated(500, sampled), note="a training")
        ledger.reserve("clinic", [later], start=True)
        state = export_certificate(ledger.log.storage, "clinic")["filter"]
    order = state["order"]
    log_delta = math.log(0.8 * order * DELTA)
    slack = log_delta + (order - 1) * math.log(order / (order - 1))
    expected = 4.0 + slack / (order - 1)
    assert state["capacity"] == pytest.approx(expected, rel=2e-3)
    assert state["capacity"] <= expected
    accountant = RdpAccountant([order])
    gaussian = dp_event.GaussianDpEvent(2.0)
    accountant.compose(dp_event.PoissonSampledDpEvent(0.01, gaussian), 500)
    assert state["used"] == pytest.approx(accountant._rdp[0], rel=1e-6)
    assert state["delta_capacity"] == pytest.approx(0.1 * DELTA)
