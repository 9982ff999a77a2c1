"""What lies in the working folder is not imported by any command, but for what a study names.

A finder of this test's own stands before all others in each process that a command starts. As soon as
anything asks for a module, whoever asks and whether it exists or not, it plants a file of that name in the
working folder. A file that is imported leaves a mark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from privtune.cli._app import mount
from tests.ledger.test_signature import KEY, pem, public_pem
from tests.tasks.test_tables import patients, table
from tests.tiers import FULL
from tests.tracking.servers import Server, free_port

PLANTER = """
import os
import sys


class Planter:
    def __init__(self):
        self.folder = os.environ["PLANTED"]
        self.spared = os.environ.get("SPARED", "").split()
        self.first = os.environ.get("PLANTED_AFTER")
        self.at_work = self.first is None
        if "--multiprocessing-fork" in sys.orig_argv:
            open(f"{self.folder}/spawned.txt", "a").close()

    def find_spec(self, name, path=None, target=None):
        if name == self.first:
            self.at_work = True
        elif self.at_work and path is None and name.isidentifier() and name not in self.spared:
            self.plant(name)

    def plant(self, name):
        if os.path.isdir(f"{self.folder}/{name}"):
            return
        try:
            with open(f"{self.folder}/{name}.py", "x") as file:
                file.write(f"open({self.folder + '-marks/' + name!r}, 'a').close()\\n")
        except FileExistsError:
            return
        for place in ("", self.folder):
            if (finder := sys.path_importer_cache.get(place)) is not None:
                finder.invalidate_caches()


sys.meta_path.insert(0, Planter())
"""

TASK = """
import pathlib

import helper
from torch import nn

beside = pathlib.Path(__file__).with_name("width.txt")


def net(features, outputs):
    import late_helper

    hidden = helper.width(beside)
    return nn.Sequential(nn.Linear(features, hidden), late_helper.layer(), nn.Linear(hidden, outputs))
"""

# What the folder is meant to give: the task, and what its own code imports.
HELPERS = {
    "mytask": TASK,
    "helper": "def width(file):\n    return int(file.read_text())\n",
    "late_helper": "import importlib\n\n\ndef layer():\n    return importlib.import_module('last').Layer()\n",
    "last": "from torch import nn\n\n\nclass Layer(nn.ReLU):\n    pass\n",
}

GROUPS = (
    "privtune.strategies", "privtune.methods", "mlflow.run_context_provider", "mlflow.app",
    "mlflow.tracking_store", "mlflow.artifact_repository", "mlflow.request_header_provider",
    "mlflow.default_experiment_provider", "sqlalchemy.dialects", "sqlalchemy.plugins", "fsspec.specs",
    "torch.backends", "torch_dynamo_backends", "pydantic", "plotly", "mimerender", "opentelemetry_context",
)  # fmt: skip

# In the order in which they are typed; each command of the command line at least once.
COMMANDS = (
    "--version",
    "--help",
    "account epsilon event.json --delta 1e-5",
    "account delta event.json --epsilon 1",
    "account calibrate gaussian.json --epsilon 1 --delta 1e-5",
    "account dpsgd --records 600 --batch 60 --noise 1.1 --epochs 2 --delta 1e-5",
    "account explain event.json",
    "account compare event.json",
    "account sensitivity event.json",
    "strategies",
    "metrics",
    "tasks",
    "study draft patients.csv --target often",
    "study plan spec.yaml",
    "study create spec.yaml",
    "study rehearse spec.yaml --repeats 1",
    "study run patients",
    "study run search.yaml --jobs 2 --executor processes",
    "worker patients --idle-exit 0",
    "study list",
    "study show patients",
    "study compare patients --html page.html",
    "study sync patients",
    "study export patients --sp800-226",
    "audit patients --runs 100",
    "predict patients defaults patients.csv",
    "model export patients defaults --to model",
    "budget create other --epsilon 1 --delta 1e-6",
    "budget charge other event.json --note another",
    "budget charges other",
    "budget settle other-1",
    "budget list",
    "budget show patients",
    "budget export other --output c.json",
    "budget sign c.json --key key.pem",
    "budget verify --certificate c.json --signature c.json.sig --key public.pem",
    "budget verify patients",
    "budget backup copy.db",
    "budget restore --yes --storage copy.db",
    "budget close other",
    "doctor",
    "ui --no-browser",
    "study delete patients --yes",
    "demo",
)
REFUSED = "budget void other-1"  # it is over
STARTING_OTHERS = ("study run search.yaml", "ui")
"""What starts processes: by spawning and to log to MLflow, or as MLflow's server."""

DAILY = (
    "account epsilon",
    "study draft",
    "study create",
    "study run",
    "study compare",
    "predict",
    "model export",
    "budget create",
    "budget charge ",
    "budget export",
    "budget sign",
    "budget verify --certificate",
    "ui",
)
"""What `make test` types: each imports what no other does. ``PRIVTUNE_CAMPAIGN=full`` types every command."""


def names_before(package: str, folder: Path) -> list[str]:
    """Return a package, and the modules that ``python -m`` itself imports before a line of it is run."""
    (folder / "bare").mkdir(parents=True)
    (folder / "bare" / "__init__.py").touch()
    (folder / "bare" / "__main__.py").write_text("import sys\nprint(*sys.modules)\n")
    command = [sys.executable, "-m", "bare"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [package, *done.stdout.split()]


class Folder:
    """A working folder, the way in which commands are typed there, and the marks that files left."""

    def __init__(self, path: Path, way: Sequence[str]) -> None:
        self.path = path / "here"
        self.marks = path / "here-marks"
        self.way = list(way)
        for folder in (self.path, self.marks, path / "hook", path / "cache"):
            folder.mkdir()
        (path / "hook" / "sitecustomize.py").write_text(PLANTER)
        self.environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("PRIVTUNE", "MLFLOW"))},
            "PLANTED": str(self.path),
            "PYTHONPATH": str(path / "hook"),
            "XDG_CACHE_HOME": str(path / "cache"),
        }
        if "-m" in way:
            self.environment["SPARED"] = " ".join(names_before("privtune", path / "bare"))
        self._fill()

    def run(self, command: str, code: int = 0) -> None:
        """Type a command, and see that nothing was imported from the folder."""
        if command.startswith("ui"):
            self._serve(command)
        else:
            done = subprocess.run(
                [*self.way, *command.split()],
                cwd=self.path,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert self.strangers() == set(), command
            assert done.returncode == code, (command, done.stdout, done.stderr)
        assert self.strangers() == set(), command

    def _serve(self, command: str) -> None:
        port = free_port()
        words = [*self.way, *command.split(), "--port", str(port)]
        log = self.path / "ui.log"
        server = Server(words, port=port, log=log, cwd=self.path, environment=self.environment)
        server.start().stop()

    def strangers(self) -> set[str]:
        """Return the modules of this folder that were imported, but for the task and its helpers."""
        return {mark.name for mark in self.marks.iterdir()} - set(HELPERS)

    def planted(self) -> set[str]:
        return {file.stem for file in self.path.glob("*.py")}

    def _fill(self) -> None:
        for name, source in HELPERS.items():
            mark = f"open({str(self.marks / name)!r}, 'a').close()\n"
            (self.path / f"{name}.py").write_text(source + mark)
        (self.path / "width.txt").write_text("3")
        evil = self.path / "evil.egg-info"
        evil.mkdir()
        (evil / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
        points = "".join(f"[{group}]\nevil = evil_plugin:Plugin\n" for group in GROUPS)
        (evil / "entry_points.txt").write_text(points)
        mark = f"open({str(self.marks / 'evil_plugin')!r}, 'a').close()\n"
        (self.path / "evil_plugin.py").write_text(mark)
        patients().to_csv(self.path / "patients.csv", index=False)
        (self.path / "event.json").write_text(json.dumps({"type": "zcdp", "rho": 0.01}))
        gaussian = {"type": "gaussian", "noise_multiplier": 4.0}
        (self.path / "gaussian.json").write_text(json.dumps(gaussian))
        (self.path / "key.pem").write_bytes(pem(KEY))
        (self.path / "key.pem").chmod(0o600)
        (self.path / "public.pem").write_bytes(public_pem(KEY))
        parameters = {"learning_rate": 0.1, "max_grad_norm": 1.0}
        arm = {"name": "defaults", "strategy": "fixed", "parameters": parameters}
        spec = {
            "name": "patients",
            "task": table(Path("patients.csv"), model="mytask:net"),
            "budget": {"name": "patients", "epsilon": 20.0, "delta": 1e-4},
            "arms": [arm],
            "epochs": 1,
            "expected_batch_size": 60,
            "device": "cpu",
        }
        (self.path / "spec.yaml").write_text(yaml.safe_dump(spec))
        mean = {"mean_runs": 2, "parameters": {"max_grad_norm": 1.0}}
        other = {
            "name": "search",
            "budget": {"name": "search", "epsilon": 20.0, "delta": 1e-4},
            "space": {"learning_rate": {"type": "float", "low": 0.05, "high": 0.5}},
            "arms": [{"name": "search", "strategy": "papernot-steinke", **mean}],
        }
        (self.path / "search.yaml").write_text(yaml.safe_dump(spec | other))


WAYS = {
    "privtune": [str(Path(sys.executable).with_name("privtune"))],
    "python -m privtune": [sys.executable, "-m", "privtune"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_nothing_is_imported_but_what_a_study_names(way: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, WAYS[way])
    # Both ways have one path once they run. How they start, and how they start others, is what differs.
    typed = COMMANDS if FULL else tuple(c for c in COMMANDS if c.startswith(DAILY))
    if way != "privtune":
        typed = tuple(command for command in typed if command.startswith(STARTING_OTHERS))
    for command in typed:
        folder.run(command)
    if FULL and way == "privtune":
        folder.run(REFUSED, code=1)
    assert {mark.name for mark in folder.marks.iterdir()} == set(HELPERS), "the task was imported"
    assert (folder.path / "spawned.txt").exists()
    assert {"cython", "typer", "torch", "hashlib", "multiprocessing", "uvicorn"} <= folder.planted()


@pytest.mark.parametrize("way", list(WAYS))
def test_an_auditor_runs_no_file_of_the_folder(way: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path, WAYS[way])
    folder.run("budget list")
    folder.run("account epsilon event.json --delta 1e-5")
    assert {"cython", "typer", "sqlalchemy", "hashlib"} <= folder.planted()
    assert list(folder.marks.iterdir()) == []


def test_an_empty_place_in_pythonpath_is_not_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path, WAYS["privtune"])
    hook = folder.environment["PYTHONPATH"]
    command = "account epsilon event.json --delta 1e-5"
    folder.environment |= {"PYTHONPATH": f":{hook}", "PLANTED_AFTER": "privtune.cli._app"}
    folder.run(command)
    folder.environment["PYTHONPATH"] = f"{folder.path}:{hook}:"
    with pytest.raises(AssertionError, match="account"):  # a folder that is named is meant
        folder.run(command)


def test_every_command_is_among_them() -> None:
    def walk(command: object, *words: str) -> Iterator[str]:
        commands = getattr(command, "commands", None)
        if commands is None:
            yield " ".join(words)
        for name, inner in (commands or {}).items():
            yield from walk(inner, *words, name)

    known = list(walk(get_command(mount())))
    assert len(known) > 30
    assert [
        name for name in known if not any(c.startswith(name) for c in (*COMMANDS, REFUSED))
    ] == []


def call(folder: Path, function: str, *path: Path) -> str:
    """Call a function that a study names, in a process whose working folder is on no path."""
    code = (
        "from privtune.imports import find_function\n"
        f"print(find_function('task', {function!r}, allowed='', must='')())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def test_a_library_gets_no_file_of_the_folder_and_hides_one(tmp_path: Path) -> None:
    library = "try:\n    import cython\nexcept ImportError:\n    cython = None\n"
    write(tmp_path / "lib", library=library, both="where = 'installed'\n")
    write(
        tmp_path / "here",
        mytask="import both, library\ndef f(): return both.where, library.cython\n",
        both="where = 'here'\ndef f(): return __file__\n",
        cython="",
        library="",
    )
    assert call(tmp_path / "here", "mytask:f", tmp_path / "lib") == "('installed', None)"
    assert "No module named" in call(tmp_path / "here", "cython_:f")
    assert call(tmp_path / "here", "both:f").endswith("/here/both.py")


@pytest.mark.parametrize("init", [True, False])
def test_packages_of_the_folder_and_modules_beside_them(tmp_path: Path, init: bool) -> None:
    write(tmp_path, pack__deep__tasks="def f():\n    import beside\n    return beside.x\n")
    write(tmp_path, beside="import other.inner as i\nx = i.x\n", other__inner="x = 'found'\n")
    if init:
        write(tmp_path, pack____init__="", pack__deep____init__="", other____init__="")
    assert call(tmp_path, "pack.deep.tasks:f") == "found"


def test_a_process_that_a_task_spawns_finds_the_same_modules(tmp_path: Path) -> None:
    write(
        tmp_path,
        mytask=(
            "import multiprocessing\nimport beside\n"
            "def f():\n"
            "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
            "        return pool.map(beside.double, [1, 2])\n"
        ),
        beside="def double(x): return 2 * x\n",
    )
    assert call(tmp_path, "mytask:f") == "[2, 4]"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("stranger", ["mytask.py", "beside.py", "__pycache__", "pack"])
def test_where_anybody_may_write_a_module_is_this_user_s(tmp_path: Path, stranger: str) -> None:
    source = "import beside, pack.inner\ndef f(): return 'called'\n"
    write(tmp_path, mytask=source, beside="", pack__inner="")
    (tmp_path / "__pycache__").mkdir()
    os.chown(tmp_path / stranger, 65534, -1)
    assert call(tmp_path, "mytask:f") == "called", "the folder is its user's choice"
    tmp_path.chmod(0o1777)
    said = call(tmp_path, "mytask:f")
    assert "Anybody may write in" in said
    assert stranger in said
    os.chown(tmp_path / stranger, 0, -1)
    assert call(tmp_path, "mytask:f") == "called"
