"""The event algebra: one event has one text, and nonsense has no event."""

import json
import math

import pytest
from hypothesis import given, settings

import privtune.accounting as dp
from privtune.accounting.events import flatten
from privtune.errors import InvalidInputError
from tests.accounting.helpers import events

pytestmark = pytest.mark.quick


@given(events)
@settings(max_examples=200, deadline=None)
def test_json_both_ways(event):
    text = event.to_json()
    assert dp.event_from_json(text) == event
    assert dp.event_from_json(text).to_json() == text
    assert dp.event_from_dict(event.to_dict()) == event
    assert hash(dp.event_from_json(text)) == hash(event)
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
    assert dp.event_from_json(text) == dp.PrivateSelection(
        dp.Repeated(3, dp.PoissonSampled(0.01, dp.Joint([dp.Gaussian(1), dp.Gaussian(2)]))),
        dp.TruncatedNegativeBinomial(1, 20),
    )


REFUSED = [
    lambda: dp.Gaussian(0.0),
    lambda: dp.Gaussian(-1.0),
    lambda: dp.Gaussian(math.nan),
    lambda: dp.Gaussian(math.inf),
    lambda: dp.Gaussian(True),
    lambda: dp.Gaussian("1"),
    lambda: dp.Laplace(0),
    lambda: dp.PoissonSampled(0.0, dp.Gaussian(1)),
    lambda: dp.PoissonSampled(1.1, dp.Gaussian(1)),
    lambda: dp.PoissonSampled(0.5, dp.Repeated(2, dp.Gaussian(1))),
    lambda: dp.PoissonSampled(0.5, dp.Composed([dp.Gaussian(1)])),
    lambda: dp.PoissonSampled(0.5, dp.PoissonSampled(0.5, dp.Gaussian(1))),
    lambda: dp.Repeated(0, dp.Gaussian(1)),
    lambda: dp.Repeated(1.5, dp.Gaussian(1)),
    lambda: dp.Repeated(True, dp.Gaussian(1)),
    lambda: dp.Repeated(10**10, dp.Gaussian(1)),
    lambda: dp.Joint([]),
    lambda: dp.Joint([dp.NonPrivate()]),
    lambda: dp.Joint([dp.PoissonSampled(0.5, dp.Gaussian(1))]),
    lambda: dp.Composed(dp.Gaussian(1)),
    lambda: dp.Composed(["gaussian"]),
    lambda: dp.WorstOf([]),
    lambda: dp.WorstOf([dp.Gaussian(1)], [0.5]),
    lambda: dp.WorstOf([dp.Gaussian(1)], [0.5, 0.5]),
    lambda: dp.WorstOf([dp.Gaussian(1), dp.Gaussian(2)], [-0.5, 1.5]),
    lambda: dp.Parallel([]),
    lambda: dp.ApproximateDP(-1, 0),
    lambda: dp.ApproximateDP(1, 1),
    lambda: dp.ApproximateDP(1, -1e-9),
    lambda: dp.PrivateSelection(dp.Gaussian(1), "geometric"),
    lambda: dp.ThresholdSelection(dp.Gaussian(1), 0.0),
    lambda: dp.SubsampledTuning(3, 0.1, dp.Gaussian(1), dp.Gaussian(1)),
    lambda: dp.SubsampledTuning(1, 1.0, dp.Gaussian(1), dp.Gaussian(1)),
    lambda: dp.TruncatedNegativeBinomial(-1.0, 5),
    lambda: dp.TruncatedNegativeBinomial(1.0, 0.5),
    lambda: dp.Geometric(math.nan),
    lambda: dp.Geometric(5, 0),
    lambda: dp.Poisson(0),
    lambda: dp.Binomial(5, 6),
    lambda: dp.Binomial(0, 0),
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
        dp.event_from_json(text)


def test_flatten_multiplies_in_one_place():
    inner = dp.Composed([dp.Gaussian(1), dp.Repeated(3, dp.Laplace(2)), dp.NonPrivate()])
    event = dp.Composed([dp.Repeated(5, dp.Repeated(2, inner)), dp.Gaussian(1), dp.Composed([])])
    assert flatten(event) == {dp.Gaussian(1): 11, dp.Laplace(2): 30, dp.NonPrivate(): 10}


def test_joint_is_one_gaussian():
    joint = dp.Joint([dp.Gaussian(1.0), dp.Gaussian(2.0), dp.Gaussian(2.0)])
    assert joint.noise_multiplier == pytest.approx(1.5**-0.5)
    assert flatten(dp.PoissonSampled(1.0, joint)) == {dp.Gaussian(joint.noise_multiplier): 1}
