"""The event algebra: one event has one text, and nonsense has no event."""

import json
import math

import pytest
from hypothesis import given, settings

from privtune.accounting import (
    ApproximateDP,
    Binomial,
    Composed,
    Gaussian,
    Geometric,
    Joint,
    Laplace,
    NonPrivate,
    Parallel,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    TruncatedNegativeBinomial,
    WorstOf,
    event_from_dict,
    event_from_json,
)
from privtune.accounting.events import flatten
from privtune.errors import InvalidInputError
from tests.accounting.helpers import events

pytestmark = pytest.mark.quick


@given(events)
@settings(max_examples=200, deadline=None)
def test_json_both_ways(event):
    text = event.to_json()
    assert event_from_json(text) == event
    assert event_from_json(text).to_json() == text
    assert event_from_dict(event.to_dict()) == event
    assert hash(event_from_json(text)) == hash(event)
    assert json.loads(text)["schema"] == 1
    assert " " not in text.replace('"', "")


def test_the_public_format():
    text = (
        '{"type": "private_selection", "event": {"type": "repeated", "count": 3, "event": '
        '{"type": "poisson_sampled", "rate": 0.01, "event": {"type": "joint", "events": '
        '[{"type": "gaussian", "noise_multiplier": 1}, {"type": "gaussian", '
        '"noise_multiplier": 2.0}]}}}, '
        '"runs": {"law": "truncated_negative_binomial", "shape": 1.0, "mean": 20}}'
    )
    assert event_from_json(text) == PrivateSelection(
        Repeated(3, PoissonSampled(0.01, Joint([Gaussian(1), Gaussian(2)]))),
        TruncatedNegativeBinomial(1, 20),
    )


REFUSED = [
    lambda: Gaussian(0.0),
    lambda: Gaussian(-1.0),
    lambda: Gaussian(math.nan),
    lambda: Gaussian(math.inf),
    lambda: Gaussian(True),
    lambda: Gaussian("1"),
    lambda: Laplace(0),
    lambda: PoissonSampled(0.0, Gaussian(1)),
    lambda: PoissonSampled(1.1, Gaussian(1)),
    lambda: PoissonSampled(0.5, Repeated(2, Gaussian(1))),
    lambda: PoissonSampled(0.5, Composed([Gaussian(1)])),
    lambda: PoissonSampled(0.5, PoissonSampled(0.5, Gaussian(1))),
    lambda: Repeated(0, Gaussian(1)),
    lambda: Repeated(1.5, Gaussian(1)),
    lambda: Repeated(True, Gaussian(1)),
    lambda: Repeated(10**10, Gaussian(1)),
    lambda: Joint([]),
    lambda: Joint([NonPrivate()]),
    lambda: Joint([PoissonSampled(0.5, Gaussian(1))]),
    lambda: Composed(Gaussian(1)),
    lambda: Composed(["gaussian"]),
    lambda: WorstOf([]),
    lambda: WorstOf([Gaussian(1)], [0.5]),
    lambda: WorstOf([Gaussian(1)], [0.5, 0.5]),
    lambda: WorstOf([Gaussian(1), Gaussian(2)], [-0.5, 1.5]),
    lambda: Parallel([]),
    lambda: ApproximateDP(-1, 0),
    lambda: ApproximateDP(1, 1),
    lambda: ApproximateDP(1, -1e-9),
    lambda: PrivateSelection(Gaussian(1), "geometric"),
    lambda: ThresholdSelection(Gaussian(1), 0.0),
    lambda: SubsampledTuning(3, 0.1, Gaussian(1), Gaussian(1)),
    lambda: SubsampledTuning(1, 1.0, Gaussian(1), Gaussian(1)),
    lambda: TruncatedNegativeBinomial(-1.0, 5),
    lambda: TruncatedNegativeBinomial(1.0, 0.5),
    lambda: Geometric(math.nan),
    lambda: Geometric(5, 0),
    lambda: Poisson(0),
    lambda: Binomial(5, 6),
    lambda: Binomial(0, 0),
]


@pytest.mark.parametrize("make", REFUSED)
def test_nonsense_is_refused_with_one_sentence(make):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).rstrip().endswith(".")


TEXTS = [
    "",
    "[]",
    "null",
    '{"type": "gauss"}',
    '{"type": "gaussian"}',
    '{"type": "gaussian", "noise_multiplier": NaN}',
    '{"type": "gaussian", "noise_multiplier": Infinity}',
    '{"type": "gaussian", "noise_multiplier": "1"}',
    '{"type": "gaussian", "noise_multiplier": 1, "noise_multiplier": 2}',
    '{"type": "gaussian", "noise_multiplier": 1, "sigma": 2}',
    '{"type": "composed", "events": {}}',
    '{"type": "repeated", "count": 2}',
    '{"type": "non_private", "schema": 2}',
    '{"type": "non_private", "schema": true}',
    '{"type": "private_selection", "event": {"type": "non_private"}, "runs": {"law": "zeta"}}',
    '{"type": "private_selection", "event": {"type": "non_private"}, "runs": {"law": "poisson"}}',
    '{"type": "repeated", "count": 1, "event": ' * 100 + '{"type": "non_private"}' + "}" * 100,
    "[" * 100_000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_bad_texts_are_refused(text):
    with pytest.raises(InvalidInputError):
        event_from_json(text)


def test_flatten_multiplies_in_one_place():
    inner = Composed([Gaussian(1), Repeated(3, Laplace(2)), NonPrivate()])
    event = Composed([Repeated(5, Repeated(2, inner)), Gaussian(1), Composed([])])
    assert flatten(event) == {Gaussian(1): 11, Laplace(2): 30, NonPrivate(): 10}


def test_joint_is_one_gaussian():
    joint = Joint([Gaussian(1.0), Gaussian(2.0), Gaussian(2.0)])
    assert joint.noise_multiplier == pytest.approx(1.5**-0.5)
    assert flatten(PoissonSampled(1.0, joint)) == {Gaussian(joint.noise_multiplier): 1}
