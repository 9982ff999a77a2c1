"""The user's own data, model and loss as a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import find_function, path_of, source_digest, users_code
from privtune.tasks._facts import SPLITS, TaskChangedError
from privtune.tasks._partition import places
from privtune.tasks._task import Build, RecordLoss, Score, Task, TaskData
from privtune.tasks.described import read_classes

if TYPE_CHECKING:
    from privtune.tasks._records import Records
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.kernel import LossOf

__all__ = ["from_spec", "own_task", "task_of"]

_FIELDS = (
    "build", "loss", "score", "data", "split", "train", "validation", "test", "public", "classes",
    "target_range", "pad_to", "columns", "precision", "name",
)  # fmt: skip
_FUNCTIONS = ("build", "loss")
_DATA = ("data", "train", "validation", "test")
_HOW = (
    'Pass data= with split={"train": 1000, "validation": 200, "test": 200}, the expected sizes; or parts '
    "that were apart from the beginning as train= and validation=."
)


def own_task(
    build: Build | str,
    *,
    loss: RecordLoss | str,
    score: str | Score | None = None,
    data: Any = None,
    split: Mapping[str, int] | None = None,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    public: Mapping[str, Any] | None = None,
    classes: int | tuple[Any, ...] | list[Any] | None = None,
    target_range: tuple[float, float] | None = None,
    pad_to: int | None = None,
    columns: Mapping[str, Any] | None = None,
    precision: str = "float32",
    name: str = "own",
) -> Task:
    """Return a task of the user's own data, model and loss.

    Every function, and every data, may be ``"package.module:function"``: then other processes find it,
    too. Functions of data take no arguments.

    Args:
        build: Suggests hyperparameters and returns a :class:`Candidate`; receives no data.
        loss: The loss of one record: ``(model, x, y) -> [1]`` of a pair, ``(model, record)`` of a dict,
            ``(model, *record)`` of a tuple, ``(model, x)`` of one tensor alone; each part with a leading
            axis of 1. Of units, ``(model, x, y) -> [rows]`` for the rows of one.
        score: How trials are scored: a metric's name, or a :class:`Score`, whose function is like ``loss``.
        data: All private records: ``(x, y)``, tensors, arrays, dicts and tuples of them, ``TensorData`` (of
            units, too), a map-style dataset, a ``DataFrame`` or a Hugging Face dataset. The target of a
            dict is its ``labels``, else its ``label``, else its last entry; of a tuple the last.
        split: Expected sizes of the splits that ``data`` is divided into, at least ``train``. Each record's
            split is a keyed hash of its content (a unit's: of its number), and true sizes are sealed.
        train: Training records, where splits are given apart; instead of ``data`` and ``split``.
        validation: Validation records, likewise.
        test: Test records, likewise.
        public: Public records as ``validation`` or ``test``: scores on them are exact, sizes public.
        classes: How many classes the targets have, or all their names.
        target_range: Of a regression, the public range of its targets.
        pad_to: How long the first axis of ragged parts is made: with zeros, token labels with -100.
        columns: Of a frame or a dataset of columns: ``{"inputs": [names], "target": name}``.
        precision: Numbers of a pass: ``float32`` or ``bfloat16``.
        name: Name of the task.

    Raises:
        InvalidInputError: If a field is outside its domain, or records are of several shapes.

    **Guarantee**: by ``data``, adding or removing one record moves no other. Of splits given apart, the
    guarantee is for data sets that differ in one record of one of them.

    Example:
        >>> import torch
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> data = torch.randn(150, 4), torch.arange(150) % 3
        >>> sizes = {"train": 100, "validation": 25, "test": 25}
        >>> task = own_task(lambda trial: None, loss=loss, data=data, split=sizes, classes=3)
        >>> task.facts.to_dict()["parts of a record"]
        'inputs 4 (float32), target a number (int64): read from the first record, and public'
    """
    given = {name: value for name, value in locals().items() if name in _FIELDS}
    functions = {name: _function(name, given[name]) for name in _FUNCTIONS}
    _check_ways(given)
    sizes = _sizes(split, public) if data is not None else {}
    labels = None if classes is None or isinstance(classes, int) else read_classes(classes)
    count = len(labels) if labels else _count(classes)
    _check_range(target_range, count, pad_to)
    parts = _read(given, count)
    first = next(iter(parts.values()))
    like = first.data.like
    targets = {target: _targets(part, count, target_range) for target, part in parts.items()}
    scored, score_of = _scored(score, first)
    declared: dict[str, Any] = {
        f"{part}_records": sizes.get(part, len(targets.get(part, ()))) for part in SPLITS
    }
    words = f"{first.parts}: {f'padded or cut to {pad_to}, ' if pad_to else ''}"
    unit = first.data.unit
    by = "given" if data is None else "content" if first.data.groups is None else "id"
    return Task(
        name=name,
        description="the user's own data, model and loss",
        **declared,
        input_shape=tuple(like[0].shape[1:]),
        classes=count,
        class_names=labels,
        load=_loader(targets, sizes),
        model=_no_model,
        loss=_no_model,
        public_test="test" in (public or {}),
        public_validation="validation" in (public or {}),
        partition=by,
        precision=precision,
        target_range=target_range if target_range is None else (target_range[0], target_range[1]),
        unit=unit,
        build=functions["build"],
        loss_of=_packed(functions["loss"], first, "loss"),
        score=scored,
        score_of=score_of,
        tree=first.data.tree,
        like=next(iter(targets.values())).like,
        parts=f"{words}read from the first record, and public",
        code=_code(given),
    )


def task_of(build: Build | Task | str, **given: Any) -> Task:
    """Return the task of what ``study.optimize`` was given: a task as it is, or the arguments of one.

    Args:
        build: A task with a ``build``, or what :func:`own_task` takes first.
        **given: What else it takes.

    Raises:
        InvalidInputError: If a task comes with other arguments, or has no ``build``; as :func:`own_task`.
    """
    if not isinstance(build, Task):
        return own_task(build, **given)
    if more := sorted(n for n, v in given.items() if v is not None and n != "precision"):
        raise InvalidInputError(more[0], "given", "is the task's to say", "Leave it out.")
    if build.build is None:
        raise InvalidInputError(
            "task",
            build.name,
            "has no build, so nothing says what to train",
            "Run it as a study of declared arms: privtune.create_study(name, task=..., arms=...).",
        )
    return build


def from_spec(spec: Mapping[str, Any]) -> Task:
    """Return the task of a mapping ``{type: own, build: ..., loss: ..., ...}``.

    Args:
        spec: The arguments of :func:`own_task` by name; ``score`` also a mapping, the arguments of
            :class:`Score`; ``sources``, the digest of every module that functions are of.

    Raises:
        InvalidInputError: If a field is unknown or missing.
        TaskChangedError: If a module's source is another one here.
    """
    fields = {name: value for name, value in spec.items() if name not in ("type", "sources")}
    if unknown := sorted(map(str, set(fields) - set(_FIELDS))):
        raise InvalidInputError("task", unknown, f"type own takes {', '.join(_FIELDS)}")
    for needed in _FUNCTIONS:
        if needed not in fields:
            raise InvalidInputError(f"task.{needed}", None, "is required for type own")
    for module, digest in spec.get("sources", {}).items():
        with users_code("task.sources", module, "cannot be imported"):
            found = source_digest(module)
        if found != digest:
            raise TaskChangedError(
                f"The source of {module} differs between this machine and whoever made the study: "
                "trials of two programs must not be compared. Bring the same files to both."
            )
    if isinstance(fields.get("score"), Mapping):
        with users_code("task.score", str(fields["score"]), "are no arguments of Score"):
            fields["score"] = Score(**fields["score"])
    return own_task(fields.pop("build"), **fields)


def _function(field: str, given: Any) -> Callable[..., Any]:
    """Return a function, imported where it is given by its path."""
    if isinstance(given, str):
        return find_function(
            field,
            given,
            allowed="must be a function, or package.module:function",
            must="must name a function",
        )
    if not callable(given):
        raise InvalidInputError(field, type(given).__name__, "must be a function, or its path")
    return given  # type: ignore[no-any-return]


def _check_ways(given: Mapping[str, Any]) -> None:
    """Refuse two ways of giving splits at once, and none."""
    apart = [name for name in _DATA[1:] if given[name] is not None]
    if given["data"] is not None and apart:
        raise InvalidInputError(apart[0], "given", "does not go with data", _HOW)
    if given["data"] is None and given["train"] is None:
        raise InvalidInputError("data", None, "must be given, or train", _HOW)
    if given["data"] is None and given["split"] is not None:
        raise InvalidInputError("split", given["split"], "goes with data alone", _HOW)
    public = given["public"] or {}
    if not isinstance(public, Mapping) or set(public) - set(SPLITS[1:]):
        raise InvalidInputError(
            "public", sorted(map(str, public)), "must be records by name: validation, test, or both"
        )
    if twice := sorted(set(public) & set(apart)):
        raise InvalidInputError("public", twice, "is given as private records, too")


def _sizes(split: Any, public: Any) -> dict[str, int]:
    """Return the expected sizes of the splits, in order."""
    if not isinstance(split, Mapping) or "train" not in split:
        raise InvalidInputError(
            "split", split, "must give the expected sizes, at least of train", _HOW
        )
    if unknown := sorted(map(str, set(split) - set(SPLITS))):
        raise InvalidInputError("split", unknown, f"must be of {', '.join(SPLITS)}")
    if twice := sorted(set(split) & set(public or {})):
        raise InvalidInputError("split", twice, "is given as public records, too")
    for name, size in split.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 10**12:
            raise InvalidInputError(
                f"split.{name}",
                size,
                "must be a whole number of records, at least 1",
                "Multiply a share by the number of records that you expect.",
            )
    return {name: split[name] for name in SPLITS if name in split}


def _count(classes: Any) -> int | None:
    if classes is None:
        return None
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise InvalidInputError(
            "classes", classes, "must be a number of at least 2, or a list of all"
        )
    return classes


def _check_range(target_range: Any, classes: int | None, pad_to: Any) -> None:
    if target_range is not None:
        if classes is not None:
            raise InvalidInputError("target_range", target_range, "does not go with classes")
        numbers = isinstance(target_range, tuple | list) and len(target_range) == 2
        if not numbers or not -1e300 < target_range[0] < target_range[1] < 1e300:
            raise InvalidInputError("target_range", target_range, "must be (low, high), low < high")
    if pad_to is not None and (
        isinstance(pad_to, bool) or not isinstance(pad_to, int) or not 1 <= pad_to <= 10**7
    ):
        raise InvalidInputError("pad_to", pad_to, "must be a whole number of at least 1")


def _read(given: Mapping[str, Any], classes: int | None) -> dict[str, Records]:
    """Return all records by the split that they are given as, ``data`` first; refuse unlike ones."""
    from privtune.tasks._records import read_records

    found: dict[str, Records] = {}
    sources = {part: given[part] for part in _DATA if given[part] is not None}
    public = {f"public.{part}": value for part, value in (given["public"] or {}).items()}
    for field, value in (sources | public).items():
        read = read_records(
            _made(field, value),
            field=field,
            pad_to=given["pad_to"],
            columns=given["columns"],
            classes=classes,
        )
        first = next(iter(found.values()), read)
        if (read.parts, read.data.tree, read.data.unit) != (
            first.parts,
            first.data.tree,
            first.data.unit,
        ):
            raise InvalidInputError(
                field, read.parts, f"must be like {next(iter(found))}: {first.parts}"
            )
        found[field.removeprefix("public.")] = read
    return found


def _made(field: str, given: Any) -> Any:
    """Return data, or what the function of a path returns."""
    if not isinstance(given, str):
        return given
    make = _function(field, given)
    with users_code(field, given, "its function failed, called without arguments"):
        return make()


def _targets(
    records: Records, classes: int | None, target_range: tuple[float, float] | None
) -> TensorData:
    """Return records whose targets are of the declared type."""
    data = records.data
    if classes is not None and data.y.is_floating_point():
        raise InvalidInputError(
            "classes",
            classes,
            f"goes with targets that are whole numbers, not {data.y.dtype}",
            "Convert them, y.long(), or leave classes out.",
        )
    if target_range is not None and not data.y.is_floating_point():
        return replace(data, y=data.y.float())
    return data


def _loader(parts: Mapping[str, TensorData], sizes: Mapping[str, int]) -> Callable[[], TaskData]:
    """Return what makes the splits, once."""

    @cache
    def load() -> TaskData:
        import torch

        known = dict(parts)
        whole = known.pop("data", None)
        if whole is not None:
            ids = None if whole.groups is None else list(map(str, whole.groups.tolist()))
            drawn = places(whole.x, whole.y, list(sizes.values()), ids=ids)
            known |= {
                name: whole.part(torch.from_numpy((drawn == place).nonzero()[0]), sealed_size=True)
                for place, name in enumerate(sizes)
            }
        for name in SPLITS:  # a split without records is one that contributes nothing
            if name not in known:
                known[name] = known["train"].part(torch.arange(0), sealed_size=True)
        return TaskData(**known)

    return load


def _no_model(*_: Any) -> Any:
    raise PrivTuneError("A task with build has no other model, and no loss of outputs.")


def _packed(function: Callable[..., Any], records: Records, field: str) -> LossOf:
    """Return a function of packed records that calls one of records as they were given."""
    from privtune.training.mechanism.data import mean_of_rows, sum_of_rows

    if records.data.unit:
        return (mean_of_rows if field == "score" else sum_of_rows)(function)
    if records.alone:
        return lambda model, x, _: function(model, x)
    tree = records.data.tree
    found: LossOf = function if tree is None else tree.loss_of(function)
    return found


def _scored(given: Any, records: Records) -> tuple[Score | None, LossOf | None]:
    """Return how trials are scored, and by which function of packed records."""
    if given is None:
        return None, None
    score = Score(given) if isinstance(given, str) else given
    if not isinstance(score, Score):
        raise InvalidInputError(
            "score",
            type(given).__name__,
            "must be a metric's name or a Score",
            "Pass privtune.Score(function, bound=..., maximize=...).",
        )
    if callable(score.metric) or ":" in score.metric:
        function = _function("score", score.metric)
        return replace(score, metric=function), _packed(function, records, "score")
    if score.metric != "loss" and not records.target:
        raise InvalidInputError(
            "score",
            score.metric,
            "needs one target: the second of a pair, or a dict's labels or label",
            "Name it so, or pass privtune.Score(function, bound=...).",
        )
    return score, None


def _code(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the mapping that makes the same task in other processes; None where they cannot."""
    code: dict[str, Any] = {"type": "own"}
    paths: list[str | None] = []
    for name, value in given.items():
        if value is None:
            continue
        if name in _FUNCTIONS:
            code[name] = value if isinstance(value, str) else path_of(value)
            paths.append(code[name])
        elif name in _DATA or name == "public":
            parts = value.values() if name == "public" else [value]
            code[name] = dict(value) if name == "public" else value
            paths += [part if isinstance(part, str) else None for part in parts]
        elif name == "score":
            metric = value.metric if isinstance(value, Score) else value
            known = path_of(metric) if callable(metric) else metric
            if isinstance(value, Score):
                code[name] = {n: v for n, v in vars(value).items() if v is not None} | {
                    "metric": known
                }
            else:
                code[name] = value
            if known is None or ":" in known:
                paths.append(known)
        else:
            code[name] = _plain(value)
    if None in paths:
        return None
    try:
        modules = sorted({str(path).partition(":")[0] for path in paths})
        return code | {"sources": {module: source_digest(module) for module in modules}}
    except PrivTuneError:
        return None  # a module without a file, as of a notebook


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what it has no form for as it is."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
