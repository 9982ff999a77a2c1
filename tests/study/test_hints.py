"""Plans that begin at hints are the plans that begin nowhere, whatever stands in the hints."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from privtune import files
from privtune.accounting import Gaussian, calibrate, hints
from privtune.study import StudyPlan, _hints, plan_study
from privtune.study._hints import searches_begin_at_hints
from tests.study.conftest import toy_spec

TARGET = toy_spec().target_epsilon
NORM = {"max_grad_norm": 1.0}
ARMS = [
    {"name": "given", "strategy": "fixed", "parameters": {"learning_rate": 0.5, **NORM}},
    {"name": "selected", "strategy": "papernot-steinke", "mean_runs": 3, "parameters": NORM},
    {"name": "adapted", "strategy": "hyfreedp"},
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "privtune"


def planned() -> StudyPlan:
    space = {"learning_rate": {"type": "float", "low": 0.1, "high": 2.0}}
    return plan_study(toy_spec(space=space, arms=ARMS))


def digests() -> list[str]:
    return [plan.digest() for plan in planned().plans]


def lines_of(folder: Path) -> list[str]:
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path.read_text().splitlines()


FORGED: dict[str, Callable[[str], str]] = {
    "as they were": lambda line: line,
    "half the noise": lambda line: f"{line.split()[0]} {0.5 * float(line.split()[1])!r}",
    "twice the noise": lambda line: f"{line.split()[0]} {2.0 * float(line.split()[1])!r}",
    "not a number": lambda line: f"{line.split()[0]} nan",
    "none": lambda line: f"{line.split()[0]} -0.0",
    "endless": lambda line: f"{line.split()[0]} inf",
    "all but none": lambda line: f"{line.split()[0]} 5e-324",
    "all but endless": lambda line: f"{line.split()[0]} 1e308",
    "huge": lambda line: f"{line.split()[0]} 1e150",
    "cut": lambda line: line[:67],  # with more digits it may be as near as a search is
    "words": lambda line: "there is no such line",
}


def test_no_hint_changes_a_plan(cache: Path) -> None:
    """A search that begins at a hint ends where it would have ended; a wrong hint is none.

    Unless it is wrong by less than a search is: then the plan meets its target as closely.
    """
    first = digests()
    kept = lines_of(cache)
    assert len(kept) > len(ARMS)
    (path,) = cache.iterdir()
    for what, forge in FORGED.items():
        path.write_text("\n".join(map(forge, kept)) + "\n")
        assert digests() == first, what
    for factor in (0.9999, 1.0001):
        names, numbers = zip(*map(str.split, kept), strict=True)
        near = (f"{n} {factor * float(x)!r}" for n, x in zip(names, numbers, strict=True))
        path.write_text("\n".join(near) + "\n")
        assert 0.99 * TARGET <= planned().total.epsilon <= TARGET


def test_a_hint_saves_the_search(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests()
    kept = lines_of(cache)
    monkeypatch.setattr("privtune.accounting.calibration._near", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(
        "privtune.accounting.calibration.solve_decreasing", lambda *_, **__: pytest.fail("searched")
    )
    digests()
    assert lines_of(cache) == kept


def test_a_hint_that_counts_keeps_what_was_found_for_it(cache: Path) -> None:
    digests()
    (path,) = cache.iterdir()
    kept = lines_of(cache)
    path.write_text(f"{kept[-1]}\n")  # of the whole; those of its arms are lost
    digests()
    assert len(lines_of(cache)) > 1


def test_whoever_believed_a_hint_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the noise, kept as a hint, does not survive the accountant."""
    kept: hints.Hints = {}
    with hints.given(kept):
        first = calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
        assert kept.values()
        for factor in (0.5, 2.0):
            kept.update(dict.fromkeys(kept, factor * first.scale))
            again = calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
            assert (again.scale, again.guarantee.epsilon) == (first.scale, first.guarantee.epsilon)
            assert set(kept.values()) == {first.scale}  # and is mended


def test_other_versions_have_hints_of_their_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("1", "2"):
        monkeypatch.setattr(_hints, "version", lambda name, number=number: number)
        with searches_begin_at_hints():
            calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_kept_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with searches_begin_at_hints():
        first = calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _homeless)
    with searches_begin_at_hints():
        assert calibrate(Gaussian(1.0), epsilon=1.0, delta=1e-5).scale == first.scale


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_full_cache_begins_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST", 200)
    for epsilon in (1.0, 2.0, 3.0, 4.0, 5.0):
        with searches_begin_at_hints():
            calibrate(Gaussian(1.0), epsilon=epsilon, delta=1e-5)
    assert 1 <= len(lines_of(cache)) <= 3
