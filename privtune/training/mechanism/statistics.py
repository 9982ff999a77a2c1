"""Statistics that are released once and shared: counts, and second moments, with Gaussian noise.

Every sum here is over records, of one vector each. Its sensitivity is how far the sum can move in the
L2 norm between neighbours: the length of the longest vector where a record is added or removed, the
longest difference of two vectors where one is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from privtune.accounting import Adjacency

if TYPE_CHECKING:
    from privtune.training.mechanism.noise_options import NoiseOptions
    from privtune.training.mechanism.streams import Streams

Floats = npt.NDArray[np.float64]

_ROWS = 2**14  # records whose products are summed at once


def counts(cells: npt.NDArray[np.int64], sizes: Sequence[int]) -> Floats:
    """Count the records in each cell of each column, the columns one after the other.

    Given the cell of each record in each column, shape ``[N, d]``, -1 for a record that is in none, and how
    many cells each column has.
    """
    found = []
    for column, size in enumerate(sizes):
        own = cells[:, column]
        found.append(np.bincount(own[(own >= 0) & (own < size)], minlength=size)[:size])
    return np.concatenate(found).astype(np.float64)


def count_sensitivity(columns: int, adjacency: Adjacency) -> float:
    """Return how far the counts of so many columns together can move, in the L2 norm.

    **Guarantee**: a record adds one unit vector, or nothing, to the block of each of the d columns.
    Its vector has the squared length d at most: sqrt(d) under add-remove. Replaced, it takes one unit
    vector from a block and adds another, which moves the block by sqrt(2) at most, and all of them by
    sqrt(2 d).
    """
    return math.sqrt(columns * (2 if adjacency is Adjacency.REPLACE_ONE else 1))


def moments(x: Floats) -> Floats:
    """Return the sum of the outer products of records ``[N, d]``, clipped to length 1, as one vector.

    A record that is not finite counts as zero. The vector is the diagonal, then what is above it times
    sqrt(2), shape ``[d (d + 1) / 2]``: it is as long as the matrix in the Frobenius norm, and so are
    differences of both.
    """
    width = x.shape[1]
    total = np.zeros((width, width))
    for start in range(0, len(x), _ROWS):
        rows = np.asarray(x[start : start + _ROWS], dtype=np.float64)
        rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
        # Scaled down before it is squared, and shortened by what rounding may add.
        largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True, initial=0.0), 1.0)
        rows = rows / largest
        length = np.linalg.norm(rows, axis=1, keepdims=True) * (1.0 + 1e-12)
        rows = rows * (1.0 / np.maximum(length, 1.0 / largest))
        total += rows.T @ rows
    above = np.triu_indices(width, k=1)
    return np.concatenate([np.diag(total), math.sqrt(2.0) * total[above]])


def moment_sensitivity(adjacency: Adjacency) -> float:
    r"""Return how far :func:`moments` can move, in the L2 norm.

    **Guarantee**: a record x of length at most 1 adds x xᵀ, of Frobenius norm \\|x\\|² ≤ 1: 1 under
    add-remove. Replaced by y it moves the matrix by \\|x xᵀ - y yᵀ\\|² = \\|x\\|⁴ + \\|y\\|⁴ - 2 (x·y)² ≤ 2:
    by sqrt(2). The vector of :func:`moments` is an isometry of symmetric matrices.

    References:
        Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", Algorithm 1, which adds noise of the
        same deviation to every entry. Here an entry off the diagonal, being counted once for its two
        places, has 1/sqrt(2) of it at the same sensitivity.
    """
    return math.sqrt(2.0) if adjacency is Adjacency.REPLACE_ONE else 1.0


def symmetric(vector: Floats) -> Floats:
    """Return the symmetric matrix that :func:`moments` made a vector of."""
    width = (math.isqrt(8 * len(vector) + 1) - 1) // 2
    matrix = np.zeros((width, width))
    matrix[np.triu_indices(width, k=1)] = vector[width:] / math.sqrt(2.0)
    return matrix + matrix.T + np.diag(vector[:width])


def noised(sums: Floats, *, scale: float, streams: Streams, noise: NoiseOptions) -> Floats:
    """Return sums with Gaussian noise of a scale, from a stream of its own: asked again, the same."""
    import torch

    from privtune.training.mechanism.noise import NoiseSource, add_noise

    source = NoiseSource([streams], torch.device("cpu"), torch.float64, noise)
    drawn = source.gaussian(len(sums))
    total = torch.from_numpy(np.ascontiguousarray(sums)).unsqueeze(0)
    column = torch.tensor([scale], dtype=torch.float64)
    found: Floats = add_noise(total, drawn, column, noise).squeeze(0).numpy()
    return found
