"""What a ``build`` function returns, and how trained models are scored: declared, never executed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.numbers import is_number

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

RecordLoss = Callable[..., "torch.Tensor"]
"""A function ``(model, *record) -> [1]`` of one record, whose tensors have a leading axis of 1."""

Build = Callable[[Any], "Candidate"]
"""Takes a ``privtune.Trial``, suggests its hyperparameters, returns what to train. It receives no data."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One model to train, and how: what ``build(trial)`` returns.

    Args:
        model: The model with its first weights. Parameters that do not require gradients stay as they are.
        optimizer: One of torch's classes, over exactly the trainable parameters of the model; None
            where the arm's method steps by itself (``dpsgd`` included: then ``learning_rate`` is
            suggested under that name, or fixed by the arm).
        method: Name of the training method (``dpsgd``, ``hyfreedp``, ``adadp``, ...); the arm's unless
            given. It must be the same for every trial, as the charge is for one method.
        max_grad_norm: Each record's gradient is clipped to this L2 norm, above 0; 1 with an optimizer
            unless given. Methods that set it by themselves take none.
        schedule: Of the learning rate: a name or mapping as in a spec (``"cosine"``), or a scheduler of
            torch's over the optimizer, stepped once after every step.
        trainable: Which part is trained: ``all``, ``head``, ``biases`` or ``lora:RANK``; the parameters that
            require gradients unless given.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> Candidate(model, torch.optim.SGD(model.parameters(), lr=0.5), max_grad_norm=1.0).method is None
        True
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    _: KW_ONLY
    method: str | None = None
    max_grad_norm: float | None = None
    schedule: str | Mapping[str, Any] | LRScheduler | None = None
    trainable: str | None = None


@dataclass(frozen=True)
class Score:
    """How trials are scored: a metric by its name, or a function of the model and one record.

    Args:
        metric: ``accuracy``, ``auc``, ``loss`` (that which is trained on) and others as in a spec; or a
            function ``(model, *record) -> [1]`` like the loss, called on one record at a time with the
            model in evaluation mode.
        bound: The most that one record adds, above 0: values of a function are clipped to
            [-bound, bound], those of ``loss`` to [0, bound]. 1 unless given.
        maximize: Whether more of a function is better. Metrics by name know that by themselves.
        mechanism: ``gaussian`` or ``laplace`` noise, where the validation split is private.

    Raises:
        InvalidInputError: If the bound is not a finite number above 0.

    Example:
        >>> Score("loss", bound=4.0).bound
        4.0
    """

    metric: str | RecordLoss = "accuracy"
    bound: float | None = None
    maximize: bool = False
    mechanism: str = "gaussian"

    def __post_init__(self) -> None:
        if self.bound is not None and not (is_number(self.bound) and self.bound > 0.0):
            raise InvalidInputError("score.bound", self.bound, "must be a finite number above 0")

    @property
    def name(self) -> str:
        """The metric's name in a plan: ``value`` or ``cost`` for a function."""
        if isinstance(self.metric, str):
            return self.metric
        return "value" if self.maximize else "cost"
