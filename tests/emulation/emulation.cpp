// What emulation.h declares. Compiled once, with all optimisation, for all kernels.
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulation.h"

emulation::Index gridDim, blockDim, blockIdx;

namespace emulation {

constexpr int kStackBytes = 256 << 10, kPatience = 100000, kMostWarps = kMostThreads / 32;

// A copy in the background.
struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes, group;
};
// Begins in a context; from then on jumps take its turns up, which cost no system call. When its thread is
// done, it rests until another needs a fiber.
struct Fiber : Thread {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};  // takes no memory until it is used
  void* jump[5];
  bool begun = false, done;
  const long* awaited;  // the fiber waits while this is `seen`
  long seen;
  std::vector<Copy> copies, leaving;  // on their way, to shared memory and from it
  int copy_groups;           // so far
};
// Threads that wait for one another.
struct Barrier {
  int arrived = 0;
  long generation = 0;
};

std::vector<std::unique_ptr<Fiber>> resting;

// A block's threads, and its shared memory while another block runs: the dynamic part, and the static
// variables by their address, of which a thread has come to the declaration.
struct Block {
  Block(Index index, int threads);
  ~Block();
  Index index;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier barrier, warp_barriers[kMostWarps], named_barriers[20];
  bool any = false, any_of_meeting[2];
  int left, waiting = 0;  // threads that are not done; of these, those that wait for other blocks
  std::string dynamic_shared;
  std::map<void*, std::string> static_shared;
};

Thread* thread;
int multiprocessors = 1, shared_bytes = kSharedBytes, l2_bytes = 1 << 16;
const char* failure = nullptr;

void (*run_kernel)(const void*);
const void* kernel;
char* shared;  // the dynamic part, of the block that runs
void* scheduler[5];
std::mt19937 random_order(1);
Block* block;
long events;    // anything that may end a wait
long meetings;  // of all blocks

Fiber& self() { return static_cast<Fiber&>(*thread); }
int thread_count() { return blockDim.x * blockDim.y * blockDim.z; }
int warp() { return thread->number / 32; }

// --------------------------------------------------------------------------------------------------- turns

// Not inlined: a function may not jump to itself.
[[gnu::noinline]] void jump_to(void** place) { __builtin_longjmp(place, 1); }
[[gnu::noinline]] void yield() {
  if (!__builtin_setjmp(self().jump)) jump_to(scheduler);
}
void run_fiber() {
  while (true) {
    run_kernel(kernel);
    if (!self().leaving.empty()) failure = "a thread is done while copies still read shared memory";
    events++, self().done = true;
    yield();
  }
}
void begin(Fiber& fiber) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_fiber, 0);
  fiber.begun = true;
  setcontext(&context);
}
[[gnu::noinline]] void resume(Fiber& fiber) {
  thread = &fiber, fiber.awaited = nullptr;
  if (__builtin_setjmp(scheduler)) return;
  if (fiber.begun) jump_to(fiber.jump);
  begin(fiber);
}

void wait_while(const long& same) {
  self().awaited = &same, self().seen = same;
  yield();
}
// The last one that arrives does `last` before all go on.
template <class Last> void meet(Barrier& barrier, int count, Last last) {
  events++;
  if (++barrier.arrived < count) return wait_while(barrier.generation);
  last();
  barrier.arrived = 0, barrier.generation++;
}
void meet(Barrier& barrier, int count) {
  meet(barrier, count, [] {});
}

Block::Block(Index index, int threads) : index(index), left(threads) {
  for (int i = 0; i < threads; i++) {
    if (resting.empty()) resting.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers.emplace_back(std::move(resting.back()));
    resting.pop_back();
    const unsigned x = blockDim.x, y = blockDim.y;
    fiber.index = {i % x, i / x % y, i / x / y}, fiber.number = i;
    fiber.done = false, fiber.awaited = nullptr, fiber.copies.clear(), fiber.leaving.clear(), fiber.copy_groups = 0;
  }
}
Block::~Block() {
  for (auto& fiber : fibers)
    if (fiber->done) resting.push_back(std::move(fiber));
}

// Until all threads are done or wait for other blocks.
void run_threads() {
  const int warps = thread_count() / 32;
  for (int idle = 0; block->left > block->waiting;) {
    const auto first = block->fibers.begin() + random_order() % warps * 32;
    for (int turns = random_order() % 32 ? 1 : 32; turns; turns--) {
      const long before = events;
      for (auto at = first; at < first + 32; at++) {
        Fiber& fiber = **at;
        if (fiber.done || (fiber.awaited && *fiber.awaited == fiber.seen)) continue;
        resume(fiber);
        block->left -= fiber.done;
      }
      idle = events == before ? idle + 1 : 0;
    }
    if (idle > kPatience) {
      failure = "all threads wait: a deadlock";
      return;
    }
  }
}

void run(Block& next) {
  block = &next, blockIdx = next.index;
  if (next.dynamic_shared.empty()) memset(shared, 0xff, kSharedBytes);
  else memcpy(shared, next.dynamic_shared.data(), kSharedBytes);
  for (auto& [at, content] : next.static_shared) memcpy(at, content.data(), content.size());
  run_threads();
  if (!next.left) return;
  next.dynamic_shared.assign(shared, kSharedBytes);
  for (auto& [at, content] : next.static_shared) memcpy(content.data(), at, content.size());
}

// From one meeting to the next, in a new order each time.
void run_together(std::vector<std::unique_ptr<Block>>& blocks) {
  while (!failure) {
    std::shuffle(blocks.begin(), blocks.end(), random_order);
    int left = 0, waiting = 0;
    for (auto& each : blocks) {
      if (!failure) run(*each);
      left += each->left, waiting += each->waiting, each->waiting = 0;
    }
    if (!left) return;
    if (!failure && waiting < int(blocks.size()) * thread_count())
      failure = "some threads wait for others that have ended";
    meetings++;
  }
}

void launch(Index blocks, Index size, int64_t bytes, void (*run_it)(const void*), const void* of_thread,
            void* dynamic_shared, bool together) {
  if (failure) return;
  run_kernel = run_it, kernel = of_thread, shared = static_cast<char*>(dynamic_shared);
  gridDim = blocks, blockDim = size;
  const unsigned count = blocks.x * blocks.y * blocks.z;
  const bool too_many = std::max(blocks.y, blocks.z) >= 1 << 16 || (together && count > multiprocessors);
  const bool whole_warps = thread_count() <= kMostThreads && thread_count() % 32 == 0;
  if (count == 0 || too_many || bytes > shared_bytes || !whole_warps) {
    failure =
        "a launch that is not possible here: no blocks, too many along y or z or together, "
        "too much shared memory, too many threads, or a part of a warp";
    return;
  }
  std::vector<std::unique_ptr<Block>> all;
  for (unsigned i = 0; i < count && !failure; i++) {
    const Index index{i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y};
    all.push_back(std::make_unique<Block>(index, thread_count()));
    if (together) continue;
    run(*all[0]);
    if (all[0]->waiting) failure = "a block waits for others in a launch that is not cooperative";
    all.clear();
  }
  if (together) run_together(all);
}

// ------------------------------------------------------------------------------------------ shared memory

void shared_at_first(void* at, size_t bytes) {
  const auto [place, first] = block->static_shared.try_emplace(at);
  if (!first) return;
  place->second.resize(bytes);
  memset(at, 0xff, bytes);
}

bool is_shared(const void* at, int bytes) {
  const auto within = [=](const void* first, size_t size) {
    return at >= first && static_cast<const char*>(at) + bytes <= static_cast<const char*>(first) + size;
  };
  if (within(shared, kSharedBytes)) return true;
  for (const auto& [first, content] : block->static_shared)
    if (within(first, content.size())) return true;
  return false;
}

// Copies arrive when they are awaited, not before: until then there is NaN.
void copy_later(void* to, const void* from, int bytes) {
  if (uintptr_t(to) % bytes || uintptr_t(from) % bytes) failure = "a copy that is not aligned";
  memset(to, 0xff, bytes);
  self().copies.push_back({to, from, bytes, self().copy_groups});
}
void commit_copies() { self().copy_groups++; }
void await_copies(int pending) {
  auto& copies = self().copies;
  const auto arrives = [=](const Copy& copy) { return copy.group < self().copy_groups - pending; };
  for (const Copy& copy : copies)
    if (arrives(copy)) copy.from ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
  copies.erase(std::remove_if(copies.begin(), copies.end(), arrives), copies.end());
}

// What leaves shared memory is read when that is awaited, not before: it must lie there until then.
void copy_out_later(void* to, const void* from, int bytes) { self().leaving.push_back({to, from, bytes, 0}); }
void await_reads() {
  for (const Copy& copy : std::exchange(self().leaving, {})) memcpy(copy.to, copy.from, copy.bytes);
}

// ------------------------------------------------------------------------------------------------ meetings

void meet_grid() {
  events++, block->waiting++;
  wait_while(meetings);
}
void meet_warp() { meet(block->warp_barriers[warp()], 32); }
void meet_block() { meet(block->barrier, thread_count()); }
void meet_at(int barrier, int count) { meet(block->named_barriers[barrier], count); }
void arrive_at(int number, int count) {
  Barrier& barrier = block->named_barriers[number];
  events++;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
}
// What is left of a meeting stays until the one after the next begins, to which all must have come.
bool meet_block_or(bool value) {
  bool& any = block->any_of_meeting[block->barrier.generation % 2];
  block->any |= value;
  meet(block->barrier, thread_count(), [&] { any = std::exchange(block->any, false); });
  return any;
}
const uint64_t* of_all_lanes(uint64_t value) {
  static uint64_t values[kMostWarps][2][32];
  Barrier& barrier = block->warp_barriers[warp()];
  uint64_t* const of_meeting = values[warp()][barrier.generation % 2];
  of_meeting[lane()] = value;
  meet(barrier, 32);
  return of_meeting;
}

// ------------------------------------------------------------------------------------------------ products

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
float of_half(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fff) << 13;
  const bool finite = (half & 0x7c00) < 0x7c00;
  const float value = finite ? from_bits(magnitude) * 0x1p112f : from_bits(magnitude | 0x7f800000);
  return half & 0x8000 ? -value : value;
}
const std::vector<float> all_halves = [] {
  std::vector<float> values(1 << 16);
  for (uint32_t half = 0; half < values.size(); half++) values[half] = of_half(half);
  return values;
}();
// Half i of words.
template <bool kBfloat16> float half_of(const uint32_t* words, int i) {
  const uint32_t half = words[i / 2] >> i % 2 * 16 & 0xffff;
  return kBfloat16 ? from_bits(half << 16) : all_halves[half];
}

// A warp's d += A·B, of some tiles of 8 columns. Of each row of A, `place` says which k its elements have, if it is sparse.
struct Tile {
  float b[32][8];
  double d[16][8];
};
struct Matrices {
  float a[16][16];
  int place[16][16];
  Tile tiles[kMostTiles];
};
Matrices matrices[kMostWarps];

// Of a row's columns at once: a product of two floats is exact in double, so that sums are the same in any instructions.
typedef double Row __attribute__((vector_size(64)));
template <int kOfRow, int kDepth, bool kSparse> void add_products(const Matrices& all, Tile& tile) {
  Row b[kDepth];
  for (int i = 0; i < kDepth; i++)
    for (int column = 0; column < 8; column++) b[i][column] = tile.b[i][column];
  for (int row = 0; row < 16; row++) {
    Row sum;
    memcpy(&sum, tile.d[row], sizeof sum);
    for (int i = 0; i < kOfRow; i++) sum += double(all.a[row][i]) * b[kSparse ? all.place[row][i] : i];
    memcpy(tile.d[row], &sum, sizeof sum);
  }
}

// Its fragments come from all lanes, of kDepth k of B: kDepth / 8 words of each tile. Sums are rounded once a product.
template <int kDepth, bool kBfloat16, bool kSparse = false>
void multiply(float (*d)[4], const uint32_t* a, const uint32_t* b, int tiles = 1) {
  constexpr int kOfRow = kSparse ? kDepth / 2 : kDepth;
  const int g = lane() / 4, t = lane() % 4;
  Matrices& all = matrices[warp()];
#pragma GCC unroll 8
  for (int i = 0; i < kOfRow / 2; i++)
    all.a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = half_of<kBfloat16>(a, i);
  for (int j = 0; j < tiles; j++) {
    Tile& tile = all.tiles[j];
#pragma GCC unroll 8
    for (int i = 0; i < kDepth / 4; i++)
      tile.b[2 * t + i % 2 + i / 2 * 8][g] = half_of<kBfloat16>(b + kDepth / 8 * j, i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) tile.d[g + i / 2 * 8][2 * t + i % 2] = d[j][i];
  }
  meet(block->warp_barriers[warp()], 32, [&] {
    for (int j = 0; j < tiles; j++) add_products<kOfRow, kDepth, kSparse>(all, all.tiles[j]);
  });
  for (int j = 0; j < tiles; j++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) d[j][i] = float(all.tiles[j].d[g + i / 2 * 8][2 * t + i % 2]);
}
void product(float (&d)[4], const uint32_t* a, const uint32_t* b, int depth, bool bfloat16) {
  if (depth == 16) bfloat16 ? multiply<16, true>(&d, a, b) : multiply<16, false>(&d, a, b);
  else bfloat16 ? multiply<8, true>(&d, a, b) : multiply<8, false>(&d, a, b);
}
void products(float (*d)[4], const uint32_t* a, const uint32_t* b, int tiles, bool bfloat16) {
  bfloat16 ? multiply<16, true>(d, a, b, tiles) : multiply<16, false>(d, a, b, tiles);
}
// Of 8 k, whose last bits are cut off.
void product_tf32(float (&d)[4], const uint32_t* a, const uint32_t* b) {
  const int g = lane() / 4, t = lane() % 4;
  Matrices& all = matrices[warp()];
  Tile& tile = all.tiles[0];
  for (int i = 0; i < 4; i++) all.a[g + i % 2 * 8][t + i / 2 * 4] = from_bits(a[i] & ~0x1fffu);
  for (int i = 0; i < 2; i++) tile.b[t + i * 4][g] = from_bits(b[i] & ~0x1fffu);
  for (int i = 0; i < 4; i++) tile.d[g + i / 2 * 8][2 * t + i % 2] = d[i];
  meet(block->warp_barriers[warp()], 32, [&] { add_products<8, 8, false>(all, tile); });
  for (int i = 0; i < 4; i++) d[i] = float(tile.d[g + i / 2 * 8][2 * t + i % 2]);
}
void product_sparse(float (&d)[4], const uint32_t* a, const uint32_t* b, uint32_t selectors) {
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < (t < 2 ? 8 : 0); i++) {  // selectors of four fours in rows g and g + 8
    const int four = 4 * t + i % 4, first = selectors >> 4 * i & 3, second = selectors >> (4 * i + 2) & 3;
    if (first >= second) failure = "selectors that do not ascend";
    int* const place = matrices[warp()].place[g + i / 4 * 8] + 2 * four;
    place[0] = 4 * four + first, place[1] = 4 * four + second;
  }
  multiply<32, false, true>(&d, a, b);
}

// -------------------------------------------------------------------------------- barriers in shared memory

// What lies in the barrier's memory.
struct Phases {
  uint32_t count : 12, missing : 12, parity : 1;
  int32_t bytes;  // announced and not yet copied
};
static_assert(sizeof(Phases) == sizeof(uint64_t));
Phases& phases_of(uint64_t* barrier) { return reinterpret_cast<Phases&>(*barrier); }
void advance(Phases& phases) {
  events++;
  if (phases.missing == 0 && phases.bytes == 0) phases.missing = phases.count, phases.parity ^= 1;
}
void initialize(uint64_t* barrier, int arrivals) {
  phases_of(barrier) = {unsigned(arrivals), unsigned(arrivals), 0, 0};
}
void arrive(uint64_t* barrier) {
  Phases& phases = phases_of(barrier);
  if (phases.missing-- == 0) failure = "an arrival too many";
  advance(phases);
}
void arrive(uint64_t* barrier, int bytes) {
  phases_of(barrier).bytes += bytes;
  arrive(barrier);
}
void await(uint64_t* barrier, uint32_t parity) {
  while (phases_of(barrier).parity == parity) yield();
}
// Takes its time: until then there is NaN.
void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  if (bytes % 16 || uintptr_t(to) % 16 || uintptr_t(from) % 16) failure = "a bulk copy that is not aligned";
  memset(to, 0xff, bytes);
  for (int turns = random_order() % 4; turns; turns--) events++, yield();
  memcpy(to, from, bytes);
  phases_of(barrier).bytes -= bytes;
  advance(phases_of(barrier));
}

constexpr int kAround = 64;
using Memory = std::pair<int64_t, char*>;  // bytes; where they are, between those around them
void* allocate(int64_t bytes, void** memory) {
  char* at = static_cast<char*>(aligned_alloc(kAround, (bytes + 3 * kAround - 1) / kAround * kAround)) + kAround;
  memset(at - kAround, 0xa5, kAround), memset(at, 0xff, bytes), memset(at + bytes, 0xa5, kAround);
  *memory = new Memory(bytes, at);
  return at;
}
void release(void* memory) {
  const std::unique_ptr<Memory> made(static_cast<Memory*>(memory));
  const auto [bytes, at] = *made;
  const auto touched = [](char each) { return each != char(0xa5); };
  if (std::any_of(at - kAround, at, touched) || std::any_of(at + bytes, at + bytes + kAround, touched))
    failure = "something was written outside of a launcher's scratch";
  free(at - kAround);
}

}  // namespace emulation

void emulation_device(int multiprocessors, int shared) {
  emulation::multiprocessors = multiprocessors, emulation::shared_bytes = shared;
}
void emulation_cache(int bytes) { emulation::l2_bytes = bytes; }
const char* emulation_failure() { return std::exchange(emulation::failure, nullptr); }
