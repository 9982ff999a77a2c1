"""What a table's spec says of its model: what builds it, its loss, and what is proven of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from privtune.errors import InvalidInputError
from privtune.tasks._columns import PAID, Column, Date
from privtune.tasks._constants import of_softmax, of_squared_error
from privtune.tasks._data import classification_loss
from privtune.tasks._spec_fields import own_model

if TYPE_CHECKING:
    import torch
    from torch import nn

_HIDDEN = (64,)


class Declared(Protocol):
    """What a table says of its columns."""

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """All values of the target; None for a regression."""
        ...

    @property
    def target_range(self) -> tuple[float, float] | None:
        """The range of a regression's target; None for classes."""
        ...

    @property
    def features(self) -> tuple[Column, ...]:
        """Its features."""
        ...

    @property
    def projection(self) -> object:
        """What they are projected on; None where they are not."""
        ...


def model_of(
    spec: Mapping[str, Any], features: int, declared: Declared
) -> tuple[str, Callable[[], nn.Module]]:
    """Return what the model is called, and what builds it."""
    given = spec.get("model", "linear")
    outputs = 1 if declared.classes is None else len(declared.classes)
    if given != "mlp" and "hidden" in spec:
        raise InvalidInputError("task.hidden", spec["hidden"], "goes with model: mlp alone")
    build: tuple[int, ...] | Callable[..., object] | None
    if given in ("linear", "logistic"):
        build = None
        what = "linear regression" if declared.classes is None else "logistic regression"
    elif given == "mlp":
        build = _hidden(spec.get("hidden", _HIDDEN))
        what = f"MLP {'-'.join(map(str, (features, *build, outputs)))}"
    else:
        what, built_in = str(given), ("linear", "logistic", "mlp")
        of = "the numbers of features and outputs"
        build = own_model(what, features, outputs, built_in=built_in, of=of)

    def model() -> nn.Module:
        from torch import nn

        from privtune.tasks._models import InRange, linear, mlp

        if build is None:
            made = linear(features, outputs)
        elif isinstance(build, tuple):
            made = mlp(features, outputs, build)
        else:
            made = build()
        if declared.target_range is None:
            return made
        return nn.Sequential(made, InRange(*declared.target_range))

    return what, model


def loss_of(
    spec: Mapping[str, Any], declared: Declared
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    weights = spec.get("class_weights")
    if declared.target_range is not None:
        if weights is not None:
            raise InvalidInputError("task.class_weights", weights, "goes with classes alone")
        low, high = declared.target_range

        def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            from privtune.tasks._models import squared_error

            return squared_error(outputs, targets, half=0.5 * (high - low))

        return squared
    if weights is None or weights == PAID:  # unweighted, until a stage has released them
        return classification_loss
    listed = isinstance(weights, Sequence) and not isinstance(weights, str)
    numbers = listed and all(isinstance(w, int | float) and 0 < w < 1e6 for w in weights)
    if not numbers or len(weights) != len(declared.classes or ()):
        raise InvalidInputError(
            "task.class_weights",
            weights,
            "must be one number above 0 for each class, in their order",
        )
    return partial(_weighted, weights=tuple(map(float, weights)))


def _weighted(
    outputs: torch.Tensor, targets: torch.Tensor, *, weights: tuple[float, ...]
) -> torch.Tensor:
    from privtune.tasks._models import weighted_cross_entropy

    return weighted_cross_entropy(outputs, targets, weights=weights)


def constants_of(spec: Mapping[str, Any], declared: Declared) -> Mapping[str, float]:
    """Return what is proven of the loss of a linear model on declared features; of others nothing."""
    weights = spec.get("class_weights") or ()
    linear = spec.get("model", "linear") in ("linear", "logistic")
    if not linear or declared.projection is not None or weights == PAID:
        return {}
    square = sum(_square(column) for column in declared.features)
    if declared.classes is None:
        return of_squared_error(square)
    return of_softmax(square, len(declared.classes), weight=max(weights, default=1.0))


def _hidden(given: Any) -> tuple[int, ...]:
    widths = [given] if isinstance(given, int) else given
    listed = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) > 0
    if not listed or not all(
        isinstance(w, int) and not isinstance(w, bool) and 1 <= w <= 10**5 for w in widths
    ):
        raise InvalidInputError(
            "task.hidden", given, "must be a list of whole numbers of at least 1"
        )
    return tuple(widths)


def _square(column: Column) -> float:
    """Return what a column's features' squares add up to at most: 1 a number, a circle, a choice."""
    return float(len(column.parts)) if isinstance(column, Date) else 1.0
