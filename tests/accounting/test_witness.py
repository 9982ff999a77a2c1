"""Other accountants beside ours, as witnesses against it, and the table of them in the docs."""

from __future__ import annotations

import importlib.util
import math
import uuid
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import privtune.accounting as dp
from privtune.accounting.compare import (
    TOOLS,
    DisputedAccountError,
    ask_witnesses,
    autodp_epsilon,
    compare,
    proved_by_dp_accounting,
)
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    verify_certificate,
)
from privtune.ledger.chain import digest_of
from tests.tiers import FULL

DELTA = 1e-5
TRAINING = dp.Repeated(400, dp.PoissonSampled(0.05, dp.Gaussian(2.0)))


@pytest.mark.parametrize(
    "event",
    [
        TRAINING,
        dp.Gaussian(1.0),
        dp.Laplace(2.0),
        dp.Repeated(100, dp.PoissonSampled(0.01, dp.Laplace(1.0))),
        dp.PrivateSelection(TRAINING, dp.Geometric(10.0)),
        dp.Repeated(100_000, dp.PoissonSampled(1e-4, dp.Gaussian(1.0))),
    ],
    ids=lambda event: event.type,
)
def test_nobody_objects_to_a_sound_account(event):
    said = ask_witnesses(event, DELTA)
    assert said.objection == ""
    assert said.lower <= said.ours <= said.composed * (1 + 1e-9)


@pytest.mark.quick
def test_autodp_answers_by_its_own_mechanisms():
    # autodp 0.2.3.1, ExactGaussianMechanism(2.0) on Poisson samples of rate 0.05, 400 of them.
    assert autodp_epsilon(TRAINING, DELTA, adjacency=dp.Adjacency.ADD_REMOVE) == pytest.approx(
        2.4627, abs=2e-3
    )
    with pytest.raises(DisputedAccountError, match="no word for the best of several runs"):
        autodp_epsilon(
            dp.PrivateSelection(TRAINING, dp.Geometric(5.0)),
            DELTA,
            adjacency=dp.Adjacency.ADD_REMOVE,
        )


def exported(events, *, delta=DELTA):
    with Ledger(f"sqlite:///{uuid.uuid4().hex}.db") as ledger:
        ledger.create_budget(Budget(200.0, delta, name="clinic"))
        ledger.reserve("clinic", [ChargeRequest(event) for event in events])
        return export_certificate(ledger.log.storage, "clinic", witnessed=True)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def certified():
    return exported([TRAINING, dp.Gaussian(4.0)])


def test_a_certificate_says_what_the_witnesses_say_and_verifies(certified):
    certificate = certified
    said = certificate["witnesses"]
    assert list(said) == ["clinic-1", "clinic-2", "all together"]
    assert said["clinic-1"]["witnesses"][0]["tool"] == "autodp RDP"
    assert said["all together"]["ours"] == pytest.approx(certificate["guarantee"]["epsilon"])
    assert verify_certificate(certificate).charges == 2


def test_a_testimony_that_was_edited_is_found(certified):
    certificate = certified
    certificate["witnesses"]["clinic-1"]["witnesses"][0]["epsilon"] = 1.0
    rest = {key: value for key, value in certificate.items() if key != "digest"}
    with pytest.raises(LedgerCorruptedError, match="witnesses"):
        verify_certificate({**rest, "digest": digest_of(rest)})


LOOSE = dp.Repeated(
    100, dp.PoissonSampled(0.01, dp.Gaussian(0.514))
)  # autodp's bound is 1.4 times the truth


@pytest.mark.parametrize("delta", [1e-5, 8e-7])
def test_a_looser_witness_is_recorded_and_blocks_nothing(delta):
    said = exported([LOOSE], delta=delta)["witnesses"]["clinic-1"]
    numbers = {answer["tool"]: answer["epsilon"] for answer in said["witnesses"]}
    assert numbers["autodp RDP"] > 1.15 * said["composed_by_autodp"]
    assert said["lower"] <= said["ours"] <= 1.002 * said["lower"]


def test_honest_budgets_are_certified():
    """Five random charges a budget, and each budget as a whole; the seed is fixed."""
    rng = np.random.default_rng(36)
    for _ in range(12 if FULL else 1):
        events = []
        for _ in range(5):
            rate, noise = 10.0 ** rng.uniform(-3.0, -0.7), rng.uniform(0.5, 3.0)
            kind = rng.integers(8)
            step = dp.Laplace(noise) if kind == 0 else dp.Gaussian(noise)
            event = dp.Repeated(int(10.0 ** rng.uniform(0.5, 2.0)), dp.PoissonSampled(rate, step))
            events.append(dp.PrivateSelection(event, dp.Geometric(5.0)) if kind == 1 else event)
        said = exported(events)["witnesses"]
        assert len(said) == 6
        for name, one in said.items():
            assert one["lower"] <= one["ours"], name


def noise_scaled(event):
    """The event as an accountant sees it that takes all noise for 1.1 times what it is."""
    if isinstance(event, dp.Gaussian | dp.Laplace):
        return type(event)(1.1 * event.noise_multiplier)
    return event.rebuild([noise_scaled(child) for child in event.children()])


def fewer(event):
    """The event as an accountant sees it that loses a tenth of every count."""
    if isinstance(event, dp.Repeated):
        return dp.Repeated(event.count - event.count // 10, event.event)
    return event.rebuild([fewer(child) for child in event.children()])


@pytest.mark.parametrize(
    ("event", "prover", "mistake"),
    [
        (LOOSE, "an explicit mechanism", noise_scaled),
        (LOOSE, "dp-accounting", fewer),
        (dp.PrivateSelection(TRAINING, dp.Geometric(5.0)), "an explicit mechanism", noise_scaled),
    ],
    ids=["training", "by dp-accounting alone", "selection"],
)
def test_an_account_that_promises_too_much_is_not_certified(event, prover, mistake, monkeypatch):
    """The mistake is in our account alone; where only dp-accounting proves, in our instance, too."""
    certificate = exported([event])
    account = dp.accountant._answer
    monkeypatch.setattr(dp.accountant, "_answer", lambda e, *rest: account(mistake(e), *rest))
    if prover == "dp-accounting":
        instance = dp.accountant.instance_epsilon
        monkeypatch.setattr(
            dp.accountant, "instance_epsilon", lambda e, delta: instance(mistake(e), delta)
        )
    assert prover in ask_witnesses(event, DELTA).objection
    with pytest.raises(DisputedAccountError, match=r"clinic-1: .*Nothing is certified"):
        exported([event])
    with pytest.raises(DisputedAccountError, match="clinic-1"):
        verify_certificate(certificate)


@pytest.mark.parametrize("rate", [1.0, 0.05])
@pytest.mark.parametrize("count", [1, 20])
def test_what_dp_accounting_proves_is_below_the_exact_epsilon(rate, count):
    """Where the exact profile is known: one step by quadrature, Gaussians in closed form."""
    step = dp.Gaussian(2.0) if rate == 1.0 else dp.PoissonSampled(rate, dp.Gaussian(2.0))
    proved = proved_by_dp_accounting(dp.Repeated(count, step), DELTA)
    if rate == 1.0:
        mu = math.sqrt(count) / 2.0
        shift = proved / mu
        exact = stats.norm.cdf(mu / 2 - shift) - math.exp(proved) * stats.norm.cdf(-mu / 2 - shift)
        assert DELTA < exact < 1.02 * DELTA
    elif count == 1:
        x = np.linspace(-40.0, 41.0, 400_001)
        without = stats.norm.pdf(x, 0.0, 2.0)
        gain = (
            (1 - rate) * without + rate * stats.norm.pdf(x, 1.0, 2.0) - math.exp(proved) * without
        )
        assert DELTA < np.trapezoid(np.maximum(gain, 0.0), x) < 1.02 * DELTA
    assert proved_by_dp_accounting(dp.PrivateSelection(step, dp.Geometric(3.0)), DELTA) == 0.0


def test_a_coarse_base_blocks_no_honest_export():
    """A base of few outcomes: two lattices differ there by more than the bound that they stood for."""
    event = dp.PrivateSelection(
        dp.PoissonSampled(0.2, dp.Laplace(0.8)), dp.Logarithmic(305.0, minimum=5)
    )
    assert ask_witnesses(event, 1e-9).objection == ""


RUN = Path(__file__).parents[2] / "studies" / "benchmarks" / "accountants" / "run.py"


def answers(event, delta=1e-5):
    return {other.tool: other for other in compare(event, delta).others}


def test_each_is_asked_for_the_same_event():
    """Their numbers, by their own functions, for two trainings in one composition."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from opacus.accountants import PRVAccountant, RDPAccountant

    both = dp.Composed([TRAINING, dp.Repeated(100, dp.PoissonSampled(0.02, dp.Gaussian(1.5)))])
    found = answers(both)
    step = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(2.0))
    other = dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.5))
    pld = PLDAccountant().compose(step, 400).compose(other, 100).get_epsilon(1e-5)
    assert found["dp-accounting PLD"].epsilon == pytest.approx(pld, rel=1e-9)
    for tool, theirs in (("Opacus RDP", RDPAccountant()), ("Opacus PRV", PRVAccountant())):
        for _ in range(400):
            theirs.step(noise_multiplier=2.0, sample_rate=0.05)
        for _ in range(100):
            theirs.step(noise_multiplier=1.5, sample_rate=0.02)
        assert found[tool].epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)
    ours = dp.epsilon(both, 1e-5).epsilon
    assert all(other.epsilon >= ours * 0.998 for other in found.values())
    assert found["autodp RDP"].epsilon == pytest.approx(found["Opacus RDP"].epsilon, rel=0.01)
    assert "They agree." in found["dp-accounting PLD"].why
    assert "needs no conversion" in found["Opacus RDP"].why


@pytest.mark.parametrize(
    ("event", "can"),
    [
        (dp.Laplace(2.0), {"dp-accounting PLD", "dp-accounting RDP", "autodp RDP"}),
        (dp.PrivateSelection(TRAINING, dp.Geometric(10)), {"dp-accounting RDP"}),
        (dp.PrivateSelection(TRAINING, dp.Poisson(10)), {"dp-accounting RDP"}),
        (dp.PrivateSelection(TRAINING, dp.Geometric(10, maximum=30)), set()),
        (dp.ApproximateDP(1.0, 1e-6), set()),
        (dp.NonPrivate(), set()),
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
    found = answers(TRAINING)
    assert found["breaks"].epsilon is None
    assert found["breaks"].why == "It fails (RuntimeError)."
    assert found["nan"].epsilon is None
    assert "Not an upper bound" in found["low"].why


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
