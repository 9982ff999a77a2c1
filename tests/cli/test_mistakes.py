"""Mistakes that come naturally at the command line: each ends in one true sentence that helps.

Each answer names what was wrong and what to write, costs nothing and shows no record. Where it names a
command, ``then`` is that command, and works. Mistakes of Python stand in ``tests/api/test_mistakes.py``.
"""

from __future__ import annotations

import gzip
import io
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privtune.ledger import Ledger
from privtune.study import Study, StudySpec
from tests.cli.conftest import Cli

MARK = "Zq7"  # in every record, and in none of our sentences
COLUMNS = """\
    age: [18, 100]
    visits: [0, 50]
    town: {categories: [north, south]}
"""
SIZES = """\
  train: 160
  validation: 40
  test: 40
"""
TASK = f"""\
task:
  type: tabular
  path: people.csv
  target: left
  classes: [stays, leaves]
  columns:
{COLUMNS}{SIZES}"""
BUDGET = "budget: {name: people, epsilon: 4.0, delta: 1.0e-5}\n"
RATE = "{type: float, low: 0.05, high: 5.0, log: true}"
SPACE = f"space:\n  learning_rate: {RATE}\n"
PARAMETERS = "{learning_rate: 0.5, max_grad_norm: 1.0}"
PLAIN = f"  - {{name: plain, strategy: fixed, parameters: {PARAMETERS}}}\n"
CHOSEN = "  - {name: chosen, strategy: papernot-steinke, mean_runs: 3, parameters: {max_grad_norm: 1.0}}\n"
END = "epochs: 2\nexpected_batch_size: 20\n"
SHORT = f"name: churn\n{TASK}{BUDGET}arms:\n{PLAIN}{END}"
SEARCHING = f"name: churn\n{TASK}{BUDGET}{SPACE}arms:\n{PLAIN}{CHOSEN}{END}"


def table(count: int = 240) -> str:
    rows = (
        f"{MARK}{n},{18 + n % 80},{n % 50},{'north' if n % 2 else 'south'},"
        f"{'leaves' if n % 50 > 25 else 'stays'}"
        for n in range(count)
    )
    return "\n".join(["who,age,visits,town,left", *rows, ""])


def as_parquet() -> bytes:
    file = io.BytesIO()
    header, *lines = table().split()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@dataclass(frozen=True)
class Mistake:
    """A command as it is typed, what its answer names, and the files that it meets."""

    name: str
    words: str
    says: tuple[str, ...]
    spec: str = SHORT
    files: dict[str, bytes | str | None] = field(default_factory=dict)
    then: str = ""
    code: int = 1


def spec(name: str, old: str, new: str, *says: str) -> Mistake:
    """A spec that is written wrong in one place."""
    assert old in SEARCHING, old
    return Mistake(name, "study run churn.yaml", says, spec=SEARCHING.replace(old, new))


def data(name: str, *says: str, is_now: bytes | str | None = "", **of_spec: str) -> Mistake:
    """A table that is not what a spec says, or a spec that is not what a table says."""
    text, files = SHORT, {} if of_spec else {"people.csv": is_now}
    for old, new in zip(*[iter(of_spec.values())] * 2, strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return Mistake(name, "study run churn.yaml", says, spec=text, files=files)


A_BUDGET = "Write budget: {name: clinic, epsilon: 4.0, delta: 1.0e-5}."
A_LAW = "{type: float, low: 0.05, high: 5.0, log: true}"
A_WORKBOOK = b"PK\x03\x04" + bytes(99)

SPECS = [
    spec("no budget", BUDGET, "", "budget: is missing", A_BUDGET),
    spec("a number for the budget", BUDGET, "budget: 4.0\n", "not 4.0", A_BUDGET),
    spec("terms outside of the budget", BUDGET, "budget: people\n", "not 'people'", A_BUDGET),
    spec("delta at the top", BUDGET, f"{BUDGET}delta: 1.0e-5\n", "It stands within budget: {"),
    spec("the target at the top", BUDGET, f"{BUDGET}target: left\n", "It stands within task: {"),
    spec("epsilon with its letter", "epsilon: 4.0", "epsilon: ε=4", "a number, not 'ε=4'"),
    spec("delta as a fraction", "1.0e-5", "1/200", "must be a number, not '1/200'"),
    spec("delta above one over n", "1.0e-5", "0.01", "1/240 = 0.0042", "such as 0.0001"),
    spec(
        "another word for replace-one",
        "1.0e-5}",
        "1.0e-5, adjacency: substitution}",
        "mean replace-one?",
    ),
    spec("no task", TASK, "", "task is missing", "privtune tasks", "privtune study draft"),
    spec(
        "a misspelt metric", "epochs: 2", "scoring: {metric: acuracy}\nepochs: 2", "mean accuracy?"
    ),
    spec("sensitivity", "epochs: 2", "report: sensitivity\nepochs: 2", "mean balanced_accuracy?"),
    spec("rmse", "epochs: 2", "report: rmse\nepochs: 2", "mean mse?"),
    spec("Bayesian optimisation", "papernot-steinke, mean_runs: 3", "bayesian", "mean everything?"),
    spec(
        "a sampler as strategy", "papernot-steinke, mean_runs: 3", "TPESampler", "mean everything?"
    ),
    spec(
        "a sampler by its class",
        "papernot-steinke, mean_runs: 3",
        "everything, trials: 3, sampler: TPESampler",
        "mean tpe?",
    ),
    spec(
        "a sampler that looks at scores",
        "mean_runs: 3",
        "mean_runs: 3, sampler: tpe",
        "Use sampler: random",
        "the strategy 'everything'",
    ),
    spec("trials of a selection", "mean_runs: 3", "n_trials: 20", "'n_trials'", "mean mean_runs?"),
    spec("suggest_float as a type", "type: float", "type: suggest_float", "mean float?"),
    spec("suggest_float as a field", RATE, "{suggest_float: [0.05, 5.0]}", f"{A_LAW} is one"),
    spec("a range as a list", RATE, "[0.05, 5.0]", "not a list", f"Write learning_rate: {A_LAW}"),
    spec(
        "min and max", RATE, "{type: float, min: 0.05, max: 5.0}", "mean high for max, low for min?"
    ),
    spec("a step on a log scale", "log: true", "log: true, step: 0.1", "Leave one of the two out"),
    spec("low above high", RATE, "{type: float, low: 5.0, high: 0.05}", "Exchange the two"),
    spec(
        "choices as a text",
        RATE,
        '{type: categorical, choices: "0.1, 0.5"}',
        "brackets: [0.1, 0.5]",
    ),
    spec("values for choices", RATE, "{type: categorical, values: [0.1]}", "mean choices?"),
    spec("a scale", "log: true", "scale: log", "mean log?"),
    spec("a fixed value in the space", RATE, "0.5", "not 0.5", "in the parameters of an arm"),
    spec("epochs of none", "epochs: 2", "epochs: 0", "epochs: must be above 0 or 'auto', not 0"),
    spec(
        "epochs in words", "epochs: 2", "epochs: 20 passes", "a number or 'auto', not '20 passes'"
    ),
    spec(
        "several epochs", "epochs: 2", "epochs: [10, 20]", "must be a number or 'auto', not a list"
    ),
    spec("a batch above the data", "size: 20", "size: 512", "= 512", "training records, 160"),
    spec("batch_size", "expected_batch_size", "batch_size", "mean expected_batch_size?"),
    spec("two arms of one name", "name: chosen", "name: plain", "two arms are called plain"),
    spec(
        "a blank in a name",
        "name: chosen",
        "name: my arm",
        "arms.1.name",
        "letters, digits",
        "'my arm'",
    ),
    spec(
        "arms as a mapping",
        f"{PLAIN}{CHOSEN}",
        "  plain: {strategy: fixed}\n",
        "not a mapping",
        "- {name: plain",
    ),
    spec(
        "arms as names",
        f"arms:\n{PLAIN}{CHOSEN}",
        "arms: [fixed]\n",
        "not 'fixed'",
        "- {name: plain",
    ),
    spec(
        "parameters of no name",
        f"parameters: {PARAMETERS}",
        PARAMETERS[1:-1],
        f"parameters: {PARAMETERS}",
    ),
    spec("parameters as a list", PARAMETERS, "[0.5, 1.0]", "must be a mapping of names to values"),
    spec("a tab", "  type: tabular", "\ttype: tabular", "line 3, is not YAML", "blanks alone"),
    spec("no blank after a colon", "epochs: 2", "epochs:2", "a colon needs a blank after it"),
    spec("a quotation that stays open", ": left", ": 'left", "line 5,", "a quotation begins there"),
    spec("a field twice", "epochs: 2", "epochs: 2\nepochs: 3", "line 21,", "epochs stands twice"),
    spec(
        "shares for sizes",
        "train: 160",
        "train: 0.7",
        "task.train = 0.7",
        "how many records you expect",
    ),
    spec(
        "a number of classes",
        "[stays, leaves]",
        "2",
        "task.classes = 2",
        "a list of at least 2 values",
    ),
    spec("columns as a list", f"\n{COLUMNS}", " [age, visits]\n", "{age: [18, 100]} is one"),
    spec(
        "bounds the wrong way round",
        "[18, 100]",
        "[100, 18]",
        "task.columns.age",
        "Exchange the two",
    ),
    spec("a type for bounds", "[18, 100]", "numeric", "[low, high]", "{categories: [...]}"),
    spec(
        "an accelerator's other name", "epochs: 2", "device: gpu\nepochs: 2", "'gpu'", "mean cuda?"
    ),
    spec(
        "a noise multiplier",
        "epochs: 2",
        "noise: 1.1\nepochs: 2",
        "follows from ε",
        "plain or secure",
    ),
    spec(
        "a word for a seed", "epochs: 2", "seed: random\nepochs: 2", "a whole number, not 'random'"
    ),
]

MISFIT = ("before anything was charged", "do not fit what is declared", "--curator")
TABLES = [
    data(
        "a misspelt column", "people.csv lacks", "visit.", "mean visits?", a="visits:", b="visit:"
    ),
    data("a target that is not there", "people.csv lacks", "churned", a="left", b="churned"),
    data("labels of another spelling", *MISFIT, a="[stays, leaves]", b="[0, 1]"),
    data("words as numbers", *MISFIT, a="{categories: [north, south]}", b="[0, 1]"),
    data(
        "far fewer records",
        *MISFIT,
        a=SIZES,
        b=SIZES.replace("0\n", "000\n"),
        c="e: 20",
        d="e: 1000",
    ),
    data("no file", "people.csv is not there", is_now=None),
    data("an empty file", "people.csv lacks", "Its first line must name the columns"),
    data("a header alone", *MISFIT, is_now=table(0)),
    data("one record", *MISFIT, is_now=table(1)),
    data("gaps alone", *MISFIT, is_now=re.sub(r",\d+,\d+,\w+,\w+", ",NaN,NaN,,", table())),
    data("Parquet called CSV", "is Parquet", "end in .parquet", is_now=as_parquet()),
    data(
        "a compressed file called CSV",
        "compressed: unpack it",
        is_now=gzip.compress(table().encode()),
    ),
    data(
        "UTF-16",
        "people.csv is in UTF-16",
        "save it as CSV in UTF-8",
        is_now=table().encode("utf-16"),
    ),
    data("a workbook called CSV", "save its sheet as CSV", is_now=A_WORKBOOK),
    data("a folder", "it is a folder", a="people.csv", b="."),
    Mistake(
        "CSV called Parquet",
        "study run churn.yaml",
        ("is no Parquet file", "end in .csv"),
        spec=SHORT.replace("people.csv", "people.parquet"),
        files={"people.parquet": table()},
    ),
    Mistake(
        "a compressed table",
        "study run churn.yaml",
        ("people.csv.gz is compressed", "unpack it"),
        spec=SHORT.replace("people.csv", "people.csv.gz"),
        files={"people.csv.gz": b"\x1f\x8b"},
    ),
    Mistake(
        "a draft of a target that is not there",
        "study draft people.csv --target churned",
        ("churned",),
    ),
    Mistake(
        "a draft of a workbook",
        "study draft people.xlsx --target left",
        ("save its sheet as CSV",),
        files={"people.xlsx": A_WORKBOOK},
    ),
    Mistake(
        "a draft over a spec",
        "study draft people.csv --target left --to churn.yaml",
        ("'churn.yaml'", "a file that is not there yet"),
    ),
    Mistake(
        "a draft of no target", "study draft people.csv", ("Missing option '--target'",), code=2
    ),
    Mistake(
        "the table for the spec",
        "study plan people.csv",
        ("people.csv is no study spec", "privtune study draft"),
        then="study draft people.csv --target left --to drafted.yaml",
    ),
]

# In an empty storage.
FIRST = [
    Mistake(
        "run before create", "study run churn", ("no study named 'churn'", "privtune study create")
    ),
    Mistake(
        "compare before create",
        "study compare churn",
        ("no study named 'churn'", "privtune study create"),
    ),
    Mistake("plan of a name", "study plan churn", ("Cannot read churn", "mean churn.yaml?")),
    Mistake(
        "a misspelt spec", "study plan chrun.yaml", ("Cannot read chrun.yaml", "mean churn.yaml?")
    ),
    Mistake(
        "negative ε",
        "budget create x --epsilon -1 --delta 1e-5",
        ("-1.0", "a finite number above 0"),
    ),
    Mistake(
        "δ without its minus", "budget create x --epsilon 4 --delta 1e5", ("100000.0", "below 1")
    ),
    Mistake("no δ", "budget create x --epsilon 4", ("Missing option '--delta'",), code=2),
    Mistake(
        "another database",
        "study list --storage mysql://h/d",
        ("SQLite or PostgreSQL", "sqlite:///"),
    ),
    Mistake(
        "a folder that is not there",
        "study create churn.yaml --storage sqlite:///data/p.db",
        ("data does not exist", "Make it first"),
    ),
    Mistake(
        "no server",
        "study list --storage postgresql://127.0.0.1:1/privtune",
        ("refused", "start the server, or correct the address"),
    ),
    Mistake(
        "two slashes",
        "study list --storage sqlite://p.db",
        ("no database URL", "sqlite:///privtune.db"),
    ),
    Mistake("a folder for the database", "study list --storage .", ("is a folder", "privtune.db")),
    Mistake(
        "an option before the command", "--storage p.db study list", ("after the command",), code=2
    ),
    Mistake("no group", "run churn.yaml", ("'run'", "mean privtune study run?"), code=2),
    Mistake("Optuna's command", "study optimize churn.yaml", ("mean privtune study run?",), code=2),
    Mistake(
        "a command of another group",
        "study charges people",
        ("mean privtune budget charges?",),
        code=2,
    ),
    Mistake(
        "ε of a run",
        "study run churn.yaml --epsilon 3",
        ("epsilon stands in the study's spec",),
        code=2,
    ),
    Mistake(
        "Optuna's best trial",
        "best churn",
        ("'best'", "Did you mean privtune study compare?"),
        code=2,
    ),
    Mistake("jobs in a word", "study run churn.yaml --jobs all", ("--jobs", "integer"), code=2),
    Mistake(
        "no GPU", "study run churn.yaml --device cuda", ("device = 'cuda'", "Give auto or cpu")
    ),
    Mistake(
        "a sample above the records",
        "account dpsgd --records 160 --batch 512 --noise 1 --epochs 2 --delta 1e-5",
        ("batch = 512", "the number of records, 160"),
    ),
    Mistake(
        "noise and ε",
        "account dpsgd --records 160 --batch 20 --noise 1 --epsilon 3 --epochs 2 --delta 1e-5",
        ("Give --noise", "or --epsilon", "Both were given"),
    ),
    Mistake(
        "a number for an event",
        "account epsilon 1.1 --delta 1e-5",
        ("EVENT.json = '1.1'", "privtune account dpsgd --help"),
        then="account dpsgd --help",
    ),
    Mistake(
        "a near strategy",
        "strategies papernot",
        ("mean papernot-steinke?",),
        then="strategies papernot-steinke",
    ),
    Mistake(
        "no repetition",
        "study rehearse churn.yaml --repeats 0",
        ("--repeats", "equal to 1"),
        code=2,
    ),
]

# Where a study is created, and nothing is charged.
CREATED = [
    Mistake(
        "compare of a spec",
        "study compare churn.yaml",
        ("'churn.yaml'", "mean churn?"),
        then="study compare churn",
    ),
    Mistake(
        "create twice",
        "study create churn.yaml",
        ("'churn' exists already", "privtune study run churn"),
    ),
    Mistake(
        "a near study", "study show chrun", ("'chrun'", "mean churn?"), then="study show churn"
    ),
    Mistake(
        "a budget for a study",
        "study show people",
        ("privtune budget show people",),
        then="budget show people",
    ),
    Mistake(
        "a study for a budget",
        "budget show churn",
        ("privtune study show churn",),
        then="study show churn",
    ),
    Mistake(
        "a near budget",
        "budget show peple",
        ("privtune budget list", "mean people?"),
        then="budget list",
    ),
    Mistake(
        "predict before the run",
        "predict churn plain people.csv",
        ("not released yet", "privtune study run churn"),
    ),
    Mistake(
        "export before the run",
        "model export churn plain --to model",
        ("not released yet", "privtune study run churn"),
    ),
    Mistake(
        "the UI before the run",
        "ui --no-browser",
        ("Nothing has been logged", "privtune study run NAME"),
    ),
    Mistake(
        "other terms of a budget",
        "budget create people --epsilon 8 --delta 1e-5",
        ("epsilon is 4.0, not 8.0",),
    ),
    Mistake(
        "a budget that is smaller",
        "study create churn.yaml",
        ("epsilon = 4.0", "says epsilon = 8.0"),
        spec=SHORT.replace("name: churn", "name: large").replace("epsilon: 4.0", "epsilon: 8.0"),
    ),
    Mistake("no charge of this number", "budget void people-7 --yes", ("no charge 7",)),
    Mistake(
        "a charge of no note",
        "budget charge people event.json",
        ("--note is missing", "what is released, and by which tool"),
    ),
    Mistake(
        "a number to charge", "budget charge people 0.5 --note x", ("'0.5'", '{"type": "gaussian"')
    ),
    Mistake(
        "a page of no name",
        "study compare churn --html",
        ("'--html' requires an argument",),
        code=2,
    ),
    Mistake(
        "a chart of another kind", "study compare churn --plot x.gif", ("x.gif", ".png"), code=2
    ),
]

# Where a study has run.
RELEASED = [
    Mistake(
        "predict of another table",
        "predict churn plain other.csv",
        ("no column visits", "takes the columns age"),
        files={"other.csv": f"age,town\n{MARK}9,{MARK}\n"},
    ),
    Mistake(
        "a near arm",
        "predict churn plian people.csv",
        ("no arm 'plian'", "plain (released)", "mean plain?"),
    ),
    Mistake("predict of no arm", "predict churn people.csv", ("Missing argument 'file'",), code=2),
    Mistake(
        "predictions over the table",
        "predict churn plain people.csv --to people.csv",
        ("another file",),
    ),
    Mistake("export into a folder", "model export churn plain --to there", ("there", "new")),
    Mistake(
        "a charge of a study",
        "budget settle people-1",
        ("belongs to study", "privtune study run churn"),
    ),
    Mistake(
        "a charge that is spent",
        "budget void people-1 --yes",
        ("people-1 is settled", "only a reserved"),
    ),
    Mistake(
        "a changed spec",
        "study run churn.yaml",
        ("other epochs", "privtune study run churn", "privtune study delete churn"),
        spec=SHORT.replace("epochs: 2", "epochs: 3"),
        then="study run churn",
    ),
    Mistake(
        "a spent budget",
        "study run churn.yaml",
        ("has no room for this charge", "is left"),
        spec=SHORT.replace("name: churn", "name: again"),
    ),
    Mistake(
        "the UI before a sync", "ui --no-browser --study churn", ("privtune study sync churn",)
    ),
]


@contextmanager
def no_other_way() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "PRIVTUNE_STORAGE", "PRIVTUNE_CURATOR"):
            patch.delenv(name, raising=False)
        yield patch


def folder_of(path: Path) -> Path:
    (path / "churn.yaml").write_text(SHORT)
    (path / "people.csv").write_text(table())
    return path


def created(path: Path) -> Study:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder_of(path))
        return Study.create(
            StudySpec.from_file(Path("churn.yaml")), f"sqlite:///{path}/privtune.db"
        )


@pytest.fixture(scope="module")
def of_a_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("created")
    created(path).close()
    return path


@pytest.fixture(scope="module")
def of_a_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("released")
    (path / "there").mkdir()
    (path / "there" / "notes.txt").write_text("mine")
    with pytest.MonkeyPatch.context() as patch, closing(created(path)) as study:
        patch.chdir(path)
        study.run()
    return path


def charges(folder: Path) -> int:
    if not (folder / "privtune.db").exists():
        return 0
    with Ledger(f"sqlite:///{folder / 'privtune.db'}") as ledger:
        return sum(len(ledger.charges(budget.name)) for budget in ledger.budgets())


def answer(mistake: Mistake, folder: Path, cli: Cli) -> str:
    """Make a mistake in a folder; return the sentence that answers it."""
    folder_of(folder)
    (folder / "churn.yaml").write_text(mistake.spec)
    for name, content in mistake.files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    before = charges(folder)
    with no_other_way() as patch:
        patch.chdir(folder)
        done = cli(*mistake.words.split())
        assert done.code == mistake.code, done
        said = done.err.splitlines()[-1]
        for words in mistake.says:
            assert words in said, said
        assert "Traceback" not in done.err
        assert MARK not in done.out + done.err, "a record"
        assert len(said) > 20
        assert not re.search(r"(?<!\.)\.\.(\s|$)", said), said
        assert charges(folder) == before
        if mistake.then:
            command = " ".join(mistake.then.split()[:2])
            assert "mean " in said or f"privtune {command}" in said, said
            again = cli(*mistake.then.split())
            assert again.code == 0, again
            assert MARK not in again.out + again.err
    return said


def named(mistake: Mistake) -> str:
    return mistake.name


@pytest.mark.parametrize("mistake", [*SPECS, *TABLES, *FIRST], ids=named)
def test_a_mistake_in_an_empty_storage(mistake: Mistake, tmp_path: Path, cli: Cli) -> None:
    answer(mistake, tmp_path, cli)


@pytest.mark.parametrize("mistake", CREATED, ids=named)
def test_a_mistake_where_a_study_is_created(mistake: Mistake, of_a_study: Path, cli: Cli) -> None:
    answer(mistake, of_a_study, cli)


@pytest.mark.parametrize("mistake", RELEASED, ids=named)
def test_a_mistake_where_a_study_has_run(mistake: Mistake, of_a_release: Path, cli: Cli) -> None:
    answer(mistake, of_a_release, cli)


def test_a_busy_port_is_said_before_a_server_is_started(tmp_path: Path, cli: Cli) -> None:
    files = tmp_path / "privtune-artifacts"
    files.mkdir(mode=0o700)
    (files / "mlflow.db").touch()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        mistake = Mistake(
            "", f"ui --no-browser --port {port}", (f"Port {port} cannot be had", "--port 5001")
        )
        answer(mistake, tmp_path, cli)


def test_a_closed_budget_admits_nothing(tmp_path: Path, cli: Cli) -> None:
    created(tmp_path).close()
    at = ("--storage", f"sqlite:///{tmp_path}/privtune.db")
    assert cli("budget", "close", "people", *at).code == 0
    answer(
        Mistake("", "study run churn", ("'people' was closed", "admits no charge")), tmp_path, cli
    )


def test_a_release_is_called_as_the_answer_says(tmp_path: Path, cli: Cli) -> None:
    """From predict without a run, by the command that the answer names, to predictions."""
    created(tmp_path).close()
    said = answer(
        Mistake("", "predict churn plain people.csv", ("not released yet",)), tmp_path, cli
    )
    command = re.search(r"privtune (study run churn)", said)
    assert command is not None
    with no_other_way() as patch:
        patch.chdir(tmp_path)
        assert cli(*command[1].split(), "--no-mlflow").code == 0
        assert cli("predict", "churn", "plain", "people.csv", "--to", "found.csv").code == 0


def test_a_misspelt_path_is_corrected_in_the_spec(tmp_path: Path, cli: Cli) -> None:
    wrong = (
        "poeple.csv is not there",
        "correct its spec and run that file",
        "privtune study delete churn",
    )
    text = SHORT.replace("people.csv", "poeple.csv")
    answer(Mistake("", "study run churn.yaml --no-mlflow", wrong, spec=text), tmp_path, cli)
    (tmp_path / "churn.yaml").write_text(SHORT)
    with no_other_way() as patch:
        patch.chdir(tmp_path)
        done = cli("study", "run", "churn.yaml", "--no-mlflow")
    assert done.code == 0, done
    assert "has changed: task. Nothing had been charged, so the study is planned again" in done.err
    assert charges(tmp_path) == 1


def test_the_curator_is_told_why_records_do_not_fit(tmp_path: Path, cli: Cli) -> None:
    """The same with --curator, as the answer says, names the column."""
    wrong = data("", *MISFIT, a="{categories: [north, south]}", b="[0, 1]")
    answer(wrong, tmp_path, cli)
    with no_other_way() as patch:
        patch.chdir(tmp_path)
        done = cli(*wrong.words.split(), "--curator")
    assert done.code == 1
    assert "town" in done.err
    assert charges(tmp_path) == 0


def test_a_study_that_runs_is_not_deleted(tmp_path: Path, cli: Cli) -> None:
    with closing(created(tmp_path)) as study, study._life.alone():
        mistake = Mistake("", "study delete churn --yes", ("'churn'", "by another process"))
        answer(mistake, tmp_path, cli)
        assert (tmp_path / "privtune.db").exists()
        again = Mistake("", "study run churn --no-mlflow", ("privtune study show churn",))
        answer(again, tmp_path, cli)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://127.0.0.1:1", "no server answers there. Start it, or correct the address"),
        ("localhost:5000", "Write http://HOST:PORT of a server"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_said_in_our_words(address: str, says: str) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    from privtune.tracking.store import explain

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(MlflowException) as caught:
            MlflowClient(address).search_experiments()
    said = explain(address, caught.value)
    assert says in said
    assert "privtune study sync" in said
    assert "\n" not in said


def test_there_are_a_hundred_of_them() -> None:
    every = [*SPECS, *TABLES, *FIRST, *CREATED, *RELEASED]
    assert len({mistake.name for mistake in every}) == len(every) >= 100
