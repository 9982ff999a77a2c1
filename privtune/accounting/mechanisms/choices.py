"""Entries of what tunes: selections, thresholds, tuning on a subset."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from privtune.accounting.algebra import Event
from privtune.accounting.choices import PrivateSelection, SubsampledTuning, ThresholdSelection
from privtune.accounting.convolution import compose
from privtune.accounting.curves import ORDERS, selection_curve
from privtune.accounting.lower import (
    Outcomes,
    best_of_runs,
    composition,
    first_to_pass,
    sampled,
    split,
)
from privtune.accounting.mechanisms._kinds import Compound
from privtune.accounting.mechanisms.entry import (
    Choice,
    CurveOf,
    E,
    Edges,
    Entry,
    Floats,
    Instances,
    MassOf,
    Pairs,
    TextOf,
    TrainingOf,
    Tuners,
)
from privtune.accounting.pairs import THIN, Pair, thinned, tuner_pair
from privtune.accounting.runs import Geometric
from privtune.accounting.selection import Threshold, Tuner
from privtune.accounting.subsampled import amplified, amplified_curve, split_curve, tabulate

_PROFILE_SIZE = 4096  # lattice points on which the profile of a tuner is tabulated
_THRESHOLD_SIZE = 400


class _Chosen(Compound[E]):
    """Best of K and its kin."""

    one_instance = False
    paired_weight = True
    size: ClassVar[int]

    @abstractmethod
    def choice(self, event: E) -> Choice: ...

    def curve(self, event: E, of: CurveOf) -> Floats:
        selection = self.choice(event).selection
        return selection_curve(of(selection.event), selection.runs)

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair:
        remove, add = pairs.tuners(event, fineness)
        if pairs.gains is not None:
            return pairs.gains.pair(event, remove, add, self.size)
        return tuner_pair(remove, add, self.size)


class _PrivateSelection(_Chosen[PrivateSelection]):
    size = _PROFILE_SIZE

    def choice(self, event: PrivateSelection) -> Choice:
        return Choice(event, threshold=False)

    def tuners(self, event: PrivateSelection, fineness: float, pairs: Pairs) -> Tuners:
        pair = pairs.fine(event.event, fineness)
        remove = Tuner(pair.remove, event.runs)
        return remove, (remove if pair.add is pair.remove else Tuner(pair.add, event.runs))

    def instance(self, event: PrivateSelection, instances: Instances) -> Outcomes:
        delta, scores = instances.delta, instances.scores
        return instances.chosen(
            event.event, lambda base: best_of_runs(base, event.runs, delta, scores=scores)
        )

    def beyond(self, event: PrivateSelection, edges: Edges, of: MassOf) -> float:
        return event.runs.expected_runs * of(event.event)  # K is independent of the data

    def text(self, event: PrivateSelection, of: TextOf) -> str:
        law = ", ".join(f"{k} {v}" for k, v in event.runs.to_dict().items() if k != "law")
        return f"best of K runs, K {event.runs.law.replace('_', ' ')} ({law})"

    def formula(self, event: PrivateSelection, of: TextOf) -> str:
        law = event.runs.to_dict()
        least = "" if event.runs.minimum is None else f", at least {event.runs.minimum}"
        return f"best of K ~ {law['law']}(mean {law['mean']:g}{least}) of [{of(event.event)}]"


class _ThresholdSelection(_Chosen[ThresholdSelection]):
    size = _THRESHOLD_SIZE

    def choice(self, event: ThresholdSelection) -> Choice:
        # Given that some run passed, the first is distributed as the best under "passed or not".
        return Choice(PrivateSelection(event.event, Geometric(1.0 / event.stop)), threshold=True)

    def tuners(self, event: ThresholdSelection, fineness: float, pairs: Pairs) -> Tuners:
        pair = thinned(pairs.fine(event.event, fineness), fineness)
        return Threshold(pair.remove, event.stop), Threshold(pair.add, event.stop)

    def instance(self, event: ThresholdSelection, instances: Instances) -> Outcomes:
        delta = instances.delta
        return instances.chosen(event.event, lambda base: first_to_pass(base, event.stop, delta))

    def beyond(self, event: ThresholdSelection, edges: Edges, of: MassOf) -> float:
        return of(event.event) / event.stop

    def text(self, event: ThresholdSelection, of: TextOf) -> str:
        return f"first run above a threshold, giving up with probability {event.stop:.6g}"

    def formula(self, event: ThresholdSelection, of: TextOf) -> str:
        return f"first past a threshold (γ = {event.stop:.4g}) of [{of(event.event)}]"


class _SubsampledTuning(Compound[SubsampledTuning]):
    replace_one = False
    paired_weight = True

    def curve(self, event: SubsampledTuning, of: CurveOf) -> Floats:
        tuning, training = of(event.tuning), of(event.training)
        if event.variant == 1:
            return split_curve(ORDERS, tuning, training, event.rate)
        return amplified_curve(ORDERS, tuning, event.rate) + training

    def own_pair(self, event: SubsampledTuning, fineness: float, pairs: Pairs) -> Pair:
        tuning, last = pairs.fine(event.tuning, fineness), pairs.fine(event.training, fineness)
        if event.variant == 1:
            first = thinned(tuning, fineness)
            deviations = [pair.remove.deviation for pair in (first, last)]
            deviation = min((d for d in deviations if d > 0.0), default=1.0)
            step = 2.0 * THIN * max(deviation, 1e-4) / fineness
            both = (first.remove, first.add), (last.remove, last.add)
            return Pair(*tabulate(*both, event.rate, step))
        removed, added = amplified(tuning.remove, tuning.add, event.rate, last.remove.step)
        return Pair(compose([(removed, 1), (last.remove, 1)]), compose([(added, 1), (last.add, 1)]))

    def instance(self, event: SubsampledTuning, instances: Instances) -> Outcomes:
        tuning, last = instances.of(event.tuning), instances.of(event.training)
        if event.variant == 1:
            return split(tuning, last, event.rate)
        return composition([(sampled(tuning, event.rate), 1), (last, 1)], instances.asked)

    def beyond(self, event: SubsampledTuning, edges: Edges, of: MassOf) -> float:
        return event.rate * of(event.tuning) + of(event.training)

    def text(self, event: SubsampledTuning, of: TextOf) -> str:
        return f"tuning on a subset at rate {event.rate:.6g}, variant {event.variant}"

    def formula(self, event: SubsampledTuning, of: TextOf) -> str:
        where = "the rest" if event.variant == 1 else "all"
        return (
            f"tune on a part of rate {event.rate:g} [{of(event.tuning)}], "
            f"train on {where} [{of(event.training)}]"
        )

    def training(self, event: SubsampledTuning, of: TrainingOf) -> tuple[int, float] | None:
        return of(event.training)


ENTRIES: dict[type[Event], Entry[Any]] = {
    PrivateSelection: _PrivateSelection(),
    ThresholdSelection: _ThresholdSelection(),
    SubsampledTuning: _SubsampledTuning(),
}
