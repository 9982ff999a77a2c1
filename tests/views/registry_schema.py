"""The rules of the registry's schema, transcribed: every field, its kind, and which must be there.

Source: https://github.com/opendp/deployments-registry-data, ``schemas/deployments-schema.yaml`` at
commit 3e9c812a924cf01d228f26f6c462c59c391c3f2a of 2026-07-15 (MIT, Copyright 2025 OpenDP), whose bytes
have the SHA-256 below. With ``PRIVTUNE_REGISTRY_SCHEMA`` set to that file, a test holds the
transcription against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any

SHA256 = "9d607ad7e587fd440f5164d407e7a77089b46b8caa016f5d8c7d127cfc1d5291"

TEXT, NUMBER, TEXTS, DATE, ANY = "text", "number", "texts", "date", "any"

FIELDS: dict[str, Any] = {
    "url_slug": TEXT,
    "status": {
        *("Converted", "Draft", "Pending", "Changes Required", "Approved"),
        *("Approved (Update Requested)", "Approved (Pending)"),
    },
    "tier": {1, 2, 3},
    "deployment": {
        "basic": {
            "name": TEXT,
            "data_curators": TEXTS,
            "intended_use": TEXT,
            "data_product_type": {
                *("Summary statistics", "Machine learning model", "Dataset"),
                *("Synthetic data", "Interactive API", "SQL queries"),
            },
            "data_product_region": TEXT,
            "description": TEXT,
            "publication_date": DATE,
            "data_product_sector": {
                *("Technology", "Healthcare", "Education", "Government", "Energy", "Finance"),
            },
        },
        "dp_variant": {
            "variant_name": {
                *("Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"),
            },
            "data_domain": TEXT,
            "unprotected_quantities": TEXT,
        },
        "privacy_loss": {
            "privacy_unit": TEXT,
            "privacy_unit_details": TEXT,
            "privacy_parameters": {"epsilon": NUMBER, "delta": "number or text", "rho": NUMBER},
            "privacy_parameters_details": ANY,
        },
        "deployment_model": {
            "model_name": {"Local", "Central", "Shuffle", "Federated", "Varies"},
            "model_name_details": TEXT,
            "actors": TEXT,
            "release_type": {"One release", "Many releases"},
            "release_type_details": TEXT,
            "data_source_type": {"Static", "Dynamic"},
            "data_source_type_details": ANY,
            "access_type": {"Interactive", "Non-interactive"},
            "access_type_details": TEXT,
        },
        "accounting": {"post_processing": TEXT, "composition": TEXT},
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": TEXT,
            "mechanisms": TEXT,
            "justification": TEXT,
        },
        "administrative": {"sources": TEXT, "notes": TEXT, "registry_authors": TEXTS},
    },
}

REQUIRED = {
    "": {"url_slug", "status", "tier", "deployment"},
    "deployment": {"basic"},
    "deployment/basic": {
        *("name", "data_curators", "description", "intended_use", "data_product_type"),
        *("data_product_region", "publication_date"),
    },
    "deployment/administrative": {"registry_authors"},
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_date(value: Any) -> bool:
    try:
        return _is_text(value) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


_KINDS = {
    TEXT: _is_text,
    NUMBER: _is_number,
    "number or text": lambda value: _is_number(value) or _is_text(value),
    TEXTS: lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)),
    DATE: _is_date,
    ANY: lambda _: True,
}


def problems(entry: Any, fields: Any = FIELDS, path: str = "") -> Iterator[str]:
    """Yield what the schema would say against an entry; nothing if it is valid."""
    if isinstance(fields, dict):
        if not isinstance(entry, dict):
            yield f"{path}: no object"
            return
        yield from (f"{path}: lacks {name}" for name in REQUIRED.get(path, set()) - entry.keys())
        for name, value in entry.items():
            if name not in fields:
                yield f"{path}: {name} is unknown"
            else:
                yield from problems(value, fields[name], f"{path}/{name}".strip("/"))
    elif isinstance(fields, set):
        if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in fields:
            yield f"{path}: {entry!r} is none of {fields}"
    elif not _KINDS[fields](entry):
        yield f"{path}: {entry!r} is no {fields}"


def transcribed(schema: dict[str, Any], path: str = "") -> tuple[Any, dict[str, set[str]]]:
    """Return the fields and the required names of a published schema, in this module's form."""
    required = {path: set(schema["required"])} if "required" in schema else {}
    if "enum" in schema:
        return set(schema["enum"]), required
    if "properties" in schema:
        assert schema["additionalProperties"] is False
        fields = {}
        for name, part in schema["properties"].items():
            fields[name], more = transcribed(part, f"{path}/{name}".strip("/"))
            required |= more
        return fields, required
    kind = schema.get("type")
    if kind == "array":
        assert schema["items"] == {"type": "string"}
        assert schema["minItems"] == 1
        return TEXTS, required
    if schema.get("format") == "date":
        return DATE, required
    names = {"string": TEXT, "number": NUMBER, None: ANY}
    return "number or text" if isinstance(kind, list) else names[kind], required
