"""Which dataset a budget protects: its public identity, never anything of its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privtune.errors import InvalidInputError
from privtune.ledger.errors import DatasetMismatchError
from privtune.names import check_text, first_names

_SHOWN = 12  # columns that are named in a sentence
_TEXTS = ("name", "source")
_FIELDS = {"name", "source", "columns", "declared"}


@dataclass(frozen=True)
class Dataset:
    """The public identity of a dataset that is charged for: name, source and declared columns.

    Args:
        name: What the dataset is called; empty for arrays in memory that nobody named.
        source: The path or the address that it is read from, as it was declared; empty in memory.
        columns: The declared columns; none where the parts of a record have no names.
        declared: Whether somebody said by the name which dataset this is, wherever it is read from.

    Raises:
        InvalidInputError: If a text cannot be stored.

    Example:
        >>> here = Dataset("patients", "patients.csv", ("age", "outcome"))
        >>> str(here), str(Dataset())
        ('patients (patients.csv; columns age, outcome)', 'data in memory without a name')
        >>> here.is_same(Dataset("p", "patients.csv")), here.is_same(Dataset("patients", "other.csv"))
        (True, False)
        >>> Dataset.from_dict(here.to_dict()) == here
        True
    """

    name: str = ""
    source: str = ""
    columns: tuple[str, ...] = ()
    declared: bool = False

    def __post_init__(self) -> None:
        for field in _TEXTS:
            check_text(getattr(self, field), f"dataset.{field}")
        for column in self.columns:
            check_text(column, "dataset.columns")

    def __str__(self) -> str:
        columns = first_names(self.columns, _SHOWN)
        facts = []
        if self.source:
            facts.append(self.source)
        if columns:
            facts.append(f"columns {columns}")
        name = self.name or "data in memory without a name"
        return f"{name} ({'; '.join(facts)})" if facts else name

    def is_same(self, other: Dataset) -> bool:
        """Return whether public facts show that this dataset and another one are the same.

        Two places are one dataset if they are the same place. Else names of columns decide, where both have
        some: at least half of those of the one with fewer; else the names.

        Args:
            other: Another dataset.

        Returns:
            False also where nothing tells, as of a file and arrays without a name.
        """
        if self.source and other.source:
            return self.source == other.source
        if self.columns and other.columns:
            shared = set(self.columns) & set(other.columns)
            fewer = min(len(self.columns), len(other.columns))
            return 2 * len(shared) >= fewer
        if self.is_unnamed or other.is_unnamed:
            # Of two that are in memory nothing speaks against it; of a file and arrays nothing speaks for it.
            return self._may_be_in_memory and other._may_be_in_memory
        return self.name == other.name

    @property
    def _may_be_in_memory(self) -> bool:
        """Whether the dataset lacks a source, and has either no name or a declared one."""
        return self.is_unnamed or (self.declared and not self.source)

    @property
    def is_unnamed(self) -> bool:
        """Whether the dataset lacks both a name and a source, as arrays in memory do."""
        return not (self.name or self.source)

    def to_dict(self) -> dict[str, Any]:
        """Return the dataset as JSON-ready data."""
        return {
            "name": self.name,
            "source": self.source,
            "columns": list(self.columns),
            "declared": self.declared,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Dataset:
        """Return the dataset that ``data`` of :meth:`to_dict` describes.

        Raises:
            InvalidInputError: If it holds anything else.
        """
        name = data["name"]
        source = data["source"]
        columns = data["columns"]
        declared = data["declared"]
        if set(data) != _FIELDS or type(declared) is not bool:
            raise InvalidInputError("dataset", sorted(data), "must have name, source and columns")
        are_texts = isinstance(columns, list) and all(
            isinstance(text, str) for text in (name, source, *columns)
        )
        if not are_texts:
            raise InvalidInputError("dataset", sorted(data), "must hold texts")
        return cls(name, source, tuple(columns), declared)


def name_of(term: str, datasets: Sequence[Dataset]) -> str:
    """Return the name of the dataset that a budget protects, or an empty text if none is known.

    Args:
        term: How the budget describes its dataset; may be empty.
        datasets: Those that were charged to it, in order.

    Example:
        >>> name_of("", [Dataset(), Dataset("patients", "patients.csv")])
        'patients'
    """
    if term:
        return term
    return next((dataset.name for dataset in datasets if dataset.name), "")


def refuse_other_dataset(
    dataset: Dataset,
    term: str,
    charged_datasets: Sequence[Dataset],
    *,
    budget: str,
) -> None:
    """Refuse a dataset that differs from the one that a budget protects, as far as public facts tell.

    Args:
        dataset: What is to be charged.
        term: How the budget describes its dataset; may be empty.
        charged_datasets: The datasets that were charged to it.
        budget: The budget's name.

    Raises:
        DatasetMismatchError: It is another one, or nothing says that it is the same.

    Example:
        >>> refuse_other_dataset(Dataset("digits", "digits.csv"), "", [], budget="hospital")
        >>> patients = [Dataset("patients", "patients.csv")]
        >>> refuse_other_dataset(Dataset("digits", "digits.csv"), "", patients, budget="hospital")
        Traceback (most recent call last):
            ...
        privtune.ledger.errors.DatasetMismatchError: Budget 'hospital' protects patients (patients.csv), ...
    """
    name = name_of(term, charged_datasets) or (budget if charged_datasets else "")
    if not name:
        return  # the first one says which it is
    protected_datasets = list(charged_datasets)
    if term:
        protected_datasets.append(Dataset(term, declared=True))
    is_same = any(dataset.is_same(other) for other in protected_datasets)
    if dataset.declared:
        is_same = dataset.name == name
    if is_same:
        return
    of_that_name = (other for other in charged_datasets if other.name == name)
    description = str(next(of_that_name, Dataset(name)))
    protected = " ".join(description.split())  # a description may have several lines
    if dataset.declared:
        raise DatasetMismatchError(
            f"Budget {budget!r} protects {protected}, and what is asked is declared to be dataset "
            f"{dataset.name!r}. Draw on a budget of its own; or, if the people in both are the same, declare "
            f"the budget's name: --dataset {name!r}."
        )
    raise DatasetMismatchError(
        f"Budget {budget!r} protects {protected}, and this is {dataset}: every dataset has a budget of its "
        f"own. If it is the same dataset, only moved or read otherwise, declare that: --dataset {name!r} (in "
        f"a spec budget: {{dataset: {name}}}, in Python Budget(..., dataset={name!r}))."
    )


def shared_sentence(dataset: Dataset, others: Mapping[str, tuple[str, Sequence[Dataset]]]) -> str:
    """Return a warning that other budgets protect the same dataset, or an empty text if none does.

    Args:
        dataset: What is to be charged.
        others: Of each other budget, by its name, how it describes its dataset, and what was charged to it.

    Example:
        >>> shared_sentence(Dataset("p", "p.csv"), {"old": ("", [Dataset("p", "p.csv")])})
        'p.csv is also charged to budget old: for the people in it, the ε of both add up.'
    """
    names = []
    for budget, (term, charged_datasets) in others.items():
        sources = [other.source for other in charged_datasets]
        is_same_place = bool(dataset.source) and dataset.source in sources
        is_same_name = dataset.declared and dataset.name == name_of(term, charged_datasets)
        if is_same_place or is_same_name:
            names.append(budget)
    if not names:
        return ""
    place = dataset.source or dataset.name
    is_one = len(names) == 1
    noun = "budget" if is_one else "budgets"
    budgets = ", ".join(names)
    add_up = "both" if is_one else "all"
    return (
        f"{place} is also charged to {noun} {budgets}: for the people in it, the ε "
        f"of {add_up} add up."
    )
