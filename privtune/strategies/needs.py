"""What a strategy needs of the study that runs it: data on its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a strategy needs of the study that runs it.

    Args:
        task: A task that the engine trains; a function of the user's own cannot take its place.
        score: A validation split, because it chooses by a score.
        independent: Candidates that are drawn independently of each other and of their scores: no
            sampler that does not declare so, no pruner. Whatever seals its trials needs it.
        parameters: Hyperparameters that every candidate has to have, by name: the option and its
            value with which that is so, or None if it always is.
        methods: The training methods that it can run; empty for all.
        non_private: Somebody who says ``--non-private``: it has no guarantee and is no part of any
            budget.

    Example:
        >>> Needs(score=True).independent
        False
    """

    task: bool = False
    score: bool = False
    independent: bool = False
    parameters: Mapping[str, tuple[str, Any] | None] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    non_private: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What is needed, as people read it."""
        said = {
            "a task": self.task,
            "a validation split": self.score,
            "independent candidates": self.independent,
            f"one of the methods {', '.join(self.methods)}": self.methods,
            "--non-private": self.non_private,
        }
        named = (
            name if when is None else f"{name} (with {when[0]}: {when[1]})"
            for name, when in self.parameters.items()
        )
        return (*(word for word, needed in said.items() if needed), *named)
