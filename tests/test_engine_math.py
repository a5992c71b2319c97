"""kernels/core/math.h against float64 and eager, in units in the last place: vectors and single values on the CPU, and a GPU's text with
models of its approximate instructions, whose errors are as large as their documentation allows."""

from __future__ import annotations

import math
import shutil
import subprocess

import pytest
import torch

import inline_loader
import math_on_gpu
from math_on_gpu import NAMES, arguments, eager, exact, judge, launcher_of, launchers

pytestmark = pytest.mark.usefixtures("optimised")

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

# What the rule's 4 units become where every instruction errs by all that its documentation allows, all in one direction.
BOUND_OF_MODELS = 5.0
every_function = pytest.mark.parametrize("name", NAMES)

# ex2.approx 2 units and rcp.approx 1, as PTX's manual has them; the library's functions as CUDA's programming guide has them. Errors are as
# large, up, down or at random; what is subnormal is zero where the instruction says so.
MODELS = """
#define MATH_ON_GPU
#include <cmath>
#include <cstdint>
#include <cstring>
namespace gpu {
inline int direction = 0;  // 1: up, -1: down, 0: at random
inline float off(double exact, int units, float x, bool flush) {
  if (!(std::fabs(exact) <= 0x1.fffffep127f) || std::fabs(exact) < 0x1p-149) return float(exact);
  uint32_t hash;
  std::memcpy(&hash, &x, 4);
  hash = (hash * 2654435761u) >> 9;
  const double most = units - 0.5, step = direction ? direction * most : (hash % 1024 / 511.5 - 1) * most;
  const float y = float(exact + step * std::ldexp(1., std::max(std::ilogb(exact) - 23, -149)));
  return flush && std::fabs(y) < 0x1p-126f ? y * 0.f : y;
}
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? x * 0.f : x; }
inline float exp2(float x) { return off(std::exp2(double(flushed(x))), 2, x, true); }
inline float reciprocal(float x) { return off(1 / double(flushed(x)), 1, x, true); }
inline float exp(float x) { return off(std::exp(double(x)), 1, x, false); }
inline float log(float x) { return off(std::log(double(x)), 1, x, false); }
inline float log1p(float x) { return off(std::log1p(double(x)), 1, x, false); }
inline float expm1(float x) { return off(std::expm1(double(x)), 1, x, false); }
inline float erf(float x) { return off(std::erf(double(x)), 2, x, false); }
inline float product(float a, float b) { return a * b; }
inline float difference(float a, float b) { return a - b; }
inline double difference(double a, double b) { return a - b; }
inline float exp2_accurate(float x) { return off(std::exp2(double(x)), 2, x, false); }
}  // namespace gpu
EXPORT int64_t err(int64_t direction) { return gpu::direction = int(direction); }
"""


@pytest.fixture(scope="module")
def x():
    torch.manual_seed(0)
    return arguments()


@pytest.fixture(scope="module", params=["vectors", "values", "gpu up", "gpu down", "gpu random"])
def built(optimised, request):
    """The kernels, and the bound of their errors."""
    kind = request.param
    if not kind.startswith("gpu"):
        source = launchers(False, kind == "values")
        return inline_loader.load("engine_math", source=source, device="cpu"), math_on_gpu.BOUND
    source = f"#include <algorithm>\n{MODELS}{launchers(False, True)}"
    kernels = inline_loader.load("engine_math_of_gpu", source=source, device="cpu")
    kernels.err({"up": 1, "down": -1, "random": 0}[kind.split()[1]])
    return kernels, BOUND_OF_MODELS


@every_function
def test_errors_are_within_the_rule_and_what_is_special_is_as_eagers(name, built, x):
    kernels, bound = built
    y = torch.full_like(x, math.nan)
    getattr(kernels, launcher_of(name))(y, x, x.numel())
    verdict = judge(name, x, y, eager(name, x), bound)
    assert not verdict.beyond, verdict
    assert not verdict.special, verdict


@pytest.fixture(scope="module", params=["vectors", "values"])
def doubles(optimised, request):
    source = launchers(False, request.param == "values", "double")
    return inline_loader.load("engine_math_in_double", source=source, device="cpu")


@every_function
def test_doubles_have_a_doubles_digits(name, doubles):
    x = torch.cat(
        [torch.linspace(-30, 30, 4096), torch.logspace(-300, 2, 1024), -torch.logspace(-300, 2, 1024)]
    ).double()
    x = x[: len(x) // 8 * 8]
    y = torch.full_like(x, math.nan)
    getattr(doubles, launcher_of(name))(y, x, x.numel())
    truth = exact(name, x)
    finite = truth.isfinite()
    largest = 1.0 if name in math_on_gpu.CROSSING else 2.0**-960
    relative = ((y - truth).abs() / truth.abs().clamp(min=largest))[finite]
    assert relative.max() < 4e-13  # an exponent of 700 has lost as many units, here and in the truth
    assert torch.equal(y.isnan(), truth.isnan())


OPERATIONS = """
#include "core/math.h"
typedef float Lanes __attribute__((vector_size(32), may_alias));
template <class T> static void run(float* y, const float* a, const float* b, int64_t count, int64_t which) {
  for (int64_t i = 0; i < count; i += sizeof(T) / sizeof(float)) {
    T u, v, r;
    __builtin_memcpy(&u, a + i, sizeof u);
    __builtin_memcpy(&v, b + i, sizeof v);
    r = which == 0 ? math::minimum(u, v) : which == 1 ? math::maximum(u, v) : which == 2 ? math::minimum(u, 0.5f)
      : which == 3 ? math::maximum(1, u) : which == 4 ? math::clamp(u, -1, 0.5f) : which == 5 ? math::clamp(u, 1, -1)
      : which == 6 ? math::select((u > v) & (v == v), u, 2) : math::select(u <= v, 0, v);
    __builtin_memcpy(y + i, &r, sizeof r);
  }
}
EXPORT void vectors(float* y, const float* a, const float* b, int64_t count, int64_t which) { run<Lanes>(y, a, b, count, which); }
EXPORT void values(float* y, const float* a, const float* b, int64_t count, int64_t which) { run<float>(y, a, b, count, which); }
"""
REFERENCES = [
    torch.minimum,
    torch.maximum,
    lambda a, b: torch.minimum(a, torch.tensor(0.5)),
    lambda a, b: torch.maximum(a, torch.tensor(1.0)),
    lambda a, b: a.clamp(-1, 0.5),
    lambda a, b: a.clamp(1, -1),
    lambda a, b: torch.where((a > b) & (b == b), a, 2.0),
    lambda a, b: torch.where(a <= b, 0.0, b),
]


@pytest.mark.parametrize("which", range(len(REFERENCES)))
@pytest.mark.parametrize("kind", ["vectors", "values"])
def test_choices_are_torchs(kind, which):
    kernels = inline_loader.load("engine_math_choices", source=OPERATIONS, device="cpu")
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 0.5, 2.5])
    a, b = values.repeat_interleave(8), values.repeat(8)
    y = torch.full_like(a, 7)
    getattr(kernels, kind)(y, a, b, a.numel(), which)
    torch.testing.assert_close(y, REFERENCES[which](a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not NVCC, reason="there is no nvcc")
def test_a_gpus_text_compiles_without_spills_and_in_few_steps(tmp_path):
    source = tmp_path / "functions.cu"
    source.write_text(launchers(gpu=True))
    flags = ["-cubin", "-arch=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    command = [
        NVCC,
        *flags,
        f"-I{inline_loader.KERNELS}",
        "-o",
        str(tmp_path / "functions.cubin"),
        str(source),
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert log.count(" 0 bytes spill stores") == log.count("spill stores") >= len(NAMES)
