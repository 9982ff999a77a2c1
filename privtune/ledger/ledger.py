"""The ledger: budgets in a database, whose charges are reserved, started, settled or voided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy.engine import Connection

from privtune.accounting import Event, Guarantee, epsilon
from privtune.errors import InvalidInputError
from privtune.ledger.admission import (
    FilterState,
    admission_of,
    admit,
    filter_state,
    fits,
    odometer,
    odometer_by_charge,
)
from privtune.ledger.chain import Document, Kind
from privtune.ledger.datasets import Dataset, refuse_other_dataset, shared_sentence
from privtune.ledger.errors import (
    BudgetClosedError,
    BudgetExistsError,
    ChargeStateError,
    UnknownChargeError,
)
from privtune.ledger.fitting import NextArm, closed_to_all, next_arms, suggestions
from privtune.ledger.history import BASIS_RECORDED, History
from privtune.ledger.log import Line, Log, forget_secret, round_digest
from privtune.ledger.privacy_filter import FILTER_SHARE, ORDERS, best_order
from privtune.ledger.storage import Storage, prepare
from privtune.ledger.values import (
    Admission,
    Budget,
    BudgetExceededError,
    Charge,
    ChargeRequest,
    ChargeState,
    Spending,
    VoidEffect,
    check_unit,
    refuse_other_unit,
)
from privtune.ledger.weights import Weight
from privtune.names import DEFAULT_STORAGE, check_name, check_text

_WORDS = ("study", "arm", "note", "plan_digest", "unit")


def charge_of(history: History, number: int) -> Charge:
    """Return the charge of a number from a budget's history, or refuse an unknown number."""
    try:
        return history.charges[number]
    except KeyError:
        raise UnknownChargeError(f"budget {history.name!r} has no charge {number}.") from None


def reservations(
    history: History,
    requests: Sequence[ChargeRequest],
    basis: str,
    weights: Sequence[Weight] = (),
) -> list[Line]:
    """Return the log's lines that reserve charges for admitted requests.

    Args:
        history: What the budget's log says.
        requests: What was admitted, or has been released already.
        basis: The rule that admitted it.
        weights: What each request weighs in the filter; none where the filter did not decide.

    Raises:
        UnitMismatchError: A request counts another unit than the budget protects.
        DatasetMismatchError: A request is for another dataset than the budget protects.
    """
    for request in requests:
        who = f"Arm {request.arm!r}" if request.arm else "The event"
        refuse_other_unit(
            request.unit,
            history.terms().unit,
            who,
            history.name,
        )
    bodies = [_body_of(request, basis) for request in requests]
    datasets = [request.dataset for request in requests]
    check_datasets(history, datasets)
    if basis == BASIS_RECORDED:
        for request in requests:
            history.confirm_weight(request.event)
    # Noted, so that opening a ledger need not compute it again; verifying does.
    for body, weight in zip(bodies, weights, strict=False):
        body["weight"] = list(weight)
    lines = []
    first = len(history.charges) + 1
    for number, body in enumerate(bodies, first):
        lines.append(Line(Kind.RESERVED, number, body=body))
    return lines


def _body_of(request: ChargeRequest, basis: str) -> dict[str, Any]:
    """Return the public part of the entry that reserves a request, without empty optional fields."""
    body: dict[str, Any] = {name: getattr(request, name) for name in _WORDS}
    body["event"] = request.event.to_dict()
    body["basis"] = basis
    if request.public:
        body["public"] = dict(request.public)
    if request.dataset is not None:
        body["dataset"] = request.dataset.to_dict()
    return body


def check_datasets(history: History, datasets: Sequence[Dataset | None]) -> None:
    """Refuse datasets that differ from the budget's, or from the first one charged if it has none.

    Args:
        history: What the budget's log says.
        datasets: What would be charged for, in order; None says nothing.

    Raises:
        DatasetMismatchError: One is another dataset, or nothing says that it is the same.
    """
    charged_datasets = list(history.datasets)
    for dataset in filter(None, datasets):
        refuse_other_dataset(
            dataset,
            history.terms().dataset,
            charged_datasets,
            budget=history.name,
        )
        charged_datasets.append(dataset)


def numbered(
    history: History,
    requests: Sequence[ChargeRequest],
) -> tuple[list[int], list[ChargeRequest]]:
    """Return the number of each request's charge, and the requests that have no charge yet.

    Args:
        history: What the budget's log says.
        requests: What is asked. Those of one plan, by its digest, are one charge.

    Raises:
        ChargeStateError: A plan's digest is that of a charge for another event.
    """
    by_digest: dict[str, tuple[int, Charge | ChargeRequest]] = {}
    for number, charge in history.charges.items():
        is_voided = charge.state is ChargeState.VOIDED
        if charge.plan_digest and not is_voided:
            by_digest[charge.plan_digest] = (number, charge)
    numbers: list[int] = []
    missing: list[ChargeRequest] = []
    for request in requests:
        digest = request.plan_digest
        number, earlier = by_digest.get(digest, (0, request))
        if not number:
            missing.append(request)
            number = len(history.charges) + len(missing)
            if digest:
                by_digest[digest] = (number, request)
        # A plan's digest pays for what it was charged for, and for nothing else.
        is_same_unit = earlier.unit == request.unit
        is_same_event = earlier.event.to_dict() == request.event.to_dict()
        if not is_same_unit or not is_same_event:
            raise ChargeStateError(
                f"plan {digest!r} is what charge {history.name}-{number} is for, which "
                "charges another event: a plan is charged for what runs, so give every plan a digest "
                "of its own."
            )
        numbers.append(number)
    return numbers, missing


def check_requests(requests: Sequence[ChargeRequest]) -> None:
    """Refuse a list of charge requests that is empty, or holds anything else."""
    are_requests = all(isinstance(request, ChargeRequest) for request in requests)
    if not requests or not are_requests:
        raise InvalidInputError("requests", requests, "must be at least one ChargeRequest")


def ask(history: History, events: Sequence[Event], *, of_study: bool = True) -> None:
    """Refuse events that a budget does not hold, with suggestions of what would fit."""
    if not events:
        return
    try:
        admit(history, events)
    except BudgetExceededError as error:
        error.fitting = suggestions(history, events, of_study=of_study)
        raise


class Ledger:
    """A ledger of budgets and their charges in a database, which is created if missing.

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
        url: str | Path = DEFAULT_STORAGE,
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
        """Return a new `budget` with its order, or the stored one of that name if its terms are equal.

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
            order = budget.order
            near = min(ORDERS, key=lambda other: abs(other - order))
            allowed = "must be one of the filter's orders"
            raise InvalidInputError("order", budget.order, allowed, f"The nearest is {near:g}.")

        def first(at: datetime) -> Line:
            # The day alone: from one budget to the next the time tells how long a study took.
            day = at.date().isoformat()
            body = {"terms": budget.to_dict(), "created_at": day}
            return Line(Kind.CREATED, body=body)

        in_log = self.log.create(budget.name, first).terms()
        terms_in_log = in_log.to_dict()
        differences = []
        for term, value in budget.to_dict().items():
            value_in_log = terms_in_log[term]
            if value_in_log != value:
                differences.append(f"{term} is {value_in_log!r}, not {value!r}")
        if differences:
            raise BudgetExistsError(
                f"a budget called {budget.name!r} exists with other terms ({', '.join(differences)}): "
                "a budget never changes, so choose another name."
            )
        return in_log

    def close_budget(self, name: str) -> None:
        """Close the budget `name` for good: it admits no more charges, and those admitted may still run."""
        check_text(name, "budget")

        def decide(_connection: Connection, history: History) -> list[Line]:
            return [] if history.closed else [Line(Kind.CLOSED)]

        self.log.write(name, decide)

    def reserve(
        self,
        budget: str,
        requests: Sequence[ChargeRequest],
        *,
        start: bool = False,
        work: Callable[[Connection], None] | None = None,
    ) -> tuple[Charge, ...]:
        """Reserve charges for all of the requests in one transaction, or for none of them.

        Args:
            budget: The budget's name.
            requests: What is asked, at least one. Arms that are declared together belong together.
            start: Whether they count as started at once, as before a release that somebody else makes.
            work: More to write in the same transaction.

        Returns:
            The charges, in the order of the requests, in state ``reserved``, or ``started``.

        Raises:
            BudgetExceededError: They do not fit; says what would.
            BudgetClosedError, DeclarationClosedError: The budget admits nothing more.
            UnitMismatchError: A request counts another unit than the budget protects.
            DatasetMismatchError: A request is for another dataset than the budget protects.
            ChargeStateError: A plan's digest is that of a charge for another event.

        **Guarantee**: the composition of everything ever admitted is at most the budget. Asking
        again for a plan (by its digest) returns the charge that is there: nothing is charged twice.
        """
        check_requests(requests)
        self.log.storage.check_original()
        # Outside of the lock, since what would fit takes seconds to find.
        before = self.log.current(budget)
        _, missing_before = numbered(before, requests)
        events = [request.event for request in missing_before]
        of_study = any(request.study for request in requests)
        ask(before, events, of_study=of_study)
        numbers: list[int] = []

        def decide(connection: Connection, history: History) -> list[Line]:
            if work is not None:
                work(connection)
            # Again, now that nobody else is charged: what was admitted before may be no longer.
            charge_numbers, missing = numbered(history, requests)
            numbers.extend(charge_numbers)
            if not missing:
                return []
            missing_events = [request.event for request in missing]
            basis, weights = admit(history, missing_events)
            lines = reservations(history, missing, basis, weights)
            if start:
                lines += [Line(Kind.STARTED, line.charge) for line in lines]
            return lines

        history, _ = self.log.write(budget, decide)
        return tuple(history.charges[number] for number in numbers)

    def record(self, budget: str, request: ChargeRequest) -> Charge:
        """Record a release that has happened already as a charge, even if the budget does not hold it.

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
                raise BudgetClosedError(
                    f"budget {budget!r} was closed for good: it admits no charge any more."
                )
            # It counts as released now: charges that are reserved already should not be a reaction to it.
            [reserved] = reservations(history, [request], BASIS_RECORDED)
            started = Line(Kind.STARTED, reserved.charge)
            settled = Line(Kind.SETTLED, reserved.charge)
            return [reserved, started, settled]

        history, [reservation, *_] = self.log.write(budget, decide)
        return history.charges[reservation.charge]

    def start(self, charge_id: str) -> Charge:
        """Mark the reserved charge `charge_id` as started, before the first access to the data.

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
        sealed = {"transcript_digest": transcript_digest}
        return self.move(charge_id, Kind.SETTLED, sealed=sealed)

    def void_effect(self, charge_id: str) -> VoidEffect:
        """Return what voiding the charge `charge_id` would give back to its budget.

        Returns:
            Whether anything is given back, and what to know beforehand.

        Raises:
            ChargeStateError: It cannot be voided.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(9.0))])
            ...     ledger.void_effect(charges[0].id).sentence
            'The budget gets back what the charge had reserved. No data was touched.'
        """
        budget, number = self.parse(charge_id)
        history = self.log.current(budget)
        charge = charge_of(history, number)
        if charge.state is not ChargeState.RESERVED:
            raise ChargeStateError(
                f"charge {charge_id} is {charge.state}: only a reserved charge can be voided."
            )
        stays_in_block = history.frozen and number in history.block
        return VoidEffect(charge, gives_back=not stays_in_block)

    def void(self, charge_id: str) -> Charge:
        """Void the charge `charge_id`, which must be reserved and not started.

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
        sealed: Document | None = None,
        note: str = "",
        work: Callable[[Connection], bool] | None = None,
    ) -> Charge:
        """Append a charge's next state to the log, and delete the secret of a settled charge's round.

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
            sealed_part = dict(sealed or {})
            if kind is Kind.SETTLED:
                # First, for it locks the round: a row reopened meanwhile would leave another digest.
                forget_secret(connection, budget, number)
                digest = round_digest(connection, budget, number)
                if digest is not None:
                    sealed_part["round"] = digest
            body = {"note": note} if note else {}
            return [Line(kind, number, body=body, sealed=sealed_part)]

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
        history = self.log.current(budget)
        return charge_of(history, number)

    def charges(
        self,
        budget: str,
        *,
        study: str | None = None,
        arm: str | None = None,
    ) -> tuple[Charge, ...]:
        """Return the charges of a ``budget``, or those of one ``study`` or ``arm``, oldest first."""
        charges = []
        history = self.log.current(budget)
        for charge in history.charges.values():
            is_of_study = study is None or charge.study == study
            is_of_arm = arm is None or charge.arm == arm
            if is_of_study and is_of_arm:
                charges.append(charge)
        return tuple(charges)

    def spent(self, budget: str) -> Guarantee:
        """Return the guarantee of a `budget`: the ε of all its charges together, at its δ."""
        return odometer(self.log.current(budget))

    def remaining(self, budget: str) -> float:
        """Return the ε of a `budget` less the ε that is spent, never below 0."""
        history = self.log.current(budget)
        spent = odometer(history).epsilon
        return max(0.0, history.terms().epsilon - spent)

    def spent_by_charge(self, budget: str) -> dict[str, float]:
        """Return, for each charge of a budget, the ε of all charges up to and including it.

        Args:
            budget: The budget's name.

        Returns:
            ε by the charge's id, in the order of the charges: upper bounds, by the account of the budget.
            The last one is :meth:`spent`.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     for sigma in (9.0, 5.0):
            ...         charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(sigma))])
            ...     [round(epsilon, 2) for epsilon in ledger.spent_by_charge("clinic").values()]
            [0.38, 0.84]
        """
        costs = odometer_by_charge(self.log.current(budget))
        return {f"{budget}-{number}": cost for number, cost in costs.items()}

    def spendings(self, budget: str) -> tuple[Spending, ...]:
        """Return the ε that each study has spent of a budget, and that of other charges by their note.

        Charges that were given up before the budget's first start count for nothing.

        Args:
            budget: The budget's name.

        Returns:
            One for each study and for each note, in the order of their first charges.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(9.0), note="a table")])
            ...     [(part.note, part.charges) for part in ledger.spendings("clinic")]
            [('a table', 1)]
        """
        history = self.log.current(budget)
        terms = history.terms()
        numbers_by_purpose: dict[tuple[str, str], list[int]] = {}
        for number, charge in history.charges.items():
            note = "" if charge.study else charge.note
            purpose = (charge.study, note)
            numbers_by_purpose.setdefault(purpose, []).append(number)
        spendings = []
        for (study, note), numbers in numbers_by_purpose.items():
            part = history.only(numbers)
            cost = odometer(part).epsilon
            if len(numbers) == 1 and cost > 0.0:
                # Alone it needs no part of δ for what might follow.
                charge = history.charges[numbers[0]]
                alone = epsilon(charge.event, terms.delta, adjacency=terms.adjacency)
                cost = min(cost, alone.epsilon)
            spending = Spending(
                study=study,
                note=note,
                charges=len(numbers),
                epsilon=cost,
            )
            spendings.append(spending)
        return tuple(spendings)

    def next_arms(self, budget: str) -> tuple[NextArm, ...]:
        """Return the largest ε of a training, a selection or a noisy number that a `budget` now holds.

        Each number is rounded down, and for one such arm in place of the others. Empty where nothing may be
        charged any more: :meth:`closed_to_all` says why.

        Example:
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(2.0, 1e-5, name="clinic"))
            ...     [(arm.kind, arm.epsilon) for arm in ledger.next_arms("clinic")]
            [('a training', 2.0), ('a selection', 2.0), ('a noisy number', 2.0)]
        """
        return next_arms(self.log.current(budget))

    def closed_to_all(self, budget: str) -> str:
        """Return why a budget admits no charge of any kind, or an empty text if it admits some.

        Args:
            budget: The budget's name.

        Returns:
            The reason, in a few words.

        Example:
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     ledger.closed_to_all("clinic")
            ''
        """
        return closed_to_all(self.log.current(budget))

    def check(self, budget: str, events: Sequence[Event]) -> None:
        """Refuse events that a budget does not hold at this moment. Charges nothing.

        Args:
            budget: The budget's name.
            events: What would be charged, together.

        Raises:
            BudgetExceededError: They do not fit; says what would.
        """
        ask(self.log.current(budget), events)

    def remaining_after(self, budget: str, events: Sequence[Event]) -> float:
        """Return the ε that a budget would have left once it is charged for events. Charges nothing.

        Args:
            budget: The budget's name.
            events: What would be charged together, and then started.

        Returns:
            The budget's ε less what is spent then, never below 0: what :meth:`remaining` returns afterwards.

        Raises:
            BudgetExceededError: They do not fit; says what would.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     round(ledger.remaining_after("clinic", [Gaussian(9.0)]), 2)
            3.54
        """
        history = self.log.current(budget)
        ask(history, events)
        verdict = admission_of(history, events) if events else None
        if verdict is not None:
            history = history.with_charges(events, *verdict)
        return max(0.0, history.terms().epsilon - odometer(history).epsilon)

    def holds(self, budget: str, events: Sequence[Event]) -> bool:
        """Return whether a budget would admit events at this moment. Charges nothing.

        Args:
            budget: The budget's name.
            events: What would be charged, together.

        Returns:
            Whether they fit, and the budget is open to them.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(1.0, 1e-5, name="clinic"))
            ...     ledger.holds("clinic", [Gaussian(5.0)]), ledger.holds("clinic", [Gaussian(1.0)])
            (True, False)
        """
        history = self.log.current(budget)
        if history.closed:
            return False
        is_declared = history.terms().admission is Admission.DECLARED
        if history.frozen and is_declared:
            return False
        return fits(history, events)

    def datasets(self, budget: str) -> tuple[Dataset, ...]:
        """Return the distinct datasets that were charged to a `budget`, in the order of the charges."""
        return tuple(self.log.current(budget).datasets)

    def dataset(self, budget: str) -> str:
        """Return the name of the dataset of a `budget`, or an empty text if none is known."""
        return self.log.current(budget).dataset

    def check_dataset(self, budget: str, dataset: Dataset) -> str:
        """Refuse a dataset that a budget does not protect, and warn of other budgets that protect it.

        Args:
            budget: The budget's name; it need not exist yet.
            dataset: What would be charged for.

        Returns:
            A sentence to warn with; empty where no other budget is for this dataset.

        Raises:
            DatasetMismatchError: It is another dataset, or nothing says that it is the same.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> patients = Dataset("patients", "patients.csv")
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
            ...     charges = ledger.reserve("clinic", [ChargeRequest(Gaussian(9.0), dataset=patients)])
            ...     ledger.dataset("clinic"), ledger.datasets("clinic") == (patients,)
            ...     ledger.check_dataset("another", patients)
            ('patients', True)
            'patients.csv is also charged to budget clinic: for the people in it, the ε of both add up.'
        """
        others: dict[str, tuple[str, Sequence[Dataset]]] = {}
        for name in self.log.names():
            history = self.log.current(name)
            if name == budget:
                check_datasets(history, [dataset])
                continue
            term = history.terms().dataset
            others[name] = (term, history.datasets)
        return shared_sentence(dataset, others)

    def filter_state(self, budget: str) -> FilterState:
        """Return the privacy filter of a `budget`: whether it is in force, and what it has left."""
        return filter_state(self.log.current(budget))

    def head(self, budget: str) -> str:
        """Return the hash of the last entry in a `budget`'s log, which proves later that the log had it."""
        return self.log.current(budget).head

    @staticmethod
    def parse(charge_id: str) -> tuple[str, int]:
        """Return the budget's name and the charge's number of a `charge_id` like "clinic-1".

        Raises:
            InvalidInputError: It is none.
        """
        budget, _, number = str(charge_id).rpartition("-")
        is_number = number.isdecimal() and len(number) <= 9
        if not budget or not is_number:
            raise InvalidInputError("charge_id", charge_id, "must be an id, like 'digits-3'")
        return budget, int(number)
