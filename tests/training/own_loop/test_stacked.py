"""Loops that wait for each other: what a stack may hold, and that nobody sees whom it was stacked with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.training.engine.initialisation import Initialisation
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.alike import UnsureError, program_of
from privtune.training.own_loop.private_training import PrivateTraining
from privtune.training.own_loop.stacked import MEETING, Offer, groups_of, held_bytes, train_stack
from privtune.training.own_loop.weights import LoopError
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.simple import blobs, cross_entropy, mlp

SCHEDULE = Schedule(200, 0.1, 12)
METHOD = FixedDPSGD(1.0)
X, Y = blobs()
Make = Callable[[nn.Module, int], Any]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y)


def secret(k: int) -> bytes:
    return bytes([k + 1] * 32)


def start(
    k: int,
    *,
    build: Callable[[], nn.Module] = mlp,
    optimizer: Make | None = lambda m, k: torch.optim.SGD(m.parameters(), 0.1 * (k + 1)),
    norm: float = 0.5,
    data: Any = None,
    **options: Any,
) -> PrivateTraining:
    with Initialisation(Streams(secret(k))):
        model = build()
    made = None if optimizer is None else optimizer(model, k)
    return PrivateTraining(
        model,
        data or TensorData(X, Y),
        **{
            "schedule": SCHEDULE,
            "method": METHOD,
            "optimizer": made,
            "clipping": None if made is None else Flat(norm),
            "secret": secret(k),
            **options,
        },
    )


def offered(private: PrivateTraining, loss: Any = loss_of) -> Offer | None:
    """What a loop hands to a meeting, which sends it on alone."""
    found: list[Offer] = []

    def meeting(offer: Offer) -> bool:
        found.append(offer)
        raise _GoneError

    token = MEETING.set(meeting)
    try:
        if private._met(loss):
            raise AssertionError
    except _GoneError:
        pass
    finally:
        MEETING.reset(token)
    return found[0] if found else None


class _GoneError(Exception):
    pass


def together(loops: list[PrivateTraining], loss: Any = loss_of) -> list[Exception | None]:
    offers = [offered(loop, loss) for loop in loops]
    (group,) = groups_of([offer for offer in offers if offer is not None])
    assert len(group) == len(loops)
    return train_stack(group)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m, k: torch.optim.SGD(m.parameters(), 0.1 * (k + 1)),
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
    "of several kinds": lambda m, k: (
        torch.optim.Adam(m.parameters(), 0.01)
        if k == 1
        else torch.optim.SGD(m.parameters(), 0.1 * (k + 1), 0.5)
    ),
    "one that has stepped": lambda m, k: stepped(torch.optim.SGD(m.parameters(), 0.1, 0.5)),
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
        for kind in (
            torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
            torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
        )
    },
}  # fmt: skip


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer that has taken a step before its loop, so that it remembers it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_in_a_stack_is_what_it_is_alone(name: str) -> None:
    """The same samples, noise and steps: a result differs by rounding, and states of optimizers too."""
    make = OPTIMIZERS[name]
    alone = [start(k, optimizer=make, norm=0.5 + k) for k in range(3)]
    for private in alone:
        private.fit(loss_of)
    stack = [start(k, optimizer=make, norm=0.5 + k) for k in range(3)]
    assert together(stack) == [None] * 3
    for one, other in zip(alone, stack, strict=True):
        a, b = flatten_params(one.bare), flatten_params(other.bare)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        other.finish(METHOD.event(SCHEDULE))
        assert other.transcript.digest() == one.transcript.digest()
        assert other.steps_taken == SCHEDULE.steps
        states = [loop._own.optimizer.state_dict() for loop in (one, other) if loop._own]
        assert states[0].keys() == states[1].keys()
        torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=1e-3, atol=1e-5)
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert all(p.grad is None for p in other.bare.parameters())


def test_other_streams_are_other_results() -> None:
    """The comparison above can fail: another seed moves weights by far more than rounding."""
    one, other = start(0), start(0, secret=secret(5))
    one.fit(loss_of)
    other.fit(loss_of)
    a, b = flatten_params(one.bare), flatten_params(other.bare)
    assert not torch.allclose(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["dpsgd", "hyfreedp", "dp-adam", "quantile-clipping", "prodigy"])
def test_methods_that_step_by_themselves(name: str) -> None:
    method = planned(name, SCHEDULE, DIMENSION)
    own = candidate(method)
    terms: dict[str, Any] = {"optimizer": None, "method": method}

    def loops() -> list[PrivateTraining]:
        given = [
            {n: v * (1 + k) if n == "learning_rate" else v for n, v in own.items()}
            for k in range(3)
        ]
        return [start(k, candidate=each, **terms) for k, each in enumerate(given)]

    alone, stack = loops(), loops()
    for private in alone:
        private.fit(loss_of)
    assert together(stack) == [None] * 3
    for one, other in zip(alone, stack, strict=True):
        a, b = flatten_params(one.bare), flatten_params(other.bare)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        other.finish(method.event(SCHEDULE))
        assert other.transcript.digest() == one.transcript.digest()
        assert other.curves.keys() == one.curves.keys()
        for curve, expected in zip(other.curves.values(), one.curves.values(), strict=True):
            assert curve == pytest.approx(expected, rel=1e-2, abs=1e-3, nan_ok=True)


def test_schedules_of_their_own() -> None:
    def loops() -> list[PrivateTraining]:
        own = {"learning_rate": 0.5, "max_grad_norm": 0.5}
        given = [{**own, "schedule": "cosine"}, {**own, "schedule": "linear", "warmup": 0.5}, own]
        return [start(k, optimizer=None, candidate=each) for k, each in enumerate(given)]

    alone, stack = loops(), loops()
    for private in alone:
        private.fit(loss_of)
    assert together(stack) == [None] * 3
    for one, other in zip(alone, stack, strict=True):
        a, b = flatten_params(one.bare), flatten_params(other.bare)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_products_keep_their_digits_in_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step that is taken alone: what a loss casts to bfloat16 is not added up in it."""
    flags, found = torch.backends.cuda.matmul, list[Any]()
    real = StackOracle.gradient

    def gradient(self: StackOracle, *args: Any, **options: Any) -> torch.Tensor:
        found.append(flags.allow_bf16_reduced_precision_reduction)
        return real(self, *args, **options)

    monkeypatch.setattr(StackOracle, "gradient", gradient)
    before = flags.allow_bf16_reduced_precision_reduction
    assert together([start(k) for k in range(2)]) == [None, None]
    assert found
    assert not any(found)
    assert flags.allow_bf16_reduced_precision_reduction == before


def test_dropout_is_drawn_from_each_loops_own_stream() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    alone, stack = ([start(k, build=build) for k in range(3)] for _ in range(2))
    for private in alone:
        private.fit(loss_of)
    assert together(stack) == [None] * 3
    for one, other in zip(alone, stack, strict=True):
        a, b = flatten_params(one.bare), flatten_params(other.bare)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("when", [0, 1, 5])
def test_a_loop_that_something_else_has_changed_is_stopped_alone(
    when: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, or by another thread while the stack is trained."""
    loops = [start(k, optimizer=lambda m, k: kind(m.parameters(), 0.01)) for k in range(3)]
    offers = [offer for loop in loops if (offer := offered(loop))]
    real, calls = StackOracle.gradient, 0

    def change() -> None:
        with torch.no_grad():
            loops[1].bare[0].bias.add_(1.0)

    def gradient(self: StackOracle, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == when:
            change()
        return real(self, *args, **options)

    if when == 0:
        change()
    monkeypatch.setattr(StackOracle, "gradient", gradient)
    found = train_stack(offers)
    assert isinstance(found[1], LoopError)
    assert "was changed by something else than a release" in str(found[1])
    assert found[0] is found[2] is None
    for loop in (loops[0], loops[2]):
        loop.finish(METHOD.event(SCHEDULE))


class Scaled(nn.Module):
    """A model of a user's, which reads an attribute and a global."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale * FACTOR
        return out


FACTOR = 1.0


def evaluated() -> nn.Module:
    model = mlp()
    model[1].eval()
    return model


def frozen(value: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        nn.init.constant_(model[0].weight, value).requires_grad_(False)
        return model

    return build


def trained(model: nn.Module, _: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def smoothed(amount: float) -> Any:
    return lambda model, x, y: F.cross_entropy(
        model(x), y, reduction="none", label_smoothing=amount
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"build": lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3))}),
        ({}, {"build": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))}),
        ({}, {"build": evaluated}),
        ({"build": lambda: Scaled(1.0)}, {"build": lambda: Scaled(2.0)}),
        (
            {"build": frozen(0.1), "optimizer": trained},
            {"build": frozen(0.2), "optimizer": trained},
        ),
        ({}, {"data": TensorData(X.flip(0), Y.flip(0))}),
        ({}, {"max_physical_batch_size": 8}),
        ({}, {"schedule": Schedule(200, 0.1, 11)}),
        ({}, {"method": FixedDPSGD(2.0)}),
        ({}, {"optimizer": None, "candidate": {"learning_rate": 0.1, "max_grad_norm": 1.0}}),
    ],
    ids=[
        "width",
        "activation",
        "mode",
        "attribute",
        "frozen",
        "records",
        "pieces",
        "steps",
        "noise",
        "method",
    ],
)
def test_what_is_unlike_shares_no_stack(one: dict[str, Any], other: dict[str, Any]) -> None:
    terms = (one, other, one)
    offers = [offer for k in range(3) if (offer := offered(start(k, **terms[k])))]
    assert [len(group) for group in groups_of(offers)] == [2, 1]


def test_losses_are_told_apart_by_what_they_refer_to() -> None:
    loops = [start(k) for k in range(3)]
    losses = [smoothed(0.0), smoothed(0.1), smoothed(0.0)]
    offers = [o for loop, loss in zip(loops, losses, strict=True) if (o := offered(loop, loss))]
    assert [len(group) for group in groups_of(offers)] == [2, 1]


class Mine(torch.optim.SGD):
    """An optimizer of a user's own."""


def hooked(model: nn.Module, _: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Holder:
    factor = 1.0


HOLDER = Holder()


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"optimizer": lambda m, _: Mine(m.parameters(), 0.1)}, loss_of),
        ({"optimizer": hooked}, loss_of),
        ({"one_by_one": True}, loss_of),
        ({}, lambda model, x, y: HOLDER.factor * cross_entropy(model(x), y)),
        ({"data": torch.utils.data.TensorDataset(X, Y)}, loss_of),
    ],
    ids=["optimizer", "hook", "one-by-one", "object", "dataset"],
)
def test_in_doubt_a_loop_goes_on_by_itself(options: dict[str, Any], loss: Any) -> None:
    private = start(0, **options)
    assert offered(private, loss) is None
    token = MEETING.set(lambda _: pytest.fail("it waited"))
    try:
        private.fit(loss)
    finally:
        MEETING.reset(token)
    assert private.steps_taken == 12


def test_a_rehearsal_waits_as_a_trial_does_and_goes_on_by_itself() -> None:
    private = start(0, limit=2)
    waited: list[Offer] = []

    def meeting(offer: Offer) -> bool:
        waited.append(offer)
        return False

    token = MEETING.set(meeting)
    try:
        private.fit(loss_of)
    finally:
        MEETING.reset(token)
    assert len(waited) == 1
    assert private.steps_taken == 2


def test_a_loop_with_calls_between_its_steps_or_a_mode_of_its_own_goes_on_by_itself() -> None:
    token = MEETING.set(lambda _: pytest.fail("it waited"))
    try:
        start(0).fit(loss_of, on_step=lambda *_: None)
        with torch.autocast("cpu", enabled=True):
            assert not start(0)._met(loss_of)
    finally:
        MEETING.reset(token)


def test_a_loss_that_was_changed_while_it_waited_does_not_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer = offered(start(0, build=lambda: Scaled(1.0)))
    assert offer is not None
    assert offer.stands()
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert not offer.stands()


def test_records_that_were_changed_while_it_waited_do_not_stand() -> None:
    x = X.clone()
    offer = offered(start(0, data=TensorData(x, Y)))
    assert offer is not None
    assert offer.stands()
    x.mul_(1.0)
    assert not offer.stands()


def test_equal_records_are_alike_wherever_they_lie() -> None:
    datas = [TensorData(X, Y), TensorData(X[:], Y[:]), TensorData(X.clone(), Y.clone())]
    offers = [o for k, data in enumerate(datas) if (o := offered(start(k, data=data)))]
    assert [len(group) for group in groups_of(offers)] == [3]
    assert held_bytes(offers) == sum(o.held_bytes for o in offers) + X.nbytes


def test_what_fails_while_a_stack_is_made_is_left_to_each_loop() -> None:
    kept: list[torch.Tensor] = []

    def remembers(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(model(x).detach())
        return cross_entropy(model(x), y) + 0.0 * sum(t.sum() for t in kept)

    offers = [o for k in range(2) if (o := offered(start(k), remembers))]
    assert train_stack(offers) == []
    assert all(offer.loop.steps_taken == 0 for offer in offers)


class Counting(nn.Module):
    """A model that is another one at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layer(x)
        return out


def test_a_model_that_changes_itself_is_not_trained_in_a_stack() -> None:
    offers = [o for k in range(2) if (o := offered(start(k, build=Counting)))]
    with pytest.raises(LoopError, match="changes itself"):
        train_stack(offers)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: UNKNOWN.sum(),
        lambda m, x, y: HOLDER.factor,
        lambda m, x, y: LOCK,
        lambda m, x, y: importing(),
        lambda m, x, y: [HOLDER.factor for _ in x],
        partial(cross_entropy, HOLDER),
    ],
    ids=["weight", "object", "lock", "import", "inner", "partial"],
)
def test_programs_are_told_by_value_or_not_at_all(function: Any) -> None:
    with pytest.raises(UnsureError):
        program_of(mlp(), function)


def test_a_loss_that_holds_a_view_of_the_weights_is_unlike_any_other() -> None:
    """By value it is, at the start, what those of other loops are; then it moves with its own."""
    loop = start(0)
    held = loop.bare[0].bias.detach()
    with pytest.raises(UnsureError, match="weights"):
        program_of(loop.bare, lambda m, x, y: loss_of(m, x, y) + (m[0].bias - held).sum())


def importing() -> Any:
    from tests.training.simple import blobs

    return blobs


UNKNOWN = nn.Parameter(torch.ones(3))
LOCK = threading.Lock()


def test_equal_programs_are_equal_wherever_they_were_made() -> None:
    def made(width: int) -> Any:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(width, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.layer(x)
                return out

        criterion = nn.CrossEntropyLoss(reduction="none")
        return Net(), lambda model, x, y: criterion(model(x), y)

    assert program_of(*made(8)) == program_of(*made(8))
    assert program_of(*made(8)) != program_of(*made(9))
    model, loss = made(8)
    with pytest.raises(UnsureError):
        program_of(model, lambda _, x, y: loss(model, x, y))
