// y = (min(conv + conv_bias, constant) + bias) * scale, and its gradient, on the CPU. The launchers of
// conv2d_min_add_multiply.cu, but v and dv are (N, C, S) like y and dy: here the library's convolution is
// most exact in that layout, and no slower. A thread takes whole planes.
#include <cmath>
#include <limits>
#include "cpu/vector.h"
#include "cpu/winograd_gradient.h"

// What becomes of a convolved value.
static accumulate_t result_of(accumulate_t v, accumulate_t conv_bias, accumulate_t constant,
                              accumulate_t bias, accumulate_t scale) {
  // The formula of conv2d_min_add_multiply.
  return (minimum(v + conv_bias, constant) + bias) * scale;
}

EXPORT void forward(output_t* y, const value_t* v, const accumulate_t* conv_bias, const accumulate_t* bias,
                    double constant, double scale, int64_t N, int64_t C, int64_t S) {
  const accumulate_t bound = constant, factor = scale;
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      const accumulate_t inner = conv_bias[plane % C], outer = bias[plane % C];
      for (int64_t i = plane * S; i < (plane + 1) * S; i++)
        y[i] = output_t(result_of(accumulate_t(v[i]), inner, bound, outer, factor));
    }
  });
}

// The gradients of v and, summed over the samples, of the parameters; d_bias has `biases` elements, C or 1.
// sums (2, N·chunks, C) of dv and of dy·scale is scratch, with chunks = 1: a row per sample. There is no TF32
// here.
EXPORT void backward(value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_bias, double* sums,
                     const output_t* dy, const value_t* v, const accumulate_t* conv_bias, double constant,
                     double scale, int64_t biases, int64_t N, int64_t C, int64_t S, int64_t chunks,
                     bool tf32) {
  const accumulate_t bound = constant, factor = scale;
  host::parallel_for(N * C, 1, [=](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; plane++) {
      double inner = 0, outer = 0;
      for (int64_t i = plane * S; i < (plane + 1) * S; i++) {
        // The gradient of conv2d_min_add_multiply.
        const accumulate_t gradient = accumulate_t(dy[i]) * factor;
        const accumulate_t passed =
            minimum_backward(gradient, accumulate_t(v[i]) + conv_bias[plane % C], bound);
        outer += gradient, inner += passed;
        dv[i] = value_t(passed);
      }
      sums[plane] = inner, sums[N * chunks * C + plane] = outer;
    }
  });
  sum_rows(d_conv_bias, C, sums, N, C);
  sum_rows(d_bias, biases, sums + N * C, N, C);
}

// What min withholds of a gradient, for backward: 0 nothing, 1 a half, at a tie, 2 all.
inline void withhold(uint8_t* withheld, const accumulate_t* values, int64_t count, accumulate_t conv_bias,
                     accumulate_t bound) {
  int32_t halves[2 * winograd::kChunk];  // compilers compare in vectors only what is as wide as a value
  for (int64_t i = 0; i < count; i++) {
    // The gradient of conv2d_min_add_multiply.
    const accumulate_t x = values[i] + conv_bias;
    halves[i] = (x >= bound) + (x > bound);
  }
  for (int64_t i = 0; i < count; i++) withheld[i] = uint8_t(halves[i]);
}

// The whole problem: y (N, C, H', W') from x (N, Cin, H, W) and weight (C, Cin, 3, 3); withheld is like y, or
// has no elements. finite (N), ones before: 0 where a sample's convolution is not finite everywhere, so that
// direct sums may give something else.
EXPORT void convolve_forward(output_t* y, uint8_t* withheld, int32_t* finite, const value_t* x,
                             const value_t* weight, const accumulate_t* conv_bias, const accumulate_t* bias,
                             double constant, double scale, int64_t N, int64_t Cin, int64_t C, int64_t H,
                             int64_t W) {
  const accumulate_t bound = constant, factor = scale;
  const winograd::Sizes sizes{N, Cin, C, 1, H, W, 1};
  const int64_t sample = C * sizes.height() * sizes.width();
  winograd::convolve(x, weight, sizes, [=](int64_t c, int64_t at, const accumulate_t* values, int64_t count) {
    const accumulate_t inner = conv_bias[c], outer = bias[c];
    int odd = 0;
    for (int64_t i = 0; i < count; i++) {
      odd |= !(std::abs(values[i]) <= std::numeric_limits<accumulate_t>::max());
      y[at + i] = output_t(result_of(values[i], inner, bound, outer, factor));
    }
    if (withheld) withhold(withheld + at, values, count, inner, bound);
    if (odd) __atomic_store_n(finite + at / sample, 0, __ATOMIC_RELAXED);
  });
}

// The convolution v (N, C, D', H', W') from x (N, Cin, D, H, W) and weight (C, Cin, depth, 3, 3).
EXPORT void convolve(value_t* v, const value_t* x, const value_t* weight, int64_t N, int64_t Cin, int64_t C,
                     int64_t D, int64_t H, int64_t W, int64_t depth) {
  winograd::convolve(v, x, weight, {N, Cin, C, D, H, W, depth});
}

// Some of dv on the way through, and its sums.
struct Passing {
  static constexpr int64_t kMost = winograd::kPixels;  // values at a time
  value_t* dv;  // where it is there: two rows and columns from the edges of (N, C, height + 4, width + 4)
  const output_t* dy;
  const uint8_t* withheld;
  accumulate_t factor;
  int64_t height, width;

  // values = those from index `at` on, in whole vectors, all of one row; inner and outer (kLanes) grow by the
  // sums of dv and of dy·scale.
  void operator()(accumulate_t* values, double* inner, double* outer, int64_t at, int64_t count) const {
    alignas(sizeof(Lanes)) accumulate_t whole[kMost];
    uint8_t halves[kMost];
    fetch(at + 4 * height * width, count);
    // The gradient of conv2d_min_add_multiply.
    for (int64_t i = 0; i < count; i++) whole[i] = accumulate_t(dy[at + i]) * factor;
    for (int64_t i = 0; i < count; i++) halves[i] = withheld[at + i];
    for (int64_t i = count; i % kLanes; i++) whole[i] = 0, halves[i] = 0;
    // Loops of one vector: compilers would take the rest of a longer one element by element.
    Lanes passed = {}, all = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int64_t j = i; j < i + kLanes; j++) {
        const accumulate_t rest = halves[j] == 1 ? whole[j] / 2 : whole[j];
        values[j] = halves[j] == 2 ? accumulate_t(0) : rest;
      }
      passed += *reinterpret_cast<const Lanes*>(values + i);
      all += *reinterpret_cast<const Lanes*>(whole + i);
    }
    for (int j = 0; j < kLanes; j++) inner[j] += passed[j];
    for (int j = 0; j < kLanes; j++) outer[j] += all[j];
    if (dv) write(values, at, count);
  }

  // The same pixels of a later channel: rows that lie far apart are not fetched ahead by themselves.
  void fetch(int64_t at, int64_t count) const {
    constexpr int64_t kLine = sizeof(winograd::Line);
    for (int64_t i = 0; i < count; i += kLine / sizeof(output_t)) __builtin_prefetch(dy + at + i);
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(withheld + at + i);
  }

  void write(const accumulate_t* values, int64_t at, int64_t count) const {
    const int64_t row = at / width, plane = row / height;
    value_t* const out = dv + ((plane * (height + 4) + row % height + 2) * (width + 4) + at % width + 2);
    for (int64_t i = 0; i < count; i++) out[i] = value_t(values[i]);
  }
};

// Its gradients: of weight where that has elements, of v likewise, and of the parameters as in `backward`. dv
// (N, C, H' + 4, W' + 4), zero at its edges, makes the gradient of x a convolution. Sums are made in `parts`,
// one thread each.
EXPORT void convolve_backward(value_t* dweight, value_t* dv, accumulate_t* d_conv_bias, accumulate_t* d_bias,
                              const output_t* dy, const uint8_t* withheld, const value_t* x, double scale,
                              int64_t biases, int64_t N, int64_t Cin, int64_t C, int64_t H, int64_t W,
                              int64_t parts) {
  // Sums of dv, and of dy·scale, (2, parts, C), and what they are made of.
  std::vector<double> sums(2 * parts * C), lanes(sums.size() * kLanes);
  double* const first = lanes.data();
  const winograd::Sizes sizes{N, Cin, C, 1, H, W, 1};
  const int64_t height = sizes.height(), width = sizes.width();
  const Passing passing{dv, dy, withheld, accumulate_t(scale), height, width};
  const auto pass = [=](accumulate_t* values, int64_t part, int64_t c, int64_t at, int64_t count) {
    double* const inner = first + (part * C + c) * kLanes;
    passing(values, inner, inner + parts * C * kLanes, at, count);
  };
  if (dweight) {
    winograd::filter_gradient(dweight, x, sizes, parts, pass);
  } else {
    host::parallel_for(parts, 1, [=](int64_t begin, int64_t end) {
      alignas(sizeof(Lanes)) accumulate_t values[Passing::kMost];
      const int64_t rows = N * C * height;
      for (int64_t part = begin; part < end; part++)
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; row++)
          for (int64_t w = 0; w < width; w += Passing::kMost)
            pass(values, part, row / height % C, row * width + w, std::min(Passing::kMost, width - w));
    });
  }
  for (size_t i = 0; i < lanes.size(); i++) sums[i / kLanes] += lanes[i];
  sum_rows(d_conv_bias, C, sums.data(), parts, C);
  sum_rows(d_bias, biases, sums.data() + parts * C, parts, C);
}
