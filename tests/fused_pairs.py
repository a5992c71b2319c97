"""Five small models, each of which can stand beside its fused self, on the graph evaluated by torch (engine_stand_in.py) but for tests of kernels."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inline_loader
from engine_stand_in import stand_in  # noqa: F401
from inline_kernels.engine.fuse import fuse
from inline_kernels.engine.variants import fused

# --------------------------------------------------------------------------------------------------------------------- models


class Pointwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(6, 1, 1))
        self.factor, self.low = 0.5, -0.25

    def forward(self, x):
        """y of x's positions."""
        x = F.gelu(self.conv(x)) * self.factor + self.bias
        return torch.clamp(x, self.low, 1.0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.GroupNorm(2, 6)
        self.act = nn.SiLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.act(self.norm(self.conv(x))))


class Block(nn.Module):
    """A convolution, batch norm, and what came in."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(Block(6), Block(6), Block(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(torch.sigmoid(self.conv(x)))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 6, 2)
        self.norm = nn.InstanceNorm3d(6)

    def forward(self, x):
        return torch.logsumexp(self.norm(self.conv(x)), dim=1)


# Where a pickle looks for them: in the module of their models.
PointwiseNew, ResidualNew = fused(Pointwise), fused(Residual)
INPUTS = {
    Pointwise: (2, 3, 5, 7),
    Normed: (2, 3, 11, 9),
    Residual: (2, 3, 6, 5),
    Dropping: (2, 3, 7, 6),
    Volume: (2, 2, 4, 5, 6),
}
SEGMENTS = {Pointwise: 1, Normed: 1, Residual: 4, Dropping: 1, Volume: 1}
every_model = pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
every_moment = pytest.mark.parametrize("moment", ["before the first call", "after calls"])


@pytest.fixture(autouse=True)
def here(request):
    """On the stand-in, but for tests of kernels."""
    inline_loader.forget()
    if not request.node.originalname.startswith("test_kernels"):
        request.getfixturevalue("stand_in")
    yield
    inline_loader.forget()


def pair(
    kind: type[nn.Module], called: bool = True, training: bool = False
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, the same one fused with tensors of its own, and an input. Each has its own modules."""
    torch.manual_seed(3)
    model = kind().train(training)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight), nn.init.normal_(module.running_mean)
    fast, x = fuse(copy.deepcopy(model)), torch.randn(INPUTS[kind])
    if called:
        state = copy.deepcopy(model.state_dict())
        results(fast, x), fast(x)
        with torch.no_grad():
            fast(x)
        fast.load_state_dict(state)
    return model, fast, x


def results(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result, gradients and buffers."""
    x = x.detach().requires_grad_(x.is_floating_point())
    leaves = {"x": x, **dict(module.named_parameters())}
    y = module(x)
    wanted = [t for t in leaves.values() if t.requires_grad]
    gradients = (
        torch.autograd.grad(y.square().sum(), wanted, allow_unused=True, materialize_grads=True)
        if wanted
        else []
    )
    names = [key for key, t in leaves.items() if t.requires_grad]
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    return {"output": y.detach(), **dict(zip(names, gradients)), **buffers}


def assert_same(fast: nn.Module, model: nn.Module, x: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Results, gradients and what is written to buffers; or the error."""
    try:
        theirs = results(model, x)
    except Exception as error:
        for ways in (contextlib.nullcontext, torch.no_grad):
            with pytest.raises(type(error)) as ours, ways():
                fast(x)
            assert str(ours.value) == str(error)
        return
    ours = results(fast, x)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        torch.testing.assert_close(
            ours[key],
            value,
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda text: f"{key}: {text}",
        )
        assert ours[key].stride() == value.stride() or key not in ("output", "x"), key
    if not model.training:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=tolerance, atol=tolerance, equal_nan=True)


def runs(fast: nn.Module, x: torch.Tensor) -> list[str]:
    return [each.runs for each in fast.plan(x)]


@contextlib.contextmanager
def patched(owner, name: str):
    with pytest.MonkeyPatch.context() as patch:
        before = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **keywords: before(*a, **keywords) * 2)
        yield


def backward(module, x):
    x = x.detach().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    return {"x": x.grad, **{key: p.grad.clone() for key, p in module.named_parameters()}}
