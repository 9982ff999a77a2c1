"""The user's own data, model and loss as a task: every kind of records, as tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.imports import find_function, path_of, source_digest, users_code
from privtune.tasks._facts import SPLITS, TaskChangedError
from privtune.tasks._partition import places
from privtune.tasks._task import IGNORED, Build, Score, Task, TaskData
from privtune.tasks.described import read_classes
from privtune.training.mechanism.data import (
    TARGETS,
    RecordTree,
    TensorData,
    blames_records,
    mean_of_rows,
    sum_of_rows,
)
from privtune.training.mechanism.kernel import LossOf
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.metrics import is_of_loss

_FIELDS = (
    "build", "loss", "score", "data", "split", "train", "validation", "test", "public", "classes",
    "target_range", "rarest_share", "pad_to", "columns", "precision", "name", "benchmark",
)  # fmt: skip
_FUNCTIONS = ("build", "loss")
_DATA = ("data", "train", "validation", "test")
_HOW = (
    'Pass data= with split={"train": 1000, "validation": 200, "test": 200}, the expected sizes; or parts '
    "that were apart from the beginning as train= and validation=."
)
_KINDS = (
    "must be a pair of tensors or arrays, a dict or tuple of such, one tensor alone, TensorData, a "
    "map-style dataset, a DataFrame or a Hugging Face dataset with declared columns, or "
    "package.module:function that returns one of these"
)
_PAD = "Pass pad_to=N: the first axis is then filled with zeros, or cut, to N of every record."
_TWICE = 3  # first records that are read twice
_AGAIN = 32  # records that are read again in another order once all were read


def own_task(build: Build | str | None, **given: Any) -> Task:
    """Return the task of data, functions and facts as ``study.optimize`` takes them."""
    if unknown := sorted(map(str, set(given) - set(_FIELDS))):
        raise InvalidInputError("task", unknown, f"type own takes {', '.join(_FIELDS)}")
    for field in _FUNCTIONS:
        if {**given, "build": build}.get(field) is None:
            raise InvalidInputError(
                field, None, "is required: a function, or package.module:function"
            )
    given = {
        **dict.fromkeys(_FIELDS),
        "precision": "float32",
        "name": "own",
        "build": build,
        **given,
    }
    functions = [_function(name, given[name]) for name in _FUNCTIONS]
    for wrong in _wrong(given):
        raise InvalidInputError(*wrong)
    split = given["split"] or {}
    sizes = {name: split[name] for name in SPLITS if name in split}
    classes, labels, pad_to = given["classes"], None, given["pad_to"]
    if classes is not None and not isinstance(classes, int):
        labels = read_classes(classes)
        classes = len(labels)
    records = _read(given, classes)
    first, public = next(iter(records.values())), given["public"] or {}
    target_range = given["target_range"] and (given["target_range"][0], given["target_range"][1])
    parts = {name: _targets(part.data, classes, target_range) for name, part in records.items()}
    like = next(iter(parts.values())).like
    score, score_of = read_score(given["score"], first)
    # By data, one record more moves no other; parts given apart are neighbours part by part.
    by = "content" if first.data.groups is None else "id"
    declared: dict[str, Any] = {
        f"{part}_records": sizes.get(part, len(parts.get(part, ()))) for part in SPLITS
    }
    return Task(
        name=given["name"],
        description="the user's own data, model and loss",
        **declared,
        input_shape=tuple(like[0].shape[1:]),
        classes=classes,
        class_names=labels,
        load=_loader(parts, sizes),
        model=_no_model,
        loss=_no_model,
        public_test="test" in public,
        public_validation="validation" in public,
        partition="given" if given["data"] is None else by,
        precision=given["precision"],
        target_range=target_range,
        rarest_share=given["rarest_share"],
        unit=first.data.unit,
        build=functions[0],
        loss_of=_packed(functions[1], first, sum_of_rows),
        score=score,
        score_of=score_of,
        tree=first.data.tree,
        like=like,
        parts=f"{first.parts}: {f'padded or cut to {pad_to}, ' if pad_to else ''}"
        "read from the first record, and public",
        code=_code(given),
        columns=first.columns,
        benchmark=bool(given["benchmark"]),
    )


def task_of(build: Build | Task | str, **given: Any) -> Task:
    """Return the task of what ``study.optimize`` was given: a task as it is, or the arguments of one."""
    if not isinstance(build, Task):
        return own_task(build, **given)
    # What is left out has the second value, too.
    same = {"benchmark": (build.benchmark,), "precision": (build.precision, "float32")}
    for name, value in sorted(given.items()):
        if value is None or (name in same and value in same[name]):
            continue
        raise InvalidInputError(name, "given", "is the task's to say", "Leave it out.")
    if build.build is None:
        raise InvalidInputError(
            "task",
            build.name,
            "has no build, so nothing says what to train",
            "Run it as a study of declared arms: privtune.create_study(name, task=..., arms=...).",
        )
    return build


def from_spec(spec: Mapping[str, Any]) -> Task:
    """Return the task of ``{type: own, build: ..., sources: digests of modules, ...}``."""
    fields = {name: value for name, value in spec.items() if name not in ("type", "sources")}
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
    return own_task(fields.pop("build", None), **fields)


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


def _wrong(given: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what is wrong with splits and numbers, as an error says it; what is first is refused."""
    data, split, public = given["data"], given["split"], given["public"] or {}
    apart = [name for name in _DATA[1:] if given[name] is not None]
    if data is not None and apart:
        yield apart[0], "given", "does not go with data", _HOW
    if data is None and given["train"] is None:
        yield "data", None, "must be given, or train", _HOW
    if data is None and split:
        yield "split", split, "goes with data alone", _HOW
    if not isinstance(public, Mapping) or set(public) - set(SPLITS[1:]):
        known = "must be records by name: validation, test, or both"
        yield "public", sorted(map(str, public)), known
    if twice := sorted(set(public) & set(apart)):
        yield "public", twice, "is given as private records, too"
    if data is not None:
        if not isinstance(split, Mapping) or "train" not in split:
            yield "split", split, "must give the expected sizes, at least of train", _HOW
        if unknown := sorted(map(str, set(split) - set(SPLITS))):
            yield "split", unknown, f"must be of {', '.join(SPLITS)}"
        if twice := sorted(set(split) & set(public)):
            yield "split", twice, "is given as public records, too"
        for name, size in split.items():
            if not _is_whole(size, 10**12):
                remedy = "Multiply a share by the number of records that you expect."
                yield f"split.{name}", size, "must be a whole number of records, at least 1", remedy
    classes, target_range, pad_to = given["classes"], given["target_range"], given["pad_to"]
    if isinstance(classes, bool) or (isinstance(classes, int) and classes < 2):
        yield "classes", classes, "must be a number of at least 2, or a list of all"
    if target_range is not None:
        if classes is not None:
            yield "target_range", target_range, "does not go with classes"
        numbers = isinstance(target_range, tuple | list) and len(target_range) == 2
        if not numbers or not -1e300 < target_range[0] < target_range[1] < 1e300:
            yield "target_range", target_range, "must be (low, high), low < high"
    if given["benchmark"] not in (None, True, False):
        yield "benchmark", given["benchmark"], "must be true or false"
    if pad_to is not None and not _is_whole(pad_to, 10**7):
        yield "pad_to", pad_to, "must be a whole number of at least 1"


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _read(given: Mapping[str, Any], classes: int | None) -> dict[str, Records]:
    """Return all records by the split that they are given as, ``data`` first; refuse unlike ones."""
    found: dict[str, Records] = {}
    sources = {part: given[part] for part in _DATA if given[part] is not None}
    public = {f"public.{part}": value for part, value in (given["public"] or {}).items()}
    for field, value in (sources | public).items():
        data = value
        if isinstance(value, str):
            make = _function(field, value)
            with users_code(field, value, "its function failed, called without arguments"):
                data = make()
        read = read_records(
            data, field=field, pad_to=given["pad_to"], columns=given["columns"], classes=classes
        )
        first = next(iter(found.values()), read)
        same = (read.parts, read.data.tree, read.data.unit)
        if same != (first.parts, first.data.tree, first.data.unit):
            raise InvalidInputError(
                field, read.parts, f"must be like {next(iter(found))}: {first.parts}"
            )
        found[field.removeprefix("public.")] = read
    return found


def _targets(
    data: TensorData, classes: int | None, target_range: tuple[float, float] | None
) -> TensorData:
    """Return records whose targets are of the declared type, and made-up ones in the declared range."""
    if classes is not None and data.y.is_floating_point():
        raise InvalidInputError(
            "classes",
            classes,
            f"goes with targets that are whole numbers, not {data.y.dtype}",
            "Convert them, y.long(), or leave classes out.",
        )
    if target_range is None:
        return data
    return replace(data, y=_floating(data.y), domain=Domain.of_targets(target_range))


def _floating(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as floating ones."""
    return numbers if numbers.is_floating_point() else numbers.float()


def _loader(parts: Mapping[str, TensorData], sizes: Mapping[str, int]) -> Callable[[], TaskData]:
    """Return what makes the splits, once."""

    @cache
    def load() -> TaskData:
        known = dict(parts)
        whole = known.pop("data", None)
        if whole is not None:
            ids = None if whole.groups is None else list(map(str, whole.groups.tolist()))
            drawn = torch.from_numpy(places(whole.x, whole.y, list(sizes.values()), ids=ids))
            for place, name in enumerate(sizes):
                index = (drawn == place).nonzero().squeeze(1)
                known[name] = whole.part(index, sealed_size=True)
        for name in SPLITS:  # a split without records is one that contributes nothing
            if name not in known:
                known[name] = known["train"].part(torch.arange(0), sealed_size=True)
        return TaskData(**known)

    return load


def _no_model(*_: Any) -> Any:
    raise PrivTuneError("A task with build has no other model, and no loss of outputs.")


def _packed(
    function: Callable[..., Any], records: Records, of_rows: Callable[[Any], LossOf]
) -> LossOf:
    """Return a function of packed records that calls one of records as they were given."""
    if records.data.unit:
        return of_rows(function)
    if records.alone:
        return lambda model, x, _: function(model, x)
    tree = records.data.tree
    found: LossOf = function if tree is None else tree.loss_of(function)
    return found


def read_score(given: Any, records: Records) -> tuple[Score | None, LossOf | None]:
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
        return replace(score, metric=function), _packed(function, records, mean_of_rows)
    if not is_of_loss(score.metric) and not records.target:
        raise InvalidInputError(
            "score",
            score.metric,
            "needs one target: the second of a pair, or a dict's labels or label",
            "Name it so, or pass privtune.Score(function, bound=...).",
        )
    return score, None


def _code(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the mapping that makes the same task in other processes; None where they cannot."""
    code = {"type": "own"} | {name: _json(v) for name, v in given.items() if v is not None}
    for name in _FUNCTIONS:
        code[name] = given[name] if isinstance(given[name], str) else path_of(given[name])
    score = given["score"]
    metric = score.metric if isinstance(score, Score) else score
    if callable(metric):
        metric = path_of(metric)
    if isinstance(score, Score):
        known = {name: value for name, value in vars(score).items() if value is not None}
        code["score"] = known | {"metric": metric}
    paths = [code["build"], code["loss"]]
    paths += [given[name] for name in _DATA if given[name] is not None]
    paths += (given["public"] or {}).values()
    if score is not None and (metric is None or ":" in metric):
        paths.append(metric)
    if not all(isinstance(path, str) for path in paths):
        return None
    try:
        modules = sorted({path.partition(":")[0] for path in paths})
        return code | {"sources": {module: source_digest(module) for module in modules}}
    except PrivTuneError:
        return None  # a module without a file, as of a notebook


def _json(value: Any) -> Any:
    """Return a value as JSON has it; what it has no form for as it is."""
    if isinstance(value, Mapping):
        return {str(key): _json(part) for key, part in value.items()}
    return [_json(part) for part in value] if isinstance(value, tuple | list) else value


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory, and what is public about each."""

    data: TensorData
    target: bool  # each has a target that a metric can be computed of
    alone: bool  # each is one tensor, without a target
    parts: str  # what each is made of, in words
    columns: tuple[str, ...] = ()  # of a frame, whose numbers are the inputs


@dataclass(frozen=True)
class _Part:
    """One part of all records: values ``[N, ...]``, and which of them are none."""

    values: torch.Tensor
    unusable: torch.Tensor


def read_records(
    data: Any,
    *,
    field: str = "data",
    pad_to: int | None = None,
    columns: Mapping[str, Any] | None = None,
    classes: int | None = None,
) -> Records:
    """Return records of any kind in memory; one that cannot be read contributes nothing."""
    if isinstance(data, TensorData):
        words = _words({"inputs": data.x, "target": data.y})
        return Records(_finite(data), target=True, alone=False, parts=words)
    data = data.tensors if type(data) is TensorDataset else data
    frame = hasattr(data, "columns") and hasattr(data, "dtypes")
    table = frame or hasattr(data, "column_names")
    if columns is not None and not (table or isinstance(data, Mapping)):
        raise InvalidInputError(
            "columns", columns, "go with a DataFrame, a dict or a dataset of columns"
        )
    if columns is not None or table:
        return _of_columns(data, field, columns, pad_to, classes, frame=frame)
    if isinstance(data, Mapping | tuple):
        return _of_tree(_each_part(_plain(data), field, pad_to))
    if _is_array(data):
        return _of_tree((_whole(data, field, pad_to),))
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, str):
        remedy = "Pass the dataset, not its loader." if hasattr(data, "__iter__") else ""
        raise InvalidInputError(field, type(data).__name__, _KINDS, remedy)
    few = isinstance(data, list) and len(data) in (2, 3) and all(map(_is_array, data))
    sizes = {np.shape(part)[:1] for part in data} if few else {()}
    if () not in sizes and len(sizes) == 1 and len(data[0]) > len(data):
        remedy = "Pass a tuple, (x, y), or torch.stack of the records."
        raise InvalidInputError(field, "a list of arrays", "is a list of records", remedy)
    return _of_tree(_of_items(data, field, pad_to))


def _is_array(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or hasattr(data, "__array__")


def _plain(data: Any) -> Any:
    """Return dicts and tuples of whatever class as plain ones."""
    if isinstance(data, Mapping):
        return {name: _plain(part) for name, part in data.items()}
    return tuple(map(_plain, data)) if isinstance(data, tuple) else data


def _flat(whole: Any) -> tuple[list[str], list[Any], Any, list[bool]]:
    """Return the paths of the leaves of a dict or tuple, these, the tree, and which are the target."""
    target = None
    if len(whole) > 1 and isinstance(whole, dict):
        target = next((name for name in TARGETS if name in whole), list(whole)[-1])
    elif len(whole) > 1:
        target = len(whole) - 1
    found, tree = pytree.tree_flatten_with_path(
        whole, is_leaf=lambda part: isinstance(part, list | _Part)
    )
    keys = [[getattr(key, "key", getattr(key, "idx", "")) for key in path] for path, _ in found]
    names = [".".join(map(str, path)) for path in keys]
    return names, [leaf for _, leaf in found], tree, [path[0] == target for path in keys]


def _each_part(whole: Any, field: str, pad_to: int | None) -> Any:
    """Return a tree of arrays and lists as one of parts."""
    names, leaves, tree, targets = _flat(whole)
    found = [
        _whole(leaf, f"{field}.{name}", pad_to, target=target)
        for name, leaf, target in zip(names, leaves, targets, strict=True)
    ]
    return pytree.tree_unflatten(found, tree)


def _of_columns(
    data: Any,
    field: str,
    columns: Mapping[str, Any] | None,
    pad_to: int | None,
    classes: int | None,
    *,
    frame: bool,
) -> Records:
    """Return the columns of a frame as one vector of inputs and a target; those of a dataset as a dict."""
    inputs, target = _declared(data, field, columns, frame=frame)
    parts = {}
    for name in (*inputs, *([] if target is None else [target])):
        values = data[name].to_numpy() if frame else data[name]
        if not (_is_array(values) or isinstance(values, list)):
            values = values[:]  # a column of Hugging Face's that is read when it is asked for
        own = not frame and name == target
        parts[name] = _whole(values, f"{field}.{name}", pad_to, target=own)
        if frame and parts[name].values.ndim > 1:
            raise InvalidInputError("columns", name, "must hold one number in every cell")
    if not frame:
        return _of_tree(parts, target)
    floating = torch.get_default_dtype()
    x = _Part(
        torch.stack([parts[name].values.to(floating) for name in inputs], dim=1),
        torch.stack([parts[name].unusable for name in inputs]).any(dim=0),
    )
    if target is None:
        return replace(_of_tree((x,)), columns=tuple(map(str, inputs)))
    y = parts[target]
    if classes is not None and y.values.is_floating_point():  # as a missing label makes all of them
        wrong = ~y.values.isfinite() | (y.values != y.values.floor())
        y = _Part(y.values.masked_fill(wrong, -1).long(), y.unusable | wrong)
    return replace(_of_tree((x, y)), columns=tuple(map(str, inputs)))


def _declared(
    data: Any, field: str, columns: Mapping[str, Any] | None, *, frame: bool
) -> tuple[list[str], str | None]:
    """Return the columns that are inputs, and the one that is the target."""
    known = list(data.columns if frame else getattr(data, "column_names", data))
    if columns is None and frame:
        raise InvalidInputError(
            field,
            "a DataFrame",
            "must come with the columns to take, since an index or a name is no feature",
            'Pass columns={"inputs": ["age", ...], "target": "outcome"}.',
        )
    if columns is None:
        target = next((name for name in TARGETS if name in known), known[-1])
        return [name for name in known if name != target], target
    right = isinstance(columns, Mapping) and not set(columns) - {"inputs", "target"}
    inputs, target = (columns.get("inputs"), columns.get("target")) if right else (None, None)
    if not isinstance(inputs, Sequence) or isinstance(inputs, str) or not inputs:
        raise InvalidInputError("columns", columns, 'must be {"inputs": [names], "target": name}')
    inputs = list(inputs)
    if absent := [n for n in (*inputs, target) if n is not None and n not in known]:
        raise InvalidInputError("columns", absent, f"must be of {', '.join(map(str, known))}")
    if len({*inputs, target}) <= len(inputs):
        raise InvalidInputError("columns", columns, "must name every column once")
    return inputs, target


def _whole(values: Any, name: str, pad_to: int | None, *, target: bool = False) -> _Part:
    """Return one part of all records, given as a tensor, an array or a list."""
    if isinstance(values, torch.Tensor):
        if values.layout is not torch.strided or values.is_nested or values.ndim == 0:
            raise InvalidInputError(name, str(values.layout), "must be dense, one row a record")
        if values.is_complex():
            remedy = "Pass torch.view_as_real of them."
            raise InvalidInputError(name, str(values.dtype), "must be real numbers", remedy)
        return _Part(values.detach(), torch.zeros(len(values), dtype=torch.bool))
    if _is_array(values):
        values = np.asarray(values)
        if values.ndim and values.dtype.kind in "biuf":
            return _Part(_tensor(values), torch.zeros(len(values), dtype=torch.bool))
        values = list(values) if values.ndim and values.dtype.kind in "OUST" else values
    if not isinstance(values, list):
        raise InvalidInputError(name, type(values).__name__, "must be a tensor, an array or a list")
    return _stacked([_item(value) for value in values], name, pad_to, target=target)


def _tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor: floating numbers in torch's default type, as models are."""
    if values.dtype.kind == "f" and values.dtype.itemsize >= 8:
        return torch.tensor(values.astype(np.float64)).to(torch.get_default_dtype())
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _item(value: Any) -> torch.Tensor | None:
    """Return one value of one record; None where it is no number, nor a block of them."""
    try:
        if isinstance(value, torch.Tensor):
            dense = value.layout is torch.strided and not value.is_nested
            return value.detach() if dense and not value.is_complex() else None
        found = np.asarray(value)
        return _tensor(found) if found.dtype.kind in "biuf" else None
    except Exception as error:  # whatever one record is must not stop the others
        if not blames_records(error):
            raise
        return None


def _stacked(
    items: list[torch.Tensor | None], name: str, pad_to: int | None, *, target: bool = False
) -> _Part:
    """Return one part of all records, given one by one; the first that is a number says the type."""
    there = [item for item in items if item is not None]
    if not there:
        raise InvalidInputError(
            name,
            "of no record a number",
            "must be numbers, or lists of numbers, of one length",
            "Encode texts and categories first, or leave them out with columns=.",
        )
    like = there[0]
    if len({item.shape for item in there}) > 1:
        axes = {(item.ndim, item.shape[1:]) for item in there}
        if pad_to is None or like.ndim == 0 or len(axes) > 1:
            shapes = sorted({str(tuple(item.shape)) for item in there})
            raise InvalidInputError(
                name,
                " and ".join(shapes[:3]),
                "must be of one shape in every record",
                _PAD if len(axes) == 1 else "Bring them to one shape, also beyond the first axis.",
            )
        whole = not like.is_floating_point() and like.dtype != torch.bool
        fill = IGNORED if target and whole else 0
        items = [None if item is None else _padded(item, pad_to, fill) for item in items]
        like = _padded(like, pad_to, fill)
    made = []
    for item in items:
        found = torch.zeros_like(like) if item is None else item.to(like.dtype)
        if (
            item is not None
            and not like.is_floating_point()
            and not torch.equal(found.to(item.dtype), item)
        ):
            raise InvalidInputError(
                name,
                f"{like.dtype} and {item.dtype}",
                "must be of one type in every record",
                "Convert all to the floating one.",
            )
        made.append(found)
    return _Part(torch.stack(made), torch.tensor([item is None for item in items]))


def _padded(item: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    found = item.new_full((length, *item.shape[1:]), fill)
    found[: len(item)] = item[:length]
    return found


def _of_items(data: Any, field: str, pad_to: int | None) -> Any:
    """Return the records of a map-style dataset or a list, read one by one, as a tree of parts."""
    if len(data) == 0:
        raise InvalidInputError(field, type(data).__name__, "must hold at least one record")
    _refuse_random(data, field)
    size, orders = len(data), dict[Any, list[Any]]()
    read = [_leaves(data, number, orders) for number in range(size)]
    _refuse_memory(data, field, read, orders)
    if len(data) != size:
        raise InvalidInputError(
            field, f"{size} and then {len(data)} records", "must have one length each time"
        )
    kinds: list[list[Any]] = []
    for found in filter(None, read):
        own = next((kind for kind in kinds if kind[0][2] == found[2]), None)
        if own is None:
            kinds.append(own := [])
        own.append(found)
    if not kinds:
        raise InvalidInputError(
            field,
            type(data).__name__,
            "must be readable as pairs of tensors, or as dicts or tuples of tensors and numbers",
            "Leave texts out and tokenize them before.",
        )
    names, _, tree, targets = max(kinds, key=len)[0]  # one odd record must not decide
    parts = [
        _stacked(
            [found[1][place] if found and found[2] == tree else None for found in read],
            ".".join(filter(None, (field, name))),
            pad_to,
            target=targets[place],
        )
        for place, name in enumerate(names)
    ]
    return pytree.tree_unflatten(parts, tree)


def _leaves(data: Any, number: int, orders: dict[Any, list[Any]]) -> Any:
    """Return one record as :func:`_flat` does; None if it holds nothing that can be used."""
    try:
        record = data[number]
    except Exception as error:  # a record that cannot be read contributes nothing
        if not blames_records(error):
            raise
        return None
    # Entries of dicts of the same names come in the order of the first.
    record = _plain(tuple(record) if isinstance(record, list) else record)
    if isinstance(record, dict):
        record = {key: record[key] for key in orders.setdefault(frozenset(record), list(record))}
    elif not isinstance(record, tuple):
        record = (record,)
    names, leaves, tree, targets = _flat(record)
    items = [_item(leaf) for leaf in leaves]
    return None if all(item is None for item in items) else (names, items, tree, targets)


def _refuse_random(data: Any, field: str) -> None:
    """Refuse a dataset whose records differ each time: a record would change its split."""
    for number in range(min(_TWICE, len(data))):
        one, other = (_leaves(data, number, {}) for _ in range(2))
        if one is None or other is None:
            continue
        if not _same_record(one, other):
            raise InvalidInputError(
                field,
                type(data).__name__,
                "must return the same record for an index every time",
                "Augment at random inside of loss, or of the model in training mode.",
            )


def _refuse_memory(
    data: Any, field: str, read: Sequence[Any], orders: dict[Any, list[Any]]
) -> None:
    """Refuse a dataset that gives another record for an index once others were read: it remembers them."""
    step = max(1, len(read) // _AGAIN)
    # Backwards: what hangs on the record that was read before has another one before it now.
    for number in range(len(read) - 1, -1, -step):
        again = _leaves(data, number, orders)
        if not _same_record(read[number], again):
            raise InvalidInputError(
                field,
                type(data).__name__,
                "must return the same record for an index whatever was read before, and remembers others",
                "Let __getitem__ keep nothing between calls: no counter, running mean or cache of records.",
            )


def _same_record(one: Any, other: Any) -> bool:
    """Say whether two readings of a record, as :func:`_leaves` returns them, are equal."""
    if one is None or other is None:
        return one is other
    if len(one[1]) != len(other[1]):
        return False
    for a, b in zip(one[1], other[1], strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return False
    return True


def _of_tree(parts: Any, target: Any = None) -> Records:
    """Return a tree of parts as records: inputs in one tensor, and a target."""
    names, found, tree, _ = _flat(parts)
    sizes = {len(part.values) for part in found}
    if len(sizes) != 1 or sizes == {0}:
        raise InvalidInputError(
            "data",
            ", ".join(map(str, sorted(sizes))) or "nothing",
            "must hold as many records in every part, at least one",
        )
    whole = pytree.tree_unflatten([part.values for part in found], tree)
    alone = isinstance(whole, tuple) and len(whole) == 1 and isinstance(whole[0], torch.Tensor)
    if alone:
        made, x, y = None, whole[0], torch.zeros(len(whole[0]))
    else:
        made, x, y = RecordTree.split(whole, target)
    if not y.is_floating_point():
        y = y.long()
    unusable = torch.stack([part.unusable for part in found]).any(dim=0)
    data = TensorData(x, y, unusable=unusable if bool(unusable.any()) else None, tree=made)
    if made is None:
        words = _words({"inputs": x} if alone else {"inputs": x, "target": y})
    else:
        words = _words(dict(zip(names, (part.values for part in found), strict=True)))
    is_target = not alone and (
        made is None
        or target is not None
        or (bool(set(made.names) & set(TARGETS)) if made.names else made.size == 2)
    )
    return Records(_finite(data), target=is_target, alone=alone, parts=words)


def _finite(data: TensorData) -> TensorData:
    """Return the data, of which records that hold anything but numbers are unusable."""
    parts = [data.x] if data.unit else [data.x, data.y]  # a unit's missing rows have the target NaN
    wrong = [
        ~part.reshape(len(part), -1).isfinite().all(dim=1)
        for part in parts
        if part.is_floating_point()
    ]
    unusable = torch.stack(wrong).any(dim=0) if wrong else None
    return data if unusable is None or not bool(unusable.any()) else data.marked(unusable)


def _words(parts: Mapping[str, torch.Tensor]) -> str:
    """Return names, shapes and types of a record's parts."""
    return ", ".join(
        f"{name} {' x '.join(map(str, part.shape[1:])) or 'a number'} "
        f"({str(part.dtype).removeprefix('torch.')})"
        for name, part in parts.items()
    )
