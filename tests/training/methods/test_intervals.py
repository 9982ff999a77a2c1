"""Whatever the noisy answers are, a rate or bound stays in the public interval that its docstring states."""

from __future__ import annotations

import math
import re

import pytest
import torch

from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import METHODS
from tests.training.methods.test_contract import candidate, options

CANDIDATES, STEPS, SIZE = 250, 45, 6  # 11,250 answers of each kind for each method
EXTREMES = (0.0, 1e30, -1e30, 3e38, -3e38, math.inf, -math.inf, math.nan)


class Answers:
    """Answers of every size, whatever is asked: some usual, some of 1e±30, some no numbers at all.

    The first half of the candidates gets numbers alone.
    """

    pace = 1.0
    usual_size = 0.3

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.schedule = Schedule(records=100, sample_rate=0.1, steps=STEPS)
        self.candidates = CANDIDATES
        self.answers = 0

    def sample(self):
        return None

    everything = sample

    def _answer(self, *shape):
        """Return answers whose last axis but one, or whose only one, is that of the candidates."""
        draws = torch.randn(shape, generator=self.random)
        power = torch.rand((*shape[:-1], 1) if len(shape) > 1 else shape, generator=self.random)
        # One candidate in five gets answers of about 1, the others up to 1e30 and down to 1e-30.
        sizes = 10.0 ** (60.0 * power - 30.0)
        own = torch.arange(CANDIDATES) % 5 > 0
        own = own.unsqueeze(-1) if len(shape) > 1 else own
        found = torch.where(own, draws * sizes, draws)
        wild = torch.rand(shape, generator=self.random) < 0.05
        numbers = torch.randint(len(EXTREMES), shape, generator=self.random)
        picked = torch.tensor(EXTREMES)[numbers]
        half = torch.arange(CANDIDATES) >= CANDIDATES // 2
        half = half.unsqueeze(-1) if len(shape) > 1 else half
        self.answers += CANDIDATES
        return torch.where(wild & half, picked, found)

    def gradient(self, sample, params, **_):
        return self._answer(*params.shape)

    def losses(self, sample, points, **_):
        return torch.stack([self._answer(CANDIDATES) for _ in points])

    def gradient_and_fraction(self, sample, params, **_):
        return self._answer(*params.shape), self._answer(CANDIDATES).double()


def start():
    return torch.randn(CANDIDATES, SIZE, generator=torch.Generator().manual_seed(1))


def trace(method, seed):
    """Yield the state after every step, the one before the first included."""
    oracle = Answers(seed)
    state = method.init(start(), [candidate(method)] * CANDIDATES)
    yield state
    for _ in range(STEPS):
        state = method.update(state, oracle)
        yield state
    assert oracle.answers >= 10_000


SLACK = 1e-5  # of rounding


def inside(values, low, high):
    low, high = (torch.as_tensor(end, dtype=torch.float64) for end in (low, high))
    values = values.double()
    assert bool((values >= low * (1 - SLACK)).all())
    assert bool((values <= high * (1 + SLACK)).all())


def check_weights(method, state, seed):
    """Weights are numbers, or the training is one that a result declares as diverged: not a number
    stays none, so that the end tells."""
    lost = ~state.params.isfinite().all(dim=1)
    after = method.update(state, Answers(seed + 1))
    assert bool((~after.params.isfinite().all(dim=1))[lost].all())


def hyfreedp(method, states):
    size = start().double().square().mean(dim=1).sqrt()
    spread = method.spread or (5.0 if method.fit == "robust" else 1e24)
    first = 1e-4 if method.fit == "paper" else 0.1 * spread**0.5 * size
    for state in states[1:]:
        for rate in (state.fit.learning_rate, state.fit.step_rate):
            inside(rate, first / spread**0.5, first * spread**0.5)
        inside(state.loss_bound, 1e-6 if method.fit == "paper" else method.loss_bound, 1e6)


def adadp(method, states):
    for step, state in enumerate(states):
        iterations = step // 2
        inside(state.learning_rate, 0.1 * 0.9**iterations, 0.1 * 1.1**iterations)


def adaclip(method, states):
    h1, h2 = method.smallest_variance, 0.1
    for state in states:
        least = h1 * min(h2, 1.0) if method.start == "paper" else h1
        inside(state.deviation, least**0.5, h2**0.5)
        assert bool((state.learning_rate == 0.1).all())


def quantile(method, states):
    for state in states:
        inside(state.max_grad_norm, 1e-6, 1e6)
        assert bool((state.learning_rate == 0.1).all())


def distance(method, states):
    for state in states:
        inside(state.distance, method.initial_distance, 1e12 * method.initial_distance)
        inside(method.report(state)["learning_rate"], 0.0, 1e12 * method.initial_distance)


def dog(method, states):
    first = 1e-6 * (1.0 + start().norm(dim=1).double())
    for state in states:
        inside(state.distance, first, 1e12 * first)
        inside(state.learning_rate, 0.0, 1e4 * state.distance.double())


def dowg(method, states):
    for state in states:
        inside(state.distance, method.initial_distance, 1e12 * method.initial_distance)
        inside(state.learning_rate, 0.0, 1e20 * state.distance.double() ** 2)


def public(method, states):
    size = start().double().square().mean(dim=1).sqrt()
    for state in states[1:]:
        inside(state.learning_rate, 0.2 * size, 0.2 * size)


def pur(method, states):
    """Noise is the printed function of the step, the rate a constant."""
    for step, state in enumerate(states[1:]):
        known = min(step, (method.horizon or STEPS) - 1)
        sigma = method._multiplier(known, 100) * method._sensitivity(100)
        inside(state.noise, sigma, sigma)


INTERVALS = {
    "hyfreedp": hyfreedp,
    "adadp": adadp,
    "adaclip": adaclip,
    "quantile-clipping": quantile,
    "dog": dog,
    "dowg": dowg,
    "prodigy": distance,
    "d-adaptation": distance,
    "public-rate": public,
    "pur": pur,
    "pur-constant": pur,
}
FIXED = {
    "dpsgd",
    "dp-adam",
    "automatic-clipping",
    "norm-bound",
}  # a candidate gives all that they step by


def test_every_method_that_sets_something_states_its_interval():
    missing = set(METHODS) - set(INTERVALS) - FIXED
    assert not missing, (
        "state the **Interval** of each in its docstring and check it in INTERVALS, or name it in FIXED if a "
        "candidate gives all that it steps by"
    )
    assert set(INTERVALS) | FIXED == set(METHODS)
    for name in INTERVALS.keys() - {"pur-constant"}:
        assert re.search(r"\*\*Interval\*\*: ", METHODS[name].__doc__), name


CASES = [(name, {}) for name in INTERVALS] + [
    ("hyfreedp", {"fit": "paper"}),
    ("hyfreedp", {"interval": 1}),
    ("hyfreedp", {"interval": 1, "fit": "paper"}),
    ("hyfreedp", {"spread": 1e6, "interval": 2, "loss_noise": "laplace"}),
    ("dog", {"averaging": None}),
    ("adadp", {"acceptance": True, "adapt_share": 1.0}),
    ("adaclip", {"start": "paper"}),
]


@pytest.mark.parametrize(("name", "own"), CASES, ids=[f"{n} {o}" for n, o in CASES])
def test_ten_thousand_answers_leave_it_inside(name, own):
    schedule = Schedule(records=100, sample_rate=0.1, steps=STEPS)
    terms = {"epsilon": 4.0, "delta": 1e-5, **options(name, SIZE), **own}
    method = METHODS[name].for_budget(schedule, **terms)
    states = list(trace(method, 0))
    INTERVALS[name](method, states)
    check_weights(method, states[-1], 0)


@pytest.mark.parametrize(("tolerance", "end"), [(1e-30, 1e-13), (1e30, 1e11)])
def test_the_rate_of_adadp_has_an_end_in_any_number_of_steps(tolerance, end):
    """0.9 or 1.1 in each of 700 iterations would be 1e-32 or 1e29 times the first rate of 0.1."""
    method = METHODS["adadp"](0.5, tolerance=tolerance, adapt_share=1.0)
    oracle = Answers(0)
    oracle.schedule = Schedule(records=100, sample_rate=0.1, steps=1400)
    state = method.init(start(), [candidate(method)] * CANDIDATES)
    for _ in range(1400):
        state = method.update(state, oracle)
    inside(state.learning_rate, 1e-13, 1e11)
    assert float((state.learning_rate / end).log().abs().min()) < 1e-3
