"""Other accountants beside ours: each is asked what it can say, and the table in the docs is that."""

import importlib.util
import math
from pathlib import Path

import pytest

from privtune.accounting import (
    ApproximateDP,
    Composed,
    Gaussian,
    Geometric,
    Laplace,
    NonPrivate,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    epsilon,
)
from privtune.accounting.compare import TOOLS, compare

STEPS = Repeated(400, PoissonSampled(0.05, Gaussian(2.0)))
RUN = Path(__file__).parents[2] / "studies" / "benchmarks" / "accountants" / "run.py"


def answers(event, delta=1e-5):
    return {other.tool: other for other in compare(event, delta).others}


def test_each_is_asked_for_the_same_event():
    """Their numbers, by their own functions, for two trainings in one composition."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from opacus.accountants import PRVAccountant, RDPAccountant

    both = Composed([STEPS, Repeated(100, PoissonSampled(0.02, Gaussian(1.5)))])
    found = answers(both)
    step = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(2.0))
    other = dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.5))
    pld = PLDAccountant().compose(step, 400).compose(other, 100).get_epsilon(1e-5)
    assert found["dp-accounting PLD"].epsilon == pytest.approx(pld, rel=1e-9)
    for tool, accountant in (("Opacus RDP", RDPAccountant()), ("Opacus PRV", PRVAccountant())):
        for _ in range(400):
            accountant.step(noise_multiplier=2.0, sample_rate=0.05)
        for _ in range(100):
            accountant.step(noise_multiplier=1.5, sample_rate=0.02)
        assert found[tool].epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    ours = epsilon(both, 1e-5).epsilon
    assert all(other.epsilon >= ours * 0.998 for other in found.values())
    assert found["autodp RDP"].epsilon == pytest.approx(found["Opacus RDP"].epsilon, rel=0.01)
    assert "They agree." in found["dp-accounting PLD"].why
    assert "does not convert" in found["Opacus RDP"].why


@pytest.mark.parametrize(
    ("event", "can"),
    [
        (Laplace(2.0), {"dp-accounting PLD", "dp-accounting RDP", "autodp RDP"}),
        (PrivateSelection(STEPS, Geometric(10)), {"dp-accounting RDP"}),
        (PrivateSelection(STEPS, Poisson(10)), {"dp-accounting RDP"}),
        (PrivateSelection(STEPS, Geometric(10, maximum=30)), set()),
        (ApproximateDP(1.0, 1e-6), set()),
        (NonPrivate(), set()),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_who_cannot_says_so(event, can):
    found = answers(event)
    assert {tool for tool, other in found.items() if other.epsilon is not None} == can
    for other in found.values():
        assert other.why.endswith(".")
        assert (other.epsilon is None) == other.why.startswith("It has no word for")


def test_what_a_library_does_is_no_crash_and_never_a_number(monkeypatch):
    def breaks(parts, delta):
        raise RuntimeError("odd")

    odd = {"breaks": breaks, "nan": lambda *_: math.nan, "low": lambda *_: 0.1}
    for tool, ask in odd.items():
        monkeypatch.setitem(TOOLS, tool, ask)
    found = answers(STEPS)
    assert found["breaks"].epsilon is None
    assert found["breaks"].why == "It fails (RuntimeError)."
    assert found["nan"].epsilon is None
    assert "no upper bound" in found["low"].why


def table():
    spec = importlib.util.spec_from_file_location("accountants", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(line):
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


def test_the_table_is_what_they_say():
    module = table()
    lines = module.TABLE.read_text(encoding="utf-8").splitlines()
    rows = {cells(line)[0]: cells(line) for line in lines if line.startswith("| ")}
    assert set(module.EVENTS) == set(rows) - {"event", "---"}
    assert rows["event"][3:] == list(TOOLS)
    sample = list(module.EVENTS)[::7]
    assert len(sample) == 3
    for name in sample:
        for there, now in zip(rows[name][1:], cells(module.row(name))[1:], strict=True):
            assert there == now == "cannot" or float(there) == pytest.approx(float(now), rel=0.01)
