"""Constants of the losses of linear models, proven from public bounds of their features."""

from __future__ import annotations

import math
from collections.abc import Mapping


def of_softmax(square: float, classes: int, *, weight: float = 1.0) -> Mapping[str, float]:
    """Return the constants of the cross-entropy of a linear model with a bias, from zero weights.

    **Proof**: with features x of squared length s at most, 1 beside them for the bias, and p the
    softmax, the gradient is the outer product of p - onehot(y), no longer than sqrt(2), and (x, 1), no
    longer than sqrt(s + 1). The Hessian is the Kronecker product of diag(p) - p pᵀ, whose eigenvalues
    are at most 1/2, and (x, 1)(x, 1)ᵀ: it is convex and (s + 1)/2-smooth. From zero weights the loss is
    log C, and nowhere below 0. A class's weight multiplies all three.

    Args:
        square: What a record's squared features add up to at most.
        classes: Number of classes C.
        weight: The largest weight of a class.

    Returns:
        ``lipschitz``, ``smoothness`` and ``gap``.

    Example:
        >>> of_softmax(1.0, 2)
        {'lipschitz': 2.0, 'smoothness': 1.0, 'gap': 0.6931471805599453}
    """
    return {
        "lipschitz": weight * math.sqrt(2.0 * (square + 1.0)),
        "smoothness": weight * 0.5 * (square + 1.0),
        "gap": weight * math.log(classes),
    }


def of_squared_error(square: float) -> Mapping[str, float]:
    """Return the constants of the squared error, in half ranges, of a linear model from zero weights.

    **Proof**: the Hessian is 2 (x, 1)(x, 1)ᵀ; at zero weights the error is 1 at most. There is no bound
    on the gradient: it grows with the weights.

    Args:
        square: What a record's squared features add up to at most.
    """
    return {"smoothness": 2.0 * (square + 1.0), "gap": 1.0}


def summed(constants: Mapping[str, float], most: int) -> Mapping[str, float]:
    """Return the constants of a sum of at most so many such losses."""
    return {name: most * value for name, value in constants.items()}
