"""An oracle of the engine whose every release is held against what a canary would do to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from privtune.training.engine import train as engine
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle

LONG = 1e4
"""Norm of a canary's gradient: longer than any clipping norm."""


class WatchedOracle(StackOracle):
    """Adds up the log-likelihood ratio of "a canary is among the records" over all releases.

    The canary's gradient points along the first coordinate; clipped, it is as long as it may be. Its
    loss is above every bound. The best test of a known mechanism is a threshold on this ratio
    (Neyman and Pearson); if the mechanism is another one than was thought, it is a test all the same.
    """

    made: list[WatchedOracle]
    replaced = False  # whether the neighbour's canary points the other way, or is not there

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[int, tuple[float, torch.Tensor]] = {}
        self.made.append(self)

    def gradient(self, sample, params, *, clipping, noise_multiplier):
        answer = super().gradient(
            sample, params, clipping=clipping, noise_multiplier=noise_multiplier
        )
        self._see_gradient(sample, answer, clipping, noise_multiplier)
        return answer

    def gradient_and_fraction(self, sample, params, **kwargs):
        answer, fraction = super().gradient_and_fraction(sample, params, **kwargs)
        self._see_gradient(sample, answer, kwargs["clipping"], kwargs["noise_multiplier"])
        # A record that is clipped counts -1/2, of at most 1/2.
        count = (fraction - 0.5) * self._normaliser(sample) / 0.5
        self._see(sample, count, -1.0, kwargs["count_noise_multiplier"])
        return answer, fraction

    def losses(self, sample, params, *, bound, noise_multiplier, mechanism="gaussian"):
        answers = super().losses(
            sample, params, bound=bound, noise_multiplier=noise_multiplier, mechanism=mechanism
        )
        for answer in answers * self._normaliser(sample) / bound:
            self._see(sample, answer, 1.0, noise_multiplier, mechanism)
        return answers

    def ratio(self):
        """Return the log-likelihood ratio of each run; a sample holds the canary at its rate."""
        total = np.zeros(self.candidates)
        for rate, of_sample in self.seen.values():
            value = of_sample.numpy()
            mixed = np.log1p(-rate) if rate < 1.0 else -np.inf
            total += np.logaddexp(mixed, np.log(rate) + value)
        return total

    def _see_gradient(self, sample, answer, clipping, noise_multiplier):
        bound = clipping.sensitivity(self.candidates)
        first = answer.double()[:, 0]
        if isinstance(clipping, CoordinateTransform):
            first = (first - clipping.center[:, 0]) / clipping.scale[:, 0]
        self._see(sample, first * self._normaliser(sample) / bound, 1.0, noise_multiplier)

    def _see(self, sample, value, shift, noise_multiplier, mechanism="gaussian"):
        value, low, high = value.double(), 0.0, shift
        if self.replaced:
            low, high = -shift / 2, shift / 2
        if mechanism == "laplace":
            found = ((value - low).abs() - (value - high).abs()) / noise_multiplier
        else:
            found = (value - (low + high) / 2) * (high - low) / noise_multiplier**2
        rate, known = self.seen.get(sample.number, (sample.rate, torch.zeros_like(found)))
        self.seen[sample.number] = (rate, known + found)


@contextmanager
def watching(*, replaced: bool = False) -> Iterator[type[WatchedOracle]]:
    """Have the engine ask watched oracles, which are found in ``made``, a stack each, in order."""
    watched = type("Watched", (WatchedOracle,), {"made": [], "replaced": replaced})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "StackOracle", watched)
        yield watched


def model() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the record's features, wherever the parameters are."""
    return outputs[..., 0] + targets


def records(sign: float) -> TensorData:
    """Return a dataset: one record that counts as nothing, and a canary (or, at 0, none)."""
    nothing = torch.full((1, 2), torch.nan)
    canary = torch.tensor([[sign * LONG, 0.0]])
    x = nothing if sign == 0.0 else torch.cat([nothing, canary])
    # The canary's loss stays above every bound however its features and the parameters multiply.
    return TensorData(x, torch.full((len(x),), 1e9), sealed_size=True)


def ratios(method, schedule: Schedule, candidate, *, runs: int, sign: float, tag: int):
    """Train ``runs`` candidates on the canary's dataset; return what all their releases say."""
    secrets = [bytes([tag]) * 28 + number.to_bytes(4, "big") for number in range(runs)]
    replaced = getattr(method, "adjacency", "add-remove") == "replace-one"
    with watching(replaced=replaced) as watched:
        engine.train(
            method,
            schedule,
            model=model,
            loss=loss,
            data=records(-1.0 if replaced and sign == 0.0 else sign),
            candidates=[candidate] * runs,
            secrets=secrets,
            device="cpu",
        )
        return np.concatenate([oracle.ratio() for oracle in watched.made])
