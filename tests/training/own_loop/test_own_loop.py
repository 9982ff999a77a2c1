"""A user's loop, and every silent trap of Opacus that must be impossible in it."""

from __future__ import annotations

import itertools
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from privtune.accounting import Gaussian, NonPrivate, PoissonSampled, Repeated
from privtune.errors import InvalidInputError
from privtune.training.engine.initialisation import Initialisation
from privtune.training.engine.train import train
from privtune.training.mechanism import kernel
from privtune.training.mechanism.clipping import EqualByLayer, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS, FixedDPSGD
from privtune.training.own_loop.private_training import PlanExhaustedError, PrivateTraining
from privtune.training.own_loop.weights import LoopError
from tests.training.methods.test_contract import DIMENSION, candidate, planned
from tests.training.simple import blobs, clipped_sum, cross_entropy, mlp, per_sample_gradients

SECRET = bytes(range(32))


def start(model=None, *, steps=5, rate=0.1, clipping=None, noise=0.0, lr=1.0, **options):
    torch.manual_seed(0)
    model = model or mlp()
    x, y = blobs()
    data = options.pop("data", None) or TensorData(x, y)
    STARTED.append(
        PrivateTraining(
            model,
            data,
            schedule=Schedule(len(x), rate, steps),
            method=FixedDPSGD(noise),
            optimizer=options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr),
            clipping=clipping or Flat(0.5),
            secret=SECRET,
            **options,
        )
    )
    return STARTED[-1]


STARTED = []


@pytest.fixture(autouse=True)
def _closed():
    """A loop that is left in mid-batch is closed, as a trial closes it."""
    yield
    while STARTED:
        STARTED.pop().close()


def losses(private, x, y):
    return cross_entropy(private.model(x), y)


def loss_of(model, x, y):
    return cross_entropy(model(x), y)


@pytest.mark.quick
def test_a_step_is_the_clipped_mean():
    private = start()
    model = mlp()
    for x, y in private.batches():
        before = flatten_params(private.bare)
        private.step(losses(private, x, y))
        moved = before - flatten_params(private.bare)
        own = per_sample_gradients(model, before, x, y, cross_entropy)
        torch.testing.assert_close(moved * 20.0, clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_by_layer():
    private = start(clipping=EqualByLayer(0.2), steps=1)
    for x, y in private.batches():
        before = flatten_params(private.bare)
        private.step(losses(private, x, y))
        moved = (before - flatten_params(private.bare)) * 20.0
        own = per_sample_gradients(mlp(), before, x, y, cross_entropy)
        cut = 8 * 16 + 16
        bound = 0.2 / 2**0.5
        expected = torch.cat([clipped_sum(own[:, :cut], bound), clipped_sum(own[:, cut:], bound)])
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
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


def test_an_empty_sample_cannot_be_told_from_any_other():
    """The loop sees one record, whose loss counts nothing; the step is noise alone."""
    found = []
    for form in ("losses", "record", "read"):
        private = start(noise=1.0, rate=1e-9, steps=3)
        before = flatten_params(private.bare)
        for batch in private.batches():
            if form == "record":
                private.step(batch, loss_of)
                continue
            x, y = batch
            assert len(x) == 1
            if form == "read":
                private.step((x, y), loss_of)
            else:
                private.step(losses(private, x, y))
        assert not torch.equal(before, flatten_params(private.bare))
        private.finish(Repeated(3, PoissonSampled(1e-9, Gaussian(1.0))))
        found.append(flatten_params(private.bare))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("clipping", [Flat(0.5), EqualByLayer(0.2)])
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
        found.append(flatten_params(private.bare))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)


def test_physical_batches_around_empty_samples():
    """About every third sample is empty here: its step is noise alone, with nothing left over."""
    found = []
    for physical in (None, 1):
        private = start(noise=0.5, rate=1.1 / 200, steps=12, max_physical_batch_size=physical)
        yielded = [private.step(losses(private, x, y)) for x, y in private.batches()]
        assert sum(yielded) == 12
        assert sum(private.transcript.looks().values()) == 12
        found.append((len(yielded), flatten_params(private.bare)))
    assert found[1][0] > found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("physical", [None, 5])
def test_a_batch_that_is_skipped_is_refused(physical, read):
    private = start(steps=3, max_physical_batch_size=physical)
    batches = private.batches()
    batch = next(batches)
    if read:
        _ = batch[0]
    with pytest.raises(LoopError, match="not followed by its step"):
        next(batches)
    with pytest.raises(LoopError, match="not followed by its step"):
        private.finish(NonPrivate())


def test_a_part_of_a_sample_is_not_its_step():
    private = start(steps=1, max_physical_batch_size=5)
    for x, y in private.batches():
        private.step(losses(private, x, y))
        break
    with pytest.raises(LoopError, match="0 of the 1 steps"):
        private.finish(NonPrivate())


def test_steps_that_are_missing_are_refused_unless_paid_for_numbers_stopped_it():
    charged = Repeated(5, PoissonSampled(0.1, Gaussian(1.0)))
    private = start(noise=1.0)
    private.step(next(private.batches()), loss_of)
    with pytest.raises(LoopError, match="took 1 of the 5 steps"):
        private.finish(charged)
    private.finish(charged, stopped=True)


def test_a_physical_batch_has_a_record():
    with pytest.raises(InvalidInputError, match="max_physical_batch_size"):
        start(max_physical_batch_size=0)


@pytest.mark.quick
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
    private.bare[0].eval()
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
        inner = private.bare
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
    before = flatten_params(private.bare)
    for a, b in private.batches():
        private.step(losses(private, a, b))
    assert torch.equal(before, flatten_params(private.bare))


def test_a_poisoned_record_leaves_the_others_alone():
    x, y = blobs()
    moves = []
    for poison in (0.0, float("nan")):
        bad = x.clone()
        bad[3] = poison if poison else bad[3]
        private = start(rate=1.0, steps=1, data=TensorData(bad, y))
        before = flatten_params(private.bare)
        for a, b in private.batches():
            private.step(losses(private, a, b))
        moves.append((before - flatten_params(private.bare)) * 200.0)
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


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_gradients_of_the_loops_own_are_no_part_of_a_release():
    """Opacus adds a second backward pass to the first, or drops one silently."""
    found = []
    for own in (False, True):
        private = start(steps=2)
        for x, y in private.batches():
            value = losses(private, x, y)
            if own:
                value.mean().backward(retain_graph=True)
                value = losses(private, x, y)
            private.step(value)
        found.append(flatten_params(private.bare))
    torch.testing.assert_close(found[1], found[0])


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
    private = start(model, data=TensorData(*sentences()), steps=3)
    with pytest.warns(FallbackWarning, match="no formula for the layers Conv1D of Tokens"):
        _ = private.model
    for x, y in private.batches():
        assert bool((x == 0).any())
        before = flatten_params(model)
        private.step(losses(private, x, y))
        own = per_sample_gradients(reference, before, x, y, cross_entropy)
        moved = (before - flatten_params(model)) * 20.0
        torch.testing.assert_close(moved, clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)
    _ = start(Tokens(), data=TensorData(*sentences())).model  # silent: warnings are errors here


@pytest.mark.filterwarnings("ignore::privtune.training.mechanism.kernel.FallbackWarning")
def test_positions_that_the_batch_shares_are_refused():
    private = start(Tokens(shared=True), data=TensorData(*sentences()))
    x, y = next(private.batches())
    with pytest.raises(
        InvalidInputError, match=r"places.weight: 1 rows .* Expand what the records"
    ):
        private.step(losses(private, x, y))


# The form by record: the engine's kernels and methods, in a loop of one's own.


def from_stream(build=mlp):
    """The model as the engine initialises it from the same secret."""
    with Initialisation(Streams(SECRET)):
        return build()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_the_engines_bit_for_bit(name):
    x, y = blobs()
    schedule = Schedule(len(x), 0.1, 12)
    method = planned(name, schedule, DIMENSION)
    own = candidate(method)
    engine = train(
        method,
        schedule,
        model=mlp,
        loss=cross_entropy,
        data=TensorData(x, y),
        candidates=[own],
        secrets=[SECRET],
        device="cpu",
    )
    model = from_stream()
    private = PrivateTraining(
        model, TensorData(x, y), schedule=schedule, method=method, candidate=own, secret=SECRET
    )
    private.fit(loss_of)
    private.finish(method.event(schedule))
    assert torch.equal(flatten_params(model), engine.params[0])
    assert private.transcript.digest() == engine.transcripts[0].digest()
    assert private.curves.keys() == engine.report.keys()


def test_an_optimizer_of_ones_own_takes_the_same_steps_in_every_form():
    x, y = blobs()
    found = []
    for form in ("engine", "fit", "step", "read", "losses", "one by one"):
        method, schedule = FixedDPSGD(1.0), Schedule(len(x), 0.1, 10)
        if form == "engine":
            trained = train(
                method,
                schedule,
                model=mlp,
                loss=cross_entropy,
                data=TensorData(x, y),
                candidates=[{"learning_rate": 0.5, "max_grad_norm": 0.5}],
                secrets=[SECRET],
                device="cpu",
            )
            found.append(trained.params[0])
            continue
        model = from_stream()
        private = PrivateTraining(
            model,
            TensorData(x, y),
            schedule=schedule,
            method=method,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            clipping=Flat(0.5),
            secret=SECRET,
            one_by_one=form == "one by one",
            max_physical_batch_size=9 if form == "one by one" else None,
        )
        if form in ("fit", "one by one"):
            private.fit(loss_of)
        else:
            for batch in private.batches():
                if form == "step":
                    private.step(batch, loss_of)
                elif form == "read":
                    a, b = batch
                    private.step((a, b), loss_of)
                else:
                    a, b = batch
                    private.step(losses(private, a, b))
        private.finish(method.event(schedule))
        found.append(flatten_params(model))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_a_batch_of_another_make_is_refused():
    private = start()
    for change in ("copied", "other"):
        batches = private.batches()
        if private._open is None:
            batch = next(batches)
        x, y = batch
        with pytest.raises(LoopError, match="another batch"):
            private.step((x.clone(), y) if change == "copied" else blobs(), loss_of)


def test_a_loss_that_remembers_records_is_refused():
    seen = []

    def running(model, x, y):
        seen.append(float(x.sum()) if not torch._C._functorch.is_batchedtensor(x) else 0.0)
        return cross_entropy(model(x - 0.01 * sum(seen)), y)

    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mean = mlp(), 0.0
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return self.inner(x - self.mean)

    class Counting(Running):
        def forward(self, x):
            self.count += x.detach().mean()
            return self.inner(x - self.count)

    for model, loss in ((mlp(), running), (Running(), loss_of), (Counting(), loss_of)):
        for one_by_one in (False, True):
            private = start(model, one_by_one=one_by_one)
            with pytest.raises((LoopError, InvalidInputError)):
                private.fit(loss)


def test_a_loss_that_changes_from_step_to_step_is_what_runs():
    """What a captured pass takes for constant is looked up again at every step."""
    found = []
    for build in (False, True):
        private = start(steps=4, noise=0.0)
        weight = 1.0

        def own(model, x, y):
            return weight * cross_entropy(model(x), y)  # noqa: B023

        def weighted(step):
            return lambda model, x, y: 0.5**step * cross_entropy(model(x), y)

        for step, batch in enumerate(private.batches()):
            weight = 0.5**step
            private.step(batch, weighted(step) if build else own)
        found.append(flatten_params(private.bare))
    torch.testing.assert_close(found[0], found[1])
    same = start(steps=4, noise=0.0)
    same.fit(loss_of)
    assert not torch.allclose(flatten_params(same.bare), found[0])


def test_dropout_and_augmentation_are_the_trials_own():
    """The same for the same secret whatever the global generator did; another for another."""

    def noisy(model, x, y):
        keep = torch.rand_like(x) < 0.8
        return cross_entropy(model(x * keep + 0.1 * torch.randn(x.shape)), y)

    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    found = []
    for seed in (1, 2):
        model = from_stream(build)
        private = start(model, steps=6, noise=1.0)
        torch.manual_seed(seed)
        private.fit(noisy)
        found.append(flatten_params(model))
        model = from_stream(build)
        private = start(model, steps=6, noise=1.0)
        torch.manual_seed(seed)
        for x, y in private.batches():
            private.step(cross_entropy(private.model(x + 0.1 * torch.randn_like(x)), y))
        found.append(flatten_params(model))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


class Unfollowable(nn.Module):
    """Control flow that hangs on the data: nothing that vmap can follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


def test_what_no_transform_takes_goes_one_by_one_by_option():
    with pytest.raises(InvalidInputError, match="one_by_one=True"):
        start(Unfollowable()).fit(loss_of)
    private = start(Unfollowable(), one_by_one=True, steps=1, noise=0.0)
    before = flatten_params(private.bare)
    batch = next(private.batches())
    x, y = batch
    reference = Unfollowable()
    own = torch.cat(
        [
            per_sample_gradients(reference, before, x[i : i + 1], y[i : i + 1], cross_entropy)
            for i in range(len(x))
        ]
    )
    private.step(batch, loss_of)
    moved = (before - flatten_params(private.bare)) * 20.0
    torch.testing.assert_close(moved, clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_optimizer_steps_inside_a_release_alone():
    private = start()
    x, y = next(private.batches())
    losses(private, x, y).mean().backward()
    with pytest.raises(LoopError, match="called by the loop itself"):
        private._own.optimizer.step()


class Shown(nn.Module):
    """Keeps what it computed where its author can look at it, as attention weights are."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = mlp(), None

    def forward(self, x):
        self.seen = self.inner(x)
        return self.seen


@pytest.mark.parametrize("form", ["losses", "record", "one by one"])
def test_what_a_model_keeps_and_never_reads_is_no_memory(form):
    found = []
    for build in (mlp, Shown):
        model = from_stream(build)
        private = start(model, noise=1.0, one_by_one=form == "one by one")
        if form == "losses":
            for x, y in private.batches():
                private.step(losses(private, x, y))
        else:
            private.fit(loss_of)
        found.append(flatten_params(model))
    assert torch.equal(*found)


def test_what_is_computed_after_a_step_is_followed_but_not_kept():
    private = start()
    batches = private.batches()
    x, y = next(batches)
    private.step(losses(private, x, y))
    large = x.repeat(100, 1)
    alive, kept = ref(large), large.mean(0)
    del large
    assert alive() is None
    x, y = next(batches)
    with pytest.raises(LoopError, match="does not charge"):
        private.step(losses(private, x - kept, y))


def rehearsed(losses_of, *, steps=2):
    """Two steps on made-up samples of two sizes, as a rehearsal takes them."""
    private = start(steps=20, limit=steps)
    for x, y in private.batches():
        private.step(losses_of(private, x, y))


def test_losses_divided_by_a_private_size_are_refused():
    """One record more would scale all others: 1.67 times the bound with twelve records."""
    rehearsed(lambda p, x, y: losses(p, x, y) / 20.0)
    for by in (lambda v, n: v / n, lambda v, n: v * (1.0 / n)):
        with pytest.raises(LoopError, match="how many records the batch holds"):
            rehearsed(lambda p, x, y, by=by: by(losses(p, x, y), len(x)), steps=6)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_weights_written_in_the_backward_pass_are_found():
    private = start(steps=3)
    weight = private.bare[0].weight

    def write(_module, _inputs, _outputs):
        weight.data.add_(1.0)

    x, y = next(private.batches())
    found = losses(private, x, y)
    private.bare[2].register_full_backward_hook(write)
    found = losses(private, x, y)
    with pytest.raises((LoopError, InvalidInputError)):
        private.step(found)


def test_a_number_read_from_the_batch_is_no_constant_of_a_loss():
    """58 times the bound with 60 records: the largest of them scales all others."""
    for make_loss in (
        lambda s: lambda model, x, y: cross_entropy(model(x / s), y),
        lambda s: lambda model, x, y, scale=s: cross_entropy(model(x / scale), y),
    ):
        private = start(steps=2)
        batch = next(private.batches())
        with pytest.raises(LoopError, match="read from the batch"):
            private.step(batch, make_loss(float(batch[0].std())))
        private.close()


def test_losses_in_fewer_digits_add_up_to_as_many():
    """Autocast computes with eight binary digits; gradients of one direction hide no error of a sum."""
    x, y = blobs()
    alike = TensorData(x[:1] + 1e-3 * x, y[:1].expand(len(y)).contiguous())
    private = start(steps=3, rate=0.5, data=alike)
    for x, y in private.batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = private.model(x)
        private.step(cross_entropy(outputs.float(), y))
    assert private.steps_taken == 3


@pytest.mark.parametrize("form", ["losses", "around", "record", "one by one"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_sum_under_autocast_keeps_all_digits(low, form):
    """The hooks leave gradients of eight digits; in these, one record moves the sum by 1.07 bounds."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(1, 50, generator=draws) + 0.3 * torch.randn(154, 50, generator=draws)

    def moved(records):
        data = TensorData(x[:records], torch.zeros(records, dtype=torch.long))
        model = nn.Linear(50, 10)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        private = PrivateTraining(
            model,
            data,
            schedule=Schedule(records, 1.0, 1),
            method=FixedDPSGD(0.0),
            optimizer=torch.optim.SGD(model.parameters(), 1.0),
            clipping=Flat(0.01),
            one_by_one=form == "one by one",
        )
        for batch in private.batches():
            with torch.autocast("cpu", dtype=low):
                if form in ("record", "one by one"):
                    private.step(batch, loss_of)
                    continue
                found = losses(private, *batch).float()
                if form == "around":
                    private.step(found)
            if form == "losses":
                private.step(found)
        return flatten_params(model).double() * records / 0.01

    sums = [moved(records) for records in range(150, 155)]
    assert all(float((b - a).norm()) < 1.0001 for a, b in itertools.pairwise(sums))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_weights_of_few_digits_are_refused(low):
    """A sum in them moves by 1.38 times the bound, whatever each record is clipped to."""
    with pytest.raises(InvalidInputError, match="trainable parameters of float32"):
        start(mlp().to(low), one_by_one=True)
    frozen = mlp()
    frozen[0].to(low).requires_grad_(False)
    assert kernel.Layout(frozen).dtype == torch.float32


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.factor * x


@pytest.mark.filterwarnings("ignore:Opacus has no formula")
@pytest.mark.parametrize("clipping", [Flat(0.5), EqualByLayer(0.5)])
def test_a_parameter_that_is_one_number_trains_in_both_forms(clipping):
    found = []
    for one_by_one in (False, True):
        private = start(nn.Sequential(mlp(), Scaled()), clipping=clipping, one_by_one=one_by_one)
        for batch in private.batches():
            own = (batch, loss_of) if one_by_one else (losses(private, *batch),)
            private.step(*own)
        found.append(flatten_params(private.bare))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
