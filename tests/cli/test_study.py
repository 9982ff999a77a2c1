"""The study commands, as a new user types them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from privtune.accounting import Composed, accountant, epsilon, event_from_dict
from privtune.study import Study, StudySpec, plan_study
from tests.cli.conftest import Cli
from tests.study.conftest import FIXED, toy_spec
from tests.toy import LOADS


@pytest.fixture
def at(tmp_path: Path) -> tuple[str, str]:
    return ("--storage", f"sqlite:///{tmp_path / 'p.db'}")


def write(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_spec(**changes).model_dump(mode="json")))
    return str(path)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    return write(tmp_path)


def test_plan_says_whether_a_stored_budget_holds_the_study(
    cli: Cli, spec: str, at: tuple[str, str], tmp_path: Path
) -> None:
    assert "Budget toy" not in cli("study", "plan", spec, *at).out
    assert not (tmp_path / "p.db").exists()
    assert cli("study", "create", spec, *at).code == 0
    planned = cli("study", "plan", spec, *at).out
    assert "Budget toy holds this study: ε = 0.0000 of" in planned
    # The spec takes the whole budget: what is left is what its arms leave of the target.
    foretold = re.search(r"is spent now, and ([\d.]+) is left once the study has started", planned)
    assert foretold is not None
    assert float(foretold[1]) < 0.05
    listed = cli("study", "list", *at).out
    assert "planned, nothing charged" in listed
    spent = tmp_path / "spent.json"
    spent.write_text(json.dumps({"type": "zcdp", "rho": 0.05}))
    assert cli("budget", "charge", "toy", str(spent), "--note", "another tool", *at).code == 0
    refused = cli("study", "plan", spec, *at)
    assert refused.code == 1
    assert "has no room for this charge" in refused.err
    assert "mean runs" in refused.out


def test_plan_advises_to_leave_out_the_same_training(
    cli: Cli, tmp_path: Path, at: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    same = [{"name": "auto", "strategy": "auto"}, {"name": "hyfree", "strategy": "hyfreedp"}]
    spec = write(tmp_path, task="tests.toy:linear_blobs", arms=[*same, FIXED])
    advice = (
        "Arms auto and hyfree run the same training: leave one out, and the others get more of ε."
    )
    planned = cli("study", "plan", spec)
    assert planned.out.count(advice) == 1
    assert planned.out.count("so the learning rate rests on little") <= 1
    assert cli("study", "create", spec, *at).code == 0
    assert advice in caplog.messages
    other = [{**same[1], "name": "far", "spread": 3.0}]
    assert (
        "the same training" not in cli("study", "plan", write(tmp_path, arms=[same[0], *other])).out
    )


def test_plan_shows_every_arm_and_touches_nothing(
    cli: Cli, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    loads = len(LOADS)
    done = cli("study", "plan", spec)
    assert done.code == 0, done.err
    for word in (
        "defaults",
        "selection",
        "hyfree",
        "mean runs",
        "one candidate with probability 25%",
        "sealed",
        "No data was touched",
        "Declared public",
        "240, private",
    ):
        assert word in done.out
    assert len(LOADS) == loads
    assert not list(empty.iterdir()), "planning leaves nothing behind"


def test_plan_as_json(cli: Cli, spec: str) -> None:
    done = cli("study", "plan", spec, "--json", "--prices")
    document = json.loads(done.out)
    assert document["total"]["epsilon"] <= document["target_epsilon"] == 6.0
    selection = document["arms"][1]
    assert selection["expected_runs"] == pytest.approx(4)
    few = {"none": 0.0, "one": 0.25, "at_most_two": 0.4375}  # a geometric number of mean 4
    assert selection["few_runs"] == pytest.approx(few, rel=1e-12)
    assert selection["floor"] is None
    assert [offer["min_runs"] for offer in selection["min_runs"]] == [2, 3]
    for offer in selection["min_runs"]:
        charged = json.loads(json.dumps(selection["event"]))
        charged["runs"]["minimum"] = offer["min_runs"]
        assert offer["epsilon"] == epsilon(event_from_dict(charged), 1e-5).epsilon
    assert selection["event"]["type"] == "private_selection"
    assert selection["guarantee"]["bounds"]
    assert selection["expected_gradient_evaluations"] == pytest.approx(4 * 2 * 240)
    assert {"noise_multiplier", "score_noise_multiplier"} <= set(selection["noise_multipliers"])


def test_plan_shows_the_floor_and_its_price(cli: Cli, spec: str, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    text = Path(spec).read_text(encoding="utf-8")
    assert text.count("mean_runs: 4") == 1
    more.write_text(text.replace("mean_runs: 4", "mean_runs: 8"), encoding="utf-8")
    shown = " ".join(cli("study", "plan", str(more), "--prices").out.split())
    assert "at least 2 candidates, and exactly two with probability 14.3%" in shown  # 1 / 7
    assert "fewest runs 2 (min_runs); without this minimum the same noise would cost ε = " in shown
    assert "but train at most one candidate with probability 12.5%" in shown
    (selection,) = [
        arm
        for arm in json.loads(cli("study", "plan", str(more), "--json", "--prices").out)["arms"]
        if arm.get("floor") is not None
    ]
    assert selection["few_runs"] == pytest.approx({"none": 0.0, "one": 0.0, "at_most_two": 1 / 7})
    without = json.loads(json.dumps(selection["event"]))
    assert without["runs"].pop("minimum") == selection["floor"]["min_runs"] == 2
    assert selection["floor"]["epsilon_without"] == epsilon(event_from_dict(without), 1e-5).epsilon
    assert selection["floor"]["epsilon_without"] < selection["guarantee"]["epsilon"]
    assert selection["floor"]["few_without"] == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("mean_runs", "offer", "price"),
    [
        (4, "; --prices adds what it costs.", " raises ε from "),
        (
            8,
            "12.5%; --prices adds what the same noise would cost",
            "without this minimum the same noise would cost ε = ",
        ),
    ],
)
def test_plan_accounts_prices_only_on_demand(
    cli: Cli, tmp_path: Path, mean_runs: int, offer: str, price: str
) -> None:
    """Printing asks for no account that planning has not made, unless --prices is given."""
    fields = yaml.safe_load(Path(write(tmp_path)).read_text(encoding="utf-8"))
    (selection,) = [arm for arm in fields["arms"] if "mean_runs" in arm]
    selection["mean_runs"] = mean_runs
    fields["repeats"] = 2 if mean_runs == 8 else 1  # the ε of one is known
    file = tmp_path / "priced.yaml"
    file.write_text(yaml.safe_dump(fields), encoding="utf-8")
    accountant._answer.cache_clear()
    plan_study(StudySpec.from_file(file))
    known = accountant._answer.cache_info().misses
    shown = " ".join(cli("study", "plan", str(file)).out.split())
    assert offer in shown
    assert price not in shown
    (arm,) = [
        arm
        for arm in json.loads(cli("study", "plan", str(file), "--json").out)["arms"]
        if arm.get("expected_runs") == pytest.approx(mean_runs)
    ]
    assert "min_runs" not in arm
    assert "epsilon_without" not in (arm["floor"] or {})
    assert accountant._answer.cache_info().misses == known
    priced = " ".join(cli("study", "plan", str(file), "--prices").out.split())
    assert price in priced
    assert "--prices" not in priced
    assert accountant._answer.cache_info().misses > known


def test_plan_with_advice(cli: Cli, spec: str) -> None:
    """What noise on the score would cost is what the arms cost with that noise."""
    document = json.loads(cli("study", "plan", spec, "--advice", "--json").out)
    found = {change["text"]: change for change in document["advice"]}
    half = found["half the noise (the score of selection)"]
    events = [event_from_dict(arm["event"]) for arm in document["arms"]]
    base = events[1].event  # type: ignore[attr-defined]
    score = base.events[1]
    louder = replace(score, noise_multiplier=score.noise_multiplier / 2)
    trial = replace(base, events=(base.events[0], louder))
    selection = events[1].rebuild([trial])
    other = Composed([events[0], selection, *events[2:]])
    assert half["epsilon"] == pytest.approx(epsilon(other, 1e-5).epsilon, rel=1e-9)
    now = document["total"]["epsilon"]
    assert half["difference"] == pytest.approx(half["epsilon"] - now, abs=1e-3)
    assert "the score of selection" in cli("study", "plan", spec, "--advice").out
    assert "advice" not in json.loads(cli("study", "plan", spec, "--json").out)


def test_a_whole_life(cli: Cli, spec: str, at: tuple[str, str]) -> None:
    assert cli("study", "create", spec, *at).code == 0

    again = cli("study", "create", spec, *at)
    assert again.code == 1
    assert "exists already" in again.err
    assert again.err.count("\n") == 1

    ran = cli("study", "run", "toy", *at)
    assert ran.code == 0, ran.err
    assert "accuracy" in ran.out
    assert "privtune ui" in ran.out

    finished = cli("study", "run", "toy", *at)
    assert (finished.code, finished.err) == (0, "")
    assert "nothing was spent" in finished.out
    assert "accuracy" in finished.out

    document = json.loads(cli("study", "compare", "toy", *at, "--json").out)
    assert [arm["state"] for arm in document["arms"]] == ["settled"] * 3
    assert document["budget"]["charged"] <= 6.0
    assert document["budget"]["left"] >= 0

    [listed] = json.loads(cli("study", "list", *at, "--json").out)
    assert (listed["name"], listed["budget"]) == ("toy", "toy")
    assert (listed["arms"], listed["released"]) == (3, 3)
    assert listed["since"] == f"{datetime.now(UTC):%Y-%m-%d}"
    assert listed["epsilon"] == pytest.approx(document["budget"]["charged"], rel=1e-6)
    table = cli("study", "list", *at).out
    assert "3 of 3 arms released" in table
    assert "The ε of a study is that of its own charges together" in table
    planned = cli("study", "plan", spec, *at)
    assert "Budget toy is charged for this study already" in planned.out
    shown = json.loads(cli("study", "show", "toy", *at, "--json").out)
    assert "sealed_trials" not in shown
    curator = json.loads(cli("study", "show", "toy", *at, "--curator", "--json").out)
    assert curator["sealed_trials"]["selection"]


def test_the_comparison_never_shows_what_is_sealed(
    cli: Cli, spec: str, at: tuple[str, str]
) -> None:
    cli("study", "create", spec, *at)
    printed = cli("study", "run", "toy", *at).out
    printed += cli("study", "compare", "toy", *at).out + cli("study", "show", "toy", *at).out
    curator = json.loads(cli("study", "show", "toy", *at, "--curator", "--json").out)
    winner = curator["arms"][1]["params"]["learning_rate"]
    losers = [
        t["params"]["learning_rate"]
        for t in curator["sealed_trials"]["selection"]
        if t["params"]["learning_rate"] != winner
    ]
    # As numbers of their own: four digits within a longer one are no loser's.
    shown = set(re.findall(r"(?<![\d.])\d+\.\d+(?:e[+-]\d+)?(?![\d.]\d)", printed))
    assert not shown & {f"{loser:.4g}" for loser in losers if len(f"{loser:.4g}".strip("0.")) >= 4}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("study", "create", "none.yaml"), "Cannot read none.yaml"),
        (("study", "plan", "toy"), "A stored study is shown by: privtune study show toy"),
        (("ui",), "Nothing has been logged"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    cli: Cli, at: tuple[str, str], args: tuple[str, ...], message: str
) -> None:
    done = cli(*args, *at)
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err


def test_catalogues(cli: Cli) -> None:
    names = {row["name"] for row in json.loads(cli("strategies", "--json").out)}
    assert {"fixed", "papernot-steinke", "dpsgd", "hyfreedp", "subsampled-tuning"} <= names
    metrics = {row["name"] for row in json.loads(cli("metrics", "--json").out)}
    assert {"accuracy", "auc", "mae", "package.module:function"} <= metrics
    assert "digits-mlp" in cli("tasks").out
    tasks = {row["name"] for row in json.loads(cli("tasks", "--json").out)}
    assert {"digits-cnn", "mnist-mlp", "iris-logistic"} <= tasks


AUTO = {"name": "auto", "strategy": "papernot-steinke", "law": "auto", "power": 0.4}
TUNED = {"name": "tuned", "strategy": "subsampled-tuning", "rate": 0.1, "mean_runs": 10}
OPEN = {"name": "open", "strategy": "everything", "trials": 2, "sampler": "random"}
ORACLE = {"name": "oracle", "strategy": "non-private-grid", "points": 2}


def test_a_plan_draws_ten_examples_and_shows_trades(cli: Cli, tmp_path: Path) -> None:
    spec = write(tmp_path, arms=[AUTO, TUNED, ORACLE])
    done = cli("study", "plan", spec)
    assert done.code == 0, done.err
    assert "Ten random candidates from the search space" in done.out
    assert "chosen:" in done.out
    assert "everything released (composition)" in done.out
    assert "times fewer" in done.out
    assert "only with --non-private" in done.out
    spec = write(tmp_path, arms=[OPEN, ORACLE])
    document = json.loads(cli("study", "plan", spec, "--json").out)
    assert len(document["examples"]) == 10
    assert all(0.05 <= e["learning_rate"] <= 5.0 for e in document["examples"])
    assert document["arms"][1]["guarantee"]["epsilon"] in (None, "inf")


def test_a_spec_is_created_and_run_at_once(cli: Cli, tmp_path: Path, at: tuple[str, str]) -> None:
    spec = write(tmp_path, arms=[OPEN])
    done = cli("study", "run", spec, *at, "--no-mlflow")
    assert done.code == 0, done.err
    assert "open" in done.out
    spent = json.loads(cli("budget", "show", "toy", *at, "--json").out)
    # The same file again is the same study, which is finished; nothing is charged twice.
    again = cli("study", "run", spec, *at, "--no-mlflow")
    assert again.code == 0
    assert "is finished" in again.out
    assert json.loads(cli("budget", "show", "toy", *at, "--json").out) == spent


def test_a_spec_that_was_changed_is_planned_anew_until_something_is_charged(
    cli: Cli, tmp_path: Path, at: tuple[str, str]
) -> None:
    first = {**OPEN, "trials": 3}
    assert cli("study", "create", write(tmp_path, arms=[first]), *at).code == 0
    done = cli("study", "run", write(tmp_path, arms=[OPEN]), *at, "--no-mlflow")
    assert done.code == 0, done.err
    assert "The spec of study 'toy' has changed: arms. Nothing had been charged, so" in done.err
    spent = json.loads(cli("budget", "show", "toy", *at, "--json").out)
    refused = cli("study", "run", write(tmp_path, arms=[first], epochs=3), *at, "--no-mlflow")
    assert refused.code == 1
    assert "created with other arms, epochs than toy.yaml has now" in refused.err
    assert "privtune study delete" in refused.err
    assert "privtune study run toy." in refused.err
    assert refused.err.count("\n") == 1
    assert json.loads(cli("budget", "show", "toy", *at, "--json").out) == spent


def test_the_demo_goes_on_with_no_other_study(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "demo-output"
    folder.mkdir()
    other = toy_spec(name="digits-demo", arms=[OPEN])
    Study.create(other, f"sqlite:///{folder / 'privtune.db'}").close()
    refused = cli("demo", "--folder", str(folder))
    assert refused.code == 1
    assert "holds a study that was created with other arms, budget, " in refused.err
    assert refused.err.count("\n") == 1


def test_an_oracle_needs_its_flag(cli: Cli, tmp_path: Path, at: tuple[str, str]) -> None:
    spec = write(tmp_path, arms=[OPEN, ORACLE])
    assert cli("study", "create", spec, *at).code == 0
    refused = cli("study", "run", "toy", *at, "--no-mlflow")
    assert refused.code == 1
    assert "Run it with --non-private" in refused.err
    assert refused.err.count("\n") == 1
    done = cli("study", "run", "toy", *at, "--no-mlflow", "--non-private")
    assert done.code == 0, done.err
    assert "NOT PRIVATE" in done.out
    assert "would have cost" in done.out
    assert "Log it to MLflow:" in done.out
    assert "study sync toy" in done.out
    document = json.loads(cli("study", "compare", "toy", *at, "--json").out)
    assert len(document["arms"][0]["trials"]) == 2
    assert document["arms"][1]["epsilon"] is None

    exported = json.loads(cli("study", "export", "toy", *at).out)
    assert exported["format"] == "privtune-study"
    assert exported["certificate"]["guarantee"]["epsilon"] <= 6.0

    deleted = cli("study", "delete", "toy", *at, "--yes")
    assert deleted.code == 0
    assert "Its charges stay on the budget" in deleted.out
    assert cli("study", "show", "toy", *at).code == 1
    charges = json.loads(cli("budget", "charges", "toy", *at, "--json").out)
    assert charges


def test_plan_shows_the_curve_of_epochs_and_batch(cli: Cli, tmp_path: Path) -> None:
    spec = write(tmp_path, arms=[FIXED], epochs="auto", expected_batch_size="auto", compute=2_000)
    page = tmp_path / "curve.html"
    printed = cli("study", "plan", spec, "--curve", "--plot", str(page)).out
    assert printed.count("<- the plan") == 2
    assert "epochs, batch  chosen for all arms: " in printed
    assert re.search(r"Twice the work would lower the shortfall by [0-9.]+%", printed)
    text = page.read_text("utf-8")
    assert "Twice the work would lower it by" in text
    assert "the plan" in text
    document = json.loads(cli("study", "plan", spec, "--curve", "--json").out)
    curve = document["curve"]
    schedule = document["arms"][0]["details"]["schedule"]
    assert curve["chosen"]["expected_batch_size"] == schedule["expected_batch_size"]
    assert curve["chosen"]["gradient_evaluations"] <= 2_000
    assert [line["work"] for line in curve["by_batch"]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert "curve" not in json.loads(cli("study", "plan", spec, "--json").out)
    refused = cli("study", "plan", spec, "--plot", str(tmp_path / "curve.png"))
    assert refused.code == 2
    assert "ends in .html" in refused.err
