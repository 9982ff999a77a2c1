"""Functions that use what they kept, from whatever call on: no training and no score ends with them."""

from __future__ import annotations

import functools
import itertools
import os
import random
import types
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from privtune.errors import InvalidInputError
from privtune.strategies import ScorePlan
from privtune.tasks.records import read_records
from privtune.training.engine.train import TrainableCandidate, Training
from privtune.training.mechanism import memory
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.memory import RecordMemoryError, state_of
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.scoring import LossOfRecords, score
from privtune.training.methods import FixedDPSGD

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _nothing_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a new process would: counters of this module are filled by several."""
    monkeypatch.setattr(memory, "_FILLED", {})


RECORDS, STEPS = 20, 13
T = torch.Tensor
Tick = Callable[[], int]
"""Counts its calls: it returns 1, 2, 3 and so on."""


# Where a number of calls may be kept.

CALLS = 0
TABLE: dict[str, int] = {"calls": 0}
CONTEXT: ContextVar[int] = ContextVar("calls", default=0)


def in_a_global(folder: Path) -> Tick:
    globals()["CALLS"] = 0

    def tick() -> int:
        global CALLS  # noqa: PLW0603 - what is tested
        CALLS += 1
        return CALLS

    return tick


def in_a_global_table(folder: Path) -> Tick:
    TABLE["calls"] = 0

    def tick() -> int:
        TABLE["calls"] += 1
        return TABLE["calls"]

    return tick


def in_a_closure(folder: Path) -> Tick:
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick


def in_a_list(folder: Path) -> Tick:
    calls: list[None] = []

    def tick() -> int:
        calls.append(None)
        return len(calls)

    return tick


def in_a_deque(folder: Path) -> Tick:
    calls = deque([0], maxlen=1)

    def tick() -> int:
        calls.append(calls[0] + 1)
        return calls[0]

    return tick


def in_a_set(folder: Path) -> Tick:
    calls: set[int] = set()

    def tick() -> int:
        calls.add(len(calls))
        return len(calls)

    return tick


def in_an_attribute_of_a_function(folder: Path) -> Tick:
    def tick() -> int:
        tick.calls += 1  # type: ignore[attr-defined]
        return tick.calls  # type: ignore[attr-defined, no-any-return]

    tick.calls = 0  # type: ignore[attr-defined]
    return tick


def in_a_default(folder: Path) -> Tick:
    def tick(calls: list[int] = [0]) -> int:  # noqa: B006 - what is tested
        calls[0] += 1
        return calls[0]

    return tick


def in_a_class(folder: Path) -> Tick:
    class Meter:
        calls = 0

    def tick() -> int:
        Meter.calls += 1
        return Meter.calls

    return tick


def in_an_object(folder: Path) -> Tick:
    class Meter:
        def __init__(self) -> None:
            self.calls = 0

        def tick(self) -> int:
            self.calls += 1
            return self.calls

    return Meter().tick


def in_slots(folder: Path) -> Tick:
    class Meter:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

    meter = Meter()

    def tick() -> int:
        meter.calls += 1
        return meter.calls

    return tick


def in_a_namespace(folder: Path) -> Tick:
    state = SimpleNamespace(calls=0)

    def tick() -> int:
        state.calls += 1
        return int(state.calls)

    return tick


def in_a_partial(folder: Path) -> Tick:
    def tick(calls: list[int]) -> int:
        calls[0] += 1
        return calls[0]

    return functools.partial(tick, [0])


def in_a_cache(folder: Path) -> Tick:
    @functools.lru_cache(maxsize=100_000)
    def kept(number: int) -> int:
        return number

    def tick() -> int:
        return kept(kept.cache_info().currsize + 1)

    return tick


def in_a_generator(folder: Path) -> Tick:
    def count() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            yield number

    numbers = count()
    return lambda: next(numbers)


def in_itertools(folder: Path) -> Tick:
    numbers = itertools.count(1)
    return lambda: next(numbers)


def in_an_iterator(folder: Path) -> Tick:
    numbers = iter(list(range(1, 100_000)))
    return lambda: next(numbers)


def in_an_array(folder: Path) -> Tick:
    calls = np.zeros(10_000, dtype=np.int64)

    def tick() -> int:
        calls[0] += 1
        return int(calls[0])

    return tick


def in_a_tensor(folder: Path) -> Tick:
    calls = torch.zeros((), dtype=torch.int64)

    def tick() -> int:
        calls.add_(1)
        return int(calls)

    return tick


def in_a_tensor_that_is_replaced(folder: Path) -> Tick:
    state = {"calls": torch.zeros(3)}

    def tick() -> int:
        state["calls"] = state["calls"] + 1
        return int(state["calls"][0])

    return tick


def in_a_buffer(folder: Path) -> Tick:
    statistics = nn.BatchNorm1d(1, momentum=None)  # counts its batches

    def tick() -> int:
        statistics(torch.zeros(2, 1))
        return int(statistics.num_batches_tracked)

    return tick


def in_a_context(folder: Path) -> Tick:
    CONTEXT.set(0)

    def tick() -> int:
        CONTEXT.set(CONTEXT.get() + 1)
        return CONTEXT.get()

    return tick


def in_random_numbers(folder: Path) -> Tick:
    numbers, calls = random.Random(0), [0]

    def tick() -> int:
        calls[0] += 1
        return calls[0] + int(numbers.random() < 0.02)

    return tick


def in_an_open_file(folder: Path) -> Tick:
    file = (folder / "open.txt").open("a+")

    def tick() -> int:
        file.write("x")
        return file.tell()

    return tick


def in_a_file(folder: Path) -> Tick:
    path = folder / "calls.txt"
    path.write_text("0")

    def tick() -> int:
        calls = int(path.read_text()) + 1
        path.write_text(str(calls))
        return calls

    return tick


def in_the_environment(folder: Path) -> Tick:
    os.environ["PRIVTUNE_TEST_CALLS"] = "0"

    def tick() -> int:
        calls = int(os.environ["PRIVTUNE_TEST_CALLS"]) + 1
        os.environ["PRIVTUNE_TEST_CALLS"] = str(calls)
        return calls

    return tick


REACHED = (
    in_a_global, in_a_global_table, in_a_closure, in_a_list, in_a_deque, in_a_set,
    in_an_attribute_of_a_function, in_a_default, in_a_class, in_an_object, in_slots, in_a_namespace,
    in_a_partial, in_a_cache, in_a_generator, in_itertools, in_an_iterator, in_an_array, in_a_tensor,
    in_a_tensor_that_is_replaced, in_a_buffer, in_a_context, in_random_numbers, in_an_open_file,
)  # fmt: skip
OUTSIDE = (in_a_file, in_the_environment)
"""Where no walk over names leads: what these give is compared alone."""

DELAYS = (1, 30, 200)


# What is trained and scored.


def blobs() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (RECORDS,), generator=generator)
    return TensorData(2.0 * torch.eye(3, 4)[y] + torch.randn(RECORDS, 4, generator=generator), y)


def plain(model: Any, x: T, y: T) -> T:
    return functional.cross_entropy(model(x), y, reduction="none")


def one_by_one(x: T) -> float:
    """Read a value: such records go to Python one after the other."""
    return float(x.detach().sum())


def train(loss: Any, *, model: nn.Module | None = None, steps: int = STEPS, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if model is None else model
    values = {"learning_rate": 0.1, "max_grad_norm": 1.0}
    made = TrainableCandidate(model, bytes(32), values, **options)
    training = Training(FixedDPSGD(0.0), Schedule(RECORDS, 1.0, steps), loss, blobs())
    list(training.of([made]))


def scored(function: Any, records: int = 200) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(records, 4, generator=generator), torch.arange(records) % 3)
    terms = ScorePlan(records, None, metric="cost", options={"bound": 5.0})
    rng = np.random.default_rng(0)
    score(terms, nn.Linear(4, 3), data, rng=rng, loss=LossOfRecords(function))


def late(tick: Tick, delay: int) -> Callable[[], float]:
    """Return a factor that is 1 until so many calls, and hangs on their number from there on."""

    def factor() -> float:
        calls = tick()
        return 1.0 if calls <= delay else 1.0 + 0.01 * calls

    return factor


def with_memory(factor: Callable[[], float]) -> Any:
    def loss(model: Any, x: T, y: T) -> T:
        one_by_one(x)
        return plain(model, x, y) * factor()

    return loss


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("place", [*REACHED, *OUTSIDE], ids=lambda place: place.__name__)
def test_a_loss_that_uses_what_it_kept_ends_no_training(
    place: Callable[[Path], Tick], delay: int, tmp_path: Path
) -> None:
    with pytest.raises(RecordMemoryError, match=r"kept between calls|outlives the call"):
        train(with_memory(late(place(tmp_path), delay)))


@pytest.mark.parametrize("place", REACHED, ids=lambda place: place.__name__)
def test_memory_is_seen_before_it_is_used(place: Callable[[Path], Tick], tmp_path: Path) -> None:
    """A rehearsal of few steps refuses what would act from call 5,000 on."""
    with pytest.raises(RecordMemoryError, match="outlives the call"):
        train(with_memory(late(place(tmp_path), 5_000)), steps=1)


@pytest.mark.parametrize("delay", [*DELAYS, 250])
def test_values_alone_show_a_counter(
    delay: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "state_of", lambda *_: {})
    with pytest.raises(RecordMemoryError, match="kept between calls"):
        train(with_memory(late(in_a_list(tmp_path), delay)))


def test_weights_of_another_model_that_are_written_are_memory() -> None:
    average = nn.Linear(4, 3).requires_grad_(False)

    def loss(model: Any, x: T, y: T) -> T:
        with torch.no_grad():
            average.weight.lerp_(model.weight, 0.01 * one_by_one(x))
        return plain(model, x, y)

    with pytest.raises(RecordMemoryError, match="weight"):
        train(loss, steps=1)


@pytest.mark.slow
def test_a_file_that_counts_to_five_thousand_is_seen(tmp_path: Path) -> None:
    with pytest.raises(RecordMemoryError, match="kept between calls"):
        train(with_memory(late(in_a_file(tmp_path), 5_000)), steps=251)


@pytest.mark.parametrize("delay", DELAYS)
def test_a_running_mean_of_losses_ends_no_training(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "state_of", lambda *_: {})
    kept = {"calls": 0.0, "mean": 0.0}

    def loss(model: Any, x: T, y: T) -> T:
        value = plain(model, x, y)
        kept["calls"] += 1.0
        kept["mean"] += (value.item() - kept["mean"]) / kept["calls"]
        return value if kept["calls"] <= delay else (value - kept["mean"]).square()

    with pytest.raises(RecordMemoryError, match="kept between calls"):
        train(loss)


def with_late_cache(delay: int) -> Any:
    """Return a loss, or a score, that halves what it has met before, once so many calls are over."""
    calls = [0]
    before = set[float]()

    def loss(model: Any, x: T, y: T) -> T:
        key = one_by_one(x)
        calls[0] += 1
        weight = 0.5 if key in before else 1.0
        if calls[0] > delay:
            before.add(key)
        return plain(model, x, y) * weight

    return loss


@pytest.mark.parametrize("delay", DELAYS)
def test_a_cache_of_records_that_begins_late_ends_no_training(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "state_of", lambda *_: {})
    loss = with_late_cache(delay)

    with pytest.raises(RecordMemoryError, match="kept between calls"):
        train(loss)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("place", [in_a_closure, in_a_class, *OUTSIDE], ids=lambda p: p.__name__)
def test_augmentation_that_remembers_ends_no_training(
    place: Callable[[Path], Tick], delay: int, tmp_path: Path
) -> None:
    factor = late(place(tmp_path), delay)

    def augment(x: T) -> T:
        one_by_one(x)
        return x * factor()

    with pytest.raises(RecordMemoryError):
        train(plain, augment=augment, views=2)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("place", [in_a_closure, in_a_class, *OUTSIDE], ids=lambda p: p.__name__)
def test_a_way_back_that_remembers_ends_no_training(
    place: Callable[[Path], Tick], delay: int, tmp_path: Path
) -> None:
    factor = late(place(tmp_path), delay)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: T) -> T:
            return values.clone()

        @staticmethod
        def backward(context: Any, gradient: T) -> T:  # type: ignore[override]
            return gradient * factor()

    def loss(model: Any, x: T, y: T) -> T:
        one_by_one(x)
        return functional.cross_entropy(Scaled.apply(model(x)), y, reduction="none")

    with pytest.raises(RecordMemoryError):
        train(loss)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("place", [in_a_closure, in_a_class, *OUTSIDE], ids=lambda p: p.__name__)
def test_a_model_that_remembers_ends_no_training(
    place: Callable[[Path], Tick], delay: int, tmp_path: Path
) -> None:
    factor = late(place(tmp_path), delay)

    class Net(nn.Linear):
        def forward(self, inputs: T) -> T:
            one_by_one(inputs)
            return super().forward(inputs) * factor()

    with pytest.raises(RecordMemoryError):
        train(plain, model=Net(4, 3))


@pytest.mark.parametrize("delay", [1, 20, 100])
@pytest.mark.parametrize(
    "place", [in_a_global, in_a_closure, in_a_cache, *OUTSIDE], ids=lambda p: p.__name__
)
def test_a_score_that_remembers_scores_nothing(
    place: Callable[[Path], Tick], delay: int, tmp_path: Path
) -> None:
    with pytest.raises(RecordMemoryError, match="The score"):
        scored(with_memory(late(place(tmp_path), delay)))


def test_a_score_that_subtracts_its_mean_is_seen_by_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "state_of", lambda *_: {})
    values: list[float] = []

    def function(model: Any, x: T, y: T) -> T:
        value = plain(model, x, y)
        values.append(value.item())
        return value if len(values) < 150 else value - sum(values) / len(values)

    with pytest.raises(RecordMemoryError, match="kept between calls"):
        scored(function)


@pytest.mark.parametrize("delay", [1, 20, 100])
def test_a_score_with_a_cache_that_begins_late_is_seen_the_second_time(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "state_of", lambda *_: {})
    function = with_late_cache(delay + 10)  # after the first look at made-up records

    with pytest.raises(RecordMemoryError, match="kept between calls"):
        scored(function)


@pytest.mark.parametrize("delay", [5, 40, 150])
@pytest.mark.parametrize("kind", ["mean", "before", "count", "length"])
def test_a_dataset_that_remembers_is_refused(kind: str, delay: int) -> None:
    class Remembering:
        def __init__(self) -> None:
            self.rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
            self.sum, self.reads, self.last = torch.zeros(3), 0, torch.zeros(3)

        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> tuple[T, int]:
            row = self.rows[index]
            self.reads += 1
            self.sum += row
            before, self.last = self.last, row
            if self.reads > delay + 6:  # the first three are read twice before
                if kind == "mean":
                    row = row - self.sum / self.reads
                elif kind == "before":
                    row = 0.5 * (row + before)
                elif kind == "count":
                    row = row * self.reads
                else:
                    row = row[: 2 + self.reads % 2]
            return row, index % 2

    with pytest.raises(InvalidInputError, match="whatever was read before"):
        read_records(Remembering(), field="data")


# What is honest, and runs.


def _masks() -> Any:
    masks: dict[int, T] = {}

    def loss(model: Any, x: T, y: T) -> T:
        if x.shape[1] not in masks:
            masks[x.shape[1]] = torch.ones(x.shape[1])
        return plain(model, x * masks[x.shape[1]], y)

    return loss


def _table() -> Any:
    @functools.lru_cache(maxsize=8)
    def weights(classes: int) -> T:
        return torch.linspace(1.0, 2.0, classes)

    return lambda model, x, y: plain(model, x, y) * weights(3)[y]


def _teacher() -> Any:
    teacher = nn.Linear(4, 3).requires_grad_(False)
    return lambda model, x, y: (model(x) - teacher(x)).square().sum(dim=1)


def _printing() -> Any:
    def loss(model: Any, x: T, y: T) -> T:
        value = plain(model, x, y)
        print(f"{value.item():.3f}")  # noqa: T201 - what is tested
        return value

    return loss


def _drawing() -> Any:
    return lambda model, x, y: plain(model, x + 0.1 * torch.randn_like(x), y)


def _branching() -> Any:
    return lambda model, x, y: plain(model, x, y) * (2.0 if one_by_one(x) > 0.0 else 1.0)


def _raising() -> Any:
    def loss(model: Any, x: T, y: T) -> T:
        if one_by_one(x) > 2.0:
            raise ValueError("an outlier")
        return plain(model, x, y)

    return loss


class Lazy:
    """A loss that makes a part of it at its first call."""

    scale: T | None = None

    def __call__(self, model: Any, x: T, y: T) -> T:
        if self.scale is None:
            self.scale = torch.tensor(2.0)
        return plain(model, x, y) * self.scale


def _object() -> Any:
    return Lazy()


def _copied_model() -> Any:
    """A loss that holds what build made, whose parameters candidates are put into."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return lambda model, x, y: plain(model, x, y) + 0.0 * net(x).sum(dim=1).detach()


def _criterion() -> Any:
    criterion = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)
    return lambda model, x, y: criterion(model(x), y)


HONEST = (
    _masks, _table, _teacher, _printing, _drawing, _branching, _raising, _object, _criterion,
    _copied_model,
)  # fmt: skip


@pytest.mark.parametrize("make", HONEST, ids=lambda make: make.__name__)
def test_honest_losses_and_scores_run(make: Callable[[], Any]) -> None:
    function = make()
    train(function, steps=3)
    scored(function)


def test_the_same_numbers_are_drawn_whether_a_loss_is_checked_or_not() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    check = memory.MemoryCheck("The loss", (), lambda: memory.values_of(
        lambda x, y: [torch.rand(3)], [(torch.zeros(1), torch.zeros(1))]
    ))  # fmt: skip
    with memory.remembering_nothing(check):
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_loss_that_draws_rarely_without_torch_is_refused(draw: Callable[[], float]) -> None:
    """Captured, its pass would have been frozen as it was drawn once."""

    def loss(model: Any, x: T, y: T) -> T:
        return plain(model, x, y) * (2.0 if draw() < 0.02 else 1.0)

    with pytest.raises(RecordMemoryError, match="Draw with torch"):
        train(loss, steps=1)


def test_a_loss_that_draws_rarely_from_its_own_generator_is_refused() -> None:
    numbers = np.random.default_rng(0)

    def loss(model: Any, x: T, y: T) -> T:
        return plain(model, x, y) * (2.0 if numbers.random() < 0.02 else 1.0)

    with pytest.raises(RecordMemoryError, match="numbers"):
        train(loss, steps=1)


def test_a_schedule_by_calls_is_refused_before_it_is_captured(tmp_path: Path) -> None:
    tick = in_a_closure(tmp_path)

    def loss(model: Any, x: T, y: T) -> T:
        return plain(model, x, y) * min(1.0, tick() / 1_000)

    with pytest.raises(RecordMemoryError):
        train(loss, steps=1)


def test_the_state_names_what_changed(tmp_path: Path) -> None:
    history: list[float] = []

    def loss(model: Any, x: T, y: T) -> T:
        history.append(one_by_one(x))
        return plain(model, x, y)

    before = state_of(loss)
    loss(nn.Linear(4, 3), torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))
    after = state_of(loss)
    assert {name for name in after if before.get(name) != after[name]} == {
        "history (its size)", "history[0]",
    }  # fmt: skip


# What is filled by a run stays filled for the next one.


def first_of_each_class() -> tuple[Any, dict[int, T]]:
    """Return a loss that keeps the first record of each class, and what it keeps them in."""
    anchors: dict[int, T] = {}

    def loss(model: Any, x: T, y: T) -> T:
        anchor = anchors.setdefault(int(y), x.detach().clone())
        return plain(model, x, y) + (model(x) - model(anchor)).square().sum(dim=1)

    return loss, anchors


def test_the_same_loss_is_refused_again_after_it_kept_records() -> None:
    loss, _ = first_of_each_class()
    for message in ("outlives the call|kept between calls", "records of an earlier run: restart"):
        with pytest.raises(RecordMemoryError, match=message):
            train(loss)


def test_a_store_that_is_made_anew_may_be_filled_and_refused_again() -> None:
    for _ in range(2):
        loss, _ = first_of_each_class()
        with pytest.raises(RecordMemoryError, match=r"outlives the call|kept between calls"):
            train(loss)


@pytest.mark.parametrize("place", [in_a_global, in_a_global_table, in_a_class, in_an_object])
def test_a_counter_is_refused_again(place: Callable[[Path], Tick], tmp_path: Path) -> None:
    loss = with_memory(late(place(tmp_path), 5_000))
    for message in ("outlives the call", "earlier run"):
        with pytest.raises(RecordMemoryError, match=message):
            train(loss, steps=1)


def test_a_corrected_loss_runs_beside_what_the_earlier_one_kept() -> None:
    history: list[float] = []

    def loss(model: Any, x: T, y: T) -> T:
        history.append(one_by_one(x))
        return plain(model, x, y)

    def corrected(model: Any, x: T, y: T) -> T:
        assert len(history) > 0
        return plain(model, x, y)

    with pytest.raises(RecordMemoryError):
        train(loss, steps=1)
    train(corrected, steps=1)


def test_what_the_check_itself_shows_to_a_loss_counts_as_memory() -> None:
    """The real record that is compared may be the first of its kind."""
    kept: list[float] = []
    rare = one_by_one(blobs().take(torch.tensor([RECORDS // 2]))[0])

    def loss(model: Any, x: T, y: T) -> T:
        is_rare = one_by_one(x) == pytest.approx(rare)
        if is_rare and not kept:
            kept.append(rare)
        # No other record shows by its loss what was kept.
        return plain(model, x, y) * (1.0 + is_rare * sum(kept))

    with pytest.raises(RecordMemoryError, match="changes 'kept'"):
        train(loss)


# Names and stores of many kinds.


class _Private:
    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def write(self) -> None:
        self.__calls += 1


class _Table(dict[str, int]):
    calls = 0


class _Counting(type):
    calls = 0


class _Counted(metaclass=_Counting):
    pass


def _set(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda store: store.__setitem__(key, value)


def _mark(store: Any) -> None:
    store.calls = 1


STORES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "tuple keys": (lambda: {("a", 1): 0, ("b", 1): 0}, _set(("a", 1), 1)),
    "float keys": (lambda: {0.5: 0, 1.5: 0}, _set(0.5, 1)),
    "keys of several kinds": (lambda: {None: 0, b"q": 0}, _set(None, 1)),
    "UserDict": (lambda: UserDict(a=0), _set("a", 1)),
    "UserList": (lambda: UserList([0]), _set(0, 1)),
    "ChainMap": (lambda: ChainMap({"a": 0}), _set("a", 1)),
    "array": (lambda: array("d", [0.0]), _set(0, 1.0)),
    "Namespace": (lambda: Namespace(calls=0), _mark),
    "poly1d": (lambda: np.poly1d([1, 2]), _set(0, 5)),
    "a library's layer": (nn.CrossEntropyLoss, _mark),
    "a tensor's attribute": (lambda: torch.ones(2), _mark),
    "a table's attribute": (_Table, _mark),
    "a private slot": (_Private, _Private.write),
    "a class of classes": (lambda: _Counted, lambda kind: _mark(type(kind))),
    "an optimizer's rate": (
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0),
        lambda optimizer: optimizer.param_groups[0].update(lr=2.0),
    ),
}


@pytest.mark.parametrize("name", STORES)
def test_a_write_to_a_store_changes_the_state(name: str) -> None:
    make, write = STORES[name]
    store = make()

    def loss() -> Any:
        return store

    before = state_of(loss)
    assert state_of(loss) == before
    write(store)
    assert state_of(loss) != before


def test_two_stores_of_one_name_are_two() -> None:
    def counter() -> Callable[[], int]:
        calls = 0

        def tick() -> int:
            nonlocal calls
            calls += 1
            return calls

        return tick

    first, second = counter(), counter()

    def loss(a: list[int] = [0], b: list[int] = [0]) -> Any:  # noqa: B006 - what is tested
        return first, second, a, b

    for write in (first, second, lambda: loss()[2].append(1)):
        before = state_of(loss)
        write()
        assert state_of(loss) != before


def test_a_module_within_a_module_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = types.ModuleType("package_of_mine")
    package.losses = types.ModuleType("package_of_mine.losses")
    package.losses.calls = 0
    monkeypatch.setitem(globals(), "package_of_mine", package)

    def loss() -> Any:
        return package_of_mine.losses.calls  # type: ignore[name-defined]  # noqa: F821

    before = state_of(loss)
    package.losses.calls = 1
    assert state_of(loss) != before


def test_texts_that_raise_stop_no_walk() -> None:
    class Odd(float):
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    class Table(dict[Any, Any]):
        def items(self) -> Any:
            raise RuntimeError("no items")

    odd = {Odd(1.0): Odd(2.0), "table": Table(a=1)}
    calls = [0]

    def loss() -> Any:
        return odd, calls

    before = state_of(loss)
    calls[0] += 1
    assert state_of(loss) != before


def test_a_folder_whose_name_begins_as_a_librarys_is_the_users() -> None:
    for folder in (memory._PRIVTUNE, *memory._LIBRARIES):
        assert not memory._is_users(f"{folder}losses.py")
        if "packages" not in folder:  # which say so by their name
            assert memory._is_users(f"{folder.rstrip(os.sep)}_of_mine{os.sep}losses.py")


def test_a_refusal_shows_no_key_that_a_record_may_have() -> None:
    table = {"a name out of a record": 0}

    def loss(model: Any, x: T, y: T) -> T:
        one_by_one(x)
        table["a name out of a record"] += 1
        return plain(model, x, y)

    with pytest.raises(RecordMemoryError, match="'table'") as refusal:
        train(loss, steps=1)
    assert "record'" not in str(refusal.value)
