// The element types of one build, by -D flags, for nvcc and the host compiler: VALUE_T, what the convolution
// yields; OUTPUT_T, what the model returns (float, double, half_t or bfloat16_t); INDEX_T, an index for
// backward; PARAMETER_T, a generated tail's parameters, by default accumulate_t, which sums use.
#pragma once
#include <stdint.h>
#include <type_traits>

#ifndef EXPORT             // inline_loader.py has its own
#define EXPORT extern "C"  // marks a launcher that inline_loader.py turns into an operator
#endif

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using half_t = __half;
using bfloat16_t = __nv_bfloat16;
#define HOST_DEVICE __host__ __device__ __forceinline__
// A result as it is stored. A byte holds a small whole number, and needs no slow conversion.
template <class T> __device__ __forceinline__ T rounded(float v) { return T(v); }
template <> __device__ __forceinline__ uint8_t rounded(float v) { return __float_as_uint(v + 8388608.f); }
#else
#ifndef WITHOUT_HALVES  // defined for sources that name none: half a second's headers
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
using half_t = c10::Half;
using bfloat16_t = c10::BFloat16;
#endif
#define HOST_DEVICE inline
#endif

#ifndef VALUE_T
#define VALUE_T float
#endif
#ifndef OUTPUT_T
#define OUTPUT_T VALUE_T
#endif
#ifndef INDEX_T
#define INDEX_T int32_t
#endif
using value_t = VALUE_T;
using output_t = OUTPUT_T;
using index_t = INDEX_T;
using accumulate_t = std::conditional_t<std::is_same_v<value_t, double>, double, float>;
#ifdef PARAMETER_T
using parameter_t = PARAMETER_T;
#else
using parameter_t = accumulate_t;
#endif
// What results are compared with, as eager rounds it.
HOST_DEVICE accumulate_t bound(double x) { return accumulate_t(output_t(accumulate_t(x))); }
