"""An arm whose code has changed is refused: its release is that of the old code."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import privtune
from privtune.code_digest import changed_parts, code_digest, python_tag
from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.strategies import Fixed, InRun, PapernotSteinke
from privtune.study import Study
from privtune.study.failures import ArmStoppedError
from privtune.study.program import ProgramChangedError
from privtune.tasks import get_task
from tests.study.conftest import toy_spec
from tests.study.elsewhere import optimize_own

KEY = b"key"


def cell(text: str, name: str = "f", **known: Any) -> Any:
    """Run a cell of a notebook, and return what it defines."""
    module = {"__name__": "__main__", **known}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), module)
    return module[name]


def digest(text: str, **known: Any) -> str:
    return code_digest(cell(text, **known), key=KEY)


BASE = """
    HIDDEN = 64
    CONFIG = {"rate": 0.5, "layers": [3, 4]}

    def helper(x):
        return x + 1

    class Net:
        width = 3
        def __init__(self, size):
            self.size = size
        def forward(self, x):
            return helper(x) * self.size

    def f(trial, scale=2.0, *, bias=True):
        \"\"\"What it does.\"\"\"
        try:
            net = Net(HIDDEN)
        except ValueError:
            net = None
        if trial in {"a", "b", "c"}:
            return [net.forward(each) for each in range(3)]
        return CONFIG["rate"] * scale
"""

EDITS = {
    "a constant": ("* scale", "* scale * 2"),
    "a module's number": ("HIDDEN = 64", "HIDDEN = 65"),
    "a setting inside of a mapping": ("[3, 4]", "[3, 5]"),
    "a helper": ("return x + 1", "return x + 2"),
    "an operator": ("* self.size", "/ self.size"),
    "a method of a class": ("self.size = size", "self.size = size + 1"),
    "an attribute of a class": ("width = 3", "width = 4"),
    "a default": ("scale=2.0", "scale=3.0"),
    "a default by name": ("bias=True", "bias=False"),
    "a name that is called": ("range(3)", "list(3)"),
    "a set of constants": ('"c"}', '"d"}'),
    "a jump": ("if trial", "if not trial"),
    "what is caught": ("ValueError", "TypeError"),
    "another argument": ("trial, scale", "trial, other, scale"),
}

LAYOUTS: dict[str, Callable[[str], str]] = {
    "comments": lambda text: text.replace("return x + 1", "# one more\n        return x + 1"),
    "blank lines": lambda text: text.replace("    def f(", "\n\n\n    def f("),
    "a line break": lambda text: text.replace(
        "x + 1", "(\n            x\n            + 1\n        )"
    ),
    "spaces": lambda text: text.replace("x + 1", "x  +  1"),
    "a docstring": lambda text: text.replace("What it does.", "Something else."),
    "no docstring": lambda text: text.replace('"""What it does."""', ""),
    "another order of functions": lambda text: text + "\n    def unrelated():\n        return 3\n",
    "what no function names": lambda text: text + "\n    OTHER = 5\n",
    "a long comment before all": lambda text: "#\n" * 300 + textwrap.dedent(text),
}


@pytest.mark.quick
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_another_digest(edit: str) -> None:
    old, new = EDITS[edit]
    assert old in BASE
    assert digest(BASE) != digest(BASE.replace(old, new))


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_no_edit(layout: str) -> None:
    changed = LAYOUTS[layout](BASE)
    assert changed != BASE
    assert digest(BASE) == digest(changed)


NESTED_CLASS = """
    def f(trial):
        class Inner:
            \"\"\"A layer.\"\"\"
            depth = 2
            def forward(self, x):
                return lambda y: x + y
        return Inner()
"""


@pytest.mark.quick
def test_a_class_within_is_read_without_its_lines() -> None:
    assert digest(NESTED_CLASS) == digest("\n\n" + NESTED_CLASS.replace("A layer.", "A"))
    assert digest(NESTED_CLASS) != digest(NESTED_CLASS.replace("depth = 2", "depth = 3"))
    assert digest(NESTED_CLASS) != digest(NESTED_CLASS.replace("x + y", "x - y"))


def closing_over(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


@pytest.mark.quick
def test_closures_count_by_their_plain_values() -> None:
    same = [3, 0.5, "a", (1, 2), {"a": [1]}, None, True]
    for value in same:
        assert code_digest(closing_over(value), key=KEY) == code_digest(
            closing_over(value), key=KEY
        )
    assert code_digest(closing_over(3), key=KEY) != code_digest(closing_over(4), key=KEY)
    assert code_digest(closing_over(3), key=KEY) != code_digest(closing_over(3.0), key=KEY)
    assert code_digest(closing_over(3), key=KEY) != code_digest(closing_over(3), key=b"other")


@pytest.mark.quick
def test_records_are_never_read() -> None:
    """Tensors, arrays, long lists and frames are known by their class alone."""
    for one, other in (
        (torch.zeros(3), torch.ones(3)),
        ([0.0] * 500, [1.0] * 500),
        ((torch.zeros(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))),
    ):
        assert code_digest(closing_over(one), key=KEY) == code_digest(closing_over(other), key=KEY)


CHANGED_BY_ITSELF = {
    "a counter": "calls = {value}\ndef f(t):\n    global calls\n    calls += 1\n    return calls\n",
    "a list": "seen = [{value}]\ndef f(t):\n    seen.append(t)\n    return seen\n",
    "a mapping": "seen = {{'a': {value}}}\ndef f(t):\n    seen['a'] = t\n    return seen\n",
    "an attribute of a class": (
        "class C:\n    n = {value}\ndef f(t):\n    C.n = t\n    return C.n\n"
    ),
    "an object": (
        "class C:\n    def __init__(self):\n        self.n = {value}\n        self.k = 2\n"
        "    def __call__(self, t):\n        self.n += 1\n        return self.k\n"
        "f = C()\nf.n = {value}\n"
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("what", ["a counter", "a list", "a mapping", "an attribute of a class"])
def test_what_the_code_itself_changes_is_no_edit(what: str) -> None:
    one, other = (CHANGED_BY_ITSELF[what].format(value=value) for value in (1, 2))
    assert digest(one) == digest(other)


@pytest.mark.quick
def test_a_callable_object_counts_by_its_settings() -> None:
    made = cell(CHANGED_BY_ITSELF["an object"].format(value=1))
    before = code_digest(made, key=KEY)
    made(None)
    assert code_digest(made, key=KEY) == before
    made.k = 3
    assert code_digest(made, key=KEY) != before


@pytest.mark.quick
def test_partials_methods_and_wrapped_functions_are_followed() -> None:
    def power(x: float, n: int) -> float:
        return x**n

    def other(x: float, n: int) -> float:
        return x * n

    def of(function: Any, n: int) -> str:
        return code_digest(functools.partial(function, n=n), key=KEY)

    assert of(power, 2) == of(power, 2)
    assert len({of(power, 2), of(power, 3), of(other, 2)}) == 3
    assert code_digest(functools.lru_cache(power), key=KEY) != code_digest(
        functools.lru_cache(other), key=KEY
    )


class Awkward:
    """An object that answers every question with an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def recursive() -> Any:
    return recursive


@pytest.mark.quick
def test_what_cannot_be_digested_is_named() -> None:
    odd: list[Any] = [
        print,
        len,
        torch.relu,
        torch.nn.functional.cross_entropy,
        functools.partial(print, Awkward()),
        closing_over(Awkward()),
        closing_over(closing_over(iter([1]))),
        recursive,
        operator_of_itself(),
        torch.nn.Linear,
        SimpleNamespace,
    ]
    for each in odd:
        assert len(code_digest(each, key=KEY)) == 64
        assert code_digest(each, key=KEY) == code_digest(each, key=KEY)
    assert code_digest(print, key=KEY) != code_digest(len, key=KEY)
    assert code_digest(None, key=KEY) == ""


def operator_of_itself() -> Any:
    held: list[Any] = []

    def function() -> Any:
        return held

    held.append(function)
    held.append(held)
    return function


IN_A_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from privtune.code_digest import code_digest
import mine
print(code_digest(mine.f, key=b"key"))
"""


def test_processes_and_folders_agree(tmp_path: Path) -> None:
    """Neither the seed of hashes, nor the path, nor the address of an object is part of it."""
    found = set()
    for seed, lines in (("0", 0), ("1", 7), ("2", 40)):
        folder = tmp_path / f"folder-{seed}"
        folder.mkdir()
        (folder / "mine.py").write_text("#\n" * lines + textwrap.dedent(BASE))
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, str(folder)],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
    assert found == {digest(BASE)}  # a script and a module are one


@pytest.mark.quick
def test_another_python_is_not_compared() -> None:
    assert changed_parts({"python": "a", "the loss": "1"}, {"python": "b", "the loss": "2"}) == []
    assert python_tag().startswith("cpython")


# Arms.

TRUTH = torch.randn(240, 3, generator=torch.Generator().manual_seed(5))
TARGETS = (TRUTH[:, 0] > 0).long()
WITH = {
    "data": (TRUTH, TARGETS),
    "split": {"train": 180, "validation": 60},
    "epochs": 1,
    "expected_batch_size": 60,
    "epsilon": 1.0,
}

BUILD = """
    import torch
    import privtune
    def f(trial):
        model = torch.nn.Linear(3, 2)
        rate = trial.suggest_float("rate", 0.1, 1.0)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))
"""
LOSS = """
    from torch.nn import functional
    def f(model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none")
"""
SCORE = """
    from torch.nn import functional
    def f(model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none")
"""


@pytest.fixture
def study(storage: str) -> Study:
    budget = privtune.Budget(8.0, 1e-3, name="changes")
    return privtune.create_study("changes", budget=budget, storage=storage, seed=3)


def ask(study: Study, *, build: str = BUILD, loss: str = LOSS, **given: Any) -> Any:
    whole: dict[str, Any] = {"strategy": Fixed(arm="mine", parameters={"rate": 0.5}), **WITH}
    return optimize_own(study, cell(build), loss=cell(loss), **whole | given)


def scored(text: str) -> Mapping[str, Any]:
    score = privtune.Score(cell(text), bound=2.0)
    return {"strategy": PapernotSteinke(arm="mine", mean_runs=2), "score": score}


def test_a_cell_that_is_run_again_returns_its_release(study: Study) -> None:
    first = ask(study)
    again = ask(study, build="# once more\n" + textwrap.dedent(BUILD))
    assert torch.equal(first.weights, again.weights)


MOMENTUM = BUILD.replace("parameters(), ", "parameters(), momentum=0.9, ")
SMOOTH = LOSS.replace('"none"', '"none", label_smoothing=0.1')
CHANGES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "build": ({}, {"build": MOMENTUM}, "The model's code"),
    "loss": ({}, {"loss": SMOOTH}, "The loss"),
    "both": ({}, {"build": MOMENTUM, "loss": SMOOTH}, "The model's code and the loss"),
    "score": (scored(SCORE), scored(SCORE.replace("model(x)", "2 * model(x)")), "The score"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_code_is_refused_and_named(study: Study, what: str, storage: str) -> None:
    before, after, named = CHANGES[what]
    ask(study, **before)
    with Ledger(storage) as ledger:
        charges = len(ledger.charges("changes"))
    with pytest.raises(ProgramChangedError) as refused:
        ask(study, **before | after)
    said = str(refused.value)
    assert said.startswith(f"{named} of arm 'mine' of study 'changes' ha")
    assert "arm='another-name'" in said
    assert "a new study" in said
    with Ledger(storage) as ledger:
        assert len(ledger.charges("changes")) == charges
    release = ask(study, **before | after, arm="other")  # the way on
    assert release.arm == "other"
    assert ask(study, **before).arm == "mine"  # put back, it is there


def frame(*columns: str) -> dict[str, Any]:
    pandas = pytest.importorskip("pandas")
    made = pandas.DataFrame(TRUTH.numpy(), columns=["a", "b", "c"])
    made["target"] = TARGETS.numpy()
    return {"data": made, "columns": {"inputs": list(columns), "target": "target"}}


def test_other_declared_columns_are_refused(study: Study) -> None:
    build = BUILD.replace("3, 2)", "2, 2)")
    ask(study, build=build, **frame("a", "b"))
    with pytest.raises(PrivTuneError, match=r"another plan \(the declared columns\)"):
        ask(study, build=build, **frame("a", "c"))
    ask(study, build=build, **frame("a", "b"))


def test_records_of_the_same_declaration_are_not_compared(study: Study) -> None:
    """No digest of a private record is kept, so other records are the user's to tell."""
    first = ask(study)
    again = ask(study, data=(TRUTH + 1.0, TARGETS))
    assert torch.equal(first.weights, again.weights)


def test_another_plan_says_what_is_another(study: Study) -> None:
    ask(study)
    with pytest.raises(PrivTuneError, match="the declared training records"):
        ask(study, split={"train": 170, "validation": 60})
    with pytest.raises(PrivTuneError, match=r"\(its hyperparameters\)"):
        ask(study, strategy=Fixed(arm="mine", parameters={"rate": 0.25}))


def test_another_sampler_is_refused(study: Study) -> None:
    class Drawing:
        independent = True

        def draw(self, rng: Any) -> dict[str, float]:
            return {"rate": 0.5}

    class Halving(Drawing):
        def draw(self, rng: Any) -> dict[str, float]:
            return {"rate": 0.25}

    given = {"strategy": PapernotSteinke(arm="mine", mean_runs=2), "epsilon": 4.0}
    ask(study, **given, sampler=Drawing())
    ask(study, **given, sampler=Drawing())
    with pytest.raises(ProgramChangedError, match=r"^The sampler of arm 'mine'"):
        ask(study, **given, sampler=Halving())


def test_an_arm_that_an_error_stopped_goes_on_with_the_mend(study: Study, storage: str) -> None:
    def failing(trial: Any) -> Any:
        if study.arms:  # it is charged
            raise RuntimeError("a mistake")
        return cell(BUILD)(trial)

    given = {"strategy": Fixed(arm="mine", parameters={"rate": 0.5}), "loss": cell(LOSS), **WITH}
    with pytest.raises(ArmStoppedError):
        optimize_own(study, failing, **given)
    release = ask(study)
    with Ledger(storage) as ledger:
        assert len(ledger.charges("changes")) == 1
    assert torch.equal(ask(study).weights, release.weights)  # the mend is its code now
    with pytest.raises(ProgramChangedError, match="The model's code"):
        ask(study, build=BUILD.replace("3, 2)", "3, 2, bias=False)"))


def test_a_refused_charge_fixes_no_code(study: Study) -> None:
    with pytest.raises(PrivTuneError):
        ask(study, epsilon=80.0)
    ask(study, build=BUILD.replace("3, 2)", "3, 2, bias=False)"))


def test_a_declared_objective_is_compared(study: Study) -> None:
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=100
    )
    text = """
        import numpy as np
        def f(trial):
            noise = trial.plan.noise_multiplier * np.random.normal(size=2)
            return trial.result({"w": 1.0 * noise})
    """
    given = {
        "mechanism": mechanism,
        "strategy": Fixed(arm="mine", parameters={}),
        "epsilon": 1.0,
    }
    study.optimize_declared(cell(text), **given)
    study.optimize_declared(cell(text.replace("1.0 *", "1.0  *")), **given)
    with pytest.raises(ProgramChangedError, match=r"^The objective's code of arm 'mine'"):
        study.optimize_declared(cell(text.replace("1.0 *", "2.0 *")), **given)


# Studies of a spec: the task is a path.

TASK = """
from dataclasses import replace
import torch
from torch import nn
from tests.toy import blobs

WIDTH = 8

def model():
    return nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

def task():
    return replace(blobs(), model=model)
"""


def write(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "changing_task.py").write_text(text)
    monkeypatch.chdir(folder)
    sys.modules.pop("changing_task", None)
    sys.dont_write_bytecode = True


def test_a_task_by_its_path_is_compared_in_a_new_process(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, TASK, monkeypatch)
    spec = toy_spec(
        task="changing_task:task",
        arms=[{"name": "hyfree", "strategy": "hyfreedp"}],
    )
    first = Study.create(spec, storage)
    released = first.run()
    first.close()
    write(tmp_path, "# a comment\n" + TASK, monkeypatch)
    with_comment = Study("toy", storage)
    assert [each.arm for each in with_comment.run()] == [each.arm for each in released]
    with_comment.close()
    write(tmp_path, TASK.replace("WIDTH = 8", "WIDTH = 9"), monkeypatch)
    changed = Study("toy", storage)
    with pytest.raises(ProgramChangedError, match=r"^The model's code of arm 'hyfree'") as refused:
        changed.run()
    assert "another name" in str(refused.value)
    (tmp_path / "changing_task.py").unlink()
    sys.modules.pop("changing_task", None)
    assert len(changed.run()) == 1  # what cannot be compared is there all the same
    changed.close()


def test_a_worker_with_other_code_trains_nothing(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import closing

    from privtune.facts import TaskChangedError
    from privtune.study.lifecycle import Life
    from privtune.study.program import check_programs, check_worker, programs_of_spec

    write(tmp_path, TASK, monkeypatch)
    Study.create(toy_spec(task="changing_task:task"), storage).close()
    with closing(Life("toy", storage)) as life:
        task = life.task()
        check_programs(life, programs_of_spec(life, task))
        plan = life.plans()["selection"]
        check_worker(life, plan, task)
        with pytest.raises(TaskChangedError, match="The model's code"):
            check_worker(life, plan, replace(task, model=torch.nn.Linear))


def test_public_benchmarks_have_no_code_of_the_user(storage: str) -> None:
    from contextlib import closing

    from privtune.study.lifecycle import Life
    from privtune.study.program import describe_program

    spec = toy_spec(task="digits-mlp", expected_batch_size=64)
    Study.create(spec, storage).close()
    with closing(Life("toy", storage)) as life:
        plan = life.plans()["hyfree"]
        program = describe_program(
            life, plan, get_task("digits-mlp"), InRun(arm="hyfree", method="hyfreedp")
        )
    assert {name for name, found in program.items() if found} <= {"python"}
