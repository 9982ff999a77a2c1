"""Checkpoints of a training, from which a stopped training continues with the same bits.

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

from privtune.errors import UnreachableFileError
from privtune.training.engine.compute import hardware, versions
from privtune.training.mechanism import noise
from privtune.training.mechanism.kernel import say_once
from privtune.training.mechanism.streams import Tensors, of_prefix, prefixed
from privtune.training.methods.method import restore_state, state_tensors

if TYPE_CHECKING:
    from privtune.training.mechanism.oracle import Oracle

_SECONDS = 10.0
"""Least time between two checkpoints: what a death costs at most, beside the next number."""

_SHARE = 0.01
"""Most of a training's time that keeping checkpoints may take."""


@dataclass(frozen=True)
class Keeper:
    """The functions that load and store the checkpoint of one training.

    Attributes:
        load: Returns what was kept last, or None.
        keep: Replaces it; called between two steps, and takes a share of a training's time.
    """

    load: Callable[[], bytes | None]
    keep: Callable[[bytes], None]


@dataclass(eq=False)
class Middle:
    """The progress of a stack: state, average of the iterates, steps done, reports and snapshots.

    Attributes:
        mean: Average of the iterates so far, ``[K, P]``; the parameters themselves where only the
            last counts.
        step: How many steps are done.
        history: What the method reported of each.
        snapshots: Averages after some steps, by the number of the step.
    """

    state: Any
    mean: torch.Tensor
    step: int = 0
    history: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def report(self) -> dict[str, torch.Tensor]:
        """The method's reports of all steps, by name, shape ``[T, K]`` each."""
        return {
            name: torch.stack([entry[name].detach() for entry in self.history])
            for name in self.history[0]
        }


class Checkpoint:
    """The checkpoint of a training of one candidate, set up before the first step.

    **Guarantee**: a checkpoint of another training, program or machine is not used, and neither is a
    damaged one: the training then begins again from its seed, with the same law of what is released.
    """

    def __init__(
        self,
        keeper: Keeper,
        training: str,
        start: Any,
        oracle: Oracle,
    ) -> None:
        self._keeper = keeper
        self._start = start
        self._oracle = oracle
        self._device = start.params.device
        first = hashlib.sha256()
        for name, tensor in sorted(state_tensors(start).items()):
            numbers = tensor.cpu().flatten()
            content = numbers.view(torch.uint8).numpy()
            first.update(name.encode())
            first.update(bytes(content))
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
        """Return the stored progress and set the oracle to it; return the beginning if none can be used.

        A checkpoint is used only if it would give the same bits: of this training (its secret,
        method, data and first weights), by the same program, on the same kind of machine. Else what
        comes out would not be what a training that nothing stopped gives.

        The layout is a digest of 32 bytes, then a safetensors file with the facts in its metadata.
        """
        beginning = Middle(self._start, self._start.params)
        try:
            content = self._keeper.load()
        except UnreachableFileError:
            return _unused(beginning, "is a file that cannot be reached from here")
        if content is None:
            return beginning
        body = content[32:]
        if hashlib.sha256(body).digest() != content[:32]:
            return _unused(beginning, "is damaged")
        length = int.from_bytes(body[:8], "little")  # as safetensors has it in front of its header
        header = json.loads(body[8 : 8 + length])
        facts = json.loads(header["__metadata__"]["checkpoint"])
        if facts["about"] != self._about:
            return beginning  # that of the training before this one, in the same arm
        if facts["where"] != self._where:
            return _unused(beginning, "is of another version or machine")
        # Copies: matrix products round otherwise where memory is aligned otherwise.
        tensors = {n: tensor.clone() for n, tensor in safetensors.torch.load(body).items()}
        self._oracle.go_to(of_prefix("oracle", tensors))
        state: Any = restore_state(self._start, of_prefix("state", tensors))
        mean = tensors.get("average", state.params)
        report = {}
        for name, column in of_prefix("report", tensors).items():
            report[name] = column.to(self._device)
        history: list[Mapping[str, torch.Tensor]] = []
        for step in range(facts["step"]):
            history.append({name: column[step] for name, column in report.items()})
        snapshots = {}
        for number, params in of_prefix("snapshot", tensors).items():
            snapshots[int(number)] = params
        return Middle(
            state,
            mean.to(self._device),
            facts["step"],
            history,
            snapshots,
        )

    def after(self, middle: Middle) -> None:
        """Store a checkpoint between two steps if the pause since the last one is over.

        The time that it took says when the next one may be: at ``_SHARE`` of a training's time at
        most.
        """
        started = time.perf_counter()
        if started < self._next:
            return
        self._keeper.keep(self._pack(middle))
        ended = time.perf_counter()
        pause = (ended - started) / _SHARE
        self._next = ended + max(_SECONDS, pause)

    def _pack(self, middle: Middle) -> bytes:
        """Return the checkpoint as bytes: a digest, then a safetensors file of the progress."""
        mean = None if middle.mean is middle.state.params else middle.mean
        snapshots = {str(step): params for step, params in middle.snapshots.items()}
        tensors: Tensors = {
            **prefixed("state", state_tensors(middle.state)),
            **prefixed("oracle", self._oracle.position()),
            **prefixed("report", middle.report),
            **prefixed("snapshot", snapshots),
        }
        if mean is not None:
            tensors["average"] = mean
        facts = {
            "about": self._about,
            "where": self._where,
            "step": middle.step,
        }
        body = safetensors.torch.save(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            metadata={"checkpoint": json.dumps(facts)},
        )
        return hashlib.sha256(body).digest() + body


def _unused(beginning: Middle, reason: str) -> Middle:
    """Warn once why a checkpoint is not used, and return the beginning of the training."""
    say_once(
        f"The checkpoint of a training that was stopped {reason} and is not used: the training "
        "begins again from its seed, at no further charge."
    )
    return beginning
