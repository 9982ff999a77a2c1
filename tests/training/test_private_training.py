"""A user's loop, and every silent trap of Opacus that must be impossible in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.errors import InvalidInputError
from privtune.training import kernel
from privtune.training.clipping import Flat, PerLayer
from privtune.training.data import TensorData
from privtune.training.engine import flatten_params
from privtune.training.kernel import FallbackWarning, OfOutputs
from privtune.training.opacus_adapter import OpacusKernel
from privtune.training.private_training import PlanExhaustedError, PrivateTraining
from privtune.training.schedule import Schedule
from tests.training.simple import blobs, clipped_sum, cross_entropy, mlp, per_sample_gradients

SECRET = bytes(range(32))


def start(model=None, *, steps=5, rate=0.1, clipping=None, noise=0.0, lr=1.0, **options):
    torch.manual_seed(0)
    model = model or mlp()
    x, y = blobs()
    data = options.pop("data", None) or TensorData(x, y)
    return PrivateTraining(
        model,
        options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr),
        data,
        schedule=Schedule(len(x), rate, steps),
        clipping=clipping or Flat(0.5),
        noise_multiplier=noise,
        secret=SECRET,
        **options,
    )


def losses(private, x, y):
    return cross_entropy(private.model(x), y)


def test_a_step_is_the_clipped_mean():
    private = start()
    model = mlp()
    for x, y in private.batches():
        before = flatten_params(private.model._module)
        private.step(losses(private, x, y))
        moved = before - flatten_params(private.model._module)
        own = per_sample_gradients(model, before, x, y, cross_entropy)
        torch.testing.assert_close(moved * 20.0, clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)


def test_by_layer():
    private = start(clipping=PerLayer(torch.tensor([0.1, 0.2])), steps=1)
    for x, y in private.batches():
        before = flatten_params(private.model._module)
        private.step(losses(private, x, y))
        moved = (before - flatten_params(private.model._module)) * 20.0
        own = per_sample_gradients(mlp(), before, x, y, cross_entropy)
        cut = 8 * 16 + 16
        expected = torch.cat([clipped_sum(own[:, :cut], 0.1), clipped_sum(own[:, cut:], 0.2)])
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


def test_transcript_is_the_plan_and_more_steps_are_refused():
    private = start(noise=1.5, data=TensorDataset(*blobs()))
    count = 0
    for x, y in private.batches():
        private.step(losses(private, x, y))
        count += 1
    assert count == 5
    private.transcript.check_within(Repeated(5, PoissonSampled(0.1, Gaussian(1.5))))
    with pytest.raises(PlanExhaustedError, match="all of them are taken"):
        next(private.batches())
    with pytest.raises(PlanExhaustedError, match="exactly one step"):
        private.step(torch.zeros(3, requires_grad=True))


def test_empty_samples_release_noise_without_the_loop():
    private = start(noise=1.0, rate=1e-9, steps=3)
    before = flatten_params(private.model._module)
    assert list(private.batches()) == []
    assert not torch.equal(before, flatten_params(private.model._module))
    private.transcript.check_within(Repeated(3, PoissonSampled(1e-9, Gaussian(1.0))))
    assert sum(private.transcript.looks().values()) == 3


@pytest.mark.parametrize("clipping", [Flat(0.5), PerLayer(torch.tensor([0.1, 0.2]))])
def test_physical_batches_change_nothing(clipping):
    """Momentum and a rate that decays by step would show a step too many, or noise added twice."""
    found = []
    for physical in (None, 7, 1):
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        private = start(
            model,
            optimizer=optimizer,
            clipping=clipping,
            noise=1.0,
            steps=6,
            max_physical_batch_size=physical,
        )
        sizes = []
        for x, y in private.batches():
            sizes.append(len(x))
            if private.step(losses(private, x, y)):
                decay.step()
        assert physical is None or max(sizes) <= physical
        assert len(sizes) > 6 if physical else len(sizes) == 6
        private.transcript.check_within(Repeated(6, PoissonSampled(0.1, Gaussian(1.0))))
        assert sum(private.transcript.looks().values()) == 6
        assert decay.last_epoch == 6
        found.append(flatten_params(private.model._module))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)


def test_physical_batches_around_empty_samples():
    """About every third sample is empty here: its step is noise alone, with nothing left over."""
    found = []
    for physical in (None, 1):
        private = start(noise=0.5, rate=1.1 / 200, steps=12, max_physical_batch_size=physical)
        yielded = [private.step(losses(private, x, y)) for x, y in private.batches()]
        assert sum(yielded) < 12
        assert sum(private.transcript.looks().values()) == 12
        found.append((len(yielded), flatten_params(private.model._module)))
    assert found[1][0] > found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_skipped_releases_nothing_of_it():
    private = start(noise=0.0, steps=1, max_physical_batch_size=5)
    model, total, before = mlp(), 0.0, flatten_params(private.model._module)
    for number, (x, y) in enumerate(private.batches()):
        if number == 1:
            continue
        own = per_sample_gradients(model, before, x, y, cross_entropy)
        total = total + clipped_sum(own, 0.5)
        private.step(losses(private, x, y))
    moved = before - flatten_params(private.model._module)
    torch.testing.assert_close(moved * 20.0, total, rtol=1e-4, atol=1e-5)


def test_a_physical_batch_has_a_record():
    with pytest.raises(InvalidInputError, match="max_physical_batch_size"):
        start(max_physical_batch_size=0)


def test_a_mean_loss_is_refused():
    private = start()
    x, y = next(private.batches())
    with pytest.raises(InvalidInputError, match="one loss a record"):
        private.step(F.cross_entropy(private.model(x), y))
    weights = torch.tensor([1.0, 2.0, 30.0])  # with a mean, sensitivity 1.39 times 2C
    with pytest.raises(InvalidInputError, match="one loss a record"):
        private.step(F.cross_entropy(private.model(x), y, weight=weights))


def test_a_regulariser_in_the_loss_is_refused():
    """In Opacus' ghost mode it lets one record move the model by 49 times the bound."""
    private = start()
    x, y = next(private.batches())
    penalty = sum(p.square().sum() for p in private.model.parameters())
    with pytest.raises(InvalidInputError, match="weight decay"):
        private.step(losses(private, x, y) + penalty)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(F.linear(torch.tanh(self.a(x)), self.a.weight))


def test_a_weight_used_by_hand_is_refused():
    """In Opacus' ghost mode it releases 1.37 times the bound."""
    private = start(Reused())
    x, y = next(private.batches())
    with pytest.raises(InvalidInputError, match="through calls of its own module"):
        private.step(losses(private, x, y))


def test_a_submodule_in_evaluation_is_refused():
    private = start()
    x, y = next(private.batches())
    private.model._module[0].eval()
    with pytest.raises(InvalidInputError, match="training mode"):
        private.step(losses(private, x, y))


def test_a_branch_not_taken_leaves_nothing_behind():
    """Opacus' ghost mode uses the norm of the last step for a branch that was not taken."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.first = nn.Linear(8, 3), nn.Linear(8, 3), True

        def forward(self, x):
            return self.a(x) if self.first else self.b(x)

    private = start(Branches(), clipping=Flat(1e9), steps=2)
    for number, (x, y) in enumerate(private.batches()):
        inner = private.model._module
        inner.first = number == 0
        before = flatten_params(inner)
        private.step(losses(private, x, y))
        moved = before - flatten_params(inner)
        assert bool(moved[:27].any()) == (number == 0)
        assert bool(moved[27:].any()) == (number == 1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_record_adds_nothing(poison):
    x, y = blobs()
    x[:, 0] = poison
    private = start(data=TensorData(x, y))
    before = flatten_params(private.model._module)
    for a, b in private.batches():
        private.step(losses(private, a, b))
    assert torch.equal(before, flatten_params(private.model._module))


def test_a_poisoned_record_leaves_the_others_alone():
    x, y = blobs()
    moves = []
    for poison in (0.0, float("nan")):
        bad = x.clone()
        bad[3] = poison if poison else bad[3]
        private = start(rate=1.0, steps=1, data=TensorData(bad, y))
        before = flatten_params(private.model._module)
        for a, b in private.batches():
            private.step(losses(private, a, b))
        moves.append((before - flatten_params(private.model._module)) * 200.0)
    assert moves[1].isfinite().all()
    assert 0.0 < float((moves[0] - moves[1]).norm()) <= 0.5 + 1e-4


def test_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(InvalidInputError, match="BatchNorm"):
        start(model)


def test_the_optimizer_must_hold_the_parameters():
    model = mlp()
    with pytest.raises(InvalidInputError, match="exactly the 4 trainable"):
        start(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))


def test_two_backward_passes_before_a_step_drop_nothing():
    """Opacus drops the first of two physical batches silently; here a batch has one step."""
    private = start()
    batches = private.batches()
    first = next(batches)
    second = next(batches)
    both = torch.cat([losses(private, *first), losses(private, *second)])
    with pytest.raises(InvalidInputError, match="one loss a record"):
        private.step(both)


class Tokens(nn.Module):
    """What transformers of Hugging Face do: padding, positions, dropout, layers of their own."""

    class Conv1D(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(width) + 0.1)

        def forward(self, x):
            return x @ self.weight

    def __init__(self, *, shared=False, drop=0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(6, 4, padding_idx=0), nn.Embedding(5, 4)
        self.mix, self.drop, self.head = self.Conv1D(4), nn.Dropout(drop), nn.Linear(4, 3)
        self.shared = shared

    def forward(self, x):
        places = torch.arange(x.shape[1]).unsqueeze(0)
        places = places if self.shared else places.expand_as(x)
        return self.head(self.drop(self.mix(self.words(x) + self.places(places))).mean(dim=1))


def sentences():
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 6, (200, 5), generator=generator)
    return x, x.sum(dim=1) % 3


def test_padding_is_not_trained_and_a_slower_layer_is_said_once():
    kernel._said.clear()
    torch.manual_seed(0)
    model, reference = Tokens(), Tokens()
    with pytest.warns(FallbackWarning, match="no formula for the layers Conv1D of Tokens"):
        private = start(model, data=TensorData(*sentences()), steps=3)
    for x, y in private.batches():
        assert bool((x == 0).any())
        before = flatten_params(model)
        private.step(losses(private, x, y))
        own = per_sample_gradients(reference, before, x, y, cross_entropy)
        moved = (before - flatten_params(model)) * 20.0
        torch.testing.assert_close(moved, clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)
    start(Tokens(), data=TensorData(*sentences()))  # silent: warnings are errors here


@pytest.mark.filterwarnings("ignore::privtune.training.kernel.FallbackWarning")
def test_positions_that_the_batch_shares_are_refused():
    private = start(Tokens(shared=True), data=TensorData(*sentences()))
    x, y = next(private.batches())
    with pytest.raises(
        InvalidInputError, match=r"places.weight: 1 rows .* Expand what the records"
    ):
        private.step(losses(private, x, y))


@pytest.mark.filterwarnings("ignore::privtune.training.kernel.FallbackWarning")
def test_dropout_and_padding_through_opacus():
    """Such a model passes the kernel's own check, which compares it with records one by one."""
    x, y = sentences()
    found = OpacusKernel(
        lambda: Tokens(drop=0.5),
        OfOutputs(cross_entropy),
        x=x[:1],
        y=y[:1],
        device=torch.device("cpu"),
    )
    assert found.mode == "hooks"
    for mode in ("hooks", "ghost"):
        OpacusKernel(
            lambda: nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
            OfOutputs(cross_entropy),
            x=blobs()[0][:1],
            y=blobs()[1][:1],
            device=torch.device("cpu"),
            mode=mode,
        )
