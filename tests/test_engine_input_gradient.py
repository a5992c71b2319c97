"""x's gradient as a convolution of dz (grad/stream_input.cuh), in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import numerics
from inline_kernels import fuse
from inline_kernels.bench import checks
from inline_kernels.engine import costs, precision, schedule, stored
from inline_kernels.engine import gradients as own
from inline_kernels.engine.cases import Case
from own_gradients import TAILS, as_eager, gradients, ours, why  # noqa: F401
from test_emulated import INF, NAN, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, random_model  # noqa: F401
from test_kernels_compile import entries, needs_nvcc, nvcc


@pytest.fixture
def of_x(ours, monkeypatch):
    """of_x(tf32, by_views): on a GPU of capability 9.0, whose library is slower for x's gradient."""

    def become(tf32: bool = True, by_views: bool = True) -> list:
        monkeypatch.setattr(costs, "stream_views", lambda *_: 0.0 if by_views else 1e9)
        monkeypatch.setattr(costs, "library_input_gradient", lambda *_: 1e9)
        ran = ours(900, tf32)
        monkeypatch.setattr(own, "obstacle", lambda *_, **__: "not asked")
        return ran

    return become


# Padding, dilation, and more before than behind; volumes; channels in and out that fill no product; by views, and rows that the copy engine gathers.
STREAM_SIZES = [
    ((16, 3, 3, 3, 3), (4, 6, 9), {}, True),
    ((40, 8, 2, 3, 4), (3, 5, 8), {"padding": 1}, True),
    ((24, 3, 3, 3), (9, 70), {"dilation": 2, "padding": (1, 3)}, True),
    ((64, 9, 3, 2), (6, 31), {"padding": (2, 0)}, True),
    ((13, 5, 1, 4), (7, 12), {"padding": "same"}, True),
    ((200, 24, 3, 2, 2), (4, 5, 6), {"padding": (2, 1, 0)}, False),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "sizes, precision",
    [  # in turn in TF32 and in float32; every third in both
        (sizes, precision)
        for i, sizes in enumerate(STREAM_SIZES)
        for precision in (("tf32", "float32") if i % 3 == 1 else (("tf32", "float32")[i % 2],))
    ],
    ids=str,
)
def test_the_gradient_of_x_by_stream(sizes, precision, of_x):
    (filters, image, settings, by_views), tf32 = sizes, precision == "tf32"
    ran = of_x(tf32, by_views)
    torch.manual_seed(0)
    model = random_model(filters, TAILS["smooth"], **settings)
    x = numerics.random_input((3, filters[1], *image)).requires_grad_()
    assert_x_by_stream(model, x, ran, tf32=tf32)
    segment, arguments = given(model, x)
    request = own.requests(own.Ways(x=own.STREAM), segment, *arguments[:2])["input"]
    assert (request["defines"]["FOLDED"] == costs.VIEWS) == (by_views and (tf32 or filters[0] != 40))


@pytest.mark.parametrize("size", [(6, 20), (3, 5, 8)], ids=str)
def test_the_gradient_of_x_by_planes(size, of_x):
    """Of a filter of one tap, in 16 bits: dz is read as it lies."""
    ran = of_x(True, False)
    torch.manual_seed(0)
    model = random_model((24, 70, *[1] * len(size)), TAILS["smooth"]).to(torch.bfloat16)
    x = numerics.random_input((3, 70, *size), dtype=torch.bfloat16).requires_grad_()
    assert_x_by_stream(model, x, ran)
    segment, arguments = given(model, x)
    request = own.requests(own.Ways(x=own.STREAM), segment, *arguments[:2])["input"]
    assert request["defines"]["FOLDED"] == costs.PLANES


def assert_x_by_stream(model: nn.Module, x: torch.Tensor, ran: list, dy=None, tf32: bool = True) -> None:
    fast = fuse(copy.deepcopy(model))
    (plan,) = fast.plan(x)
    assert "x's gradient by a kernel of our own (" in plan.reason, plan
    found, eager = gradients(fast, x, dy), gradients(as_eager(model) if tf32 else model, x, dy)
    assert ran
    exact = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_(), dy)
    for name, value in found.items():
        error = checks.judged("", name, exact[name], eager[name], value, x.dtype)
        assert error.share <= 1, error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_gradient_of_x_by_stream_in_16_bits(dtype, of_x):
    ran = of_x()
    torch.manual_seed(0)
    model = random_model((24, 5, 2, 3, 3), lambda m, v: v * m.scale, padding=1).to(dtype)
    x = numerics.random_input((2, 5, 4, 6, 9), dtype=dtype).requires_grad_()
    assert_x_by_stream(model, x, ran)


def test_the_gradient_of_x_alone(of_x):
    """Of a frozen weight; and of a filter that x has no room for."""
    ran = of_x()
    model = random_model((16, 3, 2, 3, 3), TAILS["gates"])
    model.conv.weight.requires_grad_(False)
    x = numerics.random_input((2, 3, 4, 6, 9)).requires_grad_()
    (dx,) = torch.autograd.grad(fuse(model)(x).sum(), x)
    (exact,) = torch.autograd.grad(copy.deepcopy(model).double()(x.double()).sum(), x)
    assert ran
    torch.testing.assert_close(dx, exact, rtol=1e-3, atol=1e-3)


def test_dz_that_is_not_finite_or_of_any_magnitude(of_x):
    ran = of_x()
    torch.manual_seed(0)
    model = random_model((24, 6, 3, 3), lambda m, v: v + m.by_channel)
    x, dy = torch.randn(4, 6, 8, 20).requires_grad_(), torch.randn(4, 24, 6, 18)
    scale = torch.tensor([1e-12, 1e25, 1.0, 1.0]).view(-1, 1, 1, 1)
    dy[2], dy = 0.0, dy * scale
    assert_x_by_stream(model, x, ran, dy)
    dy[0, 3, 2, 5], dy[1, 4, 0, 0], dy[3, 7, 5, 17] = NAN, INF, -INF
    found = gradients(fuse(copy.deepcopy(model)), x, dy)["x"]
    exact = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_(), dy)["x"].float()
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf() * found.sgn(), exact.isinf() * exact.sgn())
    finite = exact.isfinite()
    assert 0 < finite.sum() < finite.numel()
    found, exact = ((t / scale)[finite] for t in (found, exact))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
@pytest.mark.parametrize("by_views", [True, False], ids=["views", "gathered"])
def test_channels_of_dz_that_are_small_beside_others(tf32, by_views, of_x):
    """As behind a norm with such a scale: with large filters they count as much. Half a float16 has no room for them under a scale that only the
    largest value needs."""
    ran = of_x(tf32, by_views)
    torch.manual_seed(0)
    model = random_model((16, 5, 3, 3), lambda m, v: v + m.by_channel)
    small = torch.where(torch.arange(16) % 2 == 0, 1.0, 1e-4).view(-1, 1, 1, 1)
    with torch.no_grad():
        model.conv.weight /= small
    x, dy = torch.randn(3, 5, 8, 20), torch.randn(3, 16, 6, 18) * small.view(1, -1, 1, 1)
    dy *= 0.005 / dy.abs().amax((1, 2, 3), keepdim=True)
    assert_x_by_stream(model, x.requires_grad_(), ran, dy, tf32=tf32)


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
@pytest.mark.parametrize("by_views", [True, False], ids=["views", "gathered"])
@pytest.mark.parametrize("channels", [16, 48])
def test_what_was_not_seen_of_dz(channels, by_views, tf32, of_x):
    """A scale is that of a part, of each channel one run of 64 positions in two here: all of the others is smaller, or zero, or they are far larger,
    and the sample is packed again."""
    ran = of_x(tf32, by_views)
    torch.manual_seed(0)
    model = random_model((channels, 5, 3, 3), lambda m, v: v + m.by_channel)
    x, dy = torch.randn(3, 5, 8, 20), torch.randn(3, channels, 6, 18)
    dy[0, 0, 5, 10] = 1e4  # channel 0 is looked at from its first position on, channel 1 from its 64th
    dy[1] = 0
    dy[1, 1, 0, 3] = 3.0
    assert_x_by_stream(model, x.requires_grad_(), ran, dy * 1e-6, tf32=tf32)


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_dz_as_small_as_can_be(tf32, of_x):
    """Filters may be large. TF32 itself has no number below 2^-136, so eager is no measure; operands have 11 digits."""
    ran = of_x(tf32)
    torch.manual_seed(0)
    model = random_model((16, 5, 3, 3), lambda m, v: v + m.by_channel)
    with torch.no_grad():
        model.conv.weight *= 2.0**15  # from 2^20 on sums are direct ones
    x, dy = torch.randn(1, 5, 8, 20).requires_grad_(), torch.full((1, 16, 6, 18), 2.0**-148)
    found = gradients(fuse(copy.deepcopy(model)), x, dy)["x"].double() * 2.0**133
    exact = gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_(), dy)["x"] * 2.0**133
    assert ran and (found - exact).norm() <= 2**-11 * exact.norm()


def test_the_settings_of_backward(of_x, monkeypatch):
    """They are asked for at each backward: forward's may have been others."""
    ran, asked = of_x(), []
    settings = ["first"]
    monkeypatch.setattr(schedule, "precision", lambda x: settings[0])
    planned = own.planned
    monkeypatch.setattr(own, "planned", lambda *given: asked.append(settings[0]) or planned(*given))
    fast, x = fuse(random_model((16, 3, 3, 3), TAILS["gates"])), torch.randn(2, 3, 7, 9)
    for settings[0] in ("first", "others", "first"):
        gradients(fast, x.requires_grad_())
    assert asked == ["first", "others"] and len(ran) == 3


def test_obstacles_of_stream(of_x, monkeypatch):
    of_x()

    def refused(x: torch.Tensor, *filters: int, **settings) -> str | None:
        return why(random_model(filters, TAILS["gates"], **settings), x, obstacle=own.stream_obstacle)

    x = torch.randn(2, 4, 9, 20)
    assert refused(x, 16, 4, 3, 2) is None
    assert "channels last" in refused(x.contiguous(memory_format=torch.channels_last), 16, 4, 3, 2)
    assert "stride" in refused(x, 16, 4, 3, 2, stride=2)
    assert "groups" in refused(x, 16, 4, 3, 2, groups=2)
    assert "zeros" in refused(x, 16, 4, 3, 2, padding=1, padding_mode="reflect")
    assert "more around it" in refused(x, 16, 4, 3, 2, padding=2)
    large = torch.empty(1, device="meta").expand(256, 1, 2900, 2900)
    assert "counted in int" in refused(large, 2, 1, 3, 2)
    monkeypatch.setattr(costs, "library_input_gradient", lambda *_: 0.0)
    assert refused(x, 16, 4, 3, 2) == "the library is faster at such sizes"


@pytest.mark.parametrize("number", [6, 7, 8, 23, 24, 27, 47, 48, 57, 65, 90, 92])
def test_problems_whose_gradient_of_x_is_ours(number, gpu, monkeypatch):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **_: given[2:3] != ("dw",))
    line = stored.describe(Case(*full_size(number), True, torch.float32))
    assert "x's gradient by a kernel of our own (" in line, line


@needs_nvcc
@pytest.mark.parametrize("number, kernel", [(8, "convolve_views_kernel"), (43, "convolve_stream_kernel")])
def test_nvcc_finds_room_for_the_gradient_of_x(number, kernel, tmp_path, gpu, monkeypatch):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    segment, arguments = full_size(number)
    asked = own.requests(own.Ways(x=own.STREAM), segment, *arguments[:2])["input"]
    (tmp_path / "own.cu").write_text(asked["source"])
    defines = [f"{k}={v}" for k, v in asked["defines"].items()]
    done = nvcc(tmp_path / "own.cu", "90a", defines, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = entries(done.stdout + done.stderr)
    assert {kernel, "turn_filters_kernel"} <= found.keys()
    assert not {name: each for name, each in found.items() if each.spilled > 8}
