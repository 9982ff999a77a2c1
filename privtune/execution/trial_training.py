"""Training and scoring of candidates in stacks; weights that are not finite are a result."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.execution.fine_tuned import check_loaded, reduce_task
from privtune.strategies import Ending, Plan, ScorePlan, TrainingPlan, TrialResult
from privtune.tasks.pretrained import PART, for_candidate
from privtune.tasks.task import TaskData, made_up_inputs
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task
    from privtune.training.engine.checkpoint import Keeper
    from privtune.training.engine.train import TrainableCandidate, TrainedCandidate
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.kernel import Loss
    from privtune.training.mechanism.made_up import Domain
    from privtune.training.mechanism.scoring import LossOfRecords, Scored
    from privtune.training.methods import Method

# Of a dry run.
_STACK = 8  # candidates in the stack that is timed, at most
_SCORE_RECORDS = 64  # records that a candidate is scored on
_FIRST_STEPS = 2  # steps whose result is looked at
_STEPS = 16  # steps that are timed
_LONG = 0.5  # seconds that these may take
_FEW_STEPS = 3  # how many of longer ones are timed

_COMPUTE = Compute()

OnStep = Callable[[int, int], None]
"""Called with the steps done and the steps planned."""


def part_of(data: TensorData, part: str, rate: float | None, streams: Streams) -> TensorData:
    """Return the records that a training may see: all, the Poisson subset, or the rest of it.

    Args:
        data: All records of the training split.
        part: Which of them, as of `TrainingPlan`.
        rate: Probability that a record is in the subset; None without one.
        streams: Those of the round: every trial of it sees the same subset, whose size is sealed.
    """
    import torch

    if part == "all" or rate is None:
        return data
    draws = streams.numpy("subset", 0).random(len(data.y))
    is_member = torch.from_numpy(draws < rate)
    if part != "subset":
        is_member = ~is_member
    places = is_member.nonzero().squeeze(1)
    return data.part(places, sealed_size=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialWork:
    """What the trials of one training share: their plan, task, data, scoring and observers.

    Attributes:
        training: What each of them runs.
        task: The task.
        data: Its splits; trials are scored on the validation split.
        records: The records that the training may see, of the training split.
        score: How each is scored; None if it is not.
        compute: Where, and how many at once.
        on_step: Called with the steps done and the steps planned.
        keeper: Keeps checkpoints; None where the training cannot go on from one.
        validated: Whether results have a curve of accuracies on the validation split, which is public.
    """

    training: TrainingPlan
    task: Task
    data: TaskData
    records: Any
    score: ScorePlan | None
    compute: Compute = _COMPUTE
    on_step: OnStep | None = None
    keeper: Keeper | None = None
    validated: bool = False


def train_trials(
    work: TrialWork, *, trials: Mapping[int, Mapping[str, object]], secrets: Mapping[int, bytes]
) -> list[TrialResult]:
    """Train trials of a task's own model, stacked by the trained part, and return their results in order.

    Args:
        work: What they are trained and scored on.
        trials: Hyperparameters by index.
        secrets: Each trial's secret, 32 bytes, from which its streams derive.

    Returns:
        The results, in the order of the trials.

    Raises:
        PrivTuneError: If a curve is asked of a private split: it is neither noised nor charged.
    """
    task = work.task
    if work.validated and not task.public_validation:
        raise PrivTuneError(
            f"The validation split of task {task.name!r} is private: its accuracy is not shown."
        )
    results: dict[int, TrialResult] = {}
    parts = dict.fromkeys(params.get(PART) for params in trials.values())
    for part in parts:
        group = {index: params for index, params in trials.items() if params.get(PART) == part}
        part_task = for_candidate(task, next(iter(group.values())))
        make, reduce = reduce_task(part_task, work.records)
        candidates = (
            (index, make_candidate(make, work.training, params, secrets[index]))
            for index, params in group.items()
        )
        part_work = replace(
            work,
            task=part_task,
            data=replace(work.data, validation=reduce(work.data.validation)),
            records=reduce(work.records),
        )
        group_results = train_built(part_work, candidates)
        for result in group_results:
            params = dict(group[result.index])
            results[result.index] = replace(result, params=params)
    return [results[index] for index in trials]


def make_candidate(
    make: Callable[[], torch.nn.Module],
    training: TrainingPlan,
    params: Mapping[str, object],
    secret: bytes,
) -> TrainableCandidate:
    """Return a candidate of a task's own model, with first weights from the trial's own stream."""
    from privtune.training.engine.train import TrainableCandidate, initialisation
    from privtune.training.methods.rate_schedule import SEARCHED

    params = training.as_trained(params)
    names = (*training.method.parameters, *SEARCHED)
    values = {name: params[name] for name in names if name in params}
    with initialisation(Streams(secret)):
        return TrainableCandidate(model=make(), secret=secret, values=values)


def train_built(
    work: TrialWork,
    candidates: Iterable[tuple[int, TrainableCandidate]],
    *,
    report_score: Callable[[int, float], object] | None = None,
) -> Iterator[TrialResult]:
    """Train candidates, those of equal programs as one stack; yield results without hyperparameters.

    Whatever stops the program (no memory, a mistake) is no result: it is raised, and stops the arm.

    Args:
        work: What they are trained and scored on.
        candidates: Each with its index, made as the engine asks for it.
        report_score: Of a single trial on a public split: called with a step and the score there. What it
            raises ends the trial.
    """
    from privtune.training.engine.train import Training
    from privtune.training.mechanism.kernel import load_params

    training = work.training
    task = work.task
    score = work.score
    validation_records = work.data.validation
    on_step = work.on_step
    indices: list[int] = []
    members: list[TrainableCandidate] = []

    def take_members() -> Iterator[TrainableCandidate]:
        for index, candidate in candidates:
            indices.append(index)
            members.append(candidate)
            yield candidate

    def report_snapshot(step: int, params: torch.Tensor) -> None:
        if report_score is not None and score is not None:
            model = copy.deepcopy(members[0].model)
            load_params(model, params)
            validation = score_model(score, task, model, validation_records, secret=bytes(32))
            report_score(step + 1, validation.score)

    steps = training.schedule.steps
    engine = Training(
        training.method,
        training.schedule,
        task.record_loss,
        mark_foreign_targets(work.records, task.classes),
        device=work.compute.device,
        stack=work.compute.stack,
        precision=task.precision,
        noise=training.noise,
        on_step=None if on_step is None else lambda step, _: on_step(step + 1, steps),
        snapshots_at=training.schedule.checkpoints() if work.validated or report_score else (),
        keeper=work.keeper,
        on_snapshot=None if report_score is None else report_snapshot,
    )
    for outcome in engine.of(take_members()):
        result = _result_of(outcome, indices[outcome.position])
        if score is not None:
            secret = members[outcome.position].secret
            validation = score_model(score, task, outcome.module, validation_records, secret=secret)
            result = replace(result, score=validation.score, estimate=validation.estimate)
        if work.validated and task.classes is not None:
            accuracies = _accuracies(outcome.module, outcome.snapshots, validation_records, steps)
            load_params(outcome.module, outcome.params)
            result = replace(result, curves={**result.curves, "val_accuracy": accuracies})
        yield result


def _result_of(outcome: TrainedCandidate, index: int) -> TrialResult:
    """Return a trained candidate as a trial's result, without a score and hyperparameters."""
    from privtune.training.mechanism.kernel import Layout

    return TrialResult(
        index=index,
        params={},
        weights=outcome.params,
        score=None,
        curves={name: values.tolist() for name, values in outcome.report.items()},
        transcript_digest=outcome.transcript.digest(),
        ended=Ending.of(outcome.params),
        unusable=outcome.unusable,
        shapes=Layout(outcome.module).shapes,
    )


def score_model(
    terms: ScorePlan, task: Task, model: torch.nn.Module, data: TensorData, *, secret: bytes
) -> Scored:
    """Return the score of a trained model of a task, noise included."""
    from privtune.training.mechanism.scoring import score

    module, loss = scored_as(terms, task, model)
    records = mark_foreign_targets(data, task.classes)
    rng = Streams(secret).numpy("score", 0)
    return score(terms, module, records, rng=rng, loss=loss)


def scored_as(
    terms: ScorePlan, task: Task, model: torch.nn.Module
) -> tuple[torch.nn.Module, Loss | LossOfRecords]:
    """Return a task's model and its loss in the form that the score's metric takes."""
    from privtune.training.mechanism.data import ModelOfUnits
    from privtune.training.mechanism.metrics import find_metric
    from privtune.training.mechanism.scoring import LossOfRecords, cross_entropy

    reads = find_metric(terms.metric).reads
    if reads == "function":
        if task.score_of is None:
            raise PrivTuneError(
                f"Metric {terms.metric!r} needs a function: score=privtune.Score(function, bound=...)."
            )
        return model, LossOfRecords(task.score_of)
    if task.loss_of is None:
        return model, task.loss
    if reads == "loss":
        return model, LossOfRecords(task.loss_of)
    if task.tree is not None:
        model = task.tree.inputs.wrap(model)
    if task.unit:
        model = ModelOfUnits(model, len(task.input_shape) - 1)
    return model, cross_entropy


def domain_of(
    task: Task,
    candidate: TrainableCandidate,
    reduce: Callable[[TensorData], TensorData] = lambda records: records,
) -> Domain:
    """Return the domain of made-up records that a candidate and its loss accept."""
    from privtune.training.mechanism.data import find_domain_of

    records = reduce(made_up_records(task, 2))
    loss_of = candidate.trained_on(task.record_loss, records)
    return find_domain_of(candidate.model, loss_of, records)


def made_up_records(task: Task, records: int, domain: Domain | None = None) -> TensorData:
    """Return made-up records with a task's shapes and types, the same at every call.

    Of a task of the user's own data, their numbers are those of a domain, if one is given.
    """
    import torch

    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.made_up import Domain

    if task.like is not None:
        if domain is None:
            domain = Domain.of_targets(task.target_range)
        x, y = domain.draw(*task.like, (1, records), torch.device("cpu"))
        return TensorData(x[0], y[0], tree=task.tree, domain=domain)
    generator = torch.Generator().manual_seed(0)
    shape = (records, task.input_shape[0]) if task.unit else (records,)
    if task.classes is None:
        # Targets of a density, which declares no range either, are numbers, too: whole ones are classes.
        low, high = task.target_range or (0.0, 1.0)
        shares = torch.rand(shape, generator=generator)
        y = low + (high - low) * shares
    else:
        y = torch.randint(task.classes, shape, generator=generator)
    x = made_up_inputs(records, task.input_shape, task.tokens)
    return TensorData(x, y)


def pruned(index: int, params: Mapping[str, object]) -> TrialResult:
    """Return the result of a pruned trial: no weights, and a score of -∞."""
    import torch

    return TrialResult(
        index=index,
        params=dict(params),
        weights=torch.empty(0),
        score=-math.inf,
        ended=Ending.PRUNED,
    )


def _accuracies(
    model: torch.nn.Module, snapshots: Mapping[int, torch.Tensor], data: TensorData, steps: int
) -> list[float]:
    """Return the validation accuracy by step, NaN at steps without a snapshot of finite weights."""
    from privtune.training.mechanism.kernel import load_params
    from privtune.training.mechanism.scoring import evaluating

    curve = [math.nan] * steps
    with evaluating(model):
        for step, weights in snapshots.items():
            if bool(weights.isfinite().all()):
                load_params(model, weights)
                curve[step] = accuracy(model, data)
    return curve


def accuracy(model: torch.nn.Module, data: TensorData) -> float:
    """Return the fraction of records that a model classifies correctly.

    Where units hold several rows, it is the mean over units of the fraction of a unit's rows.
    """
    import torch

    device = next(model.parameters()).device
    with torch.no_grad():
        outputs = model(data.x.to(device)).to(data.y.device)
    # A record for which the model gives NaN counts as wrong, whatever argmax says.
    is_right = (outputs.argmax(dim=-1) == data.y) & ~outputs.isnan().any(dim=-1)
    if is_right.dim() != 2:
        return float(is_right.double().mean())
    is_row = data.y >= 0  # fillers of short units have a class below 0
    right_rows = (is_right & is_row).sum(dim=1)
    rows = is_row.sum(dim=1).clamp(min=1)
    return float((right_rows / rows).double().mean())


def mark_foreign_targets(data: TensorData, classes: int | None) -> TensorData:
    """Return the data with records marked unusable if their target is no declared class or finite number.

    One such record would stop the training by an error, or make all weights NaN: which of both would say
    that it is there.
    """
    if data.unit:  # whose fillers are no targets: units have no others left
        return data
    if data.y.is_floating_point():
        is_finite = data.y.reshape(len(data.y), -1).isfinite().all(dim=1)
        return data.marked(~is_finite)
    if classes is None or data.y.ndim != 1:
        return data
    is_foreign = (data.y < 0) | (data.y >= classes)
    return data.marked(is_foreign)


def model_of(task: Task, weights: torch.Tensor) -> torch.nn.Module:
    """Return the task's model with these weights, in evaluation mode."""
    from privtune.training.mechanism.kernel import load_params

    model = task.model()
    load_params(model, weights)
    return model.eval()


def dry_run(
    plan: Plan,
    task: Task,
    make: Callable[[bytes], TrainableCandidate],
    *,
    compute: Compute,
    reduce: Callable[[TensorData], TensorData] = lambda records: records,
    timings: MutableMapping[object, float] | None = None,
    key: object = None,
    others: Iterable[TrainableCandidate] = (),
) -> tuple[TrialResult, float]:
    """Train and score a candidate for two steps on made-up records; time a stack of others.

    A mistake that would stop a round after its charge stops it here, where it costs nothing.

    Args:
        plan: The arm's plan.
        task: The task; its data is not read.
        make: Makes a candidate from a secret of 32 bytes.
        compute: Where, and how many at once.
        reduce: From records to the inputs of what is trained.
        timings: Seconds of a candidate's step, by what it depends on; what is timed here is added.
        key: What it depends on beside the plan.
        others: Further candidates, to be trained for two steps as well.

    Returns:
        The candidate's result, and the seconds that one run of the arm is expected to take.

    Raises:
        PrivTuneError: If the training would not train, or what it would release is another model.
    """
    from privtune.execution.trained_weights import check_moved, check_trained
    from privtune.training.engine.train import copy_model
    from privtune.training.mechanism.kernel import flatten_params

    training = plan.first_training
    total_steps = plan.training.schedule.steps
    first = make(bytes(32))
    trainer = _DryRun.prepare(plan, task, first, compute=compute, reduce=reduce)
    adapts = "max_grad_norm" in training.method.adapts
    check_trained(
        first.model,
        first.trained_on(task.record_loss, trainer.records),
        trainer.records,
        device=compute.device,
        precision=task.precision,
        norm=None if adapts else first.values.get("max_grad_norm"),
    )
    trainer.restart_clock()
    weights = flatten_params(first.model)
    (result,) = trainer.train(training.method, [first], _FIRST_STEPS, plan.score)
    check_moved(weights, result.weights, first, steps=_FIRST_STEPS, of=total_steps)
    # Into copies: what build keeps has its first weights.
    anew = copy_model(make(bytes([255]) * 32).model)
    check_loaded(task, copy_model(first.model), anew, result, trainer.records)
    trainer.train(training.method, others, _FIRST_STEPS, plan.score)
    if timings is None:
        timings = {}
    stack = max(1, min(_STACK, round(plan.expected_runs * plan.repeats)))
    timing_key = (key, plan.training.schedule, training.noise, stack, _STEPS)
    if timing_key not in timings:
        seconds = trainer.time_step(make, stack)
        timings[timing_key] = _never_below_one(timings, timing_key, seconds)
    evaluations = plan.expected_gradient_evaluations
    expected_steps = evaluations / plan.training.schedule.expected_batch_size
    return result, expected_steps * timings[timing_key]


@dataclass(frozen=True)
class _DryRun:
    """A trainer of candidates on made-up records, which notes when each of their steps ended.

    Attributes:
        training: What the plan's first trial runs.
        task: The task.
        schedule: Records and rate of the same expected batch, on as few records as will do.
        records: Made-up records to train on.
        score_records: Made-up records to score on.
        compute: Where, no longer ``auto``, and how many at once.
        clock: When the clock was started, and when each step ended since, in seconds.
    """

    training: TrainingPlan
    task: Task
    schedule: Schedule
    records: TensorData
    score_records: TensorData
    compute: Compute
    clock: list[float]

    @classmethod
    def prepare(
        cls,
        plan: Plan,
        task: Task,
        first: TrainableCandidate,
        *,
        compute: Compute,
        reduce: Callable[[TensorData], TensorData],
    ) -> _DryRun:
        """Return a dry run with made-up records that the first candidate and its loss accept."""
        schedule = plan.training.schedule
        batch = schedule.expected_batch_size
        # Of each group of records a sample is drawn at most once a record.
        batches = max(4, schedule.bands)
        enough = math.ceil(batches * batch)
        size = max(2, min(schedule.records, enough))
        rate = min(1.0, batch / size)
        domain = domain_of(task, first, reduce)

        def make_up(records: int) -> TensorData:
            data = replace(made_up_records(task, records, domain), unit=task.unit)
            return replace(reduce(data), domain=domain)

        return cls(
            training=plan.first_training,
            task=task,
            schedule=Schedule(
                size,
                rate,
                _STEPS,
                schedule.bands,
            ),
            records=make_up(size),
            score_records=make_up(_SCORE_RECORDS),
            compute=replace(compute, device=check_device(compute.device)),
            clock=[],
        )

    def restart_clock(self) -> None:
        """Forget the times of all steps so far, and start to count from now."""
        self.clock[:] = [self._read_clock()]

    def _read_clock(self) -> float:
        """Return the time in seconds: CPU time if trainings run on the CPU, else wall time.

        Of a GPU's work CPU time sees nothing: there they are those of the wall.
        """
        if self.compute.device == "cpu":
            return time.process_time()
        return time.perf_counter()

    def train(
        self,
        method: Method,
        candidates: Iterable[TrainableCandidate],
        steps: int,
        score: ScorePlan | None,
    ) -> list[TrialResult]:
        """Train candidates for some steps, score them if a plan is given, and note when each step ended."""
        schedule = replace(self.schedule, steps=steps)
        if not method.correlates:
            schedule = replace(schedule, bands=1)
        work = TrialWork(
            training=replace(self.training, method=method, schedule=schedule),
            task=self.task,
            data=TaskData(self.records, self.score_records, self.score_records),
            records=self.records,
            score=score,
            compute=self.compute,
            on_step=lambda *_: self.clock.append(self._read_clock()),
        )
        return list(train_built(work, enumerate(candidates)))

    def time_step(self, make: Callable[[bytes], TrainableCandidate], stack: int) -> float:
        """Return the seconds of one step of one candidate that is trained in a stack.

        Of a round a stack is timed, as it trains; where steps are long stacks gain nothing.
        """
        import torch

        threads = torch.get_num_threads()
        steps = _STEPS
        last_step = self.clock[-1] - self.clock[-2]
        if last_step * stack * steps > _LONG:
            stack = min(stack, threads)
            steps = min(steps, _FEW_STEPS)
        self.restart_clock()
        # Its gradients are what a step costs, and a schedule of torch's may end before these steps do.
        values = {"learning_rate": 1e-3, "max_grad_norm": 1.0}
        candidates = (
            replace(make(bytes([number]) * 32), values=values, scheduler=None)
            for number in range(stack)
        )
        self.train(FixedDPSGD(noise_multiplier=1.0), candidates, steps, None)
        return seconds_per_step(self.clock, steps=steps, threads=threads) / stack


def _never_below_one(
    timings: Mapping[Any, float],
    key: Any,
    seconds: float,
) -> float:
    """Return a candidate's seconds a step, corrected so that a stack takes as long as one alone at least.

    Where a step is short, both take about as long, and which seems to take longer is chance.
    """
    _, schedule, noise, stack, _ = key
    for other_key, other_seconds in timings.items():
        _, other_schedule, other_noise, other_stack, _ = other_key
        if (other_schedule, other_noise) != (schedule, noise):
            continue
        if other_stack == 1 < stack:
            seconds = max(seconds, other_seconds / stack)
        elif stack == 1 < other_stack:
            seconds = min(seconds, other_seconds * other_stack)
    return seconds


def seconds_per_step(clock: Sequence[float], *, steps: int, threads: int) -> float:
    """Return the seconds of one step of all stacks, from the times at which their steps ended.

    It is a median: some steps capture or allocate once, and are not what a step costs. Of stacks side by side
    one step may end right after another's, so as many as run at once are taken together.

    Args:
        clock: When the first step began, and when each step of each stack ended, in seconds.
        steps: How many steps each stack took.
        threads: How many stacks may run at once.
    """
    stacks = (len(clock) - 1) / steps
    abreast = max(1, min(int(stacks), threads))
    starts = clock
    ends = clock[abreast:]
    durations = [end - start for start, end in zip(starts, ends, strict=False)]
    return statistics.median(durations) * stacks / abreast
