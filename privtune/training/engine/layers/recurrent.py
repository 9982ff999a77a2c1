"""Recurrent layers of torch, place by place: their kernels have no rule for ``vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]
Cell = Callable[[torch.Tensor, Tensors, Tensors], Tensors]
Drop = Callable[[torch.Tensor, float], torch.Tensor]


def run_lstm(
    x: torch.Tensor, states: Tensors, weights: Sequence[torch.Tensor], **how: object
) -> Tensors:
    """Return the output and the last states of ``torch.lstm``."""
    return _layers(_lstm_cell, x, states, weights, **how)  # type: ignore[arg-type]


def run_gru(
    x: torch.Tensor, states: Tensors, weights: Sequence[torch.Tensor], **how: object
) -> Tensors:
    """Return the output and the last state of ``torch.gru``."""
    return _layers(_gru_cell, x, states, weights, **how)  # type: ignore[arg-type]


def run_simple(
    squash: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Tensors]:
    """Return the same for ``torch.rnn_tanh`` or ``torch.rnn_relu``."""

    def cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
        return (squash(x + _by_state(states[0], weights)),)

    def run(
        x: torch.Tensor, states: Tensors, weights: Sequence[torch.Tensor], **how: object
    ) -> Tensors:
        return _layers(cell, x, states, weights, **how)  # type: ignore[arg-type]

    return run


def _layers(
    cell: Cell,
    x: torch.Tensor,
    states: Tensors,
    weights: Sequence[torch.Tensor],
    *,
    biased: bool,
    layers: int,
    dropout: float,
    both_ways: bool,
    batch_first: bool,
    drop: Drop,
) -> Tensors:
    """Run all layers and directions of a recurrent net.

    Args:
        cell: One place: what its inputs gave, the states before, the weights of its direction.
        x: Inputs, ``[B, T, n]`` or ``[T, B, n]``.
        states: First states, ``[layers * directions, B, m]`` each.
        weights: As torch's modules hold them: for each layer and direction, of inputs and states.
        biased: Whether there are biases.
        layers: How many.
        dropout: Chance to drop an entry between two layers.
        both_ways: Whether each layer also runs backwards.
        batch_first: Which of the axes of ``x`` are places.
        drop: Drops entries.
    """
    places = x.transpose(0, 1) if batch_first else x
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    last: list[Tensors] = []
    for layer in range(layers):
        if layer and dropout:
            places = drop(places, dropout)
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            own = tuple(weights[number * each : (number + 1) * each])
            state = tuple(s[number] for s in states)
            inputs = functional.linear(places, own[0], own[2] if biased else None)
            seen = []
            for place in range(len(places)) if way == 0 else reversed(range(len(places))):
                state = cell(inputs[place], state, own)
                seen.append(state[0])
            outputs.append(torch.stack(seen if way == 0 else seen[::-1]))
            last.append(state)
        places = torch.cat(outputs, dim=-1)
    ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (places.transpose(0, 1) if batch_first else places, *ends)


def _by_state(h: torch.Tensor, weights: Tensors) -> torch.Tensor:
    biased = len(weights) > 3
    return functional.linear(h, weights[1], weights[3] if biased else None)


def _lstm_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    h, c = states
    first, forget, fresh, out = (x + _by_state(h, weights)).chunk(4, dim=-1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(first) * torch.tanh(fresh)
    h = torch.sigmoid(out) * torch.tanh(c)
    if len(weights) in (3, 5):  # a projection of the state
        h = functional.linear(h, weights[-1])
    return h, c


def _gru_cell(x: torch.Tensor, states: Tensors, weights: Tensors) -> Tensors:
    (h,) = states
    reset, update, fresh = x.chunk(3, dim=-1)
    by_reset, by_update, by_fresh = _by_state(h, weights).chunk(3, dim=-1)
    update = torch.sigmoid(update + by_update)
    fresh = torch.tanh(fresh + torch.sigmoid(reset + by_reset) * by_fresh)
    return (fresh + update * (h - fresh),)
