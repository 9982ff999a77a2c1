"""A budget's log in memory: replayed entry by entry, each checked against the chain."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, TypeVar

from privtune.accounting import Event, event_from_dict
from privtune.errors import PrivTuneError
from privtune.ledger.chain import GENESIS, Document, Entry, Kind
from privtune.ledger.datasets import Dataset, name_of, refuse_other_dataset
from privtune.ledger.errors import SENSELESS, LedgerCorruptedError
from privtune.ledger.values import Admission, Budget, Charge, ChargeState
from privtune.ledger.weights import Weight, slack_of, weigh, weigh_as_gaussian

T = TypeVar("T")

BASIS_DECLARED = "declared"
BASIS_FILTER = "filter"
BASIS_GAUSSIAN = "gaussian"
BASIS_RECORDED = "recorded"

_DIGESTS = ("transcript_digest", "release_digest", "trials_digest")
_CLOCKS_DIFFER = timedelta(minutes=5)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_BEFORE = {
    Kind.STARTED: (ChargeState.RESERVED,),
    Kind.SETTLED: (ChargeState.STARTED,),
    Kind.VOIDED: (ChargeState.RESERVED,),
}


def order_of(budget: Budget) -> float:
    """Return the Rényi order of a stored budget's privacy filter."""
    if budget.order is None:
        raise LedgerCorruptedError(f"budget {budget.name!r} has no order for its filter.")
    return budget.order


@dataclass
class History:
    """The state of a budget, as its log gives it up to the entry last applied.

    Attributes:
        name: The budget's name.
        seq: The number of the entry last applied.
        head: Its hash.
        budget: The terms; None before the first entry.
        created_at: The day of the first entry.
        last_at: When the last entry was written, by the clock of its writer.
        backwards: Entries that are dated well before the one before them.
        closed: Whether the budget was closed for good.
        frozen: Whether a charge was started, so that the declaration is closed.
        charges: All charges, by number.
        block: The events of the declared charges, by the charge's number.
        later: The events that came after the first start, with how often each did.
        late: Those of them that were admitted as Gaussian.
        used: The sum of the divergences of the others; exact, or their order would count.
        variance: The sum of the variances of those admitted as Gaussian.
        used_delta: The sum of all failure probabilities.
        unbounded: How many have no finite divergence.
        rounds: Digests of the results of rounds, as they settled, by the charge's number.
        audits: What the log notes of audits, by digest.
        restorations: The days of restorations from copies, by entry.
        open: The charges that were admitted by divergence, and are not over.
        drift: By what share today's account of an admission is higher, by entry.
    """

    name: str
    seq: int = 0
    head: str = GENESIS
    budget: Budget | None = None
    created_at: str = ""
    last_at: datetime = _LONG_AGO
    backwards: list[int] = field(default_factory=list)
    closed: bool = False
    frozen: bool = False
    charges: dict[int, Charge] = field(default_factory=dict)
    block: dict[int, Event] = field(default_factory=dict)
    later: Counter[Event] = field(default_factory=Counter)
    late: Counter[Event] = field(default_factory=Counter)
    used: Fraction = Fraction(0)
    variance: Fraction = Fraction(0)
    used_delta: Fraction = Fraction(0)
    unbounded: int = 0
    rounds: dict[int, str] = field(default_factory=dict)
    audits: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    restorations: dict[int, str] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    drift: dict[int, float] = field(default_factory=dict)
    _events: dict[str, Event] = field(default_factory=dict)
    _weights: dict[int, Weight] = field(default_factory=dict)
    _datasets: dict[Dataset, None] = field(default_factory=dict)  # in order, unlike a set

    def terms(self) -> Budget:
        """Return the budget's terms."""
        if self.budget is None:
            raise LedgerCorruptedError(f"the log of budget {self.name!r} has no entries.")
        return self.budget

    def apply(self, entry: Entry, sealed: str | None) -> None:
        """Check the log's next entry against the hash chain, and update the state by it.

        Args:
            entry: The next entry of the log.
            sealed: The text of its sealed part; None where that stayed behind, as in a certificate.

        Raises:
            LedgerCorruptedError: The entry is not the next one, was edited, or says what no ledger writes.
        """
        if entry.seq != self.seq + 1:
            raise self._wrong(entry.seq, f"entry {self.seq + 1} is missing")
        if entry.previous != self.head:
            raise self._wrong(entry.seq, "it does not name its predecessor's hash")
        if entry.computed_hash() != entry.hash:
            raise self._wrong(entry.seq, "its content does not have the hash that it carries")
        try:
            sealed_part = {} if sealed is None else json.loads(sealed)
            self._take(entry, sealed_part)
        except LedgerCorruptedError:
            raise
        except (*SENSELESS, PrivTuneError) as error:
            raise self._wrong(entry.seq, f"it cannot be read ({error})") from error
        self.seq = entry.seq
        self.head = entry.hash

    def _take(self, entry: Entry, sealed: Document) -> None:
        """Update the state by an entry of any kind, whose place in the hash chain was checked."""
        at = datetime.fromisoformat(sealed["at"]) if sealed else _LONG_AGO
        if entry.seq == 1 and entry.kind != Kind.CREATED:
            raise self._wrong(1, "the first entry must create the budget")
        match entry.kind:
            case Kind.CREATED:
                self._create(entry)
            case Kind.CLOSED:
                self.closed = True
            case Kind.AUDITED:
                body = json.loads(entry.body)
                self.audits[str(body["digest"])] = body
            case Kind.RESTORED:
                body = json.loads(entry.body)
                self.restorations[entry.seq] = str(body["day"])
            case Kind.RESERVED:
                self._reserve(entry, at)
            case _:
                self._move(entry, sealed, at)
        if sealed and self.last_at - at > _CLOCKS_DIFFER:
            self.backwards.append(entry.seq)
        self.last_at = at

    def _create(self, entry: Entry) -> None:
        """Set the terms and the day of creation from the budget's first entry."""
        if entry.seq != 1:
            raise self._wrong(entry.seq, "a budget is created by its first entry alone")
        body = json.loads(entry.body)
        self.budget = Budget(**body["terms"])
        if self.budget.name != self.name:
            raise self._wrong(1, f"it creates budget {self.budget.name!r}")
        if self.budget.order is None:
            raise self._wrong(1, "its filter has no order")
        self.created_at = str(body["created_at"])

    def _reserve(self, entry: Entry, at: datetime) -> None:
        """Add a charge: before the first start to the declared ones, after it to the filter's sums."""
        number = len(self.charges) + 1
        if entry.charge != number:
            raise self._wrong(entry.seq, f"charge {number} comes next")
        body = json.loads(entry.body)
        basis = body["basis"]
        problem = self._basis_problem(body)
        if problem:
            raise self._wrong(entry.seq, problem)
        event = self._event(body["event"])
        dataset = self._dataset(body)
        words = [body[name] for name in ("study", "arm", "note", "plan_digest")]
        if not all(isinstance(word, str) for word in words):
            raise self._wrong(entry.seq, "its words are no texts")
        self.charges[number] = Charge(
            id=f"{self.name}-{number}",
            budget=self.name,
            event=event,
            study=body["study"],
            arm=body["arm"],
            note=body["note"],
            plan_digest=body["plan_digest"],
            basis=basis,
            state=ChargeState.RESERVED,
            created_at=at,
            unit=body["unit"],
            dataset=dataset,
        )
        if dataset is not None:
            self._datasets[dataset] = None
        if basis == BASIS_FILTER:  # until it is over the filter cannot go over
            self.open.add(number)
        if not self.frozen:
            self.block[number] = event
            return
        weight = self._weight(event, body.get("weight"))
        self._weights[number] = weight
        self._count(event, weight, 1, basis)
        if basis == BASIS_RECORDED and self.late:
            self._add(self._late_weight(event), 1, True)

    def _dataset(self, body: Document) -> Dataset | None:
        """Return the dataset that a charge names, and refuse another one than the budget protects."""
        if "dataset" not in body:
            return None
        dataset = Dataset.from_dict(body["dataset"])
        refuse_other_dataset(
            dataset,
            self.terms().dataset,
            self.datasets,
            budget=self.name,
        )
        return dataset

    @property
    def datasets(self) -> list[Dataset]:
        """The distinct datasets of charges that were not voided, in the order of the charges."""
        return list(self._datasets)

    @property
    def dataset(self) -> str:
        """The name of the protected dataset, empty as long as no dataset has a name."""
        return name_of(self.terms().dataset, self.datasets)

    def _basis_problem(self, body: Document) -> str:
        """Return why the log may not admit a charge by its rule at this point, or an empty text."""
        terms = self.terms()
        if body["unit"] != terms.unit:
            return f"it charges per {body['unit']}, the budget is per {terms.unit}"
        basis = body["basis"]
        is_filtered = basis in (BASIS_FILTER, BASIS_GAUSSIAN)
        if not is_filtered and basis not in (BASIS_DECLARED, BASIS_RECORDED):
            return f"no charge is admitted on the basis {basis!r}"
        if self.closed:
            return "the budget had been closed for good"
        if basis == BASIS_DECLARED and self.frozen:
            return "it declares a charge after the first start"
        if is_filtered and not self.frozen:
            return "it passed the filter before the first start"
        if is_filtered and terms.admission is Admission.DECLARED:
            return "a declared budget admits nothing after its first start"
        if basis == BASIS_FILTER and self.late:
            return "the filter admits Gaussian charges alone from then on"
        if basis == BASIS_GAUSSIAN and (self.open or body.get("weight") is None):
            return "what the filter had admitted otherwise was not over"
        if not is_filtered and "weight" in body:
            return f"a {basis} charge notes no weight: it is computed"
        return ""

    def _move(self, entry: Entry, sealed: Document, at: datetime) -> None:
        """Change the state of a charge to started, settled or voided."""
        number = entry.charge
        charge = self.charges.get(number)
        if charge is None or charge.state not in _BEFORE[Kind(entry.kind)]:
            was = "unknown" if charge is None else str(charge.state)
            raise self._wrong(entry.seq, f"charge {number} is {was}, not to be {entry.kind}")
        kind = Kind(entry.kind)
        if kind is Kind.VOIDED and charge.basis == BASIS_RECORDED:
            raise self._wrong(entry.seq, "what had been released cannot be voided")
        if kind is Kind.STARTED:
            self.frozen = True
            self.charges[number] = replace(charge, state=ChargeState.STARTED, started_at=at)
            return
        self.charges[number] = _closed_charge(charge, entry, sealed, at)
        if "round" in sealed:
            self.rounds[number] = sealed["round"]
        self.open.discard(number)
        if kind is Kind.VOIDED:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        """Take a voided charge out of the filter's sums, or out of the declared charges before the start."""
        self._datasets = _live_datasets(self.charges)
        if number not in self.block:
            # A filter counts what ran, and this never will.
            charge = self.charges[number]
            weight = self._weights[number]
            self._count(charge.event, weight, -1, charge.basis)
        elif not self.frozen:
            # Nobody has seen anything yet, so the declaration may still change. Once something was
            # seen, the choice to drop a declared charge may depend on it: it stays in the block.
            del self.block[number]

    @property
    def recorded(self) -> list[str]:
        """The ids of charges that were recorded after their release, which no rule admitted."""
        charges = self.charges.values()
        return [charge.id for charge in charges if charge.basis == BASIS_RECORDED]

    def only(self, numbers: Collection[int]) -> History:
        """Return a copy of this history with some of its charges alone, started if this one is.

        A charge that was given up counts where it counts here.

        Args:
            numbers: The charges, by number.
        """
        charges = _pick(self.charges, numbers)
        part = replace(
            self,
            charges=charges,
            block=_pick(self.block, numbers),
            later=Counter(),
            late=Counter(),
            used=Fraction(0),
            variance=Fraction(0),
            used_delta=Fraction(0),
            unbounded=0,
            open={number for number in self.open if number in numbers},
            _datasets=_live_datasets(charges),
        )
        is_late = False
        for number, charge in self.charges.items():
            is_late = is_late or charge.basis == BASIS_GAUSSIAN
            weight = self._weights.get(number)
            is_voided = charge.state is ChargeState.VOIDED
            if number not in numbers or weight is None or is_voided:
                continue
            part._count(charge.event, weight, 1, charge.basis)
            # As at its own time, or where what had gone over was given up since: never less.
            if charge.basis == BASIS_RECORDED and is_late:
                late_weight = self._late_weight(charge.event)
                part._add(late_weight, 1, True)
        return part

    def with_charges(
        self, events: Sequence[Event], basis: str, weights: Sequence[Weight]
    ) -> History:
        """Return a copy of this history to which more events are charged, and which has started.

        Args:
            events: The events, one at least.
            basis: By which rule they are admitted.
            weights: Of each in the filter; none before the first start.
        """
        after = self.only(self.charges)
        if not after.frozen:
            first = len(self.charges) + 1
            after.block.update(enumerate(events, first))
            after.frozen = True
            return after
        for event, weight in zip(events, weights, strict=True):
            after._count(event, weight, 1, basis)
        return after

    def weight(self, number: int) -> Weight:
        """Return the weight in the filter of a charge that was made after the first start."""
        return self._weights[number]

    def _weight(self, event: Event, note: list[float] | None) -> Weight:
        """Return the weight of an event in the filter, as its entry notes it or else computed."""
        if note is not None:
            divergence, delta = map(float, note)
            is_finite = 0 <= divergence < math.inf
            is_probability = 0 <= delta <= 1
            if not is_finite or not is_probability:
                raise ValueError(f"its weight is {note}")
            return Weight(divergence, delta)
        budget = self.terms()
        slack = slack_of(budget.delta)
        return weigh(event, order_of(budget), budget.adjacency, slack)

    def _late_weight(self, event: Event) -> Weight:
        """Return the weight of a recorded release as a Gaussian charge."""
        budget = self.terms()
        return weigh_as_gaussian(event, budget.adjacency, 1e-3 * budget.delta)

    def confirm_weight(self, event: Event) -> None:
        """Refuse a release that cannot be weighed, before its record would spoil the log."""
        if self.frozen:
            self._weight(event, None)
        if self.late:
            self._late_weight(event)

    def _count(self, event: Event, weight: Weight, times: int, basis: str) -> None:
        """Add an event, ``times`` times, to those after the first start and to the filter's sums."""
        is_gaussian = basis == BASIS_GAUSSIAN
        _add_times(self.later, event, times)
        if is_gaussian:
            _add_times(self.late, event, times)
        self._add(weight, times, is_gaussian)

    def _add(self, weight: Weight, times: int, is_gaussian: bool) -> None:
        """Add a weight to the filter's sums: a divergence, or the variance of a Gaussian charge."""
        if not math.isfinite(weight.divergence):
            self.unbounded += times
            return
        amount, delta = weight.exact()
        self.used_delta += times * delta
        if is_gaussian:
            self.variance += times * amount
        else:
            self.used += times * amount

    def _event(self, value: dict[str, Any]) -> Event:
        """Return the event of a JSON-ready value, as the same object for equal values."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._events:
            self._events[key] = event_from_dict(value)
        return self._events[key]

    def _wrong(self, seq: int, why: str) -> LedgerCorruptedError:
        return LedgerCorruptedError(f"entry {seq} of budget {self.name!r} is wrong: {why}.")


def _live_datasets(charges: Mapping[int, Charge]) -> dict[Dataset, None]:
    """Return the distinct datasets of charges that were not voided, in the order of the charges."""
    datasets: dict[Dataset, None] = {}
    for charge in charges.values():
        is_voided = charge.state is ChargeState.VOIDED
        if charge.dataset is not None and not is_voided:
            datasets[charge.dataset] = None
    return datasets


def _add_times(counter: Counter[Event], event: Event, times: int) -> None:
    """Add a number, perhaps negative, to an event's count, and drop a count of 0."""
    counter[event] += times
    if not counter[event]:  # or an event that was given up would still be weighed
        del counter[event]


def _closed_charge(charge: Charge, entry: Entry, sealed: Document, at: datetime) -> Charge:
    """Return a charge with the state, digests and note of the entry that settles or voids it."""
    transcript, release, trials = (str(sealed.get(name) or "") for name in _DIGESTS)
    note = json.loads(entry.body).get("note", "")
    notes = filter(None, (charge.note, note))
    return replace(
        charge,
        state=ChargeState(entry.kind),
        closed_at=at,
        note="; ".join(notes),
        transcript_digest=transcript,
        release_digest=release,
        trials_digest=trials,
    )


def _pick(values: Mapping[int, T], numbers: Collection[int]) -> dict[int, T]:
    """Return the items of a mapping by charge number whose numbers are among some."""
    return {number: value for number, value in values.items() if number in numbers}
