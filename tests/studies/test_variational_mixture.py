"""The mixture's density, bound and natural gradient against torch.distributions, and as a study."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as D
from torch.func import functional_call, grad, vmap

import privtune
from studies.variational_mixture import task


def density(latent: torch.Tensor) -> D.Distribution:
    logits, means, log_variances = latent.split([4, 10, 5])
    parts = D.MultivariateNormal(
        means.view(5, 2), log_variances.exp()[:, None, None] * torch.eye(2)
    )
    return D.MixtureSameFamily(D.Categorical(logits=torch.cat([logits, torch.zeros(1)])), parts)


def test_the_likelihood_is_that_of_the_mixture():
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(task.LATENT, generator=generator)
    x = torch.randn((50, 2), generator=generator)
    assert torch.allclose(task.log_likelihood(x, latent), density(latent).log_prob(x), atol=1e-5)


def test_the_prior_is_that_of_the_paper_in_what_is_unconstrained():
    generator = torch.Generator().manual_seed(4)
    latent = torch.randn((6, task.LATENT), generator=generator, dtype=torch.float64)

    def known(row: torch.Tensor) -> torch.Tensor:
        logits, means, log_variances = row.split([4, 10, 5])
        shares = torch.cat([logits, logits.new_zeros(1)]).softmax(0)
        variance = log_variances.exp()
        jacobian = shares.log().sum()  # of the first four shares by the logits
        return (
            D.Dirichlet(torch.ones(5, dtype=torch.float64)).log_prob(shares)
            + jacobian
            + D.Normal(0.0, 1.0).log_prob(means).sum()
            + (D.InverseGamma(1.0, 1.0).log_prob(variance) + log_variances).sum()
        )

    found = task.log_prior(latent)
    expected = torch.stack([known(row) for row in latent])
    assert torch.allclose(found - found[0], expected - expected[0], atol=1e-6)
    shares = torch.autograd.functional.jacobian(
        lambda y: torch.cat([y, y.new_zeros(1)]).softmax(0)[:4], latent[0, :4]
    )
    whole = torch.cat([latent[0, :4], latent.new_zeros(1)]).softmax(0)
    assert torch.allclose(torch.linalg.slogdet(shares)[1], whole.log().sum())


def test_natural_gradients_are_plain_ones_times_the_inverse_fisher_information():
    generator = torch.Generator().manual_seed(5)
    x, _ = task.records(train=20, tests=1)
    plain = task.Posterior(20, natural=False)
    natural = task.Posterior(20, natural=True)
    values = {
        "mean": torch.randn(task.LATENT, generator=generator),
        "log_sd": torch.randn(task.LATENT, generator=generator) / 2,
    }
    assert torch.allclose(
        functional_call(plain, values, (x,)), functional_call(natural, values, (x,))
    )

    def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        def loss(p: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return functional_call(module, p, (row[None],))[0]

        return vmap(grad(loss), (None, 0))(values, x)

    one, other = gradients(plain), gradients(natural)
    # The Fisher information of a Gaussian by (mean, log sd), estimated from its scores.
    sd = values["log_sd"].exp()
    draws = torch.randn((200_000, task.LATENT), generator=generator)
    fisher = {
        "mean": (draws / sd).square().mean(0),
        "log_sd": (draws.square() - 1).square().mean(0),
    }
    for name, information in fisher.items():
        assert torch.allclose(other[name] * information, one[name], rtol=0.05, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_study_takes_a_task_without_classes(tmp_path):
    study = privtune.create_study(
        "mixture",
        task="studies.variational_mixture.task:mixture",
        budget=privtune.Budget(8.0, 1e-5, name="points"),
        arms=[
            {
                "name": "selection",
                "strategy": "papernot-steinke",
                "mean_runs": 2,
                "parameters": {"max_grad_norm": 1.0},
            },
            {"name": "adadp", "strategy": "adadp", "parameters": {"max_grad_norm": 1.0}},
        ],
        space={"learning_rate": {"type": "float", "low": 0.1, "high": 1.0, "log": True}},
        scoring={"metric": "loss", "bound": 10.0},
        epochs=4,
        expected_batch_size=50,
        seed=0,
        storage=f"sqlite:///{tmp_path}/study.db",
        report={"metric": "loss", "bound": 10.0},
    )
    releases = {release.arm: release for release in study.run()}
    study.close()
    losses = {arm: release.utility.get("test_loss") for arm, release in releases.items()}
    assert losses["selection"] == pytest.approx(3.6, abs=0.4)
    assert (
        losses["adadp"] is not None
    )  # nothing but the report says how a model without trials is judged
