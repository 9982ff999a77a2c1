"""Trainings of canaries by the engine, and runs of a declared mechanism by the user's function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.strategies import Plan, TrainingPlan
from privtune.study.declared import DeclaredTrial
from privtune.tasks import Task
from privtune.training.engine.train import Made, Training, initialisation
from privtune.training.mechanism.clipping import Clipping, CoordinateTransform
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import OfOutputs
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods._base import Candidate, Method

Floats = npt.NDArray[np.float64]

LONG = 1e4
"""Norm of a canary's gradient: longer than any clipping norm."""

_LOUD = 1e9  # its loss: above every bound, however its features and the parameters multiply
_AT_ONCE = 1024  # trainings between two signs of progress
_KEPT = 64  # runs of a pass whose single releases are kept, for the law of the noise


@dataclass(frozen=True, eq=False)
class Seen:
    """What trainings of canaries gave away."""

    ratio: Floats
    model: Floats
    releases: Floats


class _Watched:
    """An oracle that looks at its own answers."""

    # The gradient of canary i points along coordinate i; clipped, it is as long as it may be. A threshold
    # on the likelihood ratio is the best test of a known mechanism, and a test of any.

    def __init__(self, oracle: Any, columns: int, *, replaced: bool) -> None:
        self._oracle, self._columns, self._replaced = oracle, columns, replaced
        self.seen: dict[int, tuple[float, torch.Tensor]] = {}
        self.releases: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    def gradient(self, sample: Any, params: torch.Tensor, **options: Any) -> torch.Tensor:
        answer: torch.Tensor = self._oracle.gradient(sample, params, **options)
        self._see_gradient(sample, answer, options["clipping"], options["noise_multiplier"])
        return answer

    def gradient_and_fraction(
        self, sample: Any, params: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        answer, fraction = self._oracle.gradient_and_fraction(sample, params, **options)
        self._see_gradient(sample, answer, options["clipping"], options["noise_multiplier"])
        # A record that is clipped counts -1/2, of at most 1/2.
        count = (fraction - 0.5) * self._divisor(sample) / 0.5
        self._see(sample, count.unsqueeze(1), -1.0, options["count_noise_multiplier"])
        return answer, fraction

    def losses(self, sample: Any, params: Sequence[torch.Tensor], **options: Any) -> torch.Tensor:
        answers: torch.Tensor = self._oracle.losses(sample, params, **options)
        if self._columns == 1:  # of many canaries it would tell the sum alone
            for answer in answers * self._divisor(sample) / options["bound"]:
                kind = options.get("mechanism", "gaussian")
                self._see(sample, answer.unsqueeze(1), 1.0, options["noise_multiplier"], kind)
        return answers

    def ratio(self) -> Floats:
        """Return the ratio of each canary in each run; a sample holds it at its rate."""
        total = np.zeros((self._oracle.candidates, self._columns))
        for rate, of_sample in self.seen.values():
            mixed = math.log1p(-rate) if rate < 1.0 else -math.inf
            total += np.logaddexp(mixed, math.log(rate) + of_sample.numpy())
        return total

    def _divisor(self, sample: Any) -> float:
        return float(sample.rate * self._oracle.schedule.records)

    def _see_gradient(
        self, sample: Any, answer: torch.Tensor, clipping: Clipping, noise: float | torch.Tensor
    ) -> None:
        bound = clipping.sensitivity(self._oracle.candidates).to(answer.device)
        values = answer.double()[:, : self._columns]
        if isinstance(clipping, CoordinateTransform):
            own = slice(0, self._columns)
            values = (values - clipping.center[:, own]) / clipping.scale[:, own]
        self._see(sample, values * self._divisor(sample) / bound.unsqueeze(1), 1.0, noise)

    def _see(
        self,
        sample: Any,
        values: torch.Tensor,
        shift: float,
        noise: float | torch.Tensor,
        kind: str = "gaussian",
    ) -> None:
        values = values.detach().double().cpu()
        scale = torch.as_tensor(noise, dtype=torch.float64).cpu().reshape(-1, 1)
        low, high = (-shift / 2, shift / 2) if self._replaced else (0.0, shift)
        if kind == "laplace":
            found = ((values - low).abs() - (values - high).abs()) / scale
        else:
            found = (values - (low + high) / 2) * (high - low) / scale**2
            self.releases.append(((values - low) / scale)[:_KEPT])
        rate, known = self.seen.get(sample.number, (sample.rate, torch.zeros_like(found)))
        self.seen[sample.number] = (rate, known + found)


class _Watching:
    """A method that shows its oracle's answers on their way; else the method itself."""

    def __init__(self, method: Method, columns: int, *, replaced: bool) -> None:
        self._method, self._columns, self._replaced = method, columns, replaced
        self.made: list[_Watched] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def update(self, state: Any, oracle: Any) -> Any:
        if not self.made or self.made[-1]._oracle is not oracle:
            self.made.append(_Watched(oracle, self._columns, replaced=self._replaced))
        watched: Any = self.made[-1]
        return self._method.update(state, watched)


class _Canaried(nn.Module):
    """The canaries' parameters first, then the task's model, if there is one, on the rest."""

    def __init__(self, columns: int, task: Task | None, idle: int = 0) -> None:
        super().__init__()
        self.columns, self.shape = columns, () if task is None else task.input_shape
        self.canaries = nn.Linear(columns, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)  # so that the model tells what was done to it
        self.inner = None if task is None else task.model()
        # In a list: a module's own parameters stand before those of its parts.
        self.idle = nn.ParameterList([nn.Parameter(torch.zeros(idle))] if idle else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.canaries(x[..., : self.columns])
        if self.inner is None:
            for parameter in self.idle:
                own = own + 0.0 * parameter.sum()
            return own
        outputs = self.inner(x[..., self.columns :].reshape(*x.shape[:-1], *self.shape))
        return torch.cat([own, outputs], dim=-1)


def _loss_of(task: Task | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss whose gradient is the canary's features, plus what the task's own adds."""

    def alone(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[..., 0] + targets

    def beside(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert task is not None  # noqa: S101 (for the type checker)
        loud = targets >= 0.5 * _LOUD
        quiet = torch.where(loud, 0.0, targets)
        own: torch.Tensor = task.loss(outputs[..., 1:], quiet.long() if task.classes else quiet)
        return own + outputs[..., 0] + torch.where(loud, _LOUD, 0.0)

    return alone if task is None else beside


def canaries(inside: Sequence[float], *, task: Task | None = None) -> TensorData:
    """Return a dataset: a record that holds no data, and the canaries that are in."""
    signs = torch.tensor(inside, dtype=torch.float32)
    rows = torch.diag(LONG * signs)[signs != 0.0]
    if task is None:
        nothing = torch.full((1, len(signs)), torch.nan)
        x = torch.cat([nothing, rows])
        return TensorData(x, torch.full((len(x),), _LOUD), sealed_size=True)
    if task.unit or task.tokens is not None:
        has = f"records of one {task.unit} each" if task.unit else "inputs that are whole numbers"
        raise InvalidInputError("task", task.name, f"has {has}: audit the canary alone")
    made = torch.Generator().manual_seed(0)
    features = torch.rand((1, math.prod(task.input_shape)), generator=made)
    other = torch.cat([torch.zeros(1, len(signs)), features], dim=1)
    rows = torch.cat([rows, features.new_zeros(len(rows), features.shape[1])], dim=1)
    label = torch.randint(task.classes or 2, (1,), generator=made).float()
    y = torch.cat([label, torch.full((len(rows),), _LOUD)])
    return TensorData(torch.cat([other, rows]), y, sealed_size=True)


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
) -> Seen:
    """Train on canaries, once for each secret, in stacks as large as the engine makes them."""
    # A method whose noise is for so many parameters gets as many.
    idle = getattr(method, "dimension", columns) - columns if task is None else 0
    found = []
    for start in range(0, len(secrets), _AT_ONCE):
        own = list(secrets[start : start + _AT_ONCE])
        watching = _Watching(method, columns, replaced=replaced)
        training = Training(
            cast(Method, watching),
            schedule,
            OfOutputs(_loss_of(task)),
            data,
            device="cpu",
            noise=noise,
            precision="float32" if task is None else task.precision,
        )
        trained = training.alike(_made(secret, candidate, columns, task, idle) for secret in own)
        ratio = np.concatenate([oracle.ratio() for oracle in watching.made])
        params = torch.stack([outcome.params[:columns] for outcome in trained])
        model = -params.double().numpy()  # descent goes against the gradient
        releases = [value.flatten() for oracle in watching.made for value in oracle.releases]
        kept = torch.cat([torch.empty(0, dtype=torch.float64), *releases]).numpy()
        found.append((ratio.ravel(), model.ravel(), kept))
        progress(len(own))
    return Seen(*(np.concatenate(part) for part in zip(*found, strict=True)))


def _made(secret: bytes, candidate: Candidate, columns: int, task: Task | None, idle: int) -> Made:
    with initialisation(Streams(secret)):
        return Made(_Canaried(columns, task, idle), secret, candidate)


def secrets_of(seed: int, purpose: str, count: int) -> list[bytes]:
    """Return secrets of made-up rounds: an audit can be repeated, and spends nobody's privacy."""
    root = Streams(seed.to_bytes(32, "big"))
    return [root.key(f"audit/{purpose}", number) for number in range(count)]


def hyperparameters(method: Method, given: Mapping[str, Any]) -> dict[str, float]:
    """Return what a method asks of a candidate: as given, else 1."""
    return {name: float(given.get(name, 1.0)) for name in method.parameters}


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
) -> npt.NDArray[np.float64]:
    """Run a declared mechanism many times; return what each release says of the canary."""
    found = np.empty(runs)
    for number, secret in enumerate(secrets_of(seed, f"declared/{inside}", runs)):
        streams = Streams(secret)
        trial = DeclaredTrial(
            replace(plan, score=None), training, number=number, streams=streams, given=plan.params
        )
        found[number] = float(trial.run(lambda trial: canary(trial, inside)))
        progress(1)
    return found
