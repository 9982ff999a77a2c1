"""Training of candidates: the kernel that computes their passes, stacks of them, steps, transcripts."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine import stacks
from privtune.training.engine.capture import Program, program_of
from privtune.training.engine.checkpoint import Checkpoint, Keeper, Middle
from privtune.training.engine.compute import (
    check_device,
    check_stack,
    refuse_autocast,
    sums_in_float32,
)
from privtune.training.engine.kernels import BatchedKernel, NotBatchableError, OneByOneKernel
from privtune.training.engine.optimizers import OPTIMIZER, Optimized, Own
from privtune.training.engine.stacks import OnStep, divide, side_by_side
from privtune.training.engine.watch import registered
from privtune.training.mechanism.clipping import sent
from privtune.training.mechanism.data import (
    TensorData,
    find_domain_of,
    find_facts,
    fingerprint,
    targets_are_classes,
)
from privtune.training.mechanism.kernel import (
    Kernel,
    Layout,
    LossOf,
    flatten_params,
    fresh,
    load_params,
    same_fixed,
    say_once,
)
from privtune.training.mechanism.made_up import Domain
from privtune.training.mechanism.memory import MemoryCheck, gradients_of, remembering_nothing
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.scoring import evaluating
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods._rate_schedule import SEARCHED, average_weights, rate_factors
from privtune.training.methods.dpsgd import AutomaticClipping, DPAdam, FixedDPSGD

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.training.methods import Method

_HELD_BYTES = 512 * 2**20  # of models that wait to be trained together
_COMPARED = 2  # made-up records whose gradients are compared before and after a training
_KERNELS = 4  # what was captured for a model is kept for the next trial of it
_LOW = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a candidate. Only ``params``, ``report`` and ``module`` are functions of releases."""

    position: int
    params: torch.Tensor  # final ones on the CPU, [P]: the method's average of the iterates
    report: Mapping[str, torch.Tensor]
    transcript: Transcript
    unusable: int
    snapshots: Mapping[int, torch.Tensor]
    module: nn.Module


@dataclass(frozen=True, eq=False)
class Training:
    """A training of candidates, each with its own model, samples, noise and privacy.

    **Guarantee**: each candidate's parameters and report are an output of the mechanism that
    ``method.event(schedule)`` describes; no candidate's data or divergence touches another's bits.
    With its secret, a result does not depend on its stack.
    """

    method: Method
    schedule: Schedule
    loss_of: LossOf
    data: TensorData
    device: str = "auto"
    stack: int | Literal["auto"] = "auto"
    precision: str = "float32"
    noise: NoiseOptions | None = None
    on_step: OnStep | None = None
    snapshots_at: Collection[int] = ()
    keeper: Keeper | None = None  # of a candidate that is trained alone
    look: Callable[[int, torch.Tensor], object] | None = None  # likewise; what it raises ends it

    def __post_init__(self) -> None:
        refuse_autocast()

    def of(self, made: Iterable[Made]) -> Iterator[Outcome]:
        """Train candidates; yield what became of each, in any order."""
        waiting, held = list[Group](), 0
        for position, each in enumerate(made):
            check_model(each.model)
            loss_of = each.trained_on(self.loss_of, self.records)
            domain = find_domain_of(each.model, loss_of, self.records)
            own = None
            if each.optimizer is not None:
                Optimized(self.method)
                own = Own.of(each.optimizer, each.model, each.scheduler, self.schedule.steps)
            program = program_of(each.model, loss_of, *self.records.like, domain)
            held += put(waiting, Member(position, each, loss_of, own, domain=domain), program)
            if held > _HELD_BYTES:
                yield from self._of_groups(waiting)
                waiting, held = [], 0
        yield from self._of_groups(waiting)

    def alike(self, made: Iterable[Made]) -> list[Outcome]:
        """Train candidates whose models one function made, as one group; return their outcomes in order."""
        members = [Member(position, each, self.loss_of) for position, each in enumerate(made)]
        first = members[0].made.model
        for own in (member.made.model for member in members[1:]):
            if Layout(own).shapes != Layout(first).shapes or not same_fixed(own, first):
                raise InvalidInputError(
                    "model",
                    type(own).__name__,
                    "must have the same shape, frozen parameters and buffers every time it is made",
                    "Load what is frozen from a file, or seed it.",
                )
        return self.of_group(Group((None,), None, members))

    def _of_groups(self, groups: list[Group]) -> Iterator[Outcome]:
        for group in with_narrow(groups, self.method):
            yield from self.of_group(group)

    def of_group(self, group: Group) -> list[Outcome]:
        """Train the candidates of a group; return what became of each, in order."""
        loss_of = group.members[0].loss_of
        domain = group.members[0].domain
        if domain is None:
            domain = find_domain_of(group.model, loss_of, self.records)
        kernel = choose_kernel(
            group.model,
            loss_of,
            replace(self.records, domain=domain),
            self.place,
            precision=self.precision,
            program=group.key[0],
        )
        facts = find_facts(
            lambda x, y: loss_of(kernel.module, x, y),
            *self.records.like,
            device=self.place,
            domain=domain,
        )
        data = replace(self.records.held_to(facts), domain=domain)
        check = self._memory_check(group.model, loss_of, data)
        longest = stacks.longest_sample(self.schedule)
        memory = stacks.memory_model(kernel, longest=longest)
        stack, cores = check_stack(self.stack), torch.get_num_threads()
        division = divide(
            kernel,
            memory,
            len(group.members),
            stack=None if stack == "auto" else stack,
            cores=cores if self.place.type == "cpu" else 1,
        )
        left = iter(group.members)
        jobs = [
            partial(self._run, [next(left) for _ in range(size)], kernel, memory, data)
            for size in division.sizes
        ]
        with sums_in_float32(), remembering_nothing(check):
            done = list(chain(*side_by_side(jobs, division.threads, self.on_step)))
        event = self.method.event(self.schedule)
        for outcome in done:
            outcome.transcript.check_within(event)
            outcome.transcript.check_whole(event)
        return done

    def _memory_check(self, model: nn.Module, loss_of: LossOf, data: TensorData) -> MemoryCheck:
        """Return the check that a loss keeps nothing: at the first weights, of records that stay the same."""
        # Two that are made up, and a real one: a loss may remember where inputs look real.
        made_up = data.domain.draw(*self.records.like, (1, _COMPARED), self.place)
        inputs, targets = (torch.split(part[0], 1) for part in made_up)
        middle = torch.tensor([len(data) // 2], device=self.place)
        records = [*zip(inputs, targets, strict=True), data.take(middle)]
        copy = fresh(model, trained=True)[0].to(self.place)
        evaluate = partial(gradients_of, loss_of, copy, records)
        return MemoryCheck("The loss", (loss_of, model), evaluate)

    @cached_property
    def place(self) -> torch.device:
        """Where to train."""
        return torch.device(check_device(self.device))

    @cached_property
    def records(self) -> TensorData:
        """The private records, where they are trained on."""
        return self.data.to(self.place)

    def _run(
        self,
        members: Sequence[Member],
        kernel: Kernel,
        memory: stacks.Memory,
        data: TensorData,
        on_step: OnStep | None,
    ) -> list[Outcome]:
        """Train one stack from its first weights, or from a checkpoint, to its end."""
        size = kernel.layout.size
        places = [m.places for m in members if m.places is not None] or None
        oracle = Oracle(
            self.schedule,
            data=data,
            kernel=kernel,
            streams=[Streams(member.made.secret) for member in members],
            device=self.place,
            physical_rows=memory.piece,
            noise=self.noise,
            places=places,
        )
        granule = stacks.granule(self.schedule, kernel, memory.row_bytes, len(members))
        oracle.compute_at_once(memory.piece, granule)
        method: Any = self.method if members[0].own is None else Optimized(self.method)
        first = torch.stack([member.widened(size) for member in members])
        state = method.init(first.to(self.place), [member.values for member in members])
        paces = [member.paces(self.method, self.schedule) for member in members]
        checkpoint = None
        # Of noise that is placed in longer vectors no position is kept: it would be drawn twice.
        if self.keeper is not None and len(members) == 1 and places is None:
            own = Streams(members[0].made.secret).key("checkpoint").hex()
            about = (own, method, self.schedule, members[0].values, paces[0], self.noise)
            told = repr((*about, fingerprint(data), kernel.module))
            checkpoint = Checkpoint(self.keeper, told, state, oracle)
        now = Middle(state, state.params) if checkpoint is None else checkpoint.load()
        weights = average_weights(getattr(self.method, "average", "last"), self.schedule.steps)
        level = all(pace == 1.0 for each in paces for pace in each)
        rates = torch.tensor(paces, dtype=state.params.dtype).T.contiguous()
        factors = sent(rates, self.place)
        for step in range(now.step, self.schedule.steps):
            if not level:
                oracle.pace = factors[step]
            now.state = method.update(now.state, oracle)
            params, weight = now.state.params, weights[step]
            # Chosen, not multiplied: before its last half, no earlier iterate has a part in the average.
            now.mean = params if weight == 1.0 else now.mean + weight * (params - now.mean)
            now.step = step + 1
            now.history.append(method.report(now.state))
            if on_step is not None:
                on_step(step, now.history[-1])
            if step in self.snapshots_at:
                now.snapshots[step] = now.mean.detach().to("cpu", copy=True)
                if self.look is not None and len(members) == 1:
                    self.look(step, now.snapshots[step][0])
            if checkpoint is not None and now.step < self.schedule.steps:
                checkpoint.after(now)
        transcripts = oracle.transcripts()
        report = {name: column.cpu() for name, column in now.report.items()}
        found = []
        for row, member in enumerate(members):
            params = member.narrowed(now.mean[row])
            trained = copy_model(member.made.model)
            load_params(trained, params)
            found.append(
                Outcome(
                    member.position,
                    params,
                    {name: column[:, row] for name, column in report.items()},
                    transcripts[row],
                    int(oracle.unusable[row]),
                    {step: member.narrowed(kept[row]) for step, kept in now.snapshots.items()},
                    trained,
                )
            )
        return found


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, into which trained weights are loaded; what is frozen may be shared.

    The model itself keeps its first weights. A list that ``build`` fills would else hold the trained weights
    of every trial, of which one alone is released.
    """
    copy, _ = fresh(model, trained=True)
    first = {id(p) for p in model.parameters() if p.requires_grad}
    if any(id(p) in first for p in copy.parameters()):  # a scripted part is shared by such a copy
        copy = deepcopy(model)
    return copy


class _OfThread(UserDict[Hashable, BatchedKernel], threading.local):
    """Kernels by what they are for; of each thread its own, as a kernel's model serves one training."""


_kernels = _OfThread()


def choose_kernel(
    module: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    device: torch.device,
    *,
    precision: str = "float32",
    program: Hashable = None,
) -> Kernel:
    """Return the batched kernel, or one that takes record after record for a model that it cannot take.

    It is checked on made-up records of the domain of ``data``.
    """
    x, y = data.like
    classes, low = targets_are_classes(data), _LOW[precision]
    if program is None:
        found = program_of(module, loss_of, x, y, data.domain)
        program = None if found is None else found.digest
    key = (program, x.shape, x.dtype, y.shape, y.dtype, device, classes, low, registered())
    known = _kernels.get(key)
    if known is not None and same_fixed(module, known.module):
        return known

    def made() -> nn.Module:
        return fresh(module, trained=True)[0]

    try:
        kernel = BatchedKernel(
            made,
            loss_of,
            x=x,
            y=y,
            device=device,
            all_classes=classes,
            low=low,
            domain=data.domain,
        )
    except NotBatchableError as reason:
        name = type(module).__name__
        if low is not None:
            raise InvalidInputError(
                "precision",
                precision,
                f"does not suit {name} ({reason})",
                "Leave it out: float32 is the default.",
            ) from reason
        # On a batch, its way might hang on other records: a scale that is read where a pixel is above 1.
        single = OneByOneKernel(made, loss_of, x=x, y=y, device=device, domain=data.domain)
        say_once(
            f"{name} cannot be trained in stacks ({reason}): each record is "
            "computed in a pass of its own, which costs many times as much."
        )
        return single
    if slow := kernel.plan.multiplied:
        held = sum(4e-6 * kernel.layout.shapes[name].numel() for name in slow)
        say_once(
            f"{type(module).__name__}: no rule covers how {', '.join(slow)} are used, so every record of a "
            f"batch has a copy, {held:.3g} MB, and products of its own. privtune.norms_of registers a rule "
            "for a layer."
        )
    if program is not None:
        _kernels.pop(key, None)
        while len(_kernels) >= _KERNELS:
            _kernels.pop(next(iter(_kernels)))
        _kernels[key] = kernel
    return kernel


_NARROW = 2**15  # weights of a model whose steps take as long as those of a narrower one


@contextmanager
def initialisation(streams: Streams) -> Iterator[None]:
    """Seed torch's global generator for one trial while its model is made, then put it back.

    **Guarantee**: what is drawn inside depends on the trial's secret alone, however many threads run
    trials: they take turns.
    """
    with GLOBAL_GENERATOR:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(streams.seed("initialisation"))
        try:
            yield
        finally:
            torch.set_rng_state(before)


@dataclass(frozen=True)
class OfViews:
    """The loss of a record as the mean over augmented views of it, whose gradients it so averages.

    **Guarantee**: a function of one record, and clipped as any loss: the sensitivity of the sum, and the
    event, are those of a training without augmentation.

    References:
        De et al. 2022, arXiv 2204.13650, section 3: averaged before they are clipped.
    """

    loss_of: LossOf
    augment: Callable[[torch.Tensor], torch.Tensor]
    views: int
    together: bool = False  # whether the loss takes all views as one batch

    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean over the views, shape ``[1]``; each place of a draw has numbers of its own."""
        views = [self.augment(x) for _ in range(self.views)]
        for view in views:
            if not torch.is_tensor(view) or (view.shape, view.dtype) != (x.shape, x.dtype):
                raise InvalidInputError(
                    "augment",
                    tuple(view.shape) if torch.is_tensor(view) else type(view).__name__,
                    f"must return inputs as it is given them: {tuple(x.shape)} of {x.dtype}",
                )
        if self.together:
            return self.loss_of(model, torch.cat(views), y.expand(len(views), *y.shape[1:])).mean(
                dim=0, keepdim=True
            )
        return torch.stack([self.loss_of(model, view, y) for view in views]).mean(dim=0)

    def fastest(self, model: nn.Module, data: TensorData) -> OfViews:
        """Return it with all views in one batch, where made-up ones have the losses of each by itself."""
        device = next(model.parameters()).device
        domain = find_domain_of(model, self, data)
        xs, ys = (part[0] for part in domain.draw(*data.like, (1, self.views), device))
        try:
            with (
                GLOBAL_GENERATOR,
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                evaluating(model),
            ):
                found = self.loss_of(fresh(model)[0], xs, ys)
                pairs = zip(torch.split(xs, 1), torch.split(ys, 1), strict=True)
                each = torch.cat([self.loss_of(fresh(model)[0], *pair) for pair in pairs])
            same = torch.allclose(found, each, rtol=1e-3, atol=1e-4) and found.shape == each.shape
        except Exception:  # whatever a loss of one record makes of several
            same = False
        return replace(self, together=same)


@dataclass(frozen=True, eq=False)
class Made:
    """A candidate that is ready to be trained."""

    model: nn.Module
    secret: bytes
    values: Mapping[str, Any]  # the method's hyperparameters, and its own schedule and warmup
    optimizer: torch.optim.Optimizer | None = None  # None where the method steps by itself
    scheduler: LRScheduler | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the inputs of one record
    views: int = 1

    def trained_on(self, loss_of: LossOf, data: TensorData) -> LossOf:
        """Return the loss that it is trained on, for records like those of ``data``."""
        if self.augment is None:
            return loss_of
        return OfViews(loss_of, self.augment, self.views).fastest(self.model, data)


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate of a group: which of all it is, from 0, and its optimizer, if it has one."""

    position: int
    made: Made
    loss_of: LossOf
    own: Own | None = None
    places: torch.Tensor | None = None  # of its parameters in the group's model, if that is wider
    domain: Domain | None = None  # the numbers that its loss accepts, if they are known

    @property
    def values(self) -> dict[str, Any]:
        """What the method is told of it; an optimizer is one of its hyperparameters."""
        own = {} if self.own is None else {OPTIMIZER: self.own}
        return {n: v for n, v in {**self.made.values, **own}.items() if n not in SEARCHED}

    def paces(self, method: Method, schedule: Schedule) -> list[float]:
        """Return the factors on its learning rate, one a step."""
        factors = rate_factors(method, self.made.values, schedule)
        own = (1.0,) * schedule.steps if self.own is None else self.own.paces
        return [a * b for a, b in zip(factors, own, strict=True)]

    def widened(self, size: int) -> torch.Tensor:
        """Return its first parameters among those of the group's model, ``[size]``, zeros elsewhere."""
        flat, places = flatten_params(self.made.model), self.places
        return flat if places is None else flat.new_zeros(size).index_copy_(0, places, flat)

    def narrowed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its own parameters on the CPU, of those of the group's model."""
        flat = flat.detach().to("cpu", copy=True)
        return flat if self.places is None else flat[self.places]


@dataclass(eq=False)
class Group:
    """Candidates whose passes one kernel, that of the first, computes, and whose steps one call takes."""

    key: tuple[Hashable, ...]  # digest of the program, and what steps them
    program: Program | None  # None where a pass cannot be told by value
    members: list[Member]

    @property
    def model(self) -> nn.Module:
        """The model of the first."""
        return self.members[0].made.model

    @property
    def size(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def holds(self, other: Group) -> bool:
        """Say whether the wider passes of this group compute those of another, and soon enough."""
        if self.program is None or other.program is None or self.key[1:] != other.key[1:]:
            return False
        if self.size > max(_NARROW, 2 * other.size) or not same_fixed(self.model, other.model):
            return False
        return self.program.holds(other.program)

    def add(self, other: Group) -> None:
        """Take the candidates of another group, filled up with zeros."""
        wide, narrow = Layout(self.model), Layout(other.model)
        every = torch.arange(wide.size)
        views, shapes = wide.unflatten(every), narrow.shapes.items()
        parts = [views[name][tuple(slice(n) for n in shape)].flatten() for name, shape in shapes]
        places = torch.cat(parts)
        own = [m if m.places is not None else replace(m, places=every) for m in self.members]
        self.members = [*own, *(replace(member, places=places) for member in other.members)]


def put(groups: list[Group], member: Member, program: Program | None) -> int:
    """Put a candidate beside those that are alike; return the bytes that it holds."""
    model, own = member.made.model, member.own
    key = (program and program.digest, "the method" if own is None else own.kind)
    for group in groups if program is not None else ():
        if group.key == key and same_fixed(group.model, model):
            _share_fixed(model, group.model)
            group.members.append(member)
            return sum(p.nbytes for p in model.parameters() if p.requires_grad)
    groups.append(Group(key, program, [member]))
    return sum(p.nbytes for p in model.parameters())


def with_narrow(groups: list[Group], method: Method) -> list[Group]:
    """Let wide models take narrow ones into their stacks, where nothing looks at all weights at once."""
    if not isinstance(method, FixedDPSGD | DPAdam | AutomaticClipping):
        return groups
    found: list[Group] = []
    for group in sorted(groups, key=lambda group: -group.size):
        plain = all(member.own is None or member.own.widens for member in group.members)
        wide = next((wide for wide in found if wide.holds(group)), None) if plain else None
        if wide is None:
            found.append(group)
        else:
            wide.add(group)
    return found


def _share_fixed(model: nn.Module, like: nn.Module) -> None:
    """Let what is frozen lie in memory once: it is the same, and nothing writes to it."""
    same = dict(like.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = same[name].data


def check_model(model: nn.Module) -> None:
    """Refuse a model of which something would be left out, or trained apart from what it belongs to."""
    layout = Layout(model)
    trained = {n: p for n, p in model.named_parameters() if n in layout.shapes}
    for name, parameter in trained.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidInputError(
                "model",
                name,
                "must have no hook on its gradient: gradients of single records never pass there",
                "Remove the hook; clipping bounds each record.",
            )
    held = {p.untyped_storage().data_ptr() for p in trained.values() if p.numel()}
    others: list[tuple[str, torch.Tensor]] = [*model.named_buffers()]
    others += [(n, p) for n, p in model.named_parameters() if n not in trained]
    others += [(n, v) for m in model.modules() for n, v in vars(m).items() if torch.is_tensor(v)]
    for name, tensor in others:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held:
            raise InvalidInputError(
                "model",
                name,
                "must not be a view of a parameter that is trained: it would stay as it is now",
                "Take it from the parameter in forward.",
            )
