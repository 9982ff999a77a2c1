"""Train candidates as one stack, and score them. Weights that are not finite are a result."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.execution.fine_tuned import check_loaded, reduced
from privtune.strategies import Ending, Plan, ScorePlan, TrainingPlan, TrialResult
from privtune.tasks._fine_tuning import PART, for_candidate
from privtune.tasks._task import TaskData, made_up_inputs
from privtune.training.engine.compute import Compute
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD

if TYPE_CHECKING:
    import torch

    from privtune.tasks import Task
    from privtune.training.engine.checkpoint import Keeper
    from privtune.training.engine.train import Made
    from privtune.training.mechanism.data import TensorData
    from privtune.training.mechanism.kernel import Loss
    from privtune.training.mechanism.made_up import Domain
    from privtune.training.mechanism.scoring import OfRecords, Scored
    from privtune.training.methods import Method

_TIMED, _SCORED = 8, 64  # candidates in the stack that a dry run times, records that it scores
_LOOKED_AT = 2  # steps whose result it looks at
_STEPS = 16  # that it times
_LONG, _FEW = 0.5, 3  # seconds that its steps may take, and how many of longer ones it times

_COMPUTE = Compute()

OnStep = Callable[[int, int], None]
"""Called with the steps done and the steps planned."""


def part_of(data: TensorData, part: str, rate: float | None, streams: Streams) -> TensorData:
    """Return the records that a training may see: all, the Poisson subset, or the rest of it."""
    import torch

    if part == "all" or rate is None:
        return data
    inside = torch.from_numpy(streams.numpy("subset", 0).random(len(data.y)) < rate)
    chosen = (inside if part == "subset" else ~inside).nonzero().squeeze(1)
    return data.part(chosen, sealed_size=True)


def train_trials(
    training: TrainingPlan,
    *,
    task: Task,
    data: TaskData,
    records: Any,
    trials: Mapping[int, Mapping[str, Any]],
    secrets: Mapping[int, bytes],
    validated: bool = False,
    **how: Any,
) -> list[TrialResult]:
    """Train the given trials, those that train the same part of the model as one stack; score each."""
    # A curve of a private split is neither noised nor charged.
    if validated and not task.public_validation:
        raise PrivTuneError(
            f"The validation split of task {task.name!r} is private: its accuracy is not shown."
        )
    done: dict[int, TrialResult] = {}
    for part in dict.fromkeys(params.get(PART) for params in trials.values()):
        alike = {index: params for index, params in trials.items() if params.get(PART) == part}
        own = for_candidate(task, next(iter(alike.values())))
        make, reduce = reduced(own, records)
        found = train_built(
            training,
            task=own,
            data=replace(data, validation=reduce(data.validation)),
            records=reduce(records),
            made=((n, made_of(make, training, p, secrets[n])) for n, p in alike.items()),
            validated=validated,
            **how,
        )
        for result in found:
            done[result.index] = replace(result, params=dict(alike[result.index]))
    return [done[index] for index in trials]


def made_of(
    make: Callable[[], torch.nn.Module],
    training: TrainingPlan,
    params: Mapping[str, Any],
    secret: bytes,
) -> Made:
    """Return a candidate of a task's own model, with first weights from the trial's own stream."""
    from privtune.training.engine.train import Made, initialisation
    from privtune.training.methods._rate_schedule import SEARCHED

    used = training.as_trained(params)
    values = {n: used[n] for n in (*training.method.parameters, *SEARCHED) if n in used}
    with initialisation(Streams(secret)):
        return Made(model=make(), secret=secret, values=values)


def train_built(
    training: TrainingPlan,
    *,
    task: Task,
    data: TaskData,
    records: Any,
    score: ScorePlan | None,
    made: Iterable[tuple[int, Made]],
    compute: Compute = _COMPUTE,
    on_step: OnStep | None = None,
    keeper: Keeper | None = None,
    validated: bool = False,
    look: Callable[[int, float], object] | None = None,
) -> Iterator[TrialResult]:
    """Train candidates, those of equal programs as one stack; yield results without hyperparameters.

    Whatever stops the program (no memory, a mistake) is no result: it is raised, and stops the arm.
    """
    from privtune.training.engine.train import Training
    from privtune.training.mechanism.kernel import Layout, load_params

    numbers: list[int] = []
    candidates: list[Made] = []

    def noted() -> Iterator[Made]:
        for number, each in made:
            numbers.append(number)
            candidates.append(each)
            yield each

    # Of a single trial on a public split: what ``look`` raises ends the trial.
    def looked(step: int, params: torch.Tensor) -> None:
        if look is not None and score is not None:
            seen = copy.deepcopy(candidates[0].model)
            load_params(seen, params)
            shown = score_model(score, task, seen, data.validation, secret=bytes(32))
            look(step + 1, shown.score)

    steps = training.schedule.steps
    engine = Training(
        training.method,
        training.schedule,
        task.record_loss,
        held_to_classes(records, task.classes),
        device=compute.device,
        stack=compute.stack,
        precision=task.precision,
        noise=training.noise,
        on_step=None if on_step is None else lambda step, _: on_step(step + 1, steps),
        snapshots_at=training.schedule.checkpoints() if validated or look else (),
        keeper=keeper,
        look=None if look is None else looked,
    )
    for outcome in engine.of(noted()):
        secret = candidates[outcome.position].secret
        scored = None
        if score is not None:
            scored = score_model(score, task, outcome.module, data.validation, secret=secret)
        curves = {name: values.tolist() for name, values in outcome.report.items()}
        if validated and task.classes is not None:
            curves["val_accuracy"] = _accuracies(
                outcome.module, outcome.snapshots, data.validation, steps
            )
            load_params(outcome.module, outcome.params)
        yield TrialResult(
            index=numbers[outcome.position],
            params={},
            weights=outcome.params,
            score=None if scored is None else scored.score,
            estimate=None if scored is None else scored.estimate,
            curves=curves,
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
    return score(
        terms,
        module,
        held_to_classes(data, task.classes),
        rng=Streams(secret).numpy("score", 0),
        loss=loss,
    )


def scored_as(
    terms: ScorePlan, task: Task, model: torch.nn.Module
) -> tuple[torch.nn.Module, Loss | OfRecords]:
    """Return a task's model and its loss as its metric takes them."""
    from privtune.training.mechanism.data import OfUnits
    from privtune.training.mechanism.metrics import is_of_loss
    from privtune.training.mechanism.scoring import OfRecords, cross_entropy

    if terms.metric in ("cost", "value"):
        if task.score_of is None:
            raise PrivTuneError(
                f"Metric {terms.metric!r} needs a function: score=privtune.Score(function, bound=...)."
            )
        return model, OfRecords(task.score_of)
    if task.loss_of is None:
        return model, task.loss
    if is_of_loss(terms.metric):
        return model, OfRecords(task.loss_of)
    inner = model if task.tree is None else task.tree.inputs.wrap(model)
    return OfUnits(inner, len(task.input_shape) - 1) if task.unit else inner, cross_entropy


def domain_of(
    task: Task,
    made: Made,
    reduce: Callable[[TensorData], TensorData] = lambda records: records,
) -> Domain:
    """Return the domain of made-up records that a candidate and its loss accept."""
    from privtune.training.mechanism.data import find_domain_of

    records = reduce(made_up_records(task, 2))
    return find_domain_of(made.model, made.trained_on(task.record_loss, records), records)


def made_up_records(task: Task, records: int, domain: Domain | None = None) -> TensorData:
    """Return records of a task's shapes and types that hold no data: always the same.

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
        y = low + (high - low) * torch.rand(shape, generator=generator)
    else:
        y = torch.randint(task.classes, shape, generator=generator)
    return TensorData(made_up_inputs(records, task.input_shape, task.tokens), y)


def pruned(index: int, params: Mapping[str, Any]) -> TrialResult:
    """Return the result of a trial that a pruner stopped on numbers that were paid for."""
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
    """Return the validation accuracy by step, NaN where there is no model to look at."""
    from privtune.training.mechanism.kernel import load_params
    from privtune.training.mechanism.scoring import evaluating

    found = [math.nan] * steps
    with evaluating(model):
        for step, weights in snapshots.items():
            if bool(weights.isfinite().all()):
                load_params(model, weights)
                found[step] = accuracy(model, data)
    return found


def accuracy(model: torch.nn.Module, data: TensorData) -> float:
    """Return the fraction of records that a model classifies correctly."""
    import torch

    with torch.no_grad():
        outputs = model(data.x.to(next(model.parameters()).device)).to(data.y.device)
    # A record for which the model gives NaN counts as wrong, whatever argmax says.
    right = (outputs.argmax(dim=-1) == data.y) & ~outputs.isnan().any(dim=-1)
    if right.dim() == 2:  # of the rows of units
        there = data.y >= 0
        return float(((right & there).sum(dim=1) / there.sum(dim=1).clamp(min=1)).double().mean())
    return float(right.double().mean())


def held_to_classes(data: TensorData, classes: int | None) -> TensorData:
    """Return the data with all records marked unusable whose target is no declared class or number."""
    if data.unit:  # whose fillers are no targets: units have no others left
        return data
    if data.y.is_floating_point():
        return data.marked(~data.y.reshape(len(data.y), -1).isfinite().all(dim=1))
    if classes is None or data.y.ndim != 1:
        return data
    return data.marked((data.y < 0) | (data.y >= classes))


def model_of(task: Task, weights: torch.Tensor) -> torch.nn.Module:
    """Return the task's model with these weights, in evaluation mode."""
    from privtune.training.mechanism.kernel import load_params

    model = task.model()
    load_params(model, weights)
    return model.eval()


def dry_run(
    plan: Plan,
    task: Task,
    make: Callable[[bytes], Made],
    *,
    compute: Compute,
    reduce: Callable[[TensorData], TensorData] = lambda records: records,
    known: MutableMapping[object, float] | None = None,
    key: object = None,
    others: Iterable[Made] = (),
) -> tuple[TrialResult, float]:
    """Train and score a candidate for two steps on made-up records; time a stack of others."""
    import torch

    from privtune.execution.trained_weights import check_moved, check_trained
    from privtune.training.engine.train import copy_model
    from privtune.training.mechanism.kernel import flatten_params

    schedule = plan.training.schedule
    records = max(2, min(schedule.records, 4 * math.ceil(schedule.expected_batch_size)))
    rate = min(1.0, schedule.expected_batch_size / records)
    training = plan.first_training
    first = make(bytes(32))
    domain = domain_of(task, first, reduce)
    made_up = (
        replace(made_up_records(task, n, domain), unit=task.unit) for n in (records, _SCORED)
    )
    data, scored = (replace(reduce(each), domain=domain) for each in made_up)
    adapts = "max_grad_norm" in training.method.adapts
    norm = None if adapts else first.values.get("max_grad_norm")
    check_trained(
        first.model,
        first.trained_on(task.record_loss, data),
        data,
        device=compute.device,
        precision=task.precision,
        norm=norm,
    )
    clock, steps = [time.perf_counter()], _STEPS

    def trained(
        method: Method, candidates: Iterable[Made], steps: int, score: ScorePlan | None
    ) -> list[TrialResult]:
        found = train_built(
            replace(training, method=method, schedule=Schedule(records, rate, steps)),
            task=task,
            data=TaskData(data, scored, scored),
            records=data,
            score=score,
            made=enumerate(candidates),
            compute=compute,
            on_step=lambda *_: clock.append(time.perf_counter()),
        )
        return list(found)

    weights = flatten_params(first.model)
    (result,) = trained(training.method, [first], _LOOKED_AT, plan.score)
    check_moved(weights, result.weights, first, steps=_LOOKED_AT, of=schedule.steps)
    # Into copies: what build keeps has its first weights.
    anew = copy_model(make(bytes([255]) * 32).model)
    check_loaded(task, copy_model(first.model), anew, result, data)
    trained(training.method, others, 2, plan.score)
    threads = torch.get_num_threads()
    stack = max(1, min(_TIMED, round(plan.expected_runs * plan.repeats)))
    timed = {} if known is None else known
    key = (key, schedule, training.noise, stack, steps)
    if key not in timed:
        # A round trains its candidates in stacks, so a stack is timed; where steps are long stacks gain
        # nothing, and a few steps tell.
        if (clock[-1] - clock[-2]) * stack * steps > _LONG:
            stack, steps = min(stack, threads), min(steps, _FEW)
        clock[:] = [time.perf_counter()]
        # What a step costs hangs on its gradients, not on the method or the learning rate.
        values = {"learning_rate": 1e-3, "max_grad_norm": 1.0}
        # A schedule of torch's may end before as many steps as are timed.
        few = (replace(make(bytes([n]) * 32), values=values, scheduler=None) for n in range(stack))
        trained(FixedDPSGD(noise_multiplier=1.0), few, steps, None)
        timed[key] = seconds_per_step(clock, steps=steps, threads=threads) / stack
    expected = plan.expected_gradient_evaluations / schedule.expected_batch_size
    return result, expected * timed[key]


def seconds_per_step(clock: Sequence[float], *, steps: int, threads: int) -> float:
    """Return the seconds of one step of all stacks, from the times at which their steps ended."""
    # The median: some steps capture or allocate once, and are not what a step costs. Of stacks side
    # by side one step may end right after another's, so as many as there are are taken together.
    splits = (len(clock) - 1) / steps
    abreast = max(1, min(int(splits), threads))
    taken = statistics.median(b - a for a, b in zip(clock, clock[abreast:], strict=False))
    return taken * splits / abreast
