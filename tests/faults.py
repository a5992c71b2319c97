"""Faults, one at a time, in a copy of the tree: do the tests that stand beside each see it?

    python tests/faults.py [--only 3,17] [--files] [--sound]    # --files: does each text stand where it is looked for, once?
                                                                # --sound: do the tests pass without the faults?
    python tests/faults.py [--jobs 2] --record benchmarks/results/trials/faults.json    # the outcomes, in place of earlier ones

A fault is caught where its tests run and at least one fails; it is not where they pass, or where none ran. Says which test, and why.
Where a part moves, its faults move along: what no longer stands anywhere is replaced by another fault of the same part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    path: str
    old: str  # stands once in the file; in a kernel's however its lines are broken
    new: str
    tests: str  # arguments of pytest, the file in tests/ first


# fmt: off
FAULTS = [
    # ---- kernels: what they share
    Fault("kernels/core/numerics.h", "return x >= low && x <= high;", "return x > low && x < high;", "test_backward_conv3d.py test_backward_pool.py -k 'bounds_hit_exactly or flat'"),
    Fault("kernels/core/numerics.h", "delta * delta * count * share", "delta * delta * share", "test_engine_cpu.py -k moments"),
    Fault("kernels/core/numerics.h", "return candidate > best ||", "return candidate >= best ||", "test_backward_conv3d.py -k the_first_wins"),
    Fault("kernels/core/math.h", "a = __builtin_assoc_barrier(a), b = __builtin_assoc_barrier(b);", "", "test_engine_cpu.py -k products_less"),
    Fault("inline_kernels/engine/graph.py", '{"add": "math::difference({0}, -{1})", ', "{", "test_engine_cpu.py -k 'products_less and softmax'"),
    Fault("inline_kernels/engine/asking.py", "return bool(asked) and not any(", "return True or any(", "test_engine_fuse.py -k 'without_an_answer and not old'"),
    Fault("inline_kernels/engine/asking.py", 'return "matches patterns"', "continue", "test_engine_fuse.py -k patterns"),
    Fault("inline_kernels/engine/examples.py", "if node.target in _SQUEEZES or", "if", "test_engine_fuse.py -k drop"),
    Fault("inline_kernels/engine/examples.py", "tuple([(key, *_described(each)) for key, each", "tuple([_described(each) for key, each", "test_engine_fuse.py -k taken_for_another"),
    Fault("inline_kernels/engine/tracing.py", "if tracer.stopped:", "if False:", "test_engine_fuse.py -k swallowed"),
    Fault("inline_kernels/engine/tracing.py", "isinstance(a, dict) and type(a) is not dict", "False", "test_engine_fuse.py -k of_their_class"),
    Fault("inline_kernels/engine/tracing.py", "if axes is None else axes", "", "test_engine_fuse.py -k for_tensors"),
    Fault("inline_kernels/engine/tracing.py", "return type(proxy)\n        kind", "return torch.Tensor\n        kind", "test_engine_capture.py -k the_33"),
    Fault("inline_kernels/engine/segment.py", 'repr((fields["axes"], fields["channels"]))', 'repr((fields["axes"],))', "test_engine_fuse.py -k widths"),
    Fault("inline_kernels/engine/halves.py", "(whole // plan.sizes.N * half.first if array.space.n else 0)", "0", "test_engine_halves.py -k norm"),
    Fault("inline_kernels/engine/halves.py", "total.add_(each)", "pass", "test_engine_halves.py -k gelu"),
    Fault("inline_kernels/engine/halves.py", "{total.data_ptr(): (total, each)", "{object(): (total, each)", "test_engine_halves.py -k pick"),
    Fault("inline_kernels/engine/halves.py", "by_sample and len(segment.inputs) == 1", "by_sample", "test_engine_halves.py -k not_parted"),
    Fault("inline_kernels/engine/halves.py", "max(16 // math.gcd(16, size // N) for size in sizes)", "1", "test_engine_halves.py -k 16_bytes"),
    Fault("inline_kernels/engine/schedule.py", "*given)\n        _free(saved, back.frees)", "*given)", "test_engine_halves.py -k freed"),
    Fault("inline_kernels/engine/halves.py", 'return "n" in axes', "return False", "test_engine_halves.py -k not_parted"),
    Fault("kernels/core/philox.h", "round < 10", "round < 9", "test_engine_source.py -k 'drawn_again and cuda'"),
    Fault("kernels/core/split.cuh", "? 0 : min(top - exponent, 126)", "? 0 : min(top - exponent, 14)", "test_emulated.py -k hardly_any"),
    Fault("kernels/core/split.cuh", "return {high, pack<Operand>(low.x, low.y)};", "return {high, 0};", "test_emulated.py -k 'rule_in_every_dtype'"),
    Fault("kernels/core/dropout.cuh", "kept[r] >> shift | of_draw(last[r]) << (32 - shift)", "kept[r] >> shift", "test_backward_conv3d.py -k 'test_gradients and 800-11'"),
    Fault("kernels/norm/formulas.h", "return mean + (conv_bias - conv_bias);", "return mean;", "test_emulated.py -k one_special_value"),
    # ---- kernels: mainloops, sinks
    Fault("kernels/norm/narrow3d_instance.cuh", "if (!isfinite(all.deviation)) {", "if (false) {", "test_emulated.py -k squares_overflow"),
    Fault("kernels/norm/narrow3d_instance.cuh", "best[u] = max_nan(best[u], value);", "best[u] = value;", "test_emulated.py -k 'instance_norm_holds_sums'"),
    Fault("kernels/norm/narrow3d_statistics.cuh", "if (tile.q + 8 * j + int(threadIdx.x % 4) * 2 + u < tile.positions)", "if (true)", "test_emulated.py -k 'test_rule_in_every_dtype'"),
    Fault("kernels/grad/narrow3d.cuh", "fitting_exponent(float(largest), 126)", "0", "test_emulated.py -k 'squares_overflow and fused'"),
    Fault("kernels/grad/narrow3d_weight.cuh", "* (1 / own_scale) * (1 / x_scale)", "* (1 / own_scale)", "test_backward_conv3d.py -k 'test_gradients and 800-10'"),
    Fault("kernels/grad/narrow3d_instance.cuh", "-a * a * a * product / size", "-a * a * product / size", "test_backward_conv3d.py -k 'test_gradients and 800-10'"),
    Fault("kernels/conv/narrow3d_operands.cuh", "scales_known = true;\n    float most[1]", "scales_known = true;\n    return true;\n    float most[1]", "test_emulated.py -k 'any_magnitude and late'"),
    Fault("kernels/grad/packed_stages.cuh", "+ plane + place.kernel_plane;", "+ plane;", "test_engine_gradients.py -k 'volumes and 900'"),
    Fault("kernels/grad/packed_stages.cuh", "int64_t(walk.source.planes) * walk.strips.height", "int64_t(1) * walk.strips.height", "test_engine_gradients.py -k 'volumes and 900'"),
    Fault("kernels/grad/packed_stages.cuh", "plane = group * 8 / kOfPlane;", "plane = 0;", "test_engine_gradients.py -k 'volumes and 800'"),
    Fault("kernels/grad/packed_stages.cuh", "input_scales.last(n) + scales.last(n);", "input_scales.last(n) + scales.first(n);", "test_engine_gradients.py -k 'magnitudes_of_dz and planes'"),
    Fault("inline_kernels/engine/gradients.py", "    if walk.before != walk.behind:\n        return \"there are more", "    if False:\n        return \"there are more", "test_engine_gradients.py -k obstacles"),
    Fault("kernels/grad/packed.cuh", "kMarksInfinite = false;", "kMarksInfinite = true;", "test_engine_gradients.py -k spoils_its_own"),
    Fault("kernels/grad/packed_stages.cuh", "negative == -255 ? 0", "negative == -254 ? 0", "test_engine_gradients.py -k smaller_than_any"),
    Fault("inline_kernels/engine/gradients.py", "math.prod(padded) * units > 2**30", "math.prod(padded) * units > 2**31", "test_engine_gradients.py -k obstacles"),
    Fault("inline_kernels/engine/gradients.py", "precision.Settings(padding=jobs.walk_of(segment, weight).before)\n    return", "precision.PLAIN_SETTINGS\n    return", "test_engine_gradients.py -k own_padding"),
    Fault("kernels/grad/packed_lines.cuh", "(at < kRing ? at : at - kRing)", "at", "test_engine_gradients.py -k test_lines"),
    Fault("kernels/grad/packed_lines.cuh", "slot == 0 && i < kDeep ? to + kRing", "slot == 0 && i < kDeep / 2 ? to + kRing", "test_engine_gradients.py -k test_lines"),
    Fault("kernels/grad/packed_lines.cuh", "row < kTapRows - 1 && !whole", "false", "test_engine_gradients.py -k 'special_values and lines'"),
    Fault("kernels/grad/packed_lines.cuh", "first = chunk = int(tile - of_all * steps)", "first = chunk = 0", "test_engine_gradients.py -k test_lines"),
    Fault("kernels/grad/packed_last.cuh", "else other.template pack<kAgain>(blockIdx.x - first,", "else other.template pack<kAgain>(blockIdx.x - first + 1,", "test_engine_gradients.py -k channels_last"),
    Fault("kernels/grad/packed_weight.cuh", "(out * Loop::kKernelD + depth)", "out", "test_engine_gradients.py -k test_channels_last"),
    Fault("inline_kernels/engine/gradients.py", "if not (by_library and _splits(segment, x, weight)):", "if True:", "test_engine_gradients.py -k dz_that_is_rounded"),
    Fault("inline_kernels/engine/gradients.py", "    if between.rounds(segment, x):  # whose", "    if False:  # whose", "test_engine_between.py -k own_layout"),
    Fault("inline_kernels/engine/layouts.py", "if wanted[1] else _standing(plan, x, layout)", "", "test_engine_between.py -k another_gradient"),
    Fault("inline_kernels/engine/layouts.py", "if not reads_weight and filters:", "if False:", "test_engine_layouts.py -k filters_are_turned"),
    Fault("inline_kernels/engine/programs.py", '"y").le(0.0)}', '"y").ge(0.0)}', "test_engine_inside.py -k in_16_bits"),
    Fault("inline_kernels/engine/chain.py", "saved.append(given[each.own_result])", "saved.append(given[0])", "test_engine_inside.py -k 'in_16_bits and two'"),
    Fault("inline_kernels/loader/operators.py", "return bool(self._keeps_result and", "return bool(False and", "test_loader_operators.py -k takes_the_result"),
    Fault("inline_kernels/engine/direct.py", "if composed and composed.saved and", "if False and", "test_engine_direct.py -k training_and_statistics"),
    Fault("kernels/core/matrix_tile.cuh", "lane / 8 * 2 + of_matrix % 2", "lane / 8 * 2", "test_engine_layouts.py -k whole_arrays"),
    Fault("kernels/load/turned.cuh", "f(point<kPack>(row + i * kStep));", "f(point<kPack>(row));", "test_engine_layouts.py -k 'test_channels_last and fours'"),
    Fault("inline_kernels/engine/chain.py", "if turning and both and self.needs", "if turning and self.needs", "test_engine_chain.py -k are_ours"),
    Fault("inline_kernels/engine/tiling.py", " or size[-1] > LINE_COLUMNS", "", "test_engine_gradients.py -k at_their_full_sizes"),
    Fault("inline_kernels/engine/choice.py", "return by_stream < costs.WIDE_LOSES * ours", "return False", "test_choice.py -k short_rows"),
    Fault("inline_kernels/engine/costs.py", "tile *= WIDE_LATER if products > WIDE_PRODUCTS else 1", "", "test_choice.py -k short_rows"),
    Fault("inline_kernels/engine/costs.py", "found += PACKING_START + shapes.moving(2 * x) * (ODD_TURNED if odd_x else 1)", "pass", "test_engine_recorded.py"),
    Fault("inline_kernels/engine/mainloops.py", "    sums=80,", "    sums=0,", "test_engine_recorded.py"),
    Fault("inline_kernels/engine/sink_text.py", "if node.op == \"spread\" and node.args[0].space == node.space else node", "if False else node", "test_engine_recorded.py"),
    Fault("inline_kernels/engine/mainloops.py", "job if len(job.dtypes) == 1 else alone", "job", "test_engine_recorded.py"),
    Fault("kernels/load/last.cuh", "for (int j = 0; j < kAtOnce; j++) later[j].store();", "for (int j = 1; j < kAtOnce; j++) later[j].store();", "test_engine_layouts.py -k several_points"),
    Fault("kernels/load/planes.cuh", "for (int j = 0; j < kAtOnce; j++) f(point<kPack>(i + j * stride));", "for (int j = 0; j < kAtOnce; j++) f(point<kPack>(i));", "test_engine_layouts.py -k several_points"),
    Fault("kernels/load/planes.cuh", "if (i < 0) some(i), i += stride;", "if (i < 0) i += stride;", "test_engine_layouts.py -k several_points"),
    Fault("kernels/grad/wide_sums.cuh", "if (exponent == units.scales.first(n)) return;", "return;", "test_backward_min_add.py -k not_seen_ahead"),
    Fault("kernels/grad/wide_weight_sm90.cuh", "of_lane + 16 * (state.stage * kStage + k * 16)", "of_lane + 16 * (state.stage * kStage + k * 8)", "test_engine_gradients.py -k 'test_tails and gates'"),
    Fault("kernels/grad/packed_input.cuh", "around = tiles.strips > 1 ? kPitch - pixels : 0", "around = 0", "test_engine_gradients.py -k 'with_the_gradient_of_x and 130'"),
    Fault("kernels/grad/stream_input.cuh", "* taps + taps - 1 - tap", "* taps + tap", "test_engine_input_gradient.py -k 'of_x_by_stream and tf32'"),
    Fault("kernels/grad/packed.cuh", "slack >= 0 && slack <= kRoom", "slack <= kRoom", "test_engine_input_gradient.py -k not_seen"),
    Fault("kernels/conv/stream_operands.cuh", "Operands::last_exponent(seen()[n], largest[n])", "first(n)", "test_engine_input_gradient.py -k not_seen"),
    Fault("inline_kernels/engine/tiling.py", "rows_shared(weight, tiles, 0, *itemsizes) + ", "rows_shared(weight, tiles, 0, *itemsizes[:1]) + ", "test_engine_stored.py -k is_what_load_keeps"),
    Fault("kernels/reduce/channels.cuh", "b.channel < a.channel", "b.channel > a.channel", "test_engine_winners.py -k 'winners_of_channels and wide'"),
    Fault("inline_kernels/engine/sinks.py", "[a.name for a in plan.composed.saved]", "[\"y\" for a in plan.composed.saved]", "test_engine_stored.py -k 'first_pass_beside_v and norm'"),
    Fault("kernels/reduce/narrow3d.cuh", "two(low, high, channel, channel + 8)", "two(low, high, channel, channel)", "test_engine_winners.py -k 'winners_of_channels and narrow3d'"),
    Fault("kernels/pool/reduction.cuh", "return (later != later) | ", "return ", "test_engine_winners.py -k 'winners_of_windows and smallest'"),
    Fault("kernels/pool/windows.cuh", "const bool later = other > where;", "const bool later = true;", "test_engine_winners.py -k winners_of_windows"),
    Fault("inline_kernels/engine/chain.py", "if self.turns is None and not watched:\n            self._build(given)", "if False:\n            self._build(given)", "test_engine_chain.py -k side_by_side"),
    Fault("inline_kernels/engine/chain.py", "*made, *a[behind:])", "*[a[0]] * len(made), *a[behind:])", "test_engine_chain.py -k watched"),
    Fault("inline_kernels/engine/schedule.py", "[_in_planes(t) if i <= plan.weight_at else t for", "[t for", "test_engine_again.py -k other_strides"),
    Fault("inline_kernels/engine/again.py", "{\"sums\": 1, \"moments\": 3}.get(sink.kind, 0)", "0 * len(sink.kind)", "test_engine_again.py -k more_sums"),
    Fault("inline_kernels/engine/fronts.py", "if any(node.is_leaf(\"z\") for node in _reached(left, given)):", "if False:", "test_engine_winners.py -k do_not_say"),
    Fault("inline_kernels/engine/programs.py", "if not self.indices:", "if True:", "test_engine_winners.py -k computed_again"),
    Fault("inline_kernels/engine/sinks.py", "self.reading = self._texts()\n        if not self.reading:\n            raise Unsupported(\"the tail doesn't read v\")\n\n    def", "self.reading = self._texts()[1:] or self._texts()\n        if not self.reading:\n            raise Unsupported(\"the tail doesn't read v\")\n\n    def", "test_engine_stored.py -k 'first_pass_beside_v and norm'"),
    Fault("kernels/reduce/narrow2d.cuh", "if constexpr (kLeaves) v[j][half * 2 + i] = own;", "", "test_engine_again.py -k 'test_tails and narrow2d and hardswish'"),
    Fault("kernels/store/strips.cuh", "kScaled ? place.unscale(own) : make_float2(1, 1)", "place.unscale(own)", "test_engine_again.py -k 'test_tails and narrow2d and hardswish'"),
    Fault("kernels/reduce/narrow3d.cuh", "if constexpr (kLeaves) v[j][2 * r + u] = own;", "", "test_engine_again.py -k 'test_tails and narrow3d and hardswish'"),
    Fault("kernels/store/runs.cuh", "kScaled ? place.unit(scale, r) : 1.f", "place.unit(scale, r)", "test_engine_again.py -k 'test_tails and narrow3d and hardswish'"),
    Fault("kernels/conv/narrow3d_exact.cuh", "if constexpr ((leaves_values<Sinks> || ...))", "if constexpr (false)", "test_engine_again.py -k 'not_finite and narrow3d'"),
    Fault("kernels/conv/narrow3d_tile.cuh", "- max(own, LEAST_SHARED)", "- own", "test_engine_again.py -k hang_on_no_sinks"),
    Fault("inline_kernels/engine/again.py", "(n * (CHANNELS_OUT - 1) + c) * plane", "(n * CHANNELS_OUT + c) * plane", "test_engine_again.py -k 'test_tails and mean'"),
    Fault("inline_kernels/engine/again.py", "if tiles[0] != tiles[1]:", "if False:", "test_engine_again.py -k tiles_would_be"),
    Fault("inline_kernels/engine/again.py", "and gradients.PACKED in asked", "and False", "test_engine_again.py -k left_to_others"),
    Fault("inline_kernels/engine/again.py", "[*others, same[0]._replace(leaves=True), stored[0]._replace(takes=True)]", "[same[0]._replace(leaves=True), stored[0]._replace(takes=True), *others]", "test_engine_again.py -k 'two and sums'"),
    Fault("inline_kernels/engine/again.py", "+ costs.SECOND * _stores(first, *later, *parts)", "", "test_engine_again.py -k full_sizes"),
    Fault("inline_kernels/engine/again.py", "return given | super()._arrays()", "return super()._arrays()", "test_engine_again.py -k 'test_tails and gelu'"),
    Fault("inline_kernels/engine/load_plan.py", " and plan.again is None\n", "\n", "test_engine_again.py -k kept_and_built"),
    Fault("kernels/load/points.cuh", "return own.place + j; });", "return own.place + 0 * j; });", "test_engine_source.py test_engine_layouts.py -k 'cuda and (window or pool)'"),
    Fault("inline_kernels/engine/gradients.py", "[a - b for a, b in zip(reach, each)]", "[a for a, b in zip(reach, each)]", "test_engine_input_gradient.py -k 'of_x_by_stream and tf32'"),
    Fault("kernels/reduce/channels.cuh", "sum += p[i].sum * LogSumExp::share(p[i].most, most);", "sum += p[i].sum;", "test_engine_sinks.py -k 'test_tails or random_widths'"),
    Fault("kernels/store/edge.cuh", "count & (-2 * kElements)", "count & (-4 * kElements)", "test_engine_direct.py -k 'test_sizes and narrow2d'"),
    Fault("kernels/conv/narrow2d_tile.cuh", "min(kColumns, width() - tile * kColumns)", "min(kColumns, width() - tile * kColumns - 1)", "test_engine_direct.py -k 'test_sizes and narrow2d'"),
    Fault("kernels/load/points.cuh", "y < coarse.H && x < coarse.W};", "y < coarse.H && x <= coarse.W};", "test_engine_source.py -k random_programs"),
    Fault("kernels/load/planes.cuh", "j < i + kPack && j < S; j++", "j < i + kPack - 1 && j < S; j++", "test_engine_source.py -k random_programs"),
    Fault("kernels/load/extreme.cuh", "(sign > 0 ? x > value : x < value)", "(sign > 0 ? x >= value : x <= value)", "test_engine_source.py test_engine_layouts.py -k ties"),
    Fault("kernels/load/reduce.cuh", "if (count == 0) shift = x;", "", "test_engine_source.py -k large_means"),
    Fault("kernels/load/small.cuh", "for (; i < count; i += width) value += f(i);", "for (; i < count; i += 2 * width) value += f(i);", "test_engine_source.py -k more_small_values"),
    # ---- kernels of a CPU, and the host's side
    Fault("kernels/cpu/reductions.h", "return count_up() < lanes ? x : T{};", "return x;", "test_engine_cpu.py -k each_value_once"),
    Fault("kernels/cpu/reductions.h", "(sign > 0 ? x > value : x < value) | is_nan", "(sign > 0 ? x >= value : x <= value) | is_nan", "test_engine_source.py test_engine_layouts.py -k ties"),
    Fault("kernels/cpu/points.h", "if (here.w + count <= extent.W) return spread_along(", "return spread_along(", "test_engine_cpu.py -k windows_there_and_back"),
    Fault("kernels/cpu/reductions.h", "if (std::isinf(square)) square = squares_in_double();", "", "test_semantics.py -k 'large_magnitudes and rest'"),
    Fault("kernels/cpu/winograd.h", "out2[i] = r - q", "out2[i] = q - r", "test_semantics.py -k winograd"),
    Fault("kernels/cpu/winograd.h", "half[column][1][k] = m[1][k] - m[2][k] - m[3][k]", "half[column][1][k] = m[1][k] - m[2][k] + m[3][k]", "test_engine_strips.py -k random_sizes"),
    Fault("kernels/cpu/strips.h", "check += each * 0", "check += Lanes{} * 0", "test_engine_strips.py -k not_finite_is"),
    Fault("kernels/cpu/strips.h", "std::min<int64_t>(kLanes, count - at); j++) odd", "kLanes; j++) odd", "test_engine_strips.py -k other_strips"),
    Fault("kernels/grad/packed.cuh", "top == 127 ? top : ", "", "test_engine_input_gradient.py -k as_small_as"),
    Fault("kernels/cpu/strips.h", "in_row(2 * int(from - first), ", "in_row(0, ", "test_engine_strips.py -k random_sizes"),
    Fault("kernels/cpu/strips.h", "(std::max(count, kLanes) - kLanes))", "std::max(count, kLanes))", "test_engine_strips.py -k random_sizes"),
    Fault("kernels/cpu/lanes.h", "uint16_t((1u << count) - 1)", "uint16_t((2u << count) - 1)", "test_engine_strips.py -k random_sizes"),
    Fault("kernels/cpu/load.h", "return int64_t(kilobytes) << 10;", "return int64_t(kilobytes) << 13;", "test_engine_cpu.py -k last_cache"),
    Fault("kernels/cpu/reductions.h", "sign > 0 ? x > value : x < value) | (x != x)) &", "sign > 0 ? x > value : x < value)) &", "test_engine_cpu.py -k 'channels_at or windows_there'"),
    Fault("kernels/cpu/points.h", "store_few(spent(x) + position, x, count)", "store_few(spent(x) + position, x, count - 1)", "test_engine_strips.py -k 'twice_eagers and softmax'"),
    Fault("inline_kernels/engine/source.py", "saved[i, node] = cost * len(behind)", "pass", "test_engine_strips.py -k 'twice_eagers or left_in'"),
    Fault("inline_kernels/engine/source.py", " and z not in _computed(program, terms, node):", ":", "test_engine_strips.py -k 'twice_eagers and behind or left_in'"),
    Fault("inline_kernels/engine/plane_text.py", "f\"{best[1]}.index\" in text", "True", "test_engine_strips.py -k left_in"),
    Fault("kernels/host/bound.h", "if (low != bound.empty) return \"\";", "", "test_bound.py -k freed"),
    Fault("kernels/host/room.h", "const int64_t at = used_;", "const int64_t at = 0;", "test_loader_source.py -k shares_an_allocation"),
    Fault("kernels/host/tensor.h", "index < 0 ? index + dims : index", "index < 0 ? index + dims - 1 : index", "test_loader_source.py -k 'sizes'"),
    # ---- loader
    Fault("inline_kernels/loader/cache.py", "if _checksum(library) != record[\"sha256\"] or changed(record[\"dependencies\"]):", "if changed(record[\"dependencies\"]):", "test_loader_cache.py -k damaged"),
    Fault("inline_kernels/loader/cache.py", "status.st_mode & 0o077,", "status.st_mode & 0o007,", "test_loader_cache.py -k shared_cache_folder"),
    Fault("inline_kernels/loader/cache.py", "if total > LIMIT and folder != keep:", "if total > LIMIT:", "test_loader_cache.py -k least_recently"),
    Fault("inline_kernels/loader/cache.py", "os.utime(folder / \"build.json\")", "pass", "test_loader_cache.py -k counts_as_use"),
    Fault("inline_kernels/loader/cache.py", "if lock := _at_once(Path(f\"{folder}.lock\")):", "if lock := _at_once(Path(f\"{folder}.other\")):", "test_loader_cache.py -k 'spares'"),
    Fault("inline_kernels/loader/cache.py", "if told and self._stamp() != self.known:", "if False:", "test_inline_loader.py -k same_compiler_text"),
    Fault("inline_kernels/loader/source.py", "_KNOWN = {\"0\": False, \"false\": False,", "_KNOWN = {\"false\": False,", "test_loader_source.py -k no_code"),
    Fault("inline_kernels/loader/source.py", "bool(match[4] and (match[1] or match[3]))", "bool(match[4] and match[1])", "test_loader_source.py -k types_as_C"),
    Fault("inline_kernels/loader/launch.py", "if (requires_grad and torch.is_grad_enabled()) or _profiler_enabled():", "if _profiler_enabled():", "test_bound.py -k gradient_is_refused"),
    Fault("inline_kernels/loader/launch.py", "    torch._C._increment_version(({written}))\n", "    pass\n", "test_bound.py -k autograd_sees"),
    Fault("inline_kernels/loader/operators.py", "if len(self._plans) >= _KEPT_PLANS:", "if False:", "test_loader_operators.py -k limited_in_number"),
    Fault("inline_kernels/loader/operators.py", "t.data_ptr() % 16) for t in tensors]", "0) for t in tensors]", "test_loader_operators.py -k plan"),
    Fault("inline_kernels/loader/operators.py", "return [gradient if need else None for gradient, need in zip(found, needs)]\n\n    def shapes", "return list(found)\n\n    def shapes", "test_loader_operators.py -k only_the_gradients"),
    # ---- engine: guards, support
    Fault("inline_kernels/engine/guards.py", "if [cls.forward for cls in self._classes] != self._forwards:", "if False:", "test_engine_changes.py test_engine_kept.py -k 'changed or intercepted'"),
    Fault("inline_kernels/engine/guards.py", "for (name, where), was in self._outside:", "for (name, where), was in ():", "test_engine_changes.py -k names_outside"),
    Fault("inline_kernels/engine/guards.py", "for value, held in self._contents:", "for value, held in ():", "test_engine_changes.py -k lists_that_forward_reads"),
    Fault("inline_kernels/engine/guards.py", "if before.get(name) != now.get(name):", "if False:", "test_engine_changes.py -k more_than_compute"),
    Fault("inline_kernels/engine/guards.py", "            self.numbers = numbers\n            changed()", "            changed()", "test_engine_changes.py test_engine_kept.py -k changed"),
    Fault("inline_kernels/engine/support.py", "forward_ad._current_level >= 0 and", "False and", "test_engine_transformed.py -k forward_mode"),
    Fault("inline_kernels/engine/support.py", "return f\"{name} has hooks\"", "return None", "test_engine_changes.py -k leaves_the_others"),
    # ---- engine: capture, graph, algebra, passes, source, schedule, direct
    Fault("inline_kernels/engine/growth.py", "elif self._writes_an_input(node):", "elif False:", "test_engine_capture.py -k writes_in_place"),
    Fault("inline_kernels/engine/graph.py", "found[arg.id] = found[arg.id] + part if arg.id in found else part", "found[arg.id] = part", "test_engine_capture.py -k random_programs"),
    Fault("inline_kernels/engine/scalars.py", "shared = a.eq(b).where(g * 0.5, g)", "shared = g", "test_semantics.py -k min_add_ties"),
    Fault("inline_kernels/engine/algebra.py", "if None in found or not _may_leave(factor, node):", "if True:", "test_engine_algebra.py -k centred"),
    Fault("inline_kernels/engine/algebra.py", "return _is_even(factor, node.attr)", "return True", "test_engine_algebra.py -k only_some_terms"),
    Fault("inline_kernels/engine/algebra.py", "return 1 if at == 0 else -1", "return 1", "test_engine_algebra.py"),
    Fault("inline_kernels/engine/algebra.py", "if op == \"relu\" and (low > 0 or x.op == \"relu\"):", "if op == \"relu\" and (high > 0 or x.op == \"relu\"):", "test_engine_algebra.py -k bounds"),
    Fault("inline_kernels/engine/passes.py", "apart = looks_up or domain[need] != domain[key]", "apart = domain[need] != domain[key]", "test_engine_axes.py -k 'lanes_share and cpu'"),
    Fault("inline_kernels/engine/small_text.py", "own = f\"{scope.c} / {size} * {size}\"", "own = f\"{scope.c}\"", "test_engine_layouts.py -k 'y_alone and norm'"),
    Fault("inline_kernels/engine/programs.py", "if node.is_leaf(\"parameter\"):", "if False:", "test_engine_source.py -k parameters_that_change"),
    Fault("inline_kernels/engine/programs.py", "kind = \"value\" if of_z else kind_of(node, few_channels)", "kind = kind_of(node, few_channels)", "test_engine_source.py -k kept_in_its_type"),
    Fault("inline_kernels/engine/direct.py", "if node.op != \"leaf\" or node.attr[1] == \"drawn\":", "if False:", "test_engine_direct.py -k not_pointwise"),
    Fault("kernels/load/points.cuh", "gridDim.x - 1 - blockIdx.x", "gridDim.x - blockIdx.x", "test_engine_source.py -k 'problems and cuda'"),
    Fault("kernels/load/planes.cuh", "share_.exists) out[share_.number] = value;", "share_.exists) out[blockIdx.x] = value;", "test_engine_source.py -k 'problems and cuda'"),
    Fault("kernels/load/planes.cuh", "1 << bits, number < all}", "1 << bits, true}", "test_engine_layouts.py -k several_planes"),
    Fault("kernels/load/reduce.cuh", "if (sharing <= 32) return of_lanes(own, sharing);\n  __shared__ Moments", "if (sharing <= 32) return of_lanes(own, 32);\n  __shared__ Moments", "test_engine_layouts.py -k several_planes"),
    Fault("kernels/load/small.cuh", "by_warp ? blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32 : blockIdx.x", "by_warp ? threadIdx.x / 32 : blockIdx.x", "test_engine_layouts.py -k warps_have"),
    Fault("inline_kernels/engine/passes.py", "        if key in self.of_all_samples:\n            return {\"channel\"}\n", "", "test_engine_layouts.py -k to_merge"),
    Fault("inline_kernels/engine/chain.py", "return self.laid[key](one).add_(other)", "return self.laid[key](one)", "test_engine_chain.py -k turned_together"),
    Fault("kernels/load/small.cuh", "first[sample * pitch + (unsigned(i) - sample * count)]", "first[(unsigned(i) - sample * count)]", "test_engine_layouts.py -k merged_at_once"),
    Fault("inline_kernels/engine/passes.py", "and bool(reads) and all(reads)", "and any(reads)", "test_engine_layouts.py -k merged_at_once"),
    Fault("inline_kernels/engine/plane_text.py", "if axis == self.point.level:", "if True:", "test_engine_source.py -k 'random_programs and cuda'"),
    Fault("inline_kernels/engine/source.py", "'up' if before % 2 else 'down'", "'down'", "test_engine_source.py -k other_way"),
    Fault("kernels/load/last.cuh", "for (int warp = 0; warp < kWarps; warp++)", "for (int warp = 1; warp < kWarps; warp++)", "test_engine_layouts.py -k all_is_channels_last"),
    Fault("kernels/load/shared.cuh", "const bool active = i + own < S;", "const bool active = true;", "test_engine_layouts.py -k channels_are_reduced"),
    Fault("kernels/load/extreme.cuh", "(further || (alike && before))", "further", "test_engine_layouts.py -k ties_and_nan"),
    Fault("kernels/load/small.cuh", "take(i + j * width, parts[j])", "take(i, parts[j])", "test_engine_layouts.py -k some_parts"),
    Fault("inline_kernels/engine/plane_text.py", "self.held + 3 * self.sums > 16", "self.held + 3 * self.sums > 20", "test_choice.py -k go_over"),
    Fault("inline_kernels/engine/load_plan.py", "-(-planes * parts // at_once) * (max", "(max", "test_choice.py -k as_many_blocks"),
    Fault("kernels/load/turned.cuh", "run[(r + i) * columns + c]", "run[(r + i) * columns]", "test_engine_layouts.py -k whole_arrays"),
    Fault("kernels/load/turned.cuh", "c % width * across", "c % width", "test_engine_layouts.py -k strides_meet"),
    Fault("kernels/load/small.cuh", "if (lanes.lane == 0) out[plane] = all;", "if (lanes.lane == 0) out[plane] = of[plane * parts];", "test_engine_layouts.py -k many_parts"),
    Fault("kernels/load/points.cuh", "if (++count_ % kFew == 0) all_ += few_, few_ = T{};", "", "test_engine_axes.py -k 'many_terms and cuda'"),
    Fault("kernels/load/shared.cuh", "if (active && sharing.lane() == 0) Point<K>::write(to, x);", "if (sharing.lane() == 0) Point<K>::write(to, x);", "test_engine_axes.py -k lanes_share"),
    Fault("inline_kernels/engine/plane_text.py", "            if reduces and inside:\n                return 0", "            if False:\n                return 0", "test_engine_axes.py -k 'lanes_share and windows'"),
    Fault("kernels/load/shared.cuh", "counts_ = active && sharing.lane() == 0;", "counts_ = active;", "test_engine_axes.py -k 'lanes_share and sums'"),
    Fault("kernels/load/shared.cuh", "* (lanes * apart) + threadIdx.x % apart; }\n};", "* (lanes * apart); }\n};", "test_engine_axes.py -k lanes_share"),
    Fault("kernels/load/shared.cuh", "other.value = of_warps[t], other.index = places[t];", "other.value = of_warps[t], other.index = x.index;", "test_engine_axes.py -k 'nan and cuda'"),
    Fault("kernels/load/shared.cuh", "return sum(x.at[i]); });", "return x.at[i]; });", "test_engine_axes.py -k 'share_channels and softmax-packs'"),
    Fault("kernels/load/shared.cuh", "const Extreme<sign, real> one = best(x.of_lane(i));", "const Extreme<sign, real> one = x.of_lane(i);", "test_engine_axes.py -k 'share_channels and several'"),
    Fault("kernels/load/shared.cuh", "for (; i < end; i += step) point(i);", "for (; i + step < end; i += step) point(i);", "test_engine_axes.py -k 'share_channels and softmax-packs'"),
    Fault("inline_kernels/engine/plane_text.py", "again &= instructions(computed) <= LIGHT * len(walks)", "pass", "test_engine_axes.py -k compute_much"),
    Fault("inline_kernels/engine/plane_text.py", "computed = [each for each in loop.known.keys() & order([node]) if not each.space.small]", "computed = loop.known.keys() & order([node])", "test_engine_cpu.py -k earlier_one"),
    Fault("kernels/conv/padded.cuh", "inside && unsigned(x) < unsigned(size[2]) ?", "unsigned(x) < unsigned(size[2]) ?", "test_engine_direct.py -k zeros_around"),
    Fault("kernels/conv/padded.cuh", "image.sizes[image.dims + axis - 3] += before[axis] + behind[axis];", "image.sizes[image.dims + axis - 3] += 2 * before[axis];", "test_engine_direct.py -k 'zeros_around and same'"),
    Fault("inline_kernels/engine/jobs.py", "        return Image((*self.x.shape[:2], *map(sum, around)), self.x.dtype, self.x.device)", "        return Image(self.x.shape, self.x.dtype, self.x.device)", "test_engine_direct.py -k columns_by_zeros"),
    Fault("inline_kernels/engine/choice.py", 'return "another mainloop is faster at such sizes" if others <= ours else None', "return None", "test_choice.py -k few_channels"),
    Fault("inline_kernels/engine/plane_text.py", "(args, \"\") if node.attr == inside else ((), \"\")", "((), \"\")", "test_engine_axes.py -k lanes_share"),
    Fault("inline_kernels/engine/passes.py", "if now < stage[key] and made_there", "if False and made_there", "test_engine_axes.py -k lanes_share"),
    Fault("inline_kernels/engine/passes.py", "            and root.kind != \"parameter\"\n", "", "test_engine_source.py -k read_by_nobody"),
    Fault("inline_kernels/engine/small_text.py", "common = math.gcd(*self.groups) or _SLICES", "common = _SLICES", "test_engine_layouts.py -k blocks_share"),
    Fault("inline_kernels/engine/stored.py", "\"inputs\": segment.inputs[:1]}", "\"inputs\": segment.inputs}", "test_engine_stored.py -k second_input"),
    Fault("inline_kernels/engine/mainloops.py", "split = job.x.dtype == torch.float32 and not precision.runs_tf32(job.x, job.weight)", "split = False", "test_engine_direct.py -k 'test_tails or test_sizes'"),
    Fault("inline_kernels/engine/ops.py", "variance = t.graph.variance(x.node, mean_, steps)", "variance = t.graph.variance(x.node, mean_, steps) + t.number(1e-3)", "test_engine_ops.py -k norms"),
    Fault("inline_kernels/engine/compiled.py", "            graph.call_function(operator.eq, (graph.create_node(\"get_attr\", name), value))\n", "            pass\n", "test_engine_transformed.py -k 'test_compile and Pointwise'"),
    Fault("inline_kernels/engine/between.py", "and EXACT not in uses and alone\n    return", "and EXACT not in uses\n    return", "test_engine_between.py -k keeps_its_digits"),
    Fault("kernels/load/join.cuh", "half = (count + 1) / 2;", "half = count / 2;", "test_engine_joining.py -k kernels"),
    Fault("kernels/load/join.cuh", "(positions + all.rows - 1) / all.rows", "positions / all.rows", "test_engine_joining.py -k kernels"),
    Fault("inline_kernels/engine/between.py", "are_operands = all(", "are_operands = any(", "test_engine_joining.py -k digits_stay"),
    Fault("inline_kernels/engine/joining.py", "m(t.contiguous())", "m(t)", "test_engine_joining.py -k eagers_float32_stays"),
    Fault("inline_kernels/engine/joining.py", "return all(between.runs_tf32_behind", "return True or all(between.runs_tf32_behind", "test_engine_joining.py -k gradients_in_float32"),
    Fault("inline_kernels/engine/joining.py", "and own[i].differentiates_last for", "and False for", "test_engine_joining.py -k operands_are_rounded"),
    Fault("kernels/load/pool.cuh", "largest.take_last(value, i, inside);", "largest.take_last(value, i);", "test_engine_pooling.py -k kernels"),
    Fault("kernels/load/pool.cuh", "(count - 1) * apart / step + 1;", "count / step;", "test_engine_pooling.py -k kernels"),
    Fault("kernels/load/pool.cuh", "size + around) -", "size + before) -", "test_engine_pooling.py -k 'kernels and inside'"),
    Fault("inline_kernels/engine/pooling.py", "any(pool.padding) or pool.ceil_mode", "any(pool.padding)", "test_engine_pooling.py -k kernels"),
    Fault("inline_kernels/engine/replacing.py", "nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d", "(nn.ConvTranspose2d,)", "test_engine_pooling.py -k who_changes"),
    Fault("inline_kernels/engine/chain.py", "gradient if known is None else self._sum(known, gradient, watched)", "gradient", "test_engine_chain.py -k computes"),
    Fault("inline_kernels/engine/chain.py", "        ctx.maybe_clear_saved_tensors()", "        pass", "test_engine_chain.py -k memory"),
    Fault("inline_kernels/engine/chain.py", "            turned[number] = a = filters = found = None\n            for i in drops:\n                values[i] = None\n        return", "        return", "test_engine_chain.py -k memory"),
    Fault("inline_kernels/engine/chain.py", "zip(steps, chain.read) if step.saving", "zip(steps, chain.of) if step.saving", "test_engine_chain.py -k neither_kept"),
    Fault("inline_kernels/engine/chain.py", "settings = precision(given[0])", "settings = None", "test_engine_chain.py -k settings_that_change"),
    Fault("inline_kernels/loader/launch.py", "arrays[i] = arrays[i].data", "pass", "test_bound.py -k who_is_trusted"),
    Fault("inline_kernels/engine/launching.py", "arguments[entry.argument].data.copy_(", "arguments[entry.argument].copy_(", "test_engine_chain.py -k neither_kept"),
    Fault("inline_kernels/engine/launching.py", "return [None if i is None else there[i] for i in self.found]", "return there", "test_engine_chain.py -k neither_kept"),
    Fault("inline_kernels/engine/library.py", "kind = (*like.shape,), like.stride(), like.dtype", "kind = (*like.shape,), torch.empty(like.shape).stride(), like.dtype", "test_engine_layouts.py -k made_like"),
    Fault("inline_kernels/engine/inside.py", "return all(special) and ", "return ", "test_engine_inside.py -k asked"),
    Fault("inline_kernels/engine/inside.py", "found and _least_ms(ours, x.device) <= _least_ms(behind, x.device)", "found", "test_engine_inside.py -k asked"),
    Fault("inline_kernels/engine/inside.py", "if kind in found or spaces", "if spaces", "test_engine_inside.py -k which_tails"),
    Fault("inline_kernels/engine/inside.py", "if between.rounds(segment, x) or case.last", "if case.last", "test_engine_inside.py -k between"),
    Fault("inline_kernels/engine/inside.py", "(x := x[:, :, ::down, ::across]).shape", "x.shape", "test_engine_inside.py -k 'some and positions'"),
    Fault("inline_kernels/engine/inside.py", "if not case.last and not _stays_in_planes(case):", "if False:", "test_engine_inside.py -k planes"),
    Fault("inline_kernels/engine/layouts.py", "return self._launched(turn, False) if lies_so else None", "return None", "test_engine_between.py -k lies_otherwise"),
    Fault("inline_kernels/engine/programs.py", 'node, node.space, "parameter") for name', 'node, node.space, "real") for name', "test_engine_source.py -k statistics_of_16_bits"),
    Fault("inline_kernels/export/export.py", " and not segment.random:", ":", "test_export_gpu.py -k nothing_is_dropped"),
    Fault("inline_kernels/export/export.py", '"y": "v", "Tail": "Whole"', '"y": "v"', "test_export_gpu.py -k our_own"),
    Fault("inline_kernels/export/cell_host.py", "known[1] == alike and ", "", "test_export.py"),
    Fault("inline_kernels/engine/layouts.py", "return cls(turn, rounds) if rounds", "return cls(turn, False) if rounds", "test_engine_chain.py -k turned_together"),
    Fault("kernels/load/turned.cuh", "if (++r == rows) r = 0, c++;", "r++;", "test_engine_layouts.py -k whole_arrays"),
    Fault("kernels/grad/selected/border.cuh", "own[edge].first_tap <= at", "own[0].first_tap <= at", "test_backward_pool.py -k sizes"),
    Fault("inline_kernels/engine/capture.py", "    _ask_for_types_ahead(traced.graph, model)\n", "", "test_engine_fuse.py -k types_that"),
    Fault("inline_kernels/engine/capture.py", "    _without_questions(traced.graph)\n", "", "test_engine_fuse.py -k types_that"),
    Fault("inline_kernels/engine/support.py", "return autocast_dtype(weight) or weight.dtype", "return weight.dtype", "test_engine_fuse.py -k eagers_under_autocast"),
    Fault("inline_kernels/engine/tracing.py", "and i >= max(count, 1) and name not in names", "and i", "test_engine_fuse.py -k types_that"),
    Fault("inline_kernels/engine/chain.py", '{"out", "inplace"} & node.kwargs.keys()', "{*()}", "test_engine_chain.py -k runs_first"),
    Fault("inline_kernels/engine/chain.py", "not stays.isdisjoint(node.all_input_nodes)", "False", "test_engine_chain.py -k runs_first"),
    Fault("inline_kernels/engine/chain.py", '"placeholder": few', '"placeholder": {node.target}', "test_engine_chain.py -k runs_first"),
    Fault("inline_kernels/engine/chain.py", "not altered(node.target, module) and", "", "test_engine_chain.py -k somebody_watches"),
    Fault("inline_kernels/engine/structure.py", "chain.may_become_in_place(", "(lambda *_: set())(", "test_engine_chain.py -k becomes_one"),
    Fault("inline_kernels/engine/tracing.py", "if optional:", "if False:", "test_engine_changes.py -k behind_defaults"),
    Fault("inline_kernels/engine/tracing.py", "return kind(*found) if kind is nn.Sequential else kind(found)", "return kind(*found[1:]) if kind is nn.Sequential else kind(found)", "test_engine_fuse.py -k types_that"),
    Fault("inline_kernels/engine/mainloops.py", "fits = fits and tiling.sums_fit(x, weight, pool)", "", "test_backward_pool.py -k do_not_fit"),
    Fault("kernels/grad/selected/sparse.cuh", "origin.four - four % kFours", "origin.four", "test_backward_pool.py -k sizes"),
    Fault("kernels/grad/selected/stage.cuh", "atomicMax(largest + turn,", "atomicMax(largest,", "test_backward_pool.py -k values"),
    Fault("kernels/grad/selected/input.cuh", "parts[k / 2][k % 2]", "parts[k % 2][k / 2]", "test_backward_pool.py -k sizes"),
    Fault("inline_kernels/engine/programs.py", 'root.node.is_leaf("dy")', "True", "test_engine_layouts.py -k gradient_of_v"),
    Fault("inline_kernels/engine/schedule.py", "dz = given[0] if back.passes_dy else dz", "dz = dz", "test_engine_layouts.py -k gradient_of_v"),
    Fault("inline_kernels/engine/load_plan.py", "case.convolves_last or _is_turned_once(case)", "case.convolves_last", "test_engine_layouts.py -k 'test_channels_last and channels'"),
    Fault("inline_kernels/engine/jobs.py", "self.weight.shape[0] if self.sinks and", "1 if self.sinks and", "test_engine_recorded.py -k seed"),
    Fault("inline_kernels/engine/costs.py", "(ODD_PASSED - 1) * shapes.moving(2 * v)", "0", "test_engine_recorded.py -k seed"),
    Fault("kernels/load/turned.cuh", "value_t* const out = turn.out;", "value_t* const out = turns.of[0].out;", "test_engine_layouts.py -k whole_arrays"),
    Fault("inline_kernels/engine/between.py", "if is_exact and not (segment.at_once and all(readers))", "if is_exact and not all(readers)", "test_engine_between.py -k has_no_error"),
    Fault("inline_kernels/engine/replacing.py", " and not support.altered(name, each)", "", "test_engine_kept.py -k keeps_something_on_a_pool"),
    Fault("inline_kernels/engine/between.py", " and user.args.count(node) == 1", "", "test_engine_between.py -k added_and_has_no_error"),
    Fault("inline_kernels/engine/stored.py", "if _writes_last(case) and not load_plan.is_last", "if False and not load_plan.is_last", "test_engine_sinks.py -k in_planes_get"),
    Fault("inline_kernels/engine/schedule.py", "plan.runs = FOR_TF32 if in_tf32 else PLANES", "plan.runs = FOR_TF32", "test_engine_between.py -k has_no_error"),
    Fault("kernels/conv/stream.cuh", "T(kRounds ? nearest_tf32(result) : result)", "T(result)", "test_engine_direct.py -k windows_for_the_next"),
    Fault("inline_kernels/engine/direct.py", "if lies_last and written.rest:", "if False:", "test_engine_direct.py -k what_follows"),
    Fault("inline_kernels/engine/mainloops.py", " + (x.dim() == 4)  # an image", "  # an image", "test_engine_direct.py -k stream_leaves"),
    Fault("kernels/conv/terms.cuh", "for (int k = 1; k < kTerms; k++)", "for (int k = 1; k < kTerms - 1; k++)", "test_stream.py -k shares"),
    Fault("kernels/conv/stream_sm90.cuh", "out.y += tile.share * ", "out.y += 0 * ", "test_stream.py -k shares"),
    Fault("kernels/conv/taps.cuh", "of[d] * walk.dilation[d];", "of[d];", "test_stream.py -k taps"),
    Fault("kernels/conv/stream_sm90.cuh", "end = n < args.N ? (n + 1) * S : 0", "end = args.positions()", "test_stream.py -k planes"),
    Fault("kernels/conv/stream_sm90.cuh", "(kInPlanes ? i % kOfSlab * 128 : at)", "at", "test_stream.py -k planes"),
    Fault("kernels/conv/one_tap.cuh", "return first + i * kOneTapThreads < S;", "return true;", "test_engine_direct.py -k one_tap"),
    Fault("inline_kernels/engine/guards.py", "self._contents += _containers(value for _, value in self._outside)", "pass", "test_engine_changes.py -k change_in_place"),
    Fault("inline_kernels/engine/guards.py", "left += [each for each in held if", "left += [each for each in () if", "test_engine_changes.py -k change_in_place"),
    Fault("inline_kernels/engine/guards.py", "return len(now) == len(was) and all(map(_is_same, now, was))", "return now == was", "test_engine_changes.py -k attribute_s_name"),
    Fault("inline_kernels/engine/tiling.py", "math.prod(shapes.image[2:]) % 8 == 0", "math.prod(shapes.image[2:]) % 4 == 0", "test_engine_direct.py -k planes_as"),
    Fault("kernels/conv/stream_operands.cuh", "line % OH * stride[1]", "line % OH", "test_stream.py -k sizes"),
    Fault("kernels/conv/stream_operands.cuh", "inside && channel < Conv::kChannelsIn", "inside", "test_stream.py -k channels_last"),
    Fault("kernels/conv/stream_sm80.cuh", "(own.inside[k] & reach.places) == reach.places", "own.inside[k] != 0", "test_stream.py -k sizes"),
    Fault("kernels/conv/stream_sm80.cuh", "slab / kCopies * kUnits;", "0;", "test_stream.py -k sizes"),
    Fault("kernels/core/matrix_tile.cuh", "at & 4 ? words[i + 1] : words[i]", "words[i]", "test_engine_layouts.py -k whole_arrays"),
    Fault("inline_kernels/engine/direct.py", 'defines["CHANNELS_LAST"] = "1"', "pass", "test_engine_direct.py -k bits_channels_last"),
    Fault("inline_kernels/engine/sinks.py", "x.size({2 + i} - LAST)", "x.size({2 + i})", "test_engine_sinks.py -k x_channels_last"),
    Fault("inline_kernels/engine/choice.py", "with contextlib.suppress(schedule.Unsupported):", "with contextlib.suppress(ValueError):", "test_engine_timed.py -k silent"),
    Fault("kernels/conv/stream_views.cuh", "alone ? first : first + second, alone}", "first, alone}", "test_stream.py -k views"),
    Fault("kernels/conv/stream_views.cuh", "column < OW && height < OH && depth < OD", "column < OW && depth < OD", "test_stream.py -k views"),
    Fault("kernels/conv/stream_views.cuh", "if (i % 2 == 0) part = first;", "if (i % 2 == 0) part = part;", "test_stream.py -k views"),
    Fault("kernels/conv/stream_views_sm90.cuh", "if (next.count == 1) {", "if (next.count == 0) {", "test_stream.py -k little_memory"),
    Fault("kernels/conv/stream_views_sm90.cuh", "patch.channels = Conv::kOfWarp,", "", "test_stream.py -k views"),
    Fault("kernels/conv/stream_views_sm90.cuh", "while (most > 1 && stages(at, most) == 0) most--;", "", "test_stream.py -k little_memory"),
    Fault("kernels/conv/stream_views_sm90.cuh", "await(weights_barrier(shared), 0);\n    for (int number = team;; number += args.teams)", "await(weights_barrier(shared), 0);\n    for (int number = team;; number += kTeams)", "test_stream.py -k little_memory"),
    Fault("kernels/store/positions.cuh", "if ((first + c) * kBeside + own >= part.channels) break;", "", "test_stream.py -k views"),
    Fault("kernels/store/positions.cuh", "unit * kOfUnit < part.columns ?", "true ?", "test_stream.py -k planes"),
    Fault("kernels/store/positions.cuh", "i * kRows < count", "true", "test_stream.py -k planes"),
    Fault("kernels/store/positions.cuh", "column < patch.columns && at >= 0) put_unit", "at >= 0) put_unit", "test_stream.py -k by_matrices"),
    Fault("kernels/core/matrix_tile.cuh", "if (padded > rows) {", "if (false) {", "test_stream.py -k by_matrices"),
    Fault("kernels/conv/stream_operands.cuh", "min(Conv::kPixel - channel, kMatrixRows)", "min(Conv::kChannelsIn - channel, kMatrixRows)", "test_stream.py -k by_matrices"),
    Fault("inline_kernels/engine/mainloops.py", "not job.is_alone and not choice.is_silent() and", "not job.is_alone and", "test_choice.py -k fastest_is_timed"),
    Fault("inline_kernels/engine/direct.py", 'r"\\bn\\b", "".join(body)', 'r"\\bn\\b", "".join(lines)', "test_engine_sinks.py -k share_a_tile"),
    Fault("kernels/store/positions.cuh", "whole &= real[i] && to[i] == to[0] + i;", "if (i < 2) whole &= real[i] && to[i] == to[0] + i;", "test_engine_direct.py -k behind_views"),
    Fault("inline_kernels/engine/tiling.py", "room // (staging + stage)", "room // stage", "test_engine_direct.py -k room_for"),
    Fault("inline_kernels/engine/between.py", "rounds_for_library(segment, x, weight) and not convolves_last", "rounds_for_library(segment, x, weight) or not convolves_last", "test_engine_between.py"),
    Fault("inline_kernels/engine/schedule.py", "        plan.runs = PLANES\n    elif", "        plan.runs = TURNED\n    elif", "test_engine_layouts.py -k y_alone"),
    Fault("kernels/cpu/picked_gradient.h", "row % kRows * down", "row % 2 * down", "test_engine_strips.py -k picked"),
    Fault("kernels/cpu/picked_gradient.h", "(first + w) * sizes.C", "w * sizes.C", "test_engine_strips.py -k picked"),
    Fault("kernels/cpu/picked_gradient.h", "odd[row] = zero != 0;", "", "test_engine_strips.py -k 'picked and finite'"),
    Fault("kernels/cpu/picked_gradient.h", "if (++strips_ == kStrips) end(share);", "if (++strips_ == kStrips) strips_ = 0, std::fill_n(sums_, of_.share(), 0.f);", "test_engine_strips.py -k picked"),
    Fault("inline_kernels/engine/tiling.py", "patch = costs.VIEWS_POSITIONS + taps[-2] * row + taps[-1]", "patch = costs.VIEWS_POSITIONS + taps[-2] * row", "test_engine_direct.py -k room_for"),
    Fault("kernels/conv/stream.cuh", "y[n * results() + i] = T(kRounds ? nearest_tf32(value) : value);", "y[at] = T(kRounds ? nearest_tf32(value) : value);", "test_engine_sinks.py -k stays_channels_last"),
    Fault("inline_kernels/engine/mainloops.py", '{"RESULTS_LAST": int(lies_last), "ROUNDS_RESULT": int(job.rounds)}', '{"RESULTS_LAST": int(lies_last), "ROUNDS_RESULT": 0}', "test_engine_sinks.py -k stays_channels_last"),
    Fault("inline_kernels/engine/layouts.py", "itself if segment.of_operand or layout == TURNED else plan.turns.rounded(x)", "itself", "test_engine_between.py -k operands_are_rounded"),
    Fault("inline_kernels/engine/layouts.py", "segment.of_operand or layout == TURNED else", "segment.of_operand else", "test_depthwise.py -k digit"),
    Fault("inline_kernels/engine/between.py", "uses |= {EXACT if depthwise.suits(segment.conv, filters[segment]) else OPERAND}", "uses |= {OPERAND}", "test_depthwise.py -k digit"),
    Fault("kernels/conv/depthwise.cuh", "apart % kStride ? -1 : apart / kStride", "apart / kStride", "test_depthwise.py -k convolutions"),
    Fault("kernels/conv/depthwise.cuh", "met < 0 || unsigned(line + met) >= unsigned(height)", "met < 0", "test_depthwise.py -k convolutions"),
    Fault("kernels/grad/depthwise_weight.cuh", "if (!kInside && i >= count) return;", "", "test_depthwise.py -k convolutions"),
    Fault("inline_kernels/engine/load_plan.py", '*[self.last and a.name in ("v", "y") for a', '*[False for a', "test_engine_between.py -k come_back"),
    Fault("inline_kernels/engine/programs.py", "if is_known(node) and small & {*order([node])}", "if False", "test_engine_source.py -k test_no_pass_before"),
    Fault("inline_kernels/engine/schedule.py", "over = over and not plan.segment.conv.is_nothing", "over = over", "test_engine_between.py -k 'is_right and before'"),
    Fault("kernels/load/turned.cuh", "if constexpr (tiled == Tiled::kWritten) write_turned(to, x);", "if constexpr (false) write_turned(to, x);", "test_engine_layouts.py -k y_alone"),
    Fault("inline_kernels/engine/schedule.py", "FOR_TF32 if rounds else TURNED", "TURNED", "test_engine_layouts.py -k y_alone"),
    Fault("inline_kernels/engine/cases.py", "all(t.is_contiguous() for t in alike)", "alike[0].is_contiguous()", "test_engine_layouts.py -k y_alone"),
    Fault("inline_kernels/engine/layouts.py", "library.aligned(library.convolve(how, x, weight)), None", "library.convolve(how, x, weight), None", "test_engine_layouts.py -k x_itself"),
    Fault("inline_kernels/engine/layouts.py", "in_planes = not plan.last or between", "in_planes = between", "test_engine_layouts.py -k x_itself"),
    Fault("inline_kernels/engine/schedule.py", "without_dz = not dx and needs_no_dz(plan)", "without_dz = False", "test_engine_layouts.py -k no_gradient_of"),
    # ---- windows that overlap, lie apart, begin outside
    Fault("kernels/load/points.cuh", "is_in<P>(z, fine.D) && is_in<P>(y, fine.H);", "is_in<P>(y, fine.H);", "test_engine_source.py -k 'any_windows and cuda and volumes'"),
    Fault("kernels/load/points.cuh", "total += math::select(inside, f(", "total += math::select(true, f(", "test_engine_source.py -k 'any_windows and cuda and mean'"),
    Fault("kernels/load/extent.h", "first = position + P < K ? I{} : divided<S>(position + P - K) + 1;", "first = divided<S>(position + P - K) + 1;", "test_engine_source.py -k 'any_windows and cuda'"),
    Fault("kernels/load/extent.h", "(behind < windows ? behind : windows) - first", "behind - first", "test_engine_source.py -k 'any_windows and cuda'"),
    Fault("kernels/load/extreme.cuh", "counts && (index < 0", "(index < 0", "test_engine_source.py -k 'any_windows and cuda and stem'"),
    Fault("kernels/cpu/points.h", "(x <= last);", "(x <= x);", "test_engine_source.py -k 'any_windows and cpu'"),
    Fault("kernels/cpu/points.h", "is_outside(z + i, fine.D) ||", "", "test_engine_cpu.py -k windows_there"),
    Fault("kernels/cpu/points.h", "P::left(fine, first.w + count - 1) + width > fine.W)", "false)", "test_engine_source.py -k 'any_windows and cpu and mean'"),
    Fault("inline_kernels/engine/graph.py", "a.op == \"upsample\" and not any(self.levels[a.attr].padding)", "a.op == \"upsample\"", "test_engine_graph.py -k overlap"),
    Fault("inline_kernels/engine/graph.py", " and self._is_apart(axis)", "", "test_engine_graph.py -k overlap"),
    Fault("inline_kernels/engine/graph.py", " and self._is_apart(_axis_of(index))", "", "test_engine_graph.py -k overlap"),
    Fault("inline_kernels/engine/passes.py", "None not in level.window and level.is_apart", "None not in level.window", "test_engine_source.py -k 'any_windows and cuda and stem'"),
    Fault("inline_kernels/engine/source.py", "if own and whole and (text", "if own and (text", "test_engine_strips.py -k 'twice_eagers and overlap'"),
    Fault("inline_kernels/engine/fronts.py", "if not pooled.graph.levels[pooled.space.level].is_apart:", "if False:", "test_engine_direct.py -k not_pointwise"),
    Fault("inline_kernels/engine/sinks.py", "({size} - {window - 2 * padding})", "({size} - {window})", "test_engine_sinks.py -k 'v_stored and overlapping'"),
    Fault("inline_kernels/engine/composed.py", "if not level.is_apart:", "if False:", "test_composed.py -k another_formula"),
    Fault("inline_kernels/engine/ops.py", "any(t.graph.levels[level].padding) and not count_include_pad", "False", "test_engine_ops.py -k says_why"),
    Fault("inline_kernels/engine/programs.py", "if a.op == \"take\" and a.args[1] is index:\n        return a.args[0]\n    operands", "if a.op == \"take\" and a.args[1] is index:\n        return a\n    operands", "test_engine_source.py -k 'any_windows and cuda and stem'"),
    Fault("kernels/load/extreme.cuh", "int(place) : index;\n    return better;", "int(place) : index;\n    return true;", "test_engine_source.py -k 'any_windows and cuda and stem'"),
    Fault("kernels/cpu/strips.h", "for (int64_t c = 0; c < extent.C; c++) {", "for (int64_t c = 0; c < extent.C && down; c++) {", "test_engine_strips.py -k 'twice_eagers and none'"),
    Fault("inline_kernels/engine/source.py", "(text.reads_v or waits) and waits <= there", "(text.reads_v or waits <= there)", "test_engine_strips.py -k 'twice_eagers'"),
    Fault("inline_kernels/engine/plane_text.py", "{loop.known[node]};\"] * is_new", "{loop.known[node]};\"] * (not is_new)", "test_engine_strips.py -k 'twice_eagers and over'"),
    # ---- a second result, and memory that is used again
    Fault("kernels/store/kept_rows.cuh", "* own.correction * own.factor", "* own.correction", "test_engine_direct.py -k 'two_results_by_wgmma and 256'"),
    Fault("kernels/conv/wide.cuh", "waiting + units * joins<Out>", "waiting", "test_engine_direct.py -k 'two_results_by_wgmma and 256'"),
    Fault("kernels/conv/wide_sm90.cuh", "const bool runs_on = !Keep::kStores && ", "const bool runs_on = ", "test_engine_direct.py -k 'two_results_by_wgmma and 45'"),
    Fault("kernels/conv/wide_sm90.cuh", "if constexpr (Keep::kStores) Keep::Rows::finish();", "", "test_engine_stored.py -k 'reduced_by_wgmma and norm'"),
    Fault("kernels/conv/wide_sm90.cuh", "if constexpr (Keep::kStores && Out::kWarpBytes > 0) await_bulk_reads();", "", "test_engine_stored.py -k 'reduced_by_wgmma and channels'"),
    Fault("kernels/store/rows.cuh", "finish() { await_bulk_reads(); }", "finish() {}", "test_engine_direct.py -k two_results_by_wgmma"),
    Fault("inline_kernels/loader/operators.py", "getrefcount(t) != _alone", "False", "test_engine_spent.py -k 'a_user_has and read'"),
    Fault("inline_kernels/loader/operators.py", "return t._use_count(), _storage_uses(storage._cdata),", "return t._use_count(), 0,", "test_engine_spent.py -k 'a_user_has and aliases'"),
    Fault("inline_kernels/loader/operators.py", "_cdata), storage.resizable()", "_cdata), True", "test_engine_spent.py -k 'a_user_has and arrays'"),
    Fault("inline_kernels/engine/schedule.py", '.count("dz") == 1', '.count("dz") > 0', "test_engine_spent.py -k another_input_s"),
    Fault("inline_kernels/engine/schedule.py", "saved[i].untyped_storage().resize_(0)", "pass", "test_engine_spent.py -k is_freed"),
    Fault("inline_kernels/engine/chain.py", "spent = each.spent and not watched and", "spent = False and", "test_engine_spent.py -k chain_writes"),
    Fault("inline_kernels/engine/schedule.py", "or name in program.texts[at].before_v", "", "test_engine_input_gradient.py -k by_stream_in_16_bits"),
    Fault("inline_kernels/engine/schedule.py", 'given += ["dz"] * bool(over)', "over = False", "test_engine_spent.py -k written_over_v"),
    Fault("inline_kernels/engine/choice.py", "return inside > 1e6 * moved", "return inside < 1e6 * moved", "test_engine_direct.py -k tail_costs"),
    Fault("inline_kernels/export/export.py", "{body}{copying}}}", "{body}}}", "test_export_gpu.py -k 'our_own and Smooth'"),
    # ---- extremes over all positions
    Fault("kernels/load/largest.h", ": other.place < place;", ": false;", "test_engine_extremes.py -k 'share_a_plane and planes'"),
    Fault("kernels/load/largest.h", "kPool && is_nan ? other.place > place", "false ? other.place > place", "test_engine_extremes.py -k 'share_a_plane or not_finite'"),
    Fault("kernels/load/reduce.cuh", "if constexpr (kPool) best.take_last(", "if constexpr (!kPool) best.take_last(", "test_engine_extremes.py -k 'not_finite and cuda'"),
    Fault("kernels/load/points.cuh", "return position + (across ? 0 : i); }", "return position + i; }", "test_engine_extremes.py -k 'last'"),
    Fault("kernels/cpu/reductions.h", "at.places(), count_up() < lanes_);", "at.places(), count_up() < kLanes);", "test_engine_extremes.py -k cpu"),
    Fault("inline_kernels/engine/programs.py", "spends_v = is_own and case.x.dtype in (torch.float32, torch.float64)", "spends_v = is_own", "test_engine_cpu.py -k left_in"),
    Fault("inline_kernels/engine/programs.py", "kind.spends_v and not any(array.name == \"v\" for array in saved)", "kind.spends_v", "test_engine_cpu.py -k left_in"),
    Fault("kernels/cpu/reductions.h", "if (++count_ == kFew) flush();\n  }\n  T value", "}\n  T value", "test_engine_axes.py -k 'many_terms and cpu'"),
    Fault("inline_kernels/engine/plane_text.py", "None in window or math.prod(window) > FEW", "False", "test_engine_axes.py -k 'many_terms and cpu'"),
    Fault("inline_kernels/engine/plane_text.py", "any(over_channels(node) for node in known if not self._array(node))", "any(map(over_channels, known))", "test_engine_axes.py -k 'many_terms and cpu'"),
    Fault("kernels/cpu/points.h", "| ties;", ";", "test_engine_cpu.py -k whole_rows"),
    Fault("kernels/cpu/points.h", "lane < count});", "lane < kLanes});", "test_engine_cpu.py -k whole_rows"),
    Fault("kernels/cpu/points.h", "*lanes = count;", "", "test_engine_cpu.py -k whole_rows"),
    Fault("kernels/cpu/lanes.h", "+ 0.5) * (1.0 / by)", ") * (1.0 / by)", "test_engine_cpu.py -k windows_there"),
    Fault("kernels/cpu/lanes.h", "(which >= i * kLanes) ? lanes : result", "lanes", "test_engine_cpu.py -k windows_there"),
    Fault("inline_kernels/engine/pass_text.py", "scope.axis == level and self.graph.levels[level].is_apart", "False", "test_engine_source.py -k window_that_is_walked"),
    Fault("inline_kernels/engine/schedule.py", "image.of if dw else library.contiguous", "image.of if dw else torch.Tensor.detach", "test_engine_strips.py -k frozen"),
    Fault("kernels/cpu/reductions.h", "better = better & (value == value);", "", "test_engine_extremes.py -k 'not_finite and cpu'"),
    Fault("inline_kernels/engine/passes.py", "key.what in (\"value\", \"largest\")", "key.what == \"value\"", "test_engine_extremes.py -k join_the_walk"),
    Fault("inline_kernels/engine/passes.py", "return Key(\"largest\", node.args[1]) if node.is_extreme else Key(\"sums\", node)", "return Key(\"largest\", node.args[1])", "test_engine_extremes.py -k any_function"),
    Fault("inline_kernels/engine/graph.py", "return self.detach(self.total(axis, a.args[0]))", "pass", "test_engine_extremes.py -k no_more_passes"),
    Fault("inline_kernels/engine/ops.py", "t.graph.extreme(\"s\", x.node, 1, pools=True)", "t.graph.extreme(\"s\", x.node, 1)", "test_engine_ops.py test_engine_extremes.py -k 'adaptive_max or a_pool or pool'"),
    Fault("inline_kernels/engine/operator.py", "fx.map_arg(map_aggregate((node.args, node.kwargs), number), values.__getitem__)", "map_aggregate(fx.map_arg((node.args, node.kwargs), values.__getitem__), number)", "test_engine_extremes.py -k a_pair"),
]
# fmt: on


class Outcome(NamedTuple):
    told: str  # "caught", "not caught", or why neither could be seen
    by: str  # the test that failed first
    why: str
    seconds: int


def run(tree: Path, tests: str) -> Outcome:
    """These tests in that tree, until one fails. A status of 5: there are none; of 2: they can't be read."""
    files, _, rest = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{file}" for file in files.split()] + (["-k", rest.strip("'")] if rest else [])
    own = {
        "INLINE_LOADER_CACHE": str(tree.parent / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "300",
    }
    start = time.monotonic()
    done = subprocess.run(command, cwd=tree, env={**os.environ, **own}, capture_output=True, text=True)
    told = {0: "not caught", 1: "caught", 5: "no test ran"}.get(done.returncode, f"status {done.returncode}")
    if told == "not caught" and " passed" not in done.stdout:
        told = "no test ran"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)(?: - )?(.*)$", done.stdout, re.M) or ["", "", ""]
    return Outcome(told, failed[1], failed[2], round(time.monotonic() - start))


def pattern(fault: Fault) -> re.Pattern:
    """What stands in the file; clang-format breaks kernels' lines where it will, comments' apart."""
    if not fault.path.startswith("kernels/"):
        return re.compile(re.escape(fault.old))
    words = re.findall(r"\w+|\s+|.", fault.old)
    return re.compile(r"\s*".join(re.escape(word) for word in words if not word.isspace()))


def seen(number: int, fault: Fault, tree: Path, sound: bool, files: bool) -> Outcome:
    """Whether it is caught in that tree, which is as before afterwards."""
    path = tree / fault.path
    text = path.read_text() if path.is_file() else ""
    stands = pattern(fault).findall(text)
    if len(stands) != 1:
        return Outcome(f"its text stands {len(stands)} times", "", "", 0)
    if files:
        return Outcome("there", "", "", 0)
    path.write_text(text if sound else text.replace(stands[0], fault.new))
    outcome = run(tree, fault.tests)
    path.write_text(text)
    return outcome


def copied(tree: Path) -> None:
    """The files that git tracks, as they are now."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).is_file(), names.stdout.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)


def record(file: Path, commit: str, fault: Fault, outcome: Outcome) -> None:
    """Its outcome, in place of an earlier one. A fault is known by its file and both its texts; others' outcomes stay while they are faults."""
    before = json.loads(file.read_text())["faults"] if file.is_file() else []
    rows = {(row["file"], row["old"], row["new"]): row for row in before}
    rows[fault[:3]] = {
        "file": fault.path, "old": fault.old, "new": fault.new, "outcome": outcome.told, "test": outcome.by, "seconds": outcome.seconds,
        "date": f"{datetime.date.today()}", "commit": commit,
    }  # fmt: skip
    what = "faults, one at a time, by tests/faults.py; test: the first of the chosen ones that failed"
    kept = [rows[each[:3]] for each in FAULTS if each[:3] in rows]
    file.write_text(json.dumps({"what": what, "torch": torch.__version__, "faults": kept}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="numbers of faults")
    parser.add_argument(
        "--files", action="store_true", help="only whether each text stands where it is looked for"
    )
    parser.add_argument("--sound", action="store_true", help="do the tests pass without the faults?")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--record", type=Path, help="writes the outcomes into this file")
    options = parser.parse_args()
    wanted = [int(number) for number in options.only.split(",") if number] or range(len(FAULTS))
    good = "there" if options.files else "not caught" if options.sound else "caught"
    missed, trees = [], queue.Queue()
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    def outcome_of(number: int) -> tuple[int, Outcome]:
        tree = trees.get()
        outcome = seen(number, FAULTS[number], tree, options.sound, options.files)
        trees.put(tree)
        return number, outcome

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            copied(Path(folder, str(job), "tree"))
            trees.put(Path(folder, str(job), "tree"))
        for number, outcome in pool.map(outcome_of, wanted):
            path, old, _, tests = FAULTS[number]
            missed += [number] if outcome.told != good else []
            what = f"{path}: {old.strip()[:50]!r}; {outcome.by or tests} {outcome.why[:100]}"
            told = {"caught": "fails", "not caught": "passes"}.get(outcome.told) if options.sound else None
            print(f"{number:3d} {told or outcome.told}, {outcome.seconds} s: {what}", flush=True)
            if options.record and not (options.sound or options.files):
                record(options.record, commit, FAULTS[number], outcome)
    print(f"{len(wanted)} faults, {len(missed)} not as they should be: {','.join(map(str, missed))}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
