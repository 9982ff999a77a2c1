"""Made-up records: real shapes and types, with random numbers that a model and its loss accept.

Nothing of a record is used but its shape and type, and what is declared of targets. What else a loss
accepts (targets in [0, 1], codes, counts) is found by trying laws of random numbers on it, in
:func:`data.find_domain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

_EDGE = 3.0  # the ends of normal numbers
_MARGIN = 0.01  # of a range, which no number is nearer to its ends than

Kind = Literal["normal", "uniform", "whole", "shares", "one of several"]


@dataclass(frozen=True)
class Law:
    """A law that the numbers of a made-up record are drawn from.

    Args:
        kind: ``normal`` numbers between -3 and 3, ``uniform`` ones between two ends, either of two ``whole``
            numbers, ``shares`` along the last axis that add up to 1, or a 1 in ``one of several`` places.
        low, high: The two ends, or the two whole numbers.
    """

    kind: Kind
    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        """Return the law in words, such as ``numbers around 0``."""
        match self.kind:
            case "normal":
                return "numbers around 0"
            case "uniform":
                return f"numbers in [{self.low:g}, {self.high:g}]"
            case "whole" if self.low == self.high:
                return f"whole numbers like {self.low:g}"
            case "whole":
                return f"{self.low:g} and {self.high:g}"
            case "shares":
                return "shares of 1"
            case _:
                return "a 1 among zeros"

    def draw(
        self,
        like: torch.Tensor,
        size: torch.Size,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Draw numbers in a given shape, in the type of ``like``, on the CPU.

        Of a type of whole numbers nothing is drawn: they alternate between the ends of the law.

        Args:
            like: A tensor of the type that is wanted.
            size: Of what is returned; the last axis is that of one record's shares.
            generator: Draws the others.
        """
        if not like.dtype.is_floating_point:
            bits = torch.arange(size.numel()).remainder(2)
            numbers = self._between(bits.view(size))
            return numbers.to(like.dtype)
        match self.kind:
            case "normal":
                numbers = torch.randn(size, generator=generator)
                numbers = numbers.clamp_(-_EDGE, _EDGE)
            case "uniform":
                shares = torch.rand(size, generator=generator)
                numbers = self._within(shares)
            case "whole":
                bits = torch.randint(2, size, generator=generator)
                numbers = self._between(bits.float())
            case _:
                numbers = torch.rand(size, generator=generator) + _MARGIN
                numbers = numbers / numbers.sum(dim=-1, keepdim=True)
        if self.kind == "one of several":
            largest = numbers.amax(dim=-1, keepdim=True)
            numbers = (numbers == largest).float()
        return numbers.to(like.dtype)

    def ends(self, like: torch.Tensor, bits: torch.Tensor) -> torch.Tensor | None:
        """Return numbers at a law's ends, the upper ones where ``bits`` are 1; None if it has no ends."""
        match self.kind:
            case "normal":
                numbers = _EDGE * (2.0 * bits - 1.0)
            case "uniform":
                numbers = self._within(bits.double())
            case "whole":
                numbers = self._between(bits)
            case _:
                return None
        return numbers.to(like.dtype)

    def _between(self, bits: torch.Tensor) -> torch.Tensor:
        """Return the lower number where bits are 0, the upper one where they are 1."""
        return self.low + (self.high - self.low) * bits

    def _within(self, shares: torch.Tensor) -> torch.Tensor:
        """Return numbers at the given shares of the way between both ends, kept a little off the ends."""
        inner = _MARGIN + (1.0 - 2.0 * _MARGIN) * shares
        return self.low + (self.high - self.low) * inner


NORMAL = Law("normal")
UNIT = Law("uniform")
_WHOLE = (
    Law("whole"),
    Law("whole", 1.0, 2.0),
    Law("whole", 1.0, 1.0),
    Law("whole", 0.0, 0.0),
)
_SEVERAL = (Law("shares"), Law("one of several"))
_FLOATING_INPUTS = (NORMAL, UNIT, *_WHOLE)
_FLOATING_TARGETS = (UNIT, *_WHOLE)


@dataclass(frozen=True)
class Domain:
    """The laws of inputs and targets that a model and its loss accept in made-up records.

    Args:
        inputs: The law of inputs.
        targets: The law of targets.
        declared: The range that the user has declared of targets; None for none.
    """

    inputs: Law = NORMAL
    targets: Law = UNIT
    declared: tuple[float, float] | None = None

    @classmethod
    def of_targets(cls, declared: tuple[float, float] | None) -> Domain:
        """Return the domain for a declared range of targets, or the default one for None."""
        if declared is None:
            return cls()
        return cls(targets=Law("uniform", *declared), declared=declared)

    def draw(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        shape: tuple[int, int],
        device: torch.device,
        *,
        seed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw made-up inputs and targets with the shape and type of the rows of ``x`` and ``y``.

        Args:
            x: Inputs like those of the records, which may be none.
            y: Targets like those of the records.
            shape: How many candidates and records, the first axes of what is returned.
            device: Where the records shall lie.
            seed: Of the numbers, which are always the same.

        Example:
            >>> import torch
            >>> x, y = torch.zeros(0, 2), torch.zeros(0)
            >>> codes = Domain(inputs=Law("whole", 1.0, 2.0))
            >>> drawn = codes.draw(x, y, (1, 3), torch.device("cpu"))[0]
            >>> drawn.shape, sorted(set(drawn.flatten().tolist()))
            (torch.Size([1, 3, 2]), [1.0, 2.0])
        """
        generator = torch.Generator().manual_seed(seed)
        size_of_inputs = torch.Size((*shape, *x.shape[1:]))
        size_of_targets = torch.Size((*shape, *y.shape[1:]))
        inputs = self.inputs.draw(x, size_of_inputs, generator)
        targets = self.targets.draw(y, size_of_targets, generator)
        return inputs.to(device), targets.to(device)

    def tried(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        device: torch.device,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield three made-up records: with numbers at ends of their ranges, at the other ends, and within.

        Each number of a record is at either end of its law in one of the first two.

        Args:
            x: Inputs like those of the records, which may be none.
            y: Targets like those of the records.
            device: Where the records shall lie.

        Yields:
            Three records, ``(x [1, ...], y [1, ...])``: at ends, at the opposite ends, and within.
        """
        generator = torch.Generator().manual_seed(0)
        size_of_x = (1, *x.shape[1:])
        size_of_y = (1, *y.shape[1:])
        bits_of_x = torch.randint(2, size_of_x, generator=generator)
        bits_of_y = torch.randint(2, size_of_y, generator=generator)
        xs, ys = self.draw(x, y, (1, 1), device)
        x_of_one = xs[0]
        y_of_one = ys[0]
        ends = (bits_of_x, bits_of_y)
        opposite_ends = (1 - bits_of_x, 1 - bits_of_y)
        for ups_of_x, ups_of_y in (ends, opposite_ends):
            # A law without ends gives what it drew.
            end_of_x = self.inputs.ends(x, ups_of_x)
            end_of_y = self.targets.ends(y, ups_of_y)
            inputs = x_of_one if end_of_x is None else end_of_x.to(device)
            targets = y_of_one if end_of_y is None else end_of_y.to(device)
            yield inputs, targets
        yield x_of_one, y_of_one

    def alternatives(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[Domain]:
        """Yield this domain, then others to try for records like ``x`` and ``y``, the simplest first."""
        inputs = list(_WHOLE)
        targets = list(_WHOLE)
        if x.dtype.is_floating_point:
            # Of an input that is one number, the last axis is that of records.
            shares = _SEVERAL if x.ndim > 1 else ()
            inputs = _unique([self.inputs, *_FLOATING_INPUTS, *shares])
        if y.dtype.is_floating_point:
            targets = _unique([self.targets, *self._laws_of_targets(y)])
        places = []
        for i in range(len(inputs)):
            for j in range(len(targets)):
                places.append((i, j))
        # Both lists begin with the simplest: so do the pairs, by the sum of their places.
        places.sort(key=lambda place: (sum(place), place[0]))
        for i, j in places:
            yield replace(self, inputs=inputs[i], targets=targets[j])

    def _laws_of_targets(self, y: torch.Tensor) -> tuple[Law, ...]:
        """Return the laws of floating targets to try, within the declared range if there is one."""
        if self.declared is None:
            if y.ndim > 1:
                return (*_FLOATING_TARGETS, *_SEVERAL)
            return _FLOATING_TARGETS
        low, high = self.declared
        first = float(-(-low // 1))  # the least whole number of the range
        whole_numbers = [n for n in (first, first + 1.0) if n <= high]
        pairs = []
        if whole_numbers:
            pairs.append((whole_numbers[0], whole_numbers[-1]))
        middle = 0.5 * (low + high)
        pairs.append((low, high))
        pairs.append((high, high))
        pairs.append((middle, middle))
        pairs.append((low, low))
        return tuple(Law("whole", *pair) for pair in pairs)


def _unique(laws: list[Law]) -> list[Law]:
    """Return the laws without repetitions, in the order of first occurrence."""
    return list(dict.fromkeys(laws))
