"""The page on EVENT.json: every event and every law is on it, and every example is one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from privtune.accounting import Event, epsilon, event_from_dict, event_from_json, run_law_from_dict
from privtune.accounting.events import _TYPES, DP_ACCOUNTING
from privtune.accounting.runs import _LAWS
from privtune.errors import InvalidInputError

pytestmark = pytest.mark.quick

PAGE = (Path(__file__).parents[2] / "docs/events.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_an_event_with_a_guarantee(text: str) -> None:
    event = event_from_json(text)
    answer = epsilon(event, 1e-5).epsilon
    assert math.isfinite(answer) == ("non_private" not in text)


def test_every_event_has_a_section_with_its_fields_and_an_example() -> None:
    assert sorted(SECTIONS) == sorted(_TYPES)
    for kind, section in SECTIONS.items():
        text, _, _ = section.partition("```json")
        for field in fields(_TYPES[kind]):
            # A joint event and a gaussian one are shown by what they release.
            assert f"`{field.name}`" in text, (kind, field.name)
        (example,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
        event = event_from_json(example)
        assert kind in {event.type, *(child.type for child in event.children())}


def test_every_law_stands_in_the_table_with_its_fields() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", PAGE, re.MULTILINE))
    assert rows.pop("law") == "fields"
    assert sorted(rows) == sorted(_LAWS)
    for name, law in _LAWS.items():
        for field in set(law.__match_args__) - {"maximum", "minimum"}:
            assert f"`{field}`" in rows[name], (name, field)
    given = {"law": "binomial", "n": 20, "mean": 10, "maximum": 15, "minimum": 2}
    assert run_law_from_dict(given).to_dict() == given


GAUSSIAN = {"type": "GaussianDpEvent", "noise_multiplier": 2.0}
SAMPLED = {"type": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": GAUSSIAN}
REPEATED = {"type": "SelfComposedDpEvent", "count": 50, "event": SAMPLED}
THEIRS = [
    GAUSSIAN,
    {"type": "LaplaceDpEvent", "noise_multiplier": 3.0},
    SAMPLED,
    REPEATED,
    {"type": "ComposedDpEvent", "events": [REPEATED, GAUSSIAN, {"type": "NoOpDpEvent"}]},
    {"type": "ZCDpEvent", "rho": 0.1},
    {"type": "ZCDpEvent", "rho": 0.1, "xi": 0.0},
    {"type": "RepeatAndSelectDpEvent", "event": REPEATED, "mean": 10, "shape": 1},
    {"type": "RepeatAndSelectDpEvent", "event": REPEATED, "mean": 10, "shape": 0},
    {"type": "RepeatAndSelectDpEvent", "event": REPEATED, "mean": 10, "shape": 0.5},
    {"type": "RepeatAndSelectDpEvent", "event": REPEATED, "mean": 10, "shape": "inf"},
    {"type": "NonPrivateDpEvent"},
]


def made_by_dp_accounting(data: dict[str, Any]) -> dp_event.DpEvent:
    """Build dp-accounting's own object by the names of its class and of its fields."""
    values = {name: value for name, value in data.items() if name != "type"}
    if "event" in values:
        values["event"] = made_by_dp_accounting(values["event"])
    if "events" in values:
        values["events"] = [made_by_dp_accounting(each) for each in values["events"]]
    if "shape" in values:
        values["shape"] = float(values["shape"])
    made: dp_event.DpEvent = getattr(dp_event, data["type"])(**values)
    return made


@pytest.mark.parametrize("data", THEIRS, ids=lambda data: data["type"])
def test_an_event_of_dp_accounting_costs_what_dp_accounting_says(data: dict[str, Any]) -> None:
    event = event_from_json(json.dumps(data))
    theirs = made_by_dp_accounting(data)
    accountant = PLDAccountant()
    if not accountant.supports(theirs):
        accountant = RdpAccountant([1 + x / 20 for x in range(1, 1200)])
    exact = isinstance(accountant, PLDAccountant)
    cost = accountant.compose(theirs).get_epsilon(1e-5)
    if math.isinf(cost):
        assert math.isinf(epsilon(event, 1e-5).epsilon)
        return
    # Where both have Renyi divergences alone, ours must give the same one.
    ours = epsilon(event, 1e-5, method="best" if exact else "rdp").epsilon
    assert ours == pytest.approx(cost, rel=0.005)


def test_every_event_of_dp_accounting_is_read_or_refused_by_name() -> None:
    classes = vars(dp_event).values()
    names = {
        each.__name__
        for each in classes
        if isinstance(each, type) and issubclass(each, dp_accounting.DpEvent)
    }
    assert {*DP_ACCOUNTING, "NoOpDpEvent"} < names
    for name in sorted(names - {*DP_ACCOUNTING, "NoOpDpEvent"}):
        with pytest.raises(InvalidInputError, match="has no exact counterpart") as caught:
            event_from_dict({"type": name})
        assert "SelfComposedDpEvent" in str(caught.value)
    for name in (*DP_ACCOUNTING, "NoOpDpEvent"):
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {**GAUSSIAN, "sigma": 1},
            "field = 'sigma': GaussianDpEvent takes noise_multiplier. Did you",
        ),
        (
            {"type": "SelfComposedDpEvent", "event": GAUSSIAN},
            "field = 'count': is required by Self",
        ),
        ({"type": "ZCDpEvent", "rho": 1.0, "xi": 0.5}, "xi = 0.5: must be 0"),
        ({"type": "GausianDpEvent"}, "Did you mean GaussianDpEvent?"),
        ({"type": "Gaussian"}, "Did you mean gaussian?"),
        ({"noise_multiplier": 1.0}, "type = None: must be given by every event"),
        ({**SAMPLED, "rate": 0.1}, "field = 'rate': PoissonSampledDpEvent takes"),
    ],
)
def test_what_is_nearly_an_event_is_one_sentence(data: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        event_from_dict(data)
    assert says in str(caught.value)


def test_a_translated_event_is_written_in_the_public_format() -> None:
    event: Event = event_from_dict(REPEATED)
    assert event.to_dict() == {
        "type": "repeated",
        "count": 50,
        "event": {
            "type": "poisson_sampled",
            "rate": 0.1,
            "event": {"type": "gaussian", "noise_multiplier": 2.0},
        },
    }
