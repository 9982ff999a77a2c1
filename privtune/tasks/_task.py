"""What a study works on: data, a model, a loss, a metric, and what is public about them."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError
from privtune.imports import users_code
from privtune.numbers import is_number
from privtune.tasks._facts import PARTITIONS, SPLITS, PublicFacts, TaskAbsentError, TaskDataError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.tasks._cells import Fault
    from privtune.tasks._rows import Rows, Served
    from privtune.tasks._usable import RecordCheck
    from privtune.training.mechanism.data import RecordTree, TensorData
    from privtune.training.mechanism.kernel import LossOf

IGNORED = -100
"""The class of a place that is none, as losses of torch's skip it."""

_ALIKE = 0.1  # of distinct records of a split, more than this share is not among others by chance
_ROWS = 256  # records whose bytes are made at once
_TRIED = 16  # real records that model and loss are tried on before a charge


def made_up_inputs(records: int, shape: tuple[int, ...], tokens: int | None) -> torch.Tensor:
    """Return inputs of a task's shape and type (whole numbers below ``tokens``, if any): always the same."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        return torch.rand((records, *shape), generator=generator)
    return torch.randint(tokens, (records, *shape), generator=generator)


@dataclass(frozen=True)
class ModelOf:
    """Builds a model of ``_models`` by its name: planning loads no torch. Equal ones build one model."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> nn.Module:
        home = importlib.import_module("privtune.tasks._models")
        made: nn.Module = getattr(home, self.name)(*self.arguments)
        return made


def classification_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="none")


def softmax_constants(square: float, classes: int, *, weight: float = 1.0) -> Mapping[str, float]:
    """Return the constants of the cross-entropy of a linear model with a bias, from zero weights."""
    # The gradient is the outer product of p - onehot(y), no longer than sqrt(2), and (x, 1), no longer
    # than sqrt(s + 1); the Hessian is that of diag(p) - p pᵀ, with eigenvalues up to 1/2, and (x, 1)(x, 1)ᵀ.
    # From zero weights the loss is log C, and nowhere below 0. A class's weight multiplies all three.
    return {
        "lipschitz": weight * math.sqrt(2.0 * (square + 1.0)),
        "smoothness": weight * 0.5 * (square + 1.0),
        "gap": weight * math.log(classes),
    }


def contents(x: Any, y: Any) -> Iterator[bytes]:
    """Yield the bytes of each record, the same whatever types its arrays have."""
    for start in range(0, len(y), _ROWS):
        parts = [_numbers(part[start : start + _ROWS]) for part in (x, y)]
        rows = np.concatenate(parts, axis=1, dtype="<f8", casting="unsafe")
        rows += 0.0  # no -0.0
        rows[np.isnan(rows)] = np.nan  # one of its many bit patterns
        for row in rows:
            yield row.tobytes()


def _numbers(part: Any) -> npt.NDArray[Any]:
    known = part.cpu() if hasattr(part, "cpu") else part
    if str(getattr(part, "dtype", "")) == "torch.bfloat16":  # numpy has no such
        known = known.float()
    rows = np.asarray(known)
    return rows.reshape(len(rows), -1)


RecordLoss = Callable[..., "torch.Tensor"]
"""A function ``(model, *record) -> [1]`` of one record, whose tensors have a leading axis of 1."""

Build = Callable[[Any], "Candidate"]
"""Takes a ``privtune.Trial``, suggests its hyperparameters, returns what to train. It receives no data."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One model to train, and how: what ``build(trial)`` returns.

    Args:
        model: The model with its first weights. Parameters without gradients stay as they are.
        optimizer: One of torch's classes over the trainable parameters; None where the arm's method
            steps by itself, ``dpsgd`` included: then ``learning_rate`` is suggested, or fixed by the arm.
        method: The training method, the same for every trial; the arm's unless given.
        max_grad_norm: The clipping norm of each record's gradient, above 0; 1 with an optimizer unless
            given. Methods that set it by themselves take none.
        schedule: Of the learning rate: a name or mapping as in a spec (``"cosine"``), or a scheduler of
            torch's over the optimizer, stepped once after every step.
        trainable: Which part is trained: ``all``, ``head``, ``biases`` or ``lora:RANK``; the parameters
            that require gradients unless given.
        target_modules: With ``lora:RANK``: names of the layers that are adapted, or how these end; all
            linear layers unless given, or all convolutions where there are none.
        augment: Takes the inputs of one record as the loss does, and returns others of the same shape and
            type, with random numbers of torch's. The gradient of a record is the mean over its views, and
            clipped then: the charge is the same. Scores see no augmentation.
        multiplicity: How many views of a record are drawn at each step.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> Candidate(model, torch.optim.SGD(model.parameters(), lr=0.5), max_grad_norm=1.0).method is None
        True
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    _: KW_ONLY
    method: str | None = None
    max_grad_norm: float | None = None
    schedule: str | Mapping[str, Any] | LRScheduler | None = None
    trainable: str | None = None
    target_modules: Sequence[str] | None = None
    augment: Callable[[Any], Any] | None = None
    multiplicity: int = 1


@dataclass(frozen=True)
class Score:
    """How trials are scored: a metric by its name, or a function of the model and one record.

    Args:
        metric: A metric's name as in a spec, or a function ``(model, *record) -> [1]`` of one record,
            called with the model in evaluation mode.
        bound: The most that one record adds, above 0; 1 unless given. A function is clipped to
            [-bound, bound], ``loss`` to [0, bound].
        maximize: Whether more of a function is better. Metrics by name know that by themselves.
        mechanism: ``gaussian`` or ``laplace`` noise, where the validation split is private.

    Raises:
        InvalidInputError: If the bound is not a finite number above 0.

    Example:
        >>> Score("loss", bound=4.0).bound
        4.0
    """

    metric: str | RecordLoss = "accuracy"
    bound: float | None = None
    maximize: bool = False
    mechanism: str = "gaussian"

    def __post_init__(self) -> None:
        if self.bound is not None and not (is_number(self.bound) and self.bound > 0.0):
            raise InvalidInputError("score.bound", self.bound, "must be a finite number above 0")

    @property
    def name(self) -> str:
        """The metric's name in a plan: ``value`` or ``cost`` for a function."""
        if isinstance(self.metric, str):
            return self.metric
        return "value" if self.maximize else "cost"


@dataclass(frozen=True)
class TaskData:
    """The three splits of a task, in memory.

    Args:
        train: Private: inputs ``x`` of shape ``[N, ...]``, targets ``y`` of shape ``[N]``.
        validation: What trials are scored on.
        test: What releases are judged on, if it is public.

    Example:
        >>> from privtune.tasks import get_task
        >>> data = get_task("synthetic-logistic").load()
        >>> data.train.x.shape[1:], data.train.y.dtype
        (torch.Size([20]), torch.int64)
    """

    train: TensorData
    validation: TensorData
    test: TensorData


def check_rarest_share(share: Any, classes: int | None) -> None:
    """Refuse a declared share of the rarest class that no class can have."""
    if classes is None:
        raise InvalidInputError(
            "rarest_share", share, "goes with classes, and the task has none", "Leave it out."
        )
    if not is_number(share) or not 0.0 < share <= 1.0 / classes:
        raise InvalidInputError(
            "rarest_share",
            share,
            f"must be above 0 and at most 1/{classes}, an equal share of the {classes} classes",
            "Write the share as it is known without the records: 0.08 for 8 of 100.",
        )


@dataclass(frozen=True, kw_only=True)
class Task(PublicFacts):
    """A learning problem, with its public facts apart from its private data.

    Planning reads the public facts only; ``load`` is called when a charge has been started, and before
    it to tell the curator alone how many records cannot be used.

    Args:
        name, description: Its name in specs, and one line for ``privtune tasks``.
        train_records, validation_records, test_records: Declared numbers, on which rates, averages and
            scores rest.
        input_shape: Shape of one input record.
        classes: Number of classes; None where targets are floats, as of a regression or a density.
        load: Reads the data; never called while planning.
        model: Builds a freshly initialised module; called under a seeded generator.
        loss: Per-sample loss, ``(outputs [B, classes], targets [B]) -> [B]``; of a regression ``[B, 1]``.
        class_names: All values of the target, if they have names.
        check: Called before a charge: raises ``TaskDataError`` where what holds the data, its records
            apart, is not as declared. Must not depend on a value of a record.
        header: As ``check``, while planning; raises ``TaskAbsentError`` for what is not there.
        constants: Of a convex loss, what is proven of one record's: ``lipschitz``, ``smoothness``, and
            ``gap``, the most that the first parameters are from the best (for ``pur``).
        tokens: Where inputs are whole numbers, how many there are, from 0.
        examine: Says how many records cannot be used; None to look at what ``load`` returns.
        build: Suggests hyperparameters and returns the candidate to train, in the place of ``model``.
        loss_of: The loss of one record, ``(model, x, y) -> [1]``, in the place of ``loss``.
        score, score_of: How trials are scored where the study does not say, and its function of packed
            records, ``(model, x, y) -> [1]``; None for a metric by its name.
        tree: How the tensors of a record lie in ``x`` and ``y``; None where they are as given.
        like: Inputs and targets of no records ``[0, ...]``, whose shapes and types are public.
        code: What makes the same task in other processes, by ``get_task``; None where only this can.
        raw: How raw rows become inputs; None where they are arrays of the inputs' shape.
        columns: Columns of a DataFrame whose numbers are an input, in their order.

    Raises:
        InvalidInputError: If a size is below 1, or the partition is unknown.

    Example:
        >>> from dataclasses import replace
        >>> from privtune.tasks import get_task
        >>> task = replace(get_task("synthetic-logistic"), name="mine", public_validation=True)
        >>> task.facts.to_dict()["validation records"]
        '1,000, all of it public'
        >>> task.load_checked().train.sealed_size  # how many records it has is private
        True
        >>> task.look(), task.check_records().reason
        ('', '')
    """

    name: str
    description: str
    validation_records: int
    test_records: int
    input_shape: tuple[int, ...]
    classes: int | None
    load: Callable[[], TaskData]
    model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    class_names: tuple[Any, ...] | None = None
    check: Callable[[], object] = lambda: None
    header: Callable[[], object] = lambda: None
    constants: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None
    examine: Callable[[], RecordCheck] | None = None
    build: Build | None = None
    loss_of: LossOf | None = None
    score: Score | None = None
    score_of: LossOf | None = None
    tree: RecordTree | None = None
    like: tuple[torch.Tensor, torch.Tensor] | None = None
    code: Mapping[str, Any] | None = None
    raw: Rows | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            raise InvalidInputError(
                "partition", self.partition, f"must be one of {', '.join(PARTITIONS)}"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise InvalidInputError(
                "precision",
                self.precision,
                "must be float32 or bfloat16: gradients leave the range of any other 16 bits",
            )
        if self.rarest_share is not None:
            # A build's classes need no declaration: there are two at least.
            undeclared = 2 if self.build is not None and self.target_range is None else None
            check_rarest_share(self.rarest_share, self.classes or undeclared)
        for name in ("train_records", "validation_records", "test_records", "classes", "tokens"):
            if name in ("validation_records", "test_records") and self.build is not None:
                continue  # 0 where the user gives no such split
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInputError(
                    name, getattr(self, name), f"task {self.name!r} must declare at least 1"
                )

    @property
    def packed_code(self) -> bytes:
        """The task's :attr:`code` as it is stored for other processes."""
        return json.dumps(self.code).encode()

    @property
    def record_loss(self) -> LossOf:
        """The loss of one record: a model, its inputs and targets as a batch of one, to shape ``[1]``."""
        from privtune.training.mechanism.kernel import OfOutputs

        return OfOutputs(self.loss) if self.loss_of is None else self.loss_of

    @property
    def rows(self) -> int | None:
        """Most rows of one record, where a record is all rows of one unit; else None."""
        return self.input_shape[0] if self.unit else None

    @property
    def facts(self) -> PublicFacts:
        """What the task declares public."""
        known = {each.name: getattr(self, each.name) for each in fields(PublicFacts)}
        return PublicFacts(
            **known
            | {
                "validation_records": self.validation_records or None,
                "test_records": self.test_records or None,
                "classes": self.class_names or self.classes,
                "unit": f"{self.unit}, at most {self.rows:,}" if self.unit else "",
            }
        )

    def served(self, model: torch.nn.Module) -> Served:
        """Return a trained model of the task as one of raw rows.

        Args:
            model: The model, in evaluation mode.

        Example:
            >>> from privtune.tasks import get_task
            >>> task = get_task("synthetic-logistic")
            >>> task.served(task.model().eval()).predict([[0.0] * 20])["prediction"].tolist()
            [0]
        """
        from privtune.tasks._rows import Served

        network, rows, labels = model, self.raw, self.class_names
        if self.tree is not None:
            network = self.tree.inputs.wrap(model)
        if labels is None and self.classes is not None:
            labels = tuple(range(self.classes))
        if rows is None:
            rows = self._array_rows(network)
        return Served(
            rows=rows,
            network=network,
            # As JSON has them: an exported model answers with the same.
            labels=json.loads(json.dumps(labels, default=str)),
            counted=self.like is not None
            and self.like[1].ndim == 1
            and not self.like[1].is_floating_point(),
            target_range=self.target_range,
        )

    def _array_rows(self, network: torch.nn.Module) -> Rows:
        """Return rows that are arrays of the inputs' shape, or of the parts' that make an input."""
        import torch

        from privtune.tasks._rows import ArrayRows
        from privtune.training.mechanism.data import find_facts

        shape = self.input_shape[1:] if self.unit else self.input_shape
        like = made_up_inputs(1, shape, self.tokens) if self.like is None else self.like[0]
        like = torch.zeros((1, *shape), dtype=like.dtype)
        limits = find_facts(lambda x, _: network(x), like, like).inputs
        number = str(like.dtype).removeprefix("torch.")
        packing = None if self.tree is None else self.tree.inputs
        return ArrayRows(
            parts={"inputs": shape} if packing is None else packing.parts,
            dtypes=(number,) if packing is None else packing.dtypes,
            shape=shape,
            number=number,
            columns=self.columns,
            limits=None if limits is None else limits.flatten().tolist(),
        )

    def look(self) -> str:
        """Return a sentence where what holds the data is not here; check its header where it is.

        Raises:
            TaskDataError: If it is not as declared.
        """
        try:
            with users_code("task", self.name, "its header cannot be checked"):
                self.header()
        except TaskAbsentError as error:
            return f"{error} Its header is checked when the study runs, before the charge."
        return ""

    def load_checked(self) -> TaskData:
        """Return the splits; those of public size hold what was declared, and so what was charged.

        Raises:
            TaskDataError: If one does not.
        """
        data = self.load()
        for split in SPLITS:
            declared = getattr(self, f"{split}_records")
            records = getattr(data, split)
            if len(records.y) != declared and not records.sealed_size:
                raise TaskDataError(
                    f"Task {self.name!r} declares {declared} {split} records, but its data is of "
                    "another size; sampling rates were charged for the declared number. Correct "
                    f"{split}_records and plan the study again."
                )
        return data

    def check_records(
        self,
        data: TaskData | None = None,
        *,
        tried: bool = True,
        model: torch.nn.Module | None = None,
    ) -> RecordCheck:
        """Return how many records cannot be used, and why, by split and column. For the curator alone.

        Args:
            data: The data, where it has been loaded.
            tried: Whether model and loss are tried on a few of the records.
            model: The model to try, of a candidate, where the task has ``build``.
        """
        from privtune.tasks._usable import Tally

        if self.examine is not None:
            return self.examine()
        data = self.load() if data is None else data
        splits = {name: getattr(data, name) for name in SPLITS if getattr(self, f"{name}_records")}
        tally = Tally(
            {name: getattr(self, f"{name}_records") for name in splits},
            what=self.unit or "record",
            sealed=any(records.sealed_size for records in splits.values()),
            by="" if self.partition in ("fixed", "given") else self.partition,
            classes=self.class_names or range(self.classes or 0),
        )
        # Targets of a density stand for nothing: they may all be the same.
        targets = self.classes is not None or self.target_range is not None
        if self.build is None:
            model = self.model() if tried else None
        for number, records in enumerate(splits.values()):
            unusable = records.unusable
            if len(records.y) == 1 and unusable is not None and bool(unusable.all()):
                continue  # one that stands for a split without records
            tally.add(
                np.full(len(records.y), number),
                _faults(self, records, model if tried else None),
                x=records.x.cpu().numpy(),
                y=records.y.cpu().numpy() if targets else None,
            )
        found = tally.check()
        if self.build is None:
            return found
        apart = {
            name: records
            for name, records in splits.items()
            if name == "train" or self.partition == "given" or not records.sealed_size
        }
        return replace(found, beside=shared_records(apart) or found.many)


def _faults(task: Task, data: TensorData, model: torch.nn.Module | None) -> Iterator[Fault]:
    """Yield what is not as declared of records in memory."""
    from privtune.tasks._cells import NO_NUMBER, Fault
    from privtune.training.mechanism.data import find_facts

    x, y = data.x.cpu(), data.y.cpu()
    unusable = np.zeros(len(y), dtype=bool)
    flat = x.reshape(len(x), -1)
    if x.is_floating_point():
        unusable = ~flat.isfinite().all(dim=1).numpy()
        yield Fault("inputs", NO_NUMBER, unusable)
    elif task.tokens is not None:
        unusable = ((flat < 0) | (flat >= task.tokens)).any(dim=1).numpy()
        said = f"declared 0 to {task.tokens - 1}"
        yield Fault("inputs", "token not declared", unusable, declared=said)
    if data.unusable is not None:
        marked = data.unusable.cpu().numpy() & ~unusable
        yield Fault("", "marked as unusable, or not readable", marked)
        unusable = unusable | marked
    for fault in _target_faults(task, y, ~unusable):
        unusable = unusable | fault.records & (not fault.used)
        yield fault
    if model is None or unusable.all():
        return
    if task.build is not None:
        device = next((part.device for part in model.parameters()), x.device)
        facts = find_facts(lambda *record: task.record_loss(model, *record), x, y, device=device)
        if (wrong := facts.unusable(x, y)) is not None:  # a training leaves them out
            outside = wrong.numpy() & ~unusable
            yield Fault("", "with a number that the model's tables or classes do not have", outside)
            unusable = unusable | outside
    if not unusable.all() and (said := _refusal(task, model, x[~unusable], y[~unusable])):
        yield Fault("", "that model and loss cannot train on", ~unusable, declared=said)


def _target_faults(task: Task, y: torch.Tensor, rest: npt.NDArray[np.bool_]) -> Iterator[Fault]:
    """Yield what is wrong with targets of some records."""
    from privtune.tasks._cells import CLIPPED, LABEL, NO_NUMBER, Fault, column_of

    targets = y.reshape(len(y), -1)
    if task.classes is None:
        yield Fault("target", NO_NUMBER, rest & ~targets.isfinite().any(dim=1).numpy())
        if task.target_range is not None:
            low, high = task.target_range
            outside = ((targets < low) | (targets > high)).any(dim=1).numpy()
            said = f"declared [{low:g}, {high:g}]"
            yield Fault("target", CLIPPED, rest & outside, used=True, declared=said)
        return
    wrong = (targets < 0) | (targets >= task.classes) | (targets != targets.floor())
    if y.ndim > 1 and not task.unit:
        wrong &= targets != IGNORED
    unusable = rest & (wrong.all(dim=1) if task.unit else wrong.any(dim=1)).numpy()
    if unusable.any():
        seen, first = targets[unusable], targets[:, 0].tolist()
        low, high = float(seen.min()), float(seen.max())
        said = f"labels from {low:g} to {high:g}, declared 0 to {task.classes - 1}"
        if low == high == -1:
            said = "of no declared class, or it cannot be read"
        cells = column_of([None if label == -1 else label for label in first])  # -1: no class
        yield Fault("target", LABEL, unusable, declared=said, cells=cells)


def _refusal(task: Task, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    """Return why model and loss cannot be trained on some real records; nothing where they can."""
    import torch

    from privtune.training.mechanism.memory import RecordMemoryError
    from privtune.training.mechanism.streams import GLOBAL_GENERATOR

    # What a factory loads may have other targets than the made-up records, and a loss that broadcasts
    # them mixes records.
    like = made_up_inputs(1, task.input_shape, task.tokens) if task.like is None else task.like[0]
    said = f"inputs {tuple(x.shape[1:])} of {x.dtype}, targets {tuple(y.shape[1:])} of {y.dtype}"
    if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        said += f"; inputs of {tuple(like.shape[1:])} of {like.dtype} are declared"
    if task.like is None and y.ndim != (2 if task.unit else 1):
        return f"{said}; targets must be of shape (N,), one number for each record"
    x, y = x[:_TRIED], y[:_TRIED]
    try:
        # With gradients: a loss may take some of its own.
        with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
            if task.loss_of is None:
                found = {"loss": task.loss(model(x), y)}
            else:
                with _remembering_nothing("The loss", task.loss_of, model, x, y):
                    found = {"loss": _one_by_one(task.loss_of, model, x, y)}
            if task.score_of is not None:
                with _remembering_nothing("The score", task.score_of, model.eval(), x, y):
                    found["score"] = _one_by_one(task.score_of, model, x, y)
            for name, values in found.items():
                if values.shape != y.shape[:1]:
                    return (
                        f"{said}; the {name} of {len(y)} records is of shape {tuple(values.shape)}"
                    )
                if 2 * int(values.isfinite().sum()) < len(y):
                    return f"{said}; most {'losses' if name == 'loss' else 'scores'} are not finite"
    except RecordMemoryError:
        raise
    except Exception as error:  # whatever a model makes of them, they cannot be trained on
        return f"{said}; {type(error).__name__}"
    return ""


def _remembering_nothing(
    what: str, of: LossOf, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> AbstractContextManager[None]:
    """Return a block that real records pass through, after which a function must be as it was."""
    import torch

    from privtune.training.mechanism.data import TensorData, find_domain_of
    from privtune.training.mechanism.memory import MemoryCheck, gradients_of, remembering_nothing

    # Shapes and types alone: what is made up must not depend on a record.
    blank = TensorData(torch.zeros_like(x[:1]), torch.zeros_like(y[:1]))
    domain = find_domain_of(model, of, blank)
    made_up = domain.draw(*blank.like, (1, 2), x.device)
    inputs, targets = (torch.split(part[0], 1) for part in made_up)
    records = list(zip(inputs, targets, strict=True))
    # Of the model its class alone: records pass through the model itself, which is then dropped.
    functions = (of, type(model))
    return remembering_nothing(
        MemoryCheck(what, functions, lambda: gradients_of(of, model, records))
    )


def _one_by_one(
    of: LossOf, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return what each record has; NaN for one that raises, where another does not."""
    import torch

    from privtune.training.mechanism.data import blames_records

    device = next((part.device for part in model.parameters()), x.device)
    found, raised = [], None
    for number in range(len(x)):
        try:
            record = x[number : number + 1].to(device), y[number : number + 1].to(device)
            value = of(model, *record)
            value = value.detach()
            found.append(value.reshape(1) if value.ndim == 0 else value)  # a mean over one record
        except Exception as error:
            if not blames_records(error):
                raise
            raised = error
    if raised is not None and not found:
        raise raised
    nothing = torch.full_like(found[0], float("nan"))
    return torch.cat([*found, *[nothing] * (len(x) - len(found))])


def shared_records(splits: Mapping[str, TensorData]) -> str:
    """Return which split, of those given apart, holds records of ``train``; nothing where none does."""

    def kinds(records: TensorData) -> list[Any]:
        if records.groups is not None:
            return list(records.groups.tolist())
        return [hash(one) for one in contents(records.x, records.y)]

    train = splits["train"]
    known = kinds(train)
    distinct = set(known)
    if train.groups is None and len(distinct) < 0.99 * len(known):
        return ""  # few values are possible: equal records are different persons'
    for name, records in splits.items():
        own = set(kinds(records)) if name != "train" else set()
        there = len(own & distinct)
        if there > (0 if train.groups is not None else max(3, _ALIKE * len(own))):
            what = records.unit or "record"
            return f"{there:,} {what}s of split {name} are training {what}s, too; set them apart"
    return ""
