"""Imports point downwards only, and planning loads neither torch nor MLflow."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from privtune.cli._app import mount
from privtune.serving.exported import pack_modules
from privtune.strategies import STRATEGIES
from privtune.tasks import TASKS
from privtune.training.methods import METHODS

PACKAGE = Path(__file__).parents[1] / "privtune"

FLOORS = {
    "code_digest": 0,
    "errors": 0,
    "facts": 0,
    "files": 0,
    "imports": 0,
    "locks": 0,
    "names": 0,
    "numbers": 0,
    "plugins": 0,
    "prose": 0,
    "public_priors": 0,
    "accounting": 0,
    "ledger": 1,
    "spaces": 1,
    "training": 1,
    "tables": 2,
    "tasks": 3,
    "stages": 4,
    "strategies": 5,
    "execution": 6,
    "study": 7,
    "audit": 7,
    "plots": 8,
    "rehearsal": 8,
    "views": 9,
    "api": 10,
    "opacus": 10,
    "sklearn": 10,
    "serving": 10,
    "tracking": 11,
    "cli": 12,
    "__main__": 13,
}

# Inside of training: what the guarantee rests on knows nothing of speed.
TRAINING = {"mechanism": 0, "methods": 1, "engine": 2}

HOMES = {
    "autodp": ("accounting/rdp.py", "accounting/compare.py"),
    "dp_accounting": "accounting/compare.py",
    "opacus": ("opacus.py", "accounting/compare.py"),
    "mlflow": ("serving/", "tracking/"),
    "sqlalchemy": (
        "ledger/",
        *(f"study/{name}.py" for name in ("rows", "lifecycle", "folders", "restore")),
        "tracking/store.py",
        "tables/sql.py",
    ),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted_name(path: Path) -> str:
    return ".".join(("privtune", *path.relative_to(PACKAGE).with_suffix("").parts))


def in_or_above_a_circle(arrows: dict[str, set[str]]) -> list[str]:
    """Take away whatever points at nothing that is left, until nothing more goes; what stays is returned."""
    rest = dict(arrows)
    while leaves := [name for name, targets in rest.items() if not targets & rest.keys()]:
        for name in leaves:
            del rest[name]
    return sorted(rest)


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
    if (
        module == "privtune"
    ):  # the face of it all, which imports what is asked for; views take its version
        return FLOORS["plots"]
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
    names = {dotted_name(path): path for path in modules() if path.stem != "__init__"}
    # Imports for type checkers count: a circle of types is a circle of thoughts.
    arrows = {name: {m for _, m in imports(path) if m in names} for name, path in names.items()}
    assert not in_or_above_a_circle(arrows)


@pytest.mark.quick
def test_rooms_import_no_room_in_a_circle() -> None:
    """Modules of two rooms may form no circle and the rooms still one: then neither is read alone."""
    arrows: dict[str, set[str]] = {}
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        if len(parts) == 1:
            continue
        here = "/".join(parts[:2]) if parts[0] == "training" and len(parts) > 2 else parts[0]
        targets = arrows.setdefault(here, set())
        for _, module in imports(path):
            names = module.split(".")
            if names[0] != "privtune" or len(names) == 1 or not (PACKAGE / names[1]).is_dir():
                continue
            is_inner = names[1] == "training" and len(names) > 2
            targets.add("/".join(names[1:3]) if is_inner else names[1])
        targets.discard(here)
    assert not in_or_above_a_circle(arrows)


REGISTRIES = {
    "training/methods": ("METHODS in training/methods/__init__.py", METHODS),
    "strategies": ("STRATEGIES in strategies/catalog.py", STRATEGIES),
}


@pytest.mark.parametrize("room", REGISTRIES)
def test_what_has_a_name_is_registered(room: str) -> None:
    """A method or strategy whose path is forgotten would be a file that nobody can ask for.

    ``DeclaredMethod`` stands for trainings of other libraries, ``InRun`` for all methods.
    """
    where, registry = REGISTRIES[room]
    forgotten = []
    for path in sorted((PACKAGE / room).glob("*.py")):
        dotted = dotted_name(path)
        module = importlib.import_module(dotted.removesuffix(".__init__"))
        for cls in vars(module).values():
            is_own = isinstance(cls, type) and cls.__module__ == module.__name__
            if not is_own or inspect.isabstract(cls) or cls.__name__ in {"DeclaredMethod", "InRun"}:
                continue
            takes_part = hasattr(cls, "plan") if room == "strategies" else hasattr(cls, "update")
            name = vars(cls).get("name")
            if takes_part and isinstance(name, str) and name and name not in registry:
                forgotten.append(f"{dotted}:{cls.__name__}")
    assert not forgotten, f"add the path of each to {where}"


SAID_BY_CLASSES = {"Kernel", "Pairs", "Prior", "Round", "Trainer", "Worker"}
"""Protocols that every class of the package that implements them names as a base.

Of the others either the members are too common to tell (``run``, ``epsilon`` and ``delta``), or, of
``Strategy``, a property of the protocol would become the default of the dataclasses' field ``arm``.
"""
SILENT = {"_Uniform"}  # its field would take Prior's property for its default


def members(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> tuple[set[str], set[str]]:
    """Return the names that a class has, and the classes above it, by its text and theirs."""
    names: set[str] = set()
    ancestors: set[str] = set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    for base in cls.bases:
        name = ast.unparse(base).partition("[")[0]
        ancestors.add(name)
        if name in classes:
            more, above = members(classes[name], classes)
            names |= more
            ancestors |= above
    return names, ancestors


@pytest.mark.quick
def test_a_class_names_the_protocol_that_it_implements() -> None:
    """Then the type checker compares the two where the class is, and a reader knows what it is for."""
    classes: dict[str, ast.ClassDef] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    silent = []
    for protocol in sorted(SAID_BY_CLASSES):
        needs, above = members(classes[protocol], classes)
        assert "Protocol" in above
        for name, cls in classes.items():
            names, ancestors = members(cls, classes)
            if needs <= names and protocol not in ancestors | {name}:
                silent.append((name, protocol))
    assert {name for name, _ in silent} == SILENT, f"name the protocol as a base: {silent}"


def test_no_field_has_the_property_of_a_protocol_as_its_default() -> None:
    """A dataclass looks for the default of a field on its bases, and takes a protocol's property for it."""
    wrong = []
    for path in modules():
        name = dotted_name(path).removesuffix(".__init__")
        if path.stem in {"__main__", "pyfunc"}:
            continue
        for cls in vars(importlib.import_module(name)).values():
            if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
                continue
            for field in dataclasses.fields(cls):
                if isinstance(field.default, property):
                    wrong.append(f"{name}:{cls.__name__}.{field.name}")
    assert not wrong, "declare it as a plain attribute in the protocol"


@pytest.mark.quick
def test_a_room_s_readme_names_its_modules() -> None:
    """Methods and strategies that are registered need no row: their summaries are listed by a command."""
    homes = {
        path.partition(":")[0]
        for registry in (METHODS, STRATEGIES)
        for path in registry._homes.values()
    }
    missing = []
    for readme in sorted(PACKAGE.rglob("README.md")):
        text = readme.read_text(encoding="utf-8")
        for path in sorted(readme.parent.glob("*.py")):
            dotted = dotted_name(path)
            if path.stem == "__init__" or dotted in homes:
                continue
            if f"`{path.name}`" not in text:
                missing.append(path.relative_to(PACKAGE).as_posix())
    assert not missing, "say in the README of the room what these modules hold"


@pytest.mark.quick
def test_no_room_imports_a_private_module_of_another() -> None:
    wrong = []
    for path in modules():
        here = path.relative_to(PACKAGE).parts[:-1]
        for line, module in imports(path):
            names = module.split(".")
            is_private = any(name.startswith("_") for name in names[1:])
            if names[0] == "privtune" and is_private and tuple(names[1:-1]) != here:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
    assert not wrong, "a module that other rooms import has no leading underscore"


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
    """Its import takes as long as the rest of ``study plan``; ``auto`` alone counts a model's weights."""
    code = (
        "import sys, yaml; from pathlib import Path; from privtune.study import StudySpec, plan_study; "
        "demo = Path('privtune/tasks/digits-demo.yaml').read_text('utf-8'); "
        "other = demo.replace('strategy: auto', 'strategy: hyfreedp'); "
        "plan_study(StudySpec.parse(yaml.safe_load(other))); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0


@pytest.mark.quick
def test_what_travels_with_a_model_needs_little(tmp_path: Path) -> None:
    package = pack_modules(tmp_path)
    paths = list((tmp_path / package).rglob("*.py"))
    assert {"pyfunc", "raw_rows", "columns"} < {path.stem for path in paths}
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
    assert {"privtune.strategies.in_run", "privtune.training.methods.fixed_rates"} <= found
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
