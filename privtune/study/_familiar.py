"""Names that users of Optuna and Opacus type, each answered in one sentence with PrivTune's name for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from privtune.errors import PrivTuneError

P = ParamSpec("P")
R = TypeVar("R")

_COUNT = (
    "how many trials there are is the strategy's to say: "
    "strategy=privtune.strategies.PapernotSteinke(mean_runs=10), or Everything(trials=10), "
    "which pays for each"
)
_NAME = "a study is called by its name: privtune.create_study('mine', budget=...), study.name"
_DIRECTION = (
    "the score says its direction: score='accuracy', or privtune.Score(function, bound=4.0, "
    "maximize=False)"
)
_OBJECTIVES = "a trial has one score, so there is one direction: " + _DIRECTION
_SAMPLER = (
    "a sampler is given to one arm: study.optimize(..., "
    "strategy=privtune.strategies.Everything(), sampler=...)"
)
_PRUNER = (
    "the engine reports and prunes, on a public validation split alone: study.optimize(..., "
    "strategy=privtune.strategies.Everything(), pruner=...)"
)
_FRAME = (
    "study.compare() has a row for each arm, and "
    "study.release(arm).to_optuna().trials_dataframe() one for each trial of an arm that pays "
    "for all of them"
)
_GIVEN = (
    "hyperparameters that are known in advance are an arm of their own: "
    "strategy=privtune.strategies.Fixed(parameters={...})"
)
_ASKED = (
    "a trial is charged before it is asked, and told once, by the engine: "
    "study.optimize(build, loss=..., score=..., data=..., strategy=...)"
)
_BEST = (
    "study.best_params and study.best_value, or study.release(arm): params, score, model and "
    "guarantee"
)
_NOTES = (
    "notes belong to the tracker, which gets releases alone: "
    "observer=privtune.tracking.mlflow.MlflowObserver(study)"
)
_STOP = (
    "the number of trials is charged in advance, and no score ends it; study.optimize(..., "
    "timeout=60) begins no trial after a minute, and the arm goes on when it is called again"
)
_CATCH = (
    "an error stops the arm, and study.optimize called again goes on with the same trials, at "
    "no further charge"
)
_FLOAT = "it is trial.suggest_float(name, low, high, log=..., step=...), as in Optuna today"
_PLOTS = (
    "optuna.visualization takes study.release(arm).to_optuna(), of an arm that pays for all "
    "of its trials"
)
_ENGINE = (
    "the engine trains: build(trial) returns privtune.Candidate(model, optimizer, "
    "max_grad_norm=1.0), and study.optimize(build, loss=..., data=..., strategy=...) samples, "
    "clips, adds noise and accounts; training by Opacus itself is study.optimize(objective, "
    "mechanism=...)"
)
_PIECES = (
    "the engine computes a large sample in pieces by itself: study.optimize(..., "
    "expected_batch_size=...)"
)
_BUDGET = (
    "epsilon and delta are the budget's: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5))"
)
_NOISE = (
    "the noise follows from the budget: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5))"
)
_SPENT = (
    "study.spent() says what the whole budget has spent, study.release(arm).guarantee what an "
    "arm cost"
)

SAID: Mapping[str, str] = {
    "n_trials": _COUNT,
    "study_name": _NAME,
    "direction": _DIRECTION,
    "directions": _OBJECTIVES,
    "sampler": _SAMPLER,
    "samplers": _SAMPLER,
    "pruner": _PRUNER,
    "pruners": _PRUNER,
    "report": _PRUNER,
    "should_prune": _PRUNER,
    "TrialPruned": _PRUNER,
    "trials_dataframe": _FRAME,
    "get_trials": "study.trials has them; " + _FRAME,
    "enqueue_trial": _GIVEN,
    "FixedTrial": _GIVEN,
    "add_trial": "trials are trained under a charge of the study's own and cannot be added; "
    + _GIVEN,
    "add_trials": "trials are trained under a charge of the study's own and cannot be added; "
    + _GIVEN,
    "ask": _ASKED,
    "tell": _ASKED,
    "best_trial": _BEST,
    "best_trials": "a trial has one score, so there is one best: " + _BEST,
    "user_attrs": _NOTES,
    "set_user_attr": _NOTES,
    "system_attrs": _NOTES,
    "set_system_attr": _NOTES,
    "stop": _STOP,
    "catch": _CATCH,
    "gc_after_trial": "memory is given back after each trial anyway",
    "metric_names": "the metric is what score= names, one for all trials",
    "set_metric_names": "the metric is what score= names, one for all trials",
    "suggest_uniform": _FLOAT,
    "suggest_loguniform": _FLOAT,
    "suggest_discrete_uniform": _FLOAT,
    "visualization": _PLOTS,
    "importance": _PLOTS.replace("visualization", "importance"),
    "get_all_study_names": "it is privtune.study.study_names(storage)",
    "PrivacyEngine": _ENGINE,
    "GradSampleModule": _ENGINE,
    "DPOptimizer": _ENGINE,
    "DPDataLoader": _ENGINE,
    "make_private": _ENGINE,
    "make_private_with_epsilon": _ENGINE,
    "module": _ENGINE,
    "data_loader": _ENGINE,
    "BatchMemoryManager": _PIECES,
    "max_physical_batch_size": _PIECES,
    "ModuleValidator": "a model that couples records is refused at the rehearsal, before anything is charged",
    "target_epsilon": _BUDGET,
    "target_delta": _BUDGET,
    "noise_multiplier": _NOISE,
    "get_epsilon": _SPENT,
    "accountant": _SPENT,
}
"""What each name is here. Where the name is one of PrivTune's own, nobody asks."""


class FamiliarNameError(PrivTuneError, AttributeError, TypeError):
    """A name of Optuna's or Opacus' that is another one here."""


def unknown(owner: str, name: str) -> AttributeError:
    """Return the error for a name that something lacks.

    Args:
        owner: What lacks it, as Python names it (``"'Study' object"``).
        name: The name.

    Example:
        >>> raise unknown("'Study' object", "trials_dataframe")
        Traceback (most recent call last):
            ...
        privtune.study._familiar.FamiliarNameError: trials_dataframe: study.compare() has a row for each ...
        >>> unknown("'Study' object", "something")
        AttributeError("'Study' object has no attribute 'something'")
    """
    if name in SAID:
        return FamiliarNameError(f"{name}: {SAID[name]}.")
    return AttributeError(f"{owner} has no attribute {name!r}")


def answer(owner: object, name: str) -> NoReturn:
    """Raise what a class says of a name that its objects lack: to be its ``__getattr__``.

    Args:
        owner: The object.
        name: The name.

    Example:
        >>> class Trial:
        ...     __getattr__ = answer
        >>> hasattr(Trial(), "make_private")
        False
        >>> Trial().make_private(module=None)
        Traceback (most recent call last):
            ...
        privtune.study._familiar.FamiliarNameError: make_private: the engine trains: build(trial) returns ...
    """
    kind = type(owner)
    if hasattr(kind, name):  # a property that failed: the error is its own
        object.__getattribute__(owner, name)
    raise unknown(f"{kind.__name__!r} object", name)


def answers(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that answers familiar arguments which it does not take. A decorator.

    Args:
        function: The function.

    Example:
        >>> @answers
        ... def create_study(name: str) -> str:
        ...     return name
        >>> create_study("mine"), create_study(study_name="mine")
        Traceback (most recent call last):
            ...
        privtune.study._familiar.FamiliarNameError: study_name: a study is called by its name: ...
    """
    takes = inspect.signature(function).parameters

    @wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in SAID and name not in takes:
                raise unknown(function.__name__, name)
        return function(*args, **kwargs)

    return answering
