"""A trial as ``build`` sees it: Optuna's suggestions and public facts, and no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.priors import IndependentSampler
from privtune.strategies import TrainingPlan
from privtune.study._familiar import answer
from privtune.study._suggestions import Suggestions
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.study._shown import ShownTrial

_NUMBERS = 2**31  # a divisor of the 2**63 seeds of a stream: each number is as likely


class Trial(Suggestions):
    """One trial of a study, handed to ``build``, which suggests hyperparameters and builds a candidate.

    Args:
        training: What this trial is charged for.
        sealed: Whether the trial is one of a sealed selection.
        number: Position in its round, or Optuna's number: see :attr:`number`.
        streams: The trial's random streams.
        given: Hyperparameters that are fixed for this trial: suggestions return them.
        sampler: A sampler of the user's own that declares independence.
        live: Optuna's trial, where every trial is paid for.

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
        ...     trial.set_user_attr("weights", sum(p.numel() for p in model.parameters()))
        ...     return privtune.Candidate(
        ...         model, torch.optim.SGD(model.parameters(), rate, heavy, weight_decay=decay)
        ...     )
        >>> study = privtune.create_study("shown", budget=privtune.Budget(8.0, 1e-5, name="clinic"))
        >>> release = study.optimize(
        ...     build,
        ...     loss=loss,
        ...     data=(x, y),
        ...     split={"train": 300, "validation": 100},
        ...     strategy=privtune.strategies.Everything(trials=1),
        ...     epochs=1,
        ...     expected_batch_size=75,
        ... )
        >>> sorted(release.params)
        ['decay', 'heavy', 'rate', 'width']
    """

    if not TYPE_CHECKING:
        __getattr__ = answer

    def __init__(
        self,
        training: TrainingPlan,
        *,
        sealed: bool,
        number: int,
        streams: Streams,
        given: Mapping[str, Any],
        sampler: IndependentSampler | None = None,
        live: ShownTrial | None = None,
    ) -> None:
        super().__init__(streams, given, sampler, live, training.as_trained)
        # The position of a sealed trial is kept from its function: see the property.
        self._number = streams.seed("number") % _NUMBERS if sealed else number
        self._training = training
        self.user_attrs: dict[str, Any] = {}

    @property
    def number(self) -> int:
        """Optuna's number under ``everything``; in a sealed selection a random one below 2**31.

        Private selection covers candidates that are drawn independently. With positions, a function that
        computes ``GRID[trial.number % len(GRID)]`` would walk through its grid: how many of it are tried
        would then be the secret number of runs. With a number from the trial's own stream it draws from the
        grid. The number is no suggestion: it is not released, and a final training on what was suggested
        has another one. What a release shall name is suggested: ``trial.suggest_categorical``.
        """
        return self._number

    @property
    def steps(self) -> int:
        """How many steps the training takes: for a schedule of the learning rate."""
        return self._training.schedule.steps

    def set_user_attr(self, name: str, value: Any) -> None:
        """Keep a value with the trial, inside the trust boundary, until the trial ends.

        Args:
            name: Its name.
            value: Anything.
        """
        self.user_attrs[name] = value
