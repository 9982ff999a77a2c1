"""Objectives that other processes can import: ``package.module:function``, and its source's digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from privtune.errors import PrivTuneError
from privtune.imports import find_function, path_of, source_digest

__all__ = ["ImportedObjective", "ObjectiveChangedError"]


class ObjectiveChangedError(PrivTuneError):
    """A worker's copy of an objective is not the one that the study runs."""


@dataclass(frozen=True)
class ImportedObjective:
    """Where an objective is found.

    Args:
        path: ``package.module:function``.
        digest: SHA-256 of the module's source, in hexadecimal digits.
    """

    path: str
    digest: str

    @classmethod
    def at(cls, path: str) -> ImportedObjective:
        """Return the objective of a path.

        Raises:
            InvalidInputError: If nothing can be imported from there.
        """
        _find(path)
        return cls(path, source_digest(path.partition(":")[0]))

    @classmethod
    def of(cls, objective: Callable[..., Any]) -> ImportedObjective | None:
        """Return where a function is found; ``None`` if no other process can import it."""
        path = path_of(objective)
        try:
            return None if path is None else cls(path, source_digest(path.partition(":")[0]))
        except PrivTuneError:
            return None

    @classmethod
    def from_json(cls, content: bytes) -> ImportedObjective:
        """Return what :meth:`to_json` wrote."""
        return cls(**json.loads(content))

    def to_json(self) -> bytes:
        """Return it as it is stored with the arm."""
        return json.dumps({"path": self.path, "digest": self.digest}).encode()

    def load(self) -> Callable[..., Any]:
        """Return the function.

        Raises:
            InvalidInputError: If it cannot be imported here.
            ObjectiveChangedError: If its module's source is another one here.
        """
        found, module = _find(self.path), self.path.partition(":")[0]
        if source_digest(module) != self.digest:
            raise ObjectiveChangedError(
                f"The source of {module} differs between this worker and whoever runs the study: "
                "trials of two programs must not be compared. Bring the same files to both."
            )
        return found


def _find(path: str) -> Callable[..., Any]:
    return find_function(
        "objective",
        path,
        allowed="must be package.module:function",
        must="must name a function of a trial",
    )
