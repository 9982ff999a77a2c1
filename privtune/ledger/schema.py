"""The ledger's tables. Their names carry a prefix, so that Optuna may share the database."""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    event,
)

HEAD = "1"
"""The version of the schema that this program reads and writes; another one is refused."""

VERSION_TABLE = "privtune_schema"
"""The table that holds the schema's version. Optuna keeps its own in ``alembic_version``."""

version = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)

metadata = MetaData()

budgets = Table(
    "privtune_budgets",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("entries", Integer, nullable=False),
    Column("charges", Integer, nullable=False),
    Column("head", String(64), nullable=False),
)
"""One row per budget: the head of its log. The row that writers lock, and the only one updated."""

entries = Table(
    "privtune_entries",
    metadata,
    Column("budget", String(100), ForeignKey("privtune_budgets.name"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("charge", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Column("sealed", Text, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
    PrimaryKeyConstraint("budget", "seq", name="privtune_entries_pk"),
    CheckConstraint("seq > 0", name="privtune_entries_seq"),
)
"""The logs, append-only: triggers refuse every update and delete."""

_TRIGGERS = {
    "sqlite": [
        f"CREATE TRIGGER privtune_entries_no_{verb} BEFORE {verb} ON privtune_entries\n"
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        "CREATE FUNCTION privtune_append_only() RETURNS trigger LANGUAGE plpgsql AS $$\n"
        "BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
        "CREATE TRIGGER privtune_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE\n"
        "ON privtune_entries EXECUTE FUNCTION privtune_append_only()",
    ],
}
for _dialect, _statements in _TRIGGERS.items():
    for _statement in _statements:
        trigger = DDL(_statement)  # type: ignore[no-untyped-call]
        event.listen(entries, "after_create", trigger.execute_if(dialect=_dialect))

rounds = Table(
    "privtune_rounds",
    metadata,
    Column("budget", String(100), ForeignKey("privtune_budgets.name"), nullable=False),
    Column("charge", Integer, nullable=False),
    Column("tasks", Integer, nullable=False),
    Column("secret", String(64), nullable=False),
    PrimaryKeyConstraint("budget", "charge", name="privtune_rounds_pk"),
)
"""One row per opened selection round. Sealed: the number of tasks and the secret stay here."""

tasks = Table(
    "privtune_tasks",
    metadata,
    Column("budget", String(100), nullable=False),
    Column("charge", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("worker", String(200), nullable=False),
    Column("leased_until", Double, nullable=False),
    Column("done", Integer, nullable=False),
    Column("score", Double, nullable=True),
    Column("result", Text, nullable=True),
    PrimaryKeyConstraint("budget", "charge", "number", name="privtune_tasks_pk"),
    ForeignKeyConstraint(
        ["budget", "charge"], ["privtune_rounds.budget", "privtune_rounds.charge"]
    ),
    CheckConstraint("done IN (0, 1)", name="privtune_tasks_done"),
    # Or a lease would look at all finished rows of a long round.
    Index("privtune_tasks_open", "budget", "charge", "done", "number"),
)
"""A round's trials. ``leased_until`` is a Unix time; the first result of a row stays."""

studies = Table(
    "privtune_studies",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("uid", String(32), nullable=False),
    Column("spec", Text, nullable=False),
    Column("root", Text, nullable=False),
)
"""One row per study. ``root`` is the absolute folder of its files: its own is below, by its name."""

arms = Table(
    "privtune_arms",
    metadata,
    Column("study", String(512), ForeignKey("privtune_studies.name"), nullable=False),
    Column("name", String(512), nullable=False),
    Column("number", Integer, nullable=False),
    Column("plan", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("secret", String(64), nullable=False),
    Column("release", Text, nullable=True),
    Column("announced", Integer, nullable=False),
    PrimaryKeyConstraint("study", "name", name="privtune_arms_pk"),
)
"""One row per arm, in the order of ``number``. ``digest`` is its charge's, of the study's id and the plan;
the secret is empty once the arm is released."""

blobs = Table(
    "privtune_blobs",
    metadata,
    Column("study", String(512), ForeignKey("privtune_studies.name"), nullable=False),
    Column("name", String(1024), nullable=False),
    Column("data", LargeBinary, nullable=True),
    Column("place", Text, nullable=True),
    PrimaryKeyConstraint("study", "name", name="privtune_blobs_pk"),
)
"""Results and released models, by their path in the study's folder; NULL where that file holds it.
``place`` is JSON where an object store does: the object's name, and the key that opens it."""

failures = Table(
    "privtune_failures",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("study", String(512), ForeignKey("privtune_studies.name"), nullable=False),
    Column("arm", String(512), nullable=False),
    Column("time", Double, nullable=False),
    Column("traceback", Text, nullable=False),
)
"""What stopped arms, in Unix time. Sealed: it may come from the data."""
