"""Draft of a study's spec for a table, made from its header and declared types alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

OPEN = "TODO"
"""The placeholder of a value that is still to be declared."""

_DRAFT = """\
# A draft of a study of {name}, made of {source}.
# No record was read. Fill in every TODO from what you know without looking at the records: a type, bound,
# category or number taken from the records would reveal something about them, at no charge. A wrong
# declaration costs accuracy, never privacy. Then run what follows, whose output is for you alone:
# privtune study plan {spec} --curator
name: {stem}
task:
  type: tabular
  path: {path}
{form}  target: {target}
{labels}
  # TODO: for each feature [low, high], its smallest and largest possible value; or {{categories: [...]}},
  # {{ordinal: [...]}}, {{date: [first, last]}}, such as [2015-01-01, 2025-01-01]; for dates in another form,
  # {{date: [first, last], format: "%d.%m.%Y"}}. Delete columns that are no features, such as names and ids
  # of people.
  columns:
{columns}
  # decimal: ","          # remove the # if numbers are written like 1,5
  # na_values: ["?"]      # remove the # to list words that mean "missing"; an empty cell always does
  # TODO: can one person (or household, or firm: whoever is to be protected) have several rows? If not, delete
  # the next three lines, and write unit: record in the budget. If so, remove the # of all three; as group
  # write the column that identifies the person, as max_per_group how many rows of a person are used at most;
  # in the budget write unit: person. Without that, someone with k rows is protected less (k times ε, more δ).
  # group: TODO
  # max_per_group: TODO
  # unit: person
  # id: COLUMN     # rows with the same value are in one split; without it, rows with the same content are
  # TODO: how many records you expect (with unit: person, how many persons), not a count of the file: about
  # 70% for training, 10% for validation (a selection chooses by it), and 20% for test (the more test records,
  # the narrower the interval of each score).
  train: TODO
  validation: TODO
  test: TODO
# TODO: epsilon, the limit for all studies together (1 protects strongly, 8 weakly); delta, at most
# 0.1 / (number of records).
budget: {{name: {stem}, epsilon: TODO, delta: TODO, unit: TODO}}
space:
  learning_rate: {{type: float, low: 0.05, high: 5.0, log: true}}
# With public numbers alone auto takes either given hyperparameters or hyfreedp: that from about train times
# epsilon = 500 on. Where privtune study plan says that auto and hyfree run the same, delete the arm hyfree.
arms:
  - {{name: auto, strategy: auto}}
  - {{name: hyfree, strategy: hyfreedp}}
  - {{name: selection, strategy: papernot-steinke, mean_runs: 10, parameters: {{max_grad_norm: 1.0}}}}
# The selection chooses by accuracy. Where one class is rare, that says little: remove the # of the next line
# (of more than two classes write balanced_accuracy).
# scoring: {{metric: auc}}
# One score of every arm on the test split, with noise. With auto, planning chooses the metric from what is
# declared, and says how wide its interval will be. To choose it yourself: {{metric: ...}}.
report: auto
# Planning chooses both from epsilon, delta, train and the number of weights: they are public, and free. To
# set what one training may spend, add a line such as compute: 15 minutes. privtune study plan {spec} --curve
# shows what other numbers would give.
epochs: auto
expected_batch_size: auto
"""
_RAREST = """\
  # TODO: the share of records with the rarest label (0.05 for one in twenty), from a source other than the
  # records, such as a published rate. If you do not know it, delete the line.
  rarest_share: TODO"""
_LABELS = f"""\
  # TODO: a list of all labels that may occur, including labels that no record has. If the target is a number,
  # replace classes by target_range: [smallest, largest possible value], and delete rarest_share.
  classes: TODO
{_RAREST}"""
_NUMBERS = """\
  # TODO: the smallest and the largest possible value of the target. If it is a label, replace target_range by
  # classes: [all labels that may occur], and add rarest_share: the share of records with the rarest label.
  target_range: [TODO, TODO]"""
_TARGETS = {
    "": _LABELS,
    "number": _NUMBERS,
    "truth": f"  classes: [false, true]\n{_RAREST}",
}
_FEATURES = {
    "": OPEN,
    "number": "[TODO, TODO]",
    "truth": "{categories: [false, true]}",
    "date": "{date: [TODO, TODO]}",
    "text": "{categories: [TODO]}",
}


def draft(
    path: str | Path,
    *,
    target: str,
    delimiter: str = "",
    encoding: str = "utf-8",
    spec: str | Path = "",
) -> str:
    """Return a study's spec of a table as commented YAML, where what must be declared is left open.

    Only names are taken from a CSV file's header, and types from that of Parquet or Arrow; they count as
    public. No record is read. A study of the draft is refused until every ``TODO`` is written.

    Args:
        path: A table's file.
        target: The column to predict.
        delimiter: What parts the columns of a CSV file; by its header line unless given.
        encoding: The letters of a CSV file.
        spec: Where the draft will be written, as its text names it; after the table unless given.

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
    from privtune.tables.reader import Form, open_table

    place = Path(path)
    source = open_table(place, (target,), Form(delimiter, encoding))
    source.check((target,), str(path))
    columns = source.columns or (target, "COLUMN")  # JSON lines have no header
    kinds = {name: _kind_of(source.types.get(name)) for name in columns}
    features = []
    for name, kind in kinds.items():
        if name != target:
            features.append(f"    {_yaml_key(name)}: {_FEATURES[kind]}")
    return _DRAFT.format(
        name=place.name,
        source="its names and types alone" if source.types else "the names in its header line",
        stem=_study_name(place.stem),
        spec=spec or f"{place.stem}.yaml",
        path=json.dumps(str(path), ensure_ascii=False),
        form=_form_lines(delimiter, encoding),
        target=json.dumps(target, ensure_ascii=False),
        labels=_TARGETS.get(kinds[target], _LABELS),
        columns="\n".join(features),
    )


def _study_name(stem: str) -> str:
    """Return a name that a study may have, from that of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]+|^[._-]+", "-", stem)
    return name.strip("-")[:100] or "table"


def _form_lines(delimiter: str, encoding: str) -> str:
    """Return the spec's lines for a delimiter and an encoding, without those equal to the defaults."""
    lines = ""
    if delimiter:
        lines += f"  delimiter: {json.dumps(delimiter)}\n"
    if encoding and encoding != "utf-8":
        lines += f"  encoding: {json.dumps(encoding)}\n"
    return lines


def _yaml_key(name: str) -> str:
    """Return a name as a key of YAML, in quotes where it could be read as something else."""
    words = ("yes", "no", "on", "off", "true", "false", "null")  # YAML's
    is_word = re.fullmatch(r"[A-Za-z]\w+", name, re.ASCII) is not None
    if is_word and name.lower() not in words:
        return name
    return json.dumps(name, ensure_ascii=False)


def _kind_of(arrow_type: pa.DataType | None) -> str:
    """Return the kind of a column (number, truth, date or text) from its declared type.

    It is empty where no type is declared, as in a CSV file.
    """
    from pyarrow import types

    if arrow_type is None:
        return ""
    if types.is_boolean(arrow_type):
        return "truth"
    if types.is_date(arrow_type) or types.is_timestamp(arrow_type):
        return "date"
    checks = (types.is_integer, types.is_floating, types.is_decimal)
    return "number" if any(check(arrow_type) for check in checks) else "text"


def unfilled(
    document: Any,
    visited: set[int],
    path: str = "",
) -> Iterator[str]:
    """Yield the paths of a spec's values that are still placeholders, reading aliased parts once.

    Args:
        document: A spec, or a part of it.
        visited: Identities of the parts that were read; a YAML file may hold one in itself.
        path: Of the part in the spec.
    """
    if isinstance(document, str) and document == OPEN:
        yield path
    if not isinstance(document, Mapping | list | tuple) or id(document) in visited:
        return
    visited.add(id(document))
    items: Iterable[tuple[Any, Any]]
    if isinstance(document, Mapping):
        items = document.items()
    else:
        items = (("", value) for value in document)
    for name, value in items:
        yield from unfilled(value, visited, f"{path}.{name}".strip("."))
