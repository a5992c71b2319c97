// The barrier of a whole grid.
#pragma once

namespace cooperative_groups {

struct grid_group {
  void sync() const { emulation::meet_grid(); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
