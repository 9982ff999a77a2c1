"""Training of candidates in stacks: groups, kernels, steps, checkpoints and outcomes."""

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
    full_float32,
    refuse_autocast,
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
from privtune.training.mechanism.plain_models import structure_of
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.scoring import evaluating
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods.method import check_correlation
from privtune.training.methods.rate_schedule import SEARCHED, average_weights, rate_factors

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.training.methods import Method

_HELD_BYTES = 512 * 2**20  # of models that wait to be trained together
_COMPARED = 2  # made-up records whose gradients are compared before and after a training
_KERNELS = 4  # what was captured for a model is kept for the next trial of it
_LOW = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class TrainedCandidate:
    """The result of training one candidate; only ``params``, ``report``, ``module`` depend on releases alone.

    ``unusable`` is a count of private records to which no noise was added: it stays inside the trust
    boundary.

    Attributes:
        position: Which of the candidates it is, from 0, in the order in which they were handed over.
        report: What the method says of its steps, by name, shape ``[T]`` each.
        transcript: What the oracle charged for this candidate, checked against the method's event.
        unusable: Inclusions of records that counted as zero, since their gradient or loss was not
            finite.
        snapshots: The averaged parameters ``[P]`` after some steps, by the step's number from 0.
        module: A copy of the candidate's model with the final parameters loaded.
    """

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

    The unit of work is a *stack*: K candidates whose models compute alike, as one tensor ``[K, P]``
    that a method steps as a whole. A training groups candidates by what their passes do, cuts the
    groups into stacks that fit into the caches, and runs these side by side.

    Attributes:
        method: The steps, and what they are charged; the same for all candidates.
        schedule: Public numbers of the training: steps, records, sampling rate.
        loss_of: The loss of one record.
        data: The private records, on any device.
        device: Where to train, ``"auto"`` for CUDA where there is one.
        stack: Most candidates that are trained as one tensor; ``"auto"`` by the memory model.
        precision: The numbers that passes run in; sums and noise are in the parameters' own type.
        noise: Where noise comes from, and what is done about its lowest bits.
        on_step: Called after every step of every stack; it sees reports, which are functions of
            releases.
        snapshots_at: Steps after which parameters are noted, from 0.
        keeper: Where a checkpoint of a candidate lies.
        on_snapshot: Called with a step's number and its snapshot ``[P]``.

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
    on_snapshot: Callable[[int, torch.Tensor], object] | None = (
        None  # likewise; what it raises ends it
    )

    def __post_init__(self) -> None:
        """Refuse autocast, and correlated noise that the method or the schedule is not for, before a draw."""
        refuse_autocast()
        bands = self.schedule.bands
        check_correlation(self.method, bands)
        if self.noise is not None and self.noise.over(bands) != self.noise:
            raise InvalidInputError(
                "noise",
                self.noise.words,
                f"must be correlated over {bands} steps, as the schedule is",
                "Take noise.over(schedule.bands).",
            )

    def of(self, candidates: Iterable[TrainableCandidate]) -> Iterator[TrainedCandidate]:
        """Train candidates in groups that compute alike; yield their outcomes, in any order.

        The iterable makes models one after the other, and they wait until there are enough for full
        stacks. Those that wait are bounded in bytes: a study of a thousand large models would else
        hold all of them at once. What a user did wrong (a hook, an optimizer that a method cannot
        use) is refused here, while the candidate is read, and not in the middle of a stack.

        Args:
            candidates: Read lazily; each is checked before the next one is made.

        Yields:
            Outcomes, in the order of the groups; ``position`` says which candidate each belongs to.
        """
        waiting = list[Group]()
        size = 0
        programs: dict[Hashable, tuple[Domain, Program | None]] = {}
        for position, each in enumerate(candidates):
            check_model(each.model)
            loss_of = each.trained_on(self.loss_of, self.records)
            optimizer = None
            if each.optimizer is not None:
                Optimized(self.method)
                optimizer = Own.of(
                    each.optimizer,
                    each.model,
                    each.scheduler,
                    self.schedule.steps,
                )
            domain, program = self._record(each.model, loss_of, programs)
            member = Member(position, each, loss_of, optimizer, domain=domain)
            size += put(waiting, member, program)
            if size > _HELD_BYTES:
                yield from self._of_groups(waiting)
                waiting = []
                size = 0
        yield from self._of_groups(waiting)

    def _record(
        self,
        model: nn.Module,
        loss_of: LossOf,
        programs: dict[Hashable, tuple[Domain, Program | None]],
    ) -> tuple[Domain, Program | None]:
        """Return the domain of a model and its loss, and their program, None if it has none.

        Models of torch's own layers and of one structure have one program: it is recorded for the first.

        Args:
            model: Of one candidate.
            loss_of: The loss that it is trained on.
            programs: By structure, of earlier candidates with the training's own loss; added to.
        """
        structure = None
        if loss_of is self.loss_of:  # else it is this candidate's own
            structure = structure_of(model)
        if structure is not None and structure in programs:
            return programs[structure]
        domain = find_domain_of(model, loss_of, self.records)
        program = program_of(model, loss_of, *self.records.like, domain)
        if structure is not None:
            programs[structure] = (domain, program)
        return domain, program

    def alike(self, candidates: Iterable[TrainableCandidate]) -> list[TrainedCandidate]:
        """Train candidates whose models one function made, as one group; return their outcomes in order.

        No program is recorded to compare the models, as ``of`` does: the caller says that one
        function made them. That may still draw what is frozen, and one kernel would then train all
        candidates on the frozen part of the first. So shapes and frozen tensors are compared.
        """
        members = []
        for position, each in enumerate(candidates):
            members.append(Member(position, each, self.loss_of))
        first = members[0].made.model
        for member in members[1:]:
            model = member.made.model
            if Layout(model).shapes != Layout(first).shapes or not same_fixed(model, first):
                raise InvalidInputError(
                    "model",
                    type(model).__name__,
                    "must have the same shape, frozen parameters and buffers every time it is made",
                    "Load what is frozen from a file, or seed it.",
                )
        return self.of_group(Group((None,), None, members))

    def _of_groups(self, groups: list[Group]) -> Iterator[TrainedCandidate]:
        """Train groups one after the other, after narrow models have joined the stacks of wide ones.

        Groups run one after the other, since each may have a kernel, and a peak of memory, of its
        own.
        """
        for group in with_narrow(groups, self.method):
            yield from self.of_group(group)

    def of_group(self, group: Group) -> list[TrainedCandidate]:
        """Train the candidates of one group in stacks; return their outcomes in order.

        Everything that hangs on the model alone happens once, here: the kernel is planned and
        checked, public facts of the loss are found, memory is divided, and the loss is watched for
        what it keeps. The stacks then only step.

        At the end each transcript is compared with the method's event in both directions: it must
        hold no release beyond the event (``check_within``: nothing was spent that was not charged),
        and all of it (``check_whole``: what is missing may have gone another way than through the
        oracle).
        """
        # Around the kernel's check, too: it compares the passes of torch's layers with the rules.
        with full_float32():
            return self._of_group(group)

    def _of_group(self, group: Group) -> list[TrainedCandidate]:
        """Plan, check and divide the training of one group, and run its stacks."""
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
        memory = stacks.memory_model(kernel, longest=longest, noise_rows=self._noise_rows)
        stack = check_stack(self.stack)
        cores = torch.get_num_threads()
        division = divide(
            kernel,
            memory,
            len(group.members),
            stack=None if stack == "auto" else stack,
            cores=cores if self.place.type == "cpu" else 1,
        )
        members = iter(group.members)
        jobs = []
        for size in division.sizes:
            stack_of_members = [next(members) for _ in range(size)]
            jobs.append(partial(self._run, stack_of_members, kernel, memory, data))
        with remembering_nothing(check):
            results = side_by_side(jobs, division.threads, self.on_step)
            outcomes = list(chain(*results))
        event = self.method.event(self.schedule)
        for outcome in outcomes:
            outcome.transcript.check_within(event)
            outcome.transcript.check_whole(event)
            outcome.transcript.check_bands(self.schedule.bands)
        return outcomes

    @property
    def _noise_rows(self) -> int:
        """How many vectors of float32 a candidate's earlier noise takes, which later noise is made of."""
        rows = min(self.schedule.bands, self.schedule.steps) - 1
        is_wide = self.noise is not None and self.noise.wide
        return 2 * rows if is_wide else rows

    def _memory_check(
        self,
        model: nn.Module,
        loss_of: LossOf,
        data: TensorData,
    ) -> MemoryCheck:
        """Return a check that compares a loss's gradients on the same records before and after training.

        A loss that keeps something of a record, such as a running mean, would carry it from one
        record's gradient into the next one's, beyond all clipping. The same gradients are computed
        before and after the training, on a copy of the model with its first weights: if they differ,
        something was kept.

        Args:
            model: With its first weights.
            loss_of: The loss that is trained on.
            data: Records, with the domain of the loss.
        """
        # Two that are made up, and a real one: a loss may remember where inputs look real.
        shape = (1, _COMPARED)
        xs, ys = data.domain.draw(*self.records.like, shape, self.place)
        inputs = torch.split(xs[0], 1)
        targets = torch.split(ys[0], 1)
        middle = torch.tensor([len(data) // 2], device=self.place)
        records = [*zip(inputs, targets, strict=True)]
        records.append(data.take(middle))
        copy, _ = fresh(model, trained=True)
        copy = copy.to(self.place)
        evaluate = partial(gradients_of, loss_of, copy, records)
        return MemoryCheck("The loss", (loss_of, model), evaluate)

    @cached_property
    def place(self) -> torch.device:
        """The device to train on.

        ``"auto"`` is looked up once a training, so that all of its groups lie on one device.
        """
        return torch.device(check_device(self.device))

    @cached_property
    def records(self) -> TensorData:
        """The private records, on the device of the training.

        They are sent to the device once for all groups, not once a stack.
        """
        return self.data.to(self.place)

    def _run(
        self,
        members: Sequence[Member],
        kernel: Kernel,
        memory: stacks.Memory,
        data: TensorData,
        on_step: OnStep | None,
    ) -> list[TrainedCandidate]:
        """Train one stack from its first weights, or from a checkpoint, to its end.

        Row k of every tensor is candidate k's: parameters are ``[K, P]``, with P of the kernel's
        model, and a narrower candidate lies at its ``places`` there, with zeros beside them. Each has
        its own streams, so neither its sample nor its noise hangs on who is in the stack.

        The loop holds no data: ``method.update`` asks the oracle for releases, and the oracle
        samples, clips, adds noise and writes the transcript. The returned weights are an average of
        the iterates, ``mean += w_t (params - mean)``, which costs no privacy, as every iterate is a
        function of releases.

        Args:
            members: The candidates of the stack, of one group.
            kernel: Computes their passes.
            memory: Says how many rows of a candidate to compute at once.
            data: Records with the domain of the loss.
            on_step: Called with the number of each step, from 0, and the method's report of it.
        """
        size = kernel.layout.size
        # Of all members or of none: see ``Group.add``.
        places = [member.places for member in members if member.places is not None]
        oracle = Oracle(
            self.schedule,
            data=data,
            kernel=kernel,
            streams=[Streams(member.made.secret) for member in members],
            device=self.place,
            physical_rows=memory.piece,
            noise=self.noise,
            places=places or None,
        )
        granule = stacks.granule(
            self.schedule,
            kernel,
            memory.row_bytes,
            len(members),
        )
        oracle.compute_at_once(memory.piece, granule)
        method: Any = self.method
        if members[0].optimizer_copy is not None:
            method = Optimized(self.method)
        now = self._beginning(method, members, size)
        paces = [member.paces(self.method, self.schedule) for member in members]
        checkpoint = None
        # Of noise that is placed in longer vectors no position is kept: it would be drawn twice.
        if self.keeper is not None and len(members) == 1 and not places:
            about = self._describe(members[0], method, paces[0], data, kernel)
            checkpoint = Checkpoint(self.keeper, about, now.state, oracle)
            now = checkpoint.load()
        average = getattr(self.method, "average", "last")
        weights = average_weights(average, self.schedule.steps)
        rates = torch.tensor(paces, dtype=now.state.params.dtype)
        rates = rates.T.contiguous()  # [steps, K]
        # By the factors themselves: as float32, one just below 1 would be 1.
        level = all(all(pace == 1.0 for pace in each) for each in paces)
        factors = sent(rates, self.place)
        for step in range(now.step, self.schedule.steps):
            if not level:
                oracle.pace = factors[step]
            now.state = method.update(now.state, oracle)
            params = now.state.params
            weight = weights[step]
            # Chosen, not multiplied: before its last half, no earlier iterate has a part in the average.
            if weight == 1.0:
                now.mean = params
            else:
                now.mean = now.mean + weight * (params - now.mean)
            now.step = step + 1
            now.history.append(method.report(now.state))
            if on_step is not None:
                on_step(step, now.history[-1])
            if step in self.snapshots_at:
                now.snapshots[step] = now.mean.detach().to("cpu", copy=True)
                if self.on_snapshot is not None and len(members) == 1:
                    self.on_snapshot(step, now.snapshots[step][0])
            if checkpoint is not None and now.step < self.schedule.steps:
                checkpoint.after(now)
        return self._outcomes(members, now, oracle)

    def _beginning(self, method: Any, members: Sequence[Member], size: int) -> Middle:
        """Return the state before the first step, which nothing else keeps once a step is taken.

        Args:
            method: What steps the members.
            members: The candidates of the stack.
            size: Parameters of the kernel's model.
        """
        weights = torch.stack([member.widened(size) for member in members])
        values = [member.values for member in members]
        state = method.init(weights.to(self.place), values)
        return Middle(state, state.params)

    def _describe(
        self,
        member: Member,
        method: Any,
        paces: Sequence[float],
        data: TensorData,
        kernel: Kernel,
    ) -> str:
        """Return the text that a checkpoint and a resumed training must agree on: method, data, model.

        It is compared as text with what a checkpoint says of itself. The name is derived from the
        secret, so it tells trainings apart and tells nothing about the secret; the fingerprint of the
        data makes sure that a training does not go on with records other than those that it began
        with.

        Args:
            member: The candidate, alone in its stack.
            method: What steps it.
            paces: Factors on its rate, one a step.
            data: The records that it is trained on.
            kernel: Of which the model is read.
        """
        name = Streams(member.made.secret).key("checkpoint").hex()
        facts = (
            name,
            method,
            self.schedule,
            member.values,
            paces,
            self.noise,
            fingerprint(data),
            kernel.module,
        )
        return repr(facts)

    @staticmethod
    def _outcomes(members: Sequence[Member], now: Middle, oracle: Oracle) -> list[TrainedCandidate]:
        """Return the outcome of each candidate of a stack, its weights loaded into a copy of its model.

        A weight that lies beside a narrow candidate's places is zero and is cut away here, so that
        what comes out has the shapes of the candidate's own model.

        Args:
            members: The candidates, in the order of the stack's rows.
            now: The training after its last step.
            oracle: Which has their transcripts, and counted unusable records.
        """
        transcripts = oracle.transcripts()
        report = {name: column.cpu() for name, column in now.report.items()}
        outcomes = []
        for row, member in enumerate(members):
            params = member.narrowed(now.mean[row])
            trained = copy_model(member.made.model)
            load_params(trained, params)
            history = {name: column[:, row] for name, column in report.items()}
            snapshots = {}
            for step, params_of_stack in now.snapshots.items():
                snapshots[step] = member.narrowed(params_of_stack[row])
            outcome = TrainedCandidate(
                member.position,
                params,
                history,
                transcripts[row],
                int(oracle.unusable[row]),
                snapshots,
                trained,
            )
            outcomes.append(outcome)
        return outcomes


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model for loading trained weights; frozen parameters may be shared.

    The model itself keeps its first weights. A list that ``build`` fills would else hold the trained weights
    of every trial, of which one alone is released.
    """
    copy, _ = fresh(model, trained=True)
    first = {id(p) for p in model.parameters() if p.requires_grad}
    if any(id(p) in first for p in copy.parameters()):  # a scripted part is shared by such a copy
        copy = deepcopy(model)
    return copy


class _ThreadKernels(UserDict[Hashable, BatchedKernel], threading.local):
    """Cached kernels by program, shapes and device; each thread has a cache of its own.

    A kernel puts weights into its model while it runs. Two threads that shared one would put each
    other's candidates into it.
    """


_kernels = _ThreadKernels()


def choose_kernel(
    module: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    device: torch.device,
    *,
    precision: str = "float32",
    program: Hashable = None,
) -> Kernel:
    """Return the batched kernel for a model, or a kernel for single records if it fails its check.

    It is checked on made-up records of the domain of ``data``.

    Planning and checking a kernel takes longer than many short trainings, so the last few are kept by
    everything that their plan hangs on: the digest of the recorded program, shapes and types of a
    record, device, whether targets are classes, numbers of the passes, and registered rules. Frozen
    parameters and buffers are compared by value, since the digest leaves their numbers out. Without a
    digest nothing is kept: there would be nothing to find it by.

    Which kernel it is changes speed and no privacy: both are checked, or correct by what they are. A
    person is told once of a slower way.

    Args:
        module: The model of a group's first candidate; the kernel works on a copy.
        loss_of: The loss of one record.
        data: Records, of which public facts alone are read: shapes, types, the domain.
        device: Where to run.
        precision: A key of ``_LOW``.
        program: Digest of what model and loss do, if it is known; recorded here if not.

    Raises:
        InvalidInputError: If passes in fewer digits are asked for, and the batched kernel cannot
            take the model; record after record, fewer digits would save nothing.
    """
    x, y = data.like
    classes = targets_are_classes(data)
    low = _LOW[precision]
    if program is None:
        recorded = program_of(module, loss_of, x, y, data.domain)
        if recorded is not None:
            program = recorded.digest
    key = (
        program,
        x.shape,
        x.dtype,
        y.shape,
        y.dtype,
        device,
        classes,
        low,
        registered(),
    )
    cached = _kernels.get(key)
    if cached is not None and same_fixed(module, cached.module):
        return cached

    def copied() -> nn.Module:
        """Return a copy of the model with trained parameters of its own.

        A kernel writes candidates' weights into its model. The user's own, from which the first
        parameters are read, must stay as it is.
        """
        copy, _ = fresh(module, trained=True)
        return copy

    try:
        kernel = BatchedKernel(
            copied,
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
        single = OneByOneKernel(
            copied,
            loss_of,
            x=x,
            y=y,
            device=device,
            domain=data.domain,
        )
        say_once(
            f"{name} cannot be trained in stacks ({reason}): each record is "
            "computed in a pass of its own, which costs many times as much."
        )
        return single
    _tell_of_copies(kernel, module)
    if program is not None:
        _remember(key, kernel)
    return kernel


def _remember(key: Hashable, kernel: BatchedKernel) -> None:
    """Cache a kernel under its key; drop the oldest if the cache is full."""
    _kernels.pop(key, None)
    while len(_kernels) >= _KERNELS:
        oldest = next(iter(_kernels))
        _kernels.pop(oldest)
    _kernels[key] = kernel


def _tell_of_copies(kernel: BatchedKernel, module: nn.Module) -> None:
    """Warn once which parameters are copied for every record, since no gradient rule covers them."""
    slow = kernel.plan.multiplied
    if not slow:
        return
    megabytes = [4e-6 * kernel.layout.shapes[name].numel() for name in slow]
    work = sum(megabytes)
    say_once(
        f"{type(module).__name__}: no rule covers how {', '.join(slow)} are used, so every record of a "
        f"batch has a copy, {work:.3g} MB, and products of its own. privtune.norms_of registers a rule "
        "for a layer."
    )


_NARROW = 2**15  # weights of a model whose steps take as long as those of a narrower one


@contextmanager
def initialisation(streams: Streams) -> Iterator[None]:
    """Seed torch's global generator for one trial while its model is made, then put it back.

    The seed comes from a stream of its own, so a trial's first weights tell nothing about its samples
    or its noise; 63 bits are enough here, since first weights are no secret that protects anybody.

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
class LossOverViews:
    """The mean loss of a record over augmented views of it, so that their gradients are averaged.

    A view that were a record of its own would be clipped by itself, and a record would then move the
    sum by as many bounds as it has views.

    Attributes:
        loss_of: The loss of one view.
        augment: Draws a view of the inputs ``[1, ...]`` of a record, in the same shape and type.
        views: How many of them are averaged.
        together: Whether one call of the loss on ``[views, ...]`` takes the place of ``views`` calls.

    **Guarantee**: a function of one record, and clipped as any loss: the sensitivity of the sum, and the
    event, are those of a training without augmentation.

    References:
        De et al. 2022, arXiv 2204.13650, section 3: averaged before they are clipped.
    """

    loss_of: LossOf
    augment: Callable[[torch.Tensor], torch.Tensor]
    views: int
    together: bool = False  # whether the loss takes all views as one batch

    def __call__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean loss over newly drawn views of one record, shape ``[1]``.

        Args:
            model: As the loss takes it.
            x: Inputs of one record, ``[1, ...]``.
            y: Its targets, ``[1, ...]``.
        """
        views = [self.augment(x) for _ in range(self.views)]
        for view in views:
            is_tensor = torch.is_tensor(view)
            if not is_tensor or view.shape != x.shape or view.dtype != x.dtype:
                raise InvalidInputError(
                    "augment",
                    tuple(view.shape) if is_tensor else type(view).__name__,
                    f"must return inputs as it is given them: {tuple(x.shape)} of {x.dtype}",
                )
        if self.together:
            targets = y.expand(len(views), *y.shape[1:])
            losses = self.loss_of(model, torch.cat(views), targets)
            return losses.mean(dim=0, keepdim=True)
        of_views = [self.loss_of(model, view, y) for view in views]
        losses = torch.stack(of_views)
        return losses.mean(dim=0)

    def fastest(self, model: nn.Module, data: TensorData) -> LossOverViews:
        """Return this loss with all views in one batch, if made-up views give the same losses one by one.

        One call on all views costs far less than a call for each, but it is the same only where the
        loss treats the records of a batch by themselves. That is tried on made-up records, and not
        believed.
        """
        device = next(model.parameters()).device
        domain = find_domain_of(model, self, data)
        shape = (1, self.views)
        inputs, targets = domain.draw(*data.like, shape, device)
        xs = inputs[0]
        ys = targets[0]
        try:
            with (
                GLOBAL_GENERATOR,
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                evaluating(model),
            ):
                copy, _ = fresh(model)
                together = self.loss_of(copy, xs, ys)
                losses = []
                for x, y in zip(torch.split(xs, 1), torch.split(ys, 1), strict=True):
                    copy, _ = fresh(model)
                    losses.append(self.loss_of(copy, x, y))
                alone = torch.cat(losses)
            is_close = torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
            same = is_close and together.shape == alone.shape
        except Exception:  # whatever a loss of one record makes of several
            same = False
        return replace(self, together=same)


@dataclass(frozen=True, eq=False)
class TrainableCandidate:
    """A candidate that is ready to be trained: model, secret, hyperparameters and optimizer.

    Attributes:
        model: With its first weights; it is read and never stepped, so a caller may keep it.
        secret: 32 bytes that its samples, noise, dropout and first weights are derived from.
    """

    model: nn.Module
    secret: bytes
    values: Mapping[str, Any]  # the method's hyperparameters, and its own schedule and warmup
    optimizer: torch.optim.Optimizer | None = None  # None where the method steps by itself
    scheduler: LRScheduler | None = None
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the inputs of one record
    views: int = 1

    def trained_on(self, loss_of: LossOf, data: TensorData) -> LossOf:
        """Return the loss to train on: the given one, or its mean over augmented views.

        The data is looked at for its public facts alone: shapes, types, and the domain of the loss.
        """
        if self.augment is None:
            return loss_of
        return LossOverViews(loss_of, self.augment, self.views).fastest(self.model, data)


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate of a group, with its position among all candidates and a copy of its optimizer."""

    position: int
    made: TrainableCandidate
    loss_of: LossOf
    optimizer_copy: Own | None = None
    places: torch.Tensor | None = None  # of its parameters in the group's model, if that is wider
    domain: Domain | None = None  # the numbers that its loss accepts, if they are known

    @property
    def values(self) -> dict[str, Any]:
        """The hyperparameters that the method gets, with the optimizer among them, without rate schedules.

        What is searched over beside the method, such as a schedule of the rate, is left out:
        ``paces`` turns it into factors, and a method would refuse a name that it does not know.
        """
        values = dict(self.made.values)
        if self.optimizer_copy is not None:
            values[OPTIMIZER] = self.optimizer_copy
        return {name: value for name, value in values.items() if name not in SEARCHED}

    def paces(self, method: Method, schedule: Schedule) -> list[float]:
        """Return the factors on the candidate's learning rate, one for each step of the schedule.

        There may be two schedules, one of the method's hyperparameters and one of torch's for the
        optimizer: their factors multiply. The length is ``schedule.steps``; 1.0 leaves the rate as it
        is.
        """
        factors = rate_factors(method, self.made.values, schedule)
        paces = (1.0,) * schedule.steps
        if self.optimizer_copy is not None:
            paces = self.optimizer_copy.paces
        return [a * b for a, b in zip(factors, paces, strict=True)]

    def widened(self, size: int) -> torch.Tensor:
        """Return the first parameters at their places in a vector of the group's wider model, ``[size]``.

        A weight that is filled up starts at zero, gets no gradient and no noise, and so stays at
        zero: the wide model computes what the narrow one would.
        """
        flat = flatten_params(self.made.model)
        places = self.places
        if places is None:
            return flat
        return flat.new_zeros(size).index_copy_(0, places, flat)

    def narrowed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the candidate's own parameters as a copy on the CPU, cut from the group's vector.

        Shape ``[P]`` of its own model. It is a copy: a view would keep the tensor of the whole stack
        in memory.
        """
        flat = flat.detach().to("cpu", copy=True)
        if self.places is None:
            return flat
        return flat[self.places]


@dataclass(eq=False)
class Group:
    """A group of candidates that share a kernel and are stepped together.

    Attributes:
        key: Candidates of equal keys, and of equal frozen parts, are trained as one group.
        members: At least one; the first one's model stands for all of them.
    """

    key: tuple[Hashable, ...]  # digest of the program, and what steps them
    program: Program | None  # None where a pass cannot be told by value
    members: list[Member]

    @property
    def model(self) -> nn.Module:
        """The model of the group's first candidate, which stands for all."""
        return self.members[0].made.model

    @property
    def size(self) -> int:
        """The number of trained parameters of the group's model.

        Of the model of the first, so of the widest in the group.
        """
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def holds(self, other: Group) -> bool:
        """Say whether another group can be trained in this wider model, at little extra cost.

        A wide pass costs more than a narrow one. For small models the calls cost, and not the
        numbers, so a wide pass is as good up to ``_NARROW`` weights; beyond that it may have twice as
        many at most.

        Eight MLPs of widths 16 to 128 take 3.6 times as much CPU time in stacks of their own.
        """
        if self.program is None or other.program is None:
            return False
        if self.key[1:] != other.key[1:]:
            return False
        largest = max(_NARROW, 2 * other.size)
        if self.size > largest or not same_fixed(self.model, other.model):
            return False
        return self.program.holds(other.program)

    def add(self, other: Group) -> None:
        """Add the candidates of a narrower group, with their parameters padded with zeros.

        Each narrow parameter lies in the corner ``[:n1, :n2, ...]`` of the wide one of its name,
        which is where ``Program.holds`` has shown that filling up with zeros changes nothing. The
        group's own members get places as well, all of them in order: noise is then drawn for each by
        its own size, and a wide candidate's noise is the same whether narrow ones are beside it or
        not.
        """
        wide = Layout(self.model)
        narrow = Layout(other.model)
        every = torch.arange(wide.size)
        views = wide.unflatten(every)
        parts = []
        for name, shape in narrow.shapes.items():
            corner = tuple(slice(n) for n in shape)
            parts.append(views[name][corner].flatten())
        places = torch.cat(parts)
        members = []
        for member in self.members:
            if member.places is None:
                members.append(replace(member, places=every))
            else:
                members.append(member)
        for member in other.members:
            members.append(replace(member, places=places))
        self.members = members


def put(groups: list[Group], member: Member, program: Program | None) -> int:
    """Add a candidate to the group that computes alike, or to a new one; return the bytes that it holds.

    Only the trained weights are counted for a candidate that joins others: what is frozen it shares.

    Args:
        groups: Added to, or one of them is.
        member: The candidate.
        program: What its pass does; None where that cannot be told by value.
    """
    model = member.made.model
    optimizer = member.optimizer_copy
    stepper = "the method" if optimizer is None else optimizer.kind
    key = (program and program.digest, stepper)
    for group in groups:
        # A pass that cannot be told by value is like no other.
        if program is not None and group.key == key and same_fixed(group.model, model):
            _share_fixed(model, group.model)
            group.members.append(member)
            return sum(p.nbytes for p in model.parameters() if p.requires_grad)
    groups.append(Group(key, program, [member]))
    return sum(p.nbytes for p in model.parameters())


def with_narrow(groups: list[Group], method: Method) -> list[Group]:
    """Merge groups of narrow models into wide ones, if the method steps each weight by itself.

    A method says whether it steps each weight by its own gradient (``steps_by_weight``). One that takes a
    mean over all weights, or counts them, would see those that are filled up with zeros, and its steps would
    hang on the width of the stack. The same holds for an optimizer whose rule moves a weight that has no
    gradient.

    Wide groups come first, so that every narrow one meets all that could hold it.
    """
    if not method.steps_by_weight:
        return groups
    result: list[Group] = []
    for group in sorted(groups, key=lambda group: -group.size):
        optimizers = [
            member.optimizer_copy for member in group.members if member.optimizer_copy is not None
        ]
        wide = None
        if all(optimizer.widens for optimizer in optimizers):
            holders = (candidate for candidate in result if candidate.holds(group))
            wide = next(holders, None)
        if wide is None:
            result.append(group)
        else:
            wide.add(group)
    return result


def _share_fixed(model: nn.Module, like: nn.Module) -> None:
    """Share the frozen parameters of an equal model, so that memory holds them once.

    A stack of K fine-tuned language models would else hold K copies of the frozen one.
    """
    same = dict(like.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = same[name].data


def check_model(model: nn.Module) -> None:
    """Refuse a model with hooks on trained parameters, or with tensors that share their memory.

    A per-sample gradient is formed outside of ``backward``, so a hook on a parameter would never be
    called: what the user meant by it would be lost without a word. A buffer or frozen parameter that
    shares memory with a trained one would keep its first values, as the kernel trains other tensors
    in its place.
    """
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
    storages = {p.untyped_storage().data_ptr() for p in trained.values() if p.numel()}
    others: list[tuple[str, torch.Tensor]] = [*model.named_buffers()]
    for name, parameter in model.named_parameters():
        if name not in trained:
            others.append((name, parameter))
    for part in model.modules():
        for name, value in vars(part).items():
            if torch.is_tensor(value):
                others.append((name, value))
    for name, tensor in others:
        if tensor.layout is not torch.strided:
            continue
        if tensor.untyped_storage().data_ptr() in storages:
            raise InvalidInputError(
                "model",
                name,
                "must not be a view of a parameter that is trained: it would stay as it is now",
                "Take it from the parameter in forward.",
            )
