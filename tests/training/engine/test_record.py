"""Recorded graphs against `make_fx`, and what cannot be recorded."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from privtune.training.engine.record import capture

pytestmark = pytest.mark.quick


def program_of(model):
    names = [name for name, _ in model.named_parameters()]

    def program(x, *params):
        with torch.enable_grad():
            own = [p.detach().requires_grad_() for p in params]
            losses = torch.vmap(
                lambda row: (
                    torch.func.functional_call(
                        model, dict(zip(names, own, strict=True)), (row.unsqueeze(0),)
                    )
                    .log_softmax(-1)
                    .square()
                    .sum()
                )
            )(x)
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


def test_what_depends_on_values_is_refused():
    with pytest.raises(RuntimeError, match="must not depend on values"):
        capture(lambda x: (x * 2 if x.sum() > 0 else x,), (torch.ones(3),))


def test_what_is_drawn_within_is_found_out():
    with pytest.raises(RuntimeError, match="more than the shapes"):
        capture(lambda x: (x + torch.from_numpy(torch.rand(3).numpy()),), (torch.ones(3),))
