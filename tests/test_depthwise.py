"""Depthwise convolutions of our own, in the emulation of a GPU, against float64: the kernels, and what `fuse` makes of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import numerics
from benchmarks.networks import NETWORKS
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import depthwise, direct, library, tiling
from inline_kernels.engine.between import ENDS, KEPT, OPERAND
from inline_kernels.engine.cases import Case
from test_emulated import INF, NAN, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_between import layouts, results  # noqa: F401
from test_engine_direct import given
from test_kernels_compile import entries, needs_nvcc, nvcc

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Depthwise(nn.Module):
    """A depthwise convolution, and what is behind it."""

    def __init__(self, channels: int, kernel, tail=torch.tanh, **settings):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel, groups=channels, **settings)
        self.tail = tail

    def forward(self, x):
        return self.tail(self.conv(x))

    def beside(self, x):
        return []


def convolved(x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    """Tap by tap, in float64: what lies outside of x meets none."""
    weight, (step, _) = conv.weight.double(), conv.stride
    (above, below), (left, right) = library.padding(conv, weight)
    size = [
        (n + sum(each) - k) // step + 1
        for n, each, k in zip(x.shape[2:], [(above, below), (left, right)], weight.shape[2:])
    ]
    v = torch.zeros(*x.shape[:2], *size, dtype=torch.float64)
    for a, b in itertools.product(*map(range, weight.shape[2:])):
        met = [
            [(i, i * step - before + tap) for i in range(n) if 0 <= i * step - before + tap < extent]
            for n, extent, before, tap in zip(size, x.shape[2:], (above, left), (a, b))
        ]
        if not all(met):
            continue
        rows, columns = (tuple(zip(*each)) for each in met)
        part = x[:, :, list(rows[1])][..., list(columns[1])] * weight[:, 0, a, b, None, None]
        v = v.index_put(
            (
                torch.arange(len(x))[:, None, None, None],
                torch.arange(x.shape[1])[:, None, None],
                torch.tensor(rows[0])[:, None],
                torch.tensor(columns[0]),
            ),
            part,
            accumulate=True,
        )
    return v


def exact(model: Depthwise, x: torch.Tensor, dz: torch.Tensor) -> dict[str, torch.Tensor]:
    conv, x = copy.deepcopy(model.conv).double(), x.detach().double().requires_grad_()
    v = convolved(x, conv)
    dx, dw = torch.autograd.grad(v, (x, conv.weight), dz.double())
    return {"v": v.detach(), "dx": dx, "dw": dw}


def eagers(model: Depthwise, x: torch.Tensor, dz: torch.Tensor) -> dict[str, torch.Tensor]:
    x, weight, conv = x.detach().requires_grad_(), model.conv.weight, model.conv
    v = F.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    dx, dw = torch.autograd.grad(v, (x, weight), dz)
    return {"v": v.detach(), "dx": dx, "dw": dw}


def ours(model: Depthwise, x: torch.Tensor, dz: torch.Tensor) -> dict[str, torch.Tensor]:
    segment, arguments = given(model, x)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(depthwise, "_leaves_weight", lambda *_: False)  # it isn't left to the library
        how = depthwise.convolution(Case(segment, arguments, False, x.dtype))
    lying = [t.detach().contiguous(memory_format=torch.channels_last) for t in (x, dz)]
    weight = model.conv.weight.detach()
    dx, dw, _ = how.differentiate(lying[1], lying[0], weight, None, [True, True, False])
    return {"v": how.run(lying[0], weight), "dx": dx, "dw": dw}


def case_of(kernel, settings: dict, channels: int, image, dtype: torch.dtype, samples: int = 2):
    torch.manual_seed(0)
    model = Depthwise(channels, kernel, bias=False, **settings).to(dtype)
    x = torch.randn(samples, channels, *image).to(dtype)
    with torch.no_grad():
        dz = torch.randn(model.conv(x).shape).to(dtype)
    return model, x, dz


# Filters, settings, channels, image: rows of a strip, less, and more; lanes that fill no block, and several tiles of them; more zeros around than
# the filter has places; an image that a stride doesn't fill.
CASES = [
    (3, {"padding": 1}, 8, (5, 7)),
    (3, {"padding": 1}, 8, (6, 16)),
    (3, {"padding": 1, "stride": 2}, 40, (8, 9)),
    (3, {"padding": 1, "stride": 2}, 8, (9, 134)),
    (3, {"padding": 4}, 8, (3, 4)),
    (3, {}, 136, (4, 11)),
    (5, {"padding": 2}, 8, (7, 13)),
    (5, {"padding": 2, "stride": 2}, 72, (6, 10)),
    (7, {"padding": 3}, 8, (9, 11)),
    (7, {"padding": 3, "stride": 2}, 8, (34, 67)),
    (7, {"padding": 3}, 8, (1, 1)),
    (2, {"padding": 1, "stride": 2}, 8, (5, 12)),
    (4, {"padding": "same"}, 8, (5, 9)),
    ((1, 6), {"padding": (0, 2)}, 8, (3, 19)),
    ((5, 2), {"stride": 2, "padding": (1, 0)}, 8, (9, 18)),
]


@pytest.mark.parametrize(
    "number, dtype",
    [(i, dtype) for i in range(len(CASES)) for dtype in (DTYPES[0], DTYPES[1 + i % 2])],
    ids=str,
)
def test_convolutions(number, dtype, gpu):  # noqa: F811
    gpu()
    model, x, dz = case_of(*CASES[number], dtype)
    found, theirs, right = (f(model, x, dz) for f in (ours, eagers, exact))
    for name, value in found.items():
        assert value.shape == right[name].shape and value.dtype == dtype
        error = checks.judged("", name, right[name], theirs[name], value, dtype)
        assert error.share <= 1, error


@pytest.mark.parametrize("multiprocessors", [1, 7, 200])
def test_any_number_of_blocks(multiprocessors, gpu):  # noqa: F811
    """And each gives the same bits again."""
    gpu(multiprocessors=multiprocessors)
    model, x, dz = case_of(5, {"padding": 2}, 40, (9, 18), torch.float32, samples=3)
    found, right = ours(model, x, dz), exact(model, x, dz)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), right[name], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(found[name], value) for name, value in ours(model, x, dz).items())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_special_values(special, stride, gpu):  # noqa: F811
    """Each tap that meets one gives what float64 gives; one that meets none, outside of x or behind the last result, gives nothing."""
    gpu()
    for of in ("x", "weight", "dz"):
        model, x, dz = case_of(3, {"padding": 1, "stride": stride}, 8, (5, 11), torch.float32)
        with torch.no_grad():
            if of == "weight":
                model.conv.weight[::2, :, 0, :] = special
            for t in (x, dz):
                if t is {"x": x, "dz": dz}.get(of):
                    t[0, 1, 0, 0] = t[1, 2, -1, -1] = t[0, 5, 2, 3] = special
        found, right = ours(model, x, dz), exact(model, x, dz)
        for name, value in found.items():
            torch.testing.assert_close(value.double(), right[name], rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_nvcc
@pytest.mark.parametrize("value, architecture", [("float", "80"), ("bfloat16_t", "80"), ("float", "90a")])
@pytest.mark.parametrize("kernel, stride", [(5, 1), (7, 2)])
def test_registers_suffice(kernel, stride, value, architecture, gpu, tmp_path):  # noqa: F811
    gpu()
    model, x, _ = case_of(kernel, {"stride": stride}, 8, (16, 16), torch.float32)
    segment, arguments = given(model, x)
    source = tmp_path / "depthwise.cu"
    (request,) = depthwise.requests(Case(segment, arguments, False, x.dtype))
    source.write_text(request["source"])
    defines = [f"{name}={what}" for name, what in {**request["defines"], "VALUE_T": value}.items()]
    done = nvcc(source, architecture, defines, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = entries(done.stderr)
    most = 8 if architecture == "80" else 0  # bytes, outside of the loop over rows
    assert len(found) == 3 and all(entry.spilled <= most for entry in found.values()), found


@needs_nvcc
@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_registers_suffice_with_a_tail(kernel, dtype, gpu, tmp_path, monkeypatch):  # noqa: F811
    gpu(architecture=900)
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
    model = Normed(8, kernel).eval().to(dtype)
    x = torch.randn(1, 8, 16, 16).to(dtype).contiguous(memory_format=torch.channels_last)
    segment, arguments = given(model, x)
    (request,) = direct.requests(Case(segment, arguments, False, dtype, last=True))
    source = tmp_path / "direct.cu"
    source.write_text(request["source"])
    defines = [f"{name}={what}" for name, what in request["defines"].items()]
    done = nvcc(source, "90a", defines, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(entry.spilled for entry in entries(done.stderr).values()), done.stderr


# ------------------------------------------------------------------------------------------------------------------------ fuse


class Normed(Depthwise):
    """Its tail is a batch norm with a SiLU."""

    def __init__(self, *given, **settings):
        super().__init__(*given, bias=False, **settings)
        self.norm = nn.BatchNorm2d(given[0])

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


MODELS = {
    "pointwise": lambda: Depthwise(24, 3, padding=1),
    "normed": lambda: Normed(8, 5, padding=2),
    "halved": lambda: Normed(16, 3, padding=1, stride=2),
    "of even size": lambda: Depthwise(8, 4, F.relu, padding="same"),
    "pooled": lambda: Depthwise(8, 3, lambda v: F.max_pool2d(v, 2)),
}


@pytest.mark.parametrize(
    "name, dtype, last",
    [
        *[(name, torch.float32, False) for name in MODELS],
        *[(name, torch.float32, True) for name in ("normed", "halved")],
        ("pointwise", torch.bfloat16, False),
        ("pointwise", torch.float16, True),
    ],
    ids=str,
)
def test_fused(name, dtype, last, gpu, monkeypatch):  # noqa: F811
    """Forward and every gradient, for x in planes and channels last; the library convolves nothing."""
    gpu()
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    x = torch.randn(3, model.conv.in_channels, 9, 13).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()

    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = {"x": x, **dict(model.named_parameters())}
        y = model(x)
        dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], dy)))}

    eager = gradients(copy.deepcopy(model), x)
    right = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    fast = fuse(copy.deepcopy(model))
    (plan,) = fast.plan(x)
    assert "a depthwise convolution of our own" in plan.reason, plan
    ours = (
        "the gradients of weight and x by kernels" if dtype == torch.float32 else "x's gradient by a kernel"
    )
    assert f"{ours} of our own" in plan.reason, plan
    monkeypatch.setattr(torch, "conv2d", None)
    if dtype == torch.float32:  # in 16 bits the weight's gradient is the library's
        made = library.Convolution.of
        monkeypatch.setattr(
            library.Convolution, "of", lambda *given: made(*given)._replace(differentiate=None)
        )
    for key, value in gradients(fast, x).items():
        error = checks.judged("", key, right[key], eager[key], value, dtype)
        assert error.share <= 1, error


def test_an_older_gpu(gpu, monkeypatch):  # noqa: F811
    gpu()
    older = tiling.Device((7, 5), 64 << 10, 4)
    monkeypatch.setattr(tiling, "device_properties", lambda index: older)
    with torch.no_grad():
        (plan,) = fuse(Depthwise(8, 3)).plan(torch.randn(2, 8, 6, 9))
    assert plan.reason.startswith("the library's convolution (it copies as GPUs of"), plan


def test_autocast(gpu):  # noqa: F811
    """In its type, of parameters in float32."""
    gpu()
    torch.manual_seed(0)
    model, x = Depthwise(8, 3, padding=1), torch.randn(2, 8, 6, 9)
    fast = fuse(copy.deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "a depthwise convolution of our own" in fast.plan(x)[0].reason
        y, theirs = fast(x), model(x)
    assert y.dtype == theirs.dtype == torch.bfloat16
    y.float().square().sum().backward(), theirs.float().square().sum().backward()
    torch.testing.assert_close(y, theirs, rtol=2e-2, atol=2e-2)
    for own, eagers in zip(fast.parameters(), model.parameters()):
        assert own.grad.dtype == torch.float32
        torch.testing.assert_close(own.grad, eagers.grad, rtol=5e-2, atol=0.2)


def test_an_edited_formula(gpu):  # noqa: F811
    """Around the same kernels, with its gradient."""
    gpu()
    torch.manual_seed(0)
    model, x = Depthwise(8, 3, F.relu, padding=1), torch.randn(2, 8, 6, 9, requires_grad=True)
    fast = fuse(model)
    fast.edit(x, fast.source(x).replace("math::relu", "real(2) * math::relu"))
    assert "a depthwise convolution of our own" in fast.plan(x)[0].reason
    fast(x).square().sum().backward()
    found, x.grad = [x.grad, model.conv.weight.grad, model.conv.bias.grad], None
    expected = torch.autograd.grad((2 * model(x)).square().sum(), [x, *model.conv.parameters()])
    for gradient, theirs in zip(found, expected):
        torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_asked_for_in_part(gpu):  # noqa: F811
    gpu()
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 9)
    for of_x, of_weight in ((True, False), (False, True)):
        model = Depthwise(8, 3, padding=1)
        model.conv.weight.requires_grad_(of_weight)
        own, theirs = (x.clone().requires_grad_(of_x) for _ in range(2))
        fuse(model)(own).square().sum().backward()
        found = own.grad if of_x else model.conv.weight.grad
        model.conv.weight.grad = None
        model(theirs).square().sum().backward()
        torch.testing.assert_close(
            found, theirs.grad if of_x else model.conv.weight.grad, rtol=1e-4, atol=1e-5
        )
        assert of_weight or model.conv.weight.grad is None


@pytest.mark.parametrize(
    "channels, settings, reason",
    [
        (12, {}, "multiple of 8"),
        (8, {"dilation": 2}, "dilated"),
        (8, {"stride": 3}, "another stride"),
        (8, {"stride": (1, 2)}, "another stride"),
        (8, {"padding": 1, "padding_mode": "reflect"}, "other values than zeros"),
        (8, {"kernel": 9, "padding": 4}, "more than 7"),
    ],
)
def test_what_stays_the_librarys(channels, settings, reason, gpu):  # noqa: F811
    """By the plan, with the reason; and it is right."""
    gpu()
    model, x = Depthwise(channels, **{"kernel": 3, **settings}), torch.randn(2, channels, 11, 12)
    with torch.no_grad():
        fast = fuse(copy.deepcopy(model))
        (plan,) = fast.plan(x)
        assert plan.reason.startswith("the library's convolution (") and reason in plan.reason, plan
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["pointwise", "normed", "halved"])
def test_a_tail_inside(name, dtype, gpu, monkeypatch):  # noqa: F811
    """Where x and y lie channels last and no gradient follows, v is never written."""
    gpu()
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
    torch.manual_seed(0)
    model = MODELS[name]().eval().to(dtype)
    if hasattr(model, "norm"):
        nn.init.normal_(model.norm.weight), nn.init.normal_(model.norm.running_mean)
        model.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(3, model.conv.in_channels, 9, 13).to(dtype)
    x[1, 2, 3, 4], x[0, 0, 0, 0] = NAN, INF
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        fast = fuse(copy.deepcopy(model))
        (plan,) = fast.plan(x)
        assert plan.reason.startswith("depthwise, the tail inside, v is never written"), plan
        found, eager, right = fast(x), model(x), copy.deepcopy(model).double()(x.double())
        (plan,) = fast.plan(x.contiguous())
        assert plan.reason.startswith("a depthwise convolution of our own"), plan
    assert found.stride() == eager.stride() and torch.equal(found.isnan(), eager.isnan())
    assert torch.equal(found.isinf(), eager.isinf())
    finite = right.isfinite() & eager.isfinite()
    error = checks.judged("", "y", *(t[finite] for t in (right, eager, found)), dtype)
    assert error.share <= 1, error


def test_a_tail_inside_gives_operands(layouts, monkeypatch):  # noqa: F811
    """Rounded for the 1 x 1 behind it."""
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
    convolve, seen = library.convolve, []

    def noted(how, x, *given):
        seen.append(x)
        return convolve(how, x, *given)

    monkeypatch.setattr(library, "convolve", noted)
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 8, 9, 11)
    with torch.no_grad():
        fast = fuse(model)
        assert fast.plan(x)[1].reason.startswith("depthwise, the tail inside")
        torch.testing.assert_close(fast(x), model(x), rtol=2e-3, atol=2e-3)
        exact = F.silu(model.depthwise(F.silu(model.grow(x))))
    assert library.is_channels_last(seen[-1])
    torch.testing.assert_close(seen[-1].contiguous(), exact, rtol=2e-3, atol=2e-3)
    assert not (seen[-1].contiguous().view(torch.int32) & 0x1FFF).any()


# ---------------------------------------------------------------------------------------------------- between other convolutions


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3), keepdim=True)


class Block(nn.Module):
    """1 x 1, depthwise, 1 x 1; `gated`: what is convolved last is weighed first, by what is made of its means, and that is how they are made."""

    def __init__(self, channels: int = 8, gated=None, stride: int = 1):
        super().__init__()
        self.grow, self.gated = nn.Conv2d(channels, 2 * channels, 1), gated
        self.depthwise = nn.Conv2d(
            2 * channels, 2 * channels, 3, stride=stride, padding=1, groups=2 * channels
        )
        self.weigh, self.shrink = (
            nn.Conv2d(2 * channels, 2 * channels, 1),
            nn.Conv2d(2 * channels, channels, 1),
        )

    def forward(self, x):
        x = F.silu(self.depthwise(F.silu(self.grow(x))))
        x = x * torch.sigmoid(self.weigh(self.gated(x))) if self.gated else x
        return torch.tanh(self.shrink(x))


def test_what_is_kept():
    """With all of its digits, in front of a depthwise convolution; rounded for others."""
    assert results(Block(32)) == [KEPT, OPERAND, ENDS]
    pools = nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), lambda x: F.adaptive_avg_pool2d(x, (1, 1))
    for gated in (mean, *pools):
        assert results(Block(32, gated)) == [KEPT, KEPT, OPERAND, ENDS]
    assert results(Block(32, nn.AdaptiveAvgPool2d((1, None))))[1] == ENDS
    assert results(NETWORKS["inverted"].model()) == [KEPT, OPERAND, KEPT] * 2 + [KEPT, OPERAND, ENDS]
    assert {*results(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), Depthwise(6, 3)))} == {None}


@pytest.mark.parametrize("phase", ["train_dx", "forward"])
@pytest.mark.parametrize("model", ["block", "gated", "halved", "inverted"])
def test_results_stay_channels_last(model, phase, layouts, monkeypatch):  # noqa: F811
    monkeypatch.setattr("inline_kernels.engine.between.rounds", lambda segment, x: False)
    make = {
        "block": Block,
        "gated": lambda: Block(gated=nn.AdaptiveAvgPool2d(1)),
        "halved": lambda: Block(stride=2),
    }
    make["inverted"] = NETWORKS["inverted"].small_model
    assert not numerics.wrong_of(make[model], (2, 8, 9, 11), phase)
    assert layouts[1] and layouts[2 + (model == "gated")]


def test_no_digit_is_lost(layouts, monkeypatch):  # noqa: F811
    """x and dz of a depthwise convolution, and its filters, in float32, as eager has them; what the 1 x 1 behind it reads is rounded."""
    seen, differentiating = {}, depthwise._differentiating

    def noted(*given):
        run = differentiating(*given)
        return lambda dz, x, weight, *rest: (
            seen.update(dz=dz, x=x, weight=weight) or run(dz, x, weight, *rest)
        )

    convolve = library.convolve

    def noted_convolve(how, x, weight, *rest):
        seen["x of the last"] = x
        return convolve(how, x, weight, *rest)

    monkeypatch.setattr(depthwise, "_differentiating", noted)
    monkeypatch.setattr(library, "convolve", noted_convolve)
    torch.manual_seed(0)
    fuse(Block())(torch.randn(2, 8, 9, 11)).sum().backward()
    lost = {name: not (t.detach().contiguous().view(torch.int32) & 0x1FFF).any() for name, t in seen.items()}
    assert lost == {"dz": False, "x": False, "weight": False, "x of the last": True}
    assert all(library.is_channels_last(seen[name]) for name in ("dz", "x", "x of the last"))
