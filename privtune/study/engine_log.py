"""A log of what Opacus does in a declared trial, to compare its training with the charge.

Opacus' accountant notes what its optimizer is told. It knows neither which loader the batches came from
nor what else moved the parameters: a loop over the old ``DataLoader`` gives the same history as the right
one. So a trial notes what happens, at four places:

- ``PrivacyEngine.make_private`` (``make_private_with_epsilon`` calls it): the optimizer and the loader that
  it returned;
- Opacus' Poisson sampler: the number of records of each batch that it drew;
- that optimizer, before its step: how many records its gradients are of, with which noise and norm;
- torch's own hook on every optimizer, and its backward passes: what is trained beside the engine.

Methods are replaced on Opacus' classes because a script makes its engine where it likes, and they are put
back when the trial ends; a script that imports Opacus late is met by an import hook, so that nothing here
imports it. Trials of a process run one after the other (``GLOBAL_GENERATOR``), and what other threads do
concerns other parameters and samplers, which are told apart by identity.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from privtune.study.declared_data import is_same_data
from privtune.study.replacement import replace_attribute

_ENGINE = "opacus.privacy_engine"
_SAMPLER = "opacus.utils.uniform_sampler"
_OWNER = "_privtune_trial"  # on parameters: the mark of the trial that stepped on them
_SAME = 1e-9

CHECKED = "checked: "
_EVERYTHING_AGREES = (
    CHECKED
    + "Opacus sampled {data} at the charged rate, and its noise, steps and batches equal the charge"
)
_DECLARED_DATA = "the declared data set"
_DECLARED_SIZE = "a data set of the declared size"
_TRAINED_BESIDE = (
    "Opacus' steps equal the charge, but {what} in the same trial, and nothing saw on what"
)


@dataclass(frozen=True)
class ChargedTraining:
    """The noise, sampling rate, steps and data that a trial is charged for.

    Attributes:
        noise_multiplier: Noise over clipping norm of each step, above 0.
        sample_rate: Probability with which a record joins each sample, in (0, 1].
        steps: Number of steps.
        records: Number of declared training records; None where nothing declares it.
        data: The declared data set; None where it is not at hand.
        seed: The trial's secret, with which a generator may be seeded.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    records: int | None
    data: Any
    seed: int

    @property
    def is_full_batch(self) -> bool:
        """Whether every step takes all records, so that nothing is sampled."""
        return self.sample_rate == 1.0


_Function = Callable[..., Any]
_Draw = Callable[[Any], Iterator[Any]]  # a sampler's __iter__


@dataclass(eq=False)
class BatchDraws:
    """The sizes of the batches that a sampler drew, pass by pass, and how far the steps have used them.

    A step uses the next batch of a pass, or the first batch of a later pass: a loop may end early, and a
    pass may serve an evaluation. A pass is drawn ahead of its steps where workers or Trainers prefetch.
    """

    passes: list[list[int]] = field(default_factory=list)
    # Where the next step may draw from: the number of a pass, and the position in it.
    _places: set[tuple[int, int]] = field(default_factory=lambda: {(-1, 0)})

    def use(self, size: int) -> bool:
        """Use the next drawn batch of ``size`` records for a step; return whether there is one.

        Several batches may have the size: all places that a right loop could be at are followed.

        Args:
            size: Number of records that the step's gradients are of.
        """
        places: set[tuple[int, int]] = set()
        for number, position in self._places:
            sizes = self.passes[number] if number >= 0 else []
            if position < len(sizes) and sizes[position] == size:
                places.add((number, position + 1))
        pass_numbers = [number for number, _ in self._places]
        earliest = min(pass_numbers, default=len(self.passes))
        for number in range(earliest + 1, len(self.passes)):
            first_sizes = self.passes[number][:1]
            if first_sizes == [size]:
                places.add((number, 1))
        self._places = places
        return bool(places)


@dataclass(eq=False)
class PrivateTraining:
    """The objects that one ``make_private`` returned, and the steps of its optimizer.

    Args:
        engine: The ``PrivacyEngine``.
        module: The model as ``make_private`` returned it.
        optimizer: Opacus' optimizer.
        loader: The loader that it returned.
        bare_loader: The loader that it was given.
    """

    engine: Any
    module: Any
    optimizer: Any
    loader: Any
    bare_loader: Any
    draws: BatchDraws = field(default_factory=BatchDraws)
    steps: int = 0
    noise_multipliers: set[float] = field(default_factory=set)
    mistake: str = ""
    may_step: bool = False

    def __post_init__(self) -> None:
        self._batch_size = self.optimizer.expected_batch_size
        self._records: int | None = 0
        self._norms: list[list[float]] = []
        self._is_clipped = False

    @property
    def parameters(self) -> list[object]:
        """The parameters of the model, with those of the optimizer."""
        module = getattr(self.module, "_module", self.module)
        parameters = list(module.parameters())
        for group in self.optimizer.param_groups:
            parameters.extend(group["params"])
        return parameters

    @property
    def is_ghost(self) -> bool:
        """Whether the model clips by ghost clipping, and the optimizer only sums and adds noise."""
        return hasattr(self.optimizer, "accumulate")

    @property
    def samplers(self) -> list[object]:
        """The samplers that may draw batches: the loader's, and a given loader's if it is a Poisson one.

        Opacus' own data module of Lightning has such a loader, which the Trainer goes through.
        """
        samplers = [self.loader.batch_sampler]
        if isinstance(self.bare_loader.batch_sampler, _poisson_sampler()):
            samplers.append(self.bare_loader.batch_sampler)
        return samplers

    def note_gradients(self) -> None:
        """Add the records whose gradients are about to be summed to the step's count."""
        size = _count_records(self.optimizer)
        if size is None or self._records is None:
            self._records = None  # once unknown, unknown for the whole step
        else:
            self._records += size
        self._norms.append(_numbers(self.optimizer.max_grad_norm))
        if self.is_ghost and not self._is_clipped:
            self.mistake = self.mistake or (
                "ghost clipping has clipped nothing: call backward on the loss of the criterion that "
                "make_private returned"
            )
        self._is_clipped = False

    def note_clipping(self) -> None:
        """Record that ghost clipping has computed the weights of a batch."""
        self._is_clipped = True

    def note_step(self) -> None:
        """Compare a finished step with the batch that was drawn for it, and record the first mistake.

        The first mistake stays: later ones often follow from it.
        """
        optimizer = self.optimizer
        records = self._records
        norms = self._norms
        self._records = 0
        self._norms = []
        self.steps += 1
        self.may_step = True
        self.noise_multipliers.add(float(optimizer.noise_multiplier))
        is_a_batch = records is not None and self.draws.use(records)
        if not (is_a_batch or self._takes_every_record(records)):
            self.mistake = self.mistake or (
                f"step {self.steps} used gradients of {_of_records(records)}, and this is no batch whose "
                "turn it was: each step takes one batch, whole and once, of the loader that make_private "
                "returned (the loop over the old loader is the commonest mistake)"
            )
        if optimizer.expected_batch_size != self._batch_size:
            self.mistake = self.mistake or (
                f"expected_batch_size was changed from {self._batch_size} to "
                f"{optimizer.expected_batch_size} after make_private"
            )
        clipped_to = [*norms, *self._norms_of_module()]
        noised_to = _numbers(optimizer.max_grad_norm)
        if not all(_is_same(norm, noised_to) for norm in clipped_to):
            self.mistake = self.mistake or (
                "max_grad_norm was changed between the clipping of a batch and its noise"
            )

    def _norms_of_module(self) -> list[list[float]]:
        """Return the clipping norms of a ghost-clipping model; empty for other models."""
        if not self.is_ghost:
            return []
        return [_numbers(self.module.max_grad_norm)]

    def _takes_every_record(self, records: int | None) -> bool:
        """Return whether a step took the whole data set, which needs no sampling."""
        if len(self.loader) != 1:
            return False
        return records == len(self.loader.dataset)

    def find_mistake(self, charged: ChargedTraining) -> str:
        """Return the first difference from the charge in words; empty if there is none.

        What was seen in a step comes last: a wrong data set or sampler explains it.
        """
        data = self.loader.dataset
        if charged.records is not None and len(data) != charged.records:
            return (
                f"make_private was given a data set of {len(data)} records, but {charged.records} are "
                "declared"
            )
        if charged.data is not None and not is_same_data(charged.data, data):
            return "make_private was given another data set than the declared one"
        if not charged.is_full_batch:
            for sampler in self.samplers:
                mistake = self._find_other_sampling(sampler, charged)
                if mistake:
                    return mistake
        return self._find_known_seed(charged) or self.mistake

    def _find_other_sampling(self, sampler: object, charged: ChargedTraining) -> str:
        """Return in words how a sampler differs from the charged sampling; empty if it does not."""
        if not isinstance(sampler, _poisson_sampler()):
            return (
                "its loader draws no Poisson samples (poisson_sampling=False, or several processes), which "
                "the charge is for"
            )
        rate = 1.0 / len(sampler)
        # 1 / (1 / 93) rounds to less than 93: Opacus then samples at 1/93, and accounts for 1/92.
        most = rate * (1.0 + _SAME)
        if not is_close(rate, charged.sample_rate) or sampler.sample_rate > most:
            return (
                f"its sampler draws each record with probability {sampler.sample_rate:.6g}, but "
                f"{charged.sample_rate:.6g} was charged"
            )
        return ""

    def _find_known_seed(self, charged: ChargedTraining) -> str:
        """Return in words which generator has a seed other than the trial's secret; empty if none."""
        generators = [("noise_generator", self.optimizer.generator)]
        for sampler in self.samplers:
            generators.append(("the loader's generator", getattr(sampler, "generator", None)))
        for name, generator in generators:
            # Who knows a seed subtracts the noise, or knows the sample: then nothing is amplified.
            if generator is None:
                continue
            if getattr(self.engine, "secure_mode", False):
                continue
            if generator.initial_seed() != charged.seed:
                return (
                    f"{name} has a seed of its own, which is no secret and the same in every trial; leave "
                    "it out, or seed it with trial.seed"
                )
        return ""


@dataclass(eq=False)
class EngineLog:
    """A log of one trial's private trainings, other optimizer steps and backward passes.

    Attributes:
        trainings: What each ``make_private`` of the trial returned, in order.
    """

    trainings: list[PrivateTraining] = field(default_factory=list)
    _mistake: str = ""
    _bare_steps: dict[int, Any] = field(default_factory=dict)
    _bare_passes: int = 0  # backward passes that no step of an engine's followed
    _stepping: dict[int, Any] = field(default_factory=dict)  # by thread
    _thread: int = 0
    _trial_mark: object = field(
        default_factory=object
    )  # an id would be used again by a later trial

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record what Opacus and torch do in a ``with`` block, and restore everything replaced for that."""
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._thread = threading.get_ident()
        with ExitStack() as undo:
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for name in ("backward", "grad"):
                wrapper = self._with_backward(getattr(torch.autograd, name))
                replace_attribute(undo, torch.autograd, name, wrapper)
            replace_all = functools.partial(self._replace_methods, undo)
            if _ENGINE in sys.modules:
                replace_all(sys.modules[_ENGINE])
            else:
                finder = _LateImport(_ENGINE, replace_all)
                sys.meta_path.insert(0, finder)
                undo.callback(sys.meta_path.remove, finder)
            undo.callback(self._release_objects)
            yield

    def find_mistake(self, engine: object, charged: ChargedTraining) -> str:
        """Return in words how an engine's training differs from the charge; empty if it does not.

        Args:
            engine: The ``PrivacyEngine`` that the script said it trained with.
            charged: What is paid for.
        """
        if not any(training.engine is engine for training in self.trainings):
            return (
                "this engine made nothing private in this trial, so nothing says what was trained: call "
                "its make_private after trial.plan is read"
            )
        for training in self.trainings:
            mistake = training.find_mistake(charged)
            if mistake:
                return mistake
            if any(id(parameter) in self._bare_steps for parameter in training.parameters):
                return (
                    "another optimizer, or the one inside of Opacus', has stepped on the same parameters "
                    "without clipping and noise"
                )
        if self._mistake:
            return self._mistake
        return self._find_other_steps(charged)

    def _find_other_steps(self, charged: ChargedTraining) -> str:
        """Return in words how the steps or their noise differ from the charge; empty if they do not."""
        steps = 0
        multipliers: set[float] = set()
        for training in self.trainings:
            steps += training.steps
            multipliers |= training.noise_multipliers
        is_noise_charged = all(is_close(each, charged.noise_multiplier) for each in multipliers)
        if steps != charged.steps or not is_noise_charged:
            numbers = (f"{each:.6g}" for each in sorted(multipliers))
            noise = ", ".join(numbers) or "none"
            return (
                f"Opacus made {steps} steps in this trial, with noise multiplier {noise}, but "
                f"{charged.steps} steps with {charged.noise_multiplier:.6g} were charged; a history that was "
                "written or loaded says nothing of them"
            )
        return ""

    def describe(self, charged: ChargedTraining) -> str:
        """Return a clause for the certificate on what was compared in a trial without a mistake.

        It stands in the certificate: it claims no more than was seen.
        """
        if self._bare_steps:
            return _TRAINED_BESIDE.format(what="another optimizer trained other parameters")
        if self._bare_passes:
            return _TRAINED_BESIDE.format(what="gradients were computed beside the engine")
        data = _DECLARED_SIZE if charged.data is None else _DECLARED_DATA
        return _EVERYTHING_AGREES.format(data=data)

    def _replace_methods(self, undo: ExitStack, engine_module: ModuleType) -> None:
        """Replace ``make_private`` and the Poisson sampler's ``__iter__`` by recording versions."""
        engine = engine_module.PrivacyEngine
        make_private = self._with_training(engine.make_private)
        replace_attribute(undo, engine, "make_private", make_private)
        sampler = sys.modules[_SAMPLER].UniformWithReplacementSampler
        draw = self._with_draws(sampler.__iter__)
        replace_attribute(undo, sampler, "__iter__", draw)

    def _with_training(self, make_private: _Function) -> _Function:
        """Return a version of ``make_private`` that records the objects it returns."""

        @functools.wraps(make_private)
        def wrapper(engine: object, *args: object, **options: object) -> object:
            objects = make_private(engine, *args, **options)
            loader = objects[-1]  # behind the criterion, where ghost clipping returns one
            bare_loader = options.get("data_loader", loader)
            training = PrivateTraining(
                engine,
                objects[0],
                objects[1],
                loader,
                bare_loader,
            )
            self._add(training)
            return objects

        return wrapper

    def _with_draws(self, draw: _Draw) -> _Draw:
        """Return a version of a sampler's ``__iter__`` that records the sizes of its batches."""

        @functools.wraps(draw)
        def wrapper(sampler: object) -> Iterator[Any]:
            sizes: list[int] = []
            for training in self.trainings:
                is_of_training = any(each is sampler for each in training.samplers)
                if is_of_training:
                    training.draws.passes.append(sizes)
            for indices in draw(sampler):
                sizes.append(len(indices))
                yield indices

        return wrapper

    def _with_backward(self, backward: _Function) -> _Function:
        """Return a version of a torch autograd function that counts calls in the trial's thread."""

        @functools.wraps(backward)
        def wrapper(*args: object, **options: object) -> object:
            if threading.get_ident() == self._thread:
                self._bare_passes += 1
            return backward(*args, **options)

        return wrapper

    def _add(self, training: PrivateTraining) -> None:
        """Add a private training to the log, and hook into its optimizer and model.

        Methods that note something and then call its own are put on the optimizer and the model
        themselves: others of their classes go on as they were.
        """
        optimizer = training.optimizer
        if any(self._is_of_another_trial(each) for each in training.parameters):
            self._mistake = self._mistake or (
                "its model was trained by an earlier trial, so that trials depend on each other: make the "
                "model in the function of the trial"
            )
        account = optimizer.step_hook
        passes_before = self._bare_passes

        def note_gradients(sum_gradients: Callable[[], object]) -> object:
            training.note_gradients()
            self._bare_passes = passes_before
            return sum_gradients()

        def note_step(stepping: object) -> None:
            training.note_step()
            account(stepping)

        # Opacus' two kinds of optimizer sum gradients by different methods.
        name = "accumulate" if training.is_ghost else "clip_and_accumulate"
        sum_gradients = getattr(optimizer, name)
        setattr(optimizer, name, functools.partial(note_gradients, sum_gradients))
        if training.is_ghost:
            get_weights = training.module.get_clipping_coef

            def note_clipping() -> object:
                training.note_clipping()
                return get_weights()

            training.module.get_clipping_coef = note_clipping
        optimizer.attach_step_hook(note_step)
        self.trainings.append(training)

    def _release_objects(self) -> None:
        """Remove the recording hooks from optimizers and models, which may outlive the trial."""
        for training in self.trainings:
            for name in ("accumulate", "clip_and_accumulate"):
                vars(training.optimizer).pop(name, None)
            vars(training.module).pop("get_clipping_coef", None)

    def _before_step(self, optimizer: object, args: object, options: object) -> None:
        """Record which parameters an optimizer of torch steps, and whether by an engine of Opacus."""
        thread = threading.get_ident()
        if thread in self._stepping:
            return  # an optimizer that is made of others, as Lookahead
        self._stepping[thread] = optimizer
        for training in self.trainings:
            if training.optimizer.original_optimizer is optimizer and training.may_step:
                training.may_step = False
                self._mark(optimizer)
                return
        parameters = _parameters_of(optimizer)
        if thread == self._thread:
            self._mark(optimizer)
        else:  # another's, unless it is about this trial's models
            of_trial: set[int] = set()
            for training in self.trainings:
                of_trial.update(map(id, training.parameters))
            parameters = [each for each in parameters if id(each) in of_trial]
        for parameter in parameters:
            self._bare_steps[id(parameter)] = parameter  # kept: an id is used again

    def _after_step(self, optimizer: object, args: object, options: object) -> None:
        """Record that the outermost optimizer step of this thread is over."""
        thread = threading.get_ident()
        if self._stepping.get(thread) is optimizer:
            del self._stepping[thread]

    def _mark(self, optimizer: object) -> None:
        """Mark an optimizer's parameters as trained by this trial, for later trials to recognise."""
        for parameter in _parameters_of(optimizer):
            setattr(parameter, _OWNER, self._trial_mark)

    def _is_of_another_trial(self, parameter: object) -> bool:
        return getattr(parameter, _OWNER, self._trial_mark) is not self._trial_mark


class _LateImport(importlib.abc.MetaPathFinder):
    """An import hook that calls a function on one module right after it is imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the awaited module, whose loader also calls the function; else None."""
        if fullname != self._name:
            return None
        # Any finder may be its own: an editable installation has one.
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _poisson_sampler() -> Any:
    """Return Opacus' Poisson sampler class, or an empty tuple if Opacus is not imported."""
    return getattr(sys.modules.get(_SAMPLER), "UniformWithReplacementSampler", ())


def _parameters_of(optimizer: Any) -> list[object]:
    """Return the parameters in all groups of a torch optimizer."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def _count_records(optimizer: Any) -> int | None:
    """Return the number of records behind an optimizer's gradients; None if Opacus keeps none per record."""
    for parameter in optimizer.params:
        gradients = getattr(parameter, "grad_sample", None)
        if isinstance(gradients, list):
            return sum(len(part) for part in gradients)
        if gradients is None:
            gradients = getattr(parameter, "_norm_sample", None)  # ghost clipping keeps norms alone
        return None if gradients is None else len(gradients)
    return 0


def _of_records(records: int | None) -> str:
    return "an unknown number of records" if records is None else f"{records} records"


def _numbers(value: Any) -> list[float]:
    """Return a clipping norm, or one for each layer, as a list of floats."""
    if isinstance(value, (list, tuple)):
        return [float(each) for each in value]
    return [float(value)]


def _is_same(one: list[float], other: list[float]) -> bool:
    """Return whether numbers are equal one by one, up to rounding."""
    if len(one) != len(other):
        return False
    return all(map(is_close, one, other))


def is_close(one: float, other: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return math.isclose(one, other, rel_tol=_SAME)
