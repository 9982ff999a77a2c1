"""Strategies of installed packages: found by name, charged by their event, refused in a sentence."""

from __future__ import annotations

import importlib
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from privtune.accounting import Composed, epsilon
from privtune.cli.commands import strategies as list_strategies
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger
from privtune.strategies import (
    EntryPointError,
    Fixed,
    Needs,
    Outcome,
    PapernotSteinke,
    Plan,
    Round,
    StrategyError,
    make_strategy,
    plan_arm,
    registered,
)
from privtune.strategies.catalog import describe
from privtune.study import Study
from privtune.training.methods import METHODS
from tests.cli.conftest import Cli, cli
from tests.strategies.world import BOTH, context
from tests.study.conftest import toy_spec
from tests.tiers import ROOT

EXAMPLE = Path(__file__).parent / "example_package"

__all__ = ["cli"]

Install = Callable[..., None]


def lay_out(
    site: Path,
    package: str,
    points: Mapping[str, str],
    group: str = "privtune.strategies",
    **modules: str,
) -> None:
    """Lay out a package as an installer does: its modules, and a folder of metadata beside them."""
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def lay_out_example(site: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    module = (EXAMPLE / "example_strategies.py").read_text()
    points = project["entry-points"]["privtune.strategies"]
    lay_out(site, project["name"], points, example_strategies=module)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install packages for one test."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    before = set(sys.modules)

    def call(package: str, points: Mapping[str, str], **modules: str) -> None:
        lay_out(site, package, points, **modules)
        importlib.invalidate_caches()

    yield call
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site)):
            del sys.modules[name]


@pytest.mark.slow
def test_a_spec_names_a_strategy_of_another_package(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_example(tmp_path / "site")
    arms = [{"name": "middle", "strategy": "middle-of-space", "models": 3}]
    spec = toy_spec(arms=arms).model_dump(mode="json")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    monkeypatch.setenv("PRIVTUNE_STORAGE", storage)

    def privtune(*arguments: str) -> str:
        done = cli(*arguments)
        assert done.code == 0, done.err
        return done.out

    with monkeypatch.context() as installed:
        installed.syspath_prepend(tmp_path / "site")
        rows = {row["name"]: row for row in json.loads(privtune("strategies", "--json"))}
        assert rows["middle-of-space"]["from"] == "privtune-example-strategies 1.0"
        assert rows["middle-of-space"]["requires"] == ["a task"]
        assert {rows[name]["from"] for name in ("fixed", "everything", "dpsgd")} == {"privtune"}
        privtune("study", "create", str(tmp_path / "spec.yaml"))
        privtune("study", "run", "toy", "--no-mlflow")
    # From here without the package: what was released and charged does not need it.
    del sys.modules["example_strategies"]
    with closing(Study("toy", storage)) as study:
        (release,), (plan,) = study.releases(), study.plans
        assert (release.strategy, len(release.trials)) == ("middle-of-space", 3)
        assert release.params["learning_rate"] == pytest.approx(0.5)
    with Ledger(storage) as ledger:
        (charge,) = ledger.charges("toy")
        assert charge.state == "settled"
        assert charge.event == plan.event == Composed((plan.training.event,) * 3)
        spent = ledger.spent("toy").epsilon
    assert 3.0 < spent <= 6.0
    assert spent == pytest.approx(epsilon(charge.event, 1e-5).epsilon)


BODY = """
from dataclasses import dataclass
from typing import ClassVar
from privtune.strategies import Needs
@dataclass(frozen=True, kw_only=True)
class Mine:
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "mine"
    needs: ClassVar[Needs] = Needs()
    arm: str
    def plan(self, context, *, epsilon): ...
    def run(self, plan, trials): yield
"""


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("", "AttributeError"),
        ("import no_such_module_at_all", "(No module named"),
        ("raise RuntimeError('line one.\\nline two.')", "RuntimeError: line one. line two"),
        ("def Mine(): ...", "must be a frozen dataclass"),
        (BODY.replace('"mine"', '"other"', 1), "registered under, name = 'mine'"),
        (BODY.replace('    summary: ClassVar[str] = "mine"\n', ""), "must have a summary"),
        (BODY.replace("    needs: ClassVar[Needs] = Needs()\n", ""), "must declare what it needs"),
        (BODY.replace("    arm: str\n", ""), "must have a field arm"),
        (BODY.replace("def plan", "def planned"), "must have the method plan"),
        (BODY.replace("trials): yield", "trials): ..."), "a method run that yields"),
        (BODY.replace("arm: str", "arm: 'Nowhere'"), "types that can be read"),
    ],
)
def test_a_package_that_cannot_be_used_is_one_sentence(
    install: Install, module: str, message: str
) -> None:
    install("bad-package", {"mine": "bad_module:Mine"}, bad_module=module)
    with pytest.raises(EntryPointError, match=r"bad-package 1\.0") as caught:
        make_strategy("mine", arm="a", options={})
    said = str(caught.value)
    assert message in said
    assert "\n" not in said
    assert ".." not in said
    assert said.endswith(".")
    (found,) = registered()
    assert (found.cls, found.problem) == (None, said)
    assert make_strategy("fixed", arm="a", options={}) == Fixed(arm="a")


def test_a_package_is_loaded_when_a_study_names_it(install: Install) -> None:
    install("good-package", {"mine": "good_module:Mine"}, good_module=BODY)
    make_strategy("fixed", arm="a", options={})
    make_strategy("hyfreedp", arm="a", options={})
    assert "good_module" not in sys.modules
    assert type(make_strategy("mine", arm="a", options={})).__module__ == "good_module"
    with pytest.raises(
        PrivTuneError, match="options of strategy 'mine' = 'x': it takes no options"
    ):
        make_strategy("mine", arm="a", options={"x": 1})
    with pytest.raises(PrivTuneError, match=r"must be one of .*, mine, .*papernot"):
        make_strategy("nobodys", arm="a", options={})


@pytest.mark.parametrize("name", ["fixed", "hyfreedp"])
def test_the_name_of_what_is_built_in_is_refused(
    install: Install, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = BODY.replace('"mine"', f'"{name}"', 1)
    install("clash", {name: "clashing:Mine"}, clashing=module)
    (found,) = registered()
    assert found.cls is None
    list_strategies()
    listed = " ".join(capsys.readouterr().out.split())
    assert f"{name} (from clash 1.0): {found.problem}" in listed
    assert f"Strategy '{name}' of clash 1.0 is refused: the name is built in" in found.problem
    assert type(make_strategy(name, arm="a", options={})).__module__.startswith("privtune.")
    assert "clashing" not in sys.modules


def test_a_name_that_two_packages_register_is_refused(install: Install) -> None:
    install("one", {"mine": "good_module:Mine"}, good_module=BODY)
    install("two", {"mine": "other_module:Mine"}, other_module=BODY)
    with pytest.raises(EntryPointError, match=r"of one 1.0 and two 1.0 is refused: .* twice"):
        make_strategy("mine", arm="a", options={})


METHODS_README = ROOT / "privtune" / "training" / "methods" / "README.md"


def test_the_methods_readme_adds_a_method(install: Install, tmp_path: Path) -> None:
    """Its example, registered as it says: planned, trained, charged and read back like those built in."""
    code, points = re.findall(
        r"```(?:python|toml)\n(.*?)```", METHODS_README.read_text(), re.DOTALL
    )
    given = tomllib.loads(textwrap.dedent(points))["project"]["entry-points"]["privtune.methods"]
    install("my-package", given, group="privtune.methods", my_package=code)
    (found,) = registered()
    assert (found.name, found.source, found.problem) == ("sign-descent", "my-package 1.0", "")
    assert "sign-descent" in METHODS
    assert "sign-descent" not in list(METHODS)
    options = [row["name"] for row in describe("sign-descent")["options"]]
    assert options[-2:] == ["max_grad_norm", "clipping"]
    rate = {"parameters": {"learning_rate": 0.1}}
    arms = [
        {"name": "signs", "strategy": "sign-descent", **rate},
        {
            "name": "search",
            "strategy": "papernot-steinke",
            "method": "sign-descent",
            "mean_runs": 2,
        },
    ]
    space = {"learning_rate": {"type": "float", "low": 0.01, "high": 0.1}}
    with closing(
        Study.create(toy_spec(arms=arms, space=space), f"sqlite:///{tmp_path / 'p.db'}")
    ) as study:
        release, _ = study.run()
        plan = study.plans[0]
    assert release.strategy == plan.training.method.name == "sign-descent"
    assert Plan.from_dict(plan.to_dict()).digest() == plan.digest()
    plain = make_strategy("sign-descent", arm="a", options={**rate, "max_grad_norm": 0.5})
    assert plan_arm(plain, context({}), epsilon=2.0).training.method.max_grad_norm == 0.5
    with pytest.raises(PrivTuneError, match="method 'sign-descent' also needs learning_rate"):
        plan_arm(make_strategy("sign-descent", arm="a", options={}), context({}), epsilon=2.0)


METHOD = """
from dataclasses import dataclass
from typing import ClassVar
from privtune.training.methods import Method
@dataclass(frozen=True)
class Mine(Method):
    noise_multiplier: float
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "mine"
    def init(self, params, candidates): ...
    def update(self, state, oracle): ...
"""


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("mine", METHOD.replace("(Method)", ""), "must inherit from"),
        ("adadp", METHOD.replace('"mine"', '"adadp"', 1), "the name is built in"),
    ],
)
def test_a_method_that_cannot_be_used_is_one_sentence(
    install: Install, name: str, module: str, message: str
) -> None:
    install("bad", {name: "bad_method:Mine"}, group="privtune.methods", bad_method=module)
    (found,) = registered()
    assert found.cls is None
    assert found.problem.startswith(f"Method '{name}' of bad 1.0 ")
    assert message in found.problem
    if name == "mine":
        with pytest.raises(EntryPointError, match=message):
            make_strategy("mine", arm="a", options={})


@dataclass(frozen=True, kw_only=True)
class Undeclared(PapernotSteinke):
    needs: ClassVar[Needs] = Needs(score=True)


@dataclass(frozen=True, kw_only=True)
class AdamAlone(PapernotSteinke):
    needs: ClassVar[Needs] = Needs(score=True, independent=True, methods=("dp-adam",))


@dataclass(frozen=True, kw_only=True)
class Silent(PapernotSteinke):
    needs = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Returning(PapernotSteinke):
    def run(self, plan: Plan, trials: Round) -> Any:
        return Outcome(None)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Returning(mean_runs=2), "Method run of Returning is no generator: it must yield"),
        (Undeclared(mean_runs=2), "seals its trials"),
        (Silent(mean_runs=2), "Silent does not declare what it needs"),
        (AdamAlone(mean_runs=2), "method of arm .* = 'dpsgd': must be one of dp-adam"),
    ],
)
def test_a_plan_that_belies_its_declaration_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(PrivTuneError, match=message):
        plan_arm(strategy, context(BOTH), epsilon=2.0)


def test_a_needed_hyperparameter_is_missed_while_planning() -> None:
    options = {"method": "hyfreedp", "mean_runs": 3}
    with pytest.raises(StrategyError, match="computes with a number called learning_rate") as said:
        plan_arm(
            make_strategy("subsampled-tuning", arm="a", options=options), context({}), epsilon=2.0
        )
    assert str(said.value).count(".") == 1
    kept = make_strategy("subsampled-tuning", arm="a", options={**options, "extrapolation": "keep"})
    assert plan_arm(kept, context({}), epsilon=2.0).arm == "a"
    words = {**BOTH, "learning_rate": {"type": "categorical", "choices": [0.1, "fast"]}}
    with pytest.raises(InvalidInputError, match="learning_rate = 'fast'"):
        plan_arm(
            make_strategy("subsampled-tuning", arm="a", options={}), context(words), epsilon=2.0
        )
