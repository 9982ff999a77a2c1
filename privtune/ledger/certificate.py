"""Certificates: everything about a budget that may leave the trust boundary, provable alone.

A certificate holds the public part of every entry and a salted digest of the rest, so that the
chain can be checked from the file. Times, workers and transcripts stay behind: when a sealed
selection started and ended tells how many trials it took. So does the time from one export to the
next: a certificate carries the day alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Composed, Guarantee
from privtune.accounting.compare import AUTODP, NOT_MADE, DisputedAccountError, ask_witnesses
from privtune.ledger import admission
from privtune.ledger.audits import audits_of, check_audits
from privtune.ledger.chain import ENTRY_VERSION, Entry, Kind, canonical, digest_of
from privtune.ledger.errors import SENSELESS, LedgerCorruptedError, UnknownBudgetError
from privtune.ledger.history import BASIS_DECLARED, BASIS_FILTER, BASIS_GAUSSIAN, History
from privtune.ledger.log import round_digest, stored_entry
from privtune.ledger.schema import budgets, entries
from privtune.ledger.storage import Storage
from privtune.ledger.values import ChargeState
from privtune.ledger.weights import weigh_as_gaussian
from privtune.names import check_text
from privtune.numbers import is_number, show_epsilon

# Another version of a numerical library may move a composed ε by its rounding; that is no news.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Verification:
    """What a verified log says.

    Attributes:
        budget: The budget's name.
        entries, charges: How many it has.
        head: The hash of the last entry; note it elsewhere, and a cut tail can be told.
        guarantee: The composition, computed anew.
        within_budget: Whether that is at most the budget: releases that were recorded after the fact are
            in a sound log whatever they cost.
        warnings: What the reader must know; the first says that the budget is broken, if it is.

    Example:
        >>> from privtune.ledger import Budget, Ledger
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     verify(ledger.log.storage, "clinic").to_dict()["guarantee"]["epsilon"]
        0.0
    """

    budget: str
    entries: int
    charges: int
    head: str
    guarantee: Guarantee
    within_budget: bool
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            **vars(self),
            "guarantee": self.guarantee.to_dict(),
            "warnings": list(self.warnings),
        }


def verify(storage: Storage, name: str, *, head: str | None = None) -> Verification:
    """Replay a budget's log from the storage: chain, states, admissions, rounds, composition.

    Args:
        storage: Where the log is: ``ledger.log.storage``.
        name: The budget.
        head: A chain head noted earlier, from a certificate; the log must contain it.

    Returns:
        What the log says.

    Raises:
        LedgerCorruptedError: Something is wrong; names the first wrong entry and says why.

    **Guarantee**: an edited, removed, inserted or reordered entry is found, unless somebody rewrote the
    log from there to its end with new hashes, or cut it off. With a noted head these are found, too; a
    SQLite ledger notes heads in a file beside the database.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> from privtune.ledger import Budget, ChargeRequest, Ledger
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(8.0))])
        ...     report = verify(ledger.log.storage, "clinic", head=ledger.head("clinic"))
        >>> report.charges, report.within_budget, report.warnings
        (1, True, ())
    """
    history, _ = _read(storage, name, head)
    notes = []
    if storage.witness.path is not None and not storage.witness.seen(name):
        notes.append(
            f"Nothing is noted about it in {storage.witness.path}, beside the database: whether "
            "entries are missing at its end cannot be told. (A plain copy of the database lacks what "
            "is in its write-ahead log; privtune budget backup makes a whole one.)"
        )
    return verified(history, notes)


def _read(storage: Storage, name: str, head: str | None = None) -> tuple[History, list[Entry]]:
    """Replay a budget's log from the storage and check everything that it says."""
    check_text(name, "budget")
    seen = storage.witness.seen(name)
    with storage.read() as connection:
        row = connection.execute(sa.select(budgets).where(budgets.c.name == name)).one_or_none()
        if row is None:
            storage.witness.check(name, seen, {})
            raise UnknownBudgetError(f"no budget is called {name!r} in {storage.safe_url}.")
        query = sa.select(entries).where(entries.c.budget == name).order_by(entries.c.seq)
        rows = connection.execute(query).all()
        # What was appended since the head was read is not looked at, as long as it is a tail.
        lines = [(stored_entry(line), line.sealed) for line in rows if line.seq <= row.entries]
        history = replay(name, lines, head=head)
        if history.seq != row.entries:
            raise LedgerCorruptedError(
                f"entry {history.seq + 1} of budget {name!r} is missing: "
                f"the log ends before entry {row.entries}, where its head says."
            )
        if history.head != row.head or len(history.charges) != row.charges:
            raise LedgerCorruptedError(
                f"entry {history.seq} of budget {name!r} is wrong: the budget's row, which names the "
                "last entry, says otherwise."
            )
        for charge, digest in history.rounds.items():
            if round_digest(connection, name, charge) != digest:
                raise LedgerCorruptedError(
                    f"the round of charge {name}-{charge} is not what it was when it settled: "
                    "a result was changed or removed."
                )
    storage.witness.check(name, seen, {line.seq: line.hash for line, _ in lines})
    return history, [line for line, _ in lines]


def replay(
    name: str, lines: Iterable[tuple[Entry, str | None]], *, head: str | None = None
) -> History:
    """Replay entries and check each: chain, states, and that it was right to admit it."""
    history = History(name)
    heads = set()
    last_declared: Entry | None = None
    for entry, sealed in lines:
        history.apply(entry, sealed)
        heads.add(entry.hash)
        if last_declared and history.frozen:
            _check_block(history, last_declared)
            last_declared = None
        if entry.kind != Kind.RESERVED:
            continue
        basis = history.charges[entry.charge].basis
        if basis in (BASIS_FILTER, BASIS_GAUSSIAN):
            _check_filter(history, entry)
        elif basis == BASIS_DECLARED:
            last_declared = entry
    if last_declared:
        _check_block(history, last_declared)
    if head is not None and head not in heads:
        raise LedgerCorruptedError(
            f"the log of budget {name!r} does not contain the entry {head}: it was cut off, or "
            "rewritten, after that head was noted."
        )
    return history


def verified(history: History, notes: Iterable[str] = ()) -> Verification:
    """Return the verification of a replayed log, with every warning that follows from it."""
    guarantee = admission.odometer(history)
    within = is_within(history, guarantee)
    warnings = list(notes)
    if history.drift:
        places = ", ".join(str(seq) for seq in list(history.drift)[:3])
        warnings.append(
            f"This version's account of {len(history.drift)} admissions (entry {places}) lies up to "
            f"{100.0 * max(history.drift.values()):.2g}% above the one that admitted them. That is "
            f"within the {100.0 * admission.DRIFT:g}% by which accounts of versions may differ; "
            "the ε here is this version's."
        )
    recorded = history.recorded
    if recorded:
        more = f" and {len(recorded) - 3} more" if len(recorded) > 3 else ""
        said = f"Recorded after their release, which no rule admitted: {', '.join(recorded[:3])}{more}."
        warnings.insert(0, said)
    if not within:
        said = (
            f"THE BUDGET IS BROKEN: everything charged to {history.name!r} costs ε = "
            f"{show_epsilon(guarantee.epsilon, 4)} of {history.terms().epsilon:g}. It admits nothing more; "
            "what was released cannot be taken back."
        )
        warnings.insert(0, said)
    if history.backwards:
        warnings.append(
            f"Entry {history.backwards[0]} is dated before its predecessor: a clock was wrong. "
            "The order is that of the numbers, and no decision hangs on a clock."
        )
    place = history.name, history.seq, len(history.charges), history.head
    return Verification(*place, guarantee, within, tuple(warnings))


def is_within(history: History, guarantee: Guarantee) -> bool:
    """Return whether what everything charged costs is at most the budget."""
    # Where a rule admitted everything, another version's account may lie a little above the rule's.
    allowed = _ROUNDING if history.recorded else 2.0 * admission.DRIFT
    return guarantee.epsilon <= history.terms().epsilon * (1 + allowed)


def _check_filter(history: History, entry: Entry) -> None:
    noted = history.weight(entry.charge)
    charge = history.charges[entry.charge]
    if charge.basis == BASIS_GAUSSIAN:
        weight = weigh_as_gaussian(charge.event, history.terms().adjacency, noted.delta)
    else:
        [weight] = admission.weights_of(history, [charge.event])
    why = "it weighs more than it notes"
    if weight.delta > noted.delta * (1 + admission.DRIFT) + 1e-15:
        raise _wrong(entry, why)
    _note(history, entry, weight.divergence - 1e-15, noted.divergence, why)
    excess = admission.filter_excess(history)
    _note(history, entry, 1.0 + excess, 1.0, "the filter did not have room for it")


def _note(history: History, entry: Entry, now: float, then: float, why: str) -> None:
    """Note by how much an account is above the one that admitted; refuse what no version explains."""
    if now <= then * (1 + _ROUNDING):
        return
    share = now / then - 1.0 if then > 0.0 else math.inf
    if share > admission.DRIFT:
        raise _wrong(entry, why)
    history.drift[entry.seq] = max(share, history.drift.get(entry.seq, 0.0))


def _check_block(history: History, last: Entry) -> None:
    """Check the declared block as it is in the end; while it grew it cost less."""
    budget = history.terms()
    declared = tuple(
        event
        for number, event in history.block.items()
        if history.charges[number].basis == BASIS_DECLARED
    )
    cost = admission.block_epsilon(declared, budget.delta, budget.adjacency).epsilon
    why = f"the declared charges cost ε = {show_epsilon(cost, 6)}, more than the budget's {budget.epsilon:g}"
    _note(history, last, cost, budget.epsilon, why)


def _wrong(entry: Entry, why: str) -> LedgerCorruptedError:
    return LedgerCorruptedError(f"entry {entry.seq} of budget {entry.budget!r} is wrong: {why}.")


FORMAT = "privtune-certificate"
_VERSION = 5
_SHOWN = ("id", "basis", "study", "arm", "note", "plan_digest", "unit")
_LIBRARIES = ("privtune", "autodp", "dp-accounting", "numpy", "scipy")
_VERSIONS = 0.02  # by what share the numbers of two versions of a witness may differ


def export_certificate(storage: Storage, name: str, *, witnessed: bool = False) -> dict[str, Any]:
    """Verify a budget's log and return its certificate: what may be given away, ready for JSON.

    Args:
        storage: Where the log is: ``ledger.log.storage``.
        name: The budget's name.
        witnessed: Whether autodp and dp-accounting are asked about every charge, which takes seconds.

    Raises:
        LedgerCorruptedError: The log does not verify; nothing is certified then.
        DisputedAccountError: More is proved than our account says.

    Returns:
        Entries, chain, composition; no times finer than a day.

    Example:
        >>> from privtune.ledger import Budget, Ledger
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     certificate = export_certificate(ledger.log.storage, "clinic")
        >>> certificate["budget"]["terms"]["epsilon"], len(certificate["entries"])
        (3.0, 1)
    """
    history, lines = _read(storage, name)
    certificate = {
        "format": FORMAT,
        "version": _VERSION,
        "exported_at": datetime.now(UTC).date().isoformat(),
        "libraries": {library: _installed(library) for library in _LIBRARIES},
        "entry_version": ENTRY_VERSION,
        "entries": [_public(line) for line in lines],
        **_summary(history, admission.odometer(history)),
    }
    if audits := audits_of(storage, history):
        certificate["audits"] = audits
    if witnessed:
        certificate["witnesses"] = _witnesses_of(history)
    return {**certificate, "digest": digest_of(certificate)}


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

    **Guarantee**: a file in which any value was changed fails. Whoever rewrites all of it, hashes
    included, makes another certificate: its signature, a head noted elsewhere, or the ledger tells.

    Example:
        >>> from privtune.ledger import Budget, Ledger
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     certificate = export_certificate(ledger.log.storage, "clinic")
        >>> verify_certificate(certificate).charges
        0
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
    for key, value in _summary(
        history, admission.odometer(history, allowed=admission.DRIFT)
    ).items():
        if not _COMPARED.get(key, _same)(certificate.get(key), value):
            raise LedgerCorruptedError(
                f"the certificate's {key!r} is not what its entries say: it was edited."
            )
    rest = {key: value for key, value in certificate.items() if key != "digest"}
    if certificate.get("digest") != digest_of(rest):
        raise LedgerCorruptedError("the certificate's digest is not that of its content.")
    warnings: tuple[str, ...] = ()
    if "witnesses" in certificate:
        there, computed = certificate["witnesses"], _witnesses_of(history)
        if NOT_MADE in canonical({"there": there, "computed": computed}):
            there, computed = _by_autodp(there), _by_autodp(computed)
            warnings = (
                "dp-accounting was not asked, where this was certified or here: pip install "
                "'privtune[check]' for this independent check.",
            )
        if not _same(there, computed, _VERSIONS):
            raise LedgerCorruptedError(
                "the certificate's 'witnesses' do not say what they say when they are asked again: it "
                "was edited, or their versions differ in more than rounding."
            )
    found = verified(history)
    said = check_audits(certificate.get("audits", ()), history)
    return replace(found, warnings=(*found.warnings, *warnings, *said))


def _summary(history: History, guarantee: Guarantee) -> dict[str, Any]:
    """Return the part of a certificate that its entries determine: terms, charges, ε."""
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
                **{name: getattr(charge, name) for name in _SHOWN},
                "state": str(charge.state),
                "event": charge.event.to_dict(),
            }
            for charge in history.charges.values()
        ],
        "guarantee": guarantee.to_dict(),
        # What the filter could admit takes a table of the block's profile, a second of every training:
        # it is stated where it decided.
        **({"filter": admission.filter_state(history).to_dict()} if history.later else {}),
    }


def _public(entry: Entry) -> dict[str, Any]:
    parts = {name: part for name, part in asdict(entry).items() if name != "budget"}
    return {**parts, "body": json.loads(entry.body)}


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
    """Say whether a certified ε is at least what this version computes: it promises no more privacy."""
    if not isinstance(there, Mapping) or not {"epsilon", "method"} <= there.keys():
        return False
    fixed = [key for key in computed if key not in ("epsilon", "method", "bounds")]
    return _not_below(there["epsilon"], computed["epsilon"]) and all(
        _same(there.get(key), computed[key]) for key in fixed
    )


def _as_full(there: Any, computed: Any) -> bool:
    """Say whether a certified filter had at most the room that this version computes."""
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
        return float(one) >= float(other) / (1 + 2.0 * admission.DRIFT)
    except (TypeError, ValueError, OverflowError):
        return False


# What an accountant says; all else is what the entries say.
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "guarantee": _as_strict,
    "filter": _as_full,
    "within_budget": lambda there, computed: isinstance(there, bool) and there <= computed,
}


def _witnesses_of(history: History) -> dict[str, Any]:
    """Ask the witnesses about every charge that was not voided, and about all of them together."""
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


def _by_autodp(witnesses: Mapping[str, Any]) -> dict[str, Any]:
    """Return what witnesses say without dp-accounting, by which more may be proved, too."""
    return {
        name: {
            **{key: value for key, value in said.items() if key != "lower"},
            "witnesses": [one for one in said["witnesses"] if one["tool"] == AUTODP],
        }
        for name, said in witnesses.items()
    }


@cache
def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
