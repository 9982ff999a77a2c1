"""What a model is told of being traced stays with the thread that traces it."""

from __future__ import annotations

import threading

import pytest
import torch

from privtune.training.engine.watch import traced

pytestmark = pytest.mark.quick


def test_threads_that_end_in_any_order_see_their_own_flag() -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen: dict[str, bool] = {}

    def first() -> None:
        with traced():
            first_in.set()
            assert second_in.wait(10)
            seen["first"] = bool(torch.compiler.is_compiling())
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        seen["before"] = bool(torch.compiler.is_compiling())
        with traced():
            second_in.set()
            assert first_out.wait(10)
            seen["second"] = bool(torch.compiler.is_compiling())
            with traced():
                pass
            seen["nested"] = bool(torch.compiler.is_compiling())
        seen["after"] = bool(torch.compiler.is_compiling())

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {
        "first": True,
        "before": False,
        "second": True,
        "nested": True,
        "after": False,
    }


def test_an_optimizer_in_another_thread_computes_as_ever() -> None:
    """Adam takes its steps in single precision where the flag stands."""

    def trained() -> torch.Tensor:
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=0.3)
        for _ in range(8):
            optimizer.zero_grad()
            (weight**3).sum().backward()
            optimizer.step()
        return weight.detach()

    expected, found = trained(), []
    with traced():
        thread = threading.Thread(target=lambda: found.append(trained()))
        thread.start()
        thread.join(20)
    assert torch.equal(found[0], expected)
