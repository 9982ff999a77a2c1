"""What is public about a task, as one list: plans, reports and certificates show the same; its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from privtune.errors import PrivTuneError

# Names of facts that views look up.
PRETRAINED, TRAINED, PRECISION = "pretrained weights", "trained part", "precision"
A_RECORD, PARTS = "a record", "parts of a record"
ROWS, MECHANISM, UNCHARGED = "rows of the query", "training", "not charged"

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""


class TaskDataError(PrivTuneError):
    """The data that a task loaded is not what the task declared in public."""


class TaskAbsentError(TaskDataError):
    """What holds a task's data is not on this machine."""


class TaskChangedError(PrivTuneError):
    """A machine's copy of a task's functions is not the one that the study was made with."""


def declared_note(facts: Mapping[str, str]) -> str:
    """Return the warning about what is declared of records or trainings and not enforced, or nothing."""
    return "; ".join(
        f"{name} {facts[name]}" for name in (ROWS, MECHANISM, UNCHARGED) if name in facts
    )


def rows_note(facts: Mapping[str, str]) -> str:
    """Return the warning about a query whose rows are declared independent; else an empty text."""
    return f"{ROWS} {facts[ROWS]}" if ROWS in facts else ""


_EXPECTED = "the declared sizes are expectations, the true sizes are sealed"
PARTITIONS: Mapping[str, str] = {
    "fixed": "given by the task: each holds exactly the declared number, which is public",
    "content": f"a keyed hash of a private record's content decides its split; {_EXPECTED}",
    "id": f"a keyed hash of a private record's id decides its split; {_EXPECTED}",
    "given": (
        "given apart: the guarantee is for data sets that differ in one record of one of these splits, "
        "and their sizes are public; splitting one data set by position (x[:1000], train_test_split) "
        "does not give that for the whole, since one record more moves others between splits"
    ),
}
"""How records come into splits, in words."""

_BY_UNIT = f"each unit is in one split alone; {_EXPECTED}"


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What a task, or a user, declares public. No guarantee protects any of it.

    Args:
        train_records, validation_records, test_records: Declared numbers; None where there are none.
        public_validation, public_test: Whether the split is public as a whole.
        partition: How records come into splits: ``fixed``, ``content``, ``id`` or ``given``.
        input_shape, classes: Shape of an input; classes as a number or all names; None if not declared.
        bounds, values: By feature the bounds that it is clipped to, or in words what it can be.
        pretrained, trainable, precision: Weights that training starts from, the part trained, its numbers.
        target_range: For a regression, the range that targets are clipped to.
        rarest_share: Share of the rarest class among the records, as far as it is known without them; the
            widths of intervals are foretold by it. None if not declared.
        unit: What one record is all rows of; empty where it is a row.
        rows_declared: Whether rows of a query are declared to come from one protected record each.
        parts: What a record holds, in words, in the place of ``input_shape``.
        benchmark: Whether all records are public, as of a benchmark or a generator: repeating an arm on them
            protects nobody, and is not charged.

    Example:
        >>> facts = PublicFacts(train_records=60_000, classes=10, bounds={"age": (0.0, 120.0)})
        >>> facts.to_dict()["training records"], facts.to_dict()["bounds"]
        ('60,000, private', 'age [0, 120]')
    """

    train_records: int
    validation_records: int | None = None
    public_validation: bool = False
    test_records: int | None = None
    public_test: bool = False
    partition: str = "fixed"
    input_shape: tuple[int, ...] | None = None
    classes: int | tuple[Any, ...] | None = None
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pretrained: str | None = None
    trainable: str = "all"
    precision: str = "float32"
    values: Mapping[str, str] = field(default_factory=dict)
    target_range: tuple[float, float] | None = None
    rarest_share: float | None = None
    unit: str = ""
    rows_declared: bool = False
    parts: str = ""
    benchmark: bool = False

    def to_dict(self) -> dict[str, str]:
        """Return names and values as people read them, in order."""
        facts = {"training records": f"{self.train_records:,}, private"}
        if self.unit:
            facts[A_RECORD] = f"all rows of one {self.unit} of them"
        if self.rows_declared:
            facts[ROWS] = (
                "declared independent: that each comes from one protected record was not checked"
            )
        for name, records, public in (
            ("validation records", self.validation_records, self.public_validation),
            ("test records", self.test_records, self.public_test),
        ):
            if records is not None:
                facts[name] = f"{records:,}, {'all of it public' if public else 'private'}"
        facts["splits"] = _BY_UNIT if self.unit else PARTITIONS[self.partition]
        if self.parts:
            facts[PARTS] = self.parts
        elif self.input_shape is not None:
            facts["shape of an input"] = " x ".join(map(str, self.input_shape)) or "a number"
        if isinstance(self.classes, int):
            facts["classes"] = str(self.classes)
        elif self.classes is not None:
            facts["classes"] = ", ".join(map(str, self.classes))
        if self.rarest_share is not None:
            facts["rarest class"] = f"{self.rarest_share:.3g} of the records"
        if self.target_range is not None:
            facts["target"] = "a number in [{:g}, {:g}]".format(*self.target_range)
        if self.bounds:
            facts["bounds"] = ", ".join(
                f"{name} [{low:g}, {high:g}]" for name, (low, high) in self.bounds.items()
            )
        if self.pretrained is not None:
            facts[PRETRAINED] = f"{self.pretrained}; what they were trained on is assumed public"
        if self.trainable != "all":
            facts[TRAINED] = self.trainable
        if self.precision != "float32":
            facts[PRECISION] = f"{self.precision} passes; norms, sums and noise in float32"
        if self.values:
            facts["values"] = "; ".join(f"{name}: {words}" for name, words in self.values.items())
        return facts
