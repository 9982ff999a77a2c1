"""Rules for weights that models use in many ways, for layers of one's own, and what they hold in memory."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune import InvalidInputError, norms_of
from privtune.training.engine import rules
from privtune.training.engine.kernels import BatchedKernel
from privtune.training.engine.train import choose_kernel
from privtune.training.mechanism.clipping import EqualByLayer, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import FallbackWarning, LossOfOutputs
from tests.training.simple import clipped_sum, cross_entropy, per_sample_gradients, rows_of, summed

CPU = torch.device("cpu")
TOKENS = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(0))


def of_classes(outputs, targets):
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets, reduction="none")


def of_tokens(outputs, targets):
    logits = getattr(outputs, "logits", outputs)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.table, self.body = nn.Embedding(20, 5), kind(5, 4, **options)
        size = options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(size, 3)

    def forward(self, x):
        first = self.body.batch_first
        h = self.table(x) if first else self.table(x).transpose(0, 1)
        return self.head(self.body(h)[0].mean(1 if first else 0))


def hugging(kind, **options):
    transformers = pytest.importorskip("transformers")
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    if kind == "GPT2LMHead":
        config = {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    own = getattr(transformers, f"{kind.split('For')[0].removesuffix('LMHead')}Config")
    return getattr(transformers, f"{kind}Model" if "LMHead" in kind else kind)(
        own(**config, **options)
    ).eval()


MODELS = {
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True, num_layers=2, bidirectional=True), TOKENS),
    "lstm, projected": (lambda: Recurrent(nn.LSTM, proj_size=2), TOKENS),
    "bert, masked": (lambda: hugging("BertForMaskedLM", vocab_size=20), TOKENS),
    "gpt2": (lambda: hugging("GPT2LMHead", vocab_size=20, n_positions=8), TOKENS),
    "vit": (
        lambda: hugging(
            "ViTForImageClassification", image_size=4, patch_size=2, num_channels=1, num_labels=3
        ),
        torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODELS)
def test_models_as_they_come_have_a_rule_for_every_parameter(name):
    """Building a kernel compares its sums with records taken one by one."""
    torch.manual_seed(0)
    make, x = MODELS[name]
    tokens = name in ("bert, masked", "gpt2")
    y, loss = (x, of_tokens) if tokens else (torch.tensor([0, 1, 2, 0]), of_classes)
    kernel = BatchedKernel(make, LossOfOutputs(loss), x=x, y=y, device=CPU)
    assert kernel.plan.multiplied == ()
    small = [kernel.layout.shapes[n] for n in kernel.plan.copied]
    assert all(
        len(shape) == 1 or shape[0] == 1 for shape in small
    )  # added or multiplied as they are


class Bilinear(nn.Module):
    """A layer that no rule covers: records are on both sides of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 5))

    def forward(self, x):
        return torch.einsum("bi,oij,bj->bo", x, self.weight, x)


def bilinear_rule(layer, inputs, grad):
    (x,) = inputs
    return {"weight": torch.einsum("bo,bi,bj->boij", grad, x, x)}


@pytest.fixture
def own():
    """A class of its own for each test: rules stay registered."""
    return type("Bilinear", (Bilinear,), {})


def kernel_of(kind):
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    model = nn.Sequential(nn.Linear(4, 5), kind())
    return (
        BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU),
        model,
        x,
        y,
    )


def test_a_rule_of_ones_own_is_used_and_gives_the_sums_of_single_records(own):
    assert kernel_of(own)[0].plan.multiplied == ("1.weight",)
    norms_of(own)(bilinear_rule)
    kernel, model, x, y = kernel_of(own)
    assert kernel.plan.copied == ()
    params = torch.randn(2, kernel.layout.size)
    rows = rows_of(x.repeat(2, 1, 1), y.repeat(2, 1))
    for _ in range(8):  # captured from the fifth on
        out = summed(kernel, params, rows, Flat(0.7))
        for k in range(2):
            gradients = per_sample_gradients(model, params[k], x, y, cross_entropy)
            torch.testing.assert_close(out[k], clipped_sum(gradients, 0.7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        lambda layer, inputs, grad: {"weight": 1.01 * bilinear_rule(layer, inputs, grad)["weight"]},
        lambda layer, inputs, grad: {"weight": bilinear_rule(layer, inputs, grad)["weight"].sum(0)},
        lambda layer, inputs, grad: {},
        lambda layer, inputs, grad: bilinear_rule(layer, [inputs[0].mul_(0.5)], grad),
    ],
)
def test_a_rule_that_gives_something_else_is_refused(rule, own):
    norms_of(own)(rule)
    with pytest.raises(
        InvalidInputError, match=r"1 \(Bilinear\).*gradients of each record|writes to what"
    ):
        kernel_of(own)


def test_a_rule_sees_one_record(own):
    """One that shortened all gradients where one is large would move the sum by 62 times the bound."""

    def rule(layer, inputs, grad):
        assert grad.shape[0] == inputs[0].shape[0] == 1
        large = grad.abs().amax().clamp_min(100.0) / 100.0
        return {"weight": bilinear_rule(layer, inputs, grad / large)["weight"]}

    norms_of(own)(rule)
    model = nn.Sequential(nn.Linear(4, 5), own())
    loss = LossOfOutputs(lambda outputs, targets: (outputs * targets).sum(1))
    x, y = torch.randn(1, 65, 4), torch.ones(1, 65, 3)
    kernel = BatchedKernel(lambda: model, loss, x=x[0], y=y[0], device=CPU)
    params, sums = torch.randn(1, kernel.layout.size), []
    for last in (0.0, 1e10):
        y[0, 64] = last
        sums.append(summed(kernel, params, rows_of(x, y), Flat(0.5)))
    assert float((sums[1] - sums[0]).norm()) <= 0.5 + 1e-4


class Twice(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.part = kind()

    def forward(self, x):
        return self.part(nn.functional.pad(self.part(x), (0, 2)))


def test_a_layer_with_a_rule_may_be_called_twice(own):
    norms_of(own)(bilinear_rule)
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    kernel = BatchedKernel(lambda: Twice(own), LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    assert [type(use) for use in kernel.plan.uses] == [rules.DirectUse]
    assert kernel.plan.copied == ()


def test_a_right_rule_is_not_blamed_for_a_loss_that_no_rule_serves(own):
    """A loss that takes gradients itself is served by copies, with a rule or without one."""
    norms_of(own)(bilinear_rule)

    def loss(model, x, y):
        slope = torch.func.grad(lambda z: model(z).sum())(x)
        return cross_entropy(model(x), y) + slope.square().sum().unsqueeze(0)

    x, y = torch.randn(6, 4), torch.arange(6) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), own())
    kernel = BatchedKernel(lambda: model, loss, x=x, y=y, device=CPU)
    assert set(kernel.plan.copied) == set(kernel.layout.shapes)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 4)).transpose(1, 2).split(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5, bias=False), nn.Linear(5, 3)

    def forward(self, x):
        return torch.addmm(self.b.bias, x.mean(1) @ self.a.weight.T, self.b.weight.t())


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, padding_idx=1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1) + self.table.weight[:2].sum(0))


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Grouped, torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))),
        (Sliced, TOKENS),
        (Transposed, torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(5, 3)),
            torch.ones(4, 4, 1, 1),
        ),
    ],
)
def test_other_ways_of_use(make, x):
    y = torch.tensor([0, 1, 2, 0])
    kernel = BatchedKernel(make, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    assert kernel.plan.multiplied == ()


class Apart(nn.Module):
    """A head whose bias lies in another layer, as that of a masked language model."""

    def __init__(self):
        super().__init__()
        self.body, self.other = nn.Linear(4, 3, bias=False), nn.Module()
        self.other.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return F.linear(x, self.body.weight, self.other.bias)


def test_a_bias_of_another_layer_is_clipped_with_its_own():
    """By layer, each to its own bound."""
    x, y, model = torch.randn(6, 4), torch.arange(6) % 3, Apart()
    kernel = BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    params = torch.randn(1, 15)
    out = summed(kernel, params, rows_of(x[None], y[None]), EqualByLayer(0.3))
    own = per_sample_gradients(model, params[0], x, y, cross_entropy)
    parts = [clipped_sum(part, 0.3 / 2**0.5) for part in (own[:, :12], own[:, 12:])]
    torch.testing.assert_close(out[0], torch.cat(parts), rtol=1e-4, atol=1e-5)


def test_rows_that_lie_within_others_are_computed_as_they_are():
    x, y = torch.randn(1, 24, 4), torch.arange(24)[None] % 3
    model = nn.Linear(4, 3)
    kernel = BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x[0], y=y[0], device=CPU)
    params = torch.randn(1, 15)
    for number in range(8):
        part = slice(8 * (number % 3), 8 * (number % 3) + 8)
        out = summed(kernel, params, rows_of(x[:, part], y[:, part]), Flat(0.5))
        own = per_sample_gradients(model, params[0], x[0, part], y[0, part], cross_entropy)
        torch.testing.assert_close(out[0], clipped_sum(own, 0.5), rtol=1e-4, atol=1e-5)


def test_a_rule_is_for_a_class_of_layers():
    with pytest.raises(InvalidInputError, match=r"class of torch\.nn\.Module"):
        norms_of(nn.Linear(1, 1))


def test_a_weight_without_a_rule_is_named_with_what_it_costs(own):
    data = TensorData(torch.randn(6, 4), torch.arange(6) % 3)
    model = nn.Sequential(nn.Linear(4, 5), own())
    with pytest.warns(FallbackWarning, match=r"how 1\.weight are used.*norms_of"):
        choose_kernel(model, LossOfOutputs(cross_entropy), data, CPU)
    norms_of(own)(bilinear_rule)  # a kernel that was kept is not used with another rule
    assert choose_kernel(model, LossOfOutputs(cross_entropy), data, CPU).plan.multiplied == ()


@pytest.mark.parametrize("limit", [0, 2**26])
def test_gradients_that_are_not_kept_give_the_same_sums(limit, monkeypatch):
    """Norms first, a few records at a time, and then the weighted sum: where keeping takes too much."""
    monkeypatch.setattr(rules, "_DIRECT_BYTES", limit)
    monkeypatch.setattr(rules, "_PIECE_BYTES", 200)
    torch.manual_seed(0)
    x, y = torch.randn(7, 9, 3), torch.arange(7) % 2
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))
    kernel = BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    assert kernel.plan.uses[0].form == ("formed" if limit else "twice")
    params = torch.randn(1, kernel.layout.size)
    out = summed(kernel, params, rows_of(x[None], y[None]), Flat(0.3))
    expected = clipped_sum(per_sample_gradients(model, params[0], x, y, cross_entropy), 0.3)
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-6)


def test_a_pass_lets_go_of_its_tensors_without_the_collector():
    """Else memory grows by a pass and another, until Python happens to collect."""
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(2, 3, 4), torch.arange(2)
    kernel = BatchedKernel(lambda: model, LossOfOutputs(cross_entropy), x=x, y=y, device=CPU)
    program, _ = kernel.passes.tape()
    params = torch.zeros(1, kernel.layout.size)
    gc.collect()
    gc.disable()
    try:
        program(params, x[None], y[None])
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [found for found in gc.garbage if torch.is_tensor(found)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
