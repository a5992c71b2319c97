// CUDA's blocks on a CPU, one after the other, for tests without a GPU. Those of a cooperative launch run
// from one meeting to the next.
//
// A thread is a fiber, which runs until it has to wait: at a barrier, a shuffle, a product. Warps take turns
// at random, so that some run far ahead. Shared memory is NaN at the start. What no order of turns gets out
// of its waiting is a deadlock; `failure` says so. An order that a GPU would take and this does not is not
// tried: a test that passes here proves no absence of races.
#pragma once
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

#pragma GCC visibility push(default)
namespace emulation {

constexpr int kSharedBytes = 227 << 10, kMostThreads = 1024, kMostTiles = 32;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// What a thread knows of itself.
struct Thread {
  Index index;
  int number;
};
extern Thread* thread;  // that runs
extern int multiprocessors, shared_bytes, l2_bytes;  // shared: of a block, at most
extern const char* failure;

inline int lane() { return thread->number % 32; }

// Runs run(kernel) in every thread. together: blocks may wait for one another.
void launch(Index blocks, Index size, int64_t bytes, void (*run)(const void*), const void* kernel,
            void* dynamic_shared, bool together);

// A launcher's scratch memory: NaN, with bytes around it that nothing may write to, as `release` sees.
void* allocate(int64_t bytes, void** memory);
void release(void* memory);

// Where a thread comes to the declaration of a static variable.
void shared_at_first(void* at, size_t bytes);

void yield();
void meet_grid();      // until all threads of all blocks are here
void meet_warp();      // … of the warp
void meet_block();     // … of the block; or `count` threads, at a barrier with a name:
void meet_at(int barrier, int count);
void arrive_at(int barrier, int count);
bool meet_block_or(bool value);
// Every lane of the warp gives a value: these are all 32, until the warp meets again.
const uint64_t* of_all_lanes(uint64_t value);

// What core/tensor_core.cuh has, by its own names.
bool is_shared(const void* at, int bytes);
void copy_later(void* to, const void* from, int bytes);  // from a null pointer: zeros
void commit_copies();
void await_copies(int pending);
void copy_out_later(void* to, const void* from, int bytes);
void await_reads();
void product(float (&d)[4], const uint32_t* a, const uint32_t* b, int depth, bool bfloat16);
void products(float (*d)[4], const uint32_t* a, const uint32_t* b, int tiles, bool bfloat16);  // of 16 k, by 8 columns
void product_tf32(float (&d)[4], const uint32_t* a, const uint32_t* b);
void product_sparse(float (&d)[4], const uint32_t* a, const uint32_t* b, uint32_t selectors);
void initialize(uint64_t* barrier, int arrivals);
void arrive(uint64_t* barrier);
void arrive(uint64_t* barrier, int bytes);
void await(uint64_t* barrier, uint32_t parity);
void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier);

template <class T> T exchange(T value, int from) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  memcpy(&value, of_all_lanes(word) + from, sizeof(T));
  return value;
}

}  // namespace emulation

extern emulation::Index gridDim, blockDim, blockIdx;
EXPORT void emulation_device(int multiprocessors, int shared);
EXPORT void emulation_cache(int bytes);  // of L2
EXPORT const char* emulation_failure();
#pragma GCC visibility pop
