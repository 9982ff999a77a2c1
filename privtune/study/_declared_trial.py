"""A trial of a declared mechanism: it trains by any library, and says what came of it."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.accounting import Event
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.priors import IndependentSampler, Prior
from privtune.strategies import Plan, TrainingPlan, TrialResult
from privtune.study._suggestions import Suggestions
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams

if TYPE_CHECKING:
    import torch
    from optuna.distributions import BaseDistribution

    from privtune.study._shown import ShownTrial
    from privtune.training.mechanism.data import TensorData

_SEED_PYTHON = random.seed  # as it is where no trial runs
OPACUS = "checked against Opacus' accountant"


class DeclaredError(PrivTuneError):
    """An objective of a declared mechanism does something else than was declared and charged."""


class PlanRead(BaseException):
    """Ends a rehearsal where the objective asks for its plan: what follows may touch the data."""


@dataclass(frozen=True)
class DeclaredPlan:
    """What one training of a declared mechanism may do, as it is charged.

    Args:
        event: The event of the training.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> plan = DeclaredPlan(Repeated(100, PoissonSampled(0.1, Gaussian(1.5))))
        >>> plan.noise_multiplier, plan.sample_rate, plan.steps
        (1.5, 0.1, 100)
    """

    event: Event

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity of each release; 0 nowhere."""
        return self._parts()[0]

    @property
    def sample_rate(self) -> float:
        """Probability with which a record joins each Poisson sample; 1 without sampling."""
        return self._parts()[1]

    @property
    def steps(self) -> int:
        """How many releases there are."""
        return self._parts()[2]

    def _parts(self) -> tuple[float, float, int]:
        event, steps, rate = self.event.to_dict(), 1, 1.0
        if event["type"] == "repeated":
            steps, event = event["count"], event["event"]
        if event["type"] == "poisson_sampled":
            rate, event = event["rate"], event["event"]
        if event["type"] in ("gaussian", "laplace"):
            return event["noise_multiplier"], rate, steps
        raise InvalidInputError(
            "trial.plan",
            self.event.type,
            "is no repeated, sampled release of one noise multiplier",
            "Read trial.plan.event.",
        )


@dataclass(frozen=True, eq=False)
class DeclaredResult:
    """What ``trial.result`` returns, and the objective returns with it.

    Args:
        weights: What is released of the artifact, flat.
        shapes: Shapes of its parts by name.
        score: The score of the trial.
    """

    weights: torch.Tensor
    shapes: Mapping[str, tuple[int, ...]]
    score: float | None


class DeclaredTrial(Suggestions):
    """One trial of a declared mechanism, handed to the objective.

    Suggestions come first. Nothing of the data may be used before :attr:`plan` is read: a rehearsal, before
    anything is charged, runs the objective until then.

    The global generators of torch, NumPy and Python stand at the trial's own secret states, and seeding them
    leads to others of these; libraries with generators of their own take :attr:`seed`.

    Args:
        plan: The arm's plan.
        training: What this trial may run.
        number: Its number, as it is shown.
        streams: The trial's random streams.
        given: Hyperparameters that are fixed for this trial.
        sampler: A sampler of the user's own that declares independence.
        live: Optuna's trial, where every trial is paid for.
        validation: What it is scored on; None where nothing is scored.
        score_of: A score function of the user's; None for a metric by its name.
        rehearsal: Whether it ends where the plan is read.

    Example:
        >>> import numpy as np
        >>> import privtune
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(300, 2))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> def objective(trial):  # the difference of two classes' noisy sums
        ...     shrink = trial.suggest_float("shrink", 0.1, 1.0)
        ...     noise = trial.plan.noise_multiplier * np.random.normal(size=2)
        ...     w = shrink * ((2 * y[:200] - 1) @ x[:200] + 2**0.5 * noise)
        ...     return trial.result({"w": w}, score=trial.score(lambda x: (x @ w > 0).astype(int)))
        >>> study = privtune.create_study("sums", budget=privtune.Budget(4.0, 1e-5, name="sums"))
        >>> release = study.optimize(
        ...     objective,
        ...     mechanism=privtune.Mechanism(
        ...         privtune.accounting.Gaussian(1.0), declared_by="the lab", records=200
        ...     ),
        ...     strategy=privtune.strategies.PapernotSteinke(mean_runs=3),
        ...     validation=(x[200:], y[200:]),
        ... )
        >>> study.certificate()["charges"][0]["note"]
        'training declared by the lab; not enforced by PrivTune'
    """

    def __init__(
        self,
        plan: Plan,
        training: TrainingPlan,
        *,
        number: int,
        streams: Streams,
        given: Mapping[str, Any],
        sampler: IndependentSampler | None = None,
        live: ShownTrial | None = None,
        validation: TensorData | None = None,
        score_of: Callable[..., Any] | None = None,
        rehearsal: bool = False,
    ) -> None:
        super().__init__(
            training,
            sealed=plan.is_sealed,
            number=number,
            streams=streams,
            given=given,
            sampler=sampler,
            live=live,
        )
        self._arm = plan
        self._validation, self._score_of, self._rehearsal = validation, score_of, rehearsal
        self._scores: list[float] = []
        self._result: DeclaredResult | None = None
        self._checked = ""
        self.plan_read = False

    @property
    def seed(self) -> int:
        """A secret whole number below 2**63 of this trial's own, for generators that take one."""
        return self._streams.seed("seed")

    @property
    def plan(self) -> DeclaredPlan:
        """What is charged for this training. Read it before anything touches the data."""
        self.plan_read = True
        if self._rehearsal:
            raise PlanRead
        return DeclaredPlan(self._training.event)

    def _suggest(
        self, name: str, distribution: BaseDistribution, prior: Prior | None = None
    ) -> Any:
        if self.plan_read and name not in self.params:
            raise DeclaredError(
                f"The objective suggests {name!r} after it has read trial.plan, where its rehearsal ends and "
                "the data begins. Suggest every hyperparameter before."
            )
        return super()._suggest(name, distribution, prior)

    def check(self, engine: Any) -> None:
        """Hold the history of Opacus' accountant against the charged plan, at the end of the training.

        Args:
            engine: An ``opacus.PrivacyEngine``.

        Raises:
            DeclaredError: If noise multiplier, sampling rate or number of steps differ.

        Example:
            >>> def train(trial):  # by Opacus, whose objects are called as ever
            ...     model, optimizer, loader = engine.make_private(
            ...         module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0,
            ...         noise_multiplier=trial.plan.noise_multiplier,
            ...     )
            ...     train_for(epochs=2)
            ...     trial.check(engine)
            ...     return trial.result(model, score=trial.score(model))
        """
        plan = self.plan
        history = [tuple(entry) for entry in engine.accountant.history]
        known = plan.noise_multiplier, plan.sample_rate
        same = all(
            math.isclose(one, other, rel_tol=1e-9)
            for entry in history
            for one, other in zip(entry[:2], known, strict=True)
        )
        if not same or sum(steps for *_, steps in history) != plan.steps:
            raise DeclaredError(
                f"Opacus' accountant has noted (noise multiplier, sampling rate, steps) {history}, but "
                f"{(*known, plan.steps)} was charged. Take all three from trial.plan; "
                "privtune.integrations.opacus declares what a DataLoader runs."
            )
        self._checked = OPACUS

    def score(self, model: Any) -> float:
        """Score what was trained on the declared split: exactly if that is public, else noised.

        Args:
            model: A torch module, or a function of inputs ``[n, ...]`` to outputs, both NumPy arrays: one
                number a class, or whole numbers ``[n]`` that are labels. It is called on one record at a
                time.

        Returns:
            The score, higher is better. NaN where the strategy chooses nothing.

        Raises:
            DeclaredError: If it is called a second time on a private split.
        """
        from privtune.training.mechanism.scoring import OfRecords, cross_entropy, score

        terms, data = self._arm.score, self._validation
        if terms is None or data is None:
            self._scores.append(math.nan)
            return math.nan
        if self._scores and terms.event is not None:
            raise DeclaredError(
                "trial.score was called twice, but a trial is charged for one look at the private "
                "validation split. Score once, at the end."
            )
        loss: Any = cross_entropy if self._score_of is None else OfRecords(self._score_of)
        rng, module = self._streams.numpy("score"), _as_module(model)
        for weights in module.parameters():  # arrays of NumPy's are of more digits than weights
            if data.x.is_floating_point() and weights.is_floating_point():
                data = replace(data, x=data.x.to(weights.dtype))
            break
        self._scores.append(score(terms, module, data, rng=rng, loss=loss))
        return self._scores[-1]

    def result(self, artifact: Any, *, score: float | None = None) -> DeclaredResult:
        """Return what the objective returns: what is released if the trial wins, with its score.

        Args:
            artifact: A torch module, whose trainable parameters are released; a state dict; or arrays by
                name.
            score: What ``trial.score`` returned, where the strategy chooses by it.

        Raises:
            DeclaredError: If the score is another number, or the plan was not read.
            InvalidInputError: If the artifact holds what is no array of real floating-point numbers.
        """
        import torch

        if not self.plan_read:
            raise DeclaredError(
                "The objective trained without reading trial.plan, so nothing says that the charged noise "
                "was used. Take the noise from trial.plan."
            )
        if torch.initial_seed() != _mark(self._streams):
            raise DeclaredError(
                "The objective has seeded torch's global generator, so every trial would add the same noise, "
                "and whoever knows the seed could subtract it. Seed nothing: the global generators stand "
                "at the trial's own secret states."
            )
        known: float | None = None
        if self._arm.score is not None:
            if score is None or not any(score == each for each in self._scores):
                raise DeclaredError(
                    "trial.result was given a score that trial.score did not give, so nothing says that it "
                    "is public or noised. Return trial.result(model, score=trial.score(model))."
                )
            known = float(score)
        weights, shapes = _flat(artifact)
        if known is not None and not bool(weights.isfinite().all()):
            known = -math.inf
        self._result = DeclaredResult(weights, shapes, known)
        return self._result

    def finish(self, value: object, index: int) -> TrialResult:
        """Return the trial's result as it is kept.

        Args:
            value: What the objective returned.
            index: The trial's place among the arm's results.

        Raises:
            DeclaredError: If it is not what ``trial.result`` gave.
        """
        if self._result is None or value is not self._result:
            raise DeclaredError(
                "The objective must return what trial.result(model, score=...) gave at its end, but it "
                f"returned {type(value).__name__}."
            )
        return TrialResult(
            index=index,
            params=self.params,
            weights=self._result.weights,
            score=self._result.score,
            shapes=self._result.shapes,
            checked=self._checked,
        )


@contextmanager
def own_generators(streams: Streams) -> Iterator[None]:
    """Set the global generators of torch, NumPy and Python to a trial's own states, for a block.

    Who seeds them inside gets other states of the trial: scripts and Trainers seed by 0 or 42, with which
    every trial would add the same noise, known to everybody.
    """
    import torch

    setting = 0

    def seed(*_: object, **__: object) -> torch.Generator:
        nonlocal setting
        setting += 1
        _set_generators(streams, setting)
        return torch.default_generator

    with ExitStack() as undo:
        undo.enter_context(GLOBAL_GENERATOR)
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(random.setstate, random.getstate())
        _set_generators(streams, setting)
        for owner, name in ((torch, "manual_seed"), (np.random, "seed"), (random, "seed")):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, seed)
        yield


def _set_generators(streams: Streams, setting: int) -> None:
    """Derive whole states from the secret: of a seed torch keeps 32 bits, which can all be tried."""
    import torch

    state = streams.generator("torch", setting).get_state()
    mark = np.array([_mark(streams)], dtype="<u8")  # what torch.initial_seed() returns from here on
    state[:8] = torch.from_numpy(mark.view(np.uint8))
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(streams.seed("cuda", setting))
    words = hashlib.shake_256(streams.key("numpy", setting)).digest(4 * 624)
    np.random.set_state(("MT19937", np.frombuffer(words, dtype=np.uint32), 624, 0, 0.0))
    _SEED_PYTHON(streams.key("python", setting))


def _mark(streams: Streams) -> int:
    return streams.seed("mark")


def _as_module(model: Any) -> torch.nn.Module:
    """Return a model that scores are computed of; a function of arrays as a module."""
    import torch

    if isinstance(model, torch.nn.Module):
        return getattr(model, "_module", model)  # without the hooks of Opacus
    if not callable(model):
        raise InvalidInputError(
            "model", type(model).__name__, "must be a torch module, or a function of arrays"
        )

    class OfArrays(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = torch.as_tensor(np.asarray(model(x.detach().cpu().numpy())))
            if found.ndim == 1 and not found.is_floating_point():
                return torch.nn.functional.one_hot(found.long()).double()
            return found

    return OfArrays()


def _flat(artifact: Any) -> tuple[torch.Tensor, dict[str, tuple[int, ...]]]:
    """Return what is released of an artifact, flat, and the shapes of its parts."""
    import torch

    if isinstance(artifact, torch.nn.Module):
        bare = getattr(artifact, "_module", artifact)
        artifact = {name: p for name, p in bare.named_parameters() if p.requires_grad}
    if not isinstance(artifact, Mapping) or not artifact:
        raise InvalidInputError(
            "artifact",
            type(artifact).__name__,
            "must be a torch module, a state dict, or a dict of arrays by name",
        )
    parts: dict[str, torch.Tensor] = {}
    for name, part in artifact.items():
        try:
            parts[str(name)] = torch.as_tensor(part).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise _not_released(name, type(part).__name__) from None
        if not parts[str(name)].is_floating_point():
            raise _not_released(name, parts[str(name)].dtype)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    return torch.cat([part.reshape(-1) for part in parts.values()]).clone(), shapes


def _not_released(name: object, kind: object) -> InvalidInputError:
    return InvalidInputError(
        f"artifact[{name!r}]", str(kind), "must be an array of real floating-point numbers"
    )
