"""Signing a certificate, and what becomes of one that somebody rewrites."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger
from tests.cli.conftest import Cli
from tests.ledger.test_signature import KEY, OTHER, pem, public_pem


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    monkeypatch.chdir(tmp_path)
    for note in ("one", "two"):
        url = f"sqlite:///{note}.db"
        with Ledger(url) as ledger:
            ledger.create_budget(Budget(4.0, 1e-5, name="b"))
            ledger.reserve("b", [ChargeRequest(Gaussian(4.0), note=note)])
        assert cli("budget", "export", "b", "--storage", url, "--output", f"{note}.json").code == 0
    Path("key.pem").write_bytes(pem(KEY))
    Path("key.pem").chmod(0o600)
    Path("public.pem").write_bytes(public_pem(KEY))
    Path("other.pem").write_bytes(public_pem(OTHER))
    return tmp_path


def test_sign_and_verify(here: Path, cli: Cli) -> None:
    before = Path("one.json").read_bytes()
    done = cli("budget", "sign", "one.json", "--key", "key.pem")
    assert (done.code, done.err) == (0, "")
    assert Path("one.json").read_bytes() == before
    given = ("--signature", "one.json.sig", "--key", "public.pem")
    said = json.loads(cli("budget", "verify", "--certificate", "one.json", *given, "--json").out)
    written = json.loads(Path("one.json.sig").read_text())
    assert said["signature"] == {n: written[n] for n in ("certificate", "key", "signed_on")}
    assert said["signature"]["key"] in done.out
    log = ("b", "--storage", "sqlite:///one.db")
    assert "Signed on" in cli("budget", "verify", *log, "--certificate", "one.json", *given).out


def test_what_was_not_signed_is_refused(here: Path, cli: Cli) -> None:
    cli("budget", "sign", "one.json", "--key", "key.pem")
    text = Path("one.json").read_text()
    Path("edited.json").write_text(text.replace('"one"', '"onf"'))
    # It is a sound certificate of a budget of the same name: by itself it verifies.
    assert cli("budget", "verify", "--certificate", "two.json").code == 0
    for certificate, key, words in (
        ("edited.json", "public.pem", "not the one that was signed"),
        ("two.json", "public.pem", "not the one that was signed"),
        ("one.json", "other.pem", "by another key"),
        ("one.json", "nowhere.pem", "cannot be read"),
    ):
        given = ("--signature", "one.json.sig", "--key", key)
        done = cli("budget", "verify", "--certificate", certificate, *given)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert words in done.err
    for given in (("--key", "public.pem"), ("--signature", "one.json.sig")):
        assert cli("budget", "verify", "--certificate", "one.json", *given).code == 2


def test_what_is_not_signed(here: Path, cli: Cli) -> None:
    Path("edited.json").write_text(Path("one.json").read_text().replace('"one"', '"onf"'))
    done = cli("budget", "sign", "edited.json", "--key", "key.pem")
    assert (done.code, done.err.count("\n"), "entry 2" in done.err) == (1, 1, True)
    Path("key.pem").chmod(0o644)
    done = cli("budget", "sign", "one.json", "--key", "key.pem")
    assert (done.code, done.err.count("\n"), "chmod 600" in done.err) == (1, 1, True)
    assert not list(here.glob("*.sig"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_keys_that_openssl_makes(here: Path, cli: Cli) -> None:
    for command in (
        "genpkey -algorithm ed25519 -out mine.pem",
        "pkey -in mine.pem -pubout -out my.pem",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    assert cli("budget", "sign", "one.json", "--key", "mine.pem").code == 0
    given = ("--signature", "one.json.sig", "--key", "my.pem")
    assert cli("budget", "verify", "--certificate", "one.json", *given).code == 0
