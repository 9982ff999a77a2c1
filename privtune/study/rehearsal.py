"""Rehearsals of a user's function, on made-up records, before anything is charged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from privtune.training.mechanism.data import Data, Fetched
    from privtune.training.mechanism.records import RecordFacts
    from privtune.training.own_loop.private_training import PrivateTraining

__all__ = [
    "REHEARSED_STEPS",
    "MadeAnew",
    "Rehearsal",
    "check_saved",
    "is_more_than_trained",
    "made_up",
]

REHEARSED_STEPS = 2
"""How many steps a rehearsal takes: what works once may fail on what the first has left behind."""


Rehearsal = Literal["steps", "others", "model"]
"""Two steps; the same on other made-up records; or the model alone is made."""


class _MadeUp:
    """Records of the shapes and types of a dataset's that hold nothing of it.

    Args:
        x: Inputs of a record, for shape and type.
        y: Targets of a record, likewise.
        size: How many records these are.
        stands_for: The dataset, of which nothing is read: a loop that reads it is refused.
        seed: What they are made up from.
    """

    sealed_size = True

    def __init__(
        self, x: torch.Tensor, y: torch.Tensor, size: int, stands_for: Data, seed: int
    ) -> None:
        self._x, self._y, self._size, self.stands_for = x, y, size, stands_for
        self._seed = seed
        self.unit = getattr(stands_for, "unit", "")
        self.tree = getattr(stands_for, "tree", None)

    def __len__(self) -> int:
        return self._size

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return as many made-up records as were asked for."""
        from privtune.training.mechanism.data import synthetic

        shape = (1, max(1, len(index)))
        x, y = synthetic(self._x, self._y, shape, self._x.device, seed=self._seed)
        return x[0, : len(index)], y[0, : len(index)]

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Data``."""
        return self._x[:0], self._y[:0]

    def fetch(self, index: torch.Tensor) -> Fetched:
        """Return as many made-up records; all of them can be used."""
        return (*self.take(index), None)

    def held_to(self, facts: RecordFacts) -> _MadeUp:
        """Return the same: what is made up keeps to any facts."""
        return self

    def to(self, device: torch.device) -> _MadeUp:
        """Return the same on a device."""
        x, y = self._x.to(device), self._y.to(device)
        return _MadeUp(x, y, self._size, self.stands_for, self._seed)

    def head(self, size: int) -> Any:
        """Return the first few, in memory."""
        import torch

        from privtune.training.mechanism.data import TensorData

        return TensorData(*self.take(torch.arange(size)), unit=self.unit)


def made_up(data: Data, records: int, *, seed: int = 0) -> _MadeUp:
    """Return as many made-up records like those of ``data``: of their shapes and types."""
    return _MadeUp(*data.like, records, data, seed)


class MadeAnew(BaseException):
    """Ends an objective where it has made its model: no failure, so no program of a user's catches it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def is_more_than_trained(model: nn.Module) -> bool:
    """Say whether a model holds tensors that are not trained, and so not released."""
    import torch

    frozen = any(not p.requires_grad for p in model.parameters())
    parts = (value for module in model.modules() for value in vars(module).values())
    return (
        frozen
        or any(True for _ in model.buffers())
        or any(isinstance(value, torch.Tensor) for value in parts)
    )


def check_saved(
    trained: nn.Module,
    anew: nn.Module,
    saved: Mapping[str, torch.Tensor],
    called: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> None:
    """Hold what would be released of a model against the model that was trained, on made-up records.

    Args:
        trained: The model that a rehearsal trained.
        anew: The model as the function makes it another time, from other first weights.
        saved: What would be released: the trained parameters by name.
        called: What the model was called with in the rehearsal; None if it never was as a whole.

    Raises:
        AdapterError: If the weights, loaded into the model made anew, give other outputs than the
            trained model, or outputs do not hang on them.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from privtune.execution.fine_tuned import AdapterError
    from privtune.training.mechanism.kernel import same_fixed
    from privtune.training.mechanism.scoring import evaluating
    from privtune.training.mechanism.streams import GLOBAL_GENERATOR

    if not all(bool(values.isfinite().all()) for values in saved.values()):
        return
    anew = anew.to(next(trained.parameters()).device)
    for tensor in (*anew.parameters(), *anew.buffers()):
        tensor.data = tensor.detach().clone()  # a table may lie in memory of the user's own

    def outputs(model: nn.Module) -> list[torch.Tensor]:
        args, kwargs = called or ((), {})
        seeded = torch.random.fork_rng(devices=[])
        with GLOBAL_GENERATOR, seeded, torch.no_grad(), evaluating(model):
            torch.default_generator.manual_seed(0)
            found = model(*args, **kwargs)
        return [t for t in tree_leaves(getattr(found, "logits", found)) if torch.is_tensor(t)]

    expected = [] if called is None else outputs(trained)
    try:
        anew.load_state_dict(saved, strict=False)
        found = [] if called is None else outputs(anew)
        same = (called is not None or same_fixed(trained, anew)) and all(
            torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
            for a, b in zip(expected, found, strict=True)
        )
    except (RuntimeError, ValueError):  # of other shapes, or with other outputs
        same = False
    if not same:
        raise AdapterError(
            "What would be released of the model, loaded into the model that the function makes anew, is "
            "another model than the one that was trained: what is not trained must be the same every "
            "time. Load it from a file, or call torch.manual_seed before it is made. Nothing was charged."
        )
    if called is not None:
        anew.load_state_dict({n: torch.full_like(v, 0.5) for n, v in saved.items()}, strict=False)
        if all(map(torch.equal, found, outputs(anew))):
            raise AdapterError(
                "What is trained of the model does not reach its outputs, so no training changes what it "
                "says. Train other parts of it. Nothing was charged."
            )


def refuse_other_ways(
    loop: PrivateTraining, again: Callable[[Rehearsal], PrivateTraining | None]
) -> None:
    """Refuse a loop whose steps hang on the records that it has read by another way than torch.

    Args:
        loop: It was rehearsed.
        again: Rehearses it again.
    """
    other = again("others")
    if other is None or other.programs == loop.programs:
        return
    same = again(
        "steps"
    )  # what differs from itself (a draw without a seed) need not hang on records
    if same is not None and same.programs == loop.programs:
        loop.refuse_other_programs(other)
