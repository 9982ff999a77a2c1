"""Tasks of the user's own data, model and loss, from the arguments of ``make_task`` or from a spec.

How records are read is in ``records``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from privtune.code_digest import is_installed
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.facts import SPLITS, TaskChangedError
from privtune.imports import find_function, path_of, source_digest, users_code
from privtune.ledger.datasets import Dataset
from privtune.names import did_you_mean, refuse_fields
from privtune.tables.reader import FORMATS
from privtune.tasks.described import read_classes
from privtune.tasks.partition import places
from privtune.tasks.records import Columns, Records, read_records
from privtune.tasks.task import Build, Score, Task, TaskData
from privtune.training.mechanism.data import TensorData, mean_of_rows, sum_of_rows
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.metrics import is_of_loss

_FIELDS = (
    "build", "loss", "score", "data", "split", "train", "validation", "test", "public", "classes",
    "target_range", "rarest_share", "pad_to", "columns", "precision", "name", "benchmark",
)  # fmt: skip
_FUNCTIONS = ("build", "loss")
_UNNAMED = "own"
_DATA = ("data", "train", "validation", "test")
_HOW = (
    'Pass data= with split={"train": 1000, "validation": 200, "test": 200}, the expected sizes; or parts '
    "that were apart from the beginning as train= and validation=."
)
_MOST_RECORDS = 10**12
_MOST_LENGTH = 10**7  # of a record's first axis

Arguments = Mapping[str, Any]
"""The fields of ``task: {type: own, ...}`` by name, with None for those left out."""


def own_task(build: Build | str | None, **arguments: Any) -> Task:
    """Return the task of the user's own data and functions, from the arguments of ``make_task`` or a spec.

    Args:
        build: The function that returns candidates, or its path.
        arguments: The fields of ``task: {type: own, ...}``, None for one that is left out.

    Raises:
        InvalidInputError: If a field is unknown or missing, or the records do not go with it.
    """
    unknown = set(arguments) - set(_FIELDS)
    if unknown:
        refuse_fields("task", unknown, _FIELDS, "type own")
    _check_functions({**arguments, "build": build})
    # In the order of _FIELDS: the code of the task is stored, and its bytes are compared.
    arguments = {
        **dict.fromkeys(_FIELDS),
        "precision": Task.precision,
        "name": _UNNAMED,
        "build": build,
        **arguments,
    }
    build_function = _function("build", arguments["build"])
    loss = _function("loss", arguments["loss"])
    _check_arguments(arguments)

    classes, labels = _classes(arguments["classes"])
    target_range = arguments["target_range"]
    if target_range is not None:
        low, high = target_range
        target_range = (low, high)
    splits = _read_splits(arguments, classes)
    parts = {}
    for name, records in splits.items():
        parts[name] = _typed_targets(records.data, classes, target_range)

    first = next(iter(splits.values()))
    like = next(iter(parts.values())).like
    sizes = _split_sizes(arguments["split"])
    public = arguments["public"] or {}
    score, score_of = read_score(arguments["score"], first)
    return Task(
        name=arguments["name"],
        description="the user's own data, model and loss",
        train_records=sizes.get("train", len(parts.get("train", ()))),
        validation_records=sizes.get("validation", len(parts.get("validation", ()))),
        test_records=sizes.get("test", len(parts.get("test", ()))),
        input_shape=tuple(like[0].shape[1:]),
        classes=classes,
        class_names=labels,
        load=_loader(parts, sizes),
        model=_no_model,
        loss=_no_model,
        public_test="test" in public,
        public_validation="validation" in public,
        partition=_partition(arguments["data"], first),
        precision=arguments["precision"],
        target_range=target_range,
        rarest_share=arguments["rarest_share"],
        unit=first.data.unit,
        build=build_function,
        loss_of=_packed(loss, first, sum_of_rows),
        score=score,
        score_of=score_of,
        tree=first.data.tree,
        like=like,
        parts=_public_parts(first, arguments["pad_to"]),
        code=_code(arguments),
        columns=first.columns,
        readers=_readers(arguments),
        dataset=_dataset(arguments),
        benchmark=bool(arguments["benchmark"]),
    )


def from_spec(spec: Mapping[str, Any]) -> Task:
    """Return the task of ``{type: own, build: ..., sources: digests of modules, ...}``.

    Raises:
        TaskChangedError: If a module of the user's is another than where the study was made.
    """
    fields = dict(spec)
    fields.pop("type", None)
    sources = fields.pop("sources", {})
    for module, declared_digest in sources.items():
        with users_code("task.sources", module, "cannot be imported"):
            digest = source_digest(module)
        if digest != declared_digest:
            raise TaskChangedError(
                f"The source of {module} differs between this machine and whoever made the study: "
                "trials of two programs must not be compared. Bring the same files to both."
            )
    score = fields.get("score")
    if isinstance(score, Mapping):
        with users_code("task.score", str(score), "are no arguments of Score"):
            fields["score"] = Score(**score)
    return own_task(fields.pop("build", None), **fields)


def _check_functions(arguments: Arguments) -> None:
    """Refuse a task without ``build`` or ``loss``, before a file of records is looked for."""
    remedies = {
        "build": "",
        "loss": "def loss(model, x, y): return cross_entropy(model(x), y, reduction='none') is one.",
    }
    for field in _FUNCTIONS:
        if arguments.get(field) is None:
            allowed = "is required: a function, or package.module:function"
            raise InvalidInputError(field, None, allowed, remedies[field])


def _function(field: str, value: Any) -> Callable[..., Any]:
    """Return a function as given, or imported from its path.

    Raises:
        InvalidInputError: If there is none at the path; with the way to a table, where it is a file's.
    """
    if isinstance(value, str):
        suffix = Path(value).suffix.lower()
        if field == "data" and suffix in FORMATS:
            raise InvalidInputError(
                field,
                value,
                "must be the records, or a function that returns them",
                f"A file is read by a spec: privtune study draft {value} --target COLUMN writes one.",
            )
        return find_function(
            field,
            value,
            allowed="must be a function, or package.module:function",
            must="must name a function",
        )
    if not callable(value):
        raise InvalidInputError(field, type(value).__name__, "must be a function, or its path")
    return value  # type: ignore[no-any-return]


def _check_arguments(arguments: Arguments) -> None:
    """Refuse invalid or contradictory splits, classes and numbers, without reading a record."""
    public = arguments["public"] or {}
    _check_sources(arguments, public)
    if arguments["data"] is not None:
        _check_split(arguments["split"], public)
    _check_classes(arguments["classes"], arguments["target_range"])
    if arguments["benchmark"] not in (None, True, False):
        raise InvalidInputError("benchmark", arguments["benchmark"], "must be true or false")
    pad_to = arguments["pad_to"]
    if pad_to is not None and not _is_whole(pad_to, _MOST_LENGTH):
        raise InvalidInputError("pad_to", pad_to, "must be a whole number of at least 1")


def _check_sources(arguments: Arguments, public: Any) -> None:
    """Refuse arguments that give no records, or give the records of a split in two ways."""
    has_data = arguments["data"] is not None
    split = arguments["split"] or {}
    apart = [name for name in _DATA[1:] if arguments[name] is not None]
    if has_data and apart:
        raise InvalidInputError(apart[0], "given", "does not go with data", _HOW)
    if not has_data and arguments["train"] is None:
        raise InvalidInputError("data", None, "must be given, or train", _HOW)
    if not has_data and split:
        raise InvalidInputError("split", split, "goes with data alone", _HOW)
    if not isinstance(public, Mapping) or set(public) - set(SPLITS[1:]):
        allowed = "must be records by name: validation, test, or both"
        raise InvalidInputError("public", sorted(map(str, public)), allowed)
    twice = sorted(set(public) & set(apart))
    if twice:
        raise InvalidInputError("public", twice, "is given as private records, too")


def _check_split(split: Any, public: Mapping[str, Any]) -> None:
    """Refuse expected sizes that are no whole numbers, or are of a wrong split."""
    if not isinstance(split, Mapping) or "train" not in split:
        allowed = "must give the expected sizes, at least of train"
        raise InvalidInputError("split", split, allowed, _HOW)
    unknown = sorted(str(name) for name in split if name not in SPLITS)
    if unknown:
        question = did_you_mean(unknown, SPLITS)
        raise InvalidInputError("split", unknown, f"must be of {', '.join(SPLITS)}", question)
    twice = sorted(set(split) & set(public))
    if twice:
        raise InvalidInputError("split", twice, "is given as public records, too")
    for name, size in split.items():
        if not _is_whole(size, _MOST_RECORDS):
            raise InvalidInputError(
                f"split.{name}",
                size,
                "must be a whole number of records, at least 1",
                "Multiply a share by the number of records that you expect.",
            )


def _check_classes(classes: Any, target_range: Any) -> None:
    """Refuse invalid classes or an invalid range of targets, and a task that declares both of them."""
    if isinstance(classes, bool) or (isinstance(classes, int) and classes < 2):
        allowed = "must be a number of at least 2, or a list of all"
        raise InvalidInputError("classes", classes, allowed)
    if target_range is None:
        return
    if classes is not None:
        raise InvalidInputError("target_range", target_range, "does not go with classes")
    is_pair = isinstance(target_range, tuple | list) and len(target_range) == 2
    allowed = "must be (low, high), low < high"
    if not is_pair:
        raise InvalidInputError("target_range", target_range, allowed)
    low, high = target_range
    if not -1e300 < low < high < 1e300:  # half of their sum must be finite, too
        raise InvalidInputError("target_range", target_range, allowed)


def _is_whole(value: Any, most: int) -> bool:
    """Return whether a value is a whole number from 1 to ``most``, and no boolean."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and 1 <= value <= most


def _classes(classes: Any) -> tuple[int | None, tuple[Any, ...] | None]:
    """Return the number of declared classes, and their names, or None for what is not declared."""
    if classes is None or isinstance(classes, int):
        return classes, None
    labels = read_classes(classes)
    return len(labels), labels


def _split_sizes(split: Mapping[str, int] | None) -> dict[str, int]:
    """Return the expected sizes in the fixed order of the splits, in which records are placed."""
    if not split:
        return {}
    return {name: split[name] for name in SPLITS if name in split}


def _partition(data: Any, records: Records) -> str:
    """Return the name of the rule that assigns records to splits: given, content or id."""
    if data is None:
        return "given"
    return "content" if records.data.groups is None else "id"


def _public_parts(records: Records, pad_to: int | None) -> str:
    """Return what a record consists of, in words for a plan."""
    padding = f"padded or cut to {pad_to}, " if pad_to else ""
    return f"{records.parts}: {padding}read from the first record, and public"


def _sources(arguments: Arguments) -> dict[str, Any]:
    """Return the user's sources of records by field, private ones first."""
    sources = {}
    for field in _DATA:
        if arguments[field] is not None:
            sources[field] = arguments[field]
    for name, source in (arguments["public"] or {}).items():
        sources[f"public.{name}"] = source
    return sources


def _read_splits(arguments: Arguments, classes: int | None) -> dict[str, Records]:
    """Return the records by split, or refuse splits that differ in shape or type.

    Raises:
        InvalidInputError: If parts differ in shape or type: one model could not be trained on all of them.
    """
    splits: dict[str, Records] = {}
    for field, source in _sources(arguments).items():
        records = read_records(
            _call_source(field, source),
            field=field,
            pad_to=arguments["pad_to"],
            columns=arguments["columns"],
            classes=classes,
        )
        name, first = next(iter(splits.items()), (field, records))
        is_like_first = (
            records.parts == first.parts
            and records.data.tree == first.data.tree
            and records.data.unit == first.data.unit
        )
        if not is_like_first:
            raise InvalidInputError(field, records.parts, f"must be like {name}: {first.parts}")
        splits[field.removeprefix("public.")] = records
    return splits


def _call_source(field: str, source: Any) -> Any:
    """Return a source of records, or what its function returns where the source is a path."""
    if not isinstance(source, str):
        return source
    function = _function(field, source)
    with users_code(field, source, "its function failed, called without arguments"):
        return function()


def _readers(arguments: Arguments) -> tuple[Any, ...]:
    """Return the user's functions and dataset classes that produce the records."""
    readers: list[Any] = []
    for source in _sources(arguments).values():
        if isinstance(source, str):
            readers.append(_function("data", source))
        elif source is not None and not is_installed(type(source).__module__):
            readers.append(type(source))
    return tuple(readers)


def _dataset(arguments: Arguments) -> Dataset:
    """Return the identity of the dataset: the task's name, the path of the data, declared columns."""
    path = ""
    for field in _DATA:
        if isinstance(arguments[field], str):
            path = arguments[field]
            break
    name = arguments["name"]
    if name == _UNNAMED:
        name = path.rpartition(":")[0]
    return Dataset(str(name), path, _declared_columns(arguments["columns"]))


def _declared_columns(columns: Columns | None) -> tuple[str, ...]:
    """Return the columns that were declared, the target last."""
    if columns is None:
        return ()
    names = [str(name) for name in columns["inputs"]]
    target = columns.get("target")
    if target is not None:
        names.append(str(target))
    return tuple(names)


def _typed_targets(
    data: TensorData,
    classes: int | None,
    target_range: tuple[float, float] | None,
) -> TensorData:
    """Return records with targets of the declared type, and with the domain of made-up targets."""
    if classes is not None and data.y.is_floating_point():
        raise InvalidInputError(
            "classes",
            classes,
            f"goes with targets that are whole numbers, not {data.y.dtype}",
            "Convert them, y.long(), or leave classes out.",
        )
    if target_range is None:
        return data
    numbers = data.y
    if not numbers.is_floating_point():
        numbers = numbers.float()
    domain = Domain.of_targets(target_range)
    return replace(data, y=numbers, domain=domain)


def _loader(parts: Mapping[str, TensorData], sizes: Mapping[str, int]) -> Callable[[], TaskData]:
    """Return a cached function that makes the three splits.

    Args:
        parts: Records by split, or all private ones as ``data``.
        sizes: Of what is made of ``data``, in the order in which its records are placed.
    """

    @cache
    def load() -> TaskData:
        splits = dict(parts)
        data = splits.pop("data", None)
        if data is not None:
            splits.update(_split_by_size(data, sizes))
        no_record = torch.arange(0)
        for name in SPLITS:
            if name not in splits:  # a split without records contributes nothing
                splits[name] = splits["train"].part(no_record, sealed_size=True)
        return TaskData(**splits)

    return load


def _split_by_size(data: TensorData, sizes: Mapping[str, int]) -> dict[str, TensorData]:
    """Return the private records by split, assigned by a hash of their content or their unit's number.

    Args:
        data: All private records.
        sizes: Of each split, in the order in which records are placed.
    """
    ids = None
    if data.groups is not None:
        ids = [str(group) for group in data.groups.tolist()]
    shares = list(sizes.values())
    split_of = places(data.x, data.y, shares, ids=ids)
    splits = {}
    for place, name in enumerate(sizes):
        is_here = torch.from_numpy(split_of == place)
        index = is_here.nonzero().squeeze(1)
        splits[name] = data.part(index, sealed_size=True)
    return splits


def _no_model(*_: Any) -> Any:
    """Refuse a call of the model or the loss of outputs, which a task with ``build`` lacks."""
    raise PrivTuneError("A task with build has no other model, and no loss of outputs.")


def _packed(
    function: Callable[..., Any],
    records: Records,
    of_rows: Callable[[Any], LossOf],
) -> LossOf:
    """Return a function that unpacks a packed record and calls a function of the user's with it.

    Args:
        function: The user's, ``(model, *record) -> [1]``.
        records: Say how a record was given: alone, as a pair, as a dict, or as the rows of a unit.
        of_rows: Makes a function of units of one of rows: a loss sums them, a score takes their mean.
    """
    if records.data.unit:
        return of_rows(function)
    if records.alone:
        return lambda model, x, _: function(model, x)
    tree = records.data.tree
    packed: LossOf = function if tree is None else tree.loss_of(function)
    return packed


def read_score(value: Any, records: Records) -> tuple[Score | None, LossOf | None]:
    """Return the declared score, and its function of packed records where it is not a metric by name.

    Raises:
        InvalidInputError: If it is no score, or a metric by name of records that have no target.
    """
    if value is None:
        return None, None
    score = Score(value) if isinstance(value, str) else value
    if not isinstance(score, Score):
        raise InvalidInputError(
            "score",
            type(value).__name__,
            "must be a metric's name or a Score",
            "Pass privtune.Score(function, bound=..., maximize=...).",
        )
    if callable(score.metric) or ":" in score.metric:
        function = _function("score", score.metric)
        score = replace(score, metric=function)
        return score, _packed(function, records, mean_of_rows)
    if not is_of_loss(score.metric) and not records.target:
        raise InvalidInputError(
            "score",
            score.metric,
            "needs one target: the second of a pair, or a dict's labels or label",
            "Name it so, or pass privtune.Score(function, bound=...).",
        )
    return score, None


def _code(arguments: Arguments) -> Mapping[str, Any] | None:
    """Return a mapping from which other processes make the same task, or None if they cannot.

    They can where functions and records have paths: so workers import them, and compare the digests of
    their modules.
    """
    code: dict[str, Any] = {"type": "own"}
    for name, value in arguments.items():
        if value is not None:
            code[name] = _json(value)
    for name in _FUNCTIONS:
        function = arguments[name]
        code[name] = function if isinstance(function, str) else path_of(function)
    score = arguments["score"]
    metric = score.metric if isinstance(score, Score) else score
    if callable(metric):
        metric = path_of(metric)
    if isinstance(score, Score):
        fields = {name: value for name, value in vars(score).items() if value is not None}
        fields["metric"] = metric
        code["score"] = fields

    paths = [code["build"], code["loss"], *_sources(arguments).values()]
    is_function = score is not None and (metric is None or ":" in metric)
    if is_function:
        paths.append(metric)
    sources = _digests_of_modules(paths)
    if sources is None:
        return None
    return {**code, "sources": sources}


def _digests_of_modules(paths: Sequence[Any]) -> dict[str, str] | None:
    """Return the digest of each module's source, by the module's name, or None if one has no file.

    Args:
        paths: Of functions and records, ``package.module:name``; what is none has no path.
    """
    modules = set()
    for path in paths:
        if not isinstance(path, str):
            return None
        module, _, _ = path.partition(":")
        modules.add(module)
    try:
        return {module: source_digest(module) for module in sorted(modules)}
    except PrivTuneError:
        return None  # a module without a file, as of a notebook


def _json(value: Any) -> Any:
    """Return a value in the form that JSON stores, with lists for tuples and texts for keys."""
    if isinstance(value, Mapping):
        return {str(key): _json(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_json(part) for part in value]
    return value
