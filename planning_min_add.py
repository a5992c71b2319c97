"""How the fused kernels of min-add cut their work, from shapes, bytes per element and a device's properties.

    plan(x, weight, value_bytes, out_bytes, *, split, aligned, capability, optin) -> Plan, what runs on a device
    plan_mma(weight, split) -> Plan, by mma.sync: runs where its shared_bytes are at most optin
    plan_wgmma(weight, value_bytes, out_bytes) -> Plan, by wgmma: runs where `plan` chooses it
    workspace_bytes(plan, x, weight) -> int, the size of the launcher's workspace

x (N, C, H, W) and weight (Cout, C, kh, kw) are shapes. split: is an operand the sum of two float16? aligned:
does x start at a multiple of 4 bytes? optin: the shared memory that a block may ask for. A build gets
plan.defines beside types and sizes: its kernels compute their layout from them, and don't compile where it takes
other than SHARED_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    wgmma: bool
    split: bool
    group: int  # input channels that are in shared memory at a time
    block_channels: int  # output channels of a block
    stages: int  # of the pipeline through shared memory: a tap's weights by mma.sync, rows of input by wgmma
    shared_bytes: int  # dynamic shared memory of a block; the convolution has no static
    tile_width: int = 128  # output pixels of a tile, part of a row
    register_steps: int = 30  # by wgmma: products of depth 16 whose weights are in registers

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in vars(self).items()}


def plan(x, weight, value_bytes, out_bytes, *, split, aligned, capability, optin) -> Plan:
    (N, channels, H, W), (_, _, kh, kw) = x, weight
    one_group = channels <= 64 and kh * kw * _round_up(channels, 16) // 16 <= 36
    counted_in_int = N * (H - kh + 1) * _ceil_div(W - kw + 1, Plan.tile_width) < 2**31 and H * W < 2**31
    whole_words = aligned and W * value_bytes % 4 == 0
    if not split and capability == (9, 0) and one_group and counted_in_int and whole_words:
        by_wgmma = plan_wgmma(weight, value_bytes, out_bytes)
        if by_wgmma.shared_bytes <= optin:
            return by_wgmma
    return plan_mma(weight, split)


def plan_mma(weight, split) -> Plan:
    (outputs, channels, kh, kw), operand_bytes, stages = weight, 4 if split else 2, 3
    group, block = min(_round_up(channels, 16), 128 // operand_bytes), 128 if outputs > 64 else 64
    operands = (kh * (Plan.tile_width + kw - 1) + stages * block) * group * operand_bytes
    # Results replace operands: 16 channels of each warp, 64 floats and a gap.
    results = block // 64 * 2 * 16 * 72 * 4
    return Plan(False, split, group, block, stages, max(operands, results))


def plan_wgmma(weight, value_bytes, out_bytes) -> Plan:
    (outputs, channels, kh, kw), pitch = weight, Plan.tile_width + weight[3] - 1
    group, block, stages = _round_up(channels, 16), 128 if outputs > 64 else 64, kh + 1
    # Rows of operands, each with two barriers; two consumers' other weights, 64 channels each; 8 warps' results,
    # a gap and constants, 16 channels each; two rows of x as they are.
    rows = stages * (pitch * group * 2 + 16)
    weights = 2 * 64 * 16 * 2 * max(0, kh * kw * group // 16 - Plan.register_steps)
    results = 8 * 16 * (Plan.tile_width * out_bytes + 32 + 16)
    raw = 2 * _round_up(channels * _ceil_div(pitch * value_bytes, 4) * 4, 16)
    return Plan(True, False, group, block, stages, rows + weights + results + raw)


def workspace_bytes(plan: Plan, x, weight) -> int:
    """Exponents, largest magnitudes, packed weights; and packed x, unless wgmma reads x itself."""
    (N, channels, H, W), (outputs, _, kh, kw), operand_bytes = x, weight, 4 if plan.split else 2
    channels, outputs = _round_up(channels, plan.group), _round_up(outputs, plan.block_channels)
    sizes = 4 * outputs, 4 * N, outputs * channels * kh * kw * operand_bytes
    packed_x = 0 if plan.wgmma else N * channels * H * W * operand_bytes
    return sum(_round_up(size, 256) for size in sizes) + packed_x


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(size: int, unit: int) -> int:
    return _ceil_div(size, unit) * unit
