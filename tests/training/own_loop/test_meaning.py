"""What a captured pass takes for constant is what its loss, and its model, refer to at every step."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook

from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import flatten_params
from privtune.training.mechanism.meaning import meaning_of
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining

STEPS = 20  # a pass is captured after 4 of one shape

pytestmark = pytest.mark.filterwarnings("ignore:loss_of, or what it refers to")

Made = tuple[Any, Callable[[int, Any], object]]
"""A loss, and what changes after a step what it refers to."""


def plain(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(m(x), y, reduction="none")


class Settings:
    beta = 1.0


class Criterion:
    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.beta * plain(m, x, y)

    def of(self, m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(m, x, y)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.settings = nn.Linear(4, 3), SimpleNamespace(beta=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.settings.beta * x)
        return out


def of_settings(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Settings.beta * plain(m, x, y)


def a_namespace(_: Any) -> Made:
    own = SimpleNamespace(beta=1.0)
    return lambda m, x, y: own.beta * plain(m, x, y), lambda n, _: setattr(own, "beta", 0.8**n)


class MadeUp:
    """Attributes of a table, of which one that is missing is an error of the table's."""

    def __init__(self) -> None:
        vars(self)["table"] = {"beta": 1.0}

    def __getattr__(self, name: str) -> Any:
        return vars(self)["table"][name]


def what_is_made_up(_: Any) -> Made:
    own = MadeUp()
    return lambda m, x, y: own.beta * plain(m, x, y), lambda n, _: own.table.update(beta=0.8**n)


def a_class(_: Any) -> Made:
    Settings.beta = 1.0
    return of_settings, lambda n, _: setattr(Settings, "beta", 0.8**n)


def a_callable(_: Any) -> Made:
    own = Criterion()
    return own, lambda n, _: setattr(own, "beta", 0.8**n)


def a_method(_: Any) -> Made:
    own = Criterion()
    return own.of, lambda n, _: setattr(own, "beta", 0.8**n)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.ones(()))
        self.inner = nn.Dropout(0.0)

    def of(self, m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.beta * self.inner.p * plain(m, x, y)


class Entries:
    beta = 1.0

    def __getitem__(self, name: str) -> float:
        return float(getattr(self, name))


def a_buffer_of_a_methods_module(_: Any) -> Made:
    own = Weighted()
    own.inner.p = 1.0
    return own.of, lambda n, _: setattr(own, "beta", torch.tensor(0.8**n))


def a_setting_within_a_methods_module(_: Any) -> Made:
    own = Weighted()
    return own.of, lambda n, _: setattr(own.inner, "p", 0.8**n)


def an_entry(_: Any) -> Made:
    own = Entries()
    return lambda m, x, y: own["beta"] * plain(m, x, y), lambda n, _: setattr(own, "beta", 0.8**n)


def a_queue(_: Any) -> Made:
    own = deque([1.0], maxlen=1)
    return lambda m, x, y: own[-1] * plain(m, x, y), lambda n, _: own.append(0.8**n)


def a_long_queue(_: Any) -> Made:
    own = deque([1.0] * 100, maxlen=100)
    return lambda m, x, y: own[-1] * plain(m, x, y), lambda n, _: own.append(0.8**n)


def an_entry_of_a_long_table(_: Any) -> Made:
    own = dict.fromkeys(range(100), 1.0)
    return lambda m, x, y: own[0] * plain(m, x, y), lambda n, _: own.update({0: 0.8**n})


def of_default(
    m: Any, x: torch.Tensor, y: torch.Tensor, *, own: Sequence[float] = (1.0,)
) -> torch.Tensor:
    return own[0] * cross_entropy(m(x), y, reduction="none")


def a_default(_: Any) -> Made:
    own = [1.0]
    of_default.__kwdefaults__ = {"own": own}
    return of_default, lambda n, _: own.__setitem__(0, 0.8**n)


BETA = 1.0


def of_inner(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scaled = lambda z: BETA * z  # noqa: E731
    return scaled(cross_entropy(m(x), y, reduction="none"))


def a_global_of_a_function_within(_: Any) -> Made:
    globals()["BETA"] = 1.0
    return of_inner, lambda n, _: globals().update(BETA=0.8**n)


def an_import(_: Any) -> Made:
    own: Any = ModuleType("settings_of_a_loop")
    own.beta, sys.modules["settings_of_a_loop"] = 1.0, own

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        from settings_of_a_loop import beta  # type: ignore[import-not-found]

        return beta * cross_entropy(m(x), y, reduction="none")

    return loss, lambda n, _: setattr(own, "beta", 0.8**n)


def a_name_in_words(_: Any) -> Made:
    own = SimpleNamespace(beta=1.0)
    return (
        lambda m, x, y: getattr(own, "beta") * plain(m, x, y),  # noqa: B009
        lambda n, _: setattr(own, "beta", 0.8**n),
    )


class Static:
    beta = 1.0

    @staticmethod
    def of_none() -> float:
        return Static.beta

    @classmethod
    def of_class(cls) -> float:
        return cls.beta


def a_static_method(_: Any) -> Made:
    own, Static.beta = Static(), 1.0
    return lambda m, x, y: own.of_none() * plain(m, x, y), lambda n, _: setattr(
        Static, "beta", 0.8**n
    )


def a_class_method(_: Any) -> Made:
    own, Static.beta = Static(), 1.0
    return lambda m, x, y: own.of_class() * plain(m, x, y), lambda n, _: setattr(
        Static, "beta", 0.8**n
    )


def a_scheduler(_: Any) -> Made:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    own = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def change(*_: Any) -> None:
        optimizer.step()
        own.step()

    return lambda m, x, y: own.get_last_lr()[0] * plain(m, x, y), change


def a_partial(_: Any) -> Made:
    own = {"beta": 1.0}

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor, own: Any) -> torch.Tensor:
        return own["beta"] * plain(m, x, y)

    return functools.partial(loss, own=own), lambda n, _: own.update(beta=0.8**n)


def an_array(_: Any) -> Made:
    own = np.ones(1000)
    return lambda m, x, y: float(own[0]) * plain(m, x, y), lambda n, _: own.fill(0.8**n)


def a_long_array(_: Any) -> Made:
    own = np.ones(20_000)
    return lambda m, x, y: float(own[0]) * plain(m, x, y), lambda n, _: own.fill(0.8**n)


def ones_at_first(_: Any) -> Made:
    own = torch.ones(3)
    return (
        lambda m, x, y: plain(lambda x: m(x) * own, x, y),
        lambda n, _: own.data.mul_(0.5 if n > 9 else 1.0),
    )


def a_list_of_a_tensor(_: Any) -> Made:
    own = torch.ones(2)
    return lambda m, x, y: own.tolist()[0] * plain(m, x, y), lambda n, _: own.data.mul_(0.8)


def an_array_of_a_tensor(_: Any) -> Made:
    own = torch.ones(2)
    return lambda m, x, y: float(own.numpy()[0]) * plain(m, x, y), lambda n, _: own.data.mul_(0.8)


def a_tensor_rebound(_: Any) -> Made:
    own = torch.ones(())
    return lambda m, x, y: own * plain(m, x, y), lambda n, _: setattr(own, "data", own.data * 0.8)


def a_number_of_a_tensor(_: Any) -> Made:
    own = torch.ones(())
    return lambda m, x, y: own.item() * plain(m, x, y), lambda n, _: own.data.mul_(0.8)


def a_choice_by_a_tensor(_: Any) -> Made:
    own = torch.ones(())
    return (
        lambda m, x, y: (2.0 if own > 0.3 else 1.0) * plain(m, x, y),
        lambda n, _: own.data.mul_(0.8),
    )


def steps_taken(private: Any) -> Made:
    held: dict[str, Any] = {}

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.8 ** held["private"].steps_taken * plain(m, x, y)

    held["private"] = private
    return loss, lambda *_: None


def a_teacher(how: str) -> Callable[[Any], Made]:
    def made(_: Any) -> Made:
        torch.manual_seed(3)
        own = SimpleNamespace(teacher=nn.Linear(4, 3).requires_grad_(False))

        def follow(n: int, _: Any) -> None:
            state = {name: 0.5 * t for name, t in own.teacher.state_dict().items()}
            if how == "rebound":
                for name, p in own.teacher.named_parameters():
                    p.data = state[name]
            elif how == "loaded":
                own.teacher.load_state_dict(state, assign=True)
            else:
                own.teacher = copy.deepcopy(own.teacher)
                own.teacher.load_state_dict(state)

        return lambda m, x, y: plain(m, x, y) + (m(x) - own.teacher(x)).square().sum(1), follow

    return made


def the_models_own(_: Any) -> Made:
    return plain, lambda n, model: setattr(model.settings, "beta", 0.8**n)


def a_hook(_: Any) -> Made:
    def listen(n: int, model: Any) -> None:
        if n == 14:
            model.register_forward_hook(lambda module, inputs, out: 2.0 * out)

    return plain, listen


def what_a_hook_reads(_: Any) -> Made:
    own = SimpleNamespace(beta=1.0)

    def change(n: int, model: Any) -> None:
        if n == 1:
            model.inner.register_forward_hook(lambda module, inputs, out: own.beta * out)
        own.beta = 0.8**n

    return plain, change


def twice(module: nn.Module, _: Any, out: Any) -> Any:
    return 2.0 * out if isinstance(module, nn.Linear) else None


def a_hook_on_every_module(_: Any) -> Made:
    on: list[Any] = []

    def change(n: int, model: Any) -> None:
        if n == 14:
            on.append(register_module_forward_hook(twice))
        if n == STEPS:
            on.pop().remove()

    return plain, change


def trained(make: Callable[[Any], Made], *, one_by_one: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.arange(8) % 3
    torch.manual_seed(1)
    model = Part()
    private = PrivateTraining(
        model,
        TensorData(x, y),
        schedule=Schedule(8, 1.0, STEPS),
        method=FixedDPSGD(0.0),
        optimizer=torch.optim.SGD(model.parameters(), 1.0),
        clipping=Flat(0.5),
        secret=bytes(32),
        one_by_one=one_by_one,
    )
    loss, change = make(private)
    private.fit(loss, on_step=lambda done, _: change(done, model))
    if make is nothing:
        assert private._kernel._changes == 0
    return flatten_params(model)


def nothing(_: Any) -> Made:
    """Weights change at every step and are no part of a meaning, or nothing would be tested here."""
    return plain, lambda *_: None


@pytest.mark.parametrize(
    "make",
    [
        nothing,
        a_namespace,
        what_is_made_up,
        a_class,
        a_callable,
        a_method,
        a_buffer_of_a_methods_module,
        a_setting_within_a_methods_module,
        an_entry,
        a_queue,
        a_long_queue,
        an_entry_of_a_long_table,
        a_default,
        a_global_of_a_function_within,
        an_import,
        a_name_in_words,
        a_static_method,
        a_class_method,
        a_scheduler,
        a_partial,
        an_array,
        a_long_array,
        ones_at_first,
        a_list_of_a_tensor,
        an_array_of_a_tensor,
        a_tensor_rebound,
        a_number_of_a_tensor,
        a_choice_by_a_tensor,
        steps_taken,
        a_teacher("rebound"),
        a_teacher("loaded"),
        a_teacher("replaced"),
        the_models_own,
        a_hook,
        what_a_hook_reads,
        a_hook_on_every_module,
    ],
)
def test_what_changes_from_step_to_step_is_captured_anew(make: Callable[[Any], Made]) -> None:
    found, expected = (trained(make, one_by_one=alone) for alone in (False, True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_no_code_reads_is_no_part_of_a_meaning() -> None:
    own = SimpleNamespace(beta=1.0, step=0, itself=None)
    own.itself = own

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return own.beta * plain(m, x, y)

    before = meaning_of(loss)
    own.step = 1
    assert meaning_of(loss) == before
    own.beta = 0.5
    assert meaning_of(loss) != before


def test_what_holds_itself_is_told_once() -> None:
    ring: list[Any] = [1.0]
    ring.append({"again": ring})
    before = meaning_of(ring)
    assert meaning_of(ring) == before
    ring[0] = 2.0
    assert meaning_of(ring) != before
