"""kernels/cpu/load.h and points.h: each word of a pass, in vectors, over sizes that fill no vector, against torch; and convolutions of a few samples at a
time."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inline_loader
from fuzz_engine import MANY, check_fused
from inline_kernels import fuse
from inline_kernels.engine import library, schedule
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import Case

pytestmark = pytest.mark.usefixtures("optimised")

# Passes as they are generated, with each of the words. Pool: PD, PH, PW.
WORDS = """
#include "load/load.h"
using Windows = load::Pool<WINDOWS>;

struct Reduce {
  double* sums; Moments<double>* moments; output_t* twice; uint8_t* mask;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    auto sum = plane.sum();
    auto moment = plane.moments();
    plane.each([&](const auto& at) {
      const auto z = at.v();
      sum.add(z);
      moment.add(z);
      at.write(twice, z * real(2));
      at.write(mask, z > real(0));
    });
    plane.reduce(sums, sum);
    plane.reduce(moments, moment);
  }
};
struct Merge {
  double *sums, *mean, *m2; const Moments<double>* moments; int64_t C, parts;
  template <class Block> ON_DEVICE void operator()(const Block& block) const {
    block.each(C, [&](int64_t c, const auto& lanes) {
      const int64_t first = (block.index * C + c) * parts;
      const Moments<double> all = lanes.merge(moments + first, parts);
      lanes.write(mean + block.index * C + c, all.mean);
      lanes.write(m2 + block.index * C + c, all.m2);
    });
  }
};
struct Pooled {
  output_t *most, *total, *again; int32_t* place; load::Extent fine;
  static constexpr bool kScalar = true, kWindows = true;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    plane.each([&](const auto& at) {
      auto best = at.largest();
      auto value = at.largest_value();
      auto sum = at.zero();
      at.window(Windows(), fine, [&](const auto& e) {
        const auto z = e.v();
        if constexpr (Windows::kPads) {
          best.take_last(z, e.place, e.inside);
          value.take_last(z, e.place, e.inside);
          sum += math::select(e.inside, z, real(0));
        } else {
          best.take_last(z, e.place);
          value.take_last(z, e.place);
          sum += z;
        }
      });
      at.write(most, value.value);
      at.write(place, best.index);
      at.write(total, sum);
      at.write(again, at.chosen(Windows(), fine, best.index).v());
    });
  }
};
struct Back {
  value_t* dz; const output_t* dy; const int32_t* place; const uint8_t* mask; load::Extent coarse;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    plane.each([&](const auto& at) {
      const auto put = at.spread(Windows(), coarse, [&](const auto& w) {
        return w.zero() + math::select(w.read(place) == w.place, w.read(dy), real(0));
      });
      at.write(dz, math::select(at.read(mask) != 0, put, -put));
    });
  }
};
struct Channels {
  output_t *largest, *sum, *least; int32_t* which; const output_t* shared; int64_t C;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    plane.each([&](const auto& at) {
      auto best = at.largest();
      auto most_of = at.largest_value();
      auto least_of = at.smallest_value();
      auto total = at.zero();
      at.channels(C, [&](const auto& e) {
        best.take(e.v(), e.c);
        most_of.take(e.v(), e.c);
        least_of.take(e.v(), e.c);
        total += e.v() * at.read(shared);
      });
      at.write(largest, most_of.value);
      at.write(which, best.index);
      at.write(least, least_of.value);
      at.write(sum, total);
    });
  }
};
struct Drop {
  output_t* y; const int64_t* seed; int64_t number;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    plane.each([&](const auto& at) { at.write(y, math::select(at.kept(seed, number, 1, 0.3), real(1), real(0))); });
  }
};

EXPORT void reduce(double* sums, double* moments_given, double* mean, double* m2, output_t* twice, uint8_t* mask, const value_t* v,
                   int64_t N, int64_t C, int64_t D, int64_t H, int64_t W, int64_t parts) {
  Moments<double>* const moments = reinterpret_cast<Moments<double>*>(moments_given);
  load::planes(Reduce{sums, moments, twice, mask}, load::Extent(N, C, D, H, W), {v, 0, C, D * H * W}, parts, {0, N});
  load::small(Merge{sums, mean, m2, moments, C, parts}, 0, N);
}
EXPORT void pooled(output_t* most, output_t* total, output_t* again, int32_t* place, value_t* dz, const value_t* v, const output_t* dy,
                   const uint8_t* mask, int64_t N, int64_t C, int64_t D, int64_t H, int64_t W, int64_t d, int64_t h, int64_t w) {
  const load::Extent fine(N, C, D, H, W), coarse(N, C, d, h, w);
  load::planes(Pooled{most, total, again, place, fine}, coarse, {v, 0, C, D * H * W}, 2, {0, N});
  load::planes(Back{dz, dy, place, mask, coarse}, fine, {}, 3, {0, N});
}
EXPORT void channels(output_t* largest, output_t* sum, output_t* least, int32_t* which, const value_t* v, const output_t* shared,
                     int64_t N, int64_t C, int64_t S, int64_t parts) {
  load::planes(Channels{largest, sum, least, which, shared, C}, load::Extent(N, 1, 1, 1, S), {v, 0, C, S}, parts, {0, N});
}
EXPORT int64_t last_cache() { return load::last_cache(); }
EXPORT void drop(output_t* y, const int64_t* seed, int64_t number, int64_t N, int64_t C, int64_t S, int64_t parts) {
  load::planes(Drop{y, seed, number}, load::Extent(N, C, 1, 1, S), {}, parts, {0, N});
}
"""
DTYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16_t"}
SIZES = [(1, 5, 7), (1, 1, 1), (1, 30, 37), (3, 9, 67), (2, 4, 16)]


# 49 · (1 / 49) is less than 1 in float64.
POOLS = [(1, 2, 2), (1, 3, 3), (1, 2, 5), (2, 1, 2), (0, 1, 1), (1, 2, 8), (1, 1, 0), (1, 1, 49)]
# With strides and padding.
POOLS += [
    (1, 3, 3, 1, 2, 2, 0, 1, 1),
    (1, 2, 3, 1, 1, 1, 0, 0, 1),
    (2, 3, 2, 1, 1, 3, 1, 1, 0),
    (1, 1, 5, 1, 2, 1, 0, 0, 2),
]


def words(dtype: torch.dtype, pool=None):
    """Those of one pool, or all the others."""
    windows = ", ".join(map(str, pool or POOLS[0]))
    defines = {"VALUE_T": DTYPES[dtype], "OUTPUT_T": DTYPES[dtype], "WINDOWS": windows}
    launchers = ["pooled"] if pool else ["reduce", "channels", "drop", "last_cache"]
    return inline_loader.load("engine_cpu_words", source=WORDS, defines=defines, launchers=launchers)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("parts", [1, 4])
def test_sums_and_moments_have_each_value_once(dtype, size, parts):
    N, C = 2, 3
    v = (torch.randn(N, C, *size) * 3 + 100).to(dtype)
    v[0, 0] -= 100
    sums, moments = poisoned(N, C, parts, dtype=torch.float64), poisoned(N, C, parts, 3, dtype=torch.float64)
    mean, m2 = poisoned(N, C, dtype=torch.float64), poisoned(N, C, dtype=torch.float64)
    twice, mask = poisoned(*v.shape, dtype=dtype), poisoned(*v.shape, dtype=torch.uint8)
    kernels = words(dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        kernels.reduce(sums, moments, mean, m2, twice, mask, v, N, C, *size, parts)
        results.append([t.clone() for t in (sums, moments, mean, m2)])
    assert all(torch.equal(a, b) for a, b in zip(*results)), "the same to the bit with any number of threads"
    exact = v.double().flatten(2)
    few = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(
        sums.sum(2), exact.sum(2), rtol=few, atol=few * exact.abs().sum().item() / (N * C)
    )
    torch.testing.assert_close(mean, exact.mean(2), rtol=few, atol=few)
    torch.testing.assert_close(m2 / exact.shape[2], exact.var(2, correction=0), rtol=4 * few, atol=few)
    torch.testing.assert_close(twice, v * 2, rtol=0, atol=0)
    assert torch.equal(mask != 0, v > 0)


@pytest.mark.parametrize("size", [*SIZES, (1, 2, 101)])
@pytest.mark.parametrize(
    "dtype, pool",
    [(torch.float32, pool) for pool in POOLS]
    + [
        (torch.float64, POOLS[0]),
        (torch.bfloat16, POOLS[1]),
        (torch.float64, POOLS[8]),
        (torch.bfloat16, POOLS[9]),
    ],
)
def test_windows_there_and_back(dtype, size, pool):
    window = [p or s for p, s in zip(pool, size)]
    stride, around = [*pool[3:6]] or window, [*pool[6:]] or [0, 0, 0]
    coarse = [(s + 2 * p - w) // t + 1 for s, w, t, p in zip(size, window, stride, around)]
    if min(coarse) < 1:
        pytest.skip("no window fits")
    N, C = 2, 3
    v = torch.randn(N, C, *size).mul(2).round().to(dtype)  # with ties
    v[1, 2, ..., :: window[2]] = 9.0  # the first of each window
    if v[0, 0].numel() > 30:
        v[0, 1].view(-1)[11] = float("nan")
    dy, mask = torch.randn(N, C, *coarse).to(dtype), torch.randint(2, v.shape).to(torch.uint8)
    most, total, again = (poisoned(N, C, *coarse, dtype=dtype) for _ in range(3))
    place, dz = poisoned(N, C, *coarse, dtype=torch.int32), poisoned(*v.shape, dtype=dtype)
    words(dtype, pool).pooled(most, total, again, place, dz, v, dy, mask, N, C, *size, *coarse)
    leaf = v.double().requires_grad_()
    expected = F.max_pool3d(leaf, window, stride, around)
    (gradient,) = torch.autograd.grad(expected, leaf, dy.double())
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(most.double(), expected.detach(), **same)
    torch.testing.assert_close(again.double(), expected.detach(), **same)
    if len(pool) > 3:  # a sum
        gradient, same = gradient.to(dtype).double(), {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(dz.double(), torch.where(mask != 0, gradient, -gradient), **same)
    padded = F.pad(v.double(), [p for p in reversed(around) for _ in range(2)])
    sums = F.avg_pool3d(padded, window, stride) * (window[0] * window[1] * window[2])
    torch.testing.assert_close(
        total.double(), sums, rtol=0.01 if dtype == torch.bfloat16 else 1e-6, atol=1e-6, equal_nan=True
    )


# Windows of whole rows, whose positions come as vectors.
ROWS = """
#include "load/load.h"

struct Rows {
  output_t *most, *least, *total, *again; int32_t *place, *least_place; double* sums; load::Extent fine;
  static constexpr bool kScalar = true, kRows = true;
  template <class Plane> ON_DEVICE void operator()(Plane& plane) const {
    auto finer = plane.sum();
    plane.each([&](const auto& at) {
      auto own_best = at.largest_row();
      auto own_least = at.smallest_row();
      auto own_value = at.largest_row_value();
      auto own_sum = at.row_total();
      at.window(load::Pool<WINDOWS>(), fine, [&](const auto& e) {
        own_best.take(e.v(), e.place, e.inside);
        own_least.take(e.v(), e.place, e.inside);
        own_value.take(e.v(), e.place, e.inside);
        own_sum += math::select(e.inside, e.v(), real(0));
        finer.add(e.v());
      });
      const auto best = at.all(own_best);
      const auto smallest = at.all(own_least);
      at.write(most, at.all(own_value).value);
      at.write(least, smallest.value);
      at.write(total, at.all(own_sum));
      at.write(place, best.index);
      at.write(least_place, smallest.index);
      at.write(again, at.chosen(load::Pool<WINDOWS>(), fine, best.index).v());
    });
    plane.reduce(sums, finer);
  }
};
EXPORT void rows(output_t* most, output_t* least, output_t* total, output_t* again, int32_t* place, int32_t* least_place, double* sums,
                 const value_t* v, int64_t N, int64_t C, int64_t D, int64_t H, int64_t W, int64_t d, int64_t h, int64_t w) {
  const load::Extent fine(N, C, D, H, W);
  load::planes(Rows{most, least, total, again, place, least_place, sums, fine}, load::Extent(N, C, d, h, w), {v, 0, C, D * H * W}, 1, {0, N});
}
"""


@pytest.mark.parametrize("size", [*SIZES, (4, 6, 33)])
@pytest.mark.parametrize("pool", [(1, 1, 0), (1, 3, 0), (2, 1, 0), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_of_whole_rows(size, pool, dtype):
    window = [p or s for p, s in zip(pool, size)]
    coarse = [s // w for s, w in zip(size, window)]
    if min(coarse) < 1 or (dtype == torch.float64 and pool[1] != 1):
        pytest.skip("no window fits, or compiled for two")
    N, C = 2, 3
    v = torch.randn(N, C, *size).mul(2).round().to(dtype)  # with ties
    for c, value in ((0, float("inf")), (1, float("nan")), (2, float("-inf"))):
        v[0, c].view(-1)[3 % v[0, c].numel() :: 5] = value
    results = [poisoned(N, C, *coarse, dtype=dtype) for _ in range(4)]
    places = [poisoned(N, C, *coarse, dtype=torch.int32) for _ in range(2)]
    sums, defines = (
        poisoned(N, C, 1, dtype=torch.float64),
        {"VALUE_T": DTYPES[dtype], "OUTPUT_T": DTYPES[dtype]},
    )
    defines["WINDOWS"] = ", ".join(map(str, pool))
    kernels = inline_loader.load("engine_cpu_rows", source=ROWS, defines=defines, launchers=["rows"])
    kernels.rows(*results, *places, sums, v, N, C, *size, *coarse)
    inside = v[..., : coarse[0] * window[0], : coarse[1] * window[1], :]
    seen = inside.unflatten(4, (coarse[2], window[2])).unflatten(3, (coarse[1], window[1]))
    seen = seen.unflatten(2, (coarse[0], window[0])).permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(5)
    largest, smallest = seen.max(-1), seen.min(-1)
    for own, expected in zip(results, (largest[0], smallest[0], seen.sum(-1), largest[0])):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    for own, expected in zip(places, (largest[1], smallest[1])):
        assert torch.equal(own.long(), expected)
    torch.testing.assert_close(sums[..., 0], seen.double().flatten(2).sum(-1), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, S, parts", [(1, 5, 1), (7, 33, 2), (40, 129, 3)])
def test_channels_at_a_position(dtype, C, S, parts):
    N = 3
    v, shared = torch.randn(N, C, S).round().to(dtype), torch.randn(N, S).to(dtype)
    v[1, C // 2, 1] = float("nan")
    v[2, :, 3], v[2, :, 4], v[0, C // 2, 0] = float("-inf"), float("inf"), float("inf")
    largest, total, least = (poisoned(N, S, dtype=dtype) for _ in range(3))
    which = poisoned(N, S, dtype=torch.int32)
    words(dtype).channels(largest, total, least, which, v, shared, N, C, S, parts)
    value, index = v.max(1)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(largest, value, **same)
    torch.testing.assert_close(which.long(), index, **same)
    torch.testing.assert_close(least, v.min(1)[0], **same)
    error = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        total,
        (v.double() * shared.double()[:, None]).sum(1).to(dtype),
        rtol=error,
        atol=error,
        equal_nan=True,
    )


def philox(seed: int, counter: int) -> list[int]:
    """Philox4x32-10, as in its paper."""
    c, k = [counter % 2**32, counter >> 32, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q % 2**32, p >> 32 ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_a_dropouts_mask_is_of_the_element_alone():
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], (
        "what the paper's authors publish"
    )
    kernels, seed = words(torch.float32), torch.tensor([12345])
    first, second = poisoned(2, 5, 77, dtype=torch.float32), poisoned(1, 1, 770, dtype=torch.float32)
    kernels.drop(first, seed, 0, 2, 5, 77, 3)
    kernels.drop(second, seed, 0, 1, 1, 770, 1)
    assert torch.equal(first.flatten(), second.flatten())
    drawn_by = 12345 + 0x9E3779B97F4A7C15  # of a pass's second dropout
    drawn = [(lane >> 8) * 2.0**-24 for counter in range(193) for lane in philox(drawn_by, counter)][:770]
    assert torch.equal(first.flatten(), (torch.tensor(drawn) >= 0.3).float())


def test_what_is_large_is_stored_past_the_caches_and_whole():
    v = torch.randn(2, 3, 1, 1500, 1501)
    sums, moments = torch.empty(2, 3, 5, dtype=torch.float64), torch.empty(2, 3, 5, 3, dtype=torch.float64)
    mean, twice, mask = (
        torch.empty(2, 3, dtype=torch.float64),
        torch.full_like(v, float("nan")),
        v.to(torch.uint8),
    )
    words(torch.float32).reduce(sums, moments, mean, mean.clone(), twice, mask, v, 2, 3, 1, 1500, 1501, 5)
    assert torch.equal(twice, v * 2)


def test_the_last_cache_is_a_cores():
    """Not all of a processor's together."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = file.read_text().strip() if file.exists() else "32768K"
    assert words(torch.float32).last_cache() == int(text.removesuffix("K")) << 10


class Much(nn.Module):
    """The library's convolution, and what takes much before it is summed."""

    def __init__(self, tail):
        super().__init__()
        self.conv, self.norm, self.tail = nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), tail

    def forward(self, x):
        return self.tail(self, self.conv(x))


OF_MUCH = {
    "a norm": lambda m, v: m.norm(F.gelu(v)),
    "rows": lambda m, v: torch.softmax(F.silu(v), -1),
    "columns": lambda m, v: torch.softmax(F.silu(v), -2),
    "picked rows": lambda m, v: m.norm(F.gelu(v)).amax(-1) * F.silu(v).amax(-1),
    "v itself, too": lambda m, v: m.norm(F.gelu(v)) * v,
    "windows": lambda m, v: m.norm(F.max_pool2d(F.gelu(v), 3, 2, 1)) + F.max_pool2d(F.gelu(v), 3, 2, 1),
}


@pytest.mark.parametrize(
    "tail, dtype",
    [
        *((tail, torch.float32) for tail in OF_MUCH),
        *itertools.product(("rows", "picked rows"), (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_what_takes_much_is_left_in_the_librarys_v(tail, dtype):
    """… where nobody needs that: not in training, not where 16 bits would round it."""
    torch.manual_seed(0)
    model, x = Much(OF_MUCH[tail]).to(dtype), torch.randn(2, 3, 25, 75).to(dtype)
    new, before = fuse(copy.deepcopy(model)), x.clone()
    with torch.no_grad():
        y, truth, eager = new(x), copy.deepcopy(model).double()(x.double()), model(x)
        leaves = "replace_v(" in new.source(x)
    assert "load" in str(new.plan(x)) and torch.equal(x, before)
    assert leaves == (tail in ("a norm", "rows") and dtype != torch.bfloat16)
    assert (y - truth).norm() <= 2 * (eager - truth).norm() + 1e-12
    assert "replace_v(" not in new.source(x)  # with gradients


# Products of about 1e5, as far apart: of a softmax one term is left, and what its sum and its gradient's cancel to is rounding.
OF_PRODUCTS = {
    "softmax": lambda m, v: m.norm(torch.softmax(v * v.sum(-2, keepdim=True), -2)),
    "logsumexp": lambda m, v: torch.logsumexp((v * v).flatten(2), -1),
    "of a function": lambda m, v: torch.logsumexp(F.hardswish(v * 300).flatten(2), -1),
}


@pytest.mark.parametrize("tail", OF_PRODUCTS)
def test_products_less_what_was_reduced_of_them_are_rounded_as_that(tail):
    """y and every gradient, in the mean of some draws: where one multiply-add is made of both they are 8 to 1,000,000 times as far off."""
    ratios = []
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Much(OF_PRODUCTS[tail]), (100 * torch.randn(2, 3, 25, 35)).requires_grad_()
        found = []
        for run in (fuse(copy.deepcopy(model)), model, copy.deepcopy(model).double()):
            y = run(x.to(run.conv.weight))
            torch.manual_seed(seed)
            of = [x, run.conv.weight, run.conv.bias]
            found.append([y, *torch.autograd.grad(y, of, torch.randn(y.shape).to(y))])
        new, eager, truth = [[t.detach() for t in each] for each in found]
        ratios.append([float((a - t).norm() / (b - t).norm()) for a, b, t in zip(new, eager, truth)])
    assert (torch.tensor(ratios).log().mean(0) <= math.log(2)).all(), ratios


class Alone(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), norm

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    "norm, in_pieces", [(nn.GroupNorm(2, 8), True), (nn.Identity(), True), (nn.BatchNorm2d(8), False)]
)
def test_a_few_samples_at_a_time_give_the_same(norm, in_pieces, monkeypatch):
    model, x = Alone(copy.deepcopy(norm)), torch.randn(5, 3, 13, 15)
    segment = capture(model, model.training, x.dim()).segments[0]
    named = dict(model.named_parameters())
    tensors = [x, *[named[name].detach() for name in segment.parameters]]
    if segment.updates:
        tensors += [
            t.clone() for update in segment.updates for t in (model.norm.running_mean, model.norm.running_var)
        ]
    sample = 8 * 11 * 13 * 4
    results = []
    for budget in (library.CPU_PIECE_BYTES, 2 * sample + 7):
        monkeypatch.setattr(library, "CPU_PIECE_BYTES", budget)
        plan = schedule.plan(Case(segment, tensors + _numbers(model, segment), False, torch.float32))
        assert [piece[:2] for piece in plan.pieces] == (
            [(0, 2), (2, 4), (4, 5)] if in_pieces and len(results) else []
        )
        with torch.no_grad():
            results.append(schedule.forward(plan, tensors + _numbers(model, segment))[0])
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
    for y in results:
        torch.testing.assert_close(y.double(), truth, rtol=2e-6, atol=2e-6)


def _numbers(model: nn.Module, segment) -> list[float]:
    found = []
    for name in segment.scalars:
        value = model
        for part in name.split("."):
            value = getattr(value, part)
        found.append(float(value))
    return found


def test_what_a_loop_finds_of_an_earlier_one():
    """A value by channel alone is loaded again, not held among values of positions: that did not compile."""
    assert check_fused(31120, "cpu", MANY, as_used=True) == ""
