"""HyFreeDP with five losses: the price of three, and the same parabola where there is no noise."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from privtune.accounting import epsilon
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import HyFreeDP
from studies.hyfreedp_tables import curves

SCHEDULE = Schedule(records=27_000, sample_rate=1 / 27, steps=135)


@pytest.mark.parametrize("batch", ["same", "separate"])
def test_five_losses_cost_what_three_cost(batch):
    told = {"epsilon": 1.0, "delta": 1e-5, "loss_batch": batch}
    three, five = (k.for_budget(SCHEDULE, **told) for k in (HyFreeDP, curves.FivePoints))
    spent = [epsilon(method.event(SCHEDULE), 1e-5).epsilon for method in (three, five)]
    assert spent[1] == pytest.approx(spent[0], rel=1e-6)
    assert five.gradient_noise_multiplier == three.gradient_noise_multiplier


@pytest.mark.quick
@pytest.mark.parametrize("reach", [1.0, 2.0])
def test_a_parabola_is_found_again(reach):
    @dataclass
    class Bowl:
        asked: int = 0

        def losses(self, sample, params, **options):
            self.asked += len(params)
            return torch.stack([(point - 3.0).square().sum(dim=1) for point in params])

    bowl, here, step = Bowl(), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -0.25]])
    points = (here + step, here, here - step)
    found = curves._Five(bowl, reach).losses(SimpleNamespace(), points, bound=None)
    assert torch.allclose(found, Bowl().losses(None, points), atol=1e-5)
    assert bowl.asked == 5


@pytest.mark.quick
def test_corollary_1_is_the_mean_of_what_is_cut_off():
    losses = 2.0 + 0.5 * torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
    found = dict(curves.biases(losses))
    for alpha in curves.ALPHAS:
        assert found[f"α = {alpha:g}"] == pytest.approx(curves.gaussian_bias(alpha), abs=2e-4)
