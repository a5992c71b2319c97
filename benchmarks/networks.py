"""Whole networks of our own writing, of layers as people use them: what `fuse` makes of a model with many convolutions.

network = NETWORKS["resnet18"]
model, x = network.model(), network.inputs()              # sizes to be timed
model, x = network.small_model(), network.small_inputs()  # for tests
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """ResNet's basic block: two 3 x 3 convolutions with batch norms, beside the input or its 1 x 1 convolution."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Images (N, 3, H, W) to scores (N, classes): a stem, four stages of two blocks, a global mean, a linear layer."""

    def __init__(self, width: int = 64, classes: int = 1000):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels_in = [], width
        for stage in range(4):
            channels = width << stage
            blocks += [Residual(channels_in, channels, 1 + (stage > 0)), Residual(channels, channels, 1)]
            channels_in = channels
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))


class TwoConvolutions(nn.Sequential):
    """(3 x 3 convolution, batch norm, ReLU) twice."""

    def __init__(self, channels_in: int, channels: int):
        layers: list[nn.Module] = []
        for each in (channels_in, channels):
            layers += [nn.Conv2d(each, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Images (N, 3, H, W) to maps (N, classes, H, W), with skips from each level down to its level up."""

    def __init__(self, width: int = 64, levels: int = 3, classes: int = 4):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(TwoConvolutions(a, b) for a, b in zip([3, *widths], widths[:-1]))
        self.middle = TwoConvolutions(widths[-2], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, 2) for each in widths[-2::-1])
        self.up = nn.ModuleList(TwoConvolutions(2 * each, each) for each in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.up):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


class AutoencoderBlock(nn.Module):
    """A latent decoder's residual block: (group norm, SiLU, 3 x 3 convolution) twice, and the input."""

    def __init__(self, channels: int = 128, groups: int = 32):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class VolumeBlock(nn.Module):
    """A volume segmenter's block: (3 x 3 x 3 convolution, instance norm, leaky ReLU) twice, the first with a stride."""

    def __init__(self, channels_in: int = 32, channels: int = 64, stride: int = 2):
        super().__init__()
        self.conv1 = nn.Conv3d(channels_in, channels, 3, stride, 1)
        self.norm1 = nn.InstanceNorm3d(channels, affine=True)
        self.conv2 = nn.Conv3d(channels, channels, 3, 1, 1)
        self.norm2 = nn.InstanceNorm3d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return F.leaky_relu(self.norm2(self.conv2(x)), 0.01)


class Bottleneck(nn.Module):
    """ResNet-50's block: 1 x 1 to a quarter of the channels, 3 x 3, 1 x 1 back, with batch norms, beside the input."""

    def __init__(self, channels: int):
        super().__init__()
        few = channels // 4
        self.conv1, self.bn1 = nn.Conv2d(channels, few, 1, bias=False), nn.BatchNorm2d(few)
        self.conv2, self.bn2 = nn.Conv2d(few, few, 3, padding=1, bias=False), nn.BatchNorm2d(few)
        self.conv3, self.bn3 = nn.Conv2d(few, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + x)


class InvertedResidual(nn.Module):
    """MobileNet's block: 1 x 1 to four times the channels, a depthwise 3 x 3, 1 x 1 back, with batch norms, and the input."""

    def __init__(self, channels: int):
        super().__init__()
        many = 4 * channels
        self.grow = nn.Sequential(nn.Conv2d(channels, many, 1, bias=False), nn.BatchNorm2d(many), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(many, many, 3, padding=1, groups=many, bias=False), nn.BatchNorm2d(many), nn.SiLU()
        )
        self.shrink = nn.Sequential(nn.Conv2d(many, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(self.depthwise(self.grow(x)))


class DenseLayer(nn.Module):
    """DenseNet's layer: (batch norm, ReLU, convolution), 1 x 1 to four times the growth and 3 x 3 to it, joined to the input."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = (
            nn.BatchNorm2d(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(y)))], dim=1)


def _dense_block(channels: int, growth: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(DenseLayer(channels + growth * layer, growth) for layer in range(layers)))


class Network(NamedTuple):
    number: str  # its name, in records
    model: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    small_model: Callable[[], nn.Module]
    small_input_shape: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.input_shape[0]

    def inputs(self, device=None) -> list[Tensor]:
        return [torch.randn(self.input_shape, device=device)]

    def small_inputs(self) -> list[Tensor]:
        return [torch.randn(self.small_input_shape)]


_ALL = [
    Network("resnet18", ResNet18, (32, 3, 224, 224), lambda: ResNet18(8, 10), (4, 3, 64, 64)),
    Network("unet", UNet, (8, 3, 256, 256), lambda: UNet(8, 2), (2, 3, 24, 20)),
    Network("vae_block", AutoencoderBlock, (8, 128, 128, 128), lambda: AutoencoderBlock(16, 4), (2, 16, 9, 11)),
    Network("volume_block", VolumeBlock, (2, 32, 64, 64, 64), lambda: VolumeBlock(4, 8), (2, 4, 8, 7, 9)),
    Network("bottlenecks", lambda: nn.Sequential(*(Bottleneck(256) for _ in range(3))), (32, 256, 56, 56), lambda: Bottleneck(32), (2, 32, 9, 11)),
    Network("inverted", lambda: nn.Sequential(*(InvertedResidual(48) for _ in range(3))), (32, 48, 56, 56), lambda: InvertedResidual(8), (2, 8, 9, 11)),
    Network("dense", lambda: _dense_block(64, 32, 6), (16, 64, 56, 56), lambda: _dense_block(8, 8, 2), (2, 8, 9, 11)),
]  # fmt: skip
NETWORKS: dict[str, Network] = {network.number: network for network in _ALL}
