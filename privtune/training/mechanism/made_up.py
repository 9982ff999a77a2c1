"""Made-up records: of the shape and type of real ones, with numbers that a model and its loss accept.

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
    """How the numbers of a made-up record are drawn.

    Args:
        kind: ``normal`` numbers between -3 and 3, ``uniform`` ones between two ends, either of two ``whole``
            numbers, ``shares`` along the last axis that add up to 1, or a 1 in ``one of several`` places.
        low, high: The two ends, or the two whole numbers.
    """

    kind: Kind
    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        """Return the law in words."""
        if self.kind == "normal":
            return "numbers around 0"
        if self.kind == "uniform":
            return f"numbers in [{self.low:g}, {self.high:g}]"
        if self.kind == "whole":
            pair = f"{self.low:g} and {self.high:g}"
            return f"whole numbers like {self.low:g}" if self.low == self.high else pair
        return "shares of 1" if self.kind == "shares" else "a 1 among zeros"

    def draw(
        self, like: torch.Tensor, size: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """Return numbers of a size, of the type of ``like``, on the CPU."""
        if not like.dtype.is_floating_point:
            bits = torch.arange(size.numel()).remainder(2).view(size)
            return self._between(bits).to(like.dtype)
        if self.kind == "normal":
            numbers = torch.randn(size, generator=generator).clamp_(-_EDGE, _EDGE)
        elif self.kind == "uniform":
            numbers = self._within(torch.rand(size, generator=generator))
        elif self.kind == "whole":
            numbers = self._between(torch.randint(2, size, generator=generator).float())
        else:
            numbers = torch.rand(size, generator=generator) + _MARGIN
            numbers = numbers / numbers.sum(dim=-1, keepdim=True)
            if self.kind == "one of several":
                numbers = (numbers == numbers.amax(dim=-1, keepdim=True)).float()
        return numbers.to(like.dtype)

    def ends(self, like: torch.Tensor, bits: torch.Tensor) -> torch.Tensor | None:
        """Return a record of the law's ends, the upper one where ``bits`` are 1; None where it has none."""
        if self.kind == "normal":
            return (_EDGE * (2.0 * bits - 1.0)).to(like.dtype)
        if self.kind == "uniform":
            return self._within(bits.double()).to(like.dtype)
        return self._between(bits).to(like.dtype) if self.kind == "whole" else None

    def _between(self, bits: torch.Tensor) -> torch.Tensor:
        """Return the lower number where bits are 0, the upper one where they are 1."""
        return self.low + (self.high - self.low) * bits

    def _within(self, shares: torch.Tensor) -> torch.Tensor:
        """Return numbers that lie so far on the way from one end to the other, and not on an end."""
        inner = _MARGIN + (1.0 - 2.0 * _MARGIN) * shares
        return self.low + (self.high - self.low) * inner


NORMAL = Law("normal")
UNIT = Law("uniform")
_WHOLE = (Law("whole"), Law("whole", 1.0, 2.0), Law("whole", 1.0, 1.0), Law("whole", 0.0, 0.0))
_SEVERAL = (Law("shares"), Law("one of several"))
_FLOATING_INPUTS = (NORMAL, UNIT, *_WHOLE)
_FLOATING_TARGETS = (UNIT, *_WHOLE)


@dataclass(frozen=True)
class Domain:
    """The numbers that a model and its loss accept, as far as made-up records need to know.

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
        """Return the domain of records of which a range of targets is declared, or nothing."""
        return (
            cls() if declared is None else cls(targets=Law("uniform", *declared), declared=declared)
        )

    def draw(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        shape: tuple[int, int],
        device: torch.device,
        *,
        seed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make records of the shape and type of the rows of ``x`` and ``y`` that hold no data.

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
        inputs = self.inputs.draw(x, torch.Size((*shape, *x.shape[1:])), generator)
        targets = self.targets.draw(y, torch.Size((*shape, *y.shape[1:])), generator)
        return inputs.to(device), targets.to(device)

    def tried(
        self, x: torch.Tensor, y: torch.Tensor, device: torch.device
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the records, as batches of one, that a model and its loss must accept to accept the domain.

        Each number of a record is at either end of its law in one of the first two.
        """
        generator = torch.Generator().manual_seed(0)
        bits = [torch.randint(2, (1, *part.shape[1:]), generator=generator) for part in (x, y)]
        drawn = self.draw(x, y, (1, 1), device)
        for ups in (bits, [1 - each for each in bits]):
            ends = (self.inputs.ends(x, ups[0]), self.targets.ends(y, ups[1]))
            inputs, targets = (
                whole[0] if end is None else end.to(device)
                for end, whole in zip(ends, drawn, strict=True)
            )
            yield inputs, targets
        yield drawn[0][0], drawn[1][0]

    def alternatives(self, x: torch.Tensor, y: torch.Tensor) -> Iterator[Domain]:
        """Yield this domain and others that records like ``x`` and ``y`` may have, the simplest first."""
        inputs = list(_WHOLE)
        targets = list(_WHOLE)
        if x.dtype.is_floating_point:
            # Of an input that is one number, the last axis is that of records.
            shares = _SEVERAL if x.ndim > 1 else ()
            inputs = list(dict.fromkeys([self.inputs, *_FLOATING_INPUTS, *shares]))
        if y.dtype.is_floating_point:
            targets = list(dict.fromkeys([self.targets, *self._laws_of_targets(y)]))
        places = [(i, j) for i in range(len(inputs)) for j in range(len(targets))]
        for i, j in sorted(places, key=lambda place: (sum(place), place[0])):
            yield replace(self, inputs=inputs[i], targets=targets[j])

    def _laws_of_targets(self, y: torch.Tensor) -> tuple[Law, ...]:
        """Return the laws of targets to try: of a declared range, those of numbers within it."""
        if self.declared is None:
            return (*_FLOATING_TARGETS, *_SEVERAL) if y.ndim > 1 else _FLOATING_TARGETS
        low, high = self.declared
        first = float(-(-low // 1))
        steps = [n for n in (first, first + 1.0) if n <= high]
        middle = 0.5 * (low + high)
        pairs = [(steps[0], steps[-1])] if steps else []
        pairs += [(low, high), (high, high), (middle, middle), (low, low)]
        return tuple(Law("whole", *pair) for pair in pairs)
