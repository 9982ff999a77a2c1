"""Calls of a user's ``build``, and the candidates that the engine trains from their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.spaces import IndependentSampler
from privtune.strategies import TrainingPlan
from privtune.study.trial import Trial
from privtune.tasks import Candidate, Task
from privtune.tasks.pretrained import check_part, for_candidate
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD
from privtune.training.methods.method import check_hyperparameter
from privtune.training.methods.rate_schedule import SEARCHED, check_given

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.study.trials import ShownTrial
    from privtune.training.engine.train import TrainableCandidate


_COMPILED_MODULE = "_orig_mod"
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"
"""Under which names what torch has compiled holds the module, or the function, itself."""
_AROUND_METHODS = "external_utils.py"
"""The file of torch's compiler whose functions stand around methods."""


@cache
def _used() -> MutableMapping[object, bool]:
    """Return the models and weights that trials of this process were built with, weakly held."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


@dataclass(frozen=True, eq=False)
class BuildResult:
    """The trial, candidate, model and optimizer that one call of ``build`` made.

    Attributes:
        trial: The trial that suggested its hyperparameters.
        candidate: What ``build`` returned.
        model: Whose part that is trained requires gradients.
        optimizer: Over that part; None where the method steps by itself.
        values: What the method is told: hyperparameters, clipping norm, schedule.
        fixed: What the method took without a suggestion, of what the arm fixes.
        secret: 32 bytes, from which its noise, samples and first weights come.
        augment: Of packed inputs; None without augmentation.
    """

    trial: Trial
    candidate: Candidate
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    values: Mapping[str, Any]
    fixed: Mapping[str, Any]
    secret: bytes
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def params(self) -> dict[str, object]:
        """Hyperparameters as they are released: suggested, or fixed by the arm."""
        return {**self.fixed, **self.trial.params}

    @property
    def scheduler(self) -> LRScheduler | None:
        """The candidate's learning-rate scheduler of torch; None for a named schedule or none."""
        schedule = self.candidate.schedule
        if schedule is None or isinstance(schedule, str | Mapping):
            return None
        return schedule

    @property
    def made(self) -> TrainableCandidate:
        """The candidate as the engine trains it."""
        from privtune.training.engine.train import TrainableCandidate

        return TrainableCandidate(
            model=self.model,
            secret=self.secret,
            values=self.values,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            augment=self.augment,
            views=self.candidate.multiplicity,
        )


def build_candidate(
    task: Task,
    training: TrainingPlan,
    *,
    secret: bytes,
    fixed: Mapping[str, object],
    sealed: bool = True,
    number: int = 0,
    sampler: IndependentSampler | None = None,
    live: ShownTrial | None = None,
) -> BuildResult:
    """Call ``build`` for one trial, under the trial's own random numbers, and check what it returns.

    Args:
        task: Whose ``build`` is called.
        training: What the trial runs.
        secret: 32 bytes: from them come the suggestions and the first weights.
        fixed: Hyperparameters that the arm fixes, or that are suggested from outside.
        sealed: Whether the trial's number and values are to be hidden.
        number: The number that an open trial shows.
        sampler: A sampler of the user's own; unless given, suggestions follow their laws.
        live: Optuna's trial, which suggests where trials see each other.

    Raises:
        InvalidInputError: If what it returns is no candidate, is another trial's, or is not what the arm's
            method takes.
    """
    trial = Trial(
        training,
        sealed=sealed,
        number=number,
        streams=Streams(secret),
        given=fixed,
        sampler=sampler,
        live=live,
    )
    candidate, model, optimizer = _call_build(task, trial, secret)
    values = _values(candidate, training, trial.params, fixed)
    fixed_values = {
        name: fixed[name] for name in values if name in fixed and name not in trial.params
    }
    augment = _packed_augmentation(task, candidate)
    return BuildResult(
        trial=trial,
        candidate=candidate,
        model=model,
        optimizer=optimizer,
        values=values,
        fixed=fixed_values,
        secret=secret,
        augment=augment,
    )


def named_method(task: Task, schedule: Schedule, fixed: Mapping[str, object]) -> str | None:
    """Return the method that the task's ``build`` names, None where it leaves that to the arm.

    Args:
        task: Whose ``build`` is called, with random numbers that no trial of a study has.
        schedule: How often, and in which samples, records are seen.
        fixed: Hyperparameters of one candidate.
    """
    secret = bytes(32)
    training = TrainingPlan(schedule, FixedDPSGD(noise_multiplier=1.0))
    trial = Trial(training, sealed=True, number=0, streams=Streams(secret), given=fixed)
    candidate, _, _ = _call_build(task, trial, secret)
    return candidate.method


def weights_of_build(task: Task, fixed: Mapping[str, object]) -> int:
    """Return how many weights the task's ``build`` has trained, for a public example of a candidate.

    Args:
        task: Whose ``build`` is called, with random numbers that no trial of a study has.
        fixed: Hyperparameters of one candidate.
    """
    secret = bytes(32)
    records = task.train_records
    one_step = Schedule(records=records, sample_rate=1.0, steps=1)
    training = TrainingPlan(one_step, FixedDPSGD(noise_multiplier=1.0))
    trial = Trial(training, sealed=True, number=0, streams=Streams(secret), given=fixed)
    _, model, _ = _call_build(task, trial, secret)
    sizes = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    return max(1, sum(sizes))


def _call_build(
    task: Task, trial: Trial, secret: bytes
) -> tuple[Candidate, nn.Module, torch.optim.Optimizer | None]:
    """Call ``build``; return its candidate, the model that is trained, and the model's optimizer."""
    from privtune.training.engine.train import initialisation

    if task.build is None:
        raise InvalidInputError("task", task.name, "must have a build function")
    with initialisation(Streams(secret)):
        candidate = task.build(trial)
        _check_kind(candidate)
        # A compiled model is bound to its own weights: a copy of it, which is trained, would not use its own.
        candidate = replace(candidate, model=uncompiled(candidate.model))
        _check_new(candidate.model, candidate.model)
        model, optimizer = _trained_part(candidate)
        _check_new(model, *(p for p in model.parameters() if p.requires_grad))
        return candidate, model, optimizer


def uncompiled(model: nn.Module) -> nn.Module:
    """Return a model without what ``torch.compile`` has put around it, or around its parts.

    The engine differentiates and copies plain modules; what is compiled goes on using the weights of the
    module that it was made from, so that a copy's training would change nothing.
    """
    inner = model
    while _COMPILED_MODULE in inner._modules:
        inner = getattr(inner, _COMPILED_MODULE)
    for part in inner.modules():
        part._compiled_call_impl = None  # of model.compile()
        _restore_functions(part)
        for name, child in part.named_children():
            setattr(part, name, uncompiled(child))
    return inner


def _restore_functions(part: nn.Module) -> None:
    """Replace the compiled functions of a module by the original ones."""
    for name, value in list(vars(part).items()):
        function = getattr(value, _COMPILED_FUNCTION, None)
        if function is None:
            continue
        # Torch puts a function of its own around a method before it compiles it.
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(_AROUND_METHODS):
            function = function.__wrapped__
        vars(part)[name] = function
        plain_function = getattr(function, "__func__", function)
        if plain_function is getattr(type(part), name, None):
            del vars(part)[name]  # a method of the class, which each copy binds to itself


def _packed_augmentation(
    task: Task, candidate: Candidate
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a candidate's augmentation as a function of the engine's packed inputs; None without one.

    Inputs are packed, shape ``[n, ...]``, or of units of several records ``[n, records, ...]``; the user's
    function takes records of their own structure, ``[n, ...]`` each.
    """
    augment = candidate.augment
    views = candidate.multiplicity
    most_views = 1 if augment is None else 1024
    if not isinstance(views, int) or not 1 <= views <= most_views:
        allowed = "must be a whole number from 1 to 1024, and 1 without augment"
        raise InvalidInputError("Candidate.multiplicity", views, allowed)
    tree = task.tree
    if augment is None or (tree is None and not task.unit):
        return augment

    def augment_packed(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1) if task.unit else x
        augmented: torch.Tensor
        if tree is None:
            augmented = augment(rows)
        else:
            records = tree.inputs.unpack(rows)
            augmented = tree.inputs.pack(augment(records))
        if task.unit:
            augmented = augmented.view(x.shape)
        return augmented

    return augment_packed


def _check_kind(candidate: object) -> None:
    """Refuse a ``build`` that returns no candidate, or a model with lazy layers."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    model = candidate.model if isinstance(candidate, Candidate) else candidate
    if not isinstance(candidate, Candidate) or not isinstance(model, nn.Module):
        raise InvalidInputError(
            "build",
            type(model).__name__,
            "must return privtune.Candidate(model, ...) with a torch.nn.Module",
            "The engine trains the model: return it untrained, with its optimizer.",
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise InvalidInputError(
            "build",
            type(model).__name__,
            "must return a model that is complete, without lazy layers",
            "Give the layers their input sizes, or run the model once on zeros before.",
        )


def _check_new(model: nn.Module, *parts: object) -> None:
    """Refuse a model or weights that an earlier trial of this process used, since those are sealed."""
    if any(part in _used() for part in parts):
        raise InvalidInputError(
            "build",
            type(model).__name__,
            "must make its model anew: this one, or a part that it trains, is that of an earlier trial or of "
            "the rehearsal, whose weights are sealed",
            "Make the model and its optimizer inside build; copy.deepcopy a model that was loaded once.",
        )
    for part in parts:
        _used()[part] = True


def _trained_part(candidate: Candidate) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return the model with its part to train, and the optimizer over that part."""
    kind, rank = check_part(candidate.trainable or "all", candidate.target_modules)
    if candidate.trainable is None:
        return candidate.model, candidate.optimizer
    from privtune.training.engine.fine_tuning import set_trainable

    model = set_trainable(candidate.model, kind, rank=rank, targets=candidate.target_modules)
    optimizer = candidate.optimizer
    if optimizer is None:
        return model, None
    if len(optimizer.param_groups) != 1 or candidate.schedule is not None:
        raise InvalidInputError(
            "trainable",
            candidate.trainable,
            "goes with an optimizer of one group and no scheduler, which is made again over that part",
            "Freeze parameters in build instead (requires_grad_(False)), and leave trainable out.",
        )
    make_optimizer = type(optimizer)
    # Groups of some optimizers hold what no constructor takes.
    arguments = signature(make_optimizer).parameters
    settings = {
        name: value
        for name, value in optimizer.param_groups[0].items()
        if name in optimizer.defaults and name in arguments
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, make_optimizer(parameters, **settings)


def _values(
    candidate: Candidate,
    training: TrainingPlan,
    suggested: Mapping[str, object],
    fixed: Mapping[str, object],
) -> dict[str, object]:
    """Return the values that the arm's method trains a candidate with: rates, norms, schedule.

    Args:
        candidate: What ``build`` returned.
        training: What is charged for each trial.
        suggested: What ``build`` suggested.
        fixed: What the arm fixes, where ``build`` suggests nothing of that name.

    Raises:
        InvalidInputError: If the method would lack a value, or ignore one.
    """
    method: Any = training.method
    norm = candidate.max_grad_norm
    takes_norm = "max_grad_norm" in method.parameters
    _check_parts(candidate, method.name, takes_norm=takes_norm, suggested=suggested)
    schedule = {name: fixed[name] for name in SEARCHED if name in fixed}
    if isinstance(candidate.schedule, str | Mapping):
        schedule = {"schedule": candidate.schedule}
    check_given(schedule)
    if candidate.optimizer is not None:
        clipping = {"max_grad_norm": norm or 1.0} if takes_norm else {}
        return {**clipping, **schedule}
    if candidate.schedule is not None and not schedule:
        raise InvalidInputError(
            "Candidate.schedule",
            type(candidate.schedule).__name__,
            "steps an optimizer, and none is given",
            'Give its optimizer, or the name of a schedule, like "cosine".',
        )
    params = dict(training.as_trained({**fixed, **suggested}))
    if norm is not None:
        params["max_grad_norm"] = norm
    missing = [name for name in method.parameters if name not in params]
    if missing:
        suggestions = ", ".join(sorted(suggested)) or "none"
        raise InvalidInputError(
            "build",
            f"suggestions {suggestions}",
            f"must suggest {' and '.join(missing)}, or give an optimizer: method {method.name!r} needs it",
            "trial.suggest_float('learning_rate', 0.01, 10, log=True) is one; max_grad_norm may stand in "
            "Candidate(max_grad_norm=...).",
        )
    values = {}
    for name in method.parameters:
        check_hyperparameter(name, name, params[name])
        values[name] = params[name]
    return {**values, **schedule}


def _check_parts(
    candidate: Candidate, method: str, *, takes_norm: bool, suggested: Mapping[str, object]
) -> None:
    """Refuse a candidate's method, norm or schedule where the arm's method would ignore it."""
    norm = candidate.max_grad_norm
    optimizer = candidate.optimizer
    schedule = candidate.schedule
    if candidate.method not in (None, method):
        raise InvalidInputError(
            "Candidate.method",
            candidate.method,
            f"must be {method!r}, the method that the arm is charged for",
            "Every trial of an arm trains by one method; compare methods as arms.",
        )
    if norm is not None and not takes_norm:
        allowed = f"is set by method {method!r} itself"
        raise InvalidInputError("Candidate.max_grad_norm", norm, allowed, "Leave it out.")
    if norm is not None:
        check_hyperparameter("Candidate.max_grad_norm", "max_grad_norm", norm)
    step = getattr(optimizer, "step", None)
    has_scheduler = hasattr(step, "_wrapped_by_lr_sched")
    if has_scheduler and (schedule is None or isinstance(schedule, str | Mapping)):
        raise InvalidInputError(
            "Candidate.schedule",
            schedule,
            "must be the scheduler that was made over the optimizer, which nobody would step",
            "Return it: Candidate(model, optimizer, schedule=scheduler).",
        )
    if optimizer is not None and norm is None and "max_grad_norm" in suggested:
        raise InvalidInputError(
            "Candidate.max_grad_norm",
            None,
            "must be what was suggested under that name, which nothing would be clipped to",
            "Return it: Candidate(model, optimizer, max_grad_norm=...).",
        )


def model_for(task: Task, training: TrainingPlan, params: Mapping[str, object]) -> nn.Module:
    """Return an untrained model of these hyperparameters, into which released weights fit.

    Args:
        task: Its ``build``, or its model.
        training: What the release's trial ran.
        params: The release's hyperparameters.
    """
    if task.build is None:
        return for_candidate(task, params).model()
    from privtune.training.engine.train import copy_model

    candidate = build_candidate(task, training, secret=bytes(32), fixed=params)
    return copy_model(candidate.model)
