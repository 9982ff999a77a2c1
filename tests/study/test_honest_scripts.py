"""Scripts as notebooks have them run to a release; trainings that would not train are refused, uncharged."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import privtune
from privtune.errors import PrivTuneError
from privtune.execution.trained_weights import UntrainedWeightsWarning
from privtune.ledger import Ledger
from privtune.strategies import Fixed, PapernotSteinke, Release
from tests.study.elsewhere import optimize_own
from tests.zoo.trap import Net

RECORDS = 48
FEATURES = 6
CLASSES = 3
WORDS = 9
LENGTH = 5
BUDGET = privtune.Budget(6.0, 1e-5, name="scripts")
T = torch.Tensor
Loss = Callable[..., T]
Script = tuple[Callable[[], nn.Module], Loss, Callable[[], Any], dict[str, Any]]

pytestmark = pytest.mark.filterwarnings(
    "ignore::privtune.training.mechanism.kernel.FallbackWarning",
)

SCRIPTS: dict[str, Script] = {}


def script(
    name: str,
    model: Callable[[], nn.Module],
    loss: Loss,
    data: Callable[[], Any],
    **options: Any,
) -> None:
    """Enter a script: a model, the loss of a record, the data, and other arguments of ``optimize``."""
    SCRIPTS[name] = (model, loss, data, options)


# Records.


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def normal(*shape: int) -> T:
    return torch.randn(RECORDS, *shape, generator=generator())


def unit(*shape: int) -> T:
    return torch.rand(RECORDS, *shape, generator=generator())


def whole(most: int, *shape: int) -> T:
    return torch.randint(most, (RECORDS, *shape), generator=generator())


def rows() -> tuple[T, T]:
    return normal(FEATURES), whole(CLASSES)


def pictures() -> tuple[T, T]:
    return unit(1, 8, 8), whole(CLASSES)


def sequences() -> tuple[T, T]:
    return normal(LENGTH, 4), whole(CLASSES)


def texts() -> tuple[T, T]:
    return whole(WORDS, LENGTH), whole(CLASSES)


def labels_of_two() -> tuple[T, T]:
    """Return float labels of a column, as ``BCELoss`` wants them."""
    return normal(FEATURES), whole(2).float().unsqueeze(1)


def numbers() -> tuple[T, T]:
    x = normal(FEATURES)
    return x, x[:, 0] + 0.1 * x[:, 1]


def codes_and_numbers() -> tuple[T, T]:
    """Return a float table: a code from 0 to 4, a code of months from 1 to 12, and two amounts above 0."""
    columns = [whole(5).float(), 1.0 + whole(12).float(), unit() + 0.5, 100.0 * unit() + 1.0]
    return torch.stack(columns, dim=1), whole(CLASSES)


# Models.


def mlp(outputs: int = CLASSES, *, inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def probabilities() -> nn.Module:
    return nn.Sequential(mlp(1), nn.Sigmoid())


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, CLASSES),
    )


def recurrent(kind: type[nn.Module]) -> nn.Module:
    return Net(
        lambda m, x: m.head(m.body(x)[0][:, -1]),
        body=kind(4, 4, batch_first=True),
        head=nn.Linear(4, CLASSES),
    )


def words() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.table(x).mean(dim=1)),
        table=nn.Embedding(WORDS, 4, padding_idx=0),
        head=nn.Linear(4, CLASSES),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return Net(
        lambda m, x: m.head(m.body(m.table(x)).mean(dim=1)),
        table=nn.Embedding(WORDS, 4),
        body=nn.TransformerEncoder(layer, 1),
        head=nn.Linear(4, CLASSES),
    )


def autoencoder(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 64), last)


class Variational(nn.Module):
    """A variational autoencoder of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 4)
        self.decoder = nn.Linear(2, 64)

    def forward(self, x: T) -> tuple[T, T, T]:
        """Return what is rebuilt, and the mean and log-variance behind it."""
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z).sigmoid(), mean, log_variance


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank change of it, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.frozen = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, FEATURES))
        self.b = nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: T) -> T:
        """Return logits."""
        return self.frozen(x) + x @ self.a.T @ self.b.T


class Tied(nn.Module):
    """A language model whose embedding is its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: T) -> T:
        """Return logits of the next word at each place."""
        return self.head(self.table(x).cumsum(dim=1))


class Temperature(nn.Module):
    """A classifier with a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: T) -> T:
        """Return logits."""
        return self.body(x) / self.log_temperature.exp()


class Coded(nn.Module):
    """A table whose first two columns are codes, held as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 2)
        self.months = nn.Embedding(12, 2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: T) -> T:
        """Return logits."""
        code = self.first(x[:, 0].long())
        month = self.months(x[:, 1].long() - 1)
        return self.head(torch.cat([code, month, x[:, 2:].log()], dim=1))


class Hot(nn.Module):
    """A table whose first column is a code that is spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5 + 3, CLASSES)

    def forward(self, x: T) -> T:
        """Return logits."""
        hot = functional.one_hot(x[:, 0].to(torch.int64), 5).to(x.dtype)
        return self.head(torch.cat([hot, x[:, 1:]], dim=1))


class Residual(nn.Module):
    """A residual block whose last layer is zero at first, as large networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.outer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: T) -> T:
        """Return logits."""
        return self.head(x + self.outer(self.inner(x).relu()))


class Experts(nn.Module):
    """Two experts, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([mlp(), mlp()])

    def forward(self, x: T) -> T:
        """Return logits."""
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (self.gate(x).softmax(dim=1).unsqueeze(2) * outputs).sum(dim=1)


class Pooled(nn.Module):
    """A body with a pooler that this task does not use, as encoders of libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.pooler = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: T) -> T:
        """Return logits."""
        return self.body(x)


class Symmetric(nn.Module):
    """A parametrization: the matrix is used as a symmetric one."""

    def forward(self, matrix: T) -> T:
        """Return the symmetric matrix of the upper triangle."""
        return matrix.triu() + matrix.triu(1).T


def symmetric() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(FEATURES, CLASSES))


def weight_normed() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(FEATURES, 8))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, CLASSES))


def orthogonal() -> nn.Module:
    layer = parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES), use_trivialization=False)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(FEATURES, CLASSES))


def half_frozen() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(8, CLASSES))


# Losses of one record.


def ce(m: Any, x: T, y: T) -> T:
    return functional.cross_entropy(m(x), y, reduction="none")


def ce_mean(m: Any, x: T, y: T) -> T:
    return nn.CrossEntropyLoss()(m(x), y)


def weighted(m: Any, x: T, y: T) -> T:
    weight = torch.tensor([1.0, 2.0, 0.5])
    return functional.cross_entropy(m(x), y, weight=weight, reduction="none")


def smoothed(m: Any, x: T, y: T) -> T:
    return functional.cross_entropy(m(x), y, label_smoothing=0.1, reduction="none")


def focal(m: Any, x: T, y: T) -> T:
    nll = ce(m, x, y)
    return (1.0 - (-nll).exp()).square() * nll


def nll(m: Any, x: T, y: T) -> T:
    return nn.NLLLoss()(functional.log_softmax(m(x), dim=1), y)


def bce(m: Any, x: T, y: T) -> T:
    return nn.BCELoss()(m(x), y)


def bce_squeezed(m: Any, x: T, y: T) -> T:
    return functional.binary_cross_entropy(m(x).squeeze(1), y.squeeze(1), reduction="none")


def bce_logits(m: Any, x: T, y: T) -> T:
    return nn.BCEWithLogitsLoss()(m(x), y)


def rebuilt_bce(m: Any, x: T, *_: T) -> T:
    return functional.binary_cross_entropy(m(x), x.flatten(1), reduction="none").mean(dim=1)


def rebuilt(m: Any, x: T, *_: T) -> T:
    return (m(x) - x.flatten(1)).square().mean(dim=1)


def elbo(m: Any, x: T, *_: T) -> T:
    found, mean, log_variance = m(x)
    pixels = functional.binary_cross_entropy(found, x.flatten(1), reduction="none").sum(dim=1)
    return pixels - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)


def mse(m: Any, x: T, y: T) -> T:
    return nn.MSELoss()(m(x).squeeze(1), y)


def huber(m: Any, x: T, y: T) -> T:
    return nn.HuberLoss()(m(x).squeeze(1), y)


def quantile(m: Any, x: T, y: T) -> T:
    error = y - m(x).squeeze(1)
    return torch.maximum(0.9 * error, -0.1 * error)


def poisson(m: Any, x: T, y: T) -> T:
    return nn.PoissonNLLLoss(log_input=True)(m(x).squeeze(1), y)


def poisson_full(m: Any, x: T, y: T) -> T:
    rate = functional.softplus(m(x).squeeze(1))
    return nn.PoissonNLLLoss(log_input=False, full=True)(rate, y)


def of_logarithm(m: Any, x: T, y: T) -> T:
    return (m(x).squeeze(1) - y.log()).square()


def gaussian(m: Any, x: T, y: T) -> T:
    mean, spread = m(x).unbind(dim=1)
    return nn.GaussianNLLLoss()(mean, y, functional.softplus(spread))


def beta(m: Any, x: T, y: T) -> T:
    a, b = (functional.softplus(m(x)) + 0.1).unbind(dim=1)
    return -torch.distributions.Beta(a, b).log_prob(y)


def gamma(m: Any, x: T, y: T) -> T:
    a, b = (functional.softplus(m(x)) + 0.1).unbind(dim=1)
    return -torch.distributions.Gamma(a, b).log_prob(y)


def bernoulli(m: Any, x: T, y: T) -> T:
    return -torch.distributions.Bernoulli(logits=m(x).squeeze(1)).log_prob(y.squeeze(1))


def categorical(m: Any, x: T, y: T) -> T:
    return -torch.distributions.Categorical(logits=m(x)).log_prob(y)


def counts(m: Any, x: T, y: T) -> T:
    return -torch.distributions.Poisson(m(x).squeeze(1).exp()).log_prob(y)


def multi_label(m: Any, x: T, y: T) -> T:
    return functional.binary_cross_entropy_with_logits(m(x), y, reduction="none").mean(dim=1)


def ordinal(m: Any, x: T, y: T) -> T:
    levels = (y.unsqueeze(1) > torch.arange(CLASSES - 1)).float()
    return functional.binary_cross_entropy_with_logits(m(x), levels, reduction="none").sum(dim=1)


def spread_targets(m: Any, x: T, y: T) -> T:
    hot = functional.one_hot(y.long(), CLASSES).float()
    return (m(x).softmax(dim=1) - hot).square().sum(dim=1)


def labels_from_one(m: Any, x: T, y: T) -> T:
    return functional.cross_entropy(m(x), y - 1, reduction="none")


def of_shares(m: Any, x: T, y: T) -> T:
    if not bool(((x.sum(dim=1) - 1.0).abs() < 1e-4).all()):
        raise ValueError("not shares")
    return ce(m, x, y)


def hinge(m: Any, x: T, y: T) -> T:
    return functional.multi_margin_loss(m(x), y, reduction="none")


def signs(m: Any, x: T, y: T) -> T:
    return functional.soft_margin_loss(m(x).squeeze(1), 2.0 * y.squeeze(1) - 1.0, reduction="none")


def divergence(m: Any, x: T, y: T) -> T:
    return functional.kl_div(m(x).log_softmax(dim=1), y, reduction="none").sum(dim=1)


def augmented(m: Any, x: T, y: T) -> T:
    return ce(m, x + 0.1 * torch.randn_like(x), y)


def next_words(m: Any, x: T, *_: T) -> T:
    logits = m(x)[:, :-1].transpose(1, 2)
    return functional.cross_entropy(logits, x[:, 1:], reduction="none").mean(dim=1)


def decayed(m: Any, x: T, y: T) -> T:
    return ce(m, x, y) + 1e-3 * sum(p.square().sum() for p in m.parameters())


def penalised(m: Any, x: T, y: T) -> T:
    x = x.clone().requires_grad_(True)
    loss = ce(m, x, y)
    (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    return loss + 0.1 * slope.square().sum(dim=1)


def survival(m: Any, x: T, y: T) -> T:
    """Exponential survival: time and whether the event was seen, of one record."""
    time, event = y.unbind(dim=1)
    log_rate = m(x).squeeze(1)
    return log_rate.exp() * time - event * log_rate


def triplet(m: Any, x: T, *_: T) -> T:
    """Pull two views of one record together: contrastive within the record."""
    one = m(x + 0.1 * torch.randn_like(x))
    other = m(x + 0.1 * torch.randn_like(x))
    return 1.0 - functional.cosine_similarity(one, other, dim=1)


script("MLP", mlp, ce, rows)
script("MLP, mean of CrossEntropyLoss", mlp, ce_mean, rows)
script("MLP, accuracy", mlp, ce, rows, score="accuracy")
script("dropout", dropping, ce, rows)
script("CNN with GroupNorm", cnn, ce, pictures)
script("LSTM", lambda: recurrent(nn.LSTM), ce, sequences)
script("GRU", lambda: recurrent(nn.GRU), ce, sequences)
script("embeddings", words, ce, texts)
script("transformer encoder", transformer, ce, texts)
script("language model, tied", Tied, next_words, lambda: whole(WORDS, LENGTH))
script("class weights", mlp, weighted, rows)
script("label smoothing", mlp, smoothed, rows)
script("focal loss", mlp, focal, rows)
script("log_softmax and NLLLoss", mlp, nll, rows)
script("sigmoid and BCELoss", probabilities, bce, labels_of_two)
script("sigmoid and BCELoss, squeezed", probabilities, bce_squeezed, labels_of_two)
script("BCEWithLogitsLoss", lambda: mlp(1), bce_logits, labels_of_two)
script("Bernoulli", lambda: mlp(1), bernoulli, labels_of_two)
script("Categorical", mlp, categorical, rows)
script("several labels", mlp, multi_label, lambda: (normal(FEATURES), whole(2, CLASSES).float()))
script("soft labels", mlp, divergence, lambda: (normal(FEATURES), unit(CLASSES).softmax(dim=1)))
script("BCE autoencoder", lambda: autoencoder(nn.Sigmoid()), rebuilt_bce, lambda: unit(1, 8, 8))
script(
    "BCE autoencoder, scored by its loss",
    lambda: autoencoder(nn.Sigmoid()), rebuilt_bce, lambda: unit(1, 8, 8),
    score=privtune.Score("loss", bound=2.0),
)  # fmt: skip
script("MSE autoencoder", lambda: autoencoder(nn.Identity()), rebuilt, lambda: unit(1, 8, 8))
script("variational autoencoder", Variational, elbo, lambda: unit(1, 8, 8))
script("regression", lambda: mlp(1), mse, numbers)
script("regression, declared range", lambda: mlp(1), mse, numbers, target_range=(-3.0, 3.0))
script("Huber", lambda: mlp(1), huber, numbers)
script("quantile", lambda: mlp(1), quantile, numbers)
script("Poisson regression", lambda: mlp(1), poisson, lambda: (normal(FEATURES), whole(6).float()))
script(
    "Poisson, rates, Stirling", lambda: mlp(1), poisson_full, lambda: (normal(FEATURES), whole(6).float())
)  # fmt: skip
script("Poisson distribution", lambda: mlp(1), counts, lambda: (normal(FEATURES), whole(6).float()))
script(
    "logarithm of targets", lambda: mlp(1), of_logarithm, lambda: (normal(FEATURES), 90.0 * unit() + 10.0),
    target_range=(10.0, 100.0),
)  # fmt: skip
script("Gaussian with its spread", lambda: mlp(2), gaussian, numbers)
script("Beta regression", lambda: mlp(2), beta, lambda: (normal(FEATURES), 0.8 * unit() + 0.1))
script("Gamma regression", lambda: mlp(2), gamma, lambda: (normal(FEATURES), unit() + 0.5))
script("ordinal", lambda: mlp(CLASSES - 1), ordinal, rows)
script(
    "one_hot of float targets", mlp, spread_targets, lambda: (normal(FEATURES), whole(CLASSES).float())
)  # fmt: skip
script("one_hot of whole targets", mlp, spread_targets, rows)
script(
    "labels from 1 as floats", mlp, lambda m, x, y: labels_from_one(m, x, y.long()),
    lambda: (normal(FEATURES), 1.0 + whole(CLASSES).float()),
)  # fmt: skip
script("labels from 1", mlp, labels_from_one, lambda: (normal(FEATURES), 1 + whole(CLASSES)))
script(
    "labels from 100, declared range", mlp,
    lambda m, x, y: functional.cross_entropy(m(x), y.long() - 100, reduction="none"),
    lambda: (normal(FEATURES), 100 + whole(CLASSES)), target_range=(100, 102),
)  # fmt: skip
script(
    "inputs that add up to 1", mlp, of_shares, lambda: (normal(FEATURES).softmax(dim=1), whole(CLASSES))
)  # fmt: skip
script("hinge of classes", mlp, hinge, rows)
script("signs as labels", lambda: mlp(1), signs, labels_of_two)
script("exponential survival", lambda: mlp(1), survival, lambda: (normal(FEATURES), unit(2)))
script("codes in float columns", Coded, ce, codes_and_numbers)
script("one_hot of a float column", Hot, ce, codes_and_numbers)
script("LoRA by hand, zero at first", LoRA, ce, rows)
script("residual block, zero at first", Residual, ce, rows)
script("mixture of experts", Experts, ce, rows)
script("frozen body", half_frozen, ce, rows)
script("learnt temperature", Temperature, ce, rows)
script("weight_norm", weight_normed, ce, rows)
script("a parametrization", symmetric, ce, rows)
script("orthogonal", orthogonal, ce, rows)
script("augmented", mlp, augmented, rows)
script("two views of one record", mlp, triplet, lambda: normal(FEATURES))
script("decay in the loss", mlp, decayed, rows)
script(
    "mean absolute error, declared range",
    lambda: mlp(1),
    mse,
    numbers,
    target_range=(-3.0, 3.0),
    score="mae",
)
script("gradient penalty by autograd.grad", mlp, penalised, rows)
script(
    "gradient penalty, scored by its loss", mlp, penalised, rows, score=privtune.Score("loss", bound=2.0)
)  # fmt: skip


def run(
    tmp_path: Path,
    build: Callable[[privtune.Trial], Any],
    loss: Loss,
    data: Any,
    **options: Any,
) -> tuple[Release | Exception, int]:
    """Run a script; return its release or its error, and how many charges there are."""
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = privtune.create_study("script", budget=BUDGET, storage=storage, seed=1)
    strategy = options.pop("strategy", Fixed())
    if "score" in options:
        strategy = PapernotSteinke(mean_runs=2)
        options["validation"] = data
        if isinstance(data, tuple):
            options["validation"] = tuple(part[36:] for part in data)
            data = tuple(part[:36] for part in data)
        else:
            options["validation"] = data[36:]
            data = data[:36]
    outcome: Release | Exception
    try:
        outcome = optimize_own(
            study,
            build,
            loss=loss,
            train=data,
            strategy=strategy,
            epochs=0.75,
            expected_batch_size=12,
            **options,
        )
    except Exception as error:
        outcome = error
    with Ledger(storage) as ledger:
        return outcome, len(ledger.charges(BUDGET.name))


def candidate(model: nn.Module, **options: Any) -> privtune.Candidate:
    """Return a candidate with plain SGD over what is trained of a model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return privtune.Candidate(model, torch.optim.SGD(trained, 0.1), max_grad_norm=1.0, **options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_honest_script_runs_to_a_release(name: str, tmp_path: Path) -> None:
    model, loss, data, options = SCRIPTS[name]
    outcome, charges = run(tmp_path, lambda trial: candidate(model()), loss, data(), **options)
    assert isinstance(outcome, Release), outcome
    assert charges == 1
    assert bool(outcome.weights.isfinite().all())


# Trainings that would not train.


class Untracked(nn.Module):
    """A body that runs without gradients, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: T) -> T:
        """Return logits."""
        with torch.no_grad():
            features = self.body(x).relu()
        return self.head(features)


class Bound(nn.Module):
    """A model whose pass is a closure over the model itself."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)
        self.run = lambda x: self.head(self.body(x)) if whole else self.body(x)
        self.whole = whole

    def forward(self, x: T) -> T:
        """Return logits."""
        return self.run(x) if self.whole else self.head(self.run(x))


class Masked(nn.Module):
    """A linear model of which a comparison chooses the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES))
        self.score = nn.Parameter(torch.randn(FEATURES, CLASSES))

    def forward(self, x: T) -> T:
        """Return logits."""
        return x @ (self.weight * (self.score > 0))


def over_another(model: nn.Module) -> privtune.Candidate:
    return privtune.Candidate(model, torch.optim.SGD(mlp().parameters(), 0.1))


def over_the_head(model: nn.Module) -> privtune.Candidate:
    head = list(model.children())[-1]
    return privtune.Candidate(model, torch.optim.SGD(head.parameters(), 0.1))


def all_frozen(model: nn.Module) -> privtune.Candidate:
    return privtune.Candidate(model.requires_grad_(False), torch.optim.SGD(model.parameters(), 0.1))


def short_steps(model: nn.Module, *, rate: float, norm: float) -> privtune.Candidate:
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate), max_grad_norm=norm)


def untracked_loss(m: Any, x: T, y: T) -> T:
    with torch.no_grad():
        return ce(m, x, y)


def of_a_state(m: Any, x: T, y: T) -> T:
    outputs = torch.func.functional_call(mlp(), m.state_dict(), (x,))
    return functional.cross_entropy(outputs, y, reduction="none")


def certain(m: Any, x: T, y: T) -> T:
    """Return the sum of a softmax, which is 1 whatever the weights are."""
    return m(x).softmax(dim=1).sum(dim=1)


def of_unit_length(m: Any, x: T, y: T) -> T:
    """Return the length of a normalised vector, which is 1 whatever the weights are."""
    return functional.normalize(m(x), dim=1).square().sum(dim=1)


def cox(m: Any, x: T, y: T) -> T:
    risk = m(x)[:, 0]
    return torch.logcumsumexp(risk, dim=0) - risk


def an_mlp() -> privtune.Candidate:
    return candidate(mlp())


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), mlp(inputs=8))


def drawn_base() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)), mlp())


GLOBAL = mlp()
Make = Callable[[], privtune.Candidate]
NOT_TRAINED: dict[str, tuple[Make, Loss, str]] = {
    "a copy in the loss": (an_mlp, lambda m, x, y: ce(copy.deepcopy(m), x, y), "no gradient in"),
    "a global model in the loss": (an_mlp, lambda m, x, y: ce(GLOBAL, x, y), "does not use"),
    "weights out of state_dict": (an_mlp, of_a_state, "no gradient in 0.weight"),
    "weights as data": (
        lambda: candidate(nn.Linear(FEATURES, CLASSES)),
        lambda m, x, y: functional.cross_entropy(x @ m.weight.data.T, y, reduction="none"),
        "no gradient in weight",
    ),
    "no_grad in the loss": (an_mlp, untracked_loss, "no gradient in"),
    "a loss that is detached": (an_mlp, lambda m, x, y: ce(m, x, y).detach(), "no gradient in"),
    "outputs that are detached": (
        an_mlp, lambda m, x, y: smoothed(lambda x: m(x).detach(), x, y), "no gradient in",
    ),
    "outputs that begin a graph of their own": (
        an_mlp,
        lambda m, x, y: smoothed(lambda x: m(x).detach().requires_grad_(), x, y),
        "no gradient in",
    ),
    "a number made into a tensor": (
        an_mlp,
        lambda m, x, y: torch.tensor([ce(m, x, y).item()], requires_grad=True),
        "no gradient in",
    ),
    "a body without gradients": (lambda: candidate(Untracked()), ce, "no gradient in body.weight, body.bias"),
    "one weight detached": (
        lambda: candidate(nn.Linear(FEATURES, CLASSES)),
        lambda m, x, y: smoothed(lambda x: functional.linear(x, m.weight.detach(), m.bias), x, y),
        "no gradient in weight,",
    ),
    "weights that a comparison chooses": (lambda: candidate(Masked()), ce, "no gradient in score,"),
    "a closure over the model": (lambda: candidate(Bound(whole=True)), ce, "not of a copy"),
    "a closure over a part of the model": (
        lambda: candidate(Bound(whole=False)), ce, "reaches body.weight, body.bias of the model that build",
    ),
    "the sign of outputs": (
        an_mlp, lambda m, x, y: smoothed(lambda x: m(x).sign(), x, y), "gradient .* is 0",
    ),
    "rounded outputs": (
        an_mlp, lambda m, x, y: smoothed(lambda x: m(x).round(), x, y), "gradient .* is 0",
    ),
    "a root at 0": (
        an_mlp, lambda m, x, y: (m(x) - m(x)).norm(dim=1) + (m(x) - m(x)).square().sum(dim=1).sqrt(),
        "or no number",
    ),
    "dropout of everything": (
        lambda: candidate(nn.Sequential(nn.Dropout(1.0), nn.Linear(FEATURES, CLASSES, bias=False))),
        ce, "does not reach its loss",
    ),
    "Cox's likelihood": (an_mlp, cox, "Cox"),
    "an optimizer over another model": (lambda: over_another(mlp()), ce, "some are of another model"),
    "an optimizer over the head alone": (lambda: over_the_head(mlp()), ce, "lacks 0.weight, 0.bias"),
    "all weights frozen": (lambda: all_frozen(mlp()), ce, "none of which requires gradients"),
    "a tiny clipping norm": (lambda: short_steps(mlp(), rate=0.1, norm=1e-12), ce, "max_grad_norm = 1e-12"),
    "a sum that is always 1": (an_mlp, certain, "noise is scaled to max_grad_norm = 1, so noise alone"),
    "a length that is always 1": (an_mlp, of_unit_length, "noise alone"),
    "a loss of tiny numbers": (an_mlp, lambda m, x, y: 1e-12 * ce(m, x, y), "noise alone"),
    "a huge clipping norm": (
        lambda: short_steps(mlp(), rate=0.1, norm=1e9), ce, r"max_grad_norm = 1e\+09, so noise alone",
    ),
    "a tiny learning rate": (lambda: short_steps(mlp(), rate=1e-15, norm=1.0), ce, "learning rate"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NOT_TRAINED)
def test_a_training_that_would_not_train_is_refused_before_the_charge(
    name: str, tmp_path: Path
) -> None:
    make, loss, says = NOT_TRAINED[name]
    outcome, charges = run(tmp_path, lambda trial: make(), loss, rows())
    assert isinstance(outcome, PrivTuneError), outcome
    assert re.search(says, str(outcome)), outcome
    assert charges == 0


def in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def with_compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)
    return model


def doubled() -> nn.Module:
    return Net(lambda m, x: m.body(2.0 * x), body=mlp())


def compiled_twice_as_large() -> nn.Module:
    return Net(torch.compile(lambda m, x: m.body(2.0 * x)), body=mlp())


def two(first: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    """Return two layers, the first of which is wrapped by a function."""
    return nn.Sequential(first(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


Pair = tuple[Callable[[], nn.Module], Callable[[], nn.Module]]
WRAPPED: dict[str, Pair] = {
    "torch.compile(model)": (lambda: torch.compile(mlp()), mlp),
    "model.compile()": (lambda: in_place(mlp()), mlp),
    "a compiled part": (lambda: two(torch.compile), two),
    "a part compiled in place": (lambda: two(in_place), two),
    "model.forward = torch.compile(model.forward)": (lambda: with_compiled_forward(mlp()), mlp),
    "a compiled function of the model": (compiled_twice_as_large, doubled),
    "DataParallel": (lambda: nn.DataParallel(mlp()), mlp),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_compiled_or_wrapped_model_is_trained_as_the_model_itself(
    name: str, tmp_path: Path
) -> None:
    weights = []
    for place, model in enumerate(WRAPPED[name]):
        folder = tmp_path / str(place)
        folder.mkdir()
        outcome, charges = run(folder, lambda trial, model=model: candidate(model()), ce, rows())
        assert isinstance(outcome, Release), outcome
        assert charges == 1
        weights.append(outcome.weights)
    assert torch.equal(*weights)


@pytest.mark.parametrize("options", [{}, {"score": "accuracy"}], ids=["shown", "sealed"])
def test_weights_without_a_part_in_the_loss_are_named_in_a_warning(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.warns(UntrainedWeightsWarning, match="pooler.weight, pooler.bias"):
        outcome, charges = run(tmp_path, lambda trial: candidate(Pooled()), ce, rows(), **options)
    assert isinstance(outcome, Release), outcome
    assert charges == 1


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        (lambda h: h.sign(), "body.weight, body.bias"),
        (lambda h: (4.0 * h).round() / 4.0, "body.weight, body.bias"),
        (lambda h: 0.0 * h, "body.weight, body.bias"),
        (lambda h: h + (h.sign() - h).detach(), ""),
    ],
    ids=["sign", "round", "times 0", "straight through"],
)
def test_weights_without_a_slope_are_named_in_a_warning(
    body: Callable[[T], T], warned: str, tmp_path: Path
) -> None:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        parts = {"body": nn.Linear(FEATURES, 8), "head": nn.Linear(8, CLASSES)}
        return candidate(Net(lambda m, x: m.head(body(m.body(x))), **parts))

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        outcome, charges = run(tmp_path, build, ce, rows())
    assert isinstance(outcome, Release), outcome
    assert charges == 1
    messages = [str(each.message) for each in shown if each.category is UntrainedWeightsWarning]
    assert len(messages) == (1 if warned else 0)
    assert all(warned in message for message in messages)


def test_a_normalised_gradient_may_be_small(tmp_path: Path) -> None:
    """Automatic clipping takes no norm that a gradient could be compared with."""

    def over_all(trial: privtune.Trial) -> privtune.Candidate:
        model = mlp()
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), 0.1))

    outcome, charges = run(
        tmp_path,
        over_all,
        lambda m, x, y: 1e-6 * ce(m, x, y),
        rows(),
        strategy=Fixed(method="automatic-clipping"),
    )
    assert isinstance(outcome, Release), outcome
    assert charges == 1


def test_an_optimizer_may_hold_what_is_frozen(tmp_path: Path) -> None:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = half_frozen()
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1))

    outcome, charges = run(tmp_path, build, ce, rows())
    assert isinstance(outcome, Release), outcome
    assert charges == 1
    assert torch.equal(outcome.model[0][0].weight, half_frozen()[0][0].weight)


class Spread(nn.Module):
    """A model with a spread that must be above 0, and a branch that is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.down = nn.Linear(FEATURES, 2, bias=False)
        self.up = nn.Linear(2, CLASSES, bias=False)
        self.spread = nn.Parameter(torch.ones(8))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: T) -> T:
        """Return logits."""
        if bool((self.spread <= 0.0).any()):
            raise ValueError("a spread must be above 0")
        return (self.head(x) + self.up(self.down(x))) / self.spread.mean()


@pytest.mark.filterwarnings("error")
def test_weights_at_which_a_model_raises_say_nothing(tmp_path: Path) -> None:
    """Random weights may lie outside of what a model takes."""
    outcome, charges = run(tmp_path, lambda trial: candidate(Spread()), ce, rows())
    assert isinstance(outcome, Release), outcome
    assert charges == 1


# What no made-up record suits, and what the message says.

NOT_ACCEPTED: dict[str, tuple[Make, Loss, Callable[[], Any], str]] = {
    "outputs outside of [0, 1]": (
        lambda: candidate(nn.Linear(FEATURES, 1)), lambda m, x, y: bce(lambda x: 9.0 + m(x), x, y),
        labels_of_two, r"on a made-up record .*between 0 and 1.*declare target_range",
    ),
    "floating labels": (
        an_mlp, ce, lambda: (normal(FEATURES), whole(CLASSES).float()), r"Write y\.long\(\) in the loss",
    ),
    "years from 1990": (
        lambda: candidate(words()), lambda m, x, y: ce(m, x - 1990, y),
        lambda: (1990 + whole(WORDS, LENGTH), whole(CLASSES)),
        r"begin at 0 in the data",
    ),
    "ages from 18": (
        lambda: candidate(words()), lambda m, x, y: ce(m, (x - 18).long(), y),
        lambda: (18.0 + whole(WORDS, LENGTH), whole(CLASSES)), r"begin at 0 in the data",
    ),
    "labels from 100, of which torch ignores what becomes -100": (
        an_mlp, lambda m, x, y: ce(m, x, y - 100), lambda: (normal(FEATURES), 100 + whole(CLASSES)),
        r"Let labels begin at 0 in the data",
    ),
    "labels from 500": (
        an_mlp, lambda m, x, y: ce(m, x, y - 500), lambda: (normal(FEATURES), 500 + whole(CLASSES)),
        r"declare target_range=\(low, high\) and write y\.long\(\)",
    ),
    "a column of another shape": (
        lambda: candidate(probabilities()), bce, lambda: (normal(FEATURES), whole(2).float()),
        r"outputs \(1, 1\) and targets \(1,\) .*squeeze\(1\)",
    ),
    "targets that are broadcast": (
        lambda: candidate(mlp(1)), lambda m, x, y: (m(x) - y).square(), numbers,
        r"outputs \(1, 1\) and targets \(1,\) .*squeeze\(1\)",
    ),
    "spectral norm": (
        lambda: candidate(spectral()),
        ce, rows, r"0.parametrizations.weight.0._u.*weight_norm",
    ),
    "a base that is drawn": (
        lambda: candidate(drawn_base()),
        ce, rows, r"0.parametrizations.weight.0.base",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ACCEPTED)
def test_a_refusal_on_made_up_records_names_the_cause(name: str, tmp_path: Path) -> None:
    make, loss, data, says = NOT_ACCEPTED[name]
    outcome, charges = run(tmp_path, lambda trial: make(), loss, data())
    assert isinstance(outcome, PrivTuneError), outcome
    assert re.search(says, str(outcome)), outcome
    assert "\n" not in str(outcome)
    assert charges == 0
