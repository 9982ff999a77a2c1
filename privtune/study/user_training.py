"""What a user says about a training loop of their own: public facts, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from privtune.accounting._checks import check_integer, check_number
from privtune.errors import InvalidInputError
from privtune.strategies import Scoring
from privtune.tasks import Task, TaskData
from privtune.training.mechanism.schedule import Schedule

__all__ = ["DPSGD", "Validation"]

_MOST = 10**12  # records: more than anybody has


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """A training loop of Poisson-sampled, clipped, noisy gradients, of any optimizer.

    Args:
        records: Number of training records, declared public: of people, where the budget's unit is
            a person.
        epochs: Expected passes over them, above 0.
        expected_batch_size: Expected records in one Poisson sample.

    Raises:
        InvalidInputError: A value out of its range.

    Example:
        >>> DPSGD(records=1000, epochs=5, expected_batch_size=50).schedule.steps
        100
    """

    records: int
    epochs: float
    expected_batch_size: int

    def __post_init__(self) -> None:
        check_integer("records", self.records, at_least=1, at_most=_MOST)
        check_number("epochs", self.epochs, above=0.0)
        check_integer("expected_batch_size", self.expected_batch_size, at_least=1, at_most=_MOST)

    @property
    def schedule(self) -> Schedule:
        """Records, rate and steps."""
        return Schedule.from_epochs(
            records=self.records,
            epochs=self.epochs,
            expected_batch_size=self.expected_batch_size,
        )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation split that trials are scored on.

    Args:
        records: Number of its records, declared public.
        public: Whether it may be shown to everybody. If not, every score is noised and charged.
        scoring: Metric, mechanism and bound.

    Raises:
        InvalidInputError: If there is no record.

    Example:
        >>> Validation(records=500, scoring=Scoring(metric="loss", bound=4.0)).public
        False
    """

    records: int
    public: bool = False
    scoring: Scoring = field(default_factory=Scoring)

    def __post_init__(self) -> None:
        check_integer("records", self.records, at_least=1, at_most=_MOST)


def objective_task(training: DPSGD, validation: Validation | None) -> Task:
    """Return the public facts of a loop as a task, for planning. It has no data of its own."""

    def nothing(*_: object) -> TaskData:
        raise InvalidInputError("task", "objective", "is trained by the user's own function")

    return Task(
        name="objective",
        description="a training loop of the user's own",
        train_records=training.records,
        validation_records=1 if validation is None else validation.records,
        test_records=1,
        input_shape=(),
        classes=None,
        load=nothing,
        model=nothing,  # type: ignore[arg-type]
        loss=nothing,  # type: ignore[arg-type]
        public_validation=validation is not None and validation.public,
    )
