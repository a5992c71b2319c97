"""Pools of what lies channels last between convolutions: which calls become an operator, and that all is right there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import numerics
from benchmarks.networks import NETWORKS
from inline_kernels import fuse
from inline_kernels.engine import between, pooling
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import CTYPES
from inline_kernels.engine.pooling import Pool
from test_emulated import Emulated, folder, gpu, guarded, library_of, remembers_nothing  # noqa: F401
from test_engine_between import layouts  # noqa: F401
from test_kernels_compile import entries, needs_nvcc, nvcc

INF, NAN = float("inf"), float("nan")
LAST = torch.channels_last


class Pooled(nn.Module):
    """Convolutions of an image and of what `pool` makes of it."""

    def __init__(self, pool, channels: int = 8):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, channels, 3, padding=1), pool
        self.one, self.two = nn.Conv2d(channels, 4, 1), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x):
        x = F.silu(self.stem(x))
        return torch.tanh(self.one(self.pool(x))).mean((2, 3)) * torch.tanh(self.two(x)).mean((2, 3))


def pools(model: nn.Module) -> list[Pool]:
    captured = capture(model, model.training, 4, bare=True)
    found = pooling.poolers(captured, model, between.laid_out(captured, model))
    return [pooler.pool for pooler, _ in found.values()]


# ----------------------------------------------------------------------------------------------------------- which calls do


def test_what_is_pooled():
    assert pools(NETWORKS["unet"].model()) == [Pool(True, (2, 2), (2, 2), (0, 0), False)] * 3
    found = {
        nn.MaxPool2d(3, 2, 1): Pool(True, (3, 3), (2, 2), (1, 1), False),
        nn.MaxPool2d((2, 3), None, 0, (2, 1), ceil_mode=True): Pool(
            True, (2, 3), (2, 3), (0, 0), True, (2, 1)
        ),
        nn.AvgPool2d(2): Pool(False, (2, 2), (2, 2), (0, 0), False),
        nn.AvgPool2d(3, 1, 1, False, False, 5): Pool(False, (3, 3), (1, 1), (1, 1), False, (1, 1), False, 5),
        lambda x: F.max_pool2d(x, kernel_size=[3], stride=[2, 1]): Pool(True, (3, 3), (2, 1), (0, 0), False),
        lambda x: F.avg_pool2d(input=x, kernel_size=2, stride=()): Pool(False, (2, 2), (2, 2), (0, 0), False),
        lambda x: F.max_pool2d(F.relu(F.max_pool2d(x, 16, 1)), 2): None,
    }
    for pool, wanted in found.items():
        of = pools(Pooled(pool, 32))
        assert of == [wanted] if wanted else [each.kernel for each in of] == [(16, 16), (2, 2)]


def hooked(pool: nn.Module) -> nn.Module:
    pool.register_forward_hook(lambda *given: None)
    return pool


def altered(pool: nn.Module) -> nn.Module:
    pool.forward = lambda x: x
    return pool


@pytest.mark.parametrize(
    "model",
    [
        Pooled(hooked(nn.MaxPool2d(2)), 32),
        Pooled(altered(nn.MaxPool2d(2)), 32),
        Pooled(nn.MaxPool2d(17, 1), 32),
        Pooled(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 32),
        Pooled(lambda x: F.avg_pool2d(x, 2, divisor_override=0), 32),
        Pooled(lambda x: F.max_pool2d(x, x.shape[-1]), 32),
        Pooled(lambda x: F.max_pool2d(x, 2, 0), 32),
        Pooled(nn.AdaptiveMaxPool2d(2), 32),
        Pooled(nn.MaxPool2d(2), 8),
        Pooled(nn.MaxPool2d(2), 32).to(memory_format=LAST),
    ],
    ids=[
        "hooks",
        "altered",
        "large windows",
        "indices",
        "by zero",
        "sizes",
        "no step",
        "adaptive",
        "few channels",
        "filters",
    ],
)
def test_what_is_not_pooled(model):
    assert pools(model) == []


# ----------------------------------------------------------------------------------------------------------------- kernels

POOLS = {
    "2": Pool(True, (2, 2), (2, 2), (0, 0), False),
    "2 ceil": Pool(True, (2, 2), (2, 2), (0, 0), True),
    "3 / 2": Pool(True, (3, 3), (2, 2), (1, 1), False),
    "3 / 2 ceil": Pool(True, (3, 3), (2, 2), (1, 1), True),
    "3 / 1": Pool(True, (3, 3), (1, 1), (1, 1), False),
    "apart": Pool(True, (2, 3), (3, 4), (1, 0), True),
    "dilated": Pool(True, (3, 2), (2, 1), (1, 1), False, (2, 3)),
    "large": Pool(True, (5, 7), (5, 4), (2, 3), True),
    "average": Pool(False, (2, 2), (2, 2), (0, 0), False),
    "average padded": Pool(False, (3, 3), (2, 2), (1, 1), True),
    "average inside": Pool(False, (3, 2), (1, 2), (1, 1), True, (1, 1), False),
    "average by five": Pool(False, (5, 3), (1, 1), (2, 1), False, (1, 1), True, 5),
}
FEW = "3 / 2 ceil", "average inside"
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def image(N: int, C: int, H: int, W: int) -> torch.Tensor:
    """Whole numbers, of which many are alike, and windows of -inf, with NaN and with several."""
    x = torch.randint(-2, 3, (N, C, H, W)).float()
    x[0, 0] = -INF
    x[0, C // 2, H // 2 :] = -INF
    x[torch.rand(x.shape) < 0.05] = NAN
    return x


def gradients(pool: Pool, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """In float64."""
    x = x.double().requires_grad_()
    return torch.autograd.grad(pool.eager(x), x, dy.double())[0]


@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.float32) for name in POOLS]
    + [(name, dtype) for name in FEW for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_kernels(name, dtype, folder, guarded):  # noqa: F811
    """Results and gradients; of the largest to the bit, as eager's planes have them."""
    torch.manual_seed(0)
    pool = POOLS[name]
    text = pooling.text(pool)
    kernels = Emulated(text, library_of(text, 800, {"VALUE_T": CTYPES[dtype]}, (), folder))
    for N, C, H, W in [(2, 8, 12, 14), (1, 12, 9, 11), (3, 5, 11, 8), (1, 2, 13, 16), (1, 264, 10, 12)]:
        x = image(N, C, H, W).to(dtype) if pool.is_largest else torch.randn(N, C, H, W).to(dtype)
        wanted = pool.eager(x.float() if pool.is_largest else x.double())
        numbers, lies = (N, C, H, W, *wanted.shape[2:]), wanted.movedim(1, -1).shape
        y = torch.full(lies, 7.0, dtype=dtype)
        places = (
            torch.full(lies, 99, dtype=torch.uint8) if pool.is_largest else torch.empty(0, dtype=torch.uint8)
        )
        kernels.pool(y, places, x.movedim(1, -1).contiguous(), *numbers)
        again = torch.full_like(y, 7.0)
        kernels.pool(again, torch.empty(0, dtype=torch.uint8), x.movedim(1, -1).contiguous(), *numbers)
        torch.testing.assert_close(again, y, rtol=0, atol=0, equal_nan=True)
        exact = (
            {"rtol": 0, "atol": 0}
            if pool.is_largest
            else {"rtol": EPSILON[dtype], "atol": 4 * EPSILON[dtype]}
        )
        torch.testing.assert_close(y.movedim(-1, 1).double(), wanted.double(), equal_nan=True, **exact)

        dy, dx = torch.randint(-3, 4, wanted.shape).to(dtype), torch.full((N, H, W, C), NAN, dtype=dtype)
        dy[torch.rand(dy.shape) < 0.01] = INF
        kernels.pool_gradient(dx, dy.movedim(1, -1).contiguous(), places, *numbers)
        wanted = gradients(pool, x, dy)
        torch.testing.assert_close(dx.movedim(-1, 1).double(), wanted, equal_nan=True, **exact)


def test_windows_outside_of_the_image(folder, guarded):  # noqa: F811
    """Their largest value is -inf, and has no place in the image."""
    text = pooling.text(Pool(True, (2, 2), (1, 1), (1, 1), False, (4, 5)))
    kernels = Emulated(text, library_of(text, 800, {"VALUE_T": "float"}, (), folder))
    numbers, y, places = (
        (1, 4, 3, 4, 1, 1),
        torch.zeros(1, 1, 1, 4),
        torch.zeros(1, 1, 1, 4, dtype=torch.uint8),
    )
    kernels.pool(y, places, torch.randn(1, 3, 4, 4), *numbers)
    kernels.pool_gradient(dx := torch.full((1, 3, 4, 4), NAN), torch.randn(1, 1, 1, 4), places, *numbers)
    assert (y == -INF).all() and not dx.any()


@needs_nvcc
@pytest.mark.parametrize(
    "name, value", [("2", "float"), ("3 / 2", "bfloat16_t"), ("average padded", "half_t")]
)
def test_registers_suffice(name, value, tmp_path):
    (path := tmp_path / "pool.cu").write_text(pooling.text(POOLS[name]))
    done = nvcc(path, "90a", [f"VALUE_T={value}"], tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    found = entries(done.stderr)
    assert {"pool_kernel", "pool_gradient_kernel"} <= found.keys()
    assert [name for name, entry in found.items() if entry.spilled or entry.registers > 64] == []


# ---------------------------------------------------------------------------------------------------------------- what runs


@pytest.fixture
def runs(layouts, monkeypatch):  # noqa: F811
    """Of each pool that runs by the operator, is a gradient to follow?"""
    found, forward = [], pooling.Plan.forward

    def noted(self, a, saving):
        found.append(saving)
        return forward(self, a, saving)

    monkeypatch.setattr(pooling.Plan, "forward", noted)
    return found


MODELS = {
    "max": (lambda: Pooled(nn.MaxPool2d(3, 2, 1), 5), (2, 3, 7, 10)),
    "average": (lambda: Pooled(nn.AvgPool2d(3, 2, 1, True), 8), (2, 3, 8, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_is_right(name, runs, monkeypatch):
    """Without rounding, which a CPU's eager does not know. Against float64, with every gradient."""
    monkeypatch.setattr(between, "rounds", lambda segment, x: False)
    make, shape = MODELS[name]
    assert not numerics.wrong_of(make, shape, "train_dx")
    assert runs


@pytest.fixture
def pooler(runs):
    """Of a model that ran; and what it was given."""

    def made(pool: nn.Module, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        model, x = Pooled(pool).to(dtype).eval(), torch.randn(2, 3, 6, 10, dtype=dtype)
        with torch.no_grad():
            (fast := fuse(model))(x)
        assert runs == [False]
        runs.clear()
        return fast._kept[0].replacements[0]

    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_keep_bytes(dtype, pooler, runs):
    """A place is a byte, and nothing is kept where no gradient follows. The gradient is the same each time, in PyTorch's deterministic mode, too."""
    largest, average = (
        pooler(nn.MaxPool2d(3, 2, 1), dtype),
        pooling.Pooler(Pool(False, (2, 2), (2, 2), (0, 0), False)),
    )
    x = torch.randn(2, 8, 6, 10, dtype=dtype).contiguous(memory_format=LAST).requires_grad_()
    for pooled, kept in ((largest, [torch.uint8]), (average, [])):
        for hook in (lambda t: t, lambda t: t.contiguous()):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (saved.append(t), hook(t))[1], lambda t: t
            ):
                y = pooled(x)
            assert [t.dtype for t in saved] == [dtype, *kept] and y.is_contiguous(memory_format=LAST)
            dy = torch.randn_like(y)
            torch.use_deterministic_algorithms(True)
            try:
                found = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in (dy, dy.contiguous())]
            finally:
                torch.use_deterministic_algorithms(False)
            wanted = gradients(pooled.pool, x.detach(), dy)
            assert torch.equal(*found) and found[0].stride() == x.stride()
            torch.testing.assert_close(
                found[0].double(), wanted, rtol=2 * EPSILON[dtype], atol=EPSILON[dtype]
            )
        with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("kept"), lambda t: t):
            assert not pooled(x.detach()).requires_grad
    assert runs == [True, True, False] * 2


def test_gradients_of_gradients_and_batches(pooler):
    pooled = pooler(nn.MaxPool2d(2))
    x = torch.randn(1, 8, 4, 6).contiguous(memory_format=LAST).requires_grad_()
    y = pooled(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        dx.sum().backward()
    dys = torch.randn(3, *y.shape)
    y = pooled(x)
    found = torch.autograd.grad(y, x, dys, retain_graph=True, is_grads_batched=True)[0]
    assert torch.equal(
        found, torch.stack([torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys])
    )


def test_operands_stay(pooler):
    """The largest value is one that was there; an average has digits of its own."""
    x = torch.randn(2, 8, 6, 10).contiguous(memory_format=LAST)
    rounded = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(pooler(nn.MaxPool2d(2))(rounded), F.max_pool2d(rounded, 2))
    for pool, is_operand in ((nn.MaxPool2d(2), True), (nn.AvgPool2d(2), False)):
        model = Pooled(pool, 32)
        told = between.laid_out(capture(model, True, 4, bare=True), model)
        assert [segment.of_operand for segment in told] == [
            False,
            True,
            is_operand,
        ]  # of `two`, then of `one`


# ------------------------------------------------------------------------------------------------------- where it isn't asked


def test_eager_where_nothing_fits(pooler, runs):
    """Other layouts, strides, types and dimensions, no elements, windows that don't fit: PyTorch's own call, with its errors."""
    pooled = pooler(nn.MaxPool2d(3, 2, 1))
    x = torch.randn(2, 8, 6, 10)
    last = x.contiguous(memory_format=LAST)
    others = [
        x,
        last[:, :4],
        last[:, :, ::2],
        last[:0],
        last.double(),
        last[0],
        last[:, :1],
        last[:, :, :1, :1],
    ]
    for other in (*others, last.to("meta"), last.double().requires_grad_()):
        y = pooled(other)
        assert y.stride() == F.max_pool2d(other, 3, 2, 1).stride()
        assert y.is_meta or torch.equal(y, F.max_pool2d(other, 3, 2, 1))
    assert not runs
    assert torch.equal(pooled(last), F.max_pool2d(x, 3, 2, 1)) and runs == [False]
    with pytest.raises(RuntimeError, match="Output size is too small"):
        pooling.Pooler(Pool(True, (7, 7), (1, 1), (0, 0), False))(last)
    with pytest.raises(RuntimeError, match="pad should be"):
        pooling.Pooler(Pool(False, (2, 2), (1, 1), (2, 2), False))(last)
    freed = last.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        pooled(freed)
    assert runs == [False]


def test_tracers_see_pytorchs_calls(runs):
    torch.manual_seed(0)
    model, x = Pooled(nn.MaxPool2d(2)).eval(), torch.randn(2, 3, 6, 10)
    fast = fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(fast)(x[None])[0], model(x), rtol=1e-2, atol=1e-2)
        assert not runs
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fast(x), model(x), rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    assert runs[-1:] == [False]


def test_who_changes_a_pool_is_heard(runs):
    """Settings, hooks."""
    torch.manual_seed(0)
    model, x = Pooled(nn.MaxPool2d(2)).eval(), torch.randn(2, 3, 6, 10)
    fast, seen = fuse(model), []
    with torch.no_grad():
        fast(x)
        fast.pool.kernel_size = 3
        torch.testing.assert_close(fast(x), copy.deepcopy(model)(x), rtol=1e-2, atol=1e-2)
        assert len(runs) == 2
        hook = fast.pool.register_forward_hook(lambda module, given, y: seen.append(y))
        torch.testing.assert_close(fast(x), copy.deepcopy(model)(x), rtol=1e-2, atol=1e-2)
        assert seen and len(runs) == 2
        hook.remove()
        fast(x)
    assert len(runs) == 3


def test_on_a_cpu_nothing_changes():
    model = Pooled(nn.MaxPool2d(2), 32)
    captured = capture(model, True, 4)
    assert captured.segments and not pooling.poolers(captured, model, captured.segments)


# ------------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_kernels_on_a_gpu(name, dtype):
    """As eager has them in planes; the largest to the bit."""
    torch.manual_seed(0)
    pooled = pooling.Pooler(POOLS[name])
    for N, C, H, W in [(2, 64, 32, 48), (3, 12, 17, 21), (2, 7, 24, 19), (1, 16, 13, 24)]:
        x = (
            image(N, C, H, W).to("cuda", dtype)
            if pooled.pool.is_largest
            else torch.randn(N, C, H, W, device="cuda").to(dtype)
        )
        last = x.contiguous(memory_format=LAST)
        if N == 1:  # at an address that isn't a multiple of 16 bytes
            last = (
                torch.cat([x.new_zeros(1), last.movedim(1, -1).flatten()])[1:].view(1, H, W, C).movedim(-1, 1)
            )
        y, wanted = pooled(last.requires_grad_()), pooled.pool.eager(x.double())
        assert y.grad_fn.name().startswith("pool_")
        dy = torch.randint(-3, 4, y.shape, device="cuda").to(dtype)
        (dx,) = torch.autograd.grad(y, last, dy)
        of_dx = gradients(pooled.pool, x, dy)
        if pooled.pool.is_largest:
            torch.testing.assert_close(y.double(), wanted, equal_nan=True, rtol=0, atol=0)
            torch.testing.assert_close(dx.double(), of_dx, rtol=0, atol=0)
            continue
        # Each of a window's sums rounds what there is so far, at most all magnitudes; then the result is rounded.
        sums = math.prod(pooled.pool.kernel) * EPSILON[torch.float32] / 2
        magnitudes = pooled.pool.eager(x.double().abs()), gradients(pooled.pool, x, dy.abs())
        for found, exact, most in zip((y, dx), (wanted, of_dx), magnitudes):
            assert ((found.double() - exact).abs() <= sums * most + EPSILON[dtype] * exact.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["forward", "train_dx"])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_right_on_a_gpu(dtype, pool, phase, monkeypatch):
    runs, forward = [], pooling.Plan.forward
    monkeypatch.setattr(
        pooling.Plan, "forward", lambda self, a, saving: (runs.append(a), forward(self, a, saving))[1]
    )
    assert not numerics.wrong_of(lambda: Pooled(pool, 64), (4, 3, 64, 48), phase, "cuda", dtype)
    assert runs or dtype == torch.float32  # what eager runs in float32 stays so
