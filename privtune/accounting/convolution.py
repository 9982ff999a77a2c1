"""Composition of loss distributions by FFT, tilted, with an allowance for its rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.pmf import MAX_SIZE, GridError, LossPmf, inner, lattice_cells

Floats = NDArray[np.float64]
_TAIL = 60.0  # windows leave out a probability below exp(-60); it is charged, not forgotten
_TILT = 30.0  # the saddle point of the third tilt sits where the tail is about exp(-30)
_STRETCH = 0.55
_WRAP = 37.0  # mass that wraps around must stay below exp(-37), one rounding error
_EPS = 2.0**-53
_EXTENDED = float(np.finfo(np.longdouble).eps) / 2.0
_NEGLIGIBLE = 50.0
_PLAIN = 256  # up to so many releases double precision suffices
# An allowance for noise is negligible below this share of a tail, if that is no rarer than this.
_BESIDE, _RAREST = 1e-6, 1e-16


def log_moment(parts: Sequence[tuple[LossPmf, int]], tilt: float) -> float:
    """Return log Σ masses·exp(tilt·loss) of the whole composition."""
    total = 0.0
    for pmf, count in parts:
        exponent = pmf.log_masses + tilt * pmf.losses
        top = float(exponent.max())
        total += count * (math.log(float(np.exp(exponent - top).sum())) + top)
    return total


def chernoff(
    moment: Callable[[float], float], start: float, tail: float, most: float
) -> tuple[float, float]:
    """Return (min over θ <= most of (moment(θ) + tail)/θ, the θ), by golden section on log θ.

    Where losses are bounded, θ would grow forever, until it takes all digits of what it is
    multiplied with.
    """
    ratio = 2.0
    best = min(start, most)
    value = (moment(best) + tail) / best
    while ratio > 1.3:
        moved = False
        for candidate in (best * ratio, best / ratio):
            if candidate > most:
                continue
            new = (moment(candidate) + tail) / candidate
            if new < value:
                best, value, moved = candidate, new, True
                break
        if not moved:
            ratio = math.sqrt(ratio)
    return value, best


def _fitting_tilt(moment: Callable[[float], float], theta: float, top: float) -> float:
    """Return the largest tilt up to theta under which the mass above `top` is below rounding.

    Mass beyond the window wraps around into it; heavy tails bound the tilt that can be afforded.
    """
    while theta > 1e-3:
        fixed = moment(theta)
        for more in (theta, 0.3 * theta, 3.0 * theta, 0.1 * theta):
            if moment(theta + more) - fixed - more * top <= -_WRAP:
                return theta
        theta *= 0.6
    return 0.0


def compose(parts: Sequence[tuple[LossPmf, int]], *, plain: int = _PLAIN) -> LossPmf:
    """Compose independent releases by FFT.

    The convolution is done three times, exponentially tilted: by 0 (accurate where P lives), by -1
    (where Q lives) and at the saddle point of the far tail; every atom is taken from the tilt with
    the least rounding noise there, and an allowance for that noise is added to it.

    Args:
        parts: Pairs of one direction on one lattice, each with its count, 1 or more.
        plain: Up to so many releases double precision does; its noise is added like any other. Of
            more, it does where that noise is negligible wherever losses so large have any
            probability; else all is done again in extended precision.

    Returns:
        The pair of the composition, on the same lattice.

    Raises:
        GridError: The result needs more than 2^23 lattice points.
    """
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    step = parts[0][0].step
    if not all(pmf.masses.any() and pmf.infinite < 1.0 for pmf, _ in parts):
        return LossPmf(step, 0, np.zeros(1), 1.0)
    log_finite = sum(count * math.log1p(-pmf.infinite) for pmf, count in parts)
    origin = sum(count * pmf.lowest for pmf, count in parts)
    reach = sum(count * (pmf.masses.size - 1) for pmf, count in parts)

    def upper(theta: float) -> float:
        return log_moment(parts, theta)

    if upper(0.0) <= -_TAIL:
        return LossPmf(step, 0, np.zeros(1), 1.0)
    start = math.sqrt(2.0 * _TAIL / max(variance(parts), 1e-12))
    most = _NEGLIGIBLE / step  # a larger tilt leaves nothing of an atom beside the next one
    top, theta = chernoff(upper, start, _TAIL, most)
    bottom, rest = _bottom(parts, start, most)
    _, theta = chernoff(upper, theta, _TILT, most)
    # A measure tilted to the far tail reaches further up than P itself.
    top += _STRETCH * (top - sum(count * pmf.mean for pmf, count in parts))
    theta = _fitting_tilt(upper, theta, top)
    high = min(lattice_cells(top, step) + 1, origin + reach)
    low = max(-lattice_cells(bottom, step) - 1, origin)
    high = max(high, low)
    size = max(high - low + 1, *(pmf.masses.size for pmf, _ in parts))
    if size > MAX_SIZE:
        raise GridError(f"the loss distribution needs {size} lattice points")
    size = int(sp.fft.next_fast_len(min(size, reach + 1) if reach + 1 > high - low else size, True))
    window = np.arange(low, high + 1)
    tilts = (0.0, -1.0, theta)
    masses, noise = _atoms(parts, tilts, window, origin, size, extended=False)
    if sum(count for _, count in parts) > plain and not _is_negligible(noise, masses):
        masses, _ = _atoms(parts, tilts, window, origin, size, extended=True)
    infinite = -math.expm1(log_finite)
    if high < origin + reach:
        infinite += math.exp(-_TAIL)
    if low > origin:
        masses[0] += rest
    return LossPmf(step, low, np.minimum(masses, 1.0), min(infinite, 1.0))


def _bottom(parts: Sequence[tuple[LossPmf, int]], start: float, most: float) -> tuple[float, float]:
    """Return minus a loss, and the most P-mass that lies below it."""
    # Q(loss < x) <= exp(-60), hence P(loss < x) <= exp(x - 60).
    if log_moment(parts, -1.0) > -_TAIL:
        bottom, _ = chernoff(lambda theta: log_moment(parts, -1.0 - theta), start, _TAIL, most)
        if bottom >= 0.0:
            return bottom, math.exp(-_TAIL - bottom)
    # Of Q hardly anything has a loss: P itself tells where it begins.
    bottom, _ = chernoff(lambda theta: log_moment(parts, -theta), start, _TAIL, most)
    return bottom, math.exp(-_TAIL)


def _is_negligible(noise: Floats, masses: Floats) -> bool:
    """Whether an allowance for noise is beside every tail of the masses that has any probability."""
    tail = np.cumsum(masses[::-1])
    allowed = np.cumsum(noise[::-1])
    return bool((allowed <= np.maximum(_BESIDE * tail, _BESIDE * _RAREST)).all())


def _atoms(
    parts: Sequence[tuple[LossPmf, int]],
    tilts: Sequence[float],
    window: NDArray[np.int64],
    origin: int,
    size: int,
    *,
    extended: bool,
) -> tuple[Floats, Floats]:
    """Return the masses in the window, an allowance for noise in each, and that allowance."""
    step = parts[0][0].step
    places = (window - origin) % size
    losses = window * step
    best_noise = np.full(window.size, np.inf)
    masses = np.zeros(window.size)
    for tilt in tilts:
        values, noise, log_scale = _tilted(parts, tilt, size, extended=extended)
        exponent = log_scale - tilt * losses + _exponent_rounding(parts, tilt)
        log_noise = exponent + math.log(noise)
        better = log_noise < best_noise
        best_noise[better] = log_noise[better]
        cleaned = np.maximum(values[places[better]], 0.0) + noise
        masses[better] = cleaned * np.exp(np.minimum(exponent[better], 700.0))
    return masses, np.exp(np.minimum(best_noise, 700.0))


def _exponent_rounding(parts: Sequence[tuple[LossPmf, int]], tilt: float) -> float:
    """Return a bound on the rounding of the exponents that a tilt adds and takes away again."""
    reach = sum(
        count * max(abs(float(pmf.losses[0])), abs(float(pmf.losses[-1]))) for pmf, count in parts
    )
    return 4.0 * _EPS * abs(tilt) * reach


def variance(parts: Sequence[tuple[LossPmf, int]]) -> float:
    """Return the variance of the loss of the whole composition."""
    return sum(count * pmf.deviation**2 for pmf, count in parts)


def transform(
    pmf: LossPmf, tilt: float, size: int, real: type[np.floating[Any]] = np.float64
) -> tuple[NDArray[np.complexfloating], float]:
    """Return the spectrum of one tilted part, as from its first loss, and the log of its scale."""
    exponent = pmf.log_masses + tilt * pmf.losses
    shift = float(exponent.max())
    tilted = np.exp(exponent - shift)
    total = float(tilted.sum())
    return sp.fft.rfft((tilted / total).astype(real), size), math.log(total) + shift


def _tilted(
    parts: Sequence[tuple[LossPmf, int]], tilt: float, size: int, *, extended: bool
) -> tuple[Floats, float, float]:
    """Return the circular convolution of the tilted parts, its noise, and the log of its scale."""
    # Raising to the power `count` multiplies the rounding of the transform by `count`, and is done
    # only where the result is not negligible.
    real, accuracy = (np.longdouble, _EXTENDED) if extended else (np.float64, _EPS)
    if not parts:
        raise GridError("nothing to compose")
    # Frequencies left out are below exp(-50) each: nothing beside the rounding of the others. No part
    # raises what another one has left of them.
    alive = np.arange(size // 2 + 1)
    logs = np.zeros(alive.size, dtype=np.result_type(real, np.complex64))
    log_scale, forward = 0.0, 0.0
    for pmf, count in parts:
        found, log_total = transform(pmf, tilt, size, real)
        log_scale += count * log_total
        forward += count * (2.0 + math.log2(size)) * accuracy
        kept = np.abs(found[alive]) > math.exp(-_NEGLIGIBLE / count)
        alive, logs = alive[kept], logs[kept]
        logs = logs + count * np.log(found[alive])
        kept = logs.real > -_NEGLIGIBLE
        alive, logs = alive[kept], logs[kept]
    spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
    spectrum[alive] = np.exp(logs)
    values = np.asarray(sp.fft.irfft(spectrum, size))
    rounding = forward + (4.0 + 2.0 * math.log2(size)) * _EPS
    noise = rounding * math.sqrt(inner(values, values) / size)
    return values, noise, log_scale
