"""An honest ledger of a version whose accounts were a little lower: a warning, not corruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from privtune.accounting import Composed, Gaussian, epsilon
from privtune.ledger import (
    Budget,
    BudgetExceededError,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    verify,
    verify_certificate,
)
from privtune.ledger.chain import digest_of
from tests.ledger.test_tampering import check, rewritten

BLOCK = (Gaussian(4.0), Gaussian(5.0))
COST = epsilon(Composed(BLOCK), 1e-5).epsilon


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    """A declared block of two, the first started, and one charge that passed the filter."""
    with Ledger(sqlite_url) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        first, _ = opened.reserve("b", [ChargeRequest(event) for event in BLOCK])
        opened.start(first.id)
        opened.reserve("b", [ChargeRequest(Gaussian(3.0))])
        yield opened


def lighter(share: float) -> Any:
    """The filter's charge as a version noted it whose divergences are lower by a share."""

    def change(seq: int, body: dict[str, Any]) -> dict[str, Any]:
        if seq == 5:
            body["weight"][0] /= 1.0 + share
        return body

    return change


def test_a_weight_that_is_higher_today_is_a_warning(ledger: Ledger) -> None:
    honest = verify(ledger.log.storage, "b").guarantee.bounds["filter"]
    rewritten(ledger, lighter(0.009))
    found = verify(ledger.log.storage, "b")
    assert found.within_budget
    [warning] = [text for text in found.warnings if "version's account" in text]
    assert "1 admissions (entry 5)" in warning
    assert "0.9%" in warning
    # What is printed holds for the weight of today, which is above the noted one.
    assert honest <= found.guarantee.bounds["filter"] <= honest + 0.009 * 4.0
    certificate = export_certificate(ledger.log.storage, "b")
    assert verify_certificate(certificate).warnings == found.warnings[-1:]


def test_rounding_is_not_worth_a_word(ledger: Ledger) -> None:
    rewritten(ledger, lighter(1e-7))
    assert not [t for t in verify(ledger.log.storage, "b").warnings if "account" in t]


def shrunk(share: float) -> Any:
    """A budget that the block exceeds by a share, by today's account."""

    def change(seq: int, body: dict[str, Any]) -> dict[str, Any]:
        if seq == 1:
            body["terms"]["epsilon"] = COST / (1.0 + share)
        return body

    return change


@pytest.fixture
def declared(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path}/declared.db") as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        opened.reserve("b", [ChargeRequest(event) for event in BLOCK])
        yield opened


def test_a_block_that_costs_a_little_more_today_is_a_warning(declared: Ledger) -> None:
    rewritten(declared, shrunk(0.008))
    found = verify(declared.log.storage, "b")
    assert found.within_budget
    assert found.guarantee.epsilon == pytest.approx(COST)
    assert "0.8%" in found.warnings[-1]
    # It admits nothing more: what counts from now on is the account of today.
    with Ledger(declared.url) as fresh, pytest.raises(BudgetExceededError):
        fresh.reserve("b", [ChargeRequest(Gaussian(1e6))])


def test_nothing_is_forgiven_where_no_rule_admitted(sqlite_url: str) -> None:
    """A recorded release that exceeds the budget by half a percent breaks it."""
    with Ledger(sqlite_url) as opened:
        opened.create_budget(Budget(COST / 1.005, 1e-5, name="b"))
        opened.reserve("b", [ChargeRequest(BLOCK[0])])
        opened.record("b", ChargeRequest(BLOCK[1]))
        found = verify(opened.log.storage, "b")
    assert not found.within_budget
    assert "THE BUDGET IS BROKEN" in found.warnings[0]


def edited(certificate: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """A certificate with other numbers, as another version would have written them."""
    rest = {**certificate, part: {**certificate[part], **changes}}
    del rest["digest"]
    return {**rest, "digest": digest_of(rest)}


def test_a_certificate_of_looser_accounts_with_other_bounds_verifies(ledger: Ledger) -> None:
    there = export_certificate(ledger.log.storage, "b")
    more = 1.3 * there["guarantee"]["epsilon"]
    loose = edited(there, "guarantee", epsilon=more, method="rdp", bounds={"rdp": 9.0})
    assert verify_certificate(loose).charges == 3
    less = 0.7 * there["filter"]["capacity"]
    assert verify_certificate(edited(there, "filter", capacity=less)).charges == 3


@pytest.mark.parametrize(
    ("part", "name", "factor"),
    [
        ("guarantee", "epsilon", 0.7),
        ("filter", "capacity", 1.05),
        ("filter", "used", 0.9),
        ("filter", "order", 1.5),
        ("guarantee", "delta", 0.5),
    ],
)
def test_one_that_promises_more_than_its_entries_give_was_edited(
    ledger: Ledger, part: str, name: str, factor: float
) -> None:
    there = export_certificate(ledger.log.storage, "b")
    with pytest.raises(LedgerCorruptedError, match=f"'{part}' is not what its entries say"):
        verify_certificate(edited(there, part, **{name: factor * there[part][name]}))


def test_more_than_a_hundredth_is_no_version(ledger: Ledger, declared: Ledger) -> None:
    rewritten(ledger, lighter(0.011))
    assert "entry 5 of budget 'b' is wrong: it weighs more than it notes" in check(ledger)
    rewritten(declared, shrunk(0.012))
    assert "more than the budget's" in check(declared)
