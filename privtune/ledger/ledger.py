"""The durable budget: what was admitted, what has started, what was settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy.engine import Connection

from privtune.accounting import Event, Guarantee
from privtune.errors import InvalidInputError
from privtune.ledger.admission import FilterState, admit, filter_state, odometer, suggestions
from privtune.ledger.chain import Kind
from privtune.ledger.errors import (
    BudgetClosedError,
    BudgetExistsError,
    ChargeStateError,
    UnknownChargeError,
)
from privtune.ledger.history import BASIS_RECORDED, History
from privtune.ledger.log import Line, Log, forget_secret, round_digest
from privtune.ledger.privacy_filter import FILTER_SHARE, ORDERS, best_order
from privtune.ledger.storage import Storage, prepare
from privtune.ledger.values import (
    Budget,
    BudgetExceededError,
    Charge,
    ChargeRequest,
    ChargeState,
    check_unit,
    refuse_other_unit,
)
from privtune.ledger.weights import Weight
from privtune.names import check_name, check_text

_WORDS = ("study", "arm", "note", "plan_digest", "unit")


def charge_of(history: History, number: int) -> Charge:
    """Return a charge of a budget."""
    try:
        return history.charges[number]
    except KeyError:
        raise UnknownChargeError(f"budget {history.name!r} has no charge {number}.") from None


def reservations(
    history: History, requests: Sequence[ChargeRequest], basis: str, weights: Sequence[Weight] = ()
) -> list[Line]:
    """Return the lines that reserve what was admitted on a basis."""
    for request in requests:
        who = f"Arm {request.arm!r}" if request.arm else "The event"
        refuse_other_unit(request.unit, history.terms().unit, who, history.name)
    bodies: list[dict[str, Any]] = [
        {
            **{name: getattr(request, name) for name in _WORDS},
            "event": request.event.to_dict(),
            "basis": basis,
            **({"public": dict(request.public)} if request.public else {}),
        }
        for request in requests
    ]
    if basis == BASIS_RECORDED:
        for request in requests:
            history.confirm_weight(request.event)
    # Noted, so that opening a ledger need not compute it again; verifying does.
    for body, weight in zip(bodies, weights, strict=False):
        body["weight"] = list(weight)
    first = len(history.charges) + 1
    return [Line(Kind.RESERVED, number, body=body) for number, body in enumerate(bodies, first)]


def numbered(
    history: History, requests: Sequence[ChargeRequest]
) -> tuple[list[int], list[ChargeRequest]]:
    """Return the number of each request's charge, and the requests that have none yet."""
    there: dict[str, tuple[int, Charge | ChargeRequest]] = {
        charge.plan_digest: (number, charge)
        for number, charge in history.charges.items()
        if charge.plan_digest and charge.state is not ChargeState.VOIDED
    }
    numbers: list[int] = []
    missing: list[ChargeRequest] = []
    for request in requests:
        number, known = there.get(request.plan_digest, (0, request))
        if not number:
            missing.append(request)
            number = len(history.charges) + len(missing)
            if request.plan_digest:
                there[request.plan_digest] = number, request
        # A plan's digest pays for what it was charged for, and for nothing else.
        if (known.unit, known.event.to_dict()) != (request.unit, request.event.to_dict()):
            raise ChargeStateError(
                f"plan {request.plan_digest!r} is what charge {history.name}-{number} is for, which "
                "charges another event: a plan is charged for what runs, so give every plan a digest "
                "of its own."
            )
        numbers.append(number)
    return numbers, missing


def check_requests(requests: Sequence[ChargeRequest]) -> None:
    """Refuse a list of charge requests that is empty, or holds anything else."""
    if not requests or not all(isinstance(request, ChargeRequest) for request in requests):
        raise InvalidInputError("requests", requests, "must be at least one ChargeRequest")


def ask(history: History, events: Sequence[Event]) -> None:
    """Refuse events that do not fit before the budget is locked, and say what would fit."""
    if not events:
        return
    try:
        admit(history, events)
    except BudgetExceededError as error:
        error.fitting = suggestions(history, events)
        raise


class Ledger:
    """Opens, or creates, the ledger in a database.

    Args:
        url: ``file.db``, ``sqlite:///file.db`` or ``postgresql://user@host/database``; ``privtune.db`` in the
            working directory unless given.
        patience: How long to wait for other processes, in seconds.
        clock: The time that is noted with every entry, for tests; else this machine's.

    **Guarantee**: a charge is in the log, durably, before :meth:`reserve` returns it; all charges
    of one call are admitted in one transaction, or none; whatever crashes, what was started stays
    spent. Threads may share a ledger; every process opens its own.

    Raises:
        LedgerSchemaError: The database holds another version of the ledger.
        LedgerConnectionError: The database cannot be opened.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> ledger = Ledger("sqlite:///privtune.db")
        >>> budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        >>> training = Repeated(1000, PoissonSampled(0.01, Gaussian(1.0)))
        >>> [charge] = ledger.reserve("clinic", [ChargeRequest(training, arm="defaults")])
        >>> charge.id, ledger.start(charge.id).state  # only now is data touched
        ('clinic-1', <ChargeState.STARTED: 'started'>)
        >>> ledger.settle(charge.id).state, ledger.filter_state("clinic").in_force
        (<ChargeState.SETTLED: 'settled'>, True)
        >>> spent = ledger.spent("clinic").epsilon
        >>> round(spent, 1), spent + ledger.remaining("clinic")  # 1.8 if nothing could follow
        (2.1, 3.0)
        >>> ledger.check("clinic", [Gaussian(20.0)])  # it would fit
        >>> [count] = ledger.reserve("clinic", [ChargeRequest(Gaussian(20.0), note="a count")])
        >>> ledger.void(count.id).state, ledger.charge("clinic-2") == ledger.charges("clinic")[1]
        (<ChargeState.VOIDED: 'voided'>, True)
        >>> [other] = ledger.reserve("clinic", [ChargeRequest(Gaussian(20.0))])
        >>> ledger.move(other.id, Kind.STARTED, work=lambda connection: True).state, ledger.parse(other.id)
        (<ChargeState.STARTED: 'started'>, ('clinic', 3))
        >>> ledger.record("clinic", ChargeRequest(Gaussian(9.0), note="published last year")).basis
        'recorded'
        >>> ledger.close_budget("clinic")
        >>> ledger.is_closed("clinic"), ledger.budgets() == (ledger.budget("clinic"),)
        (True, True)
        >>> head = ledger.head("clinic")  # write it down: with it a cut log can be told
        >>> ledger.close()
    """

    def __init__(
        self,
        url: str | Path = "sqlite:///privtune.db",
        *,
        patience: float = 60.0,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        storage = Storage(url, patience=patience)
        self.log = Log(storage, clock=clock)
        try:
            prepare(storage)
        except BaseException:
            storage.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self.log.storage.close()

    def create_budget(self, budget: Budget) -> Budget:
        """Return a `budget` as stored, with its order: a new one, or the one that is there with these terms.

        Raises:
            BudgetExistsError: A budget of that name has other terms.
            InvalidInputError: Its name is reserved, or its unit of privacy is no word.
        """
        check_name(budget.name, "budget")
        check_unit(budget.unit)
        check_text(budget.dataset, "dataset")
        if budget.order is None:
            order = best_order(budget.epsilon, FILTER_SHARE * budget.delta)
            budget = replace(budget, order=order)
        elif budget.order not in ORDERS:
            near = min(ORDERS, key=lambda order: abs(order - (budget.order or 0.0)))
            allowed = "must be one of the filter's orders"
            raise InvalidInputError("order", budget.order, allowed, f"The nearest is {near:g}.")

        def first(at: datetime) -> Line:
            # The day alone: from one budget to the next the time tells how long a study took.
            body = {"terms": budget.to_dict(), "created_at": at.date().isoformat()}
            return Line(Kind.CREATED, body=body)

        there = self.log.create(budget.name, first).terms()
        ours, theirs = budget.to_dict(), there.to_dict()
        if other := [f"{k} is {theirs[k]!r}, not {v!r}" for k, v in ours.items() if theirs[k] != v]:
            raise BudgetExistsError(
                f"a budget called {budget.name!r} exists with other terms ({', '.join(other)}): "
                "a budget never changes, so choose another name."
            )
        return there

    def close_budget(self, name: str) -> None:
        """Close the budget `name` for good: it admits nothing more; what it admitted may still run."""
        check_text(name, "budget")

        def decide(_connection: Connection, history: History) -> list[Line]:
            return [] if history.closed else [Line(Kind.CLOSED)]

        self.log.write(name, decide)

    def reserve(
        self,
        budget: str,
        requests: Sequence[ChargeRequest],
        *,
        work: Callable[[Connection], None] | None = None,
    ) -> tuple[Charge, ...]:
        """Admit all of the requests in one transaction, or none.

        Args:
            budget: The budget's name.
            requests: What is asked, at least one. Arms that are declared together belong together.
            work: More to write in the same transaction.

        Returns:
            The charges, in the order of the requests, in state ``reserved``.

        Raises:
            BudgetExceededError: They do not fit; says what would.
            BudgetClosedError, DeclarationClosedError: The budget admits nothing more.
            UnitMismatchError: A request counts another unit than the budget protects.
            ChargeStateError: A plan's digest is that of a charge for another event.

        **Guarantee**: the composition of everything ever admitted is at most the budget. Asking
        again for a plan (by its digest) returns the charge that is there: nothing is charged twice.
        """
        check_requests(requests)
        # Outside of the lock, since what would fit takes seconds to find.
        now = self.log.current(budget)
        ask(now, [request.event for request in numbered(now, requests)[1]])
        numbers: list[int] = []

        def decide(connection: Connection, history: History) -> list[Line]:
            if work is not None:
                work(connection)
            found, missing = numbered(history, requests)
            numbers.extend(found)
            if not missing:
                return []
            basis, weights = admit(history, [request.event for request in missing])
            return reservations(history, missing, basis, weights)

        history, _ = self.log.write(budget, decide)
        return tuple(history.charges[number] for number in numbers)

    def record(self, budget: str, request: ChargeRequest) -> Charge:
        """Return the charge of a release that has happened already, whether or not the budget holds it.

        Refusing would not undo it. A budget that it exceeds admits nothing more, and says so.

        Args:
            budget: The budget's name.
            request: What was released, and by whom.

        Returns:
            The charge, settled, with basis ``"recorded"``.

        Raises:
            BudgetClosedError: The budget was closed.
            UnitMismatchError: It counts another unit than the budget protects.
        """
        check_requests([request])

        def decide(_connection: Connection, history: History) -> list[Line]:
            if history.closed:
                raise BudgetClosedError(f"budget {budget!r} was closed for good.")
            # It counts as released now: charges that are reserved already should not be a reaction to it.
            [line] = reservations(history, [request], BASIS_RECORDED)
            return [line, Line(Kind.STARTED, line.charge), Line(Kind.SETTLED, line.charge)]

        history, written = self.log.write(budget, decide)
        return history.charges[written[0].charge]

    def start(self, charge_id: str) -> Charge:
        """Mark a reserved charge, `charge_id`, as started. Call it before the first access to the data.

        Returns:
            The charge, as it is now.

        Raises:
            ChargeStateError: It is not reserved: somebody else has started it, or it was voided.
        """
        return self.move(charge_id, Kind.STARTED)

    def settle(self, charge_id: str, transcript_digest: str = "") -> Charge:
        """Mark a started charge as settled: its releases are out.

        Args:
            charge_id: The charge's id, as ``"clinic-1"``.
            transcript_digest: The digest of what was released.

        Returns:
            The charge, as it is now.

        Raises:
            ChargeStateError: It is not started.
        """
        check_text(transcript_digest, "transcript_digest")
        return self.move(charge_id, Kind.SETTLED, sealed={"transcript_digest": transcript_digest})

    def void(self, charge_id: str) -> Charge:
        """Give back a charge, `charge_id`, that never started.

        After the budget's first start a voided charge stays in the declared block: dropping it may be a
        reaction to what was seen.

        Returns:
            The charge, as it is now.

        Raises:
            ChargeStateError: It has started, so it is spent.
        """
        return self.move(charge_id, Kind.VOIDED)

    def move(
        self,
        charge_id: str,
        kind: Kind,
        *,
        sealed: Mapping[str, Any] | None = None,
        note: str = "",
        work: Callable[[Connection], bool] | None = None,
    ) -> Charge:
        """Append a charge's next state; a settled one's round is noted, and its secret forgotten.

        Args:
            charge_id: The charge.
            kind: The state.
            sealed: What to note in the sealed part.
            note: Added to the charge's note, which is part of certificates.
            work: More to do in the same transaction; False if the state is not to be appended.

        Returns:
            The charge, as it is now.

        Raises:
            ChargeStateError: The charge is not in the state before.
        """
        budget, number = self.parse(charge_id)
        before = ChargeState.STARTED if kind is Kind.SETTLED else ChargeState.RESERVED

        def decide(connection: Connection, history: History) -> list[Line]:
            state = charge_of(history, number).state
            if work is not None and not work(connection):
                return []
            if state is not before:
                raise ChargeStateError(
                    f"charge {charge_id} is {state}: only a {before} charge can be {kind}."
                )
            noted = dict(sealed or {})
            if kind is Kind.SETTLED:
                # First, for it locks the round: a row reopened meanwhile would leave another digest.
                forget_secret(connection, budget, number)
                if (digest := round_digest(connection, budget, number)) is not None:
                    noted["round"] = digest
            return [Line(kind, number, body={"note": note} if note else {}, sealed=noted)]

        history, _ = self.log.write(budget, decide)
        return history.charges[number]

    @property
    def url(self) -> str:
        """The storage's URL, without a password."""
        return self.log.storage.safe_url

    def budget(self, name: str) -> Budget:
        """Return the terms of the budget `name`."""
        return self.log.current(name).terms()

    def budgets(self) -> tuple[Budget, ...]:
        """Return the terms of every budget, by name."""
        return tuple(self.budget(name) for name in self.log.names())

    def is_closed(self, name: str) -> bool:
        """Return whether the budget `name` was closed for good."""
        return self.log.current(name).closed

    def charge(self, charge_id: str) -> Charge:
        """Return the charge of an id, `charge_id`, like "clinic-1"."""
        budget, number = self.parse(charge_id)
        return charge_of(self.log.current(budget), number)

    def charges(
        self, budget: str, *, study: str | None = None, arm: str | None = None
    ) -> tuple[Charge, ...]:
        """Return the charges of a ``budget``, oldest first; of one ``study`` or ``arm``, if named."""
        return tuple(
            charge
            for charge in self.log.current(budget).charges.values()
            if (study is None or charge.study == study) and (arm is None or charge.arm == arm)
        )

    def spent(self, budget: str) -> Guarantee:
        """Return the odometer of a `budget`: what everything charged to it costs together, at its δ."""
        return odometer(self.log.current(budget))

    def remaining(self, budget: str) -> float:
        """Return the ε that the odometer leaves of a `budget`, never below 0."""
        history = self.log.current(budget)
        return max(0.0, history.terms().epsilon - odometer(history).epsilon)

    def check(self, budget: str, events: Sequence[Event]) -> None:
        """Refuse events that a budget does not hold at this moment. Charges nothing.

        Args:
            budget: The budget's name.
            events: What would be charged, together.

        Raises:
            BudgetExceededError: They do not fit; says what would.
        """
        ask(self.log.current(budget), events)

    def filter_state(self, budget: str) -> FilterState:
        """Return the privacy filter of a `budget`: whether it is in force, and what it has left."""
        return filter_state(self.log.current(budget))

    def head(self, budget: str) -> str:
        """Return the hash of a `budget`'s last entry. Note it elsewhere: it proves what was there."""
        return self.log.current(budget).head

    @staticmethod
    def parse(charge_id: str) -> tuple[str, int]:
        """Return the budget's name and the charge's number of a `charge_id` like "clinic-1".

        Raises:
            InvalidInputError: It is none.
        """
        budget, _, number = str(charge_id).rpartition("-")
        if not budget or not number.isdecimal() or len(number) > 9:
            raise InvalidInputError("charge_id", charge_id, "must be an id, like 'digits-3'")
        return budget, int(number)
