"""Every event type through every reader: what lacks one fails here, not in a ladder."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import privtune
import privtune.accounting as dp
from privtune.accounting import events as all_events
from privtune.accounting.events import flatten
from privtune.accounting.pld import default_step, event_pair, no_pair
from privtune.accounting.rdp import rdp_curve
from privtune.accounting.reach import mass_beyond_reach
from privtune.accounting.registry import (
    ENTRIES,
    UnknownEventError,
    entry,
    formula,
    looks,
    text,
    training,
)
from privtune.errors import InvalidInputError
from privtune.ledger.weights import weigh
from tests.accounting.helpers import events, steps

pytestmark = pytest.mark.quick

ONE_OF_EACH = [
    dp.Gaussian(3.0),
    dp.Laplace(3.0),
    dp.Joint([dp.Gaussian(3.0), dp.Laplace(3.0)]),
    dp.PoissonSampled(0.1, dp.Joint([dp.Gaussian(3.0), dp.Laplace(3.0)])),
    dp.Repeated(3, dp.Gaussian(3.0)),
    dp.Composed([dp.Gaussian(3.0), dp.Laplace(3.0)]),
    dp.WorstOf([dp.Gaussian(3.0), dp.Laplace(3.0)], [0.5, 0.5]),
    dp.Parallel([dp.Gaussian(3.0), dp.Laplace(3.0)]),
    dp.ZCDP(0.1),
    dp.ApproximateDP(0.3, 1e-7),
    dp.PrivateSelection(dp.Gaussian(3.0), dp.Geometric(3)),
    dp.ThresholdSelection(dp.Gaussian(3.0), 0.3),
    dp.SubsampledTuning(1, 0.1, dp.Gaussian(3.0), dp.Gaussian(4.0)),
    dp.NonPrivate(),
]
TRAININGS = (dp.Gaussian, dp.Laplace, dp.Joint, dp.PoissonSampled, dp.Repeated, dp.Composed)
PACKAGE = Path(privtune.__file__).parent
HOMES = ("accounting/registry.py", "accounting/events.py")


def all_types():
    return {kind for kind in dp.Event.__subclasses__() if kind.__module__.startswith("privtune.")}


def test_every_type_has_an_entry_and_an_example():
    assert set(ENTRIES) == all_types() == {type(event) for event in ONE_OF_EACH}
    assert {kind.type for kind in ENTRIES} == set(all_events._TYPES)


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda e: e.type)
def test_every_type_through_every_reader(event):
    known = entry(event)
    curve = rdp_curve(event)
    assert not np.isnan(curve).any()
    parts = flatten(event)
    assert (not no_pair(parts)) == known.private
    answer = dp.epsilon(event, 1e-5)
    assert math.isfinite(answer.epsilon) == known.private
    if known.private:
        pair = event_pair(parts, default_step(parts, 1e-5))
        assert pair.epsilon(1e-5) == pytest.approx(answer.epsilon, rel=0.05)
    assert weigh(event, 8.0, dp.Adjacency.ADD_REMOVE).divergence >= 0
    assert 0.0 <= mass_beyond_reach(event, gaussian=8.0, laplace=8.0) <= 1.0
    for words in (text(event), formula(event), dp.explain(event, 1e-5).text):
        assert words
        assert words == words.strip()
    assert training(event) is None
    assert training(dp.Composed([dp.Gaussian(1), event, steps(0.01, 1.0, 7)])) == (7, 0.01)
    if isinstance(event, TRAININGS):
        assert looks(event).total() >= 1
    else:
        with pytest.raises(UnknownEventError, match="not a release of a training"):
            looks(event)
    if known.replace_one:
        assert dp.epsilon(event, 1e-5, adjacency=dp.Adjacency.REPLACE_ONE).epsilon >= answer.epsilon
    else:
        with pytest.raises(InvalidInputError, match="add-remove only"):
            dp.epsilon(event, 1e-5, adjacency=dp.Adjacency.REPLACE_ONE)


@given(events)
@settings(max_examples=200, deadline=None)
def test_noise_is_scaled_wherever_it_stands(event):
    """The JSON text of the scaled event differs in the noise multipliers, and in nothing else."""

    def louder(data):
        if isinstance(data, dict):
            return {k: v * 1.5 if k == "noise_multiplier" else louder(v) for k, v in data.items()}
        return [louder(part) for part in data] if isinstance(data, list) else data

    assert dp.scale_noise(event, 1.5) == dp.event_from_dict(louder(event.to_dict()))


@given(events)
@settings(max_examples=200, deadline=None)
def test_an_event_is_its_children_and_how_they_are_put_together(event):
    children = event.children()
    assert event.rebuild(children) == event
    assert len(children) == sum(
        len(v) if k == "events" else 1
        for k, v in event.to_dict().items()
        if k in ("event", "events", "tuning", "training")
    )
    if children:
        other = event.rebuild([dp.Gaussian(7.0)] * len(children))
        assert other.children() == (dp.Gaussian(7.0),) * len(children)
        with pytest.raises(InvalidInputError, match="as many"):
            event.rebuild(children[1:])


class Unknown(dp.Event):
    """A type that nobody entered."""

    type = "unknown"


@pytest.mark.parametrize(
    "ask",
    [
        lambda e: dp.epsilon(e, 1e-5),
        lambda e: dp.epsilon(e, 1e-5, adjacency=dp.Adjacency.REPLACE_ONE),
        lambda e: dp.scale_noise(e, 2.0),
        formula,
        training,
        lambda e: weigh(e, 8.0, dp.Adjacency.ADD_REMOVE),
        lambda e: dp.explain(e, 1e-5),
        mass_beyond_reach,
    ],
)
@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: dp.PrivateSelection(e, dp.Geometric(3))])
def test_nothing_is_guessed_about_an_unknown_type(ask, wrap):
    with pytest.raises(UnknownEventError, match="unknown event"):
        ask(wrap(Unknown()))
    for read in (lambda: text(Unknown()), lambda: looks(dp.Repeated(2, Unknown()))):
        with pytest.raises(UnknownEventError, match="unknown event"):
            read()


def test_no_other_module_asks_for_the_type_of_an_event():
    """No `match` over events, and at most one question of a kind in a function."""
    names = {kind.__name__ for kind in ENTRIES}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix().startswith(HOMES):
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            asked = [
                node
                for node in ast.walk(function)
                if (isinstance(node, ast.MatchClass) and getattr(node.cls, "id", "") in names)
                or (
                    isinstance(node, ast.Call)
                    and getattr(node.func, "id", "") == "isinstance"
                    and names & {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                )
            ]
            if len(asked) > 1 or any(isinstance(node, ast.MatchClass) for node in asked):
                wrong.append(f"{path.name}: {function.name}")
    assert not wrong
