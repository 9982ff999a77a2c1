"""A study as an entry of the Differential Privacy Deployments Registry of OpenDP, in YAML.

The entry is a draft for its author to complete. It follows the schema at
https://github.com/opendp/deployments-registry-data, ``schemas/deployments-schema.yaml``.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import yaml

from privtune.errors import PrivTuneError
from privtune.numbers import ceil_to
from privtune.views.officer import OPEN, Evidence, evidence

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.study import Study

SCHEMA = (
    "https://github.com/opendp/deployments-registry-data/blob/"
    "3e9c812a924cf01d228f26f6c462c59c391c3f2a/schemas/deployments-schema.yaml"
)
"""The version of the schema that entries are tested against."""


def to_yaml(study: Study) -> str:
    """Return the entry as the registry wants it: a YAML file.

    Raises:
        PrivTuneError: As :func:`registry_entry`.
    """
    entry = registry_entry(study)
    body = yaml.dump(entry, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return (
        f"# Schema: {SCHEMA}\n"
        f"# {OPEN}: every field that says so; data_product_sector and data_source_type, which are left\n"
        "# out; publication_date, which is the day of the certificate.\n"
        f"{body}"
    )


def registry_entry(study: Study) -> dict[str, Any]:
    """Return a study as an entry of the registry.

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
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", found.study.lower()).strip("-") or "study",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": _basic(found),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"{found.dataset}. {OPEN}: which datasets were possible.",
                "unprotected_quantities": _list(
                    *(f"Declared public, {line}" for line in found.public)
                ),
            },
            "privacy_loss": _privacy_loss(found),
            "deployment_model": _model(found),
            "accounting": {
                "post_processing": "Whatever is computed from the releases alone. "
                f"{OPEN}: what was computed from them before publication.",
                "composition": _list(
                    f"Of everything: {found.spent}.",
                    "The ledger keeps events, not numbers: ε is the composition of all of them, computed "
                    "anew, and charged before any data is touched.",
                ),
            },
            "implementation": _implementation(found),
            "administrative": {
                "sources": _list(
                    f"Certificate of budget {found.terms['name']}, with digest "
                    f"{found.certificate['digest']} and chain head {found.certificate['head']}; checked by "
                    "privtune budget verify --certificate FILE.",
                    f"{OPEN}: where it and the data product can be had.",
                ),
                "notes": _list(
                    f"Drafted by PrivTune {found.certificate['libraries']['privtune']}.",
                    *found.loud,
                ),
                "registry_authors": [OPEN],
            },
        },
    }


def _basic(found: Evidence) -> dict[str, Any]:
    arms = ", ".join(f"{plan.arm} ({plan.strategy})" for plan in found.plans)
    return {
        "name": found.study,
        "data_curators": [OPEN],
        "intended_use": OPEN,
        "data_product_type": "Machine learning model",
        "data_product_region": OPEN,
        "description": f"Models and the hyperparameters chosen for them, of the study {found.study}: "
        f"{arms}. {OPEN}: what the models do.",
        "publication_date": found.certificate["exported_at"],
    }


def _privacy_loss(found: Evidence) -> dict[str, Any]:
    return {
        "privacy_unit": found.unit,
        "privacy_unit_details": " ".join(
            (f"{found.neighbours[:1].upper()}{found.neighbours[1:]}.", *found.grouped)
        )
        + f" {OPEN}: {found.whose}",
        "privacy_parameters": {
            "epsilon": ceil_to(found.guarantee.epsilon, 4),
            "delta": found.guarantee.delta,
        },
        "privacy_parameters_details": _list(
            f"Of everything released on the budget: {found.spent}.",
            f"{found.limit[:1].upper()}{found.limit[1:]}.",
            *found.loud,
        ),
    }


def _model(found: Evidence) -> dict[str, Any]:
    return {
        "model_name": "Central",
        "actors": _list(
            "Whoever runs the study: trusted with the records, and with trials that are sealed.",
            "Everybody else: is shown releases only.",
            f"{OPEN}: who they are.",
        ),
        "release_type": "Many releases" if len(found.charges) > 1 else "One release",
        "release_type_details": f"{found.limit[:1].upper()}{found.limit[1:]}. There is no period after "
        "which it begins anew.",
        "access_type": "Non-interactive",
    }


def _implementation(found: Evidence) -> dict[str, Any]:
    own = {line.arm: line.text for line in found.own}
    return {
        "preprocessing_and_hyperparameter_tuning": _list(
            "Hyperparameter tuning: accounted for. Every look that it took at private records is part of "
            "the ε above, losing trials included, and was charged before it was taken.",
            *(
                f"{plan.arm} ({plan.strategy}): {_tuning(plan)} Charge {own[plan.arm]}."
                for plan in found.plans
                if plan.arm in own
            ),
            *(
                f"Outside of this study, on the same budget and within the same ε: {line.text}."
                for line in found.others
            ),
            f"{OPEN}: pre-processing and exploration of the data before, and whether search spaces or given "
            "hyperparameters were chosen with its help. The ledger has no entry of it.",
        ),
        "mechanisms": _list(
            *(f"Charge {line.text}." for line in found.charges),
            f"Trainings by PrivTune ({found.libraries}). Source of noise and treatment of floating-point "
            f"numbers: {found.noises}.",
            "Times and numbers of trials of sealed arms are not published.",
            f"{OPEN}: how the records are kept, and who has access.",
        ),
        "justification": OPEN,
    }


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


def _list(*lines: str) -> str:
    """Return lines as a list in Markdown, which the registry shows."""
    return "".join(f"- {' '.join(line.split())}\n" for line in lines)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks: the registry refuses folded ones."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    )


_Dumper.add_representer(str, _text)
