"""A ledger and a certificate that an older version wrote, odd names and notes included."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Budget,
    BudgetExceededError,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    render_certificate,
    upgrade_storage,
    verify,
    verify_certificate,
    write_file,
)

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """The budget `clinic`, with a round; and `mlflow`, a name of today no more, overspent."""
    path = tmp_path / "old.db"
    connection = sqlite3.connect(path)
    connection.executescript((GOLDEN / "v1-ledger.sql").read_text())
    connection.close()
    upgrade_storage(f"sqlite:///{path}")
    with Ledger(f"sqlite:///{path}") as opened:
        yield opened


def test_an_old_ledger_opens_verifies_and_goes_on(ledger: Ledger) -> None:
    found = verify(ledger.log.storage, "clinic")
    assert (found.entries, found.charges, found.within_budget) == (8, 3, True)
    assert "cannot be told" in found.warnings[0]
    assert [charge.note for charge in ledger.charges("clinic")] == ["one", "", "hélo"]
    ledger.settle(ledger.start("clinic-2").id)
    ledger.reserve("clinic", [ChargeRequest(Gaussian(9.0))])
    assert verify(ledger.log.storage, "clinic").warnings == ()


def test_an_old_name_is_found_and_not_made_anew(ledger: Ledger) -> None:
    terms = ledger.budget("mlflow")
    assert ledger.create_budget(terms) == terms
    found = verify(ledger.log.storage, "mlflow")
    assert not found.within_budget
    with pytest.raises(BudgetExceededError):
        ledger.reserve("mlflow", [ChargeRequest(Gaussian(99.0))])
    with pytest.raises(InvalidInputError, match="is reserved"):
        ledger.create_budget(Budget(1.0, 1e-5, name="MLflow"))


def test_a_note_with_half_a_pair_can_be_exported(ledger: Ledger, tmp_path: Path) -> None:
    """New ones are refused; what is in a log stays exportable."""
    certificate = export_certificate(ledger.log.storage, "mlflow")
    assert "\ud83d" in certificate["charges"][0]["note"]
    path = tmp_path / "certificate.json"
    write_file(path, json.dumps(certificate, ensure_ascii=False))
    assert verify_certificate(json.loads(path.read_text())).charges == 1


def test_an_old_certificate_verifies() -> None:
    certificate = json.loads((GOLDEN / "v1-certificate.json").read_text())
    assert certificate["version"] == 1
    found = verify_certificate(certificate)
    assert (found.entries, found.charges, found.within_budget) == (8, 3, True)
    with pytest.raises(LedgerCorruptedError):
        verify_certificate({**certificate, "exported_at": "2026-01-01"})


def test_a_certificate_that_always_states_its_filter_verifies() -> None:
    certificate = json.loads((GOLDEN / "v2-certificate.json").read_text())
    assert (certificate["version"], certificate["filter"]["in_force"]) == (2, True)
    assert verify_certificate(certificate).charges == 2
    capacity = 1.1 * certificate["filter"]["capacity"]
    rewritten = {**certificate, "filter": {**certificate["filter"], "capacity": capacity}}
    with pytest.raises(LedgerCorruptedError, match="filter"):
        verify_certificate(rewritten)


def test_a_certificate_whose_log_notes_no_audits_verifies() -> None:
    certificate = json.loads((GOLDEN / "v3-certificate.json").read_text())
    assert certificate["version"] == 3
    assert [audit["passed"] for audit in certificate["audits"]] == [True]
    assert {entry["kind"] for entry in certificate["entries"]} == {
        "created", "reserved", "started", "settled",
    }  # fmt: skip
    assert verify_certificate(certificate).warnings == ()


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
    assert "nothing was admitted by it" in render_certificate(quiet)
    with pytest.raises(LedgerCorruptedError):
        verify_certificate({key: value for key, value in later.items() if key != "filter"})


def test_the_certificate_of_today_of_an_old_log(ledger: Ledger) -> None:
    certificate = export_certificate(ledger.log.storage, "clinic")
    old = json.loads((GOLDEN / "v1-certificate.json").read_text())
    assert (certificate["version"], certificate["head"]) == (4, old["head"])
    assert certificate["budget"]["created_at"] == old["budget"]["created_at"][:10]
    verify_certificate(certificate, head=old["head"])


def test_a_block_that_leaves_room_is_stated_at_its_part_of_delta() -> None:
    """Read at the whole δ beside the odometer's readings, who stops at will would learn more than it says."""
    certificate = json.loads((GOLDEN / "v2-certificate-block.json").read_text())
    with pytest.raises(LedgerCorruptedError, match="guarantee"):
        verify_certificate(certificate)
