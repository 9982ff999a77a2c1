"""What a charge rests on that is public is under the chain; a unit that nothing enforces is said so."""

from __future__ import annotations

import copy
import json

import pytest

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Admission,
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    UnitMismatchError,
    export_certificate,
    render_certificate,
    verify,
    verify_certificate,
)
from privtune.ledger.values import check_unit

pytestmark = pytest.mark.quick

FACTS = {"training records": "1,077, private", "classes": "ill, well"}


@pytest.mark.parametrize("unit", ["2", " person", "a  b", "pers<b>on", "x" * 41, "per.son", "a-"])
def test_a_unit_is_a_word(sqlite_url: str, unit: str) -> None:
    with Ledger(sqlite_url) as ledger:
        with pytest.raises(InvalidInputError, match="1 to 40 letters"):
            ledger.create_budget(Budget(1.0, 1e-5, name="b", unit=unit))
        assert ledger.budgets() == ()
    assert check_unit("Ärztin-Monat 2") == "Ärztin-Monat 2"


@pytest.mark.parametrize(("budgets", "asked"), [("person", "record"), ("record", "person")])
def test_a_charge_of_another_unit_is_refused(sqlite_url: str, budgets: str, asked: str) -> None:
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b", unit=budgets))
        request = ChargeRequest(Gaussian(5.0), arm="a", unit=asked)
        for charge in (lambda: ledger.reserve("b", [request]), lambda: ledger.record("b", request)):
            with pytest.raises(UnitMismatchError, match=f"Arm 'a' .* protects every {budgets}"):
                charge()
        assert ledger.charges("b") == ()
        right = ChargeRequest(Gaussian(5.0), unit=budgets)
        assert [c.unit for c in ledger.reserve("b", [right])] == [budgets]


def test_the_unit_is_under_the_chain(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b", unit="person"))
        ledger.reserve("b", [ChargeRequest(Gaussian(5.0), unit="person")])
        assert verify(ledger.log.storage, "b").charges == 1
        certificate = json.loads(json.dumps(export_certificate(ledger.log.storage, "b")))
    assert verify_certificate(certificate).charges == 1
    assert "differentially private per person" in render_certificate(certificate)
    for entry, change in (
        (0, {"terms": {**Budget(3.0, 1e-5, name="b").to_dict()}}),
        (1, {"unit": "hospital"}),
    ):
        edited = copy.deepcopy(certificate)
        edited["entries"][entry]["body"].update(change)
        with pytest.raises(LedgerCorruptedError, match=f"entry {entry + 1} .* content"):
            verify_certificate(edited)
    edited = copy.deepcopy(certificate)
    del edited["charges"][0]["unit"]
    with pytest.raises(LedgerCorruptedError, match="'charges'"):
        verify_certificate(edited)


def test_public_facts_are_under_the_chain(sqlite_url: str) -> None:
    with pytest.raises(InvalidInputError, match="texts by name"):
        ChargeRequest(Gaussian(1.0), public={"training records": 3})  # type: ignore[dict-item]
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
        asked = [
            ChargeRequest(Gaussian(5.0), study="s", arm=arm, public=FACTS) for arm in ("one", "two")
        ]
        ledger.reserve("b", [*asked, ChargeRequest(Gaussian(9.0), note="none declared")])
        certificate = export_certificate(ledger.log.storage, "b")
        assert verify(ledger.log.storage, "b").entries == 4
    assert verify_certificate(certificate).charges == 3
    first, second, third = (entry["body"] for entry in certificate["entries"][1:])
    assert first["public"] == second["public"] == FACTS
    keys = {"event", "study", "arm", "note", "plan_digest", "basis", "unit"}
    assert set(third) == keys
    for charge in certificate["charges"]:
        assert set(charge) == {*keys, "id", "state", "dataset"}

    edited = copy.deepcopy(certificate)
    edited["entries"][1]["body"]["public"]["training records"] = "10,770, private"
    with pytest.raises(LedgerCorruptedError, match=r"entry 2 .* content"):
        verify_certificate(edited)

    page = render_certificate(certificate)
    assert page.count("1,077, private") == 1, "arms that share a list share it on the page"


def test_a_certificate_says_which_rule_binds(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger:
        for name in ("adaptive", "declared"):
            ledger.create_budget(Budget(3.0, 1e-5, name=name, admission=Admission(name)))
            ledger.reserve(name, [ChargeRequest(Gaussian(8.0))])
        storage = ledger.log.storage
        for name in ("adaptive", "declared"):
            page = render_certificate(export_certificate(storage, name))
            assert "It also decides what may be charged until a run has started" in page
        ledger.start("declared-1")
        page = render_certificate(export_certificate(storage, "declared"))
    assert "Nothing more can be charged, since a run has started" in page
    assert "filter alone decides" not in page


def test_a_certificate_states_the_filter_that_decided_and_no_other(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ledger.start(ledger.reserve("clinic", [ChargeRequest(Gaussian(8.0))])[0].id)
        quiet = export_certificate(ledger.log.storage, "clinic")
        ledger.reserve("clinic", [ChargeRequest(Gaussian(20.0))])
        later = export_certificate(ledger.log.storage, "clinic")
    assert "filter" not in quiet
    assert later["filter"]["used"] > 0.0
    assert [verify_certificate(certificate).charges for certificate in (quiet, later)] == [1, 2]
    assert "no charge went through it" in render_certificate(quiet)
    binding = "refuses nothing. The privacy filter alone decides what may still be charged"
    assert [binding in render_certificate(certificate) for certificate in (quiet, later)] == [
        True,
        True,
    ]
    with pytest.raises(LedgerCorruptedError):
        verify_certificate({key: value for key, value in later.items() if key != "filter"})
    with pytest.raises(LedgerCorruptedError, match="no privtune-certificate of version 5"):
        verify_certificate({**later, "version": 4})
