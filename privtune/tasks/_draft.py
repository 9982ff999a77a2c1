"""The draft of a study of a table: its header and declared types, and what else must be declared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

OPEN = "TODO"
"""What stands for a value that is still to be declared."""

_DRAFT = """\
# A draft of a study of {name}, made of {source}.
# No record was read: a type, bound, category or number that is taken from the records would be a
# release about them that nothing charges. Write what is known without them in the place of every TODO;
# a wrong declaration costs accuracy, never privacy. Then: privtune study plan {stem}.yaml --curator
name: {stem}
task:
  type: tabular
  path: {path}
{form}  target: {target}
  {labels}
  # TODO: of each feature [low, high], the least and the most that it can be; or {{categories: [...]}},
  # {{ordinal: [...]}}, {{date: [first, last]}}. Delete what is none, such as names and numbers of people.
  columns:
{columns}
  # id: COLUMN     # its value decides the split of a record; unless given, the whole record does
  # group: COLUMN  # where the budget's unit is another than record: the column that says whose a row is,
  # max_per_group: N  # at most how many rows of one count,
  # unit: person   # and the same word as in the budget
  train: TODO  # TODO: how many records you expect, not how many there are
  validation: TODO  # TODO: likewise, such as a tenth of them
  test: TODO  # TODO: likewise
# TODO: the most that all studies together may spend; delta far below one over the number of records.
# TODO: may one person (or household, or firm: whoever is to be protected) have several rows? If not, write
# unit: record. If so, write unit: person, and above group, max_per_group and unit: with unit: record,
# someone with k rows is protected k times less.
budget: {{name: {stem}, epsilon: TODO, delta: TODO, unit: TODO}}
space:
  learning_rate: {{type: float, low: 0.05, high: 5.0, log: true}}
arms:
  - {{name: defaults, strategy: fixed, parameters: {{learning_rate: 0.5, max_grad_norm: 1.0}}}}
  - {{name: selection, strategy: papernot-steinke, mean_runs: 10, parameters: {{max_grad_norm: 1.0}}}}
epochs: 20
expected_batch_size: 64
"""
_LABELS = "classes: TODO  # TODO: all labels that may occur, also such as no record has"
_TARGETS = {
    "": f"{_LABELS}; or target_range",
    "number": "target_range: [TODO, TODO]  # TODO: the least and the most that it can be; or classes",
    "truth": "classes: [false, true]",
}
_FEATURES = {
    "": OPEN,
    "number": "[TODO, TODO]",
    "truth": "{categories: [false, true]}",
    "date": "{date: [TODO, TODO]}",
    "text": "{categories: [TODO]}",
}


def draft(path: str | Path, *, target: str, delimiter: str = "", encoding: str = "utf-8") -> str:
    """Return a study's spec of a table as commented YAML, where what must be declared is left open.

    Only names are taken from a CSV file's header, and types from that of Parquet or Arrow; they count as
    public. No record is read. A study of the draft is refused until every ``TODO`` is written.

    Args:
        path: A table's file.
        target: The column to predict.
        delimiter: What parts the columns of a CSV file; by its header line unless given.
        encoding: The letters of a CSV file.

    Returns:
        The text of the spec.

    Raises:
        TaskDataError: If the file is not there, cannot be read, or lacks the target.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "people.csv")
        ...     _ = file.write_text("age,left")
        ...     text = draft(file, target="left")
        >>> "    age: TODO" in text.splitlines()
        True
    """
    from privtune.tasks._reader import Form, open_table

    place = Path(path)
    source = open_table(place, (target,), Form(delimiter, encoding))
    source.check((target,), str(path))
    kinds = {name: _kind(source.types.get(name)) for name in source.columns or (target, "COLUMN")}
    given = {"delimiter": delimiter, "encoding": "" if encoding == "utf-8" else encoding}
    features = (f"    {_key(n)}: {_FEATURES[kind]}" for n, kind in kinds.items() if n != target)
    return _DRAFT.format(
        name=place.name,
        source="its names and types alone" if source.types else "the names in its header line",
        stem=re.sub(r"[^A-Za-z0-9._-]+|^[._-]+", "-", place.stem).strip("-")[:100] or "table",
        path=json.dumps(str(path), ensure_ascii=False),
        form="".join(f"  {name}: {json.dumps(said)}\n" for name, said in given.items() if said),
        target=json.dumps(target, ensure_ascii=False),
        labels=_TARGETS.get(kinds[target], _LABELS),
        columns="\n".join(features),
    )


def _key(name: str) -> str:
    words = ("yes", "no", "on", "off", "true", "false", "null")  # YAML's
    word = re.fullmatch(r"[A-Za-z]\w+", name, re.ASCII) and name.lower() not in words
    return name if word else json.dumps(name, ensure_ascii=False)


def _kind(found: pa.DataType | None) -> str:
    """Return what a column of a declared type can be; nothing where no type is declared."""
    from pyarrow import types

    if found is None:
        return ""
    if types.is_boolean(found):
        return "truth"
    if types.is_date(found) or types.is_timestamp(found):
        return "date"
    number = types.is_integer(found) or types.is_floating(found) or types.is_decimal(found)
    return "number" if number else "text"


def unfilled(document: Any, seen: set[int], path: str = "") -> Iterator[str]:
    """Yield the paths of values that a draft leaves open; what aliases name again is read once."""
    if isinstance(document, str) and document == OPEN:
        yield path
    if not isinstance(document, Mapping | list | tuple) or id(document) in seen:
        return
    seen.add(id(document))
    named = document.items() if isinstance(document, Mapping) else (("", v) for v in document)
    for name, value in named:
        yield from unfilled(value, seen, f"{path}.{name}".strip("."))
