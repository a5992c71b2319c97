"""y = hardswish(relu(conv2d(x))): a problem of one's own, to copy. CONTRIBUTING.md goes through it, step by step."""

from __future__ import annotations

import torch
from torch import nn

from inline_kernels.engine.variants import fused
from models import Problem


class Conv2dReluHardswish(nn.Module):
    """y = hardswish(relu(conv(x))).

    x (N, in_channels, H, W) gives y (N, out_channels, H', W'), where H' = H - kernel height + 1 and W' likewise.
    """

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        x = self.conv(x)
        x = torch.relu(x)
        return x * torch.clamp((x + 3) / 6, 0, 1)


Conv2dReluHardswishNew = fused(Conv2dReluHardswish)

PROBLEM = Problem(
    "conv2d_relu_hardswish",
    number=57,
    Model=Conv2dReluHardswish,
    ModelNew=Conv2dReluHardswishNew,
    init_inputs=(8, 64, 3),
    input_shape=(128, 8, 128, 128),
    cpu_batch_size=2,
)
