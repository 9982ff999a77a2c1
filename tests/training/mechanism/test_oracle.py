"""What the oracle adds to the kernel's sums: bounds, noise of every release, and who gets which."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats
from torch import nn

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.training.mechanism import noise as noise_module
from privtune.training.mechanism.clipping import Automatic, Clipping, EqualByLayer, Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import Layout
from privtune.training.mechanism.noise import NoiseSource
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import TranscriptMismatchError

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SIZE, RECORDS, RATE = 500, 40, 0.5
OPTIONS = [
    NoiseOptions(),
    NoiseOptions(source="chacha20"),
    NoiseOptions(floating_point="grid"),
    NoiseOptions(floating_point="four-draws"),
]


class Silent:
    """A kernel whose gradients are zero and whose losses are given."""

    drops = False

    def __init__(self, loss: float = 0.0) -> None:
        self.module = nn.Linear(SIZE, 1, bias=False)
        self.layout = Layout(self.module)
        self._loss = loss

    def accumulate(self, params, rows, clipping, *, out, halves=None):
        return None

    def losses(self, params, rows):
        return torch.full_like(rows.mask, self._loss)


def oracle(
    numbers: tuple[int, ...] = (0,), loss: float = 0.0, noise: NoiseOptions | None = None
) -> Oracle:
    return Oracle(
        Schedule(records=RECORDS, sample_rate=RATE, steps=3),
        data=TensorData(torch.zeros(RECORDS, SIZE), torch.zeros(RECORDS)),
        kernel=Silent(loss),
        streams=[Streams(bytes([k]) * 32) for k in numbers],
        device=CPU,
        physical_rows=64,
        noise=noise,
    )


def normal(values: torch.Tensor, deviation: float) -> None:
    """Kolmogorov-Smirnov at 1e-4 on a fixed stream; half and twice the noise are seen."""
    row = values.flatten().double().numpy() / deviation
    assert stats.kstest(row, "norm").pvalue > 1e-4
    assert stats.kstest(2 * row, "norm").pvalue < 1e-4
    assert stats.kstest(row / 2, "norm").pvalue < 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_release_has_its_noise(options: NoiseOptions) -> None:
    """The standard deviation is multiplier times sensitivity, over the expected batch size."""
    asked, clipping = oracle(noise=options), Flat(3.0)
    params, batch = torch.zeros(1, SIZE), RATE * RECORDS
    sample = asked.sample()
    given = asked.gradient(sample, params, clipping=clipping, noise_multiplier=2.0)
    normal(given, 6.0 / batch)
    bound = torch.tensor([5.0])
    given = asked.losses(sample, [params] * SIZE, bound=bound, noise_multiplier=2.0)
    normal(given, 10.0 / batch)
    counts = [
        asked.gradient_and_fraction(
            sample, params, clipping=clipping, noise_multiplier=2.0, count_noise_multiplier=4.0
        )[1]
        - 0.5
        for _ in range(SIZE)
    ]
    normal(torch.stack(counts), 2.0 / batch)


@pytest.mark.parametrize(
    ("loss", "counted"), [(0.5, 0.5), (9.0, 2.0), (-9.0, 0.0), (float("nan"), 0.0)]
)
def test_a_loss_counts_from_zero_to_its_bound(loss: float, counted: float) -> None:
    asked = oracle(loss=loss)
    params = torch.zeros(1, SIZE)
    given = asked.losses(
        asked.everything(), [params], bound=torch.tensor([2.0]), noise_multiplier=0.0
    )
    assert given.item() == pytest.approx(counted)


def test_a_mean_is_over_the_expected_size() -> None:
    """The realised size is private: it is the sum that varies, not what it is divided by."""
    asked, params = oracle(loss=1.0), torch.zeros(1, SIZE)
    sums = set()
    for _ in range(20):
        mean = asked.losses(
            asked.sample(), [params], bound=torch.tensor([2.0]), noise_multiplier=0.0
        )
        sums.add(mean.item() * RATE * RECORDS)
    assert len(sums) > 3
    assert all(value == pytest.approx(round(value)) for value in sums)


def test_a_full_batch_is_no_sample() -> None:
    """What everybody is in has no amplification: the transcript says at which rate it was drawn."""
    asked, params = oracle(), torch.zeros(1, SIZE)
    for sample in (asked.everything(), asked.sample()):
        asked.gradient(sample, params, clipping=Flat(1.0), noise_multiplier=2.0)
    looks = asked.transcripts()[0].looks()
    assert looks == Counter({(rate, (("gaussian", 2.0),)): 1 for rate in (1.0, RATE)})


def test_a_candidate_is_the_same_alone_as_in_a_stack() -> None:
    together, alone = oracle((0, 1, 2)), oracle((2,))
    multipliers = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2 * 2**14 // SIZE):  # beyond what was drawn ahead
        found = [
            asked.gradient(
                asked.sample(),
                torch.zeros(len(own), SIZE),
                clipping=Flat(1.0),
                noise_multiplier=own,
            )
            for asked, own in ((together, multipliers), (alone, multipliers[2:]))
        ]
        assert torch.equal(found[0][2], found[1][0])
    assert together.transcripts()[2].looks() == alone.transcripts()[0].looks()


def test_what_was_charged_and_not_released_is_missed() -> None:
    """A training that released less may have let some of it go another way."""
    step = PoissonSampled(RATE, Gaussian(2.0))
    asked = oracle()
    for _ in range(2):
        asked.gradient(
            asked.sample(), torch.zeros(1, SIZE), clipping=Flat(1.0), noise_multiplier=2.0
        )
    transcript = asked.transcripts()[0]
    transcript.check_whole(Repeated(2, step))
    transcript.check_within(Repeated(3, step))
    with pytest.raises(TranscriptMismatchError, match="charged 1 more samples"):
        transcript.check_whole(Repeated(3, step))
    with pytest.raises(TranscriptMismatchError, match="released"):
        transcript.check_within(step)


class Asked(Streams):
    """Streams that note under which names keys are asked for."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.names: list[str] = []

    def key(self, name: str, candidate: int = 0) -> bytes:
        self.names.append(name)
        return super().key(name, candidate)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_two_sources_of_noise_have_one_key(
    options: NoiseOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds and sizes of releases have keys of their own, and a cipher never uses one again."""
    monkeypatch.setattr(noise_module, "_KEYSTREAM", 2**19)
    streams = Asked(bytes(32))
    source = NoiseSource([streams], CPU, options=options)
    for size in (1, 7, 1, 9000, 9000, 9000, 9000, 9000, 9000, 9000, 9000):
        source.gaussian(size)
        source.laplace(size)
    assert len(streams.names) == len(set(streams.names))
    assert len(streams.names) >= 6
    if options.source == "chacha20":
        assert len(streams.names) > 6, "the keystream was long enough to change its key"


@pytest.mark.parametrize("make", ["generator", "numpy"])
def test_a_source_holds_the_whole_key(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys that differ in their last bit alone, and in their first, have other numbers."""
    found = set()
    for key in (bytes(32), bytes(31) + b"\1", b"\1" + bytes(31)):
        monkeypatch.setattr(Streams, "key", lambda *_, key=key: key)
        source = getattr(Streams(bytes(32)), make)("noise")
        if make == "numpy":
            found.add(tuple(source.random(4)))
        else:
            found.add(tuple(torch.randn(4, generator=source).tolist()))
    assert len(found) == 3


def test_a_bound_that_is_written_over_is_read_anew() -> None:
    """Bounds are remembered for speed, and loops of a user's own may write into them."""
    bound = torch.tensor([1.0, 2.0])
    assert Flat(bound).sensitivity(2).tolist() == [1.0, 2.0]
    bound.mul_(3.0)
    assert Flat(bound).sensitivity(2).tolist() == [3.0, 6.0]


@pytest.mark.parametrize("clipping", [Flat(2.0), Automatic(), EqualByLayer(2.0)])
def test_a_norm_that_is_no_number_counts_nothing(clipping: Clipping) -> None:
    norms = torch.tensor([[[float("nan"), float("inf"), 1.0, 1e30]]])
    coefficients = clipping.coefficients(norms)[0, 0]
    assert coefficients[:2].tolist() == [0.0, 0.0]
    bound = clipping.sensitivity(1).item()
    assert (coefficients[2:] * norms[0, 0, 2:]).amax() <= bound * (1 + 1e-6)
