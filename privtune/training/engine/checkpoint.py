"""The state of a training in mid-way, so that one that was stopped goes on where it was.

A checkpoint holds the method's state, the position of every random stream, what was drawn ahead,
counted, reported and released: nothing is drawn twice, and what comes out is the same to the last
bit. It stays inside the trust boundary. When one is kept depends on the clock, and nothing that is
released depends on when one was kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from privtune.errors import PrivTuneError
from privtune.training.engine.compute import hardware, versions
from privtune.training.mechanism import noise
from privtune.training.mechanism.kernel import say_once
from privtune.training.mechanism.streams import Tensors, of_prefix, prefixed
from privtune.training.methods._base import restore_state, state_tensors

if TYPE_CHECKING:
    from privtune.training.mechanism.oracle import Oracle

_SECONDS = 10.0
"""Least time between two checkpoints: what a death costs at most, beside the next number."""

_SHARE = 0.01
"""Most of a training's time that keeping checkpoints may take."""


@dataclass(frozen=True)
class Keeper:
    """Where the checkpoint of a training lies."""

    load: Callable[[], bytes | None]
    keep: Callable[[bytes], None]


@dataclass(eq=False)
class Middle:
    """A stack in mid-way: state, steps done, what was reported of each."""

    state: Any
    mean: torch.Tensor
    step: int = 0
    history: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def report(self) -> dict[str, torch.Tensor]:
        """What the method reported, by name, shape ``[T, K]``."""
        return {
            name: torch.stack([entry[name].detach() for entry in self.history])
            for name in self.history[0]
        }


class Checkpoint:
    """The checkpoint of one training of one candidate, made before its first step.

    **Guarantee**: a checkpoint of another training, program or machine is not used, and neither is a
    damaged one: the training then begins again from its seed, with the same law of what is released.
    """

    def __init__(self, keeper: Keeper, training: str, start: Any, oracle: Oracle) -> None:
        self._keeper, self._start, self._oracle = keeper, start, oracle
        self._device = start.params.device
        first = hashlib.sha256()
        for name, tensor in sorted(state_tensors(start).items()):
            first.update(name.encode() + bytes(tensor.cpu().flatten().view(torch.uint8).numpy()))
        self._about = {"training": training, "start": first.hexdigest()}
        # What may change the bits of a training: the program, and what it runs on.
        self._where = {
            **versions(),
            "threads": torch.get_num_threads(),
            "hardware": hardware(self._device),
            "noise": noise.VALUES,
        }
        self._next = time.perf_counter() + _SECONDS

    def load(self) -> Middle:
        """Return the training as it was kept, its oracle at that position; or as it begins."""
        beginning = Middle(self._start, self._start.params)
        try:
            content = self._keeper.load()
        except PrivTuneError:
            return _unused(beginning, "is a file that cannot be reached from here")
        if content is None:
            return beginning
        body = content[32:]
        if hashlib.sha256(body).digest() != content[:32]:
            return _unused(beginning, "is damaged")
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        facts = json.loads(header["__metadata__"]["checkpoint"])
        if facts["about"] != self._about:
            return beginning  # that of the training before this one, in the same arm
        if facts["where"] != self._where:
            return _unused(beginning, "is of another version or machine")
        # Copies: matrix products round otherwise where memory is aligned otherwise.
        tensors = {n: tensor.clone() for n, tensor in safetensors.torch.load(body).items()}
        self._oracle.go_to(of_prefix("oracle", tensors))
        state: Any = restore_state(self._start, of_prefix("state", tensors))
        mean = tensors.get("average", state.params).to(self._device)
        report = {n: column.to(self._device) for n, column in of_prefix("report", tensors).items()}
        return Middle(
            state,
            mean,
            facts["step"],
            [
                {name: column[step] for name, column in report.items()}
                for step in range(facts["step"])
            ],
            {int(step): kept for step, kept in of_prefix("snapshot", tensors).items()},
        )

    def after(self, middle: Middle) -> None:
        """Keep a checkpoint, between two steps, if it is time for one."""
        started = time.perf_counter()
        if started < self._next:
            return
        self._keeper.keep(self._pack(middle))
        ended = time.perf_counter()
        self._next = ended + max(_SECONDS, (ended - started) / _SHARE)

    def _pack(self, middle: Middle) -> bytes:
        own = None if middle.mean is middle.state.params else middle.mean
        tensors: Tensors = {
            **prefixed("state", state_tensors(middle.state)),
            **prefixed("oracle", self._oracle.position()),
            **prefixed("report", middle.report),
            **prefixed("snapshot", {str(step): kept for step, kept in middle.snapshots.items()}),
            **({} if own is None else {"average": own}),
        }
        facts = {"about": self._about, "where": self._where, "step": middle.step}
        body = safetensors.torch.save(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            metadata={"checkpoint": json.dumps(facts)},
        )
        return hashlib.sha256(body).digest() + body


def _unused(beginning: Middle, reason: str) -> Middle:
    say_once(
        f"The checkpoint of a training that was stopped {reason} and is not used: the training "
        "begins again from its seed, at no further charge."
    )
    return beginning
