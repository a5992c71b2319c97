// A sink (core/sinks.cuh) for max pooling: keeps the largest v of each window, and where it is, in registers
// until a row of windows is complete, and writes it while the next rows' products are under way. Windows
// don't overlap; rows and columns that fill none are left out. NaN counts as less than all others.
#pragma once
#include "core/sinks.cuh"

namespace pool {

// Windows of the largest of kHeight × kWidth.
template <int kHeight_, int kWidth_> struct Max {
  static constexpr int kHeight = kHeight_, kWidth = kWidth_, kArea = kHeight * kWidth;
};

// kPlaces: are places wanted, too? They are a byte each, and the first among equal ones.
template <class Pool, bool kPlaces> struct Window {
  float* window_max;  // (N, C, PH, PW)
  uint8_t* argmax;    // by rows of the window; like window_max

  static constexpr int kRowGroup = Pool::kHeight;
  static constexpr int kBatch = 8;  // channels whose windows are read together
  // Until a window's rows are complete, a thread keeps of two neighbouring columns the larger value, or both
  // where windows of an odd width may part them.
  static constexpr int kKept = Pool::kWidth % 2 == 0 ? 1 : 2;
  static constexpr int kWidth = Pool::kWidth / (3 - kKept);  // kept values that a window has in a row
  static constexpr int kPacked = kKept == 1 ? 1 : 8;         // origins of kept values in a register
  // Kept values of a channel in shared memory; no bank conflicts.
  template <class Loop> static constexpr int kPitch = Loop::kColumns / 2 * kKept + 4 * kKept;

  template <class Loop> struct Kept {
    alignas(16) float kept[Loop::kBlockChannels][kPitch<Loop>];
  };
  template <class Loop> struct Origins {
    uint8_t origins[Loop::kBlockChannels][kPitch<Loop>];
  };
  template <class Loop>
  struct Shared : Kept<Loop>, std::conditional_t<kPlaces, Origins<Loop>, sinks::NoRoom<Window>> {};

  // A lane's windows pass through shared memory, since a window's columns are several lanes'.
  template <class Loop> struct Warp : sinks::IdleWarp {
    static constexpr int kTiles = Loop::kTiles, kColumns = 8 * kTiles, kStagingPitch = kPitch<Loop>;
    using Place = typename Loop::Place;
    const Place& place;
    float* const staging;     // [16][kStagingPitch]: kept values
    uint8_t* staged_origins;  // and where each comes from
    float* const window_max;
    uint8_t* const argmax;
    const int pooled_columns;
    float* out;      // the next row of windows
    int window_row;  // the next of the rows of a window
    uint32_t left,
        right;  // places of its first two columns; both are kept, so that to choose is one instruction
    float best[2][kTiles][kKept];
    // Where they come from: the place in the window of the row and of the pair's column, as if the pair were
    // the first; or where both columns are kept, the row alone, in four bits.
    uint32_t origins[kPlaces ? 2 * kTiles * kKept / kPacked : 1];

    __device__ __forceinline__ Warp(const Window& sink, Shared<Loop>& shared, const Place& place)
        : place(place), staging(&shared.kept[0][0] + place.first_own * kStagingPitch),
          window_max(sink.window_max), argmax(sink.argmax), pooled_columns(place.columns / Pool::kWidth) {
      if constexpr (kPlaces) staged_origins = &shared.origins[0][0] + place.first_own * kStagingPitch;
    }
    __device__ __forceinline__ int pooled_height() const { return place.height() / Pool::kHeight; }
    __device__ __forceinline__ int pooled_width() const { return place.width() / Pool::kWidth; }

    __device__ __forceinline__ void begin() {
      out = window_max + (place.first * pooled_height() + place.row() / Pool::kHeight) * pooled_width() +
            place.column() / Pool::kWidth;
      window_row = 0, left = 0, right = 1;
#pragma unroll
      for (int i = 0; i < 2 * kTiles * kKept; i++) (&best[0][0][0])[i] = -INFINITY;
#pragma unroll
      for (uint32_t& origin : origins) origin = 0;
    }
    template <class Offset>
    __device__ __forceinline__ void accept(Accumulators<kTiles>& v, const Offset& offset) {
      take_maxima(v);
      if (window_row == Pool::kHeight - 1) stage_maxima(offset);
      window_row++, left += Pool::kWidth, right += Pool::kWidth;
    }
    __device__ __forceinline__ void overlap() {
      if (window_row == Pool::kHeight) write_row();
    }
    __device__ __forceinline__ void end() { overlap(); }

   private:
    // Writes the row of windows that is complete.
    __device__ __forceinline__ void write_row() {
      const int lane = threadIdx.x % 32;
      window_row = 0, left = 0, right = 1;
      __syncwarp();  // these windows have been written
#pragma unroll
      for (int p = 0; p < kColumns / Pool::kWidth; p += 32) {
        float* to = out + p + lane;
#pragma unroll
        for (int first = 0; first < 16; first += kBatch) {
          float maximum[kBatch];
          int where[kBatch];
#pragma unroll
          for (int r = 0; r < kBatch; r++) {
            const int window = p + lane < kColumns / Pool::kWidth ? p + lane : 0;
            read_window(maximum[r], where[r], (first + r) * kStagingPitch + window * kWidth);
          }
          write_windows(to, maximum, where, p + lane < pooled_columns, first);
        }
      }
      out += pooled_width();
    }
    __device__ __forceinline__ void take_maxima(const Accumulators<kTiles>& v) {
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
          for (int k = 0; k < kKept; k++) {
            const float value = kKept == 1 ? fmaxf(v[j][half * 2], v[j][half * 2 + 1]) : v[j][half * 2 + k];
            if (kPlaces) {
              uint32_t& origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
              const uint32_t own = 15u << (k + j * kKept) % kPacked * 4;
              const uint32_t changed = kKept == 1 ? (v[j][half * 2 + 1] > v[j][half * 2] ? right : left)
                                                  : (origin & ~own) | (window_row * 0x11111111u & own);
              origin = value > best[half][j][k] ? changed : origin;
            }
            best[half][j][k] = fmaxf(best[half][j][k], value);
          }
    }
    // The kept values of the row of windows to `staging`; the next one's start anew.
    template <class Offset> __device__ __forceinline__ void stage_maxima(const Offset& offset) {
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      __syncwarp();  // the last windows have been read
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < kTiles; j++) {
          const int first = (half * 8 + g) * kStagingPitch + (j * 4 + t) * kKept;
          float* const to = staging + first;
          if (kKept == 1) to[0] = best[half][j][0] + offset[half];
          else
            *reinterpret_cast<float2*>(to) =
                make_float2(best[half][j][0] + offset[half], best[half][j][kKept - 1] + offset[half]);
#pragma unroll
          for (int k = 0; k < kKept; k++) {
            if (kPlaces) {
              const uint32_t origin = origins[((half * kTiles + j) * kKept + k) / kPacked];
              staged_origins[first + k] =
                  uint8_t(kKept == 1 ? origin : origin >> (k + j * kKept) % kPacked * 4 & 15);
            }
            best[half][j][k] = -INFINITY;
          }
        }
    }
    // The maximum of a window whose kept values begin with `first`, and the first place that has it.
    __device__ __forceinline__ void read_window(float& maximum, int& where, int first) const {
      const float* const from = staging + first;
      if (kWidth == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        maximum = fmaxf(two.x, two.y);
      } else {
        maximum = from[0];
#pragma unroll
        for (int i = 1; i < kWidth; i++) maximum = fmaxf(maximum, from[i]);
      }
      if (!kPlaces) return;
      where = Pool::kArea - 1;
#pragma unroll
      for (int i = kWidth - 1; i >= 0; i--) {
        const int origin = staged_origins[first + i];
        const int own = kKept == 1 ? origin + 2 * i : origin * Pool::kWidth + i;
        if (from[i] == maximum) where = i == kWidth - 1 ? own : min(where, own);
      }
    }
    // Of kBatch channels from the warp's `first` on, a window each, if it is `wanted`; moves `to` on.
    __device__ __forceinline__ void write_windows(float*& to, const float (&maximum)[kBatch],
                                                  const int (&where)[kBatch], bool wanted, int first) const {
      const int64_t stride = int64_t(pooled_height()) * pooled_width();
      if (wanted) {
        float* value = to;
        uint8_t* origin = kPlaces ? argmax + (to - window_max) : nullptr;
#pragma unroll
        for (int r = 0; r < kBatch; r++, value += stride, origin += stride) {
          if (!place.real(first + r)) break;
          const float2 power = place.unscale(first + r);
          *value = maximum[r] * power.x * power.y;
          if (kPlaces) *origin = uint8_t(where[r]);
        }
      }
      to += kBatch * stride;
    }
  };
};

}  // namespace pool
