"""Operations that beat their plain form on stacks: convolution, few outputs, cross-entropy.

Each works on physical tensors ``[K, B, ...]``. Convolutions run candidate by candidate in a layout
with channels last: on CPU that makes them and the pooling behind them several times faster.
"""

from __future__ import annotations

from typing import Any

import torch

_SMALL_CLASSES = 64  # up to here, softmax over the leading axis beats softmax over the last
_FEW_OUTPUTS = 32  # up to here, whole vectors of outputs are what a product on CPU is fast at
_VECTOR = 16  # numbers of float32 in one

_LIBRARY: Any = torch.library.Library("privtune", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "stacked_conv2d(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor"
)
_LIBRARY.define(
    "stacked_conv2d_input(Tensor g, Tensor x, Tensor w, int[] stride, int[] padding, "
    "int[] dilation, int groups) -> Tensor"
)


def _forward(  # noqa: PLR0917
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Convolve ``[K, N, C, H, W]`` with ``[K, O, C/groups, kh, kw]``, candidate by candidate."""
    parts = [
        torch.conv2d(
            _channels_last(x[k]),
            _channels_last(w[k]),
            None if b is None else b[k],
            stride,
            padding,
            dilation,
            groups,
        )
        for k in range(len(x))
    ]
    return _joined(parts)


def _backward_input(  # noqa: PLR0917
    g: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Return the gradient with respect to ``x``, candidate by candidate."""
    parts = [
        torch.ops.aten.convolution_backward(
            _channels_last(g[k]),
            _channels_last(x[k]),
            _channels_last(w[k]),
            None,
            stride,
            padding,
            dilation,
            False,
            [0, 0],
            groups,
            [True, False, False],
        )[0]
        for k in range(len(g))
    ]
    return _joined(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Stack images with channels last; one candidate needs no copy."""
    if len(parts) == 1:
        return _channels_last(parts[0]).unsqueeze(0)
    return torch.stack([part.permute(0, 2, 3, 1) for part in parts]).permute(0, 1, 4, 2, 3)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Lay out ``[N, C, H, W]`` with channels last, with strides that say so even if C is 1."""
    _, channels, height, width = x.shape
    if channels == 1 or height * width == 1:
        strides = (channels * height * width, 1, width * channels, channels)
        return x.contiguous().as_strided(x.shape, strides)
    return x.contiguous(memory_format=torch.channels_last)


_LIBRARY.impl("stacked_conv2d", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("stacked_conv2d_input", _backward_input, "CompositeExplicitAutograd")


class _StackedConv2d(torch.autograd.Function):
    """A convolution with a gradient for its input alone: weights are handled by book-keeping."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *options: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.options = options
        y: torch.Tensor = torch.ops.privtune.stacked_conv2d(x, w, b, *options)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        gradient = torch.ops.privtune.stacked_conv2d_input(grads[0], x, w, *ctx.options)
        return (gradient, None, None, *(None for _ in ctx.options))


def stacked_conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Convolve K stacks of images with K weights: ``[K, N, C, H, W]`` to ``[K, N, O, H', W']``."""
    y: torch.Tensor = _StackedConv2d.apply(  # type: ignore[no-untyped-call]
        x, w, b, stride, padding, dilation, groups
    )
    return y


class _FewOutputs(torch.autograd.Function):
    """A product taken as its transpose, and on the way back as it stands."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(w)
        return multiplied(rows, w, b, turned=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (w,) = ctx.saved_tensors
        return torch.bmm(grads[0], w), None, None


def turns(outputs: int, device: torch.device) -> bool:
    """Say whether a product of so many outputs is faster as its transpose."""
    return outputs < _FEW_OUTPUTS and outputs % _VECTOR > 0 and device.type == "cpu"


def multiplied(
    rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *, turned: bool
) -> torch.Tensor:
    """Multiply as ``stacked_linear`` does, without a way back; ``turned`` takes the transpose."""
    if turned:
        y = torch.bmm(w, rows.mT) if b is None else torch.baddbmm(b.unsqueeze(2), w, rows.mT)
        return y.mT
    return torch.bmm(rows, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.mT)


def stacked_linear(
    rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *, one_place: bool
) -> torch.Tensor:
    """Multiply K stacks of rows with K weights: ``[K, R, d]`` and ``[K, p, d]`` to ``[K, R, p]``.

    On CPU a product whose rows are a few outputs that fill no whole vectors takes twice as long as
    its transpose, whose rows are records. The result then lies with outputs first, as the
    cross-entropy wants it; where a record has several ``places``, it could no longer be viewed as
    one row of all of them.
    """
    if not (one_place and turns(w.shape[1], rows.device)):
        return multiplied(rows, w, b, turned=False)
    y: torch.Tensor = _FewOutputs.apply(rows, w, b)  # type: ignore[no-untyped-call]
    return y


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of ``[C, R]``: few classes, laid out first."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, targets: torch.Tensor, ignored: int | None
    ) -> torch.Tensor:
        skip = None if ignored is None else targets == ignored
        if skip is not None:
            targets = targets.masked_fill(skip, 0)
        # Both the probabilities (for the way back) and the losses are written here; a captured graph
        # drops what its pass does not read.
        ctx.save_for_backward(torch.softmax(rows, dim=0), targets, skip)
        picked = torch.log_softmax(rows, dim=0).gather(0, targets.unsqueeze(0)).squeeze(0)
        return -picked if skip is None else -picked.masked_fill(skip, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, targets, skip = ctx.saved_tensors
        scale = (grads[0] if skip is None else grads[0].masked_fill(skip, 0.0)).unsqueeze(0)
        gradient = p.scatter_add(0, targets.unsqueeze(0), torch.full_like(scale, -1.0))
        return gradient * scale, None, None


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, ignored: int | None
) -> torch.Tensor | None:
    """Return the cross-entropy of ``[..., C]`` and ``[...]``, or None where the plain form is best.

    Targets equal to ``ignored`` have a loss of zero; None if none can be.
    """
    classes = logits.shape[-1]
    if classes > _SMALL_CLASSES:
        return None
    rows = logits.movedim(-1, 0).reshape(classes, -1)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, targets.reshape(-1), ignored
    )
    return losses.view(targets.shape)
