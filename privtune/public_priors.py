"""Public priors: which learning rates were best on public data, by method and schedule.

They are results of ``studies/priors``, which the package ships in ``public-priors.json``.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from privtune.errors import InvalidInputError
from privtune.names import refuse_fields

__all__ = [
    "fall_of",
    "public_guess",
    "public_law",
    "with_public_priors",
]

_Fields = Mapping[str, Any]  # of a law, as a spec has them

_FALLS: Mapping[str, str] = {
    "constant": "constant",
    "linear": "falling",
    "cosine": "falling",
}
"""Which measurement stands for a schedule of the learning rate; a step or a decay has none."""

_SETTINGS = ("prior", "method", "schedule")

_REMEDY = "Give a law of your own, such as {type: float, low: 0.05, high: 5.0, log: true}."


def fall_of(schedule: object) -> str | None:
    """Return which measurement stands for a schedule of the learning rate, or None if there is none.

    Args:
        schedule: A type, or a mapping with one, as a spec has it.

    Returns:
        ``constant`` or ``falling``.

    Example:
        >>> fall_of("cosine"), fall_of({"type": "linear", "start": 0.7}), fall_of("step")
        ('falling', 'falling', None)
    """
    kind = schedule.get("type", "constant") if isinstance(schedule, Mapping) else schedule
    return _FALLS.get(kind) if isinstance(kind, str) else None


def _shipped() -> Any:
    """Return what the package ships: laws of the best rates, and guesses, by method and fall of the rate."""
    folder = importlib.resources.files("privtune")
    text = (folder / "public-priors.json").read_text("utf-8")
    return json.loads(text)


def public_law(
    name: str,
    method: object = "dpsgd",
    schedule: object = "constant",
) -> _Fields:
    """Return the law of the values that were best on public data, in the fields of a spec's law.

    Args:
        name: The hyperparameter, ``learning_rate``.
        method: Name of the method that is trained with it.
        schedule: The schedule of its learning rate, a type or a mapping with one.

    Returns:
        ``type``, ``median`` and ``sigma`` of a log-normal law.

    Raises:
        InvalidInputError: If nothing was measured for the hyperparameter, the method or the schedule.

    References:
        ``studies/priors``: the best of eleven rates on seven public tasks, at a clipping norm of 1.

    Example:
        >>> public_law("learning_rate")["median"]
        1.72
        >>> cosine = public_law("learning_rate", "dp-adam", "cosine")
        >>> cosine == public_law("learning_rate", "dp-adam", "linear")
        True
        >>> public_law("learning_rate", "norm-bound")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: method = 'norm-bound': a public prior is measured for ...
    """
    laws = _shipped()["laws"]
    if name not in laws:
        raise InvalidInputError(
            "prior", name, f"a public prior is shipped for {', '.join(laws)} alone", _REMEDY
        )
    law: _Fields = _measured("prior", laws[name], method, schedule, _REMEDY)["law"]
    return law


def public_guess(method: object, schedule: object) -> dict[str, float]:
    """Return the rate that lost the least accuracy on public data, as options of ``public-rate``.

    Args:
        method: ``dpsgd`` or ``dp-adam``.
        schedule: The schedule of the learning rate, a type or a mapping with one.

    Returns:
        ``learning_rate`` of DP-SGD; ``share`` and ``zero_share`` of DP-Adam.

    Raises:
        InvalidInputError: If nothing was measured for the method or the schedule.

    References:
        ``studies/priors``: the mean loss of accuracy against the best rate of each task and ε.

    Example:
        >>> public_guess("dpsgd", "constant")
        {'learning_rate': 1.0}
        >>> sorted(public_guess("dp-adam", "cosine"))
        ['share', 'zero_share']
    """
    remedy = "Give learning_rate, or another schedule."
    guesses = _measured("rate", _shipped()["guesses"], method, schedule, remedy)
    return dict(guesses)


def _measured(
    what: str,
    methods: Mapping[str, Any],
    method: object,
    schedule: object,
    remedy: str,
) -> Any:
    """Return the measurement for a method and the fall of its rate; refuse others in one sentence."""
    if not isinstance(method, str) or method not in methods:
        allowed = f"a public {what} is measured for the methods {' and '.join(methods)} alone"
        raise InvalidInputError("method", method, allowed, remedy)
    fall = fall_of(schedule)
    if fall is None:
        allowed = f"a public {what} is measured for the schedules {', '.join(_FALLS)} alone"
        raise InvalidInputError("schedule", schedule, allowed, remedy)
    return methods[method][fall]


def with_public_priors(space: Mapping[str, _Fields]) -> dict[str, _Fields]:
    """Return a spec's space with the shipped law in the place of each ``{prior: public}``.

    Args:
        space: Laws by hyperparameter. Beside ``prior: public`` may stand ``method`` and ``schedule``,
            those that the law was measured with: DP-SGD at a constant rate unless given.

    Returns:
        The space; other laws as they are.

    Raises:
        InvalidInputError: If a prior is not ``public``, or nothing was measured for it.

    Example:
        >>> with_public_priors({"learning_rate": {"prior": "public"}})["learning_rate"]["median"]
        1.72
    """
    laws = dict(space)
    for name, fields in space.items():
        if isinstance(fields, Mapping) and "prior" in fields:
            laws[name] = _law_of_prior(name, fields)
    return laws


def _law_of_prior(name: str, fields: _Fields) -> _Fields:
    """Return the shipped law that the fields of a spec's prior ask for."""
    where = f"space.{name}"
    if fields["prior"] != "public":
        raise InvalidInputError(f"{where}.prior", fields["prior"], "a prior must be public")
    unknown = set(fields) - set(_SETTINGS)
    if unknown:
        refuse_fields(where, unknown, _SETTINGS, "prior: public")
    method = fields.get("method", "dpsgd")
    schedule = fields.get("schedule", "constant")
    several = [value for value in (method, schedule) if isinstance(value, list | tuple)]
    if several:
        raise InvalidInputError(
            where,
            dict(fields),
            "a public prior is one law for every arm that draws from it, and they differ in method or "
            "schedule",
            "Say which is meant, like {prior: public, method: dp-adam, schedule: linear}, or make a study "
            "for each.",
        )
    try:
        return public_law(name, method, schedule)
    except InvalidInputError as error:
        raise InvalidInputError(where, error.value, error.allowed, error.remedy) from None
