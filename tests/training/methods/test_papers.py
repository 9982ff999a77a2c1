"""Every transition against a slow, literal transcription of the paper, on random problems."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privtune.training.methods import (
    ADADP,
    METHODS,
    PUR,
    AdaCliP,
    AutomaticClipping,
    DAdaptation,
    DoG,
    DoWG,
    DPAdam,
    FixedDPSGD,
    HyFreeDP,
    NormBound,
    Prodigy,
    PublicRate,
    PURConstant,
    QuantileClipping,
)
from tests.training.methods.world import World, run

STEPS = 6
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 10_000)
sigmas = st.sampled_from([0.0, 0.4, 1.3])
rates = st.floats(0.01, 2.0)
norms = st.floats(0.1, 3.0)


def clip(g, bound):
    return g * min(1.0, bound / np.linalg.norm(g))


def noisy_mean(world, rows, theta, change, sigma, sensitivity):
    total = np.zeros_like(theta)
    for i in rows:
        total = total + change(world.gradient(i, theta))
    noise = world.noise(len(theta)) if sigma else 0.0
    return (total + sigma * sensitivity * noise) / world.batch


def clipped_mean(world, rows, theta, sigma, bound):
    return noisy_mean(world, rows, theta, lambda g: clip(g, bound), sigma, bound)


def scaled_mean(world, rows, theta, sigma):
    return noisy_mean(world, rows, theta, lambda g: g / (np.linalg.norm(g) + 0.01), sigma, 1.0)


def check(method, candidates, literal, *, steps=STEPS, seeds=(1, 2), fields=(), **world):
    """Compare the params (and named state) of each candidate after each step with the literal."""
    states, _ = run(method, candidates, seeds=seeds, steps=steps, **world)
    for k, seed in enumerate(seeds):
        trace = literal(World(seed, **world), candidates[k])
        for t, expected in enumerate(trace):
            theta, *rest = expected if isinstance(expected, tuple) else (expected,)
            got = states[t + 1]
            np.testing.assert_allclose(got.params[k].numpy(), theta, rtol=1e-9, atol=1e-11)
            for read, value in zip(fields, rest, strict=True):
                np.testing.assert_allclose(read(got)[k].numpy(), value, rtol=1e-8, atol=1e-11)


@few
@given(seed=seeds, sigma=sigmas, lr=rates, norm=norms, momentum=st.sampled_from([0.0, 0.9]))
def test_dpsgd(seed, sigma, lr, norm, momentum):
    def literal(world, candidate):
        theta, velocity = world.start(), 0.0
        for _ in range(STEPS):
            bound = candidate["max_grad_norm"]
            g = clipped_mean(world, world.draw(), theta, sigma, bound)
            velocity = momentum * velocity + g + 0.01 * theta
            theta = theta - candidate["learning_rate"] * velocity
            yield theta

    candidates = [
        {"learning_rate": lr, "max_grad_norm": norm},
        {"learning_rate": lr / 3, "max_grad_norm": norm * 2},
    ]
    check(FixedDPSGD(sigma, momentum, 0.01), candidates, literal, seeds=(seed, seed + 1))


@few
@given(seed=seeds, sigma=sigmas, lr=rates, norm=norms, decoupled=st.booleans())
def test_dp_adam(seed, sigma, lr, norm, decoupled):
    def literal(world, candidate):
        theta, m, v = world.start(), 0.0, 0.0
        for t in range(1, STEPS + 1):
            bound, rate = candidate["max_grad_norm"], candidate["learning_rate"]
            g = clipped_mean(world, world.draw(), theta, sigma, bound)
            if decoupled:
                theta = theta - rate * 0.1 * theta
                origin = theta / (1 - rate * 0.1)
            else:
                origin = theta
                g = g + 0.1 * origin
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g**2
            theta = theta - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            yield theta

    candidates = [{"learning_rate": lr, "max_grad_norm": norm}] * 2
    method = DPAdam(sigma, weight_decay=0.1, decoupled=decoupled)
    check(method, candidates, literal, seeds=(seed, seed + 1))


@few
@given(seed=seeds, sigma=sigmas, lr=rates, norm=norms, floor=st.sampled_from([0.01, 0.3, 2.0]))
@pytest.mark.parametrize("decoupled", [True, False])
def test_dp_adam_bc(seed, sigma, lr, norm, floor, decoupled):
    """Tang et al., Algorithm 1: the noise's variance is taken from the second moment, down to a floor."""

    def literal(world, candidate):
        theta, m, v = world.start(), 0.0, 0.0
        bound, rate = candidate["max_grad_norm"], candidate["learning_rate"]
        phi = (sigma * bound / world.batch) ** 2
        for t in range(1, STEPS + 1):
            g = clipped_mean(world, world.draw(), theta, sigma, bound)
            if not decoupled:
                g = g + 0.1 * theta
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            signal = np.maximum(v / (1 - 0.99**t) - phi, floor * phi)
            step = (m / (1 - 0.9**t)) / (np.sqrt(signal) + 1e-8)
            if decoupled:
                step = step + 0.1 * theta
            theta = theta - rate * step
            yield theta

    candidates = [
        {"learning_rate": lr, "max_grad_norm": norm},
        {"learning_rate": lr, "max_grad_norm": 2.0 * norm},
    ]
    method = DPAdam(sigma, beta2=0.99, weight_decay=0.1, decoupled=decoupled, noise_floor=floor)
    check(method, candidates, literal, seeds=(seed, seed + 1))


BOUND = float(max(np.linalg.norm(World(0).x, axis=1)))  # |gradient| <= |x|: nothing is clipped


@few
@given(seed=seeds, sigma=sigmas, lr=rates)
@pytest.mark.parametrize(
    ("make", "change", "sensitivity"),
    [
        (
            lambda sigma: AutomaticClipping(sigma, stabilizer=0.05),
            lambda g: g / (np.linalg.norm(g) + 0.05),
            1.0,
        ),
        (lambda sigma: NormBound(sigma, gradient_bound=BOUND), lambda g: g, BOUND),
    ],
    ids=["automatic-clipping", "norm-bound"],
)
def test_descent_along_other_gradients(make, change, sensitivity, seed, sigma, lr):
    def literal(world, candidate):
        theta = world.start()
        for _ in range(STEPS):
            g = noisy_mean(world, world.draw(), theta, change, sigma, sensitivity)
            theta = theta - candidate["learning_rate"] * g
            yield theta

    check(make(sigma), [{"learning_rate": lr}] * 2, literal, seeds=(seed, seed + 1))


@few
@given(seed=seeds, sigma=sigmas, count=st.sampled_from([0.0, 2.0]), lr=rates, norm=norms)
def test_quantile_clipping(seed, sigma, count, lr, norm):
    """Andrew et al., Algorithm 1, with the count encoded as ±1/2 and expected batch sizes."""

    def literal(world, candidate):
        theta, bound = world.start(), candidate["max_grad_norm"]
        for _ in range(STEPS):
            rows = world.draw()
            unclipped = sum(np.linalg.norm(world.gradient(i, theta)) <= bound for i in rows)
            g = clipped_mean(world, rows, theta, sigma, bound)
            halves = unclipped - len(rows) / 2
            noise = count / 2 * world.noise(1)[0] if count else 0.0
            fraction = (halves + noise) / world.batch + 0.5
            theta = theta - candidate["learning_rate"] * g
            bound = bound * math.exp(-0.2 * (fraction - 0.6))
            yield theta, bound

    candidates = [{"learning_rate": lr, "max_grad_norm": norm}] * 2
    check(
        QuantileClipping(sigma, count, quantile=0.6),
        candidates,
        literal,
        seeds=(seed, seed + 1),
        fields=(lambda s: s.max_grad_norm,),
    )


@few
@given(
    seed=seeds,
    sigma=sigmas,
    lr=rates,
    h2=st.floats(1e-6, 10.0),
    per_record=st.booleans(),
    start=st.sampled_from(["largest", "paper"]),
)
def test_adaclip(seed, sigma, lr, h2, per_record, start):
    """Pichapati et al., Algorithm 1, equations (4) and (5); the sum is noised once.

    The paper's first s is sqrt(h1 h2) everywhere; ours, unless asked for that, sqrt(h2).
    """
    h1 = 1e-12

    def literal(world, candidate):
        theta = world.start()
        m = np.zeros_like(theta)
        first = candidate["largest_variance"] * (h1 if start == "paper" else 1.0)
        s = np.full_like(theta, math.sqrt(first))
        for _ in range(STEPS):
            b = np.sqrt(s) * math.sqrt(sum(s))
            total = np.zeros_like(theta)
            for i in world.draw():
                w = (world.gradient(i, theta) - m) / b
                total += w / max(1.0, np.linalg.norm(w))
            noise = sigma * world.noise(len(theta)) if sigma else 0.0
            g = b * (total + noise) / world.batch + m
            v = np.minimum(
                np.maximum(
                    ((g - m) ** 2 - (b * sigma / world.batch) ** 2)
                    * (world.batch if per_record else 1),
                    h1,
                ),
                candidate["largest_variance"],
            )
            theta = theta - candidate["learning_rate"] * g
            m = 0.99 * m + 0.01 * g
            s = np.sqrt(0.9 * s**2 + 0.1 * v)
            yield theta, m, s

    candidates = [{"learning_rate": lr, "largest_variance": h2}] * 2
    check(
        AdaCliP(sigma, per_record=per_record, start=start),
        candidates,
        literal,
        seeds=(seed, seed + 1),
        fields=(lambda s: s.mean, lambda s: s.deviation),
    )


def adadp_literal(world, candidate, sigma, tau, acceptance, iterations):
    """Koskela & Honkela, Algorithm 2, one pair of steps at a time."""
    theta, eta, bound = world.start(), candidate["learning_rate"], candidate["max_grad_norm"]
    for _ in range(iterations):
        g1 = clipped_mean(world, world.draw(), theta, sigma, bound)
        full = theta - eta * g1
        half = theta - eta / 2 * g1
        yield full, eta
        g2 = clipped_mean(world, world.draw(), half, sigma, bound)
        hat = half - eta / 2 * g2
        err = np.linalg.norm(np.abs(full - hat) / np.maximum(1.0, np.abs(full)))
        if not (acceptance and err > tau):
            theta = full
        eta = min(max(tau / err, 0.9), 1.1) * eta
        yield theta, eta


@few
@given(
    seed=seeds, sigma=sigmas, lr=rates, norm=norms, tau=st.floats(0.001, 1.0), accept=st.booleans()
)
def test_adadp(seed, sigma, lr, norm, tau, accept):
    candidates = [{"learning_rate": lr, "max_grad_norm": norm}] * 2
    check(
        ADADP(sigma, tolerance=tau, acceptance=accept, adapt_share=1.0),
        candidates,
        lambda world, candidate: adadp_literal(world, candidate, sigma, tau, accept, STEPS // 2),
        seeds=(seed, seed + 1),
        fields=(lambda s: s.learning_rate,),
    )


@pytest.mark.parametrize("when", [{"adapt_epochs": 1.2}, {}])
def test_adadp_fixes_the_rate_and_decays_it(when):
    """Equation (5.1): after 50 steps of adaptation, eta_50 / (1 + 0.1 (k - 50)), k in epochs.

    At rate 0.3, 1.2 epochs are the first third of 12 steps: the default.
    """
    method = ADADP(0.5, tolerance=0.1, decay=0.1, **when)

    def literal(world, candidate):
        trace = list(adadp_literal(world, candidate, 0.5, 0.1, False, 2))
        yield from trace
        theta, eta = trace[-1]
        for step in range(4, 12):
            bound = candidate["max_grad_norm"]
            g = clipped_mean(world, world.draw(), theta, 0.5, bound)
            epoch = int(0.3 * step - 1.2 + 1e-9) + 1  # k - 50, of the epoch under way
            theta = theta - eta / (1 + 0.1 * epoch) * g
            yield theta, eta

    candidates = [{"learning_rate": 0.1, "max_grad_norm": 1.0}] * 2
    check(method, candidates, literal, steps=12, fields=(lambda s: s.learning_rate,))


def test_adadp_decays_by_the_printed_values():
    """Equation (5.1) with 100 epochs of 10 steps: 1/1.1 in epoch 51, 1/6 in epoch 100."""
    method = ADADP(0.0, tolerance=0.1, adapt_epochs=50.0)
    candidate = {"learning_rate": 0.1, "max_grad_norm": 1.0}
    states, oracle = run(method, [candidate], seeds=(1,), steps=1000, rate=0.1)
    taken = []
    for step in (500, 509, 510, 999):
        oracle.gradient = lambda *_, **__: torch.ones(1, 3, dtype=torch.float64)
        before = states[step]
        after = method.update(before, oracle)
        taken.append(float((before.params - after.params)[0, 0] / before.learning_rate[0]))
    assert taken == pytest.approx([1 / 1.1, 1 / 1.1, 1 / 1.2, 1 / 6], rel=1e-9)


def test_adadp_tolerance_rule():
    """τ = sqrt(d / 2T) with T iterations, two steps of the schedule each."""
    one, _ = run(ADADP(0.5), [{"max_grad_norm": 1.0}] * 2, steps=8)
    tau = math.sqrt(3 / (2 * 4))
    two, _ = run(ADADP(0.5, tolerance=tau), [{"max_grad_norm": 1.0}] * 2, steps=8)
    assert one[-1].params.equal(two[-1].params)
    capped, _ = run(ADADP(0.5, largest_tolerance=1e-4), [{"max_grad_norm": 1.0}] * 2, steps=8)
    given, _ = run(ADADP(0.5, tolerance=1e-4), [{"max_grad_norm": 1.0}] * 2, steps=8)
    assert capped[-1].params.equal(given[-1].params)
    assert not capped[-1].params.equal(one[-1].params)


@few
@given(
    seed=seeds,
    sigma=sigmas,
    loss_sigma=st.sampled_from([0.0, 0.3, 2.0]),
    eta=st.floats(1e-3, 2.0),
    batch=st.sampled_from(["same", "separate"]),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_hyfreedp_as_in_the_paper(seed, sigma, loss_sigma, eta, batch, momentum):
    """Bu & Liu, Algorithm 1, with SGD, K = 2 and the R_l of their runs; a fit counts if it is a minimum.

    Line 7 has R_l = L̃(0); Section 4 says that in practice it is the sum of the three losses.
    """

    def literal(world, candidate):
        theta, rate, bound, velocity = world.start(), eta, 1.0, 0.0
        for t in range(STEPS):
            rows = world.draw()
            m = scaled_mean(world, rows, theta, sigma)
            velocity = momentum * velocity + m
            if t % 2 == 0:
                if batch == "separate":
                    rows = world.draw()
                noisy = []
                for sign in (+1, 0, -1):
                    point = theta + sign * rate * velocity
                    total = sum(min(world.loss(i, point), bound) for i in rows)
                    noise = loss_sigma * bound * world.noise(1)[0] if loss_sigma else 0.0
                    noisy.append((total + noise) / world.batch)
                plus, here, minus = noisy
                # Least squares of (6) from {-eta, 0, eta}: three points, so it interpolates.
                slope, curve = (plus - minus) / (2 * rate), (plus + minus - 2 * here) / rate**2
                if slope > 0 and curve > 0 and math.isfinite(slope / curve):
                    rate = slope / curve
                if plus + here + minus > 0:
                    bound = plus + here + minus
            theta = theta - rate * velocity
            yield theta, rate, bound

    method = HyFreeDP(
        sigma,
        loss_sigma,
        interval=2,
        loss_batch=batch,
        learning_rate=eta,
        fit="paper",
        optimizer="sgd",
        momentum=momentum,
    )
    check(
        method,
        [{}, {}],
        literal,
        seeds=(seed, seed + 1),
        fields=(lambda s: s.fit.learning_rate, lambda s: s.loss_bound),
    )


@few
@given(
    seed=seeds,
    sigma=sigmas,
    loss_sigma=st.sampled_from([0.2, 1.0, 4.0]),
    kind=st.sampled_from(["gaussian", "laplace"]),
    interval=st.sampled_from([1, 3, 10]),
)
def test_hyfreedp_robust(seed, sigma, loss_sigma, kind, interval):
    """The documented fit, written for one candidate with plain numbers."""
    steps, spread = 45, 7.0

    def literal(world, candidate):
        theta = start = world.start()
        first = 0.1 * math.sqrt(spread) * math.sqrt(sum(start**2) / len(start))
        # SGD: over the size that noise and a gradient of norm 1 have in a coordinate.
        first /= math.sqrt((sigma / world.batch) ** 2 + 1 / len(start))
        low, high = first / math.sqrt(spread), first * math.sqrt(spread)
        rate = mean = first
        bound, fits, visited = 5.0, 0, []
        for t in range(steps):
            g = scaled_mean(world, world.draw(), theta, sigma)
            if t % interval == 0:
                # Where it was 20 steps ago; never before the start.
                back = visited[max(0, len(visited) - -(-20 // interval))] if visited else None
                way = interval * rate * g if back is None else back - theta
                visited.append(theta)
                rows, noisy = world.draw(), []
                for point in (theta + way, theta, theta - way):
                    total = sum(min(world.loss(i, point), bound) for i in rows)
                    noise = world.laplace() if kind == "laplace" else world.noise(1)[0]
                    noisy.append((total + loss_sigma * bound * noise) / world.batch)
                behind, here, ahead = noisy
                dev = loss_sigma * bound / world.batch * (math.sqrt(2) if kind == "laplace" else 1)
                if here <= 0.9 * bound:
                    slope, curve = (behind - ahead) / 2, behind + ahead - 2 * here
                    grow, shrink = {1: (4**0.1, 0.5**0.1), 3: (4**0.3, 0.5**0.3), 10: (4, 0.5)}[
                        interval
                    ]
                    if curve > math.sqrt(6) * dev:
                        sure = max(0.0, abs(slope) - dev / math.sqrt(2))
                        factor = 1 + math.copysign(sure, slope) / curve
                    elif abs(slope) > math.sqrt(2) * dev:
                        factor = 1 + math.copysign(grow, slope)
                    else:
                        factor = 1.0
                    factor = min(max(factor, shrink), grow)
                    rate = min(max(rate * factor, low), high)
                    if t and (fits or factor <= 1):
                        fits += 1
                    mean = min(max(mean * (rate / mean) ** (1 / max(fits, 1)), low), high)
                bound = min(max(1.5 * here, bound / 2, 5.0), 1e6)
            theta = theta - mean * g
            yield theta, rate, mean, bound

    method = HyFreeDP(
        sigma,
        loss_sigma,
        interval=interval,
        optimizer="sgd",
        spread=spread,
        loss_batch="separate",
        loss_bound=5.0,
        loss_noise=kind,
    )
    check(
        method,
        [{}, {}],
        literal,
        steps=steps,
        seeds=(seed, seed + 1),
        fields=(lambda s: s.fit.learning_rate, lambda s: s.fit.step_rate, lambda s: s.loss_bound),
    )


@few
@given(seed=seeds, sigma=sigmas)
def test_public_rate(seed, sigma):
    """AdamW with a decay of 0.01 at a fifth of the root mean square of the first weights."""

    def literal(world, candidate):
        theta, m, v = world.start(), 0.0, 0.0
        rate = 0.2 * math.sqrt(sum(theta**2) / len(theta))
        for t in range(1, STEPS + 1):
            g = scaled_mean(world, world.draw(), theta, sigma)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            theta = theta - rate * 0.01 * theta
            theta = theta - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            yield theta, rate

    fields = (lambda s: s.learning_rate,)
    check(PublicRate(sigma), [{}, {}], literal, seeds=(seed, seed + 1), fields=fields)


@few
@given(seed=seeds, sigma=sigmas, lr=rates)
def test_public_rate_of_sgd(seed, sigma, lr):
    """Plain steps at the given rate along gradients that are clipped to 1."""

    def literal(world, candidate):
        theta = world.start()
        for _ in range(STEPS):
            theta = theta - lr * clipped_mean(world, world.draw(), theta, sigma, 1.0)
            yield theta, lr

    method = PublicRate(
        sigma, method="dpsgd", learning_rate=lr, max_grad_norm=1.0, weight_decay=0.0
    )
    fields = (lambda s: s.learning_rate,)
    check(method, [{}, {}], literal, seeds=(seed, seed + 1), fields=fields)


def test_weights_that_begin_at_0_have_a_share_of_their_own():
    """A linear model's rate is a share of what torch usually draws, another than a network's."""
    method = PublicRate(1.0, share=0.25, zero_share=2.0)
    weights = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    oracle = SimpleNamespace(
        usual_size=0.5, pace=1.0, sample=lambda: None, gradient=lambda *_, **__: torch.ones(2, 2)
    )
    state = method.update(method.init(weights, [{}, {}]), oracle)
    assert state.learning_rate.tolist() == pytest.approx([0.25 * math.sqrt(12.5), 2.0 * 0.5])
    same = replace(method, zero_share=None)
    state = same.update(same.init(weights, [{}, {}]), oracle)
    assert state.learning_rate[1].item() == pytest.approx(0.25 * 0.5)


@few
@given(seed=seeds, sigma=sigmas)
def test_dog(seed, sigma):
    """Ivgi et al., equation (1) with r_eps = 1e-6 (1 + |x_0|), released as the decaying average."""

    def literal(world, candidate):
        theta = start = average = world.start()
        reach, squares = 1e-6 * (1 + np.linalg.norm(start)), 0.0
        for t in range(1, 20 + 1):
            g = scaled_mean(world, world.draw(), theta, sigma)
            reach = max(reach, np.linalg.norm(theta - start))
            squares += sum(g**2)
            theta = theta - reach / math.sqrt(squares + 1e-8) * g
            average = (1 - 9 / (t + 8)) * average + 9 / (t + 8) * theta
            yield average, theta

    check(
        DoG(sigma),
        [{}, {}],
        literal,
        steps=20,
        seeds=(seed, seed + 1),
        fields=(lambda s: s.iterate,),
    )


@few
@given(seed=seeds, sigma=sigmas)
def test_dowg(seed, sigma):
    """Khaled et al., Algorithm 1."""

    def literal(world, candidate):
        theta = start = world.start()
        reach, weighted = 1e-4, 0.0
        for _ in range(20):
            g = clipped_mean(world, world.draw(), theta, sigma, 2.0)
            reach = max(reach, np.linalg.norm(theta - start))
            weighted += reach**2 * sum(g**2)
            theta = theta - reach**2 / math.sqrt(weighted) * g
            yield theta

    check(DoWG(sigma, max_grad_norm=2.0), [{}, {}], literal, steps=20, seeds=(seed, seed + 1))


@few
@given(seed=seeds, sigma=sigmas, decay=st.sampled_from([0.0, 0.02]))
def test_d_adaptation(seed, sigma, decay):
    """Defazio & Mishchenko, D-Adaptation of Adam; the inner product is weighed by the second moment before.

    So the authors' code has it, which also decays weights. No distance is over 1e12 times the first.
    """

    def literal(world, candidate):
        theta, d, root = world.start(), 1e-6, math.sqrt(0.999)
        s, m, v, r = np.zeros_like(theta), 0.0, np.zeros_like(theta), 0.0
        for _ in range(25):
            g = scaled_mean(world, world.draw(), theta, sigma)
            r = root * r + (1 - root) * d * sum(g * s / (np.sqrt(v) + 1e-8))
            s = root * s + (1 - root) * d * g
            m = 0.9 * m + 0.1 * d * g
            v = 0.999 * v + 0.001 * g**2
            theta = theta - decay * d * theta - m / (np.sqrt(v) + 1e-8)
            d = min(max(d, r / ((1 - root) * sum(abs(s)))), 1e6)
            yield theta, d

    method = DAdaptation(sigma, weight_decay=decay)
    fields = (lambda s: s.distance,)
    check(method, [{}, {}], literal, steps=25, seeds=(seed, seed + 1), fields=fields)


@few
@given(seed=seeds, sigma=sigmas, decay=st.sampled_from([0.0, 0.02]))
def test_prodigy(seed, sigma, decay):
    """Mishchenko & Defazio, Algorithm 4; ε stands beside the new distance, as in the authors' code."""

    def literal(world, candidate):
        theta = start = world.start()
        d, root, m, v, r, s = 1e-6, math.sqrt(0.999), 0.0, 0.0, 0.0, 0.0
        for _ in range(15):
            g = scaled_mean(world, world.draw(), theta, sigma)
            m = 0.9 * m + 0.1 * d * g
            v = 0.999 * v + 0.001 * d**2 * g**2
            r = root * r + (1 - root) * d**2 * sum(g * (start - theta))
            s = root * s + (1 - root) * d**2 * g
            farther = max(d, r / sum(abs(s)))
            theta = theta - decay * d * theta - d * m / (np.sqrt(v) + farther * 1e-8)
            d = farther
            yield theta, d

    method = Prodigy(sigma, weight_decay=decay)
    fields = (lambda s: s.distance,)
    check(method, [{}, {}], literal, steps=15, seeds=(seed, seed + 1), fields=fields)


@few
@given(
    seed=seeds,
    regime=st.sampled_from(["non-convex", "convex", "strongly-convex"]),
    adjacency=st.sampled_from(["replace-one", "add-remove"]),
)
def test_pur_schedules(seed, regime, adjacency):
    """Proposition 3 (with sqrt(d) t), eta = 1/(2M), noise of standard deviation sigma_t."""
    lam, bound = 0.1, 4.0
    smooth, dim, gap, radius = lam + bound**2 / 4, 3, math.log(2), 3.0

    def literal(world, candidate):
        theta = world.start()
        for t in range(1, STEPS + 1):
            sigma = {
                "non-convex": 4 * smooth * math.sqrt(gap) / (math.sqrt(dim) * t),
                "convex": 4 * smooth * radius / (math.sqrt(dim) * t),
                "strongly-convex": math.sqrt(2 * lam * gap * (1 - lam / (2 * smooth)) ** t / dim),
            }[regime]
            g = sum(clip(world.gradient(i, theta), bound) for i in range(world.records))
            noisy = g / world.records + lam * theta + sigma * world.noise(dim)
            theta = theta - noisy / (2 * smooth)
            yield theta, sigma

    method = PUR(
        lipschitz=bound,
        smoothness=smooth,
        dimension=dim,
        regularisation=lam,
        adjacency=adjacency,
        regime=regime,
        distance=radius,
        strong_convexity=lam,
    )
    check(method, [{}, {}], literal, seeds=(seed, seed + 1), fields=(lambda s: s.noise,))


def test_pur_constant():
    smooth, bound, sigma = 2.0, 4.0, 1.7 * 2 * 4.0 / 40

    def literal(world, candidate):
        theta = world.start()
        for _ in range(STEPS):
            g = sum(world.gradient(i, theta) for i in range(world.records)) / world.records
            theta = theta - (g + sigma * world.noise(3)) / (2 * smooth)
            yield theta, sigma

    method = PURConstant(bound, smooth, 3, noise_multiplier=1.7)
    check(method, [{}, {}], literal, fields=(lambda s: s.noise,))


@pytest.mark.parametrize(("steps", "horizon"), [(6, 4), (3, 9)])
def test_pur_stays_after_its_horizon(steps, horizon):
    method = PURConstant(4.0, 2.0, 3, horizon=horizon)
    states, oracle = run(method, [{}, {}], steps=steps)
    assert oracle.transcripts()[0].looks().total() == min(steps, horizon)
    assert states[-1].params.equal(states[min(steps, horizon)].params)


@pytest.mark.quick
def test_every_method_is_transcribed_here():
    """A method without a transcription is compared with nothing but itself."""
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    classes = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    missing = [name for name, method in METHODS.items() if method.__name__ not in classes]
    assert not missing, f"transcribe the paper of {', '.join(missing)} in this file"
