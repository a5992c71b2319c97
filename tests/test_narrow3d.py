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
using Conv = Shape<value_t, CHANNELS_IN, CHANNELS_OUT, KERNEL_D, KERNEL_H, KERNEL_W, STAGE_PIXELS>;

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
                    In<float> bias, In<output_t> other, int64_t rows, int64_t depth, int64_t pitch, int64_t raw,
                    int64_t shared, cudaStream_t stream) {
  store::pointwise(y, convolution<Conv>(x, weight, rows, depth, pitch, raw, shared),
                   Tail{conv_bias, scale, bias, other}, stream);
}
"""


def tail(v, conv_bias, scale, bias, other):
    v = v + conv_bias.view(-1, 1, 1, 1)
    return torch.sigmoid(torch.tanh(v * scale.view(-1, 1, 1, 1)) * bias.view(-1, 1, 1, 1)) * other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", [800, 900])
@pytest.mark.parametrize(
    "channels, C, kernel, size",
    [
        (3, 16, (3, 3, 3), (6, 9, 12)),
        (3, 24, (3, 3, 3), (5, 8, 11)),  # half of a block's channels; rows that start anywhere
        (1, 5, (2, 2, 4), (9, 7, 19)),
        (4, 32, (1, 2, 2), (4, 13, 9)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_pointwise_tail(channels, C, kernel, size, mean, architecture, dtype, gpu, folder):  # noqa: F811
    x, weight = (
        numerics.random_input((2, channels, *size), dtype=dtype) + mean,
        torch.randn(C, channels, *kernel) / 8,
    )
    weight = (weight - weight.mean(dim=(2, 3, 4), keepdim=True) * bool(mean)).to(
        dtype
    )  # that x's mean is not all there is
    v = torch.conv3d(x, weight)
    by_channel = [torch.randn(C) for _ in range(3)]
    other = torch.randn(v.shape).to(dtype)
    gpu(architecture=architecture)
    defines, plan = tiling.plan_volume(2, x, weight, 33 << 10, vectors=True)
    ctype = {torch.float32: "float", torch.float16: "half_t"}[dtype]
    kernels = Emulated(SOURCE, library_of(SOURCE, architecture, {"VALUE_T": ctype, **defines}, (), folder))
    kernels.library.emulation_device(4, (227 if architecture >= 900 else 163) << 10)
    y = torch.full_like(v, float("nan"))
    kernels.forward(y, x, weight, *by_channel, other, *plan.launch)
    exact = tail(torch.conv3d(x.double(), weight.double()), *[p.double() for p in (*by_channel, other)])
    eager = tail(v, *[p.to(dtype) for p in by_channel], other)
    error = checks.judged("", "output", exact, eager, y, dtype)
    assert error.share <= 1, error
