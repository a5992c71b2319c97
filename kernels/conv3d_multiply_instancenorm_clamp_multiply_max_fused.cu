// y = max over c of m[c]·clamp(instance_norm(conv(x)·m[c]), low, high), forward, with the convolution inside; its output is never written.
//
// Two launches: statistics per (sample, block, channel), then the convolution again, normalised and reduced over the channels.
// Instance normalisation removes whatever is constant over a channel: the convolution's bias and what shifting x adds.
#include "convolution3d.cuh"

struct MaximumSink {
  float low, high, m[2], offset[2], slope[2];  // real units: z = (v + offset)·slope
  float start[2], factor[2], w_scale[2];       // in units of the sums
  float* y;                                    // of the sample's first plane, at the block's first row
  int plane_size;
  bool first_channels;
  __device__ void first(float scale) { rescale(1, scale); }
  __device__ void rescale(float, float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) start[r] = offset[r] * scale * w_scale[r], factor[r] = slope[r] * (1 / scale) * (1 / w_scale[r]);
  }
  __device__ __forceinline__ void begin(float (&c)[kTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; j++) c[j][0] = c[j][1] = start[0], c[j][2] = c[j][3] = start[1];
  }
  __device__ __forceinline__ float value(int r, float v) const { return min_nan(max_nan(v * factor[r], low), high) * m[r]; }
  __device__ __forceinline__ void meanwhile(int, int, int, int) {}
  __device__ __forceinline__ void take(float (&v)[kTiles][4], int plane, int q, int limit) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float best[2 * kTiles];  // positions 2t, 2t + 1 of each tile
#pragma unroll
    for (int j = 0; j < kTiles; j++)
#pragma unroll
      for (int u = 0; u < 2; u++) best[2 * j + u] = max_nan(value(0, v[j][u]), value(1, v[j][2 + u]));
    // Over the 8 lanes g: each step halves the positions that a lane keeps, as long as there are two.
    int kept = 0;
    bool owner = true;
#pragma unroll
    for (int step = 0, count = 2 * kTiles; step < 3; step++, count = (count + 1) / 2) {
      const bool upper = g >> step & 1;
      if (count > 1) {
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
          const float mine = upper ? best[count / 2 + i] : best[i], other = upper ? best[i] : best[count / 2 + i];
          best[i] = max_nan(mine, __shfl_xor_sync(~0u, other, 4 << step));
        }
        kept += upper ? count / 2 : 0;
      } else {
        best[0] = max_nan(best[0], __shfl_xor_sync(~0u, best[0], 4 << step));
        owner &= !upper;
      }
    }
    const int position = q + kept / 2 * 8 + 2 * t + kept % 2;
    if (owner && position < limit) {
      float* at = y + int64_t(plane) * plane_size + position;
      *at = first_channels ? best[0] : max_nan(best[0], *at);
    }
  }
};

// The block's channels come 16 at a time; y holds the maximum so far, which the same thread reads again.
__global__ void __launch_bounds__(kBlock, BLOCKS_PER_SM)
apply_kernel(float* y, const PartStatistics* statistics, const float* conv_bias, const float* multiplier, float low, float high,
             float eps, const Convolution c) {
  extern __shared__ uint4 shared[];
  __shared__ float weight_scale[16];
  __shared__ float coefficients[16][3];
  const Part part(c, blockIdx.x);
  const int g = threadIdx.x % 32 / 4;
#pragma unroll 1
  for (int first_channel = 0; first_channel < kOut; first_channel += 16) {
    if (threadIdx.x < 16) {
      const int channel = first_channel + threadIdx.x;
      const Moments<float> moments = merge_slots(statistics, c, part.n, channel);
      const ScaledChannel scaled =
          scaled_channel(&moments.mean, &moments.m2, conv_bias + channel, multiplier + channel, eps, 0, 0, 1, int64_t(c.OD) * c.OH * c.OW);
      coefficients[threadIdx.x][0] = -scaled.mean, coefficients[threadIdx.x][1] = scaled.a, coefficients[threadIdx.x][2] = scaled.m;
    }
    find_weight_scales(weight_scale, c, first_channel);
    MaximumSink sink;
    sink.low = low, sink.high = high, sink.plane_size = c.OH * c.OW, sink.first_channels = first_channel == 0;
    sink.y = y + part.n * c.OD * int64_t(sink.plane_size) + part.first_row * c.OW;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sink.offset[r] = coefficients[g + 8 * r][0], sink.slope[r] = coefficients[g + 8 * r][1];
      sink.m[r] = coefficients[g + 8 * r][2], sink.w_scale[r] = weight_scale[g + 8 * r];
    }
    sweep(c, part, first_channel, weight_scale, reinterpret_cast<uint32_t*>(shared), sink);
  }
}

// y (N, D', H', W'); statistics (N, slots, CHANNELS_OUT, 2) is scratch, with slots = ceil(H' / rows)·ceil(D' / depth): a block computes
// `rows` output rows of `depth` output planes.
EXPORT void forward(float* y, float* statistics, const float* x, const float* weight, const float* conv_bias,
                    const float* multiplier, double low, double high, double eps, int64_t N, int64_t D, int64_t H, int64_t W,
                    int64_t rows, int64_t depth, cudaStream_t stream) {
  launch_statistics(statistics, convolution(x, weight, D, H, W, rows, depth), N, stream);
  const Convolution c = convolution(x, weight, D, H, W, rows, depth);
  const int bytes = shared_bytes(c);
  allow_shared(apply_kernel, bytes);
  apply_kernel<<<unsigned(N * c.slots()), kBlock, bytes, stream>>>(y, reinterpret_cast<const PartStatistics*>(statistics), conv_bias,
                                                                   multiplier, low, high, eps, c);
}
