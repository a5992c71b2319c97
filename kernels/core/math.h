// The functions of a tail, for one value or for a vector of them: the same text for a GPU's float, for the
// compilers' vector types on a CPU (any width) and for float and double on either.
//
// math::mish(x) is the function, math::mish_gradient(x) its derivative at x. NaN, infinities, zeros and
// subnormal numbers give what PyTorch's operators give; so do ties (hardswish at ±3, …), as autograd has
// them. The error of a float function is at most 4 units in the last place, or twice that of PyTorch's
// (tests/test_engine_math.py says where); double is the library's, lane by lane. Half types are computed in
// float by who calls.
//
// Most are written in a few words whose texts differ: exp, fast_exp2, quotient. A GPU has one MUFU for each.
// What stands for a float in sm_90a's machine code, constants' moves included (of which MUFU):
//   exp 10 (1)  tanh 16 (2)  sigmoid 17 (2)  silu 18 (2)  mish 19 (2)  softplus 24 (1)  erf 28 (1)
//   gelu 23 (2)  gelu_tanh 22 (2); gradients: silu 20 (2)  mish 25 (2)  gelu 24 (2)  gelu_tanh 26 (2)
#pragma once
#include <cmath>
#include <limits>
#include "core/scalar.h"

// A test gives its own models of a GPU's instructions before this header.
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#define MATH_ON_GPU
namespace gpu {

// MUFU.EX2, MUFU.RCP: 2 and 1 units in the last place; subnormal arguments and results are zeros.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp(float x) { return expf(x); }
__device__ __forceinline__ float log(float x) { return logf(x); }
__device__ __forceinline__ float log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float expm1(float x) { return expm1f(x); }
__device__ __forceinline__ float erf(float x) { return erff(x); }
__device__ __forceinline__ float exp2_accurate(float x) { return exp2f(x); }
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float difference(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double difference(double a, double b) { return __dsub_rn(a, b); }

}  // namespace gpu
#endif

#ifdef __CUDACC__
#define MATH HOST_DEVICE
#else
#define MATH inline __attribute__((always_inline))  // called, they would lose the registers of a whole tail
#endif

namespace math {

// --------------------------------------------------------------------------------------------------- vectors

template <class T, class = void> struct Traits {
  using Element = T;
  using Integer = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  static constexpr int lanes = 1;
};
template <class T> struct Traits<T, std::enable_if_t<!std::is_arithmetic_v<T>, decltype(void(T{}[0]))>> {
  using Element = std::remove_cv_t<std::remove_reference_t<decltype(T{}[0])>>;
  using Integer = decltype(T{} < T{});
  static constexpr int lanes = sizeof(T) / sizeof(Element);
};
template <class T> using Element = typename Traits<T>::Element;
template <class T> using Integer = typename Traits<T>::Integer;
template <class T> constexpr bool is_float = std::is_same_v<Element<T>, float>;

// The number in every lane; a zero keeps its sign.
template <class T> MATH T all(Element<T> number) { return number - T{}; }

// Of two operands, one of which may be a plain number beside a vector.
template <class A, class B>
using Common = std::conditional_t<(Traits<A>::lanes > 1 || std::is_integral_v<B>), A,
                                  std::conditional_t<(Traits<B>::lanes > 1 || std::is_integral_v<A>), B, A>>;
template <class T, class A> MATH T widened(A a) {
  if constexpr (std::is_same_v<T, A>) return a;
  else return all<T>(Element<T>(a));
}

// Lane by lane.
template <class T, class F> MATH T each(T x, const F& f) {
  if constexpr (Traits<T>::lanes == 1) {
    return f(x);
  } else {
    for (int j = 0; j < Traits<T>::lanes; j++) x[j] = f(x[j]);
    return x;
  }
}

// As results have it: what eager compares.
template <class T> MATH T rounded(T x) {
  if constexpr (std::is_same_v<Element<T>, output_t>) return x;
  else
    return each(x, [](Element<T> value) { return Element<T>(accumulate_t(output_t(accumulate_t(value)))); });
}

#ifndef __CUDACC__
template <class E, int bytes> using Vector __attribute__((vector_size(bytes))) = E;
#endif

// Both may be numbers beside a vector of masks.
template <class Mask, class A, class B> MATH auto select(Mask mask, A a, B b) {
  using T = Common<A, B>;
#ifndef __CUDACC__
  if constexpr (Traits<Mask>::lanes > Traits<T>::lanes) {
    using Wide = Vector<T, sizeof(T) * Traits<Mask>::lanes>;
    return mask ? all<Wide>(a) : all<Wide>(b);
  } else
#endif
    return mask ? widened<T>(a) : widened<T>(b);
}

template <class To, class From> MATH To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// c0 + x·(c1 + x·(…
template <class T> MATH T polynomial(T, float c) { return all<T>(c); }
template <class T, class... C> MATH T polynomial(T x, float c, C... higher) {
  return polynomial(x, higher...) * x + c;
}

// ---------------------------------------------------------------------------------------------- without
// error

template <class T> MATH T square(T x) { return x * x; }

template <class T> MATH T abs(T x) {
#ifdef __CUDACC__
  return ::fabs(x);
#else
  using I = Integer<T>;
  return bits<T>(bits<I>(x) & ~bits<I>(-T{}));
#endif
}

// The magnitude of x with the sign of `sign`.
template <class T> MATH T copysign(T x, T sign) {
#ifdef __CUDACC__
  return ::copysign(x, sign);
#else
  using I = Integer<T>;
  const I mask = bits<I>(-T{});
  return bits<T>((bits<I>(x) & ~mask) | (bits<I>(sign) & mask));
#endif
}

// As torch.minimum and torch.maximum: NaN of either side wins.
template <class A, class B> MATH Common<A, B> minimum(A a_, B b_) {
  using T = Common<A, B>;
  const T a = widened<T>(a_), b = widened<T>(b_);
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
#endif
  const T smaller = a < b ? a : b;
  return a != a ? a : smaller;
}
// What statistics are of: the same number in each pass. A GPU's compiler takes other products into sums that
// follow, unrounded.
template <class A, class B> MATH auto product(A a, B b) {
#ifdef MATH_ON_GPU
  if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) return gpu::product(a, b);
#endif
  return a * b;
}

// x less its maximum, say, both rounded: no product that makes one of them is taken in, as a compiler may do
// in one pass and not in the next. Of products as large as 2e5 an exponent would differ by 0.008.
template <class A, class B> MATH auto difference(A a_, B b_) {
  using T = decltype(a_ - b_);
  T a = widened<T>(a_), b = widened<T>(b_);
#if defined(MATH_ON_GPU)
  return gpu::difference(a, b);
#elif defined(__CUDACC__) || defined(__clang__)  // Clang, by default, takes none from another statement
#elif __GNUC__ >= 12
  a = __builtin_assoc_barrier(a), b = __builtin_assoc_barrier(b);
#else
  asm("" : "+m"(a));
  asm("" : "+m"(b));
#endif
  return a - b;
}

template <class A, class B> MATH Common<A, B> maximum(A a_, B b_) {
  using T = Common<A, B>;
  const T a = widened<T>(a_), b = widened<T>(b_);
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
#endif
  const T larger = a > b ? a : b;
  return a != a ? a : larger;
}

// torch.clamp: NaN stays NaN; low > high gives high.
template <class T, class A, class B> MATH T clamp(T x, A low, B high) {
  return minimum(maximum(x, widened<T>(low)), widened<T>(high));
}

template <class T> MATH T relu(T x) { return maximum(x, T{}); }

// The smaller, or `bound` in place of NaN: one instruction everywhere.
template <class T> MATH T at_most(T x, Element<T> bound) {
#ifdef __CUDACC__
  return ::fmin(x, bound);
#else
  return x < all<T>(bound) ? x : all<T>(bound);
#endif
}
template <class T> MATH T at_least(T x, Element<T> bound) {
#ifdef __CUDACC__
  return ::fmax(x, bound);
#else
  return x > all<T>(bound) ? x : all<T>(bound);
#endif
}

// ------------------------------------------------------------------------------------- on a CPU, in vectors

constexpr float kLog2e = 1.44269504088896f;
// ln 2 in two parts, of which the first has few digits: its product with an exponent is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;

namespace cpu {

constexpr float kRound = 12582912.f;  // 1.5·2²³: x + kRound has x, rounded, in its last bits

// x·2^n for a whole n, -252 to 252, rounded once where the result is subnormal.
template <class T> MATH T scale(T x, T n, Integer<T> whole) {
#if defined(__AVX512F__) && defined(__GNUC__)
  if constexpr (sizeof(T) == 64)
    return (T)__builtin_ia32_scalefps512_mask(x, n, x, -1, 4);  // 4: rounds as usual
#endif
  const Integer<T> half = whole >> 1, rest = whole - half;
  return x * bits<T>((half + 127) << 23) * bits<T>((rest + 127) << 23);
}

// A whole number n near y, |y| < 2²¹, as both types.
template <class T> struct Whole {
  T n;
  Integer<T> whole;
};
template <class T> MATH Whole<T> nearest(T y) {
  const T shifted = y + kRound;
  return {shifted - kRound, bits<Integer<T>>(shifted) - bits<int32_t>(kRound)};
}

// The numbers whose power is neither zero nor infinite, and NaN.
template <class T> MATH T within(T x, float low, float high) {
  x = x < all<T>(low) ? all<T>(low) : x;
  return x > all<T>(high) ? all<T>(high) : x;
}

template <class T> MATH T exp(T x_) {
  const T x = within(x_, -105, 90);
  const Whole<T> e = nearest(x * kLog2e);
  const T r = (x - e.n * kLn2High) - e.n * kLn2Low;
  const T p =
      r * r * polynomial(r, 0.49999994f, 0.166665211f, 0.0416682884f, 0.00836870354f, 0.00138189388f) + r +
      1.f;
  return scale(p, e.n, e.whole);
}

template <class T> MATH T exp2(T x_) {
  const T x = within(x_, -151, 129);
  const Whole<T> e = nearest(x);
  const T f = x - e.n;
  const T p = f * polynomial(f, 0.693147182f, 0.240226477f, 0.0555035956f, 0.00961850584f, 0.00133910251f,
                             0.000153267814f) +
              1.f;
  return scale(p, e.n, e.whole);
}

template <class T> MATH T expm1(T x_) {
  const T x = within(x_, -18, 89);  // -1 to the last digit, and beyond
  const Whole<T> e = nearest(x * kLog2e);
  const T r = (x - e.n * kLn2High) - e.n * kLn2Low;
  const T p =
      r * r * polynomial(r, 0.49999997f, 0.16666545f, 0.0416674614f, 0.00836643204f, 0.00138684351f) + r;
  const T half = bits<T>((e.whole + 126) << 23);  // of the power, which may itself be infinite
  const T y = (p * half + (half - 0.5f)) * 2.f;
  return abs(x) < all<T>(0x1p-24f) ? x : y;
}

template <class T> MATH T log(T x) {
  using I = Integer<T>;
  const auto small = x < all<T>(std::numeric_limits<float>::min());
  const T normal = small ? x * 0x1p23f : x;
  const I exponent = (bits<I>(normal) - bits<int32_t>(0.707106769f)) >> 23;
  const T f = bits<T>(bits<I>(normal) - (exponent << 23)) - 1.f;  // √½ - 1 to √2 - 1
  T e;
  if constexpr (Traits<T>::lanes == 1) e = T(exponent);
  else e = __builtin_convertvector(exponent, T);
  e = small ? e - 23.f : e;
  const T square = f * f;
  T y = f * square *
        polynomial(f, 0.333333135f, -0.250000089f, 0.20002076f, -0.166679919f, 0.142202064f, -0.124060407f,
                   0.11884819f, -0.116722085f, 0.0674871579f);
  y = (f + (e * kLn2Low + (y - 0.5f * square))) + e * kLn2High;
  const T infinity = all<T>(std::numeric_limits<float>::infinity());
  y = x < infinity ? y : x;  // infinity, NaN
  y = x > T{} ? y : (x == T{} ? -infinity : x + (y - y) / T{});
  return y;
}

template <class T> MATH T log1p(T x) {
  const T u = x + 1.f;
  const auto usual = (x > all<T>(-1.f)) & (x < all<T>(std::numeric_limits<float>::infinity()));
  const T y = log(u) + (usual ? (x - (u - 1.f)) / u : T{});
  return abs(x) < all<T>(0x1p-24f) ? x : y;
}

}  // namespace cpu

// ---------------------------------------------------------------------------------------------- what differs

#ifdef MATH_ON_GPU
#define MATH_PRIMITIVE(name, of_gpu)                  \
  template <class T> MATH T name(T x) {               \
    if constexpr (is_float<T>) return gpu::of_gpu(x); \
    else return ::name(x);                            \
  }
#else
#define MATH_PRIMITIVE(name, of_gpu)                                    \
  template <class T> MATH T name(T x) {                                 \
    if constexpr (is_float<T>) return cpu::name(x);                     \
    else return each(x, [](double value) { return std::name(value); }); \
  }
#endif
MATH_PRIMITIVE(exp, exp)
MATH_PRIMITIVE(exp2, exp2_accurate)
MATH_PRIMITIVE(log, log)
MATH_PRIMITIVE(log1p, log1p)
MATH_PRIMITIVE(expm1, expm1)

// 1 / x.
template <class T> MATH T reciprocal(T x) { return 1 / x; }

// 2^x where what lies below the normal numbers may be zero.
template <class T> MATH T fast_exp2(T x) {
#ifdef MATH_ON_GPU
  return gpu::exp2(x);
#else
  return cpu::exp2(x);
#endif
}

// 1 / x for a normal x below 2^126.
template <class T> MATH T fast_reciprocal(T x) {
#ifdef MATH_ON_GPU
  if constexpr (is_float<T>) return gpu::reciprocal(x);
#endif
  return 1 / x;
}

// a / b for such a b, rounded once: a quotient that is nearly right, and what is left of a.
template <class T> MATH T quotient(T a, T b) {
#ifdef MATH_ON_GPU
  if constexpr (is_float<T>) {
    const T inverse = gpu::reciprocal(b), near = a * inverse;
    return (a - b * near) * inverse + near;
  }
#endif
  return a / b;
}

template <class T> MATH T sqrt(T x) {
  return each(x, [](Element<T> value) { return std::sqrt(value); });
}
template <class T> MATH T rsqrt(T x) {
#ifdef __CUDACC__
  return ::rsqrt(x);
#else
  return 1 / sqrt(x);
#endif
}

template <class T> MATH T exp_gradient(T x) { return exp(x); }
template <class T> MATH T exp2_gradient(T x) { return exp2(x) * Element<T>(0.693147180559945309); }
template <class T> MATH T log_gradient(T x) { return 1 / x; }
template <class T> MATH T log1p_gradient(T x) { return 1 / (x + 1); }
template <class T> MATH T expm1_gradient(T x) { return exp(x); }
template <class T> MATH T sqrt_gradient(T x) { return Element<T>(0.5) / sqrt(x); }
template <class T> MATH T rsqrt_gradient(T x) {
  const T y = rsqrt(x);
  return Element<T>(-0.5) * y * (y * y);
}

// ------------------------------------------------------------------------------------- sigmoid and its
// family

// Powers t = exp(-|x|) neither overflow nor cancel: sigmoid is 1 / (1 + t), or below zero t / (1 + t).
template <class T> MATH T sigmoid(T x) {
  const T t = exp(-abs(x));
  return quotient(select(x < T{}, t, 1), t + 1);
}
template <class T> MATH T sigmoid_gradient(T x) {
  const T t = exp(-abs(x)), sum = t + 1;
  return quotient(t, sum * sum);
}

template <class T> MATH T silu(T x) { return x * sigmoid(x); }
template <class T> MATH T silu_gradient(T x) {
  const T t = exp(-abs(x)), near = quotient(T{} + 1, t + 1), far = t * near;  // sigmoid(|x|), sigmoid(-|x|)
  const auto negative = x < T{};
  return select(negative, far, near) * (x * select(negative, near, far) + 1);
}

template <class T> MATH T tanh(T x) {
  if constexpr (is_float<T>) {
    const T a = abs(x), s = x * x;
    const T large = -2 * fast_reciprocal(fast_exp2(a * (2 * kLog2e)) + 1) + 1;
    const T p = polynomial(s, -0.333332986f, 0.133319363f, -0.0537847169f, 0.0207986254f, -0.00589796668f);
    return a < all<T>(0.6f) ? x * s * p + x : copysign(large, x);
  } else {
    return each(x, [](double value) { return std::tanh(value); });
  }
}
template <class T> MATH T tanh_gradient(T x) { return 4 * sigmoid_gradient(2 * x); }

// x·tanh(ln(1 + e)) = x·n / (n + 2) with e = exp(x), n = e·(e + 2): sums of positive numbers. From 20 on the
// quotient is 1.
template <class T> MATH T mish(T x) {
  const T e = exp(at_most(x, 20)), n = e * e + 2 * e;
  return x * quotient(n, n + 2);
}
template <class T> MATH T mish_gradient(T x) {
  const T e = exp(at_most(x, 20)), n = e * e + 2 * e;
  const T inverse = quotient(T{} + 1, n + 2);
  return x * select(x < all<T>(20), 4 * (e * inverse) * ((e + 1) * inverse), 0) + n * inverse;
}

// ln(1 + t) for t in 0 to 1.
template <class T> MATH T log1p_of_share(T t) {
  if constexpr (is_float<T>)
    return t * polynomial(t, 1.f, -0.499999881f, 0.333327144f, -0.249888644f, 0.198996231f, -0.161351711f,
                          0.124795295f, -0.0832389519f, 0.042114824f, -0.0136916717f, 0.00208454439f);
  else return log1p(t);
}

// ln(1 + exp(βx)) / β; x itself where βx exceeds the threshold.
template <class T> MATH T softplus(T x, Element<T> beta, Element<T> threshold) {
  const T z = x * beta;
  const T y = (log1p_of_share(exp(-abs(z))) + at_least(z, 0)) * (1 / beta);
  return z > all<T>(threshold) ? x : y;
}
template <class T> MATH T softplus_gradient(T x, Element<T> beta, Element<T> threshold) {
  const T z = x * beta;
  return select(z > all<T>(threshold), 1, sigmoid(z));
}

template <class T> MATH T elu(T x, Element<T> alpha) { return x <= T{} ? alpha * expm1(x) : x; }
template <class T> MATH T elu_gradient(T x, Element<T> alpha) {
  return x <= T{} ? alpha * exp(x) : all<T>(1);
}

// -------------------------------------------------------------------------------------------- erf and its
// own

constexpr double kTwoOverSqrtPi = 1.12837916709551257, kSqrtHalf = 0.707106781186547524;
constexpr double kNormal = 0.398942280401432678;  // 1 / √(2π)

// The normal distribution's tail beyond t ≥ 0, divided by exp(-t²/2).
template <class T> MATH T mills(T t_) {
  const T t = at_most(t_, 14);  // farther out exp(-t²/2) is zero
  const T p = polynomial(t, 0.5f, 0.437251106f, 0.182461977f, 0.0403726035f, 0.00407761734f);
  const T q = polynomial(t, 1.f, 1.67238717f, 1.19929134f, 0.467429487f, 0.101205919f, 0.0102209422f);
  return quotient(p, q);
}

namespace cpu {

template <class T> MATH T erf(T x) {
  const T a = abs(x), s = x * x;
  const T large = 1 - 2 * (exp2(s * -kLog2e) * mills(a * 1.41421356f));
  const T p = polynomial(s, 0.128379166f, -0.376126289f, 0.112836242f, -0.02685556f, 0.00519175315f,
                         -0.000803975272f, 7.94310035e-05f);
  return a < all<T>(0.9f) ? x * p + x : copysign(large, x);
}

}  // namespace cpu
MATH_PRIMITIVE(erf, erf)
#undef MATH_PRIMITIVE
template <class T> MATH T erf_gradient(T x) { return Element<T>(kTwoOverSqrtPi) * exp(-(x * x)); }

// The normal distribution's integral up to x, without the cancellation of 1 + erf: below zero it is
// exp(-x²/2)·M(-x), and M a quotient of polynomials with positive terms alone.
template <class T> struct Normal {
  T power, value;  // exp(-x²/2), and the integral
  MATH explicit Normal(T x) {
    if constexpr (is_float<T>) {
      power = fast_exp2(x * x * (-0.5f * kLog2e));
      const T tail = power * mills(abs(x));
      value = x < T{} ? tail : 1 - tail;
    } else {
      power = exp(x * x * -0.5);
      value = 0.5 * each(x * -kSqrtHalf, [](double y) { return std::erfc(y); });
    }
  }
};
template <class T> MATH T gelu(T x) { return x * Normal<T>(x).value; }
template <class T> MATH T gelu_gradient(T x) {
  const Normal<T> normal(x);
  return x * (normal.power * Element<T>(kNormal)) + normal.value;
}

// x/2·(1 + tanh u) = x·sigmoid(2u), u = √(2/π)·(x + 0.044715·x³).
constexpr double kGelu = 2 * 0.797884560802865356, kCubic = 0.044715;
template <class T> MATH T gelu_tanh(T x) {
  return x * sigmoid(x * (x * x * Element<T>(kGelu * kCubic) + Element<T>(kGelu)));
}
template <class T> MATH T gelu_tanh_gradient(T x) {
  const T square = x * x;
  const T u = x * (square * Element<T>(kGelu * kCubic) + Element<T>(kGelu)), t = exp(-abs(u));
  const T near = quotient(T{} + 1, t + 1), far = t * near;
  return x * (near * far) * (square * Element<T>(3 * kGelu * kCubic) + Element<T>(kGelu)) +
         select(u < T{}, far, near);
}

// ------------------------------------------------------------------------------------------------ in pieces

template <class T> MATH T hardsigmoid(T x) { return clamp(x + 3, 0, 6) * Element<T>(1. / 6); }
template <class T> MATH T hardsigmoid_gradient(T x) {
  return select((x > all<T>(-3)) & (x < all<T>(3)), all<T>(Element<T>(1. / 6)), 0);
}
template <class T> MATH T hardswish(T x) { return x * at_most(at_least(x + 3, 0), 6) * Element<T>(1. / 6); }
template <class T> MATH T hardswish_gradient(T x) {
  const T inside = x < all<T>(3) ? x * Element<T>(1. / 3) + Element<T>(0.5) : all<T>(1);
  return x <= all<T>(-3) ? T{} : inside;
}

}  // namespace math
#undef MATH
