"""Own loops: what would be released of a model is, loaded anew, the model that was trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import privtune
from privtune.errors import PrivTuneError
from privtune.execution.fine_tuned import AdapterError
from privtune.ledger import Ledger
from privtune.strategies import Everything, Fixed
from privtune.study._loop_data import SealedTrialError
from privtune.study.objective import plan_objective, rehearse
from privtune.study.user_training import DPSGD, Validation
from privtune.training.engine.fine_tuning import set_trainable
from privtune.training.own_loop.weights import LoopError

pytestmark = pytest.mark.filterwarnings(
    "ignore::privtune.training.mechanism.kernel.FallbackWarning"
)
X, Y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
LOOP = DPSGD(records=40, epochs=1, expected_batch_size=8)
BUDGET = privtune.Budget(6.0, 1e-5, name="saved")


def rehearsed(make: Any, form: str = "record", *, scored: bool = True) -> Any:
    def objective(trial: privtune.Trial) -> float:
        model = make()
        rate = trial.suggest_float("rate", 0.1, 1.0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
        private = trial.make_private(model, optimizer, (X[:40], Y[:40]))
        for batch in private.batches():
            if form == "losses":
                x, y = batch
                private.step(cross_entropy(private.model(x), y, reduction="none"))
            else:
                private.step(
                    batch, lambda model, x, y: cross_entropy(model(x), y, reduction="none")
                )
        return trial.score(model, (X[40:], Y[40:])) if scored else 0.0

    split = Validation(records=20, public=True) if scored else None
    strategy = Everything(trials=1) if scored else Fixed()
    options: dict[str, Any] = {"budget": BUDGET, "epsilon": 6.0, "sampler": None, "pruner": None}
    return rehearse(objective, plan_objective(strategy, LOOP, split, **options))


def body(seed: int | None = 5) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Placed(nn.Module):
    """Looks at its input through tensors that no file holds."""

    def __init__(self, make: Any, *, buffer: bool) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        if buffer:
            self.register_buffer("places", make(6), persistent=False)
        else:
            self.places = make(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x * self.places)
        return out


class Merged(nn.Module):
    """Adds its adapter to the layer once, when it is first used to predict, as it is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(6, 3).requires_grad_(False)
        torch.seed()
        self.up = nn.Linear(6, 3, bias=False)
        self.merged = (self.base.weight + self.up.weight).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.base(x) + self.up(x)
        return x @ self.merged.T + self.base.bias


class Unsaved(nn.Linear):
    """Keeps its weights out of what is saved and loaded."""

    def _load_from_state_dict(self, *_: Any) -> None:
        return None


class Idle(nn.Module):
    """Has an adapter that nothing listens to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.up = nn.Linear(6, 3).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 0.0 * self.up(x)
        return out


class Averaging(nn.Module):
    """Trains a buffer beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: torch.Tensor = self.head(x - self.mean)
        return out


def unsaved() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(6, 6).requires_grad_(False), Unsaved(6, 3)
    torch.nn.init.normal_(layers[1].weight, generator=torch.Generator())
    return nn.Sequential(*layers)


class Reading(nn.Module):
    """Looks words up in a table that lies in the user's memory."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(table, freeze=False)
        self.head = nn.Linear(4, 3)
        self.register_buffer("one", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words((x > 0).long()).mean(1) * self.one)
        return out


def headed() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(6, 5, bias=False).requires_grad_(False), nn.Linear(5, 3, bias=False)
    return nn.Sequential(*layers)


HONEST = {
    "all": body,
    "all, drawn": lambda: body(None),
    "head": lambda: set_trainable(body(), "head"),
    "biases": lambda: set_trainable(body(), "biases"),
    "lora": lambda: set_trainable(body(), "lora", rank=2),
    "head without biases": headed,
    "compiled": lambda: torch.compile(set_trainable(body(), "head"), backend="eager"),
    "buffer": lambda: Placed(torch.arange, buffer=True),
    "attribute": lambda: Placed(torch.arange, buffer=False),
}
BROKEN = {
    "frozen part drawn": lambda: set_trainable(body(None), "lora", rank=2),
    "buffer drawn": lambda: Placed(torch.randn, buffer=True),
    "attribute drawn": lambda: Placed(torch.randn, buffer=False),
    "weights copied": Merged,
    "weights not loaded": unsaved,
}


@pytest.mark.parametrize("form", ["record", "losses"])
@pytest.mark.parametrize("make", HONEST.values(), ids=HONEST)
def test_what_can_be_loaded_passes(make: Any, form: str) -> None:
    rehearsed(make, form)


@pytest.mark.parametrize("form", ["record", "losses"])
@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_what_is_another_model_when_loaded_is_refused(make: Any, form: str) -> None:
    with pytest.raises(AdapterError, match="is another model than the one that was trained"):
        rehearsed(make, form)


def test_the_last_call_on_zeros_alone_says_nothing() -> None:
    rehearsed(headed, scored=False)
    with pytest.raises(AdapterError, match="is another model than the one that was trained"):
        rehearsed(BROKEN["buffer drawn"], scored=False)


def test_memory_of_the_users_own_is_not_written_to() -> None:
    table = torch.randn(2, 4)
    before = table.clone()
    rehearsed(lambda: Reading(table))
    assert torch.equal(table, before)


def test_what_reaches_no_output_or_trains_beside_its_weights_is_refused() -> None:
    with pytest.raises(AdapterError, match="does not reach its outputs"):
        rehearsed(Idle)
    with pytest.raises((LoopError, PrivTuneError)):
        rehearsed(Averaging, "losses")


class Growing(nn.Module):
    """Is wider whenever it is made."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Growing.made += 1
        self.register_buffer("one", torch.ones(1))
        self.head = nn.Linear(6, 3 + self.made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x * self.one)
        return out


def test_a_model_of_another_shape_is_another_model() -> None:
    with pytest.raises(AdapterError, match="is another model than the one that was trained"):
        rehearsed(Growing)


def test_a_rehearsal_that_a_bare_except_swallows_is_refused() -> None:
    def objective(trial: privtune.Trial) -> float:
        model = BROKEN["buffer drawn"]()
        try:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            private = trial.make_private(model, optimizer, (X[:40], Y[:40]))
            private.fit(lambda model, x, y: cross_entropy(model(x), y, reduction="none"))
        except:  # noqa: E722 - what is tested
            return 0.0
        return 0.0

    options: dict[str, Any] = {"budget": BUDGET, "epsilon": 6.0, "sampler": None, "pruner": None}
    with pytest.raises(SealedTrialError, match="a bare except"):
        rehearse(objective, plan_objective(Fixed(), LOOP, None, **options))


def test_a_part_that_is_shared_keeps_its_mode() -> None:
    shared = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)).requires_grad_(False)
    rehearsed(lambda: nn.Sequential(shared, nn.Linear(5, 3)))
    assert shared.training
    assert shared[1].training


def test_nothing_is_charged_for_what_cannot_be_loaded(storage: str) -> None:
    def objective(trial: privtune.Trial) -> float:
        model = BROKEN["frozen part drawn"]()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        private = trial.make_private(model, optimizer, (X[:40], Y[:40]))
        private.fit(lambda model, x, y: cross_entropy(model(x), y, reduction="none"))
        return trial.score(model, None)

    study = privtune.create_study("saved", budget=BUDGET, storage=storage)
    with pytest.raises(AdapterError, match=r"torch\.manual_seed before it is made"):
        study.optimize(objective, strategy=privtune.strategies.Fixed(), training=LOOP)
    with Ledger(storage) as ledger:
        assert not ledger.charges("saved")
