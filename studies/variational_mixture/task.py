"""A Gaussian mixture in the plane, and a Gaussian posterior over its parameters, as a module.

The loss of a record is its own term of the negative evidence bound; there are no targets. A record
carries the standard normal draws at which its expected log likelihood is estimated: they are
public, drawn before the data is looked at, and leave with the record.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from privtune.tasks import Task, TaskData
from privtune.training.mechanism.data import TensorData

COMPONENTS, DIMENSIONS = 5, 2
_SIZES = (COMPONENTS - 1, COMPONENTS * DIMENSIONS, COMPONENTS)  # logits, means, log variances
LATENT = sum(_SIZES)
_FIRST_SD = 0.1


def points(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return records of five Gaussians with covariance 1 around 0 and (±1, ±1)."""
    centres = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    which = torch.randint(COMPONENTS, (count,), generator=generator)
    return centres[which] + torch.randn((count, DIMENSIONS), generator=generator)


def with_draws(x: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Return records with their draws behind them, each with its mirror image."""
    half = torch.randn((len(x), draws // 2, LATENT), generator=generator)
    return torch.cat([x, torch.cat([half, -half], dim=1).flatten(1)], dim=1)


def log_likelihood(x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """Return log p(x | latent): points [..., 2] and unconstrained parameters [..., 19]."""
    logits, means, log_variances = latent.split(_SIZES, dim=-1)
    logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)
    means = means.unflatten(-1, (COMPONENTS, DIMENSIONS))
    squares = (x.unsqueeze(-2) - means).square().sum(dim=-1)
    logs = -squares * (-log_variances).exp() / 2 - log_variances - math.log(2 * math.pi)
    return (logits.log_softmax(dim=-1) + logs).logsumexp(dim=-1)


def log_prior(latent: torch.Tensor) -> torch.Tensor:
    """Return the log density, but for a constant: Dir(1), N(0, I), Inv-Gamma(1, 1)."""
    logits, means, log_variances = latent.split(_SIZES, dim=-1)
    logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], dim=-1)
    # The Jacobians of softmax and exp are in it: they take the densities to what is unconstrained.
    return (
        logits.log_softmax(dim=-1).sum(dim=-1)
        - means.square().sum(dim=-1) / 2
        - (log_variances + (-log_variances).exp()).sum(dim=-1)
    )


def scaled(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a value as it is, whose gradient is multiplied by a factor that is held fixed."""
    factor = factor.detach()
    return factor * value + (value - factor * value).detach()


class Posterior(nn.Module):
    """A Gaussian with a diagonal covariance; outputs are the negative bounds of records.

    Args:
        records: How many records share the divergence from the prior.
        natural: Whether gradients are multiplied by the inverse Fisher information of the
            Gaussian: its variance for a mean, 1/2 for a log standard deviation. It is a function
            of the parameters alone, and so public.
    """

    def __init__(self, records: int, *, natural: bool) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(LATENT))
        self.log_sd = nn.Parameter(torch.full((LATENT,), math.log(_FIRST_SD)))
        self.records, self.natural = records, natural

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_sd = self.mean, self.log_sd
        if self.natural:
            variance = (2 * log_sd).exp()
            mean, log_sd = scaled(mean, variance), scaled(log_sd, torch.full_like(log_sd, 0.5))
        draws = x[:, DIMENSIONS:].unflatten(-1, (-1, LATENT))
        latent = mean + log_sd.exp() * draws
        fit = log_likelihood(x[:, None, :DIMENSIONS], latent).mean(dim=1)
        entropy = log_sd.sum()
        divergence = -entropy - log_prior(latent).mean(dim=1)
        return divergence / self.records - fit


def held_out(params: torch.Tensor, x: torch.Tensor, draws: torch.Tensor) -> float:
    """Return the expected log likelihood of a record, averaged over records and draws."""
    mean, log_sd = params.split(LATENT)
    latent = mean + log_sd.exp() * draws
    return log_likelihood(x[:, None], latent).mean().item()


def of_truth(x: torch.Tensor) -> float:
    """Return the mean log likelihood of records under the density that they were drawn from."""
    latent = torch.tensor([0.0] * 4 + [0, 0, 1, 1, 1, -1, -1, 1, -1, -1] + [0.0] * 5)
    return log_likelihood(x, latent).mean().item()


def records(*, train: int, tests: int, draws: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training records with their draws behind them, and held-out ones without."""
    generator = torch.Generator().manual_seed(0)
    x = points(train, generator)
    return with_draws(x, draws, generator), points(tests, generator)


def bound_of(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a record's loss: the output itself."""
    return outputs


def mixture() -> Task:
    """Return the task for a study: no classes; score it by ``{metric: loss, bound: ...}``."""
    sizes = {"train_records": 1000, "validation_records": 250, "test_records": 250}

    def load() -> TaskData:
        x, _ = records(train=sum(sizes.values()), tests=1)
        parts = x.split(list(sizes.values()))
        return TaskData(*(TensorData(part, torch.zeros(len(part))) for part in parts))

    return Task(
        name="variational-mixture",
        description="A Gaussian posterior over five Gaussians in the plane",
        **sizes,
        input_shape=(DIMENSIONS + 4 * LATENT,),
        classes=None,
        load=load,
        model=functools.partial(Posterior, 1000, natural=False),
        loss=bound_of,
        public_test=True,
    )
