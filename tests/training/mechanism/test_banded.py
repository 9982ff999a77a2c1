"""Correlated noise: its numbers, their error, its covariance, the groups of records, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import linalg, optimize, stats

from privtune.errors import InvalidInputError
from privtune.training.engine.stacks import memory_model
from privtune.training.engine.train import Training
from privtune.training.mechanism import oracle as oracles
from privtune.training.mechanism.banded import coefficients, inverse, prefix_error
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.noise import CorrelatedNoise
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.sampling import CyclicSampler, assign_groups
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import Transcript, TranscriptMismatchError
from privtune.training.methods import METHODS, FixedDPSGD
from tests.training.mechanism.test_oracle import CPU, SIZE, Silent
from tests.training.methods.test_contract import DIMENSION, options
from tests.training.simple import blobs, fit, secrets

CORRELATING = ("dpsgd", "dp-adam", "automatic-clipping", "norm-bound")
MNIST = Schedule.from_epochs(records=60_000, expected_batch_size=512, epochs=10)


def matrix(column, steps: int) -> np.ndarray:
    """The banded matrix C itself."""
    full = np.zeros((steps, steps))
    for lag, number in enumerate(column):
        full += number * np.eye(steps, k=-lag)
    return full


def dense_error(column, steps: int) -> float:
    """``|A C^-1|_F / sqrt(T)`` by dense matrices: nothing of it is the package's."""
    sums = np.tril(np.ones((steps, steps)))
    strategy = matrix(np.asarray(column) / np.linalg.norm(column), steps)
    inverse_strategy = linalg.solve_triangular(strategy, np.eye(steps), lower=True)
    return float(np.linalg.norm(sums @ inverse_strategy) / math.sqrt(steps))


def least_dense_error(start: np.ndarray, steps: int) -> float:
    """The least error that L-BFGS finds from ``start``, over columns ``(1, x)`` with ``|x| <= 1``.

    The error does not depend on the column's norm, and the first number of the best column is its largest.
    The bounds keep every matrix of the search invertible.
    """

    def error(later: np.ndarray) -> float:
        return dense_error(np.concatenate([[1.0], later]), steps)

    later = start[1:] / start[0]
    found = optimize.minimize(error, later, method="L-BFGS-B", bounds=[(-1.0, 1.0)] * len(later))
    return float(found.fun)


def root(bands: int) -> np.ndarray:
    """The coefficients of ``(1 - x)^(-1/2)``, cut off: a column that needs no search."""
    return np.array([math.comb(2 * j, j) / 4.0**j for j in range(bands)])


@pytest.mark.quick
@pytest.mark.parametrize(("bands", "steps"), [(2, 9), (3, 40), (8, 100), (16, 60), (40, 60)])
def test_numbers_are_those_of_the_least_error(bands: int, steps: int) -> None:
    """A search on dense matrices, from the root and from the column itself, finds none better, to 1e-4."""
    column = coefficients(bands, steps)
    assert len(column) == min(bands, steps)
    assert column[0] > 0.0
    error = prefix_error(bands, steps)
    assert error == pytest.approx(dense_error(column, steps), rel=1e-6)
    best = min(least_dense_error(start, steps) for start in (root(bands), np.array(column)))
    assert best > error * (1.0 - 1e-4)
    assert dense_error(root(bands), steps) > error * (1.0 + 1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("bands", [2, 7, 32, 256])
@pytest.mark.parametrize("steps", [3, 300, 20_000])
def test_a_column_has_a_norm_of_at_most_1_however_it_is_rounded(bands: int, steps: int) -> None:
    column = coefficients(bands, steps)
    for kind in (np.float32, np.float64):
        rounded = np.asarray(column, dtype=kind).astype(np.float64)
        # One unit in the last place more, which is how far rounding to nearest moves at most twice over.
        assert np.linalg.norm(rounded * (1.0 + np.finfo(kind).eps)) <= 1.0
    assert np.linalg.norm(column) > 1.0 - 1e-5


def test_one_band_is_independent_noise() -> None:
    assert coefficients(1, 50) == (1.0,)
    assert prefix_error(1, 50) == pytest.approx(math.sqrt(51 / 2))
    assert Schedule(100, 0.1, 50) == Schedule(100, 0.1, 50, bands=1)
    assert "bands" not in Schedule(100, 0.1, 50).to_dict()


@pytest.mark.parametrize(
    ("epsilon", "bands", "share", "cut_off"),
    [
        (1.0, 4, 0.911, 0.999),
        (2.0, 8, 0.770, 0.872),
        (4.0, 2, 0.818, 0.858),  # two bands: docs/comparison.md
        (4.0, 16, 0.609, 0.697),
        (8.0, 32, 0.480, 0.541),
    ],
)
def test_what_correlation_saves_on_mnist(
    epsilon: float, bands: int, share: float, cut_off: float
) -> None:
    """The error of sums over that of independent noise, by dp-accounting's noise and dense matrices.

    Ten epochs of 512 of 60,000 records at δ = 1e-5; the last column is the share of the root, cut off.
    """

    def noise(groups: int) -> float:
        """The noise multiplier by dp-accounting alone."""

        def cost(multiplier: float) -> float:
            accountant = PLDAccountant(value_discretization_interval=1e-3)
            step = dp_accounting.PoissonSampledDpEvent(
                groups * MNIST.sample_rate, dp_accounting.GaussianDpEvent(multiplier)
            )
            accountant.compose(step, math.ceil(MNIST.steps / groups))
            return accountant.get_epsilon(1e-5) - epsilon

        return optimize.brentq(cost, 0.3, 12.0, xtol=1e-4)

    plain = noise(1) * math.sqrt((MNIST.steps + 1) / 2)
    banded = replace(MNIST, bands=bands)
    method = FixedDPSGD.for_budget(banded, epsilon=epsilon, delta=1e-5)
    multiplier = noise(bands)
    assert method.noise_multiplier == pytest.approx(multiplier, rel=2e-3)
    column = coefficients(bands, MNIST.steps)
    assert multiplier * dense_error(column, MNIST.steps) / plain == pytest.approx(share, abs=3e-3)
    assert multiplier * dense_error(root(bands), MNIST.steps) / plain == pytest.approx(
        cut_off, abs=3e-3
    )


@pytest.mark.parametrize("noise_multiplier", [0.8, 2.0])
@pytest.mark.parametrize(
    ("rate", "steps", "bands"), [(0.01, 500, 8), (0.01, 501, 50), (0.1, 40, 10)]
)
def test_the_guarantee_is_that_of_dp_accounting(
    noise_multiplier: float, rate: float, steps: int, bands: int
) -> None:
    """The largest number of samples of one group, each at so many times the rate, to 1e-3."""
    from privtune.accounting import epsilon

    schedule = Schedule(10_000, rate, steps, bands)
    accountant = PLDAccountant(value_discretization_interval=2e-4)
    step = dp_accounting.PoissonSampledDpEvent(
        bands * rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    of_group = max(len(range(group, steps, bands)) for group in range(bands))
    accountant.compose(step, of_group)
    reference = accountant.get_epsilon(1e-5)
    answer = epsilon(FixedDPSGD(noise_multiplier).event(schedule), 1e-5).epsilon
    assert answer == pytest.approx(reference, rel=1e-3)
    assert answer != pytest.approx(
        epsilon(FixedDPSGD(noise_multiplier).event(replace(schedule, bands=1)), 1e-5).epsilon,
        rel=1e-2,
    )


def release_noise(
    bands: int,
    steps: int,
    *,
    numbers: tuple[int, ...] = (0,),
    noise: NoiseOptions | None = None,
    norm: float = 3.0,
    multiplier: float = 2.0,
) -> np.ndarray:
    """The noise that an oracle releases on gradients of zero, over its scale: ``[K, T, SIZE]``."""
    schedule = Schedule(records=32, sample_rate=0.125, steps=steps, bands=bands)
    asked = Oracle(
        schedule,
        data=TensorData(torch.zeros(32, SIZE), torch.zeros(32)),
        kernel=Silent(),
        streams=[Streams(bytes([k]) * 32) for k in numbers],
        device=CPU,
        physical_rows=64,
        noise=noise,
    )
    params = torch.zeros(len(numbers), SIZE)
    rows = []
    for _ in range(steps):
        answer = asked.gradient(
            asked.sample(), params, clipping=Flat(norm), noise_multiplier=multiplier
        )
        rows.append(answer.double() * schedule.expected_batch_size / (norm * multiplier))
    return torch.stack(rows, dim=1).numpy()


def covariance_p_value(noise: np.ndarray, column) -> float:
    """The p-value of a test that the noise ``[T, n]`` has the covariance ``C^-1 C^-T``.

    ``C n`` has then independent standard rows, and of their covariances S the sum of ``n (S - I)^2``, each
    over its own variance, is about chi-square with a degree of freedom for each pair of steps.
    """
    steps, count = noise.shape
    white = matrix(column, steps) @ noise
    covariance = white @ white.T / count
    error = count * (covariance - np.eye(steps)) ** 2
    chi = np.triu(error, 1).sum() + np.trace(error) / 2.0
    freedom = steps * (steps + 1) / 2
    return float(min(1.0, 2.0 * min(stats.chi2.sf(chi, freedom), stats.chi2.cdf(chi, freedom))))


@pytest.mark.statistical
@pytest.mark.parametrize(
    "options",
    [
        NoiseOptions(),
        NoiseOptions.of("secure").over(4),
        NoiseOptions(floating_point="four-draws"),
    ],
    ids=["plain", "secure", "four draws"],
)
def test_noise_has_the_planned_covariance(options: NoiseOptions) -> None:
    """Of 50,000 draws of 20 steps, at 1e-3; numbers that are 5% off, or of another lag, are seen at 1e-6.

    The first row of all has the deviation ``1/c_0``.
    """
    steps = 20
    released = release_noise(4, steps, numbers=tuple(range(100)), noise=options)
    noise = np.concatenate(list(released), axis=1)
    column = np.array(coefficients(4, steps))
    assert covariance_p_value(noise, column) > 1e-3
    for place in range(4):
        for factor in (0.95, 1.05):
            wrong = column.copy()
            wrong[place] *= factor
            assert covariance_p_value(noise, wrong) < 1e-6
    assert covariance_p_value(noise, np.roll(column, 1)) < 1e-6
    assert covariance_p_value(noise, [1.0]) < 1e-6


def test_noise_is_the_exact_solution_of_the_recursion() -> None:
    """``C n`` is the independent noise that the same streams give, to float32's digits."""
    released = release_noise(5, 30)[0]
    independent = release_noise(1, 30)[0]
    column = coefficients(5, 30)
    assert np.abs(matrix(column, 30) @ released - independent).max() < 3e-6
    series = inverse(np.array(column), 30)
    last = sum(series[lag] * independent[29 - lag] for lag in range(30))
    assert np.abs(released[29] - last).max() < 1e-5


def test_secure_noise_lies_on_its_grid() -> None:
    """The recursion runs on float64 noise that is not rounded; every release is a multiple of the grid."""
    options = NoiseOptions.of("secure").over(4)
    wide = release_noise(4, 12, noise=options)[0]
    step = 2.0 ** math.ceil(math.log2(6.0)) * 2.0**-20 / 6.0
    places = wide / step
    assert np.abs(places - np.round(places)).max() < 1e-6  # the divisor is a power of two
    exact = release_noise(1, 12, noise=NoiseOptions.of("secure"))[0]
    assert np.abs(matrix(coefficients(4, 12), 12) @ wide - exact).max() < 1e-5


@pytest.mark.parametrize(
    "options", [NoiseOptions(), NoiseOptions(floating_point="grid").over(6)], ids=str
)
def test_a_candidate_has_the_same_noise_in_every_stack(options: NoiseOptions) -> None:
    together = release_noise(6, 15, numbers=(3, 8, 5), noise=options)
    alone = release_noise(6, 15, numbers=(8,), noise=options)
    assert np.array_equal(together[1], alone[0])


def cyclic(records: int, rate: float, bands: int, tags=(0,)) -> tuple[CyclicSampler, list]:
    streams = [Streams(bytes([tag]) * 32) for tag in tags]
    groups = [assign_groups(s, records=records, bands=bands) for s in streams]
    sampler = CyclicSampler(
        records=records,
        rate=rate * bands,
        rngs=[s.numpy("sampling") for s in streams],
        groups=groups,
        bands=bands,
    )
    return sampler, groups


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("records", "rate", "bands"), [(300, 0.05, 4), (7, 0.2, 5), (4000, 0.01, 16)]
)
def test_a_record_is_sampled_in_the_turn_of_its_group(
    records: int, rate: float, bands: int
) -> None:
    """Rate and groups at 4.5 standard errors; two samples of a record are a multiple of b apart."""
    steps = min(400_000 // records, 2000) * bands
    sampler, (groups,) = cyclic(records, rate, bands)
    counts = np.zeros(records)
    for step in range(steps):
        index, sizes = sampler()
        members = index[0, : sizes[0]]
        assert len(np.unique(members)) == len(members)
        assert (groups[members] == step % bands).all()
        assert sampler.group == step % bands
        counts[members] += 1
    trials = records * steps / bands
    share = counts.sum() / (records * steps)
    error = (
        math.sqrt(rate * bands * (1 - rate * bands) / trials) / bands if rate * bands < 1 else 1e-12
    )
    assert abs(share - rate) <= 4.5 * error + 1e-12
    if error > 1e-9:
        assert 0.05 * rate > 4.5 * error  # with power: a rate that is 5% off would be seen
    sizes_of_groups = np.bincount(groups, minlength=bands)
    if records >= 300:
        expected = records / bands
        chi = ((sizes_of_groups - expected) ** 2 / expected).sum()
        assert 1e-4 < stats.chi2.sf(chi, bands - 1) < 1 - 1e-4


def test_groups_are_drawn_by_themselves() -> None:
    """A record's group is the same whatever records come after it, and every candidate has its own."""
    streams = Streams(bytes([1]) * 32)
    few = assign_groups(streams, records=100, bands=256)
    more = assign_groups(streams, records=1000, bands=256)
    assert np.array_equal(few, more[:100])
    assert more.max() > 200
    assert not np.array_equal(few, assign_groups(Streams(bytes(32)), records=100, bands=256))


def test_samples_of_groups_are_the_same_alone_and_go_on_where_they_were() -> None:
    together, _ = cyclic(500, 0.02, 6, (0, 1, 2))
    alone, _ = cyclic(500, 0.02, 6, (1,))
    again, _ = cyclic(500, 0.02, 6, (1,))
    for step in range(300):
        (a, na), (b, nb) = together(), alone()
        assert np.array_equal(a[1, : na[1]], b[0, : nb[0]])
        if step == 101:
            position = {name: tensor.clone() for name, tensor in alone.position().items()}
            again.go_to(position)
        if step > 101:
            c, nc = again()
            assert np.array_equal(b[0, : nb[0]], c[0, : nc[0]])
            assert again.group == alone.group == step % 6


def asked_oracle(bands: int = 3, steps: int = 6) -> Oracle:
    return Oracle(
        Schedule(records=40, sample_rate=0.25, steps=steps, bands=bands),
        data=TensorData(torch.zeros(40, SIZE), torch.zeros(40)),
        kernel=Silent(),
        streams=[Streams(bytes(32))],
        device=CPU,
        physical_rows=64,
    )


def ask(asked: Oracle, sample=None, norm: float = 1.0, multiplier: float = 2.0) -> torch.Tensor:
    params = torch.zeros(1, SIZE)
    return asked.gradient(
        sample or asked.sample(), params, clipping=Flat(norm), noise_multiplier=multiplier
    )


@pytest.mark.quick
def test_what_correlated_noise_is_not_for_is_refused() -> None:
    params, bound = torch.zeros(1, SIZE), torch.ones(1)
    asked = asked_oracle()
    sample = asked.sample()
    with pytest.raises(TranscriptMismatchError, match="sample of every record cannot be released"):
        asked.everything()
    with pytest.raises(TranscriptMismatchError, match="a loss cannot be released beside it"):
        asked.losses(sample, [params], bound=bound, noise_multiplier=1.0)
    with pytest.raises(TranscriptMismatchError, match="a count beside the gradient cannot"):
        asked.gradient_and_fraction(
            sample, params, clipping=Flat(1.0), noise_multiplier=1.0, count_noise_multiplier=1.0
        )
    ask(asked, sample)
    with pytest.raises(TranscriptMismatchError, match="one release about each sample in turn"):
        ask(asked, sample)
    asked = asked_oracle()
    asked.sample()
    with pytest.raises(TranscriptMismatchError, match="sample 0 is next"):
        ask(asked)


@pytest.mark.quick
@pytest.mark.parametrize("change", [{"norm": 2.0}, {"multiplier": 1.0}])
def test_another_scale_in_a_later_step_is_refused(change: dict) -> None:
    asked = asked_oracle()
    ask(asked)
    ask(asked)
    with pytest.raises(TranscriptMismatchError, match="one scale in all steps"):
        ask(asked, **change)


@pytest.mark.statistical
def test_an_oracle_samples_groups_at_their_rate() -> None:
    """The sizes of 3,000 samples: at 4.5 standard errors, and a rate that is 5% off would be seen."""
    asked = asked_oracle(bands=3, steps=3000)
    sizes = [int(asked.sample().sizes[0]) for _ in range(3000)]
    error = 4.5 * math.sqrt(10 * 0.75 / 3000)
    assert abs(np.mean(sizes) - 10.0) < error < 0.5


def test_a_training_with_other_noise_than_planned_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks are those that were charged, and the noise is independent: another mechanism all the same."""
    monkeypatch.setattr(oracles, "coefficients", lambda bands, steps: (1.0,))
    with pytest.raises(TranscriptMismatchError, match="over 1 steps, but its plan says 4"):
        run_method("dpsgd", 4)


@pytest.mark.quick
def test_the_scale_is_kept_where_a_training_goes_on() -> None:
    asked = asked_oracle()
    ask(asked)
    again = asked_oracle()
    again.go_to(asked.position())
    with pytest.raises(TranscriptMismatchError, match="one scale in all steps"):
        ask(again, norm=2.0)
    again = asked_oracle()
    again.go_to(asked.position())
    assert torch.equal(ask(again), ask(asked))


def made(groups, bands, rate: float = 0.5) -> Transcript:
    transcript = Transcript()
    for group, of_release in zip(groups, bands, strict=True):
        transcript.record(transcript.open_sample(rate, group), "gaussian", 2.0, of_release)
    return transcript


@pytest.mark.quick
def test_the_transcript_counts_the_samples_of_one_group() -> None:
    look = (0.5, (("gaussian", 2.0),))
    assert made([0, 1, 2, 0, 1], [3] * 5).looks() == {look: 2}
    assert made([0, 0, 0, 0, 0], [1] * 5).looks() == {look: 5}
    made([0, 1, 2, 0, 1], [3] * 5).check_bands(3)
    event = FixedDPSGD(2.0).event(Schedule(60, 0.5 / 3, 5, 3))
    made([0, 1, 2, 0, 1], [3] * 5).check_within(event)
    made([0, 1, 2, 0, 1], [3] * 5).check_whole(event)


def check_all(transcript: Transcript, event) -> None:
    """What the engine checks at the end of a training."""
    transcript.check_within(event)
    transcript.check_whole(event)
    transcript.check_bands(3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("groups", "bands", "sentence"),
    [
        ([0, 0, 1, 2, 0], [3] * 5, "sampled the same group"),
        ([0, 1, 0, 1, 0], [3] * 5, "correlated over 3 steps, and steps 0 and 2 sampled the same"),
        ([0] * 5, [1] * 5, "but its plan charged 2"),
        ([0, 1, 2, 0, 1], [1] * 5, "but its plan says 3"),
        ([0, 2, 1, 0, 2], [3] * 5, "sampled group 2 of 3, but its plan says group 1"),
        ([0, 1, 2, 0, 1], [2] * 5, "correlated over 2 steps"),
    ],
)
def test_a_training_that_sampled_or_noised_otherwise_is_refused(groups, bands, sentence) -> None:
    event = FixedDPSGD(2.0).event(Schedule(60, 0.5 / 3, 5, 3))
    with pytest.raises(TranscriptMismatchError, match=sentence):
        check_all(made(groups, bands), event)


@pytest.mark.quick
def test_a_transcript_with_bands_is_kept_whole() -> None:
    transcript = made([0, 1, 2, 0, 1], [3] * 5)
    again = Transcript()
    again.go_to(transcript.position())
    assert again.looks() == transcript.looks()
    again.check_bands(3)
    assert again.digest() == transcript.digest()
    assert again.digest() != made([0, 1, 2, 0, 1], [2] * 5).digest()


def trained(name: str, bands: int, count: int = 1, steps: int = 20, **more):
    x, y = blobs()
    schedule = Schedule(len(x), 0.1, steps, bands)
    kind = METHODS[name]
    method = kind.for_budget(schedule, epsilon=4.0, delta=1e-5, **options(name, DIMENSION), **more)
    return method, schedule, TensorData(x, y), count


def run_method(name: str, bands: int, tags=(0,), **more):
    method, schedule, data, _ = trained(name, bands, **more)
    values = {"learning_rate": 0.3, "max_grad_norm": 1.0}
    if name == "automatic-clipping":
        del values["max_grad_norm"]
    if name == "norm-bound":
        del values["max_grad_norm"]
    return fit(
        method,
        [values] * len(tags),
        steps=schedule.steps,
        bands=bands,
        data=data,
        secrets=[secrets(20)[tag] for tag in tags],
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("dpsgd", {}),
        ("dpsgd", {"momentum": 0.9, "clipping": "by-layer"}),
        ("dp-adam", {"average": "tail"}),
        ("automatic-clipping", {"schedule": "linear"}),
        ("norm-bound", {}),
    ],
)
def test_methods_train_in_stacks_as_alone(name: str, more: dict) -> None:
    together = run_method(name, 4, (2, 7, 5), **more)
    alone = run_method(name, 4, (7,), **more)
    # Noise has the same bits; sums of a stack are rounded in another order.
    assert torch.allclose(together.params[1], alone.params[0], atol=1e-4)
    assert together.transcripts[1] == alone.transcripts[0]
    plain = run_method(name, 1, (7,), **more)
    assert not torch.allclose(plain.params, alone.params, atol=1e-2)
    assert plain.transcripts[0].looks().total() == 20
    assert alone.transcripts[0].looks().total() == 5


def test_the_engine_takes_no_other_noise_than_the_schedule_says() -> None:
    method, schedule, data, _ = trained("dpsgd", 4)
    with pytest.raises(InvalidInputError, match="must be correlated over 4 steps"):
        Training(method, schedule, torch.nn.functional.cross_entropy, data, noise=NoiseOptions())
    with pytest.raises(InvalidInputError, match="alike in every step; adaclip is none"):
        Training(
            METHODS["adaclip"](noise_multiplier=1.0),
            schedule,
            torch.nn.functional.cross_entropy,
            data,
        )


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_whose_steps_differ_refuse_bands(name: str) -> None:
    kind = METHODS[name]
    if kind.correlates:
        assert name in CORRELATING
        return
    if kind.event is not FixedDPSGD.event:
        return  # the engine and the planner refuse it
    made = kind.for_budget(
        Schedule(200, 0.1, 20), epsilon=4.0, delta=1e-5, **options(name, DIMENSION)
    )
    with pytest.raises(InvalidInputError, match="alike in every step"):
        made.event(Schedule(200, 0.1, 20, 4))


@pytest.mark.quick
def test_a_noise_floor_is_refused_beside_correlated_noise() -> None:
    floored = METHODS["dp-adam"](1.0, noise_floor=0.1)
    assert floored.event(Schedule(200, 0.1, 20)).count == 20
    with pytest.raises(InvalidInputError, match="must be left out where noise is correlated"):
        floored.event(Schedule(200, 0.1, 20, 4))


def test_a_wrong_row_of_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's own check of the order: noise that is drawn for something else in between is seen."""
    asked = asked_oracle()
    ask(asked)
    assert isinstance(asked._noise, CorrelatedNoise)
    asked._noise.gaussian(SIZE)
    with pytest.raises(TranscriptMismatchError, match="sample 2 is next"):
        ask(asked)


def test_earlier_noise_counts_as_memory() -> None:
    kernel = Silent()
    plain = memory_model(kernel, longest=64)
    banded = memory_model(kernel, longest=64, noise_rows=7)
    assert banded.state_bytes - plain.state_bytes == 7 * 4 * SIZE
    method, schedule, data, _ = trained("dpsgd", 5)
    loss = torch.nn.functional.cross_entropy
    assert Training(method, schedule, loss, data)._noise_rows == 4
    secure = NoiseOptions.of("secure").over(5)
    assert Training(method, schedule, loss, data, noise=secure)._noise_rows == 8


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bands": 8}, "is for correlated noise alone"),
        ({"correlation": "banded", "bands": 0}, "from 1 to 256"),
        ({"correlation": "banded", "bands": 257}, "from 1 to 256"),
        ({"correlation": "banded", "bands": 2.5}, "from 1 to 256"),
        ({"correlation": "banded", "bands": True}, "from 1 to 256"),
        ({"correlation": "bands"}, "noise.correlation"),
    ],
)
def test_options_are_refused_with_a_sentence(fields: dict, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        NoiseOptions.of(fields)


@pytest.mark.quick
def test_options_say_what_they_are() -> None:
    options = NoiseOptions.of({"correlation": "banded"})
    assert options.bands == "auto"
    assert options.over(8).note == "noise: fast, plain, correlated over 8 steps"
    assert options.over(1) == NoiseOptions() == options.independent
    assert NoiseOptions().to_dict() == {"source": "fast", "floating_point": "plain"}
    assert NoiseOptions.of(options.over(8).to_dict()) == options.over(8)


@pytest.mark.quick
def test_a_rate_above_1_in_a_group_is_refused() -> None:
    assert Schedule(100, 0.125, 50, 8).group_rate == 1.0
    with pytest.raises(InvalidInputError, match=r"at most 7 at sample rate 0\.13"):
        Schedule(100, 0.13, 50, 8)
    assert Schedule(100, 0.1, 51, 8).rounds == 7
