"""The study spec: the description of a study in a YAML file or by the Python API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar

import pydantic
import yaml
from pydantic_core import ErrorDetails

import privtune.accounting as acc
from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError, PrivTuneError, show_value
from privtune.execution.executor import Executor
from privtune.files import read_bounded
from privtune.ledger import RECORD, Budget, Dataset
from privtune.ledger.values import check_unit
from privtune.names import check_name, check_text, did_you_mean
from privtune.public_priors import with_public_priors
from privtune.spaces import SearchSpace, without_numpy
from privtune.strategies import PlanningContext, Reporting, Scoring, Strategy, make_strategy
from privtune.strategies.searched_priors import complete_public_priors
from privtune.study import schedules
from privtune.study._objects import check_address
from privtune.study.reports import AUTO, read_report, report_choices
from privtune.tables.draft import unfilled
from privtune.tasks import Task, get_task
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.schedule import NoiseOptions, Schedule

if TYPE_CHECKING:
    from privtune.stages.stage import TaskStage
    from privtune.strategies import Plan

T = TypeVar("T")

_STORED = {"stored": True}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys, reads 1e-3 as a number and yes as a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping's node; refuse a key that occurs twice in it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            identity = (key.tag, str(key.value))
            if isinstance(key, yaml.ScalarNode) and identity in keys:
                problem = f"{key.value} stands twice in one mapping"
                raise yaml.composer.ComposerError(problem=problem, problem_mark=key.start_mark)
            keys.add(identity)
        return node


def _run_check(check: Callable[[T], T], value: T) -> T:
    """Run a check and raise its refusal as a ``ValueError``, to which Pydantic adds the field's name."""
    try:
        return check(value)
    except InvalidInputError as error:
        sentence = f"{error.allowed}, not {error.value!r}"
        if error.remedy:
            remedy = error.remedy.removesuffix(".")
            sentence = f"{sentence}. {remedy}"
        raise ValueError(sentence) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
# Of yes, no, on and off: as classes they are words, which predictions are said in.
for _letter in "yYnNoO":
    _resolvers = _Loader.yaml_implicit_resolvers.get(_letter, [])
    _Loader.yaml_implicit_resolvers[_letter] = [
        (_tag, _pattern) for _tag, _pattern in _resolvers if "bool" not in _tag
    ]


def read_yaml(text: str) -> Any:
    """Return the data of a YAML document, read by the rules of :class:`_Loader`."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def _no_switch(value: object) -> object:
    """Refuse true and false, which Pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _checked(check: Callable[[T], T]) -> pydantic.AfterValidator:
    """Return a Pydantic validator that runs a check of the package."""
    validate = partial(_run_check, check)
    return pydantic.AfterValidator(validate)


_NUMBER = pydantic.BeforeValidator(_no_switch)
_Name = Annotated[str, _checked(check_name)]
_Positive = Annotated[float, _NUMBER, pydantic.Field(gt=0, allow_inf_nan=False)]
_Batch = Annotated[int, pydantic.Field(ge=1, le=10**12)]


class SpecError(PrivTuneError):
    """A study spec is malformed, incomplete or unreadable."""


_SPEC_TEXT = re.compile(r'^(budget|arms)\s*:|"budget"\s*:\s*\{|"arms"\s*:\s*\[', re.MULTILINE)


def _is_like_a_spec(data: object) -> bool:
    """Return whether data has a budget or arms like a spec, so that messages may quote it."""
    if not isinstance(data, Mapping):
        return False
    return isinstance(data.get("budget"), Mapping) or isinstance(data.get("arms"), list)


def _no_spec(path: Path) -> SpecError:
    """Return the error for a file that holds something else than a spec, without quoting its content."""
    return SpecError(
        f"{path} is no study spec: a spec is a YAML file with a budget (budget: {{name, epsilon, delta}}) "
        f"and a list of arms. If {path} is a table, privtune study draft writes a spec for it."
    )


class BudgetSpec(pydantic.BaseModel):
    """The budget that a study draws on; created with the study if it does not exist.

    Args:
        name: Name of the budget.
        epsilon: ε, above 0.
        delta: δ, in (0, 1).
        adjacency: ``add-remove`` or ``replace-one``.
        unit: What is protected, in a word: ``record``, or what the task groups its rows by.
        dataset: Name of the protected dataset. Given, it declares that the study's data is this dataset,
            wherever it is read from; else the file, or the task, says which it is.

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
    dataset: Annotated[str, _checked(partial(check_text, what="dataset"))] = ""

    def guarantee_of(self, event: acc.Event) -> acc.Guarantee:
        """Return the guarantee of an event by itself, at this budget's δ and adjacency.

        Args:
            event: The event; what else is charged to the budget does not count.

        Returns:
            ε, δ, and the bound that gives them.

        Example:
            >>> import privtune
            >>> budget = BudgetSpec(name="digits", epsilon=8.0, delta=1e-5)
            >>> noisy = privtune.accounting.Gaussian(noise_multiplier=4.0)
            >>> budget.guarantee_of(noisy).delta
            1e-05
        """
        return acc.epsilon(event, self.delta, adjacency=self.adjacency)

    def to_budget(self) -> Budget:
        """Return the budget as the ledger creates it."""
        return Budget(
            self.epsilon,
            self.delta,
            name=self.name,
            adjacency=self.adjacency,
            unit=self.unit,
            dataset=self.dataset,
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
        options = dict(self.model_extra or {})
        return make_strategy(self.strategy, arm=self.name, options=options)


class SpecFields(TypedDict, total=False):
    """Fields of a spec that :func:`privtune.create_study` takes as they are: see :class:`StudySpec`."""

    space: Mapping[str, Mapping[str, Any]] | None
    epochs: float | Literal["auto"] | None
    expected_batch_size: int | Literal["auto"] | None
    compute: float | str | None
    scoring: Mapping[str, Any] | None
    stages: Sequence[Mapping[str, Any]] | None
    report: Mapping[str, Any] | str | None
    epsilon: float | None
    repeats: int
    device: str | None
    stack: int | Literal["auto"] | None
    executor: str | Mapping[str, Any] | None
    noise: NoiseOptions | str | Mapping[str, Any] | None
    artifacts: str | None
    seed: int | None


class StudySpec(pydantic.BaseModel):
    """The spec of a study: one task, one budget, and the arms to compare.

    Args:
        name: Name of the study.
        task: Built-in name, ``package.module:factory``, or a table; None for an open study, whose
            arms a ``build`` of the user's declares (``study.optimize``).
        budget: The budget it draws on.
        space: Optuna's distributions, by hyperparameter.
        arms: At least one, unless the study is open.
        report: One final score of every arm on the test split: metric, ``epsilon_share``, ...; unless
            given, ``auto``: planning chooses the metric, and whether it is worth its charge. None for none.
        scoring: How trials are scored: ``metric``, ``mechanism``, ``bound``.
        stages: What is released of a table before the arms, once for all of them: ``type``
            (``quantiles``, ``histogram``, ``dp-pca``), ``epsilon_share``, ....
        epochs: Expected passes over the training data of one training; ``auto``: planning chooses.
        expected_batch_size: Expected records in one Poisson sample; ``auto``: planning chooses.
        compute: What one training may spend where epochs are ``auto``: gradient evaluations (``2e6``), or
            a time of one CPU core (``15 minutes``). Twenty passes over the records unless given.
        epsilon: What all arms together may cost; the whole budget unless given.
        repeats: How often each arm runs, so that arms are compared by means. On records that a task
            declares public (``benchmark``) repetitions are not charged; on all others each is.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        stack: How many candidates to train at once, or ``auto``.
        noise: Where noise comes from and how it is treated: ``secure``, or ``source``,
            ``floating_point``, ``correlation`` and ``bands``.
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
        privtune.study.spec.SpecError: Study spec, epoch: is not a field; the ... Did you mean epochs?
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
    report: Mapping[str, Any] | str | None = AUTO
    stages: tuple[Mapping[str, Any], ...] = ()
    epochs: _Positive | Literal["auto"] | None = None
    expected_batch_size: Annotated[_Batch | Literal["auto"], _NUMBER] | None = None
    compute: Annotated[float | str, _NUMBER, _checked(schedules.check_compute)] | None = None
    epsilon: _Positive | None = None
    repeats: Annotated[int, _NUMBER] = pydantic.Field(default=1, ge=1, le=1000)
    device: Annotated[str, _checked(partial(check_device, here=False))] = "auto"
    stack: Annotated[Annotated[int, pydantic.Field(ge=1)] | Literal["auto"], _NUMBER] = "auto"
    executor: str | Mapping[str, Any] | None = None
    noise: str | Mapping[str, Any] | None = None
    artifacts: str | None = None
    seed: Annotated[int | None, _NUMBER] = pydantic.Field(default=None, ge=0, lt=2**256)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _priors(cls, data: Any) -> Any:
        """Say of each public prior the method and schedule that the arms search with; check nothing."""
        if not isinstance(data, Mapping):
            return data
        space = data.get("space")
        arms = data.get("arms")
        if not isinstance(space, Mapping) or not isinstance(arms, list | tuple):
            return data
        return {**data, "space": complete_public_priors(space, arms)}

    @pydantic.field_validator("report")
    @classmethod
    def _report(cls, report: Mapping[str, object] | str | None) -> Mapping[str, Any] | str | None:
        return read_report(report)

    @pydantic.field_validator("noise", mode="before")
    @classmethod
    def _noise(cls, noise: object) -> Any:
        """Return noise options as a dict of their fields; return other forms unchanged."""
        return noise.to_dict() if isinstance(noise, NoiseOptions) else noise

    @pydantic.field_validator("noise", "executor", "scoring")
    @classmethod
    def _parts(cls, part: object, info: pydantic.ValidationInfo) -> Any:
        """Check noise, executor or scoring by the class that reads it; return it as it was written."""
        if part is not None:
            read = _PARTS[str(info.field_name)]
            read(part)
        return part

    @pydantic.field_validator("artifacts")
    @classmethod
    def _artifacts(cls, url: str | None, info: pydantic.ValidationInfo) -> str | None:
        """Check the address of an object store, unless the spec comes from a database.

        A machine that reads a stored study need not be able to open its object store.
        """
        if url is None or info.context == _STORED:
            return url
        return _run_check(check_address, url)

    @pydantic.field_validator("arms")
    @classmethod
    def _unique_arms(cls, arms: tuple[ArmSpec, ...]) -> tuple[ArmSpec, ...]:
        """Refuse two arms of the same name, which identifies seeds, charges and files."""
        names = [arm.name for arm in arms]
        _check_unique(names, names, "two arms are")
        return arms

    @pydantic.field_validator("stages")
    @classmethod
    def _unique_stages(
        cls, stages: tuple[Mapping[str, object], ...], info: pydantic.ValidationInfo
    ) -> tuple[Mapping[str, Any], ...]:
        """Refuse a stage with the name of another stage or of an arm."""
        if not stages:
            return stages  # tables take a twentieth of a second to import
        from privtune.stages.spec_stages import make_stage

        names = [make_stage(stage).name for stage in stages]
        arm_names = [arm.name for arm in info.data.get("arms", ())]
        _check_unique(names, [*names, *arm_names], "another arm or stage is")
        return stages

    @pydantic.field_validator("epsilon")
    @classmethod
    def _within(cls, epsilon: float | None, info: pydantic.ValidationInfo) -> float | None:
        """Refuse an ε of the study above the ε of its whole budget."""
        budget = info.data.get("budget")  # absent if it is wrong itself
        if epsilon is None or not budget:
            return epsilon
        if epsilon > budget.epsilon:
            raise ValueError(
                f"must be at most the budget's, {budget.epsilon:g}, of which it is a part, not "
                f"{epsilon:g}"
            )
        return epsilon

    @pydantic.model_validator(mode="after")
    def _whole(self) -> StudySpec:
        """Refuse a study of a task that lacks training fields, and an open study that has any."""
        of_training = ("arms", "epochs", "expected_batch_size")
        absent = [name for name in of_training if not getattr(self, name)]
        if self.compute is not None and self.epochs != schedules.AUTO and self.task is not None:
            raise ValueError(
                f"compute is what may be spent where epochs are auto, and they are {self.epochs}: write "
                "epochs: auto, or leave compute out"
            )
        if self.task is not None:
            if absent:
                raise ValueError(f"a study of a task also needs {', '.join(absent)}")
            return self
        of_task = [name for name in (*of_training, "space", "stages") if getattr(self, name)]
        if of_task:
            raise ValueError(
                f"task is missing, and {', '.join(of_task)} cannot go without one. Write task: with a name "
                "that privtune tasks lists, or describe a table, as privtune study draft does. In Python, "
                f"leave {', '.join(of_task)} out: study.optimize says what is trained"
            )
        if self.scoring:
            raise ValueError(
                "scoring is given, but an open study has no task: say privtune.make_task(..., score=...)"
            )
        return self

    @classmethod
    def parse(cls, data: object, *, stored: bool = False) -> StudySpec:
        """Return the spec that a mapping from YAML, JSON or Python describes; refuse malformed data.

        Args:
            data: A mapping, as YAML or JSON have it.
            stored: Whether it comes from a database: this machine need not open its object store.

        Returns:
            The spec.

        Raises:
            SpecError: One sentence: where, what, and what is allowed.
        """
        try:
            open_fields = dict.fromkeys(unfilled(data, set()))
            if open_fields:
                raise SpecError(
                    f"The spec is a draft, and leaves {', '.join(open_fields)} open: write each."
                )
            document = without_numpy(data)
            return cls.model_validate(document, context=_STORED if stored else None)
        except RecursionError:
            raise SpecError("The study spec is nested too deeply, or holds itself.") from None
        except pydantic.ValidationError as error:
            sentence = _sentence(error, data)
            end = "" if sentence.endswith("?") else "."
            raise SpecError(f"Study spec, {sentence}{end}") from error

    @classmethod
    def from_file(cls, path: Path) -> StudySpec:
        """Return the spec in a YAML file.

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
            ('digits-demo', ['fixed', 'papernot-steinke', 'auto'])
        """
        text = ""
        try:
            text = read_bounded(path).decode()
            data = read_yaml(text)
        except OSError as error:
            raise SpecError(f"Cannot read {path}: {error.strerror}.{_instead_of(path)}") from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # Dates that are none and numbers that are too long are ValueErrors, bad UTF-8 too.
            if not _SPEC_TEXT.search(text):
                raise _no_spec(path) from None
            line, problem = _problem_of_yaml(error)
            raise SpecError(f"{path}{line} is not YAML: {problem}.") from error
        except RecursionError:
            raise SpecError(f"{path} is nested too deeply.") from None
        if not _is_like_a_spec(data):
            raise _no_spec(path)
        return cls.parse(data)

    @property
    def task_name(self) -> str:
        """The name of the study's task for people; "a build function" for an open study."""
        if self.task is None:
            return "a build function"
        return _name_of(self.task)

    @property
    def weakened(self) -> str:
        """The note on charges that a fixed seed weakens the guarantee; empty without a seed."""
        if self.seed is None:
            return ""
        return "fixed seed: no guarantee against whoever knows it"

    @property
    def target_epsilon(self) -> float:
        """The ε that all arms and stages together may cost."""
        if self.epsilon is None:
            return self.budget.epsilon
        return self.epsilon

    @property
    def placement(self) -> Compute:
        """The device and stack size of trainings, which change no result."""
        return Compute(self.device, self.stack)

    def dataset_of(self, known: Mapping[str, object] | None) -> Dataset:
        """Return the dataset to charge, under the name that the budget declares if it declares one.

        Args:
            known: The public identity of the data, as a plan has it; None where it has none.

        Example:
            >>> str(study.spec.dataset_of(None))
            'data in memory without a name'
        """
        dataset = Dataset() if known is None else Dataset.from_dict(known)
        if not self.budget.dataset:
            return dataset
        return replace(dataset, name=self.budget.dataset, declared=True)

    def search_space(self) -> SearchSpace:
        """Return the search space that candidates are drawn from."""
        return SearchSpace.from_dict(self.space)

    def make_stages(self) -> tuple[TaskStage, ...]:
        """Return the stages that release facts of a table before the arms, in order.

        Example:
            >>> study.spec.make_stages()
            ()
        """
        if not self.stages:
            return ()  # tables take a twentieth of a second to import
        from privtune.stages.spec_stages import make_stage

        return tuple(make_stage(stage) for stage in self.stages)

    def load_task(self, released: Mapping[str, Mapping[str, object]] | None = None) -> Task:
        """Return the study's task without reading its data.

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
        from privtune.stages.spec_stages import staged_task

        stages = self.make_stages()
        task: Any = staged_task(self.task, stages)
        if released is None:
            return get_task(task)
        task = self.task
        for stage in stages:
            task = stage.applied(task, released[stage.name])
        return get_task(task)

    def planning_context(
        self, task: Task | None = None, *, weights: int | None = None
    ) -> PlanningContext:
        """Return the public facts that the arms plan with.

        Args:
            task: The task in the place of the study's own, which an open study lacks.
            weights: Number of weights that a ``build`` has trained, by which epochs and batch are chosen.

        Returns:
            Task, schedule, space, δ and adjacency, scoring, noise.

        Raises:
            SpecError: If the spec leaves epochs or the expected batch size open.
        """
        task = task or self.load_task()
        if self.epochs is None or self.expected_batch_size is None:
            raise SpecError(f"Study {self.name!r} needs epochs and expected_batch_size.")
        chosen = None
        if schedules.is_auto(self):
            schedule, chosen = schedules.choose(self, task, weights)
        else:
            schedule = Schedule.from_epochs(
                records=task.train_records,
                expected_batch_size=self.expected_batch_size,  # type: ignore[arg-type]
                epochs=self.epochs,  # type: ignore[arg-type]
            )
        scoring = Scoring.from_dict(self.scoring) if self.scoring else Scoring.of(task.score)
        choices: tuple[Reporting, ...] = ()
        report = None
        if self.report == AUTO:
            choices = report_choices(task, scoring, self.budget.adjacency)
            report = choices[0] if choices else None
        elif isinstance(self.report, Mapping):
            report = Reporting.from_dict(self.report)
        return PlanningContext(
            task=task,
            schedule=schedule,
            space=self.search_space(),
            delta=self.budget.delta,
            adjacency=self.budget.adjacency,
            scoring=scoring,
            report=report,
            report_choices=choices,
            define_by_run=task.build is not None,
            noise=NoiseOptions.of(self.noise),
            repeats=self.repeats,
            chosen_schedule=chosen,
        )


SPACE = "space"
"""The detail of a plan that holds its space, where the study's spec has none: in an open study."""


def space_of(spec: StudySpec, plan: Plan) -> SearchSpace:
    """Return the search space of an arm: its own in an open study, else that of the study's spec."""
    laws = plan.details.get(SPACE, spec.space)
    return SearchSpace.from_dict(laws)


def _check_unique(names: Sequence[str], all_names: Sequence[str], what: str) -> None:
    """Refuse names that stand more than once among all names: a name is a key."""
    twice = sorted({name for name in names if all_names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} called {', '.join(twice)}; names must differ")


def _name_of(task: object) -> str:
    """Return the name of a task for people: its name, its file, or the task that it is made of."""
    if not isinstance(task, Mapping):
        return str(task or "a table")
    match task.get("type"):
        case "fine-tuning":
            part = task.get("trainable", "all")
            return f"{_name_of(task.get('task'))}, {part}"
        case "stand-in":
            return f"a stand-in for {_name_of(task.get('of'))}"
        case _:
            name = task.get("path") or task.get("build", "a table")
            return str(name)


def _problem_of_yaml(error: Exception) -> tuple[str, str]:
    """Return the line, if known, and the problem of a document that YAML cannot read."""
    message = " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, yaml.MarkedYAMLError):
        return "", message
    mark = error.context_mark or error.problem_mark
    problem = error.problem
    for part, words in _WHERE_YAML.items():
        if part in message:
            problem = words
            break
    if mark is None or not problem:
        return "", message
    return f", line {mark.line + 1},", problem


_PARTS: Mapping[str, Callable[[Any], object]] = {
    "noise": NoiseOptions.of,
    "executor": partial(Executor.of, jobs=1),
    "scoring": Scoring.from_dict,
}

_BUDGET = "budget: {name: clinic, epsilon: 4.0, delta: 1.0e-5}"
_REMEDIES: Mapping[str, str] = {
    "budget": f"Write {_BUDGET}",
    "arms": "An entry of it is - {name: plain, strategy: fixed, parameters: {learning_rate: 0.5, "
    "max_grad_norm: 1.0}}",
    "noise": "The noise multiplier follows from ε; noise: plain or secure says how noise is drawn, and "
    "noise: {correlation: banded} correlates it over steps",
    "space": "Write learning_rate: {type: float, low: 0.05, high: 5.0, log: true}; a value that is fixed "
    "stands in the parameters of an arm",
}
"""What to do where a field, or an entry of it, is missing or has the wrong form."""

_HOMES: Mapping[str, tuple[str, ...]] = {
    "task: {type: tabular, ...}": (
        "path",
        "target",
        "classes",
        "columns",
        "train",
        "validation",
        "test",
    ),
    "an entry of arms": ("strategy", "method", "mean_runs", "law", "parameters"),
}
"""Where fields stand that are none of a spec itself."""

_FORMS: Mapping[type, str] = {list: "a list", tuple: "a list", dict: "a mapping"}
_OF_FORM = frozenset(
    {"missing", "model_type", "mapping_type", "dict_type", "tuple_type", "string_type"}
)
_WHERE_YAML: Mapping[str, str] = {  # by a part of PyYAML's sentence
    "found character '\\t'": "a tab indents it, and YAML takes blanks alone",
    "could not find expected ':'": "a colon needs a blank after it, as in epochs: 20",
    "while scanning a quoted scalar": "a quotation begins there and does not end",
    "mapping values are not allowed here": "a text with a colon needs quotes, and each field a line of its "
    "own",
}


def _instead_of(path: Path) -> str:
    """Return a hint at the spec or command that an unreadable path may mean; empty without one."""
    if not path.suffix:
        for ending in (".yaml", ".yml"):
            if path.with_name(path.name + ending).is_file():
                return f" Did you mean {path}{ending}?"
        return f" A stored study is shown by: privtune study show {path}"
    specs = [*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]
    names = [spec.name for spec in specs]
    question = did_you_mean(path.name, names)
    return f" {question}" if question else ""


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
    """Return a sentence on the first wrong field, with all that a union of types allows there."""
    first, *others = error.errors()
    path = _path(first, data)
    allowed, separator, value = _in_words(first).partition(", not ")
    for other in others:
        # The members of a union have errors of their own, below the same path.
        if path != _path(other, data) or path in (first["loc"], other["loc"]):
            continue
        words = _in_words(other)
        other_allowed, _, _ = words.partition(", not ")
        alternative = other_allowed.removeprefix("must be ")
        if alternative not in allowed:
            allowed += f" or {alternative}"
    where = ".".join(map(str, path)) or "the spec"
    # A check of the package names the field itself.
    if not allowed.startswith(f"{where}."):
        allowed = f"{where}: {allowed}"
    return f"{allowed}{separator}{value}".rstrip(".")


def _path(error: ErrorDetails, data: object) -> tuple[int | str, ...]:
    """Return the path of a wrong field in the data, without names that Pydantic adds."""
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
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_field(error["loc"])
    words = _IN_WORDS.get(kind)
    if words is None:
        return error["msg"]
    context = error.get("ctx", {})
    sentence = words.format(**context)
    if kind == "value_error":
        return sentence
    value = error["input"]
    remedy = _remedy(error)
    if not isinstance(value, str | int | float):
        form = _FORMS.get(type(value), "")
        # Text may be one of several forms that are allowed.
        if form and kind not in ("missing", "string_type"):
            sentence = f"{sentence}, not {form}"
        return f"{sentence}{remedy}"
    sentence = f"{sentence}, not {show_value(value)}"
    if remedy:
        return f"{sentence}{remedy}"
    choices = re.findall(r"'([^']+)'", str(context.get("expected", "")))
    question = did_you_mean(value, choices)
    return f"{sentence}. {question}".rstrip(". ")


def _unknown_field(place: tuple[int | str, ...]) -> str:
    """Return a refusal of an unknown field, with the known fields and where it may belong."""
    name = place[-1]
    model = BudgetSpec if place[0] == "budget" else StudySpec
    fields = model.model_fields
    hint = did_you_mean(name, fields)
    if place[0] in BudgetSpec.model_fields:
        hint = f"It stands within {_BUDGET}"
    if len(place) == 1:
        for home, home_fields in _HOMES.items():
            if name in home_fields:
                hint = f"It stands within {home}"
    return f"is not a field; the fields are {', '.join(fields)}. {hint}".rstrip()


def _remedy(error: ErrorDetails) -> str:
    """Return an example to write for a field that is missing or of a wrong form; empty without one."""
    place = error["loc"]
    if not place or len(place) > 2 or error["type"] not in _OF_FORM:
        return ""
    remedy = _REMEDIES.get(str(place[0]), "")
    return f". {remedy}" if remedy else ""
