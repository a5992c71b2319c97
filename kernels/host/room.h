// One allocation for all scratch of a launcher that is launched again and again: an allocation takes a
// microsecond of the host.
#pragma once
#include <stdint.h>

namespace inline_loader {

// While one lives, its thread's small pieces of scratch lie in one piece of memory, of as many bytes as the
// call before took: `bytes`, which becomes what this call takes. What has no room in it, as at the first
// call, is allocated by itself. Allocator: allocate(bytes, memory) and release(memory), as of Host.
template <class Allocator> class Room {
 public:
  explicit Room(int64_t& bytes) : bytes_(bytes), size_(__atomic_load_n(&bytes, __ATOMIC_RELAXED)) {
    current = this;
  }
  Room(const Room&) = delete;
  ~Room() {
    current = nullptr;
    if (used_ != size_)
      __atomic_store_n(&bytes_, used_, __ATOMIC_RELAXED);  // another thread may launch the same
    if (memory_) Allocator::release(memory_);
  }

  // As Host's: of the thread's room, if it has one; `memory` is then null, for the room gives it back.
  static void* allocate(int64_t bytes, void** memory) {
    *memory = nullptr;
    void* const piece = current ? current->piece(bytes) : nullptr;
    return piece ? piece : Allocator::allocate(bytes, memory);
  }

  // What scratch in a loop takes of later calls has an end; larger pieces take the GPU longer than the host.
  static constexpr int64_t kMost = 4 << 20, kAligned = 512;

 private:
  void* piece(int64_t bytes) {
    bytes = (bytes + kAligned - 1) / kAligned * kAligned;
    if (bytes > kMost - used_) return nullptr;
    const int64_t at = used_;
    used_ += bytes;
    if (used_ > size_) return nullptr;
    if (!memory_) data_ = static_cast<char*>(Allocator::allocate(size_, &memory_));
    return data_ + at;
  }

  int64_t& bytes_;
  const int64_t size_;
  int64_t used_ = 0;
  char* data_ = nullptr;
  void* memory_ = nullptr;
  inline static thread_local Room* current = nullptr;
};

}  // namespace inline_loader
