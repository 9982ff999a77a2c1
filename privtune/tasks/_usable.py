"""How many records cannot be used, and why: for the curator, who owns the data, and for nobody else.

A record that is not as declared contributes nothing, and nobody outside is told. Where most are so, a
budget is spent on a training of nothing: so the curator is told before anything is charged. No count of
this module may leave the trust boundary: it is protected by no guarantee.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from privtune.tasks._cells import (
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
    Notation,
    unusable,
)
from privtune.tasks._columns import Column, Date, Number, Paid
from privtune.tasks._facts import SPLITS

# While a declared class never occurs, how many records of other labels are no stray ones:
_OFTEN = 0.05  # of all records; of what one line of the spec would mend, as many stop a run
_RECURS = 3  # of one and the same label
_CHANCE = 1e-6  # that a split of a keyed hash has so few records by chance
_MANY = 1000
_SOME = 100  # declared, above which a keyed hash gives a split twice as many by a chance of e^-38
_KEPT = 50  # different values of a column that are not as declared, for an example
_FEW = 1000  # different contents, above which nobody asks whether equal ones share a split
_FITS = 0.9  # of the values that are not as declared, are as declared with a line more

_NOTATIONS = [Notation(decimal=d, thousands=t) for t in ("", ",", ".", " ", "'") for d in ("", ",")]
_DAYS = (
    *(
        "%d.%m.%Y",
        "%d/%m/%Y",
        "%m/%d/%Y",
        "%d-%m-%Y",
        "%m-%d-%Y",
        "%Y/%m/%d",
        "%Y-%m-%d",
        "%d %b %Y",
    ),
    *("%d-%b-%Y", "%b %d, %Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%Y-%m", "%m/%Y", "%Y"),
)
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


def mending(column: Column | None, why: str, seen: Mapping[str, int]) -> list[str]:
    """Return the fields of a spec, any of which makes most of these values be as declared."""
    total = sum(seen.values())
    if seen.get(UNREADABLE, 0) > (1.0 - _FITS) * total:
        return ["the file anew, with one record a line and a cell for each name of the header"]
    if why in (OTHER, LABEL):
        return ["encoding: cp1252"] if any("\ufffd" in value for value in seen) else []
    if why == MARKED:
        return ['thousands: "."', 'decimal: "."']
    found: dict[Any, str] = {}

    def take(said: Mapping[str, Any], values: Sequence[Any], low: Any, high: Any) -> None:
        """Keep fields unless others before read the same."""
        right = zip(values, seen.values(), strict=True)
        if sum(n for one, n in right if one is not None and low <= one <= high) >= _FITS * total:
            line = ", ".join(f"{name}: {json.dumps(value)}" for name, value in said.items())
            found.setdefault(tuple(values), line or "no format and no unit")

    if isinstance(column, Number | Paid) and why == NO_NUMBER:
        ends = (column.low, column.high) if isinstance(column, Number) else (-1e300, 1e300)
        for one in _NOTATIONS:
            numbers = one.numbers(pa.array(list(seen), pa.string()))[0]
            known = [None if math.isnan(number) else float(number) for number in numbers]
            take({name: value for name, value in vars(one).items() if value}, known, *ends)
    elif isinstance(column, Date) and why == NO_DATE:
        for said in (
            {},
            *({"format": day + time} for day in _DAYS for time in _TIMES),
            *({"unit": unit} for unit in UNITS),
        ):
            other = replace(column, format=said.get("format", ""), unit=said.get("unit", ""))
            take(said, list(map(other.moment, seen)), column.low, column.high)
    often, count = max(seen.items(), key=lambda one: one[1], default=("", 0))
    word = _NINES.fullmatch(often) if why == CLIPPED else why in (NO_NUMBER, NO_DATE)
    if not found and word and count >= max(_RECURS, _FITS * total):
        return [f"na_values: [{_shown(often)}]"]
    return list(found.values())


@dataclass(frozen=True)
class Finding:
    """How many records are not as declared, in one column and in one way."""

    column: str
    why: str
    used: bool
    records: Mapping[str, int]  # by split
    hint: str = ""  # what the file says, and the spec
    mends: str = ""  # what to write into the spec
    often: int = 0  # have the commonest of the values
    choices: int = 0  # values that are declared; 0 where none are listed

    def count(self, split: str = "") -> int:
        """Return how many records of a split, or of all, are so."""
        return self.records.get(split, 0) if split else sum(self.records.values())

    def words(self, split: str = "", *, advice: bool = False) -> str:
        """Return the finding in one line; with ``advice`` always what to write."""
        where = f"{self.column}: " if self.column else ""
        hint = f" ({self.hint})" if self.hint else ""
        used = ", used all the same" if self.used else ""
        mends = self.mends or (advice and _ADVICE.get(self.why))
        return f"{where}{self.count(split):,} {self.why}{used}{hint}{f'; write {mends}' if mends else ''}"


@dataclass(frozen=True)
class SplitCheck:
    """What one split holds, or all of them."""

    split: str  # ``all splits`` where the place of a record is not known yet; empty for all of them
    declared: int
    usable: int  # rows, or units where rows are grouped
    rows: int
    unusable: int  # rows that contribute nothing

    def too_few(self, *, sealed: bool) -> bool:
        """Say whether fewer than half of the declared can be used, and not by the chance of a hash."""
        # A split without any is too few by whatever chance: nothing can be trained or chosen on it.
        if self.usable == 0 or 2 * self.usable >= self.declared:
            return self.usable == 0
        many = self.declared >= _MANY  # Chernoff: fewer than half of them by chance of e^-125
        return not sealed or many or _poisson_below(self.usable, self.declared) < _CHANCE


@dataclass(frozen=True)
class RecordCheck:
    """What the records of a task are, beside what is declared. For the curator alone."""

    splits: tuple[SplitCheck, ...]
    findings: tuple[Finding, ...]
    what: str = "record"  # that the declared numbers count, or a unit
    sealed: bool = True  # the declared numbers are expectations
    unseen: tuple[str, ...] = ()  # declared classes that no usable record has
    alone: str = ""  # the one class that all usable records have, of several that are declared
    same: str = ""  # what is the same of all usable records: the target, or the inputs
    clumped: str = ""  # why splits may differ much from what is declared
    beside: str = ""  # why a study of the user's own records stops, beside all this

    @property
    def _whole(self) -> SplitCheck:
        """All splits as one."""
        names = ("declared", "usable", "rows", "unusable")
        return SplitCheck("", *(sum(getattr(s, name) for s in self.splits) for name in names))

    @property
    def usable(self) -> int:
        """How many records contribute something, over all splits."""
        return self._whole.usable

    @property
    def reason(self) -> str:
        """Why a study of these records would spend its budget for nothing; empty where it would not."""
        whole = self._whole
        if self.beside:
            return self.beside
        if 2 * whole.unusable > whole.rows:
            worst = self._worst(whole)
            return f"{whole.unusable:,} of {whole.rows:,} records cannot be used{worst}"
        if whole.too_few(sealed=self.sealed):
            return self._few(whole)
        if said := next(filter(None, (self._stops(one, whole.rows) for one in self.findings)), ""):
            return f"of {whole.rows:,} records, {said}"
        if self.alone:
            return (
                f"all usable records have the class {self.alone!r}, and none has {self.unseen[0]!r}"
            )
        if self.same:
            return f"{self.same} of all usable records are the same"
        return next((self._few(s) for s in self.splits if s.too_few(sealed=self.sealed)), "")

    def _stops(self, one: Finding, rows: int) -> str:
        """Return a finding in words where it makes a study worth nothing; else an empty text."""
        many = one.count() >= _OFTEN * rows
        if self.unseen and one.why == LABEL and (many or one.often >= _RECURS or self.alone):
            unseen = ", ".join(map(repr, self.unseen[:3]))
            return f"{one.words(advice=True)}, and none has the declared {unseen}"
        there = rows - sum(
            other.count()
            for other in self.findings
            if other.column == one.column and other.why in {MISSING, NO_NUMBER} - {one.why}
        )
        # One declared value may be so rare that no record has it; of a list some value occurs.
        none = one.count() == there and (one.why == MISSING or one.choices > 1)
        most = one.why == CLIPPED and 2 * one.count() > there
        stops = (one.mends and many) or (one.used and (none or most))
        return one.words(advice=True) if stops else ""

    @property
    def many(self) -> str:
        """Which split has more than twice the declared records, beyond chance; empty where none has."""
        found = (s for s in self.splits if s.declared >= _SOME and s.usable > 2 * s.declared)
        return next(map(self._few, found), "")

    def _few(self, split: SplitCheck) -> str:
        """Say how many records of a split can be used, how many are declared, and why."""
        of = f" of split {split.split}" if split.split in SPLITS else ""
        clumped = f"; {self.clumped}" if of and self.clumped else ""
        return (
            f"{split.usable:,} {self.what}s{of} can be used, and {split.declared:,} are declared"
            f"{self._worst(split)}{clumped}"
        )

    def _worst(self, split: SplitCheck) -> str:
        """Say why most of the unusable records of a split cannot be used."""
        unusable = [one for one in self.findings if not one.used and one.count(split.split)]
        worst = max(unusable, key=lambda one: one.count(split.split), default=None)
        return "" if worst is None else f": {worst.words(split.split, advice=True)}"

    def lines(self) -> list[str]:
        """Return all of it for the curator to read, a line each."""
        found = []
        for split in self.splits:
            found.append(
                f"{split.split}: {split.usable:,} usable {self.what}s, {split.declared:,} declared; "
                f"{split.unusable:,} of {split.rows:,} rows cannot be used"
            )
            there = [one for one in self.findings if one.count(split.split)]
            there.sort(key=lambda one: (one.used, -one.count(split.split)))
            found += [f"  {one.words(split.split)}" for one in there]
        return found + ([self.clumped] if self.clumped else [])

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        splits, findings = (list(map(asdict, known)) for known in (self.splits, self.findings))
        return {"stops": self.reason, "splits": splits, "findings": findings}


def _poisson_below(count: int, mean: float) -> float:
    """Return the probability that a Poisson variable of this mean is at most ``count``."""
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1)]
    return sum(map(math.exp, logs))


@dataclass
class _Counted:
    """How often one fault was met: by split, and by what is written."""

    used: bool
    declared: tuple[Any, ...] | str
    records: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    against: int = 0

    def add(self, fault: Fault) -> None:
        """Count what is written."""
        self.declared, self.against = fault.declared, self.against + fault.against
        for value, count in fault.written().items():
            if value in self.seen or len(self.seen) < _KEPT:
                self.seen[value] += count

    @property
    def hint(self) -> str:
        """What the file says and what the spec does."""
        one = isinstance(self.declared, str)
        says = ", ".join(_shown(v) for v, _ in sorted(self.seen.most_common(1 if one else 3)))
        spec = self.declared
        if not isinstance(spec, str):
            more = ", ..." if len(spec) > 3 else ""
            spec = f"declared: {', '.join(repr(str(value)) for value in spec[:3])}{more}"
        return "; ".join(filter(None, (f"such as {says}" if says else "", spec)))


@dataclass
class Tally:
    """Counts faults of records that are read some at a time."""

    declared: Mapping[str, int]  # numbers by split, in order
    what: str = "record"  # that these count
    sealed: bool = True  # they are expectations
    by: str = ""  # what the split of a record goes by: its content, or its id
    classes: Sequence[Any] = ()  # none of a regression
    columns: Mapping[str, Column] = field(default_factory=dict)  # as they are declared
    rows: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], _Counted] = field(default_factory=dict)
    units: dict[str, set[Any]] = field(default_factory=dict)
    seen: set[float] = field(default_factory=set)  # targets of usable records
    inputs: set[bytes] = field(default_factory=set)  # theirs, at most two
    kinds: set[Any] = field(default_factory=set)  # what their splits go by, at most _FEW

    def add(
        self,
        drawn: npt.NDArray[np.int64],
        faults: Iterable[Fault],
        *,
        units: Sequence[Any] | None = None,
        x: Any = None,
        y: Any = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Count some records by the numbers of their splits, with whatever is known of each."""
        faults = [fault for fault in faults if fault.records.any() or fault.against]
        lost = unusable(faults, len(drawn))
        for fault in faults:
            own = self.faults.setdefault(
                (fault.column, fault.why), _Counted(fault.used, fault.declared)
            )
            own.add(fault)
            for number, split in enumerate(self.declared):
                own.records[split] += int((fault.records & (drawn == number)).sum())
        for number, split in enumerate(self.declared):
            here = drawn == number
            self.rows[split] += int(here.sum())
            self.unusable[split] += int((here & lost).sum())
            if units is not None:
                there = self.units.setdefault(split, set())
                there |= {units[place] for place in (here & ~lost).nonzero()[0]}
        self._gather(~lost, x, y, ids)

    def _gather(self, rest: npt.NDArray[np.bool_], x: Any, y: Any, ids: Any) -> None:
        """Collect distinct targets and contents of usable records, up to a limit."""
        if y is not None:
            targets = np.asarray(y)[rest]
            if self.classes or len(self.seen) < 2:
                self.seen |= set(np.unique(targets[np.isfinite(targets)]).tolist())
        for place in rest.nonzero()[0]:
            content = None if x is None else _digest(x[place])
            if content is not None and len(self.inputs) < 2:
                self.inputs.add(content)
            if len(self.kinds) >= _FEW:
                break
            if ids is not None:
                self.kinds.add(ids[place])
            elif content is not None and y is not None:
                self.kinds.add((content, _digest(y[place])))

    def check(self) -> RecordCheck:
        """Return what was counted."""
        unseen = [str(one) for number, one in enumerate(self.classes) if number not in self.seen]
        findings = [
            Finding(
                column,
                why,
                one.used,
                dict(one.records),
                one.hint,
                mends=_mends(self.columns.get(column), why, one.seen),
                often=max(one.seen.values(), default=0),
                choices=0 if isinstance(one.declared, str) else len(one.declared),
            )
            for (column, why), one in self.faults.items()
            if one.records.total() > one.against / (1.0 - _FITS)
        ]
        splits = [
            SplitCheck(
                split,
                declared,
                len(self.units.get(split, ()))
                if self.units
                else self.rows[split] - self.unusable[split],
                self.rows[split],
                self.unusable[split],
            )
            for split, declared in self.declared.items()
        ]
        rows = self.rows.total() - self.unusable.total()
        known = [str(one) for one in self.classes if str(one) not in unseen]
        same = "the inputs" if len(self.inputs) == 1 else ""
        if not self.classes and len(self.seen) == 1:
            same = "the targets"
        clumped = ""
        if self.by and 0 < 2 * len(self.kinds) < min(rows, 2 * _FEW):
            clumped = (
                f"the {rows:,} usable rows have {len(self.kinds):,} different {self.by}s, and equal ones "
                "share a split: declare as id: a column that differs by record, or another key:"
            )
        return RecordCheck(
            tuple(splits),
            tuple(findings),
            self.what,
            self.sealed,
            tuple(unseen),
            alone=known[0] if len(known) == 1 and unseen and rows > 1 else "",
            same=same if rows > 1 else "",
            clumped=clumped,
        )


def _mends(column: Column | None, why: str, seen: Counter[str]) -> str:
    """Say what to write, and where."""
    if not (lines := mending(column, why, seen)) or lines[0].startswith("the file"):
        return "".join(lines)
    return f"{' or '.join(lines)} in {_PLACES.get(why, 'task, or in its column')}"


def _digest(values: Any) -> bytes:
    same = np.ascontiguousarray(values) + 0  # no -0.0
    return hashlib.blake2b(same.tobytes(), digest_size=16).digest()


def _shown(value: str) -> str:
    if value == UNREADABLE:
        return "a line that cannot be read"
    if re.fullmatch(r"-?\d+e-\d+", value):  # as numbers are kept
        return repr(str(float(value)))
    return repr(value if len(value) <= 40 else f"{value[:37]}...")
