"""The ledger's values: budgets, units of privacy, requests, charges and their costs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from privtune.accounting import Adjacency, Event
from privtune.accounting.events import MAX_DEPTH
from privtune.errors import InvalidInputError
from privtune.ledger.datasets import Dataset
from privtune.ledger.errors import LedgerError, UnitMismatchError
from privtune.names import NAME_RULE, check_text, is_name
from privtune.numbers import is_number, show_epsilon, show_left

E = TypeVar("E", bound=StrEnum)


RECORD = "record"
"""The unit of privacy where records are what is sampled and clipped, each by itself."""


class Admission(StrEnum):
    """When a budget admits charges: at any time, or only before its first start."""

    DECLARED = "declared"
    ADAPTIVE = "adaptive"


class ChargeState(StrEnum):
    """The state of a charge: reserved, then started and settled, or else voided."""

    RESERVED = "reserved"
    STARTED = "started"
    SETTLED = "settled"
    VOIDED = "voided"


@dataclass(frozen=True)
class Budget:
    """A limit of ε and δ on everything that is ever released about one protected dataset.

    A budget never changes after its creation; it can be closed for good.

    Args:
        epsilon, delta: The whole, finite and above 0; δ below 1.
        name: The budget's name in its ledger, best that of the dataset: letters, digits, ``.``, ``_`` and
            ``-``. It must be given: two datasets would share a budget without a name.
        adjacency: Which pairs of datasets are neighbours.
        unit: What one neighbour adds, removes or replaces: ``"record"``, ``"person"``,
            ``"hospital"``. Charges of another unit are refused.
        dataset: The protected dataset, as a name or a free description. Whoever gives it with a study
            declares that the study's data is this dataset, wherever it is read from. Never put a content
            hash here: an unsalted hash of the data is itself a disclosure.
        admission: ``"declared"``: everything is reserved before the first charge starts, and
            nothing after. ``"adaptive"``: what comes later passes a privacy filter.
        order: The Rényi order of the filter, above 1; None chooses the best one for the target.

    Raises:
        InvalidInputError: If a term is outside its domain.

    Example:
        >>> budget = Budget(4.0, 1e-5, name="digits")
        >>> budget.admission, budget.to_dict()["adjacency"]
        (<Admission.ADAPTIVE: 'adaptive'>, 'add-remove')
    """

    epsilon: float
    delta: float
    name: str = field(kw_only=True)
    adjacency: Adjacency = field(default=Adjacency.ADD_REMOVE, kw_only=True)
    unit: str = field(default=RECORD, kw_only=True)
    dataset: str = field(default="", kw_only=True)
    admission: Admission = field(default=Admission.ADAPTIVE, kw_only=True)
    order: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not is_number(self.epsilon) or not 0 < self.epsilon < math.inf:
            raise InvalidInputError("epsilon", self.epsilon, "must be a finite number above 0")
        if not is_number(self.delta) or not 0 < self.delta < 1:
            swapped = is_number(self.delta) and self.delta >= 1 > self.epsilon
            remedy = "ε comes first, then δ." if swapped else ""
            raise InvalidInputError(
                "delta",
                self.delta,
                "must be a number above 0 and below 1",
                remedy,
            )
        object.__setattr__(self, "epsilon", float(self.epsilon))
        object.__setattr__(self, "delta", float(self.delta))
        if not is_name(self.name):
            raise InvalidInputError("name", self.name, NAME_RULE)
        for name in ("unit", "dataset"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidInputError(name, value, "must be a text")
        adjacency = member(Adjacency, "adjacency", self.adjacency)
        object.__setattr__(self, "adjacency", adjacency)
        admission = member(Admission, "admission", self.admission)
        object.__setattr__(self, "admission", admission)
        if not self.unit:
            raise InvalidInputError(
                "unit",
                self.unit,
                "must say what is protected",
                f"Try {RECORD!r}.",
            )
        if self.order is not None:
            if not is_number(self.order) or not 1 < self.order < math.inf:
                raise InvalidInputError("order", self.order, "must be a finite number above 1")
            object.__setattr__(self, "order", float(self.order))

    def to_dict(self) -> dict[str, Any]:
        """Return the budget's terms as JSON-ready data."""
        terms = {field.name: getattr(self, field.name) for field in fields(self)}
        terms["adjacency"] = str(self.adjacency)
        terms["admission"] = str(self.admission)
        return terms


@dataclass(eq=False, repr=False)
class BudgetExceededError(LedgerError):
    """A request exceeds the budget, and nothing was reserved for it.

    Attributes:
        budget: The budget's terms.
        requested: ε of the request alone, at the budget's δ.
        spent, remaining: ε of what is charged already, and what is left, by the odometer.
        used: Which part of the filter's room is used, once it is in force; else None.
        fitting: What would fit, in words; may be empty.
    """

    budget: Budget
    requested: float = field(kw_only=True)
    spent: float = field(kw_only=True)
    remaining: float = field(kw_only=True)
    used: float | None = field(default=None, kw_only=True)
    fitting: Sequence[str] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        message = (
            f"budget {self.budget.name!r} (ε = {self.budget.epsilon:g}, δ = {self.budget.delta:g}) "
            f"has no room for this charge. It costs ε = {show_epsilon(self.requested)} alone; "
            f"ε = {show_epsilon(self.spent)} is spent, ε = {show_left(self.remaining)} is left"
        )
        if self.used is not None:
            message += (
                ". Since a run has started, a charge must also fit into the privacy filter (fully adaptive "
                f"composition), of which {self.used:.1%} is used"
            )
        return f"{message}." + (f" What fits: {'; '.join(self.fitting)}." if self.fitting else "")


@dataclass(frozen=True)
class ChargeRequest:
    """A request to charge a budget for one event, with its study, arm, note and plan.

    Args:
        event: What will touch the data. It is what is charged.
        study, arm: Who asks; empty for a release made outside of a study.
        note: One line for the reader of the log and of certificates: nothing private.
        plan_digest: The digest of the plan that will run, so that the plan can be held against it.
        public: What the event rests on that is declared public, by name; part of certificates.
        unit: What the event counts as one; it must be the budget's unit.
        dataset: Which dataset it is about, by public facts; None where that is not said.

    Raises:
        InvalidInputError: If the event is none or nested too deeply, or a text cannot be stored.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> ChargeRequest(Gaussian(8.0), note="a table of counts", public={"regions": "12"}).note
        'a table of counts'
    """

    event: Event
    study: str = ""
    arm: str = ""
    note: str = ""
    plan_digest: str = ""
    public: Mapping[str, str] = field(default_factory=dict, hash=False)
    unit: str = RECORD
    dataset: Dataset | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise InvalidInputError("event", self.event, "must be an Event of privtune.accounting")
        if self.event.depth > MAX_DEPTH:  # what is recorded must be read again
            raise InvalidInputError(
                "event",
                self.event.type,
                f"must be nested {MAX_DEPTH} deep at most",
            )
        for name in ("study", "arm", "note", "plan_digest"):
            check_text(getattr(self, name), name)
        texts = [text for pair in self.public.items() for text in pair]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidInputError("public", self.public, "must be texts by name")
        check_text("".join(texts), "public")


@dataclass(frozen=True)
class Spending:
    """The joint cost of the charges of one study, or of those outside studies that share a note.

    Spendings do not add up: charges together cost less than the sum.

    Attributes:
        study: The study's name; empty for charges outside of studies.
        note: The note of charges outside of studies; empty for those of a study.
        charges: How many there are.
        epsilon: Of one charge its ε alone; of several an upper bound on all of them, by the odometer, which
            holds whatever each of them was chosen by. At the budget's δ.

    Example:
        >>> Spending("digits-mlp", "", charges=3, epsilon=1.25).study
        'digits-mlp'
    """

    study: str
    note: str
    charges: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class Charge:
    """One charge of a budget, in the state that the log gives it now.

    Attributes:
        id: ``"<budget>-<number>"``; never used again, whatever becomes of the charge.
        budget, event, study, arm, note, plan_digest, unit: What was asked, and of which budget.
        basis: By which rule it was admitted: ``"declared"``, ``"filter"`` or ``"gaussian"`` (the
            filter, by a divergence or as Gaussian), or ``"recorded"`` after the release.
        state: How far it has come.
        created_at, started_at, closed_at: When it was reserved, started, settled or voided (UTC). They
            tell how many trials a sealed round took: they stay inside the trust boundary.
        transcript_digest: The digest of the transcript that settled it.
        release_digest: The digest of the release as its study stored it.
        trials_digest: The digest of the trials that are kept for the curator.
        dataset: Which dataset it is about, as public facts say; None where that was not said.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> from privtune.ledger import Ledger
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(4.0, 1e-5, name="digits"))
        ...     [charge] = ledger.reserve("digits", [ChargeRequest(Gaussian(8.0))])
        >>> charge.id, charge.state, charge.basis
        ('digits-1', <ChargeState.RESERVED: 'reserved'>, 'declared')
    """

    id: str
    budget: str
    event: Event
    study: str
    arm: str
    note: str
    plan_digest: str
    basis: str
    state: ChargeState
    created_at: datetime
    started_at: datetime | None = None
    closed_at: datetime | None = None
    transcript_digest: str = ""
    unit: str = RECORD
    release_digest: str = ""
    trials_digest: str = ""
    dataset: Dataset | None = None


@dataclass(frozen=True, slots=True)
class VoidEffect:
    """The effect of voiding a charge: whether the budget gets back what was reserved.

    Attributes:
        charge: The charge.
        gives_back: Whether the budget has more room afterwards.
    """

    charge: Charge
    gives_back: bool

    @property
    def sentence(self) -> str:
        """The sentence to show before a charge is voided."""
        if self.gives_back:
            room = "The budget gets back what the charge had reserved."
        else:
            room = (
                "The budget gets nothing back: a run has started, and the decision to cancel a charge may "
                "depend on its results. So the charge counts as spent."
            )
        if not self.charge.arm:
            return f"{room} No data was touched."
        return (
            f"{room} No data was touched. Arm {self.charge.arm!r} of study {self.charge.study!r} "
            "can then run only if the budget has room to charge it again."
        )


def member(kind: type[E], name: str, value: object) -> E:
    """Return the member of an enumeration with a value, and refuse any other value."""
    try:
        return kind(str(value))
    except ValueError:
        allowed = " or ".join(repr(str(member)) for member in kind)
        raise InvalidInputError(name, value, f"must be {allowed}") from None


_UNIT_RULE = (
    "must be 1 to 40 letters, digits, spaces and hyphens, beginning with a letter, as person"
)
_LONGEST_UNIT = 40


def check_unit(unit: str) -> str:
    """Return the unit of privacy of a new budget, and refuse a text that is no name of a unit."""
    if not re.fullmatch(r"[^\W\d_][^\W_]*(?:[ -][^\W_]+)*", unit) or len(unit) > _LONGEST_UNIT:
        raise InvalidInputError("unit", unit, _UNIT_RULE)
    return unit


def refuse_other_unit(unit: str, protected: str, who: str, budget: str) -> None:
    """Refuse a request whose unit of privacy differs from the budget's."""
    if unit == protected:
        return
    if protected == RECORD:
        why = f"one row more changes what its {unit} adds by up to twice what is charged"
        remedy = f"Draw on a budget of unit: {unit}."
    else:
        why = f"one {protected} may have many of them"
        remedy = (
            f"Group by {protected} (a table: group, max_per_group and unit: {protected}; a task or "
            "data of your own: privtune.tasks.by_unit or unit_records), or draw on a budget of "
            f"unit: {unit}."
        )
    counts = "each record by itself" if unit == RECORD else f"all rows of one {unit} together"
    raise UnitMismatchError(
        f"{who} counts {counts}, but budget {budget!r} protects every {protected}: {why}. {remedy}"
    )
