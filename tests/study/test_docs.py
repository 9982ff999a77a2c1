"""The spec that the documentation shows is one that can be read."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from privtune.errors import PrivTuneError
from privtune.numbers import show_epsilon
from privtune.strategies.describe import plan_line
from privtune.study import StudySpec, plan_study
from privtune.tasks import get_task

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_spec_is_a_spec() -> None:
    page = (DOCS / "spec.md").read_text("utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    table, paid = map(yaml.safe_load, blocks("guide/tables.md", "yaml"))
    assert get_task(table["task"]).input_shape == (1 + 1 + 3 + 1 + 5,)
    # The second is what stages pay for in place of the first's public bounds.
    columns = {**table["task"]["columns"], **paid["task"]["columns"]}
    task = {**table["task"], **paid["task"], "columns": columns}
    arms = [{"name": "a", "strategy": "hyfreedp"}]
    budget = {"name": "paid", "epsilon": 2.0, "delta": 1e-5}
    plans = plan_study(
        StudySpec.parse(
            {
                "name": "paid",
                "task": task,
                "stages": paid["stages"],
                "budget": budget,
                "arms": arms,
                "epochs": 2,
                "expected_batch_size": 64,
            }
        )
    )
    assert plans
    spec = StudySpec.parse(yaml.safe_load(block))
    strategies = [arm.to_strategy() for arm in spec.arms]
    assert [s.arm for s in strategies] == [arm.name for arm in spec.arms]
    context = spec.planning_context()
    # Each arm can be planned at a generous target: its options exist and fit together.
    for strategy in strategies:
        assert strategy.plan(context, epsilon=6.0).arm == strategy.arm


BASE = {
    "name": "refused",
    "task": "digits-mlp",
    "budget": {"name": "digits", "epsilon": 8.0, "delta": 1e-5},
    "space": {
        "learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True},
        "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
    },
    "epochs": 20,
    "expected_batch_size": 64,
}


def refusals() -> list[tuple[str, str]]:
    """The fields of a spec and the text that they are refused with, as the guide has them."""
    page = (DOCS / "guide" / "refusals.md").read_text("utf-8")
    return re.findall(r"```yaml\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)


def test_the_guide_s_refusals_are_there() -> None:
    assert len(refusals()) == 11


@pytest.mark.parametrize(("fields", "printed"), refusals())
def test_a_documented_refusal_is_what_is_printed(fields: str, printed: str) -> None:
    with pytest.raises(PrivTuneError) as caught:
        plan_study(StudySpec.parse({**BASE, **yaml.safe_load(fields)}))
    assert str(caught.value) == " ".join(printed.split())


def test_what_the_guide_plans_is_what_is_planned() -> None:
    page = (DOCS / "guide" / "selection.md").read_text("utf-8")
    spec, printed = re.findall(r"```(?:yaml|text)\n(.*?)```", page, re.DOTALL)[:2]
    planned = plan_study(StudySpec.parse(yaml.safe_load(spec)))
    words = " ".join(printed.split())
    for plan, cost in zip(planned.plans, planned.guarantees, strict=True):
        assert plan_line(plan, cost) in words
    assert f"together: ε = {show_epsilon(planned.total.epsilon, 4)} at" in words


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


def test_the_guide_s_program_takes_25_lines_and_compiles() -> None:
    (code,) = blocks("guide/own-model.md", "python")
    assert len([line for line in code.splitlines() if line]) <= 25
    compile(code, "own-model.md", "exec")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    return [
        code
        for language, code in re.findall(
            r"^ *```(\w+)\n(.*?)^ *```", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
        if language in languages
    ]


PAGES = sorted(f"guide/{page.name}" for page in (DOCS / "guide").glob("*.md"))


# What no test runs as it stands, and why; whatever else is Python on the site is run below.
NOT_RUN = {
    "by_unit(": "reads a clinic's table: tests/tasks/test_units.py groups made-up ones",
    "norms_of(Bilinear)": "its layer and the rule are in tests/training/engine/test_rules.py",
    "AutoModelForSequenceClassification": "needs a model's files: as below, but for its head",
}


@pytest.mark.slow
def test_the_python_of_the_site_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's first program, then each other block in the place of its own arm."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("guide/own-model.md", "python")
    exec(compile(program, "own-model.md", "exec"), {})
    assert re.search(r"test accuracy [\d.]+% \[", capsys.readouterr().out)
    ran = 0
    for code in [code for page in PAGES for code in blocks(page, "py")]:
        if any(mark in code for mark in NOT_RUN):
            continue
        ran += 1
        (tmp_path / str(ran)).mkdir()
        monkeypatch.chdir(tmp_path / str(ran))
        exec(compile(program.split("release = ")[0] + code, "guide", "exec"), {})
    assert ran == 6


@pytest.mark.slow
def test_the_language_model_of_the_guide_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model of random weights, a tokenizer of few words, and a tenth of the texts."""
    tokenizers = pytest.importorskip("tokenizers")
    hf = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    words = [f"word{number}" for number in range(20)]
    known = {word: number for number, word in enumerate(["<pad>", "<unk>", *words])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", eos_token="<pad>"
    )
    fast.save_pretrained("gpt2")
    sizes = hf.GPT2Config(
        vocab_size=22, n_positions=64, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    hf.GPT2LMHeadModel(sizes).save_pretrained("gpt2")
    draw = random.Random(0)
    for name, count in (("notes", 180), ("public", 40)):
        lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(count)]
        Path(f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    (program,) = blocks("guide/language-models.md", "python")
    program = program.replace('"train": 1500, "validation": 300', '"train": 150, "validation": 30')
    program = program.replace("expected_batch_size=100", "expected_batch_size=20")
    names: dict[str, Any] = {}
    exec(compile(program, "language-models.md", "exec"), names)
    release = names["release"]
    assert "noised validation perplexity" in capsys.readouterr().out
    assert 10.0 < release.utility["test_perplexity"] < 40.0  # of 20 words, drawn evenly
    assert all("c_attn" in name for name in release.shapes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Opacus', about itself
def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A net of one's own, which fits a screen and prints what it printed; then the guide's script."""
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    (first,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (second,) = blocks("guide/declared.md", "python")
    (shown,) = re.findall(r"^```text\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert len(first.splitlines()) <= 40
    assert second.count("  # +") == 5
    assert second.count("  # ~") == 1
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert [re.sub(r"[\d.]+", "0", line) for line in printed.splitlines()] == [
        re.sub(r"[\d.]+", "0", line) for line in shown.splitlines()
    ]
    exec(compile(second, "README.md", "exec"), names)
    assert "checked: Opacus sampled the declared data set" in capsys.readouterr().out


def test_the_spec_and_the_commands_of_the_readme_are_right() -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    (spec,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    demo = (DOCS.parent / "privtune/tasks/digits-demo.yaml").read_text("utf-8")
    assert yaml.safe_load(spec) == yaml.safe_load(demo)
    assert {"make demo", "make test"} <= {
        line.split("  #")[0].strip() for line in readme.splitlines()
    }


def test_no_other_python_is_on_the_site() -> None:
    """A block that is new is run by a test, or stands in the list with a reason."""
    pages = {page.name for page in DOCS.glob("*.md") if blocks(page.name, "python", "py")}
    assert pages == {"certificates.md"}  # run by tests/ledger/test_certificate_page.py
    everything = "".join("".join(blocks(page, "python", "py")) for page in PAGES)
    assert all(everything.count(mark) == 1 for mark in NOT_RUN)


@pytest.mark.parametrize(
    "spec",
    [spec for page in PAGES for spec in blocks(page, "yaml") if spec.startswith("name:")],
)
def test_the_guide_s_specs_can_be_planned(spec: str) -> None:
    assert plan_study(StudySpec.parse(yaml.safe_load(spec))).plans


def test_the_commands_of_the_site_exist() -> None:
    """Every `privtune ...` of a block of shell names a command, and options that it has."""
    from typer.main import get_command

    from privtune.cli._app import mount

    root = get_command(mount())
    lines = [
        line.strip().split("#")[0]
        for page in [*(page.name for page in DOCS.glob("*.md")), *PAGES]
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().startswith("privtune ")
    ]
    assert len(lines) > 10
    for line in lines:
        command, words = root, line.split()[1:]
        while commands := getattr(command, "commands", None):
            assert words[0] in commands, line
            command, words = commands[words[0]], words[1:]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("name", ["fair", "visits"])
def test_specs_among_the_examples_are_specs(name: str) -> None:
    spec = StudySpec.from_file(DOCS / "examples" / f"{name}.yaml")
    context = spec.planning_context()
    for arm in spec.arms:
        assert arm.to_strategy().plan(context, epsilon=1.0).arm == arm.name
    assert context.plan_report(1.0) is not None
