"""Commands that only show keep the accountant's answers for each other, and nobody else reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from privtune.accounting import (
    Composed,
    Gaussian,
    Geometric,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    accountant,
    answers,
    epsilon,
)
from privtune.cli import _answers
from privtune.cli._answers import answers_are_kept

BASE = Repeated(200, PoissonSampled(0.02, Gaussian(1.1)))
EVENT = Composed([PrivateSelection(BASE, Geometric(6)), BASE])
REASONED = Repeated(10**9, PrivateSelection(Gaussian(1.0), Geometric(2)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(answers, "_WORTH", 0.0)
    accountant._answer.cache_clear()
    yield tmp_path / "cache" / "privtune"
    accountant._answer.cache_clear()


def shown(event=EVENT):
    """What a command of its own would show."""
    accountant._answer.cache_clear()
    with answers_are_kept():
        return epsilon(event, 1e-5)


def only(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


@pytest.mark.parametrize("event", [EVENT, REASONED])
def test_what_is_kept_is_the_whole_answer(
    cache: Path, event, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shown(event)
    assert only(cache).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(accountant, "_computed", lambda *_: pytest.fail("computed"))
    again = shown(event)
    assert again == first
    assert (again.bounds, again.reasons) == (first.bounds, first.reasons)


def test_a_wrong_answer_is_computed_again(cache: Path) -> None:
    first = shown()
    text = only(cache).read_text("ascii")
    digits = re.search(r"\[\d\.\d+", text)
    assert digits is not None
    wrong = [
        text.replace(digits.group(), "[0.125"),  # smaller, by hand
        text[: len(text) // 2],  # cut
        "\x00" * 40 + "\n" + text[40:],
        text.replace(text.split(" ")[0], "0" * 64),  # of another question
        text.split(" ")[0] + " not an answer\n",
        "",
    ]
    for content in wrong:
        only(cache).write_text(content, encoding="ascii")
        assert shown() == first


def test_an_answer_of_another_question_is_not_read(cache: Path) -> None:
    first = shown()
    accountant._answer.cache_clear()
    with answers_are_kept():
        assert epsilon(EVENT, 1e-6).epsilon > first.epsilon
        assert epsilon(EVENT, 1e-5, method="rdp").method == "rdp"
        assert epsilon(Composed([EVENT, BASE]), 1e-5).epsilon > first.epsilon


def test_another_account_has_answers_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown()
    monkeypatch.setattr("numpy.__version__", "other")
    computed = []
    real = accountant._computed
    monkeypatch.setattr(accountant, "_computed", lambda *a: computed.append(a) or real(*a))
    shown()
    assert computed
    assert len(list(cache.iterdir())) == 2


def test_nobody_else_looks_answers_up(cache: Path) -> None:
    """Whatever stands there: without the commands that show, all is computed."""
    forged: answers.Answers = {}
    with answers.given(forged):
        first = epsilon(EVENT, 1e-5)
    (key,) = forged
    forged[key] = forged[key].replace(repr(first.epsilon), "0.125")
    accountant._answer.cache_clear()
    assert epsilon(EVENT, 1e-5) == first
    assert not cache.exists()


def test_what_decides_never_runs_among_kept_answers() -> None:
    """Only these commands keep answers; each of them shows, and charges nothing."""
    found = set()
    for path in Path(_answers.__file__).parent.glob("*.py"):
        for name in re.findall(r"@answers_are_kept\(\)\ndef (\w+)\(", path.read_text("utf-8")):
            found.add((path.stem, name))
    assert found == {
        ("budget", "list_"),
        ("budget", "show"),
        ("study", "compare"),
        ("study", "plan"),
        ("study", "show"),
    }
