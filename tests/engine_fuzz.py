"""Random convolutions with random tails, and whether what is generated for them is right.

model, x = random_case(seed)
python tests/engine_fuzz.py FIRST COUNT [cpu|cuda]     # cuda: in the emulation where there is no GPU
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

POINTWISE = (
    "relu",
    "leaky",
    "gelu",
    "gelu_tanh",
    "silu",
    "mish",
    "hardswish",
    "tanh",
    "sigmoid",
    "softplus",
    "clamp",
    "hardtanh",
    "minimum",
    "abs",
)
AFFINE = ("bias", "scale", "constant", "divide", "residual")
NORMS = ("group", "instance", "batch", "layer")
REDUCTIONS = ("maxpool", "avgpool", "softmax", "logsumexp", "largest", "smallest", "sum", "mean", "global")


class RandomTail(nn.Module):
    """A convolution, then 2 to 8 operations."""

    def __init__(self, seed: int):
        super().__init__()
        r = random.Random(seed)
        self.nd = r.choice([2, 2, 3])
        groups = r.choice([1, 1, 1, 2])
        self.C = C = r.choice([1, 2, 4, 6, 8, 12, 16]) if groups == 1 else r.choice([2, 4, 8])
        self.inputs = groups * r.choice([1, 2, 3])
        settings = {
            "stride": r.choice([1, 1, 2]),
            "padding": r.choice([0, 0, 1]),
            "dilation": r.choice([1, 1, 2]),
        }
        convolution = nn.Conv2d if self.nd == 2 else nn.Conv3d
        kernel = r.choice([1, 2, 3])
        self.conv = convolution(self.inputs, C, kernel, groups=groups, bias=r.random() < 0.7, **settings)
        self.parameters_, self.modules_, self.ops = nn.ParameterList(), nn.ModuleList(), []
        spatial, channels, pools = True, True, 0
        for _ in range(r.randint(2, 8)):
            names = [*POINTWISE, *AFFINE]
            if spatial and channels:
                names += [*NORMS, *REDUCTIONS] * 2
            if pools == 2:
                names = [name for name in names if "pool" not in name]
            name, value = r.choice(names), None
            if name in ("bias", "scale"):
                shape = (C, *[1] * self.nd) if channels and r.random() < 0.8 else (1,)
                value = len(self.parameters_)
                self.parameters_.append(nn.Parameter(torch.randn(shape)))
            elif name in NORMS:
                value = len(self.modules_)
                self.modules_.append(self._norm(name, r))
            elif name in ("constant", "minimum", "divide"):
                value = r.choice([-1.7, -0.4, 0.3, 1.9])
            elif "pool" in name:
                pools, value = pools + 1, tuple(r.choice([1, 2, 2, 3]) for _ in range(self.nd))
            channels = channels and name not in ("logsumexp", "largest", "smallest", "sum", "mean")
            spatial = spatial and name != "global"
            self.ops.append((name, value))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def _norm(self, name: str, r: random.Random) -> nn.Module:
        C = self.C
        if name == "group":
            return nn.GroupNorm(r.choice([g for g in (1, 2, 4) if C % g == 0]), C)
        if name == "layer":
            return nn.GroupNorm(1, C)
        affine = r.random() < 0.6
        kinds = {
            "instance": (nn.InstanceNorm2d, nn.InstanceNorm3d),
            "batch": (nn.BatchNorm2d, nn.BatchNorm3d),
        }
        return kinds[name][self.nd - 2](C, affine=affine)

    def forward(self, x):
        x = self.conv(x)
        kept = x
        for name, value in self.ops:
            x = self._apply_op(name, value, x, kept)
            kept = x if name in REDUCTIONS and name != "softmax" else kept
        return x

    def _apply_op(self, name, value, x, kept):
        if name in NORMS:
            return self.modules_[value](x)
        if name in ("bias", "scale"):
            parameter = self.parameters_[value]
            return x + parameter if name == "bias" else x * parameter
        pools = {
            "maxpool": F.max_pool2d if self.nd == 2 else F.max_pool3d,
            "avgpool": F.avg_pool2d if self.nd == 2 else F.avg_pool3d,
        }
        if name in pools:
            return pools[name](x, value)
        return {
            "relu": lambda: torch.relu(x),
            "leaky": lambda: F.leaky_relu(x, 0.1),
            "gelu": lambda: F.gelu(x),
            "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
            "silu": lambda: F.silu(x),
            "mish": lambda: F.mish(x),
            "hardswish": lambda: F.hardswish(x),
            "tanh": lambda: torch.tanh(x),
            "sigmoid": lambda: torch.sigmoid(x),
            "softplus": lambda: F.softplus(x),
            "clamp": lambda: torch.clamp(x, -0.7, 0.9),
            "hardtanh": lambda: F.hardtanh(x, -0.8, 1.1),
            "minimum": lambda: torch.clamp(x, max=value),
            "abs": lambda: torch.abs(x),
            "constant": lambda: x + value,
            "divide": lambda: x / value,
            "residual": lambda: x + kept,
            "softmax": lambda: torch.softmax(x, dim=1),
            "logsumexp": lambda: torch.logsumexp(x, dim=1, keepdim=True),
            "largest": lambda: torch.max(x, dim=1, keepdim=True)[0],
            "smallest": lambda: torch.min(x, dim=1, keepdim=True)[0],
            "sum": lambda: torch.sum(x, dim=1, keepdim=True),
            "mean": lambda: torch.mean(x, dim=1, keepdim=True),
            "global": lambda: x.mean(dim=tuple(range(2, 2 + self.nd)), keepdim=True),
        }[name]()


def random_case(seed: int, dtype=torch.float32) -> tuple[nn.Module, torch.Tensor]:
    """A model in training mode, and an input of an odd size."""
    torch.manual_seed(seed)
    r = random.Random(seed + 1)
    model = RandomTail(seed)
    sizes = [r.randint(19, 31) for _ in range(2)] if model.nd == 2 else [r.randint(11, 15) for _ in range(3)]
    return model.to(dtype), torch.randn(r.randint(2, 3), model.inputs, *sizes, dtype=dtype)
