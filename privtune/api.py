"""The Python way in: create and load studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Budget
from privtune.study import BudgetSpec, Study, StudyNotFoundError, StudySpec, delete_study
from privtune.study._familiar import answers

__all__ = ["create_study", "delete_study", "load_study"]

_DEFAULT_STORAGE = "sqlite:///privtune.db"


@answers
def create_study(
    name: str,
    *,
    budget: Budget,
    task: str | Mapping[str, Any] | None = None,
    arms: Sequence[Mapping[str, Any]] = (),
    space: Mapping[str, Mapping[str, Any]] | None = None,
    epochs: float | None = None,
    expected_batch_size: int | None = None,
    scoring: Mapping[str, Any] | None = None,
    stages: Sequence[Mapping[str, Any]] | None = None,
    report: Mapping[str, Any] | None = None,
    epsilon: float | None = None,
    repeats: int = 1,
    device: str | None = None,
    stack: int | Literal["auto"] | None = None,
    executor: str | Mapping[str, Any] | None = None,
    noise: str | Mapping[str, Any] | None = None,
    artifacts: str | None = None,
    seed: int | None = None,
    storage: str | Path = _DEFAULT_STORAGE,
    load_if_exists: bool = False,
    anyway: bool = False,
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
        task: A built-in task, ``package.module:factory``, or a table, as in a spec.
        arms: For each arm ``name``, ``strategy`` and the strategy's options, as in a spec.
        space: What is searched, by name: ``{"type": "float", "low": ..., "high": ..., "log": True}``.
        epochs: Expected passes over the training data of one training, above 0.
        expected_batch_size: Expected size of a Poisson sample, at least 1.
        scoring: How trials are scored: ``metric``, ``mechanism``, ``bound``, ....
        stages: What is released of a table before the arms, once for all of them: ``type``
            (``quantiles``, ``histogram``, ``dp-pca``), ``epsilon_share``, ....
        report: One final score of every arm on the test split: ``metric``, ``epsilon_share``, ....
        epsilon: What all arms together may cost; the whole budget unless given.
        repeats: How often each arm runs, so that arms are compared by means. On records that a task
            declares public (``benchmark``) repetitions are not charged; on all others each is.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        stack: How many candidates to train at once, or ``auto``.
        executor: Who trains the rounds of selections, as in ``Study.run``.
        noise: ``plain``, ``secure``, or ``source`` and ``floating_point``.
        artifacts: URL of an object store for large models, encrypted there; the database unless given.
        seed: Makes the study reproducible, and its guarantee void against whoever knows the seed.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
        anyway: Whether to plan although δ is above one over the number of protected records.
        load_if_exists: Return a study of this name as it is, if there is one. Whatever else is given
            must be what it was created with.

    Returns:
        The study.

    Raises:
        PrivTuneError: If a field is not valid, the name is taken, an arm cannot be planned, or a study
            that exists was created with something else than what is given.

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
        >>> study.arms, study.spent().epsilon
        (('defaults',), 0.0)
    """
    given = {n: v for n, v in locals().items() if v is not None and v != ()}
    del given["anyway"]
    storage, exists = given.pop("storage"), given.pop("load_if_exists")
    if not isinstance(budget, Budget):
        raise InvalidInputError(
            "budget",
            budget,
            "must be a privtune.Budget",
            "Budget(4.0, 1e-5, name='clinic') is one.",
        )
    terms = {field: getattr(budget, field) for field in BudgetSpec.model_fields}
    spec = StudySpec.parse({**given, "budget": terms})
    if not exists:
        return Study.create(spec, storage, anyway=anyway)
    try:
        study = Study(name, storage)
    except StudyNotFoundError:
        return Study.create(spec, storage, anyway=anyway)
    asked, kept = (each.model_dump(mode="json") for each in (spec, study.spec))
    if other := sorted(n for n in given if asked[n] != kept[n]):  # they would do nothing
        study.close()
        raise PrivTuneError(
            f"Study {name!r} exists, and was created with other {', '.join(other)} than is given now. "
            "Load it as it is, privtune.load_study(name), or give the new study another name; device, "
            "stack and executor can be given to study.run."
        )
    return study


@answers
def load_study(
    name: str, *, storage: str | Path = _DEFAULT_STORAGE, curator: bool = False
) -> Study:
    """Load a study that exists.

    Args:
        name: Name of the study.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
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
