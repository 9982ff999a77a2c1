"""Stacks that are trained side by side: the same results, one at a time where it must be."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from privtune.training.engine import stacks
from privtune.training.engine import train as engine
from privtune.training.engine.compute import full_float32
from privtune.training.engine.stacks import Memory, divide
from privtune.training.mechanism import clipping, kernel, memory
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, LossOfOutputs, traced
from privtune.training.methods.hyfreedp import HyFreeDP
from tests.training.simple import OneByOne, SimpleDPSGD, blobs, cross_entropy, dropping, fit, mlp

pytestmark = pytest.mark.quick

STEPS = 40  # programs are captured on the way


@pytest.fixture
def cores(monkeypatch):
    """Two threads for torch, and stacks side by side however small."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(stacks, "_TURN_BYTES", 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unwatched(monkeypatch):
    """Losses that note where they run: what they reach is not compared."""
    monkeypatch.setattr(memory, "state_of", lambda *_: {})


@pytest.fixture
def no_pool(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pool of threads")

    monkeypatch.setattr(stacks, "ThreadPoolExecutor", refuse)


def run(method=None, count=8, **options):
    engine._kernels.clear()
    return again(method, count, **options)


def again(method=None, count=8, **options):
    return fit(method or SimpleDPSGD(1.0), count=count, **{"steps": STEPS, **options})


def good(count):
    return [{"learning_rate": 0.5, "max_grad_norm": 1.0}] * count


def in_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize(
    ("method", "model", "candidates"),
    [
        (SimpleDPSGD(1.0), dropping, good(8)),
        (HyFreeDP(1.0, 1.0), mlp, [{}] * 8),
    ],
)
def test_threads_change_no_bit_of_the_same_stacks(cores, method, model, candidates):
    given = {"model": model, "candidates": candidates, "snapshots_at": (3, STEPS - 1)}
    found = [run(method, **given) for _ in range(2)]
    torch.set_num_threads(1)
    apart, whole = run(method, stack=4, **given), run(method, **given)
    for abreast in found:
        assert torch.equal(abreast.params, apart.params)
        assert abreast.transcripts == apart.transcripts == whole.transcripts
        for name, values in apart.report.items():
            assert torch.equal(values, abreast.report[name])
        for one, other in zip(abreast.snapshots, apart.snapshots, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[step], other[step]) for step in one)
    torch.testing.assert_close(apart.params, whole.params, rtol=1e-3, atol=1e-4)


def test_code_of_a_user_stays_in_the_calling_thread(cores, unwatched):
    where = {"model": set(), "step": set(), "loss": set()}
    shares = set()

    def here():
        return threading.current_thread().name.partition("_")[0]

    def model():
        where["model"].add(here())
        return mlp()

    def loss(outputs, targets):
        where["loss"].add(here())
        if here() == "privtune-stack":
            shares.add(torch.get_num_threads())
        return cross_entropy(outputs, targets)

    steps = []

    def on_step(step, report):
        where["step"].add(here())
        steps.append((step, len(report["learning_rate"])))

    run(model=model, loss=loss, on_step=on_step)
    assert where["model"] == where["step"] == {here()}
    assert where["loss"] == {here(), "privtune-stack"}  # it is captured where it is needed
    assert shares == {1}
    assert sorted(steps) == sorted((step, 4) for step in range(STEPS) for _ in range(2))


def test_the_model_itself_runs_in_one_thread_at_a_time(cores, unwatched):
    inside, most = [], []

    def loss(outputs, targets):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return cross_entropy(outputs, targets)

    run(loss=loss)
    assert max(most) == 1


def test_trainings_in_threads_of_a_user_share_no_model(unwatched):
    within, go = threading.Event(), threading.Event()
    stepped = set()

    def loss(outputs, targets):
        if threading.current_thread() in stepped:
            within.set()
            assert go.wait(60)
        return cross_entropy(outputs, targets)

    def on_step(step, report):
        stepped.add(threading.current_thread())

    alone = again(count=2, loss=loss, steps=3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(again, count=2, loss=loss, steps=3, on_step=on_step)
        try:
            assert within.wait(60)
            second = again(count=2, loss=loss, steps=3)
        finally:
            go.set()
        assert torch.equal(first.result().params, alone.params)
    assert torch.equal(second.params, alone.params)


def test_the_setting_for_sums_stands_until_the_last_training_ends():
    flags = torch.backends.cuda.matmul
    flag = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = True
    first, second = full_float32(), full_float32()
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # not the one that began last
        assert not flags.allow_bf16_reduced_precision_reduction
        second.__exit__(None, None, None)
        assert flags.allow_bf16_reduced_precision_reduction
    finally:
        flags.allow_bf16_reduced_precision_reduction = flag


@dataclass(frozen=True)
class Failing(SimpleDPSGD):
    """Fails at the third step of the stack that begins with a learning rate of 9."""

    updates: list[float] = field(default_factory=list)

    def update(self, state, oracle):
        self.updates.append(float(state.learning_rate[0]))
        if self.updates.count(9.0) == 3:
            raise ValueError("the third")
        return super().update(state, oracle)


def all_is_as_before():
    assert not [t for t in threading.enumerate() if t.name.startswith("privtune-stack")]
    assert torch.get_num_threads() == in_new_thread() == 2


def test_an_error_stops_the_others_and_is_raised(cores):
    flag = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    candidates = good(4) + [{"learning_rate": 9.0, "max_grad_norm": 1.0}] * 4
    method = Failing()
    with pytest.raises(ValueError, match="the third"):
        run(method, candidates=candidates, steps=5000)
    assert 0 < method.updates.count(0.5) < 5000
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == flag
    all_is_as_before()


def test_what_threads_change_is_put_back(cores):
    flag = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    drawn = []
    for count in (1, 2):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        run(steps=3)
        drawn.append(torch.get_rng_state())
    assert torch.equal(*drawn)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == flag
    all_is_as_before()


def test_a_model_that_is_taken_record_by_record_uses_no_pool(cores, no_pool, monkeypatch):
    monkeypatch.setattr(kernel, "_said", set())  # a warning comes once a process
    with pytest.warns(FallbackWarning, match="in a pass of its own"):
        run(model=OneByOne, steps=2)


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 3)
    )


def test_threads_follow_the_work_of_a_step():
    data, device = TensorData(*blobs()), torch.device("cpu")

    def of(mebibytes, candidates, *, model=mlp, stack=None, cores=64):
        kernel = engine.choose_kernel(model(), LossOfOutputs(cross_entropy), data, device)
        memory = Memory(0.0, 0.0, int(mebibytes * 2**20), 8, 8)
        return divide(kernel, memory, candidates, stack=stack, cores=cores).threads

    assert of(0.01, 100) == 1  # threads would wait for the interpreter
    assert of(0.25, 64, cores=2) == 2
    assert of(60.0, 8) == 2  # 128 MiB
    assert of(300.0, 8) == 1
    # Convolutions run candidate by candidate: in as many threads as 512 MiB hold.
    assert of(60.0, 16, model=convolutional) == 8
    assert of(60.0, 16, model=convolutional, stack=2) == 2
    assert of(300.0, 16, model=convolutional) == 1


def test_bounds_are_kept_by_thread():
    Flat(torch.ones(2)).sensitivity(2)
    assert clipping._columns.bounds
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lambda: dict(clipping._columns.bounds)).result()


def test_threads_that_end_in_any_order_see_their_own_flag() -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen: dict[str, bool] = {}

    def stands() -> bool:
        return bool(torch.compiler.is_compiling())

    def first() -> None:
        with traced():
            first_in.set()
            assert second_in.wait(10)
            seen["first"] = stands()
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        seen["before"] = stands()
        with traced():
            second_in.set()
            assert first_out.wait(10)
            with traced():
                pass
            seen["second"] = stands()
        seen["after"] = stands()

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {"first": True, "before": False, "second": True, "after": False}
