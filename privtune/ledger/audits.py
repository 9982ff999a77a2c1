"""Audits beside a budget: records of what was found by experiment, carried by its certificate.

An audit runs on made-up records, so nothing in its record is private. It proves nothing alone: what it
says of the account is computed anew from its events, which are parts of the event that was charged for
its plan. The budget's log notes the digest of each: one that is left out of a certificate is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Event, epsilon, event_from_dict, lower_bound
from privtune.accounting.events import flatten
from privtune.ledger.admission import DRIFT
from privtune.ledger.chain import Kind, digest_of
from privtune.ledger.errors import LedgerCorruptedError
from privtune.ledger.history import History
from privtune.ledger.log import Line, Log
from privtune.ledger.schema import blobs
from privtune.ledger.storage import Storage
from privtune.ledger.values import Budget, ChargeState
from privtune.numbers import is_number

AUDITS = "_audits/"
"""Where a study keeps them among its results: no arm has this name."""


def kept_audits(storage: Storage, studies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the audits that studies keep, in the order of their names."""
    start = sa.func.substr(blobs.c.name, 1, len(AUDITS)) == AUDITS
    query = sa.select(blobs.c.data).where(blobs.c.study.in_(studies), start)
    with storage.read() as connection:
        return [
            json.loads(data)
            for data in connection.scalars(query.order_by(blobs.c.study, blobs.c.name))
        ]


def audits_of(storage: Storage, history: History) -> list[dict[str, Any]]:
    """Return the audits of what was charged to a budget: of these plans, in these studies."""
    charged = _charged(history)
    kept = kept_audits(storage, sorted({study for study, _ in charged}))
    found = [audit for audit in kept if (audit["study"], audit["plan"]) in charged]
    _refuse_missing(found, history)
    return found


def note_audit(log: Log, budget: str, audit: Mapping[str, Any]) -> None:
    """Note in a budget's log that there is an audit, once: a certificate without it fails then."""
    digest = digest_of(audit)
    body = {key: audit[key] for key in ("study", "arm", "plan", "passed")}

    def decide(_connection: object, history: History) -> list[Line]:
        noted = history.audits.get(digest, {"deleted": True})
        return [Line(Kind.AUDITED, body={**body, "digest": digest})] if "deleted" in noted else []

    log.write(budget, decide)


def note_deleted(log: Log, budget: str, study: str) -> None:
    """Note in a budget's log that the audits of a study go with it, and what they had said."""

    def decide(_connection: object, history: History) -> list[Line]:
        return [
            Line(Kind.AUDITED, body={**noted, "deleted": True})
            for noted in history.audits.values()
            if noted["study"] == study and "deleted" not in noted
        ]

    log.write(budget, decide)


def check_audits(audits: Any, history: History) -> tuple[str, ...]:
    """Refuse audits of nothing charged here or that misquote the account, and missing ones."""
    try:
        charged = _charged(history)
        held = [check_audit(audit, history.terms()) for audit in audits]
        for audit in held:
            whole = charged.get((audit["study"], audit["plan"]))
            if whole is None:
                raise _wrong(audit, "it is of no charge of this budget")
            if not all(_is_part(event_from_dict(row["event"]), whole) for row in audit["rows"]):
                raise _wrong(audit, "it is of an event that is no part of what was charged")
        _refuse_missing(audits, history)
        return (*contradictions(held), *_deleted(history))
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerCorruptedError(
            f"the certificate's 'audits' lack a part ({error!r}): it was edited."
        ) from error


def check_audit(audit: Mapping[str, Any], terms: Budget) -> dict[str, Any]:
    """Refuse an audit that is none, of other terms, or that misquotes the account."""
    said = (audit["delta"], audit["adjacency"], audit["published"])
    if said != (terms.delta, str(terms.adjacency), terms.epsilon):
        raise _wrong(audit, "it is of another δ, adjacency or ε than the budget's")
    rows = [_row(audit, row, terms) for row in audit["rows"]]
    parts = [part["passed"] for part in (*audit["rows"], *audit["checks"])]
    if audit["passed"] is not all(parts):
        raise _wrong(audit, "what it found and whether it passed do not fit together")
    if not _are_numbers(audit["confidence"], audit["seed"]):
        raise _wrong(audit, "its confidence or its seed is no number")
    return {**audit, "rows": rows}


def contradictions(audits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each finding of an audit that contradicts the reported ε."""
    for audit in audits:
        whose = f"The audit of {audit['study']}/{audit['arm']} (seed {audit['seed']})"
        for row in audit["rows"]:
            if not row["passed"]:
                yield (
                    f"{whose} contradicts what is reported of {row['mechanism']}: ε is above "
                    f"{row['audited']:.4g} at {audit['confidence']:.0%} confidence, and reported is "
                    f"{row['reported']:.4g}."
                )
        for law in audit["checks"]:
            if not law["passed"]:
                yield f"{whose} found a law broken: {law['law']}, {law['seen']}."


def _row(audit: Mapping[str, Any], row: Mapping[str, Any], terms: Budget) -> dict[str, Any]:
    if not _are_numbers(*(row[name] for name in ("audited", "lower", "reported", "runs"))):
        raise _wrong(audit, "what it found is no number")
    event = event_from_dict(row["event"])
    now = epsilon(event, terms.delta, adjacency=terms.adjacency).epsilon
    least = lower_bound(event, terms.delta, adjacency=terms.adjacency)
    # Versions may bound more tightly from both sides: never say less was known than is.
    apart = 1.0 + 2.0 * DRIFT
    if row["reported"] < now / apart or row["lower"] > least * apart:
        raise _wrong(audit, f"its event costs between {least:.6g} and {now:.6g}, not what it says")
    if row["passed"] is not (row["audited"] <= row["reported"]):
        raise _wrong(audit, "what it found and whether it passed do not fit together")
    reported = min(row["reported"], now * apart)  # nor excuse what was found by an account of then
    return {**row, "reported": reported, "passed": row["audited"] <= reported}


def _are_numbers(*values: object) -> bool:
    return all(map(is_number, values))


def _charged(history: History) -> dict[tuple[str, str], Event]:
    return {
        (charge.study, charge.plan_digest): charge.event
        for charge in history.charges.values()
        if charge.state is not ChargeState.VOIDED
    }


def _is_part(event: Event, whole: Event) -> bool:
    """Say whether all parts of an event are among the parts of another event, or of one inside it."""
    own, there = flatten(event), flatten(whole)
    return all(count <= there.get(part, 0) for part, count in own.items()) or any(
        _is_part(event, child) for child in whole.children()
    )


def _refuse_missing(audits: Iterable[Mapping[str, Any]], history: History) -> None:
    charged, there = _charged(history), {digest_of(audit) for audit in audits}
    for digest, noted in history.audits.items():
        paid_for = (noted["study"], noted["plan"]) in charged
        if paid_for and "deleted" not in noted and digest not in there:
            raise LedgerCorruptedError(
                f"an audit of study {noted['study']!r} is missing, or was edited: the log of budget "
                f"{history.name!r} notes it, with the digest {digest[:16]}."
            )


def _deleted(history: History) -> Iterator[str]:
    """Yield what the log says of audits that were deleted with their study."""
    for noted in history.audits.values():
        if "deleted" in noted:
            found = "agreed with" if noted["passed"] else "contradicted"
            yield (
                f"An audit of {noted['study']}/{noted['arm']} {found} what is reported, and was deleted "
                "with its study: it cannot be read any more."
            )


def _wrong(audit: Mapping[str, Any], why: str) -> LedgerCorruptedError:
    return LedgerCorruptedError(
        f"the certificate's audit of {audit['study']}/{audit['arm']} is wrong: {why}."
    )
