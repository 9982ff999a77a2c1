"""Noise, scaled from the sensitivity that the clipping states, from a stream of its own.

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

VALUES = 3
"""Which values a secret gives: where that is another number, no training goes on in its middle."""

_AHEAD = 2**15  # about how many values of a candidate are drawn at once
_MOST = 2**11  # releases drawn at once: each is a view, which takes longer to make than a number
_TAILS = 64  # tail values that are drawn at once
_KEYSTREAM = 2**36  # bytes drawn from one key; ChaCha20 has a block counter of 32 bits
_GRID = 2.0**-20  # of the noise's scale

_Values: TypeAlias = "npt.NDArray[np.floating[Any]]"


def noise_scale(
    noise_multiplier: float | tuple[float, ...], sensitivity: torch.Tensor
) -> torch.Tensor:
    """Return multiplier (one for all, or each) times sensitivity ``[K]``, float64, on the device of that."""
    own = noise_multiplier
    if isinstance(own, float):
        own = (own,) * len(sensitivity)
    if not all(math.isfinite(multiplier) and multiplier >= 0.0 for multiplier in own):
        raise InvalidInputError(
            "noise_multiplier", noise_multiplier, "must be a finite number of at least 0"
        )
    bounds = sensitivity.tolist() if looks_freely(sensitivity.device) else [0.0] * len(own)
    if not all(m == 0.0 or math.isfinite(bound) for m, bound in zip(own, bounds, strict=True)):
        raise InvalidInputError(
            "sensitivity", "infinite", "must be finite where noise is added", "Clip the gradients."
        )
    # Not a plain product: a gradient that is not clipped, without noise, has 0 times an infinite sensitivity.
    multipliers = sent(torch.tensor(own, dtype=torch.float64), sensitivity.device)
    return torch.where(multipliers > 0.0, multipliers * sensitivity, 0.0)


def add_noise(
    total: torch.Tensor, noise: torch.Tensor, scale: torch.Tensor, options: NoiseOptions
) -> torch.Tensor:
    """Add standard noise ``[K, n]`` times a scale ``[K]`` to a sum, on the grid where that is asked for."""
    column = scale.to(noise).unsqueeze(1)
    if not options.wide:
        return torch.addcmul(total, noise, column)
    # The grid is public, as the scale is: the bits below it, which Mironov's attack reads, are not released.
    grid = torch.exp2(torch.ceil(torch.log2(column.clamp(min=1e-300)))) * _GRID
    exact = total.double() + noise * column
    rounded = torch.round(exact / grid) * grid
    return torch.where(column > 0.0, rounded, exact).to(total.dtype)


class NoiseSource:
    """Standard noise for a stack of candidates, each from its own streams.

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
        self._device = device
        self._dtype = torch.float64 if self.options.wide else dtype
        self._sources: dict[tuple[str, int], list[_Keystream]] = {}
        self._ahead: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.outside: torch.Tensor | None = None
        """Where there is no noise, ``[K, size]``, so that nothing may be released; None for nowhere."""

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values, shape ``[K, size]``."""
        return self._next("gaussian", size)

    def laplace(self, size: int) -> torch.Tensor:
        """Return Laplace values of scale 1, shape ``[K, size]``."""
        return self._next("laplace", size)

    def position(self) -> Tensors:
        """Return where the sources are, and what was drawn ahead."""
        found: Tensors = {}
        for (kind, size), sources in self._sources.items():
            for k, source in enumerate(sources):
                found |= prefixed(f"{kind}.{size}.{k}", source.position())
            ahead = self._ahead[kind, size]
            left = torch.stack(ahead) if ahead else torch.empty(0, len(sources), size)
            found[f"{kind}.{size}.ahead"] = left.cpu()
        return found

    def go_to(self, position: Tensors) -> None:
        """Go on from a position: no value is drawn twice."""
        for name, ahead in position.items():
            kind, size, last = name.split(".", maxsplit=2)
            if last != "ahead":
                continue
            for k, source in enumerate(self._open(kind, int(size))):
                source.go_to(of_prefix(f"{kind}.{size}.{k}", position))
            # In their places in a block: sums round otherwise where memory is aligned otherwise.
            block = self._block(int(size))
            block[:, block.shape[1] - len(ahead) :] = ahead.flip(0).transpose(0, 1).to(block)
            self._ahead[kind, int(size)] = list(block.unbind(1)[::-1][: len(ahead)])

    def _block(self, size: int) -> torch.Tensor:
        """Return an empty block of releases, shape ``[K, count, size]``."""
        shape = (len(self._streams), max(1, min(_AHEAD // size, _MOST)), size)
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def _open(self, kind: str, size: int) -> list[_Keystream]:
        """Return the sources of a kind and size of release, the fastest that the options admit."""
        key, name = (kind, size), f"noise/{kind}/{size}"
        if key not in self._sources:
            if self._device.type == "cpu" or self.options.source == "chacha20":
                self._sources[key] = [_Keystream(s, name) for s in self._streams]
            else:
                self._sources[key] = [_OnDevice(s, name, self._device) for s in self._streams]
            self._ahead[key] = []
        return self._sources[key]

    def _next(self, kind: str, size: int) -> torch.Tensor:
        """Take the next release of a kind and size from what was drawn ahead."""
        key = (kind, size)
        sources = self._open(kind, size)
        if not self._ahead[key]:
            self._ahead[key] = list(reversed(self._draw(kind, size, sources)))
        return self._ahead[key].pop()

    def _draw(
        self, kind: str, size: int, sources: Sequence[_Keystream]
    ) -> tuple[torch.Tensor, ...]:
        """Draw a block of releases for every candidate."""
        block = self._block(size)
        out = block.flatten(1)
        if kind == "laplace":
            for row, source in zip(out, sources, strict=True):
                drawn = torch.from_numpy(exact_laplace(source.uniform, len(row)))
                row.copy_(sent(drawn, self._device))
        elif self.options.floating_point == "four-draws":
            parts = out.new_empty(len(sources), 4 * out.shape[1])
            _gaussian(parts, sources)
            torch.sum(parts.view(len(sources), 4, -1), dim=1, out=out).mul_(0.5)
        else:
            _gaussian(out, sources)
        return block.unbind(1)


class PlacedNoise(NoiseSource):
    """Noise of candidates whose parameters lie at some places of vectors of a size: zero beside them.

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
        self._own = [NoiseSource([stream], device, dtype, options) for stream in streams]
        self._lengths, self._size = [len(place) for place in places], size
        self._index = torch.cat([place + k * size for k, place in enumerate(places)]).to(device)
        outside = torch.ones(len(places) * size, dtype=torch.bool, device=device)
        self.outside = outside.index_fill_(0, self._index, False).view(-1, size)

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values at the candidates' places, shape ``[K, size]``."""
        if size != self._size:  # its draws would begin where those of whole vectors began
            raise RuntimeError(f"noise of {size} values beside that of vectors of {self._size}")
        pairs = zip(self._own, self._lengths, strict=True)
        drawn = torch.cat([own.gaussian(length)[0] for own, length in pairs])
        out = drawn.new_zeros(len(self._own) * size)
        return out.index_copy_(0, self._index, drawn).view(-1, size)


def _gaussian(out: torch.Tensor, sources: Sequence[_Keystream]) -> None:
    """Fill ``out``, a row each, with standard normal values that have the tails of a Gaussian."""
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
    """Do the same without looking at a value: as many tails are sent as all but surely suffice."""
    # More places than tails occur with a probability of 2^-128. Which tails are taken says where `out` lies
    # beyond the edge, never their own size.
    many = min(most_beyond(out.shape[1]), out.shape[1])
    for row, source in zip(out, sources, strict=True):
        source.gaussian(row)
    drawn = torch.tensor([[s.beyond() for _ in range(many)] for s in sources], dtype=torch.float64)
    places = out.abs().topk(many, dim=1).indices
    found = out.gather(1, places)
    own = sent(drawn.to(out.dtype), out.device).copysign(found)
    out.scatter_(1, places, torch.where(found.abs() > EDGE, own, found))


class _Keystream:
    """Standard noise made of the keystream of ChaCha20, keyed by one candidate's secret."""

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name, self._keys = streams, name, 0
        self._beyond: list[float] = []
        self._rekey()

    def fill(self, out: _Values) -> None:
        """Fill ``out`` with standard normal values, right up to ``EDGE``."""
        even = len(out) + len(out) % 2
        if out.dtype == np.float32:
            _box_muller(self._bytes(4 * even).view("<u4"), out)
        else:
            _box_muller_wide(self.uniform(even), out)

    def gaussian(self, out: torch.Tensor) -> None:
        """Fill a tensor on any device likewise."""
        drawn = torch.empty(len(out), dtype=out.dtype).numpy()
        for start in range(0, len(out), TOGETHER):
            self.fill(drawn[start : start + TOGETHER])
        out.copy_(sent(torch.from_numpy(drawn), out.device))

    def uniform(self, size: int) -> Floats:
        """Return uniform values in [0, 1), multiples of 2^-53."""
        words = self._bytes(8 * size).view("<u8")
        uniform: Floats = (words >> np.uint64(11)).astype(np.float64)
        uniform *= 2.0**-53
        return uniform

    def beyond(self) -> float:
        """Return the next value above ``EDGE``, in place of one that was drawn there."""
        if not self._beyond:
            self._beyond = gaussian_tail(self.uniform, _TAILS).tolist()
        return self._beyond.pop()

    def position(self) -> Tensors:
        """Return where the source is."""
        return {
            "beyond": torch.tensor(self._beyond, dtype=torch.float64),
            "keystream": torch.tensor([self._keys - 1, self._used]),
        }

    def go_to(self, position: Tensors) -> None:
        """Go on from a position."""
        self._beyond = position["beyond"].tolist()
        self._keys, used = position["keystream"].tolist()
        self._rekey(block=used // 64)
        # Of the block that was given out in part, those bytes are skipped: they would come twice.
        self._stream.update(bytes(used % 64))
        self._used = used

    def _rekey(self, block: int = 0) -> None:
        """Start the keystream of the next key: one block counter must never come round."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        key = self._streams.key(f"{self._name}/chacha20/{self._keys}")
        cipher = Cipher(ChaCha20(key, block.to_bytes(16, "little")), mode=None)
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
        return np.frombuffer(self._stream.update(bytes(size)), dtype=np.uint8)


class _OnDevice(_Keystream):
    """The device's own generator, where bytes would have to be sent; tails are of the keystream."""

    def __init__(self, streams: Streams, name: str, device: torch.device) -> None:
        super().__init__(streams, name)
        self._generator = streams.generator(name, device=device)

    def gaussian(self, out: torch.Tensor) -> None:
        """Fill ``out`` with standard normal values, right up to ``EDGE``."""
        out.normal_(generator=self._generator)

    def position(self) -> Tensors:
        """Return where the source is."""
        return {**super().position(), "generator": self._generator.get_state()}

    def go_to(self, position: Tensors) -> None:
        """Go on from a position."""
        super().go_to(position)
        self._generator.set_state(position["generator"])


def _box_muller(words: npt.NDArray[np.uint32], out: _Values) -> None:
    """Fill ``out`` with standard normal values, of as many words or one more: an even number.

    Box and Muller (1958): ``sqrt(-2 ln u) (cos v, sin v)``. Rounding leaves u right to 2^-24 of
    itself, so the mass beyond an edge of a few deviations is right to some 1e-5 of itself.
    """
    half = len(words) // 2
    radius, left = out[:half], out[half:]
    np.copyto(radius, words[:half], casting="unsafe")
    radius += np.float32(0.5)  # u = (w + 1/2) 2^-32 has a logarithm
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = words[half:].view(np.int32).astype(np.float32)
    angle *= np.float32(math.pi * 2.0**-31)
    np.multiply(radius[: len(left)], np.sin(angle[: len(left)]), out=left)
    radius *= np.cos(angle, out=angle)


def _box_muller_wide(uniform: Floats, out: _Values) -> None:
    """Do the same with uniform numbers of 53 bits, in float64."""
    half = len(uniform) // 2
    radius = np.sqrt(-2.0 * np.log(1.0 - uniform[:half]))
    angle = (2.0 * math.pi) * uniform[half:]
    np.multiply(radius, np.cos(angle), out=out[:half])
    np.multiply(radius[: len(out) - half], np.sin(angle[: len(out) - half]), out=out[half:])


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
    """Return uniform values in (0, 1] whose smallest is 2^-848, each right to 53 bits."""
    # Sixteen digits to the base 2^53, the last drawn in front, plus the least value, so that none is 0.
    digits = uniform(_WORDS * size).reshape(_WORDS, size)
    value = np.ones(size)
    for digit in digits:
        value *= 2.0**-53
        value += digit
    return value


def gaussian_tail(uniform: Uniform, size: int) -> Floats:
    """Return values of a standard normal given that it lies above ``EDGE``."""
    values: Floats = -special.ndtri(_fine(uniform, size) * special.ndtr(-EDGE))
    return values


def exact_gaussian(uniform: Uniform, size: int) -> Floats:
    """Return standard normal values: for a few, this costs more than a generator's own."""
    return _signed(uniform, -special.ndtri(0.5 * _fine(uniform, size)))


def exact_laplace(uniform: Uniform, size: int) -> Floats:
    """Return Laplace values of scale 1."""
    return _signed(uniform, -np.log(_fine(uniform, size)))


def beyond(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.intp]:
    """Return the places of the values beyond ``EDGE`` on either side: few, and in most calls none."""
    if max(values.max(), -values.min()) <= EDGE:
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.abs(values) > EDGE)


def most_beyond(size: int) -> int:
    """Return how many of ``size`` normal values lie beyond ``EDGE`` at most, but for odds of 2^-128.

    By Chernoff's bound for a binomial law of mean m: ``P(X >= n) <= exp(n - m) (m / n)^n``.
    """
    mean, count = 2.0 * size * float(special.ndtr(-EDGE)), 1
    while count <= mean or count * math.log(count / mean) - count + mean < 128.0 * math.log(2.0):
        count += max(1, count // 64)
    return count


def _signed(uniform: Uniform, values: Floats) -> Floats:
    return np.where(uniform(len(values)) < 0.5, -values, values)
