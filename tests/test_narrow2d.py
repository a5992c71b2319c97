"""Sinks of a 2-D convolution of few channels in: pointwise tails (kernels/store/strips.cuh) and reductions over channels
(kernels/reduce/narrow2d.cuh), without a GPU (tests/test_emulated.py), against float64."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import numerics
from inline_kernels.bench import checks
from test_emulated import Emulated, folder, gpu, guarded, library_of, pytestmark, remembers_nothing  # noqa: F401
from test_kernels_compile import FUSED_ARCHITECTURES, needs_nvcc, nvcc

# mish(conv(x) + conv_bias) * other, other like the convolution's result; and its reductions over channels.
SOURCE = """
#include "conv/narrow2d.cuh"
#include "reduce/narrow2d.cuh"
#include "store/strips.cuh"

using Filter = conv::Filter<CHANNELS_IN, CHANNELS_OUT, KERNEL_H, KERNEL_W>;

struct Tail {
  const float* conv_bias;
  const output_t* other;

  struct Channel {
    float conv_bias;
  };
  __device__ Channel channel(int64_t, int c) const { return {conv_bias[c]}; }
  __device__ float operator()(float v, const Channel& c, int64_t at) const {
    const float u = v + c.conv_bias;
    return u * tanhf(u > 20 ? u : log1pf(expf(u))) * float(other[at]);
  }
};

EXPORT void stored(Out<output_t> y, In<value_t> x, In<value_t> weight, In<float> conv_bias, In<output_t> other,
                   cudaStream_t stream) {
  conv::narrow2d::pointwise<Filter, LONG_ROWS>(x, weight, stream,
                                               store::Strips<output_t, Tail>{y, {conv_bias, other}});
}
"""
REDUCED = """
EXPORT void NAME(Out<output_t> y, In<value_t> x, In<value_t> weight, In<float> conv_bias, In<output_t> other,
                 cudaStream_t stream) {
  conv::narrow2d::pointwise<Filter, LONG_ROWS>(
      x, weight, stream, reduce::Channels<output_t, reduce::KIND, Tail>{y, {conv_bias, other}, {}});
}
"""
REDUCTIONS = {
    "sums": ("Sum", lambda t: t.sum(1)),
    "largest": ("Max", lambda t: t.amax(1)),
    "smallest": ("Min", lambda t: t.amin(1)),
    "logsumexp": ("LogSumExp", lambda t: t.logsumexp(1)),
}
ALL = SOURCE + "".join(
    REDUCED.replace("NAME", name).replace("KIND", kind) for name, (kind, _) in REDUCTIONS.items()
)
TYPES = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}


def tail(x, weight, conv_bias, other):
    v = torch.conv2d(x, weight)
    return torch.nn.functional.mish(v + conv_bias.view(-1, 1, 1)) * other


def given(channels, C, kernel, size, dtype):
    x, weight = (
        numerics.random_input((2, channels, *size), dtype=dtype),
        torch.randn(C, channels, *kernel) / 4,
    )
    shape = 2, C, size[0] - kernel[0] + 1, size[1] - kernel[1] + 1
    return x, weight.to(dtype), torch.randn(C), torch.randn(shape).to(dtype)


def kernels_of(source, x, weight, architecture, multiprocessors, folder):  # noqa: F811
    names = "CHANNELS_OUT", "CHANNELS_IN", "KERNEL_H", "KERNEL_W"
    defines = {
        "VALUE_T": TYPES[x.dtype],
        **dict(zip(names, weight.shape)),
        "LONG_ROWS": int(x.shape[3] > 128),
    }
    kernels = Emulated(source, library_of(source, architecture, defines, (), folder))
    kernels.library.emulation_device(multiprocessors, (227 if architecture >= 900 else 163) << 10)
    return kernels


def behind(shape, dtype):
    """NaN, with memory behind it that nothing may write to, and not at the beginning of a sector."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 64,), float("nan"), dtype=dtype)
    return memory[1 : count + 1].view(shape), memory


def assert_within_limits(kernels, launcher, reduction, x, weight, conv_bias, other):
    exact = reduction(tail(*[t.double() for t in (x, weight, conv_bias, other)]))
    eager = reduction(tail(x, weight, conv_bias.to(x.dtype), other))
    y, memory = behind(exact.shape, x.dtype)
    getattr(kernels, launcher)(y, x, weight, conv_bias, other)
    error = checks.judged("", "output", exact, eager, y, x.dtype)
    assert error.share <= 1, (launcher, error)
    assert memory[0].isnan() and memory[y.numel() + 1 :].isnan().all(), "something was written beside y"


SIZES = [
    (8, 64, (3, 3), (9, 34)),  # whole warps; rows of whole sectors
    (5, 24, (2, 3), (11, 21)),  # half of a warp's channels; rows that begin anywhere
    (3, 16, (1, 4), (7, 6)),  # rows shorter than a sector
    (9, 48, (3, 1), (5, 150)),  # rows longer than a tile
]


@pytest.mark.parametrize("architecture, dtype", [(800, torch.float32), (900, torch.float16)], ids=str)
@pytest.mark.parametrize("channels, C, kernel, size", SIZES, ids=str)
def test_pointwise_tail(channels, C, kernel, size, architecture, dtype, gpu, folder):  # noqa: F811
    inputs = given(channels, C, kernel, size, dtype)
    kernels = kernels_of(ALL, *inputs[:2], architecture, 3, folder)
    assert_within_limits(kernels, "stored", lambda t: t, *inputs)
    if dtype == torch.float32:
        for name, (_, reduction) in REDUCTIONS.items():
            assert_within_limits(kernels, name, reduction, *inputs)


def test_random_sizes(gpu, folder):  # noqa: F811
    """Strips of every length, and every place in a sector that a row may begin at."""
    draw = random.Random(torch.initial_seed())
    for _ in range(24):
        kernel, W = (2, 3), draw.randint(3, 60)
        inputs = given(4, 16, kernel, (draw.randint(2, 12), W), torch.float32)
        kernels = kernels_of(ALL, *inputs[:2], 800, draw.randint(1, 9), folder)
        assert_within_limits(kernels, "stored", lambda t: t, *inputs)
        assert_within_limits(kernels, "logsumexp", REDUCTIONS["logsumexp"][1], *inputs)


def test_more_than_a_block_of_channels(gpu, folder):  # noqa: F811
    inputs = given(8, 96, (3, 3), (6, 19), torch.float32)
    kernels = kernels_of(SOURCE, *inputs[:2], 800, 3, folder)
    assert_within_limits(kernels, "stored", lambda t: t, *inputs)


@pytest.mark.parametrize("magnitude", [1e15, 1e-15])
def test_a_scale_that_does_not_fit(magnitude, gpu, folder):  # noqa: F811
    """All is computed, and stored, once more; magnitudes are those of products of x and weight."""
    x, weight, conv_bias, other = given(5, 24, (2, 3), (11, 21), torch.float32)
    x, weight = x * magnitude, weight / magnitude
    kernels = kernels_of(ALL, x, weight, 800, 3, folder)
    assert_within_limits(kernels, "stored", lambda t: t, x, weight, conv_bias, other)
    assert_within_limits(kernels, "sums", lambda t: t.sum(1), x, weight, conv_bias, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_special_values_of_a_tail(value, gpu, folder):  # noqa: F811
    """Reductions of them as PyTorch's."""
    x, weight, conv_bias, other = given(5, 24, (2, 3), (11, 21), torch.float32)
    other[0, 3, 2], other[1, :, 4] = value, value  # in one channel, and in all
    kernels = kernels_of(ALL, x, weight, 800, 3, folder)
    for name, (_, reduction) in REDUCTIONS.items():
        exact = reduction(tail(x, weight, conv_bias, other))
        y = torch.empty_like(exact)
        getattr(kernels, name)(y, x, weight, conv_bias, other)
        kinds = [torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (exact, y)]
        assert torch.equal(*kinds), name


@needs_nvcc
@pytest.mark.parametrize("reads_other, most, long_rows", [(False, 0, 0), (True, 32, 1)])
def test_registers_spilled(reads_other, most, long_rows, tmp_path):
    """None by conv and mish; few, and outside of loops, where the tail reads a tensor besides."""
    path = tmp_path / "tails.cu"
    path.write_text(ALL if reads_other else ALL.replace(" * float(other[at])", ""))
    sizes = {"CHANNELS_OUT": 64, "CHANNELS_IN": 8, "KERNEL_H": 3, "KERNEL_W": 3, "LONG_ROWS": long_rows}

    def spilled(architecture: str) -> list[int]:
        done = nvcc(path, architecture, [f"{k}={v}" for k, v in sizes.items()], tmp_path / architecture)
        assert done.returncode == 0, done.stderr
        return [int(each) for each in re.findall(r"(\d+) bytes spill stores", done.stderr)]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(spilled, FUSED_ARCHITECTURES):
            assert len(found) == 5 and max(found) <= most, found
