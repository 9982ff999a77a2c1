"""The Python way in: create and load studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from privtune.ledger import Budget
from privtune.study import Study, StudyNotFoundError, StudySpec, delete_study

__all__ = ["create_study", "delete_study", "load_study"]

_DEFAULT_STORAGE = "sqlite:///privtune.db"


def create_study(
    name: str,
    *,
    budget: Budget,
    task: str | None = None,
    arms: Sequence[Mapping[str, Any]] = (),
    storage: str = _DEFAULT_STORAGE,
    load_if_exists: bool = False,
    **options: Any,
) -> Study:
    """Plan a study and store it. Touches no data and spends nothing.

    With a task and arms everything is declared and planned together; :meth:`Study.run` runs it.
    Without, the study is open: :meth:`Study.optimize` runs one arm after the other, each trained by
    a function of your own.

    Releases go to MLflow with ``observer=privtune.tracking.mlflow.MlflowObserver(study)``, given to
    either. Whether or not it is given, nothing in a sealed round can reach MLflow.

    Args:
        name: Name of the study.
        budget: The budget it draws on; created with the study if it does not exist.
        task: A built-in task, or ``package.module:factory``.
        arms: For each arm ``name``, ``strategy`` and the strategy's options, as in a spec.
        storage: Database URL of studies and budgets.
        load_if_exists: Return a study of this name as it is, if there is one.
        **options: Further fields of :class:`privtune.StudySpec`: ``epochs``,
            ``expected_batch_size``, ``space``, ``scoring``, ``epsilon``, ``device``, ``seed``.

    Returns:
        The study.

    Raises:
        PrivTuneError: If a field is not valid, the name is taken, or an arm cannot be planned.

    Example:
        >>> study = create_study(
        ...     "digits",
        ...     budget=Budget(8.0, 1e-5, name="digits"),
        ...     task="digits-mlp",
        ...     arms=[
        ...         {
        ...             "name": "defaults",
        ...             "strategy": "fixed",
        ...             "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
        ...         }
        ...     ],
        ...     epochs=2,
        ...     expected_batch_size=64,
        ... )
        >>> study.arms, study.status()[0].state, study.spent().epsilon
        (('defaults',), 'planned', 0.0)
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
                "unit": budget.unit,
            },
            "arms": [dict(arm) for arm in arms],
            **options,
        }
    )
    if load_if_exists:
        try:
            return Study(name, storage)
        except StudyNotFoundError:
            pass
    return Study.create(spec, storage)


def load_study(name: str, *, storage: str = _DEFAULT_STORAGE, curator: bool = False) -> Study:
    """Load a study that exists.

    Args:
        name: Name of the study.
        storage: Database URL of studies and budgets.
        curator: Whether you are inside the trust boundary and may see sealed trials.

    Returns:
        The study; ``run`` goes on where it was.

    Raises:
        PrivTuneError: If there is no such study.

    Example:
        >>> opened = create_study("own-loop", budget=Budget(4.0, 1e-5, name="clinic"))
        >>> load_study("own-loop").remaining()
        4.0
    """
    return Study(name, storage, curator=curator)
