"""The Python way in: create and load studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from privtune.ledger import Budget
from privtune.study import Study, StudySpec

__all__ = ["create_study", "load_study"]

_DEFAULT_STORAGE = "sqlite:///privtune.db"


def create_study(
    name: str,
    *,
    budget: Budget,
    task: str,
    arms: Sequence[Mapping[str, Any]],
    epochs: float,
    expected_batch_size: int,
    storage: str = _DEFAULT_STORAGE,
    **options: Any,
) -> Study:
    """Plan a study and store it. Touches no data and spends nothing.

    Args:
        name: Name of the study.
        budget: The budget it draws on; created with the study if it does not exist.
        task: A built-in task, or ``package.module:factory``.
        arms: For each arm ``name``, ``strategy`` and the strategy's options, as in a spec.
        epochs: Expected passes over the training data of one training, above 0.
        expected_batch_size: Expected records in one Poisson sample.
        storage: Database URL of studies and budgets.
        **options: Further fields of :class:`privtune.StudySpec`: ``space``, ``epsilon``,
            ``device``, ``seed``.

    Returns:
        The study; :meth:`Study.run` runs it.

    Raises:
        PrivTuneError: If a field is not valid, the name is taken, or an arm cannot be planned.
    """
    spec = StudySpec.parse(
        {
            "name": name,
            "task": task,
            "budget": {
                "name": budget.name,
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "adjacency": budget.adjacency,
            },
            "arms": [dict(arm) for arm in arms],
            "epochs": epochs,
            "expected_batch_size": expected_batch_size,
            **options,
        }
    )
    return Study.create(spec, storage)


def load_study(name: str, *, storage: str = _DEFAULT_STORAGE) -> Study:
    """Load a study that exists.

    Args:
        name: Name of the study.
        storage: Database URL of studies and budgets.

    Raises:
        PrivTuneError: If there is no such study.
    """
    return Study(name, storage)
