"""Windows of convolutions: patches of images, and per-record gradients without most of these.

A convolution is a product at each place of its output, of the patch of the image there. Patches overlap, so
all of them take taps times the memory of the image. Where rows of windows overlap, a gradient is formed by
one product for each row of the kernel: what such a row sees is a part of the image, read in place, once the
image was written out along its width alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Where a convolution looks: pairs for height and width.

    Attributes:
        kernel: Taps of the kernel.
        stride: Steps of the kernel.
        padding: Zeros on either side.
        dilation: Steps within the kernel.
        outputs: Places of the output, for one image.
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    outputs: Pair

    @property
    def taps(self) -> int:
        """Places of the kernel."""
        return self.kernel[0] * self.kernel[1]

    def patches(self, images: torch.Tensor) -> torch.Tensor:
        """Return patches ``[K, B, n H' W', taps C]`` of images ``[K, B, n, C, H, W]``, tap by tap."""
        rows = self._padded(images, 0)
        of_image, of_row, of_column, of_channel = rows.stride()
        channels = rows.shape[3]
        # A view: each place of the output, then each tap of the kernel there.
        sizes = (len(rows), *self.outputs, *self.kernel, channels)
        by_place = (of_row * self.stride[0], of_column * self.stride[1])
        by_tap = (of_row * self.dilation[0], of_column * self.dilation[1])
        patches = rows.as_strided(sizes, (of_image, *by_place, *by_tap, of_channel))
        return patches.reshape(*images.shape[:2], -1, self.taps * channels)

    def spares_patches(self, images: torch.Tensor, features: int) -> bool:
        """Say whether ``gradients`` writes less memory than all patches take.

        At a place and for a channel in, patches have as many numbers as the kernel has taps. For a row of
        the kernel ``gradients`` writes as many as the stride has rows, and a gradient twice.

        Args:
            images: ``[K, B, n, C, H, W]``.
            features: Channels that come out.
        """
        places = self.outputs[0] * self.outputs[1]
        rows = self.kernel[0]
        return images.shape[2] == 1 and places * (rows - self.stride[0]) > features * rows

    def gradients(self, images: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return each record's gradient ``[K, B, O taps C]``, in the order of ``g^T patches``.

        Args:
            images: ``[K, B, 1, C, H, W]``.
            g: Gradients of the outputs, ``[K, B, H' W', O]``.
        """
        height = images.shape[-2] + 2 * self.padding[0]
        step = self.stride[0]
        missing = -height % step
        rows = self._padded(images, missing)
        of_image, of_row, of_column, of_channel = rows.stride()
        channels = rows.shape[3]
        of_residue = (height + missing) // step
        width = self.outputs[1]
        # Rows by their number modulo the stride: those that a row of the kernel meets then lie in a row.
        sizes = (len(rows), step, of_residue, width, self.kernel[1], channels)
        by_place = (of_row, of_row * step, of_column * self.stride[1])
        by_tap = (of_column * self.dilation[1], of_channel)
        slabs = rows.as_strided(sizes, (of_image, *by_place, *by_tap))
        slabs = slabs.reshape(len(rows), step, of_residue * width, -1)
        left = g.flatten(0, 1).mT
        places = g.shape[2]
        products = []
        for tap in range(self.kernel[0]):
            above, residue = divmod(tap * self.dilation[0], step)
            seen = slabs[:, residue].narrow(1, above * width, places)
            products.append(torch.bmm(left, seen))
        gradients = torch.stack(products, dim=2)  # [K B, O, kh, kw C]
        return gradients.view(*images.shape[:2], -1)

    def _padded(self, images: torch.Tensor, below: int) -> torch.Tensor:
        """Return images with their zeros, ``[K B n, H, W, C]``, and so many rows of zeros more below."""
        high, wide = self.padding
        rows = images.flatten(0, 2).permute(0, 2, 3, 1)
        if high or wide or below:
            rows = functional.pad(rows, (0, 0, wide, wide, high, high + below))
        return rows.contiguous()
