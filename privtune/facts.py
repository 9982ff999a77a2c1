"""The public facts of a task, as one list for plans, reports and certificates, and errors of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from privtune.errors import PrivTuneError

# Names of facts that views look up.
PRETRAINED = "pretrained weights"
TRAINED = "trained part"
PRECISION = "precision"
INPUTS = "inputs"
A_RECORD = "a record"
PARTS = "parts of a record"
ROWS = "rows of the query"
MECHANISM = "training"
UNCHARGED = "not charged"
EXACT = "exact scores on the test split"

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""


class TaskDataError(PrivTuneError):
    """The data that a task loaded is not what the task declared in public."""


class TaskAbsentError(TaskDataError):
    """The file or other source of a task's data is not on this machine."""


class TaskChangedError(PrivTuneError):
    """A machine's copy of a task's functions is not the one that the study was made with."""


def declared_note(facts: Mapping[str, str]) -> str:
    """Return the warning about declared records or trainings that nothing enforces, or an empty text."""
    warnings = []
    for name in (ROWS, MECHANISM, UNCHARGED):
        if name in facts:
            warnings.append(f"{name} {facts[name]}")
    return "; ".join(warnings)


def rows_note(facts: Mapping[str, str]) -> str:
    """Return the warning about a query whose rows are declared independent; else an empty text."""
    if ROWS not in facts:
        return ""
    return f"{ROWS} {facts[ROWS]}"


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
    """The facts that a task or a user declares public: no guarantee protects any of them.

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
        input_range: Where inputs are arrays of numbers on one scale: the ends of that scale, to which the
            task brings what ``bounds`` tells. Predictions are refused for numbers beyond it.
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
    input_range: tuple[float, float] | None = None
    benchmark: bool = False

    @property
    def scaling(self) -> str:
        """The instruction that scales raw numbers to the input range, in words; empty if none is needed.

        Example:
            >>> PublicFacts(train_records=9, bounds={"pixels": (0.0, 16.0)}, input_range=(0.0, 1.0)).scaling
            'divide pixels by 16'
        """
        if self.input_range is None:
            return ""
        ranges = set(self.bounds.values())
        if ranges <= {self.input_range}:
            return ""
        low, high = self.input_range
        feature, *others = self.bounds
        feature_low, feature_high = self.bounds[feature]
        if not others and feature_low == low == 0.0:
            divisor = feature_high / high
            return f"divide {feature} by {divisor:g}"
        return f"scale each feature from its bounds to {_range_in_words(self.input_range)}"

    def to_dict(self) -> dict[str, str]:
        """Return the public facts by name, each as readable text, in the order in which they are shown."""
        facts = {"training records": self._split_in_words(self.train_records, public=False)}
        if self.unit:
            facts[A_RECORD] = f"all rows of one {self.unit} of them"
        if self.rows_declared:
            facts[ROWS] = (
                "declared independent: that each comes from one protected record was not checked"
            )
        if self.validation_records is not None:
            facts["validation records"] = self._split_in_words(
                self.validation_records,
                public=self.public_validation,
            )
        if self.test_records is not None:
            facts["test records"] = self._split_in_words(
                self.test_records,
                public=self.public_test,
            )
        facts["splits"] = _BY_UNIT if self.unit else PARTITIONS[self.partition]
        return {
            **facts,
            **self._facts_of_inputs(),
            **self._facts_of_targets(),
            **self._facts_of_bounds(),
            **self._facts_of_training(),
        }

    def _split_in_words(self, records: int, *, public: bool) -> str:
        """Return the size of a split and who may see its records, as text, such as ``1,000, private``."""
        who = "private"
        if public:
            who = "all of it public"
        elif self.benchmark:
            who = "public, protected as if private"
        return f"{records:,}, {who}"

    def _facts_of_inputs(self) -> dict[str, str]:
        """Return the fact about a record's inputs: its parts, or the shape of one input."""
        if self.parts:
            return {PARTS: self.parts}
        if self.input_shape is None:
            return {}
        shape = " x ".join(map(str, self.input_shape))
        return {"shape of an input": shape or "a number"}

    def _facts_of_targets(self) -> dict[str, str]:
        """Return the facts about targets: the classes, the share of the rarest, or the range of numbers."""
        facts = {}
        if isinstance(self.classes, int):
            facts["classes"] = str(self.classes)
        elif self.classes is not None:
            facts["classes"] = ", ".join(map(str, self.classes))
        if self.rarest_share is not None:
            facts["rarest class"] = f"{self.rarest_share:.3g} of the records"
        if self.target_range is not None:
            facts["target"] = f"a number in {_range_in_words(self.target_range)}"
        return facts

    def _facts_of_bounds(self) -> dict[str, str]:
        """Return the facts about ranges: the bounds of features, and the numbers that a model takes."""
        facts = {}
        if self.bounds:
            ranges = []
            for name, ends in self.bounds.items():
                ranges.append(f"{name} {_range_in_words(ends)}")
            facts["bounds"] = ", ".join(ranges)
        if self.input_range is not None:
            words = f"a model takes numbers in {_range_in_words(self.input_range)}"
            if self.scaling:
                words += f": {self.scaling}"
            facts[INPUTS] = words
        return facts

    def _facts_of_training(self) -> dict[str, str]:
        """Return the facts about pretraining, the trained part, precision, and the values of features."""
        facts = {}
        if self.pretrained is not None:
            facts[PRETRAINED] = f"{self.pretrained}; what they were trained on is assumed public"
        if self.trainable != "all":
            facts[TRAINED] = self.trainable
        if self.precision != "float32":
            facts[PRECISION] = f"{self.precision} passes; norms, sums and noise in float32"
        if self.values:
            values = [f"{name}: {words}" for name, words in self.values.items()]
            facts["values"] = "; ".join(values)
        return facts


def _range_in_words(ends: tuple[float, float]) -> str:
    """Return a range as people read it: ``[0, 120]``."""
    low, high = ends
    return f"[{low:g}, {high:g}]"
