"""Modules that the judge must accept, each as a copy of itself and some as an honest rewrite.

HONEST maps a name to an `Entry`, (reference, candidate, make_inputs, phases, refusal):

    entry = HONEST["attention"]
    reference = entry.reference()  # a fresh module
    rows = compare.compare_pair(reference, entry.candidate(reference), entry.make_inputs, device="cpu",
                                phases=entry.phases, variants=("candidate",), seed=1)
    assert all(row["ok"] for row in rows)

candidate(reference) is a deep copy, or a rewrite with the same parameters. Where refusal is not empty the
kind may be refused, by a TypeError or a ValueError whose text the regular expression `refusal` finds, because
the judge says what it expects instead.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Entry(NamedTuple):
    reference: Callable[[], nn.Module]
    candidate: Callable[[nn.Module], nn.Module]
    make_inputs: Callable[[], list[Tensor]]
    phases: tuple[str, ...]
    refusal: str = ""


HONEST: dict[str, Entry] = {}
USUAL = ("forward", "train_dx")


class Of(nn.Module):
    """Modules by name, and a function of them and of the inputs."""

    def __init__(self, function: Callable, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            if isinstance(module, Tensor) and not isinstance(module, nn.Parameter):
                self.register_buffer(name, module)
            else:
                setattr(self, name, module)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def draws(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape, dtype=dtype) for shape in shapes]


def honest(
    name: str, reference: Callable[[], nn.Module], inputs, *phases: str, refusal: str = "", rewrite=None
) -> None:
    """Adds a module as its own copy, which trains, and, if there is a rewrite, its forward so written, which runs without gradients, too.
    inputs: a shape, or a function that draws."""
    make_inputs = inputs if callable(inputs) else draws(inputs)
    HONEST[name] = Entry(reference, copy.deepcopy, make_inputs, phases or USUAL[1:], refusal)

    def rewritten(module):
        twin = copy.deepcopy(module)
        twin.__class__ = type("Rewritten", (type(module),), {"forward": rewrite})
        return twin

    if rewrite:
        HONEST[f"{name}, rewritten"] = Entry(reference, rewritten, make_inputs, phases or USUAL, refusal)


def of(
    name: str, function: Callable, inputs, *phases: str, modules: Callable[[], dict] = dict, **options
) -> None:
    """The same of a function and of modules that are made anew each time."""
    honest(name, lambda: Of(function, **modules()), inputs, *phases, **options)


ALL = "forward", "forward_grad", "train", "train_dx"

# ------------------------------------------------------------------------------------------- normalisations, state

honest("batchnorm1d", lambda: nn.BatchNorm1d(6), (8, 6), *ALL)
honest("batchnorm1d in eval", lambda: nn.BatchNorm1d(6).eval(), (8, 6))
honest("batchnorm1d, more than a piece", lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), (20, 6))
honest("batchnorm1d without affine", lambda: nn.BatchNorm1d(6, affine=False), (8, 6))
honest(
    "batchnorm2d", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (4, 3, 6, 6),
    rewrite=lambda self, x: F.relu(
        F.batch_norm(
            self[0](x), self[1].running_mean, self[1].running_var, self[1].weight, self[1].bias,
            self.training, _counted(self[1]), self[1].eps,
        )
    ),
)  # fmt: skip
honest("batchnorm2d with a cumulative mean", lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 5))
honest(
    "instancenorm2d with statistics",
    lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    (2, 3, 6, 6),
)
honest("instancenorm1d", lambda: nn.InstanceNorm1d(3), (2, 3, 9))
honest("groupnorm", lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5))
honest(
    "layernorm",
    lambda: nn.LayerNorm(8),
    (3, 5, 8),
    rewrite=lambda self, x: _normalised(x) * self.weight + self.bias,
)
honest("rmsnorm", lambda: nn.RMSNorm(8), (3, 5, 8))
honest("local response norm", lambda: nn.LocalResponseNorm(3), (2, 5, 4, 4))
honest("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(6, 5)), (8, 6))
honest("weight norm", lambda: parametrizations.weight_norm(nn.Linear(6, 5)), (8, 6))
honest("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(5, 5)), (8, 5))


def _counted(norm) -> float:
    """The momentum; counts a batch in training."""
    norm.num_batches_tracked += norm.training
    return norm.momentum


def _shares(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


# ---------------------------------------------------------------------------------- gradients that autograd shares

of("sum of two inputs", lambda self, x, y: x + y, draws((4, 5), (4, 5)))
of(
    "embedding and input", lambda self, x, i: self.table(i) + x, lambda: [torch.randn(4, 5), torch.randint(7, (4,))], *ALL,
    modules=lambda: dict(table=nn.Embedding(7, 5)), rewrite=lambda self, x, i: x + self.table.weight[i],
)  # fmt: skip
of(
    "product and a shift at batch 1", lambda self, x: x @ self.w + self.p, (1, 4),
    modules=lambda: dict(w=nn.Parameter(torch.randn(4, 5)), p=nn.Parameter(torch.randn(1, 5))),
    rewrite=lambda self, x: torch.addmm(self.p, x, self.w),
)  # fmt: skip
of("shift", lambda self, x: x + self.p, (4, 5), modules=lambda: dict(p=nn.Parameter(torch.randn(4, 5))))
of("identity", lambda self, x: x * 1, (4, 5))
of("input itself", lambda self, x: x, (4, 5))
of("view of its input", lambda self, x: x.flatten(1), (4, 5, 2))
honest("dropout in eval, its input", lambda: nn.Dropout(0.5).eval(), (4, 5))
of(
    "parameter as output",
    lambda self, x: self.p.expand(len(x), 5),
    (4, 5),
    modules=lambda: dict(p=nn.Parameter(torch.randn(5))),
)

# ------------------------------------------------------------------------------------------------------ dimensions

of(
    "0-dim output",
    lambda self, x: self.linear(x).square().mean(),
    (4, 6),
    *ALL,
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of(
    "0-dim input", lambda self, x, s: self.linear(x) * s, draws((4, 6), ()), modules=lambda: dict(linear=nn.Linear(6, 5)),
    rewrite=lambda self, x, s: F.linear(x * s, self.linear.weight) + self.linear.bias * s,
)  # fmt: skip
of(
    "0-dim input alone",
    lambda self, s: s.exp() * self.p,
    draws(()),
    modules=lambda: dict(p=nn.Parameter(torch.randn(3))),
)
honest("no batch", lambda: nn.Conv2d(3, 4, 3), (3, 6, 6))
honest("a vector", lambda: nn.Linear(6, 5), (6,))
of("fixed batch", lambda self, x: x.reshape(8, 2, 3).transpose(1, 2).tanh(), (8, 6))
of(
    "fixed size through a parameter",
    lambda self, x: x * self.p,
    (8, 6),
    modules=lambda: dict(p=nn.Parameter(torch.randn(8, 6))),
)
of(
    "zero-size output",
    lambda self, x: self.linear(x)[:, :0],
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of("zero-size input", lambda self, x: self.linear(x), (0, 6), modules=lambda: dict(linear=nn.Linear(6, 5)))
of("batch in the second dimension", lambda self, x: x.cumsum(0) / 3, (5, 2, 3))
of(
    "inputs of several batch sizes",
    lambda self, x, y: x @ y.mT,
    draws((4, 6), (3, 6)),
    rewrite=lambda self, x, y: F.linear(x, y),
)
of("all pairs of a batch", lambda self, x: torch.cdist(x, x + 1), (6, 4))

# ------------------------------------------------------------------------------------------------ losses and types

of(
    "mean squared error", lambda self, x, y: F.mse_loss(self.linear(x), y), draws((4, 6), (4, 5)), modules=lambda: dict(linear=nn.Linear(6, 5)),
    rewrite=lambda self, x, y: (self.linear(x) - y).square().mean(),
)  # fmt: skip
of(
    "cross entropy", lambda self, x, i: F.cross_entropy(self.linear(x), i), lambda: [torch.randn(8, 6), torch.randint(5, (8,))],
    modules=lambda: dict(linear=nn.Linear(6, 5)),
    rewrite=lambda self, x, i: -self.linear(x).log_softmax(1).gather(1, i[:, None]).mean(),
)  # fmt: skip
honest("cross entropy alone", nn.CrossEntropyLoss, lambda: [torch.randn(8, 5), torch.randint(5, (8,))])
honest(
    "cross entropy by sample",
    lambda: nn.CrossEntropyLoss(reduction="none"),
    lambda: [torch.randn(8, 5), torch.randint(5, (8,))],
)
honest("binary cross entropy", nn.BCEWithLogitsLoss, lambda: [torch.randn(8, 5), torch.rand(8, 5)])
honest(
    "embeddings",
    lambda: nn.Embedding(9, 4, padding_idx=0),
    lambda: [torch.randint(9, (3, 5))],
    "forward",
    "train",
)
honest("embedding bag", lambda: nn.EmbeddingBag(9, 4), lambda: [torch.randint(9, (3, 5))], "forward", "train")
honest("float64", lambda: nn.Linear(6, 5).double(), draws((4, 6), dtype=torch.float64))
honest("bfloat16", lambda: nn.Linear(6, 5).bfloat16(), draws((4, 6), dtype=torch.bfloat16), *ALL)
honest("float16", lambda: nn.Linear(6, 5).half(), draws((4, 6), dtype=torch.float16))
of(
    "float32 to bfloat16",
    lambda self, x: self.linear(x).bfloat16(),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of("integer output", lambda self, x: x.argmax(1), (4, 6), "forward", refusal="float")
of("boolean output", lambda self, x: x > 0, (4, 6), "forward", refusal="float")
of("complex output", lambda self, x: torch.fft.rfft(x), (4, 6), refusal="complex|float")
of("complex input", lambda self, x: x.abs(), draws((4, 6), dtype=torch.complex64), refusal="complex|float")
of("a tuple", lambda self, x: (x, x + 1), (4, 6), refusal="one tensor")
of("a dict", lambda self, x: {"y": x + 1}, (4, 6), refusal="one tensor")
of("numbers as inputs", lambda self, x, n: x * n, lambda: [torch.randn(4, 6), 3], refusal="tensor")
of(
    "no inputs",
    lambda self: self.p * 2,
    lambda: [],
    modules=lambda: dict(p=nn.Parameter(torch.randn(3))),
    refusal="input",
)

# ------------------------------------------------------------------------------------------- attention and sequences

MASK = torch.ones(5, 5).triu(1).bool()


def _attention(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT / 2).masked_fill(self.mask, -math.inf)
    return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _attention_in_other_words(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    scores = torch.where(self.mask, -math.inf, torch.einsum("nthd,nshd->nhts", q / 2, k))
    return self.out(torch.einsum("nhts,nshd->nthd", F.softmax(scores, -1), v).flatten(2))


def _fused_attention(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _projections() -> dict:
    return dict(qkv=nn.Linear(8, 24), out=nn.Linear(8, 8), mask=MASK.clone())


of("causal attention", _attention, (2, 5, 8), modules=_projections, rewrite=_attention_in_other_words)
of("fused attention", _fused_attention, (2, 5, 8), modules=_projections)
of(
    "multi-head attention", lambda self, x: self.attention(x, x, x, need_weights=False)[0], (2, 5, 8),
    modules=lambda: dict(attention=nn.MultiheadAttention(8, 2, batch_first=True)),
)  # fmt: skip
of(
    "scores of minus infinity", lambda self, x: self.linear(x).masked_fill(MASK, -math.inf), (2, 5, 6), *ALL,
    modules=lambda: dict(linear=nn.Linear(6, 5)), rewrite=lambda self, x: torch.where(MASK, -math.inf, self.linear(x)),
)  # fmt: skip
of(
    "scores of -1e9",
    lambda self, x: self.linear(x).masked_fill(MASK, -1e9),
    (2, 5, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of(
    "boolean mask as input", lambda self, x, m: x.masked_fill(m, -1e9).softmax(-1) @ self.v,
    lambda: [torch.randn(2, 5, 5), torch.rand(2, 5, 5) < 0.3], modules=lambda: dict(v=nn.Parameter(torch.randn(5, 4))),
)  # fmt: skip
honest("encoder layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8))
of(
    "lstm",
    lambda self, x: self.lstm(x)[0],
    (2, 5, 4),
    modules=lambda: dict(lstm=nn.LSTM(4, 6, batch_first=True)),
)
of(
    "gru, last state",
    lambda self, x: self.gru(x)[1][0],
    (2, 5, 4),
    modules=lambda: dict(gru=nn.GRU(4, 6, batch_first=True)),
)
honest("lstm cell", lambda: nn.LSTM(4, 6), (5, 2, 4), refusal="one tensor")


def _rotated(self, x):
    a, b = x.chunk(2, -1)
    return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


def _angles() -> dict:
    angles = torch.arange(5.0)[:, None] / 10 ** torch.arange(4.0)
    return dict(cos=angles.cos(), sin=angles.sin())


of("rotary embedding", _rotated, (2, 5, 8), modules=_angles)
of(
    "rotary embedding by complex numbers",
    lambda self, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(self.angles), self.angles)).flatten(-2),
    (2, 5, 8), modules=lambda: dict(angles=torch.rand(5, 4)),
)  # fmt: skip
of(
    "positions in a buffer",
    lambda self, x: x + self.positions[: x.shape[1]],
    (2, 5, 8),
    modules=lambda: dict(positions=torch.randn(9, 8)),
)
of(
    "spectrum", lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8), (2, 3, 8),
    modules=lambda: dict(filter=nn.Parameter(torch.randn(5))),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ convolutions

honest("conv1d", lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8))
honest(
    "conv2d", lambda: nn.Conv2d(3, 4, 3, stride=2), (2, 3, 7, 7),
    rewrite=lambda self, x: torch.einsum(
        "oihw,niyxhw->noyx", self.weight, x.unfold(2, 3, 2).unfold(3, 3, 2)
    ) + self.bias[:, None, None],
)  # fmt: skip
honest("conv3d", lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 4, 4))
honest("transposed conv2d", lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 4, 4))
honest("depthwise conv2d", lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6))
honest("max pool", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), (2, 3, 8, 8))
honest("average pool", lambda: nn.AvgPool2d(2), (2, 3, 6, 6))
honest(
    "adaptive pools", lambda: nn.Sequential(nn.AdaptiveMaxPool2d(3), nn.AdaptiveAvgPool2d(1)), (2, 3, 8, 8)
)
honest("power pool", lambda: nn.LPPool2d(2, 2), lambda: [torch.rand(2, 3, 6, 6)])
honest("upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4))
honest("pixel shuffle", lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)), (2, 2, 3, 3))
of(
    "patches", lambda self, x: self.embed(x).flatten(2).mT + self.positions, (2, 3, 8, 8),
    modules=lambda: dict(embed=nn.Conv2d(3, 6, 4, stride=4), positions=nn.Parameter(torch.randn(1, 4, 6))),
)  # fmt: skip
of(
    "squeeze and excite", lambda self, x: x * self.gate(x.mean((2, 3)))[..., None, None], (2, 4, 5, 5),
    modules=lambda: dict(gate=nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4), nn.Sigmoid())),
)  # fmt: skip
of(
    "unet block", lambda self, x: self.out(torch.cat([x, self.up(F.silu(self.down(x)))], 1)), (2, 3, 6, 6),
    modules=lambda: dict(down=nn.Conv2d(3, 4, 2, 2), up=nn.ConvTranspose2d(4, 3, 2, 2), out=nn.Conv2d(6, 2, 1)),
)  # fmt: skip
of(
    "grid sample",
    lambda self, x, grid: F.grid_sample(x, grid, align_corners=False),
    lambda: [torch.randn(2, 3, 4, 4), torch.rand(2, 3, 3, 2) - 0.5],
)

# ----------------------------------------------------------------------------------------------- functions of values

honest(
    "softmax",
    lambda: nn.Softmax(-1),
    (3, 6),
    rewrite=lambda self, x: _shares((x - x.amax(-1, keepdim=True)).exp()),
)
honest("log softmax", lambda: nn.LogSoftmax(1), (3, 6))
of("logsumexp", lambda self, x: x.logsumexp(1), (3, 6))
of("cumsum", lambda self, x: x.cumsum(1), (3, 6))
of("sorted", lambda self, x: x.sort(1).values, (3, 6))
of("topk", lambda self, x: x.topk(2, 1).values, (3, 6))
of("median", lambda self, x: x.median(1).values, (3, 7))
of("quantile", lambda self, x: x.quantile(0.3, 1), (3, 7))
of("norm", lambda self, x: x.norm(dim=1), (3, 6))
of("determinant", lambda self, x: torch.linalg.det(x), (3, 4, 4))
of("solve", lambda self, x: torch.linalg.solve(x @ x.mT + 4 * torch.eye(4), x), (3, 4, 4))
of("cholesky", lambda self, x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)), (3, 4, 4))
of("einsum", lambda self, x, y: torch.einsum("bij,bkj->bik", x, y), draws((2, 3, 4), (2, 5, 4)))
honest("bilinear", lambda: nn.Bilinear(3, 4, 5), draws((6, 3), (6, 4)))
honest("cosine similarity", nn.CosineSimilarity, draws((6, 4), (6, 4)))
of(
    "masked in place",
    lambda self, x: self.linear(x).masked_fill_(MASK[0], 0).add_(1),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
honest("relu in place", lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)), (4, 6))
of("a rectified input", lambda self, x: x.relu(), (4, 6), "forward", "forward_grad", "train_dx")
of("nothing to train", lambda self, x: x.relu(), (4, 6), "train", refusal="gradient|parameter")
of("one value", lambda self, x: x * 0 + 3, (4, 6))
of("small values", lambda self, x: x * 1e-30, (4, 6))
of("large values", lambda self, x: x * 1e30, (4, 6))
of("infinities for some", lambda self, x: 1 / x.relu(), (4, 6), "forward")
of("nan for some", lambda self, x: x.sqrt(), (4, 6), "forward", "train_dx")
of(
    "scatter",
    lambda self, x, i: x.new_zeros(4, 5).scatter_add(1, i, x),
    lambda: [torch.randn(4, 6), torch.randint(5, (4, 6))],
)

# -------------------------------------------------------------------------------------------------------- parameters

honest(
    "parameters that are frozen",
    lambda: _frozen(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))),
    (4, 6),
)
honest(
    "all parameters frozen", lambda: nn.Linear(6, 5).requires_grad_(False), (4, 6), "forward_grad", "train_dx"
)
of(
    "unused parameters",
    lambda self, x: self.linear(x),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5), spare=nn.Linear(2, 2)),
)
of(
    "an unused input",
    lambda self, x, y: self.linear(x),
    draws((4, 6), (4, 6)),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of(
    "tied weights",
    lambda self, x: F.linear(self.a(x).tanh(), self.b.weight.t()),
    (4, 6),
    modules=lambda: _tied(),
)
of(
    "a module used twice",
    lambda self, x: self.linear(self.linear(x).tanh()),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 6)),
)
of(
    "residual",
    lambda self, x: x + self.linear(x).tanh(),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 6)),
)
of(
    "gated unit", lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)), (4, 6),
    modules=lambda: dict(gate=nn.Linear(6, 8), up=nn.Linear(6, 8), down=nn.Linear(8, 6)),
    rewrite=lambda self, x: self.down(self.up(x) * self.gate(x) * self.gate(x).sigmoid()),
)  # fmt: skip
honest(
    "dropout in eval, in the middle",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh()).eval(),
    (4, 6),
)
honest("dropout last", lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), (16, 6))
honest(
    "dropout last by a comparison",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.25)),
    (16, 6),
    rewrite=lambda self, x: _dropped(self, x),
)
honest("prelu", lambda: nn.PReLU(3), (4, 3))


def _dropped(self, x):
    y = self[0](x)
    return y * (torch.rand_like(y) >= 0.25) / 0.75 if self.training else y


def _experts(self, x):
    weights, chosen = self.router(x).softmax(-1).topk(2)
    outs = torch.stack([expert(x) for expert in self.experts], 1)
    return (outs.gather(1, chosen[..., None].expand(-1, -1, outs.shape[-1])) * weights[..., None]).sum(1)


of(
    "mixture of experts",
    _experts,
    (6, 4),
    modules=lambda: dict(router=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 5) for _ in range(3))),
)


def _frozen(module):
    module[0].requires_grad_(False)
    return module


def _tied() -> dict:
    a, b = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
    b.weight = a.weight
    return dict(a=a, b=b)


# ------------------------------------------------------------------------------------ constants, types, containers

of("a constant of its own", lambda self, x: x @ torch.ones(6, 5), (4, 6))
of(
    "a constant put in",
    lambda self, x: x.clone().index_put((torch.tensor([0, 2]),), torch.tensor(0.0)),
    (4, 5),
)
of(
    "a constant of numpy's",
    lambda self, x: x @ torch.from_numpy(numpy.ones((6, 5), "float32")),
    (4, 6),
    refusal="float64",
)
of("a norm as a factor", lambda self, x: x / x.norm().clamp(min=1), (4, 5))
of(
    "integers of an image", lambda self, x: self.conv(x.float() / 255),
    lambda: [torch.randint(255, (2, 3, 6, 6), dtype=torch.uint8)], "forward", "train",
    modules=lambda: dict(conv=nn.Conv2d(3, 4, 3)),
)  # fmt: skip
of(
    "weights of eight bits",
    lambda self, x: x @ self.w.float(),
    (4, 6),
    modules=lambda: dict(w=torch.randint(-9, 9, (6, 5), dtype=torch.int8)),
)
of(
    "weights rounded on the way",
    lambda self, x: x @ self.w.to(torch.float8_e4m3fn).float(),
    (4, 6),
    modules=lambda: dict(w=torch.randn(6, 5)),
)
of(
    "products in bfloat16",
    lambda self, x: _in_bfloat16(self.linear, x),
    (4, 6),
    modules=lambda: dict(linear=nn.Linear(6, 5)),
)
of(
    "complex parameters",
    lambda self, x: (x * self.w).abs(),
    (4, 6),
    modules=lambda: dict(w=nn.Parameter(torch.randn(6, dtype=torch.complex64))),
)
of(
    "parameters in lists",
    lambda self, x: sum(x * p for p in self.several),
    (4, 6),
    modules=lambda: dict(several=nn.ParameterList(torch.randn(6) for _ in range(3))),
)
of(
    "a recurrence",
    lambda self, x: _recurrence(x, self.a),
    (2, 6, 4),
    modules=lambda: dict(a=nn.Parameter(torch.rand(4))),
)
of(
    "sequences of unlike lengths", lambda self, x: _unlike_lengths(self.gru, x), (2, 5, 4),
    modules=lambda: dict(gru=nn.GRU(4, 3, batch_first=True)),
)  # fmt: skip
of(
    "the nearest of a table",
    lambda self, x: x + (self.table[torch.cdist(x, self.table).argmin(1)] - x).detach(),
    (6, 4),
    modules=lambda: dict(table=torch.randn(5, 4)),
)
of(
    "masked by the smallest number", lambda self, x: (x + self.mask).softmax(-1) @ x, (2, 5, 5),
    modules=lambda: dict(mask=torch.where(MASK, torch.finfo(torch.float32).min, 0.0)),
)  # fmt: skip
of(
    "sequences without alignment",
    lambda self, x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [2, 1]]), torch.tensor([6, 6]), torch.tensor([2, 2])),
    (6, 2, 4),
)  # fmt: skip
of("the same input twice", lambda self, x, y: x * y, lambda: [torch.randn(4, 6)] * 2)
of("an expanded input", lambda self, x: x.tanh(), lambda: [torch.randn(1, 6).expand(8, 6)])
of(
    "a sample at a time", lambda self, x: self.linear(x), (8, 6), *ALL, modules=lambda: dict(linear=nn.Linear(6, 5)),
    rewrite=lambda self, x: torch.vmap(lambda row: self.linear.weight @ row + self.linear.bias)(x),
)  # fmt: skip
for _name, _twin in {"scripted": torch.jit.script, "traced to a script": lambda module: torch.jit.trace(module, torch.randn(8, 6))}.items():  # fmt: skip
    HONEST[_name] = Entry(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
        lambda module, twin=_twin: twin(copy.deepcopy(module)),
        draws((8, 6)),
        ALL,
    )


def _in_bfloat16(linear, x):
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).float()


def _recurrence(x, a):
    state, states = torch.zeros_like(x[:, 0]), []
    for row in x.unbind(1):
        state = state * a.sigmoid() + row
        states.append(state)
    return torch.stack(states, 1)


def _unlike_lengths(gru, x):
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(gru(packed)[0], batch_first=True)[0]


# --------------------------------------------------------------------------------- what else draws random numbers

DROPS = "drop|random"
honest(
    "dropout in the middle",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh()),
    (16, 6),
    refusal=DROPS,
)
honest(
    "two dropouts",
    lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5), nn.Dropout(0.2)),
    (16, 6),
    refusal=DROPS,
)
honest("channels dropped", lambda: nn.Dropout2d(0.5), (4, 6, 3, 3), refusal=DROPS)
honest("alpha dropout", lambda: nn.AlphaDropout(0.5), (16, 6), refusal=DROPS)
honest("random slopes", lambda: nn.RReLU(), (16, 6), refusal=DROPS)
of("dropout as a function", lambda self, x: F.dropout(x + 1, 0.5, self.training), (16, 6), refusal=DROPS)
of("noise in training", lambda self, x: x + torch.randn_like(x) * self.training, (16, 6), refusal=DROPS)
honest("dropout of nothing", lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0)), (16, 6))
honest("dropout of everything", lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(1.0)), (16, 6))

# --------------------------------------------------------------------------------- what an honest rewrite may do


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(context, g):
        x, weight = context.saved_tensors
        return (g @ weight if context.needs_input_grad[0] else None), g.t() @ x


def _keeps_a_constant(self, x):
    """By shape; it hangs on nothing else."""
    if x.shape not in (kept := vars(self).setdefault("kept", {})):
        kept[x.shape] = torch.arange(x.shape[1], dtype=x.dtype) / 10
    return self.linear(x + kept[x.shape])


def _keeps_a_workspace(self, x):
    """Which it writes before it reads it, and never returns."""
    workspace = vars(self).setdefault(x.shape, torch.empty_like(x))
    with torch.no_grad():
        torch.add(x, torch.arange(x.shape[1]) / 10, out=workspace)
    return self.linear(x + (workspace.clone() - x.detach()))


def _prepares_in_the_first_call(self, x):
    """As what is compiled or tuned does."""
    if not vars(self).get("calls"):
        time.sleep(0.01)
    self.calls = vars(self).get("calls", 0) + 1
    return self.linear(x + torch.arange(x.shape[1]) / 10)


def _changes_settings_meanwhile(self, x):
    threads, generator = torch.get_num_threads(), torch.random.fork_rng()
    torch.set_num_threads(2)
    with generator, torch.backends.mkldnn.flags(enabled=False):
        torch.manual_seed(0)
        torch.rand(3)
        y = self.linear(x + torch.arange(x.shape[1]) / 10)
    torch.set_num_threads(threads)
    return y


def _in_another_thread(self, x):
    """Joined before the return."""
    shift = []
    thread = threading.Thread(target=lambda: shift.append(torch.arange(x.shape[1]) / 10))
    thread.start()
    thread.join()
    return self.linear(x + shift[0])


def _under_its_seed(self, x):
    """A mask by a generator of its own, which torch's seeds, as fused kernels draw."""
    y = self[0](x)
    if not self.training:
        return y
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return y * (torch.rand(y.shape, generator=generator) < 0.5) * 2


SHIFTED = {
    "keeps a constant": _keeps_a_constant,
    "keeps a workspace": _keeps_a_workspace,
    "prepares in the first call": _prepares_in_the_first_call,
    "changes settings meanwhile": _changes_settings_meanwhile,
    "uses another thread": _in_another_thread,
    "recomputes in backward": lambda self, x: checkpoint(
        lambda x: self.linear(x + torch.arange(x.shape[1]) / 10), x, use_reentrant=False
    ),
    "has a backward of its own": lambda self, x: (
        _Product.apply(x + torch.arange(x.shape[1]) / 10, self.linear.weight) + self.linear.bias
    ),
    "lies otherwise in memory": lambda self, x: (
        self.linear.weight @ (x + torch.arange(x.shape[1]) / 10).t() + self.linear.bias[:, None]
    ).t(),
    "works in place": lambda self, x: (x @ self.linear.weight.t()).add_(
        self.linear.bias + self.linear.weight @ (torch.arange(x.shape[1]) / 10)
    ),
}
for _name, _forward in SHIFTED.items():
    _shifted = lambda self, x: self.linear(x + torch.arange(x.shape[1]) / 10)  # noqa: E731
    of(_name, _shifted, (8, 6), *ALL, modules=lambda: dict(linear=nn.Linear(6, 5)), rewrite=_forward)
    del HONEST[_name]
honest(
    "dropout last, under a seed",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)),
    (16, 6),
    rewrite=_under_its_seed,
)
HONEST["a function"] = Entry(
    lambda: Of(lambda self, x: x * x + 1),
    lambda module: lambda x: x.square() + 1,
    draws((4, 6)),
    ALL[:2] + ALL[3:],
)
HONEST["traced"] = Entry(
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
    lambda module: torch.fx.symbolic_trace(copy.deepcopy(module)),
    draws((4, 6)),
    USUAL,
)


# -------------------------------------------------------------------------------------------- what surrounds a module


class Assigned(nn.Module):
    """Keeps a running mean in a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Empty(nn.Linear):
    def __len__(self):
        return 0


def _by_numpy() -> list[Tensor]:
    return [torch.from_numpy(numpy.random.rand(8, 6).astype("float32")) * random.uniform(1, 2)]


honest("a buffer that is assigned", Assigned, (8, 6), "forward", "train")
honest("a length of nothing", lambda: Empty(6, 5), (8, 6))
honest("inputs by other generators", lambda: nn.Linear(6, 5), _by_numpy)
honest(
    "compiled",
    lambda: nn.Linear(6, 5),
    (8, 6),
    rewrite=lambda self, x: _compiled()(x, self.weight, self.bias),
)
honest("rare dropout", lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.01)), (64, 64), "forward")
honest("dropout of a vector", lambda: nn.Dropout(0.5), (2000,), "forward", "train_dx")
honest(
    "dropout in bfloat16",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1)).bfloat16(),
    draws((16, 6), dtype=torch.bfloat16),
)


@functools.cache
def _compiled():
    """By the first who asks: it imports the compiler."""
    return torch.compile(lambda x, weight, bias: F.linear(x, weight, bias), backend="eager")
