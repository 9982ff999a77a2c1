"""Noise for releases: scaled by the clipping's sensitivity, and drawn from streams of a secret.

Noise in floating point is not noise in the reals: the lowest bits of a release can tell two datasets apart
(Mironov 2012). By default nothing is done about that, as in other libraries; ``NoiseOptions`` has two
remedies, and a cryptographic source of randomness. Tails are exact under every option: see ``tails``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy import special

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.mechanism.clipping import looks_freely, sent
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams, Tensors, of_prefix, prefixed
from privtune.training.mechanism.transcript import TranscriptMismatchError

VALUES = 3
"""Which values a secret gives: where that is another number, no training goes on in its middle."""

_AHEAD = 2**15  # about how many values of a candidate are drawn at once
_MOST = 2**11  # releases drawn at once: each is a view, which takes longer to make than a number
_TAILS = 64  # tail values that are drawn at once
_KEYSTREAM = 2**36  # bytes drawn from one key; ChaCha20 has a block counter of 32 bits
_GRID = 2.0**-20  # of the noise's scale

_Values: TypeAlias = "npt.NDArray[np.floating[Any]]"


def noise_scale(
    noise_multiplier: float | tuple[float, ...],
    sensitivity: torch.Tensor,
) -> torch.Tensor:
    """Return each candidate's noise scale, ``[K]``: noise multiplier times sensitivity, in float64.

    A sensitivity on a GPU is not looked at, which would make the host wait in every step: one that is
    infinite gives infinite noise there, and a release of no use.

    Raises:
        InvalidInputError: If noise is to be added to a sum whose sensitivity is infinite.
    """
    factors = noise_multiplier
    if isinstance(factors, float):
        factors = (factors,) * len(sensitivity)
    if not all(math.isfinite(multiplier) and multiplier >= 0.0 for multiplier in factors):
        raise InvalidInputError(
            "noise_multiplier",
            noise_multiplier,
            "must be a finite number of at least 0",
        )
    if looks_freely(sensitivity.device):
        bounds = sensitivity.tolist()
    else:
        bounds = [0.0] * len(factors)
    if not all(m == 0.0 or math.isfinite(bound) for m, bound in zip(factors, bounds, strict=True)):
        raise InvalidInputError(
            "sensitivity",
            "infinite",
            "must be finite where noise is added",
            "Clip the gradients.",
        )
    # Not a plain product: a gradient that is not clipped, without noise, has 0 times an infinite sensitivity.
    column = torch.tensor(factors, dtype=torch.float64)
    multipliers = sent(column, sensitivity.device)
    return torch.where(multipliers > 0.0, multipliers * sensitivity, 0.0)


def add_noise(
    total: torch.Tensor,
    noise: torch.Tensor,
    scale: torch.Tensor,
    options: NoiseOptions,
) -> torch.Tensor:
    """Add standard noise ``[K, n]`` times a scale ``[K]`` to a sum, and round to a grid if options say so.

    The grid's step is the power of two at or above the scale, times 2^-20. Rounding to it is
    post-processing of the noisy value, and costs no privacy.

    Args:
        total: The sum, ``[K, n]``.
        noise: Standard values of the same shape.
        scale: What each candidate's noise is multiplied by.
        options: Say whether float64 and the grid are used.
    """
    column = scale.to(noise).unsqueeze(1)
    if not options.wide:
        return torch.addcmul(total, noise, column)
    # The grid is public, as the scale is: the bits below it, which Mironov's attack reads, are not released.
    exponent = torch.ceil(torch.log2(column.clamp(min=1e-300)))
    grid = torch.exp2(exponent) * _GRID
    exact = total.double() + noise * column
    rounded = torch.round(exact / grid) * grid
    noisy = torch.where(column > 0.0, rounded, exact)
    return noisy.to(total.dtype)


class NoiseSource:
    """Standard noise for a stack of candidates, each from its own streams.

    Sources are opened by kind and size of release, each from a key of its own: how many releases of
    another size a method asks for in between changes no value. Values are drawn in blocks, as a call
    costs more than a number.

    **Guarantee**: a candidate's noise is a function of its own secret and of the sizes that it
    asked for, never of the stack that it is in. No value is given out twice.
    """

    def __init__(
        self,
        streams: Sequence[Streams],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        options: NoiseOptions | None = None,
    ) -> None:
        self.options = options or NoiseOptions()
        self._streams = list(streams)
        self.device = device
        self._dtype = torch.float64 if self.options.wide else dtype
        self._sources: dict[tuple[str, int], list[_Keystream]] = {}
        self._ahead: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.outside: torch.Tensor | None = None
        """Where there is no noise, ``[K, size]``, so that nothing may be released; None for nowhere."""
        self.bands = 1
        """Over how many steps the noise is correlated."""

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values, shape ``[K, size]``."""
        return self._next("gaussian", size)

    def laplace(self, size: int) -> torch.Tensor:
        """Return Laplace values of scale 1, shape ``[K, size]``."""
        return self._next("laplace", size)

    def position(self) -> Tensors:
        """Return the positions of all sources, and the values that were drawn ahead, for a checkpoint.

        What was drawn ahead is part of it, since the keystream has moved past it.
        """
        tensors: Tensors = {}
        for (kind, size), sources in self._sources.items():
            for k, source in enumerate(sources):
                position = source.position()
                tensors |= prefixed(f"{kind}.{size}.{k}", position)
            ahead = self._ahead[kind, size]
            if ahead:
                releases = torch.stack(ahead)
            else:
                releases = torch.empty(0, len(sources), size)
            tensors[f"{kind}.{size}.ahead"] = releases.cpu()
        return tensors

    def go_to(self, position: Tensors) -> None:
        """Set all sources to a checkpoint's position, so that no value is drawn twice."""
        for name, ahead in position.items():
            kind, digits, last = name.split(".", maxsplit=2)
            if last != "ahead":
                continue
            size = int(digits)
            for k, source in enumerate(self._open(kind, size)):
                of_source = of_prefix(f"{kind}.{size}.{k}", position)
                source.go_to(of_source)
            # In their places in a block: sums round otherwise where memory is aligned otherwise.
            block = self._block(size)
            first = block.shape[1] - len(ahead)
            last_first = ahead.flip(0).transpose(0, 1)  # [K, releases, size]
            block[:, first:] = last_first.to(block)
            releases = block.unbind(1)[::-1]
            self._ahead[kind, size] = list(releases[: len(ahead)])

    def _block(self, size: int) -> torch.Tensor:
        """Return an uninitialised block for several releases, shape ``[K, count, size]``."""
        count = max(1, min(_AHEAD // size, _MOST))
        shape = (len(self._streams), count, size)
        return torch.empty(shape, device=self.device, dtype=self._dtype)

    def _open(self, kind: str, size: int) -> list[_Keystream]:
        """Return the sources for releases of a kind and size, opened at first use."""
        key = (kind, size)
        name = f"noise/{kind}/{size}"
        if key in self._sources:
            return self._sources[key]
        if self.device.type == "cpu" or self.options.source == "chacha20":
            self._sources[key] = [_Keystream(s, name) for s in self._streams]
        else:
            self._sources[key] = [_OnDevice(s, name, self.device) for s in self._streams]
        self._ahead[key] = []
        return self._sources[key]

    def _next(self, kind: str, size: int) -> torch.Tensor:
        """Return the next release of a kind and size; draw a new block if none is left."""
        key = (kind, size)
        sources = self._open(kind, size)
        if not self._ahead[key]:
            block = self._draw(kind, size, sources)
            self._ahead[key] = list(reversed(block))
        return self._ahead[key].pop()

    def _draw(
        self,
        kind: str,
        size: int,
        sources: Sequence[_Keystream],
    ) -> tuple[torch.Tensor, ...]:
        """Draw a block of releases for all candidates; return views ``[K, size]``, one a release.

        *Four draws* makes a value of four, so that the lowest bits of a release, which Mironov's
        attack reads, are those of a sum that many draws give (Holohan and Braghin 2021).

        Args:
            kind: ``gaussian`` or ``laplace``.
            size: Numbers of a release.
            sources: One for each candidate.
        """
        block = self._block(size)
        out = block.flatten(1)
        if kind == "laplace":
            for row, source in zip(out, sources, strict=True):
                values = torch.from_numpy(exact_laplace(source.uniform, len(row)))
                row.copy_(sent(values, self.device))
        elif self.options.floating_point == "four-draws":
            # A sum of four has twice the deviation of one.
            draws = out.new_empty(len(sources), 4 * out.shape[1])
            _gaussian(draws, sources)
            fours = draws.view(len(sources), 4, -1)
            torch.sum(fours, dim=1, out=out)
            out.mul_(0.5)
        else:
            _gaussian(out, sources)
        return block.unbind(1)


class PlacedNoise(NoiseSource):
    """A noise source for narrow models in a wide stack: noise at their parameters' places, zeros elsewhere.

    It is for narrow models in the stack of a wide one. What is beside the places is zeroed after the
    sum: noise there would move weights that the model does not have.

    **Guarantee**: at its places, a candidate's noise is what it draws alone, where its vector is its own.
    """

    def __init__(
        self,
        streams: Sequence[Streams],
        device: torch.device,
        dtype: torch.dtype,
        options: NoiseOptions | None,
        *,
        places: Sequence[torch.Tensor],
        size: int,
    ) -> None:
        super().__init__(streams, device, dtype, options)
        self._noises = [NoiseSource([stream], device, dtype, options) for stream in streams]
        self._lengths = [len(place) for place in places]
        self._size = size
        # Places in the rows of all candidates, one after the other.
        shifted = [place + k * size for k, place in enumerate(places)]
        self._index = torch.cat(shifted).to(device)
        outside = torch.ones(len(places) * size, dtype=torch.bool, device=device)
        outside.index_fill_(0, self._index, False)
        self.outside = outside.view(-1, size)

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values at each candidate's places, zeros elsewhere, shape ``[K, size]``."""
        if size != self._size:  # its draws would begin where those of whole vectors began
            raise RuntimeError(f"noise of {size} values beside that of vectors of {self._size}")
        of_candidates = []
        for noise, length in zip(self._noises, self._lengths, strict=True):
            (of_candidate,) = noise.gaussian(length)
            of_candidates.append(of_candidate)
        values = torch.cat(of_candidates)
        out = values.new_zeros(len(self._noises) * size)
        out.index_copy_(0, self._index, values)
        return out.view(-1, size)


class CorrelatedNoise:
    """Noise of step t that is row t of ``C^-1 Z``, for independent noise Z and a banded Toeplitz matrix C.

    A row is ``(z_t - c_1 n_(t-1) - ... - c_(b-1) n_(t-b+1)) / c_0``, so the last b - 1 rows are kept. Each
    number is computed by products and differences of its own, rounded one by one: so it is the same
    whatever stack and device it is computed in.

    **Guarantee**: all rows together are ``C^-1 Z`` at one scale, for one release of each sample in turn;
    another order, or another scale, is refused before noise is drawn.

    Args:
        source: Of the independent noise.
        column: The numbers c, as :func:`privtune.training.mechanism.banded.coefficients` returns them.

    References:
        Choquette-Choo et al. 2023, arXiv 2306.08153, Algorithm 9.
    """

    def __init__(self, source: NoiseSource, column: Sequence[float]) -> None:
        self._source = source
        self._column = tuple(column)
        self._rows: torch.Tensor | None = (
            None  # [b - 1, K, size], the row of step t at t mod (b - 1)
        )
        self._scale: torch.Tensor | None = None
        self._step = 0
        self.options = source.options
        self.outside = source.outside
        self.bands = len(self._column)

    def check_release(self, number: int, scale: torch.Tensor) -> None:
        """Refuse a release that is not about the next sample, or whose noise has another scale.

        Args:
            number: Of the sample that the release is about, from 0.
            scale: Of each candidate's noise, ``[K]``.

        Raises:
            TranscriptMismatchError: If the account of correlated noise does not cover the release.
        """
        if number != self._step:
            raise TranscriptMismatchError(
                f"Correlated noise is for one release about each sample in turn: sample {self._step} is "
                f"next, and a release about sample {number} was asked for."
            )
        if self._scale is None:
            self._scale = scale
        if scale is not self._scale and not torch.equal(scale, self._scale):
            raise TranscriptMismatchError(
                "Correlated noise has one scale in all steps, and another clipping norm or noise "
                f"multiplier was asked for in step {number}."
            )

    def gaussian(self, size: int) -> torch.Tensor:
        """Return the row of the next step, shape ``[K, size]``."""
        noise = self._source.gaussian(size)
        count = self.bands - 1
        if self._rows is None:
            self._rows = noise.new_zeros(count, *noise.shape)
        rows = self._rows
        part = torch.empty_like(noise)
        for lag in range(1, min(count, self._step) + 1):
            torch.mul(rows[(self._step - lag) % count], self._column[lag], out=part)
            noise.sub_(part)
        noise.div_(self._column[0])
        rows[self._step % count].copy_(noise)
        self._step += 1
        return noise

    def laplace(self, size: int) -> torch.Tensor:
        """Refuse Laplace noise: the account of correlated noise is for Gaussian noise alone."""
        raise TranscriptMismatchError("Laplace noise cannot be correlated over steps.")

    def position(self) -> Tensors:
        """Return the position of the independent noise, and the rows that later ones are made of."""
        tensors = prefixed("source", self._source.position())
        tensors["step"] = torch.tensor(self._step)
        if self._rows is not None and self._scale is not None:
            tensors["rows"] = self._rows.to("cpu", copy=True)
            tensors["scale"] = self._scale.to("cpu", copy=True)
        return tensors

    def go_to(self, position: Tensors) -> None:
        """Set noise, rows and scale to a checkpoint's position."""
        self._source.go_to(of_prefix("source", position))
        self._step = int(position["step"])
        if "rows" in position:
            device = self._source.device
            self._rows = position["rows"].to(device, copy=True)
            self._scale = position["scale"].to(device)


def _gaussian(out: torch.Tensor, sources: Sequence[_Keystream]) -> None:
    """Fill the rows of ``out`` with standard normal values whose tails are exact.

    Values beyond ``EDGE`` are drawn again, given that they lie there: a generator of 24 or 32 bits
    has no fine tail, and a δ of 1e-6 is a statement about that tail.
    """
    if not looks_freely(out.device):
        _gaussian_unseen(out, sources)
        return
    for row, source in zip(out.numpy(), sources, strict=True):
        for start in range(0, len(row), TOGETHER):
            part = row[start : start + TOGETHER]
            source.fill(part)
            for place in beyond(part):
                part[place] = math.copysign(source.beyond(), part[place])


def _gaussian_unseen(out: torch.Tensor, sources: Sequence[_Keystream]) -> None:
    """Fill the rows of a GPU tensor with standard normal values and exact tails, without reading any."""
    # More places than tails occur with a probability of 2^-128. Which tails are taken says where `out` lies
    # beyond the edge, never their own size.
    size = out.shape[1]
    many = min(most_beyond(size), size)
    for row, source in zip(out, sources, strict=True):
        source.gaussian(row)
    rows = []
    for source in sources:
        row = [source.beyond() for _ in range(many)]
        rows.append(row)
    tails = torch.tensor(rows, dtype=torch.float64)
    places = out.abs().topk(many, dim=1).indices
    extremes = out.gather(1, places)
    replacements = sent(tails.to(out.dtype), out.device)
    replacements = replacements.copysign(extremes)
    out.scatter_(1, places, torch.where(extremes.abs() > EDGE, replacements, extremes))


class _Keystream:
    """Standard noise made of the keystream of ChaCha20, keyed by one candidate's secret.

    ChaCha20 is a cryptographic generator: who sees any number of releases cannot tell the next noise.
    The name of the key holds kind, size and number, so no two keystreams are alike.
    """

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams = streams
        self._name = name
        self._keys = 0
        self._beyond: list[float] = []
        self._rekey()

    def fill(self, out: _Values) -> None:
        """Fill an array with standard normal values that are accurate up to ``EDGE`` deviations."""
        even = len(out) + len(out) % 2
        if out.dtype == np.float32:
            words = self._bytes(4 * even).view("<u4")
            _box_muller(words, out)
        else:
            _box_muller_wide(self.uniform(even), out)

    def gaussian(self, out: torch.Tensor) -> None:
        """Fill a tensor on any device with standard normal values, accurate up to ``EDGE`` deviations."""
        values = torch.empty(len(out), dtype=out.dtype).numpy()
        for start in range(0, len(out), TOGETHER):
            self.fill(values[start : start + TOGETHER])
        out.copy_(sent(torch.from_numpy(values), out.device))

    def uniform(self, size: int) -> Floats:
        """Return uniform values in [0, 1), multiples of 2^-53."""
        words = self._bytes(8 * size).view("<u8")
        high_bits = words >> np.uint64(11)  # 53 of them, as a float64 holds
        uniform: Floats = high_bits.astype(np.float64)
        uniform *= 2.0**-53
        return uniform

    def beyond(self) -> float:
        """Return the next exact value above ``EDGE``, to replace a value in the tail."""
        if not self._beyond:
            tails = gaussian_tail(self.uniform, _TAILS)
            self._beyond = tails.tolist()
        return self._beyond.pop()

    def position(self) -> Tensors:
        """Return the number of the key, the bytes used of it, and the tail values drawn ahead.

        The number of the key, and the bytes of it that were given out.
        """
        return {
            "beyond": torch.tensor(self._beyond, dtype=torch.float64),
            "keystream": torch.tensor([self._keys - 1, self._used]),
        }

    def go_to(self, position: Tensors) -> None:
        """Set the keystream to a checkpoint's position."""
        self._beyond = position["beyond"].tolist()
        self._keys, used = position["keystream"].tolist()
        self._rekey(block=used // 64)
        # Of the block that was given out in part, those bytes are skipped: they would come twice.
        self._stream.update(bytes(used % 64))
        self._used = used

    def _rekey(self, block: int = 0) -> None:
        """Start the keystream of the next key, from the given block on."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        key = self._streams.key(f"{self._name}/chacha20/{self._keys}")
        # The counter of blocks, then a nonce of zeros: the key is used for nothing else.
        counter = block.to_bytes(16, "little")
        cipher = Cipher(ChaCha20(key, counter), mode=None)
        try:
            self._stream = cipher.encryptor()
        except UnsupportedAlgorithm:
            raise PrivTuneError(
                "OpenSSL has no ChaCha20 here, of which noise is made (one restricted to FIPS has "
                "none): install cryptography's own wheel, which brings another OpenSSL."
            ) from None
        self._keys += 1
        self._used = 0

    def _bytes(self, size: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes of the keystream."""
        if self._used + size > _KEYSTREAM:
            self._rekey()
        self._used += size
        content = self._stream.update(bytes(size))
        return np.frombuffer(content, dtype=np.uint8)


class _OnDevice(_Keystream):
    """A source of noise from the GPU's own generator, with tails from the keystream.

    It has 64 bits of seed on CUDA; whoever wants a cryptographic source there says so in the options.
    """

    def __init__(
        self,
        streams: Streams,
        name: str,
        device: torch.device,
    ) -> None:
        super().__init__(streams, name)
        self._generator = streams.generator(name, device=device)

    def gaussian(self, out: torch.Tensor) -> None:
        """Fill a tensor with standard normal values from the device's generator."""
        out.normal_(generator=self._generator)

    def position(self) -> Tensors:
        """Return the position of the keystream, and the state of the device's generator."""
        return {**super().position(), "generator": self._generator.get_state()}

    def go_to(self, position: Tensors) -> None:
        """Set keystream and device generator to a checkpoint's position."""
        super().go_to(position)
        self._generator.set_state(position["generator"])


def _box_muller(words: npt.NDArray[np.uint32], out: _Values) -> None:
    """Fill ``out`` with standard normal values from 32-bit words, by the method of Box and Muller.

    Box and Muller (1958): ``sqrt(-2 ln u) (cos v, sin v)``. Rounding leaves u right to 2^-24 of
    itself, so the mass beyond an edge of a few deviations is right to some 1e-5 of itself.
    """
    half = len(words) // 2
    radius = out[:half]
    second = out[half:]
    np.copyto(radius, words[:half], casting="unsafe")
    radius += np.float32(0.5)  # u = (w + 1/2) 2^-32 has a logarithm
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = words[half:].view(np.int32).astype(np.float32)
    angle *= np.float32(math.pi * 2.0**-31)
    rest = len(second)  # one less than the half where a number of values is odd
    np.multiply(radius[:rest], np.sin(angle[:rest]), out=second)
    radius *= np.cos(angle, out=angle)


def _box_muller_wide(uniform: Floats, out: _Values) -> None:
    """Fill ``out`` with standard normal values from 53-bit uniform numbers, by Box and Muller in float64."""
    half = len(uniform) // 2
    rest = len(out) - half  # one less than the half where a number of values is odd
    u = 1.0 - uniform[:half]  # in (0, 1]: it has a logarithm
    radius = np.sqrt(-2.0 * np.log(u))
    angle = (2.0 * math.pi) * uniform[half:]
    cosines = np.cos(angle)
    sines = np.sin(angle[:rest])
    np.multiply(radius, cosines, out=out[:half])
    np.multiply(radius[:rest], sines, out=out[half:])


Floats = npt.NDArray[np.float64]

Uniform = Callable[[int], Floats]
"""Draws so many uniform values in [0, 1), multiples of 2^-53."""

EDGE = 4.5
"""Where tails begin, in deviations. Up to here 24 bits would be fine enough: ``P(|Z| > 4.5)`` = 6.8e-6
would be right to 1.4e-8, half a step of such uniform numbers. The 32 bits here are right to 1e-4 of
it, and at 6.5 deviations three words are left."""

TOGETHER = 2**15
"""Values that are made and searched together, while they are in a cache."""

_WORDS = 16  # uniform numbers of 53 bits that make a fine one


def _fine(uniform: Uniform, size: int) -> Floats:
    """Return uniform values in (0, 1] that go down to 2^-848, each accurate to 53 bits.

    A double in (0, 1] made of 53 bits has no value between 0 and 2^-53: no normal value made of it
    lies beyond some 8 deviations. Sixteen of them reach 2^-848.
    """
    # Sixteen digits to the base 2^53, the last drawn in front, plus the least value, so that none is 0.
    digits = uniform(_WORDS * size).reshape(_WORDS, size)
    value = np.ones(size)
    for digit in digits:
        value *= 2.0**-53
        value += digit
    return value


def gaussian_tail(uniform: Uniform, size: int) -> Floats:
    """Return values from the tail of a standard normal law above ``EDGE``."""
    # The lower tail turned over: there probabilities are small numbers, with all their digits.
    probability = _fine(uniform, size) * special.ndtr(-EDGE)
    values: Floats = -special.ndtri(probability)
    return values


def exact_gaussian(uniform: Uniform, size: int) -> Floats:
    """Return standard normal values with exact tails, by inversion, which is slow."""
    half = 0.5 * _fine(uniform, size)
    return _signed(uniform, -special.ndtri(half))


def exact_laplace(uniform: Uniform, size: int) -> Floats:
    """Return Laplace values of scale 1 with exact tails."""
    exponential = -np.log(_fine(uniform, size))
    return _signed(uniform, exponential)


def beyond(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.intp]:
    """Return the indices of values beyond ``EDGE`` on either side, mostly none."""
    if max(values.max(), -values.min()) <= EDGE:
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.abs(values) > EDGE)


def most_beyond(size: int) -> int:
    """Return a bound on how many of ``size`` normal values exceed ``EDGE``, with failure odds of 2^-128.

    By Chernoff's bound for a binomial law of mean m: ``P(X >= n) <= exp(n - m) (m / n)^n``.
    """
    mean = 2.0 * size * float(special.ndtr(-EDGE))
    count = 1
    enough = 128.0 * math.log(2.0)

    def log_odds(n: int) -> float:
        """Return -ln of Chernoff's bound for n values, n above the mean."""
        return n * math.log(n / mean) - n + mean

    while count <= mean or log_odds(count) < enough:
        count += max(1, count // 64)
    return count


def _signed(uniform: Uniform, values: Floats) -> Floats:
    """Return the values with random signs, each from a new uniform draw.

    The sign is not taken from the value's own bits, which are all spent on its size.
    """
    is_negative = uniform(len(values)) < 0.5
    return np.where(is_negative, -values, values)
