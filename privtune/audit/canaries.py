"""Train canaries with the engine, or run a declared mechanism with the user's canary function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from privtune.audit.bounds import Floats
from privtune.errors import InvalidInputError
from privtune.strategies import Plan, TrainingPlan
from privtune.study.declared_arms import DeclaredTrial
from privtune.tasks import Task
from privtune.training.engine.train import TrainableCandidate, Training, initialisation
from privtune.training.mechanism.clipping import Clipping, CoordinateTransform
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods.method import Candidate, Method

LONG = 1e4
"""Norm of a canary's gradient: longer than any clipping norm."""

_LOUD = 1e9  # its loss: above every bound, however its features and the parameters multiply
_AT_ONCE = 1024  # trainings between two signs of progress
_RUNS_WITH_RELEASES = 64  # of a pass: their single releases show the law of the noise


@dataclass(frozen=True, eq=False)
class CanaryEvidence:
    """The evidence of canaries that trainings reveal, one value per training and canary.

    Args:
        ratio: Log-likelihood ratio of all answers of the oracle: of the canary to its absence.
        model: How far the canary's parameter moved towards it.
        releases: Single releases less what they would be without the canary, over their planned
            standard deviation: of the first trainings of a pass.
    """

    ratio: Floats
    model: Floats
    releases: Floats


class _WatchedOracle:
    """A wrapper of an oracle that records the canaries' likelihood ratios of its answers.

    Args:
        oracle: Answers.
        columns: Canaries; number i moves parameter i.
        replaced: Whether another record, of the opposite gradient, is there in a canary's place.
    """

    # The gradient of canary i points along coordinate i; clipped, it is as long as it may be. A threshold
    # on the likelihood ratio is the best test of a known mechanism, and a test of any.

    def __init__(self, oracle: Any, columns: int, *, replaced: bool) -> None:
        self._oracle = oracle
        self._columns = columns
        self._replaced = replaced
        # By the sample's number: its rate, and the sum of the ratios of its answers.
        self._ratios: dict[int, tuple[float, torch.Tensor]] = {}
        self.releases: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    def gradient(
        self,
        sample: Any,
        params: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        answer: torch.Tensor = self._oracle.gradient(sample, params, **options)
        self._watch_gradient(sample, answer, options)
        return answer

    def gradient_and_fraction(
        self,
        sample: Any,
        params: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        answer, fraction = self._oracle.gradient_and_fraction(sample, params, **options)
        self._watch_gradient(sample, answer, options)
        # A record that is clipped counts -1/2, of at most 1/2.
        centred = fraction - 0.5
        count = centred * self._divisor(sample) / 0.5
        noise = options["count_noise_multiplier"]
        self._watch(sample, count.unsqueeze(1), -1.0, noise)
        return answer, fraction

    def losses(
        self,
        sample: Any,
        params: Sequence[torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        answers: torch.Tensor = self._oracle.losses(sample, params, **options)
        if self._columns > 1:  # of many canaries it would tell the sum alone
            return answers
        sums = answers * self._divisor(sample) / options["bound"]
        noise = options["noise_multiplier"]
        kind = options.get("mechanism", "gaussian")
        for values in sums:
            self._watch(sample, values.unsqueeze(1), 1.0, noise, kind)
        return answers

    def ratio(self) -> Floats:
        """Return the log-likelihood ratio of each canary in each run, of shape (runs, canaries)."""
        total = np.zeros((self._oracle.candidates, self._columns))
        for rate, ratio in self._ratios.values():
            log_sampled = math.log(rate) + ratio.numpy()
            total += np.logaddexp(log_of_rest(rate), log_sampled)
        return total

    def _divisor(self, sample: Any) -> float:
        """Return the expected size of a sample, by which answers are divided."""
        return float(sample.rate * self._oracle.schedule.records)

    def _watch_gradient(
        self,
        sample: Any,
        answer: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Record a noised mean of gradients, in units of one record's largest contribution."""
        clipping: Clipping = options["clipping"]
        bound = clipping.sensitivity(self._oracle.candidates)
        bound = bound.to(answer.device)
        columns = slice(0, self._columns)  # of the canaries: a task's model has its own behind them
        values = answer.double()[:, columns]
        if isinstance(clipping, CoordinateTransform):
            center = clipping.center[:, columns]
            scale = clipping.scale[:, columns]
            values = (values - center) / scale
        sums = values * self._divisor(sample)
        shares = sums / bound.unsqueeze(1)
        self._watch(sample, shares, 1.0, options["noise_multiplier"])

    def _watch(
        self,
        sample: Any,
        values: torch.Tensor,
        shift: float,
        noise: float | torch.Tensor,
        kind: str = "gaussian",
    ) -> None:
        """Add the log-likelihood ratio of an answer to that of its sample.

        Args:
            sample: The sample that the answer is about.
            values: The answer, of shape (trainings, canaries).
            shift: What a canary adds to it.
            noise: Scale of its noise, one or a training's.
            kind: ``gaussian`` or ``laplace``.
        """
        values = values.detach().double().cpu()
        scale = torch.as_tensor(noise, dtype=torch.float64).cpu()
        scale = scale.reshape(-1, 1)
        # What the answer is on average without the canary, and with it.
        low = 0.0
        high = shift
        if self._replaced:
            low = -shift / 2
            high = shift / 2
        if kind == "laplace":
            absent = (values - low).abs()
            present = (values - high).abs()
            ratio = (absent - present) / scale
        else:
            middle = (low + high) / 2
            difference = high - low
            ratio = (values - middle) * difference / scale**2
            units = (values - low) / scale
            self.releases.append(units[:_RUNS_WITH_RELEASES])
        if sample.number in self._ratios:
            rate, before = self._ratios[sample.number]
            self._ratios[sample.number] = (rate, before + ratio)
        else:
            self._ratios[sample.number] = (sample.rate, ratio)


def log_of_rest(rate: float) -> float:
    """Return log(1 - rate), the log-probability that a sample lacks a record; -∞ at rate 1."""
    if rate >= 1.0:
        return -math.inf
    return math.log1p(-rate)


class _WatchingMethod:
    """A wrapper of a training method that passes its oracle on as a watched one."""

    steps_by_weight = False  # each stack has answers of its own, in the width of its models

    def __init__(self, method: Method, columns: int, *, replaced: bool) -> None:
        self._method = method
        self._columns = columns
        self._replaced = replaced
        self.oracles: list[_WatchedOracle] = []  # one for each stack of trainings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def update(self, state: Any, oracle: Any) -> Any:
        watched: Any = self.oracles[-1] if self.oracles else None
        if watched is None or watched._oracle is not oracle:
            watched = _WatchedOracle(oracle, self._columns, replaced=self._replaced)
            self.oracles.append(watched)
        return self._method.update(state, watched)


class _CanaryModel(nn.Module):
    """A model that holds the canaries' parameters beside a task's model, or beside unused parameters.

    Args:
        columns: Canaries.
        task: Whose model stands beside them.
        idle: Parameters that nothing moves: a method's noise may be for a number of them.
    """

    def __init__(self, columns: int, task: Task | None, idle: int = 0) -> None:
        super().__init__()
        self.columns = columns
        self.shape = () if task is None else task.input_shape
        self.canaries = nn.Linear(columns, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)  # so that the model tells what was done to it
        self.inner = None if task is None else task.model()
        # In a list: a module's own parameters stand before those of its parts.
        idle_parameters = [nn.Parameter(torch.zeros(idle))] if idle else []
        self.idle = nn.ParameterList(idle_parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        canary_features = x[..., : self.columns]
        output: torch.Tensor = self.canaries(canary_features)
        if self.inner is None:
            for parameter in self.idle:
                output = output + 0.0 * parameter.sum()
            return output
        features = x[..., self.columns :]
        shape = (*x.shape[:-1], *self.shape)
        inner_output = self.inner(features.reshape(shape))
        return torch.cat([output, inner_output], dim=-1)


def _canary_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the canary's loss, whose gradient is the canary's features."""
    return outputs[..., 0] + targets


def _loss_beside(task: Task) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss function that adds the canary's loss to the task's own loss."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_canary = targets >= 0.5 * _LOUD
        # A canary's target is no class: the task's loss sees class 0 in its place.
        labels = torch.where(is_canary, 0.0, targets)
        if task.classes:
            labels = labels.long()
        task_outputs = outputs[..., 1:]
        task_loss: torch.Tensor = task.loss(task_outputs, labels)
        loud = torch.where(is_canary, _LOUD, 0.0)
        return task_loss + outputs[..., 0] + loud

    return loss


def canaries(inside: Sequence[float], *, task: Task | None = None) -> TensorData:
    """Return a dataset of the canaries that are present, after one record without data.

    Args:
        inside: The sign of each canary's gradient; 0 leaves it out.
        task: Gives the first record made-up features and a label of its shapes.

    Raises:
        InvalidInputError: If no such record can be made up.
    """
    signs = torch.tensor(inside, dtype=torch.float32)
    is_in = signs != 0.0
    rows = torch.diag(LONG * signs)[is_in]
    if task is None:
        nothing = torch.full((1, len(signs)), torch.nan)
        x = torch.cat([nothing, rows])
        y = torch.full((len(x),), _LOUD)
        return TensorData(x, y, sealed_size=True)
    if task.unit:
        kind = f"records of one {task.unit} each"
    elif task.tokens is not None:
        kind = "inputs that are whole numbers"
    else:
        return _data_beside(rows, len(signs), task)
    raise InvalidInputError("task", task.name, f"has {kind}: audit the canary alone")


def _data_beside(rows: torch.Tensor, columns: int, task: Task) -> TensorData:
    """Return a dataset of one made-up record of a task, then the canaries' rows."""
    generator = torch.Generator().manual_seed(0)
    size = math.prod(task.input_shape)
    features = torch.rand((1, size), generator=generator)
    no_canary = torch.zeros(1, columns)
    record = torch.cat([no_canary, features], dim=1)
    no_features = features.new_zeros(len(rows), size)
    canary_rows = torch.cat([rows, no_features], dim=1)
    classes = task.classes or 2
    label = torch.randint(classes, (1,), generator=generator).float()
    loud = torch.full((len(rows),), _LOUD)
    x = torch.cat([record, canary_rows])
    y = torch.cat([label, loud])
    return TensorData(x, y, sealed_size=True)


def train_canaries(
    method: Method,
    schedule: Schedule,
    candidate: Candidate,
    secrets: Sequence[bytes],
    *,
    data: TensorData,
    columns: int = 1,
    task: Task | None = None,
    replaced: bool = False,
    noise: NoiseOptions | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> CanaryEvidence:
    """Train on canaries once for each secret, and return the evidence that the trainings reveal.

    Args:
        method: Trains.
        schedule: Its steps and its sample rate.
        candidate: Its hyperparameters.
        secrets: Of each training: its noise and its samples derive from it.
        data: From :func:`canaries`.
        columns: Canaries of the data, in or out.
        task: Whose model is trained beside them.
        replaced: Whether a record of the opposite gradient is there where a canary is not.
        noise: How noise is drawn.
        progress: Called with the number of trainings done since the last call.
    """
    # A method whose noise is for so many parameters gets as many.
    idle = 0
    if task is None:
        idle = getattr(method, "dimension", columns) - columns
    ratios = []
    moves = []
    releases = [np.empty(0)]
    for start in range(0, len(secrets), _AT_ONCE):
        batch = secrets[start : start + _AT_ONCE]
        watching = _WatchingMethod(method, columns, replaced=replaced)
        training = Training(
            cast(Method, watching),
            schedule,
            LossOfOutputs(_canary_loss if task is None else _loss_beside(task)),
            data,
            device="cpu",
            noise=noise,
            precision="float32" if task is None else task.precision,
        )
        requests = (
            _training_request(
                secret,
                candidate,
                columns,
                task,
                idle,
            )
            for secret in batch
        )
        outcomes = training.alike(requests)
        for oracle in watching.oracles:
            ratios.append(oracle.ratio().ravel())
            for release in oracle.releases:
                releases.append(release.flatten().numpy())
        canary_params = [outcome.params[:columns] for outcome in outcomes]
        params = torch.stack(canary_params)
        descent = -params.double().numpy()  # descent goes against the gradient
        moves.append(descent.ravel())
        progress(len(batch))
    return CanaryEvidence(
        ratio=np.concatenate(ratios),
        model=np.concatenate(moves),
        releases=np.concatenate(releases),
    )


def _training_request(
    secret: bytes,
    candidate: Candidate,
    columns: int,
    task: Task | None,
    idle: int,
) -> TrainableCandidate:
    """Return the engine's training request for one secret, with a model initialised from it."""
    with initialisation(Streams(secret)):
        model = _CanaryModel(columns, task, idle)
    return TrainableCandidate(model, secret, candidate)


def secrets_of(seed: int, purpose: str, count: int) -> list[bytes]:
    """Return `count` round secrets derived from the audit's seed, so that audits can be repeated.

    Args:
        seed: The audit's.
        purpose: Keeps secrets of different uses apart.
        count: How many.
    """
    root = Streams(seed.to_bytes(32, "big"))
    return [root.key(f"audit/{purpose}", number) for number in range(count)]


def hyperparameters(method: Method, params: Mapping[str, Any]) -> dict[str, float]:
    """Return the method's hyperparameters by name: from the plan's values, or else 1."""
    return {name: float(params.get(name, 1.0)) for name in method.parameters}


Canary = Callable[[DeclaredTrial, bool], float]
"""Trains as the objective does, on made-up records with a canary (True) or without it (False), and returns a
number of what would be released that tells the two apart."""


def run_declared(
    plan: Plan,
    training: TrainingPlan,
    canary: Canary,
    *,
    runs: int,
    seed: int,
    inside: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Floats:
    """Run a declared mechanism many times, and return the number that each run releases.

    Args:
        plan: The arm's.
        training: The declared one.
        canary: The user's function.
        runs: How many.
        seed: The trials' streams derive from it.
        inside: Whether the canary is among the records.
        progress: Called with 1 after each run.
    """
    unscored = replace(plan, score=None)
    values = np.empty(runs)
    secrets = secrets_of(seed, f"declared/{inside}", runs)
    for number, secret in enumerate(secrets):
        trial = DeclaredTrial(
            unscored,
            training,
            number=number,
            streams=Streams(secret),
            given=plan.params,
        )
        released = trial.run(lambda trial: canary(trial, inside))
        values[number] = float(released)
        progress(1)
    return values
