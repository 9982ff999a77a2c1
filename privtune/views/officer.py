"""What officers and registries ask for, answered from plans, ledger and certificate.

NIST Special Publication 800-226 (March 2025, doi:10.6028/NIST.SP.800-226) evaluates a claim of
differential privacy by a pyramid: each layer rests on the one below it. The questions are ours, in the
order of its layers; ``templates/officer.txt`` holds them. The entry of OpenDP's registry follows its
``schemas/deployments-schema.yaml``. What no tool can know is left open, and marked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from privtune.accounting import Adjacency, Guarantee, epsilon, event_from_dict
from privtune.accounting.registry import formula
from privtune.errors import PrivTuneError
from privtune.ledger import ChargeState
from privtune.ledger.audits import contradictions
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to, show_epsilon, show_left
from privtune.tasks import A_RECORD, MECHANISM
from privtune.views.page import render
from privtune.views.text import public_facts, stage_line, together, weakened

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.study import Study

OPEN = "To be answered by you"
"""Marks what no tool can know."""

SCHEMA = (
    "https://github.com/opendp/deployments-registry-data/blob/"
    "3e9c812a924cf01d228f26f6c462c59c391c3f2a/schemas/deployments-schema.yaml"
)
"""The version of the schema that entries are tested against."""


class Line(NamedTuple):
    """One charge: its study and arm, empty for a release made elsewhere, and all of it in one line."""

    study: str
    arm: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """What a study's certificate says, in the words that officers and registries ask for.

    Every number is one of the certificate's, or follows from its events alone.
    """

    study: str
    task: str
    plans: tuple[Plan, ...]
    weakened: str
    certificate: Mapping[str, Any]
    unprotected: tuple[str, ...]  # arms that released something without any guarantee
    stages: tuple[str, ...]

    @property
    def terms(self) -> Mapping[str, Any]:
        """The budget's terms."""
        terms: Mapping[str, Any] = self.certificate["budget"]["terms"]
        return terms

    @property
    def unit(self) -> str:
        """What is protected, in a word."""
        return str(self.terms["unit"])

    @property
    def wording(self) -> PromiseWording:
        """The words of what is promised."""
        return PromiseWording(self.unit)

    @property
    def guarantee(self) -> Guarantee:
        """What everything charged to the budget costs together."""
        said = self.certificate["guarantee"]
        adjacency = Adjacency(said["adjacency"])
        return Guarantee(float(said["epsilon"]), float(said["delta"]), said["method"], adjacency)

    @property
    def neighbours(self) -> str:
        """What neighbouring datasets are."""
        return self.wording.define_neighbours(self.guarantee.adjacency)

    @property
    def dataset(self) -> str:
        """The protected dataset, as the budget describes it, or the task."""
        return self.terms["dataset"] or f"the private data of task {self.task}"

    @property
    def spent(self) -> str:
        """ε and δ of everything, and how they are known."""
        spent = self.guarantee
        return (
            f"ε = {show_epsilon(spent.epsilon, 4)} at δ = {spent.delta:g}, {spent.adjacency} "
            f"({together(spent)})"
        )

    @property
    def limit(self) -> str:
        """What was fixed before anything was released."""
        kept = "kept" if self.certificate["within_budget"] else "BROKEN"
        ended = "closed for good" if self.certificate["budget"]["closed"] else "not closed"
        return (
            f"fixed beforehand, for everything ever released on this budget: ε = "
            f"{self.terms['epsilon']:g} at δ = {self.terms['delta']:g}; it is {kept}, and {ended}"
        )

    @property
    def libraries(self) -> str:
        """The libraries that computed the certificate, with their versions."""
        return ", ".join(f"{name} {of}" for name, of in self.certificate["libraries"].items())

    @property
    def loud(self) -> tuple[str, ...]:
        """What takes away from the guarantee, a sentence each."""
        found = []
        if self.unprotected:
            names = ", ".join(self.unprotected)
            found.append(f"No guarantee at all covers what these arms released: {names}.")
        if self.weakened:
            found.append(f"{self.weakened[:1].upper()}{self.weakened[1:]}.")
        if not self.certificate["within_budget"]:
            found.append("The budget is broken: what was charged costs more than it promises.")
        return (*found, *contradictions(self.certificate.get("audits", ())))

    @property
    def noises(self) -> str:
        """Where noise comes from, each source once; that of a declared training is its own."""
        own = [plan.training.noise for plan in self.plans]
        said = [f"{noise.source}, {noise.floating_point}" for noise in own]
        said += [f"in the training of {arm}, that of another library" for arm, _ in self.declared]
        return "; ".join(dict.fromkeys(said))

    @property
    def declared(self) -> list[tuple[str, str]]:
        """Arms whose training is declared, and by whom."""
        known = ((plan.arm, plan.public_facts.get(MECHANISM)) for plan in self.plans)
        return [(arm, words) for arm, words in known if words]

    @property
    def public(self) -> list[str]:
        """What is declared public, a line each."""
        facts = public_facts(self.plans)
        return [f"{arms}: {name}: {value}" for arms, f in facts for name, value in f.items()]

    @property
    def grouped(self) -> list[str]:
        """What a unit is made of, where it is more than a record."""
        said = dict.fromkeys(plan.public_facts.get(A_RECORD) for plan in self.plans)
        return [f"What is sampled and clipped as one: {one}." for one in said if one]

    @property
    def whose(self) -> str:
        """What is left to answer about the unit."""
        return self.wording.open_question

    @property
    def audited(self) -> list[str]:
        """What the audits say that the certificate carries."""
        audits = self.certificate.get("audits", ())
        said = [
            f"{audit['study']}/{audit['arm']}, {row['mechanism']}: by experiment on made-up records ε ≥ "
            f"{row['audited']:.4g} at {audit['confidence']:.0%} confidence ({row['runs']:,} runs, seed "
            f"{audit['seed']}); lower bound {show_left(row['lower'], 4)}, reported "
            f"{show_epsilon(row['reported'], 4)}, published {audit['published']:g}."
            for audit in audits
            for row in audit["rows"]
        ]
        return [*said, *contradictions(audits)]

    @cached_property
    def charges(self) -> tuple[Line, ...]:
        """Every charge that was not voided, oldest first."""
        adjacency, delta = self.guarantee.adjacency, self.guarantee.delta
        lines = []
        for charge in self.certificate["charges"]:
            if charge["state"] == ChargeState.VOIDED:
                continue
            event = event_from_dict(charge["event"])
            alone = epsilon(event, delta, adjacency=adjacency).epsilon
            who = "/".join(filter(None, (charge["study"], charge["arm"]))) or "outside of a study"
            note = f" ({charge['note']})" if charge["note"] else ""
            said = (
                f"{charge['id']}, {who}{note}: {formula(event)}; alone ε = {show_epsilon(alone, 4)}; "
                f"{charge['state']}"
            )
            lines.append(Line(charge["study"], charge["arm"], said))
        return tuple(lines)

    @property
    def own(self) -> list[Line]:
        """The study's own charges."""
        return [line for line in self.charges if line.study == self.study]

    @property
    def others(self) -> list[Line]:
        """What others charged to the same budget."""
        return [line for line in self.charges if line.study != self.study]


def evidence(study: Study) -> Evidence:
    """Collect what a study's certificate says, once something was released.

    Raises:
        PrivTuneError: Nothing was released yet.
        LedgerCorruptedError: The budget's log does not verify.
    """
    released = [arm.plan for arm in study.status() if arm.release is not None]
    if not released:
        raise PrivTuneError(
            f"study {study.name!r} has released nothing yet, so there is nothing to answer for; run "
            f"it first: privtune study run {study.name}"
        )
    return Evidence(
        study.name,
        study.spec.task_name,
        tuple(study.plans),
        weakened(study),
        study.certificate(),
        tuple(plan.arm for plan in released if not plan.is_private),
        tuple(stage_line(stage) for stage in study.stages),
    )


def to_markdown(study: Study) -> str:
    """Return the answers as Markdown."""
    found = evidence(study)
    head = [*(f"**{_escaped(line)}**" for line in found.loud), *map(_escaped, _head(found))]
    lines = [f"# Evaluation after NIST SP 800-226: {_escaped(found.study)}", ""]
    lines += [*[part for line in head for part in (f"> {line}", ">")][:-1], ""]
    for layer in _layers(found):
        lines += [f"## {layer['title']}", ""]
        for answer in layer["answers"]:
            lines += [f"### {answer['question']}", ""]
            lines += [f"- {_escaped(line)}" for line in answer["known"]]
            lines += [f"- **{OPEN}:** {answer['open']}"] if answer["open"] else []
            lines.append("")
    return "\n".join(lines)


def to_html(study: Study) -> str:
    """Return the answers as one page that needs nothing from outside."""
    found = evidence(study)
    return render(
        "officer.html",
        title=f"Evaluation after NIST SP 800-226: {found.study}",
        loud=found.loud,
        head=_head(found),
        layers=_layers(found),
        open=OPEN,
    )


def _layers(found: Evidence) -> list[dict[str, Any]]:
    """Return the questionnaire with its answers, from the top of the pyramid to its base."""
    spent = ceil_to(found.guarantee.epsilon, 3)
    means = found.wording.explain_epsilon(spent, found.guarantee.delta)
    layers: list[dict[str, Any]] = []
    for line in render("officer.txt", found=found, meaning=means).splitlines():
        kind, _, said = line.partition(" ")
        if kind == "#":
            layers.append({"title": said, "answers": []})
        elif kind == "?":
            layers[-1]["answers"].append({"question": said, "known": [], "open": ""})
        elif kind == "-":
            layers[-1]["answers"][-1]["known"].append(said)
        elif kind == "!":
            layers[-1]["answers"][-1]["open"] = said
    return layers


def _head(found: Evidence) -> list[str]:
    return [
        f"Made from the certificate of {found.certificate['exported_at']} of budget "
        f"{found.terms['name']}, by PrivTune {found.certificate['libraries']['privtune']}. The questions "
        "follow the pyramid of NIST SP 800-226 (March 2025), whose layers rest on those below; they do not "
        "replace reading it.",
        f"What no tool can know is marked “{OPEN}”.",
    ]


def _escaped(value: str) -> str:
    """Return text that Markdown shows as it is, whoever wrote it."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(value.split()))


def to_yaml(study: Study) -> str:
    """Return a study as a draft of an entry of OpenDP's registry of deployments, for its author to complete.

    Raises:
        PrivTuneError: Nothing was released, or something without any guarantee.
    """
    found = evidence(study)
    if found.unprotected or not math.isfinite(found.guarantee.epsilon):
        what = ", ".join(found.unprotected) or f"budget {found.terms['name']}"
        raise PrivTuneError(
            f"{what} released something without any guarantee: that is no deployment of differential "
            "privacy, and cannot be registered."
        )
    own = {line.arm: line.text for line in found.own}
    return render(
        "registry.yaml",
        schema=SCHEMA,
        open=OPEN,
        found=found,
        slug=re.sub(r"[^a-z0-9]+", "-", found.study.lower()).strip("-") or "study",
        arms=", ".join(f"{plan.arm} ({plan.strategy})" for plan in found.plans),
        epsilon=ceil_to(found.guarantee.epsilon, 4),
        # YAML reads 1e-05, without a point, as a text.
        delta=yaml.safe_dump(found.guarantee.delta).split()[0],
        tuning=[
            f"{plan.arm} ({plan.strategy}): {_tuning(plan)} Charge {own[plan.arm]}."
            for plan in found.plans
            if plan.arm in own
        ],
        upper=lambda line: line[:1].upper() + line[1:],
    )


def _tuning(plan: Plan) -> str:
    """Say in a sentence how an arm came to its hyperparameters."""
    if plan.search is None:
        return (
            "its hyperparameters were given beforehand."
            if plan.params
            else "sets its hyperparameters within one training, from releases that are paid for."
        )
    scored = plan.score is None or plan.score.event is not None
    how = "noised scores" if scored else "scores on a split that is declared public"
    kept = "The number of trials is secret, the winner alone is shown." if plan.is_sealed else ""
    return f"chooses among trials by {how}. {kept}".strip()
