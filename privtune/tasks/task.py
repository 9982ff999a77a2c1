"""Tasks: the data, model, loss and metric of a study, with the public facts about them."""

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
from privtune.facts import PARTITIONS, SPLITS, PublicFacts, TaskAbsentError, TaskDataError
from privtune.imports import users_code
from privtune.ledger.datasets import Dataset
from privtune.names import refuse_name
from privtune.numbers import is_number

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.tables.cells import Fault
    from privtune.tables.raw_rows import Rows, ServedModel
    from privtune.tables.unusable import RecordCheck
    from privtune.training.mechanism.data import RecordTree, TensorData
    from privtune.training.mechanism.kernel import LossOf

IGNORED = -100
"""Class number of a target that losses skip, as torch's losses do."""

_ALIKE = 0.1  # of distinct records of a split, more than this share is not among others by chance
_ROWS = 256  # records whose bytes are made at once
_TRIED = 16  # real records that model and loss are tried on before a charge


def made_up_inputs(records: int, shape: tuple[int, ...], tokens: int | None) -> torch.Tensor:
    """Return inputs of a task's shape, drawn with a fixed seed: whole numbers if it has ``tokens``."""
    import torch

    size = (records, *shape)
    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        return torch.rand(size, generator=generator)
    return torch.randint(tokens, size, generator=generator)


@dataclass(frozen=True)
class ModelOf:
    """Builder of a model of ``_models`` by its name, so that planning loads no torch."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> nn.Module:
        """Build the model, its weights drawn by torch's generator."""
        home = importlib.import_module("privtune.tasks._models")
        make = getattr(home, self.name)
        model: nn.Module = make(*self.arguments)
        return model


def classification_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each record."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, targets, reduction="none")


def softmax_constants(square: float, classes: int) -> Mapping[str, float]:
    """Return the constants of the cross-entropy of a linear model with a bias, from zero weights."""
    # The gradient is the outer product of p - onehot(y), no longer than sqrt(2), and (x, 1), no longer
    # than sqrt(s + 1); the Hessian is that of diag(p) - p pᵀ, with eigenvalues up to 1/2, and (x, 1)(x, 1)ᵀ.
    # From zero weights the loss is log C, and nowhere below 0. A weight of 1 at most makes none larger.
    return {
        "lipschitz": math.sqrt(2.0 * (square + 1.0)),
        "smoothness": 0.5 * (square + 1.0),
        "gap": math.log(classes),
    }


def contents(x: Any, y: Any) -> Iterator[bytes]:
    """Yield each record as bytes, which are the same for every type of its arrays.

    Splits by content rest on them: the same record must fall into the same split on every machine.
    """
    for start in range(0, len(y), _ROWS):
        end = start + _ROWS
        inputs = _numbers(x[start:end])
        targets = _numbers(y[start:end])
        rows = np.concatenate([inputs, targets], axis=1, dtype="<f8", casting="unsafe")
        rows += 0.0  # no -0.0
        rows[np.isnan(rows)] = np.nan  # one of its many bit patterns
        for row in rows:
            yield row.tobytes()


def _numbers(part: Any) -> npt.NDArray[Any]:
    """Return a tensor or an array as a numpy array of rows, ``[N, n]``."""
    if hasattr(part, "cpu"):
        part = part.cpu()
    dtype = str(getattr(part, "dtype", ""))
    if dtype == "torch.bfloat16":  # numpy has no such
        part = part.float()
    rows = np.asarray(part)
    return rows.reshape(len(rows), -1)


RecordLoss = Callable[..., "torch.Tensor"]
"""A function ``(model, *record) -> [1]`` of one record, whose tensors have a leading axis of 1."""

Build = Callable[[Any], "Candidate"]
"""A function that takes a ``privtune.Trial`` and no data, and returns the candidate to train."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model to train and its training settings, as ``build(trial)`` returns them.

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
        bound = self.bound
        if bound is None:
            return
        if not is_number(bound) or bound <= 0.0:
            raise InvalidInputError("score.bound", bound, "must be a finite number above 0")

    @property
    def name(self) -> str:
        """The metric's name in a plan: ``value`` or ``cost`` for a function."""
        if isinstance(self.metric, str):
            return self.metric
        if self.maximize:
            return "value"
        return "cost"


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
    """Refuse a declared share of the rarest class outside of (0, 1 / ``classes``]."""
    if classes is None:
        raise InvalidInputError(
            "rarest_share",
            share,
            "goes with classes, and the task has none",
            "Leave it out.",
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
        readers: Functions and classes of the user's that make the records, beside ``load``.
        dataset: Which dataset the records are, as budgets tell one from another: public facts alone.

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
        >>> task.check_header(), task.check_records().reason
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
    readers: tuple[Any, ...] = ()
    dataset: Dataset | None = None

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            refuse_name("partition", self.partition, PARTITIONS)
        if self.precision not in ("float32", "bfloat16"):
            raise InvalidInputError(
                "precision",
                self.precision,
                "must be float32 or bfloat16: gradients leave the range of any other 16 bits",
            )
        if self.rarest_share is not None:
            classes = self.classes
            if not classes and self.build is not None and self.target_range is None:
                classes = 2  # a build's classes need no declaration: there are two at least
            check_rarest_share(self.rarest_share, classes or None)
        self._check_input_range()
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse declared sizes, classes or tokens below 1, since rates and averages divide by them."""
        sizes: tuple[str, ...] = ("train_records", "validation_records", "test_records")
        if self.build is not None:  # the others are 0 where the user gives no such split
            sizes = ("train_records",)
        for name in (*sizes, "classes", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(name, value, f"task {self.name!r} must declare at least 1")

    def _check_input_range(self) -> None:
        """Refuse an ``input_range`` that is not two finite numbers in ascending order."""
        ends = self.input_range
        if ends is None:
            return
        are_numbers = len(ends) == 2 and all(map(is_number, ends))
        if not are_numbers or ends[0] >= ends[1]:
            raise InvalidInputError(
                "input_range",
                ends,
                "must be two finite numbers, the lower one first",
            )

    @property
    def packed_code(self) -> bytes:
        """The task's :attr:`code` as JSON bytes, for other processes."""
        return json.dumps(self.code).encode()

    @property
    def record_loss(self) -> LossOf:
        """The loss of one record, a function of a model and a batch of one that returns shape ``[1]``."""
        from privtune.training.mechanism.kernel import LossOfOutputs

        if self.loss_of is None:
            return LossOfOutputs(self.loss)
        return self.loss_of

    @property
    def rows(self) -> int | None:
        """Most rows of one record, where a record is all rows of one unit; else None."""
        if not self.unit:
            return None
        return self.input_shape[0]

    @property
    def facts(self) -> PublicFacts:
        """The public facts that the task declares."""
        facts = {each.name: getattr(self, each.name) for each in fields(PublicFacts)}
        facts["validation_records"] = self.validation_records or None
        facts["test_records"] = self.test_records or None
        facts["classes"] = self.class_names or self.classes
        if self.unit:
            facts["unit"] = f"{self.unit}, at most {self.rows:,}"
        return PublicFacts(**facts)

    def served(self, model: torch.nn.Module, *, temperature: float | None = None) -> ServedModel:
        """Return a trained model of the task, wrapped to predict from raw rows.

        Args:
            model: The model, in evaluation mode.
            temperature: What its logits are divided by for probabilities; 1 unless given.

        Example:
            >>> from privtune.tasks import get_task
            >>> task = get_task("synthetic-logistic")
            >>> task.served(task.model().eval()).predict([[0.0] * 20])["prediction"].tolist()
            [0]
        """
        from privtune.tables.raw_rows import ServedModel

        network = model if self.tree is None else self.tree.inputs.wrap(model)
        labels = self.class_names
        if labels is None and self.classes is not None:
            labels = tuple(range(self.classes))
        # As JSON has them: an exported model answers with the same.
        labels_as_json = json.dumps(labels, default=str)
        are_labels = False
        if self.like is not None:
            _, targets = self.like
            are_labels = targets.ndim == 1 and not targets.is_floating_point()
        rows = self.raw
        if rows is None:
            rows = self._array_rows(network)
        return ServedModel(
            rows=rows,
            network=network,
            labels=json.loads(labels_as_json),
            counted=are_labels,
            target_range=self.target_range,
            temperature=temperature,
        )

    def _array_rows(self, network: torch.nn.Module) -> Rows:
        """Return how raw rows become inputs where they are arrays, of the input's shape or its parts'."""
        import torch

        from privtune.tables.raw_rows import ArrayRows
        from privtune.training.mechanism.data import find_facts

        shape = self.input_shape[1:] if self.unit else self.input_shape
        if self.like is None:
            like = made_up_inputs(1, shape, self.tokens)
        else:
            like, _ = self.like
        row = torch.zeros((1, *shape), dtype=like.dtype)
        facts = find_facts(lambda x, _: network(x), row, row)
        limits = None
        if facts.inputs is not None:
            limits = facts.inputs.flatten().tolist()
        number = str(like.dtype).removeprefix("torch.")
        parts: Mapping[str, tuple[int, ...]] = {"inputs": shape}
        dtypes: tuple[str, ...] = (number,)
        if self.tree is not None:
            parts = self.tree.inputs.parts
            dtypes = self.tree.inputs.dtypes
        return ArrayRows(
            parts=parts,
            dtypes=dtypes,
            shape=shape,
            number=number,
            columns=self.columns,
            limits=limits,
            within=self.input_range,
            scaling=self.facts.scaling,
        )

    def check_header(self) -> str:
        """Return a sentence if the data is absent, or check its header if it is there.

        Raises:
            TaskDataError: If it is not as declared.

        Example:
            >>> from privtune.tasks import get_task
            >>> get_task("synthetic-logistic").check_header()
            ''
        """
        try:
            with users_code("task", self.name, "its header cannot be checked"):
                self.header()
        except TaskAbsentError as error:
            return f"{error} It is looked for again when the study runs, before the charge."
        return ""

    def load_checked(self) -> TaskData:
        """Return the splits after checking that those of public size hold the declared number of records.

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
        """Return counts of unusable records by split, column and reason, for the curator alone.

        Args:
            data: The data, where it has been loaded.
            tried: Whether model and loss are tried on a few of the records.
            model: The model to try, of a candidate, where the task has ``build``.
        """
        from privtune.tables.unusable import Tally

        if self.examine is not None:
            return self.examine()
        if data is None:
            data = self.load()
        sizes = {}
        splits = {}
        for name in SPLITS:
            size = getattr(self, f"{name}_records")
            if size:
                sizes[name] = size
                splits[name] = getattr(data, name)
        is_hashed = self.partition not in ("fixed", "given")
        numbers_of_classes = range(self.classes or 0)
        tally = Tally(
            sizes,
            what=self.unit or "record",
            sealed=any(records.sealed_size for records in splits.values()),
            by=self.partition if is_hashed else "",
            classes=self.class_names or numbers_of_classes,
        )
        # Targets of a density stand for nothing: they may all be the same.
        has_targets = self.classes is not None or self.target_range is not None
        if not tried:
            model = None
        elif self.build is None:
            model = self.model()
        for number, records in enumerate(splits.values()):
            if _is_placeholder(records):
                continue
            split_of = np.full(len(records.y), number)
            targets = None
            if has_targets:
                targets = records.y.cpu().numpy()
            tally.add(
                split_of,
                _faults(self, records, model),
                x=records.x.cpu().numpy(),
                y=targets,
            )
        check = tally.check()
        if self.build is None:
            return check
        apart = {}
        for name, records in splits.items():
            if name == "train" or self.partition == "given" or not records.sealed_size:
                apart[name] = records
        shared = shared_records(apart)
        return replace(check, beside=shared or check.many)


def _is_placeholder(records: TensorData) -> bool:
    """Return whether a split holds a single unusable record, as a split without records does."""
    if records.unusable is None or len(records.y) != 1:
        return False
    return bool(records.unusable.all())


def _faults(task: Task, data: TensorData, model: torch.nn.Module | None) -> Iterator[Fault]:
    """Yield the faults of one split's records, by comparison with what the task declares.

    A record is in one fault alone, the first that applies: else it would be counted twice.

    Args:
        task: Says what is declared.
        data: The records of one split.
        model: What is tried on a few of those that are usable; None to try none.
    """
    from privtune.tables.cells import Fault

    x = data.x.cpu()
    y = data.y.cpu()
    unusable = np.zeros(len(y), dtype=bool)
    for fault in _input_faults(task, x):
        unusable = fault.records
        yield fault
    if data.unusable is not None:
        marks = data.unusable.cpu().numpy()
        marked = marks & ~unusable
        yield Fault("", "marked as unusable, or not readable", marked)
        unusable = unusable | marked
    for fault in _target_faults(task, y, ~unusable):
        if not fault.used:
            unusable = unusable | fault.records
        yield fault
    if model is not None:
        yield from _training_faults(task, x, y, model, ~unusable)


def _input_faults(task: Task, x: torch.Tensor) -> Iterator[Fault]:
    """Yield the faults of inputs ``[N, ...]``: NaN, infinities or undeclared tokens."""
    from privtune.tables.cells import NO_NUMBER, Fault

    numbers = x.reshape(len(x), -1)
    if x.is_floating_point():
        is_finite = numbers.isfinite().all(dim=1)
        yield Fault("inputs", NO_NUMBER, ~is_finite.numpy())
    elif task.tokens is not None:
        undeclared = (numbers < 0) | (numbers >= task.tokens)
        last = task.tokens - 1
        yield Fault(
            "inputs",
            "token not declared",
            undeclared.any(dim=1).numpy(),
            declared=f"declared 0 to {last}",
        )


def _training_faults(
    task: Task,
    x: torch.Tensor,
    y: torch.Tensor,
    model: torch.nn.Module,
    usable: npt.NDArray[np.bool_],
) -> Iterator[Fault]:
    """Yield the faults of records on which model or loss fails, though they are as declared."""
    from privtune.tables.cells import Fault
    from privtune.training.mechanism.data import find_facts

    if not usable.any():
        return
    if task.build is not None:
        device = _device_of(model, x)
        facts = find_facts(
            lambda *record: task.record_loss(model, *record),
            x,
            y,
            device=device,
        )
        beyond = facts.unusable(x, y)
        if beyond is not None:  # a training leaves them out
            why = "with an index outside the model's embedding tables or classes"
            outside = beyond.numpy() & usable
            yield Fault("", why, outside)
            usable = usable & ~outside
    if not usable.any():
        return
    usable_x = x[usable]
    usable_y = y[usable]
    refusal = _refusal(task, model, usable_x, usable_y)
    if refusal:
        yield Fault("", "that model and loss cannot train on", usable, declared=refusal)


def _device_of(model: torch.nn.Module, x: torch.Tensor) -> torch.device:
    """Return the device of a model, or of its inputs if it has no parameters."""
    devices = (part.device for part in model.parameters())
    return next(devices, x.device)


def _target_faults(task: Task, y: torch.Tensor, usable: npt.NDArray[np.bool_]) -> Iterator[Fault]:
    """Yield the faults in the targets of records that are usable so far."""
    targets = y.reshape(len(y), -1)
    if task.classes is None:
        yield from _number_faults(task, targets, usable)
    else:
        yield from _label_faults(task, y.ndim, targets, usable)


def _number_faults(
    task: Task,
    targets: torch.Tensor,
    usable: npt.NDArray[np.bool_],
) -> Iterator[Fault]:
    """Yield the faults of regression targets ``[N, n]``: missing numbers, and numbers out of range."""
    from privtune.tables.cells import CLIPPED, NO_NUMBER, Fault

    has_number = targets.isfinite().any(dim=1)
    has_none = ~has_number.numpy()
    yield Fault("target", NO_NUMBER, usable & has_none)
    if task.target_range is None:
        return
    low, high = task.target_range
    is_outside = (targets < low) | (targets > high)
    outside = is_outside.any(dim=1).numpy()
    yield Fault(
        "target",
        CLIPPED,
        usable & outside,
        used=True,
        declared=f"declared [{low:g}, {high:g}]",
    )


def _label_faults(
    task: Task,
    axes: int,
    targets: torch.Tensor,
    usable: npt.NDArray[np.bool_],
) -> Iterator[Fault]:
    """Yield the fault of records with an undeclared label, or of units with undeclared labels alone.

    Args:
        task: Says which classes are declared.
        axes: Of the targets as they were: with several labels a record, one may be IGNORED.
        targets: Labels.
        usable: Records that are usable so far.
    """
    from privtune.tables.cells import LABEL, Fault, column_of

    classes = task.classes or 0
    is_fraction = targets != targets.floor()
    undeclared = (targets < 0) | (targets >= classes) | is_fraction
    if axes > 1 and not task.unit:
        undeclared &= targets != IGNORED
    if task.unit:
        faulty = undeclared.all(dim=1)
    else:
        faulty = undeclared.any(dim=1)
    unusable = usable & faulty.numpy()
    if not unusable.any():
        return
    labels = targets[unusable]
    low = float(labels.min())
    high = float(labels.max())
    declared = f"labels from {low:g} to {high:g}, declared 0 to {classes - 1}"
    if low == high == -1:
        declared = "of no declared class, or it cannot be read"
    first_labels = targets[:, 0].tolist()
    cells = [None if label == -1 else label for label in first_labels]  # -1: no class
    yield Fault(
        "target",
        LABEL,
        unusable,
        declared=declared,
        cells=column_of(cells),
    )


def _refusal(
    task: Task,
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> str:
    """Return why model and loss fail on a few real records, or an empty text.

    Of an error its type alone: its text may quote a record.
    """
    from privtune.training.mechanism.memory import RecordMemoryError

    # What a factory loads may have other targets than the made-up records, and a loss that broadcasts
    # them mixes records.
    if task.like is None:
        like = made_up_inputs(1, task.input_shape, task.tokens)
    else:
        like, _ = task.like
    shape = tuple(x.shape[1:])
    target_shape = tuple(y.shape[1:])
    declared = tuple(like.shape[1:])
    kind = f"inputs {shape} of {x.dtype}, targets {target_shape} of {y.dtype}"
    if shape != declared or x.dtype != like.dtype:
        kind += f"; inputs of {declared} of {like.dtype} are declared"
    axes = 2 if task.unit else 1
    if task.like is None and y.ndim != axes:
        return f"{kind}; targets must be of shape (N,), one number for each record"
    few_x = x[:_TRIED]
    few_y = y[:_TRIED]
    try:
        problem = _try_records(task, model, few_x, few_y)
    except RecordMemoryError:
        raise
    except Exception as error:  # whatever a model makes of them, they cannot be trained on
        problem = type(error).__name__
    if not problem:
        return ""
    return f"{kind}; {problem}"


def _try_records(
    task: Task,
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> str:
    """Return what is wrong with the losses and scores of a few records, or an empty text.

    Random numbers are as before it afterwards: a look at records must not move what a study draws.
    """
    import torch

    from privtune.training.mechanism.streams import GLOBAL_GENERATOR

    # With gradients: a loss may take some of its own.
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]), torch.enable_grad():
        if task.loss_of is None:
            losses = task.loss(model(x), y)
        else:
            with _remembering_nothing("The loss", task.loss_of, model, x, y):
                losses = _one_by_one(task.loss_of, model, x, y)
        problem = _problem_of(losses, y, name="loss", plural="losses")
        if task.score_of is not None:
            with _remembering_nothing("The score", task.score_of, model.eval(), x, y):
                scores = _one_by_one(task.score_of, model, x, y)
            problem = problem or _problem_of(scores, y, name="score", plural="scores")
    return problem


def _problem_of(values: torch.Tensor, y: torch.Tensor, *, name: str, plural: str) -> str:
    """Return what is wrong with one number per record, or an empty text if most are finite.

    Args:
        values: The losses or the scores, to be ``[n]``.
        y: The targets, ``[n, ...]``.
        name: What one of them is called.
        plural: What several are called.
    """
    if values.shape != y.shape[:1]:
        shape = tuple(values.shape)
        return f"the {name} of {len(y)} records is of shape {shape}"
    finite = int(values.isfinite().sum())
    if 2 * finite < len(y):
        return f"most {plural} are not finite"
    return ""


def _remembering_nothing(
    what: str,
    of: LossOf,
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> AbstractContextManager[None]:
    """Return a context that checks that a function keeps nothing of the real records it is called on."""
    import torch

    from privtune.training.mechanism.data import TensorData, find_domain_of
    from privtune.training.mechanism.memory import MemoryCheck, gradients_of, remembering_nothing

    # Shapes and types alone: what is made up must not depend on a record.
    blank_x = torch.zeros_like(x[:1])
    blank_y = torch.zeros_like(y[:1])
    blank = TensorData(blank_x, blank_y)
    domain = find_domain_of(model, of, blank)
    made_up_x, made_up_y = domain.draw(*blank.like, (1, 2), x.device)
    inputs = torch.split(made_up_x[0], 1)
    targets = torch.split(made_up_y[0], 1)
    records = list(zip(inputs, targets, strict=True))
    # Of the model its class alone: records pass through the model itself, which is then dropped.
    functions = (of, type(model))
    check = MemoryCheck(what, functions, lambda: gradients_of(of, model, records))
    return remembering_nothing(check)


def _one_by_one(
    of: LossOf,
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Return a function's value for each record, with NaN for records that raise an error.

    Those of records that raise come last: how many there are is all that is asked.
    """
    import torch

    from privtune.training.mechanism.data import blames_records

    device = _device_of(model, x)
    values = []
    last_error = None
    for number in range(len(x)):
        only = slice(number, number + 1)
        try:
            inputs = x[only].to(device)
            target = y[only].to(device)
            value = of(model, inputs, target).detach()
            if value.ndim == 0:
                value = value.reshape(1)  # a mean over one record
        except Exception as error:
            if not blames_records(error):
                raise
            last_error = error
        else:
            values.append(value)
    if last_error is not None and not values:
        raise last_error
    filler = torch.full_like(values[0], float("nan"))
    count = len(x) - len(values)
    fillers = [filler] * count
    return torch.cat([*values, *fillers])


def shared_records(splits: Mapping[str, TensorData]) -> str:
    """Return a sentence about a split that shares records with ``train``, or an empty text.

    A release that was trained on what it is judged by would look better than it is.

    Args:
        splits: Records by split, ``train`` among them.
    """
    train = splits["train"]
    identities = _identities(train)
    distinct = set(identities)
    has_units = train.groups is not None
    if not has_units and len(distinct) < 0.99 * len(identities):
        return ""  # few values are possible: equal records are different persons'
    for name, records in splits.items():
        if name == "train":
            continue
        others = set(_identities(records))
        shared = len(others & distinct)
        most = 0.0
        if not has_units:
            most = max(3, _ALIKE * len(others))
        if shared > most:
            what = records.unit or "record"
            return f"{shared:,} {what}s of split {name} are training {what}s, too; set them apart"
    return ""


def _identities(records: TensorData) -> list[Any]:
    """Return a key for each record: its unit, or a hash of its content."""
    if records.groups is not None:
        return list(records.groups.tolist())
    each_content = contents(records.x, records.y)
    return [hash(content) for content in each_content]
