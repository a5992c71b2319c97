"""Random programs: a convolution of random settings and sizes, and two to eight operations of the table behind it.

    python tests/fuzz_engine.py [--first 0] [--count 500] [--fused] [--strips] [--many] [--as-used] [--device cpu]

Without --fused the captured graph and its adjoints, by torch in float64, are held against autograd. With it `fuse(model)` in float32 is
held against eager: for the result and each gradient at most twice eager's error, both against float64. Prints what differs, by seed; a
program is its seed's alone. --strips: the convolutions are those that a CPU's own kernels compute in strips, fused. --many: they have 1 to 96 channels, and
1 to 7 taps along an axis, fused. --as-used: fused, where x and
the gradient that comes in lie in memory in some way, and some parameters, or x, need no gradient.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Shape(NamedTuple):
    """What a random program knows of its value: has it all channels, and how many positions."""

    channels: bool
    positions: tuple[int, ...]


class RandomTail(nn.Module):
    """`conv`, then `steps`: functions of (module, value, the value of the same shape that a residual adds)."""

    def __init__(self, conv: nn.Module, prologue: bool):
        super().__init__()
        self.conv, self.second = conv, prologue
        self.steps: list[Callable] = []
        self.names: list[str] = []
        self.number = 0.75

    def forward(self, x):
        v = self.conv(x)
        if self.second:
            v = v + torch.sigmoid(v)
        kept = v
        for step, keeps in self.steps:
            v = step(self, v, kept)
            kept = v if keeps else kept
        return v


FEW, STRIPS, MANY = "few channels in", "in strips", "many channels"  # kinds of convolutions


class _Builder:
    def __init__(self, seed: int, kind: str):
        self.r, self.kind = random.Random(seed), kind
        torch.manual_seed(seed)

    def choose(self, *options):
        return self.r.choice(options)

    def model(self) -> tuple[RandomTail, torch.Tensor]:
        self.dimensions = self.choose(2, 2, 3)
        convolutions = {FEW: self.convolution, STRIPS: self.in_strips, MANY: self.of_many}
        model, x = convolutions[self.kind]()
        with torch.no_grad():
            self.shape = Shape(True, tuple(model.conv(x).shape[2:]))
        self.outside = model.conv.out_channels
        for _ in range(self.r.randint(2, 8)):
            self.step(model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) * 0.5 + (0.3 if p.dim() < 3 else 0.0))
        return model.train(self.choose(True, True, False)), x

    def in_strips(self) -> tuple[RandomTail, torch.Tensor]:
        """Enough terms a sum, sides of many tiles, more rows or planes than a strip has."""
        flat = self.dimensions == 2
        inside, outside = self.r.randint(8, 12) if flat else self.r.randint(3, 5), self.choose(8, 16, 24)
        settings = dict(padding=self.choose(0, 0, 1, 2), bias=self.choose(True, True, False))
        if flat:
            convolution = nn.Conv2d(inside, outside, 3, **settings)
            size = [self.r.randint(18, 47), self.r.randint(18, self.choose(25, 70, 140))]
        else:
            convolution = nn.Conv3d(inside, outside, [self.choose(3, 4), 3, 3], **settings)
            size = [self.r.randint(5, 12), self.r.randint(18, 26), self.r.randint(18, 40)]
        x = torch.randn(self.r.randint(1, 3), inside, *size)
        return RandomTail(convolution, self.choose(True, False, False)), x

    def convolution(self) -> tuple[RandomTail, torch.Tensor]:
        groups = self.choose(1, 1, 1, 2)
        inside, outside = groups * self.r.randint(1, 3), groups * self.choose(1, 2, 3, 4, 6, 8, 12, 16)
        kernel = [self.choose(1, 2, 3, 3, 5) for _ in range(self.dimensions)]
        settings = dict(stride=self.choose(1, 1, 1, 2), dilation=self.choose(1, 1, 2), groups=groups)
        settings["padding"] = self.choose(0, 0, 1, 2)
        settings["bias"] = self.choose(True, True, False)
        convolution = nn.Conv2d if self.dimensions == 2 else nn.Conv3d
        model = RandomTail(convolution(inside, outside, kernel, **settings), self.choose(True, False, False))
        size = [self.r.randint(13, 21) if self.dimensions == 2 else self.r.randint(11, 14) for _ in kernel]
        return model, torch.randn(self.r.randint(1, 3), inside, *size)

    def of_many(self) -> tuple[RandomTail, torch.Tensor]:
        groups = self.choose(1, 1, 1, 2)
        inside, outside = (groups * self.r.randint(1, 96 // groups) for _ in range(2))
        kernel = [self.choose(1, 2, 3, 3, 5, 7) for _ in range(self.dimensions)]
        settings = dict(groups=groups, stride=self.choose(1, 1, 1, 2), padding=self.choose(0, 0, 1, 2))
        settings |= dict(dilation=self.choose(1, 1, 2), bias=self.choose(True, True, False))
        reach = [(taps - 1) * settings["dilation"] for taps in kernel]
        most = 24 if self.dimensions == 2 else 14
        size = [self.r.randint(each + 2, max(each + 4, most)) for each in reach]
        convolution = nn.Conv2d if self.dimensions == 2 else nn.Conv3d
        model = RandomTail(convolution(inside, outside, kernel, **settings), self.choose(True, False, False))
        return model, torch.randn(self.r.randint(1, 3), inside, *size)

    def step(self, model: RandomTail) -> None:
        kinds = ["pointwise"] * 4 + ["parameter"] * 2 + ["number", "residual"]
        if self.count(self.shape.positions) > 1:
            kinds += ["positions"]
        if 1 not in self.shape.positions:
            kinds += ["pool"] * 2
        if self.shape.channels:
            kinds += ["channels"] + ["norm"] * 3
        kind = self.r.choice(kinds)
        before = self.shape
        name, function = getattr(self, kind)(model)
        model.steps.append((function, kind == "pool" or before != self.shape))
        model.names.append(name)

    # ---- kinds of steps: a name and a function of (module, value, kept)
    def pointwise(self, model):
        a, b = self.r.uniform(-1, 0), self.r.uniform(0, 1)
        return self.r.choice(
            [
                ("relu", lambda m, v, k: torch.relu(v)),
                ("leaky_relu", lambda m, v, k: F.leaky_relu(v, b)),
                ("gelu", lambda m, v, k: F.gelu(v)),
                ("gelu tanh", lambda m, v, k: F.gelu(v, approximate="tanh")),
                ("silu", lambda m, v, k: F.silu(v)),
                ("mish", lambda m, v, k: F.mish(v)),
                ("softplus", lambda m, v, k: F.softplus(v, beta=2.0)),
                ("sigmoid", lambda m, v, k: torch.sigmoid(v)),
                ("tanh", lambda m, v, k: v.tanh()),
                ("hardswish", lambda m, v, k: F.hardswish(v)),
                ("hardtanh", lambda m, v, k: F.hardtanh(v, a, b)),
                ("elu", lambda m, v, k: F.elu(v, 0.5)),
                ("clamp", lambda m, v, k: torch.clamp(v, a, b)),
                ("clamp_min", lambda m, v, k: v.clamp(min=a)),
                ("min", lambda m, v, k: torch.min(v, torch.tensor(0.25))),
                ("max", lambda m, v, k: torch.max(v, torch.tensor(-0.25))),
                ("exp", lambda m, v, k: torch.exp(torch.tanh(v))),
                ("log", lambda m, v, k: torch.log(torch.abs(v) + 0.5)),
                ("sqrt", lambda m, v, k: torch.sqrt(v * v + 0.1)),
                ("rsqrt", lambda m, v, k: torch.rsqrt(torch.square(v) + 0.5)),
                ("neg", lambda m, v, k: -v),
            ]
        )

    def parameter(self, model):
        name = f"p{len(model.steps)}"
        by_channel = self.shape.channels and self.choose(True, True, False)
        ones = [1] * self.dimensions
        shape = (self.outside, *ones) if by_channel else tuple(ones * self.choose(0, 1))
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
        return self.r.choice(
            [
                ("add parameter", lambda m, v, k: v + getattr(m, name)),
                ("subtract from parameter", lambda m, v, k: getattr(m, name) - 0.75 * v),
                ("multiply by parameter", lambda m, v, k: v * getattr(m, name)),
                ("divide by parameter", lambda m, v, k: v / (getattr(m, name) * 0.1 + 1.5)),
                ("maximum", lambda m, v, k: torch.maximum(v, getattr(m, name))),
            ]
        )

    def number(self, model):
        a = self.r.uniform(-1.5, 1.5)
        return self.r.choice(
            [
                ("add number", lambda m, v, k: v + a),
                ("multiply by attribute", lambda m, v, k: v * m.number),
                ("divide by number", lambda m, v, k: v / 1.7),
                ("from number", lambda m, v, k: a - 0.75 * v),
            ]
        )

    def residual(self, model):
        return self.r.choice(
            [("residual", lambda m, v, k: v + k), ("gate", lambda m, v, k: torch.sigmoid(v) * k)]
        )

    def norm(self, model):
        name = f"norm{len(model.steps)}"
        groups = self.r.choice([g for g in (1, 2, 3, 4, 8) if self.outside % g == 0])
        instance, batch = (
            (nn.InstanceNorm2d, nn.BatchNorm2d)
            if self.dimensions == 2
            else (nn.InstanceNorm3d, nn.BatchNorm3d)
        )
        made = [
            ("group_norm", lambda: nn.GroupNorm(groups, self.outside)),
            ("instance_norm", lambda: instance(self.outside, affine=self.choose(True, False))),
            ("batch_norm", lambda: batch(self.outside)),
        ]
        if self.count(self.shape.positions) == 1:
            made = [("tanh", nn.Tanh)]
        kind, make = self.r.choice(made)
        model.add_module(name, make())
        return kind, lambda m, v, k: getattr(m, name)(v)

    @staticmethod
    def count(positions) -> int:
        total = 1
        for size in positions:
            total *= size
        return total

    def pool(self, model):
        window = stride = tuple(self.choose(1, 2, 2, 3) for _ in range(self.dimensions))
        around = (0,) * self.dimensions
        if self.choose(True, False):  # windows that overlap, lie apart, begin outside
            stride = tuple(self.choose(1, 2, 3) for _ in window)
            around = tuple(self.r.randint(0, w // 2) for w in window)
        axes = [*zip(self.shape.positions, window, stride, around)]
        sizes = tuple((s + 2 * p - w) // t + 1 for s, w, t, p in axes)
        if min(sizes) < 1:
            return self.pointwise(model)
        self.shape = self.shape._replace(positions=sizes)
        largest, average = [(F.max_pool2d, F.avg_pool2d), (F.max_pool3d, F.avg_pool3d)][self.dimensions - 2]
        options = [("max_pool", lambda m, v, k: largest(v, window, stride, around))]
        if self.dimensions == 2 or all(
            s >= w for s, w, *_ in axes
        ):  # else eager refuses it, whatever is around
            options.append(("avg_pool", lambda m, v, k: average(v, window, stride, around)))
        return self.r.choice(options)

    def positions(self, model):
        """Over all positions, or one axis of them."""
        axes, axis = tuple(range(2, 2 + self.dimensions)), self.r.randint(2, 1 + self.dimensions)
        whole = self.choose(True, False)
        if self.choose(True, False):
            return self.r.choice(
                [
                    ("softmax over an axis", lambda m, v, k: torch.softmax(v, axis)),
                    ("minus the mean", lambda m, v, k: v - v.mean(axes, keepdim=True)),
                    ("times the sum of an axis", lambda m, v, k: v * v.sum(axis, keepdim=True)),
                ]
            )
        sizes = [1 if whole or i == axis - 2 else s for i, s in enumerate(self.shape.positions)]
        self.shape = self.shape._replace(positions=tuple(sizes))
        over = axes if whole else axis
        options = [
            ("mean", lambda m, v, k: v.mean(over, keepdim=True)),
            ("sum", lambda m, v, k: torch.sum(v, over, keepdim=True)),
            ("amax", lambda m, v, k: torch.amax(v, over, keepdim=True)),
            ("logsumexp", lambda m, v, k: torch.logsumexp(v, over, keepdim=True)),
        ]
        if not whole:
            options.append(("min over an axis", lambda m, v, k: torch.min(v, over, keepdim=True)[0]))
        return self.r.choice(options)

    def channels(self, model):
        if self.outside == 1:  # their own mean: zeros, which only rounding tells apart
            return self.pointwise(model)
        if self.choose(True, False):
            return self.r.choice(
                [
                    ("softmax", lambda m, v, k: torch.softmax(v, 1)),
                    ("minus the channels' mean", lambda m, v, k: v - v.mean(1, keepdim=True)),
                ]
            )
        self.shape = self.shape._replace(channels=False)
        return self.r.choice(
            [
                ("channel max", lambda m, v, k: torch.max(v, 1, keepdim=True)[0]),
                ("channel min", lambda m, v, k: torch.min(v, dim=1, keepdim=True).values),
                ("channel sum", lambda m, v, k: v.sum(1, keepdim=True)),
                ("channel mean", lambda m, v, k: v.mean(1, keepdim=True)),
                ("channel logsumexp", lambda m, v, k: torch.logsumexp(v, 1, keepdim=True)),
            ]
        )


def random_program(seed: int, kind: str = FEW) -> tuple[RandomTail, torch.Tensor]:
    """A model in float32, its names of steps in `model.names`, and an input."""
    return _Builder(seed, kind).model()


def _last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats.get(t.dim(), torch.contiguous_format))


def _slice(t: torch.Tensor) -> torch.Tensor:
    """… of a larger one, at an address that is a multiple of an element's size alone."""
    return F.pad(t, (1, 2)).narrow(-1, 1, t.shape[-1]) if t.dim() else t


def _across(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


def _alike(t: torch.Tensor) -> torch.Tensor:
    """The same for every sample, as a sum's gradient is."""
    return t[:1].expand(t.shape) if t.dim() else t


class Use(NamedTuple):
    """How x and dy lie, and what needs no gradient: parameters' names, "x"."""

    x: Callable = torch.clone
    dy: Callable = torch.clone
    frozen: frozenset[str] = frozenset()


AS_IT_IS = Use()


def random_use(seed: int, model: nn.Module) -> Use:
    """Something needs a gradient."""
    r = random.Random(seed)
    names = ["x", *dict(model.named_parameters())]
    frozen = r.choice([[], ["x"], r.sample(names, r.randint(1, len(names) - 1)), ["conv.weight"]])
    return Use(
        r.choice([torch.clone, _last, _last, _slice, _across]),
        r.choice([torch.clone, _last, _slice, _across, _alike]),
        frozenset(frozen),
    )


def gradients(
    run: Callable, model: nn.Module, x: torch.Tensor, seed: int = 1, use: Use = AS_IT_IS
) -> dict[str, torch.Tensor]:
    """The result, and the gradients of x and of each parameter that has one, for a dy of the seed."""
    x = use.x(x.detach()).requires_grad_("x" not in use.frozen)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in use.frozen)
    model.zero_grad()
    y = run(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y.backward(use.dy(dy.to(y)))
    leaves = {"x": x, **dict(model.named_parameters())}
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items() if t.grad is not None}}


def check_graph(seed: int) -> tuple[str, object]:
    """What differs from autograd ("" if nothing), and the segment."""
    from inline_kernels.engine.capture import capture
    from reference_graph import Reference

    model, x = random_program(seed)
    model, x = model.double(), x.double()
    captured = capture(model, model.training, x.dim())
    if len(captured.segments) != 1 or len(captured.module.graph.nodes) != 3:
        return (
            f"{len(captured.segments)} segments, {[s.stopped for s in captured.segments]} {captured.remarks}",
            None,
        )
    twin = copy.deepcopy(model)
    want = gradients(model, model, x)
    got = gradients(Reference(twin, captured).run, twin, x)
    for name, value in want.items():
        difference = (got[name] - value).norm().item()
        if not difference <= 1e-8 * max(value.norm().item(), 1e-2 * want["y"].norm().item(), 0.1):
            return f"{name} differs by {difference:.1e} of {value.norm().item():.1e}", captured.segments[0]
    return "", captured.segments[0]


DRAWS = 16


def check_fused(seed: int, device: str, kind: str = FEW, as_used: bool = False) -> str:
    """What doesn't compile, or is less exact than twice eager ("" if nothing): in one draw and, where rounding was lucky for eager, in the mean of some, of other x
    and dy: where a norm's planes are constant its gradients hang on dy alone."""
    from inline_kernels import fuse

    model, x = random_program(seed, kind)
    model, x, use = model.to(device), x.to(device), random_use(seed, model) if as_used else AS_IT_IS
    doubled, twin, fused = copy.deepcopy(model).double(), copy.deepcopy(model), fuse(model)

    def errors(x: torch.Tensor, of_dy: int = 1) -> dict[str, tuple[float, ...]]:
        """By name: ours, eager's, what is allowed anyway, the value's norm."""
        plain = AS_IT_IS._replace(
            frozen=use.frozen
        )  # of a dy channels last torch's own norms give wrong gradients
        exact = gradients(doubled, doubled, x.double(), of_dy, plain)
        eager, own = (gradients(run, run, x, of_dy, use) for run in (twin, fused))
        assert eager.keys() == own.keys() and eager["y"].stride() == own["y"].stride()
        with torch.no_grad():  # by other passes than where backward follows
            own["y alone"], eager["y alone"], exact["y alone"] = fused(use.x(x)), eager["y"], exact["y"]
        found = {}
        for name, value in exact.items():
            ours, theirs = ((each[name].double() - value).norm().item() for each in (own, eager))
            size = max(value.norm().item(), 1e-2 * exact["y"].norm().item(), 1e-3)
            found[name] = ours, theirs, 4 * torch.finfo(torch.float32).eps * size, value.norm().item()
        return found

    def wrong(found: dict[str, tuple[float, ...]]) -> str:
        for name, (own, theirs, floor, size) in found.items():
            if not own <= max(2 * theirs, floor):
                return f"{name}: error {own:.1e}, eager's {theirs:.1e}, of {size:.1e}"
        return ""

    found = wrong(errors(x))
    if failed := [each.reason for each in fused.plan(x) if "while compiling" in each.reason]:
        return failed[0]
    if not found:
        return ""
    torch.manual_seed(seed)
    draws = [errors(torch.randn_like(x), of_dy) for of_dy in range(DRAWS)]
    means = {name: tuple(map(statistics.fmean, zip(*(draw[name] for draw in draws)))) for name in draws[0]}
    return wrong(means)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--strips", dest="kind", action="store_const", const=STRIPS)
    parser.add_argument("--many", dest="kind", action="store_const", const=MANY)
    parser.add_argument("--as-used", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty returns is NaN
    from inline_kernels.engine import library
    from loading import making_poisoned

    library.making = making_poisoned
    warnings.simplefilter("ignore")
    bad = 0
    for seed in range(options.first, options.first + options.count):
        try:
            if options.fused or options.kind or options.as_used:
                wrong = check_fused(seed, options.device, options.kind or FEW, options.as_used)
            else:
                wrong, _ = check_graph(seed)
        except Exception as error:  # reported, as a difference is
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            bad += 1
            print(seed, wrong.split("\n")[0], random_program(seed, options.kind or FEW)[0].names)
    print(f"{options.count} programs, {bad} wrong")
    return bad > 0


if __name__ == "__main__":
    sys.path[:0] = ["."]
    sys.exit(main())
