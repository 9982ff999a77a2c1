"""Imports point downwards only, and planning loads neither torch nor MLflow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from privtune.cli._app import mount
from privtune.strategies import STRATEGIES
from privtune.tasks import TASKS
from privtune.tracking.model import travelling
from privtune.training.methods import METHODS

PACKAGE = Path(__file__).parents[1] / "privtune"

FLOORS = {
    "errors": 0,
    "files": 0,
    "imports": 0,
    "names": 0,
    "numbers": 0,
    "plugins": 0,
    "accounting": 0,
    "ledger": 1,
    "spaces": 1,
    "training": 1,
    "tasks": 2,
    "strategies": 3,
    "execution": 4,
    "study": 5,
    "audit": 5,
    "api": 6,
    "opacus": 6,
    "sklearn": 6,
    "plots": 6,
    "views": 7,
    "tracking": 8,
    "cli": 9,
    "__main__": 10,
}

# Inside of training: what the guarantee rests on knows nothing of speed.
TRAINING = {"mechanism": 0, "methods": 1, "engine": 2}

HOMES = {
    "autodp": ("accounting/rdp.py", "accounting/compare.py"),
    "dp_accounting": "accounting/compare.py",
    "opacus": ("opacus.py", "accounting/compare.py"),
    "mlflow": "tracking/",
    "sqlalchemy": (
        "ledger/",
        *(f"study/{name}.py" for name in ("rows", "lifecycle")),
        "tracking/store.py",
        "tasks/_sql.py",
    ),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module))
    return found


def floor(module: str) -> int | None:
    parts = module.split(".")
    if module == "privtune":  # the face of it all, which stands where the public functions do
        return FLOORS["api"]
    return FLOORS.get(parts[1]) if parts[0] == "privtune" else None


@pytest.mark.quick
def test_imports_point_downwards() -> None:
    wrong = []
    for path in modules():
        relative = path.relative_to(PACKAGE)
        if len(relative.parts) == 1 and relative.stem == "__init__":
            continue
        here = FLOORS[relative.parts[0].removesuffix(".py")]
        for line, module in imports(path):
            there = floor(module)
            if there is not None and there > here:
                wrong.append(f"{relative}:{line} imports {module}")
    assert not wrong


@pytest.mark.quick
def test_imports_inside_of_training_point_downwards() -> None:
    wrong = []
    for path in sorted((PACKAGE / "training").rglob("*.py")):
        room = path.relative_to(PACKAGE / "training").parts[0]
        for line, module in imports(path):
            parts = module.split(".")
            inside = parts[:2] == ["privtune", "training"] and len(parts) > 2
            if inside and room in TRAINING and TRAINING[parts[2]] > TRAINING[room]:
                wrong.append(f"{path.name}:{line} imports {module}")
    assert not wrong


@pytest.mark.quick
def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {
        ".".join(("privtune", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in modules()
        if path.stem != "__init__"
    }
    # Imports for type checkers count: a circle of types is a circle of thoughts.
    arrows = {name: {m for _, m in imports(path) if m in names} for name, path in names.items()}
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"in or above a circle: {sorted(arrows)}"


@pytest.mark.quick
def test_floors_are_real() -> None:
    # The walk above passes on an empty package: make sure that it sees imports at all.
    seen = sum(1 for path in modules() for _, m in imports(path) if floor(m) is not None)
    assert len(modules()) > 40
    assert seen > 100


@pytest.mark.quick
def test_libraries_have_one_home() -> None:
    wrong = []
    for path in modules():
        relative = path.relative_to(PACKAGE).as_posix()
        for line, module in imports(path):
            homes = HOMES.get(module.split(".")[0])
            if homes is None or relative.startswith(homes) or relative == "cli/ui.py":
                continue
            wrong.append(f"{relative}:{line} imports {module}")
    assert not wrong


def test_planning_loads_neither_torch_nor_mlflow() -> None:
    rooms = ("accounting", "ledger", "spaces", "tasks", "training.methods", "strategies", "study")
    names = ["privtune", "privtune.training", *(f"privtune.{room}" for room in rooms)]
    code = (
        f"import sys, importlib\nfor package in map(importlib.import_module, {names}):\n"
        "    for name in getattr(package, '__all__', ()):\n"
        "        name in ('Packing', 'TensorData', 'norms_of') or getattr(package, name)\n"  # made of tensors
        "sys.exit(','.join({'torch', 'mlflow', 'opacus'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_plan_without_a_model_s_size_loads_no_torch() -> None:
    """The demo's three arms: its import takes as long as the rest of ``study plan``."""
    code = (
        "import sys; from pathlib import Path; from privtune.study import StudySpec, plan_study; "
        "plan_study(StudySpec.from_file(Path('privtune/tasks/digits-demo.yaml'))); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0


@pytest.mark.quick
def test_what_travels_with_a_model_needs_little(tmp_path: Path) -> None:
    package = travelling(tmp_path)
    paths = list((tmp_path / package).rglob("*.py"))
    assert {"served", "_rows", "_columns"} < {path.stem for path in paths}
    assert len(paths) < 12
    found = {module.split(".")[0] for path in paths for _, module in imports(path)}
    assert found - sys.stdlib_module_names <= {
        package,
        "mlflow",
        "numpy",
        "pandas",
        "pyarrow",
        "torch",
    }


@pytest.mark.quick
def test_registries_name_what_they_hold_and_import_it_when_it_is_asked_for() -> None:
    assert {name: each.name for name, each in METHODS.items()} == {name: name for name in METHODS}
    assert {name: each.name for name, each in STRATEGIES.items()} == {n: n for n in STRATEGIES}
    assert {name: make().name for name, make in TASKS.items()} == {name: name for name in TASKS}
    code = (
        "import sys; from privtune.strategies import STRATEGIES, Plan; "
        "from privtune.tasks import TASKS; from privtune.training.methods import METHODS; "
        "STRATEGIES['fixed'], METHODS['dpsgd'], TASKS['digits-mlp'], 'dog' in METHODS; "
        "print(*sorted(name for name in sys.modules if name.startswith('privtune.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert {"privtune.strategies.in_run", "privtune.training.methods.dpsgd"} <= found
    for other in ("strategies.selection", "training.methods.free", "tasks.tabular", "tasks.own"):
        assert f"privtune.{other}" not in found


def test_a_command_of_a_group_is_mounted_alone() -> None:
    def commands(*words: str) -> list[str]:
        context = typer.Context(root := get_command(mount(*words)))
        group = root.get_command(context, "study")
        return group.list_commands(context)

    assert commands("study", "run") == ["run"]
    assert commands("study", "list") == ["list"], "a name of its own, not its function's"
    assert len(commands("study", "--help")) == len(commands()) > 5


LONGEST = 80
"""Lines of a function without its docstring."""


def lengths(path: Path) -> Iterator[tuple[str, int]]:
    """Give the name and the lines of every function in a module."""
    name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            said = (ast.get_docstring(node, clean=False) or "").splitlines()
            yield f"{name}:{node.name}", node.end_lineno - node.lineno + 1 - len(said)


@pytest.mark.quick
def test_functions_are_short() -> None:
    found = {name: n for path in modules() for name, n in lengths(path)}
    assert len(found) > 1000
    assert not {name: n for name, n in found.items() if n > LONGEST}


NUMBERS = {"numpy", "scipy", "privtune.accounting"}
STORES = {"sqlalchemy", "alembic", "optuna"}
HEAVY = {"torch", "mlflow", "opacus", "pandas", "plotly", "sklearn", "autodp", "dp_accounting"}


@pytest.mark.parametrize(
    ("words", "spared"),
    [
        ("--version", {"rich", "pydantic"} | NUMBERS | STORES | HEAVY),
        ("--help", {"rich", "pydantic"} | NUMBERS | STORES | HEAVY),
        ("study --help", {"rich", "privtune.cli.budget"} | NUMBERS | STORES | HEAVY),
        ("study create --help", {"rich"} | NUMBERS | STORES | HEAVY),
    ],
)
def test_help_imports_what_it_shows(words: str, spared: set[str]) -> None:
    code = (
        f"import atexit, sys; sys.argv = ['privtune', *{words.split()!r}]\n"
        f"atexit.register(lambda: print('IMPORTED', {spared!r} & set(sys.modules)))\n"
        "from privtune.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "IMPORTED set()"
