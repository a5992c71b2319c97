// Launches what is launched again and again, from Python past PyTorch's operators. It checks nothing that
// `bound` of loader_launch.py has checked.
#pragma once
#include <algorithm>
#include "host/pytorch.h"

namespace inline_loader {

// A launcher whose last arguments are known.
struct Bound {
  const Launcher* launcher;
  int64_t device;    // of its tensors; -1: the CPU
  int64_t empty;     // how many of its tensors have no elements, and the address 0
  int64_t first;     // how many arguments come before the last
  int64_t scratch;   // bytes of a call's small pieces of scratch memory, of a Room; 0 until there was a call
  Argument last[1];  // or more; behind them the Sizes of its tensors, which come first, where it takes sizes
};

// A tensor whose storage was freed has the address 0, a view of it its offset. As low lie elsewhere only
// small tensors of a Python whose heap does.
constexpr uintptr_t kLow = uintptr_t(1) << 32;

// Returns what went wrong, until the thread's next call, or null; "" if nothing was launched, because a
// tensor's memory may have been freed.
inline const char* launch(Bound& bound, const Argument* first) {
  const Launcher& launcher = *bound.launcher;
  const int64_t given = launcher.count - takes_stream(launcher);
  int64_t low = 0;
  for (int i = 0; i < bound.first; i++) low += launcher.kinds[i] >= 0 && uintptr_t(first[i].data) < kLow;
  if (low != bound.empty) return "";
  constexpr int kOften = 32;
  Argument few[kOften];
  std::vector<Argument> many(launcher.count > kOften ? launcher.count : 0);
  Argument* const arguments = many.empty() ? few : many.data();
  std::copy_n(first, bound.first, arguments);
  std::copy_n(bound.last, given - bound.first, arguments + bound.first);
  thread_local std::string what;
  try {
    const auto* sizes = reinterpret_cast<const Sizes*>(bound.last + (given - bound.first));
#ifdef WITH_CUDA
    std::optional<Room<Allocator>> room;
    if (keeps_memory()) room.emplace(bound.scratch);
#endif
    launch(launcher, int(bound.device), arguments, sizes);
    return nullptr;
  } catch (const std::exception& error) { what = error.what(); } catch (...) {
    what = std::string(launcher.names[2]) + ": an exception that is no std::exception";
  }
  return what.c_str();
}

}  // namespace inline_loader
