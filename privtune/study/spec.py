"""The study spec: what a YAML file or the Python API says about a study."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic
import yaml
from pydantic_core import ErrorDetails

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.files import read_bounded
from privtune.ledger import RECORD, Budget
from privtune.ledger.values import check_unit
from privtune.names import check_name
from privtune.spaces import SearchSpace, with_public_priors, without_numpy
from privtune.strategies import PlanningContext, Reporting, Scoring, Strategy, make_strategy
from privtune.study._objects import check_address
from privtune.tasks import Task, get_task
from privtune.tasks._draft import unfilled
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.schedule import NoiseOptions, Schedule

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.tasks.stages import TaskStage

T = TypeVar("T")

_STORED = {"stored": True}


class _Loader(yaml.SafeLoader):
    """PyYAML's, which itself takes the last of two values, and 1e-3 for text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that stands twice; ``<<``, which may repeat keys, is resolved later."""
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
for (
    _first
) in "yYnNoO":  # of yes, no, on and off: as classes they are words, which predictions are said in
    _Loader.yaml_implicit_resolvers[_first] = [
        pair for pair in _Loader.yaml_implicit_resolvers.get(_first, []) if "bool" not in pair[0]
    ]


def read_yaml(text: str) -> Any:
    """Return what a YAML document says: a name stands once in a mapping, 1e-3 is a number, yes a word."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def _no_switch(value: object) -> object:
    """Refuse true and false, which Pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _asked(check: Callable[[T], T], value: T) -> T:
    """Ask a check of the package, whose refusal then names the spec's field and not the argument."""
    try:
        return check(value)
    except InvalidInputError as error:
        remedy = f". {error.remedy[:-1]}" if error.remedy else ""
        raise ValueError(f"{error.allowed}, not {error.value!r}{remedy}") from None


def _checked(check: Callable[[T], T]) -> pydantic.AfterValidator:
    return pydantic.AfterValidator(partial(_asked, check))


_NUMBER = pydantic.BeforeValidator(_no_switch)
_Name = Annotated[str, _checked(check_name)]
_Positive = Annotated[float, _NUMBER, pydantic.Field(gt=0, allow_inf_nan=False)]


class SpecError(PrivTuneError):
    """A study spec is not well formed."""


class BudgetSpec(pydantic.BaseModel):
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

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: _Name
    epsilon: _Positive
    delta: Annotated[float, _NUMBER] = pydantic.Field(gt=0, lt=1)
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    unit: Annotated[str, _checked(check_unit)] = RECORD

    def to_budget(self) -> Budget:
        """Return the ledger's budget."""
        return Budget(
            self.epsilon, self.delta, name=self.name, adjacency=self.adjacency, unit=self.unit
        )


class ArmSpec(pydantic.BaseModel):
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

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    name: _Name
    strategy: str
    weight: _Positive = 1.0

    def to_strategy(self) -> Strategy:
        """Return the strategy of this arm; its options are checked here."""
        return make_strategy(self.strategy, arm=self.name, options=dict(self.model_extra or {}))


class StudySpec(pydantic.BaseModel):
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
        repeats: How often each arm runs, so that arms are compared by means. On records that a task
            declares public (``benchmark``) repetitions are not charged; on all others each is.
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

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: _Name
    task: str | Mapping[str, Any] | None = None
    budget: BudgetSpec
    space: Annotated[Mapping[str, Mapping[str, Any]], _checked(with_public_priors)] = (
        pydantic.Field(default_factory=dict)
    )
    arms: tuple[ArmSpec, ...] = ()
    scoring: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    stages: tuple[Mapping[str, Any], ...] = ()
    epochs: _Positive | None = None
    expected_batch_size: Annotated[int | None, _NUMBER] = pydantic.Field(default=None, ge=1)
    epsilon: _Positive | None = None
    repeats: Annotated[int, _NUMBER] = pydantic.Field(default=1, ge=1, le=1000)
    device: Annotated[str, _checked(partial(check_device, here=False))] = "auto"
    stack: Annotated[Annotated[int, pydantic.Field(ge=1)] | Literal["auto"], _NUMBER] = "auto"
    executor: str | Mapping[str, Any] | None = None
    noise: str | Mapping[str, Any] | None = None
    artifacts: str | None = None
    seed: Annotated[int | None, _NUMBER] = pydantic.Field(default=None, ge=0, lt=2**256)

    @pydantic.field_validator("noise", "executor", "scoring", "report")
    @classmethod
    def _parts(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        if given is not None:
            _PARTS[str(info.field_name)](given)
        return given

    @pydantic.field_validator("artifacts")
    @classmethod
    def _artifacts(cls, url: str | None, info: pydantic.ValidationInfo) -> str | None:
        # A machine that reads a stored study need not be able to open its object store.
        return url if url is None or info.context == _STORED else _asked(check_address, url)

    @pydantic.field_validator("arms", "stages")
    @classmethod
    def _unique(cls, given: tuple[Any, ...], info: pydantic.ValidationInfo) -> tuple[Any, ...]:
        names, what = [getattr(arm, "name", "") for arm in given], "two arms are"
        taken = list(names)
        if info.field_name == "stages" and given:
            from privtune.tasks.stages import make_stage

            names, what = [make_stage(stage).name for stage in given], "another arm or stage is"
            taken = [*names, *(arm.name for arm in info.data.get("arms", ()))]
        if twice := sorted({name for name in names if taken.count(name) > 1}):
            raise ValueError(f"{what} called {', '.join(twice)}; names must differ")
        return given

    @pydantic.field_validator("epsilon")
    @classmethod
    def _within(cls, epsilon: float | None, info: pydantic.ValidationInfo) -> float | None:
        budget = info.data.get("budget")  # absent if it is wrong itself
        if epsilon is not None and budget and epsilon > budget.epsilon:
            raise ValueError(
                f"must be at most the budget's, {budget.epsilon:g}, of which it is a part, not "
                f"{epsilon:g}"
            )
        return epsilon

    @pydantic.model_validator(mode="after")
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
            stored: Whether it comes from a database: this machine need not open its object store.

        Returns:
            The spec.

        Raises:
            SpecError: One sentence: where, what, and what is allowed.
        """
        try:
            if left := dict.fromkeys(unfilled(data, set())):
                raise SpecError(
                    f"The spec is a draft, and leaves {', '.join(left)} open: write each."
                )
            return cls.model_validate(without_numpy(data), context=_STORED if stored else None)
        except RecursionError:
            raise SpecError("The study spec is nested too deeply, or holds itself.") from None
        except pydantic.ValidationError as error:
            raise SpecError(f"Study spec, {_sentence(error, data)}.") from error

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
            stored = (
                "" if path.suffix else f" A stored study is shown by: privtune study show {path}"
            )
            raise SpecError(f"Cannot read {path}: {error.strerror}.{stored}") from error
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
        return "a build function" if self.task is None else _name_of(self.task)

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
            return ()  # tables take a twentieth of a second to import
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

    def planning_context(self, task: Task | None = None) -> PlanningContext:
        """Return the public facts that the arms plan with.

        Args:
            task: The task in the place of the study's own, which an open study lacks.

        Returns:
            Task, schedule, space, δ and adjacency, scoring, noise.

        Raises:
            SpecError: If the spec leaves epochs or the expected batch size open.
        """
        task = task or self.load_task()
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
            repeats=self.repeats,
        )


SPACE = "space"
"""The detail of a plan that holds its space, where the study's spec has none: in an open study."""


def space_of(spec: StudySpec, plan: Plan) -> SearchSpace:
    """Return what the candidates of an arm are drawn from: the study's space, or the arm's own."""
    return SearchSpace.from_dict(plan.details.get(SPACE, spec.space))


def _name_of(task: Any) -> str:
    if not isinstance(task, Mapping):
        return str(task or "a table")
    if task.get("type") == "fine-tuning":
        return f"{_name_of(task.get('task'))}, {task.get('trainable', 'all')}"
    if task.get("type") == "stand-in":
        return f"a stand-in for {_name_of(task.get('of'))}"
    return str(task.get("path") or task.get("build", "a table"))


_PARTS: Mapping[str, Callable[[Any], object]] = {
    "noise": NoiseOptions.of,
    "executor": partial(Executor.of, jobs=1),
    "scoring": Scoring.from_dict,
    "report": Reporting.from_dict,
}

_IN_WORDS: Mapping[str, str] = {  # by Pydantic's kind of error, without its names of Python's types
    "missing": "is missing",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "string_type": "must be text",
    "invalid_key": "must be text",
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


def _sentence(error: pydantic.ValidationError, data: object) -> str:
    """Return what is wrong with the first field that is wrong; of a union, all that is allowed."""
    first, *others = error.errors()
    path = _path(first, data)
    where = ".".join(map(str, path)) or "the spec"
    allowed, but, given = _in_words(first).partition(", not ")
    for other in others:
        words = _in_words(other).partition(", not ")[0].removeprefix("must be ")
        # The members of a union have errors of their own, below the same path.
        part = path == _path(other, data) and path not in (first["loc"], other["loc"])
        if part and words not in allowed:
            allowed += f" or {words}"
    # A check of the package names the field itself.
    said = allowed if allowed.startswith(f"{where}.") else f"{where}: {allowed}"
    return f"{said}{but}{given}".rstrip(".")


def _path(error: ErrorDetails, data: object) -> tuple[int | str, ...]:
    """Return where an error is, without Pydantic's names for the members of a union or for a key."""
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


def _in_words(error: ErrorDetails) -> str:
    """Return what is wrong with a field, what is allowed, and what was given."""
    if error["type"] == "extra_forbidden":
        known = (BudgetSpec if error["loc"][0] == "budget" else StudySpec).model_fields
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
