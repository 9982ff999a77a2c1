"""The study spec: what a YAML file or the Python API says about a study."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.files import read_bounded
from privtune.ledger import RECORD, Budget, check_unit
from privtune.names import check_name
from privtune.spaces import SearchSpace, with_public_priors, without_numpy
from privtune.strategies import Strategy, make_strategy
from privtune.study._objects import check_address
from privtune.tasks import Task, get_task
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.schedule import NoiseOptions, Schedule

if TYPE_CHECKING:
    from privtune.strategies import PlanningContext
    from privtune.tasks.stages import TaskStage


class _Loader(yaml.SafeLoader):
    """PyYAML's, which itself takes the last of two values, and 1e-3 for text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before ``<<`` adds to it what it may change."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                said = f"{key.value} stands twice in one mapping"
                raise yaml.composer.ComposerError(problem=said, problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str) -> Any:
    """Return what a YAML document says.

    Raises:
        yaml.YAMLError: It is none, or says something twice.

    Example:
        >>> read_yaml("{low: 1e-3, high: 5}")
        {'low': 0.001, 'high': 5}
        >>> read_yaml("{epsilon: 4, epsilon: 40}")
        Traceback (most recent call last):
            ...
        yaml.composer.ComposerError: epsilon stands twice in one mapping
          in "<unicode string>", line 1, column 14:
            {epsilon: 4, epsilon: 40}
                         ^
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


T = TypeVar("T")


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


NUMBER = BeforeValidator(_no_switch)
"""Pydantic takes true for 1."""


def checked(check: Callable[[T], T], value: T) -> T:
    """Ask a check of the package; what it refuses is told with the name of the spec's field.

    Raises:
        ValueError: If the check refuses the value.
    """
    try:
        return check(value)
    except InvalidInputError as error:
        remedy = f". {error.remedy[:-1]}" if error.remedy else ""
        raise ValueError(f"{error.allowed}, not {error.value!r}{remedy}") from None


Space = Annotated[
    Mapping[str, Mapping[str, Any]], AfterValidator(partial(checked, with_public_priors))
]
"""What a spec says of its space: a public prior is the law that it stands for from then on."""


_IN_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "string_type": "must be text",
    "invalid_key": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "value_error": "{error}",
}
"""Pydantic's kinds of errors, in the words of a spec."""


def sentence(
    error: ValidationError, data: object, fields: Callable[[ErrorDetails], Collection[str]]
) -> str:
    """Return what is wrong with the first field that is wrong; of a choice, all that is allowed.

    Args:
        error: What Pydantic found.
        data: What was checked.
        fields: The fields that there are, where one that is not one was given.
    """
    first, *others = error.errors()
    path = _path(first, data)
    where = ".".join(map(str, path)) or "the spec"
    allowed, but, given = _in_words(first, fields).partition(", not ")
    for other in others:
        words = _in_words(other, fields).partition(", not ")[0].removeprefix("must be ")
        # Of a choice, each part has its say, below the same path.
        part = path == _path(other, data) and path not in (first["loc"], other["loc"])
        if part and words not in allowed:
            allowed += f" or {words}"
    return f"{where}: {allowed}{but}{given}".rstrip(".")


def _path(error: ErrorDetails, data: object) -> tuple[int | str, ...]:
    """Return where an error is, without Pydantic's names for the parts of a choice or of a key."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(data, Mapping) and (part in data or error["type"] == "missing"):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int):
            data = data[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _in_words(error: ErrorDetails, fields: Callable[[ErrorDetails], Collection[str]]) -> str:
    """Return what is wrong with a field, what is allowed, and what was given."""
    if error["type"] == "extra_forbidden":
        known = fields(error)
        if close := difflib.get_close_matches(str(error["loc"][-1]), known, n=1):
            return f"is not a field of it; {close[0]} is"
        return f"is not a field of it; these are: {', '.join(known)}"
    words = _IN_WORDS.get(error["type"])
    if words is None:
        return error["msg"]
    said = words.format(**error.get("ctx", {}))
    given = error["input"]
    shown = isinstance(given, str | int | float) and error["type"] != "value_error"
    return f"{said}, not {given!r}" if shown else said


Name = Annotated[str, AfterValidator(partial(checked, check_name))]


class BudgetSpec(BaseModel):
    """The budget that a study draws on; created with the study if it does not exist.

    Args:
        name: Name of the budget.
        epsilon: ε, above 0.
        delta: δ, in (0, 1).
        adjacency: ``add-remove`` or ``replace-one``.
        unit: What is protected, in a word: ``record``, or what the task groups its rows by.

    Example:
        >>> BudgetSpec(name="digits", epsilon=8.0, delta=1e-5).to_budget().adjacency
        <Adjacency.ADD_REMOVE: 'add-remove'>
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    epsilon: Annotated[float, NUMBER] = Field(gt=0, allow_inf_nan=False)
    delta: Annotated[float, NUMBER] = Field(gt=0, lt=1)
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    unit: Annotated[str, AfterValidator(partial(checked, check_unit))] = RECORD

    def to_budget(self) -> Budget:
        """Return the ledger's budget."""
        return Budget(
            self.epsilon, self.delta, name=self.name, adjacency=self.adjacency, unit=self.unit
        )


class ArmSpec(BaseModel):
    """One arm: its name, its strategy, and the strategy's own options beside them.

    Args:
        name: Name of the arm.
        strategy: How it chooses.
        weight: The arm's target ε in proportion to those of the other arms; equal unless given.

    Example:
        >>> arm = ArmSpec(name="selection", strategy="papernot-steinke", mean_runs=20)
        >>> arm.to_strategy().mean_runs
        20
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Name
    strategy: str
    weight: Annotated[float, NUMBER] = Field(default=1.0, gt=0, allow_inf_nan=False)

    def to_strategy(self) -> Strategy:
        """Build the strategy; its options are checked here.

        Returns:
            The strategy, of this arm's name.
        """
        return make_strategy(self.strategy, arm=self.name, options=dict(self.model_extra or {}))


__all__ = ["ArmSpec", "BudgetSpec", "SpecError", "StudySpec"]

_STORED = {"stored": True}


class SpecError(PrivTuneError):
    """A study spec is not well formed."""


class StudySpec(BaseModel):
    """A study: one task, one budget, the arms that are compared.

    Args:
        name: Name of the study.
        task: Built-in name, ``package.module:factory``, or a table; None for an open study, whose
            arms a ``build`` of the user's declares (``study.optimize``).
        budget: The budget it draws on.
        space: Optuna's distributions, by hyperparameter.
        arms: At least one, unless the study is open.
        report: One final score of every arm on the test split: metric, ``epsilon_share``, ....
        scoring: How trials are scored: ``metric``, ``mechanism``, ``bound``.
        stages: What is released of a table before the arms, once for all of them: ``type``
            (``quantiles``, ``histogram``, ``dp-pca``), ``epsilon_share``, ....
        epochs: Expected passes over the training data of one training.
        expected_batch_size: Expected records in one Poisson sample.
        epsilon: What all arms together may cost; the whole budget unless given.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        stack: How many candidates to train at once, or ``auto``.
        noise: Where noise comes from and how it is treated: ``secure``, or ``source`` and
            ``floating_point``.
        executor: Who trains the rounds of selections, as in ``Study.run``.
        artifacts: Absolute URL of an object store for large results, as fsspec takes it
            (``s3://bucket/folder``); files beside the database unless given.
        seed: Makes the study reproducible, and its guarantee void against whoever knows the seed.

    Example:
        >>> spec = StudySpec.parse(
        ...     {
        ...         "name": "digits",
        ...         "task": "digits-mlp",
        ...         "budget": {"name": "digits", "epsilon": 8.0, "delta": 1e-5},
        ...         "space": {"learning_rate": {"type": "float", "low": 0.01, "high": 10.0, "log": True}},
        ...         "arms": [
        ...             {
        ...                 "name": "defaults",
        ...                 "strategy": "fixed",
        ...                 "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
        ...             }
        ...         ],
        ...         "epochs": 10,
        ...         "expected_batch_size": 64,
        ...     }
        ... )

        >>> spec.load_task().train_records, spec.planning_context().schedule.steps
        (1077, 169)
        >>> list(spec.search_space())
        ['learning_rate']
        >>> StudySpec.parse({**spec.model_dump(), "epoch": 3})
        Traceback (most recent call last):
            ...
        privtune.study.spec.SpecError: Study spec, epoch: is not a field of it; epochs is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    task: str | Mapping[str, Any] | None = None
    budget: BudgetSpec
    space: Space = Field(default_factory=dict)
    arms: tuple[ArmSpec, ...] = ()
    scoring: Mapping[str, Any] = Field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    stages: tuple[Mapping[str, Any], ...] = ()
    epochs: Annotated[float | None, NUMBER] = Field(default=None, gt=0, allow_inf_nan=False)
    expected_batch_size: Annotated[int | None, NUMBER] = Field(default=None, ge=1)
    epsilon: Annotated[float | None, NUMBER] = Field(default=None, gt=0, allow_inf_nan=False)
    device: str = "auto"
    stack: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], NUMBER] = "auto"
    executor: str | Mapping[str, Any] | None = None
    noise: str | Mapping[str, Any] | None = None
    artifacts: str | None = None
    seed: Annotated[int | None, NUMBER] = Field(default=None, ge=0, lt=2**256)

    @field_validator("device")
    @classmethod
    def _device(cls, device: str) -> str:
        return checked(partial(check_device, here=False), device)

    @field_validator("noise")
    @classmethod
    def _noise(cls, noise: Any) -> Any:
        NoiseOptions.of(noise)
        return noise

    @field_validator("artifacts")
    @classmethod
    def _artifacts(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url is None or info.context == _STORED:
            return url  # this machine may lack what opens it, and need not open it
        return checked(check_address, url)

    @field_validator("executor")
    @classmethod
    def _executor(cls, executor: Any) -> Any:
        Executor.of(executor, 1)
        return executor

    @field_validator("arms")
    @classmethod
    def _unique(cls, arms: tuple[ArmSpec, ...]) -> tuple[ArmSpec, ...]:
        names = [arm.name for arm in arms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two arms are called {', '.join(twice)}; names must differ")
        return arms

    @field_validator("stages")
    @classmethod
    def _stages(
        cls, stages: tuple[Mapping[str, Any], ...], info: ValidationInfo
    ) -> tuple[Mapping[str, Any], ...]:
        if not stages:
            return stages
        from privtune.tasks.stages import make_stage

        names = [make_stage(stage).name for stage in stages]
        taken = [*(arm.name for arm in info.data.get("arms", ())), *names]
        if twice := sorted({name for name in names if taken.count(name) > 1}):
            raise ValueError(
                f"another arm or stage is called {', '.join(twice)}; names must differ"
            )
        return stages

    @field_validator("epsilon")
    @classmethod
    def _within(cls, epsilon: float | None, info: ValidationInfo) -> float | None:
        budget = info.data.get("budget")  # checked before; absent if it is wrong itself
        if epsilon is not None and budget and epsilon > budget.epsilon:
            raise ValueError(
                f"must be at most the budget's, {budget.epsilon:g}, of which it is a part, not "
                f"{epsilon:g}"
            )
        return epsilon

    @field_validator("scoring", "report")
    @classmethod
    def _scores(cls, given: Mapping[str, Any] | None, info: ValidationInfo) -> Any:
        if given is not None:
            from privtune.strategies import Reporting, Scoring

            (Scoring if info.field_name == "scoring" else Reporting).from_dict(given)
        return given

    @model_validator(mode="after")
    def _whole(self) -> StudySpec:
        declared = ("arms", "epochs", "expected_batch_size")
        given = [name for name in declared if getattr(self, name)]
        alone = [*given, *(name for name in ("space", "stages") if getattr(self, name))]
        if self.task is None and alone:
            raise ValueError(f"task is missing, but {', '.join(alone)} is given")
        if self.task is None and self.scoring:
            raise ValueError(
                "scoring is given, but an open study has no task: say study.optimize(..., score=...)"
            )
        if self.task is not None and len(given) < len(declared):
            missing = ", ".join(name for name in declared if name not in given)
            raise ValueError(f"a study of a task also needs {missing}")
        return self

    @classmethod
    def parse(cls, data: object, *, stored: bool = False) -> StudySpec:
        """Check data against the spec.

        Args:
            data: A mapping, as YAML or JSON have it.
            stored: Whether it comes from a store: another machine may open its object store.

        Returns:
            The spec.

        Raises:
            SpecError: One sentence: where, what, and what is allowed.
            InvalidInputError: Likewise, of what it says of scores.
        """
        try:
            return cls.model_validate(without_numpy(data), context=_STORED if stored else None)
        except RecursionError:
            raise SpecError("The study spec is nested too deeply, or holds itself.") from None
        except ValidationError as error:
            first = error.errors()[0]
            cause = first.get("ctx", {}).get("error")
            if first["loc"][:1] in {("scoring",), ("report",)} and isinstance(
                cause, InvalidInputError
            ):
                raise cause from None  # it names the field by itself
            raise SpecError(f"Study spec, {sentence(error, data, _fields)}.") from error

    @classmethod
    def from_file(cls, path: Path) -> StudySpec:
        """Read a YAML file.

        Args:
            path: The file.

        Returns:
            The spec.

        Raises:
            SpecError: If the file cannot be read, is not YAML, or is not a study spec.

        Example:
            >>> from importlib import resources
            >>> with resources.as_file(resources.files("privtune.tasks") / "digits-demo.yaml") as path:
            ...     spec = StudySpec.from_file(path)
            >>> spec.name, [arm.strategy for arm in spec.arms]
            ('digits-demo', ['fixed', 'papernot-steinke', 'hyfreedp'])
        """
        try:
            data = read_yaml(read_bounded(path).decode())
        except OSError as error:
            raise SpecError(f"Cannot read {path}: {error.strerror}.") from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # Dates that are none and numbers that are too long are ValueErrors, bad UTF-8 too.
            said = " ".join(str(error).split()).rstrip(".")
            raise SpecError(f"{path} is not YAML: {said}.") from error
        except RecursionError:
            raise SpecError(f"{path} is nested too deeply.") from None
        return cls.parse(data)

    @property
    def task_name(self) -> str:
        """What the task is called, for people."""
        if self.task is None:
            return "a build function"
        if isinstance(self.task, str):
            return self.task
        if self.task.get("type") == "fine-tuning":
            return f"{self.task.get('task')}, {self.task.get('trainable', 'all')}"
        return str(self.task.get("path", "a table"))

    @property
    def weakened(self) -> str:
        """What the charges and the tracker say of a fixed seed; nothing without one."""
        return "" if self.seed is None else "fixed seed: no guarantee against whoever knows it"

    @property
    def target_epsilon(self) -> float:
        """What all arms together may cost."""
        return self.budget.epsilon if self.epsilon is None else self.epsilon

    @property
    def compute(self) -> Compute:
        """How trainings are computed; it changes no result."""
        return Compute(self.device, self.stack)

    def search_space(self) -> SearchSpace:
        """Return what candidates are drawn from."""
        return SearchSpace.from_dict(self.space)

    def make_stages(self) -> tuple[TaskStage, ...]:
        """Return what is released before the arms, in order.

        Example:
            >>> study.spec.make_stages()
            ()
        """
        if not self.stages:
            return ()
        from privtune.tasks.stages import make_stage

        return tuple(make_stage(stage) for stage in self.stages)

    def load_task(self, released: Mapping[str, Mapping[str, Any]] | None = None) -> Task:
        """Return the task; its data is not touched.

        Args:
            released: What its stages released, by name; unless given, the task is that which arms
                are planned for, and cannot be loaded where something is left to be paid for.

        Raises:
            SpecError: If the study is open: it has none.
        """
        if self.task is None:
            raise SpecError(
                f"Study {self.name!r} is open: it has no task of its own. Run arms on it with "
                "study.optimize in Python."
            )
        if not self.stages and isinstance(self.task, str):
            return get_task(self.task)
        from privtune.tasks.stages import staged_task

        stages = self.make_stages()
        planned = staged_task(self.task, stages)
        if released is None:
            return get_task(planned)
        task: Any = self.task
        for stage in stages:
            task = stage.applied(task, released[stage.name])
        return get_task(task)

    def planning_context(self) -> PlanningContext:
        """Return the public facts that the arms plan with.

        Returns:
            Task, schedule, space, δ and adjacency, scoring, noise.

        Raises:
            SpecError: If the spec leaves epochs or the expected batch size open.
        """
        from privtune.strategies import PlanningContext, Reporting, Scoring

        task = self.load_task()
        if self.epochs is None or self.expected_batch_size is None:
            raise SpecError(f"Study {self.name!r} needs epochs and expected_batch_size.")
        return PlanningContext(
            task=task,
            schedule=Schedule.from_epochs(
                records=task.train_records,
                expected_batch_size=self.expected_batch_size,
                epochs=self.epochs,
            ),
            space=self.search_space(),
            delta=self.budget.delta,
            adjacency=self.budget.adjacency,
            scoring=Scoring.from_dict(self.scoring) if self.scoring else Scoring.of(task.score),
            report=None if self.report is None else Reporting.from_dict(self.report),
            define_by_run=task.build is not None,
            noise=NoiseOptions.of(self.noise),
        )


def _fields(error: ErrorDetails) -> Collection[str]:
    """Return the fields that there are, where one that is not one was given."""
    return (BudgetSpec if error["loc"][0] == "budget" else StudySpec).model_fields
