"""The gradients of a convolution from dz that is packed once, behind any tail, in the emulation of a GPU, against float64."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import numerics
from inline_kernels import fuse
from inline_kernels.engine import costs, layouts, library, precision, stored
from inline_kernels.engine import gradients as own
from inline_kernels.engine.cases import Case
from own_gradients import DTYPES, TAILS, assert_rule, gradients, ours, ways, why  # noqa: F401
from test_emulated import INF, NAN, folder, gpu, guarded, pytestmark, remembers_nothing  # noqa: F401
from test_engine_direct import device, full_size, given, random_model  # noqa: F401
from test_kernels_compile import entries, needs_nvcc, nvcc

# (C, channels, kernel), the image: of channels that fill no block, several of them, rows of one strip and of more.
SIZES = [
    ((24, 5, 3, 2), (9, 70)),
    ((72, 24, 3, 3), (8, 21)),
    ((16, 70, 1, 4), (3, 140)),
    ((8, 17, 5, 5), (12, 12)),
]


@pytest.mark.parametrize("tail, architecture, dtype", ways(TAILS, ("norm", "mean")), ids=str)
def test_tails(tail, architecture, dtype, ours):
    """Each with one of the sizes; in 16 bits not those of which what eager rounds between operations is no measure."""
    filters, image = SIZES[([*TAILS].index(tail) + DTYPES.index(dtype)) % len(SIZES)]
    ran = ours(architecture)
    torch.manual_seed(0)
    model = random_model(filters, TAILS[tail]).to(dtype)
    assert_rule(model, numerics.random_input((3, filters[1], *image), dtype=dtype), ran)


# By wgmma on 9.0: those of 64 channels in at most; of rows that are a tile, and of several.
WITH_INPUT = [
    ((64, 24, 3, 3), (8, 21)),
    ((128, 5, 3, 2), (9, 70)),
    ((48, 17, 2, 5), (6, 128)),
    ((16, 70, 1, 4), (3, 140)),
    ((64, 24, 3, 5), (4, 130)),
]


@pytest.mark.parametrize("sizes, architecture, dtype", ways(WITH_INPUT), ids=str)
def test_with_the_gradient_of_x(sizes, architecture, dtype, ours):
    filters, image = sizes
    ran = ours(architecture)
    torch.manual_seed(0)
    model = random_model(filters, TAILS["smooth"]).to(
        dtype
    )  # 16 bits open and close other gates than float64
    x = numerics.random_input((3, filters[1], *image), dtype=dtype)
    if dtype == torch.float32:
        x *= torch.tensor([1e-9, 1.0, 1e4]).view(-1, 1, 1, 1)
    assert_rule(model, x.requires_grad_(), ran)


# (C, channels, kernel), the image, padding: of volumes several planes of a filter side by side, or one, or fewer than there is room for.
AROUND = [
    ((24, 20, 3, 3, 2), (4, 6, 20), 1),
    ((72, 24, 2, 3, 3), (3, 5, 66), (0, 1, 2)),
    ((16, 70, 2, 1, 4), (2, 3, 140), 0),
    ((8, 9, 4, 3, 1), (5, 4, 9), (2, 1, 0)),
    ((24, 17, 3, 5), (9, 30), (2, 1)),
]


@pytest.mark.parametrize("sizes, architecture, dtype", ways(AROUND), ids=str)
def test_volumes_and_zeros_around_x(sizes, architecture, dtype, ours):
    """Of volumes beside x's gradient, too, which takes dz in planes."""
    filters, image, padding = sizes
    ran = ours(architecture)
    for dx in (False, True)[: len(image) - 1]:
        torch.manual_seed(0)
        model = random_model(filters, lambda m, v: torch.tanh(v) * 2, padding=padding).to(dtype)
        x = numerics.random_input((3, filters[1], *image), dtype=dtype)
        if dtype == torch.float32:
            x *= torch.tensor([1e-9, 1.0, 1e4]).view(-1, *[1] * (len(image) + 1))
        ran.clear()
        assert_rule(model, x.requires_grad_(dx), ran)


# Lines, of short rows: planes that end in a step's first 16 positions and in later ones, or are few; that one step's taps meet, and two's.
LINES = [
    ((72, 24, 3, 3), (14, 14), 1),
    ((8, 17, 3, 3), (7, 7), 1),
    ((24, 70, 3, 3), (6, 36), (1, 1)),
    ((16, 9, 2, 3), (5, 48), (0, 1)),
    ((80, 65, 1, 1), (9, 13), 0),
    ((8, 20, 3, 3, 3), (3, 5, 12), 1),
]


@pytest.mark.parametrize(
    "sizes, dtype, last",
    [  # each size in both types, in turn in planes and channels last; the first in all
        (sizes, dtype, last)
        for i, sizes in enumerate(LINES)
        for j, dtype in enumerate([torch.float32, torch.bfloat16])
        for last in ((False, True) if i == 0 else ((i + j) % 2 == 0,))
    ],
    ids=str,
)
def test_lines(sizes, dtype, last, ours):
    filters, image, padding = sizes
    ran = ours()
    torch.manual_seed(0)
    model = random_model(filters, lambda m, v: torch.tanh(v) * 2, padding=padding).to(dtype)
    x = numerics.random_input((5, filters[1], *image), dtype=dtype)
    if dtype == torch.float32:
        x *= torch.tensor([1e-9, 1.0, 1e4, 0.0, 1.0]).view(-1, *[1] * (len(image) + 1))
    assert_rule(model, lying(model, x, *["x"] * last), ran)


def lying(model: torch.nn.Module, x: torch.Tensor, *what: str) -> torch.Tensor:
    """x; it, the filters, or both, are channels last then."""
    layout = library.channels_last(x)
    if "filters" in what:
        model.conv.weight.data = model.conv.weight.data.contiguous(memory_format=layout)
    return x.contiguous(memory_format=layout) if "x" in what else x


LAST = {"x": ("x",), "filters": ("filters",), "all": ("x", "filters")}


@pytest.mark.parametrize("what", LAST)
@pytest.mark.parametrize("sizes, architecture, dtype", ways(AROUND[4:]), ids=str)
def test_channels_last(sizes, architecture, dtype, what, ours):
    """Each as it lies; dz lies as eager's result, channels last, and the weight's gradient as the weight does."""
    filters, image, padding = sizes
    ran = ours(architecture)
    for dx in (False, True):
        torch.manual_seed(0)
        model = random_model(filters, lambda m, v: torch.tanh(v) * 2, padding=padding).to(dtype)
        x = numerics.random_input((3, filters[1], *image), dtype=dtype)
        if dtype == torch.float32:
            x *= torch.tensor([1e-9, 1.0, 1e4]).view(-1, *[1] * (len(image) + 1))
        x = lying(model, x, *LAST[what]).requires_grad_(dx)
        ran.clear()
        assert_rule(model, x, ran)
        assert library.is_channels_last(gradients(fuse(model), x)["conv.weight"]) == ("filters" in LAST[what])


@pytest.mark.parametrize(
    "sizes, what, dx",
    [  # each size with two of them
        (sizes, *each)
        for i, sizes in enumerate(AROUND)
        for j, each in enumerate([([], False), ([], True), (["x"], False)])
        if (i + j) % 3
    ],
    ids=str,
)
def test_in_float32(sizes, what, dx, ours):
    """Where eager doesn't run TF32 an operand is two float16. dz doesn't hang on how v was rounded."""
    filters, image, padding = sizes
    ran = ours(900, False)
    torch.manual_seed(0)
    model = random_model(filters, lambda m, v: v * m.by_channel, padding=padding)
    x = numerics.random_input((3, filters[1], *image))
    x *= torch.tensor([1e-9, 1.0, 1e4]).view(-1, *[1] * (len(image) + 1))
    assert_rule(model, lying(model, x, *what).requires_grad_(dx), ran, tf32=False)


@pytest.mark.parametrize("last", [False, True], ids=["planes", "last"])
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
@pytest.mark.parametrize("architecture", [800, 900])
def test_magnitudes_of_dz_that_is_packed(architecture, tf32, last, ours):
    """As test_magnitudes, of what is packed where it is needed."""
    ran = ours(architecture, tf32)
    torch.manual_seed(0)
    model = random_model((16, 9, 2, 3, 2), lambda m, v: v * m.by_channel)
    x, dy = numerics.random_input((4, 9, 3, 6, 40)), torch.randn(4, 16, 2, 4, 39)
    dy *= torch.tensor([1e-12, 1.0, 3e7, 0.0]).view(-1, 1, 1, 1, 1)
    dy[1, 5, 1, 2, 20] = 1e6  # beyond what is seen
    x = lying(model, x, *["x"] * last).requires_grad_()
    assert_rule(model, x, ran, dy, tf32)


@pytest.mark.parametrize("architecture", [800, 900])
@pytest.mark.parametrize("of", ["x", "dy", "both", "beyond what is seen"])
def test_magnitudes(of, architecture, ours):
    """Samples of magnitudes far apart, in x, in dz, or in both, so that they make up for each other; and one value of a sample that is much larger
    than all that its scale was guessed from: it is packed again."""
    ran = ours(architecture)
    torch.manual_seed(0)
    model = random_model((16, 9, 3, 2), TAILS["gates"])
    x, dy = numerics.random_input((4, 9, 20, 40)), torch.randn(4, 16, 18, 39)
    far = torch.tensor([1e-12, 1.0, 3e7, 0.0]).view(-1, 1, 1, 1)
    with torch.no_grad():
        model.conv.bias.abs_().add_(1)  # of samples of zeros, too, gradients pass
        if of in ("x", "both"):
            x *= far
        if of in ("dy", "both"):
            dy *= far.flip(0) if of == "both" else far
        if of == "beyond what is seen":
            dy[1, 5, 9, 20], dy[2] = 1e6, 0.0
            dy[2, :, 9, 20] = 1e-30
    assert_rule(model, x, ran, dy)


def test_nothing_but_zeros_and_an_infinity(ours):
    ours()
    model = random_model((16, 6, 1, 2), lambda m, v: v + m.by_channel)
    x, dy = torch.zeros(2, 6, 3, 9), torch.zeros(2, 16, 3, 8)
    found = gradients(fuse(copy.deepcopy(model)), x, dy)["conv.weight"]
    assert torch.equal(found, torch.zeros_like(found))
    x[0], dy[0] = 1.0, 0.0
    x[1, 3], dy[1, 5] = INF, 2.0**-20
    found = gradients(fuse(copy.deepcopy(model)), x, dy)["conv.weight"]
    assert found[5, 3].eq(INF).all() and found[:5, :3].eq(0).all() and found[0, 3].isnan().all()


@pytest.mark.parametrize("last", [False, True], ids=["planes", "last"])
@pytest.mark.parametrize("architecture", [800, 900])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("width", [70, 31], ids=["rows", "lines"])
@pytest.mark.parametrize("of_x", [True, False], ids=["x", "dz"])
def test_special_values(of_x, width, padding, architecture, last, ours):
    """At the start of a row, in its middle, and where it ends for one tap and goes on for others; and where the plane does: they spoil what they
    spoil in eager."""
    ran = ours(architecture)
    torch.manual_seed(0)
    model = random_model((16, 6, 3, 3), lambda m, v: v + m.by_channel, padding=padding)
    x, dy = torch.randn(3, 6, 8 - 2 * padding, width - 2 * padding), torch.randn(3, 16, 6, width - 2)
    spoilt = x if of_x else dy
    end = spoilt.shape[3] - 1
    for i, (at, value) in enumerate(
        [(0, NAN), (width // 2, -INF), (end, INF), (end - 1, INF), (end - 2, -INF)]
    ):
        spoilt[i % 3, i, 4 if i < 3 else -1, at] = value
    spoilt[0, 5, 0, 0] = NAN  # the first of all
    if of_x:  # where a line's zeros are, for the taps' first row
        spoilt[2, 5, 6 - padding, 1 - padding] = INF
    x = lying(model, x, *["x"] * last)
    found = gradients(fuse(copy.deepcopy(model)), x, dy)["conv.weight"]
    exact = gradients(copy.deepcopy(model).double(), x.double(), dy)["conv.weight"]

    def kinds(t: torch.Tensor) -> torch.Tensor:
        return torch.where(t.isnan(), 2, t.sgn() * t.isinf())

    assert ran and torch.equal(kinds(found), kinds(exact))
    assert kinds(exact).unique().numel() == 4
    finite = exact.isfinite()
    torch.testing.assert_close(found[finite].double(), exact[finite], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("of_x", [True, False], ids=["x", "dz"])
@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_an_infinity_spoils_its_own_channel(of_x, tf32, ours):
    """And not those of finite values that are larger than what its sample's scale was guessed from."""
    ran = ours(900, tf32)
    torch.manual_seed(0)
    model = random_model((16, 9, 2, 3, 3), lambda m, v: v * m.by_channel)
    x, dy = torch.randn(2, 9, 3, 6, 20), torch.randn(2, 16, 2, 4, 18)
    spoilt = x if of_x else dy
    spoilt[:, 2] *= 100
    spoilt[0, 7, 1, 3, 17], spoilt[0, 5, 0, 0, 0] = 1e3, INF
    found = gradients(fuse(model), x.requires_grad_(), dy)["conv.weight"]
    assert ran
    own = found.isfinite().all(dim=(0, 2, 3, 4) if of_x else (1, 2, 3, 4))
    assert not own[5] and own.sum() == len(own) - 1


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_products_that_are_smaller_than_any_number(tf32, ours):
    ours(900, tf32)
    torch.manual_seed(0)
    model = random_model((16, 9, 2, 3, 3), lambda m, v: v * m.by_channel)
    x, dy = torch.randn(2, 9, 3, 6, 20) * 1e-36, torch.randn(2, 16, 2, 4, 18) * 1e-36
    found = gradients(fuse(model), x.requires_grad_(), dy)["conv.weight"]
    assert torch.equal(found, torch.zeros_like(found))


def test_bitwise_repeatable(ours):
    ours()
    model, x = random_model((16, 9, 3, 2), TAILS["smooth"]), numerics.random_input((5, 9, 9, 70))
    fast = fuse(model)
    first = gradients(fast, x)
    numerics.assert_equal(gradients(fast, x), first)


# -------------------------------------------------------------------------------------------------------------------- who runs


@pytest.mark.parametrize("channels", [(24, 9), (40, 36)], ids=["planes", "last"])
@pytest.mark.parametrize("tail", ["v", "mish"])
def test_where_the_library_gives_that_of_x(channels, tail, ours, monkeypatch):
    """Of the same dz ours give the weight's, in whichever layout a pass has written it, and nobody turns x."""
    ran, asked, backward = ours(), [], library.convolve_backward
    monkeypatch.setattr(
        library, "convolve_backward", lambda *given: asked.append(given[4]) or backward(*given)
    )
    turned = []
    channels_last = layouts.Turns.channels_last
    monkeypatch.setattr(
        layouts.Turns,
        "channels_last",
        lambda self, like, *given: turned.append([*like.shape]) or channels_last(self, like, *given),
    )
    tails = {"v": lambda m, v: v + m.by_channel, "mish": lambda m, v: torch.nn.functional.mish(v)}
    model = random_model((*channels, 3, 2), tails[tail])
    x = numerics.random_input((2, channels[1], 9, 20)).requires_grad_()
    y = fuse(model)(x)
    turned.clear()
    dx, dw = torch.autograd.grad(y, (x, model.conv.weight), torch.ones_like(y))
    assert ran == [1] and asked == [(True, False)] and [*x.shape] not in turned
    exact = torch.autograd.grad(model(x).sum(), (x, model.conv.weight))
    torch.testing.assert_close((dx, dw), exact, rtol=1e-3, atol=1e-2)


def test_dz_that_is_rounded(ours, monkeypatch):
    """The library's gradient of x is in TF32, and eager's of the weight in float32: of such a dz ours would have lost digits."""
    ran = ours()
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **_: given[2:3] == ("dx",))
    torch.manual_seed(0)
    model = random_model((40, 36, 3, 2), lambda m, v: torch.nn.functional.mish(v))
    x = numerics.random_input((2, 36, 9, 20)).requires_grad_()
    found = gradients(fuse(model), x)["conv.weight"]
    torch.testing.assert_close(found, gradients(model, x)["conv.weight"], rtol=1e-4, atol=1e-4)
    assert not ran
    gradients(fuse(model), x.detach())
    assert ran


def test_obstacles(ours, monkeypatch):
    ours()
    model, x = random_model((16, 9, 3, 2), TAILS["gates"]), torch.randn(2, 9, 9, 20)
    assert why(model, x) is None
    assert "channels last" in why(model, x.contiguous(memory_format=torch.channels_last))
    assert "multiple of 8" in why(random_model((20, 9, 3, 2), TAILS["gates"]), x)
    padded = random_model((16, 9, 3, 2), TAILS["gates"], padding=1)
    assert why(padded, x) is None and "padding" in why(padded, x, True)
    assert "stride" in why(random_model((16, 9, 3, 2), TAILS["gates"], stride=2), x)
    assert "behind" in why(random_model((16, 9, 3, 2), TAILS["gates"], padding="same"), x)
    large = torch.empty(1, 9, 2**15, 2**14 + 2, device="meta")  # two units a pixel
    assert "counted" in why(model, large) and "counted" not in (why(model, large[..., 2:]) or "")
    assert "stride" in why(random_model((18, 9, 3, 2), TAILS["gates"], groups=9), x)
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **_: given[2:3] != ("dw",))
    assert why(model, x) == "eager runs float32"
    assert why(model.half(), x.half()) is None
    assert "16, 32 or 48" in why(random_model((24, 9, 3, 2), TAILS["gates"]).half(), x.half(), True)
    large = torch.randn(2, 9, 14, 20).half()
    assert "window" in why(random_model((16, 9, 12, 9), TAILS["gates"]).half(), large, True)
    assert "nothing" in why(random_model((16, 9, 12, 9), TAILS["gates"]).half(), x.half())
    monkeypatch.setattr(costs, "weight_gradient", lambda *_: (2.0, 2.0))
    assert why(model, x) == "the library is faster at such sizes"
    ours(700)
    assert "compute capability" in why(model, x)


def test_eager_is_asked_for_its_own_padding(ours, monkeypatch):
    ours()
    asked = []
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **_: asked.append(given[2:]) or True)
    for padding in ((1, 0), (0, 0)):
        assert (
            why(random_model((16, 9, 3, 2), TAILS["gates"], padding=padding), torch.randn(2, 9, 9, 20))
            is None
        )
    assert [(of, settings.padding) for of, settings in asked] == [("dw", (1, 0)), ("dw", (0, 0))]


def test_the_faster_of_ours(ours, monkeypatch):
    """Where eager runs TF32 both can: the expected times decide."""
    ours()
    segment, arguments = given(random_model((16, 9, 3, 2), TAILS["gates"]), torch.randn(2, 9, 9, 20))
    for faster, found in ((0.5, own.FEW), (1.5, own.PACKED), (2.0, own.PACKED)):
        monkeypatch.setattr(costs, "few_weights_gradient", lambda *_, faster=faster: (faster, 2.0))
        assert own.fastest(segment, *arguments[:2], False, True, in_units=True) == (None, found)
    assert own.fastest(segment, *arguments[:2], False, True, in_units=False) == (None, own.PACKS)


@pytest.mark.parametrize(
    "channels, extent, cut",
    [(64, 56, None), (128, 28, 1), (256, 14, 1), (512, 7, 1), (64, 256, None), (256, 64, None), (128, 48, 2)],
)
def test_networks_at_their_full_sizes(channels, extent, cut, gpu, monkeypatch):  # noqa: F811
    """All channels last. In TF32 the expected times say ours, by lines where rows are short; of one tap, and in 16 bits, the library."""
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)

    def found(taps: int, dtype: torch.dtype) -> own.Ways:
        model = random_model((8, 8, taps, taps), TAILS["gates"], padding=taps // 2)
        segment, _ = given(model, torch.randn(2, 8, 9, 9))
        x = torch.empty(32, channels, extent, extent, device="meta", dtype=dtype)
        weight = torch.empty(channels, channels, taps, taps, device="meta", dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        if taps == 3 and dtype == torch.float32:
            (asked,) = own.requests(own.Ways(None, own.PACKS), segment, x, weight, True).values()
            assert ("grad::Rows" if cut is None else f"grad::Lines<{cut}>") in asked["source"]
            assert asked["source"].count("grad::Lies::kLast") == 2
        for dx in (False, True):
            ways = own.fastest(segment, x, weight, dx, True, in_units=False, last=True)
        return ways

    # Of 512 channels at 7 x 7 sums are merged for too long.
    assert found(3, torch.float32) == (None, own.PACKS if extent > 7 else None)
    assert found(1, torch.float32) == found(3, torch.bfloat16) == (None, None)


@pytest.mark.parametrize("number", [1, 4, 17, 32, 35, 46, 52, 54])
def test_problems_at_their_full_sizes(number, gpu, monkeypatch):  # noqa: F811
    """plan says that ours runs, and the times expected; and dz has half of its bytes."""
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    case = Case(*full_size(number), True, torch.float32)
    line = stored.describe(case)
    assert "the gradients of weight and x by kernels of our own (" in line, line


@pytest.mark.parametrize("number", [43, 47])
def test_volumes_at_their_full_sizes(number, gpu, monkeypatch):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: True)
    segment, arguments = full_size(number)
    line = stored.describe(Case(segment, arguments, True, torch.float32))
    assert "the weight's gradient by a kernel of our own (" in line, line
    for dx, found in ((False, (None, own.PACKED)), (True, (own.STREAM, own.PACKS))):
        assert own.fastest(segment, *arguments[:2], dx, True, in_units=True) == found


def test_sizes_are_the_kernels(ours, monkeypatch):
    """Where Python's and the kernel's differ the launcher says so."""
    ours()
    monkeypatch.setattr(own, "size", lambda *given: 8 + 2 * given[1] * given[2] * given[0])
    with pytest.raises(AssertionError, match="g in units"):
        gradients(fuse(random_model((16, 9, 3, 2), TAILS["gates"])), torch.randn(2, 9, 9, 20))


@needs_nvcc
@pytest.mark.parametrize("architecture, dtype", [("80", "bfloat16_t"), ("90a", "float")])
@pytest.mark.parametrize(
    "number, by, tf32, last",
    [(1, own.PACKED, True, 0), (43, own.PACKS, True, 0), (43, own.PACKS, False, 0), (43, own.PACKS, True, 1)],
    ids=["images", "volumes", "float32", "lines"],
)
def test_nvcc_finds_room(number, by, tf32, last, architecture, dtype, tmp_path, gpu, monkeypatch):  # noqa: F811
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: tf32 or dtype != "float")
    segment, arguments = full_size(number)
    found, ways = {}, own.Ways(by if by == own.PACKED else None, by)
    if last:  # and of short rows
        arguments[0] = torch.empty(4, 32, 9, 32, 32, device="meta", memory_format=torch.channels_last_3d)
    for asked in own.requests(ways, segment, *arguments[:2], bool(last)).values():
        defines = asked["defines"] | {
            "VALUE_T": dtype,
            "OUTPUT_T": dtype,
            "CAPABILITY": int(architecture[:2]),
        }
        assert not last or "grad::Lines<1>" in asked["source"]
        if architecture == "80":  # which has none
            asked["source"] = re.sub(r"grad::Lines<\d>", "grad::Rows", asked["source"])
        (tmp_path / "own.cu").write_text(asked["source"])
        done = nvcc(
            tmp_path / "own.cu", architecture, [f"{k}={v}" for k, v in defines.items()], tmp_path / "out"
        )
        assert done.returncode == 0, done.stderr
        found |= entries(done.stdout + done.stderr)
    own_kernels = ["convolve_rows_kernel" if architecture == "90a" else "convolve_kernel"] * bool(ways.x)
    assert {"packed_weight_kernel", "merge_packed_kernel", *own_kernels} <= found.keys()
    assert not {name: each for name, each in found.items() if each.spilled > 8}


def test_times_that_are_expected(gpu):  # noqa: F811
    """Of problem 1 on an H200 ours are less than half; in 16 bits, and of small ones, the library's are less."""
    gpu(architecture=900, multiprocessors=132)
    segment, (x, weight, *_) = full_size(1)
    for dx in (False, True):
        ours, library = own.expected(segment, x, weight, dx)
        assert 700 < ours < library / 2 < 3000
    of_16_bits = [torch.empty(t.shape, dtype=torch.bfloat16, device="meta") for t in (x, weight)]
    ours, library = own.expected(segment, *of_16_bits, False)
    assert ours > library
    few = torch.empty(1, 64, 16, 16, device="meta"), torch.empty(128, 64, 3, 3, device="meta")
    ours, library = own.expected(segment, *few, False)
    assert ours > library
