"""A training that is stopped anywhere goes on from its checkpoint and ends with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from torch import nn

from privtune.errors import PrivTuneError, UnreachableFileError
from privtune.training.engine import checkpoint
from privtune.training.engine import train as engine
from privtune.training.engine.checkpoint import Keeper
from privtune.training.mechanism import kernel
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning
from privtune.training.mechanism.noise import NoiseOptions
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import looks_of
from privtune.training.methods import METHODS
from studies.harness import TrainingResult
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.simple import OneByOne, SimpleDPSGD, blobs, dropping, fit, mlp, secrets

STEPS = 37  # more than are drawn ahead at once, and more than one capture takes


class Stop(BaseException):
    """What stops a training: neither an error nor a record's doing."""


class Drawer:
    """Keeps one checkpoint."""

    content: bytes | None = None
    times = 0

    def keep(self, content: bytes) -> None:
        self.content, self.times = content, self.times + 1

    @property
    def keeper(self) -> Keeper:
        return Keeper(lambda: self.content, self.keep)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", 1e9)


def run(
    name: str,
    *,
    drawer: Drawer | None = None,
    stop: int | None = None,
    model=mlp,
    secret: int = 0,
    loss_noise: str = "gaussian",
    bands: int = 1,
    data: Callable[[torch.Tensor, torch.Tensor], TensorData] = TensorData,
    **options,
) -> TrainingResult:
    """Train one candidate in what is as good as a fresh process."""
    engine._kernels.clear()
    x, y = blobs()
    x[5] = float("nan")  # counted, whenever it is drawn
    schedule = Schedule(len(x), 0.1, STEPS, bands)
    method = planned(name, schedule, DIMENSION)
    if loss_noise == "laplace":
        method = type(method).for_budget(schedule, epsilon=4.0, delta=1e-5, loss_noise=loss_noise)

    def on_step(step: int, report) -> None:
        if step == stop:
            raise Stop

    return fit(
        method,
        [candidate(method)],
        steps=STEPS,
        bands=bands,
        model=model,
        data=data(x, y),
        secrets=secrets(1, tag=secret),
        on_step=on_step,
        snapshots_at=(2, 20, STEPS - 1),
        keeper=None if drawer is None else drawer.keeper,
        **options,
    )


def check_same(one: TrainingResult, other: TrainingResult) -> None:
    assert torch.equal(one.params, other.params)
    assert one.report.keys() == other.report.keys()
    for name, values in one.report.items():
        assert torch.equal(values.nan_to_num(-7.0), other.report[name].nan_to_num(-7.0)), name
    assert one.transcripts == other.transcripts
    assert one.unusable == other.unusable
    assert one.snapshots[0].keys() == other.snapshots[0].keys()
    for step, kept in one.snapshots[0].items():
        assert torch.equal(kept, other.snapshots[0][step])


def stopped_and_resumed(stops: list[int], name: str, **options) -> TrainingResult:
    drawer = Drawer()
    for stop in stops:
        with pytest.raises(Stop):
            run(name, drawer=drawer, stop=stop, **options)
    assert drawer.times == max(stops)
    return run(name, drawer=drawer, **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_bit_for_bit(name: str) -> None:
    stops = [random.Random(name).randrange(1, STEPS - 1)]
    undisturbed = run(name)
    resumed = stopped_and_resumed(stops, name)
    check_same(undisturbed, resumed)
    assert undisturbed.unusable[0] > 0
    schedule = Schedule(200, 0.1, STEPS)
    event = planned(name, schedule, DIMENSION).event(schedule)
    assert resumed.transcripts[0].looks() == looks_of(event)


@pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"noise": NoiseOptions(source="chacha20")},
        {"noise": NoiseOptions(floating_point="four-draws")},
        {"noise": NoiseOptions(floating_point="grid")},
        {"model": dropping},
        {"model": OneByOne},
        {"loss_noise": "laplace"},
    ],
    ids=["chacha20", "four-draws", "grid", "dropout", "one by one", "laplace"],
)
def test_every_stream_goes_on_where_it_was(options: dict) -> None:
    check_same(run("hyfreedp", **options), stopped_and_resumed([3, 19], "hyfreedp", **options))


@pytest.mark.parametrize(
    "noise", [NoiseOptions(), NoiseOptions.of("secure")], ids=["plain", "secure"]
)
@pytest.mark.parametrize("stops", [[0], [2], [3, 4, 19]])
def test_correlated_noise_goes_on_bit_for_bit(stops: list[int], noise: NoiseOptions) -> None:
    """The rows that later noise is made of, the group whose turn it is, and the scale are kept."""
    options = {"bands": 5, "noise": noise.over(5)}
    undisturbed = run("dpsgd", **options)
    check_same(undisturbed, stopped_and_resumed(stops, "dpsgd", **options))
    assert not torch.equal(undisturbed.params, run("dpsgd", noise=noise).params)


@pytest.mark.parametrize("change", ["version", "damage", "cut"])
def test_a_checkpoint_that_cannot_be_used_is_left_with_a_sentence(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = Drawer()
    with pytest.raises(Stop):
        run("dpsgd", drawer=drawer, stop=20)
    assert drawer.content is not None
    if change == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    elif change == "damage":
        drawer.content = drawer.content[:-1] + bytes([drawer.content[-1] ^ 1])
    else:
        drawer.content = drawer.content[: len(drawer.content) // 2]
    kernel._said.clear()
    before = drawer.times
    with pytest.warns(FallbackWarning, match="begins again from its seed"):
        again = run("dpsgd", drawer=drawer)
    check_same(run("dpsgd"), again)
    assert drawer.times - before == STEPS - 1


def _edited(x: torch.Tensor, y: torch.Tensor) -> TensorData:
    return TensorData(x, torch.where(torch.arange(len(y)) == 7, 1 - y.clamp(max=1), y))


@pytest.mark.parametrize(
    "after",
    [
        {"data": _edited},
        {"data": lambda x, y: TensorData(x.flip(0), y.flip(0))},
        {"model": lambda: nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 3))},
    ],
    ids=["one record edited", "records in another order", "another activation"],
)
def test_a_training_does_not_go_on_with_other_records_or_another_function(after: dict) -> None:
    drawer = Drawer()
    with pytest.raises(Stop):
        run("dpsgd", drawer=drawer, stop=20)
    check_same(run("dpsgd", **after), run("dpsgd", drawer=drawer, **after))


def zeros() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("options", [{"secret": 1}, {"loss_noise": "laplace"}])
def test_a_checkpoint_of_another_training_is_not_used(options: dict) -> None:
    drawer = Drawer()
    with pytest.raises(Stop):
        run("hyfreedp", drawer=drawer, stop=20, model=zeros)
    own = run("hyfreedp", model=zeros, **options)
    check_same(own, run("hyfreedp", drawer=drawer, model=zeros, **options))
    with pytest.raises(AssertionError):
        check_same(own, run("hyfreedp", model=zeros))


def test_a_checkpoint_is_no_pickle_and_holds_no_record() -> None:
    drawer = Drawer()
    with pytest.raises(Stop):
        run("adadp", drawer=drawer, stop=20)
    assert drawer.content is not None
    tensors = safetensors.torch.load(drawer.content[32:])
    x, _ = blobs()
    rows = {tuple(row.tolist()) for row in x}
    for tensor in tensors.values():
        if tensor.ndim and tensor.shape[-1] == x.shape[1]:
            assert not rows & {tuple(row.tolist()) for row in tensor.reshape(-1, x.shape[1])}


@pytest.mark.parametrize("error", [UnreachableFileError("away"), PrivTuneError("another reason")])
def test_only_a_file_out_of_reach_is_done_without(error: PrivTuneError) -> None:
    def load() -> bytes:
        raise error

    keeper = Keeper(load, lambda content: None)
    if isinstance(error, UnreachableFileError):
        with pytest.warns(FallbackWarning, match="cannot be reached from here and is not used"):
            fit(SimpleDPSGD(1.0), count=1, steps=2, keeper=keeper)
    else:
        with pytest.raises(PrivTuneError, match="another reason"):
            fit(SimpleDPSGD(1.0), count=1, steps=2, keeper=keeper)


def test_checkpoints_wait_for_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(checkpoint, "_SHARE", 0.01)
    kept: list[float] = []

    def keep(content: bytes) -> None:
        kept.append(clock[0])
        clock[0] += 1.0

    def on_step(step: int, report) -> None:
        clock[0] += 1.0

    fit(SimpleDPSGD(1.0), count=1, steps=300, on_step=on_step, keeper=Keeper(lambda: None, keep))
    assert kept == [1.0, 102.0, 203.0]
