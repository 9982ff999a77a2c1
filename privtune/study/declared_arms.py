"""Arms of a declared mechanism, whose candidates another library trains under an event the user declares."""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.accounting import CalibrationError, Event, Gaussian, PoissonSampled, Repeated
from privtune.accounting import epsilon as account
from privtune.accounting.checks import check_integer, check_number
from privtune.accounting.registry import training as first_training
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import RECORD, Dataset
from privtune.names import check_text
from privtune.spaces import Prior, SearchSpace
from privtune.strategies import (
    Ending,
    Plan,
    PlanningContext,
    StrategyError,
    TrainingPlan,
    TrialResult,
    plan_arm,
)
from privtune.strategies.arms import check_given
from privtune.study.arm_rounds import Batch, Files, StudyRound, optuna_sampler, own_sampler
from privtune.study.declared_data import holds_validation
from privtune.study.engine_log import CHECKED, ChargedTraining, EngineLog, is_close
from privtune.study.lifecycle import Life, Trainer
from privtune.study.program import Program, describe_declared
from privtune.study.rehearsal import refuse_unasked
from privtune.study.replacement import replace_attribute
from privtune.study.score_rehearsal import models_of, rehearse_score
from privtune.study.stored_results import Measurement
from privtune.study.trial import Suggestions
from privtune.tasks import MECHANISM, PublicFacts
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams
from privtune.training.methods.declared_mechanism import DeclaredMethod

if TYPE_CHECKING:
    import torch
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from privtune.spaces import IndependentSampler
    from privtune.strategies import Outcome, Strategy
    from privtune.study.trials import ShownTrial
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.estimates import ScoreEstimate
    from privtune.training.mechanism.scoring import Scored

_MOST = 10**12  # records: more than anybody has
_TRIES = 20
_VALIDATION = "validation.sha256"
_SEED_PYTHON = random.seed  # as it is where no trial runs
_WORDS = 624  # of 32 bits: the state of a Mersenne Twister
_LEAST_COMPARED = "compared.least"


class DeclaredError(PrivTuneError):
    """An objective of a declared mechanism does something else than was declared and charged."""


class _PlanRead(BaseException):
    """A signal that ends a rehearsal when the objective reads its plan."""


@dataclass(frozen=True)
class Mechanism:
    """A training by another library, with the privacy cost that somebody declares for it.

    **Guarantee**: none by PrivTune. What is charged is the declared event; that the objective's training is
    of that event is up to whoever declares it, and certificates say so by name.

    Args:
        event: What one training costs (``privtune.accounting``). Its noise multipliers are proportions:
            planning multiplies them by one factor, so that the arm meets its ε.
        declared_by: Who declares it, as certificates name them.
        records: Number of training records, declared public.
        calibrate: False keeps the event as it is, and the arm costs what it costs.
        data: The data set of these records, if it is at hand: ``trial.check`` compares what Opacus sampled
            with it. It is neither read before the charge nor stored.

    Raises:
        InvalidInputError: If something is no event, no name or no number of records.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> Mechanism(Gaussian(1.0), declared_by="the statistics group", records=1000).calibrate
        True
    """

    event: Event
    declared_by: str
    records: int = field(kw_only=True)
    calibrate: bool = field(default=True, kw_only=True)
    data: Any = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise InvalidInputError(
                "event", type(self.event).__name__, "must be an event of privtune.accounting"
            )
        if not check_text(self.declared_by, "declared_by").strip():
            raise InvalidInputError("declared_by", self.declared_by, "must name who declares it")
        check_integer("records", self.records, at_least=1, at_most=_MOST)

    @classmethod
    def dpsgd(
        cls, *, records: int, epochs: float, expected_batch_size: int, declared_by: str
    ) -> Mechanism:
        """Declare DP-SGD: Poisson samples, gradients that are clipped record by record, Gaussian noise.

        Args:
            records: Number of training records, declared public.
            epochs: Expected passes over them, above 0.
            expected_batch_size: Expected records of a sample.
            declared_by: Who declares it.

        Returns:
            The mechanism; its noise is what the arm's ε asks for.

        Example:
            >>> declared = {"epochs": 5, "expected_batch_size": 50, "declared_by": "the lab"}
            >>> Mechanism.dpsgd(records=1000, **declared).event.count
            100
        """
        check_integer("records", records, at_least=1, at_most=_MOST)
        check_number("epochs", epochs, above=0.0)
        size = check_integer(
            "expected_batch_size", expected_batch_size, at_least=1, at_most=records
        )
        schedule = Schedule.from_epochs(records=records, epochs=epochs, expected_batch_size=size)
        step = PoissonSampled(schedule.sample_rate, Gaussian(1.0))
        return cls(Repeated(schedule.steps, step), declared_by, records=records)

    @property
    def schedule(self) -> Schedule:
        """The records, sampling rate and steps of the event; one unsampled step if it states none."""
        steps, sample_rate = first_training(self.event) or (1, 1.0)
        return Schedule(self.records, sample_rate, steps)

    @property
    def method(self) -> DeclaredMethod:
        """The declared event as the training method of a plan."""
        document = self.event.to_json()
        return DeclaredMethod(document, self.declared_by, self.calibrate)


@dataclass(frozen=True)
class DeclaredPlan:
    """The noise, sampling rate and steps that one training of a declared mechanism is charged for.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> plan = DeclaredPlan(Repeated(100, PoissonSampled(0.1, Gaussian(1.5))))
        >>> plan.noise_multiplier, plan.sample_rate, plan.steps
        (1.5, 0.1, 100)
    """

    event: Event

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity of each release, above 0."""
        noise_multiplier, _, _ = self._parts()
        return noise_multiplier

    @property
    def sample_rate(self) -> float:
        """Probability with which a record joins each Poisson sample; 1 without sampling."""
        _, sample_rate, _ = self._parts()
        return sample_rate

    @property
    def steps(self) -> int:
        """The number of noised releases that one training makes."""
        _, _, steps = self._parts()
        return steps

    def _parts(self) -> tuple[float, float, int]:
        """Return noise multiplier, sampling rate and steps; refuse an event that has not one of each."""
        event = self.event.to_dict()
        steps = 1
        sample_rate = 1.0
        if event["type"] == "repeated":
            steps = event["count"]
            event = event["event"]
        if event["type"] == "poisson_sampled":
            sample_rate = event["rate"]
            event = event["event"]
        if event["type"] in ("gaussian", "laplace"):
            return event["noise_multiplier"], sample_rate, steps
        raise InvalidInputError(
            "trial.plan",
            self.event.type,
            "is no repeated, sampled release of one noise multiplier",
            "Read trial.plan.event.",
        )


@dataclass(frozen=True, eq=False)
class DeclaredResult:
    """A trial's released parameters as one flat tensor, with their shapes by name and the score."""

    weights: torch.Tensor
    shapes: Mapping[str, tuple[int, ...]]
    score: float | None
    estimate: ScoreEstimate | None = None


class DeclaredTrial(Suggestions):
    """One trial of a declared mechanism, handed to the objective.

    Suggestions come first. Nothing of the data may be used before :attr:`plan` is read: a rehearsal, before
    anything is charged, runs the objective until then.

    The global generators of torch, NumPy and Python stand at the trial's own secret states, and seeding them
    leads to others of these; libraries with generators of their own take :attr:`seed`.

    Args:
        plan: The arm's plan.
        training: What this trial may run.
        validation: What it is scored on; None where nothing is scored.
        score_of: A score function of the user's; None for a metric by its name.
        mechanism: What is declared; None for made-up records, of which nothing is declared.
        rehearsal: Whether it ends where the plan is read.
        **given: What ``Suggestions`` takes.

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
        >>> release = study.optimize_declared(
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
        validation: TensorData | None = None,
        score_of: Callable[..., Any] | None = None,
        mechanism: Mechanism | None = None,
        rehearsal: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(training, sealed=plan.is_sealed, **given)
        self._mechanism = mechanism
        self._engines = EngineLog()
        self._engine: Any = None
        self._arm = plan
        self._validation = validation
        self._score_of = score_of
        self._rehearsal = rehearsal
        self._scores: list[Scored] = []
        self._result: DeclaredResult | None = None
        self._checked = ""
        self._plan_read = False
        self._models: list[torch.nn.Module] = []  # that a rehearsal's objective holds

    @property
    def seed(self) -> int:
        """A secret whole number below 2**63 of this trial's own, for generators that take one."""
        return self._streams.seed("seed")

    @property
    def plan(self) -> DeclaredPlan:
        """The charged noise, rate and steps of this training, to be read before the data is touched."""
        self._plan_read = True
        if self._rehearsal:
            self._models = models_of(inspect.currentframe().f_back, __file__)  # type: ignore[union-attr]
            raise _PlanRead
        return DeclaredPlan(self._training.event)

    def _suggest(
        self, name: str, distribution: BaseDistribution, prior: Prior | None = None
    ) -> object:
        """Suggest a value; refuse a new name after the plan is read, where the rehearsal ended."""
        if self._plan_read and name not in self.params:
            raise DeclaredError(
                f"The objective suggests {name!r} after it has read trial.plan, where its rehearsal ends and "
                "the data begins. Suggest every hyperparameter before."
            )
        return super()._suggest(name, distribution, prior)

    def run(self, objective: Callable[[DeclaredTrial], object]) -> Any:
        """Call an objective with this trial's random states while recording what Opacus does.

        Args:
            objective: The function of a trial; PrivTune calls it here.

        Returns:
            What the objective returns.
        """
        with own_generators(self._streams), self._engines.watch():
            return objective(self)

    def check(self, engine: object) -> None:
        """Compare what Opacus did in this trial with the charge, at the end of the training.

        Compared are the history of Opacus' accountant; the data set, the sampling and the seeds of what
        ``make_private`` returned; the number of records, the noise and the norm of each step; and whether
        anything else trained the same parameters. Where other parameters were trained in the same trial,
        nothing can tell what for: then the release says this in place of *checked*.

        Args:
            engine: The ``opacus.PrivacyEngine`` whose ``make_private`` the trial called.

        Raises:
            DeclaredError: If something differs from what was charged.
            InvalidInputError: If this is no engine of Opacus.

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
        _check_history(engine, plan)
        mechanism = self._mechanism
        training = ChargedTraining(
            noise_multiplier=plan.noise_multiplier,
            sample_rate=plan.sample_rate,
            steps=plan.steps,
            records=None if mechanism is None else mechanism.records,
            data=None if mechanism is None else mechanism.data,
            seed=self.seed,
        )
        mistake = self._engines.find_mistake(engine, training)
        if mistake:
            raise DeclaredError(
                f"What Opacus did in this trial is not what was charged: {mistake}. Train on the loader "
                "and by the optimizer that make_private returned, and by nothing else, as "
                "docs/guide/declared.md shows."
            )
        self._engine = engine
        self._checked = self._engines.describe(training)

    def score(self, model: object) -> float:
        """Return the score of a trained model on the validation split, noised unless the split is public.

        Args:
            model: A torch module, or a function of inputs ``[n, ...]`` to outputs, both NumPy arrays: one
                number a class, or whole numbers ``[n]`` that are labels. It is called on one record at a
                time.

        Returns:
            The score, higher is better. NaN where the strategy chooses nothing.

        Raises:
            DeclaredError: If it is called a second time on a private split.
        """
        from privtune.training.mechanism.scoring import LossOfRecords, Scored, cross_entropy, score

        terms = self._arm.score
        data = self._validation
        if terms is None or data is None:
            self._scores.append(Scored(math.nan))
            return math.nan
        if self._scores and terms.event is not None:
            raise DeclaredError(
                "trial.score was called twice, but a trial is charged for one look at the private "
                "validation split. Score once, at the end."
            )
        loss: Any = cross_entropy if self._score_of is None else LossOfRecords(self._score_of)
        rng = self._streams.numpy("score")
        module = _as_module(model)
        weights = next(module.parameters(), None)
        if weights is not None and weights.is_floating_point() and data.x.is_floating_point():
            # A module in float64 refuses records in float32.
            data = replace(data, x=data.x.to(weights.dtype))
        scored = score(terms, module, data, rng=rng, loss=loss)
        self._scores.append(scored)
        return scored.score

    def result(self, artifact: object, *, score: float | None = None) -> DeclaredResult:
        """Return the result for the objective to return: the parameters to release, with their score.

        Args:
            artifact: A torch module, whose trainable parameters are released; a state dict; or arrays by
                name.
            score: What ``trial.score`` returned, where the strategy chooses by it.

        Raises:
            DeclaredError: If the score is another number, or the plan was not read.
            InvalidInputError: If the artifact holds what is no array of real floating-point numbers.
        """
        import torch

        if not self._plan_read:
            raise DeclaredError(
                "The objective trained without reading trial.plan, so nothing says that the charged noise "
                "was used. Take the noise from trial.plan."
            )
        if torch.initial_seed() != self._streams.seed("mark"):
            raise DeclaredError(
                "The objective has seeded torch's global generator, so every trial would add the same noise, "
                "and whoever knows the seed could subtract it. Seed nothing: the global generators stand "
                "at the trial's own secret states."
            )
        if self._engine is not None:
            self.check(self._engine)  # again: steps that came after the check are in the artifact
        scored = self._find_score(score)
        weights, shapes = _flat(artifact)
        if scored is None:
            self._result = DeclaredResult(weights, shapes, None)
        elif bool(weights.isfinite().all()):
            self._result = DeclaredResult(weights, shapes, scored.score, scored.estimate)
        else:
            self._result = DeclaredResult(weights, shapes, -math.inf)
        return self._result

    def _find_score(self, score: float | None) -> Scored | None:
        """Return the measurement that gave a score; refuse a score that ``trial.score`` did not give."""
        if self._arm.score is None:
            return None
        for scored in self._scores:
            if scored.score == score:
                return scored
        raise DeclaredError(
            "trial.result was given a score that trial.score did not give, so nothing says that it "
            "is public or noised. Return trial.result(model, score=trial.score(model))."
        )

    def _finish(self, value: object, index: int) -> TrialResult:
        """Return the trial's result for storage; refuse an objective that returned something else."""
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
            estimate=self._result.estimate,
            ended=Ending.of(self._result.weights),
            shapes=self._result.shapes,
            checked=self._checked,
        )


def _check_history(engine: object, plan: DeclaredPlan) -> None:
    """Refuse an object that is no Opacus engine, or one whose accountant recorded another training."""
    accountant: Any = getattr(engine, "accountant", None)
    if not hasattr(accountant, "history"):
        raise InvalidInputError(
            "engine", type(engine).__name__, "must be the opacus.PrivacyEngine of this trial"
        )
    history = [tuple(entry) for entry in accountant.history]
    charge = (plan.noise_multiplier, plan.sample_rate, plan.steps)
    steps = 0
    is_same = True
    for noise_multiplier, sample_rate, entry_steps in history:
        steps += entry_steps
        is_same = is_same and is_close(noise_multiplier, plan.noise_multiplier)
        is_same = is_same and is_close(sample_rate, plan.sample_rate)
    if not is_same or steps != plan.steps:
        raise DeclaredError(
            f"Opacus' accountant has noted (noise multiplier, sampling rate, steps) {history}, but "
            f"{charge} was charged. Take all three from trial.plan; "
            "privtune.opacus declares what a DataLoader runs."
        )


@contextmanager
def own_generators(streams: Streams) -> Iterator[None]:
    """Set the global generators of torch, NumPy and Python to a trial's own states, for a ``with`` block."""
    import torch

    setting = 0

    # Scripts and Trainers seed by 0 or 42: every trial would add the same noise, known to everybody.
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
            replace_attribute(undo, owner, name, seed)
        yield


def _set_generators(streams: Streams, setting: int) -> None:
    """Set the full states of all global generators from the trial's secret.

    Args:
        streams: The trial's own.
        setting: How often the trial has seeded a generator: each time leads to other states.
    """
    import torch

    state = streams.generator("torch", setting).get_state()
    # The first 8 bytes of torch's state are what torch.initial_seed() returns.
    mark = np.array([streams.seed("mark")], dtype="<u8")
    state[:8] = torch.from_numpy(mark.view(np.uint8))
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(streams.seed("cuda", setting))
    numpy_key = streams.key("numpy", setting)
    content = hashlib.shake_256(numpy_key).digest(4 * _WORDS)
    words = np.frombuffer(content, dtype=np.uint32)
    np.random.set_state(("MT19937", words, _WORDS, 0, 0.0))
    _SEED_PYTHON(streams.key("python", setting))


def _as_module(model: Any) -> torch.nn.Module:
    """Return a model as a torch module; a function of arrays is wrapped in one."""
    import torch

    if isinstance(model, torch.nn.Module):
        return getattr(model, "_module", model)  # without the hooks of Opacus
    if not callable(model):
        raise InvalidInputError(
            "model", type(model).__name__, "must be a torch module, or a function of arrays"
        )

    class ModelOfArrays(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inputs = x.detach().cpu().numpy()
            outputs = torch.as_tensor(np.asarray(model(inputs)))
            are_labels = outputs.ndim == 1 and not outputs.is_floating_point()
            if not are_labels:
                return outputs
            return torch.nn.functional.one_hot(outputs.long()).double()

    return ModelOfArrays()


def _flat(artifact: object) -> tuple[torch.Tensor, dict[str, tuple[int, ...]]]:
    """Return the parameters that an objective gave out as one flat tensor, and their shapes by name."""
    import torch

    if isinstance(artifact, torch.nn.Module):
        module = getattr(artifact, "_module", artifact)
        parameters = dict(module.named_parameters())
        artifact = {name: value for name, value in parameters.items() if value.requires_grad}
    if not isinstance(artifact, Mapping) or not artifact:
        raise InvalidInputError(
            "artifact",
            type(artifact).__name__,
            "must be a torch module, a state dict, or a dict of arrays by name",
        )
    parts = {str(name): _as_floats(name, array) for name, array in artifact.items()}
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    flat = torch.cat([part.reshape(-1) for part in parts.values()])
    return flat.clone(), shapes


def _as_floats(name: object, array: object) -> torch.Tensor:
    """Return one of the parameters that an objective gave out, as a tensor of floating-point numbers."""
    import torch

    try:
        part = torch.as_tensor(array).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        part = None
    if part is None or not part.is_floating_point():
        kind = str(getattr(array, "dtype", type(array).__name__))
        allowed = "must be an array of real floating-point numbers"
        raise InvalidInputError(f"artifact[{name!r}]", kind, allowed)
    return part


def plan_declared(
    strategy: Strategy,
    mechanism: Mechanism,
    context: PlanningContext,
    *,
    epsilon: float | None,
    unit: str,
    scored: bool,
) -> Plan:
    """Plan an arm of a declared mechanism for ``epsilon``, or at the event's own cost if that is None.

    Args:
        strategy: How to choose.
        mechanism: What is declared.
        context: Its public facts.
        epsilon: What the arm may cost; None keeps the declared event as it is.
        unit: What the budget protects, in a word.
        scored: Whether there is a validation split.
    """
    _check_strategy(strategy)
    if epsilon is None:
        plan = _uncalibrated(strategy, context)
    else:
        plan = plan_arm(strategy, context, epsilon=epsilon)
    protects_records = unit == RECORD
    facts = PublicFacts(
        train_records=mechanism.records,
        validation_records=context.task.validation_records if scored else None,
        public_validation=context.task.public_validation,
        unit="" if protects_records else unit,
    ).to_dict()
    facts[MECHANISM] = f"declared by {mechanism.declared_by}; not enforced by PrivTune"
    details = {**plan.details, "public": facts}
    if not protects_records:
        details["unit"] = unit
    columns = getattr(mechanism.data, "column_names", None) or ()
    dataset = Dataset(columns=tuple(map(str, columns)))
    details["dataset"] = dataset.to_dict()
    return replace(plan, details=details)


def _check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy that needs the engine, or that sets options a declared mechanism would ignore."""
    if getattr(strategy, "rate", None) is not None:
        raise StrategyError(
            f"Strategy {strategy.name!r} tunes on a subset of the records, and what a declared mechanism "
            "costs there is not known. Use papernot-steinke, liu-talwar or everything."
        )
    if strategy.needs.alone:
        raise StrategyError(
            f"Strategy {strategy.name!r} draws from a declared space, and the objective of a declared "
            "mechanism suggests by itself. Use papernot-steinke, liu-talwar or everything."
        )
    defaults = {field.name: field.default for field in fields(strategy)}  # type: ignore[arg-type]
    for name in ("method", "options", "candidates", "guarantee"):
        value = getattr(strategy, name, None)
        if value and value != defaults.get(name):
            raise InvalidInputError(
                f"{name} of arm {strategy.arm!r}",
                value,
                "does not go with a declared mechanism, which is the method",
                "Leave it out; fixed hyperparameters go through strategies.Fixed(parameters=...).",
            )


def _uncalibrated(strategy: Strategy, context: PlanningContext) -> Plan:
    """Plan an arm whose declared event is not calibrated; its scores get about the same ε."""
    public_task = replace(context.task, public_validation=True)
    without_score = replace(context, task=public_task)
    event = plan_arm(strategy, without_score, epsilon=1.0).event
    cost = account(event, context.delta, adjacency=context.adjacency)
    epsilon = 1.001 * cost.epsilon
    for _ in range(_TRIES):
        try:
            return plan_arm(strategy, context, epsilon=epsilon)
        except CalibrationError:  # some bounds on training and score together are looser
            epsilon *= 1.25
    return plan_arm(strategy, context, epsilon=epsilon)


@dataclass(frozen=True, kw_only=True)
class _Files(Files):
    """A trainer of candidates that calls the user's objective for one trial after the other."""

    objective: Callable[[DeclaredTrial], Any]
    mechanism: Mechanism
    validation: TensorData | None
    score_of: Callable[..., Any] | None

    def train(self, batch: Batch) -> Iterable[TrialResult]:
        """Call the objective for each trial of a batch under its own random states; yield its result."""
        self._check_validation()
        shown_trials: Mapping[int, ShownTrial] = {} if batch.has_name else self.live
        for number, parameters in batch.trials.items():
            self.check_deadline()
            trial = DeclaredTrial(
                self.plan,
                batch.training,
                validation=self.validation,
                score_of=self.score_of,
                mechanism=self.mechanism,
                number=number,
                streams=Streams(batch.secrets[number]),
                given=parameters,
                sampler=self.sampler,
                live=shown_trials.get(number),
            )
            value = trial.run(self.objective)
            result = trial._finish(value, number)
            if not result.checked.startswith(CHECKED):
                self.results.put(_LEAST_COMPARED, result.checked.encode())
            yield result

    def _check_validation(self) -> None:
        """Refuse validation records other than those that earlier trials of the arm were scored on."""
        if self.validation is None:
            return
        digest = hashlib.sha256()
        for part in (self.validation.x, self.validation.y):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        content = digest.hexdigest().encode()
        self.results.put(_VALIDATION, content)  # the first of the arm stays
        if self.results.get(_VALIDATION) != content:
            raise DeclaredError(
                "Trials of this arm were scored on other validation records, but one split was charged. Give "
                "the same split as before, as by a fixed random_state."
            )


class _DeclaredRound(StudyRound):
    """The round of a declared arm, whose release is marked *checked* only if all its trials were."""

    def run(self, strategy: Strategy) -> list[Outcome]:
        """Run all repetitions; mark their outcomes with the weakest check that any trial passed."""
        outcomes = super().run(strategy)
        least = self.files.results.find(_LEAST_COMPARED)
        if least is None:
            return outcomes
        return [_with_comparison(outcome, least.decode()) for outcome in outcomes]


def _with_comparison(outcome: Outcome, comparison: str) -> Outcome:
    """Return an outcome whose result and trials carry a given text on what was checked."""
    result = outcome.result
    if result is not None:
        result = replace(result, checked=comparison)
    trials = tuple(replace(trial, checked=comparison) for trial in outcome.trials)
    return replace(outcome, result=result, trials=trials)


@dataclass
class DeclaredTrainer(Trainer):
    """A trainer of an arm whose candidates the user's objective trains.

    Attributes:
        life: The study.
        objective: The function of a trial.
        mechanism: What it is declared to cost.
        strategy: How to choose.
        sampler: Optuna's, or one of the user's own with independent draws.
        deadline: On the monotonic clock, in seconds; no trial begins after it.
        validation: What trials are scored on; None where nothing is scored.
        score_of: A score function of the user's; None for a metric by its name.
        device: What certificates say of the hardware, which PrivTune does not choose here.
        shows_output: False: of a function's records nothing is known.
    """

    life: Life
    objective: Callable[[DeclaredTrial], Any]
    mechanism: Mechanism
    strategy: Strategy
    sampler: BaseSampler | IndependentSampler | None
    deadline: float
    validation: TensorData | None
    score_of: Callable[..., Any] | None
    device: str = "the function's own"
    shows_output: bool = False

    def describe(self, plan: Plan) -> Program:
        """Return the digests of the code that decides the arm's release."""
        return describe_declared(
            self.life,
            self.objective,
            self.strategy,
            score=self.score_of if plan.score is not None else None,
            sampler=self.sampler,
        )

    def rehearse(self, plan: Plan) -> None:
        """Run the objective until it reads its plan, and refuse trials that depend on each other."""
        self._check_validation_apart(plan)
        first = self._rehearsed_trial(plan, 0)
        second = self._rehearsed_trial(plan, 1)
        if plan.is_sealed:
            # In the other order: what a function remembers of earlier trials is not independent.
            self._check_independent(plan, second, 1)
            self._check_independent(plan, first, 0)
        check_given(self.strategy, first.params)
        refuse_unasked(
            plan,
            {**first.params, **second.params},
            lambda draw: self._rehearsed_trial(plan, draw).params,
            "the function suggests before it reads trial.plan",
        )
        if plan.score is not None and self.validation is not None:
            rehearse_score(plan.score, self.validation, self.score_of, first._models)

    def _check_independent(self, plan: Plan, trial: DeclaredTrial, draw: int) -> None:
        """Refuse an objective that suggests something else to the same trial when it is called again."""
        before = _suggestions_in_words(trial)
        after = _suggestions_in_words(self._rehearsed_trial(plan, draw))
        if before == after:
            return
        raise DeclaredError(
            f"The objective suggested {before} to a trial and {after} to the same trial in "
            "another order: it remembers earlier trials (an iterator over a grid, a warm start, "
            "a narrowed range), and private selection covers independent candidates alone. Draw "
            "from fixed ranges by trial.suggest_..., or use the strategy 'everything'. Nothing "
            "was charged."
        )

    def _check_validation_apart(self, plan: Plan) -> None:
        """Refuse private validation records that are also in the declared training data."""
        data = self.mechanism.data
        validation = self.validation
        if data is None or validation is None:
            return
        if plan.score is None or plan.score.event is None:
            return
        if holds_validation(data, validation.x):
            raise InvalidInputError(
                "validation",
                f"{len(validation.x)} records",
                "stand in the declared training data, too, but a record is charged for training or for "
                "scoring",
                "Declare and train on a data set without them. Nothing was charged.",
            )

    def _rehearsed_trial(self, plan: Plan, draw: int) -> DeclaredTrial:
        """Return a trial of fixed random numbers, after the objective has read its plan."""
        trial = DeclaredTrial(
            plan,
            plan.first_training,
            rehearsal=True,
            number=0,
            streams=Streams(bytes([draw] * 32)),
            given=plan.params,
            sampler=own_sampler(self.sampler),
        )
        try:
            trial.run(self.objective)
        except _PlanRead:
            return trial
        except Exception as error:
            error.add_note("This was a rehearsal, which ends at trial.plan: nothing was charged.")
            raise
        if trial._plan_read:
            raise DeclaredError(
                "The objective went on after trial.plan, where its rehearsal ends: catch Exception, not "
                "everything (a bare except). Nothing was charged."
            )
        raise DeclaredError(
            "The objective returned without reading trial.plan, so nothing says what noise it adds. "
            "Suggest hyperparameters, read trial.plan, then train by it. Nothing was charged."
        )

    def prepare(self, plan: Plan) -> tuple[Strategy, StudyRound]:
        """Return the arm's strategy, and a round that trains by the objective."""
        users_sampler = own_sampler(self.sampler)
        files = _Files(
            plan=plan,
            secret=self.life.secret(plan),
            results=self.life.sealed(plan.arm),
            space=SearchSpace({}),
            objective=self.objective,
            mechanism=self.mechanism,
            validation=self.validation,
            score_of=self.score_of,
            sampler=users_sampler,
            deadline=self.deadline,
        )
        optunas = optuna_sampler(self.sampler)
        return self.strategy, _DeclaredRound(self.life, files, sampler=optunas)

    def finish(self, plan: Plan, outcome: Outcome, repetition: int) -> Measurement:
        """Return an empty measurement, since only the user's objective knows the model."""
        return Measurement()


def _suggestions_in_words(trial: DeclaredTrial) -> str:
    """Return a trial's suggested values in order, each with its range, as text."""
    laws = trial.distributions
    suggestions = [f"{name} = {value!r} of {laws[name]}" for name, value in trial.params.items()]
    return ", ".join(suggestions) or "nothing"
