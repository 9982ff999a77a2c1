"""Objectives of a round that wait for each other in fit, and what each of them must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sqlite3
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import privtune
from privtune.spaces import SearchSpace
from privtune.strategies import Everything, PapernotSteinke, TrialResult
from privtune.study import StudyInterruptedError, _together
from privtune.study._together import can_meet
from privtune.study.failures import ArmStoppedError
from privtune.study.objective import ObjectiveFiles, plan_objective, rehearse
from privtune.training.engine import stacks as stacks_of
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams
from privtune.training.own_loop import stacked
from privtune.training.own_loop.weights import LoopError
from tests.toy import blobs

DATA = blobs().load()
TRAIN, VALIDATION = (DATA.train.x, DATA.train.y), (DATA.validation.x, DATA.validation.y)
LOOP = privtune.DPSGD(records=240, epochs=1, expected_batch_size=24)
SPLIT = privtune.Validation(records=60)
STREAMS = Streams(bytes(32))
TRIALS = 6


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


class Kept:
    """Keeps the digest of a split, as results do."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def put(self, name: str, content: bytes) -> None:
        self._known.setdefault(name, content)

    def get(self, name: str) -> bytes | None:
        return self._known.get(name)


def files(objective: Any, *, method: str = "dpsgd", **options: Any) -> ObjectiveFiles:
    plan = plan_objective(
        PapernotSteinke(mean_runs=3, method=method),
        LOOP,
        SPLIT,
        budget=privtune.Budget(6.0, 1e-5, name="loop"),
        epsilon=6.0,
        sampler=None,
        pruner=None,
    )
    results: Any = Kept()
    return ObjectiveFiles(
        plan=plan,
        secret=bytes(32),
        results=results,
        space=SearchSpace({}),
        objective=objective,
        **options,
    )


def run(trials: ObjectiveFiles, count: int = TRIALS) -> Iterator[TrialResult]:
    assert trials.plan.search is not None
    (training,) = trials.plan.search.trainings
    numbers = range(count)
    secrets = {n: STREAMS.key("trial", n) for n in numbers}
    yield from trials.train(training, {n: {} for n in numbers}, secrets=secrets, scored=True)


def until_error(trials: ObjectiveFiles, count: int) -> tuple[list[int], Exception | None]:
    """Run trials; return which were done, and what the round ended with."""
    done: list[int] = []
    try:
        for result in run(trials, count):
            done.append(result.index)
    except Exception as error:
        return done, error
    return done, None


def waiting() -> int:
    return sum(thread.name == "privtune trial" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not waiting()
    assert not _together._TURN.locked()


class Numbered(privtune.Trial):
    """A trial that tells its position, so that tests can say which is which."""

    number = 0

    def __init__(self, *args: Any, number: int, **rest: Any) -> None:
        super().__init__(*args, number=number, **rest)
        self.number = number


@pytest.fixture(autouse=True)
def _trials_tell_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privtune.study.objective.Trial", Numbered)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many loops each stack trained."""
    sizes: list[int] = []
    before = stacked._Stack.train

    def train(self: Any) -> Any:
        sizes.append(len(self._loops))
        return before(self)

    monkeypatch.setattr(stacked._Stack, "train", train)
    return sizes


def small(trial: privtune.Trial, width: int = 8) -> float:
    rate = trial.suggest_float("rate", 0.1, 1.0, log=True)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    if trial.suggest_categorical("adam", [True, False]):
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), rate / 10)
    else:
        decay = trial.suggest_float("decay", 1e-4, 1e-2, log=True)
        optimizer = torch.optim.SGD(model.parameters(), rate, 0.5, weight_decay=decay)
    norm = trial.suggest_float("norm", 0.5, 2.0)
    private = trial.make_private(model, optimizer, TRAIN, max_grad_norm=norm)
    private.fit(loss_of)
    return trial.score(model, VALIDATION)


def widths(trial: privtune.Trial) -> float:
    return small(trial, 4 + 4 * (trial.number % 2))


def stepping(trial: privtune.Trial) -> float:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trial.make_private(model, None, TRAIN).fit(loss_of)
    return trial.score(model, VALIDATION)


@pytest.mark.parametrize(
    ("objective", "method", "sizes"),
    [(small, "dpsgd", 1), (widths, "dpsgd", 2), (stepping, "hyfreedp", 1)],
)
def test_trials_together_are_what_they_are_one_by_one(
    objective: Any, method: str, sizes: int, stacks: list[int]
) -> None:
    together = {r.index: r for r in run(files(objective, method=method))}
    assert len(stacks) == sizes
    assert sum(stacks) == TRIALS
    alone = {r.index: r for r in run(files(objective, method=method, stack=1))}
    assert len(stacks) == sizes
    assert together.keys() == alone.keys() == set(range(TRIALS))
    for number, one in alone.items():
        other = together[number]
        assert other.params == one.params
        assert other.transcript_digest == one.transcript_digest
        torch.testing.assert_close(other.weights, one.weights, rtol=1e-4, atol=1e-5)
        assert other.score == pytest.approx(one.score, abs=1e-6)
    assert len({r.score for r in alone.values()}) == TRIALS  # of streams of their own


def test_what_a_trial_prints_draws_and_warns_of_is_as_it_left_it(stacks: list[int]) -> None:
    """Globals of the process are each trial's own while it runs, and nobody's afterwards."""
    seen: list[tuple[str, float]] = []

    def objective(trial: privtune.Trial) -> float:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            print("before", trial.number)  # noqa: T201
            rate = trial.suggest_float("rate", 0.1, 1.0)
            model = nn.Sequential(nn.Linear(6, 3))
            optimizer = torch.optim.SGD(model.parameters(), rate)
            private = trial.make_private(model, optimizer, TRAIN)
            torch.manual_seed(trial.number)
            first = torch.rand(()).item()
            private.fit(loss_of)
            print("after", trial.number)  # noqa: T201
            with pytest.raises(UserWarning):
                warnings.warn("an error in here", UserWarning, stacklevel=1)
            seen.append((said.getvalue(), first + torch.rand(()).item()))
        return trial.score(model, VALIDATION)

    stdout, filters, state = sys.stdout, list(warnings.filters), torch.get_rng_state()
    found = list(run(files(objective), 3))
    assert [r.index for r in found] == [0, 1, 2]
    assert stacks == [3]
    for number, (said, drawn) in enumerate(seen):
        generator = torch.Generator().manual_seed(number)
        expected = torch.rand((), generator=generator) + torch.rand((), generator=generator)
        assert said == f"before {number}\nafter {number}\n"
        assert drawn == pytest.approx(float(expected))
    assert sys.stdout is stdout
    assert warnings.filters == filters
    assert torch.equal(torch.get_rng_state(), state)


def test_who_reads_batches_or_calls_between_steps_goes_on_by_itself(stacks: list[int]) -> None:
    order: list[tuple[int, str]] = []

    def objective(trial: privtune.Trial) -> float:
        model = nn.Sequential(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        private = trial.make_private(model, optimizer, TRAIN)
        order.append((trial.number, "begins"))
        if trial.number == 1:
            for batch in private.batches():
                private.step(batch, loss_of)
        elif trial.number == 2:
            private.fit(loss_of, on_step=lambda *_: None)
        else:
            private.fit(loss_of)
        order.append((trial.number, "trained"))
        return trial.score(model, VALIDATION)

    found = list(run(files(objective), 4))
    assert sorted(r.index for r in found) == [0, 1, 2, 3]
    assert stacks == [2]
    begun, trained = "begins", "trained"
    assert order == [
        (0, begun), (1, begun), (1, trained), (2, begun), (2, trained), (3, begun), (0, trained),
        (3, trained),
    ]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after", "once"])
def test_a_failure_stops_that_trial_alone(when: str, stacks: list[int]) -> None:
    """The others go on to their scores; what failed after it had waited is tried by itself once."""
    calls: list[int] = []

    def objective(trial: privtune.Trial) -> float:
        calls.append(trial.number)
        if (trial.number, when) == (2, "before"):
            raise KeyError("typo")
        score = small(trial)
        if trial.number == 2 and (when == "after" or calls.count(2) == 1):
            raise KeyError("typo")
        return score

    found, error = until_error(files(objective), 4)
    if when == "before":  # as one by one: no second call, and no more trials are begun
        assert isinstance(error, KeyError)
        assert (found, calls, stacks) == ([0, 1], [0, 1, 2], [2])
    elif when == "after":
        assert isinstance(error, KeyError)
        assert (found, calls, stacks) == ([0, 1, 3], [0, 1, 2, 3, 2], [4])
    else:  # another trial may have been what it failed of
        assert (found, calls, error) == ([0, 1, 2, 3], [0, 1, 2, 3, 2], None)


def test_a_trial_that_waited_while_no_other_ran_is_not_tried_again() -> None:
    calls: list[int] = []

    def objective(trial: privtune.Trial) -> float:
        calls.append(trial.number)
        if trial.number == 0:
            return reading(trial)
        small(trial)
        raise KeyError("typo")

    found, error = until_error(files(objective), 2)
    assert isinstance(error, KeyError)
    assert (found, calls) == ([0], [0, 1])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_ends_the_round_and_is_not_tried_again(error: Any) -> None:
    calls: list[int] = []

    def objective(trial: privtune.Trial) -> float:
        calls.append(trial.number)
        score = small(trial)
        if trial.number == 1:
            raise error
        return score

    done: list[int] = []
    with pytest.raises(error):
        done += (r.index for r in run(files(objective), 3))
    assert calls == [0, 1, 2]


def test_trials_that_share_an_object_are_run_again_by_themselves() -> None:
    """A model that is kept outside of the function is another trial's by the time of the score."""
    kept: dict[str, nn.Module] = {}

    def objective(trial: privtune.Trial) -> float:
        kept["model"] = nn.Sequential(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(kept["model"].parameters(), trial.suggest_float("r", 0.1, 1.0))
        trial.make_private(kept["model"], optimizer, TRAIN).fit(loss_of)
        return trial.score(kept["model"], VALIDATION)

    together = {r.index: r.weights for r in run(files(objective), 3)}
    alone = {r.index: r.weights for r in run(files(objective, stack=1), 3)}
    for number, weights in alone.items():
        torch.testing.assert_close(together[number], weights, rtol=1e-4, atol=1e-5)
    assert rehearse(objective, files(objective).plan).stack == 1  # so a study does not even begin


def reading(trial: privtune.Trial) -> float:
    """An objective that reads its batches, and so never waits."""
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    private = trial.make_private(model, optimizer, TRAIN)
    for batch in private.batches():
        private.step(batch, loss_of)
    return trial.score(model, VALIDATION)


def handling(trial: privtune.Trial) -> float:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    score = small(trial)
    signal.signal(signal.SIGUSR1, before)
    return score


CONNECTION: list[sqlite3.Connection] = []


def connected(trial: privtune.Trial) -> float:
    """Uses a connection that whoever called it first has opened, after ``fit``."""
    if not CONNECTION:
        CONNECTION.append(sqlite3.connect(":memory:"))
    score = small(trial)
    CONNECTION[0].execute("select 1")
    return score


def looping(trial: privtune.Trial) -> float:
    """Asks for the event loop that only the main thread is given."""
    loop = LOOP_OF_MAIN[0]
    if threading.current_thread() is threading.main_thread():
        asyncio.set_event_loop(loop)
    asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
    return small(trial)


LOOP_OF_MAIN: list[asyncio.AbstractEventLoop] = []
LOCK = threading.Lock()


def locking(trial: privtune.Trial) -> float:
    with LOCK:
        return small(trial)


def exclusive(trial: privtune.Trial) -> float:
    """Holds a database while it waits, so that the next trial fails before it waits."""
    with contextlib.closing(sqlite3.connect(DATABASE[0], timeout=0.0)) as connection:
        connection.execute("begin immediate")
        return small(trial)


DATABASE: list[str] = []


@pytest.mark.parametrize("objective", [handling, connected, looping, locking, exclusive, reading])
def test_what_must_not_meet_is_found_in_the_rehearsal_and_run_where_the_round_runs(
    objective: Any, storage: str, tmp_path: Any, stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_together, "_PATIENCE", 0.1)
    monkeypatch.setitem(globals(), "CONNECTION", [])
    monkeypatch.setitem(globals(), "DATABASE", [str(tmp_path / "own.db")])
    monkeypatch.setitem(globals(), "LOOP_OF_MAIN", [asyncio.new_event_loop()])
    main: list[bool] = []

    def watched(trial: privtune.Trial) -> float:
        if not trial._rehearsal:
            main.append(threading.current_thread() is threading.main_thread())
        score: float = objective(trial)
        return score

    state = torch.get_rng_state()
    release = rounds(storage, "bound").optimize(
        watched, strategy=PapernotSteinke(mean_runs=8), training=LOOP, validation=SPLIT
    )
    asyncio.set_event_loop(None)
    LOOP_OF_MAIN[0].close()
    assert not release.is_nothing
    assert len(main) > 1
    assert all(main)
    assert stacks == []
    assert torch.equal(torch.get_rng_state(), state)


def test_an_objective_that_may_meet_is_rehearsed_so_and_any_other_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, bool]] = []

    def watched(trial: privtune.Trial, objective: Any) -> float:
        main = threading.current_thread() is threading.main_thread()
        calls.append(("called", main))
        try:
            score: float = objective(trial)
        finally:
            calls.append(("left", main))
        return score

    plan = files(small).plan
    assert rehearse(partial(watched, objective=small), plan).stack == "auto"
    one, two, left = [("called", True), ("left", True)], ("called", False), ("left", False)
    assert calls == [*one, two, two, left, left]
    for options, objective in (({"stack": 1}, small), ({}, reading)):
        calls.clear()
        assert rehearse(partial(watched, objective=objective), plan, **options).stack == 1
        assert calls == one
    calls.clear()  # two models do not fit beside each other: no third and fourth are made
    monkeypatch.setattr(stacks_of, "STACK_BYTES", 1000)
    assert rehearse(partial(watched, objective=small), plan).stack == 1
    assert calls == one


def test_an_interrupt_of_a_rehearsal_that_meets_is_no_answer() -> None:
    def objective(trial: privtune.Trial) -> float:
        if threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt
        return small(trial)

    with pytest.raises(KeyboardInterrupt):
        rehearse(objective, files(small).plan)


def test_a_users_mistake_is_raised_where_it_was_made_and_once() -> None:
    calls: list[int] = []

    def objective(trial: privtune.Trial) -> float:
        calls.append(trial.number)
        small(trial)
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo") as found:
        rehearse(objective, files(small).plan)
    assert calls == [0]
    assert "This was a rehearsal" in found.value.__notes__[0]


def test_a_trial_that_goes_on_after_fit_has_failed_draws_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stack has drawn its samples and noise: another run of them would be about other weights."""
    before, said = stacked._Stack._steps, []

    def steps(self: Any) -> Iterator[int]:
        for step in before(self):
            if step == 3:
                raise RuntimeError("in mid stack")
            yield step

    def objective(trial: privtune.Trial) -> float:
        model = nn.Sequential(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        private = trial.make_private(model, optimizer, TRAIN)
        try:
            private.fit(loss_of)
        except RuntimeError:
            with pytest.raises(LoopError, match="not drawn again") as found:
                private.fit(loss_of)
            said.append(str(found.value))
        return trial.score(model, VALIDATION)

    alone = {r.index: r.weights for r in run(files(objective, stack=1), 3)}
    monkeypatch.setattr(stacked._Stack, "_steps", steps)
    together = {r.index: r.weights for r in run(files(objective), 3)}
    assert len(said) == 3
    for number, weights in alone.items():
        assert torch.equal(together[number], weights)  # each was run again by itself


def test_what_a_trial_does_to_its_thread_or_to_torch_stays_its_own(stacks: list[int]) -> None:
    """Modes of torch's, context variables, the default type: set in one trial, unseen in the next."""
    seen: dict[int, tuple[Any, ...]] = {}

    def objective(trial: privtune.Trial) -> float:
        now = torch.is_grad_enabled(), torch.get_default_dtype(), VARIABLE.get()
        VARIABLE.set(trial.number)
        model = nn.Sequential(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        private = trial.make_private(model, optimizer, TRAIN)
        if trial.number == 1:
            torch.set_default_dtype(torch.float64)  # another pass, perhaps: this one goes by itself
        private.fit(loss_of)
        seen[trial.number] = *now, torch.get_default_dtype(), VARIABLE.get()
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)  # left so: this thread ends
        return trial.score(model, VALIDATION)

    assert len(list(run(files(objective), 4))) == 4
    assert stacks == [3]
    narrow, wide = torch.float32, torch.float64
    assert seen == {n: (True, narrow, -1, wide if n == 1 else narrow, n) for n in range(4)}
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == narrow
    assert VARIABLE.get() == -1


VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=-1)


def test_a_round_within_a_trial_runs_by_itself(stacks: list[int]) -> None:
    """A study that an objective opens meets nobody: the threads are its trial's round's."""
    inner: list[list[TrialResult]] = []

    def objective(trial: privtune.Trial) -> float:
        if trial.number < 2:
            inner.append(list(run(files(small), 2)))
        return small(trial)

    assert sorted(r.index for r in run(files(objective), 3)) == [0, 1, 2]
    assert stacks == [3]
    alone = [r.weights for r in run(files(small, stack=1), 2)]
    assert all(torch.equal(r.weights, alone[r.index]) for results in inner for r in results)


def test_a_study_within_a_rehearsal_does_not_wait_for_it() -> None:
    assert can_meet(lambda: None)
    with GLOBAL_GENERATOR:  # as a rehearsal holds it, which the threads of another would wait for
        assert not can_meet(lambda: None)


TEMPERATURE = 1.0


def hot_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x) / TEMPERATURE, y, reduction="none")


def test_a_global_that_trials_write_is_each_trials_own_all_the_same(stacks: list[int]) -> None:
    def objective(trial: privtune.Trial) -> float:
        global TEMPERATURE  # noqa: PLW0603 - as careless as users are
        TEMPERATURE = trial.suggest_float("temperature", 0.5, 2.0)
        model = nn.Sequential(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        trial.make_private(model, optimizer, TRAIN).fit(hot_loss)
        return trial.score(model, VALIDATION)

    together = {r.index: r.weights for r in run(files(objective), 3)}
    assert stacks == []
    alone = {r.index: r.weights for r in run(files(objective, stack=1), 3)}
    for number, weights in alone.items():
        assert torch.equal(together[number], weights)


def test_the_deadline_lets_those_that_began_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("privtune.study.objective.time", clock)

    def objective(trial: privtune.Trial) -> float:
        now[0] += 1.0
        return small(trial)

    found, error = until_error(files(objective, deadline=2.5), 5)
    assert isinstance(error, StudyInterruptedError)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("where", ["start", "stack", "score"])
def test_an_interrupt_ends_every_thread(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def objective(trial: privtune.Trial) -> float:
        try:
            if (trial.number, where) == (2, "start"):
                raise KeyboardInterrupt
            score = small(trial)
            if (trial.number, where) == (1, "score"):
                raise KeyboardInterrupt
            return score
        finally:
            ended.append(trial.number)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    if where == "stack":
        monkeypatch.setattr(stacked._Stack, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run(files(objective), 4))
    assert sorted(ended) == ([0, 1, 2] if where == "start" else [0, 1, 2, 3])


def test_whoever_waits_for_a_running_trial_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the main thread, which waits; the objective that runs must hear of it."""
    started, ended = threading.Event(), threading.Event()

    def objective(_: privtune.Trial) -> float:
        started.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    before = _together._Seat.go_on

    def go_on(seat: Any) -> None:
        class Interrupted:
            def acquire(self) -> None:
                started.wait()
                raise KeyboardInterrupt

            def release(self) -> None:
                pass

        seat._back = Interrupted()
        before(seat)

    monkeypatch.setattr(_together._Seat, "go_on", go_on)
    with pytest.raises(KeyboardInterrupt):
        list(run(files(objective), 2))
    assert ended.is_set()


def test_who_leaves_the_round_early_leaves_no_thread() -> None:
    results = run(files(small), 4)
    next(results)
    assert waiting() == 3
    results.close()


def test_what_waits_holds_no_more_memory_than_a_stack_may(
    monkeypatch: pytest.MonkeyPatch, stacks: list[int]
) -> None:
    monkeypatch.setattr(stacked, "held_bytes", lambda offers: len(offers) * 50 * 2**20)
    assert sorted(r.index for r in run(files(small), 6)) == list(range(6))
    assert stacks == [3, 3]


def test_shown_trials_and_stack_1_run_one_by_one(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked, "train_stack", lambda _: pytest.fail("a stack"))
    budget = privtune.Budget(6.0, 1e-5, name="loop")
    study = privtune.create_study("loop", budget=budget, storage=storage, stack=1, seed=3)
    terms: dict[str, Any] = {"training": LOOP, "validation": SPLIT}
    study.optimize(small, strategy=PapernotSteinke(mean_runs=4), epsilon=3.0, **terms)
    shown = Everything(trials=2, sampler="random")
    assert len(study.optimize(small, strategy=shown, epsilon=2.0, **terms).trials) == 2


def rounds(storage: str, name: str, **options: Any) -> privtune.Study:
    budget = privtune.Budget(6.0, 1e-5, name=name)
    return privtune.create_study(name, budget=budget, storage=storage, seed=3, **options)


def test_a_round_of_a_study_is_stacked_and_releases_what_it_would_one_by_one(
    storage: str, stacks: list[int]
) -> None:
    terms: dict[str, Any] = {"training": LOOP, "validation": SPLIT}
    strategy = PapernotSteinke(mean_runs=8)
    one = rounds(storage, "stacked").optimize(small, strategy=strategy, **terms)
    assert max(stacks) > 1
    other = rounds(storage, "alone", stack=1).optimize(small, strategy=strategy, **terms)
    assert one.params == other.params
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)


def test_a_failure_in_a_stack_stops_the_arm_which_goes_on_after_the_mend(storage: str) -> None:
    broken, terms = [True], {"training": LOOP, "validation": SPLIT}

    def flaky(trial: privtune.Trial) -> float:
        score = small(trial)
        if broken[0] and not trial._rehearsal and trial.params["rate"] > 0.2:
            raise KeyError("typo")
        return score

    study, strategy = rounds(storage, "flaky"), PapernotSteinke(mean_runs=8)
    with pytest.raises(ArmStoppedError, match="nothing was released"):
        study.optimize(flaky, strategy=strategy, epsilon=5.0, **terms)  # type: ignore[arg-type]
    broken[0] = False
    release = study.optimize(flaky, strategy=strategy, epsilon=5.0, **terms)  # type: ignore[arg-type]
    assert not release.is_nothing
