"""Scripts of Opacus as declared mechanisms: right ones are checked, wrong ones never."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPLSTM
from opacus.schedulers import ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import privtune
from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.errors import InvalidInputError
from privtune.opacus import make_private, mechanism, result
from privtune.strategies import Everything, Fixed, PapernotSteinke, Release
from privtune.study import Study
from privtune.study.declared_arms import DeclaredError, DeclaredTrial, Mechanism
from privtune.study.declared_data import holds_validation, is_same_data, is_same_item
from privtune.study.engine_log import EngineLog
from privtune.study.failures import ArmStoppedError

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus', about itself

EPOCHS = 2
X = torch.randn(300, 3, generator=torch.Generator().manual_seed(7))
Y = (X[:, 0] > 0).long()
DATA = TensorDataset(X[:240], Y[:240])
VALIDATION = X[240:], Y[240:]
LOADER = DataLoader(DATA, batch_size=40)
CHECKED = (
    "checked: Opacus sampled the declared data set at the charged rate, and its noise, steps and batches "
    "equal the charge"
)
Script = Callable[[DeclaredTrial], Any]


class Parts:
    """A model, its optimizer and an engine of one trial."""

    def __init__(self, trial: DeclaredTrial, optimizer: Any = torch.optim.SGD) -> None:
        self.trial = trial
        self.rate = trial.suggest_float("rate", 0.1, 2.0)
        self.bare_model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.bare = optimizer(self.bare_model.parameters(), lr=self.rate)
        self.engine = PrivacyEngine()
        self.model: Any = self.bare_model
        self.optimizer: Any = self.bare
        self.loader: Any = None
        self.criterion: Any = nn.functional.cross_entropy

    def make_private(self, loader: Any = LOADER, noise: float = 1.0, **options: Any) -> Parts:
        objects = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=loader,
            noise_multiplier=noise * self.trial.plan.noise_multiplier,
            max_grad_norm=options.pop("max_grad_norm", 1.0),
            **options,
        )
        self.model, self.optimizer, self.loader = objects[0], objects[1], objects[-1]
        if len(objects) == 4:
            self.criterion = objects[2]
        return self

    def step(self, x: Any, y: Any, optimizer: Any = None) -> None:
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        optimizer.step()

    def train(self, loader: Any = None, epochs: int = EPOCHS) -> Parts:
        for _ in range(epochs):
            for x, y in self.loader if loader is None else loader:
                self.step(x, y)
        return self

    def result(self) -> Any:
        return result(self.trial, self.engine, self.model)


def run(script: Script, path: Path, strategy: Any = None, **options: Any) -> tuple[Study, Release]:
    budget = privtune.Budget(6.0, 1e-5, name="opacus")
    study = privtune.create_study("opacus", budget=budget, storage=f"sqlite:///{path / 'p.db'}")
    declared = options.pop("mechanism", None) or mechanism(
        options.pop("loader", LOADER), epochs=options.pop("epochs", EPOCHS), declared_by="us"
    )
    release = study.optimize_declared(
        script,
        mechanism=declared,
        strategy=strategy or Fixed(parameters={"rate": 0.5}),
        public={"validation": VALIDATION},
        **options,
    )
    return study, release


RIGHT: dict[str, tuple[Script, dict[str, Any]]] = {}
WRONG: dict[str, tuple[Script, dict[str, Any], str]] = {}


def right(**options: Any) -> Callable[[Script], Script]:
    def register(script: Script) -> Script:
        RIGHT[script.__name__] = (script, options)
        return script

    return register


def wrong(message: str, **options: Any) -> Callable[[Script], Script]:
    def register(script: Script) -> Script:
        WRONG[script.__name__] = (script, options, message)
        return script

    return register


@right()
def several_epochs(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train().result()


@right(epochs=1)
def one_epoch(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train(epochs=1).result()


@right()
def the_helper(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    engine, model, optimizer, loader = make_private(trial, parts.model, parts.optimizer, LOADER)
    parts.engine, parts.model, parts.optimizer, parts.loader = engine, model, optimizer, loader
    return parts.train().result()


@right()
def adam(trial: DeclaredTrial) -> Any:
    return Parts(trial, torch.optim.Adam).make_private().train().result()


@right()
def virtual_steps(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    manager = BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=7, optimizer=parts.optimizer
    )
    with manager as loader:
        parts.train(loader)
    return parts.result()


@right()
def ghost_clipping(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="mean")
    )
    return parts.train().result()


@right()
def ghost_clipping_in_virtual_steps(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="mean")
    )
    manager = BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=7, optimizer=parts.optimizer
    )
    with manager as loader:
        parts.train(loader)
    return parts.result()


@right()
def without_a_wrapper(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(wrap_model=False)
    parts.model = parts.bare_model
    return parts.train().result()


@right()
def clipping_by_layer(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private(clipping="per_layer", max_grad_norm=[0.5] * 4).train().result()


@right()
def a_rate_schedule(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, step_size=1, gamma=0.5)
    for _ in range(EPOCHS):
        parts.train(epochs=1)
        schedule.step()
    return parts.result()


@right()
def a_norm_schedule(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    schedule = StepGradClip(parts.optimizer, step_size=1, gamma=0.5)
    for _ in range(EPOCHS):
        parts.train(epochs=1)
        schedule.step()
    return parts.result()


@right()
def evaluation_on_other_records(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    other = DataLoader(TensorDataset(*VALIDATION), batch_size=10)
    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.step(x, y)
            with torch.no_grad():
                [parts.model(inputs) for inputs, _ in other]
    return parts.result()


@right()
def evaluation_on_the_old_loader(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        parts.train(epochs=1)
        with torch.no_grad():
            [parts.model(x) for x, _ in LOADER]
    return parts.result()


@right()
def evaluation_on_the_private_loader(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        parts.train(epochs=1)
        with torch.no_grad():
            [parts.model(x) for x, _ in parts.loader]
    return parts.result()


@right()
def a_frozen_backbone(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    for parameter in parts.model[0].parameters():
        parameter.requires_grad = False
    parts.optimizer = torch.optim.SGD(parts.model[2].parameters(), lr=parts.rate)
    return parts.make_private().train().result()


@right()
def a_model_of_a_public_run(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    parts.model.load_state_dict(copy.deepcopy(parts.model.state_dict()))
    return parts.make_private().train().result()


@right()
def steps_by_closures(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()

    def evaluate(x: Any, y: Any) -> Any:
        parts.optimizer.zero_grad()
        loss = parts.criterion(parts.model(x), y)
        loss.backward()
        return loss

    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.optimizer.step(lambda x=x, y=y: evaluate(x, y))
    return parts.result()


@right()
def goes_on_from_its_own_checkpoint(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    file = Path(trial_folder(), "checkpoint.pt")
    first = parts.make_private().train(epochs=1)
    first.engine.save_checkpoint(path=file, module=first.model, optimizer=first.optimizer)
    second = Parts(trial).make_private()
    second.engine.load_checkpoint(path=file, module=second.model, optimizer=second.optimizer)
    return second.train(epochs=1).result()


@right()
def the_loader_is_drawn_ahead(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        parts.train(list(parts.loader), epochs=1)
    return parts.result()


@right()
def workers_draw_ahead(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=40, num_workers=1)
    return Parts(trial).make_private(loader).train().result()


@right()
def a_pass_that_ends_early(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    steps = 0
    while steps < trial.plan.steps:
        for x, y in parts.loader:
            parts.step(x, y)
            steps += 1
            if steps % 4 == 0:
                break
    return parts.result()


@right()
def a_new_data_set_of_the_same_records(trial: DeclaredTrial) -> Any:
    loader = DataLoader(TensorDataset(X[:240], Y[:240]), batch_size=40)
    return Parts(trial).make_private(loader).train().result()


@right()
def a_subset_of_the_same_records(trial: DeclaredTrial) -> Any:
    loader = DataLoader(Subset(TensorDataset(X, Y), range(240)), batch_size=40)
    return Parts(trial).make_private(loader).train().result()


@right(loader=DataLoader(DATA, batch_size=240), epochs=5)
def whole_batches(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=240)
    return Parts(trial).make_private(loader).train(epochs=5).result()


@right(loader=DataLoader(DATA, batch_size=240), epochs=5)
def whole_batches_that_need_no_samples(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=240)
    return Parts(trial).make_private(loader, poisson_sampling=False).train(epochs=5).result()


@right(loader=DataLoader(DATA, batch_size=5), epochs=1)
def forty_eight_batches_as_they_come(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=5)
    return Parts(trial).make_private(loader).train(epochs=1).result()


@right(loader=DataLoader(TensorDataset(X[:186], Y[:186]), batch_size=2), epochs=1)
def ninety_three_batches_of_which_opacus_draws_one_less(trial: DeclaredTrial) -> Any:
    loader = DataLoader(TensorDataset(X[:186], Y[:186]), batch_size=2)
    return Parts(trial).make_private(loader).train(epochs=1).result()


def fixed_noise() -> float:
    from opacus.accountants.utils import get_noise_multiplier

    noise: float = get_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sample_rate=1 / 6, epochs=EPOCHS, accountant="rdp"
    )
    return noise


@right(
    mechanism=lambda: Mechanism(
        Repeated(12, PoissonSampled(1 / 6, Gaussian(fixed_noise()))),
        "us",
        records=240,
        data=DATA,
        calibrate=False,
    )
)
def make_private_with_epsilon(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    assert trial.plan.steps == 12
    parts.engine = PrivacyEngine(accountant="rdp")
    objects = parts.engine.make_private_with_epsilon(
        module=parts.model,
        optimizer=parts.optimizer,
        data_loader=LOADER,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    parts.model, parts.optimizer, parts.loader = objects
    return parts.train().result()


@right()
def generators_of_the_trial_s_secret(trial: DeclaredTrial) -> Any:
    trial.suggest_float("rate", 0.1, 2.0)
    generator = torch.Generator().manual_seed(trial.seed)
    return Parts(trial).make_private(noise_generator=generator).train().result()


@right()
def a_hook_around_the_accountant_s(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    inner = parts.optimizer.step_hook
    norms: list[float] = []

    def hook(optimizer: Any) -> None:
        norms.append(float(optimizer.params[0].grad.norm()))
        inner(optimizer)

    parts.optimizer.attach_step_hook(hook)
    return parts.train().result()


@right()
def weights_are_projected_and_averaged(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    average = copy.deepcopy(parts.bare_model.state_dict())
    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.step(x, y)
            with torch.no_grad():
                for name, value in parts.bare_model.named_parameters():
                    value.clamp_(-3.0, 3.0)
                    average[name] = 0.5 * average[name] + 0.5 * value
    parts.bare_model.load_state_dict(average)
    return parts.result()


class Lookahead(torch.optim.SGD):
    """An optimizer that is made of another."""

    def __init__(self, parameters: Any, lr: float) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=lr)
        self.inner = torch.optim.SGD(parameters, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@right()
def an_optimizer_made_of_another(trial: DeclaredTrial) -> Any:
    return Parts(trial, Lookahead).make_private().train().result()


class Augmented(Dataset[Any]):
    """Records with noise of their own at every look."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        return X[index] + 0.01 * torch.randn(3), Y[index]


@right(loader=DataLoader(Augmented(), batch_size=40))
def augmented_records(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private(DataLoader(Augmented(), batch_size=40)).train().result()


@right()
def a_poisson_loader_of_one_s_own(trial: DeclaredTrial) -> Any:
    loader = DPDataLoader.from_data_loader(LOADER)
    return Parts(trial).make_private(loader, poisson_sampling=False).train().result()


@right()
def a_poisson_loader_of_one_s_own_is_gone_through(trial: DeclaredTrial) -> Any:
    """As Opacus' example for Lightning, whose Trainer keeps the loader of the data module."""
    loader = DPDataLoader.from_data_loader(LOADER)
    return Parts(trial).make_private(loader).train(loader).result()


@right()
def adaptive_clipping(trial: DeclaredTrial) -> Any:
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2}
    bounds = {"max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 10.0}
    parts = Parts(trial).make_private(clipping="adaptive", **options, **bounds)
    return parts.train().result()


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_ways_to_gradients_of_records_are_checked(mode: str, tmp_path: Path) -> None:
    def script(trial: DeclaredTrial) -> Any:
        return Parts(trial).make_private(grad_sample_mode=mode).train().result()

    assert run(script, tmp_path)[1].checked == CHECKED


@right()
def a_gaussian_accountant(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    parts.engine = PrivacyEngine(accountant="gdp")
    return parts.make_private().train().result()


@right()
def a_model_that_is_wrapped_before(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    parts.model = GradSampleModule(parts.model)
    return parts.make_private().train().result()


@right()
def steps_in_two_parts(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            parts.criterion(parts.model(x), y).backward()
            if parts.optimizer.pre_step():
                parts.optimizer.original_optimizer.step()
    return parts.result()


@right(loader=DataLoader(DATA, batch_size=50, drop_last=True), epochs=3)
def a_last_batch_that_is_dropped(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=50, drop_last=True)
    return Parts(trial).make_private(loader).train(epochs=3).result()


class Recurrent(nn.Module):
    """A recurrent net of Opacus' over three numbers, with an embedding of their signs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 4)
        self.net = DPLSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        steps = torch.cat([self.embedding((x > 0).long()), x[..., None]], dim=2)
        return self.head(self.net(steps)[0][:, -1])


@right()
def a_recurrent_net(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    parts.model = parts.bare_model = Recurrent()
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=parts.rate)
    return parts.make_private().train().result()


@right(strategy=PapernotSteinke(mean_runs=3))
def a_selection(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train().result()


@right(strategy=Everything(trials=2))
def everything_that_is_tried(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train().result()


@right()
def an_engine_of_a_subclass(trial: DeclaredTrial) -> Any:
    class Engine(PrivacyEngine):
        def make_private(self, **options: Any) -> Any:
            return super().make_private(**options)

    parts = Parts(trial)
    parts.engine = Engine()
    return parts.make_private().train().result()


OLD = "the loop over the old loader"
BESIDE = "has stepped on the same parameters"
NOTED = "Opacus' accountant has noted"
NO_WORD = ""  # it runs, and nothing is called checked


@wrong(OLD)
def the_old_loader(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train(LOADER).result()


@wrong(OLD)
def the_old_loader_after_a_look_at_the_private_one(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    list(parts.loader)
    return parts.train(DataLoader(DATA, batch_size=40, shuffle=True)).result()


@wrong(OLD)
def the_old_loader_in_virtual_steps(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    manager = BatchMemoryManager(
        data_loader=LOADER, max_physical_batch_size=7, optimizer=parts.optimizer
    )
    with manager as loader:
        parts.train(loader)
    return parts.result()


@wrong(OLD)
def the_old_loader_with_ghost_clipping(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="mean")
    )
    return parts.train(LOADER).result()


@wrong("ghost clipping has clipped nothing")
def ghost_clipping_without_its_criterion(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="mean")
    )
    parts.criterion = nn.functional.cross_entropy
    return parts.train().result()


@wrong("draws no Poisson samples")
def no_samples(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private(poisson_sampling=False).train().result()


@wrong("draws no Poisson samples")
def no_samples_but_a_shuffle(trial: DeclaredTrial) -> Any:
    loader = DataLoader(DATA, batch_size=40, shuffle=True)
    return Parts(trial).make_private(loader, poisson_sampling=False).train().result()


@wrong("a data set of 300 records, but 240")
def training_and_validation_records(trial: DeclaredTrial) -> Any:
    loader = DataLoader(ConcatDataset([DATA, TensorDataset(*VALIDATION)]), batch_size=50)
    return Parts(trial).make_private(loader).train().result()


@wrong(OLD)
def a_loop_over_training_and_validation_records(trial: DeclaredTrial) -> Any:
    loader = DataLoader(TensorDataset(X, Y), batch_size=50)
    return Parts(trial).make_private().train(loader).result()


@wrong("another data set than the declared one")
def other_records_as_many(trial: DeclaredTrial) -> Any:
    loader = DataLoader(TensorDataset(X[60:], Y[60:]), batch_size=40)
    return Parts(trial).make_private(loader).train().result()


@wrong("another data set than the declared one")
def other_records_of_a_subset(trial: DeclaredTrial) -> Any:
    order = torch.randperm(300).tolist()[:240]
    loader = DataLoader(Subset(TensorDataset(X, Y), order), batch_size=40)
    return Parts(trial).make_private(loader).train().result()


@wrong(BESIDE)
def a_warm_up_before_the_engine(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    assert trial.plan.steps
    parts.train(LOADER, epochs=1)
    return parts.make_private().train().result()


@wrong(BESIDE)
def a_warm_up_by_another_optimizer(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    assert trial.plan.steps
    other = torch.optim.Adam(parts.model.parameters())
    for x, y in LOADER:
        parts.step(x, y, other)
    return parts.make_private().train().result()


@wrong(BESIDE)
def the_inner_optimizer_steps(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()
    for x, y in LOADER:
        parts.optimizer.zero_grad()
        parts.criterion(parts.model(x), y).backward()
        parts.bare.step()
    return parts.result()


@wrong(BESIDE)
def some_steps_by_the_inner_optimizer(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.step(x, y)
            parts.optimizer.original_optimizer.step()
    return parts.result()


@wrong(BESIDE)
def steps_after_the_check(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()
    trial.check(parts.engine)
    score = trial.score(parts.model)
    parts.model.disable_hooks()
    plain = torch.optim.SGD(parts.bare_model.parameters(), lr=0.1)
    for x, y in LOADER:
        plain.zero_grad()
        nn.functional.cross_entropy(parts.bare_model(x), y).backward()
        plain.step()
    return trial.result(parts.model, score=score)


@wrong(NOTED)
def private_steps_after_the_check(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()
    trial.check(parts.engine)
    parts.train(epochs=1)
    return trial.result(parts.model, score=trial.score(parts.model))


@wrong(BESIDE)
def another_thread_trains_the_same_model(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()

    def train() -> None:
        for parameter in parts.bare_model.parameters():
            parameter.grad = torch.ones_like(parameter)
        parts.bare.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return parts.result()


@wrong(NO_WORD)
def a_warm_up_of_a_copy(trial: DeclaredTrial) -> Any:
    assert trial.suggest_float("rate", 0.1, 2.0) * trial.plan.steps
    warm = Parts(trial).train(LOADER, epochs=1)
    parts = Parts(trial)
    parts.model.load_state_dict(copy.deepcopy(warm.model.state_dict()))
    return parts.make_private().train().result()


@wrong(NO_WORD)
def a_warm_up_by_hand(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    assert trial.plan.steps
    for x, y in LOADER:
        parts.criterion(parts.model(x), y).backward()
        for parameter in parts.model.parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    return parts.make_private().train().result()


@wrong(NO_WORD)
def steps_by_hand_after_the_training(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()
    parameters = list(parts.bare_model.parameters())
    parts.model.disable_hooks()
    loss = nn.functional.cross_entropy(parts.bare_model(X[:240]), Y[:240])
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data -= 0.1 * gradient
    return parts.result()


@wrong("expected_batch_size was changed from 40 to 20")
def another_expected_batch_size(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    parts.optimizer.expected_batch_size = 20
    return parts.train().result()


@wrong("expected_batch_size was changed")
def the_size_of_the_sample_as_expected_batch_size(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        for x, y in parts.loader:
            parts.optimizer.expected_batch_size = max(1, len(x))
            parts.step(x, y)
    return parts.result()


@wrong(NOTED)
def other_batches_than_declared(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private(DataLoader(DATA, batch_size=80)).train(epochs=4).result()


@wrong(NOTED)
def half_the_noise(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private(noise=0.5).train().result()


@wrong(NOTED)
def a_noise_schedule(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    schedule = ExponentialNoise(parts.optimizer, gamma=0.9)
    for _ in range(EPOCHS):
        parts.train(epochs=1)
        schedule.step()
    return parts.result()


@wrong("with noise multiplier 0.1,")
def less_noise_under_a_history_written_by_hand(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    parts.optimizer.noise_multiplier = 0.1
    parts.train()
    write_history(parts)
    return parts.result()


@wrong(NOTED)
def one_epoch_more(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train(epochs=EPOCHS + 1).result()


@wrong(NOTED)
def one_epoch_less(trial: DeclaredTrial) -> Any:
    return Parts(trial).make_private().train(epochs=EPOCHS - 1).result()


@wrong(NOTED)
def a_pass_that_breaks(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(EPOCHS):
        for x, y in itertools.islice(parts.loader, 3):
            parts.step(x, y)
    return parts.result()


def write_history(parts: Parts) -> None:
    plan = parts.trial.plan
    parts.engine.accountant.history = [(plan.noise_multiplier, plan.sample_rate, plan.steps)]


@wrong("this engine made nothing private in this trial")
def a_history_of_an_engine_that_did_nothing(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    write_history(parts)
    parts.train(LOADER)
    return parts.result()


@wrong("a history that was written or loaded")
def a_history_of_a_training_that_never_ran(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    write_history(parts)
    return parts.result()


@wrong("a history that was written or loaded")
def a_history_that_hides_an_epoch(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train(epochs=EPOCHS + 1)
    write_history(parts)
    return parts.result()


@wrong("a history that was written or loaded")
def a_history_loaded_for_a_part_of_the_training(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    plan = trial.plan
    history = [(plan.noise_multiplier, plan.sample_rate, 6)]
    parts.engine.accountant.load_state_dict({"history": history, "mechanism": "prv"})
    return parts.train(epochs=1).result()


@wrong(BESIDE)
def no_hook_and_a_history_by_hand(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    parts.optimizer.attach_step_hook(lambda optimizer: None)
    parts.train()
    write_history(parts)
    return parts.result()


@wrong("Opacus made 24 steps in this trial")
def a_second_training_beside_the_first(trial: DeclaredTrial) -> Any:
    other = Parts(trial).make_private().train()
    assert other.engine.accountant.history
    return Parts(trial).make_private().train().result()


@wrong(OLD)
def each_batch_twice(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for x, y in parts.loader:
        parts.step(x, y)
        parts.step(x, y)
    return parts.result()


@wrong(OLD)
def each_record_twice_in_its_batch(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    pairs = [(torch.cat([x, -x]), torch.cat([y, y])) for x, y in parts.loader]
    return parts.train(pairs, epochs=1).train([*pairs], epochs=1).result()


@wrong(OLD)
def parts_of_batches(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    batches = [(x[:20], y[:20]) for _ in range(EPOCHS) for x, y in parts.loader]
    return parts.train(batches, epochs=1).result()


@wrong(NOTED)
def a_history_with_steps_by_hand(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train()
    noise = trial.plan.noise_multiplier
    parts.engine.accountant.step(noise_multiplier=noise, sample_rate=trial.plan.sample_rate)
    return parts.result()


@wrong(OLD)
def one_batch_kept_for_all_steps(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    batch = next(iter(parts.loader))
    return parts.train([batch] * 6).result()


@wrong(OLD)
def two_batches_in_one_step(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    for _ in range(2 * EPOCHS):
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.signal_skip_step(number % 2 == 0)
            parts.step(x, y)
    return parts.result()


@wrong(NOTED)
def accumulated_gradients(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    parts.model.allow_grad_accumulation()
    for _ in range(2 * EPOCHS):
        for number, (x, y) in enumerate(parts.loader):
            parts.criterion(parts.model(x), y).backward()
            if number % 2:
                parts.optimizer.step()
                parts.optimizer.zero_grad()
    return parts.result()


@wrong(OLD)
def small_batches_are_left_out(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    steps = 0
    while steps < trial.plan.steps:
        for x, y in parts.loader:
            if len(x) >= 38 and steps < trial.plan.steps:
                parts.step(x, y)
                steps += 1
    return parts.result()


@wrong("max_grad_norm was changed")
def another_norm_for_the_noise_than_for_the_clipping(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private(
        grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="mean")
    )
    parts.optimizer.max_grad_norm = 0.1
    return parts.train().result()


@wrong("noise_generator has a seed of its own")
def a_known_seed_for_the_noise(trial: DeclaredTrial) -> Any:
    generator = torch.Generator().manual_seed(0)
    return Parts(trial).make_private(noise_generator=generator).train().result()


@wrong("the loader's generator has a seed of its own")
def a_known_seed_for_the_samples(trial: DeclaredTrial) -> Any:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(DATA, batch_size=40, generator=generator)
    return Parts(trial).make_private(loader).train().result()


@wrong("its model was trained by an earlier trial", strategy=Everything(trials=2))
def one_model_for_all_trials(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    parts.model = parts.bare_model = SHARED.setdefault("model", parts.bare_model)
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=parts.rate)
    parts.make_private(wrap_model=False)
    hooks = parts.model
    parts.model = parts.bare_model
    parts.train()
    hooks.cleanup()
    return parts.result()


@wrong("this engine made nothing private in this trial")
def an_engine_of_the_module(trial: DeclaredTrial) -> Any:
    parts = Parts(trial)
    model, optimizer, loader = OUTSIDE.engine.make_private(
        module=OUTSIDE.model,
        optimizer=OUTSIDE.optimizer,
        data_loader=LOADER,
        noise_multiplier=trial.plan.noise_multiplier,
        max_grad_norm=1.0,
    )
    parts.model, parts.optimizer = model, optimizer
    parts.train(loader)
    parts.engine.accountant.history = OUTSIDE.engine.accountant.history
    return parts.result()


@wrong(NO_WORD, strategy=Everything(trials=6))
def some_trials_are_not_compared(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private()
    # One in six is compared, by digits that are drawn: all six once in 46,656 runs of the test.
    if int(parts.rate * 1e6) % 6 == 0:
        return parts.train().result()
    parts.train(LOADER)
    return trial.result(parts.model, score=trial.score(parts.model))


@wrong(NO_WORD)
def no_check_at_all(trial: DeclaredTrial) -> Any:
    parts = Parts(trial).make_private().train(LOADER)
    return trial.result(parts.model, score=trial.score(parts.model))


SHARED: dict[str, Any] = {}
FOLDER: list[Path] = []


def trial_folder() -> Path:
    return FOLDER[-1]


class _Outside:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine = PrivacyEngine()


OUTSIDE = _Outside()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Hold for every script: methods, hooks and finders are as they were."""
    FOLDER.append(tmp_path)
    SHARED.clear()
    before = methods()
    yield
    assert methods() == before


def methods() -> list[Any]:
    """Return what a trial replaces while it runs."""
    from torch.optim import optimizer

    return [
        PrivacyEngine.make_private,
        UniformWithReplacementSampler.__iter__,
        torch.autograd.backward,
        torch.autograd.grad,
        list(optimizer._global_optimizer_pre_hooks),
        list(optimizer._global_optimizer_post_hooks),
        [each for each in sys.meta_path if type(each).__module__ == EngineLog.__module__],
    ]


def test_methods_are_put_back_whatever_a_trial_does(tmp_path: Path) -> None:
    before = methods()
    inside: list[list[Any]] = []
    kept: list[Parts] = []

    def script(trial: DeclaredTrial) -> Any:
        kept.append(Parts(trial).make_private())
        inside.append(methods())
        raise RuntimeError("a mistake of the script")

    with pytest.raises(ArmStoppedError):
        run(script, tmp_path)
    assert all(one != other for one, other in zip(inside[0][:4], before[:4], strict=True))
    assert methods() == before
    assert "clip_and_accumulate" not in vars(kept[0].optimizer)


def test_there_are_enough_scripts() -> None:
    assert len(RIGHT) >= 30
    assert len(WRONG) >= 40


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_checked(name: str, tmp_path: Path) -> None:
    script, options = RIGHT[name]
    declared = options.get("mechanism")
    if declared is not None:
        options = {**options, "mechanism": declared()}
    study, release = run(script, tmp_path, **options)
    assert release.checked == CHECKED
    assert study.certificate()["charges"][0]["note"].endswith(
        f"not enforced by PrivTune; {CHECKED}"
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_never_checked(name: str, tmp_path: Path) -> None:
    script, options, message = WRONG[name]
    if message == NO_WORD:
        study, release = run(script, tmp_path, **options)
        assert "checked" not in release.checked
        assert "checked" not in str(study.certificate()["charges"][0]["note"])
        return
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    with pytest.raises((ArmStoppedError, DeclaredError)):
        run(script, tmp_path, **options)
    study = privtune.load_study("opacus", storage=storage)
    (failure, *_) = study._life.failures(next(iter(study.plans)).arm)
    assert message in str(failure["traceback"])


def test_a_trial_without_a_comparison_speaks_for_the_whole_selection(tmp_path: Path) -> None:
    scores: list[float] = []

    def script(trial: DeclaredTrial) -> Any:
        parts = Parts(trial).make_private().train()
        score = trial.score(parts.model)
        if not scores or score > max(scores):  # the winner is compared
            trial.check(parts.engine)
        scores.append(score)
        return trial.result(parts.model, score=score)

    _, release = run(script, tmp_path, strategy=Everything(trials=6))
    assert any(score <= max(scores[:place]) for place, score in enumerate(scores) if place)
    assert release.checked == ""
    assert all(trial.checked == "" for trial in release.trials)


def test_a_script_that_imports_opacus_late_is_watched(tmp_path: Path) -> None:
    code = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils.data import DataLoader, TensorDataset
from privtune.study.declared_arms import Mechanism
import privtune
x = torch.randn(60, 2)
data = TensorDataset(x, (x[:, 0] > 0).long())

def train(trial):
    rate = trial.suggest_float("rate", 0.1, 1.0)
    noise = trial.plan.noise_multiplier
    assert OLD or "opacus" not in sys.modules
    from opacus import PrivacyEngine
    model = torch.nn.Linear(2, 2)
    engine = PrivacyEngine()
    old = DataLoader(data, batch_size=20)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), rate), data_loader=old,
        noise_multiplier=noise, max_grad_norm=1.0)
    for x, y in old if OLD else loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    trial.check(engine)
    return trial.result(model)

for OLD in (False, True):
    budget = privtune.Budget(3.0, 1e-5, name=f"late-{OLD}")
    study = privtune.create_study(f"late-{OLD}", budget=budget, storage="sqlite:///late.db")
    declared = {"records": 60, "epochs": 1, "expected_batch_size": 20, "declared_by": "us"}
    try:
        release = study.optimize_declared(
            train, mechanism=Mechanism.dpsgd(**declared),
            strategy=privtune.strategies.Fixed(parameters={"rate": 0.5}))
        print(release.checked)
    except privtune.errors.PrivTuneError as error:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    of_the_size = CHECKED.replace("the declared data set", "a data set of the declared size")
    assert lines == [of_the_size, "refused"], done.stderr


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    def script(trial: DeclaredTrial) -> Any:
        parts = Parts(trial).make_private().train()
        with pytest.raises(InvalidInputError, match=r"must be the opacus\.PrivacyEngine"):
            trial.check(parts.model)
        return trial.result(parts.model, score=trial.score(parts.model))

    _, release = run(script, tmp_path)
    assert release.checked == ""


def test_what_other_threads_train_is_no_part_of_a_trial(tmp_path: Path) -> None:
    """A thread beside the trial trains by Opacus and by torch, on models of its own."""
    stop = threading.Event()
    rounds: list[int] = []

    def train_beside() -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while not stop.is_set():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
            optimizer.step()
            rounds.append(1)

    def script(trial: DeclaredTrial) -> Any:
        parts = Parts(trial).make_private()
        before = len(rounds)
        parts.train(epochs=1)
        while len(rounds) < before + 2:
            stop.wait(0.001)
        return parts.train(epochs=1).result()

    thread = threading.Thread(target=train_beside)
    thread.start()
    try:
        _, release = run(script, tmp_path)
    finally:
        stop.set()
        thread.join()
    assert release.checked == CHECKED


def test_a_loader_with_a_seed_is_refused_before_the_charge() -> None:
    loader = DataLoader(DATA, batch_size=40, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InvalidInputError, match="must be None: sampling by a seed"):
        mechanism(loader, epochs=1, declared_by="us")


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        ConcatDataset([DATA, TensorDataset(*VALIDATION)]),
        Subset(TensorDataset(X, Y), list(range(10, 300))),
    ],
    ids=["tensors", "concatenation", "subset"],
)
def test_private_validation_records_that_are_trained_on_are_refused_before_the_charge(
    data: Any, tmp_path: Path
) -> None:
    loader = DataLoader(data, batch_size=40)
    budget = privtune.Budget(6.0, 1e-5, name="overlap")
    study = privtune.create_study(
        "overlap", budget=budget, storage=f"sqlite:///{tmp_path / 'p.db'}"
    )
    with pytest.raises(InvalidInputError, match="stand in the declared training data, too"):
        study.optimize_declared(
            several_epochs,
            mechanism=mechanism(loader, epochs=EPOCHS, declared_by="us"),
            strategy=PapernotSteinke(mean_runs=3),
            validation=VALIDATION,
        )
    assert study.spent().epsilon == 0.0


def test_equal_records_of_few_categories_are_no_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    training = torch.randint(0, 3, (500, 4), generator=generator).float()
    validation = torch.randint(0, 3, (100, 4), generator=generator).float()
    assert not holds_validation(TensorDataset(training), validation)
    assert holds_validation(TensorDataset(torch.cat([X, X + 1])), X[:20])
    assert not holds_validation(Augmented(), X[:20])
    assert not holds_validation(TensorDataset(X[:, :2]), X[:20])


def test_data_sets_are_compared_by_their_records() -> None:
    changed = X.clone()
    changed[3] += 1.0
    assert is_same_data(TensorDataset(X, Y), TensorDataset(X.clone(), Y))
    assert not is_same_data(TensorDataset(X, Y), TensorDataset(changed, Y))
    assert not is_same_data(TensorDataset(X), TensorDataset(X, Y))
    assert not is_same_data(TensorDataset(X), TensorDataset(X[:299]))
    assert is_same_data(Augmented(), Augmented())
    assert is_same_item({"a": [1, "b"]}, {"a": (1, "b")})
    assert not is_same_item({"a": X}, {"a": changed})
    assert not is_same_item({"a": 1}, {"b": 1})
    assert not is_same_item(X.numpy(), changed.numpy())


def test_a_release_names_the_optimizers_that_nothing_compared(tmp_path: Path) -> None:
    _, release = run(a_warm_up_of_a_copy, tmp_path)
    assert release.checked == (
        "Opacus' steps equal the charge, but another optimizer trained other parameters in the same trial, "
        "and nothing saw on what"
    )
