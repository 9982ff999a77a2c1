"""The interface of kernels, which compute clipped sums, and the flat layout of parameters."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._functorch.autograd_function import custom_function_call
from torch._library.custom_ops import OPDEFS
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping


REACHED_RECORDS = 8
"""Made-up records whose losses tell which parameters they reach."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss of each record: outputs and targets with a batch axis first, to shape ``[B]``."""

LossOf = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""The loss of one record: a model, its inputs and targets as a batch of one, to shape ``[1]``."""


@dataclass(frozen=True)
class LossOfOutputs:
    """A loss that is a function of the model's outputs and the targets only."""

    loss: Loss

    def __call__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of each record, shape ``[B]``; refuse losses of another shape."""
        losses = self.loss(model(x), y)
        if losses.shape != x.shape[:1]:
            raise InvalidInputError(
                "loss",
                tuple(losses.shape),
                "must be one number a record: shape (B,) for B records",
                'Use reduction="none"; a mean or a sum couples the records.',
            )
        return losses


@dataclass(frozen=True, eq=False)
class Rows:
    """The inputs, targets and mask of one step, M rows for each candidate, the real records first.

    Attributes:
        x: Inputs ``[K, M, ...]``.
        y: Targets ``[K, M, ...]``.
        dropout: A stream for each candidate.
    """

    x: torch.Tensor
    y: torch.Tensor
    sizes: Sequence[int] | npt.NDArray[np.int64]  # how many rows of each candidate are records
    mask: torch.Tensor  # 1 for a record; 0 for what fills up, or stands for an unusable record
    dropout: Sequence[torch.Generator]


class FallbackWarning(UserWarning):
    """The warning that a model takes a slower path, with the same results and privacy."""


_said: set[str] = set()


def say_once(message: str) -> None:
    """Warn that a model takes a slower path, once for each message."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=4)


class Kernel(Protocol):
    """The interface that computes clipped sums of per-sample gradients for a stack of K candidates."""

    layout: Layout
    """Where the trained parameters lie in a vector."""

    module: nn.Module
    """The model that the kernel runs, with the candidates' weights in place of its own."""

    @property
    def drops(self) -> bool:
        """Whether a pass draws random values, such as dropout masks, from the candidates' streams."""
        ...

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add each candidate's sum of clipped gradients over ``rows``, at weights ``params``, to ``out``.

        **Guarantee**: a record adds at most the clipping's sensitivity, and exactly nothing if its
        gradient is not finite; no row of one candidate touches a bit of another's sum. If a pass
        raises, ``out`` and ``halves`` are as they were.
        """
        ...

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row, without dropout, shape ``[K, M]``."""
        ...

    def reach(self, params: torch.Tensor) -> Mapping[str, float]:
        """Return the largest gradient norm of each parameter that losses of made-up records reach, by name.

        A parameter that is reached is a part of the graph of a loss. Beside its name stands the largest norm
        of its gradient over those records all gradients of which are finite; 0 where there are none.
        """
        ...


def _refuse_shared(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that overlap in memory under separate names: each would be trained by itself.

    Tied by ``other = one``, a parameter has one name in ``named_parameters`` and is trained once.
    """
    spans = []
    for name, p in parameters:
        if p.nbytes:
            spans.append((p.data_ptr(), p.data_ptr() + p.nbytes, name))
    spans.sort()
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        # What lies nowhere yet has an address of 0.
        if 0 < start < end:
            raise InvalidInputError(
                "model",
                f"{one} and {other}",
                "must not share memory, as other.data = one.data makes them: they would be trained apart",
                "Tie the parameter itself: other = one.",
            )


class Layout:
    """The place of each trainable parameter in a flat vector, in the order of ``named_parameters``.

    Attributes:
        size: P, the number of weights that are trained.
        spans: Start and end of each in the vector.
        layer_of: Number of the layer that owns it, for norms by layer.

    Raises:
        InvalidInputError: If nothing is trained, shapes are not known yet, memory is shared, or types
            differ.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise InvalidInputError(
                "model",
                type(module).__name__,
                "must have a trainable parameter",
            )
        if any(isinstance(p, UninitializedParameter) for _, p in parameters):
            raise InvalidInputError(
                "model",
                type(module).__name__,
                "must have the shapes of all its parameters",
                "Run a lazy layer once on a made-up record, before the optimizer is made.",
            )
        _refuse_shared(parameters)
        kinds = {p.dtype for _, p in parameters}
        if kinds not in ({torch.float32}, {torch.float64}):
            raise InvalidInputError(
                "model",
                ", ".join(sorted(map(str, kinds))),
                "must have trainable parameters of float32, or of float64: in fewer digits the rounding "
                "of a sum moves it by more than a record may",
                "Call model.float(); what is frozen may stay as it is.",
            )
        self.dtype = parameters[0][1].dtype
        self.shapes: Mapping[str, torch.Size] = {n: p.shape for n, p in parameters}
        self.spans: dict[str, tuple[int, int]] = {}
        at = 0
        for name, shape in self.shapes.items():
            end = at + shape.numel()
            self.spans[name] = (at, end)
            at = end
        self.size = at
        self.lengths = [end - start for start, end in self.spans.values()]
        self.layer_of: dict[str, int] = {}
        for layer, names in enumerate(self.layers.values()):
            for name in names:
                self.layer_of[name] = layer

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """The names of trainable parameters by the module that owns them, in order."""
        owned: dict[str, list[str]] = {}
        for name in self.shapes:
            owner = name.rpartition(".")[0]
            owned.setdefault(owner, []).append(name)
        return {owner: tuple(names) for owner, names in owned.items()}

    @property
    def usual_size(self) -> float:
        """The root mean square of weights as torch's layers draw them, ``1 / sqrt(3 fan_in)``.

        Methods that adapt their step take it for the size of the weights where the first ones are all
        zero. It is public, as shapes are.
        """
        squares = 0.0
        for names in self.layers.values():
            shapes = [self.shapes[name] for name in names]
            fans = [shape[1:].numel() for shape in shapes if len(shape) > 1]
            for shape in shapes:
                # A bias is drawn by the fan of the weight beside it.
                fan = fans[0] if fans else shape.numel()
                if len(shape) > 1:
                    fan = shape[1:].numel()
                squares += shape.numel() / (3.0 * fan)
        return math.sqrt(squares / self.size)

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the parameters in ``flat``, shape ``[..., P]``."""
        lead = flat.shape[:-1]
        return {
            name: flat[..., start:end].view((*lead, *self.shapes[name]))
            for name, (start, end) in self.spans.items()
        }

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a flat ``[K, P]`` as views ``[K, n]``, one a parameter."""
        parts = flat.split_with_sizes(self.lengths, dim=1)
        return dict(zip(self.spans, parts, strict=True))

    def flatten(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Concatenate one tensor a parameter into a flat vector of shape ``[P]``."""
        return torch.cat([tensors[name].reshape(-1) for name in self.spans])


def same_fixed(one: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have equal frozen parameters and buffers."""
    return next(unlike_fixed(one, other), None) is None


def unlike_fixed(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the names of frozen parameters and buffers in which two models differ."""

    def fixed(module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the frozen parameters and buffers of a model, by name."""
        frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        return {**frozen, **dict(module.named_buffers())}

    first = fixed(one)
    second = fixed(other)
    yield from sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        if not torch.equal(first[name].cpu(), second[name].cpu()):
            yield name


def flatten_params(module: nn.Module) -> torch.Tensor:
    """Return a copy of the trainable parameters as one vector of shape ``[P]``."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return Layout(module).flatten(parameters)


def share_flat(module: nn.Module) -> torch.Tensor:
    """Make the trainable parameters views of one vector of shape ``[P]``, and return it.

    A kernel that runs the model itself then changes candidates by one copy.
    """
    flat = flatten_params(module)
    parameters = dict(module.named_parameters())
    for name, view in Layout(module).unflatten(flat).items():
        parameters[name].data = view
    return flat


def load_params(module: nn.Module, flat: torch.Tensor) -> None:
    """Give the trainable parameters of ``module`` the values of a vector ``[P]``, in new memory."""
    layout = Layout(module)
    if flat.shape != (layout.size,):
        raise InvalidInputError("flat", tuple(flat.shape), f"must have shape ({layout.size},)")
    parameters = dict(module.named_parameters())
    for name, value in layout.unflatten(flat.detach()).items():
        parameters[name].data = value.to(parameters[name], copy=True)


SAME_SHAPE = (
    "Give outputs and targets one shape: squeeze(1) the outputs, or unsqueeze(1) the targets."
)
"""What helps where outputs and targets hold as many numbers in other shapes."""


def describe_shapes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[str, bool]:
    """Describe the shapes of a record and its outputs, and say whether only the targets' shape differs.

    Outputs and targets that hold as many numbers in other shapes are broadcast against each other.
    """
    inputs = f"inputs {tuple(x.shape)} of {x.dtype}"
    targets = f"targets {tuple(y.shape)} of {y.dtype}"
    try:
        with torch.no_grad():
            outputs = fresh(model)[0](x)
    except Exception:  # where the loss does more than to call the model
        outputs = None
    if not isinstance(outputs, torch.Tensor):
        return f"{inputs} and {targets}", False
    unlike = outputs.shape != y.shape and outputs.numel() == y.numel()
    return f"{inputs}, outputs {tuple(outputs.shape)} and {targets}", unlike


def add_reach(
    reach: dict[str, float],
    names: Iterable[str],
    gradients: Iterable[torch.Tensor | None],
) -> None:
    """Update each parameter's largest gradient norm with the gradients of one more loss.

    A record whose gradient is not finite contributes nothing to a training, as one whose gradient is 0.
    """
    reached: dict[str, torch.Tensor] = {}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            reached[name] = gradient.to_dense() if gradient.is_sparse else gradient
    finite = all(bool(values.isfinite().all()) for values in reached.values())
    for name, values in reached.items():
        norm = 0.0
        if finite:
            # In float64: squares of tiny numbers would be 0.
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        reach[name] = max(reach.get(name, 0.0), norm)


_EMPTY = (OrderedDict, dict, list, set)
_UNCHANGING = (type(None), bool, int, float, str, bytes)  # copies of such are these themselves


def fresh(model: nn.Module, beside: Any = None, *, trained: bool = False) -> tuple[nn.Module, Any]:
    """Return a copy of a model that shares parameters only, and a copy of what refers to the model.

    What may refer to the model, as its loss does, is copied along; of a model that is ``trained``, parameters
    that require gradients are copied, too.
    """
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    if trained:
        parameters = (p for p in model.parameters() if p.requires_grad)
        memo |= {id(p): nn.Parameter(p.detach().clone()) for p in parameters}
    parts = list(model.modules())
    compiled = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]
    memo |= {id(part): part for part in compiled}  # a copy of such would bring weights of its own
    parts = [part for part in parts if id(part) not in memo]
    for part in parts:
        memo[id(part)] = cast(Any, nn.Module).__new__(type(part))
    for part in parts:
        attributes = {name: _copied(value, memo) for name, value in vars(part).items()}
        vars(memo[id(part)]).update(attributes)
    return _copied(model, memo), _copied(beside, memo)


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Raise an error if a ``with`` block changes parameters or buffers of a model, after restoring them.

    What was written is put back before the refusal, so that a model which a user keeps holds nothing
    of a record.

    Raises:
        InvalidInputError: If a parameter or a buffer has changed.
    """
    shared = [*model.parameters(), *model.buffers()]
    stood = [(part, part.detach(), part.detach().clone()) for part in shared]
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # a pass that raises may have written before
        failure = error
    written = []
    for part, place, before in stood:
        if not _same(part.detach(), before):
            written.append((part, place, before))
    for part, place, before in written:
        place.copy_(before)
        part.data = place
    if written:
        raise InvalidInputError(
            "model",
            type(model).__name__,
            "must not write to its parameters in a pass: they would hold something of every record",
        ) from failure
    if failure is not None:
        raise failure


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors hold the same numbers; NaN is like NaN."""
    if one.shape != other.shape:
        return False
    both_nan = one.isnan() & other.isnan()
    return bool(((one == other) | both_nan).all())


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied.

    What cannot be copied is shared, but lists and tables are taken apart, as they may hold a model's
    parts.
    """
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind in _EMPTY and not value:  # as most of what a module holds: its hooks
        return memo.setdefault(id(value), kind())
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()  # what a pass has left, as a weight norm does
    length = len(memo)
    try:
        return deepcopy(value, memo)
    except Exception:  # whatever a class of a user's makes of it
        while len(memo) > length:
            memo.popitem()  # copies that were begun
    copy: Any = value
    if kind is list:
        copy = []
        memo[id(value)] = copy  # before its parts: one may refer to it
        copy.extend(_copied(part, memo) for part in value)
    elif kind is dict:
        copy = {}
        memo[id(value)] = copy
        for name, part in value.items():
            copy[name] = _copied(part, memo)
    return copy


class Largest(TorchFunctionMode):
    """A torch mode that notes the bytes of the largest tensor in a pass over one record."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 1

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run a call, and note the bytes of its result."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.nbytes)
        return result

    def at_once(self, most: int) -> int:
        """Return how many records can pass at once, at most ``most``, with tensors of up to 256 MiB."""
        return max(1, min(most, 2**28 // self.bytes))


class Apart(TorchFunctionMode):
    """A torch mode that refuses users' own ``vmap`` rules, which would see all records at once."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run a call, but refuse a function or operator with a ``vmap`` rule of a user's."""
        if func is custom_function_call:
            if args[0].vmap is not torch.autograd.Function.vmap:
                raise RuntimeError(f"{args[0].__name__}.vmap would see all records at once")
        elif isinstance(func, torch._ops.OpOverload):
            definition = OPDEFS.get(func._schema.name)
            if definition is not None and definition._vmap_fn is not None:
                raise RuntimeError(f"the rule of {func} for vmap would see all records at once")
        return func(*args, **(kwargs or {}))


class _TracingFlag(threading.local):
    """A truth value for each thread, in place of torch's compiling flag, which the process shares.

    Others look at it, too: Adam computes with steps in single precision where it stands.

    With the flag of the process, a trial in another thread would take the traced way in the middle of
    its pass.
    """

    inside = 0

    def __bool__(self) -> bool:
        return self.inside > 0

    # In the place of a bool, which libraries also combine with others.
    def __or__(self, other: object) -> bool:
        return bool(self) or bool(other)

    def __and__(self, other: object) -> bool:
        return bool(self) and bool(other)

    __ror__ = __or__
    __rand__ = __and__


_FLAG: Any = _TracingFlag()


@contextmanager
def traced() -> Iterator[None]:
    """Tell models that run in this thread that torch is tracing them, inside the ``with`` block."""
    # Libraries whose models look at values to go a shorter way (Hugging Face's leave out a mask that masks
    # nothing) then go the way that is right for all values.
    torch.compiler._is_compiling_flag = _FLAG
    _FLAG.inside += 1
    try:
        yield
    finally:
        _FLAG.inside -= 1


def by_record(
    one: Callable[..., torch.Tensor], *, randomness: str = "error"
) -> Callable[..., torch.Tensor]:
    """Return a function that applies ``one`` to each of many records by ``torch.vmap``."""
    many = torch.vmap(one, randomness=randomness)

    def called(*records: torch.Tensor) -> torch.Tensor:
        with Apart(), traced():
            results: torch.Tensor = many(*records)
        return results

    return called
