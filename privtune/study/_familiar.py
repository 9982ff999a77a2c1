"""Names that users of Optuna and Opacus type, each answered in one sentence with PrivTune's name for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from privtune.errors import PrivTuneError

P = ParamSpec("P")
R = TypeVar("R")

_ANSWERS: Mapping[str, str] = {
    "n_trials": "how many trials there are is the strategy's to say: "
    "strategy=privtune.strategies.PapernotSteinke(mean_runs=10), or Everything(trials=10), "
    "which pays for each",
    "study_name": "a study is called by its name: privtune.create_study('mine', budget=...), study.name",
    "direction directions": "a trial has one score, which says its direction: score='accuracy', or "
    "privtune.Score(function, bound=4.0, maximize=False)",
    "sampler samplers": "a sampler is given to one arm: study.optimize(..., "
    "strategy=privtune.strategies.Everything(), sampler=...)",
    "pruner pruners report should_prune TrialPruned": "the engine reports and prunes, on a public "
    "validation split alone: study.optimize(..., strategy=privtune.strategies.Everything(), pruner=...)",
    "trials_dataframe get_trials": "study.compare() has a row for each arm, and "
    "study.release(arm).to_optuna().trials_dataframe() one for each trial of an arm that pays for all of "
    "them; study.trials has the curator's",
    "enqueue_trial FixedTrial add_trial add_trials": "hyperparameters that are known in advance are an arm "
    "of their own: strategy=privtune.strategies.Fixed(parameters={...})",
    "ask tell": "a trial is charged before it is asked, and told once, by the engine: "
    "study.optimize(build, loss=..., score=..., data=..., strategy=...)",
    "best_trial best_trials": "study.best_params and study.best_value, or study.release(arm): params, score, "
    "model and guarantee",
    "user_attrs set_user_attr system_attrs set_system_attr": "notes belong to the tracker, which gets "
    "releases alone: observer=privtune.tracking.mlflow.MlflowObserver(study)",
    "stop": "the number of trials is charged in advance, and no score ends it; study.optimize(..., "
    "timeout=60) begins no trial after a minute, and the arm goes on when it is called again",
    "catch": "an error stops the arm, and study.optimize called again goes on with the same trials, at "
    "no further charge",
    "gc_after_trial": "memory is given back after each trial anyway",
    "metric_names set_metric_names": "the metric is what score= names, one for all trials",
    "suggest_uniform suggest_loguniform suggest_discrete_uniform": "it is trial.suggest_float(name, low, "
    "high, log=..., step=...), as in Optuna today",
    "visualization importance": "optuna.visualization and optuna.importance take "
    "study.release(arm).to_optuna(), of an arm that pays for all of its trials",
    "get_all_study_names": "it is privtune.study.study_names(storage)",
    "PrivacyEngine GradSampleModule DPOptimizer DPDataLoader make_private make_private_with_epsilon module "
    "data_loader": "the engine trains: build(trial) returns privtune.Candidate(model, optimizer, "
    "max_grad_norm=1.0), and study.optimize(build, loss=..., data=..., strategy=...) samples, "
    "clips, adds noise and accounts; training by Opacus itself is study.optimize(objective, "
    "mechanism=...)",
    "BatchMemoryManager max_physical_batch_size": "the engine computes a large sample in pieces by itself: "
    "study.optimize(..., expected_batch_size=...)",
    "ModuleValidator": "a model that couples records is refused at the rehearsal, before anything is charged",
    "target_epsilon target_delta": "epsilon and delta are the budget's: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5))",
    "noise_multiplier": "the noise follows from the budget: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5))",
    "get_epsilon accountant": "study.spent() says what the whole budget has spent, "
    "study.release(arm).guarantee what an arm cost",
}

SAID = {name: said for names, said in _ANSWERS.items() for name in names.split()}


class FamiliarNameError(PrivTuneError, AttributeError, TypeError):
    """A name of Optuna's or Opacus' that is another one here."""


def unknown(owner: str, name: str) -> AttributeError:
    """Return the error for a name that an owner (``"'Study' object"``) lacks.

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
    """Raise the error for a name that an object lacks: a class's ``__getattr__``."""
    kind = type(owner)
    if hasattr(kind, name):  # a property that failed: the error is its own
        object.__getattribute__(owner, name)
    raise unknown(f"{kind.__name__!r} object", name)


def answers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to answer familiar arguments that it does not take."""
    takes = inspect.signature(function).parameters

    @wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in SAID and name not in takes:
                raise unknown(function.__name__, name)
        return function(*args, **kwargs)

    return answering
