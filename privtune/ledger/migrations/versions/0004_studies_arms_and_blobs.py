"""Studies, their arms and their results: before, they stood in user attributes of Optuna's studies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

from privtune.ledger.places import artifact_root

revision = "0004"
down_revision = "0002"

_PREFIX = "privtune:"


def upgrade() -> None:
    """Create the four tables and move what Optuna's attributes hold into them."""
    studies = op.create_table(
        "privtune_studies",
        sa.Column("name", sa.String(512), primary_key=True),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("root", sa.Text, nullable=False),
    )
    arms = op.create_table(
        "privtune_arms",
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("release", sa.Text, nullable=True),
        sa.Column("announced", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("study", "name", name="privtune_arms_pk"),
    )
    blobs = op.create_table(
        "privtune_blobs",
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=True),
        sa.PrimaryKeyConstraint("study", "name", name="privtune_blobs_pk"),
    )
    op.create_table(
        "privtune_failures",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
        sa.Column("arm", sa.String(512), nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("traceback", sa.Text, nullable=False),
    )
    connection = op.get_bind()
    attributes = _attributes(connection)
    root = artifact_root(connection.engine.url.render_as_string(hide_password=False))
    for name, values in attributes.items():
        document = values.get("document")
        if document is None:
            continue
        study = {"name": name, "uid": document["uid"], "root": str(root)}
        connection.execute(sa.insert(studies), {**study, "spec": json.dumps(document["spec"])})
        for number, plan in enumerate(document["plans"]):
            arm = attributes.get(f"{name}/{plan['arm']}", {})
            release, secret = arm.get("release"), arm.get("secret")
            row = {
                "study": name,
                "name": plan["arm"],
                "number": number,
                "plan": json.dumps(plan),
                "digest": _digest(document["uid"], plan),
                "secret": secret or "",
                "release": None if release is None else json.dumps(release),
                "announced": int(bool(arm.get("announced"))),
            }
            connection.execute(sa.insert(arms), row)
            budget = document["spec"]["budget"]["name"]
            _hand_over(connection, budget, row["digest"], row["secret"])
        found = [{"study": name, "name": file, "data": None} for file in _files(root / name)]
        if found:
            connection.execute(sa.insert(blobs), found)
    if attributes:
        # The secrets above all: one that stayed would outlive its release.
        statement = "DELETE FROM study_user_attributes WHERE key LIKE :prefix"
        connection.execute(sa.text(statement), {"prefix": f"{_PREFIX}%"})


def _attributes(connection: sa.Connection) -> dict[str, dict[str, Any]]:
    """Return our attributes of Optuna's studies, by study."""
    if not sa.inspect(connection).has_table("study_user_attributes"):
        return {}
    found: dict[str, dict[str, Any]] = {}
    query = (
        "SELECT study_name, key, value_json FROM study_user_attributes "
        "JOIN studies ON studies.study_id = study_user_attributes.study_id WHERE key LIKE :prefix"
    )
    for study, key, value in connection.execute(sa.text(query), {"prefix": f"{_PREFIX}%"}):
        found.setdefault(study, {})[key.removeprefix(_PREFIX)] = json.loads(value)
    return found


def _digest(uid: str, plan: dict[str, Any]) -> str:
    """Return the digest under which an arm's charge is found."""
    canonical = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    text = json.dumps([uid, hashlib.sha256(canonical.encode()).hexdigest()])
    return hashlib.sha256(text.encode()).hexdigest()


def _hand_over(connection: sa.Connection, budget: str, digest: str, secret: str) -> None:
    """Give an open round the arm's secret, which its trials derived from, and forget an old one."""
    query = "SELECT charge, body FROM privtune_entries WHERE budget = :budget AND kind = 'reserved'"
    for charge, body in connection.execute(sa.text(query), {"budget": budget}).all():
        if json.loads(body).get("plan_digest") == digest:
            connection.execute(
                sa.text(
                    "UPDATE privtune_rounds SET secret = :secret "
                    "WHERE budget = :budget AND charge = :charge"
                ),
                {"secret": secret, "budget": budget, "charge": charge},
            )


def _files(folder: Path) -> list[str]:
    """Return a study's results, by their path in its folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
