// y = relu(conv2d(x, weight) + conv_bias) * scale + bias
#include <cmath>
#include "core/numerics.h"
#include "host/tensor.h"

struct Tail {
  const accumulate_t *conv_bias, *bias;  // (C)
  accumulate_t scale;

  accumulate_t operator()(accumulate_t v, int64_t c) const {
    return maximum(v + conv_bias[c], accumulate_t(0)) * scale + bias[c];
  }
  // Of v and conv_bias; that of bias is dy.
  accumulate_t gradient(accumulate_t dy, bool positive) const { return positive ? dy * scale : accumulate_t(0); }
};

// Each output of a valid convolution, f(n, c, i, j, position in y), and each product in it, g(position in x, in weight).
template <class F> void each_output(const In<value_t>& x, const In<value_t>& weight, const F& f) {
  const int64_t C = weight.size(0), H = x.size(2) - weight.size(2) + 1, W = x.size(3) - weight.size(3) + 1;
  for (int64_t n = 0; n < x.size(0); n++)
    for (int64_t c = 0; c < C; c++)
      for (int64_t i = 0; i < H; i++)
        for (int64_t j = 0; j < W; j++) f(n, c, i, j, ((n * C + c) * H + i) * W + j);
}
template <class G>
void each_product(const In<value_t>& x, const In<value_t>& weight, int64_t n, int64_t c, int64_t i, int64_t j, const G& g) {
  for (int64_t k = 0; k < x.size(1); k++)
    for (int64_t a = 0; a < weight.size(2); a++)
      for (int64_t b = 0; b < weight.size(3); b++)
        g(((n * x.size(1) + k) * x.size(2) + i + a) * x.size(3) + j + b,
          ((c * x.size(1) + k) * weight.size(2) + a) * weight.size(3) + b);
}

template <class Keep>
void convolve(value_t* y, const In<value_t>& x, const In<value_t>& weight, const Tail& tail, const Keep& keep) {
  each_output(x, weight, [&](int64_t n, int64_t c, int64_t i, int64_t j, int64_t at) {
    double sum = 0;
    each_product(x, weight, n, c, i, j, [&](int64_t p, int64_t q) { sum += double(x[p]) * weight[q]; });
    y[at] = tail(accumulate_t(sum), c);
    keep(at, sum + tail.conv_bias[c] > 0);
  });
}

EXPORT void forward(Out<value_t> y, In<value_t> x, In<value_t> weight, In<accumulate_t> conv_bias, In<accumulate_t> bias,
                    double scale) {
  convolve(y, x, weight, Tail{conv_bias, bias, accumulate_t(scale)}, [](int64_t, bool) {});
}

EXPORT int64_t positive_size(In<value_t> x, In<value_t> weight) {
  const int64_t count = x.size(0) * weight.size(0) * (x.size(2) - weight.size(2) + 1) * (x.size(3) - weight.size(3) + 1);
  return (count + 7) / 8;
}

// A bit an element.
EXPORT void forward_saving(Out<value_t> y, Out<uint8_t> positive, In<value_t> x, In<value_t> weight, In<accumulate_t> conv_bias,
                           In<accumulate_t> bias, double scale) {
  for (int64_t i = 0; i < positive.numel(); i++) positive[i] = 0;
  convolve(y, x, weight, Tail{conv_bias, bias, accumulate_t(scale)},
           [&](int64_t at, bool is) { positive[at / 8] |= uint8_t(is << at % 8); });
}

EXPORT void backward(Out<value_t> dx, Out<value_t> dweight, Out<accumulate_t> dconv_bias, Out<accumulate_t> dbias, In<value_t> dy,
                     In<uint8_t> positive, In<value_t> x, In<value_t> weight, double scale) {
  const Tail tail{nullptr, nullptr, accumulate_t(scale)};
  Scratch<double> sums(2 * weight.size(0)), of_x(dx.numel()), of_weight(dweight.numel());
  for (auto [sum, count] : {std::pair(sums.data, 2 * weight.size(0)), {of_x.data, dx.numel()}, {of_weight.data, dweight.numel()}})
    for (int64_t i = 0; i < count; i++) sum[i] = 0;
  each_output(x, weight, [&](int64_t n, int64_t c, int64_t i, int64_t j, int64_t at) {
    const accumulate_t dv = tail.gradient(dy[at], positive[at / 8] >> at % 8 & 1);
    sums[2 * c] += dv, sums[2 * c + 1] += dy[at];
    each_product(x, weight, n, c, i, j, [&](int64_t p, int64_t q) {
      if (dx) of_x[p] += double(dv) * weight[q];
      if (dweight) of_weight[q] += double(dv) * x[p];
    });
  });
  for (int64_t i = 0; i < dx.numel(); i++) dx[i] = value_t(of_x[i]);
  for (int64_t i = 0; i < dweight.numel(); i++) dweight[i] = value_t(of_weight[i]);
  for (int64_t c = 0; c < weight.size(0); c++) dconv_bias[c] = sums[2 * c], dbias[c] = sums[2 * c + 1];
}
