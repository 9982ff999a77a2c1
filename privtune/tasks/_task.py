"""What a study works on: data, a model, a loss, a metric, and what is public about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError, PrivTuneError

if TYPE_CHECKING:
    import torch

    from privtune.training.engine import TensorData

__all__ = ["Task", "TaskData", "TaskDataError"]


class TaskDataError(PrivTuneError):
    """The data that a task loaded is not what the task declared in public."""


@dataclass(frozen=True)
class TaskData:
    """The three splits of a task, in memory."""

    train: TensorData
    validation: TensorData
    test: TensorData


@dataclass(frozen=True, kw_only=True)
class Task:
    """A learning problem, with its public facts apart from its private data.

    Planning reads the public facts only; ``load`` is called when a charge has been started.

    Args:
        name: Name in specs.
        description: One line for ``privtune tasks``.
        train_records: Number of training records, declared public.
        validation_records: Number of validation records, declared public.
        test_records: Number of test records, declared public.
        input_shape: Shape of one input record.
        classes: Number of classes.
        load: Reads the data. May take time, may fail; is never called while planning.
        model: Builds a freshly initialised module; called under a seeded generator.
        loss: Per-sample loss: ``(outputs [B, classes], targets [B]) -> [B]``.
        public_test: Whether the test split is declared public. If not, no test metric is shown.
        public_validation: Whether the validation split is declared public. If not, every score
            on it is noised and charged.
        check: Called before anything is charged: raises ``TaskDataError`` where what holds the data
            is not as declared, its records apart. Must not depend on a value of a record.

    Raises:
        InvalidInputError: If a size is below 1.
    """

    name: str
    description: str
    train_records: int
    validation_records: int
    test_records: int
    input_shape: tuple[int, ...]
    classes: int
    load: Callable[[], TaskData]
    model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    public_test: bool = False
    public_validation: bool = False
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        for field in ("train_records", "validation_records", "test_records", "classes"):
            if getattr(self, field) < 1:
                raise InvalidInputError(
                    field, getattr(self, field), f"task {self.name!r} must declare at least 1"
                )

    def load_checked(self) -> TaskData:
        """Load the data and check its sizes against what was declared, and charged.

        Returns:
            The splits.

        Raises:
            TaskDataError: If a split holds another number of records than was declared: rates and
                normalisers were charged for the declared one.
        """
        data = self.load()
        for split in ("train", "validation", "test"):
            declared = getattr(self, f"{split}_records")
            found = len(getattr(data, split).y)
            if found != declared:
                raise TaskDataError(
                    f"Task {self.name!r} declares {declared} {split} records, but its data is of "
                    "another size; sampling rates were charged for the declared number. Correct "
                    f"{split}_records and plan the study again."
                )
        return data
