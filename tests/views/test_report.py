"""The page that is handed to others: self-contained, right, and free of sealed numbers."""

from __future__ import annotations

import json
import math
import re
import statistics
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from privtune.accounting import epsilon
from privtune.cli._tables import print_comparison
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to
from privtune.strategies import Repetition
from privtune.study import ArmStatus, Study
from privtune.views import text as words_of
from privtune.views.comparison import comparison_document, to_csv, to_markdown
from privtune.views.headline import headline
from privtune.views.record import arm_record, budget_view, study_note
from privtune.views.report import render_study
from privtune.views.templating import _prose, figure, render
from tests.cli.conftest import Cli, cli
from tests.study.conftest import toy_spec
from tests.toy import curated, exact_score
from tests.tracked import ARMS, Tracked
from tests.tracking.test_sealed import forms

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects the text outside of scripts, and complains about what is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.loads += [v for k, v in attrs if k in ("src", "href") and v and ":" in v]
        if values.get("role") == "img":
            self.images.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] in ("script", "style"):
            return
        self.words.append(data)
        if self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def html(tracked: Tracked) -> str:
    return render_study(tracked.study)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.mark.quick
def test_the_page_is_well_formed_and_needs_no_network(html: str, page: Page) -> None:
    assert not page.open
    assert page.loads == ["data:,"]
    assert "Fixed seed 1. No guarantee holds" in page.text
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.S)  # Plotly's own text has addresses
    assert not re.search(r"https?://", own)
    assert "@import" not in own


@pytest.mark.quick
def test_the_answer_comes_before_the_budget_and_names_are_code(
    html: str, page: Page, tracked: Tracked
) -> None:
    assert "`" not in page.text
    answer = headline(tracked.study, tracked.study.status()).lines[0]
    (arm, *_) = re.findall("`(.+?)`", answer)
    before = html[: html.index("Privacy budget toy")]
    assert f"<code>{arm}</code>" in before[before.index("<h1>") :]


def test_what_a_user_wrote_is_escaped_between_backticks() -> None:
    assert _prose("`a<b` & `c`") == "<code>a&lt;b</code> &amp; <code>c</code>"


def test_run_epsilon_and_procedure_epsilon_stand_side_by_side(page: Page, tracked: Tracked) -> None:
    for status in tracked.study.status():
        one = epsilon(status.plan.training.event, 1e-5).epsilon
        row = f"{status.plan.arm} {ceil_to(one, 3):.3f} {ceil_to(status.guarantee.epsilon, 3):.3f}"
        assert row in page.text
    assert (
        f"everything charged to the budget — {ceil_to(tracked.study.spent().epsilon, 3):.3f}"
        in (page.text)
    )


def test_what_is_declared_public_is_the_plans_list(page: Page, tracked: Tracked) -> None:
    (facts,) = {tuple(plan.public_facts.items()) for plan in tracked.study.plans}
    assert dict(facts)["training records"] == "240, private"
    for name, value in facts:
        assert f"{name} {value}" in page.text
    bodies = [entry["body"] for entry in tracked.study.export()["certificate"]["entries"]]
    charged = [body["public"] for body in bodies if "event" in body]
    assert charged == [dict(facts)] * 3


@pytest.mark.quick
def test_no_sealed_number_is_in_the_page(html: str, tracked: Tracked) -> None:
    winner = tracked.study.release("selection").params
    assert forms(winner["learning_rate"])[1] or True
    for trial in curated(tracked.study).sealed_trials("selection"):
        if trial["params"] == winner:
            continue
        for value in (*trial["params"].values(), trial["score"]):
            assert not any(form in html.encode() for form in forms(value))


def test_a_study_that_has_not_run_has_a_page_too(tmp_path: Path, cli: Cli) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    Study.create(toy_spec(arms=ARMS[:1]), storage)
    target = tmp_path / "report.html"
    done = cli("study", "compare", "toy", "--storage", storage, "--html", str(target))
    assert done.code == 0, done.err
    page = Page(target.read_text(encoding="utf-8"))
    assert "planned" in page.text
    assert "Nothing yet." in page.text


@pytest.mark.quick
def test_what_others_wrote_is_escaped() -> None:
    import plotly.graph_objects as go

    evil = "</title><script>alert(1)</script>"
    bar = go.Figure(go.Bar(x=["</script><script>alert(1)</script>"]), {"height": 300})
    drawn = figure("f", bar, numbers={"columns": [evil], "rows": [[evil]], "caption": evil})
    drawn |= {"lines": True, "noised": False, "utility": evil, "repeated": False}
    page = render("chart.html", title=evil, shown=drawn)
    assert "<script>alert" not in page
    assert page.count("</title>") == page.count("</script>") == 1


@pytest.mark.parametrize("spent", [0.1, 0.5, 1.0, 3.0, 8.0, 20.0, 27.0, 40.0])
def test_how_often_a_guess_is_right_is_rounded_up(spent: float) -> None:
    (shown,) = re.findall(
        r"at most ([\d.]+)% of the time", PromiseWording("record").explain_epsilon(spent, 1e-12)
    )
    share = float(shown) / 100
    assert (math.exp(spent) + 1e-12) / (math.exp(spent) + 1) <= share * (1 + 1e-15)
    assert share < 1.0 or spent > 25.0


PARAMETERS = {"learning_rate": 0.5, "max_grad_norm": 1.0}
COMPOSITION = "the composition of all charges, not their sum"


def test_a_composition_is_said_only_where_it_is_one(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str, storage: str, **more: float) -> tuple[str, str]:
        arms = [{"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}]
        url = f"sqlite:///{tmp_path}/{storage}.db"
        with closing(Study.create(toy_spec(name=name, arms=arms, **more), url)) as study:
            study.run()
            print_comparison(study)
            view = budget_view(study)
            page = render_study(study)
            texts = (capsys.readouterr().out, study_note(study, view, study.status()), page)
            return view.spent.method, " ".join(" ".join(texts).split())

    # A study that takes the whole budget leaves no room: nothing can follow.
    method, whole = said("whole", "one")
    assert whole.count(f"by {method}: {COMPOSITION}") == 3
    # What follows may depend on what a first study has shown: the odometer reads, and the filter admits.
    for name in ("first", "second"):
        method, read = said(name, "two", epsilon=1.0)
        assert method in ("odometer", "filter")
        bound = {"odometer": "by a privacy odometer: ", "filter": "by the privacy filter: "}[method]
        assert read.count(bound) == 3
        assert "composition of all charges" not in read


ACCURACIES = {
    "defaults": [0.80, 0.82, 0.84],
    "selection": [0.79, 0.80, None],
    "hyfree": [0.90, 0.91, 0.86],
}


def repeated(arm: ArmStatus) -> ArmStatus:
    """An arm as if it had run three times: a run without accuracy released nothing, 0.86 diverged."""
    runs = tuple(
        Repetition(
            params={}, score=None, estimates={"test_accuracy": exact_score(v)}, diverged=v == 0.86
        )
        if v is not None
        else Repetition(params={}, score=None, nothing=True)
        for v in ACCURACIES[arm.plan.arm]
    )
    return replace(arm, release=replace(arm.release, repetitions=runs))


def test_one_draw_says_so(page: Page, tracked: Tracked, capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(tracked.study)
    for text in (page.text, to_markdown(tracked.study), capsys.readouterr().out):
        assert "ran once" in text
        assert "±" not in text
        assert "better than next" not in text
    document = comparison_document(tracked.study)
    assert [arm["draws"] for arm in document["arms"]] == [1, 1, 1]
    assert document["order"]["better"] == {}


def test_repetitions_show_mean_error_and_how_sure_the_order_is(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = tuple(map(repeated, tracked.study.status()))
    monkeypatch.setattr(Study, "status", lambda _: arms)
    document = json.loads(json.dumps(comparison_document(tracked.study), allow_nan=False))
    spread = {arm["arm"]: arm["spread"]["test_accuracy"] for arm in document["arms"]}
    for arm, values in ACCURACIES.items():
        there = [v for v in values if v is not None]
        error = statistics.stdev(there) / math.sqrt(len(there))
        known = {"mean": statistics.mean(there), "error": error, "n": len(there)}
        assert spread[arm] == pytest.approx(known)
    better = document["order"]["better"]
    assert [*better] == ["hyfree", "defaults", "selection"]  # the best first
    # Of two pairs, differences 0.01 and 0.02: t = 3 with one degree of freedom, Cauchy's law.
    assert better["defaults"]["selection"] == pytest.approx(0.5 + math.atan(3.0) / math.pi)
    assert better["selection"]["defaults"] == pytest.approx(0.5 - math.atan(3.0) / math.pi)
    shown = Page(render_study(tracked.study)).text
    print_comparison(tracked.study)
    for text in (shown, to_markdown(tracked.study), capsys.readouterr().out):
        for words in ("79.50% ± 0.50%", "2 of 3", "89%", "1 released nothing", "1 diverged"):
            assert words in text
        assert "one draw" not in text
    assert "89.00% ± 1.53%" in shown
    assert "test_accuracy_mean,test_accuracy_error,test_accuracy_n" in to_csv(tracked.study)
    table = tracked.study.compare()
    assert table["test_accuracy_mean"]["selection"] == pytest.approx(0.795)
    assert list(table["draws"]) == [3, 3, 3]


@pytest.mark.parametrize("public", [True, False])
def test_who_paid_for_repetitions_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], public: bool
) -> None:
    arms = [{"name": name, "strategy": "fixed", "parameters": PARAMETERS} for name in ("a", "b")]
    task = {"task": "tests.toy:benchmark_blobs"} if public else {}
    spec = toy_spec(arms=arms, epochs=1, repeats=2, **task)
    with closing(Study.create(spec, f"sqlite:///{tmp_path}/p.db")) as study:
        study.run()
        print_comparison(study)
        sized = dict(words_of.public_facts(study.plans)[0][1])["training records"]
        assert sized == ("240, public, protected as if private" if public else "240, private")
        facts = [entry["body"].get("public") for entry in study.certificate()["entries"]]
        in_certificate = {fact["training records"] for fact in facts if fact}
        assert in_certificate == {sized}, "one fact has one form of words"
        (plan, _), (arm, _) = study.plans, comparison_document(study)["arms"]
        record = arm_record(study, plan, study.release("a"), budget_view(study))
        page, exported = Page(render_study(study)).text, study.export()["arms"][0]
    said = (
        "One of the 2 repetitions was charged"
        if public
        else "Each of the 2 repetitions was charged"
    )
    printed = capsys.readouterr().out
    assert "the mean over the models of all repetitions" in printed
    assert "not charged repetitions" not in printed
    texts = (page, to_markdown(study), printed, record.note)
    assert [said in " ".join(text.split()) for text in texts] == [True] * 4
    assert record.tags["privtune.repetitions"].startswith(said)
    assert ("repetitions beyond one are in no ε" in page) == public
    assert (arm["draws"], arm["repetitions_charged"]) == (2, not public)
    assert len(exported["release"]["repetitions"]) == 2
