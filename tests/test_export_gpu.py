"""Cells for a GPU, without one: run by tests/emulation on the CPU, beside Model and float64; and what nvcc makes of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import inline_loader
import models
import test_emulated
from inline_kernels.engine import choice, costs, direct, precision
from inline_kernels.export import export
from inline_kernels.loader import source as loader_source
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401
from test_export import CELLS, FUSED, Normed, builds, pair, ran, text_of  # noqa: F401


class NormedDropped(nn.Module):
    """y = dropout(group_norm(conv(x))) * scale."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels_in, channels, 3), nn.GroupNorm(2, channels)
        self.drop, self.scale = nn.Dropout(0.25), scale

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))) * self.scale


class Activated(nn.Module):
    """y = relu(conv(x)) * scale + bias."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(channels_in, channels, 3), scale
        self.bias = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.scale + self.bias


class Around(nn.Module):
    """y = relu(conv(x)) * scale, of an image with zeros around it."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(channels_in, channels, 3, padding=1), scale

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.scale


class Smooth(nn.Module):
    """y = gelu(conv(x) * factor) - scale, whose backward needs v and parameters as they were."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(channels_in, channels, 3), scale
        self.factor = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        return nn.functional.gelu(self.conv(x) * self.factor) - self.scale


class Least(nn.Module):
    """y = tanh(the least of conv(x) * scale over channels), whose backward needs which channel has it."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(channels_in, channels, 3), scale

    def forward(self, x):
        return torch.tanh(torch.min(self.conv(x) * self.scale, dim=1, keepdim=True)[0])


class Pooled(nn.Module):
    """y = max_pool(tanh(conv(x) + factor)) * scale, whose backward needs the winner's place and v."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(channels_in, channels, 3), scale
        self.factor = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x):
        return nn.functional.max_pool2d(torch.tanh(self.conv(x) + self.factor), 2) * self.scale


# Small sizes of the problems, by init_inputs and x's.
SMALL = {
    "conv2d_min_add_multiply": ((16, 32, 3, 0.5, (32, 1, 1), 2.0), (2, 16, 9, 20)),
    "conv2d_groupnorm_scale_maxpool_clamp": ((8, 16, 3, 4, (16, 1, 1), 4, 0.0, 1.0), (2, 8, 14, 22)),
    "conv3d_groupnorm_min_clamp_dropout": ((3, 16, 3, 8, 0.25, 1.0, 0.2), (2, 3, 6, 9, 12)),
    "conv3d_multiply_instancenorm_clamp_multiply_max": (
        (3, 16, 3, (16, 1, 1, 1), -1.0, 1.0),
        (2, 3, 6, 9, 12),
    ),
}


def emulated_kernels(kernels: Path) -> None:
    """Copies the kernels, with the tensor cores of tests/emulation."""
    shutil.copytree(inline_loader.KERNELS, kernels)
    for header in ("tensor_core.cuh", "wgmma.cuh"):
        shutil.copy(test_emulated.EMULATION / header, kernels / "core")


def compiled_for_the_cpu(folder: Path, text: str, library: Path) -> None:  # noqa: F811
    headers = test_emulated.once(folder / "headers-800", functools.partial(test_emulated.precompile, 800))

    def make_runs(so):
        return test_emulated.compile_with(
            "-O2", test_emulated.EMULATION / "emulation.cpp", "-shared", "-o", so
        )

    runs, source = test_emulated.once(folder / "emulation.so", make_runs), library.with_suffix(".cpp")
    text = test_emulated.translated(
        text, ("type = aoti_torch_device_type_cuda()", "type = aoti_torch_device_type_cpu()")
    )
    source.write_text(text.replace("cudaGetLastError()", "cudaError_t(0)"))
    macros = ["-DCAPABILITY=80", f"-DSHARED_LIMIT={99 << 10}", "-DTF32=0", "-D__CUDA_ARCH__=800"]
    torchs = Path(torch.__path__[0]) / "lib"
    test_emulated.compile_with(
        *macros, "-I", test_emulated.EMULATION, "-include", headers / "cuda.h", source, runs, "-shared", "-o", library,
        f"-L{torchs}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torchs}",
    )  # fmt: skip


@pytest.fixture
def on_the_cpu(folder, monkeypatch):  # noqa: F811
    """on_the_cpu(name) is the names of the cell for a GPU, of small sizes, whose kernels tests/emulation runs on the CPU."""

    def load_inline(name, sources, cuda, *, build_directory, **options):
        compiled_for_the_cpu(folder, sources[0], Path(build_directory, f"{name}.so"))

    def cell(name, text=None):
        kernels = test_emulated.once(folder / "cells", emulated_kernels)
        monkeypatch.setattr(export, "KERNELS", kernels)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
        if name in SMALL:
            changes = dict(zip(("init_inputs", "input_shape"), SMALL[name]), kernels=kernels)
            problem = dataclasses.replace(models.PROBLEMS[name], **changes)
            x, model = torch.empty(problem.input_shape, device="meta"), problem.Model(*problem.init_inputs)
            own = export.composed(problem, x, "cuda")._replace(place=kernels)
            names = ran(export.cell(export._text_of(problem), model, x, own, "cuda"))
        else:
            names = ran((text or CELLS[name])())
        names["_EXPECTED"]["the device of all"] = "cpu"
        return names.update(_DEVICE="cpu") or names

    return cell


@pytest.mark.parametrize("name", [*FUSED, "engine, cuda"])
def test_cells_for_a_gpu_in_the_emulation(name, on_the_cpu):
    """They compute and train what Model does, whatever is frozen."""
    names = on_the_cpu(name)
    names["check"]()
    ours, theirs, x = pair(names)
    with torch.no_grad():
        assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)
    theirs.eval()
    dy, found = torch.randn_like(theirs(x)), []
    for model in (ours, theirs, copy.deepcopy(theirs).double()):
        dtype = model.conv.weight.dtype
        for frozen in ("conv.weight", "x"):
            model.zero_grad(), model.conv.weight.requires_grad_(frozen != "conv.weight")
            given = x.to(dtype, copy=True).requires_grad_(frozen != "x")
            model(given).backward(dy.to(dtype))
            wanted = [given, *model.parameters()]
            assert [t.grad is None for t in wanted] == [not t.requires_grad for t in wanted]
            found.append([t.grad for t in wanted if t.requires_grad])
    gradients = [found[i] + found[i + 1] for i in (0, 2, 4)]
    for one, other, exact in zip(*gradients, strict=True):
        error, limit = ((t.double() - exact).norm() for t in (one, other))
        assert error <= 2 * limit + 1e-6 * exact.norm()


@pytest.fixture
def by_our_own(gpu, on_the_cpu, monkeypatch):  # noqa: F811
    """by_our_own(Model) gives the launchers, with their parameters, and the names of the cell that is exported on a GPU of capability 8.0. behind: y is
    faster computed behind v where backward follows."""

    def cell(Model, behind=False):
        given, shape, launchers = (8, 16, 0.5), (2, 8, 14, 22), {}
        problem = SimpleNamespace(Model=Model, input_shape=shape, get_init_inputs=lambda: [*given])

        def text():
            gpu()
            monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
            monkeypatch.setattr(choice, "narrow_loses", lambda *_, **__: None)
            monkeypatch.setattr(costs, "WIDE_LIBRARY", math.inf)
            monkeypatch.setattr(choice, "inside_loses", lambda start, *_: behind and start == costs.SECOND)
            model, x = Model(*given), torch.empty(shape, device="meta")
            own = export.generated(model, x, "cuda", by_our_own=True)._replace(place=export.KERNELS)
            found = loader_source.parse_launchers(own.source)
            launchers.update({each.name: {p.name for p in each.parameters} for each in found})
            return export.cell(export._text_of(problem), model, x, own, "cuda")

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        return launchers, on_the_cpu("", text)

    return cell


@pytest.mark.parametrize(
    "Model, behind",
    [
        (Activated, False),
        (Around, False),
        (Smooth, False),
        (Smooth, True),
        (Normed, False),
        (Least, False),
        (Pooled, False),
    ],
)
def test_convolutions_of_our_own_in_the_emulation(Model, behind, by_our_own, monkeypatch):
    """y by one launcher, with what backward needs by another, or else v; running statistics as Model's; only for what they were chosen for."""
    launchers, names = by_our_own(Model, behind)
    assert {"forward", "forward_saving"} <= launchers.keys() and "v" not in launchers["forward"]
    assert ("convolve" in launchers) == (behind or Model is Normed)
    assert ("v" in launchers["forward_saving"]) == (Model in (Smooth, Normed))
    names["check"]()
    ours, theirs, x = pair(names)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    if Model is Normed:
        with pytest.raises(RuntimeError, match="can't run: norm.training is False"):
            ours.eval()(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RuntimeError, match=r"the GPU is capability 9.0, its kernels are for capability 8.0"):
        copy.deepcopy(ours).train()(x)


@pytest.mark.parametrize("tf32", [True, False], ids=["tf32", "float32"])
def test_no_convolution_is_more_exact_than_eagers(tf32, gpu, monkeypatch):  # noqa: F811
    """Where that runs TF32: who compares y with eager's would take eager's error for ours."""
    gpu(architecture=900, multiprocessors=132)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: tf32)
    monkeypatch.setattr(direct, "FEWEST_RESULTS", 0)
    monkeypatch.setattr(choice, "stream_loses", lambda *_: None)
    monkeypatch.setattr(choice, "narrow_loses", lambda *_, **__: None)
    x = torch.empty(2, 12, 14, 22, device="meta")
    found = export.generated(Activated(12, 24, 0.5), x, "cuda", by_our_own=True)
    assert ("narrow2d" in found.source) != tf32 and ("TF32" in found.chosen_for) == tf32
    assert {"forward", "forward_saving"} <= {
        each.name for each in loader_source.parse_launchers(found.source)
    }
    if tf32:
        assert "conv::pointwise<Build>" in found.source and found.defines["SPLIT"] == 0
    last = x.contiguous(memory_format=torch.channels_last)  # which a cell lays out in planes
    found = export.generated(Activated(12, 24, 0.5), last, "cuda", by_our_own=True)
    assert not found.defines.get("LAST") and not found.defines.get("RESULTS_LAST")


def test_nothing_is_dropped_in_evaluation_by_our_own(by_our_own):
    launchers, names = by_our_own(NormedDropped)
    assert "convolve" in launchers
    names["check"]()
    ours, theirs, x = pair(names)
    with torch.no_grad():
        assert abs((ours(x) == 0).float().mean() - 0.25) < 0.05
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), atol=1e-5, rtol=1e-5)


def test_fused_dropout_in_the_emulation(on_the_cpu):
    """Where all elements tie, half of dy passes what is kept; and what is kept follows the seed."""
    ours, theirs, x = pair(on_the_cpu("conv3d_groupnorm_min_clamp_dropout"))
    for model in (ours, theirs):
        model.norm.weight.data.zero_(), model.norm.bias.data.fill_(0.25)
    torch.manual_seed(5)
    y, other = ours(x), ours(x)
    torch.manual_seed(5)
    assert torch.equal(ours(x), y) and not torch.equal(y, other)
    kept = y != 0
    assert abs(kept.float().mean() - 0.8) < 0.05 and torch.allclose(y[kept], torch.tensor(0.25 / 0.8))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.allclose(ours.norm.bias.grad, (dy * kept / 0.8 / 2).sum((0, 2, 3, 4)), atol=1e-4)
    ours.zero_grad(), ours.eval()(x).backward(dy), theirs.eval()(x).backward(dy)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-3)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("launcher, capability", [("forward", (8, 0)), ("backward", (9, 0))])
def test_nvcc_compiles_what_a_cell_builds(launcher, capability, tmp_path, monkeypatch):
    names, given = ran(text_of("cuda")), {}

    def load_inline(name, sources, cuda, **options):
        given.update(options, source=cuda[0])
        raise InterruptedError

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    properties = SimpleNamespace(
        **dict(zip(("major", "minor"), capability)), shared_memory_per_block_optin=99 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    with pytest.raises(InterruptedError):
        names["_library"](launcher)
    (tmp_path / "cell.cu").write_text(given["source"], encoding="utf-8")
    architecture = "-arch=sm_80" if capability == (8, 0) else "-arch=sm_90a"
    assert given["extra_cuda_cflags"][0][-6:].strip("_") == architecture[-6:].removeprefix("ch=").strip("_")
    command = ["nvcc", "-std=c++17", architecture, "-cubin", "-o", "cell.cubin", "cell.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    code = (tmp_path / "cell.cubin").read_bytes()
    assert (b"tail_kernel" in code) and (b"sum_rows" in code) == (launcher == "backward"), (
        "others' templates are not built"
    )


def instructions(source: str, place: Path) -> Counter:
    """What ptxas is given of each function of a source, without names."""
    place.with_suffix(".cu").write_text(source, encoding="utf-8")
    macros = ["-DCAPABILITY=90", f"-DSHARED_LIMIT={227 << 10}", "-DTF32=1"]
    command = ["nvcc", "-ptx", "-arch=sm_90a", "-std=c++17", f"-I{inline_loader.KERNELS}", *macros]
    done = subprocess.run([*command, "-o", place, place.with_suffix(".cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    text = re.sub(r"//.*|\b_Z\w+", "_", place.read_text())
    text = re.sub(r"\$L__BB\d+", "$", text)  # a label has its function's number
    return Counter(re.split(r"^(?=\.(?:visible|weak|extern|func|global|shared|const)\b)", text, flags=re.M))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("name", FUSED[1:2])  # the emulation runs all
def test_fused_cells_build_the_kernels_of_the_repository(name, tmp_path):
    """Of two launchers, instruction by instruction; though the cell has left out of the headers what it doesn't use."""
    names = ran(text_of(name))
    launchers, *others = re.findall(r"^EXPORT void (\w+)", names["_FORMULA"][1], flags=re.M)
    launchers = [launchers, *others[-1:]]
    parts = names["_HEADERS"][1], names["_FORMULA"][1], *[f"CELL({each})" for each in launchers]
    defines = re.findall(r"^#define (?!EXPORT).*\n", names["_HEADERS"][1].partition("// ---")[0], flags=re.M)
    whole = (inline_loader.KERNELS / f"{name}.cu").read_text(encoding="utf-8")
    every = {launcher.name for launcher in loader_source.parse_launchers(whole)}
    own = "".join(defines) + loader_source.without(whole, every.difference(launchers))
    found = instructions("\n".join(parts), tmp_path / "cell")
    assert found and found == instructions(own, tmp_path / "own")
