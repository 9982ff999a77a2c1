"""Stages by their type in a spec, and the task of a spec with its stages applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from privtune.errors import InvalidInputError
from privtune.names import check_name, refuse_name
from privtune.stages.dp_pca import DpPca
from privtune.stages.histogram import Histogram
from privtune.stages.quantiles import Quantiles
from privtune.stages.stage import TaskStage
from privtune.stages.usable import Usable
from privtune.tasks.described import TaskSpec
from privtune.tasks.tabular import read_table

STAGES: Mapping[str, type[TaskStage]] = {
    stage.type: stage for stage in (Usable, Quantiles, Histogram, DpPca)
}
"""Stage classes by type, in the required order: each reads what earlier ones released."""


def make_stage(data: Mapping[str, Any]) -> TaskStage:
    """Return a stage from its fields in a spec.

    Raises:
        InvalidInputError: If there is no such type, or a field is unknown or outside of its domain.
    """
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in STAGES:
        refuse_name("stages.type", kind, STAGES)
    name = data.get("name") or kind
    check_name(str(name), "stage")
    stage_class = STAGES[kind]
    return stage_class.of(data)


def staged_task(task: Any, stages: Sequence[TaskStage]) -> Any:
    """Return a spec's task as planned with its stages, after checking that they fit, without reading data.

    Args:
        task: As the spec has it: a name, or a mapping.
        stages: In the order in which they will be released.

    Raises:
        InvalidInputError: If they do not go with the task, or leave something that it needs unpaid.
    """
    names = [stage.name for stage in stages]
    is_table = isinstance(task, Mapping) and task.get("type") == "tabular"
    if not is_table:
        are_usable = [isinstance(stage, Usable) for stage in stages]
        if not all(are_usable):
            raise InvalidInputError("stages", names, "go with a table: task.type: tabular")
        return task
    if stages and "group" in task:
        raise InvalidInputError(
            "stages",
            names,
            "go with tables of one row a record: rows of one group move more than what is charged",
        )
    if isinstance(task.get("projection"), int):
        raise InvalidInputError(
            "task.projection",
            task["projection"],
            "must be a list of directions",
        )
    _check_order(stages)
    unpaid = _unpaid_after(stages, task)
    if unpaid:
        raise InvalidInputError(
            "task",
            unpaid,
            "are to be paid for, and no stage does",
            "Say stages: [{type: quantiles}] for bounds, [{type: histogram}] for class_weights.",
        )
    for stage in stages:
        stage.check(task)
        task = stage.planned(task)
    return task


def _check_order(stages: Sequence[TaskStage]) -> None:
    """Refuse stages in a wrong order, and two of a type that may be there once."""
    types = [stage.type for stage in stages]
    order = list(STAGES)
    if types != sorted(types, key=order.index):
        raise InvalidInputError("stages", types, f"must be in the order {', '.join(order)}")
    for single in (Usable, Quantiles, DpPca):
        is_single = [isinstance(stage, single) for stage in stages]
        if sum(is_single) > 1:
            raise InvalidInputError("stages", single.type, "may be there once")


def _unpaid_after(stages: Sequence[TaskStage], task: TaskSpec) -> list[str]:
    """Return the facts that a table leaves to stages, if none of these stages releases them."""
    pays_bounds = False
    pays_weights = False
    for stage in stages:
        if isinstance(stage, Quantiles):
            pays_bounds = True
        elif isinstance(stage, Histogram) and stage.pays_weights(task):
            pays_weights = True
    unpaid = []
    for what in read_table(task).unpaid:
        is_paid_bound = pays_bounds and what.startswith("bounds of ")
        is_paid_weight = pays_weights and what == "class_weights"
        if not is_paid_bound and not is_paid_weight:
            unpaid.append(what)
    return unpaid
