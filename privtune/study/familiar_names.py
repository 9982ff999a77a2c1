"""Names that users of Optuna and Opacus type, each answered in one sentence with PrivTune's name for it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from privtune.errors import PrivTuneError
from privtune.names import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_ANSWERS: Mapping[str, str] = {
    "n_trials": "how many trials there are is the strategy's to say: "
    "strategy=privtune.strategies.PapernotSteinke(mean_runs=10), or Everything(trials=10), "
    "which pays for each",
    "study_name": "a study is called by its name: privtune.create_study('mine', budget=...), "
    "privtune.load_study('mine'), study.name",
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
    "study.optimize(privtune.make_task(build, loss=..., score=..., data=...), strategy=...)",
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
    "max_grad_norm=1.0), and study.optimize(privtune.make_task(build, loss=..., data=...), strategy=...) "
    "samples, clips, adds noise and accounts; training by Opacus itself is "
    "study.optimize_declared(objective, mechanism=..., strategy=...)",
    "BatchMemoryManager max_physical_batch_size": "the engine computes a large sample in pieces by itself: "
    "study.optimize(..., expected_batch_size=...)",
    "ModuleValidator": "a model that couples records is refused at the rehearsal, before anything is charged",
    "target_epsilon target_delta delta": "epsilon and delta are the budget's: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5, name='clinic'))",
    "noise_multiplier": "the noise follows from the budget: privtune.create_study(..., "
    "budget=privtune.Budget(4.0, 1e-5, name='clinic')), or of an Opacus script select(..., epsilon=4.0, "
    "delta=1e-5)",
    "batch_size": "a Poisson sample has no fixed size: study.optimize(..., expected_batch_size=64)",
    "max_grad_norm": "the clipping norm is the candidate's: privtune.Candidate(model, optimizer, "
    "max_grad_norm=1.0)",
    "secure_mode": "noise of cryptographic quality is asked for by noise='secure'",
    "get_epsilon accountant": "study.spent() says what the whole budget has spent, "
    "study.release(arm).guarantee what an arm cost",
}

ANSWER_OF: Mapping[str, str] = {
    name: sentence for names, sentence in _ANSWERS.items() for name in names.split()
}
"""The sentences by single names."""


class FamiliarNameError(PrivTuneError, AttributeError, TypeError):
    """A name of Optuna's or Opacus' was used, for which PrivTune has another one."""


def unknown(owner: str, name: str) -> AttributeError:
    """Return the error for a name that an owner (``"'Study' object"``) lacks.

    Example:
        >>> raise unknown("'Study' object", "trials_dataframe")
        Traceback (most recent call last):
            ...
        privtune.study.familiar_names.FamiliarNameError: trials_dataframe: study.compare() has ...
        >>> unknown("'Study' object", "something")
        AttributeError("'Study' object has no attribute 'something'")
    """
    if name in ANSWER_OF:
        return FamiliarNameError(f"{name}: {ANSWER_OF[name]}.")
    return AttributeError(f"{owner} has no attribute {name!r}")


def answer(owner: object, name: str) -> NoReturn:
    """Raise the error for an attribute that an object lacks; for use as a class's ``__getattr__``."""
    kind = type(owner)
    if hasattr(kind, name):  # a property that failed: the error is its own
        object.__getattribute__(owner, name)
    raise unknown(f"{kind.__name__!r} object", name)


_NEEDED: Mapping[str, str] = {
    "budget": "budget=privtune.Budget(4.0, 1e-5, name='clinic')",
    "strategy": "strategy=privtune.strategies.PapernotSteinke(mean_runs=10), or another of them",
    "name": "a name, as in privtune.create_study('mine', budget=...)",
    "task": "privtune.make_task(build, loss=..., data=...)",
    "mechanism": "mechanism=privtune.Mechanism(event, declared_by=..., records=...)",
}


_HOMES: Mapping[str, str] = {
    "privtune.make_task({})": "build",
    "privtune.make_task(build, {})": "loss score data split train validation test public benchmark "
    "classes target_range rarest_share pad_to columns precision",
    "study.optimize_declared(objective, {})": "mechanism",
    "study.optimize(task, {})": "strategy report space epochs expected_batch_size epsilon arm n_jobs "
    "timeout callbacks observer show_progress_bar",
    "privtune.create_study(..., {})": "budget arms scoring stages repeats device stack executor noise "
    "artifacts seed storage load_if_exists tracking",
    "privtune.load_study(name, {})": "curator",
}

HOME_OF: Mapping[str, str] = {
    name: call for call, names in _HOMES.items() for name in names.split()
}
"""The call that takes an argument, by its name: where it goes that was given to another one."""


def answers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that wrong or missing arguments raise an error that says what to write.

    Python's own error would name the argument alone, and not what it is called here.
    """
    return answers_with(())(function)


def answers_with(fields: Collection[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator like :func:`answers` for a function whose ``**fields`` take only these names."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        names = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names += fields

        @wraps(function)
        def answering(*args: P.args, **kwargs: P.kwargs) -> R:
            strangers = [name for name in kwargs if name not in names]
            for name in strangers:
                if name in ANSWER_OF and name not in HOME_OF:
                    raise unknown(function.__name__, name)
            if strangers:
                raise _error_of_strangers(function.__name__, names, strangers)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _error_of_call(function.__name__, error) from None
            return function(*args, **kwargs)

        return answering

    return decorate


def _error_of_strangers(
    function: str, names: Collection[str], strangers: Sequence[str]
) -> TypeError:
    """Return the error for unknown arguments, with the call that takes them or a similar name."""
    first = strangers[0]
    sentence = f"{function}() got an unexpected keyword argument {first!r}"
    home = HOME_OF.get(first)
    if home is None:
        question = did_you_mean(first, names)
        return TypeError(f"{sentence}. {question}".rstrip())
    movers = [name for name in strangers if HOME_OF.get(name) == home]
    arguments = [f"{name}=" for name in movers]
    call = home.format(", ".join(f"{argument}..." for argument in arguments))
    verb = "belongs" if len(movers) == 1 else "belong"
    return TypeError(f"{sentence}: {' and '.join(arguments)} {verb} to {call}.")


def _error_of_call(function: str, error: TypeError) -> TypeError:
    """Return the error for a call that does not fit a signature, with an example of what is missing."""
    message = str(error)
    missing = re.findall(r"'(\w+)'", message) if "missing" in message else []
    for name in missing:
        if name in _NEEDED:
            return TypeError(f"{function}() needs {name}: give {_NEEDED[name]}.")
    return TypeError(f"{function}() {error}")
