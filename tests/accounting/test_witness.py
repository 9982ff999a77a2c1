"""autodp and dp-accounting as witnesses: beside ours, and against it where ours promises too much."""

from __future__ import annotations

import uuid

import pytest

from privtune.accounting import (
    Adjacency,
    Gaussian,
    Geometric,
    Laplace,
    PoissonSampled,
    PrivateSelection,
    Repeated,
)
from privtune.accounting import witness as witnesses
from privtune.accounting.witness import DisputedAccountError, ask_witnesses, autodp_epsilon
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    verify_certificate,
)
from privtune.ledger.certificate import _digest

DELTA = 1e-5
TRAINING = Repeated(400, PoissonSampled(0.05, Gaussian(2.0)))


@pytest.mark.parametrize(
    "event",
    [
        TRAINING,
        Gaussian(1.0),
        Laplace(2.0),
        Repeated(100, PoissonSampled(0.01, Laplace(1.0))),
        PrivateSelection(TRAINING, Geometric(10.0)),
        Repeated(100_000, PoissonSampled(1e-4, Gaussian(1.0))),
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
    assert autodp_epsilon(TRAINING, DELTA, adjacency=Adjacency.ADD_REMOVE) == pytest.approx(
        2.4627, abs=2e-3
    )
    with pytest.raises(DisputedAccountError, match="no word for the best of several runs"):
        autodp_epsilon(
            PrivateSelection(TRAINING, Geometric(5.0)), DELTA, adjacency=Adjacency.ADD_REMOVE
        )


@pytest.fixture
def certified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return certificate_of()


def certificate_of():
    with Ledger(f"sqlite:///{uuid.uuid4().hex}.db") as ledger:
        ledger.create_budget(Budget(8.0, DELTA, name="clinic"))
        ledger.reserve("clinic", [ChargeRequest(TRAINING), ChargeRequest(Gaussian(4.0))])
        return export_certificate(ledger.log.storage, "clinic", witnessed=True)


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
        verify_certificate({**rest, "digest": _digest(rest)})


@pytest.mark.parametrize(
    "event", [TRAINING, PrivateSelection(TRAINING, Geometric(3.0))], ids=["training", "in a whole"]
)
def test_autodp_objects_to_curves_that_promise_too_much(event, monkeypatch):
    """Where autodp has a word for all of it; what it has none for, no witness vouches for."""
    monkeypatch.setattr(witnesses, "rdp_epsilon", lambda curve, delta: 0.5)
    said = ask_witnesses(event, DELTA)
    if event is TRAINING:
        assert said.objection.startswith("autodp RDP says epsilon = 2.46")
    else:
        assert said.objection == ""
        [answer] = [answer for answer in said.witnesses if answer.tool == "autodp RDP"]
        assert answer.epsilon is None
        assert "no word" in answer.why


def test_an_account_that_promises_too_much_is_not_certified(monkeypatch, certified):
    real = witnesses.compare

    def cheaper(event, delta, **rest):
        found = real(event, delta, **rest)
        half = type(found.ours)(found.ours.epsilon / 2.0, delta, "pld", found.ours.adjacency, {})
        return type(found)(half, found.lower, found.others)

    certificate = certified
    monkeypatch.setattr(witnesses, "compare", cheaper)
    assert "dp-accounting PLD" in ask_witnesses(TRAINING, DELTA).objection
    with pytest.raises(DisputedAccountError, match="Nothing is certified"):
        certificate_of()
    with pytest.raises(DisputedAccountError, match="clinic-1"):
        verify_certificate(certificate)
