"""A trial as ``build`` sees it: Optuna's suggestions and public facts, and no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.strategies import TrainingPlan
from privtune.study._familiar import answer
from privtune.study._suggestions import Suggestions

if TYPE_CHECKING:
    pass


class Trial(Suggestions):
    """One trial of a study, handed to ``build``, which suggests hyperparameters and builds a candidate.

    Args:
        training: What this trial is charged for.
        **given: What ``Suggestions`` takes.

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

    def __init__(self, training: TrainingPlan, **given: Any) -> None:
        super().__init__(training, **given)
        self.user_attrs: dict[str, Any] = {}

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
