"""A budget's log in memory: replayed entry by entry, each checked against the chain."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from privtune.accounting import Event, event_from_dict
from privtune.errors import PrivTuneError
from privtune.ledger.chain import GENESIS, Entry, Kind
from privtune.ledger.errors import SENSELESS, LedgerCorruptedError
from privtune.ledger.values import Admission, Budget, Charge, ChargeState
from privtune.ledger.weights import Weight, slack_of, weigh, weigh_as_gaussian

BASIS_DECLARED = "declared"
BASIS_FILTER = "filter"
BASIS_GAUSSIAN = "gaussian"
BASIS_RECORDED = "recorded"

_CLOCKS_DIFFER = timedelta(minutes=5)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_BEFORE = {
    Kind.STARTED: (ChargeState.RESERVED,),
    Kind.SETTLED: (ChargeState.STARTED,),
    Kind.VOIDED: (ChargeState.RESERVED,),
}


def order_of(budget: Budget) -> float:
    """Return the order of a stored budget's filter."""
    if budget.order is None:
        raise LedgerCorruptedError(f"budget {budget.name!r} has no order for its filter.")
    return budget.order


@dataclass
class History:
    """What a budget's log says, up to the entry last applied."""

    name: str
    seq: int = 0
    head: str = GENESIS
    budget: Budget | None = None
    created_at: str = ""
    last_at: datetime = _LONG_AGO
    backwards: list[int] = field(default_factory=list)  # entries dated well before the one before
    closed: bool = False
    frozen: bool = False  # a charge was started: the declaration is closed
    charges: dict[int, Charge] = field(default_factory=dict)
    block: dict[int, Event] = field(default_factory=dict)  # declared, by the charge's number
    later: Counter[Event] = field(default_factory=Counter)  # came after the first start
    late: Counter[Event] = field(default_factory=Counter)  # of them those admitted as Gaussian
    used: Fraction = Fraction(0)  # the divergences of the others; exact, or their order would count
    variance: Fraction = Fraction(0)
    used_delta: Fraction = Fraction(0)
    unbounded: int = 0  # how many have no finite divergence
    rounds: dict[int, str] = field(default_factory=dict)  # digests of results, as they settled
    audits: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)  # admitted by divergence, and not over
    drift: dict[int, float] = field(default_factory=dict)  # by what share today's account is higher
    _events: dict[str, Event] = field(default_factory=dict)
    _weights: dict[int, Weight] = field(default_factory=dict)

    def terms(self) -> Budget:
        """Return the budget's terms."""
        if self.budget is None:
            raise LedgerCorruptedError(f"the log of budget {self.name!r} has no entries.")
        return self.budget

    def apply(self, entry: Entry, sealed: str | None) -> None:
        """Check an entry against the chain and take it in."""
        if entry.seq != self.seq + 1:
            raise self._wrong(entry.seq, f"entry {self.seq + 1} is missing")
        if entry.previous != self.head:
            raise self._wrong(entry.seq, "it does not name its predecessor's hash")
        if entry.computed_hash() != entry.hash:
            raise self._wrong(entry.seq, "its content does not have the hash that it carries")
        try:
            self._take(entry, {} if sealed is None else json.loads(sealed))
        except LedgerCorruptedError:
            raise
        except (*SENSELESS, PrivTuneError) as error:
            raise self._wrong(entry.seq, f"it cannot be read ({error})") from error
        self.seq = entry.seq
        self.head = entry.hash

    def _take(self, entry: Entry, sealed: dict[str, Any]) -> None:
        at = datetime.fromisoformat(sealed["at"]) if sealed else _LONG_AGO
        if entry.kind == Kind.CREATED:
            if entry.seq != 1:
                raise self._wrong(entry.seq, "a budget is created by its first entry alone")
            body = json.loads(entry.body)
            self.budget = Budget(**body["terms"])
            if self.budget.name != self.name:
                raise self._wrong(1, f"it creates budget {self.budget.name!r}")
            if self.budget.order is None:
                raise self._wrong(1, "its filter has no order")
            self.created_at = str(body["created_at"])
        elif entry.seq == 1:
            raise self._wrong(1, "the first entry must create the budget")
        elif entry.kind == Kind.CLOSED:
            self.closed = True
        elif entry.kind == Kind.AUDITED:
            body = json.loads(entry.body)
            self.audits[str(body["digest"])] = body
        elif entry.kind == Kind.RESERVED:
            self._reserve(entry, at)
        else:
            self._move(entry, sealed, at)
        if sealed and self.last_at - at > _CLOCKS_DIFFER:
            self.backwards.append(entry.seq)
        self.last_at = at

    def _reserve(self, entry: Entry, at: datetime) -> None:
        if entry.charge != len(self.charges) + 1:
            raise self._wrong(entry.seq, f"charge {len(self.charges) + 1} comes next")
        body = json.loads(entry.body)
        self._check_basis(entry, body)
        event = self._event(body["event"])
        if not all(isinstance(body[name], str) for name in ("study", "arm", "note", "plan_digest")):
            raise self._wrong(entry.seq, "its words are no texts")
        self.charges[entry.charge] = Charge(
            id=f"{self.name}-{entry.charge}",
            budget=self.name,
            event=event,
            study=body["study"],
            arm=body["arm"],
            note=body["note"],
            plan_digest=body["plan_digest"],
            basis=body["basis"],
            state=ChargeState.RESERVED,
            created_at=at,
            unit=body["unit"],
        )
        if body["basis"] == BASIS_FILTER:  # until it is over the filter cannot go over
            self.open.add(entry.charge)
        if not self.frozen:
            self.block[entry.charge] = event
        else:
            weight = self._weight(event, body.get("weight"))
            self._weights[entry.charge] = weight
            self._count(event, weight, 1, body["basis"])
            if body["basis"] == BASIS_RECORDED and self.late:
                self._add(self._late_weight(event), 1, True)

    def _check_basis(self, entry: Entry, body: dict[str, Any]) -> None:
        """Refuse what no ledger admits, whatever it costs."""
        unit = self.terms().unit
        if body["unit"] != unit:
            raise self._wrong(entry.seq, f"it charges per {body['unit']}, the budget is per {unit}")
        basis = body["basis"]
        filtered = basis in (BASIS_FILTER, BASIS_GAUSSIAN)
        if not filtered and basis not in (BASIS_DECLARED, BASIS_RECORDED):
            raise self._wrong(entry.seq, f"no charge is admitted on the basis {basis!r}")
        if self.closed:
            raise self._wrong(entry.seq, "the budget had been closed for good")
        if basis == BASIS_DECLARED and self.frozen:
            raise self._wrong(entry.seq, "it declares a charge after the first start")
        if filtered and not self.frozen:
            raise self._wrong(entry.seq, "it passed the filter before the first start")
        if filtered and self.terms().admission is Admission.DECLARED:
            raise self._wrong(entry.seq, "a declared budget admits nothing after its first start")
        if basis == BASIS_FILTER and self.late:
            raise self._wrong(entry.seq, "the filter admits Gaussian charges alone from then on")
        if basis == BASIS_GAUSSIAN and (self.open or body.get("weight") is None):
            raise self._wrong(entry.seq, "what the filter had admitted otherwise was not over")
        if not filtered and "weight" in body:
            raise self._wrong(entry.seq, f"a {basis} charge notes no weight: it is computed")

    def _move(self, entry: Entry, sealed: dict[str, Any], at: datetime) -> None:
        charge = self.charges.get(entry.charge)
        if charge is None or charge.state not in _BEFORE[Kind(entry.kind)]:
            was = "unknown" if charge is None else str(charge.state)
            raise self._wrong(entry.seq, f"charge {entry.charge} is {was}, not to be {entry.kind}")
        if entry.kind == Kind.VOIDED and charge.basis == BASIS_RECORDED:
            raise self._wrong(entry.seq, "what had been released cannot be voided")
        state = ChargeState(entry.kind)
        if state is ChargeState.STARTED:
            self.frozen = True
            charge = replace(charge, state=state, started_at=at)
        else:
            digest = sealed.get("transcript_digest", "")
            noted = "; ".join(filter(None, (charge.note, json.loads(entry.body).get("note", ""))))
            charge = replace(
                charge, state=state, closed_at=at, transcript_digest=digest, note=noted
            )
            if "round" in sealed:
                self.rounds[entry.charge] = sealed["round"]
        self.charges[entry.charge] = charge
        if state is not ChargeState.STARTED:
            self.open.discard(entry.charge)
        if state is not ChargeState.VOIDED:
            return
        if entry.charge not in self.block:
            # A filter counts what ran, and this never will.
            self._count(charge.event, self._weights[entry.charge], -1, charge.basis)
        elif not self.frozen:
            # Nobody has seen anything yet, so the declaration may still change. Once something was
            # seen, the choice to drop a declared charge may depend on it: it stays in the block.
            del self.block[entry.charge]

    @property
    def recorded(self) -> list[str]:
        """The charges that no rule admitted: releases that had happened."""
        return [c.id for c in self.charges.values() if c.basis == BASIS_RECORDED]

    def weight(self, number: int) -> Weight:
        """Return what a charge that came after the first start weighs in the filter."""
        return self._weights[number]

    def _weight(self, event: Event, stored: list[float] | None) -> Weight:
        """Return what a charge weighs in the filter: as noted at its admission, or computed."""
        if stored is not None:
            divergence, delta = map(float, stored)
            if not (0 <= divergence < math.inf and 0 <= delta <= 1):
                raise ValueError(f"its weight is {stored}")
            return Weight(divergence, delta)
        budget = self.terms()
        return weigh(event, order_of(budget), budget.adjacency, slack_of(budget.delta))

    def _late_weight(self, event: Event) -> Weight:
        """Return the Gaussian weight of a recorded release: it may have come after the filter went over."""
        budget = self.terms()
        return weigh_as_gaussian(event, budget.adjacency, 1e-3 * budget.delta)

    def confirm_weight(self, event: Event) -> None:
        """Weigh a release before it is recorded: an event that cannot be weighed would spoil the log."""
        if self.frozen:
            self._weight(event, None)
        if self.late:
            self._late_weight(event)

    def _count(self, event: Event, weight: Weight, times: int, basis: str) -> None:
        gaussian = basis == BASIS_GAUSSIAN
        for counter in (self.later, self.late) if gaussian else (self.later,):
            counter[event] += times
            if not counter[event]:
                del counter[event]
        self._add(weight, times, gaussian)

    def _add(self, weight: Weight, times: int, gaussian: bool) -> None:
        if not math.isfinite(weight.divergence):
            self.unbounded += times
            return
        amount, delta = weight.exact()
        self.used_delta += times * delta
        if gaussian:
            self.variance += times * amount
        else:
            self.used += times * amount

    def _event(self, value: dict[str, Any]) -> Event:
        """Parse an event; equal events are one object."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._events:
            self._events[key] = event_from_dict(value)
        return self._events[key]

    def _wrong(self, seq: int, why: str) -> LedgerCorruptedError:
        return LedgerCorruptedError(f"entry {seq} of budget {self.name!r} is wrong: {why}.")
