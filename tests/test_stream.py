"""The mainloop kernels/conv/stream.cuh: a convolution alone, in the emulation of a GPU, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from inline_kernels.engine import costs
from test_emulated import Emulated, folder, library_of, pytestmark  # noqa: F401

INF, NAN = float("inf"), float("nan")
SOURCE = """
#include "conv/taps.cuh"
EXPORT void forward(Out<output_t> y, In<value_t> x, In<value_t> weight, int64_t stride, int64_t before, int64_t behind,
                    int64_t dilation, cudaStream_t stream) {
  const int s = stride, b = before, e = behind, d = dilation;
#ifdef KERNEL_D
  using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;
  const conv::Walk walk{{s, s, s}, {b, b, b}, {e, e, e}, {d, d, d}};
#else
  using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
  const conv::Walk walk{{1, s, s}, {0, b, b}, {0, e, e}, {1, d, d}};
#endif
  using Operands = conv::Operands<value_t, SPLIT>;
#if BY_TAPS
  conv::by_taps<Filter, Operands, COLUMNS, 1, LEAD, SHARED_LIMIT, X_LAST, Y_LAST, false>(
      x, weight, walk, stream, conv::Stored{y, conv::Identity{}});
#elif X_LAST == Y_LAST || FOLDED <= 0
  conv::streamed<Filter, Operands, COLUMNS, 1, LEAD, SHARED_LIMIT, X_LAST, FOLDED, Y_LAST, false, conv::Unpooled,
                 SHARES>(x, weight, walk, stream, conv::Stored{y, conv::Identity{}});
#else
  const Scratch<uint32_t> largest(x.size(0), stream);
  conv::stream<Filter, Operands, COLUMNS, 1, LEAD, SHARED_LIMIT, X_LAST, FOLDED>(
      x, weight, walk, conv::Identity{}, store::Positions<output_t, Y_LAST>{y}, conv::NoSink{}, largest, stream,
      [](const conv::Doubts&) {});
#endif
}
"""
# Windows of v; v twice, with a tail that reads where its result lies; sums over sixteens of channels, and over a warp's positions.
SINKS = """
#include "conv/stream.cuh"
#include "reduce/stream.cuh"
using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;
using Operands = conv::Operands<value_t, SPLIT>;
constexpr conv::Walk kWalk{{1, 1, 1}, {0, 2, 2}, {0, 2, 2}, {1, 1, 1}};
struct Shifted {
  struct Channel {
    int c;
  };
  __device__ Channel channel(int64_t, int c) const { return {c}; }
  __device__ float before(float v, const Channel& channel) const { return v + channel.c; }
  __device__ float after(float pooled, const Channel& channel) const { return 2.f * pooled + channel.c; }
};
struct Plus : conv::Identity {
  using ReadsPlaces = void;
  const value_t* added;
  __device__ float operator()(float v, const Channel&, int64_t at) const { return v + float(added[at]); }
};
EXPORT void pooled(Out<output_t> y, In<value_t> x, In<value_t> weight, cudaStream_t stream) {
  conv::streamed<Filter, Operands, COLUMNS, 1, 2, SHARED_LIMIT, false, 1, false, false, pool::Windows<pool::Largest, 2, 3>>(
      x, weight, kWalk, stream, conv::Stored{y, Shifted{}});
}
EXPORT void twice(Out<output_t> y, Out<output_t> more, In<value_t> x, In<value_t> weight, In<value_t> added,
                  cudaStream_t stream) {
  Plus plus;
  plus.added = added;
  conv::streamed<Filter, Operands, COLUMNS, 1, 2, SHARED_LIMIT, false, 1, false, false>(
      x, weight, kWalk, stream, conv::Stored{y, plus}, conv::Stored{more, conv::Identity{}});
}
template <class To> void sum_to(const To& to, In<value_t> x, In<value_t> weight, cudaStream_t stream) {
  const Scratch<uint32_t> largest(x.size(0), stream);
  conv::stream<Filter, Operands, COLUMNS, 1, 2, SHARED_LIMIT, false, 1>(
      x, weight, kWalk, conv::Identity{}, to, conv::NoSink{}, largest, stream, [](const conv::Doubts&) {});
}
EXPORT void over_channels(Out<output_t> partial, In<value_t> x, In<value_t> weight, cudaStream_t stream) {
  sum_to(reduce::StreamChannels<reduce::Sum>{partial.data}, x, weight, stream);
}
EXPORT int64_t parts(int64_t positions) {
  return conv::stream_parts(positions, conv::stream_columns<Filter, true>(COLUMNS));
}
EXPORT void over_positions(Out<double> partial, In<value_t> x, In<value_t> weight, cudaStream_t stream) {
  sum_to(reduce::StreamPositions<reduce::OfSums>{partial.data, int(partial.size(2))}, x, weight, stream);
}
"""
TYPES = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}
# Filters; images; columns of a tile; stride, padding before and behind, dilation. Tiles that end inside samples, and of several of them;
# positions that are no multiple of anything; channels that fill no group and no block; both kinds of blocks; a step of one, two and four taps;
# volumes; rows of which a copy has one pixel or several, with padding, with a stride.
CASES = [
    ((136, 72, 3, 3), (3, 9, 7), 128, (1, 1, 1, 1)),
    ((128, 64, 1, 1), (2, 5, 13), 192, (1, 0, 0, 1)),
    ((40, 24, 2, 3), (5, 8, 6), 256, (2, 0, 1, 1)),
    ((130, 17, 3, 2), (2, 11, 9), 128, (1, 2, 2, 2)),
    ((64, 130, 1, 3), (7, 1, 3), 128, (1, 1, 1, 1)),
    ((40, 8, 3, 3), (3, 9, 7), 128, (1, 1, 1, 1)),
    ((64, 8, 3, 2, 3), (2, 5, 6, 7), 128, (1, 1, 0, 1)),
    ((136, 32, 2, 3, 1), (3, 5, 4, 6), 192, (2, 1, 1, 1)),
    ((24, 72, 2, 1, 2), (2, 4, 5, 3), 128, (1, 0, 1, 2)),
    ((24, 3, 2, 7), (2, 9, 11), 192, (2, 3, 2, 1)),
    ((40, 13, 2, 3, 3), (2, 4, 5, 3), 128, (1, 1, 2, 1)),
    ((40, 8, 3, 3), (2, 9, 7), 128, (1, 1, 1, 2)),
    ((72, 136, 1, 1), (3, 9, 6), 128, (2, 0, 0, 1)),
    ((24, 20, 1, 1, 1), (2, 5, 4, 7), 128, (3, 0, 0, 1)),
    ((40, 40, 1, 1), (2, 9, 7), 128, (2, 1, 0, 1)),
]


def convolved(x, weight, settings):
    stride, before, behind, dilation = settings
    nd = x.dim() - 2
    convolution = F.conv2d if nd == 2 else F.conv3d
    return convolution(F.pad(x, (before, behind) * nd), weight, stride=stride, dilation=dilation)


@pytest.fixture
def stream(folder):  # noqa: F811
    """stream(x, weight, columns, settings, x is channels last, y is): what the kernel writes."""

    def run(
        x,
        weight,
        columns,
        settings,
        x_last=False,
        y_last=False,
        result=None,
        lead=2,
        split=False,
        views=False,
        shared=227 << 10,
        shares=1,
        by_taps=False,
        capability=90,
        planes=False,
    ):
        axes = "DHW"[5 - weight.dim() :]
        dims = dict(zip(("CHANNELS_OUT", "CHANNELS_IN", *(f"KERNEL_{axis}" for axis in axes)), weight.shape))
        result = result or x.dtype
        defines = dims | {"COLUMNS": columns, "X_LAST": int(x_last), "Y_LAST": int(y_last), "LEAD": lead}
        defines |= {"SHARED_LIMIT": shared, "SHARES": shares, "BY_TAPS": int(by_taps)}
        defines |= {"SPLIT": int(split), "CAPABILITY": capability}
        packs = not x_last or x.dtype == torch.float32 or x.shape[1] % 8
        folded = costs.stream_folded(weight.shape, settings[-1], packs, split)
        defines["FOLDED"] = costs.PLANES if planes else costs.VIEWS if views else folded
        defines |= {"VALUE_T": TYPES[x.dtype], "OUTPUT_T": TYPES[result]}
        kernels = Emulated(SOURCE, library_of(SOURCE, capability * 10, defines, (), folder))
        kernels.library.emulation_device(2, 227 << 10)
        shape = convolved(x.float(), weight.float(), settings).shape
        y = torch.full(shape, NAN, dtype=result)
        of_y = y.movedim(1, -1).contiguous() if y_last else y
        given = x.movedim(1, -1).contiguous() if x_last else x
        kernels.forward(of_y, given, weight, *settings)
        return of_y.movedim(-1, 1) if y_last else of_y

    return run


def assert_close(y, x, weight, settings, split=False):
    """Operands have 11 digits, or 8, or, split, 22, and sums those of float32."""
    exact = convolved(x.double(), weight.double(), settings)
    digits = 22 if split else 8 if torch.bfloat16 in (x.dtype, y.dtype) else 11
    bound = convolved(x.double().abs(), weight.double().abs(), settings) * 2.0 ** (2 - digits)
    assert ((y.double() - exact).abs() <= bound).all()


def drawn(filters, image, dtype):
    torch.manual_seed(0)
    N, *size = image
    return torch.randn(N, filters[1], *size).to(dtype), torch.randn(filters).to(dtype)


@pytest.mark.parametrize(
    "case, dtype, lead",
    [(case, torch.float32, case % 2 * 2) for case in range(len(CASES))]
    + [(case, torch.bfloat16, 2 - case % 2 * 2) for case in (1, 4, 6, 7, 9, 10)],
    ids=str,
)
def test_sizes(case, dtype, lead, stream):
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, dtype)
    assert_close(stream(x, weight, columns, settings, lead=lead), x, weight, settings)


@pytest.mark.parametrize(
    "filters, image, columns, settings", [CASES[1], CASES[3], CASES[7], CASES[9]], ids=str
)
def test_split(filters, image, columns, settings, stream):
    """float32's digits; and an infinity stays where it is."""
    x, weight = drawn(filters, image, torch.float32)
    x[1] *= 1e-30
    assert_close(stream(x, weight, columns, settings, split=True), x, weight, settings, split=True)
    x[0].view(-1)[5] = INF
    y, eager = stream(x, weight, columns, settings, split=True), convolved(x, weight, settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())
    finite = eager.isfinite()
    torch.testing.assert_close(y[finite], eager[finite], rtol=1e-5, atol=1e-4)


# Planes that end inside of tiles, and of which one has several; channels that fill no group, and no block; a volume.
@pytest.mark.parametrize(
    "filters, image, columns, shares, dtype",
    [
        ((136, 72, 1, 1), (3, 8, 9), 128, 1, torch.bfloat16),
        ((40, 128, 1, 1), (2, 10, 52), 192, 1, torch.float16),
        ((256, 100, 1, 1), (3, 4, 10), 256, 1, torch.bfloat16),
        ((130, 136, 1, 1), (1, 24, 31), 128, 2, torch.float16),
        ((64, 20, 1, 1, 1), (3, 5, 8, 9), 192, 1, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("y_last", [False, True])
def test_planes(filters, image, columns, shares, dtype, y_last, stream):
    """x in planes of 16 bits as it lies; infinities and NaN stay where they are."""
    settings = (1, 0, 0, 1)
    x, weight = drawn(filters, image, dtype)
    given = {"planes": True, "shares": shares, "y_last": y_last}
    assert_close(stream(x, weight, columns, settings, **given), x, weight, settings)
    x[0].view(-1)[[5, 60]] = torch.tensor([INF, NAN], dtype=dtype)
    y, eager = stream(x, weight, columns, settings, **given), convolved(x.float(), weight.float(), settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())


@pytest.mark.parametrize(
    "filters, image, dtype",
    [
        ((64, 33, 3, 3), (2, 7, 9), torch.bfloat16),
        ((40, 136, 1, 2), (3, 8, 8), torch.float16),
        ((72, 260, 1, 1), (2, 9, 15), torch.bfloat16),
        ((24, 50, 2, 2, 2), (2, 3, 5, 6), torch.float16),
        ((12, 34, 1, 1), (2, 5, 9), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", [80, 90])
def test_packed_by_matrices(filters, image, dtype, capability, stream):
    """16 bits in planes: channels that fill no eight and no tile, positions that fill neither; so with results."""
    settings = (1, 0, 0, 1)
    x, weight = drawn(filters, image, dtype)
    given = {"capability": capability, "y_last": filters[0] in (12, 40)}
    assert_close(stream(x, weight, 128, settings, **given), x, weight, settings)
    x[0].view(-1)[[5, 60]] = torch.tensor([INF, NAN], dtype=dtype)
    y, eager = stream(x, weight, 128, settings, **given), convolved(x.float(), weight.float(), settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())


# By mma.sync, in the memory of compute capability 8.6, or of 8.0, with more stages.
SM80, SM86 = {"capability": 80, "shared": 163 << 10}, {"capability": 80, "shared": 99 << 10}


@pytest.mark.parametrize(
    "case, dtype",
    [(case, torch.float32) for case in range(len(CASES))]
    + [(case, torch.bfloat16) for case in (1, 4, 6, 7, 9, 10)],
    ids=str,
)
def test_sizes_on_sm80(case, dtype, stream):
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, dtype)
    y = stream(x, weight, columns, settings, **(SM80 if case % 2 else SM86))
    assert_close(y, x, weight, settings)


@pytest.mark.parametrize("case, shares", [(1, 1), (3, 1), (5, 1), (9, 1), (10, 2)], ids=str)
def test_split_on_sm80(case, shares, stream):
    """float32's digits; and an infinity stays where it is."""
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, torch.float32)
    x[1] *= 1e-30
    given = {"split": True, "shares": shares, **(SM80 if case % 2 else SM86)}
    assert_close(stream(x, weight, columns, settings, **given), x, weight, settings, split=True)
    x[0].view(-1)[5] = INF
    y, eager = stream(x, weight, columns, settings, **given), convolved(x, weight, settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())


@pytest.mark.parametrize(
    "case, dtype, x_last, y_last, shares",
    [
        (0, torch.bfloat16, True, True, 2),
        (7, torch.float32, False, True, 3),
        (8, torch.float16, True, False, 1),
    ],
    ids=str,
)
def test_layouts_on_sm80(case, dtype, x_last, y_last, shares, stream):
    """x that is read as it lies, y channels last, and shares of K."""
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, dtype)
    y = stream(x, weight, columns, settings, x_last, y_last, shares=shares, **SM86)
    assert_close(y, x, weight, settings)


SM90 = {"capability": 90, "shared": 227 << 10}


@pytest.mark.parametrize(
    "channels, given, split",
    [(40, SM90, False), (136, SM90, True), (40, SM86, True), (136, SM86, False)],
    ids=str,
)
def test_sinks(channels, given, split, folder):  # noqa: F811
    """Windows; a second result, and a tail that reads places; sums over channels, and over positions. Of so many places on axes that more than 32 bits are needed."""
    filters, image = (channels, 20, 9, 10), (3, 13, 11)
    defines = dict(zip(("CHANNELS_OUT", "CHANNELS_IN", "KERNEL_H", "KERNEL_W"), filters))
    defines |= {"COLUMNS": 128, "SPLIT": int(split), "SHARED_LIMIT": given["shared"]}
    defines |= {"CAPABILITY": given["capability"], "VALUE_T": "float", "OUTPUT_T": "float"}
    kernels = Emulated(SINKS, library_of(SINKS, given["capability"] * 10, defines, (), folder))
    kernels.library.emulation_device(2, 227 << 10)
    x, weight = drawn(filters, image, torch.float32)
    settings = (1, 2, 2, 1)
    exact = convolved(x.double(), weight.double(), settings)
    bound = convolved(x.double().abs(), weight.double().abs(), settings) * 2.0 ** (2 - (22 if split else 11))
    nan = torch.full_like(exact, NAN, dtype=torch.float32)

    shift = torch.arange(channels)[:, None, None]
    windows = F.max_pool2d(exact + shift, (2, 3))
    y = torch.full_like(windows, NAN, dtype=torch.float32)
    kernels.pooled(y, x, weight)
    assert ((y - (2 * windows + shift)).abs() <= 2 * F.max_pool2d(bound, (2, 3)) + 1e-4).all()

    y, more, added = nan.clone(), nan.clone(), torch.randn(exact.shape)
    kernels.twice(y, more, x, weight, added)
    assert ((more - exact).abs() <= bound).all() and ((y - added - exact).abs() <= bound + 1e-5).all()

    partial = torch.full((len(x), (channels + 15) // 16, *exact.shape[2:]), NAN)
    kernels.over_channels(partial, x, weight)
    assert ((partial.sum(1) - exact.sum(1)).abs() <= bound.sum(1)).all()

    parts = kernels.parts(exact[0, 0].numel())
    partial = torch.full((len(x), channels, parts), NAN, dtype=torch.float64)
    kernels.over_positions(partial, x, weight)
    assert ((partial.sum(2) - exact.sum((2, 3))).abs() <= bound.sum((2, 3))).all()


@pytest.mark.parametrize("case, shares", [(0, 2), (2, 3), (7, 3), (8, 3), (9, 2)], ids=str)
@pytest.mark.parametrize("split, last", [(False, False), (True, True)])
def test_shares(case, shares, split, last, stream):
    """Of K, added behind: steps of both kinds, groups and taps, whose number is no multiple; and what can't be held."""
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, torch.float32)
    given = {"split": split, "x_last": last, "y_last": last, "shares": shares}
    assert_close(stream(x, weight, columns, settings, **given), x, weight, settings, split)
    x[0, 0].view(-1)[5] = INF
    y, eager = stream(x, weight, columns, settings, **given), convolved(x, weight, settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())


@pytest.mark.parametrize(
    "filters, image, settings",
    [
        ((3, 72, 3, 3), (3, 9, 7), (1, 1, 1, 1)),
        ((1, 64, 2, 3), (2, 11, 9), (2, 0, 1, 2)),
        ((5, 24, 3, 1, 2), (2, 4, 5, 6), (1, 2, 1, 1)),
        ((14, 20, 3, 3), (2, 7, 8), (1, 1, 2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype, split, last, gpu",
    [
        (torch.float32, False, False, {}),
        (torch.float32, True, True, {}),
        (torch.bfloat16, False, True, {}),
        (torch.float32, True, False, SM86),
    ],
)
def test_taps(dtype, split, last, gpu, filters, image, settings, stream):
    """A channel for each tap, which are added behind, with padding, strides and dilation; and what can't be held."""
    x, weight = drawn(filters, image, dtype)
    given = {"split": split, "x_last": last, "y_last": last, "by_taps": True, **gpu}
    assert_close(stream(x, weight, 128, settings, **given), x, weight, settings, split)
    x[1] *= 1e-30
    x[0, 0].view(-1)[5] = INF
    y, eager = stream(x, weight, 128, settings, **given), convolved(x.float(), weight.float(), settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())
    assert_close(y[1:], x[1:], weight, settings, split)


# Channels of one, two, three and five eights; an odd number of taps, and an even one; planes, rows and tiles that end anywhere.
VIEWS = [
    ((40, 8, 3, 3), (3, 9, 7), 128, (1, 1, 1, 1)),
    ((72, 13, 3, 2), (2, 11, 40), 128, (1, 2, 1, 2)),
    ((130, 24, 1, 3), (2, 1, 300), 192, (1, 0, 1, 1)),
    ((32, 8, 3, 3, 3), (2, 4, 6, 17), 256, (1, 0, 0, 1)),
    ((64, 40, 2, 2, 2), (2, 5, 6, 7), 128, (1, 1, 2, 1)),
    ((24, 3, 1, 1), (2, 5, 130), 192, (1, 0, 0, 1)),
]


OPERANDS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
LAYOUTS = [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    "dtype, split, case, x_last, y_last",
    [  # each case with each layout, each kind of operands with all cases
        (*OPERANDS[kind], case, *LAYOUTS[(case + kind + again) % 3])
        for case in range(len(VIEWS))
        for kind in range(3)
        for again in range(1 + (case == 1))
    ],
    ids=str,
)
def test_views(dtype, split, case, x_last, y_last, stream):
    """Operands that are views of a patch; infinities and NaN stay where they are, those of weights, too."""
    filters, image, columns, settings = VIEWS[case]
    x, weight = drawn(filters, image, dtype)
    x[1] *= 1e-30
    given = {"split": split, "views": True, "x_last": x_last, "y_last": y_last}
    assert_close(stream(x, weight, columns, settings, **given), x, weight, settings, split)
    x[0].view(-1)[[5, 17]] = torch.tensor([INF, NAN], dtype=dtype)
    if not split:  # its high parts of both would be zeros
        weight[3].view(-1)[-1] = -INF
    y, eager = stream(x, weight, columns, settings, **given), convolved(x.float(), weight.float(), settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())


@pytest.mark.parametrize(
    "split, kilobytes", [(False, 84), (False, 69), (False, 44), (True, 118), (True, 100)], ids=str
)
def test_views_in_little_memory(split, kilobytes, stream):
    """A team has one stage; of as many teams as there is room for: 4, 3 or 1, split 2 or 1."""
    filters, image, columns, settings = VIEWS[3]
    x, weight = drawn(filters, image, torch.float32)
    y = stream(x, weight, columns, settings, split=split, views=True, shared=kilobytes << 10)
    assert_close(y, x, weight, settings, split)


@pytest.mark.parametrize(
    "dtype, case, split",
    [(torch.float32, i, False) for i in (0, 3, 6, 9, 12)]
    + [(torch.float32, i, True) for i in (0, 5, 7, 10, 13)]
    + [(torch.bfloat16, 10, False)],
    ids=str,
)
def test_channels_last(dtype, case, split, stream):
    """x is packed as it lies; with infinities what is beside them is computed again."""
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, dtype)
    given = {"x_last": True, "y_last": True, "split": split}
    assert_close(stream(x, weight, columns, settings, **given), x, weight, settings, split)
    x[1] *= 1e-30
    x[0, 0].view(-1)[5] = INF
    y, eager = stream(x, weight, columns, settings, **given), convolved(x.float(), weight.float(), settings)
    assert torch.equal(y.isinf(), eager.isinf()) and torch.equal(y.isnan(), eager.isnan())
    assert_close(y[1:], x[1:], weight, settings, split)


@pytest.mark.parametrize("result, case", [(torch.float16, 7), (torch.float32, 0)], ids=str)
@pytest.mark.parametrize("x_last, y_last", list(itertools.product([False, True], repeat=2)))
def test_layouts(x_last, y_last, result, case, stream):
    filters, image, columns, settings = CASES[case]
    x, weight = drawn(filters, image, torch.float16)
    assert_close(stream(x, weight, columns, settings, x_last, y_last, result), x, weight, settings)


def test_samples_of_other_magnitudes(stream):
    """Each sample and each channel out has a scale of its own, where the first one does not fit, too, to the ends of float32's range."""
    filters, image, columns, settings = CASES[0]
    x, weight = drawn(filters, image, torch.float32)
    x *= torch.tensor([1e-30, 1.0, 1e22])[:, None, None, None]
    weight *= torch.logspace(-12, 12, filters[0])[:, None, None, None]
    assert_close(stream(x, weight, columns, settings), x, weight, settings)


def test_what_is_beside_an_outlier(stream):
    """Keeps its digits, in x and in the weights."""
    filters, image, columns, settings = CASES[0]
    for which in range(2):
        x, weight = drawn(filters, image, torch.float32)
        (x, weight)[which][1, 3, 1, 1] = 1e30
        assert_close(stream(x, weight, columns, settings), x, weight, settings)


def test_values_that_are_not_finite(stream):
    filters, image, columns, settings = CASES[0]
    x, weight = drawn(filters, image, torch.float32)
    for n, value in enumerate([INF, NAN, -INF]):
        x[n, n, 4, 3] = value
    kinds = [
        torch.where(y.isnan(), 2, y.sgn() * y.isinf())
        for y in (stream(x, weight, columns, settings), convolved(x, weight, settings))
    ]
    assert torch.equal(*kinds) and all((kinds[0] == kind).any() for kind in (0, 1, -1, 2))
