"""Every edit of a log or a certificate is found, and named."""

from __future__ import annotations

import copy
import json
import math
import re
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
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
    UnknownBudgetError,
    export_certificate,
    render_certificate,
    verify,
    verify_certificate,
)
from privtune.ledger.chain import Entry, Kind, canonical, digest_of, sealed_digest
from privtune.ledger.log import Line, round_digest
from privtune.ledger.rounds import Rounds
from tests.ledger.conftest import complete_one, lease_one

TRANSCRIPT = 16 * "feed"  # as long as a digest: no other hash can hold it by accident


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    """Eight entries: created, two reserved, started, settled, reserved, voided, reserved."""
    with Ledger(sqlite_url) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b", dataset="clinic"))
        first, _ = opened.reserve(
            "b", [ChargeRequest(Gaussian(4.0), note="one"), ChargeRequest(Gaussian(5.0))]
        )
        opened.settle(opened.start(first.id).id, transcript_digest=TRANSCRIPT)
        [third] = opened.reserve("b", [ChargeRequest(Gaussian(9.0))])
        opened.void(third.id)
        opened.reserve("b", [ChargeRequest(Gaussian(9.0))])
        yield opened


def edit(ledger: Ledger, *statements: str) -> None:
    """Change the file behind the ledger's back, triggers and noted heads removed, as an attacker would."""
    path = ledger.log.storage.url.database
    assert path is not None
    Path(f"{path}-heads").unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        for verb in ("UPDATE", "DELETE"):
            connection.execute(f"DROP TRIGGER IF EXISTS privtune_entries_no_{verb}")
        for statement in statements:
            connection.execute(statement)
    connection.close()


def check(ledger: Ledger, head: str | None = None) -> str:
    with pytest.raises(LedgerCorruptedError) as caught:
        verify(ledger.log.storage, "b", head=head)
    return str(caught.value)


def test_a_sound_log_verifies(ledger: Ledger) -> None:
    found = verify(ledger.log.storage, "b", head=ledger.head("b"))
    assert (found.entries, found.charges, found.head) == (8, 4, ledger.head("b"))
    assert found.guarantee == ledger.spent("b")
    ledger.reserve("b", [ChargeRequest(Gaussian(20.0))])
    verify(ledger.log.storage, "b", head=found.head)  # an old head stays good when the log grows
    with pytest.raises(UnknownBudgetError):
        verify(ledger.log.storage, "c")


@pytest.mark.parametrize(
    "verb", ["UPDATE privtune_entries SET charge = 9", "DELETE FROM privtune_entries"]
)
def test_the_database_itself_refuses_edits(ledger: Ledger, verb: str) -> None:
    path = ledger.log.storage.url.database
    assert path is not None
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(verb)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE privtune_entries SET body = replace(body, '5', '50') WHERE seq = 3", "entry 3 .* content"),
        ("UPDATE privtune_entries SET kind = 'settled' WHERE seq = 7", "entry 7 .* content"),
        ("UPDATE privtune_entries SET sealed = sealed || ' ' WHERE seq = 5", "entry 5 .* content"),
        ("UPDATE privtune_entries SET hash = '00' WHERE seq = 4", "entry 4 .* content"),
        ("UPDATE privtune_entries SET charge = 2 WHERE seq = 4", "entry 4 .* content"),
        ("DELETE FROM privtune_entries WHERE seq = 6", "entry 7 .* entry 6 is missing"),
        ("DELETE FROM privtune_entries WHERE seq = 1", "entry 2 .* entry 1 is missing"),
        ("DELETE FROM privtune_entries WHERE seq = 8", "entry 8 .* is missing"),
        ("UPDATE privtune_budgets SET head = 'ff'", "entry 8 .* says otherwise"),
        ("UPDATE privtune_budgets SET charges = 1", "entry 8 .* says otherwise"),
    ],
)  # fmt: skip
def test_an_edited_log_is_named(ledger: Ledger, statement: str, says: str) -> None:
    edit(ledger, statement)
    with pytest.raises(LedgerCorruptedError, match=says):
        verify(ledger.log.storage, "b")


def test_reordered_rows_are_named(ledger: Ledger) -> None:
    edit(
        ledger,
        "UPDATE privtune_entries SET seq = 99 WHERE seq = 2",
        "UPDATE privtune_entries SET seq = 2 WHERE seq = 3",
        "UPDATE privtune_entries SET seq = 3 WHERE seq = 99",
    )
    assert "entry 2" in check(ledger)


def test_a_ledger_refuses_to_work_on_an_edited_log(ledger: Ledger) -> None:
    edit(ledger, "UPDATE privtune_entries SET body = replace(body, '5.0', '50.0') WHERE seq = 3")
    with Ledger(ledger.url) as fresh, pytest.raises(LedgerCorruptedError, match="entry 3"):
        fresh.reserve("b", [ChargeRequest(Gaussian(90.0))])


def truncate(ledger: Ledger) -> None:
    """Cut off the last entry and move the head back: the log is consistent in itself."""
    edit(
        ledger,
        "DELETE FROM privtune_entries WHERE seq = 8",
        "UPDATE privtune_budgets SET entries = 7, charges = 3, head = "
        "(SELECT hash FROM privtune_entries WHERE seq = 7)",
    )


def test_a_cut_tail_is_told_by_a_noted_head(ledger: Ledger) -> None:
    head = ledger.head("b")
    truncate(ledger)
    verify(ledger.log.storage, "b")
    assert "cut off, or rewritten" in check(ledger, head)
    with pytest.raises(LedgerCorruptedError, match="ends with entry"):
        ledger.spent("b")  # who had it open in memory notices as well


def rewritten(ledger: Ledger, change: Any) -> None:
    """Rewrite the log with all hashes anew, as somebody who knows the program would."""
    path = ledger.log.storage.url.database
    assert path is not None
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT seq, kind, charge, body, sealed FROM privtune_entries ORDER BY seq"
    ).fetchall()
    statements, previous = [], "0" * 64
    for seq, kind, charge, body, sealed in rows:
        text = canonical(change(seq, json.loads(body)))
        draft = Entry("b", seq, kind, charge, text, sealed_digest(sealed), previous, "")
        statements.append((text, previous, draft.computed_hash(), seq))
        previous = draft.computed_hash()
    edit(ledger)
    connection.executemany(
        "UPDATE privtune_entries SET body = ?, previous = ?, hash = ? WHERE seq = ?", statements
    )
    connection.execute("UPDATE privtune_budgets SET head = ?", (previous,))
    connection.commit()
    connection.close()


def test_a_rewritten_log_is_told_by_a_noted_head(ledger: Ledger) -> None:
    head = ledger.head("b")
    rewritten(ledger, lambda seq, body: {**body, "note": "x"} if seq == 2 else body)
    verify(ledger.log.storage, "b")
    assert "rewritten" in check(ledger, head)


LOUD = {"type": "gaussian", "noise_multiplier": 0.5}


@pytest.mark.parametrize(
    ("seq", "change", "says"),
    [
        (3, {"event": LOUD}, "more than the budget"),
        (8, {"event": LOUD}, "entry 8 .* weighs more"),
        (8, {"event": LOUD, "weight": [20.0, 0.0]}, "entry 8 .* did not have room"),
        (8, {"event": LOUD, "basis": "recorded", "weight": [0.0, 0.0]}, "entry 8"),
        (8, {"event": LOUD, "basis": "whatever", "weight": [0.0, 0.0]}, "entry 8"),
        (8, {"weight": [-1.0, 0.0]}, "entry 8"),
        (8, {"weight": [None, 0.0]}, "entry 8"),
        (8, {"weight": [0.1, -1e-9]}, "entry 8"),
        (8, {"weight": [0.1]}, "entry 8"),
        (8, {"weight": "0"}, "entry 8"),
        (8, {"basis": []}, "entry 8"),
        (8, None, "entry 8"),
        (8, 7, "entry 8"),
        (8, [], "entry 8"),
        (1, {"terms": {**Budget(4.0, 1e-5, name="b").to_dict()}}, "entry 1 .* no order"),
    ],
)
def test_a_rewritten_log_is_named(ledger: Ledger, seq: int, change: Any, says: str) -> None:
    """Hashes alone do not make an admission right: it is computed anew, and what it says is read."""
    both = isinstance(change, dict)
    rewritten(
        ledger, lambda at, body: body if at != seq else {**body, **change} if both else change
    )
    assert re.search(says, check(ledger))


@pytest.mark.parametrize(
    ("seq", "basis", "says"),
    [
        (8, "declared", "after the first start"),
        (2, "filter", "before the first start"),
        (8, "recorded", "notes no weight"),
        (8, "adaptive", "no charge is admitted on the basis 'adaptive'"),
        (3, "gift", "no charge is admitted on the basis 'gift'"),
        (8, None, "no charge is admitted on the basis None"),
    ],
)
def test_a_charge_cannot_be_passed_off_as_another(
    ledger: Ledger, seq: int, basis: str | None, says: str
) -> None:
    """Neither verify nor a ledger that opens the log believes it; nor does anybody certify it."""
    rewritten(ledger, lambda at, body: {**body, "basis": basis} if at == seq else body)
    found = check(ledger)
    assert f"entry {seq}" in found
    assert says in found
    with Ledger(ledger.url) as fresh, pytest.raises(LedgerCorruptedError, match=f"entry {seq}"):
        fresh.spent("b")
    with pytest.raises(LedgerCorruptedError, match=f"entry {seq}"):
        export_certificate(ledger.log.storage, "b")


def loud(seq: int, body: dict[str, Any]) -> dict[str, Any]:
    """Make the log's last charge a recorded release of ε far above the budget."""
    kept = {key: value for key, value in body.items() if key != "weight"}
    return {**kept, "event": LOUD, "basis": "recorded"} if seq == 8 else body


def test_a_recorded_release_is_weighed_anew_and_breaks_the_budget(ledger: Ledger) -> None:
    rewritten(ledger, loud)
    found = verify(ledger.log.storage, "b")
    assert found.guarantee.epsilon > 4
    assert not found.within_budget
    assert "THE BUDGET IS EXCEEDED" in found.warnings[0]


def test_a_declared_budget_has_no_filter(sqlite_url: str) -> None:
    """What was never admitted is refused on reading, whatever it costs."""
    with Ledger(sqlite_url) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        [first] = opened.reserve("b", [ChargeRequest(Gaussian(4.0))])
        opened.start(first.id)
        opened.reserve("b", [ChargeRequest(Gaussian(90.0))])

        def declared(seq: int, body: dict[str, Any]) -> dict[str, Any]:
            if seq == 1:
                body["terms"]["admission"] = "declared"
            return body

        rewritten(opened, declared)
        assert "entry 4" in check(opened)
        assert "a declared budget admits nothing" in check(opened)


def forge(ledger: Ledger, line: Line) -> None:
    """Append an entry that no ledger would, with the hashes that it should have."""
    with pytest.raises(LedgerCorruptedError):
        ledger.log.write("b", lambda *_: [line])


def test_a_closed_budget_admits_nothing_on_reading_either(ledger: Ledger) -> None:
    ledger.close_budget("b")
    body = {"event": Gaussian(99.0).to_dict(), "basis": "recorded", "unit": "record"}
    empty = dict.fromkeys(("study", "arm", "note", "plan_digest"), "")
    forge(ledger, Line(Kind.RESERVED, 5, body={**body, **empty}))
    assert "entry 10 of budget 'b' is wrong: the budget had been closed for good" in check(ledger)


def test_a_recorded_release_cannot_be_voided(ledger: Ledger) -> None:
    """Else it would be given back, and weigh nothing."""
    rewritten(ledger, loud)
    with Ledger(ledger.url) as fresh:
        forge(fresh, Line(Kind.VOIDED, 4))
    assert "entry 9 of budget 'b' is wrong: what had been released cannot be voided" in check(
        ledger
    )


def test_the_chain_covers_the_results_of_rounds(ledger: Ledger) -> None:
    rounds = Rounds(ledger)
    opened = rounds.open("b-4", count=2)
    for score in (0.25, 0.5):
        lease = lease_one(rounds, opened.charge_id, "w")
        assert lease is not None
        complete_one(rounds, lease, score, {"file": "x"})
    ledger.settle("b-4")
    verify(ledger.log.storage, "b")
    certificate = json.dumps(export_certificate(ledger.log.storage, "b"))
    with ledger.log.storage.read() as connection:
        digest = round_digest(connection, "b", 4)
    assert digest is not None
    assert digest not in certificate
    for change in (
        "UPDATE privtune_tasks SET score = 0.75 WHERE number = 0",
        "UPDATE privtune_tasks SET score = 0.25, result = '{}' WHERE number = 0",
        "DELETE FROM privtune_tasks WHERE number = 1",
    ):
        edit(ledger, change)
        assert "the round of charge b-4 is not what it was" in check(ledger)


# Certificates.


def test_a_certificate_keeps_times_and_transcripts_sealed(ledger: Ledger) -> None:
    """When a sealed selection started and ended tells how many trials it took."""
    text = json.dumps(export_certificate(ledger.log.storage, "b"))
    page = render_certificate(json.loads(text))
    for charge in ledger.charges("b"):
        for moment in (charge.created_at, charge.started_at, charge.closed_at):
            if moment is not None:
                assert moment.isoformat() not in text + page
    assert TRANSCRIPT not in text + page


def test_a_certificate_knows_days_and_no_times(sqlite_url: str) -> None:
    """Else the time from one export, or one budget, to the next tells how long a study took."""
    clock = datetime(2026, 3, 1, 6, 30, 15, tzinfo=UTC)
    before = datetime.now(UTC).date().isoformat()
    with Ledger(sqlite_url, clock=lambda: clock) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        opened.settle(opened.start(opened.reserve("b", [ChargeRequest(Gaussian(9.0))])[0].id).id)
        certificate = export_certificate(opened.log.storage, "b")
    text = json.dumps(certificate) + render_certificate(certificate)
    assert certificate["budget"]["created_at"] == "2026-03-01"
    assert before <= certificate["exported_at"] <= datetime.now(UTC).date().isoformat()
    assert not re.search(r"\d\d:\d\d", text.split("<style>")[0] + text.split("</style>")[1])


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from paths(child, (*prefix, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from paths(child, (*prefix, index))
    else:
        yield prefix


def test_every_edit_of_a_certificate_fails(ledger: Ledger) -> None:
    certificate = json.loads(json.dumps(export_certificate(ledger.log.storage, "b")))
    everything = list(paths(certificate))
    assert len(everything) > 100
    for path in everything:
        edited = copy.deepcopy(certificate)
        place = edited
        for step in path[:-1]:
            place = place[step]
        old = place[path[-1]]
        place[path[-1]] = (
            (not old) if isinstance(old, bool)
            else old + 1 if isinstance(old, int)
            else old * 1.001 + 1e-3 if isinstance(old, float)
            else f"{old}x"
        )  # fmt: skip
        with pytest.raises(LedgerCorruptedError):
            verify_certificate(edited)
        if isinstance(old, float):
            place[path[-1]] = 10**400  # JSON knows numbers that no float holds
            with pytest.raises(LedgerCorruptedError):
                verify_certificate(edited)


DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq", math.inf),
        ("seq", True),
        ("charge", "3"),
        ("kind", "\ud800"),
        ("sealed", None),
        ("body", {"x": math.nan}),
        ("body", DEEP),
        ("more", 1),
    ],
)
def test_a_senseless_part_of_a_certificate_is_one_sentence(
    ledger: Ledger, name: str, value: Any
) -> None:
    certificate = export_certificate(ledger.log.storage, "b")
    certificate["entries"][-1][name] = value
    with pytest.raises(LedgerCorruptedError):
        verify_certificate(certificate)
    with pytest.raises(LedgerCorruptedError):
        verify_certificate({**certificate, "entries": DEEP})


@pytest.mark.parametrize("part", ["entries", "charges"])
def test_a_shortened_certificate_fails(ledger: Ledger, part: str) -> None:
    certificate = export_certificate(ledger.log.storage, "b")
    certificate[part].pop()
    with pytest.raises(LedgerCorruptedError):
        verify_certificate(certificate)
    certificate.pop(part)
    with pytest.raises(LedgerCorruptedError):
        verify_certificate(certificate)


def test_the_page_escapes_what_users_wrote(sqlite_url: str, tmp_path: Path) -> None:
    with Ledger(sqlite_url) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b", dataset="<script>alert(1)</script>"))
        opened.reserve("b", [ChargeRequest(Gaussian(4.0), note="<img src=x>")])
        page = render_certificate(export_certificate(opened.log.storage, "b"))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page


def test_kinds_are_what_the_log_says() -> None:
    """The words are part of the format: a new meaning is a new word."""
    assert [str(kind) for kind in Kind] == [
        "created", "reserved", "started", "settled", "voided", "closed", "audited",
        "restored",
    ]  # fmt: skip


BLOCK = (Gaussian(4.0), Gaussian(5.0))
COST = epsilon(Composed(BLOCK), 1e-5).epsilon


# An honest ledger of a version whose accounts were a little lower: a warning, not corruption.


@pytest.fixture
def admitted(sqlite_url: str) -> Iterator[Ledger]:
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


def test_a_weight_that_is_higher_today_is_a_warning(admitted: Ledger) -> None:
    honest = verify(admitted.log.storage, "b").guarantee.bounds["filter"]
    rewritten(admitted, lighter(0.009))
    found = verify(admitted.log.storage, "b")
    assert found.within_budget
    [warning] = [text for text in found.warnings if "this version of PrivTune computes" in text]
    assert "For 1 charge (entry 5)" in warning
    assert "0.9%" in warning
    # What is printed holds for the weight of today, which is above the noted one.
    assert honest <= found.guarantee.bounds["filter"] <= honest + 0.009 * 4.0
    certificate = export_certificate(admitted.log.storage, "b")
    assert verify_certificate(certificate).warnings == found.warnings[-1:]


def test_rounding_is_not_worth_a_word(admitted: Ledger) -> None:
    rewritten(admitted, lighter(1e-7))
    assert not [t for t in verify(admitted.log.storage, "b").warnings if "account" in t]


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
    # It refuses every charge: what counts from now on is the account of today.
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
    assert "THE BUDGET IS EXCEEDED" in found.warnings[0]


def edited(certificate: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """A certificate with other numbers, as another version would have written them."""
    rest = {**certificate, part: {**certificate[part], **changes}}
    del rest["digest"]
    return {**rest, "digest": digest_of(rest)}


def test_a_certificate_of_looser_accounts_with_other_bounds_verifies(admitted: Ledger) -> None:
    there = export_certificate(admitted.log.storage, "b")
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
    admitted: Ledger, part: str, name: str, factor: float
) -> None:
    there = export_certificate(admitted.log.storage, "b")
    with pytest.raises(LedgerCorruptedError, match=f"'{part}' is not what its entries say"):
        verify_certificate(edited(there, part, **{name: factor * there[part][name]}))


def test_more_than_a_hundredth_is_no_version(admitted: Ledger, declared: Ledger) -> None:
    rewritten(admitted, lighter(0.011))
    assert "entry 5 of budget 'b' is wrong: it weighs more than it notes" in check(admitted)
    rewritten(declared, shrunk(0.012))
    assert "more than the budget's" in check(declared)
