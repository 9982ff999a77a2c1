"""Small helpers that the methods share: candidates to tensors, field checks, calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from privtune.errors import InvalidInputError
from privtune.numbers import is_number

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate

M = TypeVar("M")


def build(method: type[M], options: Mapping[str, Any], **fixed: Any) -> M:
    """Make a method from the options of a spec and the fields that a plan fixes."""
    own = [f for f in fields(method) if f.name not in fixed]  # type: ignore[arg-type]
    allowed = [f.name for f in sorted(own, key=lambda f: bool(f.kw_only))]  # its own options first
    for name in options:
        if name == "clipping" and (why := getattr(method, "clips_whole", "")):
            raise InvalidInputError("option", name, f"cannot be had here: {why}")
        if name not in allowed:
            raise InvalidInputError("option", name, f"must be one of {', '.join(allowed)}")
    for field in own:
        _check_kind(field.name, options.get(field.name, field.default), str(field.type))
    needed = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in options]:
        raise InvalidInputError(
            "options", sorted(options), f"the method also needs {', '.join(missing)}"
        )
    return method(**{**options, **fixed})


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
}


def _check_kind(name: str, value: object, kind: str) -> None:
    """Refuse an option of another kind than its field is declared as, where that is a plain one."""
    plain, _, nothing = kind.partition(" | ")
    if plain not in _KINDS or nothing not in ("", "None") or value is MISSING:
        return
    if value is None and nothing:
        return
    types, word = _KINDS[plain]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidInputError(name, value, f"must be {word}")


def _is_finite(value: object) -> bool:
    """Say whether a value is a number that a float holds, of NumPy's types as well."""
    known = isinstance(value, int | float)
    return is_number(value) or (not known and isinstance(value, Real) and math.isfinite(value))


def check_positive(name: str, value: float) -> None:
    """Refuse a field that is not a finite number above 0."""
    if not (_is_finite(value) and value > 0.0):
        raise InvalidInputError(name, value, "must be a finite number above 0")


_NORMS = (1e-15, 1e30)  # float32 sees no norm below 1e-19, and holds no noise above 3e38


def check_hyperparameter(where: str, name: str, value: object) -> None:
    """Refuse a value that no training can begin with: one that fails after the charge is paid for.

    Args:
        where: Where it stands, for the message.
        name: Of the hyperparameter.
        value: Its value.
    """
    if not is_number(value) or value <= 0.0:
        raise InvalidInputError(where, value, "must be a finite number above 0")
    if name == "max_grad_norm" and not _NORMS[0] <= value <= _NORMS[1]:
        raise InvalidInputError(where, value, "must be from {:g} to {:g}".format(*_NORMS))


def check_nonnegative(name: str, value: float) -> None:
    """Refuse a field that is not a finite number of at least 0."""
    if not (_is_finite(value) and value >= 0.0):
        raise InvalidInputError(name, value, "must be a finite number of at least 0")


def check_fraction(name: str, value: float) -> None:
    """Refuse a field outside [0, 1)."""
    if not (_is_finite(value) and 0.0 <= value < 1.0):
        raise InvalidInputError(name, value, "must lie in [0, 1)")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a field that is not one of ``choices``."""
    if value not in choices:
        raise InvalidInputError(name, value, f"must be one of {', '.join(choices)}")


def expect_nothing(candidates: Sequence[Candidate]) -> None:
    """Refuse hyperparameters where none is left to set."""
    if given := next(filter(None, candidates), None):
        raise InvalidInputError(
            "candidate", dict(given), "must be empty: the method sets everything itself"
        )


def candidate_column(
    candidates: Sequence[Candidate], name: str, like: torch.Tensor, default: float | None = None
) -> torch.Tensor:
    """Collect one positive hyperparameter of every candidate into a tensor of shape ``[K]``."""
    import torch

    values = []
    for candidate in candidates:
        value = candidate.get(name, default)
        if value is None:
            raise InvalidInputError(
                "candidate", dict(candidate), f"must give {name}", "The method does not set it."
            )
        check_positive(name, float(value))
        values.append(float(value))
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def rows(values: torch.Tensor) -> torch.Tensor:
    """Turn shape ``[K]`` into ``[K, 1]``, to scale rows of ``[K, P]``."""
    return values.unsqueeze(-1)


def descend(params: torch.Tensor, rate: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return ``params - rate * direction``, for a rate of each candidate, in one pass."""
    import torch

    return torch.addcmul(params, rate.unsqueeze(-1), direction, value=-1.0)


def first_size(params: torch.Tensor, oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the size of the first weights, shape ``[K]``, and where all of them are 0.

    It is their root mean square, or that of what torch's layers usually begin with where they are
    all 0. First weights are public: a file's, or drawn without the data.

    Args:
        params: First parameters, shape ``[K, P]``.
        oracle: Knows the layers' shapes.
    """
    size = params.square().mean(dim=1).sqrt()
    return size.where(size > 0.0, oracle.usual_size), size == 0.0


def noise_scale_for(event: Event, *, epsilon: float, delta: float) -> float:
    """Return the factor on every noise multiplier of ``event`` that meets (epsilon, delta)."""
    from privtune.accounting import calibrate

    return calibrate(event, epsilon=epsilon, delta=delta).scale
