"""The program of an arm: digests of the user's code behind its release, stored when it is charged.

An arm that has been released is returned as it is. So a function that was edited since, under the name of
the same arm, must be refused: else its user would look at the release of the old one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from privtune.code_digest import changed_parts, code_digest, python_tag
from privtune.errors import PrivTuneError
from privtune.facts import TaskChangedError
from privtune.ledger.errors import Place
from privtune.ledger.reading import parsing, read_object, show_key
from privtune.prose import capitalise
from privtune.study.lifecycle import Life, Stage

if TYPE_CHECKING:
    from privtune.strategies import Plan, Strategy
    from privtune.tasks import Task

Program = Mapping[str, str]
"""Digests by what they are of; empty where nothing is known. Under ``python`` the version of Python."""

_FOLDER = ".programs"  # no name of an arm begins with a dot
_OPEN = (Stage.PLANNED, Stage.CHARGED, Stage.STARTED)


class ProgramChangedError(PrivTuneError):
    """The code of an arm is not the code that it was charged for and run with."""


def describe_program(
    life: Life,
    plan: Plan,
    task: Task,
    strategy: Strategy,
    *,
    sampler: object = None,
    pruner: object = None,
) -> Program:
    """Return the digests of the code of an arm that the engine trains, by the names of its parts.

    Args:
        life: The study, whose id is the digests' key.
        plan: The arm's plan: a score that nothing computes is no part of the program.
        task: Model, loss, score and readers.
        strategy: How it chooses.
        sampler: Optuna's or the user's own, if there is one.
        pruner: Optuna's, if there is one.
    """
    model = task.model if task.build is None else task.build
    loss = task.loss if task.loss_of is None else task.loss_of
    has_score = plan.score is not None or plan.report is not None
    score = task.score_of if has_score else None
    return _digests(
        life,
        {
            "the model's code": (model,),
            "the loss": (loss,),
            "the score": (score,),
            "the code that reads the data": (task.load, *task.readers),
            **_choosers(strategy, sampler, pruner),
        },
    )


def describe_declared(
    life: Life,
    objective: object,
    strategy: Strategy,
    *,
    score: object = None,
    sampler: object = None,
) -> Program:
    """Return the digests of the code of an arm that another library trains, by part.

    Args:
        life: The study, whose id is the digests' key.
        objective: The function that trains.
        strategy: How it chooses.
        score: A score function of the user's; None for a metric by its name.
        sampler: Optuna's or the user's own, if there is one.
    """
    return _digests(
        life,
        {
            "the objective's code": (objective,),
            "the score": (score,),
            **_choosers(strategy, sampler, None),
        },
    )


def _choosers(strategy: Strategy, sampler: object, pruner: object) -> dict[str, tuple[object, ...]]:
    """Return the classes of strategy, sampler and pruner, by name."""
    sampler_class = None if sampler is None else type(sampler)
    pruner_class = None if pruner is None else type(pruner)
    return {
        "the strategy's code": (type(strategy),),
        "the sampler": (sampler_class,),
        "the pruner": (pruner_class,),
    }


def _digests(life: Life, parts: Mapping[str, tuple[object, ...]]) -> Program:
    """Return a digest of each part of an arm's code, and Python's version."""
    # The study's id is in its database alone, so that no digest that leaks can be held against guesses.
    key = life.row.uid.encode()
    digests = {"python": python_tag()}
    for name, values in parts.items():
        digests[name] = code_digest(*values, key=key)
    return digests


def check_programs(life: Life, programs: Mapping[str, Program]) -> None:
    """Refuse arms whose code has changed since they ran; store the digests of arms not trained yet.

    An arm that an error stopped goes on with the code that mends it, at no further charge.

    Args:
        life: The study.
        programs: The digests of today's code, by arm.

    Raises:
        ProgramChangedError: Names the arm, and what has changed.
    """
    arms = life.arms()
    stages = {name: life.stage(arms[name].plan) for name in programs if name in arms}
    is_mend = any(_is_stopped(life, name, stage) for name, stage in stages.items())
    for name, program in programs.items():
        stage = stages.get(name, Stage.PLANNED)
        is_open = stage in _OPEN
        earlier = _stored_program(life, name)
        if earlier is not None and stage is not Stage.PLANNED and not is_mend:
            changes = changed_parts(earlier, program)
            if changes:
                sentence = _refusal(life, name, changes, is_open=is_open)
                raise ProgramChangedError(sentence)
        if is_open and earlier != program:
            content = json.dumps(program).encode()
            folder = life.results.within(_FOLDER)
            folder.put(_file(name), content, replace=True, in_row=True)


def _is_stopped(life: Life, arm: str, stage: Stage) -> bool:
    """Return whether an error stopped an arm after its charge: its code may be mended."""
    if stage not in (Stage.CHARGED, Stage.STARTED):
        return False
    return bool(life.failures(arm))


def check_finished(life: Life) -> None:
    """Refuse to return the releases of a finished study whose code has changed since."""
    has_users_code = [_has_users_code(life, name) for name in life.plans()]
    if not any(has_users_code):
        return  # a built-in task, or a table: nothing of it is the user's code
    task = None
    with suppress(PrivTuneError):  # what is gone cannot be compared, and its releases are there
        task = life.task()
    if task is not None:
        check_programs(life, programs_of_spec(life, task))


def _has_users_code(life: Life, arm: str) -> bool:
    """Return whether the stored program of an arm has digests of the user's own code."""
    program = _stored_program(life, arm) or {}
    return any(digest for name, digest in program.items() if name != "python")


def programs_of_spec(life: Life, task: Task) -> dict[str, Program]:
    """Return the program digests of each arm that a spec declares, by arm."""
    plans = life.plans()
    programs = {}
    for arm in life.spec.arms:
        if arm.name in plans:
            strategy = arm.to_strategy()
            programs[arm.name] = describe_program(life, plans[arm.name], task, strategy)
    return programs


def check_worker(life: Life, plan: Plan, task: Task) -> None:
    """Refuse to train trials of an arm if this worker's code differs from the stored program.

    Raises:
        TaskChangedError: Names what differs: of two programs, the winner would be that of the luckier one.
    """
    of_driver = _stored_program(life, plan.arm)
    of_worker = programs_of_spec(life, task).get(plan.arm)
    if of_driver is None or of_worker is None:
        return
    changes = changed_parts(of_driver, of_worker)
    if changes:
        raise TaskChangedError(
            f"{_listed(changes)} of arm {plan.arm!r} of study {life.name!r} differs between this machine and "
            "whoever runs the study: trials of two programs must not be compared. Bring the same files to "
            "both."
        )


def _refusal(life: Life, arm: str, changes: Sequence[str], *, is_open: bool) -> str:
    """Return a sentence that names the changed parts of an arm's code and the user's remedies."""
    has = "has" if len(changes) == 1 else "have"
    event = "was charged" if is_open else "was released"
    new_study = "make a new study (privtune.create_study with another name)"
    ways = f"say arm='another-name' for a new arm, or {new_study}"
    if life.spec.task is not None:
        ways = "give the spec another name, which makes a new study, where arms can have new names"
    back = " Or put the code back, and go on at no further charge." if is_open else ""
    return (
        f"{_listed(changes)} of arm {arm!r} of study {life.name!r} {has} changed since it {event}, and what "
        f"was released of the old code is no result of the new: {ways}.{back}"
    )


def _listed(parts: Sequence[str]) -> str:
    """Return parts as the beginning of a sentence: ``The loss, the score and the sampler``."""
    *first, last = parts
    text = last
    if first:
        text = f"{', '.join(first)} and {last}"
    return capitalise(text)


def _file(arm: str) -> str:
    return f"{arm}.json"


def _stored_program(life: Life, arm: str) -> dict[str, str] | None:
    """Return the program digests stored for an arm; None if there are none."""
    file = _file(arm)
    content = life.results.within(_FOLDER).get(file)
    if content is None:
        return None
    key = show_key({"study": life.name, "name": f"{_FOLDER}/{file}"})
    place = Place("privtune_blobs", "data", key)
    with parsing(place):
        document: dict[str, Any] = read_object(content, place)
        if not all(isinstance(value, str) for value in document.values()):
            raise place.error("holds no digests, where some were written")
    return document
