"""Counts of unusable records, with reasons and remedies, for the curator alone.

A record that is not as declared contributes nothing, and nobody outside is told. Where most are so, a
budget is spent on a training of nothing: so the curator is told before anything is charged. No count of
this module may leave the trust boundary: it is protected by no guarantee.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from privtune.facts import SPLITS
from privtune.tables.cells import (
    CLIPPED,
    LABEL,
    MARKED,
    MISSING,
    NO_DATE,
    NO_NUMBER,
    OTHER,
    UNITS,
    UNREADABLE,
    Fault,
    Mask,
    Notation,
    unusable,
)
from privtune.tables.columns import Column, Date, Number, PaidColumn

# While a declared class never occurs, how many records of other labels are no stray ones:
_OFTEN = 0.05  # of all records; of what one line of the spec would mend, as many stop a run
_RECURS = 3  # of one and the same label
_CHANCE = 1e-6  # that a split of a keyed hash has so few records by chance
_MANY = 1000
_SOME = 100  # declared, above which a keyed hash gives a split twice as many by a chance of e^-38
_EXAMPLES = 50  # different values of a column that are not as declared, for an example
_FEW = 1000  # different contents, above which nobody asks whether equal ones share a split
_FITS = 0.9  # of the values that are not as declared, are as declared with a line more

_NOTATIONS = [
    Notation(decimal=decimal, thousands=mark)
    for mark in ("", ",", ".", " ", "'")
    for decimal in ("", ",")
]
_DAYS = (
    "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y-%m-%d", "%d %b %Y",
    "%d-%b-%Y", "%b %d, %Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%Y-%m", "%m/%Y", "%Y",
)  # fmt: skip
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_ADVICE = {
    NO_NUMBER: "categories, ordinal or date if it holds no numbers",
    NO_DATE: "format: as Python's strptime has it",
    CLIPPED: "the bounds in the units of the file",
    OTHER: "the values as the file has them",
    LABEL: "classes as the file has them",
}
_PLACES = {NO_DATE: "its column", OTHER: "task", LABEL: "task"}  # of what else: both
_NINES = re.compile(r"-?9{2,}(\.0*)?")


@dataclass
class _Mends:
    """Remedies: fields of a spec with which faulty values would be as declared.

    Attributes:
        values: What the file says, and how often.
        lines: By how the values would be read, the first fields that read them so.
    """

    values: Mapping[str, int]
    lines: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def add(
        self,
        options: Mapping[str, Any],
        readings: Sequence[Any],
        low: Any,
        high: Any,
    ) -> None:
        """Add spec fields as a remedy if they make most values valid; of equal readings the first stays.

        Args:
            options: The fields.
            readings: What each value is with them, None for nothing.
            low: The lower bound.
            high: The upper one.
        """
        fitting = 0
        counts = self.values.values()
        for reading, count in zip(readings, counts, strict=True):
            if reading is not None and low <= reading <= high:
                fitting += count
        if fitting < _FITS * sum(counts):
            return
        settings = [f"{name}: {json.dumps(value)}" for name, value in options.items()]
        line = ", ".join(settings) or "no format and no unit"
        self.lines.setdefault(tuple(readings), line)

    def add_notations(self, low: float, high: float) -> None:
        """Add as remedies the notations in which most values are numbers within bounds."""
        import pyarrow as pa

        column = pa.array(list(self.values), pa.string())
        for notation in _NOTATIONS:
            numbers, _ = notation.numbers(column)
            readings: list[float | None] = []
            for number in numbers:
                is_none = math.isnan(number)
                readings.append(None if is_none else float(number))
            options = {name: value for name, value in vars(notation).items() if value}
            self.add(options, readings, low, high)

    def add_forms(self, column: Date) -> None:
        """Add as remedies the date formats and units in which most values are dates within bounds."""
        for options in _forms_of_dates():
            form = options.get("format", "")
            unit = options.get("unit", "")
            other = replace(column, format=form, unit=unit)
            readings = list(map(other.moment, self.values))
            self.add(options, readings, column.low, column.high)


def _forms_of_dates() -> Iterator[dict[str, str]]:
    """Yield every format and unit of dates that is tried, as fields of a column."""
    yield {}
    for day in _DAYS:
        for time in _TIMES:
            yield {"format": day + time}
    for unit in UNITS:
        yield {"unit": unit}


def list_mends(
    column: Column | None,
    why: str,
    values: Mapping[str, int],
) -> list[str]:
    """Return alternative lines for a spec, any of which makes most of the faulty values valid.

    Args:
        column: As it is declared; None where the column is none of the features.
        why: Why the values are not as declared.
        values: What the file says, and how often.
    """
    total = sum(values.values())
    unreadable = values.get(UNREADABLE, 0)
    if unreadable > (1.0 - _FITS) * total:
        return ["the file anew, with one record a line and a cell for each name of the header"]
    if why in (OTHER, LABEL):
        is_other_encoding = any("\ufffd" in value for value in values)
        return ["encoding: cp1252"] if is_other_encoding else []
    if why == MARKED:
        return ['thousands: "."', 'decimal: "."']
    mends = _Mends(values)
    if why == NO_NUMBER and isinstance(column, Number):
        mends.add_notations(column.low, column.high)
    elif why == NO_NUMBER and isinstance(column, PaidColumn):
        mends.add_notations(-1e300, 1e300)
    elif why == NO_DATE and isinstance(column, Date):
        mends.add_forms(column)
    if mends.lines:
        return list(mends.lines.values())
    word = _word_for_nothing(why, values)
    if word is None:
        return []
    return [f"na_values: [{_quote(word)}]"]


def _word_for_nothing(why: str, values: Mapping[str, int]) -> str | None:
    """Return a word (or a number of nines) that means missing in most faulty cells, or None.

    Args:
        why: Why the values are not as declared.
        values: What the file says, and how often.
    """
    by_count = operator.itemgetter(1)
    word, count = max(values.items(), key=by_count, default=("", 0))
    if why == CLIPPED:
        may_be_filler = _NINES.fullmatch(word) is not None
    else:
        may_be_filler = why in (NO_NUMBER, NO_DATE)
    fewest = max(_RECURS, _FITS * sum(values.values()))
    if may_be_filler and count >= fewest:
        return word
    return None


@dataclass(frozen=True)
class Finding:
    """Number of records that are not as declared, in one column and for one reason.

    Attributes:
        column: Its name; empty where it is the whole record.
        why: What is wrong with them, in words.
        used: Whether they are used all the same.
        records: How many they are, by split.
        hint: What the file says, and the spec.
        mends: What to write into the spec.
        often: How many have the commonest of the values.
        choices: How many values are declared; 0 where none are listed.
    """

    column: str
    why: str
    used: bool
    records: Mapping[str, int]
    hint: str = ""
    mends: str = ""
    often: int = 0
    choices: int = 0

    def count(self, split: str = "") -> int:
        """Return the number of such records in a split, or in all splits."""
        if split:
            return self.records.get(split, 0)
        return sum(self.records.values())

    def words(self, split: str = "", *, advice: bool = False) -> str:
        """Return the finding in one line, with ``advice`` always including a remedy."""
        words = f"{self.count(split):,} {self.why}"
        if self.column:
            words = f"{self.column}: {words}"
        if self.used:
            words += ", used all the same"
        if self.hint:
            words += f" ({self.hint})"
        mends = self.mends
        if advice and not mends:
            mends = _ADVICE.get(self.why, "")
        if mends:
            words += f"; write {mends}"
        return words


@dataclass(frozen=True)
class SplitCheck:
    """Declared and usable numbers of records in one split, or in all.

    Attributes:
        split: Its name; ``all splits`` where the place of a record is not known yet, empty for all of them.
        declared: The number that is declared.
        usable: Rows that contribute something, or units where rows are grouped.
        rows: All rows.
        unusable: Rows that contribute nothing.
    """

    split: str
    declared: int
    usable: int
    rows: int
    unusable: int

    def too_few(self, *, sealed: bool) -> bool:
        """Return whether under half of the declared records are usable, beyond the chance of a hash."""
        if self.usable == 0:
            # Too few by whatever chance: nothing can be trained or chosen on such a split.
            return True
        if 2 * self.usable >= self.declared:
            return False
        # By Chernoff, a hash gives fewer than half of so many by a chance of e^-125.
        is_beyond_chance = not sealed or self.declared >= _MANY
        if is_beyond_chance:
            return True
        probability = _poisson_below(self.usable, self.declared)
        return probability < _CHANCE


@dataclass(frozen=True)
class RecordCheck:
    """Comparison of a task's records with their declaration, for the curator alone.

    Attributes:
        splits: What each split holds.
        findings: What is not as declared.
        what: What the declared numbers count: a record, or a unit.
        sealed: Whether the declared numbers are expectations.
        unseen: Declared classes that no usable record has.
        alone: The one class that all usable records have, of several that are declared.
        same: What is the same of all usable records: the target, or the inputs.
        clumped: Why splits may differ much from what is declared.
        beside: Why a study of the user's own records stops, beside all this.
    """

    splits: tuple[SplitCheck, ...]
    findings: tuple[Finding, ...]
    what: str = "record"
    sealed: bool = True
    unseen: tuple[str, ...] = ()
    alone: str = ""
    same: str = ""
    clumped: str = ""
    beside: str = ""

    @property
    def _total(self) -> SplitCheck:
        """Sums over all splits, as one split."""
        return SplitCheck(
            split="",
            declared=sum(split.declared for split in self.splits),
            usable=sum(split.usable for split in self.splits),
            rows=sum(split.rows for split in self.splits),
            unusable=sum(split.unusable for split in self.splits),
        )

    @property
    def usable(self) -> int:
        """Number of usable records, over all splits."""
        return self._total.usable

    @property
    def reason(self) -> str:
        """Reason why a study of these records would waste its budget, or an empty text."""
        total = self._total
        if self.beside:
            return self.beside
        if 2 * total.unusable > total.rows:
            cause = self._main_cause(total)
            return f"{total.unusable:,} of {total.rows:,} records cannot be used{cause}"
        if total.too_few(sealed=self.sealed):
            return self._compare(total)
        for finding in self.findings:
            words = self._explain_stop(finding, total.rows)
            if words:
                return f"of {total.rows:,} records, {words}"
        if self.alone:
            return (
                f"all usable records have the class {self.alone!r}, and none has {self.unseen[0]!r}"
            )
        if self.same:
            return f"{self.same} of all usable records are the same"
        for split in self.splits:
            if split.too_few(sealed=self.sealed):
                return self._compare(split)
        return ""

    def _explain_stop(self, finding: Finding, rows: int) -> str:
        """Return a finding in words if it makes a study worthless, or an empty text."""
        count = finding.count()
        many = count >= _OFTEN * rows
        if self.unseen and finding.why == LABEL:
            # Stray labels are few, and each another one.
            is_stray = not many and finding.often < _RECURS and not self.alone
            if not is_stray:
                unseen = ", ".join(map(repr, self.unseen[:3]))
                return f"{finding.words(advice=True)}, and none has the declared {unseen}"
        filled = rows - self._count_empty(finding)
        if self._stops(finding, filled, many=many):
            return finding.words(advice=True)
        return ""

    def _count_empty(self, finding: Finding) -> int:
        """Return how many records lack a value in a finding's column, by all findings but this one."""
        causes = {MISSING, NO_NUMBER} - {finding.why}
        count = 0
        for other in self.findings:
            if other.column == finding.column and other.why in causes:
                count += other.count()
        return count

    def _stops(
        self,
        finding: Finding,
        filled: int,
        *,
        many: bool,
    ) -> bool:
        """Return whether a finding stops a study: its column is useless, or a remedy saves many records.

        Args:
            finding: What is wrong in the column.
            filled: How many records have a value in it.
            many: Whether the finding is of so many that a mend is worth a stop.
        """
        if finding.mends and many:
            return True
        if not finding.used:
            return False
        if finding.why == CLIPPED and 2 * finding.count() > filled:
            return True
        # One declared value may be so rare that no record has it; of a list some value occurs.
        says_nothing = finding.why == MISSING or finding.choices > 1
        return says_nothing and finding.count() == filled

    @property
    def many(self) -> str:
        """Description of a split with over twice the declared records, beyond chance, or an empty text."""
        for split in self.splits:
            if split.declared >= _SOME and split.usable > 2 * split.declared:
                return self._compare(split)
        return ""

    def _compare(self, split: SplitCheck) -> str:
        """Return a sentence with a split's usable and declared numbers of records, and the main cause."""
        place = ""
        clumped = ""
        if split.split in SPLITS:
            place = f" of split {split.split}"
            if self.clumped:
                clumped = f"; {self.clumped}"
        cause = self._main_cause(split)
        return (
            f"{split.usable:,} {self.what}s{place} can be used, and {split.declared:,} are declared"
            f"{cause}{clumped}"
        )

    def _main_cause(self, split: SplitCheck) -> str:
        """Return the most frequent reason for unusable records in a split, in words."""

        def count(finding: Finding) -> int:
            return finding.count(split.split)

        causes = [finding for finding in self.findings if not finding.used]
        worst = max(causes, key=count, default=None)
        if worst is None or not count(worst):
            return ""
        return f": {worst.words(split.split, advice=True)}"

    def lines(self) -> list[str]:
        """Return the whole comparison for the curator, in lines of text."""
        lines = []
        for split in self.splits:
            name = split.split
            lines.append(
                f"{name}: {split.usable:,} usable {self.what}s, {split.declared:,} declared; "
                f"{split.unusable:,} of {split.rows:,} rows cannot be used"
            )
            lines += [f"  {finding.words(name)}" for finding in self._findings_of(name)]
        if self.clumped:
            lines.append(self.clumped)
        return lines

    def _findings_of(self, split: str) -> list[Finding]:
        """Return the findings in a split, unusable records first, then by decreasing count."""
        findings = [finding for finding in self.findings if finding.count(split)]
        findings.sort(key=lambda finding: finding.count(split), reverse=True)
        findings.sort(key=lambda finding: finding.used)
        return findings

    def to_dict(self) -> dict[str, Any]:
        """Return the reason to stop, the splits and the findings as JSON-ready data."""
        return {
            "stops": self.reason,
            "splits": [asdict(split) for split in self.splits],
            "findings": [asdict(finding) for finding in self.findings],
        }


def _poisson_below(count: int, mean: float) -> float:
    """Return the probability that a Poisson variable of this mean is at most ``count``.

    By logarithms: mean^k and k! leave the range of floats long before their quotient does.
    """
    probabilities = []
    for k in range(count + 1):
        log_factorial = math.lgamma(k + 1)
        log_probability = k * math.log(mean) - mean - log_factorial
        probabilities.append(math.exp(log_probability))
    return sum(probabilities)


@dataclass
class _FaultCount:
    """Count of one fault, by split and by the text of the faulty cell.

    Attributes:
        used: Whether such records are used all the same.
        declared: What the column may hold.
        records: How many records are so, by split.
        values: What the file says of them, and how often; at most `_EXAMPLES` different ones.
        against: How many records show that the column has no such fault.
    """

    used: bool
    declared: tuple[Any, ...] | str
    records: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    against: int = 0

    def add(self, fault: Fault) -> None:
        """Add the faulty cells of a batch to the counts by text."""
        self.declared = fault.declared
        self.against += fault.against
        for value, count in fault.count_values().items():
            if value in self.values or len(self.values) < _EXAMPLES:
                self.values[value] += count

    @property
    def is_likely(self) -> bool:
        """Whether few records speak against the fault."""
        return self.records.total() > self.against / (1.0 - _FITS)

    @property
    def hint(self) -> str:
        """Examples of faulty cells, and the declaration that they contradict, in words."""
        spec = self.declared
        most = 1
        if not isinstance(spec, str):
            most = 3
            words = [repr(str(value)) for value in spec[:3]]
            if len(spec) > 3:
                words.append("...")
            spec = f"declared: {', '.join(words)}"
        parts = []
        examples = sorted(self.values.most_common(most))
        if examples:
            quotes = [_quote(value) for value, _ in examples]
            parts.append(f"such as {', '.join(quotes)}")
        if spec:
            parts.append(spec)
        return "; ".join(parts)

    def finding(
        self,
        column: str,
        why: str,
        declaration: Column | None,
    ) -> Finding:
        """Return the counts as a finding, with the remedy in words."""
        choices = 0
        if not isinstance(self.declared, str):
            choices = len(self.declared)
        return Finding(
            column,
            why,
            self.used,
            dict(self.records),
            self.hint,
            mends=_mends_in_words(declaration, why, self.values),
            often=max(self.values.values(), default=0),
            choices=choices,
        )


@dataclass
class Tally:
    """Running count of faults over batches of records.

    Attributes:
        declared: Numbers by split, in order.
        what: What these count: a record, or a unit.
        sealed: Whether they are expectations.
        by: What the split of a record goes by: its content, or its id; empty for neither.
        classes: All that are declared; none of a regression.
        columns: Feature columns as they are declared.
        rows: How many rows each split has.
        unusable: How many of them contribute nothing.
        faults: What is not as declared, by column and why.
        units: By split the units that a usable row belongs to.
        targets: Different targets of usable records; of a regression two at most.
        inputs: Digests of their inputs, two at most.
        contents: Different things that their splits go by, at most `_FEW`.
    """

    declared: Mapping[str, int]
    what: str = "record"
    sealed: bool = True
    by: str = ""
    classes: Sequence[Any] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], _FaultCount] = field(default_factory=dict)
    units: dict[str, set[Any]] = field(default_factory=dict)
    targets: set[float] = field(default_factory=set)
    inputs: set[bytes] = field(default_factory=set)
    contents: set[Any] = field(default_factory=set)

    def add(
        self,
        splits: npt.NDArray[np.int64],
        faults: Iterable[Fault],
        *,
        units: Sequence[Any] | None = None,
        x: Any = None,
        y: Any = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Count a batch of records and their faults.

        Args:
            splits: The number of each record's split ``[N]``, in the order of ``declared``.
            faults: Which records are not as declared.
            units: The unit of each, where rows are grouped.
            x: Inputs ``[N, ...]``.
            y: Targets ``[N]``.
            ids: What the split of each goes by, where it is no content.
        """
        faults = [fault for fault in faults if fault.records.any() or fault.against]
        is_unusable = unusable(faults, len(splits))
        is_usable = ~is_unusable
        masks = {split: splits == number for number, split in enumerate(self.declared)}
        for fault in faults:
            self._count_fault(fault, masks)
        for split, mask in masks.items():
            unusable_here = mask & is_unusable
            self.rows[split] += int(mask.sum())
            self.unusable[split] += int(unusable_here.sum())
            if units is not None:
                members = self.units.setdefault(split, set())
                usable_here = mask & is_usable
                places = np.flatnonzero(usable_here).tolist()
                members.update(units[place] for place in places)
        self._collect(is_usable, x, y, ids)

    def _count_fault(self, fault: Fault, masks: Mapping[str, Mask]) -> None:
        """Count a fault of some records, by the split that each of them is in.

        Args:
            fault: What is not as declared of the records ``[N]``.
            masks: By split which of the records are in it ``[N]``.
        """
        key = (fault.column, fault.why)
        if key not in self.faults:
            self.faults[key] = _FaultCount(fault.used, fault.declared)
        count = self.faults[key]
        count.add(fault)
        for split, mask in masks.items():
            records_here = fault.records & mask
            count.records[split] += int(records_here.sum())

    def _collect(
        self,
        usable: Mask,
        x: Any,
        y: Any,
        ids: Any,
    ) -> None:
        """Collect distinct targets, inputs and contents of usable records, up to a limit.

        What is collected says whether all records are alike, or many of them: beyond that, no more is held
        of a record than a digest.
        """
        if y is not None and (self.classes or len(self.targets) < 2):
            targets = np.asarray(y)[usable]
            is_finite = np.isfinite(targets)
            distinct = np.unique(targets[is_finite])
            self.targets.update(distinct.tolist())
        for place in np.flatnonzero(usable):
            content = None if x is None else _digest(x[place])
            if content is not None and len(self.inputs) < 2:
                self.inputs.add(content)
            if len(self.contents) >= _FEW:
                break
            if ids is not None:
                self.contents.add(ids[place])
            elif content is not None and y is not None:
                self.contents.add((content, _digest(y[place])))

    def check(self) -> RecordCheck:
        """Return the comparison of all counted records with their declaration."""
        findings = []
        for (column, why), count in self.faults.items():
            declaration = self.columns.get(column)
            if count.is_likely:
                findings.append(count.finding(column, why, declaration))
        labels = list(map(str, self.classes))
        unseen = [label for number, label in enumerate(labels) if number not in self.targets]
        present = [label for label in labels if label not in unseen]
        rows = self.rows.total() - self.unusable.total()
        alone = ""
        same = ""
        if rows > 1:  # of one record, all is the same
            same = self._constant()
            if len(present) == 1 and unseen:
                alone = present[0]
        return RecordCheck(
            tuple(self._check_split(split) for split in self.declared),
            tuple(findings),
            self.what,
            self.sealed,
            tuple(unseen),
            alone=alone,
            same=same,
            clumped=self._explain_clumps(rows),
        )

    def _check_split(self, split: str) -> SplitCheck:
        """Return the counts of one split."""
        rows = self.rows[split]
        unusable_rows = self.unusable[split]
        usable = rows - unusable_rows
        if self.units:
            usable = len(self.units.get(split, ()))
        return SplitCheck(
            split,
            self.declared[split],
            usable,
            rows,
            unusable_rows,
        )

    def _constant(self) -> str:
        """Return which of targets and inputs is constant over usable records, or an empty text."""
        if not self.classes and len(self.targets) == 1:
            return "the targets"
        if len(self.inputs) == 1:
            return "the inputs"
        return ""

    def _explain_clumps(self, rows: int) -> str:
        """Return a sentence if usable rows have few different ids or contents, or an empty text.

        Splits then differ much from what is declared, since equal rows are in one of them.
        """
        count = len(self.contents)
        most = min(rows, 2 * _FEW)
        if not self.by or not 0 < 2 * count < most:
            return ""
        return (
            f"the {rows:,} usable rows have {count:,} different {self.by}s, and equal ones "
            "share a split: declare as id: a column that differs by record, or another key:"
        )


def _mends_in_words(
    column: Column | None,
    why: str,
    values: Mapping[str, int],
) -> str:
    """Return the remedies of a fault and their place in the spec, in words, or an empty text."""
    lines = list_mends(column, why, values)
    if not lines:
        return ""
    if lines[0].startswith("the file"):
        return lines[0]
    place = _PLACES.get(why, "task, or in its column")
    return f"{' or '.join(lines)} in {place}"


def _digest(values: Any) -> bytes:
    """Return a digest of an array, equal for equal values."""
    signless = np.ascontiguousarray(values) + 0  # no -0.0
    return hashlib.blake2b(signless.tobytes(), digest_size=16).digest()


def _quote(value: str) -> str:
    """Return a cell's text in quotes for the curator, shortened if long."""
    if value == UNREADABLE:
        return "a line that cannot be read"
    if re.fullmatch(r"-?\d+e-\d+", value):  # as numbers are held
        return repr(str(float(value)))
    if len(value) > 40:
        value = f"{value[:37]}..."
    return repr(value)
