"""What a cell of a file holds: a number, a moment, one of the declared values, or nothing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MISSING = frozenset({"", "na", "n/a", "nan", "nat", "null", "none"})


def is_missing(cell: Any) -> bool:
    """Return whether a cell holds nothing."""
    return cell is None or str(cell).strip().lower() in MISSING


def number_of(cell: Any) -> float | None:
    """Return the number that a cell holds, None if it is none."""
    try:
        return None if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def numbers_of(cells: Sequence[Any]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the numbers in some cells, NaN for none, and where a cell is neither number nor empty."""
    if isinstance(cells, np.ndarray):
        return cells.astype(np.float64), np.zeros(len(cells), dtype=bool)
    found = [number_of(cell) for cell in cells]
    missing = missing_of(cells)
    values = np.array([math.nan if v is None else v for v in found], dtype=float)
    return values, np.isnan(values) & ~missing


def missing_of(cells: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Return which cells hold nothing."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    return np.array([is_missing(cell) for cell in cells], dtype=bool)


def coded(cells: Sequence[Any], values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return which of the declared values each cell holds; -1 for another, or none."""
    place = {label_of(value): index for index, value in enumerate(values)}
    if isinstance(cells, np.ndarray):
        different, where = np.unique(cells, return_inverse=True)
        known = [place.get(label_of(value), -1) for value in different.tolist()]
        return np.array(known, dtype=np.int64)[where]
    return np.array([place.get(label_of(cell), -1) for cell in cells], dtype=np.int64)


def label_of(value: Any) -> float | str:
    """Return what stands for a value, written as a number or a word, with or without blanks."""
    text = str(value).strip()
    if text.lower() in {"true", "false"}:
        return text.lower()
    number = number_of(text)
    return text if number is None or math.isnan(number) else number


def moment_of(cell: Any) -> datetime.datetime | None:
    """Return a cell as a time without a zone, None if it is none."""
    if isinstance(cell, datetime.date) and not isinstance(cell, datetime.datetime):
        cell = datetime.datetime(cell.year, cell.month, cell.day)
    try:
        found = cell if isinstance(cell, datetime.datetime) else _parsed(str(cell).strip())
        return (
            found if found.tzinfo is None else found.astimezone(datetime.UTC).replace(tzinfo=None)
        )
    except (ValueError, OverflowError):
        return None


def _parsed(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
