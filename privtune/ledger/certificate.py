"""Certificates: everything about a budget that may leave the trust boundary, provable alone.

A certificate holds the public part of every entry and a salted digest of the rest, so that the
chain can be checked from the file. Times, workers and transcripts stay behind: when a sealed
selection started and ended tells how many trials it took. So does the time from one export to the
next: a certificate carries the day alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Composed, Guarantee
from privtune.accounting.compare import DisputedAccountError, ask_witnesses
from privtune.ledger.admission import DRIFT, filter_state, odometer
from privtune.ledger.audits import audits_of, check_audits
from privtune.ledger.chain import ENTRY_VERSION, Entry, canonical
from privtune.ledger.errors import SENSELESS, LedgerCorruptedError
from privtune.ledger.history import History
from privtune.ledger.log import stored_entry
from privtune.ledger.schema import entries
from privtune.ledger.storage import Storage
from privtune.ledger.values import ChargeState
from privtune.ledger.verification import Verification, is_within, replay, verified, verify
from privtune.numbers import is_number

FORMAT = "privtune-certificate"
_VERSION = 5
_LIBRARIES = ("privtune", "autodp", "dp-accounting", "numpy", "scipy")
_ROUNDING = 1e-6
_VERSIONS = 0.02  # by what share the numbers of two versions of a witness may differ


def export_certificate(storage: Storage, name: str, *, witnessed: bool = False) -> dict[str, Any]:
    """Verify a budget's log and return its certificate, ready for JSON.

    Args:
        storage: Where the log is: ``ledger.log.storage``.
        name: The budget's name.
        witnessed: Whether autodp and dp-accounting are asked, for every charge and for the whole:
            seconds, which no training should wait for.

    Returns:
        What may be given away: entries, chain, composition; no times finer than a day.

    Raises:
        LedgerCorruptedError: The log does not verify; nothing is certified then.
        DisputedAccountError: More is proved than our account says.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> from privtune.ledger import Budget, ChargeRequest, Ledger
        >>> ledger = Ledger()
        >>> budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        >>> charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(8.0))])

        >>> certificate = export_certificate(ledger.log.storage, "clinic")
        >>> certificate["budget"]["terms"]["epsilon"], len(certificate["entries"])
        (3.0, 2)
        >>> ledger.close()
    """
    entries_there = verify(storage, name).entries
    with storage.read() as connection:
        query = sa.select(entries).where(entries.c.budget == name, entries.c.seq <= entries_there)
        lines = [stored_entry(row) for row in connection.execute(query.order_by(entries.c.seq))]
    history = replay(name, ((line, None) for line in lines))
    certificate = {
        "format": FORMAT,
        "version": _VERSION,
        "exported_at": datetime.now(UTC).date().isoformat(),
        "libraries": {library: _installed(library) for library in _LIBRARIES},
        "entry_version": ENTRY_VERSION,
        "entries": [_public(line) for line in lines],
        **_summary(history, odometer(history)),
    }
    if audits := audits_of(storage, history):
        certificate["audits"] = audits
    if witnessed:
        certificate["witnesses"] = _witnesses_of(history)
    return {**certificate, "digest": _digest(certificate)}


def verify_certificate(certificate: Mapping[str, Any], *, head: str | None = None) -> Verification:
    """Check a certificate from its own content: chain, states, admissions, composition.

    Args:
        certificate: The parsed file.
        head: A chain head noted elsewhere that the certificate must contain.

    Returns:
        What the certificate says.

    Raises:
        LedgerCorruptedError: It was edited, or never was a certificate; says where.
        DisputedAccountError: More is proved than our account says.

    **Guarantee**: a file in which any value was changed fails. Who rewrites all of it, hashes
    included, makes another certificate: that is told by its signature (``privtune.ledger.signature``),
    by a head noted elsewhere, or by the ledger.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> from privtune.ledger import Budget, ChargeRequest, Ledger
        >>> ledger = Ledger()
        >>> budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        >>> charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(8.0))])

        >>> certificate = export_certificate(ledger.log.storage, "clinic")
        >>> ledger.close()
        >>> verify_certificate(certificate).charges
        1
        >>> verify_certificate({**certificate, "exported_at": "1999-12-31"})
        Traceback (most recent call last):
            ...
        privtune.ledger.errors.LedgerCorruptedError: the certificate's digest is not that of ...
    """
    try:
        return _verified(certificate, head)
    except SENSELESS as error:
        raise LedgerCorruptedError(
            f"the certificate lacks a part, or has one that makes no sense ({error})."
        ) from error


def _verified(certificate: Mapping[str, Any], head: str | None) -> Verification:
    if (certificate.get("format"), certificate.get("version")) != (FORMAT, _VERSION):
        raise LedgerCorruptedError(f"this is no {FORMAT} of version {_VERSION}.")
    name = certificate["budget"]["terms"]["name"]
    lines = [_entry(name, value) for value in certificate["entries"]]
    history = replay(name, ((line, None) for line in lines), head=head)
    for key, value in _summary(history, odometer(history, allowed=DRIFT)).items():
        if not _COMPARED.get(key, _same)(certificate.get(key), value):
            raise LedgerCorruptedError(
                f"the certificate's {key!r} is not what its entries say: it was edited."
            )
    rest = {key: value for key, value in certificate.items() if key != "digest"}
    if certificate.get("digest") != _digest(rest):
        raise LedgerCorruptedError("the certificate's digest is not that of its content.")
    if "witnesses" in certificate and not _same(
        certificate["witnesses"], _witnesses_of(history), _VERSIONS
    ):
        raise LedgerCorruptedError(
            "the certificate's 'witnesses' do not say what they say when they are asked again: it was "
            "edited, or their versions differ in more than rounding."
        )
    found = verified(history)
    said = check_audits(certificate.get("audits", ()), history)
    return replace(found, warnings=(*found.warnings, *said))


def _summary(history: History, guarantee: Guarantee) -> dict[str, Any]:
    """Return what follows from the entries."""
    return {
        "within_budget": is_within(history, guarantee),
        "head": history.head,
        "budget": {
            "terms": history.terms().to_dict(),
            "created_at": history.created_at,
            "closed": history.closed,
        },
        "charges": [
            {
                "id": charge.id,
                "state": str(charge.state),
                "basis": charge.basis,
                "study": charge.study,
                "arm": charge.arm,
                "note": charge.note,
                "plan_digest": charge.plan_digest,
                "event": charge.event.to_dict(),
                "unit": charge.unit,
            }
            for charge in history.charges.values()
        ],
        "guarantee": guarantee.to_dict(),
        # What the filter could admit takes a table of the block's profile, a second of every training:
        # it is stated where it decided.
        **({"filter": filter_state(history).to_dict()} if history.later else {}),
    }


def _public(entry: Entry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "kind": entry.kind,
        "charge": entry.charge,
        "body": json.loads(entry.body),
        "sealed": entry.sealed,
        "previous": entry.previous,
        "hash": entry.hash,
    }


def _entry(budget: str, value: Mapping[str, Any]) -> Entry:
    entry = Entry(budget=budget, **{**value, "body": canonical(value["body"])})
    for name, part in asdict(entry).items():
        if type(part) is not (int if name in ("seq", "charge") else str):
            raise TypeError(f"{name} of an entry is {type(part).__name__}")
    return entry


def _same(there: Any, computed: Any, share: float = _ROUNDING) -> bool:
    """Compare, with a tolerance for numbers that other library versions round differently."""
    if isinstance(computed, Mapping):
        return (
            isinstance(there, Mapping)
            and there.keys() == computed.keys()
            and all(
                key == "why" or _same(there[key], computed[key], share) for key in computed
            )  # the words for why a witness differs hang on its number
        )
    if isinstance(computed, list):
        return (
            isinstance(there, list)
            and len(there) == len(computed)
            and all(_same(one, other, share) for one, other in zip(there, computed, strict=True))
        )
    if isinstance(computed, float):
        return there == computed or (
            is_number(there) and math.isclose(there, computed, rel_tol=share)
        )
    return type(there) is type(computed) and bool(there == computed)


def _as_strict(there: Any, computed: Any) -> bool:
    """Compare a cost with today's, by the bounds of today: it must not promise more privacy."""
    if not isinstance(there, Mapping) or not {"epsilon", "method"} <= there.keys():
        return False
    fixed = [key for key in computed if key not in ("epsilon", "method", "bounds")]
    return _not_below(there["epsilon"], computed["epsilon"]) and all(
        _same(there.get(key), computed[key]) for key in fixed
    )


def _as_full(there: Any, computed: Any) -> bool:
    """Compare a filter with today's: it must not have had more room."""
    if not isinstance(there, Mapping) or there.keys() != computed.keys():
        return False
    had, has = there["capacity"], computed["capacity"]
    return (
        (had is None or (has is not None and _not_below(has, had)))
        and _not_below(there["used"], computed["used"])
        and all(_same(there[k], v) for k, v in computed.items() if k not in ("capacity", "used"))
    )


def _not_below(one: Any, other: Any) -> bool:
    """Whether a number is at least another, up to what accounts of versions may differ by."""
    try:
        return float(one) >= float(other) / (1 + 2.0 * DRIFT)
    except (TypeError, ValueError, OverflowError):
        return False


# What an accountant says; all else is what the entries say.
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "guarantee": _as_strict,
    "filter": _as_full,
    "within_budget": lambda there, computed: isinstance(there, bool) and there <= computed,
}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _witnesses_of(history: History) -> dict[str, Any]:
    """Ask the witnesses about every charge that was not voided, and about all of them together.

    Raises:
        DisputedAccountError: More is proved than our account says.
    """
    terms = history.terms()
    charges = [c for c in history.charges.values() if c.state is not ChargeState.VOIDED]
    asked = {charge.id: charge.event for charge in charges}
    if len(asked) > 1:
        asked["all together"] = Composed([charge.event for charge in charges])
    said = {}
    for name, event in asked.items():
        found = ask_witnesses(event, terms.delta, adjacency=terms.adjacency)
        if found.objection:
            raise DisputedAccountError(f"{name}: {found.objection}")
        said[name] = found.to_dict()
    return said


@cache
def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
