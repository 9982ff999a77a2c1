"""What a charge rests on that is public is under the chain; a unit that nothing enforces is said so."""

from __future__ import annotations

import copy
import json

import pytest

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    render_certificate,
    unit_note,
    verify,
    verify_certificate,
)
from tests.ledger.old import make_hospital

pytestmark = pytest.mark.quick

FACTS = {"training records": "1,077, private", "classes": "ill, <b>well</b>"}


def test_a_new_budget_is_per_record(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger:
        with pytest.raises(InvalidInputError, match="must be 'record'"):
            ledger.create_budget(Budget(1.0, 1e-5, name="b", unit="hospital"))
        assert ledger.budgets() == ()


def test_an_old_unit_opens_verifies_and_promises_nothing(sqlite_url: str) -> None:
    with Ledger(make_hospital(sqlite_url)) as ledger:
        terms = ledger.budget("old")
        assert terms.unit == "hospital"
        assert ledger.create_budget(terms) == terms, "what is there stays as it is"
        assert verify(ledger.log.storage, "old").charges == 1
        ledger.reserve("old", [ChargeRequest(Gaussian(9.0))])
        certificate = json.loads(json.dumps(export_certificate(ledger.log.storage, "old")))
    assert verify_certificate(certificate).charges == 2
    assert certificate["unit_note"] == unit_note("hospital")
    page = render_certificate(certificate)
    assert "differentially private per record" in page
    assert "is not enforced: the guarantee is per record" in page
    assert "per hospital" not in page


def test_public_facts_are_under_the_chain(sqlite_url: str) -> None:
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
    # What an older version writes, and reads, is as it was.
    keys = {"event", "study", "arm", "note", "plan_digest", "basis"}
    assert set(third) == keys
    for charge in certificate["charges"]:
        assert set(charge) == {*keys, "id", "state"}
    assert "unit_note" not in certificate

    edited = copy.deepcopy(certificate)
    edited["entries"][1]["body"]["public"]["training records"] = "10,770, private"
    with pytest.raises(LedgerCorruptedError, match=r"entry 2 .* content"):
        verify_certificate(edited)

    page = render_certificate(certificate)
    assert page.count("1,077, private") == 1, "arms that share a list share it on the page"
    assert "s / one, s / two" in page
    assert "&lt;b&gt;well&lt;/b&gt;" in page


def test_public_facts_are_texts() -> None:
    with pytest.raises(InvalidInputError, match="texts by name"):
        ChargeRequest(Gaussian(1.0), public={"training records": 3})  # type: ignore[dict-item]
