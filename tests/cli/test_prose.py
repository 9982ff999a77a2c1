"""What is printed fits a terminal: prose is broken at words, and what is to be copied is not broken."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.formatting import HelpFormatter
from typer.main import get_command

from privtune.cli import _common
from privtune.cli._app import mount
from privtune.ledger import Budget, Ledger
from privtune.prose import broken, fitted

WIDTH = 80
SENTENCES = [
    "Study patients is finished: every arm has been released, so nothing was run and nothing was spent.",
    "  auto: not shown to be better than the best constant answer (50.0%), whose learning rate is fixed.",
    "Budget patients: ε = 1.998 of 2 charged, 0.0021 left (δ = 1e-05, add-remove), and all of it by pld.",
]
COMMAND = "privtune budget verify NAME --storage sqlite:////a/folder/that/lies/deep/privtune.db"


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_prose_is_broken_at_words_and_hangs_below_its_label(text: str, width: int) -> None:
    lines = broken(text, width).split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == text.strip()
    indent = len(text) - len(text.lstrip())
    assert all(line.startswith(" " * (indent + 2)) for line in lines[1:])


def test_a_line_that_fits_and_several_lines_stay_as_they_are() -> None:
    text = "Wrote page.html.\n\n    a tree of costs"
    assert broken(text, WIDTH) == text


@pytest.mark.parametrize("end", ["", ".", ". Or give the spec another name."])
def test_a_command_after_a_colon_stays_on_one_line(end: str) -> None:
    text = (
        f"Copied 3 budgets to b.db. It holds what is sealed: keep it. Check it with: {COMMAND}{end}"
    )
    assert any(COMMAND in line for line in broken(text, 60).split("\n"))


def test_no_word_is_broken_however_long_it_is() -> None:
    url = f"http://127.0.0.1:5000/#/{'x' * 120}"
    assert url in broken(f"MLflow runs here: {url}", WIDTH).split()


def test_an_amount_stays_with_its_name() -> None:
    text = "Together with all that was charged before it would be ε = 14.609 at δ = 1e-05 by pld."
    for width in range(30, 80):
        assert not re.search(r"(ε|δ|=)$", broken(text, width), re.MULTILINE)


def test_what_is_piped_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(SENTENCES[0] * 3) == SENTENCES[0] * 3
    _common.say(SENTENCES[0] * 3)
    assert capsys.readouterr().out == f"{SENTENCES[0] * 3}\n"


def on_a_terminal(*arguments: str, cwd: Path) -> list[str]:
    """Return the lines that a command prints to a terminal of 80 columns, on both its streams."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    without = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "privtune", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=without,
    )
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        read += part
    os.close(ours)
    process.wait()
    return re.sub(r"\x1b\[[0-9;]*m", "", read.decode()).replace("\r", "").split("\n")


def test_a_terminal_breaks_no_line_of_a_refusal_an_answer_or_a_usage_error(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    with Ledger(storage) as ledger:
        ledger.create_budget(Budget(2.0, 1e-5, name="b", dataset="of many records " * 8))
        head = ledger.head("b")
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: s\n")
    shown = on_a_terminal("budget", "show", "b", "--storage", storage, cwd=tmp_path)
    assert f"Chain head: {head}" in shown
    pages = [
        shown,
        on_a_terminal("budget", "show", "of-another-name", "--storage", storage, cwd=tmp_path),
        on_a_terminal("study", "plan", str(spec), cwd=tmp_path),
        on_a_terminal("budget", "verify", "--key", "a", "--signature", "b", cwd=tmp_path),
        on_a_terminal("budget", "close", "b", "--storage", storage, cwd=tmp_path),
    ]
    for page in pages:
        assert [line for line in page if len(line) > WIDTH and " " in line.strip()] == []


@pytest.mark.parametrize("wide", [False, True])
def test_no_word_of_a_table_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, wide: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _common.console.cache_clear()
    columns = ["arm", "strategy", "test balanced accuracy", "CPU seconds", "released parameters"]
    cells = [
        "selection",
        "papernot-steinke",
        "53.8% [49.9, 58.7]",
        "12.3",
        "max_grad_norm = 1, lr = 2",
    ]
    _common.show_table(columns, [cells], numeric=columns[2:-1], wide=wide)
    _common.console.cache_clear()
    shown = capsys.readouterr().out
    for word in " ".join([*columns, *cells]).split():
        assert word in shown
    assert not wide or (" ".join(columns[-1:]) in shown and cells[-1] in shown)


def test_a_wide_table_is_as_wide_as_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    long = "a formula of many words " * 12
    _common.show_table(["charge", "event"], [["b-1", long.strip()]], wide=True)
    assert long.strip() in capsys.readouterr().out


def commands(command: Any, path: str = "privtune") -> Iterator[tuple[str, Any, int]]:
    """Yield each command, and how wide the first column of the list is in which it stands."""
    inner = getattr(command, "commands", {})
    for name, one in inner.items():
        yield f"{path} {name}", one, max(map(len, inner))
        yield from commands(one, f"{path} {name}")


def test_no_help_of_a_command_is_cut_in_a_list() -> None:
    room = HelpFormatter(width=WIDTH).width - 6
    found = list(commands(get_command(mount())))
    assert len(found) > 30
    cut = {
        path for path, one, beside in found if one.get_short_help_str(room - beside).endswith("...")
    }
    assert cut == set()
