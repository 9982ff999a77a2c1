"""What is left of a composition without some of its parts, for all of them at once.

The spectrum of a composition is the product of the spectra of its parts, so leaving copies out takes
them from a sum of logarithms. Tilted by θ, the law `t` of the losses lives on a window of N points, and
of its N frequencies few count. By Parseval δ(ε) is a sum over these alone: with `g = e^{-θh + iω}`

    Σ_{m >= m0} P(mh) = e^{M(θ)} Σ_{m >= m0} e^{-θmh} t(m)
                      = e^{M(θ)}/N Σ_ω t̂(ω) g^{m0} (1 - g^{hi - m0}) / (1 - g),

and the Q-mass is the same with θ + 1 in g. Nothing is added for rounding: what comes out compares
compositions on one lattice, and is no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.algebra import Event
from privtune.accounting.convolution import chernoff, log_moment, transform, variance
from privtune.accounting.pld import pairs_on_one_lattice
from privtune.accounting.pmf import MAX_SIZE, GridError, LossPmf, lattice_cells

Floats = NDArray[np.float64]
_FINENESS = 2.0  # of the lattice, which then adds about a thousandth of ε to each, alike
_OUTSIDE = 60.0  # of the tilted whole a mass of at most exp(-60) is outside the window,
_STILL = 30.0  # of what is left without a part at most exp(-30): it wraps around
_STEEPEST = 2.0  # tilt times step: the saddle point of bounded losses is infinite
_NEGLIGIBLE = 50.0  # frequencies below exp(-50) count nowhere
_LEAST = 1e-300  # of a spectrum, of which there is a logarithm
_MOST_NUMBERS = 2**23  # of all spectra, where they count
_UNCLEAR = 1e-4  # of δ, that the rounding of a spectrum may take


def epsilons_on_one_lattice(
    compositions: Sequence[Mapping[Event, int]], delta: float, near: float
) -> list[float]:
    """Return ε of a whole and of what is left of it without some parts, all on one lattice.

    Args:
        compositions: What `flatten` returns: of the whole first, then of what is left, with the same
            parts, each less often or not at all.
        delta: In (0, 1).
        near: About ε of the whole.

    Returns:
        One for each composition: what `event_pair` gives on that lattice, rounding apart. NaN where
        what is left does not fit into the window of the whole, or is not known to have any ε.

    Raises:
        GridError: The whole does not fit on one lattice.
    """
    pairs, counts = pairs_on_one_lattice(compositions, delta, near, _FINENESS)
    with np.errstate(all="ignore"):  # what leaves its range is NaN
        found = _epsilons([pair.remove for pair in pairs], counts, delta)
        if not all(pair.remove is pair.add for pair in pairs):
            found = np.maximum(found, _epsilons([pair.add for pair in pairs], counts, delta))
    return [float(value) for value in found]


def _epsilons(pmfs: Sequence[LossPmf], counts: NDArray[np.int64], delta: float) -> Floats:
    """Return ε in one direction, a row of counts for each composition, that of the whole first."""
    if not all(pmf.masses.any() and pmf.infinite < delta for pmf in pmfs):
        raise GridError("a part alone fails more often than δ")
    step = pmfs[0].step
    parts = [(pmf, int(count)) for pmf, count in zip(pmfs, counts[0], strict=True) if count]

    def moment(tilt: float) -> float:
        return log_moment(parts, tilt)

    def moments(tilt: float) -> Floats:
        return np.array([log_moment([(pmf, 1)], tilt) for pmf in pmfs])

    start = math.sqrt(2.0 * _OUTSIDE / max(variance(parts), 1e-12))
    most = _NEGLIGIBLE / step
    _, tilt = chernoff(moment, start, -math.log(delta), _STEEPEST / step)
    base, fixed = moments(tilt), moment(tilt)
    top, up = chernoff(lambda more: moment(tilt + more) - fixed, start, _OUTSIDE, most)
    bottom, down = chernoff(lambda less: moment(tilt - less) - fixed, start, _OUTSIDE, most)
    end, first = max(lattice_cells(top, step), 1) + 1, min(-lattice_cells(bottom, step), 0)
    size = max(end - first, *(pmf.masses.size for pmf in pmfs))
    if size > MAX_SIZE:
        raise GridError(f"the loss distribution needs {size} lattice points")
    rounding = float(counts[0].astype(np.float64).sum()) * (2.0 + math.log2(size)) * 2.0**-53
    size = int(sp.fft.next_fast_len(size, True))
    alive, spectra = _spectra(pmfs, counts, tilt, size)
    origins = counts @ np.array([pmf.lowest for pmf in pmfs])
    law = _Laws(step, tilt, size, end, alive, spectra, origins, counts @ base)
    infinite = -np.expm1(counts @ np.log1p([-pmf.infinite for pmf in pmfs]))
    above = counts @ (moments(tilt + up) - base) - up * end * step
    below = counts @ (moments(tilt - down) - base) + down * (end - size) * step
    fits = (np.maximum(above, below) <= -_STILL) & (infinite < delta)
    return np.where(fits, law.epsilons(delta - infinite, rounding), np.nan)


def _spectra(
    pmfs: Sequence[LossPmf], counts: NDArray[np.int64], tilt: float, size: int
) -> tuple[NDArray[np.int64], NDArray[np.complex128]]:
    """Return the frequencies that count in any composition, and its spectrum there in a row each."""
    # What is left of the whole has copies of few parts less: at most `touched`, in any composition.
    less = np.maximum(counts[0] - counts, 0)
    touched, most = int((less > 0).sum(axis=1).max()), less.max(axis=0)
    alive = np.arange(size // 2 + 1)
    whole, largest = np.zeros(alive.size), np.zeros(alive.size)
    found: list[tuple[NDArray[np.int64], NDArray[np.complexfloating]]] = []
    for pmf, count, gone in zip(pmfs, counts[0], most, strict=True):
        spectrum = transform(pmf, tilt, size)[0][alive]
        logs = np.log(np.where(np.abs(spectrum) > _LEAST, spectrum, _LEAST))
        # No part raises what the others have left of a frequency.
        whole, largest = whole - count * logs.real, np.maximum(largest, -gone * logs.real)
        kept = whole - touched * largest < _NEGLIGIBLE
        alive, whole, largest = alive[kept], whole[kept], largest[kept]
        found.append((alive, logs[kept]))
        if sum(places.size for places, _ in found) > _MOST_NUMBERS:
            raise GridError(f"too many frequencies of {len(pmfs)} parts count")
    rows = [logs[np.searchsorted(places, alive)] for places, logs in found]
    return alive, np.exp(counts @ np.stack(rows))


@dataclass(frozen=True)
class _Laws:
    """Tilted laws of losses by their spectra at some frequencies, on a window that ends at `end`."""

    step: float
    tilt: float
    size: int
    end: int
    alive: NDArray[np.int64]
    spectra: NDArray[np.complex128]
    origins: NDArray[np.int64]
    log_scales: Floats

    def above(self, first: NDArray[np.int64], more: float) -> Floats:
        """Return Σ P(mh) e^{-more·(m - first)h} over m >= first, for each law from its own first on."""
        rate = (self.tilt + more) * self.step
        turn = 2.0 * math.pi / self.size
        places = (self.alive * ((first - self.origins) % self.size)[:, None]) % self.size
        left = (self.alive * ((self.end - first) % self.size)[:, None]) % self.size
        sums = np.exp(1j * turn * places) * (
            1.0 - np.exp(-rate * (self.end - first)[:, None] + 1j * turn * left)
        )
        sums /= -np.expm1(-rate + 1j * turn * self.alive)
        twice = np.where((self.alive == 0) | (2 * self.alive == self.size), 1.0, 2.0)
        total = ((self.spectra * sums).real * twice).sum(axis=1) / self.size
        scale = self.log_scales - self.tilt * self.step * first
        return np.asarray(np.maximum(total, 0.0) * np.exp(np.minimum(scale, 700.0)))

    def epsilons(self, deltas: Floats, rounding: float) -> Floats:
        """Return the least ε >= 0 at which the finite losses leave δ, NaN where rounding hides it."""

        def is_clear(place: NDArray[np.int64]) -> NDArray[np.bool_]:
            scale = self.log_scales - self.tilt * self.step * place
            return np.asarray(scale + math.log(rounding) <= np.log(_UNCLEAR * deltas))

        low, high = np.full(deltas.size, -1), np.full(deltas.size, self.end)
        while int((high - low).max()) > 1:
            middle = (low + high) // 2
            met = self.above(middle, 0.0) - self.above(middle, 1.0) <= deltas
            met &= is_clear(middle)
            low, high = np.where(met, low, middle), np.where(met, middle, high)
        # Up to `high` from the point before the profile is a line in e^ε.
        share = (self.above(high, 0.0) - deltas) / self.above(high, 1.0)
        found = (high + np.clip(np.log(share) / self.step, -1.0, 0.0)) * self.step
        return np.where(is_clear(np.maximum(low, 0)), np.maximum(found, 0.0), np.nan)
