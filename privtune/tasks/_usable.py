"""How many records cannot be used, and why: for the curator, who owns the data, and for nobody else.

A record that is not as declared contributes nothing, and nobody outside is told. Where most are so, a
budget is spent on a training of nothing: so the curator is told before anything is charged. Nothing here
is private in the sense of a guarantee: no count of this module may leave the trust boundary.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from privtune.tasks._cells import coded, is_missing, label_of, missing_of
from privtune.tasks._facts import SPLITS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from privtune.training.mechanism.data import TensorData

MISSING, CLIPPED, OTHER = "missing", "clipped to a bound", "not declared"
NO_NUMBER, LABEL = "not a number", "with a label that is not declared"
"""Why a record is not as declared."""

# While a declared class never occurs, how many records of other labels are no stray ones:
_OFTEN = 0.05  # of all records
_RECURS = 3  # of one and the same label
_CHANCE = 1e-6  # that a split of a keyed hash has so few records by chance
_MANY = 1000
_ALIKE = 0.1  # of distinct records of a split, more than this share is not among others by chance
_ROWS = 256  # records whose bytes are made at once
_SOME = 100  # declared, above which a keyed hash gives a split twice as many by a chance of e^-38
_SAYS = "the file says "
_KEPT = 50  # different values of a column that are not as declared, for an example
_FEW = 1000  # different contents, above which nobody asks whether equal ones share a split


@dataclass(frozen=True)
class Fault:
    """Which of some records are not as declared, in one column and in one way.

    Args:
        column: The column; empty where it is the whole record.
        why: What is wrong, in words.
        records: True for each such record, shape ``[N]``.
        used: Whether the record counts all the same: its value was clipped, or filled.
        declared: What the column may hold, in words.
        values: What such records hold, one for each of them; empty where that is not known.
    """

    column: str
    why: str
    records: npt.NDArray[np.bool_]
    used: bool = False
    declared: tuple[Any, ...] | str = ""
    values: Sequence[Any] = ()


def fault_of(
    name: str,
    why: str,
    mask: npt.NDArray[np.bool_],
    cells: Sequence[Any],
    *,
    used: bool = False,
    declared: Any = "",
) -> Fault:
    """Return a fault of some cells, with what they hold."""
    held = [cells[int(place)] for place in mask.nonzero()[0]]
    return Fault(name, why, mask, used, declared, [cell for cell in held if not is_missing(cell)])


def label_faults(
    name: str, cells: Sequence[Any], classes: Sequence[Any], *, without: str
) -> tuple[Fault, Fault]:
    """Return two faults: labels that are missing, and labels that are no declared class.

    Args:
        name: The column.
        cells: Its labels. A declared class is a label also where it is a word for nothing, such as none.
        classes: The declared classes.
        without: What a missing label is called.
    """
    other, missing = coded(cells, classes) < 0, missing_of(cells)
    return (
        fault_of(name, without, other & missing, cells),
        fault_of(name, LABEL, other & ~missing, cells, declared=classes),
    )


@dataclass(frozen=True)
class Finding:
    """How many records of a split are not as declared, in one column and in one way.

    Args:
        column: The column; empty where it is the whole record.
        why: What is wrong, in words.
        records: How many.
        used: Whether they count all the same.
        hint: What the file says, and the spec.
        misspelt: How many of all splits are a declared value but for case and blanks; of labels, one that
            is never written as declared.
        often: How many of all splits have the commonest of the values.
        choices: How many values are declared; 0 where none are listed.
    """

    column: str
    why: str
    records: int
    used: bool
    hint: str = ""
    misspelt: int = 0
    often: int = 0
    choices: int = 0

    @property
    def words(self) -> str:
        """The finding in one line."""
        where = f"{self.column}: " if self.column else ""
        hint = f" ({self.hint})" if self.hint else ""
        used = ", used all the same" if self.used else ""
        return f"{where}{self.records:,} {self.why}{used}{hint}"


@dataclass(frozen=True)
class SplitCheck:
    """What one split holds.

    Args:
        split: Its name; ``all splits`` where the place of a record is not known yet.
        declared: The declared number of records.
        usable: How many can be used: rows, or units where rows are grouped.
        rows: How many rows there are.
        unusable: How many rows contribute nothing.
        findings: Why, and what else is not as declared.
        sealed: Whether the declared number is an expectation.
    """

    split: str
    declared: int
    usable: int
    rows: int
    unusable: int
    findings: tuple[Finding, ...] = ()
    sealed: bool = True

    @property
    def too_few(self) -> bool:
        """Whether fewer than half of the declared records can be used, and not by the chance of a hash.

        A split without any is too few by whatever chance: nothing can be trained or chosen on it.
        """
        if self.usable == 0:
            return True
        if 2 * self.usable >= self.declared:
            return False
        many = self.declared >= _MANY  # Chernoff: fewer than half of them by chance of e^-125
        return not self.sealed or many or _poisson_below(self.usable, self.declared) < _CHANCE

    @property
    def too_many(self) -> bool:
        """Whether more than twice the declared records are there, and not by the chance of a hash.

        Rates and averages rest on the declared number: a sample then holds far more than was meant.
        """
        return self.declared >= _SOME and self.usable > 2 * self.declared

    @property
    def worst(self) -> str:
        """Why most of the unusable records cannot be used."""
        lost = [one for one in self.findings if not one.used]
        return f": {max(lost, key=lambda one: one.records).words}" if lost else ""


@dataclass(frozen=True)
class RecordCheck:
    """What the records of a task are, beside what is declared. For the curator alone.

    Args:
        splits: Its splits.
        what: What the declared numbers count: records, or a unit.
        unseen: Declared classes that no usable record has.
        alone: The one declared class that all usable records have, of several.
        same: What is the same of all usable records: the target, or the inputs.
        clumped: Why splits may differ much from what is declared; empty where records differ.
        beside: Why a study of the user's own records stops, beside all this; empty where it does not.
    """

    splits: tuple[SplitCheck, ...]
    what: str = "record"
    unseen: tuple[str, ...] = ()
    alone: str = ""
    same: str = ""
    clumped: str = ""
    beside: str = ""

    @property
    def usable(self) -> int:
        """How many records contribute something, over all splits."""
        return sum(split.usable for split in self.splits)

    @property
    def declared(self) -> int:
        """How many records are declared, over all splits."""
        return sum(split.declared for split in self.splits)

    @property
    def reason(self) -> str:
        """Why a study of these records would spend its budget for nothing; empty where it would not."""
        whole = self._whole
        if self.beside:
            return self.beside
        if 2 * whole.unusable > whole.rows:
            return f"{whole.unusable:,} of {whole.rows:,} records cannot be used{whole.worst}"
        if whole.too_few:
            return self._few(whole)
        for one in whole.findings:
            stray = not (
                one.misspelt
                or one.often >= _RECURS
                or one.records >= _OFTEN * whole.rows
                or self.alone
            )
            if self.unseen and one.why == LABEL and not stray:
                classes = ", ".join(map(repr, self.unseen[:3]))
                return (
                    f"of {whole.rows:,} records, {one.words}, and none has the declared {classes}"
                )
            there = whole.rows - sum(
                other.records
                for other in whole.findings
                if other.column == one.column and other.why in {MISSING, NO_NUMBER} - {one.why}
            )
            # One declared value may be so rare that no record has it; of a list some value occurs.
            none = one.records == there and (one.why == MISSING or one.choices > 1)
            most = 2 * (one.records if one.why == CLIPPED else one.misspelt) > there
            if one.used and (none or most):
                return f"of {whole.rows:,} records, {one.words}"
        if self.alone:
            return (
                f"all usable records have the class {self.alone!r}, and none has {self.unseen[0]!r}"
            )
        if self.same:
            return f"{self.same} of all usable records are the same"
        return next((self._few(split) for split in self.splits if split.too_few), "")

    @property
    def many(self) -> str:
        """Which split has more than twice the declared records; empty where none has."""
        return next((self._few(split) for split in self.splits if split.too_many), "")

    def _few(self, split: SplitCheck) -> str:
        """Say how many records of a split can be used, how many are declared, and why."""
        of = f" of split {split.split}" if split.split in SPLITS else ""
        clumped = f"; {self.clumped}" if of and self.clumped else ""
        return (
            f"{split.usable:,} {self.what}s{of} can be used, and {split.declared:,} are declared"
            f"{split.worst}{clumped}"
        )

    @property
    def _whole(self) -> SplitCheck:
        return _together(self.splits)

    def lines(self) -> list[str]:
        """Return all of it for the curator to read, a line each."""
        found = []
        for split in self.splits:
            found.append(
                f"{split.split}: {split.usable:,} usable {self.what}s, {split.declared:,} declared; "
                f"{split.unusable:,} of {split.rows:,} rows cannot be used"
            )
            found += [f"  {one.words}" for one in split.findings]
        return found + ([self.clumped] if self.clumped else [])

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "stops": self.reason,
            "splits": [
                {
                    "split": split.split,
                    "declared": split.declared,
                    "usable": split.usable,
                    "rows": split.rows,
                    "unusable": split.unusable,
                    "findings": [vars(one) for one in split.findings],
                }
                for split in self.splits
            ],
        }


def _together(splits: Sequence[SplitCheck]) -> SplitCheck:
    """Return all splits as one."""
    found: dict[tuple[str, str, bool], Finding] = {}
    for one in (finding for split in splits for finding in split.findings):
        key = (one.column, one.why, one.used)
        before = found.get(key)
        more = 0 if before is None else before.records
        hint = one.hint if before is None else before.hint or one.hint
        found[key] = replace(one, records=one.records + more, hint=hint)
    return SplitCheck(
        "",
        sum(split.declared for split in splits),
        sum(split.usable for split in splits),
        sum(split.rows for split in splits),
        sum(split.unusable for split in splits),
        tuple(found.values()),
        any(split.sealed for split in splits),
    )


def _poisson_below(count: int, mean: float) -> float:
    """Return the probability that a Poisson variable of this mean is at most ``count``."""
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1)]
    return sum(map(math.exp, logs))


@dataclass
class Tally:
    """Counts faults of records that are read some at a time.

    Args:
        declared: The declared numbers by split, in order.
        what: What these count.
        sealed: Whether the declared numbers are expectations.
        by: What the split of a record goes by: its content, or its id.
        classes: The declared ones; none of a regression.
    """

    declared: Mapping[str, int]
    what: str = "record"
    sealed: bool = True
    by: str = ""
    classes: Sequence[Any] = ()
    rows: Counter[str] = field(default_factory=Counter)
    unusable: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[str, str, str, bool]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], Counter[Any]] = field(default_factory=dict)
    allowed: dict[tuple[str, str], Any] = field(default_factory=dict)
    units: dict[str, set[Any]] = field(default_factory=dict)
    misspelt: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
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
        """Count some records.

        Args:
            drawn: The number of the split of each.
            faults: What is not as declared of them.
            units: Whose each is, where rows are grouped.
            x: Their inputs, where these are known.
            y: Their targets: the number of a class, or a number.
            ids: What they are known by; their content where it is None.
        """
        import numpy as np

        lost = np.zeros(len(drawn), dtype=bool)
        for fault in faults:
            if not fault.records.any():
                continue
            lost |= fault.records if not fault.used else False
            key = (fault.column, fault.why)
            self.allowed[key] = fault.declared
            seen = self.examples.setdefault(key, Counter())
            written = Counter(map(_written, fault.values))
            for value, count in written.items():
                if value in seen or len(seen) < _KEPT:
                    seen[value] += count
            self.misspelt.setdefault(key, Counter()).update(_misspelt(written, fault.declared))
            for number, split in enumerate(self.declared):
                if count := int((fault.records & (drawn == number)).sum()):
                    self.counts[split, fault.column, fault.why, fault.used] += count
        for number, split in enumerate(self.declared):
            own = drawn == number
            self.rows[split] += int(own.sum())
            self.unusable[split] += int((own & lost).sum())
            if units is not None:
                there = self.units.setdefault(split, set())
                there |= {units[place] for place in (own & ~lost).nonzero()[0]}
        self._gather(~lost, x, y, ids)

    def _gather(self, rest: npt.NDArray[np.bool_], x: Any, y: Any, ids: Any) -> None:
        """Collect distinct targets and contents of usable records, up to a limit."""
        import numpy as np

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
        hints = {}
        for key, seen in self.examples.items():
            spelt = self.misspelt[key]
            if key[1] == LABEL:
                spelt = Counter({value: count for value, count in spelt.items() if value in unseen})
            allowed, often = self.allowed[key], max(seen.values(), default=0)
            choices = 0 if isinstance(allowed, str) else len(allowed)
            hint = _hint(seen, allowed, spelt.total())
            hints[key] = (hint, spelt.total(), often, choices)
        splits = []
        for split, declared in self.declared.items():
            found = [
                Finding(column, why, count, used, *hints[column, why])
                for (at, column, why, used), count in self.counts.items()
                if at == split
            ]
            found.sort(key=lambda one: (one.used, -one.records))
            rows = self.rows[split]
            usable = len(self.units.get(split, ())) if self.units else rows - self.unusable[split]
            splits.append(
                SplitCheck(
                    split, declared, usable, rows, self.unusable[split], tuple(found), self.sealed
                )
            )
        rows = sum(self.rows.values()) - sum(self.unusable.values())
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
            self.what,
            tuple(unseen),
            alone=known[0] if len(known) == 1 and unseen and rows > 1 else "",
            same=same if rows > 1 else "",
            clumped=clumped,
        )


def _digest(values: Any) -> bytes:
    import numpy as np

    same = np.ascontiguousarray(values) + 0  # no -0.0
    return hashlib.blake2b(same.tobytes(), digest_size=16).digest()


def _misspelt(written: Counter[str], declared: Any) -> Counter[str]:
    """Return by declared value how often it is written in another case, or with blanks."""
    if isinstance(declared, str):
        return Counter()
    alike = {_folded(value): str(value) for value in declared}
    found: Counter[str] = Counter()
    for value, count in written.items():
        if (meant := alike.get(_folded(value))) is not None:
            found[meant] += count
    return found


def _hint(seen: Counter[str], declared: tuple[Any, ...] | str, misspelt: int) -> str:
    """Return what the file says and what the spec does."""
    if not seen:
        return str(declared) if isinstance(declared, str) else ""
    common = [value for value, _ in seen.most_common(3)]
    if isinstance(declared, str):
        shown = ", ".join(map(_shown, common[:1]))
        return f"such as {shown}{'; ' if declared else ''}{declared}"
    alike = {_folded(value): str(value) for value in declared}
    spelt = next((value for value in seen if misspelt and _folded(value) in alike), None)
    wrong = "" if spelt is None else f"{_SAYS}{spelt!r}, the spec {alike[_folded(spelt)]!r}"
    if wrong and 2 * misspelt > seen.total():
        return wrong
    says = ", ".join(map(_shown, sorted(common)))
    spec = ", ".join(map(repr, map(str, declared[:3]))) + (", ..." if len(declared) > 3 else "")
    also = f"; of {misspelt:,} {wrong}" if wrong else ""
    return f"such as {says}; declared: {spec}{also}"


def _written(value: Any) -> str:
    """Return a value as a file writes it: a column of whole numbers may be read as others."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    return str(int(value)) if whole else str(value)


def _folded(value: Any) -> str:
    """Return a text without case, blanks, format marks and Unicode composition."""
    text = unicodedata.normalize("NFKC", str(label_of(value))).casefold()
    return "".join(one for one in text if not one.isspace() and unicodedata.category(one) != "Cf")


def _shown(value: str) -> str:
    if value == "\0":
        return "a line that cannot be read"
    return repr(value if len(value) <= 40 else f"{value[:37]}...")


def contents(x: Any, y: Any) -> Iterator[bytes]:
    """Yield the bytes of each record, the same whatever types its arrays have."""
    import numpy as np

    for start in range(0, len(y), _ROWS):
        parts = [_numbers(part[start : start + _ROWS]) for part in (x, y)]
        rows = np.concatenate(parts, axis=1, dtype="<f8", casting="unsafe")
        rows += 0.0  # no -0.0
        rows[np.isnan(rows)] = np.nan  # one of its many bit patterns
        for row in rows:
            yield row.tobytes()


def _numbers(part: Any) -> npt.NDArray[Any]:
    import numpy as np

    known = part.cpu() if hasattr(part, "cpu") else part
    if str(getattr(part, "dtype", "")) == "torch.bfloat16":  # numpy has no such
        known = known.float()
    rows = np.asarray(known)
    return rows.reshape(len(rows), -1)


def shared_records(splits: Mapping[str, TensorData]) -> str:
    """Return which split holds training records, too; nothing where none does.

    Args:
        splits: ``train``, and those that were given apart from it.
    """

    def kinds(records: TensorData) -> list[Any]:
        if records.groups is not None:
            return list(records.groups.tolist())
        return [hash(one) for one in contents(records.x, records.y)]

    if len(splits) < 2:
        return ""
    train = splits["train"]
    known = kinds(train)
    distinct = set(known)
    if train.groups is None and len(distinct) < 0.99 * len(known):
        return ""  # few values are possible: equal records are different persons'
    for name, records in splits.items():
        own = set(kinds(records))
        there = len(own & distinct)
        if name != "train" and there > (
            0 if train.groups is not None else max(3, _ALIKE * len(own))
        ):
            what = records.unit or "record"
            return f"{there:,} {what}s of split {name} are training {what}s, too; set them apart"
    return ""
