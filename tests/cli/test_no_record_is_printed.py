"""A file of records, given by mistake in place of any file or name, is refused without a cell of it."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main

from privtune.cli._app import mount
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

MARK = "Zq7"  # in every cell, and in none of our sentences
PEOPLE = [f"{MARK}alice", f"{MARK}bob: b", f"{MARK}carol"]
# Columns that are fields of specs, events, certificates and signatures, too.
FIELDS = ("name", "type", "task", "epochs", "budget", "schema", "event", "certificate", "arms")


def rows(count: int = 3) -> Iterator[dict[str, str]]:
    for place in range(count):
        person = PEOPLE[place % 3]
        yield {field: f"{person} {field} {place}" for field in FIELDS}


def as_csv(count: int = 3) -> bytes:
    lines = [",".join(FIELDS), *(",".join(row.values()) for row in rows(count))]
    return "\n".join(lines).encode()


def as_parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows())), file)
    return file.getvalue()


def as_npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.array([list(row.values()) for row in rows()]))
    return file.getvalue()


def lines(records: Iterator[dict[str, str]]) -> bytes:
    return "\n".join(json.dumps(row) for row in records).encode()


FILES: dict[str, Callable[[], bytes]] = {
    "records.csv": as_csv,
    "semicolons.csv": lambda: as_csv().replace(b",", b"; "),
    "colons.csv": lambda: as_csv().replace(b",", b": "),
    "quotes.csv": lambda: b'name,text\n"%sa","tab\t%sb"\n&%sc,*%sd\n' % ((MARK.encode(),) * 4),
    "numbers.csv": lambda: b"id,number\n1,2\n!%sa 3,0x%sb\n" % ((MARK.encode(),) * 2),
    "records.jsonl": lambda: lines(rows()),
    "record.json": lambda: lines(rows(1)),
    "records.json": lambda: json.dumps(list(rows())).encode(),
    "by-person.json": lambda: json.dumps({person: [person] for person in PEOPLE}).encode(),
    "twice.json": lambda: b'{"%sa": 1, "%sa": 2}' % ((MARK.encode(),) * 2),
    "records.parquet": as_parquet,
    "records.npz": as_npz,
    "records.csv.gz": lambda: gzip.compress(as_csv()),
    "large.csv": lambda: as_csv(60_000),
    "binary.dat": lambda: bytes(range(256)) + MARK.encode() + b"\0\xff" * 50,
    "records.yaml": as_csv,
    "record.yaml": lambda: lines(rows(1)),
    "by-person.yaml": lambda: "\n".join(f"{MARK}{n}: {MARK}x" for n in range(3)).encode(),
    "tabs.yaml": lambda: as_csv().replace(b",", b"\t"),
    "aliases.yaml": lambda: b"a: *%sa\nb: !%sb c\n" % ((MARK.encode(),) * 2),
}
# They read no file, and go on until they are stopped.
ENDLESS = {"privtune ui", "privtune demo", "privtune doctor", "privtune worker"}
MAYBE_FILES = {"event_file", "name", "study"}  # `study run` takes a name or a spec
# What reads records is asked for their columns, and prints what it is asked to print.
OF_RECORDS = {("privtune predict", "file"), ("privtune study draft", "file")}


def commands() -> Iterator[tuple[str, list[Any]]]:
    """Yield every command with its parameters."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
        context = command.context_class(command, info_name=path)
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), f"{path} {name}")
        elif path not in ENDLESS:
            yield path, command.params

    yield from walk(typer.main.get_command(mount()), "privtune")


def kind(parameter: Any) -> str:
    return str(parameter.type_descriptor.annotation)


def takes_text(parameter: Any) -> bool:
    return bool(re.search(r"\bstr\b|'str'|Path", kind(parameter)))


def takes_file(parameter: Any) -> bool:
    """Return whether a parameter is a file's path, or may be one."""
    return takes_text(parameter) and ("Path" in kind(parameter) or parameter.name in MAYBE_FILES)


def placed(parameters: list[Any], chosen: Any, given: str) -> list[str]:
    """Return the arguments of a call in which a file stands in one place, and others are filled in."""
    words: list[str] = []
    for each in parameters:
        if each is not chosen and not each.required:
            continue
        value = given if each is chosen else "0.5"
        if each is not chosen and "int" in kind(each):
            value = "1"
        if each is not chosen and takes_text(each):
            value = "other"
        words += [value] if each.param_type_name == "argument" else [each.opts[0], value]
    return words


PLACES = [
    pytest.param(path, parameters, each, id=f"{path} {each.name}")
    for path, parameters in commands()
    for each in parameters
    if takes_file(each)
]


@pytest.mark.parametrize(("path", "parameters", "chosen"), PLACES)
def test_no_cell_of_a_file_is_printed(
    path: str,
    parameters: list[Any],
    chosen: Any,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        file = tmp_path / name
        file.write_bytes(content())
        done = cli(*path.split()[1:], *placed(parameters, chosen, name))
        text = done.out + done.err
        assert "Traceback" not in text
        if (path, chosen.name) not in OF_RECORDS:
            assert MARK not in text, (name, text[:500])
        if file.exists():
            file.unlink()


def test_the_walk_reaches_every_file_that_is_read() -> None:
    reached = {(place.values[0], place.values[2].name) for place in PLACES}
    wanted = {
        ("privtune account epsilon", "event_file"),
        ("privtune budget charge", "event"),
        ("privtune budget verify", "certificate"),
        ("privtune budget verify", "key"),
        ("privtune study create", "spec"),
        ("privtune study plan", "spec"),
        ("privtune study run", "name"),
        ("privtune predict", "file"),
    }
    assert wanted <= reached
