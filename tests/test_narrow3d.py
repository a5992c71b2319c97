"""Pointwise tails of a small 3-D convolution (kernels/store/runs.cuh), without a GPU (tests/test_emulated.py), against float64."""

from __future__ import annotations

import pytest
import torch

import numerics
from inline_kernels.bench import checks
from inline_kernels.engine import tiling
from test_emulated import Emulated, folder, gpu, guarded, library_of, pytestmark, remembers_nothing  # noqa: F401

# y = sigmoid(tanh((conv(x) + conv_bias) * scale) * bias) * other: parameters by channel, an input like y.
SOURCE = """
#include "store/runs.cuh"

using namespace conv::narrow3d;
using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W>;

struct Tail {
  const float *conv_bias, *scale, *bias;
  const output_t* other;

  struct Channel {
    float conv_bias, scale, bias;
  };
  __device__ Channel channel(int64_t, int c) const { return {conv_bias[c], scale[c], bias[c]}; }
  __device__ float operator()(float v, const Channel& c, int64_t at) const {
    return 1 / (1 + expf(-tanhf((v + c.conv_bias) * c.scale) * c.bias)) * float(other[at]);
  }
};

EXPORT void forward(Out<output_t> y, In<value_t> x, In<value_t> weight, In<float> conv_bias, In<float> scale,
                    In<float> bias, In<output_t> other, cudaStream_t stream) {
  store::pointwise<Conv>(x, weight, stream, conv::Stored{y, Tail{conv_bias, scale, bias, other}});
}

EXPORT int64_t tiles(In<value_t> x, In<value_t> weight, int64_t own) {
  const auto c = convolution<Conv>(x, weight, int(own), true, x.size(0));
  return c.OW % 4 == 0 || c.rows * c.OW % 4 == 0 || c.OH * c.OW % 4 ? c.slots() : -1;
}
"""


def tail(v, conv_bias, scale, bias, other):
    v = v + conv_bias.view(-1, 1, 1, 1)
    return torch.sigmoid(torch.tanh(v * scale.view(-1, 1, 1, 1)) * bias.view(-1, 1, 1, 1)) * other


def built(weight, architecture, folder):  # noqa: F811
    ctype = {torch.float32: "float", torch.float16: "half_t"}[weight.dtype]
    defines = {"VALUE_T": ctype, **tiling.spatial_defines(weight.shape)}
    kernels = Emulated(SOURCE, library_of(SOURCE, architecture, defines, (), folder))
    kernels.library.emulation_device(4, (227 if architecture >= 900 else 163) << 10)
    return kernels


@pytest.mark.parametrize(
    "channels, C, kernel, size, architecture, dtype",
    [
        (3, 16, (3, 3, 3), (6, 9, 12), 900, torch.float32),
        (
            3,
            24,
            (3, 3, 3),
            (5, 8, 11),
            800,
            torch.float16,
        ),  # half of a block's channels; rows that start anywhere
        (1, 5, (2, 2, 4), (9, 7, 19), 900, torch.float32),
        (4, 32, (1, 2, 2), (4, 13, 9), 800, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_pointwise_tail(channels, C, kernel, size, mean, architecture, dtype, gpu, folder):  # noqa: F811
    x, weight = (
        numerics.random_input((2, channels, *size), dtype=dtype) + mean,
        torch.randn(C, channels, *kernel),
    )
    weight -= weight.mean(dim=(2, 3, 4), keepdim=True) * bool(mean)  # that x's mean is not all there is
    weight = (weight / 8).to(dtype)
    v = torch.conv3d(x, weight)
    by_channel = [torch.randn(C) for _ in range(3)]
    other = torch.randn(v.shape).to(dtype)
    gpu(architecture=architecture)
    kernels = built(weight, architecture, folder)
    y = torch.full_like(v, float("nan"))
    kernels.forward(y, x, weight, *by_channel, other)
    exact = tail(torch.conv3d(x.double(), weight.double()), *[p.double() for p in (*by_channel, other)])
    eager = tail(v, *[p.to(dtype) for p in by_channel], other)
    error = checks.judged("", "output", exact, eager, y, dtype)
    assert error.share <= 1, error


@pytest.mark.parametrize("own", [1 << 10, 33 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_fits_has_tiles(dtype, own, gpu, folder):  # noqa: F811
    """And what tiling.py says does not fit is refused."""
    gpu(architecture=900)
    weight, found = torch.empty(16, 3, 3, 3, 3, dtype=dtype), set()
    kernels = built(weight, 900, folder)
    for H in range(3, 9):
        for W in range(6, 1600, 12):
            x = torch.empty(2, 3, 5, H, W, dtype=dtype)
            fits = tiling.volume_fits(x, weight, own)
            found.add(fits)
            if fits:
                assert kernels.tiles(x, weight, own) > 0
            else:
                with pytest.raises(AssertionError, match="room for"):
                    kernels.tiles(x, weight, own)
    assert found == {True, False}


@pytest.mark.parametrize("wrong", ["y", "channels", "filters"])
def test_tensors_of_other_sizes_are_refused(wrong, gpu, folder):  # noqa: F811
    gpu()
    x, weight = torch.randn(2, 3, 5, 6, 8), torch.randn(16, 3, 3, 3, 3)
    kernels, y, by_channel = built(weight, 800, folder), torch.empty(2, 16, 3, 4, 6), torch.randn(16)
    if wrong == "y":
        y = y[:1].clone()
    elif wrong == "channels":
        x = x[:, :2].clone()
    else:
        weight = weight[:, :, :2].clone()
    with pytest.raises(AssertionError, match="expected"):
        kernels.forward(y, x, weight, by_channel, by_channel, by_channel, y)
