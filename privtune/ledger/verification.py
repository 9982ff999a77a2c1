"""Replays a budget's log and checks everything that it says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from privtune.accounting import Guarantee
from privtune.ledger.admission import (
    DRIFT,
    block_epsilon,
    filter_excess,
    odometer,
    weights_of,
)
from privtune.ledger.chain import Entry, Kind
from privtune.ledger.errors import LedgerCorruptedError, UnknownBudgetError
from privtune.ledger.history import BASIS_DECLARED, BASIS_FILTER, BASIS_GAUSSIAN, History
from privtune.ledger.log import stored_entry
from privtune.ledger.round_digest import round_digest
from privtune.ledger.schema import budgets, entries
from privtune.ledger.storage import Storage
from privtune.ledger.weights import weigh_as_gaussian
from privtune.names import check_text
from privtune.numbers import show_epsilon

# Another version of a numerical library may move a composed ε by its rounding; that is no news.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Verification:
    """What a verified log says.

    Attributes:
        budget: The budget's name.
        entries: How many entries it has.
        charges: How many charges.
        head: The hash of the last entry; note it elsewhere, and a cut tail can be told.
        guarantee: The composition, computed anew.
        within_budget: Whether that is at most the budget. A log may be sound and its budget broken:
            releases that were recorded after the fact are in it whatever they cost.
        warnings: What the reader must know, a sentence each; the first says that the budget is
            broken, if it is.

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
            "budget": self.budget,
            "entries": self.entries,
            "charges": self.charges,
            "head": self.head,
            "guarantee": self.guarantee.to_dict(),
            "within_budget": self.within_budget,
            "warnings": list(self.warnings),
        }


def verify(storage: Storage, name: str, *, head: str | None = None) -> Verification:
    """Replay a budget's log from the storage: chain, states, admissions, rounds, composition.

    Args:
        storage: Where the log is.
        name: The budget.
        head: A chain head noted earlier, from a certificate; the log must contain it.

    Returns:
        What the log says.

    Raises:
        LedgerCorruptedError: Something is wrong; names the first wrong entry and says why.

    **Guarantee**: an edited, removed, inserted or reordered entry is found, unless the log was
    rewritten from there to its end by somebody who computed all the hashes anew, or cut off at its
    end; with a head noted before, these are found too. The heads that a SQLite ledger notes in a
    file beside the database count as noted, as long as that file is there.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> from privtune.ledger import Budget, ChargeRequest, Ledger
        >>> ledger = Ledger()
        >>> budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        >>> charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(8.0))])

        >>> report = verify(ledger.log.storage, "clinic", head=ledger.head("clinic"))
        >>> report.charges, report.within_budget, report.warnings
        (1, True, ())
        >>> ledger.close()
    """
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
    notes = []
    if storage.witness.path is not None and not seen:
        notes.append(
            f"Nothing is noted about it in {storage.witness.path}, beside the database: whether "
            "entries are missing at its end cannot be told. (A plain copy of the database lacks what "
            "is in its write-ahead log; privtune budget backup makes a whole one.)"
        )
    return verified(history, notes)


def replay(
    name: str, lines: Iterable[tuple[Entry, str | None]], *, head: str | None = None
) -> History:
    """Replay entries and check each: chain, states, and that it was right to admit it.

    Raises:
        LedgerCorruptedError: Names the first entry that is wrong.
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
    """Return what a replayed log says, with every warning that follows from it."""
    guarantee = odometer(history)
    within = is_within(history, guarantee)
    warnings = list(notes)
    if history.drift:
        places = ", ".join(str(seq) for seq in list(history.drift)[:3])
        warnings.append(
            f"This version's account of {len(history.drift)} admissions (entry {places}) lies up to "
            f"{100.0 * max(history.drift.values()):.2g}% above the one that admitted them. That is "
            f"within the {100.0 * DRIFT:g}% by which accounts of versions may differ; the ε here is "
            "this version's."
        )
    recorded = history.recorded
    if recorded:
        more = f" and {len(recorded) - 3} more" if len(recorded) > 3 else ""
        warnings.insert(
            0,
            f"Recorded after their release, which no rule admitted: {', '.join(recorded[:3])}{more}.",
        )
    if not within:
        warnings.insert(
            0,
            f"THE BUDGET IS BROKEN: everything charged to {history.name!r} costs ε = "
            f"{show_epsilon(guarantee.epsilon, 4)} of {history.terms().epsilon:g}. It admits nothing more; "
            "what was released cannot be taken back.",
        )
    if history.backwards:
        warnings.append(
            f"Entry {history.backwards[0]} is dated before its predecessor: a clock was wrong. "
            "The order is that of the numbers, and no decision hangs on a clock."
        )
    return Verification(
        history.name,
        history.seq,
        len(history.charges),
        history.head,
        guarantee,
        within,
        tuple(warnings),
    )


def is_within(history: History, guarantee: Guarantee) -> bool:
    """Return whether what everything charged costs is at most the budget.

    Where a rule admitted everything, another version's account may lie a little above the one that
    the rule had.
    """
    allowed = _ROUNDING if history.recorded else 2.0 * DRIFT
    return guarantee.epsilon <= history.terms().epsilon * (1 + allowed)


def _check_filter(history: History, entry: Entry) -> None:
    noted = history.weight(entry.charge)
    charge = history.charges[entry.charge]
    if charge.basis == BASIS_GAUSSIAN:
        weight = weigh_as_gaussian(charge.event, history.terms().adjacency, noted.delta)
    else:
        [weight] = weights_of(history, [charge.event])
    # What fails is rounded nowhere; a divergence may be bounded otherwise by another version.
    if weight.delta > noted.delta * (1 + DRIFT) + 1e-15:
        raise _wrong(entry, "it weighs more than it notes")
    _note(
        history, entry, weight.divergence - 1e-15, noted.divergence, "it weighs more than it notes"
    )
    excess = filter_excess(history)
    _note(history, entry, 1.0 + excess, 1.0, "the filter did not have room for it")


def _note(history: History, entry: Entry, now: float, then: float, why: str) -> None:
    """Note by how much an account is above the one that admitted; refuse what no version explains."""
    if now <= then * (1 + _ROUNDING):
        return
    share = now / then - 1.0 if then > 0.0 else math.inf
    if share > DRIFT:
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
    cost = block_epsilon(declared, budget.delta, budget.adjacency).epsilon
    why = f"the declared charges cost ε = {show_epsilon(cost, 6)}, more than the budget's {budget.epsilon:g}"
    _note(history, last, cost, budget.epsilon, why)


def _wrong(entry: Entry, why: str) -> LedgerCorruptedError:
    return LedgerCorruptedError(f"entry {entry.seq} of budget {entry.budget!r} is wrong: {why}.")
