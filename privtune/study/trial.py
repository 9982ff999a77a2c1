"""A trial as an objective sees it: Optuna's calls, and two of ours: make_private and score."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.priors import IndependentSampler, Prior
from privtune.spaces import SearchSpace
from privtune.strategies import Plan, StrategyError, TrainingPlan, TrialResult
from privtune.training.streams import Streams

if TYPE_CHECKING:
    import torch

    from privtune.study._shown import ShownTrial
    from privtune.training.private_training import PrivateTraining

__all__ = ["SealedTrialError", "Trial", "refuse_autologging"]


class SealedTrialError(PrivTuneError):
    """Something inside a sealed trial would show it to others, or was never charged."""


class Trial:
    """One trial of a study, handed to the objective.

    Args:
        plan: The arm's plan.
        training: What this trial may run.
        number: Position in its round. Sealed, like everything here.
        streams: The trial's random streams.
        subset: The arm's streams, which the tuning subset is drawn from.
        given: Hyperparameters that are fixed for this trial: suggestions return them.
        sampler: A sampler of the user's own that declares independence.
        live: Optuna's trial, where every trial is paid for.
    """

    def __init__(
        self,
        plan: Plan,
        training: TrainingPlan,
        *,
        number: int,
        streams: Streams,
        subset: Streams,
        given: Mapping[str, Any],
        sampler: IndependentSampler | None = None,
        live: ShownTrial | None = None,
    ) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, BaseDistribution] = {}
        self.user_attrs: dict[str, Any] = {}
        self._plan, self._training = plan, training
        self._streams, self._subset = streams, subset
        self._given = dict(given)
        if sampler is not None and not given:
            self._given = dict(sampler.draw(streams.numpy("search")))
        self._live = live
        self._private: PrivateTraining | None = None
        self._model: torch.nn.Module | None = None
        self._score: float | None = None

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Suggest a number, as Optuna's trials do."""
        return float(self._suggest(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Suggest a whole number, as Optuna's trials do."""
        return int(self._suggest(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Suggest one of some choices, as Optuna's trials do."""
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest(self, name: str, prior: Prior) -> Any:
        """Suggest a value of a public prior: log-normal, a mixture, one of your own."""
        return self._suggest(name, prior.distribution, prior)

    def make_private(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        max_grad_norm: float = 1.0,
        max_physical_batch_size: int | None = None,
    ) -> PrivateTraining:
        """Make a training private, in Opacus' manner: noise, rate and steps come from the plan.

        Args:
            model: The model, in training mode.
            optimizer: Over its parameters; regularisers belong here, as weight decay.
            dataset: ``TensorData``, a pair of tensors, or a map-style dataset, of exactly the
                number of records that the plan declares.
            max_grad_norm: Each record's gradient is clipped to this norm, above 0.
            max_physical_batch_size: Most records that are computed at once: a longer sample comes
                in several batches, and the last of them takes the step. None for whole samples.

        Returns:
            ``batches()`` yields the planned Poisson samples, ``step(losses)`` follows each, with
            one loss a record, and says whether the optimizer stepped.

        Raises:
            SealedTrialError: If the trial has made one already: a second was not charged.
        """
        from privtune.execution.training import part_of
        from privtune.training.clipping import Flat
        from privtune.training.private_training import PrivateTraining

        if self._private is not None:
            raise SealedTrialError(
                "make_private was called twice in one trial, but a trial is charged for one "
                "training. Run the second as a trial or an arm of its own."
            )
        data = _records(dataset, self._training.part)
        declared = self._plan_records()
        if len(data) != declared:
            raise InvalidInputError(
                "dataset", f"another size than {declared}", "must hold the declared records"
            )
        records = part_of(data, self._training.part, self._plan.rate, self._subset)
        self._private = PrivateTraining(
            model,
            optimizer,
            records,
            schedule=self._training.schedule,
            clipping=Flat(max_grad_norm),
            noise_multiplier=self._training.method.noise_multiplier,  # type: ignore[attr-defined]
            secret=self._streams.key("training"),
            max_physical_batch_size=max_physical_batch_size,
        )
        self._model = model
        return self._private

    def score(self, model: torch.nn.Module, validation: Any) -> float:
        """Score a model on the declared validation split: exactly if that is public, else noised.

        Args:
            model: The trained model.
            validation: ``TensorData`` or a pair of tensors.

        Returns:
            The score, higher is better. NaN where the strategy chooses nothing: then the split is
            not touched, and nothing is charged for it.

        Raises:
            SealedTrialError: If it is called a second time on a private split.
        """
        plan = self._plan.score
        if plan is None:
            return math.nan
        if self._score is not None and plan.event is not None:
            raise SealedTrialError(
                "trial.score was called twice, but a trial is charged for one look at the private "
                "validation split. Score once, at the end."
            )
        data = _in_memory(validation)
        if len(data) != plan.records:
            raise InvalidInputError(
                "validation", f"another size than {plan.records}", "must hold the declared records"
            )
        self._score = _noised(plan, model, data, self._streams)
        return self._score

    def report(self, value: float, step: int) -> None:
        """Report an intermediate score to the pruner; only where it is public and paid for."""
        if self._live is None:
            return  # nobody compares sealed trials, so nobody reads it
        if self._plan.score is not None and self._plan.score.event is not None:
            raise StrategyError(
                "trial.report was called with a private validation split: each intermediate score "
                "would be a release of its own, and none was charged. Declare the split public, or "
                "score once, at the end."
            )
        self._live.report(value, step)

    def should_prune(self) -> bool:
        """Return whether the pruner wants to stop this trial; False where trials are sealed."""
        return self._live is not None and self._live.should_prune()

    def set_user_attr(self, name: str, value: Any) -> None:
        """Keep a value with the trial, inside the trust boundary, until the trial ends."""
        self.user_attrs[name] = value

    def finish(self, value: object, index: int) -> TrialResult:
        """Check what the objective returned, and return the trial's result.

        Raises:
            SealedTrialError: If nothing was trained privately, or the value is not the score's.
            TranscriptMismatchError: If more was released than was charged.
        """
        if self._private is None or self._model is None:
            raise SealedTrialError(
                "The objective returned without trial.make_private, so what it trained was never "
                "clipped, noised or charged. Train through make_private."
            )
        self._private.transcript.check_within(self._training.event)
        score: float | None = None
        if self._plan.score is not None:
            if self._score is None or (value != self._score and not math.isnan(self._score)):
                raise SealedTrialError(
                    "The objective returned a number that trial.score did not give, so nothing says "
                    "that it is public or noised. Return trial.score(model, validation)."
                )
            score = -math.inf if math.isnan(self._score) else self._score
        layout = self._private.layout
        named = {n: p.detach() for n, p in self._model.named_parameters()}
        weights = layout.flatten(named).cpu().clone()
        if score is not None and not bool(weights.isfinite().all()):
            score = -math.inf
        return TrialResult(
            index=index,
            params=dict(self.params),
            weights=weights,
            score=score,
            transcript_digest=self._private.transcript.digest(),
            shapes={name: tuple(shape) for name, shape in layout.shapes.items()},
        )

    def _plan_records(self) -> int:
        """Return how many records the dataset as a whole must hold."""
        return int(self._plan.details["records"])

    def _suggest(
        self, name: str, distribution: BaseDistribution, prior: Prior | None = None
    ) -> Any:
        if name in self.params:
            return self.params[name]
        if name in self._given:
            value = self._given[name]
        elif self._live is not None:
            value = self._live.suggest(name, distribution)
        else:
            # Each name has a stream of its own: what is drawn does not hang on the order of calls.
            law = {name: distribution if prior is None else prior}
            value = SearchSpace(law).draw(Streams(self._streams.key(f"search/{name}")), 0)[name]
        self.params[name], self.distributions[name] = value, distribution
        return value


def refuse_autologging(sealed: bool) -> None:
    """Stop a sealed trial that the user's own MLflow would log.

    Raises:
        SealedTrialError: If MLflow has an active run, or automatic logging is on.
    """
    mlflow = sys.modules.get("mlflow")
    if not sealed or mlflow is None:
        return
    if mlflow.active_run() is not None:
        raise SealedTrialError(
            "An MLflow run is active inside a sealed trial: whatever is logged there shows a trial "
            "that must stay secret. End it (mlflow.end_run()); releases are logged by PrivTune."
        )
    tools = sys.modules.get("mlflow.utils.autologging_utils")
    integrations = getattr(tools, "AUTOLOGGING_INTEGRATIONS", {})
    on = [name for name, options in integrations.items() if options.get("disable") is False]
    if on:
        raise SealedTrialError(
            f"MLflow autologging is on ({', '.join(sorted(on))}) inside a sealed trial: it would log "
            "trials that must stay secret. Turn it off: mlflow.autolog(disable=True)."
        )


def _records(data: Any, part: str) -> Any:
    """Return the records of a dataset; as they are where a training sees all of them."""
    from torch.utils.data import Dataset

    if part == "all" and isinstance(data, Dataset) and not hasattr(data, "tensors"):
        from privtune.training.data import DatasetData

        return DatasetData(data)
    return _in_memory(data)


def _in_memory(data: Any) -> Any:
    from privtune.training.data import TensorData

    if isinstance(data, tuple) and len(data) == 2:
        return TensorData(*data)
    if hasattr(data, "tensors"):  # torch's TensorDataset
        return TensorData(*data.tensors)
    if hasattr(data, "x") and hasattr(data, "y"):
        return data
    import torch

    rows = [data[index] for index in range(len(data))]
    x = torch.stack([torch.as_tensor(row[0]) for row in rows])
    return TensorData(x, torch.stack([torch.as_tensor(row[1]) for row in rows]))


def _noised(plan: Any, model: torch.nn.Module, data: Any, streams: Streams) -> float:
    import torch

    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(data.x)
    model.train(training)
    if plan.metric == "accuracy":
        value = float((outputs.argmax(dim=-1) == data.y).double().mean())
    else:
        losses = torch.nn.functional.cross_entropy(outputs, data.y, reduction="none").double()
        losses = losses.nan_to_num(nan=plan.bound, posinf=plan.bound)
        value = -float(losses.clamp(0.0, plan.bound).mean())
    rng = streams.numpy("score")
    unit = rng.standard_normal() if plan.mechanism == "gaussian" else rng.laplace()
    return value + float(unit) * float(plan.standard_deviation)
