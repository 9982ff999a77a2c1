"""``privtune doctor``: whether this machine keeps what the ledger and the launchers promise."""

from __future__ import annotations

import contextlib

import typer

from privtune.cli._common import DEFAULT_STORAGE, AsJson, Storage, console, emit_json

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Look at libraries, database, files and launchers; exit with 1 where a guarantee would break."""
    from rich.markup import escape
    from rich.table import Table

    from privtune.errors import PrivTuneError
    from privtune.execution.doctor import check_engines
    from privtune.ledger.doctor import check_artifacts, check_machine, check_storage
    from privtune.ledger.places import artifact_root
    from privtune.study._study import check_studies

    checks = [*check_machine(), *check_engines(), *check_storage(storage)]
    with contextlib.suppress(PrivTuneError):  # a storage that is none is among the checks already
        checks.append(check_artifacts(artifact_root(storage)))
        checks += check_studies(storage)
    healthy = all(check.state != "fail" for check in checks)
    if as_json:
        emit_json({"healthy": healthy, "checks": [check.to_dict() for check in checks]})
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for check in checks:
            style = _STYLES[check.state]
            table.add_row(f"[{style}]{check.state}[/]", check.name, escape(check.says))
        console().print(table)
    if not healthy:
        raise typer.Exit(1)
