"""What a wide convolution's kernels are compiled to, for which sizes, and by which mainloop: none of it needs a GPU.

The kernels plan tiles and shared memory by themselves (kernels/conv/wide.cuh); registers and static shared memory ptxas reports.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inline_loader
from inline_kernels.engine import tiling
from inline_kernels.loader import source as loader_source
from inline_kernels.loader.source import parse_launchers
from numerics import MIN_ADD
from test_emulated import Emulated, folder, library_of  # noqa: F401

SOURCE = inline_loader.KERNELS / f"{MIN_ADD}.cu"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
TYPES = {4: "float", 2: "half_t"}
LAUNCHERS = {launcher.name for launcher in parse_launchers(SOURCE.read_text())}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")

# Filters (Cout, C, kh, kw); value_bytes; out_bytes; bytes of registers that are spilled, outside all inner
# loops; what they are here for. By mma.sync: `split` in place of the last two numbers.
BY_WGMMA = [
    ((128, 64, 3, 3), 4, 4, 0, "the default: 36 products, 6 of them with weights in shared memory"),
    ((130, 60, 3, 3), 4, 2, 0, "two blocks of channels; channels in that are padded; as under autocast"),
    ((64, 64, 3, 3), 2, 2, 12, "64 channels in a block; half operands"),
    ((128, 16, 5, 6), 2, 4, 0, "30 products, all with weights in registers; whole results of half operands"),
    ((20, 5, 1, 1), 4, 4, 0, "the smallest: one product, one row"),
]  # fmt: skip
BY_MMA = [
    ((128, 64, 3, 3), 4, False, "the default"),
    ((128, 64, 3, 3), 4, True, "two parts: two K blocks of channels"),
    ((20, 5, 3, 3), 4, True, "64 channels in a block, few in"),
    ((128, 200, 7, 2), 2, False, "several K blocks; half operands"),
    ((8, 3, 1, 1), 2, False, "results take more than operands"),
]  # fmt: skip


def made_up(monkeypatch, capability=(9, 0), shared=227 << 10) -> None:
    monkeypatch.setattr(tiling, "device_properties", lambda index: tiling.Device(capability, shared, 132))


def image(weight, value_bytes=4, size=(128, 128)) -> torch.Tensor:
    dtype = {4: torch.float32, 2: torch.float16}[value_bytes]
    return torch.empty((2, weight[1], *size), dtype=dtype, device="meta")


def compiled(launchers, architecture: str, defines: dict, folder: Path) -> dict[str, list[dict[str, int]]]:
    """Of these launchers' kernels by name, of each instance: registers, bytes of static shared memory, bytes of registers that are
    spilled. Those that spill least come first."""
    source = folder / "source.cu"
    source.write_text(loader_source.without(SOURCE.read_text(), LAUNCHERS.difference(launchers)))
    command = [
        NVCC,
        "-c",  # both halves: the host's may miss a name that the device's has
        "-Xptxas=-v",
        f"-arch=sm_{architecture}",
        "-std=c++17",
        "--expt-relaxed-constexpr",
    ]
    command += [f"-I{inline_loader.KERNELS}", *(f"-D{key}={value}" for key, value in defines.items())]
    done = subprocess.run([*command, "-o", str(folder / "out"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        found = {
            what: re.search(form, part)
            for what, form in {
                "registers": r"Used (\d+) registers", "shared": r"(\d+) bytes smem", "spilled": r"(\d+) bytes spill stores"
            }.items()
        }  # fmt: skip
        name = re.search(r"\d([a-z_]+_kernel)[EI]", part)[1]
        own = {what: int(match[1]) if match else 0 for what, match in found.items()}
        kernels.setdefault(name, []).append(own)
    return {name: sorted(each, key=lambda own: own["spilled"]) for name, each in kernels.items()}


def forward_defines(weight, value_bytes, out_bytes, split=False) -> dict:
    known = tiling.wide_defines(
        image(weight, value_bytes), torch.empty(weight), split, aligned=True, gradients=False
    )
    return {"VALUE_T": TYPES[value_bytes], "OUTPUT_T": TYPES[out_bytes], **known}


FORWARD = ["forward", "forward_saving"]


@needs_nvcc
@pytest.mark.parametrize(
    "weight, value_bytes, out_bytes, spilled, reason", BY_WGMMA, ids=lambda value: str(value)[:20]
)
def test_forward_by_wgmma(weight, value_bytes, out_bytes, spilled, reason, tmp_path, monkeypatch):
    made_up(monkeypatch)
    kernels = compiled(FORWARD, "90a", forward_defines(weight, value_bytes, out_bytes), tmp_path)
    assert kernels.keys() == {"pack_weight_kernel", "convolve_rows_kernel"}
    (_, saving) = convolve = kernels["convolve_rows_kernel"]
    assert all(each["shared"] == 0 and each["registers"] * 384 <= 65536 for each in convolve)
    others = [convolve[0], *kernels["pack_weight_kernel"]]
    assert all(each["spilled"] <= spilled for each in others) and saving["spilled"] <= max(spilled, 12)


@needs_nvcc
@pytest.mark.parametrize("weight, value_bytes, split, reason", BY_MMA, ids=lambda value: str(value)[:20])
def test_forward_by_mma(weight, value_bytes, split, reason, tmp_path, monkeypatch):
    made_up(monkeypatch, (8, 0))
    kernels = compiled(FORWARD, "80", forward_defines(weight, value_bytes, value_bytes, split), tmp_path)
    packed = ["pack_weight_kernel", "pack_input_kernel", *["repack_input_kernel"] * (value_bytes == 4)]
    assert kernels.keys() == {*packed, "convolve_kernel"} and len(kernels["convolve_kernel"]) == 2
    assert all(own["spilled"] <= 8 * split for each in kernels.values() for own in each), kernels
    assert all(own["shared"] == 0 and own["registers"] <= 255 for own in kernels["convolve_kernel"])


@needs_nvcc
@pytest.mark.parametrize(
    "value_bytes, split, architecture",
    [(4, False, "90a"), (4, True, "80")],
)
def test_backward_hardly_spills(value_bytes, split, architecture, tmp_path, monkeypatch):
    made_up(monkeypatch, (9, 0) if architecture == "90a" else (8, 0))
    weight = (128, 64, 3, 3)
    defines = tiling.wide_defines(
        image(weight, value_bytes), torch.empty(weight), split, aligned=True, gradients=True
    )
    defines |= {"VALUE_T": TYPES[value_bytes]}
    of_parameters = compiled(["backward_parameters", "backward_weight"], architecture, defines, tmp_path)
    of_input = compiled(["backward_input"], architecture, defines, tmp_path)
    by_wgmma = architecture == "90a" and not split
    assert ("convolve_rows_kernel" in of_input) == by_wgmma != ("pack_gradient_kernel" in of_input)
    assert not any(own["spilled"] for each in of_parameters.values() for own in each), of_parameters
    most = 24 if split else 0
    assert all(own["spilled"] <= most for each in of_input.values() for own in each), of_input


# -------------------------------------------------------------------------------------------------------------- which mainloop

ASKED = """
using Forward = conv::ForwardMainloop<Build, Tail, store::GradMask, store::Rows<output_t>>;
using Input = grad::InputMainloop<Build, grad::PackedGradient>;
using Weight = grad::UnitsMainloop<Build>;
constexpr bool kWeightBySm90 = grad::kTakesUnits<Build> && Weight::kFits;
EXPORT int64_t by_sm90(int64_t which) { return which == 0 ? Forward::kBySm90 : which == 1 ? kWeightBySm90 : Input::kBySm90; }
EXPORT int64_t shared(int64_t which) {
  return which == 0 ? Forward::Loop::kSharedBytes : which == 1 ? kWeightBySm90 * Weight::Loop::kSharedBytes : Input::Loop::kSharedBytes;
}
EXPORT int64_t tile(int64_t of_rows) { return of_rows ? Forward::Loop::Tile::kRows : Forward::Loop::kKBlock; }
EXPORT int64_t copied() { return Weight::Loop::kCopiedX; }
EXPORT int64_t ahead() { return Weight::Loop::Source::kAhead; }
"""


def asked(defines: dict, folder: Path) -> Emulated:
    """What the kernels answer that are compiled for these."""
    source = loader_source.without(SOURCE.read_text(), LAUNCHERS) + ASKED
    return Emulated(source, library_of(source, 900, defines, (), folder))


@pytest.mark.parametrize("by_wgmma, changed", [
    ((1, 1, 1), {}),
    ((0, 0, 0), {"split": True}),
    ((0, 0, 0), {"capability": (8, 0)}),
    ((0, 0, 0), {"capability": (10, 0)}),
    ((0, 1, 0), {"shared": 200 << 10}),  # the weight's gradient is fewer steps ahead
    ((0, 0, 0), {"shared": 99 << 10}),
    ((1, 0, 1), {"value_bytes": 2}),
    ((0, 0, 1), {"value_bytes": 2, "aligned": False}),
    ((0, 0, 1), {"value_bytes": 2, "size": (9, 127)}),  # rows that are no whole words
    ((1, 1, 1), {"size": (9, 140)}),  # rows of two tiles
    ((0, 1, 0), {"weight": (128, 65, 1, 1)}),  # a second K block; channels of x in two blocks
    ((0, 1, 0), {"weight": (128, 64, 5, 2)}),  # 40 products; of the gradient of x twice as many
    ((0, 1, 0), {"size": (2**11 + 2, 3), "samples": 2**20}),  # 2^31 tiles
], ids=str)  # fmt: skip
def test_where_wgmma_runs(by_wgmma, changed, folder, monkeypatch):
    """Forward, the weight's gradient and that of x, on GPUs that are made up."""
    given = {"weight": (128, 64, 3, 3), "value_bytes": 4, "size": (9, 128), "samples": 2, **changed}
    made_up(monkeypatch, given.get("capability", (9, 0)), given.get("shared", 227 << 10))
    weight, split = torch.empty(given["weight"], device="meta"), given.get("split", False)
    x = image(given["weight"], given["value_bytes"], given["size"]).expand(2, -1, -1, -1)
    x = x[:1].expand(given["samples"], -1, -1, -1)
    defines = [
        tiling.wide_defines(x, weight, split, aligned=given.get("aligned", True), gradients=gradients)
        for gradients in (False, True)
    ]
    types = {"VALUE_T": TYPES[given["value_bytes"]]}
    forward, backward = (asked({**types, **each}, folder) for each in defines)
    assert (forward.by_sm90(0), backward.by_sm90(1), backward.by_sm90(2)) == by_wgmma
    room = given.get("shared", 227 << 10)
    if by_wgmma[1] and given["weight"] == (128, 64, 3, 3):
        assert backward.ahead() == (3 if room == 227 << 10 else 2)
    assert max(forward.shared(0), backward.shared(1), backward.shared(2)) <= room


@pytest.mark.parametrize("copied, changed", [
    (4, {}),
    (1, {"size": (9, 138)}),
    (4, {"weight": (128, 64, 1, 9)}),
    (1, {"weight": (128, 64, 1, 11)}),  # two blocks of columns: the second begins at column 6
], ids=str)  # fmt: skip
def test_how_many_pixels_are_copied_at_a_time(copied, changed, folder, monkeypatch):
    """As many as all strips of x begin at a multiple of."""
    given = {"weight": (128, 64, 3, 3), "size": (9, 140), **changed}
    made_up(monkeypatch)
    weight = torch.empty(given["weight"], device="meta")
    x = image(given["weight"], 4, given["size"])
    kernels = asked(tiling.wide_defines(x, weight, False, aligned=True, gradients=True), folder)
    assert kernels.copied() == copied


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_whatever_is_no_obstacle_fits(folder, data):
    """And what is one does not compile: filters of any size, at any limit, in both directions."""
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    shape = draw(8, 64, 70, 200), draw(3, 16, 64, 100), draw(1, 3, 7, 15), draw(1, 3, 9, 30)
    shared, value_bytes = draw(99, 163, 227) << 10, draw(4, 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        made_up(monkeypatch, draw((8, 0), (9, 0)), shared)
        x, weight = image(shape, value_bytes, (64, 200)), torch.empty(shape, device="meta")
        obstacle = tiling.wide_obstacle(x, weight, x.dtype)
        split = value_bytes == 4
        defines = tiling.wide_defines(x, weight, split, aligned=True, gradients=True)
    defines |= {"VALUE_T": TYPES[value_bytes]}
    if obstacle:
        with pytest.raises(AssertionError, match="does not fit in shared memory"):
            asked(defines, folder)
    else:
        kernels = asked(defines, folder)
        assert max(kernels.shared(which) for which in range(3)) <= shared


def test_tiles_shrink_until_they_fit(folder, monkeypatch):
    """First to one row, then to fewer channels at a time."""
    tiles = []
    for shared in (227, 163, 130, 99):
        made_up(monkeypatch, (8, 0), shared << 10)
        weight = torch.empty(64, 64, 11, 3, device="meta")
        x = image(weight.shape, 2, (64, 200))
        known = tiling.wide_defines(x, weight, False, aligned=True, gradients=False)
        kernels = asked({"VALUE_T": "half_t", **known}, folder)
        tiles.append((kernels.tile(0), kernels.tile(1)))
        assert kernels.shared(0) <= shared << 10
    assert tiles == sorted(tiles, reverse=True) and tiles[0] > tiles[-1]
