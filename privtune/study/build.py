"""From a user's ``build`` to what the engine trains: one trial, its suggestions, its candidate."""

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
from privtune.tasks._fine_tuning import check_part, for_candidate
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD
from privtune.training.methods._base import check_hyperparameter
from privtune.training.methods._rate_schedule import SEARCHED, check_given

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.study.trials import ShownTrial
    from privtune.training.engine.train import Made


_COMPILED_MODULE = "_orig_mod"
_COMPILED_FUNCTION = "_torchdynamo_orig_callable"
"""Under which names what torch has compiled holds the module, or the function, itself."""
_AROUND_METHODS = "external_utils.py"
"""The file of torch's compiler whose functions stand around methods."""


@cache
def _used() -> MutableMapping[Any, bool]:
    """Return the models and weights that trials of this process were built with, weakly held."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


@dataclass(frozen=True, eq=False)
class Built:
    """What one call of ``build`` made."""

    trial: Trial
    candidate: Candidate
    model: nn.Module  # whose part that is trained requires gradients
    optimizer: torch.optim.Optimizer | None  # over that part; None where the method steps by itself
    values: Mapping[str, Any]  # what the method is told: hyperparameters, clipping norm, schedule
    fixed: Mapping[str, Any]  # what the method took without a suggestion, of what the arm fixes
    secret: bytes
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None  # of packed inputs

    @property
    def params(self) -> dict[str, Any]:
        """Hyperparameters as they are released: suggested, or fixed by the arm."""
        return {**self.fixed, **self.trial.params}

    @property
    def scheduler(self) -> LRScheduler | None:
        """Torch's scheduler, if the candidate has one."""
        schedule = self.candidate.schedule
        return None if schedule is None or isinstance(schedule, str | Mapping) else schedule

    @property
    def made(self) -> Made:
        """The candidate as the engine trains it."""
        from privtune.training.engine.train import Made

        return Made(
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
    fixed: Mapping[str, Any],
    sealed: bool = True,
    number: int = 0,
    sampler: IndependentSampler | None = None,
    live: ShownTrial | None = None,
) -> Built:
    """Call ``build`` for one trial, under the trial's own random numbers, and check what it returns."""
    trial = Trial(
        training,
        sealed=sealed,
        number=number,
        streams=Streams(secret),
        given=fixed,
        sampler=sampler,
        live=live,
    )
    candidate, model, optimizer = _called(task, trial, secret)
    values = _values(candidate, training, trial.params, fixed)
    used = {n: fixed[n] for n in values if n in fixed and n not in trial.params}
    augment = _packed(task, candidate)
    return Built(trial, candidate, model, optimizer, values, used, secret, augment)


def named_method(task: Task, schedule: Schedule, fixed: Mapping[str, Any]) -> str | None:
    """Return the method that the task's ``build`` names, None where it leaves that to the arm."""
    training = TrainingPlan(schedule, FixedDPSGD(noise_multiplier=1.0))
    trial = Trial(training, sealed=True, number=0, streams=Streams(bytes(32)), given=fixed)
    return _called(task, trial, bytes(32))[0].method


def _called(
    task: Task, trial: Trial, secret: bytes
) -> tuple[Candidate, nn.Module, torch.optim.Optimizer | None]:
    """Call ``build``; return its candidate, the model with its part to train, and the optimizer of that."""
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
    """Return a model without what ``torch.compile`` has put around it, or around its parts."""
    inner = model
    while _COMPILED_MODULE in inner._modules:
        inner = getattr(inner, _COMPILED_MODULE)
    for part in inner.modules():
        part._compiled_call_impl = None  # of model.compile()
        for name, value in list(vars(part).items()):
            function = getattr(value, _COMPILED_FUNCTION, None)
            if function is None:
                continue
            # Torch puts a function of its own around a method before it compiles it.
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename.endswith(_AROUND_METHODS):
                function = function.__wrapped__
            vars(part)[name] = function
            if getattr(function, "__func__", function) is getattr(type(part), name, None):
                del vars(part)[name]  # a method of the class, which each copy binds to itself
        for name, child in part.named_children():
            setattr(part, name, uncompiled(child))
    return inner


def _packed(task: Task, candidate: Candidate) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the augmentation of a candidate as one of inputs as the engine has them."""
    augment, views, tree = candidate.augment, candidate.multiplicity, task.tree
    if not isinstance(views, int) or not 1 <= views <= (1 if augment is None else 1024):
        allowed = "must be a whole number from 1 to 1024, and 1 without augment"
        raise InvalidInputError("Candidate.multiplicity", views, allowed)
    if augment is None or (tree is None and not task.unit):
        return augment

    def packed(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1) if task.unit else x
        found = augment(rows if tree is None else tree.inputs.unpack(rows))
        whole: torch.Tensor = found if tree is None else tree.inputs.pack(found)
        return whole.view(x.shape) if task.unit else whole

    return packed


def _check_kind(candidate: object) -> None:
    """Refuse a ``build`` that returns no candidate, or a model whose weights are not made yet."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    found = candidate.model if isinstance(candidate, Candidate) else candidate
    if not isinstance(candidate, Candidate) or not isinstance(found, nn.Module):
        raise InvalidInputError(
            "build",
            type(found).__name__,
            "must return privtune.Candidate(model, ...) with a torch.nn.Module",
            "The engine trains the model: return it untrained, with its optimizer.",
        )
    if any(map(is_lazy, found.parameters())):
        raise InvalidInputError(
            "build",
            type(found).__name__,
            "must return a model that is complete, without lazy layers",
            "Give the layers their input sizes, or run the model once on zeros before.",
        )


def _check_new(model: nn.Module, *parts: Any) -> None:
    """Refuse parts of an earlier trial, whose trained weights are sealed."""
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
    (group,) = optimizer.param_groups
    taken = signature(type(optimizer)).parameters  # groups of some hold what no constructor takes
    settings = {n: v for n, v in group.items() if n in optimizer.defaults and n in taken}
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, type(optimizer)(trained, **settings)


def _values(
    candidate: Candidate,
    training: TrainingPlan,
    suggested: Mapping[str, Any],
    fixed: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values that the arm's method trains a candidate with: rates, norms, schedule."""
    method: Any = training.method
    norm, optimizer = candidate.max_grad_norm, candidate.optimizer
    takes_norm = "max_grad_norm" in method.parameters
    _check_parts(candidate, method.name, takes_norm=takes_norm, suggested=suggested)
    schedule = {name: fixed[name] for name in SEARCHED if name in fixed}
    if isinstance(candidate.schedule, str | Mapping):
        schedule = {"schedule": candidate.schedule}
    check_given(schedule)
    if optimizer is not None:
        return {**({"max_grad_norm": norm or 1.0} if takes_norm else {}), **schedule}
    if candidate.schedule is not None and not schedule:
        raise InvalidInputError(
            "Candidate.schedule",
            type(candidate.schedule).__name__,
            "steps an optimizer, and none is given",
            'Give its optimizer, or the name of a schedule, like "cosine".',
        )
    known = {**training.as_trained({**fixed, **suggested})}
    if norm is not None:
        known["max_grad_norm"] = norm
    if missing := [name for name in method.parameters if name not in known]:
        raise InvalidInputError(
            "build",
            f"suggestions {', '.join(sorted(suggested)) or 'none'}",
            f"must suggest {' and '.join(missing)}, or give an optimizer: method {method.name!r} needs it",
            "trial.suggest_float('learning_rate', 0.01, 10, log=True) is one; max_grad_norm may stand in "
            "Candidate(max_grad_norm=...).",
        )
    for name in method.parameters:
        check_hyperparameter(name, name, known[name])
    return {**{name: known[name] for name in method.parameters}, **schedule}


def _check_parts(
    candidate: Candidate, method: str, *, takes_norm: bool, suggested: Mapping[str, Any]
) -> None:
    """Refuse a candidate's method, norm or schedule where the arm's method would ignore it."""
    norm, optimizer, schedule = candidate.max_grad_norm, candidate.optimizer, candidate.schedule
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
    scheduled = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
    if scheduled and (schedule is None or isinstance(schedule, str | Mapping)):
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


def model_for(task: Task, training: TrainingPlan, params: Mapping[str, Any]) -> nn.Module:
    """Return an untrained model of these hyperparameters, into which released weights fit."""
    if task.build is None:
        return for_candidate(task, params).model()
    from privtune.training.engine.train import copy_model

    return copy_model(build_candidate(task, training, secret=bytes(32), fixed=params).model)
