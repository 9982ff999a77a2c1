"""The ledger's tables, with a prefix in their names so that Optuna may share the database."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.schema import SchemaItem

from privtune.ledger.reading import HEX, INFINITE, TIME, checked

HEAD = "2"
"""The version of the schema that this program reads and writes; another one is refused."""

VERSION_TABLE = "privtune_schema"
"""The table that holds the schema's version. Optuna keeps its own in ``alembic_version``."""


def _table(name: str, home: sa.MetaData, *items: SchemaItem) -> sa.Table:
    """Return a table whose columns check what they read."""
    parts = (checked(item, name) if isinstance(item, sa.Column) else item for item in items)
    return sa.Table(name, home, *parts)


version = _table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)

metadata = sa.MetaData()

stores = _table(
    "privtune_store",
    metadata,
    sa.Column("uid", sa.String(32), primary_key=True),
    sa.Column("origin", sa.String(32), nullable=False),
    sa.Column("home", sa.Text, nullable=False),
)
"""One row: the store's id, that of the store it was restored from, and as JSON where it is at home."""

budgets = _table(
    "privtune_budgets",
    metadata,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("entries", sa.Integer, nullable=False),
    sa.Column("charges", sa.Integer, nullable=False),
    sa.Column("head", sa.String(64), nullable=False),
)
"""One row per budget: the head of its log. The row that writers lock, and the only one updated."""

entries = _table(
    "privtune_entries",
    metadata,
    sa.Column("budget", sa.String(100), sa.ForeignKey("privtune_budgets.name"), nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("charge", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("sealed", sa.Text, nullable=False),
    sa.Column("previous", sa.String(64), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.PrimaryKeyConstraint("budget", "seq", name="privtune_entries_pk"),
    sa.CheckConstraint("seq > 0", name="privtune_entries_seq"),
)
"""The logs, append-only: triggers refuse every update and delete."""

TRIGGERS = ("privtune_entries_no_UPDATE", "privtune_entries_no_DELETE")
"""The triggers of a SQLite file, by name."""

_TRIGGERS = {
    "sqlite": [
        f"CREATE TRIGGER {name} BEFORE {name.rpartition('_')[2]} ON privtune_entries\n"
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        for name in TRIGGERS
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
        trigger = sa.DDL(_statement)  # type: ignore[no-untyped-call]
        sa.event.listen(entries, "after_create", trigger.execute_if(dialect=_dialect))

rounds = _table(
    "privtune_rounds",
    metadata,
    sa.Column("budget", sa.String(100), sa.ForeignKey("privtune_budgets.name"), nullable=False),
    sa.Column("charge", sa.Integer, nullable=False),
    sa.Column("tasks", sa.Integer, nullable=False),
    sa.Column("secret", sa.String(64), nullable=False, info={HEX: True}),
    sa.Column("digest", sa.String(64), nullable=False, server_default=""),
    sa.PrimaryKeyConstraint("budget", "charge", name="privtune_rounds_pk"),
)
"""One row per opened selection round. Sealed: the number of tasks and the secret stay here. ``digest`` is
what is kept of the results once their study is deleted, for whoever verifies the log."""

tasks = _table(
    "privtune_tasks",
    metadata,
    sa.Column("budget", sa.String(100), nullable=False),
    sa.Column("charge", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(200), nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
    sa.Column("done", sa.Integer, nullable=False),
    sa.Column("score", sa.Double, nullable=True, info={INFINITE: True}),
    sa.Column("result", sa.Text, nullable=True),
    sa.PrimaryKeyConstraint("budget", "charge", "number", name="privtune_tasks_pk"),
    sa.ForeignKeyConstraint(
        ["budget", "charge"], ["privtune_rounds.budget", "privtune_rounds.charge"]
    ),
    sa.CheckConstraint("done IN (0, 1)", name="privtune_tasks_done"),
    # Or a lease would look at all finished rows of a long round.
    sa.Index("privtune_tasks_open", "budget", "charge", "done", "number"),
)
"""A round's trials. ``leased_until`` is a Unix time; the first result of a row stays."""

studies = _table(
    "privtune_studies",
    metadata,
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("uid", sa.String(32), nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("root", sa.Text, nullable=False),
)
"""One row per study. ``root`` is where its folder of files was first; where it is now, its marks tell."""

arms = _table(
    "privtune_arms",
    metadata,
    sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
    sa.Column("name", sa.String(512), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("secret", sa.String(64), nullable=False, info={HEX: True}),
    sa.Column("release", sa.Text, nullable=True),
    sa.Column("announced", sa.Integer, nullable=False),
    sa.PrimaryKeyConstraint("study", "name", name="privtune_arms_pk"),
)
"""One row per arm, in the order of ``number``. ``digest`` is its charge's, of the study's id and spec and the
plan; the secret is empty once the arm is released."""

blobs = _table(
    "privtune_blobs",
    metadata,
    sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
    sa.Column("name", sa.String(1024), nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=True),
    sa.Column("place", sa.Text, nullable=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.PrimaryKeyConstraint("study", "name", name="privtune_blobs_pk"),
)
"""Results and released models, by their path in the study's folder; NULL where that file holds it.
``place`` is JSON where an object store does: the object's name, and the key that opens it. ``digest`` is the
content's SHA-256, wherever it is."""

failures = _table(
    "privtune_failures",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("study", sa.String(512), sa.ForeignKey("privtune_studies.name"), nullable=False),
    sa.Column("arm", sa.String(512), nullable=False),
    sa.Column("time", sa.Double, nullable=False, info={TIME: True}),
    sa.Column("traceback", sa.Text, nullable=False),
)
"""What stopped arms, in Unix time. Sealed: it may come from the data."""
