"""HyFreeDP's fit along the way travelled: for trainings of a small part of a model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.strategies.in_run import budgeted
from privtune.tasks import fine_tuned, get_task
from privtune.training.engine.train import train
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import DPAdam, HyFreeDP
from privtune.training.methods._parabola import Fit
from privtune.training.methods._travelled import first_rate, fit_travelled, robust_bound

SCHEDULE = Schedule(records=2000, sample_rate=0.1, steps=100)


@pytest.mark.quick
def test_the_rate_changes_by_what_the_way_should_have_been():
    """A minimum half a way ahead, half a way behind; no curvature; nothing but noise; clipped."""
    losses = torch.tensor(  # behind, here, ahead
        [[2.25, 0.25, 1.0, 0.8, 1.0], [0.25, 0.25, 0.6, 0.8, 1.0], [0.25, 2.25, 0.2, 0.801, 1.0]]
    )
    rate, none = torch.full((5,), 0.1), torch.zeros(5)
    fit = Fit(rate, rate, none, none, none, none, none, rate)
    known = {"deviation": torch.full((5,), 1e-2), "bound": torch.ones(5), "interval": 5}
    found = fit_travelled(fit, losses, moved=True, **known)
    assert found.learning_rate.tolist() == pytest.approx([0.15, 0.05, 0.4, 0.1, 0.1], rel=2e-2)
    assert found.step_rate.tolist() == pytest.approx(found.learning_rate.tolist())
    assert found.fits.tolist() == [0, 1, 0, 1, 0]  # the mean begins where growth ends
    each = fit_travelled(fit, losses, moved=True, **{**known, "interval": 1})
    assert each.learning_rate[2] == pytest.approx(0.1 * 4.0**0.2)
    again = fit_travelled(found, losses, moved=True, **known)
    assert again.step_rate[1] == pytest.approx((0.05 * 0.025) ** 0.5, rel=2e-2)
    lost = fit_travelled(fit, losses * torch.nan, moved=True, **known)
    assert torch.equal(lost.step_rate, rate)


def test_the_first_rate_and_the_bound_are_of_what_is_public_or_released():
    weights = torch.tensor([[0.3, -0.3], [0.0, 0.0]])
    least = torch.full((2,), 1e-4)
    assert first_rate(weights, least, 0.1).tolist() == pytest.approx([0.03, 1e-4])
    bound = torch.tensor([4.0, 4.0, 1.0, 4.0])
    here = torch.tensor([[0.0] * 4, [3.0, 0.1, -1.0, torch.nan], [0.0] * 4])
    assert robust_bound(bound, here, 1.0).tolist() == [4.5, 2.0, 1.0, 4.0]
    for _ in range(200):  # noise of four times the bound: it must not feed on itself without end
        bound = robust_bound(bound, 4.0 * bound.expand(3, 4), 1.0)
    assert bound.max().item() == 1e6


def biases_alone() -> nn.Module:
    """Return a network of which biases and head are trained."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    for name, weights in model.named_parameters():
        weights.requires_grad_(name.endswith("bias") or name.startswith("2."))
    return model


def test_on_biases_alone_the_rate_found_is_near_the_best():
    """Frozen weights whose biases can learn that the first feature is in a band off the middle."""
    x = torch.randn(2400, 8, generator=torch.Generator().manual_seed(0))
    y = ((x[:, 0] - 1.0).abs() < 1.0).long()

    def right(method, candidates):
        found = train(
            method,
            SCHEDULE,
            model=biases_alone,
            loss=lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"),
            data=TensorData(x[:2000], y[:2000]),
            candidates=candidates,
            secrets=[bytes([k]) * 32 for k in range(len(candidates))],
            device="cpu",
        )
        model, scores = biases_alone(), []
        for weights in found.params:
            load_params(model, weights)
            scores.append(float((model(x[2000:]).argmax(dim=1) == y[2000:]).float().mean()))
        return sum(scores) / len(scores), found.report["learning_rate"][50].log10()

    told, rates = {"epsilon": 2.0, "delta": 1e-5}, (1e-3, 1e-2, 1e-1, 1.0)
    grid = DPAdam.for_budget(SCHEDULE, **told)
    scores = [right(grid, [{"learning_rate": rate, "max_grad_norm": 0.1}] * 3)[0] for rate in rates]
    known = HyFreeDP.of_a_part("biases", {})
    ours, rate = right(HyFreeDP.for_budget(SCHEDULE, **told, **known), [{}] * 3)
    before, before_rate = right(HyFreeDP.for_budget(SCHEDULE, **told, fit="steady"), [{}] * 3)
    assert max(scores) == scores[2]
    # Powers of ten from the best, 0.1: of all three, and of the worst of three.
    assert (rate + 1.0).abs().max() < 1.0 < (before_rate + 1.0).abs().max() - 0.5
    assert ours > max(scores) - 0.05 > before + 0.1


def test_the_first_rate_follows_the_first_weights_unless_one_is_given():
    told = {"epsilon": 2.0, "delta": 1e-5}
    weights = torch.tensor([[0.3, -0.3], [0.0, 0.0]])

    def first(schedule=SCHEDULE, candidate=(), **options):
        method = HyFreeDP.for_budget(schedule, **told, **options)
        return method.init(weights, [dict(candidate), {}]).fit.step_rate.tolist()

    large, lora = Schedule(55_000, 512 / 55_000, 330), HyFreeDP.of_a_part("lora:4", {})
    assert first() == first(fit="travelled") == pytest.approx([0.03, 1e-4])
    assert first(large, **lora) == pytest.approx([0.03, 1e-4])
    assert first(large) == first(fit="paper") == pytest.approx([1e-4] * 2)
    assert first(learning_rate=1e-4) == pytest.approx([1e-4] * 2)
    assert not HyFreeDP.of_a_part("lora:4", {"learning_rate": 1e-4})
    assert first(candidate={"learning_rate": 1e-6}) == pytest.approx([1e-6, 1e-4])
    assert first(relative_rate=1.0) == pytest.approx([0.3, 1e-4])
    # Plans of earlier versions, which know no such part, start where they started.
    assert HyFreeDP(1.0, 1.0).init(weights, [{}, {}]).fit.step_rate.tolist() == pytest.approx(
        [1e-4] * 2
    )
    with pytest.raises(InvalidInputError, match="relative_rate = 2"):
        HyFreeDP(1.0, 1.0, relative_rate=2.0)


def test_a_task_that_trains_biases_alone_takes_it_at_the_same_price():
    method = HyFreeDP.for_budget(SCHEDULE, epsilon=2.0, delta=1e-5, fit="travelled")
    steady = HyFreeDP.for_budget(SCHEDULE, epsilon=2.0, delta=1e-5, fit="steady")
    assert method.event(SCHEDULE) == steady.event(SCHEDULE)
    assert method.schedule == {"type": "linear", "start": 0.7}
    assert steady.schedule == "constant"
    for part, fit in (("biases", "travelled"), ("head", "travelled"), ("all", "eager")):
        task = fine_tuned(get_task("digits-mlp"), trainable=part)
        context = SimpleNamespace(define_by_run=False, task=task, schedule=SCHEDULE, delta=1e-5)
        assert budgeted(context, "hyfreedp", {}, epsilon=2.0).fit == fit
        for own, of_own in (("all", "eager"), ("head", "travelled")):  # the arm's part decides
            found = budgeted(context, "hyfreedp", {}, epsilon=2.0, trainable=own)
            assert found.fit == of_own
    assert budgeted(context, "hyfreedp", {"fit": "paper"}, epsilon=2.0).schedule == "constant"
