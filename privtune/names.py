"""Rules for names and stored texts, suggestions for mistyped names, and where the usual storage is."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from privtune.errors import InvalidInputError
from privtune.files import read_private

DEFAULT_STORAGE = "sqlite:///privtune.db"
"""The database of studies and budgets where none is named: a file of the working folder."""

STORAGE_EXAMPLES = "Examples: runs/p.db, sqlite:///privtune.db, postgresql://user@host/database."

NAME_RULE = "must be 1 to 100 letters, digits, '.', '_' or '-', a letter or digit first"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CERTIFICATE = "certificate.json"
"""Name of the certificate's file in a study's folder, beside the folders of arms."""

# Folders beside those of studies and arms, and names that Windows keeps for devices.
_RESERVED = {"mlflow", "mlflow.db", "mlflow.lock", "sealed", "trials", CERTIFICATE}
_RESERVED |= {"con", "prn", "aux", "nul"}
_RESERVED |= {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}

# What other tools call a thing, and what it is called here. A suggestion is made only where the second
# name is among those that are allowed.
_FAMILIAR: Mapping[str, tuple[str, ...]] = {
    # metrics
    "acc": ("accuracy",),
    "auroc": ("auc",),
    "cross_entropy": ("loss",),
    "f1_macro": ("macro_f1",),
    "f1_score": ("f1",),
    "log_loss": ("loss",),
    "mean_absolute_error": ("mae",),
    "mean_squared_error": ("mse",),
    "neg_log_loss": ("loss",),
    "neg_mean_absolute_error": ("mae",),
    "neg_mean_squared_error": ("mse",),
    "precision": ("f1",),
    "r2_score": ("r2",),
    "recall": ("balanced_accuracy",),
    "rmse": ("mse",),
    "roc_auc": ("auc",),
    "roc_auc_score": ("auc",),
    "sensitivity": ("balanced_accuracy",),
    # hyperparameters and fields
    "batch": ("expected_batch_size", "batch_size"),
    "batch_size": ("expected_batch_size",),
    "clip": ("max_grad_norm",),
    "clip_norm": ("max_grad_norm",),
    "clipping": ("max_grad_norm",),
    "clipping_norm": ("max_grad_norm",),
    "eps": ("epsilon",),
    "eta": ("learning_rate",),
    "l2_norm_clip": ("max_grad_norm",),
    "lr": ("learning_rate",),
    "max_norm": ("max_grad_norm",),
    "metric": ("scoring",),
    "n_trials": ("mean_runs", "trials"),
    "noise": ("noise_multiplier",),
    "noise_scale": ("noise_multiplier",),
    "num_epochs": ("epochs",),
    "num_steps": ("count", "steps"),
    "num_trials": ("mean_runs", "trials"),
    "params": ("parameters",),
    "probability": ("rate",),
    "q": ("rate",),
    "sample_rate": ("rate",),
    "sampling_probability": ("rate",),
    "sampling_rate": ("rate",),
    "search_space": ("space",),
    "sigma": ("noise_multiplier",),
    "standard_deviation": ("noise_multiplier",),
    "std": ("noise_multiplier",),
    "stddev": ("noise_multiplier",),
    "step_size": ("learning_rate",),
    "steps": ("count",),
    "times": ("count",),
    "trials": ("arms", "mean_runs"),
    # distributions
    "categoricaldistribution": ("categorical",),
    "choice": ("categorical",),
    "floatdistribution": ("float",),
    "intdistribution": ("int",),
    "integer": ("int",),
    "lognormal": ("log_normal",),
    "logreal": ("{type: float, log: true}",),
    "loguniform": ("{type: float, log: true}",),
    "log_uniform": ("{type: float, log: true}",),
    "quniform": ("{type: float, step: ...}",),
    "randint": ("int",),
    "real": ("float",),
    "suggest_categorical": ("categorical",),
    "suggest_discrete_uniform": ("{type: float, step: ...}",),
    "suggest_float": ("float",),
    "suggest_int": ("int",),
    "suggest_loguniform": ("{type: float, log: true}",),
    "suggest_uniform": ("float",),
    "uniform": ("float",),
    # their arguments
    "lower": ("low",),
    "max": ("high",),
    "maximum": ("high",),
    "min": ("low",),
    "minimum": ("low",),
    "options": ("choices",),
    "scale": ("log", "noise_multiplier"),
    "upper": ("high",),
    "values": ("choices",),
    # strategies, methods and samplers
    "bayesian": ("everything",),
    "bayesian_optimization": ("everything",),
    "best_of_k": ("papernot-steinke",),
    "cmaessampler": ("cmaes", "everything"),
    "default": ("fixed",),
    "dp_sgd": ("dpsgd", "fixed"),
    "dpsgd": ("fixed",),
    "grid": ("everything", "non-private-grid"),
    "grid_search": ("everything", "non-private-grid"),
    "gp": ("everything",),
    "gpsampler": ("gp", "everything"),
    "gridsampler": ("grid", "everything"),
    "hyperband": ("everything",),
    "optuna": ("everything",),
    "random": ("papernot-steinke",),
    "qmcsampler": ("qmc", "everything"),
    "random_search": ("papernot-steinke",),
    "randomsampler": ("random", "papernot-steinke"),
    "selection": ("papernot-steinke",),
    "tpe": ("everything",),
    "tpesampler": ("tpe", "everything"),
    # adjacencies
    "bounded": ("replace-one",),
    "change_one": ("replace-one",),
    "replace": ("replace-one",),
    "substitute": ("replace-one",),
    "substitution": ("replace-one",),
    "swap": ("replace-one",),
    "unbounded": ("add-remove",),
    # devices
    "gpu": ("cuda",),
    # tasks
    "csv": ("tabular",),
    "custom": ("own",),
    "image": ("images",),
    "table": ("tabular",),
    # events and laws
    "choose": ("private_selection",),
    "composition": ("composed",),
    "eps_delta": ("approximate_dp",),
    "negative_binomial": ("truncated_negative_binomial",),
    "pure_dp": ("approximate_dp",),
    "self_composed": ("repeated",),
    "subsampled": ("poisson_sampled",),
}
_SURE = 0.85  # difflib's ratio of a slip of a finger
_CLOSE = 0.6  # and that of what may be meant
_SHORT = 3  # letters of a beginning that is taken for a whole name: fix, fixed


def first_names(names: Sequence[str], most: int = 3) -> str:
    """Return some names as text: the first ones, and how many more there are.

    Args:
        names: One at least.
        most: How many are named.

    Example:
        >>> first_names(["a", "b", "c", "d"], 2), first_names(["a", "b"], 2)
        ('a, b and 2 more', 'a, b')
    """
    words = ", ".join(names[:most])
    count = len(names) - most
    if count > 0:
        return f"{words} and {count} more"
    return words


def usual_storage(storage: str | Path | None = None) -> str | Path:
    """Return the storage to use: the given one, else that of the environment, else a file of this folder.

    Python, the commands and workers all find it here. In the environment it is the URL in
    ``PRIVTUNE_STORAGE``, else the one in the file that ``PRIVTUNE_STORAGE_FILE`` names. A URL may hold a
    password, and other users of a machine can read a command line.

    Args:
        storage: The URL of a database, or the path of a SQLite file; None where nothing was said.

    Returns:
        A URL or a path, which is no more than a text yet: opening it checks what it names.

    Raises:
        InvalidInputError: If the given storage is empty or no text, or the file that the environment names
            is empty, cannot be read, or can be read by others.
    """
    if storage is not None:
        if isinstance(storage, Path) or (isinstance(storage, str) and storage.strip()):
            return storage
        # Of another type the name alone: a URL in bytes may hold a password.
        value = storage if isinstance(storage, str) else type(storage).__name__
        allowed = "must be the URL of a database, or the path of a SQLite file"
        raise InvalidInputError("storage", value, allowed, STORAGE_EXAMPLES)
    url = os.environ.get("PRIVTUNE_STORAGE")
    if url:
        return url
    file = os.environ.get("PRIVTUNE_STORAGE_FILE")
    if not file:
        return DEFAULT_STORAGE
    content = read_private(Path(file))
    url = content.decode(errors="replace").strip()
    if not url:
        allowed = "names a file that is empty"
        raise InvalidInputError(
            "PRIVTUNE_STORAGE_FILE", file, allowed, "Write the URL of the storage into it."
        )
    return url


def did_you_mean(
    names: object,
    allowed: Iterable[str],
    *,
    free: Collection[str] = (),
) -> str:
    """Return a question that suggests allowed names for mistyped ones; empty if none is similar.

    Args:
        names: The name that was refused, or a list of such.
        allowed: The names that are allowed.
        free: Suggestions in words, which are no names themselves.
    """
    candidates = [*map(str, allowed)]
    mistakes = names if isinstance(names, list | tuple | set | frozenset) else [names]
    suggestions: dict[str, str] = {}
    for name in mistakes:
        suggestion = _nearest(name, candidates, free)
        if suggestion is not None:
            suggestions[str(name)] = suggestion
    if not suggestions:
        return ""
    if len(mistakes) == 1:
        (suggestion,) = suggestions.values()
        return f"Did you mean {suggestion}?"
    pairs = [f"{suggestion} for {name}" for name, suggestion in suggestions.items()]
    return f"Did you mean {', '.join(pairs)}?"


def _nearest(
    name: object,
    allowed: list[str],
    free: Collection[str],
) -> str | None:
    """Return the allowed name that is nearest to a mistyped one, or None if none is near."""
    if not isinstance(name, str) or not name:
        return None
    plain = _plain(name)
    for candidate in allowed:
        if _plain(candidate) == plain:
            return candidate
    for candidate in _FAMILIAR.get(plain, ()):
        if candidate in allowed or candidate in free:
            return candidate
    by_plain = {_plain(word): word for word in allowed}
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=_SURE)
    if close:
        return by_plain[close[0]]
    if len(plain) >= _SHORT:
        longer = [word for word in by_plain if word.startswith(plain)]
        if len(longer) == 1:
            return by_plain[longer[0]]
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=_CLOSE)
    if not close:
        return None
    return by_plain[close[0]]


def _plain(name: str) -> str:
    """Return a name in one spelling: ``LogUniform``, ``log-uniform`` and ``log_uniform`` are the same."""
    words = re.sub(r"[\s._-]+", "_", name.strip())
    return words.lower()


def refuse_name(
    what: str,
    name: object,
    allowed: Iterable[str],
    *,
    also: str = "",
    free: Collection[str] = (),
    remedy: str = "",
) -> NoReturn:
    """Raise the error for a name outside a closed list, with the allowed names and the likely one.

    Args:
        what: What the name was given as.
        name: The name.
        allowed: The names that are allowed.
        also: What is allowed beside them, in words.
        free: Suggestions in words; see :func:`did_you_mean`.
        remedy: What to do where no name is near.
    """
    candidates = [*map(str, allowed)]
    words = ", ".join(candidates) or "nothing"
    if also:
        words = f"{words}, {also}"
    question = did_you_mean(name, candidates, free=free)
    raise InvalidInputError(what, name, f"must be one of {words}", question or remedy)


def refuse_fields(
    what: str,
    unknown: Collection[object],
    allowed: Iterable[str],
    owner: str,
    *,
    remedy: str = "",
) -> NoReturn:
    """Raise the error for fields or options that their owner lacks, with those that it takes.

    Args:
        what: What they were given as.
        unknown: The names that the owner lacks, one at least.
        allowed: The names that it has.
        owner: Whose fields they are, as the subject of a sentence.
        remedy: What to do where no name is near.
    """
    candidates = [*map(str, allowed)]
    names = sorted(map(str, unknown))
    value = names[0] if len(names) == 1 else names
    options = ", ".join(candidates) or "no options"
    question = did_you_mean(names, candidates)
    raise InvalidInputError(what, value, f"{owner} takes {options}", question or remedy)


def is_name(name: object) -> bool:
    """Return whether a text has the form of a name: one harmless component of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object, what: str = "name") -> str:
    """Return the name of a new study, arm or budget if it is allowed; ``what`` says which in the error.

    It becomes the name of a folder, on systems that take ``CON`` for a device, too.
    """
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInputError(what, name, NAME_RULE)
    if name.lower() in _RESERVED:
        raise InvalidInputError(what, name, "is reserved", "Choose another name.")
    return name


def check_text(value: object, what: str) -> str:
    """Return a text if every database can store it, and refuse one with NUL or half of a surrogate pair."""
    if not isinstance(value, str):
        raise InvalidInputError(what, value, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        allowed = "holds half of a surrogate pair, which is no character"
        raise InvalidInputError(what, value, allowed) from None
    if "\0" in value:
        raise InvalidInputError(what, value, "holds a NUL, which databases do not store")
    return value
