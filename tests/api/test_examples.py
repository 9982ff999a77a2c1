"""The examples of the documentation run, small."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEOPLE = "people"  # compares two units, and has no study to give


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {PEOPLE}))
def test_an_example_runs(
    name: str,
    storage_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    study = load_file(EXAMPLES / f"{name}.py").main(storage=storage_url, epochs=0.5)
    (status,) = study.status()
    assert status.state == "settled"
    assert study.spent().epsilon <= study.spec.budget.epsilon
    (printed,) = capsys.readouterr().out.splitlines()[-1:]
    assert str(study.releases()[0].guarantee) in printed


def plain_loop(private: PrivateTraining) -> None:
    for x, y in private.batches():
        losses = nn.functional.cross_entropy(private.model(x), y, reduction="none")
        private.step(losses)


def with_hugging_face(private: PrivateTraining, model: nn.Module, optimizer: Optimizer) -> None:
    load_file(EXAMPLES / "hugging_face_trainer.py").PrivateTrainer(
        model, optimizer, private
    ).train()


def with_lightning(private: PrivateTraining, model: nn.Module, optimizer: Optimizer) -> None:
    example = load_file(EXAMPLES / "lightning_module.py")
    example.trainer().fit(example.PrivateModule(model, optimizer, private))


@pytest.mark.parametrize("rate", [0.2, 1 / 60], ids=["full samples", "a third of them empty"])
@pytest.mark.parametrize("fit", [with_hugging_face, with_lightning])
def test_a_trainer_takes_the_planned_steps_and_nothing_else(
    fit: Callable[..., None],
    rate: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The same weights as a loop written by hand; a second step, clipping or a batch twice show."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 2
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        seen: list[int] = []
        optimizer.register_step_post_hook(
            lambda stepped, *_, seen=seen: seen.extend(
                p.grad is not None for p in stepped.param_groups[0]["params"][:1]
            )
        )
        private = PrivateTraining(
            model,
            TensorData(x, y),
            schedule=Schedule(60, rate, 12),
            method=FixedDPSGD(1.0),
            optimizer=optimizer,
            clipping=Flat(0.5),
            secret=bytes(range(32)),
        )
        if by_hand:
            plain_loop(private)
        else:
            capfd.readouterr()
            fit(private, model, optimizer)
            assert capfd.readouterr() == ("", ""), "a sealed trial says nothing"
        assert sum(seen) == 12
        private.transcript.check_within(Repeated(12, PoissonSampled(rate, Gaussian(1.0))))
        assert sum(private.transcript.looks().values()) == 12
        found.append(flatten_params(model))
    assert torch.equal(found[0], found[1])


def test_people_and_rows_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_file(EXAMPLES / f"{PEOPLE}.py").main(people=100)
    _, record, person = capsys.readouterr().out.splitlines()[-3:]
    assert "up to 6" in record
    assert person.split()[:4] == ["person", "100", "1", "1"]
    assert list(tmp_path.iterdir()) == []
