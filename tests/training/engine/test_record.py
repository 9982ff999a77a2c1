"""Recorded graphs against `make_fx`, and what cannot be recorded."""

import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from privtune.training.engine.capture import NotCapturedError, capture

pytestmark = pytest.mark.quick


def program_of(model):
    names = [name for name, _ in model.named_parameters()]

    def program(x, *params):
        with torch.enable_grad():
            own = [p.detach().requires_grad_() for p in params]
            given = dict(zip(names, own, strict=True))
            losses = torch.vmap(
                lambda row: torch.func.functional_call(model, given, (row[None],)).log_softmax(-1)
            )(x).square()
            return tuple(torch.autograd.grad(losses.sum(), own))

    return program


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (4, 6)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        (4, 1, 4, 4),
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.GELU()), (4, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_graph_does_what_make_fx_traces(name):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    example = (torch.randn(shape), *(p.detach() for p in model.parameters()))
    recorded, traced = capture(program_of(model), example), make_fx(program_of(model))(*example)
    others = tuple(torch.randn_like(t) for t in example)
    for one, other in zip(recorded(*others), traced(*others), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (lambda x: (x * 2 if x.sum() > 0 else x,), "must not depend on values"),
        (lambda x: (torch.nonzero(x > 0).flatten().float(),), "must not depend on values"),
        (lambda x: (x + torch.from_numpy(torch.rand(3).numpy()),), "more than the shapes"),
    ],
)
def test_what_depends_on_more_than_shapes_is_refused(program, said):
    with pytest.raises(RuntimeError, match=said):
        capture(program, (torch.ones(3),))


def masked(x):
    kept = torch.ones_like(x, dtype=torch.float32)
    kept.masked_fill_(x == 0, 0.0)
    return (kept * x,)


def filled(x):
    view = torch.tensor([1.0, 1.0, 1.0])[:3]
    view.masked_fill_(x == 0, 0.0)
    return (view * x,)


def test_what_one_run_writes_is_not_there_in_the_next():
    """A mask that is made of ones and filled would keep the zeros of every batch before."""
    run = capture(masked, (torch.tensor([1, 1, 1]),))
    for x in (torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1]), torch.tensor([1, 1, 1])):
        assert torch.equal(run(x)[0], masked(x)[0])
    with pytest.raises(NotCapturedError, match="must not depend on values"):
        capture(filled, (torch.tensor([1, 1, 1]),))


def test_a_run_lets_go_of_what_it_no_longer_needs():
    """Else capturing a pass would hold every tensor of it at once."""
    alive = []

    def program(x):
        for _ in range(20):
            x = x * 1.5
            alive.append(weakref.ref(x.untyped_storage()))
        seen.append(sum(storage() is not None for storage in alive))
        return (x,)

    seen: list[int] = []
    capture(program, (torch.ones(1000),))
    assert seen[0] <= 3
