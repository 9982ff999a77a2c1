"""What the sheets of AdaCliP and ADADP tell their methods is what the papers' sections say."""

from __future__ import annotations

import math

import pytest
import torch

from studies.adaclip import parts
from studies.adadp_figures import task
from studies.harness import Split

D = 9


@pytest.mark.parametrize(
    ("choice", "first", "rest", "noise"),
    [
        ("optimal", 1.0, 0.0, 1.0),  # Section 4.3 with μ = 1: b, and the squared length of b
        ("whitened", math.sqrt(D), 0.0, D),
        ("one norm", 1.0, 1.0, D),
    ],
)
def test_deviations_give_the_scales_of_section_4_3(choice, first, rest, noise):
    one, other = parts.deviations(choice, D)
    s = torch.tensor([one] + [other] * (D - 1), dtype=torch.float64)
    b = s.sqrt() * s.sum().sqrt()  # Algorithm 1, line 6
    assert b[0].item() == pytest.approx(first, rel=1e-4)
    assert b[1:].tolist() == pytest.approx([rest] * (D - 1), abs=5e-3)
    assert b.square().sum().item() == pytest.approx(noise, rel=1e-3)


def test_told_deviations_are_those_of_the_gradients_of_records():
    made = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 784, generator=made), torch.randint(10, (40,), generator=made)
    params = 0.1 * torch.randn(1, 7850, generator=made)
    state = parts.AdaCliP(1.0).init(params, [{"learning_rate": 1.0, "largest_variance": 1.0}])
    mean, deviation = parts.of_records(Split(x, y, x, y))(state)
    each = []
    for one, target in zip(x, y, strict=True):  # a record at a time, by autograd
        weights = params[0].clone().requires_grad_()
        out = weights[:7840].view(10, 784) @ one + weights[7840:]
        each.append(torch.autograd.grad(torch.nn.functional.cross_entropy(out, target), weights)[0])
    rows = torch.stack(each)
    assert torch.allclose(mean[0], rows.mean(dim=0), atol=1e-6)
    assert torch.allclose(deviation[0], rows.std(dim=0, correction=0).clamp_min(1e-6), atol=1e-4)


@pytest.mark.parametrize(("name", "most"), [(task.EVEN, 10), (task.UNEVEN, 2)])
def test_a_client_is_one_record_with_its_own_rows(name, most):
    net = task.net(name, None, smoke=True)
    rows = net.split.y
    assert rows.shape[1] == task.ROWS
    assert (rows >= 0).sum() == 1200  # no row is lost or doubled
    digits = [len(set(row.tolist()) - {-1}) for row in rows]
    assert max(digits) <= most + (most == 2)  # a run may hold the end of one digit and the next
    assert (sum(digits) / len(digits) > 5) == (name == task.EVEN)
    model = net.model()
    x, y = net.split.x[:3], rows[:3]
    losses = net.loss(model(x), y)
    alone = [
        torch.nn.functional.cross_entropy(model(x[i]), y[i], reduction="sum") for i in range(3)
    ]
    assert torch.allclose(losses, torch.stack(alone), rtol=1e-5)
