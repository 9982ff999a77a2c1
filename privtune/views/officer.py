"""Answers to the questions of privacy officers and registries, from plans, ledger and certificate.

NIST Special Publication 800-226 (March 2025, doi:10.6028/NIST.SP.800-226) evaluates a claim of
differential privacy by a pyramid: each layer rests on the one below it. The questions are ours, in the
order of its layers; ``templates/officer.txt`` holds them. The entry of OpenDP's registry follows its
``schemas/deployments-schema.yaml``. What no tool can know is left open, and marked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from privtune.prose import capitalise
from privtune.tasks import A_RECORD, MECHANISM
from privtune.views.templating import render
from privtune.views.text import describe_dataset, public_facts, stage_line, together, weakened

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


class ChargeLine(NamedTuple):
    """One charge as a line of text, with its study and arm: both empty for a release made elsewhere.

    Args:
        study: The study that was charged.
        arm: Its arm.
        text: Number, event, ε alone and state.
    """

    study: str
    arm: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """The facts of a study's certificate, in the words that officers and registries ask for.

    Every number is one of the certificate's, or follows from its events alone.

    Args:
        study: Its name.
        task: Its task's name.
        plans: Of all arms.
        weakened: What weakens the guarantee; empty if nothing does.
        certificate: The budget's.
        unprotected: Arms that released something without any guarantee.
        stages: What each stage released, a line each.
    """

    study: str
    task: str
    plans: tuple[Plan, ...]
    weakened: str
    certificate: Mapping[str, Any]
    unprotected: tuple[str, ...]
    stages: tuple[str, ...]

    @property
    def terms(self) -> Mapping[str, Any]:
        """The budget's terms, as the certificate has them."""
        terms: Mapping[str, Any] = self.certificate["budget"]["terms"]
        return terms

    @property
    def unit(self) -> str:
        """The privacy unit, in a word."""
        return str(self.terms["unit"])

    @property
    def wording(self) -> PromiseWording:
        """The wording of the guarantee for this privacy unit."""
        return PromiseWording(self.unit)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee (ε, δ) of all charges to the budget together."""
        record = self.certificate["guarantee"]
        return Guarantee(
            float(record["epsilon"]),
            float(record["delta"]),
            record["method"],
            Adjacency(record["adjacency"]),
        )

    @property
    def neighbours(self) -> str:
        """The definition of neighbouring datasets, in words."""
        return self.wording.define_neighbours(self.guarantee.adjacency)

    @property
    def dataset(self) -> str:
        """The protected dataset in words, as the budget's log has it; if it has no name, by the budget's."""
        return describe_dataset(self.certificate)

    @property
    def spent(self) -> str:
        """The ε and δ of all charges together, with the method that computed them, in words."""
        spent = self.guarantee
        return (
            f"ε = {show_epsilon(spent.epsilon, 4)} at δ = {spent.delta:g}, {spent.adjacency} "
            f"({together(spent)})"
        )

    @property
    def limit(self) -> str:
        """The budget's limit, fixed at its creation, and whether it is exceeded and closed, in words."""
        excess = "not exceeded" if self.certificate["within_budget"] else "EXCEEDED"
        state = "closed for good" if self.certificate["budget"]["closed"] else "still open"
        return (
            f"limit for everything released on this budget, fixed when it was created: ε = "
            f"{self.terms['epsilon']:g} at δ = {self.terms['delta']:g}; {excess}; the budget is {state}"
        )

    @property
    def libraries(self) -> str:
        """The libraries that computed the certificate, with their versions."""
        versions = self.certificate["libraries"].items()
        return ", ".join(f"{name} {version}" for name, version in versions)

    @property
    def loud(self) -> tuple[str, ...]:
        """The sentences on what weakens the guarantee."""
        sentences = []
        if self.unprotected:
            names = ", ".join(self.unprotected)
            sentences.append(f"What these arms released has no privacy guarantee: {names}.")
        if self.weakened:
            sentence = capitalise(self.weakened)
            sentences.append(f"{sentence}.")
        if not self.certificate["within_budget"]:
            sentences.append(
                "The budget is exceeded: all charges together cost more than its limit."
            )
        audits = self.certificate.get("audits", ())
        return (*sentences, *contradictions(audits))

    @property
    def noises(self) -> str:
        """The sources of noise in words, each once, with those of trainings by other libraries."""
        sources: dict[str, None] = {}
        for plan in self.plans:
            noise = plan.training.noise
            sources[noise.words] = None
        for arm, _ in self.declared:
            sources[f"in the training of {arm}, that of the other library"] = None
        return "; ".join(sources)

    @property
    def declared(self) -> list[tuple[str, str]]:
        """The arms with a declared training, each with the text of the declaration."""
        arms = []
        for plan in self.plans:
            mechanism = plan.public_facts.get(MECHANISM)
            if mechanism:
                arms.append((plan.arm, mechanism))
        return arms

    @property
    def public(self) -> list[str]:
        """The facts that are declared public, a line each."""
        lines = []
        for arms, facts in public_facts(self.plans):
            lines += [f"{arms}: {name}: {value}" for name, value in facts.items()]
        return lines

    @property
    def grouped(self) -> list[str]:
        """The sentences on units that are sampled and clipped as a whole, if they are more than a record."""
        sentences: dict[str, None] = {}
        for plan in self.plans:
            unit = plan.public_facts.get(A_RECORD)
            if unit:
                sentences[f"Unit that is sampled and clipped as a whole: {unit}."] = None
        return list(sentences)

    @property
    def whose(self) -> str:
        """The question about the privacy unit that only the curator can answer."""
        return self.wording.open_question

    @property
    def audited(self) -> list[str]:
        """The results of the audits in the certificate, a line for each mechanism."""
        audits = self.certificate.get("audits", ())
        lines = []
        for audit in audits:
            for row in audit["rows"]:
                lines.append(
                    f"{audit['study']}/{audit['arm']}, {row['mechanism']}: by experiment on made-up "
                    f"records ε ≥ {row['audited']:.4g} at {audit['confidence']:.0%} confidence "
                    f"({row['runs']:,} runs, seed {audit['seed']}); lower bound "
                    f"{show_left(row['lower'], 4)}, reported {show_epsilon(row['reported'], 4)}, "
                    f"published {audit['published']:g}."
                )
        return [*lines, *contradictions(audits)]

    @cached_property
    def charges(self) -> tuple[ChargeLine, ...]:
        """Every charge that was not voided, oldest first."""
        lines = []
        for charge in self.certificate["charges"]:
            if charge["state"] == ChargeState.VOIDED:
                continue
            line = ChargeLine(
                charge["study"],
                charge["arm"],
                self._describe_charge(charge),
            )
            lines.append(line)
        return tuple(lines)

    def _describe_charge(self, charge: Mapping[str, Any]) -> str:
        """Return one line about a charge: its number, event, state, and the ε of this charge alone."""
        event = event_from_dict(charge["event"])
        together = self.guarantee
        alone = epsilon(event, together.delta, adjacency=together.adjacency)
        names = filter(None, (charge["study"], charge["arm"]))
        origin = "/".join(names) or "outside of a study"
        note = ""
        if charge["note"]:
            note = f" ({charge['note']})"
        return (
            f"{charge['id']}, {origin}{note}: {formula(event)}; alone ε = "
            f"{show_epsilon(alone.epsilon, 4)}; {charge['state']}"
        )

    @property
    def study_lines(self) -> list[ChargeLine]:
        """The study's own charges."""
        return [line for line in self.charges if line.study == self.study]

    @property
    def others(self) -> list[ChargeLine]:
        """The charges to the same budget from outside of the study."""
        return [line for line in self.charges if line.study != self.study]


def evidence(study: Study) -> Evidence:
    """Return the evidence of a study's certificate, once something was released.

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
        tuple(map(stage_line, study.stages)),
    )


def to_markdown(study: Study) -> str:
    """Return the answered questionnaire as Markdown, with what weakens the guarantee at the top.

    Raises:
        PrivTuneError: Nothing was released yet.
    """
    proof = evidence(study)
    lines = [f"# Evaluation after NIST SP 800-226: {_escaped(proof.study)}", ""]
    for line in proof.loud:
        lines += [f"> **{_escaped(line)}**", ">"]
    for line in _head(proof):
        lines += [f"> {_escaped(line)}", ">"]
    lines[-1] = ""  # no bar behind the last one
    for layer in _layers(proof):
        lines += [f"## {layer.title}", ""]
        for question in layer.questions:
            lines += [f"### {question.words}", ""]
            lines += [f"- {_escaped(line)}" for line in question.known]
            if question.open:
                lines.append(f"- **{OPEN}:** {question.open}")
            lines.append("")
    return "\n".join(lines)


def to_html(study: Study) -> str:
    """Return the answered questionnaire as one HTML page that needs nothing from outside.

    Raises:
        PrivTuneError: Nothing was released yet.
    """
    proof = evidence(study)
    return render(
        "officer.html",
        title=f"Evaluation after NIST SP 800-226: {proof.study}",
        loud=proof.loud,
        head=_head(proof),
        layers=_layers(proof),
        open=OPEN,
    )


@dataclass
class OfficerQuestion:
    """A question of a layer, with its known answer and what is left open.

    Args:
        words: The question.
        known: What the evidence says, a line each.
        open: What is left to answer; empty if nothing is.
    """

    words: str
    known: list[str] = field(default_factory=list)
    open: str = ""


@dataclass
class Layer:
    """A layer of NIST's pyramid, with its questions.

    Args:
        title: Its title.
        questions: Of the layer, in order.
    """

    title: str
    questions: list[OfficerQuestion] = field(default_factory=list)


def _layers(proof: Evidence) -> list[Layer]:
    """Return the questionnaire with its answers, from the top of the pyramid to its base.

    The template's lines begin with a mark of their kind: a layer, a question, what is known, what is
    open. Values are on one line each, so that nothing in them begins a line.
    """
    spent = ceil_to(proof.guarantee.epsilon, 3)
    meaning = proof.wording.explain_epsilon(spent, proof.guarantee.delta)
    questionnaire = render("officer.txt", found=proof, meaning=meaning)
    layers: list[Layer] = []
    question = OfficerQuestion("")  # none was asked yet
    for line in questionnaire.splitlines():
        kind, _, words = line.partition(" ")
        match kind:
            case "#":
                layers.append(Layer(words))
            case "?":
                question = OfficerQuestion(words)
                layers[-1].questions.append(question)
            case "-":
                question.known.append(words)
            case "!":
                question.open = words
    return layers


def _head(proof: Evidence) -> list[str]:
    """Return the opening lines: from which certificate the answers come, and what they cannot say."""
    exported_at = proof.certificate["exported_at"]
    version = proof.certificate["libraries"]["privtune"]
    return [
        f"Made from the certificate of {exported_at} of budget {proof.terms['name']}, by PrivTune "
        f"{version}. The questions follow NIST SP 800-226 (March 2025), from the top layer of its "
        "pyramid to the base. They do not replace reading it.",
        f"What no tool can know is marked “{OPEN}”.",
    ]


def _escaped(value: str) -> str:
    """Return a text on one line, with Markdown's special characters escaped."""
    line = " ".join(value.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", line)


def to_yaml(study: Study) -> str:
    """Return a study as a draft of an entry of OpenDP's registry of deployments, for its author to complete.

    Raises:
        PrivTuneError: Nothing was released, or something without any guarantee.
    """
    proof = evidence(study)
    spent = proof.guarantee
    if proof.unprotected or not math.isfinite(spent.epsilon):
        what = ", ".join(proof.unprotected) or f"budget {proof.terms['name']}"
        raise PrivTuneError(
            f"{what} released something without any guarantee: that is no deployment of differential "
            "privacy, and cannot be registered."
        )
    charges = {line.arm: line.text for line in proof.study_lines}
    arms = []
    tuning = []
    for plan in proof.plans:
        arm = f"{plan.arm} ({plan.strategy})"
        arms.append(arm)
        charge = charges.get(plan.arm)
        if charge is not None:
            tuning.append(f"{arm}: {_tuning(plan)} Charge {charge}.")
    study_name = proof.study.lower()
    slug = re.sub(r"[^a-z0-9]+", "-", study_name)
    return render(
        "registry.yaml",
        schema=SCHEMA,
        open=OPEN,
        found=proof,
        slug=slug.strip("-") or "study",
        arms=", ".join(arms),
        epsilon=ceil_to(spent.epsilon, 4),
        # YAML reads 1e-05, without a point, as a text.
        delta=yaml.safe_dump(spent.delta).split()[0],
        tuning=tuning,
        upper=capitalise,
    )


def _tuning(plan: Plan) -> str:
    """Say in a sentence how an arm came to its hyperparameters: fixed, adapted within one run, or searched.

    It follows the arm's name.
    """
    if plan.search is None and plan.params:
        return "its hyperparameters were fixed in advance."
    if plan.search is None:
        return (
            "adapts its hyperparameters within one training, from noised releases that are charged."
        )
    scores = "noised scores"
    if plan.score is not None and plan.score.event is None:
        scores = "scores on a split that is declared public"
    sentence = f"chooses among trials by {scores}."
    if plan.is_sealed:
        sentence += " The number of trials is secret, and only the winner is released."
    return sentence
