"""What a certificate says of a study, in the words that officers and registries ask for.

Every number here is one of the certificate's, or follows from its events alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from privtune.accounting import Adjacency, Guarantee, epsilon, event_from_dict
from privtune.accounting.registry import formula
from privtune.errors import PrivTuneError
from privtune.ledger import RECORD, ChargeState
from privtune.ledger.audits import contradictions
from privtune.numbers import ceil_to, show_epsilon, show_left
from privtune.tasks import A_RECORD, MECHANISM
from privtune.views.report import Html, document, meaning, section, text
from privtune.views.text import public_facts, stage_line, together, weakened

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.study import Study

OPEN = "To be answered by you"
"""Marks what no tool can know."""

_NEIGHBOURS = {
    Adjacency.ADD_REMOVE: "one has one {unit} more than the other (add or remove)",
    Adjacency.REPLACE_ONE: "one {unit} of the one is replaced by any other",
}


@dataclass(frozen=True)
class Line:
    """One charge that was not voided.

    Args:
        id: The charge.
        study: The study that it is for; empty for a release made outside of one.
        arm: The study's arm.
        text: The whole of it in one line.
    """

    id: str
    study: str
    arm: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """A study that has released something, and the certificate of its budget.

    Args:
        study: Name of the study.
        task: Name of its task.
        plans: The plans of its arms.
        weakened: What weakens its guarantee; empty if nothing does.
        certificate: The certificate.
        unprotected: Arms that released something without any guarantee, which no budget holds.
        stages: What stages before the arms released, a line each.
    """

    study: str
    task: str
    plans: tuple[Plan, ...]
    weakened: str
    certificate: Mapping[str, Any]
    unprotected: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

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
    def guarantee(self) -> Guarantee:
        """What everything charged to the budget costs together."""
        said = self.certificate["guarantee"]
        adjacency = Adjacency(said["adjacency"])
        return Guarantee(float(said["epsilon"]), float(said["delta"]), said["method"], adjacency)

    @property
    def neighbours(self) -> str:
        """What neighbouring datasets are."""
        said = _NEIGHBOURS[self.guarantee.adjacency].format(unit=self.unit)
        return f"two datasets are neighbours if {said}"

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
    def noises(self) -> tuple[str, ...]:
        """Where noise comes from, each source once; that of a declared training is its own."""
        said: dict[str, None] = {}
        for plan in self.plans:
            own = plan.training.noise
            said[f"{own.source}, {own.floating_point}"] = None
            if MECHANISM in plan.public_facts:
                said[f"in the training of {plan.arm}, that of another library"] = None
        return tuple(said)

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
            lines.append(
                Line(
                    charge["id"],
                    charge["study"],
                    charge["arm"],
                    f"{charge['id']}, {who}{note}: {formula(event)}; alone ε = "
                    f"{show_epsilon(alone, 4)}; {charge['state']}",
                )
            )
        return tuple(lines)


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


@dataclass(frozen=True)
class Answer:
    """One question, what is known, and what is not.

    Args:
        question: The question.
        known: What plans, ledger and certificate say, a line each.
        open: What is left to the reader to answer; empty if nothing is.
    """

    question: str
    known: tuple[str, ...] = ()
    open: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer of the pyramid.

    Args:
        title: Its name.
        answers: Its questions.
    """

    title: str
    answers: tuple[Answer, ...]


def answers(found: Evidence) -> tuple[Layer, ...]:
    """Return the questions with their answers, from the top of the pyramid to its base."""
    return (
        Layer("Top: ε, δ and the unit of privacy", _top(found)),
        Layer("Middle: algorithms, correctness, side channels, security", _middle(found)),
        Layer("Base: access, trust, collection of the data", _base(found)),
    )


def to_markdown(study: Study) -> str:
    """Return the answers as Markdown."""
    found = evidence(study)
    lines = [f"# Evaluation after NIST SP 800-226: {_plain(found.study)}", "", *_quoted(found), ""]
    for layer in answers(found):
        lines += [f"## {layer.title}", ""]
        for answer in layer.answers:
            lines += [f"### {answer.question}", ""]
            lines += [f"- {_plain(line)}" for line in answer.known]
            if answer.open:
                lines.append(f"- **{OPEN}:** {answer.open}")
            lines.append("")
    return "\n".join(lines)


def to_html(study: Study) -> str:
    """Return the answers as one page that needs nothing from outside."""
    found = evidence(study)
    parts = [
        section(layer.title, *(_html(answer) for answer in layer.answers))
        for layer in answers(found)
    ]
    title = f"Evaluation after NIST SP 800-226: {found.study}"
    head = "".join(f"<p>{text(line)}</p>" for line in _head(found))
    loud = "".join(f'<p class="lead warn">{text(line)}</p>' for line in found.loud)
    sign = Html('<div class="sign"><div>Name, role</div><div>Date</div><div>Signature</div></div>')
    return document(title, Html(f"<h1>{text(title)}</h1>{loud}{head}"), *parts, sign)


def _top(found: Evidence) -> tuple[Answer, ...]:
    spent = ceil_to(found.guarantee.epsilon, 3)
    lines = found.charges
    others = [line for line in lines if line.study != found.study]
    return (
        Answer("How strong is the guarantee?", (f"Of everything: {found.spent}.",)),
        Answer("What does that number mean?", (meaning(spent, found.guarantee.delta, found.unit),)),
        Answer(
            "What is the limit, and who chose it?",
            (f"The budget {found.terms['name']}: {found.limit}.",),
            "who chose ε and δ, and why they are small enough for this data.",
        ),
        Answer(
            "Which variant of differential privacy?",
            (f"Approximate differential privacy, (ε, δ); {found.neighbours}.",),
        ),
        Answer(
            "What is the unit of privacy?",
            (f"One {found.unit} of: {found.dataset}.", *grouped(found)),
            whose(found.unit),
        ),
        Answer(
            "What else was released from the same data?",
            tuple(f"Charged to the same budget: {line.text}." for line in others)
            or ("Nothing else was charged to this budget.",),
            "what was or will be released without a charge, by whomever. The ledger cannot see it.",
        ),
    )


def audited(found: Evidence) -> tuple[str, ...]:
    """Return what the audits say that the certificate carries."""
    audits = found.certificate.get("audits", ())
    said = [
        f"{audit['study']}/{audit['arm']}, {row['mechanism']}: by experiment on made-up records ε ≥ "
        f"{row['audited']:.4g} at {audit['confidence']:.0%} confidence ({row['runs']:,} runs, seed "
        f"{audit['seed']}); lower bound {show_left(row['lower'], 4)}, reported "
        f"{show_epsilon(row['reported'], 4)}, published {audit['published']:g}."
        for audit in audits
        for row in audit["rows"]
    ]
    return (*said, *contradictions(audits)) or ("No audit was kept with this study.",)


def grouped(found: Evidence) -> tuple[str, ...]:
    """Return what a unit is made of, where it is more than a record."""
    said = dict.fromkeys(plan.public_facts.get(A_RECORD) for plan in found.plans)
    return tuple(f"What is sampled and clipped as one: {one}." for one in said if one)


def whose(unit: str) -> str:
    """Return what is left to answer about the unit."""
    if unit != RECORD:
        return (
            f"whether the rows' groups are right: the number above protects one {unit} as the data names "
            f"them; for whoever stands under k names ε is up to k times as large, and δ larger still."
        )
    return (
        f"whether one person can stand in several {RECORD}s. The number above protects one {RECORD}; "
        "for a person who has k of them, ε is up to k times as large, and δ larger still."
    )


def _middle(found: Evidence) -> tuple[Answer, ...]:
    own = [line for line in found.charges if line.study == found.study]
    public = [
        f"{arms}: {name}: {value}"
        for arms, facts in public_facts(found.plans)
        for name, value in facts.items()
    ]
    libraries = ", ".join(f"{k} {v}" for k, v in found.certificate["libraries"].items())
    return (
        Answer("What touched the data?", tuple(f"{line.text}." for line in own)),
        Answer(
            "Was the choice of hyperparameters accounted for?",
            (
                "Yes: each charge above is of a whole arm, every training, score and choice of its "
                "search included, and was made before the arm touched any data.",
            ),
            "whether the search space, the arms or given hyperparameters were themselves chosen with the "
            "help of this data.",
        ),
        Answer(
            "How is it known that what ran is what was charged?",
            (
                "Noise, rates and numbers of steps come from the plan whose digest stands with the charge, "
                "and the transcript of every training is checked against it at its end.",
                *(
                    f"Not so for arm {plan.arm}, whose training is {plan.public_facts[MECHANISM]}."
                    for plan in found.plans
                    if MECHANISM in plan.public_facts
                ),
                f"ε is recomputed from the charged events by whoever holds the certificate ({libraries}).",
            ),
            "who reviewed code of your own (models, losses, loops), if any runs.",
        ),
        Answer(
            "Was it tested that the guarantee holds as the software runs?",
            audited(found),
            "whether somebody else repeated it; privtune audit NAME --seed repeats an audit.",
        ),
        Answer("What is declared public, so that nothing protects it?", tuple(public)),
        Answer(
            "How useful are the results, and for whom are they worse?",
            (),
            "whether utility was measured, and whether small groups bear larger errors: noise and clipping "
            "weigh most on those who are rare in the data.",
        ),
        Answer(
            "How is noise made?",
            (f"Source and treatment of floating-point numbers: {'; '.join(found.noises)}.",),
            "whether that suffices: the default keeps the tails that δ needs, and hides nothing in the "
            "lowest bits.",
        ),
        Answer(
            "What do side channels tell?",
            tuple(
                f"Sealed of {plan.arm}: {', '.join(plan.sealed)}."
                for plan in found.plans
                if plan.sealed
            ),
            "who can watch the machine, its power, network or scheduler while a sealed round runs: its "
            "length tells about how many trials it has.",
        ),
    )


def _base(found: Evidence) -> tuple[Answer, ...]:
    name = found.terms["name"]
    return (
        Answer(
            "Whom must the people in the data trust?",
            (
                "The central model: whoever runs the study sees the records, and adds the noise.",
                *(f"Everybody is shown: {line}" for line in found.stages),
                *(
                    f"{plan.arm} shows everybody else: {', '.join(plan.released)}."
                    for plan in found.plans
                ),
            ),
            "who that is, and by which rules they are bound.",
        ),
        Answer(
            "Who has access to the records and to the ledger?",
            (
                "privtune doctor says whether others may read the database and its files on this machine.",
            ),
            "who has access, how it is controlled and logged, how copies and backups are kept.",
        ),
        Answer(
            "How was the data collected?",
            (),
            "on what legal ground, what people were told, whether less would do, and when it is deleted.",
        ),
        Answer(
            "Was the data looked at before?",
            (),
            "exploration, cleaning, selection of features or scaling by the records: the ledger has no entry "
            "of it.",
        ),
        Answer(
            "How can this page be checked?",
            (
                f"privtune budget verify --certificate {name}.certificate.json; chain head "
                f"{found.certificate['head']}, digest {found.certificate['digest']}. Every number here "
                "follows from that file.",
            ),
            f"whose signature it bears: privtune budget verify --certificate {name}.certificate.json "
            f"--signature {name}.certificate.json.sig --key PUBLIC.pem.",
        ),
    )


def _head(found: Evidence) -> list[str]:
    return [
        f"Made from the certificate of {found.certificate['exported_at']} of budget "
        f"{found.terms['name']}, by PrivTune {found.certificate['libraries']['privtune']}. The questions "
        "follow the pyramid of NIST SP 800-226 (March 2025), whose layers rest on those below; they do not "
        "replace reading it.",
        f"What no tool can know is marked “{OPEN}”.",
    ]


def _quoted(found: Evidence) -> list[str]:
    lines = [*(f"**{_plain(line)}**" for line in found.loud), *map(_plain, _head(found))]
    return [part for line in lines for part in (f"> {line}", ">")][:-1]


def _html(answer: Answer) -> Html:
    parts = [f"<li>{text(line)}</li>" for line in answer.known]
    if answer.open:
        parts.append(f"<li><strong>{OPEN}:</strong> {text(answer.open)}</li>")
    return Html(f"<h3>{text(answer.question)}</h3><ul>{''.join(parts)}</ul>")


def _plain(value: str) -> str:
    """Return text that Markdown shows as it is, whoever wrote it."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(value.split()))
