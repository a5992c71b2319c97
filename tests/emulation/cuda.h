// CUDA's blocks on a CPU, one after the other, for tests without a GPU. Those of a cooperative launch run
// from one meeting to the next.
//
// A thread is a fiber, which runs until it has to wait: at a barrier, a shuffle, a product. Warps take turns
// at random, so that some run far ahead. Shared memory is NaN at the start. What no order of turns gets out
// of its waiting is a deadlock; `failure` says so. An order that a GPU would take and this does not is not
// tried: a test that passes here proves no absence of races.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device__
#define __forceinline__ inline
#define __global__
#define __host__
#define __launch_bounds__(...)
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulation {

constexpr int kSharedBytes = 227 << 10, kStackBytes = 256 << 10, kMostThreads = 1024, kPatience = 100000;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

}  // namespace emulation

emulation::Index gridDim, blockDim, blockIdx;
#define threadIdx emulation::self().index

namespace emulation {

// A copy in the background.
struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes, group;
};
// Begins in its context; from then on jumps take its turns up, which cost no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  Index index;
  bool begun = false, done = false;
  std::vector<Copy> copies;  // on their way
  int copy_groups = 0;       // so far
};
// Threads that wait for one another.
struct Barrier {
  int arrived = 0;
  long generation = 0;
};

// A block's threads, and its shared memory while another block runs: the dynamic part, and the static
// variables by their address, of which a thread has come to the declaration.
struct Block {
  Index index;
  std::vector<Fiber> fibers;
  std::unique_ptr<char[]> stacks;  // take no memory until they are used
  Barrier barrier, warp_barriers[kMostThreads / 32], named_barriers[16];
  int left, waiting = 0;  // threads that are not done; of these, those that wait for other blocks
  std::string dynamic_shared = std::string(kSharedBytes, '\xff');
  std::map<void*, std::string> static_shared;
};

alignas(1024) uint4 dynamic_shared[kSharedBytes / sizeof(uint4)];
jmp_buf scheduler;
std::function<void()> kernel;
std::mt19937 random_order(1);
Block* block;
int current;    // thread
long events;    // anything that may end a wait
long meetings;  // of all blocks
int multiprocessors = 1;
const char* failure = nullptr;

inline Fiber& self() { return block->fibers[current]; }
inline int thread_count() { return blockDim.x * blockDim.y * blockDim.z; }
inline int lane() { return current % 32; }
inline int warp() { return current / 32; }

inline void yield() {
  if (!_setjmp(self().jump)) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.jump, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

inline void arrive(Barrier& barrier, int count) {
  events++;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
}
inline void meet(Barrier& barrier, int count) {
  const long generation = barrier.generation;
  arrive(barrier, count);
  while (barrier.generation == generation) yield();
}

inline void run_fiber() {
  kernel();
  events++, self().done = true;
  yield();
}

// Until all threads of all blocks are here.
inline void meet_grid() {
  const long meeting = meetings;
  events++, block->waiting++;
  while (meetings == meeting) yield();
}

// Where a thread comes to the declaration of a static variable.
inline void shared_at_first(void* at, size_t bytes) {
  if (block->static_shared.emplace(at, std::string(bytes, '\xff')).second) memset(at, 0xff, bytes);
}

// On the stacks of the block that `block` was, if there was one.
inline void begin(Block& block, Index index) {
  std::unique_ptr<char[]> stacks = std::move(block.stacks);
  block = Block();
  block.index = index, block.left = thread_count(), block.fibers = std::vector<Fiber>(block.left);
  block.stacks =
      stacks ? std::move(stacks) : std::unique_ptr<char[]>(new char[size_t(kStackBytes) * block.left]);
  for (unsigned i = 0; i < block.left; i++) {
    Fiber& fiber = block.fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = block.stacks.get() + size_t(i) * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Until all threads are done or wait for other blocks.
inline void run_threads() {
  const int count = thread_count();
  for (int idle = 0; block->left > block->waiting;) {
    const int first = random_order() % ((count + 31) / 32) * 32;
    for (int turns = random_order() % 32 ? 1 : 32; turns; turns--) {
      const long before = events;
      for (current = first; current < std::min(first + 32, count); current++) {
        if (self().done) continue;
        resume(self());
        block->left -= self().done;
      }
      idle = events == before ? idle + 1 : 0;
    }
    if (idle > kPatience) {
      failure = "all threads wait: a deadlock";
      return;
    }
  }
}

inline void run(Block& next) {
  block = &next, blockIdx = next.index;
  memcpy(dynamic_shared, next.dynamic_shared.data(), kSharedBytes);
  for (auto& [at, content] : next.static_shared) memcpy(at, content.data(), content.size());
  run_threads();
  if (!next.left) return;
  memcpy(next.dynamic_shared.data(), dynamic_shared, kSharedBytes);
  for (auto& [at, content] : next.static_shared) memcpy(content.data(), at, content.size());
}

// From one meeting to the next, in a new order each time.
inline void run_together(std::vector<Block>& blocks) {
  std::vector<Block*> order;
  for (Block& each : blocks) order.push_back(&each);
  while (!failure) {
    std::shuffle(order.begin(), order.end(), random_order);
    int left = 0, waiting = 0;
    for (Block* each : order) {
      if (!failure) run(*each);
      left += each->left, waiting += each->waiting, each->waiting = 0;
    }
    if (!left) return;
    if (!failure && waiting < int(blocks.size()) * thread_count())
      failure = "some threads wait for others that have ended";
    meetings++;
  }
}

inline void launch(dim3 blocks, dim3 size, int64_t bytes, std::function<void()> of_thread,
                   bool together = false) {
  if (failure) return;
  kernel = of_thread;
  gridDim = {blocks.x, blocks.y, blocks.z}, blockDim = {size.x, size.y, size.z};
  const unsigned count = blocks.x * blocks.y * blocks.z;
  const bool too_many = std::max(blocks.y, blocks.z) >= 1 << 16 || (together && count > multiprocessors);
  if (count == 0 || too_many || bytes > kSharedBytes || thread_count() > kMostThreads || thread_count() % 32) {
    failure =
        "a launch that is not possible here: no blocks, too many along y or z or together, "
        "too much shared memory, too many threads, or a part of a warp";
    return;
  }
  std::vector<Block> all(together ? count : 1);
  for (unsigned i = 0; i < count && !failure; i++) {
    Block& own = all[together ? i : 0];
    begin(own, {i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y});
    if (!together) run(own);
    if (own.waiting) failure = "a block waits for others in a launch that is not cooperative";
  }
  if (together) run_together(all);
}

// Every lane of the warp gives a value, and reads another lane's.
template <class T> T exchange(T value, int from) {
  static uint64_t values[kMostThreads / 32][32];
  static_assert(sizeof(T) <= 8);
  memcpy(&values[warp()][lane()], &value, sizeof(T));
  meet(block->warp_barriers[warp()], 32);
  memcpy(&value, &values[warp()][from], sizeof(T));
  meet(block->warp_barriers[warp()], 32);
  return value;
}
template <class T, class Merge> T reduce(T value, Merge merge) {
  for (int mask = 16; mask; mask /= 2) value = merge(value, exchange(value, lane() ^ mask));
  return value;
}

}  // namespace emulation

// -------------------------------------------------------------------------------------- CUDA C++'s own words

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { meet(emulation::block->barrier, emulation::thread_count()); }
inline bool __syncthreads_or(bool value) {
  static bool any;
  __syncthreads();
  any = false;
  __syncthreads();
  any |= value;
  __syncthreads();
  return any;
}
inline void __syncwarp(unsigned = ~0u) { meet(emulation::block->warp_barriers[emulation::warp()], 32); }
template <class T> T __shfl_sync(unsigned, T value, int from) { return emulation::exchange(value, from); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, emulation::lane() ^ mask);
}
template <class T> T __shfl_down_sync(unsigned, T value, int offset) {
  return emulation::exchange(
      value, emulation::lane() + offset < 32 ? emulation::lane() + offset : emulation::lane());
}
inline bool __any_sync(unsigned, bool value) {
  return emulation::reduce(int(value), [](int a, int b) { return a | b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulation::reduce(value, [](unsigned a, unsigned b) { return max(a, b); });
}
inline void __threadfence() {}
template <class T, class U> T atomicAdd(T* at, U value) { return std::exchange(*at, *at + T(value)); }
template <class T, class U> T atomicMax(T* at, U value) { return std::exchange(*at, max(*at, T(value))); }
template <class T> void __stcs(T* at, T value) { *at = value; }
template <class T> T __ldcg(const T* at) { return *at; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
template <class To, class From> To emulated_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline int __float_as_int(float value) { return emulated_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }

// ------------------------------------------------------------------------------------------ the host's calls

inline cudaError_t emulated_get_device(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t emulated_attribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? __CUDA_ARCH__ / 100
           : attribute == cudaDevAttrCooperativeLaunch    ? 1
           : attribute == cudaDevAttrMultiProcessorCount  ? emulation::multiprocessors
                                                          : emulation::kSharedBytes;
  return cudaSuccess;
}
template <class... Arguments> cudaError_t emulated_nothing(Arguments...) { return cudaSuccess; }
template <class Kernel, class... Arguments>
cudaError_t emulated_launch(const cudaLaunchConfig_t* config, Kernel run, Arguments... arguments) {
  const bool together = config->numAttrs && config->attrs->id == cudaLaunchAttributeCooperative;
  emulation::launch(
      config->gridDim, config->blockDim, config->dynamicSmemBytes, [=] { run(arguments...); }, together);
  return cudaSuccess;
}
#define cudaGetDevice emulated_get_device
#define cudaDeviceGetAttribute emulated_attribute
#define cudaFuncGetAttributes emulated_nothing
#define cudaFuncSetAttribute emulated_nothing
#define cudaMemsetAsync(at, value, bytes, stream) memset(at, value, bytes)
#define cudaLaunchKernelEx emulated_launch

EXPORT void emulation_multiprocessors(int count) { emulation::multiprocessors = count; }
EXPORT const char* emulation_failure() { return std::exchange(emulation::failure, nullptr); }
