"""A tiny private world in NumPy: logistic regression, Poisson samples, noise; and an oracle on it.

The oracle answers methods; the literal transcriptions of the papers use the world directly. Both
draw samples and noise from streams that start alike, so they must agree step by step.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import expit

from privtune.training.mechanism.clipping import CoordinateTransform, Flat
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import Transcript


class World:
    """Data of one candidate, with its own streams. Losses and gradients record by record."""

    def __init__(self, seed, records=40, features=3, rate=0.3, scale=1.0):
        data = np.random.default_rng(12345)
        self.x = data.normal(size=(records, features)) * scale
        self.y = np.sign(self.x @ np.ones(features) + 0.3 * data.normal(size=records))
        self.rate, self.records = rate, records
        self.batch = rate * records
        self.sampling = np.random.default_rng([seed, 0])
        self.noising = np.random.default_rng([seed, 1])

    def draw(self):
        return np.flatnonzero(self.sampling.random(self.records) < self.rate)

    def noise(self, size):
        return self.noising.normal(size=size)

    def laplace(self):
        return self.noising.laplace()

    def gradient(self, i, theta):
        return -self.y[i] * self.x[i] * expit(-self.y[i] * (self.x[i] @ theta))

    def loss(self, i, theta):
        return np.logaddexp(0.0, -self.y[i] * (self.x[i] @ theta))

    def start(self):
        return np.random.default_rng([len(self.y), 7]).normal(size=self.x.shape[1])


class LiteralOracle:
    """The oracle protocol over one world a candidate, in plain loops."""

    def __init__(self, worlds, steps):
        self.worlds = worlds
        self.candidates, self.pace = len(worlds), 1.0
        self.usual_size = (3.0 * worlds[0].x.shape[1]) ** -0.5
        first = worlds[0]
        self.schedule = Schedule(records=first.records, sample_rate=first.rate, steps=steps)
        self._transcripts = [Transcript() for _ in worlds]

    def start(self):
        return torch.tensor(np.stack([w.start() for w in self.worlds]))

    def sample(self):
        return self._open(self.schedule.sample_rate, [w.draw() for w in self.worlds])

    def everything(self):
        return self._open(1.0, [np.arange(w.records) for w in self.worlds])

    def _open(self, rate, rows):
        number = {t.open_sample(rate) for t in self._transcripts}.pop()
        return rate, number, rows

    def _record(self, number, kind, multipliers):
        for transcript, multiplier in zip(self._transcripts, multipliers, strict=True):
            transcript.record(number, kind, multiplier)

    def _multipliers(self, value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [float(value)] * self.candidates

    def gradient(self, sample, params, *, clipping, noise_multiplier):
        return self._gradients(sample, params, clipping, noise_multiplier)[0]

    def _gradients(self, sample, params, clipping, noise_multiplier):
        rate, number, rows = sample
        multipliers = self._multipliers(noise_multiplier)
        self._record(number, "gaussian", multipliers)
        sensitivity = clipping.sensitivity(self.candidates).numpy()
        out, halves = [], []
        for k, world in enumerate(self.worlds):
            theta = params[k].numpy()
            total, half = np.zeros_like(theta), 0.0
            for i in rows[k]:
                g = world.gradient(i, theta)
                if isinstance(clipping, CoordinateTransform):
                    g = (g - clipping.center[k].numpy()) / clipping.scale[k].numpy()
                length = float(np.linalg.norm(g))
                norm = torch.full((1, self.candidates, 1), length, dtype=torch.float64)
                total += float(clipping.coefficients(norm)[0, k, 0]) * g
                half += 0.5 if float(clipping.unclipped(norm)[k, 0]) else -0.5
            noise = world.noise(len(theta)) if multipliers[k] else 0.0
            mean = (total + multipliers[k] * sensitivity[k] * noise) / (rate * world.records)
            if isinstance(clipping, CoordinateTransform):
                mean = mean * clipping.scale[k].numpy() + clipping.center[k].numpy()
            out.append(mean)
            halves.append(half)
        return torch.tensor(np.stack(out)), halves

    def gradient_and_fraction(
        self, sample, params, *, clipping, noise_multiplier, count_noise_multiplier
    ):
        assert isinstance(clipping, Flat)
        gradient, halves = self._gradients(sample, params, clipping, noise_multiplier)
        rate, number, _ = sample
        multipliers = self._multipliers(count_noise_multiplier)
        self._record(number, "gaussian", multipliers)
        fractions = [
            (half + multiplier * 0.5 * (world.noise(1)[0] if multiplier else 0.0))
            / (rate * world.records)
            + 0.5
            for world, half, multiplier in zip(self.worlds, halves, multipliers, strict=True)
        ]
        return gradient, torch.tensor(fractions, dtype=torch.float64)

    def losses(self, sample, params, *, bound, noise_multiplier, mechanism="gaussian"):
        rate, number, rows = sample
        multipliers = self._multipliers(noise_multiplier)
        out = np.empty((len(params), self.candidates))
        for j, point in enumerate(params):
            self._record(number, mechanism, multipliers)
            for k, world in enumerate(self.worlds):
                limit = float(bound[k])
                total = sum(min(world.loss(i, point[k].numpy()), limit) for i in rows[k])
                noise = 0.0
                if multipliers[k]:
                    noise = world.noise(1)[0] if mechanism == "gaussian" else world.laplace()
                out[j, k] = (total + multipliers[k] * limit * noise) / (rate * world.records)
        return torch.tensor(out)

    def transcripts(self):
        return tuple(self._transcripts)


def run(method, candidates, *, seeds=(1, 2), steps=6, **world):
    """Run a method on the literal oracle; return the states after each step, and the oracle."""
    oracle = LiteralOracle([World(seed, **world) for seed in seeds], steps)
    state = method.init(oracle.start(), candidates)
    states = [state]
    for _ in range(steps):
        state = method.update(state, oracle)
        states.append(state)
    return states, oracle
