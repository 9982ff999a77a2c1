"""The entry points from Python: functions that make tasks, and create and load studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import ByName
from privtune.ledger import Budget
from privtune.names import refuse_name, usual_storage
from privtune.study import (
    BudgetSpec,
    Observer,
    Study,
    StudyNotFoundError,
    StudySpec,
    delete_study,
)
from privtune.study.familiar_names import answers, answers_with
from privtune.study.schedules import with_chosen_numbers
from privtune.study.spec import SpecFields

if TYPE_CHECKING:
    from privtune.tasks import Score, Task
    from privtune.tasks.task import Build, RecordLoss

__all__ = ["answer", "create_study", "delete_study", "load_study", "make_task"]

_PLACES = ("device", "stack", "executor")
"""Fields of a spec that say where it is computed. They change no result."""


@answers
def make_task(
    build: Build | str,
    *,
    loss: RecordLoss | str | None = None,
    score: str | Score | None = None,
    data: Any = None,
    split: Mapping[str, int] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    public: Mapping[str, Any] | None = None,
    benchmark: bool | None = None,
    classes: int | Sequence[Any] | None = None,
    target_range: tuple[float, float] | None = None,
    rarest_share: float | None = None,
    pad_to: int | None = None,
    columns: Mapping[str, Any] | None = None,
    precision: str = "float32",
) -> Task:
    """Return a task of your own: its records, the ``build`` of its candidates, its loss and its score.

    The records are read and brought into tensors, and what one is made of counts as public from then on;
    nothing is trained or charged. :meth:`Study.optimize` runs arms of the task, as many as you like.

    A function or data may be given as ``"package.module:function"``; processes on other machines need that.

    Args:
        build: Takes a :class:`privtune.Trial`, suggests hyperparameters, and returns a
            :class:`privtune.Candidate`. It receives no data.
        loss: ``(model, *record) -> [1]``: the loss of one record, whose tensors have a leading axis
            of 1. A dict is passed whole: ``(model, record)``. Required.
        score: Name of a metric, or a :class:`privtune.Score` of one or of a function like ``loss``;
            ``accuracy`` unless given. For strategies that choose.
        data: The private records: tensors or arrays with records along the first axis, as a pair,
            tuple or dict of them; a map-style ``Dataset``; a ``DataFrame`` with ``columns``; a data
            set of Hugging Face's.
        split: Expected sizes of ``train``, ``validation`` and ``test``: the split of a record is a keyed
            hash of its content, so that a record more or less moves no other.
        train: With fixed splits, the training records, in place of ``data`` and ``split``.
        validation: Likewise, the validation records.
        test: Likewise, the test records.
        public: Records that everybody may see, by split: ``{"test": (x, y)}``. Their scores are
            exact and free.
        benchmark: Whether all records are public, as of a benchmark or a generator: repetitions of an
            arm are not charged then.
        classes: How many classes there are, or a list of all; as many as the model tells apart unless
            given.
        target_range: Of a regression, the public range of its targets.
        rarest_share: Share of the rarest class, as far as it is known without the records: by it the
            widths of intervals are foretold.
        pad_to: Length that ragged records are padded or cut to.
        columns: Of a ``DataFrame``: ``{"inputs": [...], "target": ...}``.
        precision: Numbers of the forward and the backward pass: ``float32`` or ``bfloat16``.

    Returns:
        The task.

    Raises:
        InvalidInputError: If something is missing or does not go together, or the records are of no kind
            that can be read.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> import privtune
        >>> def build(trial):
        ...     model = torch.nn.Linear(2, 2)
        ...     rate = trial.suggest_float("rate", 0.1, 9)
        ...     return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))
        >>> def loss(model, x, y):  # of one record
        ...     return cross_entropy(model(x), y, reduction="none")
        >>> x = torch.randn(200, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> task = make_task(build, loss=loss, data=(x, y), split={"train": 150, "validation": 50})
        >>> task.train_records, task.validation_records, task.input_shape
        (150, 50, (2,))
    """
    from privtune.tasks.own import own_task

    return own_task(
        build,
        loss=loss,
        score=score,
        data=data,
        split=split,
        train=train,
        validation=validation,
        test=test,
        public=public,
        benchmark=benchmark,
        classes=classes,
        target_range=target_range,
        rarest_share=rarest_share,
        pad_to=pad_to,
        columns=columns,
        precision=precision,
    )


@answers_with(SpecFields.__annotations__)
def create_study(
    name: str,
    *,
    budget: Budget,
    task: str | Mapping[str, Any] | None = None,
    arms: Sequence[Mapping[str, Any]] = (),
    storage: str | Path | None = None,
    load_if_exists: bool = False,
    tracking: str | None = None,
    force: bool = False,
    **fields: Unpack[SpecFields],
) -> Study:
    """Plan a study and store it, without touching data or spending budget.

    With a task and arms everything is declared and planned together; :meth:`Study.run` runs it.
    Without, the study is open: :meth:`Study.optimize` runs one arm after the other, each trained by
    a function of your own.

    Releases go to MLflow with ``tracking="mlflow"``: to ``MLFLOW_TRACKING_URI``, or the store beside the
    database. Whether or not it is given, nothing in a sealed round can reach MLflow.

    Args:
        name: Name of the study.
        budget: The budget it draws on; created with the study if it does not exist.
        task: A built-in task, ``package.module:factory``, or a table, as in a spec.
        arms: For each arm ``name``, ``strategy`` and the strategy's options, as in a spec.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file. Unless given
            that of the variable ``PRIVTUNE_STORAGE``, else that in the file ``PRIVTUNE_STORAGE_FILE``, else
            ``privtune.db`` in this folder.
        load_if_exists: Return a study of this name as it is, if there is one. Whatever else is given
            must be what it was created with; of an open study ``device``, ``stack`` and ``executor`` may
            be others now, since they change no result.
        tracking: ``mlflow``: log each release as it is made. Unless given nothing is logged, and
            ``privtune study sync NAME`` does it later.
        force: Whether to plan although δ is above one over the number of protected records.
        **fields: Other fields of a spec, as :class:`privtune.StudySpec` has them. What is searched and how
            long is trained, of a study with a task: ``space``, ``epochs`` and ``expected_batch_size``
            (``auto``: planning chooses them), ``compute``, ``scoring``, ``stages``. What each arm reports of
            the test split: ``report``; planning chooses a metric unless it is given, None for no score. What
            all arms together may cost: ``epsilon``; the whole budget unless given. How often each arm runs:
            ``repeats``. Where it is computed, which changes no result: ``device`` (``auto``, ``cpu``,
            ``cuda``), ``stack``, and ``executor``, who trains the rounds of selections, as in
            :meth:`Study.run`. Where noise comes from: ``noise`` (``plain``, ``secure``, or a
            :class:`privtune.NoiseOptions`). Where large models are stored: ``artifacts``, the URL of an
            object store, encrypted there. ``seed`` makes the study reproducible, and its guarantee void
            against whoever knows the seed.

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
    if not isinstance(budget, Budget):
        raise InvalidInputError(
            "budget",
            budget,
            "must be a privtune.Budget",
            "Budget(4.0, 1e-5, name='clinic') is one.",
        )
    terms = {field: getattr(budget, field) for field in BudgetSpec.model_fields}
    _check_tracking(tracking)
    storage = usual_storage(storage)
    values = {"name": name, "budget": terms, "task": task, "arms": arms, **fields}
    document = {}
    for field, value in values.items():
        # Of a report None says that there is none; of others, that they are not given.
        if field == "report" or (value is not None and value != ()):
            document[field] = value
    spec = StudySpec.parse(document)
    if not load_if_exists:
        return _track(Study.create(spec, storage, force=force), tracking)
    try:
        study = Study(name, storage)
    except StudyNotFoundError:
        return _track(Study.create(spec, storage, force=force), tracking)
    new = with_chosen_numbers(spec, study.plans).model_dump(mode="json")
    stored = study.spec.model_dump(mode="json")
    differences = sorted(field for field in document if new[field] != stored[field])
    if study.spec.task is None:  # whose arms have no study.run, which takes them
        places = {field: getattr(spec, field) for field in _PLACES if field in differences}
        study.place(places)
        differences = [field for field in differences if field not in places]
    if differences:  # they would do nothing
        study.close()
        raise PrivTuneError(
            f"Study {name!r} exists, and was created with other {', '.join(differences)} than is given now. "
            "Load it as it is, privtune.load_study(name), or give the new study another name; device, "
            "stack and executor can be given to study.run."
        )
    return _track(study, tracking)


TRACKERS: ByName[Callable[[Study], Observer]] = ByName(
    {"mlflow": "privtune.tracking.mlflow:MlflowObserver"}
)
"""What logs the releases of a study, by the name that ``tracking`` gives."""


def _check_tracking(tracking: str | None) -> None:
    """Refuse the name of an unknown tracker, and say where a server's address belongs."""
    if tracking is None or tracking in TRACKERS:
        return
    remedy = ""
    if "://" in tracking:
        remedy = "The address of a server stands in the variable MLFLOW_TRACKING_URI."
    refuse_name("tracking", tracking, [*TRACKERS], remedy=remedy)


def _track(study: Study, tracking: str | None) -> Study:
    """Attach the tracker of a given name, if any, to a study, and return the study."""
    if tracking is not None:
        study.observer = TRACKERS[tracking](study)
    return study


def answer(study: Study) -> str:
    """Return a study's answer in sentences: which arm is best, how surely, and how its model is used.

    The same sentences stand above ``privtune study compare``, the report, and the study's note in MLflow.

    Args:
        study: A study; before its first release the sentence says how it is run.

    Returns:
        One or two lines.

    Example:
        >>> opened = create_study("unanswered", budget=Budget(4.0, 1e-5, name="clinic"))
        >>> answer(opened)
        'Nothing is released yet: run its program'
    """
    from privtune.views.headline import headline

    return "\n".join(headline(study, study.status()).lines)


@answers
def load_study(
    name: str,
    *,
    storage: str | Path | None = None,
    curator: bool = False,
    tracking: str | None = None,
) -> Study:
    """Load a study that exists.

    Args:
        name: Name of the study.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file. Unless given
            that of the variable ``PRIVTUNE_STORAGE``, else that in the file ``PRIVTUNE_STORAGE_FILE``, else
            ``privtune.db`` in this folder.
        curator: Whether you are inside the trust boundary and may see sealed trials.
        tracking: ``mlflow``: log what is released from now on, and what was released before with it.

    Returns:
        The study; ``run`` goes on where it was.

    Raises:
        PrivTuneError: If there is no such study.

    Example:
        >>> opened = create_study("own-loop", budget=Budget(4.0, 1e-5, name="clinic"))
        >>> load_study("own-loop").remaining()
        4.0
    """
    _check_tracking(tracking)
    study = Study(name, usual_storage(storage), curator=curator)
    return _track(study, tracking)
