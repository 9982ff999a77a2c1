"""Records of audits: stored with studies, noted in a budget's log, and carried by its certificate.

An audit runs on made-up records, so nothing in its record is private. It proves nothing alone: what it
says of the account is computed anew from its events, which are parts of the event that was charged for
its plan. The budget's log notes the digest of each: one that is left out of a certificate is missed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Event, epsilon, event_from_dict, lower_bound
from privtune.accounting.events import flatten
from privtune.ledger.admission import DRIFT
from privtune.ledger.chain import Document, Kind, digest_of
from privtune.ledger.errors import LedgerCorruptedError, Place
from privtune.ledger.history import History
from privtune.ledger.log import Line, Log
from privtune.ledger.reading import parsing, read_object, show_key
from privtune.ledger.schema import blobs
from privtune.ledger.storage import Storage
from privtune.ledger.values import Budget, ChargeState
from privtune.numbers import is_number

AUDITS = "_audits/"
"""Where a study keeps them among its results: no arm has this name."""

PlanKey = tuple[str, str]
"""A study's name and the digest of one of its plans."""

_VERDICT_MISFITS = "what it found and whether it passed do not fit together"


def kept_audits(storage: Storage, studies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the audits that are stored with studies, ordered by the name of the study.

    Args:
        storage: Where the studies are.
        studies: Their names.

    Raises:
        StudyCorruptedError: An audit is not the one that was stored.
    """
    beginning = sa.func.substr(blobs.c.name, 1, len(AUDITS))
    query = (
        sa.select(blobs)
        .where(blobs.c.study.in_(studies), beginning == AUDITS)
        .order_by(blobs.c.study, blobs.c.name)
    )
    with storage.read() as connection:
        rows = connection.execute(query).all()
    audits = []
    for row in rows:
        key = show_key({"study": row.study, "name": row.name})
        place = Place("privtune_blobs", "data", key)
        digest = hashlib.sha256(row.data or b"").hexdigest()
        if digest != row.digest:
            raise place.error("is not the audit that was stored there")
        audits.append(read_object(row.data, place))
    return audits


def audits_of(storage: Storage, history: History) -> list[dict[str, Any]]:
    """Return the stored audits of the plans that were charged to a budget.

    Args:
        storage: Where the budget and the studies are.
        history: What the budget's log says.

    Raises:
        LedgerCorruptedError: An audit that the log notes is missing.
    """
    events = _events_by_plan(history)
    studies = {study for study, _ in events}
    audits = []
    audits_of_studies = kept_audits(storage, sorted(studies))
    with parsing(Place("privtune_blobs", "data")):
        for audit in audits_of_studies:
            if _plan_key(audit) in events:
                audits.append(audit)
        _refuse_missing(audits, history)
    return audits


def note_audit(log: Log, budget: str, audit: Document) -> None:
    """Note an audit once in a budget's log, so that a certificate without the audit is refused."""
    digest = digest_of(audit)
    body = {key: audit[key] for key in ("study", "arm", "plan", "passed")}
    body["digest"] = digest

    def decide(_connection: object, history: History) -> list[Line]:
        note = history.audits.get(digest)
        # One that was deleted with its study may come again.
        if note is not None and "deleted" not in note:
            return []
        return [Line(Kind.AUDITED, body=body)]

    log.write(budget, decide)


def note_deleted(log: Log, budget: str, study: str) -> None:
    """Note in a budget's log that the audits of a study are deleted, with the verdict of each."""

    def decide(_connection: object, history: History) -> list[Line]:
        lines = []
        for note in history.audits.values():
            if note["study"] != study or "deleted" in note:
                continue
            deletion = {**note, "deleted": True}
            lines.append(Line(Kind.AUDITED, body=deletion))
        return lines

    log.write(budget, decide)


def check_audits(audits: Any, history: History) -> tuple[str, ...]:
    """Check a certificate's audits against its entries, and return the sentences to warn with.

    Args:
        audits: What a certificate has as its audits.
        history: What its entries say.

    Returns:
        A sentence for each finding that contradicts the reported ε, and for each audit that was deleted.

    Raises:
        LedgerCorruptedError: The audits are not those of the budget, or were edited.
    """
    try:
        events = _events_by_plan(history)
        terms = history.terms()
        checked_audits = [check_audit(audit, terms) for audit in audits]
        for audit in checked_audits:
            _refuse_other_event(audit, events)
        _refuse_missing(audits, history)
        findings = contradictions(checked_audits)
        deletions = _state_deletions(history)
        return (*findings, *deletions)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerCorruptedError(
            f"the certificate's 'audits' lack a part ({error!r}): it was edited."
        ) from error


def _plan_key(audit: Document) -> PlanKey:
    """Return the study's name and the plan's digest from an audit, or from the log's note of one."""
    return audit["study"], audit["plan"]


def _refuse_other_event(audit: Document, events: Mapping[PlanKey, Event]) -> None:
    """Refuse an audit unless its plan was charged and its events are parts of the charged event."""
    event = events.get(_plan_key(audit))
    if event is None:
        raise _wrong(audit, "it is of no charge of this budget")
    for row in audit["rows"]:
        audited_event = event_from_dict(row["event"])
        if not _is_part(audited_event, event):
            raise _wrong(audit, "it is of an event that is no part of what was charged")


def check_audit(audit: Document, terms: Budget) -> dict[str, Any]:
    """Refuse an audit whose terms, numbers or verdict do not fit the budget and its account.

    Args:
        audit: The record.
        terms: The budget that it is of.

    Returns:
        The record, held against the account of this version.

    Raises:
        LedgerCorruptedError: It is of other terms, or its parts contradict each other or the account.
    """
    quoted_terms = (audit["delta"], audit["adjacency"], audit["published"])
    budget_terms = (terms.delta, str(terms.adjacency), terms.epsilon)
    if quoted_terms != budget_terms:
        raise _wrong(audit, "it is of another δ, adjacency or ε than the budget's")
    rows = [_check_row(audit, row, terms) for row in audit["rows"]]
    parts = (*audit["rows"], *audit["checks"])
    verdicts = [part["passed"] for part in parts]
    if audit["passed"] is not all(verdicts):
        raise _wrong(audit, _VERDICT_MISFITS)
    if not _are_numbers(audit["confidence"], audit["seed"]):
        raise _wrong(audit, "its confidence or its seed is no number")
    return {**audit, "rows": rows}


def contradictions(audits: Sequence[Document]) -> Iterator[str]:
    """Yield a sentence for each finding of an audit that contradicts the reported ε or a law."""
    for audit in audits:
        subject = f"The audit of {audit['study']}/{audit['arm']} (seed {audit['seed']})"
        for row in audit["rows"]:
            if not row["passed"]:
                yield (
                    f"{subject} contradicts the reported ε of {row['mechanism']}: it is above "
                    f"{row['audited']:.4g} at {audit['confidence']:.0%} confidence, but reported is "
                    f"{row['reported']:.4g}."
                )
        for check in audit["checks"]:
            if not check["passed"]:
                yield f"{subject} found a law broken: {check['law']}, {check['seen']}."


def _check_row(audit: Document, row: Document, terms: Budget) -> dict[str, Any]:
    """Check one finding of an audit, and return it with the verdict by this version's account."""
    numbers = [row[name] for name in ("audited", "lower", "reported", "runs")]
    if not _are_numbers(*numbers):
        raise _wrong(audit, "what it found is no number")
    audited = row["audited"]
    reported = row["reported"]
    event = event_from_dict(row["event"])
    guarantee = epsilon(event, terms.delta, adjacency=terms.adjacency)
    upper = guarantee.epsilon
    lower = lower_bound(event, terms.delta, adjacency=terms.adjacency)
    # Versions may bound more tightly from both sides: never say less was known than is.
    tolerance = 1.0 + 2.0 * DRIFT
    if reported < upper / tolerance or row["lower"] > lower * tolerance:
        raise _wrong(
            audit, f"its event costs between {lower:.6g} and {upper:.6g}, not what it says"
        )
    if row["passed"] is not (audited <= reported):
        raise _wrong(audit, _VERDICT_MISFITS)
    # Nor excuse what was found by an account of then.
    reported_today = min(reported, upper * tolerance)
    return {
        **row,
        "reported": reported_today,
        "passed": audited <= reported_today,
    }


def _are_numbers(*values: object) -> bool:
    return all(map(is_number, values))


def _events_by_plan(history: History) -> dict[PlanKey, Event]:
    """Return the events of charges that were not voided, by the study and the plan's digest."""
    events = {}
    for charge in history.charges.values():
        if charge.state is not ChargeState.VOIDED:
            key = (charge.study, charge.plan_digest)
            events[key] = charge.event
    return events


def _is_part(event: Event, larger: Event) -> bool:
    """Return whether all parts of an event are among those of another event, or of one inside it."""
    counts = Counter(flatten(event))
    larger_counts = Counter(flatten(larger))
    if counts <= larger_counts:
        return True
    return any(_is_part(event, child) for child in larger.children())


def _refuse_missing(audits: Iterable[Document], history: History) -> None:
    """Refuse audits that lack one noted in the log, except deleted ones and those of voided charges."""
    events = _events_by_plan(history)
    digests = {digest_of(audit) for audit in audits}
    for digest, note in history.audits.items():
        is_charged = _plan_key(note) in events
        is_deleted = "deleted" in note
        if is_charged and not is_deleted and digest not in digests:
            raise LedgerCorruptedError(
                f"an audit of study {note['study']!r} is missing, or was edited: the log of budget "
                f"{history.name!r} notes it, with the digest {digest[:16]}."
            )


def _state_deletions(history: History) -> Iterator[str]:
    """Yield a sentence for each audit that was deleted with its study, with the verdict it had."""
    for note in history.audits.values():
        if "deleted" not in note:
            continue
        verdict = "agreed with" if note["passed"] else "contradicted"
        yield (
            f"An audit of {note['study']}/{note['arm']} {verdict} the reported ε. It was deleted "
            "together with its study, so it can no longer be read."
        )


def _wrong(audit: Document, why: str) -> LedgerCorruptedError:
    """Return the error for a wrong audit in a certificate, with the audit's study and arm."""
    return LedgerCorruptedError(
        f"the certificate's audit of {audit['study']}/{audit['arm']} is wrong: {why}."
    )
