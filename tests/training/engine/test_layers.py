"""Clipped sums of the batched kernel against records taken one by one, for every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.training.engine import kernels
from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.engine.rules import DirectUse, ProductUse, Transformed, _Products, split
from privtune.training.engine.windows import Windows
from privtune.training.mechanism.clipping import Automatic, CoordinateTransform, EqualByLayer, Flat
from privtune.training.mechanism.kernel import LossOfOutputs
from tests.training.simple import clipped_sum, cross_entropy, per_sample_gradients, rows_of, summed

CPU, seq = torch.device("cpu"), nn.Sequential


class Attention(nn.Module):
    def __init__(self, cross=False, need_weights=False, bias=True):
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=bias)
        self.head = nn.Linear(8, 3)
        self.cross, self.need_weights = cross, need_weights

    def forward(self, x):
        h = self.embed(x)
        other = torch.tanh(h) if self.cross else h
        out, _ = self.attention(h, other, other, need_weights=self.need_weights)
        return self.head(out.mean(1))


class CausalSDPA(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(3, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2).amax(1))


class Idle(nn.Module):
    """A layer between two others has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.idle = nn.Linear(5, 2)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


class Reused(nn.Module):
    """A weight used again by hand: Opacus' ghost mode releases 1.37 times the bound for it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.head(F.linear(h, self.a.weight))


class NormedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)))
        h = torch.tanh(self.norm(self.second(h)))
        return self.head(h.mean((2, 3)))


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return (x * self.scale) @ self.matrix + self.scale[:3].sin()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(F.leaky_relu(self.a(x), 0.1, True))


class Masked(nn.Module):
    """An encoder written out, of tokens among which zeros fill up; a mask only where there are any."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(5, 8, padding_idx=0), nn.Embedding(6, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        there = x != 0
        h = self.first(self.embed(x) + self.place(torch.arange(x.shape[1]).expand(1, -1)))
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / 2
        if torch.compiler.is_compiling() or not there.all():
            scores = scores.masked_fill(~there[:, None, None], -1e4)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = self.second(h + self.out(mixed))
        h = h + self.narrow(F.gelu(self.wide(h)))
        return self.head((h * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True).clamp(min=1))


class PaddedLayer(nn.Module):
    """Torch's own encoder layer with a mask of places that fill up."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        filled = (x == 0) & (torch.arange(x.shape[1]) > 0)
        return self.head(self.layer(self.embed(x), src_key_padding_mask=filled).mean(1))


def tuned(make, kind):
    return lambda: set_trainable(make().eval(), kind, rank=2)


def frozen():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def conv(*layers, flat):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 3))


def image(*shape):
    return lambda n: torch.randn(n, *shape)


def tokens(*shape):
    return lambda n: torch.randint(5, (n, *shape))


CASES = {
    "linear no bias": (lambda: nn.Linear(4, 3, bias=False), image(4)),
    "mlp relu in place": (
        lambda: seq(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        image(4),
    ),
    "in place by position": (InPlace, image(4)),
    "idle": (Idle, image(4)),
    "linear sequence direct": (
        lambda: seq(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(18, 3)),
        image(9, 3),
    ),
    "linear sequence ghost": (
        lambda: seq(nn.Linear(30, 40), nn.SiLU(), nn.Flatten(), nn.Linear(80, 3)),
        image(2, 30),
    ),
    "conv2d": (
        lambda: conv(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), flat=20),
        image(1, 8, 8),
    ),
    "conv2d options": (
        lambda: conv(
            nn.Conv2d(
                4, 6, (3, 2), stride=2, padding=(2, 1), dilation=(1, 2), groups=2, bias=False
            ),
            nn.Tanh(),
            nn.AvgPool2d(2),
            flat=6 * 2 * 2,
        ),
        image(4, 7, 7),
    ),
    "conv2d grouped bias": (lambda: conv(nn.Conv2d(4, 4, 3, groups=4), flat=16), image(4, 4, 4)),
    "conv2d same": (lambda: conv(nn.Conv2d(2, 3, 3, padding="same"), flat=48), image(2, 4, 4)),
    "conv2d 1x1 ghost": (lambda: conv(nn.Conv2d(40, 40, 1), flat=160), image(40, 2, 2)),
    "conv2d by rows": (
        lambda: conv(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(3, 4, (5, 3), stride=2, padding=2, dilation=(1, 2), bias=False),
            nn.AvgPool2d(4),
            flat=4,
        ),
        image(2, 9, 8),
    ),
    "conv1d": (
        lambda: conv(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), flat=16),
        image(2, 8),
    ),
    "embedding": (lambda: seq(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 3)), tokens(6)),
    "embedding padding": (
        lambda: seq(nn.Embedding(5, 4, padding_idx=1), nn.Flatten(), nn.Linear(24, 3)),
        tokens(6),
    ),
    "layer norm": (
        lambda: seq(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)),
        image(4),
    ),
    "group norm": (
        lambda: conv(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), flat=36),
        image(1, 5, 5),
    ),
    "group norm of a sequence": (
        lambda: conv(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), flat=24),
        image(2, 8),
    ),
    "group norm of features": (
        lambda: seq(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3)),
        image(4),
    ),
    "group norm twice": (NormedTwice, image(1, 6, 6)),
    "rms norm": (
        lambda: seq(nn.Linear(4, 6), nn.RMSNorm(6), nn.Softplus(), nn.Linear(6, 3)),
        image(4),
    ),
    "instance norm": (
        lambda: conv(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ELU(), flat=36),
        image(1, 5, 5),
    ),
    "attention": (Attention, image(5, 3)),
    "attention cross": (lambda: Attention(cross=True), image(5, 3)),
    "attention weights": (lambda: Attention(need_weights=True, bias=False), image(5, 3)),
    "sdpa causal": (CausalSDPA, image(5, 3)),
    "encoder layer": (
        lambda: seq(
            nn.Linear(3, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(40, 3),
        ),
        image(5, 3),
    ),
    "tied": (Tied, tokens(4)),
    "reused": (Reused, image(4)),
    "by hand": (ByHand, image(4)),
    "prelu": (lambda: seq(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)), image(4)),
    "frozen": (frozen, image(4)),
    "padded layer": (PaddedLayer, tokens(6)),
    **{f"masked, {kind}": (tuned(Masked, kind), tokens(6)) for kind in ("all", "biases", "lora")},
}


def make(name, candidates, width, sizes, *, dtype=torch.float32):
    torch.manual_seed(7)
    build, inputs = CASES[name]
    model = build().to(dtype)
    x = inputs(candidates * width)
    x = (x.to(dtype) if x.is_floating_point() else x).unflatten(0, (candidates, width))
    y = torch.randint(3, (candidates, width))
    kernel = BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x[0], y=y[0], device=CPU)
    params = 0.5 * torch.randn(candidates, kernel.layout.size, dtype=dtype)
    rows = rows_of(x, y, sizes)
    rows = replace(rows, mask=rows.mask.to(dtype))
    gradients = [
        per_sample_gradients(model, params[k], x[k, :n], y[k, :n], cross_entropy)
        for k, n in enumerate(sizes)
    ]
    return kernel, params, rows, gradients


def close(found, expected):
    scale = expected.abs().max().clamp(min=1e-12)
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "candidates"),
    [*((name, 3) for name in CASES), *((name, 1) for name in ("linear no bias", "conv2d", "tied"))],
)
def test_clipped_sums_equal_records_taken_one_by_one(name, candidates):
    sizes = [5, 0, 8][:candidates]
    kernel, params, rows, gradients = make(name, candidates, 8, sizes)
    norms = torch.cat([g.norm(dim=1) for g in gradients])
    for bound in (float(norms.median()), 1e6):
        out = torch.zeros_like(params)
        halves = torch.zeros(candidates)
        assert kernel.accumulate(params, rows, Flat(bound), out=out, halves=halves) is None
        for k, own in enumerate(gradients):
            close(out[k], clipped_sum(own, bound))
            unclipped = (own.norm(dim=1) <= bound * (1 + 1e-6)).float()
            assert abs(float((unclipped - 0.5).sum() - halves[k])) <= 1.0


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((5, 2), (2, 3), (0, 1), (1, 2)),
        ((4, 3), (3, 1), (2, 0), (2, 1)),
    ],
)
def test_gradients_of_windows_are_those_of_a_convolution(kernel, stride, padding, dilation):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 1, 2, 13, 11, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 2, *kernel, generator=generator, dtype=torch.float64)
    weight.requires_grad_()
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    for k in range(2):
        for b in range(3):
            y = F.conv2d(images[k, b], weight, **options)
            g = torch.randn(y.shape, generator=generator, dtype=torch.float64)
            (expected,) = torch.autograd.grad(y, weight, g)
            windows = Windows(kernel, stride, padding, dilation, tuple(y.shape[2:]))
            rows = g.permute(0, 2, 3, 1).reshape(1, 1, -1, 4)
            image_alone = images[k : k + 1, b : b + 1]
            by_rows = windows.gradients(image_alone, rows).view(4, *kernel, 2)
            patches = windows.patches(image_alone)
            by_patches = (rows.mT @ patches).view(4, *kernel, 2)
            for gradient in (by_rows, by_patches):
                torch.testing.assert_close(gradient.permute(0, 3, 1, 2), expected)
    # Of all images at once, each record's is its own.
    y = F.conv2d(images.flatten(0, 2), weight, **options)
    rows = torch.randn(2, 3, y[0, 0].numel(), 4, generator=generator, dtype=torch.float64)
    together = windows.gradients(images, rows)
    alone = windows.gradients(images[1:, 2:], rows[1:, 2:])
    torch.testing.assert_close(together[1, 2], alone[0, 0])


def test_convolutions_and_group_norms_have_rules():
    kernel, *_ = make("conv2d by rows", 1, 8, [8])
    forms = [use.form for use in kernel.plan.uses if isinstance(use, ProductUse)]
    assert forms[:2] == ["formed", "formed"]
    kernel, *_ = make("group norm", 1, 8, [8])
    assert kernel.plan.copied == ()  # a group norm has a rule


@pytest.mark.parametrize("name", ["masked, lora", "masked, biases"])
def test_a_captured_pass_of_an_encoder_holds_no_copy_of_what_is_frozen(name):
    kernel, params, rows, gradients = make(name, 3, 8, [8, 8, 8])
    kernel._seen[3, 8] = 10**6
    out = summed(kernel, params, rows, Flat(0.1))
    for k, own in enumerate(gradients):
        close(out[k], clipped_sum(own, 0.1))
    graph = kernel._programs[3, 8][0]._run.__self__
    frozen = [p for p in kernel.module.parameters() if not p.requires_grad and p.ndim == 2]
    held = {b.data_ptr(): b for b in graph.buffers()}
    assert sum(p.data_ptr() in held for p in frozen) >= 5
    for p in frozen:
        held.pop(p.data_ptr(), None)
    assert not any(torch.equal(b, p) for b in held.values() for p in frozen)


def test_a_pass_too_large_to_be_captured_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(kernels, "_LARGE", 100)
    kernel, params, rows, gradients = make("masked, lora", 2, 8, [8, 8])
    kernel._seen[2, 8] = 10**6
    out = summed(kernel, params, rows, Flat(0.1))
    assert not kernel._programs
    for k, own in enumerate(gradients):
        close(out[k], clipped_sum(own, 0.1))


@pytest.mark.parametrize(
    "name", ["mlp relu in place", "conv2d", "embedding", "attention", "tied", "idle"]
)
def test_other_clippings(name):
    candidates, sizes = 2, [6, 8]
    kernel, params, rows, gradients = make(name, candidates, 8, sizes)
    size, layout = kernel.layout.size, kernel.layout

    out = summed(kernel, params, rows, Automatic(0.1))
    for k, own in enumerate(gradients):
        close(out[k], (own / (own.norm(dim=1, keepdim=True) + 0.1)).sum(0))

    spans = [
        (layout.spans[names[0]][0], layout.spans[names[-1]][1]) for names in layout.layers.values()
    ]
    out = summed(kernel, params, rows, EqualByLayer(0.3))
    for k, own in enumerate(gradients):
        parts = [clipped_sum(own[:, s:e], 0.3 / len(spans) ** 0.5) for s, e in spans]
        close(out[k], torch.cat(parts))

    center, scale = torch.randn(candidates, size) * 0.1, torch.rand(candidates, size) + 0.5
    out = summed(kernel, params, rows, CoordinateTransform(center, scale))
    for k, own in enumerate(gradients):
        close(out[k], clipped_sum((own - center[k]) / scale[k], 1.0))


@pytest.mark.parametrize(
    "name", ["mlp relu in place", "conv2d 1x1 ghost", "conv2d options", "linear sequence direct"]
)
def test_a_transform_does_not_lose_to_cancellation(name):
    """Centers next to the gradients and tiny scales: three large terms that nearly cancel."""
    kernel, params, rows, gradients = make(name, 2, 6, [6, 4], dtype=torch.float64)
    center = torch.stack([own.mean(0) for own in gradients])
    center += 1e-6 * torch.randn(center.shape, dtype=torch.float64)
    for scale in (1.0, 1e-5):
        scales = torch.full_like(center, scale)
        out = summed(kernel, params, rows, CoordinateTransform(center, scales))
        for k, own in enumerate(gradients):
            expected = clipped_sum((own - center[k]) / scale, 1.0)
            torch.testing.assert_close(out[k], expected, rtol=1e-6, atol=1e-7)
    # In single precision one record's share of the sum stays within the norm it is charged for.
    kernel, params, rows, gradients = make(name, 1, 1, [1])
    center = gradients[0].mean(0, keepdim=True) * (1.0 + 1e-6)
    clipping = CoordinateTransform(center, torch.full_like(center, 1e-9))
    out = summed(kernel, params, rows, clipping)
    assert float(out.double().norm()) <= 1.0 + 1e-5


def test_layers_take_the_form_that_they_should():
    kernel, *_ = make("linear sequence ghost", 1, 2, [2])
    assert [use.form for use in kernel.plan.uses] == ["ghost", "outer"]
    kernel, *_ = make("linear sequence direct", 1, 2, [2])
    assert [use.form for use in kernel.plan.uses] == ["formed", "formed", "outer"]
    kernel, *_ = make("conv2d 1x1 ghost", 1, 2, [2])
    assert [use.form for use in kernel.plan.uses] == ["ghost", "outer"]


def test_a_weight_that_is_used_again_keeps_its_rule():
    kernel, *_ = make("reused", 1, 2, [2])
    assert kernel.plan.copied == ()
    assert [type(use) for use in kernel.plan.uses] == [ProductUse, DirectUse, ProductUse]
    kernel, *_ = make("tied", 1, 2, [2])
    assert [type(use) for use in kernel.plan.uses] == [ProductUse]
    kernel, *_ = make("by hand", 1, 2, [2])
    assert kernel.plan.copied == ("scale",)
    assert kernel.plan.multiplied == ()  # it is multiplied, and its sine added, element by element
    kernel, *_ = make("attention", 1, 2, [2])
    assert not any(isinstance(use, DirectUse) for use in kernel.plan.uses)


def test_float64_models():
    kernel, params, rows, gradients = make("conv2d", 2, 4, [4, 3], dtype=torch.float64)
    out = summed(kernel, params, rows, Flat(0.5))
    for k, own in enumerate(gradients):
        torch.testing.assert_close(out[k], clipped_sum(own, 0.5), rtol=1e-10, atol=1e-12)


def test_gram_norms_do_not_lose_to_cancellation():
    """Tokens that cancel: float32 Gram norms can be too small, and 1.35 times the bound leaves."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(50):
        half = torch.randn(1, 1, 8, 64, generator=generator) * 1e3
        a = torch.cat([half, half * (1 + 3e-8) + 1e-3], dim=2)
        g = torch.randn(1, 1, 8, 64, generator=generator)
        g = torch.cat([g, -g], dim=2)
        use = ProductUse("w", "b", "ghost")
        squared, saved = use.squared_norms(a, g)
        coefficient = (1.0 / squared.sqrt()).clamp(max=1.0)
        out = {"w": torch.zeros(1, 64 * 64), "b": torch.zeros(1, 64)}
        use.accumulate(coefficient, saved, out)
        released = torch.cat([out["w"], out["b"]], dim=1).double().norm()
        worst = max(worst, float(released))
    assert worst <= 1.0 + 1e-6


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_a_transformed_norm_is_never_too_short(spread):
    """Norms of float32 against those of gradients that are formed in float64, as they cancel."""
    kernel, params, rows, _ = make("mlp relu in place", 2, 40, [40, 40])
    program, uses = kernel._program(params, rows, (), normed=False)
    pairs = split(uses, program(params, rows.x, rows.y))
    with torch.no_grad():
        own = {
            name: values.double()
            for use, parts in zip(uses, pairs, strict=True)
            for name, values in use.instantiate(*(part.double() for part in parts)).items()
        }
        gradients = torch.cat([own[name] for name in kernel.layout.spans], dim=2)
        # Centers next to one record: its three terms cancel the more, the less they are apart.
        center = (gradients[:, 0] * (1.0 + spread * torch.randn_like(gradients[:, 0]))).float()
        scale = 10.0 ** torch.empty_like(center).uniform_(-6.0, 2.0)
        norms, _ = Transformed(uses, kernel.layout, CoordinateTransform(center, scale)).norms(pairs)
        single, _ = _Products(uses, kernel.layout, center, scale).norms(pairs)  # in float32 alone
        exact = ((gradients - center.double().unsqueeze(1)) / scale.double().unsqueeze(1)).norm(
            dim=2
        )
    for found in (norms, single):
        assert bool((found[0].double() >= exact * (1.0 - 1e-6)).all())
    assert bool((norms[0].double() <= exact * 1.01).all())  # far centers are taken in float64


def test_products_that_torch_may_shorten_are_taken_in_float64():
    kernel, params, rows, _ = make("mlp relu in place", 1, 4, [4])
    program, uses = kernel._program(params, rows, (), normed=False)
    layout, flat = kernel.layout, torch.ones_like(params)
    pairs = split(uses, program(params, rows.x, rows.y))
    torch.set_float32_matmul_precision("medium")
    try:
        sums = Transformed(uses, layout, CoordinateTransform(flat, flat))
        _, saved = sums.norms(pairs)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {part.dtype for way in saved for kept in way for part in kept} == {torch.float64}


@pytest.mark.parametrize("name", ["mlp relu in place", "linear no bias", "idle"])
@pytest.mark.parametrize("times", [1.0, 5000.0])
def test_norms_of_transforms_that_are_captured_are_those_of_the_plain_pass(
    name, times, monkeypatch
):
    """Bit by bit: with a record that is no number, and with a candidate whose center is far."""
    found = []
    for rare, few in ((10**6, 2**23), (0, 2**23), (0, 2**10)):
        monkeypatch.setattr(kernels, "_RARE", rare)
        monkeypatch.setattr(kernels, "_FEW_BYTES", few)
        kernel, params, rows, gradients = make(name, 2, 8, [8, 7])
        rows.x[1, 2] = torch.nan
        scale = 0.3 + torch.rand_like(params)
        center = 0.01 * torch.randn_like(params)
        center[1] *= times
        out, halves = torch.zeros_like(params), torch.zeros(2)
        clipping = CoordinateTransform(center, scale, 0.7)
        bad = kernel.accumulate(params, rows, clipping, out=out, halves=halves)
        assert bad.tolist() == [0, 1]
        assert sum(len(key) == 3 for key in kernel._programs) == (rare == 0 and few == 2**23)
        close(out[0], clipped_sum((gradients[0] - center[0]) / scale[0], 0.7))
        found.append((out, halves))
    for values in zip(*found, strict=True):
        assert all(torch.equal(values[0], other) for other in values[1:])


def test_a_far_center_changes_no_bit_of_another_candidate():
    kernel, params, rows, gradients = make("mlp relu in place", 2, 8, [8, 8])
    scale = torch.full_like(params, 0.1)
    near = 0.01 * torch.randn_like(params)
    far = torch.stack([near[0], 50.0 * torch.randn_like(near[1])])
    sums = [
        summed(kernel, params, rows, CoordinateTransform(center, scale)) for center in (near, far)
    ]
    assert torch.equal(sums[0][0], sums[1][0])
    own = gradients[1].double()
    close(sums[1][1], clipped_sum((own - far[1].double()) / 0.1, 1.0).float())


@pytest.mark.parametrize("ignored", [0, 2, -1])
def test_a_class_may_be_ignored_and_a_target_may_become_one_that_is(ignored):
    """Where no target is negative, no index was taken to be ignored: a record was trained on, or lost."""

    def loss(outputs, targets):
        if ignored < 0:
            targets = targets.masked_fill(targets == 2, ignored)
        return F.cross_entropy(outputs, targets, reduction="none", ignore_index=ignored)

    x, y = torch.randn(1, 6, 4), torch.tensor([[0, 1, 2, 0, 1, 2]])
    kernel = BatchedKernel(
        lambda: nn.Linear(4, 3), LossOfOutputs(loss), x=x[0], y=y[0], device=CPU, all_classes=True
    )
    params, rows = torch.randn(1, 15), rows_of(x, y)
    out = summed(kernel, params, rows, Flat(0.5))
    own = per_sample_gradients(nn.Linear(4, 3), params[0], x[0], y[0], loss)
    torch.testing.assert_close(out[0], clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)
    found = kernel.losses(params, rows)[0]
    assert (found == 0.0).tolist() == (y[0] == (2 if ignored else 0)).tolist()


@pytest.mark.parametrize("activation", [nn.SiLU, nn.GELU])
def test_a_captured_pass_gives_the_bits_of_one_that_is_not(activation):
    """Else a training that goes on from its checkpoint, or a second one of its kernel, gives others."""
    x, y = torch.randn(2, 16, 6), torch.randint(3, (2, 16))
    kernel = BatchedKernel(
        lambda: nn.Sequential(nn.Linear(6, 40), activation(), nn.Linear(40, 3)),
        LossOfOutputs(cross_entropy),
        x=x[0],
        y=y[0],
        device=CPU,
    )
    params, rows = torch.randn(2, kernel.layout.size), rows_of(x, y)
    found = [summed(kernel, params, rows, Flat(0.5)) for _ in range(8)]
    assert all(torch.equal(each, found[0]) for each in found)
