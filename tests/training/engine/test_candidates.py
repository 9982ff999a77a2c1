"""Candidates of a ``build``: what shares a stack, and that nobody sees whom it was stacked with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.checkpoint import checkpoint as checkpointed

from privtune.errors import InvalidInputError
from privtune.training.engine import checkpoint
from privtune.training.engine import train as engine
from privtune.training.engine.checkpoint import Keeper
from privtune.training.engine.train import (
    TrainableCandidate,
    TrainedCandidate,
    Training,
    choose_kernel,
    initialisation,
)
from privtune.training.mechanism.clipping import Clipping, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, flatten_params
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import TranscriptMismatchError
from privtune.training.methods import (
    METHODS,
    Candidate,
    DPAdam,
    FixedDPSGD,
    Method,
    candidate_column,
)
from privtune.training.methods.rate_schedule import rate_factors
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.simple import SimpleDPSGD, blobs, cross_entropy, mlp
from tests.training.simple import State as SimpleState

SCHEDULE = Schedule(200, 0.1, 12)
METHOD = FixedDPSGD(1.0)
X, Y = blobs()
DATA = TensorData(X, Y)
CPU = torch.device("cpu")
Make = Callable[[nn.Module, int], torch.optim.Optimizer]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y)


def secret(k: int) -> bytes:
    return bytes([k + 1] * 32)


def sgd(model: nn.Module, k: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1 * (k + 1))


def make(
    k: int,
    build: Callable[[], nn.Module] = mlp,
    optimizer: Make | None = sgd,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    **values: Any,
) -> TrainableCandidate:
    with initialisation(Streams(secret(k))):
        model = build()
    made = None if optimizer is None else optimizer(model, k)
    stepped = None if scheduler is None or made is None else scheduler(made)
    return TrainableCandidate(model, secret(k), {"max_grad_norm": 0.5 + k, **values}, made, stepped)


def run(
    made: Sequence[TrainableCandidate], method: Any = METHOD, **options: Any
) -> list[TrainedCandidate]:
    given: dict[str, Any] = {"loss_of": loss_of, "data": DATA, "device": "cpu", **options}
    found = Training(method, SCHEDULE, **given).of(iter(made))
    return sorted(found, key=lambda outcome: outcome.position)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates each stack had."""
    sizes: list[int] = []

    def counted(*args: Any, **options: Any) -> Oracle:
        sizes.append(len(options["streams"]))
        return Oracle(*args, **options)

    monkeypatch.setattr(engine, "Oracle", counted)
    return sizes


OPTIMIZERS: dict[str, Make] = {
    "SGD": sgd,
    "momentum, decay": lambda m, k: torch.optim.SGD(
        m.parameters(), 0.1, 0.3 * k, weight_decay=0.01 * k, nesterov=k > 0
    ),
    "dampening, also without momentum": lambda m, k: torch.optim.SGD(
        m.parameters(), 0.1, 0.4 * k, dampening=0.5, maximize=k == 1
    ),
    "a group a layer": lambda m, k: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters(), "lr": 0.2 * k}]
    ),
    "in another order": lambda m, k: torch.optim.SGD([*m.parameters()][::-1], 0.1, 0.3 * k),
    "a rate in a tensor": lambda m, k: torch.optim.Adam(m.parameters(), torch.tensor(0.01 * (k + 1))),
    **{
        f"{kind.__name__}, decay": lambda m, k, kind=kind: kind(
            [
                {"params": m[0].parameters(), "betas": (0.5, 0.9 - 0.1 * k)},
                {"params": m[2].parameters(), "eps": 1e-3 * (k + 1), "maximize": k == 2},
            ],
            0.01,
            weight_decay=0.1 * k,
        )
        for kind in (torch.optim.Adam, torch.optim.AdamW)
    },
    "amsgrad": lambda m, k: torch.optim.Adam(m.parameters(), 0.01 * (k + 1), amsgrad=k > 0),
    **{
        kind.__name__: lambda m, k, kind=kind: kind(m.parameters(), 0.01 * (k + 1))
        for kind in (torch.optim.RMSprop, torch.optim.NAdam)
    },
}  # fmt: skip

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, SCHEDULE.steps),
    "from nothing": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "in two parts": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.2, 1.0, 3), schedules.ExponentialLR(o, 0.8)], [3]
    ),
    "of each group": lambda o: schedules.LambdaLR(
        o, [lambda step, n=n: 0.9 ** (step * (n + 1)) for n in range(len(o.param_groups))]
    ),
    "momentum, too": lambda o: schedules.OneCycleLR(o, 0.3, total_steps=SCHEDULE.steps + 1),
}


def by_torch(
    k: int,
    optimizer: Make,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    paces: Sequence[float] = (1.0,) * SCHEDULE.steps,
) -> torch.Tensor:
    """Step torch's own optimizer along an oracle's releases."""
    made = make(k, optimizer=optimizer, scheduler=scheduler)
    model = made.model
    assert made.optimizer is not None
    kernel = choose_kernel(model, loss_of, DATA, CPU)
    streams, usual = [Streams(secret(k))], {"device": CPU, "physical_rows": 256}
    oracle = Oracle(SCHEDULE, data=DATA, kernel=kernel, streams=streams, **usual)
    for pace in paces:
        gradient = oracle.gradient(
            oracle.sample(),
            flatten_params(model)[None],
            clipping=Flat(0.5 + k),
            noise_multiplier=1.0,
        )
        for name, part in kernel.layout.unflatten(gradient[0]).items():
            dict(model.named_parameters())[name].grad = part.clone()
        for group in made.optimizer.param_groups:
            group["lr"] = group["lr"] * pace
        made.optimizer.step()
        for group in made.optimizer.param_groups:
            group["lr"] = group["lr"] / pace
        if made.scheduler is not None:
            made.scheduler.step()
    return flatten_params(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs_own_alone_and_in_a_stack(name: str, stacked: list[int]) -> None:
    found = run([make(k, optimizer=OPTIMIZERS[name]) for k in range(3)])
    assert stacked == ([1, 2] if name == "amsgrad" else [3])
    (alone,) = run([make(1, optimizer=OPTIMIZERS[name])])
    torch.testing.assert_close(alone.params, found[1].params, rtol=1e-4, atol=1e-5)
    for k, outcome in enumerate(found):
        expected = by_torch(k, OPTIMIZERS[name])
        torch.testing.assert_close(outcome.params, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(flatten_params(outcome.module), outcome.params)
        assert len(outcome.report["learning_rate"]) == SCHEDULE.steps
        outcome.transcript.check_whole(METHOD.event(SCHEDULE))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["a group a layer", "momentum, decay"])
def test_schedules_of_torch(name: str, optimizer: str) -> None:
    if name == "momentum, too" and optimizer == "a group a layer":
        pytest.skip("torch needs a momentum there")

    def own(model: nn.Module, k: int) -> torch.optim.Optimizer:
        return OPTIMIZERS[optimizer](model, k + 1)

    made = [make(k, optimizer=own, scheduler=SCHEDULES[name]) for k in range(2)]
    for k, outcome in enumerate(run(made)):
        expected = by_torch(k, own, SCHEDULES[name])
        torch.testing.assert_close(outcome.params, expected, rtol=1e-4, atol=1e-5)
    rates = by_torch(0, own)
    assert not torch.allclose(rates, by_torch(0, own, SCHEDULES[name]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["momentum, decay", "AdamW, decay", "RMSprop"])
def test_a_named_schedule_scales_the_rates_of_an_optimizer(optimizer: str) -> None:
    made = [make(k, optimizer=OPTIMIZERS[optimizer], schedule="linear", warmup=0.5) for k in (1, 2)]
    paces = rate_factors(METHOD, made[0].values, SCHEDULE)
    for k, outcome in zip((1, 2), run(made), strict=True):
        expected = by_torch(k, OPTIMIZERS[optimizer], paces=paces)
        torch.testing.assert_close(outcome.params, expected, rtol=1e-4, atol=1e-5)


FACTOR = 1.0


class Scaled(nn.Module):
    """A model of a user's, which reads an attribute and a global."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale * FACTOR
        return out


class Held(nn.Module):
    """A model that holds numbers in a buffer, or beside."""

    def __init__(self, value: float, *, buffer: bool) -> None:
        super().__init__()
        self.layer, offset = nn.Linear(8, 3), torch.full((3,), value)
        self.offset = nn.Buffer(offset) if buffer else offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.offset
        return out


class _Sign(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _HalfSign(_Sign):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def frozen(value: float) -> nn.Module:
    model = mlp()
    nn.init.constant_(model[0].weight, value).requires_grad_(False)
    return model


def dropping(p: float, *, training: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 3))
    model[1].train(training)
    return model


def hooked(factor: float) -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * factor)
    return model


def halved() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, given, got: (given[0] / 2,))
    return model


def applying(function: Any) -> nn.Module:
    return Wide(3, lambda x: x + function(x))


@pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning")
def test_a_hook_on_the_way_back_is_another_program(stacked: list[int]) -> None:
    run([make(k, halved if k == 1 else mlp) for k in range(3)])
    assert sorted(stacked) == [1, 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (mlp, lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))),
        (Scaled, lambda: Scaled(2.0)),
        (lambda: hooked(1.0), lambda: hooked(2.0)),
        (mlp, lambda: hooked(1.0)),
        (lambda: dropping(0.5), lambda: dropping(0.5, training=False)),
        (lambda: frozen(1.0), lambda: frozen(2.0)),
        (mlp, lambda: frozen(1.0)),
        (lambda: Held(1.0, buffer=True), lambda: Held(2.0, buffer=True)),
        (lambda: Held(1.0, buffer=False), lambda: Held(2.0, buffer=False)),
        (lambda: applying(torch.tanh), lambda: applying(lambda x: x.detach().tanh())),
        (lambda: applying(_HalfSign.apply), lambda: applying(_Sign.apply)),
        (
            lambda: applying(lambda x: x.clamp(max=1.0)),
            lambda: applying(lambda x: x.clamp(max=2.0)),
        ),
    ],
)
def test_other_programs_share_no_stack_and_equal_ones_do(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], stacked: list[int]
) -> None:
    run([make(0, one), make(1, other)])
    assert stacked == [1, 1]
    stacked.clear()
    run([make(0, one), make(1, other), make(2, one), make(3, other)])
    assert sorted(stacked) == [2, 2]


class Wide(nn.Module):
    """A net of a user's, of any width."""

    def __init__(
        self, width: int, function: Callable[[torch.Tensor], torch.Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.width, self.function = width, function
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.function(self.first(x)))
        return out


def deep(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    sizes, parts = (8, *widths), []
    for one, two in pairwise(sizes):
        parts += [nn.Linear(one, two), act()]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], 3))


WIDER: dict[str, Callable[[int], nn.Module]] = {
    "tanh": lambda n: mlp(hidden=n),
    "deep": lambda n: deep(n, n + 2, act=nn.GELU),
    "a product": lambda n: Wide(n, lambda x: x.tanh() * F.silu(x)),
    "a sum": lambda n: Wide(n, lambda x: x.tanh() + x.view(-1)),
}


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda m, k: torch.optim.AdamW(m.parameters(), 0.01 * (k + 1), weight_decay=0.1 * k)],
)
@pytest.mark.parametrize("name", WIDER)
def test_narrow_nets_are_computed_with_wide_ones(
    name: str, optimizer: Make, stacked: list[int]
) -> None:
    widths = (16, 23, 9, 23)
    made = [make(k, lambda k=k: WIDER[name](widths[k]), optimizer) for k in range(4)]
    found = run(made, snapshots_at=(3,))
    assert stacked == [4]
    for k, outcome in enumerate(found):
        (alone,) = run([make(k, lambda k=k: WIDER[name](widths[k]), optimizer)], snapshots_at=(3,))
        torch.testing.assert_close(alone.params, outcome.params, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.snapshots[3], outcome.snapshots[3], rtol=1e-4, atol=1e-5)
        assert torch.equal(flatten_params(outcome.module), outcome.params)
        assert alone.transcript.digest() == outcome.transcript.digest()


NOT_WIDER: dict[str, Callable[[int], nn.Module]] = {
    "not zero at zero": lambda n: Wide(n, torch.sigmoid),
    "a mean": lambda n: Wide(n, lambda x: x - x.mean()),
    "a softmax": lambda n: Wide(n, lambda x: x.softmax(dim=1)),
    "a number": lambda n: Wide(n, lambda x: x + 1.0),
    "a spread number": lambda n: Wide(n, lambda x: x + x[:, :1]),
    "a size": lambda n: Wide(n, lambda x: x / x.shape[1]),
    "the largest": lambda n: Wide(n, lambda x: x * x.max()),
    "dropout": lambda n: nn.Sequential(nn.Linear(8, n), nn.Dropout(0.3), nn.Linear(n, 3)),
    "norm": lambda n: nn.Sequential(nn.Linear(8, n), nn.LayerNorm(n), nn.Linear(n, 3)),
    "depth": lambda n: deep(*([n] * (1 + (n > 12)))),
    "none the widest": lambda n: deep(n, 28 - n),
    "a part": lambda n: Wide(n, lambda x: torch.cat([x[:, :4], x[:, 4:].tanh()], dim=1)),
    "another order": lambda n: Wide(n, lambda x: x.view(-1, 2).T.reshape(1, -1)),
}


@pytest.mark.parametrize("name", NOT_WIDER)
def test_what_a_wide_net_does_not_compute_is_trained_apart(name: str, stacked: list[int]) -> None:
    run([make(k, lambda k=k: NOT_WIDER[name](16 - 5 * k + k % 2)) for k in range(2)])
    assert stacked == [1, 1]


@pytest.mark.parametrize("name", ["dpsgd", "dp-adam", "automatic-clipping"])
def test_methods_step_narrow_nets_with_wide_ones(name: str, stacked: list[int]) -> None:
    method, values = METHODS[name](1.0, clipping="by-layer"), {"learning_rate": 0.1}

    def one(k: int) -> TrainableCandidate:
        given = make(k, lambda: mlp(hidden=9 + 7 * k), None, **values)
        return replace(given, values={n: given.values[n] for n in method.parameters})

    together = run([one(k) for k in range(3)], method)
    assert stacked == [3]
    for k, outcome in enumerate(together):
        (alone,) = run([one(k)], method)
        torch.testing.assert_close(alone.params, outcome.params, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Signs(Method):
    """A method of somebody else's, which answers what the engine asks of those built in."""

    noise_multiplier: float
    name: ClassVar[str] = "signs"
    summary: ClassVar[str] = "the signs of noisy gradients"
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    reported: ClassVar[tuple[str, ...]] = ()
    steps_by_weight: ClassVar[bool] = True

    @property
    def takes_optimizer(self) -> bool:
        return True

    def clipping_of(self, max_grad_norm: torch.Tensor) -> Clipping:
        return self.clip(max_grad_norm)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> SimpleState:
        rate = candidate_column(candidates, "learning_rate", params)
        return SimpleState(params, rate, candidate_column(candidates, "max_grad_norm", params))

    def update(self, state: SimpleState, oracle: Oracle) -> SimpleState:
        gradient = self.gradient(oracle, state.params, self.clip(state.max_grad_norm))
        return replace(
            state, params=state.params - state.learning_rate.unsqueeze(1) * gradient.sign()
        )


def test_a_method_from_elsewhere_steps_narrow_nets_with_wide_ones(stacked: list[int]) -> None:
    values = {"learning_rate": 0.01, "max_grad_norm": 1.0}
    made = [
        replace(make(k, lambda k=k: mlp(hidden=9 + 7 * k), None), values=values) for k in range(2)
    ]
    run(made, Signs(1.0))
    assert stacked == [2]


def test_a_method_from_elsewhere_takes_an_optimizer() -> None:
    """It clips by its own norm, and torch's optimizer steps: as DP-SGD of the same norm and noise."""
    (outcome,) = run([make(0)], Signs(1.0))
    (expected,) = run([make(0)], FixedDPSGD(1.0))
    assert torch.equal(outcome.params, expected.params)


def test_settings_that_are_not_one_for_all_weights_share_no_stack(stacked: list[int]) -> None:
    def grouped(model: nn.Module, k: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": p, "lr": 0.1 * (n + 1)} for n, p in enumerate(model.parameters())]
        )

    run([make(k, lambda k=k: mlp(hidden=9 + k), grouped) for k in range(2)])
    assert stacked == [1, 1]


def test_methods_that_look_at_all_weights_train_each_width_apart(stacked: list[int]) -> None:
    method = planned("prodigy", SCHEDULE, DIMENSION)
    own = candidate(method)
    made = [replace(make(k, lambda k=k: mlp(hidden=9 + k), None), values=own) for k in range(2)]
    run(made, method)
    assert stacked == [1, 1]


def test_beside_the_places_of_a_candidate_nothing_is_released() -> None:
    kernel = choose_kernel(mlp(), loss_of, DATA, CPU)
    places = [torch.arange(0, kernel.layout.size, 3), torch.arange(kernel.layout.size)]
    for options in (NoiseOptions(), NoiseOptions(floating_point="grid")):
        oracle = Oracle(
            SCHEDULE,
            data=DATA,
            kernel=kernel,
            streams=[Streams(secret(k)) for k in range(2)],
            device=CPU,
            physical_rows=256,
            noise=options,
            places=places,
        )
        params = torch.randn(2, kernel.layout.size, generator=torch.Generator().manual_seed(0))
        gradient = oracle.gradient(
            oracle.sample(), params, clipping=Flat(1.0), noise_multiplier=1.0
        )
        assert gradient[0].nonzero().flatten().tolist() == places[0].tolist()
        assert bool((gradient[1] != 0.0).all())


def test_optimizers_of_several_kinds_share_no_stack(stacked: list[int]) -> None:
    def own(model: nn.Module, k: int) -> torch.optim.Optimizer:
        kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)
        return kinds[k % 3](model.parameters(), 0.01 * (k + 1))

    for k, outcome in enumerate(run([make(k, optimizer=own) for k in range(6)])):
        torch.testing.assert_close(outcome.params, by_torch(k, own), rtol=1e-4, atol=1e-5)
    assert sorted(stacked) == [2, 2, 2]


def test_what_waits_is_bounded(stacked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    size = flatten_params(mlp()).nbytes
    monkeypatch.setattr(engine, "_HELD_BYTES", 2 * size)
    made: list[int] = []
    done: list[int] = []

    def each() -> Any:
        for k in range(7):
            made.append(k)
            assert len(made) - len(done) <= 3
            yield make(k)

    for outcome in Training(METHOD, SCHEDULE, loss_of, DATA, device="cpu").of(each()):
        done.append(outcome.position)
    assert done == list(range(7))
    assert stacked == [3, 3, 1]


def test_the_model_and_the_global_generator_stay_as_they_were() -> None:
    made = make(0, lambda: dropping(0.5))
    made.model.calls = []  # type: ignore[assignment]
    made.model.register_forward_hook(lambda module, *_: module.calls.append(1))
    state, weights = torch.get_rng_state(), flatten_params(made.model)
    (found,) = run([made])
    assert found.module is not made.model
    assert torch.equal(flatten_params(made.model), weights)
    assert not torch.equal(flatten_params(found.module), weights)
    assert not made.model.calls
    assert torch.equal(torch.get_rng_state(), state)


def test_looks_at_a_candidate_that_is_trained_alone() -> None:
    seen: dict[int, torch.Tensor] = {}
    (found,) = run([make(0)], snapshots_at=(3, 7), on_snapshot=seen.setdefault)
    assert seen.keys() == found.snapshots.keys() == {3, 7}
    assert all(torch.equal(seen[step], found.snapshots[step]) for step in seen)
    with pytest.raises(ZeroDivisionError):
        run([make(0)], snapshots_at=(3,), on_snapshot=lambda *_: 1 // 0)


@pytest.mark.parametrize("name", ["momentum, decay", "AdamW, decay", "NAdam"])
def test_a_candidate_goes_on_from_its_checkpoint_to_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", 1e9)
    drawer: list[bytes] = []
    keeper = Keeper(lambda: drawer[-1] if drawer else None, drawer.append)

    def stop(step: int, _: object) -> None:
        assert step != 7

    def one() -> list[TrainableCandidate]:
        engine._kernels.clear()
        cosine = SCHEDULES["cosine"]
        return [make(1, lambda: dropping(0.3), OPTIMIZERS[name], cosine)]

    (whole,) = run(one())
    with pytest.raises(AssertionError):
        run(one(), keeper=keeper, on_step=stop)
    assert len(drawer) == 7
    (resumed,) = run(one(), keeper=keeper)
    assert len(drawer) == 7 + SCHEDULE.steps - 1 - 7
    assert torch.equal(resumed.params, whole.params)
    assert torch.equal(resumed.report["learning_rate"], whole.report["learning_rate"])


def stepped(model: nn.Module, k: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            lambda m, k: type("Mine", (torch.optim.SGD,), {})(m.parameters(), 0.1),
            "must be one of torch's classes",
        ),
        (lambda m, k: torch.optim.SGD(m[0].parameters(), 0.1), "lacks 2.weight, 2.bias"),
        (stepped, "must be new for each candidate"),
    ],
)
def test_optimizers_that_are_refused_before_anything_is_drawn(
    optimizer: Make, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracle, "sample", lambda _: pytest.fail("drawn"))
    with pytest.raises(InvalidInputError, match=said):
        run([make(0, optimizer=optimizer)])


@pytest.mark.parametrize(
    "method", [DPAdam(1.0), FixedDPSGD(1.0, momentum=0.9), METHODS["hyfreedp"](1.0, 1.0)]
)
def test_methods_that_take_no_optimizer(method: Any) -> None:
    with pytest.raises(InvalidInputError, match="steps by itself"):
        run([make(0)], method)


class Tied(nn.Module):
    """Layers that are tied by their memory, or by a view that is kept beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 3), nn.Linear(3, 3)
        if how == "memory":
            self.other.bias.data = self.one.weight.data[1, :3]
        elif how == "view":
            self.register_buffer("kept", self.one.weight.detach().T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.one(x))
        return out


@pytest.mark.parametrize("how", ["memory", "view"])
def test_weights_that_would_come_apart_are_refused(how: str) -> None:
    with pytest.raises(InvalidInputError, match=how):
        run([make(0, lambda: Tied(how))])
    run([make(0, lambda: Tied("not"))])


def test_a_method_that_releases_more_than_it_charges_is_found() -> None:
    made = make(0, optimizer=None, learning_rate=0.1)
    with pytest.raises(TranscriptMismatchError):
        run([made], SimpleDPSGD(1.0, extra_releases=1))


def test_a_diverged_candidate_is_a_result_and_touches_no_other(stacked: list[int]) -> None:
    def own(model: nn.Module, k: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 1e40 if k == 1 else 0.1)

    found = run([make(k, optimizer=own) for k in range(3)])
    assert stacked == [3]
    assert not bool(found[1].params.isfinite().all())
    (alone,) = run([make(2, optimizer=own)])
    torch.testing.assert_close(alone.params, found[2].params, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    """Computes its first layers again on the way back, to hold less memory, or not."""

    def __init__(self, *, again: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh())
        self.last, self.again, self.reentrant = nn.Linear(16, 3), again, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()  # as Hugging Face does of embeddings
        h = (
            checkpointed(self.first, x, use_reentrant=self.reentrant)
            if self.again
            else self.first(x)
        )
        found: torch.Tensor = self.last(h)
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_activations_changes_nothing(reentrant: bool) -> None:
    """A part that ran again on the way back would draw another dropout, or have no gradient."""
    (plain,) = run([make(0, lambda: Checkpointed(again=False))])
    (saving,) = run([make(0, lambda: Checkpointed(again=True, reentrant=reentrant))])
    assert torch.equal(plain.params, saving.params)
    # Elsewhere it is torch's own.
    model, x = Checkpointed(again=True, reentrant=reentrant).eval(), DATA.x[:3].clone()
    loss_of(model, x, DATA.y[:3]).sum().backward()
    plain_model = Checkpointed(again=False).eval()
    plain_model.load_state_dict(model.state_dict())
    loss_of(plain_model, x, DATA.y[:3]).sum().backward()
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_autocast_is_refused_around_a_training_and_named_inside_of_one() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InvalidInputError, match="pass precision='bfloat16'"),
    ):
        run([make(0)])

    def cast(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, x, y).float()

    with pytest.warns(FallbackWarning, match="autocast inside: leave it out, and pass precision"):
        run([make(0, lambda: mlp(hidden=13))], loss_of=cast)
