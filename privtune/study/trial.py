"""The trial that a ``build`` is called with, which offers suggestions and public facts but no data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from privtune.errors import InvalidInputError
from privtune.spaces import (
    IndependentSampler,
    Prior,
    SearchSpace,
    categorical,
    check_hyperparameter,
    plain,
)
from privtune.strategies import TrainingPlan
from privtune.strategies.searching import CHANGING
from privtune.study.familiar_names import answer
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.study.trials import ShownTrial

_NUMBERS = 2**31  # a divisor of the 2**63 seeds of a stream: each number is as likely

# What the plan says of each training, as loops call it: lower case, letters alone.
_PLANNED = frozenset(
    {"batchsize", "expectedbatchsize", "lotsize", "epoch", "epochs", "nepoch", "nepochs"}
    | {"numepochs", "maxepochs", "steps", "nsteps", "numsteps", "maxsteps"}
    | {"iterations", "niterations", "numiterations", "maxiterations"}
    | {"noise", "noisemultiplier", "noisescale", "sigma", "samplerate"}
    | {"epsilon", "targetepsilon", "delta", "targetdelta"}
)


class Suggestions:
    """The hyperparameters of one trial, each drawn when it is first asked for.

    Args:
        training: What the trial trains.
        sealed: Whether trials are sealed, so that the trial's number must tell nothing.
        number: Its position in its round, or Optuna's number.
        streams: Where its random numbers come from.
        given: Hyperparameters that are fixed for this trial.
        sampler: The user's own, which draws all at once.
        live: Optuna's trial, where every trial is paid for.
    """

    def __init__(
        self,
        training: TrainingPlan,
        *,
        sealed: bool,
        number: int,
        streams: Streams,
        given: Mapping[str, object],
        sampler: IndependentSampler | None = None,
        live: ShownTrial | None = None,
    ) -> None:
        self._training = training
        self._number = streams.seed("number") % _NUMBERS if sealed else number
        self._suggested: dict[str, tuple[Any, BaseDistribution]] = {}
        self._streams = streams
        self._fixed = dict(given)
        self._live = live
        if sampler is not None:
            # What is fixed comes last: a sampler that was left out beside it would draw nothing at all.
            samples = sampler.draw(streams.numpy("search"))
            self._fixed = {**samples, **given}
        # What the engine trains with; no function asks for these.
        self._engine_params = {name: given[name] for name in CHANGING if name in given}

    @property
    def number(self) -> int:
        """The trial's number under ``everything``; in a sealed selection a random one below 2**31.

        Private selection covers candidates that are drawn independently. With positions, a function that
        computes ``GRID[trial.number % len(GRID)]`` would walk through its grid, and how much of it is tried
        would be the secret number of runs. The number is not released: what a release shall name is
        suggested, as by ``trial.suggest_categorical``.
        """
        return self._number

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the trial's hyperparameters by name, as they are released.

        That is what was suggested, and what a ``space`` drew of ``expected_batch_size``, ``epochs`` and
        ``noise_multiplier``, which the engine trains with.
        """
        suggestions = {name: value for name, (value, _) in self._suggested.items()}
        return {**self._engine_params, **suggestions}

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """A copy of the distributions that the trial's values were suggested from, by name."""
        return {name: distribution for name, (_, distribution) in self._suggested.items()}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number for ``name`` in [``low``, ``high``], on a grid of ``step`` or a ``log`` scale.

        As with Optuna's trials, it is the same one whenever the trial asks for this name.
        """
        law = FloatDistribution(low, high, log=log, step=step)
        return float(self._suggest(name, law))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Return an integer for ``name`` in [``low``, ``high``], by ``step`` or on a ``log`` scale.

        Raises:
            InvalidInputError: If it is the learning rate of a tuning subset, which is scaled.
        """
        law = IntDistribution(low, high, log=log, step=step)
        value = self._suggest(name, law)
        if isinstance(value, float):
            allowed = "must be suggested by suggest_float: it is scaled to the tuning subset"
            raise InvalidInputError(name, f"suggest_int({low}, {high})", allowed)
        return int(value)

    def suggest_categorical(self, name: str, choices: Sequence[object]) -> Any:
        """Return one of the ``choices`` for ``name``, the same whenever this trial asks.

        Choices are None, booleans, numbers, texts, scalars of NumPy's, or tuples of these, in a list, a
        tuple, a range or an array. Of others (modules, functions, enums) suggest the names.
        """
        return self._suggest(name, categorical(name, choices))

    def suggest(self, name: str, prior: Prior) -> Any:
        """Return a value for ``name`` from a public ``prior``, such as a log-normal law or a mixture."""
        return self._suggest(name, prior.distribution, prior)

    def _suggest(
        self, name: str, distribution: BaseDistribution, prior: Prior | None = None
    ) -> Any:
        """Return the trial's value for a name, scaled as the training uses it.

        Raises:
            InvalidInputError: If the name belongs to the plan, or was suggested from another law before.
        """
        letters = re.sub(r"[\s_-]", "", check_hyperparameter(name).lower())
        if letters in _PLANNED:
            # Its value would be released, and nothing would have run with it.
            raise InvalidInputError(
                "name of a hyperparameter",
                name,
                "belongs to the plan: what a trial runs is what was charged, whatever it suggests",
                "To search it, run an arm for each value (study.optimize with other epochs=..., or "
                "epsilon=...), or write it into the space: study.optimize(space={'expected_batch_size': "
                "{'type': 'categorical', 'choices': [64, 256]}}, ...) with guarantee='common' of the "
                "strategy; epochs and noise_multiplier go there, too.",
            )
        if name not in self._suggested:
            drawn_value = self._draw(name, distribution, prior)
            self._suggested[name] = plain(name, drawn_value), distribution
        value, before = self._suggested[name]
        if not _same_values(before, distribution):
            raise InvalidInputError(
                name,
                distribution,
                f"was suggested to this trial before, by {before}",
                "Give each hyperparameter a name of its own.",
            )
        params = self._training.as_trained({name: value})
        return params[name]

    def _draw(self, name: str, distribution: BaseDistribution, prior: Prior | None) -> Any:
        """Return the value of a name that is fixed, else suggested by Optuna, else drawn at random."""
        if name in self._fixed:
            return self._fixed[name]
        if self._live is not None:
            return self._live.suggest(name, distribution)
        # Each name has a stream of its own: what is drawn does not hang on the order of calls.
        law = distribution if prior is None else prior
        streams = Streams(self._streams.key(f"search/{name}"))
        candidate = SearchSpace({name: law}).draw(streams, 0)
        return candidate[name]


def _same_values(law: BaseDistribution, other: BaseDistribution) -> bool:
    """Return whether two distributions have the same type and values, whatever their scale."""
    if isinstance(law, CategoricalDistribution):
        return law == other
    fields = {**vars(law), "log": None}
    other_fields = {**vars(other), "log": None}
    return type(law) is type(other) and fields == other_fields


class Trial(Suggestions):
    """One trial of a study, handed to ``build``, which suggests hyperparameters and builds a candidate.

    Example:
        >>> import torch
        >>> import privtune
        >>> from torch.nn.functional import cross_entropy
        >>> x = torch.randn(400, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> def loss(model, x, y):  # of one record
        ...     return cross_entropy(model(x), y, reduction="none")

        >>> def build(trial):
        ...     width = trial.suggest_int("width", 2, 4)
        ...     rate = trial.suggest_float("rate", 0.1, 10.0, log=True)
        ...     decay = trial.suggest("decay", privtune.LogNormal(median=1e-3, sigma=1.0))
        ...     heavy = 0.9 if trial.suggest_categorical("heavy", [True, False]) else 0.0
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))
        ...     return privtune.Candidate(
        ...         model, torch.optim.SGD(model.parameters(), rate, heavy, weight_decay=decay)
        ...     )
        >>> study = privtune.create_study("shown", budget=privtune.Budget(8.0, 1e-5, name="clinic"))
        >>> split = {"train": 300, "validation": 100}
        >>> release = study.optimize(
        ...     privtune.make_task(build, loss=loss, data=(x, y), split=split),
        ...     strategy=privtune.strategies.Everything(trials=1),
        ...     epochs=1,
        ...     expected_batch_size=75,
        ... )
        >>> sorted(release.params)
        ['decay', 'heavy', 'rate', 'width']
    """

    if not TYPE_CHECKING:
        __getattr__ = answer

    @property
    def steps(self) -> int:
        """The number of steps that the training takes, for a learning-rate schedule."""
        return self._training.schedule.steps

    @property
    def records(self) -> int:
        """The public number of records that the training is planned for, as in ``kl / trial.records``.

        The real number of records is private. A loss or weight decay that divides by ``len(x)`` depends on
        it, and so does every step. In a tuning on a subset it is the expected size of the subset.
        """
        return self._training.schedule.records
