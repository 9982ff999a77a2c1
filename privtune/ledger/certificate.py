"""Certificates of budgets: files that may leave the trust boundary and can be verified alone.

A certificate holds the public part of every entry and a salted digest of the rest, so that the
chain can be checked from the file. Times, workers and transcripts stay behind: when a sealed
selection started and ended tells how many trials it took. So does the time from one export to the
next: a certificate carries the day alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.accounting import Composed, Event, Guarantee
from privtune.accounting.compare import AUTODP, NOT_MADE, DisputedAccountError, ask_witnesses
from privtune.ledger import admission
from privtune.ledger.audits import audits_of, check_audits
from privtune.ledger.chain import ENTRY_VERSION, Document, Entry, Kind, canonical, digest_of
from privtune.ledger.errors import SENSELESS, LedgerCorruptedError
from privtune.ledger.history import BASIS_DECLARED, BASIS_FILTER, BASIS_GAUSSIAN, History
from privtune.ledger.log import round_digest, stored_entry, unknown_budget
from privtune.ledger.schema import budgets, entries
from privtune.ledger.storage import Storage
from privtune.ledger.values import Charge, ChargeState
from privtune.ledger.weights import weigh_as_gaussian
from privtune.names import check_text, first_names
from privtune.numbers import is_number, show_epsilon

# Another version of a numerical library may move a composed ε by its rounding; that is no news.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Verification:
    """The result of verifying a budget's log: its size, last entry's hash, ε and warnings.

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
        """Return the verification as JSON-ready data."""
        return {
            **vars(self),
            "guarantee": self.guarantee.to_dict(),
            "warnings": list(self.warnings),
        }


def verify(storage: Storage, name: str, *, head: str | None = None) -> Verification:
    """Verify a budget's stored log: its hash chain, states, admissions, rounds and composition.

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
    witness = storage.witness
    if witness.path is not None and not witness.read_heads(name):
        notes.append(
            f"{witness.path}, beside the database, has no hash of this log, so entries missing at "
            "its end cannot be noticed. (A plain copy of the database lacks its write-ahead log; privtune "
            "budget backup makes a complete one.)"
        )
    original = storage.original()
    if original is not None:
        notes.append(
            f"This database is a copy of {original.place}. Charges that were made there after the copy are "
            "not in this log."
        )
    return verified(history, notes)


def _read(storage: Storage, name: str, head: str | None = None) -> tuple[History, list[Entry]]:
    """Read and verify a budget's log from the storage, and return its history and its entries.

    Args:
        storage: Where the log is.
        name: The budget.
        head: A chain head noted earlier that the log must contain.

    Returns:
        The history, and the entries that it is of.

    Raises:
        LedgerCorruptedError: Something is wrong; names the first wrong entry and says why.
    """
    check_text(name, "budget")
    noted_heads = storage.witness.read_heads(name)
    with storage.read() as connection:
        head_query = sa.select(budgets).where(budgets.c.name == name)
        row = connection.execute(head_query).one_or_none()
        if row is None:
            storage.witness.check(name, noted_heads, {})
            raise unknown_budget(connection, name, storage.safe_url)
        is_of_budget = entries.c.budget == name
        query = sa.select(entries).where(is_of_budget).order_by(entries.c.seq)
        rows = connection.execute(query).all()
        lines = []
        for line in rows:
            # What was appended since the head was read is not looked at, as long as it is a tail.
            if line.seq <= row.entries:
                lines.append((stored_entry(line), line.sealed))
        history = replay(name, lines, head=head)
        _check_head(history, row)
        _check_rounds(connection, history)
    hashes = {entry.seq: entry.hash for entry, _ in lines}
    storage.witness.check(name, noted_heads, hashes)
    return history, [entry for entry, _ in lines]


def _check_head(history: History, row: sa.Row[Any]) -> None:
    """Refuse a log that does not end with the entry that the budget's row names."""
    if history.seq != row.entries:
        missing = history.seq + 1
        raise LedgerCorruptedError(
            f"entry {missing} of budget {history.name!r} is missing: "
            f"the log ends before entry {row.entries}, where its head says."
        )
    if history.head != row.head or len(history.charges) != row.charges:
        raise LedgerCorruptedError(
            f"entry {history.seq} of budget {history.name!r} is wrong: the budget's row, which names the "
            "last entry, says otherwise."
        )


def _check_rounds(connection: Connection, history: History) -> None:
    """Refuse rounds whose results do not have the digest that the log noted."""
    name = history.name
    for charge, digest in history.rounds.items():
        if round_digest(connection, name, charge) != digest:
            raise LedgerCorruptedError(
                f"the round of charge {name}-{charge} is not what it was when it settled: "
                "a result was changed or removed."
            )


def replay(
    name: str, lines: Iterable[tuple[Entry, str | None]], *, head: str | None = None
) -> History:
    """Replay the entries of a log into a history, and check the chain, the states and each admission.

    Args:
        name: The budget.
        lines: The entries in order, each with the text of its sealed part; None where that stayed behind.
        head: A chain head that must be among them.

    Raises:
        LedgerCorruptedError: An entry is wrong, or the head is missing.
    """
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
    """Return the verification of a replayed log, with every warning that follows from it.

    Args:
        history: The log.
        notes: Warnings about the place where it was read.
    """
    guarantee = admission.odometer(history)
    within = is_within(history, guarantee)
    warnings = [
        *notes,
        *_study_warnings(history),
        *_drift_warnings(history),
    ]
    for seq, day in history.restorations.items():
        warnings.append(
            f"This database was restored from a copy on {day} (entry {seq}). Charges that the original got "
            "after the copy was made are not in this log."
        )
    recorded = history.recorded
    if recorded:
        warnings.insert(
            0,
            f"These charges were recorded after their release, without a check of the budget: "
            f"{first_names(recorded)}.",
        )
    if not within:
        cost = show_epsilon(guarantee.epsilon, 4)
        limit = history.terms().epsilon
        warnings.insert(
            0,
            f"THE BUDGET IS EXCEEDED: all charges to {history.name!r} together cost ε = {cost}, above the "
            f"limit of {limit:g}. Every further charge is refused. What was released cannot be taken back.",
        )
    if history.backwards:
        warnings.append(
            f"Entry {history.backwards[0]} has an earlier date than the entry before it: a clock was wrong. "
            "Entries are ordered by number, and nothing depends on their dates."
        )
    return Verification(
        budget=history.name,
        entries=history.seq,
        charges=len(history.charges),
        head=history.head,
        guarantee=guarantee,
        within_budget=within,
        warnings=tuple(warnings),
    )


def _study_warnings(history: History) -> Iterator[str]:
    """Yield a sentence for each note that studies left on charges, such as of a fixed seed.

    Notes of charges outside of studies are words of a user, and say what was released.
    """
    numbers_by_note: dict[str, list[int]] = {}
    for number, charge in history.charges.items():
        if charge.study and charge.note:
            numbers_by_note.setdefault(charge.note, []).append(number)
    for note, numbers in numbers_by_note.items():
        names = [f"{history.name}-{number}" for number in numbers]
        charges = "Charge" if len(names) == 1 else "Charges"
        sentence = note.rstrip(".")
        yield f"{charges} {first_names(names)}, as the study noted: {sentence}."


def _drift_warnings(history: History) -> Iterator[str]:
    """Yield a warning if this version accounts more for charges than the one that admitted them."""
    if not history.drift:
        return
    count = len(history.drift)
    first_entries = list(history.drift)[:3]
    places = ", ".join(map(str, first_entries))
    charges = "1 charge" if count == 1 else f"{count} charges"
    largest = max(history.drift.values())
    yield (
        f"For {charges} (entry {places}) this version of PrivTune computes up to "
        f"{100.0 * largest:.2g}% more than the version that admitted them. Versions "
        f"may differ by {100.0 * admission.DRIFT:g}%. The ε shown here is this version's."
    )


def is_within(history: History, guarantee: Guarantee) -> bool:
    """Return whether the ε of everything charged is at most the budget's, up to a tolerance."""
    # Where a rule admitted everything, another version's account may lie a little above the rule's.
    allowed = _ROUNDING if history.recorded else 2.0 * admission.DRIFT
    return guarantee.epsilon <= history.terms().epsilon * (1 + allowed)


def _check_filter(history: History, entry: Entry) -> None:
    """Check that a charge weighs no more than its entry notes, and that the filter had room for it."""
    weight_in_log = history.weight(entry.charge)
    charge = history.charges[entry.charge]
    if charge.basis == BASIS_GAUSSIAN:
        adjacency = history.terms().adjacency
        weight = weigh_as_gaussian(charge.event, adjacency, weight_in_log.delta)
    else:
        [weight] = admission.weights_of(history, [charge.event])
    why = "it weighs more than it notes"
    largest_delta = weight_in_log.delta * (1 + admission.DRIFT) + 1e-15
    if weight.delta > largest_delta:
        raise _wrong(entry, why)
    divergence = weight.divergence - 1e-15
    _note(history, entry, divergence, weight_in_log.divergence, why)
    excess = admission.filter_excess(history)
    _note(
        history,
        entry,
        1.0 + excess,
        1.0,
        "the filter did not have room for it",
    )


def _note(history: History, entry: Entry, now: float, then: float, why: str) -> None:
    """Note the share by which a number rose since an admission; refuse more than versions may differ by."""
    if now <= then * (1 + _ROUNDING):
        return
    share = now / then - 1.0 if then > 0.0 else math.inf
    if share > admission.DRIFT:
        raise _wrong(entry, why)
    share_before = history.drift.get(entry.seq, 0.0)
    history.drift[entry.seq] = max(share, share_before)


def _check_block(history: History, last: Entry) -> None:
    """Check that all declared charges together cost at most the budget."""
    budget = history.terms()
    events = []
    for number, event in history.block.items():
        if history.charges[number].basis == BASIS_DECLARED:
            events.append(event)
    guarantee = admission.block_epsilon(tuple(events), budget.delta, budget.adjacency)
    cost = guarantee.epsilon
    why = f"the declared charges cost ε = {show_epsilon(cost, 6)}, more than the budget's {budget.epsilon:g}"
    _note(history, last, cost, budget.epsilon, why)


def _wrong(entry: Entry, why: str) -> LedgerCorruptedError:
    """Return the error for an entry of the log that this version's account contradicts."""
    return LedgerCorruptedError(f"entry {entry.seq} of budget {entry.budget!r} is wrong: {why}.")


FORMAT = "privtune-certificate"
_VERSION = 5
_ENTRY_FIELDS = tuple(part.name for part in fields(Entry) if part.name != "budget")
_SHOWN = ("id", "basis", "study", "arm", "note", "plan_digest", "unit")
_LIBRARIES = ("privtune", "autodp", "dp-accounting", "numpy", "scipy")
_VERSIONS = 0.02  # by what share the numbers of two versions of a witness may differ


def export_certificate(storage: Storage, name: str, *, witnessed: bool = False) -> dict[str, Any]:
    """Verify a budget's log and return its certificate as JSON-ready data.

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
    today = datetime.now(UTC).date()
    certificate: dict[str, Any] = {
        "format": FORMAT,
        "version": _VERSION,
        "exported_at": today.isoformat(),
        "libraries": {library: _installed(library) for library in _LIBRARIES},
        "entry_version": ENTRY_VERSION,
        "entries": [_public(line) for line in lines],
        **_summary(history, admission.odometer(history)),
    }
    audits = audits_of(storage, history)
    if audits:
        certificate["audits"] = audits
    if witnessed:
        certificate["witnesses"] = _witnesses_of(history)
    certificate["digest"] = digest_of(certificate)
    return certificate


def verify_certificate(certificate: Document, *, head: str | None = None) -> Verification:
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


def _verified(certificate: Document, head: str | None) -> Verification:
    """Check a certificate, and raise one of :data:`SENSELESS` if it has another shape."""
    if certificate.get("format") != FORMAT or certificate.get("version") != _VERSION:
        raise LedgerCorruptedError(f"this is no {FORMAT} of version {_VERSION}.")
    name = certificate["budget"]["terms"]["name"]
    lines = [(_entry(name, value), None) for value in certificate["entries"]]
    history = replay(name, lines, head=head)
    guarantee = admission.odometer(history, allowed=admission.DRIFT)
    summary = _summary(history, guarantee)
    for key, value in summary.items():
        is_right = _COMPARED.get(key, _same)
        if not is_right(certificate.get(key), value):
            raise LedgerCorruptedError(
                f"the certificate's {key!r} is not what its entries say: it was edited."
            )
    content = dict(certificate)
    digest = content.pop("digest", None)
    if digest != digest_of(content):
        raise LedgerCorruptedError("the certificate's digest is not that of its content.")
    witness_warnings = _check_witnesses(certificate, history)
    verification = verified(history)
    audit_warnings = check_audits(certificate.get("audits", ()), history)
    warnings = (
        *verification.warnings,
        *witness_warnings,
        *audit_warnings,
    )
    return replace(verification, warnings=warnings)


def _check_witnesses(certificate: Document, history: History) -> tuple[str, ...]:
    """Check the other accountants' answers in a certificate, and return a warning if one is missing."""
    if "witnesses" not in certificate:
        return ()
    warnings: tuple[str, ...] = ()
    certified = certificate["witnesses"]
    computed = _witnesses_of(history)
    both = {"there": certified, "computed": computed}
    if NOT_MADE in canonical(both):
        certified = _by_autodp(certified)
        computed = _by_autodp(computed)
        warnings = (
            "dp-accounting did not check this certificate, either when it was made or now. For this "
            "independent check: pip install 'privtune[check]'.",
        )
    if not _same(certified, computed, _VERSIONS):
        raise LedgerCorruptedError(
            "the certificate's 'witnesses' do not say what they say when they are asked again: it "
            "was edited, or their versions differ in more than rounding."
        )
    return warnings


def _summary(history: History, guarantee: Guarantee) -> dict[str, Any]:
    """Return the part of a certificate that its entries determine: terms, charges, ε."""
    budget = {
        "terms": history.terms().to_dict(),
        "created_at": history.created_at,
        "closed": history.closed,
        "dataset": history.dataset,
        "datasets": [str(dataset) for dataset in history.datasets],
    }
    charges = history.charges.values()
    summary: dict[str, Any] = {
        "within_budget": is_within(history, guarantee),
        "head": history.head,
        "budget": budget,
        "charges": [_public_charge(charge) for charge in charges],
        "guarantee": guarantee.to_dict(),
    }
    # What the filter could admit takes a table of the block's profile, a second of every training:
    # it is stated where it decided.
    if history.later:
        summary["filter"] = admission.filter_state(history).to_dict()
    return summary


def _public_charge(charge: Charge) -> dict[str, Any]:
    """Return the public fields of a charge as JSON-ready data, without times and transcript."""
    dataset = charge.dataset
    document = {name: getattr(charge, name) for name in _SHOWN}
    document["state"] = str(charge.state)
    document["dataset"] = None if dataset is None else dataset.to_dict()
    document["event"] = charge.event.to_dict()
    return document


def _public(entry: Entry) -> dict[str, Any]:
    """Return an entry of the log as a certificate has it, with only a digest of the sealed part."""
    parts: dict[str, Any] = {name: getattr(entry, name) for name in _ENTRY_FIELDS}
    parts["body"] = json.loads(entry.body)
    return parts


def _entry(budget: str, value: Document) -> Entry:
    """Return the log's entry from its form in a certificate, and refuse fields of another type."""
    parts = dict(value)
    parts["body"] = canonical(value["body"])
    entry = Entry(budget=budget, **parts)
    for name in ("budget", *_ENTRY_FIELDS):
        part = getattr(entry, name)
        kind = int if name in ("seq", "charge") else str
        if type(part) is not kind:
            raise TypeError(f"{name} of an entry is {type(part).__name__}")
    return entry


def _same(certified: object, computed: object, share: float = _ROUNDING) -> bool:
    """Return whether certified data equals computed data, up to a relative tolerance for floats."""
    match computed:
        case Mapping():
            return _same_mapping(certified, computed, share)
        case list():
            if not isinstance(certified, list) or len(certified) != len(computed):
                return False
            return all(map(partial(_same, share=share), certified, computed))
        case float():
            if certified == computed:  # also two infinite ones
                return True
            return is_number(certified) and math.isclose(certified, computed, rel_tol=share)
        case _:
            # 1 and True are equal, and not the same.
            if type(certified) is not type(computed):
                return False
            return bool(certified == computed)


def _same_mapping(
    certified: object,
    computed: Document,
    share: float,
    beside: Collection[str] = (),
) -> bool:
    """Return whether two mappings have equal keys and, up to a tolerance, equal values.

    Args:
        certified: What a certificate has.
        computed: What it should have.
        share: By what share numbers may differ.
        beside: Parts that are compared otherwise, or not at all.
    """
    if not isinstance(certified, Mapping) or certified.keys() != computed.keys():
        return False
    for key, value in computed.items():
        # The words for why a witness differs hang on its number.
        if key == "why" or key in beside:
            continue
        if not _same(certified[key], value, share):
            return False
    return True


def _as_strict(certified: Any, computed: Any) -> bool:
    """Return whether a certified guarantee states an ε of at least this version's, up to a tolerance."""
    if not isinstance(certified, Mapping):
        return False
    if "epsilon" not in certified or "method" not in certified:
        return False
    if not _not_below(certified["epsilon"], computed["epsilon"]):
        return False
    for key, value in computed.items():
        if key in ("epsilon", "method", "bounds"):
            continue
        if not _same(certified.get(key), value):
            return False
    return True


def _as_full(certified: Any, computed: Any) -> bool:
    """Return whether a certified filter state claims at most the room that this version computes."""
    if not _same_mapping(certified, computed, _ROUNDING, beside=("capacity", "used")):
        return False
    certified_room = certified["capacity"]
    room = computed["capacity"]
    # A computed room of None is below every number: the certified one was larger.
    if certified_room is not None and not _not_below(room, certified_room):
        return False
    return _not_below(certified["used"], computed["used"])


def _not_below(number: Any, other: Any) -> bool:
    """Return whether a number is at least another one, up to the difference allowed between versions."""
    tolerance = 1 + 2.0 * admission.DRIFT
    try:
        return float(number) >= float(other) / tolerance
    except (TypeError, ValueError, OverflowError):
        return False


# What an accountant says; all else is what the entries say.
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "guarantee": _as_strict,
    "filter": _as_full,
    "within_budget": lambda certified, computed: (
        isinstance(certified, bool) and certified <= computed
    ),
}


def _witnesses_of(history: History) -> dict[str, Any]:
    """Return other accountants' answers for each charge that was not voided, and for all together."""
    terms = history.terms()
    events: dict[str, Event] = {}
    for charge in history.charges.values():
        if charge.state is not ChargeState.VOIDED:
            events[charge.id] = charge.event
    if len(events) > 1:
        events["all together"] = Composed(list(events.values()))
    answers = {}
    for name, event in events.items():
        answer = ask_witnesses(event, terms.delta, adjacency=terms.adjacency)
        if answer.objection:
            raise DisputedAccountError(f"{name}: {answer.objection}")
        answers[name] = answer.to_dict()
    return answers


def _by_autodp(witnesses: Document) -> dict[str, Any]:
    """Return autodp's answers from those of all other accountants, without lower bounds."""
    answers = {}
    for name, answer in witnesses.items():
        by_autodp = [witness for witness in answer["witnesses"] if witness["tool"] == AUTODP]
        answer_by_autodp = {**answer, "witnesses": by_autodp}
        answer_by_autodp.pop("lower", None)
        answers[name] = answer_by_autodp
    return answers


@cache
def _installed(library: str) -> str:
    """Return the version of an installed library, or ``unknown``."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
