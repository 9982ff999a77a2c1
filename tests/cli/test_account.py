"""``privtune account`` from a file and from standard input, for people and for programs."""

import json
import math
import re
import time
from decimal import Decimal

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from typer.testing import CliRunner

from privtune.accounting import (
    Adjacency,
    ApproximateDP,
    Composed,
    Gaussian,
    Geometric,
    NonPrivate,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    delta,
    epsilon,
    event_from_dict,
    lower_bound,
)
from privtune.accounting.costs import sensitivity
from privtune.cli._common import patience
from privtune.cli.account import Neighbours, app
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import ceil_digits

pytestmark = pytest.mark.quick

BASE = Repeated(400, PoissonSampled(0.05, Gaussian(2.0)))
TUNED = PrivateSelection(BASE, Geometric(20))
EVENT = Composed([TUNED, Gaussian(5.0)])
runner = CliRunner()


def run(*arguments, event=TUNED):
    result = runner.invoke(app, [*arguments], input=event.to_json(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def printed(pattern, text):
    return [Decimal(number) for number in re.findall(pattern, text)]


@pytest.mark.parametrize("noise", [0.6, 1.0, 1.7, 3.1])
def test_what_is_printed_is_no_less_than_what_is_reported(noise):
    event = Gaussian(noise)
    answer, spent = epsilon(event, 1e-5), delta(event, 1.0)
    for command in ("epsilon", "explain", "sensitivity", "compare"):
        [shown, *_] = printed(
            r"(?:ε = |PrivTune +│ )([\d.e-]+)", run(command, "-", "--delta", "1e-5", event=event)
        )
        assert Decimal(answer.epsilon) <= shown <= Decimal(answer.epsilon * (1 + 1e-5)), command
    text = run("delta", "-", "--epsilon", "1", event=event)
    assert Decimal(spent.delta) <= printed(r"δ = ([\d.e-]+)", text)[0]
    [least] = printed(r"lower +│ ([\d.e-]+)", run("epsilon", "-", "--delta", "1e-5", event=event))
    assert least <= Decimal(lower_bound(event, 1e-5))
    found = sensitivity(event, 1e-5)
    text = run("sensitivity", "-", "--delta", "1e-5", event=event)
    for change in found.changes:
        [shown] = printed(re.escape(change.text) + r" +│ ([\d.e-]+)", text)
        assert Decimal(change.epsilon) <= shown


def test_epsilon_as_json_has_every_bound():
    document = json.loads(run("epsilon", "-", "--delta", "1e-5", "--json"))
    answer = epsilon(TUNED, 1e-5)
    assert document["epsilon"] == answer.epsilon
    assert document["method"] == "envelope"
    assert document["adjacency"] == "add-remove"
    assert document["delta"] == 1e-5
    assert document["bounds"]["lower"] == lower_bound(TUNED, 1e-5)
    assert set(document["bounds"]) == {"rdp", "envelope", "profile", "liu-talwar", "lower"}
    assert document["bounds"]["lower"] <= document["epsilon"] <= document["bounds"]["rdp"]


@pytest.mark.parametrize("method", ["rdp", "pld", "best"])
def test_methods(method):
    document = json.loads(
        run("epsilon", "-", "--delta", "1e-5", "--method", method, "--json", event=BASE)
    )
    assert document["epsilon"] == epsilon(BASE, 1e-5, method=method).epsilon


def test_from_a_file(tmp_path):
    path = tmp_path / "event.json"
    path.write_text(json.dumps(EVENT.to_dict()))
    document = json.loads(run("epsilon", str(path), "--delta", "1e-6", "--json"))
    assert document["epsilon"] == epsilon(EVENT, 1e-6).epsilon
    shown = run("epsilon", str(path), "--delta", "1e-6")
    assert f"{ceil_digits(document['epsilon'], 6):.6g}" in shown
    assert "rdp" in shown


def test_calibrate():
    document = json.loads(
        run("calibrate", "-", "--epsilon", "1", "--delta", "1e-5", "--json", event=EVENT)
    )
    event = event_from_dict(document["event"])
    assert document["guarantee"]["epsilon"] == epsilon(event, 1e-5).epsilon <= 1.0
    assert event.events[1].noise_multiplier == pytest.approx(5.0 * document["scale"])
    assert "noise ×" in run("calibrate", "-", "--epsilon", "1", "--delta", "1e-5", event=BASE)


def test_explain():
    document = json.loads(run("explain", "-", "--json", event=EVENT))
    assert document["tree"]["epsilon"] == epsilon(EVENT, 1e-5).epsilon
    assert len(document["tree"]["children"]) == 2
    shown = run("explain", "-", event=EVENT)
    assert "best of K runs" in shown
    assert "Poisson sample" in shown


def test_infinity_is_a_word():
    document = json.loads(run("epsilon", "-", "--delta", "1e-5", "--json", event=NonPrivate()))
    assert document["epsilon"] == "inf"
    assert "∞" in run("epsilon", "-", "--delta", "1e-5", event=NonPrivate())


@pytest.mark.parametrize(
    "arguments",
    [
        ("epsilon", "/no/such/file.json", "--delta", "1e-5"),
        ("epsilon", "-", "--delta", "2"),
        ("epsilon", "-", "--delta", "1e-5", "--adjacency", "replace-one"),
        ("calibrate", "-", "--epsilon", "-1", "--delta", "1e-5"),
        ("delta", "-", "--epsilon", "nan"),
    ],
)
def test_refusals_are_errors_of_the_project(arguments):
    result = runner.invoke(app, list(arguments), input=BASE.to_json())
    assert isinstance(result.exception, InvalidInputError)
    assert str(result.exception)


def test_what_is_not_finite_or_not_usual_is_explained():
    leak = ApproximateDP(1.0, 1e-4)
    said = run("epsilon", "-", "--delta", "1e-5", event=leak)
    assert "ε = ∞ at δ = 1e-05 (add-remove)\n" in said
    assert "No ε is enough: a part has δ = 0.0001, which is above the target δ = 1e-05." in said
    assert "No ε" not in run("epsilon", "-", "--delta", "1e-3", event=leak)
    replaced = run(
        "epsilon", "-", "--delta", "1e-5", "--adjacency", "replace-one", event=Gaussian(2.0)
    )
    assert "over the sensitivity to a replacement" in replaced
    assert "replacement" not in run("epsilon", "-", "--delta", "1e-5", event=Gaussian(2.0))
    small = ("dpsgd", "--records", "1077", "--batch", "64", "--epochs", "2", "--noise", "2")
    assert "δ = 0.01 is above one over the 1,077 records" in run(*small, "--delta", "0.01")
    assert "is above one over" not in run(*small, "--delta", "1e-5")


TF_PRIVACY = [  # noise multiplier, epochs, epsilon: tensorflow/privacy, tutorials/README.md
    (1.3, 15, 1.19),
    (1.1, 60, 3.01),
    (0.7, 45, 7.10),
]
MNIST = ("dpsgd", "--records", "60000", "--batch", "256", "--delta", "1e-5")


def dpsgd(*arguments):
    result = runner.invoke(app, [*MNIST, *arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


@pytest.mark.parametrize(("noise", "epochs", "published"), TF_PRIVACY)
def test_five_numbers_are_the_training_that_tf_privacy_has_published(noise, epochs, published):
    document = dpsgd("--noise", str(noise), "--epochs", str(epochs))
    theirs = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(document["rate"], dp_event.GaussianDpEvent(noise)),
        document["steps"],
    )
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    renyi = rdp_privacy_accountant.RdpAccountant(orders).compose(theirs)
    # The tutorial is older than today's conversion: this is the one of Mironov (2017).
    bounds = [
        bound + math.log(1e5) / (order - 1) for order, bound in zip(orders, renyi._rdp, strict=True)
    ]
    assert min(bounds) == pytest.approx(published, abs=0.01)
    exact = pld_privacy_accountant.PLDAccountant().compose(theirs).get_epsilon(1e-5)
    assert document["epsilon"] == pytest.approx(exact, rel=2e-3)
    assert document["epsilon"] < published


@pytest.mark.parametrize("target", [0.5, 3.0, 8.0])
def test_a_target_gives_the_least_noise_that_meets_it(target):
    document = dpsgd("--epsilon", str(target), "--epochs", "15")
    noise = document["noise_multiplier"]
    again = dpsgd("--noise", str(noise), "--epochs", "15")
    assert again["epsilon"] <= target
    less = dpsgd("--noise", str(noise * 0.999), "--epochs", "15")
    assert less["epsilon"] > target
    shown = runner.invoke(app, [*MNIST, "--epsilon", str(target), "--epochs", "15"]).stdout
    assert printed(r"noise multiplier = ([\d.]+)", shown)[0] >= Decimal(str(noise))
    for word in ("add-remove", "pld", "Poisson", "256/60000", "3,516 steps"):
        assert word in shown


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (("--batch", "60001", "--noise", "1"), "number of records, 60000"),
        (("--records", "0", "--noise", "1"), "records = 0"),
        (("--noise", "-1"), "noise_multiplier = -1"),
        (("--noise", "nan"), "noise_multiplier = nan"),
        (("--noise", "1", "--delta", "1"), "delta = 1"),
        (("--noise", "1", "--epochs", "0"), "epochs = 0"),
        (("--noise", "1", "--epochs", "1e30"), "epochs = 1e+30"),
        (("--noise", "1", "--epsilon", "3"), "Both were given"),
        ((), "Neither was given"),
        (("--epsilon", "0"), "epsilon = 0"),
    ],
)
def test_a_wrong_number_is_one_sentence(changed, word):
    result = runner.invoke(app, [*MNIST, "--epochs", "15", *changed])
    assert isinstance(result.exception, PrivTuneError)
    assert word in str(result.exception)
    assert not result.stdout


def test_compare():
    document = json.loads(run("compare", "-", "--json", event=BASE))
    assert document["ours"]["epsilon"] == epsilon(BASE, 1e-5).epsilon
    assert document["lower"] == lower_bound(BASE, 1e-5)
    others = {other["tool"]: other for other in document["others"]}
    assert others["dp-accounting PLD"]["epsilon"] == pytest.approx(
        document["ours"]["epsilon"], rel=1e-3
    )
    shown = run("compare", "-", "--delta", "1e-6")
    assert "none" in shown
    assert f"{ceil_digits(epsilon(TUNED, 1e-6).epsilon, 6):.6g}" in shown


def test_sensitivity():
    document = json.loads(run("sensitivity", "-", "--json", event=BASE))
    assert document["guarantee"]["epsilon"] == epsilon(BASE, 1e-5).epsilon
    found = {change["text"]: change for change in document["changes"]}
    smaller = found["δ ten times smaller"]
    assert smaller["epsilon"] == epsilon(BASE, 1e-6).epsilon
    assert smaller["difference"] == smaller["epsilon"] - document["guarantee"]["epsilon"]
    shown = run("sensitivity", "-", event=BASE)
    assert "twice the noise" in shown
    assert "∞" in run("sensitivity", "-", event=Composed([BASE, NonPrivate()]))


def test_the_command_line_knows_every_adjacency() -> None:
    assert [choice.value for choice in Neighbours] == [choice.value for choice in Adjacency]


def test_what_takes_long_is_told_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with patience("Planning", after=0.01):
        time.sleep(0.2)
    with patience("Nothing", after=30.0):
        pass
    assert capsys.readouterr() == ("", "Planning ...\n")
