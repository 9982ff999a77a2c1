"""HyFreeDP's robust fit: its first rate, its public interval, its bound on the losses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies.in_run import budgeted
from privtune.tasks import fine_tuned, get_task
from privtune.training.mechanism.kernel import Layout
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import HyFreeDP
from privtune.training.methods.hyfreedp import Fit, fit_robust, robust_bound
from tests.training.methods.world import LiteralOracle, World

SCHEDULE = Schedule(records=2000, sample_rate=0.1, steps=100)


@pytest.mark.quick
def test_the_rate_changes_by_what_the_way_should_have_been():
    """A minimum half a way ahead, half a way behind; no curvature; nothing but noise; clipped."""
    losses = torch.tensor(  # behind, here, ahead
        [[2.25, 0.25, 1.0, 0.8, 1.0], [0.25, 0.25, 0.6, 0.8, 1.0], [0.25, 2.25, 0.2, 0.801, 1.0]]
    )
    rate, wide = torch.full((5,), 0.1), torch.full((5,), 1e-3)
    fit = Fit(rate, wide, 1e4 * wide, torch.zeros(5), rate)
    known = {"deviation": torch.full((5,), 1e-2), "bound": torch.ones(5), "interval": 10}
    found = fit_robust(fit, losses, moved=True, **known)
    assert found.learning_rate.tolist() == pytest.approx([0.15, 0.05, 0.4, 0.1, 0.1], rel=2e-2)
    assert found.step_rate.tolist() == pytest.approx(found.learning_rate.tolist())
    assert found.fits.tolist() == [0, 1, 0, 1, 0]  # the mean begins where growth ends
    again = fit_robust(found, losses, moved=True, **known)
    assert again.step_rate[1] == pytest.approx((0.05 * 0.025) ** 0.5, rel=2e-2)
    lost = fit_robust(fit, losses * torch.nan, moved=True, **known)
    assert torch.equal(lost.step_rate, rate)
    held = fit_robust(
        replace(fit, lowest=0.08 + 0 * wide, highest=0.12 + 0 * wide), losses, moved=True, **known
    )
    assert held.learning_rate.tolist() == pytest.approx([0.12, 0.08, 0.12, 0.1, 0.1], rel=2e-2)


@pytest.mark.parametrize("interval", [1, 2, 5, 10])
def test_the_rate_grows_sixteenfold_at_most_in_the_steps_that_a_fit_looks_back(interval):
    """Whatever the interval: a rate that grows faster is past the best one before the losses say so."""
    rate = torch.full((1,), 1e-3)
    fit = Fit(rate, rate * 1e-6, rate * 1e6, torch.zeros(1), rate)
    down = torch.tensor([[0.9], [0.5], [0.1]])  # straight down, without noise
    known = {"deviation": torch.zeros(1), "bound": torch.ones(1), "interval": interval}
    for _ in range(20 // interval):
        fit = fit_robust(fit, down, moved=True, **known)
    assert float(fit.learning_rate / rate) == pytest.approx(16.0, rel=1e-4)


def test_the_loss_bound_is_of_the_loss_at_the_iterate_alone():
    bound = torch.tensor([4.0, 4.0, 1.0, 4.0])
    far = torch.full((4,), 1e4)  # probed elsewhere: of no effect
    losses = torch.stack([far, torch.tensor([3.0, 0.1, -1.0, torch.nan]), far])
    assert robust_bound(bound, losses, 1.0).tolist() == [4.5, 2.0, 1.0, 4.0]
    for _ in range(200):  # noise of four times the bound: it must not feed on itself without end
        bound = robust_bound(bound, 4.0 * bound.expand(3, 4), 1.0)
    assert bound.max().item() == 1e6


def first_fit(weights, method, usual_size=0.5):
    """Return the fit at the first step."""
    oracle = LiteralOracle([World(k) for k in range(len(weights))], 3)
    oracle.usual_size = usual_size
    state = method.init(weights, [{} for _ in weights])
    return method._begun(state, oracle)


def test_the_first_rate_and_its_interval_follow_the_first_weights():
    weights = torch.tensor([[0.3, -0.3], [0.0, 0.0]]).double()

    def interval(**options):
        fit = first_fit(weights, HyFreeDP(1.0, 8.0, **options))
        assert torch.equal(fit.learning_rate, fit.step_rate)
        return [x.tolist() for x in (fit.lowest, fit.learning_rate, fit.highest)]

    def near(*rows):
        return [pytest.approx(row) for row in rows]

    middle = 0.1 * 5**0.5
    # Weights of 0 take what torch would draw for them, and may move by 100.
    assert interval() == near([0.03, 0.05], [0.3 * middle, 0.5], [0.15, 5.0])
    assert interval(spread=100.0) == near([0.03, 0.05], [0.3, 0.5], [3.0, 5.0])
    assert interval(learning_rate=0.2, spread=4.0) == near([0.1] * 2, [0.2] * 2, [0.4] * 2)
    assert interval(fit="paper") == near([1e-16] * 2, [1e-4] * 2, [1e8] * 2)
    own = HyFreeDP(1.0, 8.0).init(weights, [{"learning_rate": 0.7}, {}])
    assert own.fit.learning_rate.tolist() == [0.7, 0.0]
    for wrong in ({"spread": 0.5}, {"learning_rate": 0.0}, {"fit": "steady"}):
        with pytest.raises(InvalidInputError):
            HyFreeDP(1.0, 8.0, **wrong)


@pytest.mark.parametrize(
    "layer", [nn.Linear(20, 3), nn.Conv2d(4, 8, 3), nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 4))]
)
def test_the_usual_size_is_that_of_what_torch_draws(layer):
    """Against the root mean square of 400 layers as torch initialises them: known to half a percent."""
    torch.manual_seed(0)
    drawn = 0.0
    for _ in range(400):
        for part in layer.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        drawn += (
            float(nn.utils.parameters_to_vector(layer.parameters()).detach().square().mean()) / 400
        )
    assert Layout(layer).usual_size == pytest.approx(drawn**0.5, rel=0.02)


def test_a_task_that_trains_biases_alone_gives_the_rate_more_room_at_the_same_price():
    method = HyFreeDP.for_budget(SCHEDULE, epsilon=2.0, delta=1e-5)
    letter = HyFreeDP.for_budget(SCHEDULE, epsilon=2.0, delta=1e-5, fit="paper")
    assert method.event(SCHEDULE) == letter.event(SCHEDULE)
    assert method.schedule == {"type": "linear", "start": 0.7}
    assert letter.schedule == "constant"
    for part, spread in (("biases", 100.0), ("head", 100.0), ("all", None), ("lora:2", None)):
        task = fine_tuned(get_task("digits-mlp"), trainable=part)
        context = SimpleNamespace(
            define_by_run=False,
            declared=None,
            task=task,
            schedule=SCHEDULE,
            delta=1e-5,
            adjacency=Adjacency.ADD_REMOVE,
        )
        made = budgeted(context, "hyfreedp", {}, epsilon=2.0)
        assert (made.spread, made.schedule == "constant") == (spread, part == "lora:2")
        found = budgeted(context, "hyfreedp", {}, epsilon=2.0, trainable="head")
        assert found.spread == 100.0  # the arm's part decides
    assert (
        budgeted(context, "hyfreedp", {"spread": 9.0}, epsilon=2.0, trainable="head").spread == 9.0
    )
    assert (
        budgeted(context, "hyfreedp", {"fit": "paper"}, epsilon=2.0, trainable="head").spread
        is None
    )
