"""A model as one file: what it holds, that it computes and trains what Model does where nothing of ours can be imported, what stands in its
way, and what an edit of it does."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import models
from inline_kernels.export import cell_of, export, notebook, used
from inline_kernels.loader import source as loader_source
from inline_kernels.loader import units

ROOT = Path(__file__).resolve().parent.parent
# What KernelBench looks for in a solution's text, comments taken off (its kernel_static_checker.py): errors of any kind.
FORBIDDEN = {
    "fallback": r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+|\bpass\b",
    "clock": r"(?:torch\.cuda\.(?:Event(?:\.\w+)?|synchronize)|time\.(?:perf_counter|time))\s*=",
    "thread": r"threading|multiprocessing|concurrent\.futures|(?:Thread|Process)PoolExecutor",
    "lazy tensor": r"_make_subclass|class\s+\w+.*\((?:torch\.)?Tensor\)|torch\.Tensor\.__new__",
    "stream": r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(?:wait|record)_stream\s*\(",
}
COMPOSED = ROOT / "tests" / "composed"
PUBLIC = {"Model", "ModelNew", "get_inputs", "get_init_inputs", "check", "torch", "nn"}


class ScaledRelu(nn.Module):
    """y = relu(conv(x)) * scale + bias."""

    def __init__(self, in_channels, out_channels, kernel_size, scale):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))
        self.scale = scale

    def forward(self, x):
        return torch.relu(self.conv(x)) * self.scale + self.bias


class DroppedConv(nn.Module):
    """y = dropout(conv(x))."""

    def __init__(self, channels, p):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.conv(x))


class Pooled(nn.Module):
    """y = dropout(max_pool(group_norm(conv(x), 2))) + shift + conv's bias once more."""

    def __init__(self, channels, scale):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, stride=2)
        self.norm, self.pool, self.drop = nn.GroupNorm(2, channels), nn.MaxPool2d(2), nn.Dropout(0.25)
        self.shift = nn.Parameter(torch.randn(channels, 1, 1))
        self.scale = scale

    def forward(self, x):
        return self.drop(self.pool(self.norm(self.conv(x)) * self.scale)) + self.shift


class Normed(nn.Module):
    """y = batch_norm(conv(x)) * scale."""

    def __init__(self, channels_in, channels, scale):
        super().__init__()
        self.conv, self.norm, self.scale = (
            nn.Conv2d(channels_in, channels, 3),
            nn.BatchNorm2d(channels),
            scale,
        )

    def forward(self, x):
        return self.norm(self.conv(x)) * self.scale


# The library convolves: v is its result.
LOAD = """// y = relu(v + conv_bias) * scale + bias
#include <vector>
#include "core/numerics.h"
#include "host/tensor.h"

template <class F> void each(const In<value_t>& v, const F& f) {
  const int64_t C = v.size(1), S = v.size(2) * v.size(3);
  host::parallel_for(C, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++)
      for (int64_t n = 0; n < v.size(0); n++)
        for (int64_t i = 0; i < S; i++) f(c, (n * C + c) * S + i);
  });
}

EXPORT void forward(Out<value_t> y, In<value_t> v, In<accumulate_t> conv_bias, In<accumulate_t> bias, double scale) {
  each(v, [&](int64_t c, int64_t i) {
    y[i] = value_t(maximum(accumulate_t(v[i]) + conv_bias[c], accumulate_t(0)) * accumulate_t(scale) + bias[c]);
  });
}

EXPORT int64_t channels(In<value_t> v) { return v.size(1); }

EXPORT int64_t counts_size(In<value_t> x, In<value_t> weight) { return x.size(0) * weight.size(0); }

EXPORT int64_t positive_size(In<value_t> v) { return v.numel(); }

EXPORT void backward_parameters(Out<accumulate_t> d_conv_bias, Out<accumulate_t> d_bias, Out<uint8_t> positive, Out<int64_t> counts,
                                In<value_t> dy, In<value_t> v, In<accumulate_t> conv_bias, double scale, int64_t channels) {
  if (counts.numel() != v.size(0) * channels || positive.numel() != v.numel()) throw std::runtime_error("sizes");
  std::vector<double> sums(2 * channels);
  each(v, [&](int64_t c, int64_t i) {
    positive[i] = accumulate_t(v[i]) + conv_bias[c] > 0;
    sums[2 * c] += positive[i] ? double(dy[i]) * scale : 0, sums[2 * c + 1] += double(dy[i]);
  });
  for (int64_t c = 0; c < channels; c++) d_conv_bias[c] = accumulate_t(sums[2 * c]), d_bias[c] = accumulate_t(sums[2 * c + 1]);
}

EXPORT void backward_v(Out<value_t> d_v, In<value_t> dy, In<uint8_t> positive, double scale) {
  for (int64_t i = 0; i < d_v.numel(); i++) d_v[i] = value_t(positive[i] ? accumulate_t(dy[i]) * accumulate_t(scale) : 0);
}
"""
DROPPED = """#include "core/philox.h"
#include "host/tensor.h"

EXPORT void forward(Out<value_t> y, In<value_t> v, In<int64_t> seed, int64_t number, double drop_p) {
  for (int64_t i = 0; i < v.numel(); i++) {
    const bool keeps = drop_p == 0 || dropout_keeps(philox(seed_of(seed, number), i / 4).lane[i % 4], drop_p);
    y[i] = keeps ? v[i] / value_t(1 - drop_p) : value_t(0);
  }
}

EXPORT void backward(Out<value_t> dv, In<value_t> dy, In<int64_t> seed, int64_t number, double drop_p) {
  for (int64_t i = 0; i < dv.numel(); i++) {
    const bool keeps = drop_p == 0 || dropout_keeps(philox(seed_of(seed, number), i / 4).lane[i % 4], drop_p);
    dv[i] = keeps ? dy[i] / value_t(1 - drop_p) : value_t(0);
  }
}
"""
PLAIN = (1, 1), (0, 0), (1, 1), False, (0, 0), 1  # a convolution's settings


def exported(Model, init_inputs, shape, source=None, device="cpu", dtype=torch.float32) -> str:
    """The cell of a class. source: its text, or path; None: the engine's."""
    problem = SimpleNamespace(Model=Model, input_shape=shape, get_init_inputs=lambda: [*init_inputs])
    model, x = Model(*init_inputs).to(dtype), torch.empty(shape, dtype=dtype, device="meta")
    text = source.read_text() if isinstance(source, Path) else source
    kernels = export.Kernels(text, "conv.weight", PLAIN) if text else export.generated(model, x, device)
    kernels = kernels._replace(place=export.KERNELS)
    return export.cell(export._text_of(problem), model, x, kernels, device)


relu = functools.partial(exported, ScaledRelu, (3, 8, 3, 0.5), (4, 3, 10, 12))
pooled = functools.partial(exported, Pooled, (4, -0.5), (3, 4, 13, 17))
CELLS = {
    "direct": lambda: relu(COMPOSED / "scaled_relu.cpp"), "load": lambda: relu(LOAD), "halves": lambda: relu(LOAD, dtype=torch.bfloat16),
    "cuda": lambda: relu(COMPOSED / "scaled_relu.cu", "cuda"), "engine": relu, "engine, doubles": lambda: pooled(dtype=torch.float64),
    "engine, pooled": pooled, "engine, cuda": lambda: pooled(device="cuda"),
    "dropped": lambda: exported(DroppedConv, (2, 0.25), (3, 2, 20, 20), DROPPED),
    "engine, dropped": lambda: exported(DroppedConv, (2, 0.25), (3, 2, 20, 20)),
    "engine, statistics": lambda: exported(Normed, (3, 4, 0.5), (3, 3, 9, 11)),
    "engine, statistics of 16 bits": lambda: exported(Normed, (3, 4, 0.5), (3, 3, 9, 11), dtype=torch.bfloat16),
}  # fmt: skip
FUSED = [name for name, problem in models.PROBLEMS.items() if "fused" in problem.variants]  # for a GPU
CELLS |= {name: functools.partial(cell_of, name, "cuda") for name in FUSED}
each_cell = pytest.mark.parametrize("name", CELLS)


@functools.cache
def text_of(name: str) -> str:
    torch.manual_seed(0)
    return CELLS[name]()


@pytest.fixture(scope="module", autouse=True)
def builds(tmp_path_factory):
    """Of all cells here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


def ran(text: str) -> dict:
    exec(compile(text, "cell", "exec"), names := {"__name__": "__main__"})
    return names


def pair(names: dict) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    ours, theirs = (
        names[each](*names["get_init_inputs"]()).to(names["_DTYPE"]) for each in ("ModelNew", "Model")
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, names["get_inputs"]()[0].to(names["_DTYPE"])


# ------------------------------------------------------------------------------------------------------- what a file holds


@each_cell
def test_what_a_file_holds(name):
    """Formula and gradient before all else; each header once; public names and private ones; what KernelBench's checker lets through."""
    text, defined = text_of(name), set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
            defined |= {target.id for target in targets}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
    assert {each for each in defined if each[0] != "_"} == PUBLIC
    parts = ["class Model(", "\n_FORMULA = ", "\n_HEADERS = ", "class ModelNew("]
    assert parts == sorted(parts, key=text.index)
    assert '#include "' not in text and text.count(" core/scalar.h\n") == text.count(" host/tensor.h\n") == 1
    code = "\n".join(re.split("#|//", line)[0] for line in text.split("\n"))
    assert {rule for rule, pattern in FORBIDDEN.items() if re.search(pattern, code)} == set()
    assert "load_inline" in code and ('_DEVICE, _DTYPE, _AS_WRITTEN = "cuda"' in code) == (
        "cuda" in name or name in FUSED
    )
    assert "__global__" in code or "cuda" not in name
    if python := importlib.util.find_spec("IPython") and importlib.import_module(
        "IPython.core.inputtransformer2"
    ):
        assert python.TransformerManager().transform_cell(text) == text


def test_the_rules_bite():
    samples = {
        "fallback": "try:\n", "clock": "time.time = f", "thread": "import threading", "lazy tensor": "class A(Tensor):",
        "stream": "s = torch.cuda.Stream()",
    }  # fmt: skip
    assert samples.keys() == FORBIDDEN.keys()
    assert all(re.search(FORBIDDEN[rule], text) for rule, text in samples.items())


def test_the_host_is_one_text_for_all():
    assert len({text_of(name).partition("host: the same for all models")[2] for name in CELLS}) == 1


MOST = {  # lines of a cell for a GPU
    "conv2d_min_add_multiply": 4411, "conv2d_groupnorm_scale_maxpool_clamp": 4779,
    "conv3d_groupnorm_min_clamp_dropout": 3754, "conv3d_multiply_instancenorm_clamp_multiply_max": 3614,
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_lines(name):
    assert len(text_of(name).splitlines()) <= MOST[name]


def test_a_notebook_with_its_headers_folded():
    cells = json.loads(notebook(text_of("direct")))["cells"]
    assert [cell["metadata"] for cell in cells] == [{}, {"jupyter": {"source_hidden": True}}, {}]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
    ours, theirs, x = pair(names)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize("change, message", [
    (lambda text: text.replace("double scale", "double factor"), "forward: expected parameters out of .* scale, .*, got `double factor`"),
    (lambda text: text.replace("In<value_t> v,", "const value_t* v,"), r"forward: expected In<T> and Out<T>, .*, got `const value_t\* v`"),
    (lambda text: text.replace("Out<uint8_t> positive", "Out<Mask> positive"), r"expected In<T> and Out<T>, T out of .*, got `Out<Mask> positive`"),
    (lambda text: text.replace("EXPORT int64_t positive_size", "inline int64_t positive_size"), r"expected a function `EXPORT int64_t positive_size\(…\)` of how many elements it has, got `Out<uint8_t> positive`"),
    (lambda text: text.replace("EXPORT int64_t channels", "inline int64_t channels"), "backward_parameters: expected parameters out of .*, got `int64_t channels`"),
    (lambda text: text.replace("double scale, int64_t channels", "double positive, int64_t channels"), "expected parameters out of .*, got `double positive`"),
], ids=["argument", "pointer", "type", "size", "number", "no number"])  # fmt: skip
def test_what_can_be_no_cell(change, message):
    with pytest.raises(ValueError, match=message):
        relu(change(LOAD))


def test_headers_in_their_places(tmp_path):
    """Once; in front of an #if that nobody can decide; of one that is known its live branch."""
    files = {
        "a.h": "#pragma once\n#ifdef GPU\n#include \"gpu.h\"\n#else\n#include \"cpu.h\"\n#endif\n#ifndef GPU\nint host;\n#endif\nint a;",
        "gpu.h": "int gpu;", "cpu.h": "#ifdef X\n#include \"b.h\"\n#else\nint x;\n#endif\nint cpu;", "b.h": "int b;",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    headers: dict = {}
    source = '#include <math.h>\n#include "a.h"\n#if Y\n#include "b.h"\n#include "a.h"\n#endif\n'
    gathered = loader_source.gather(source, tmp_path, [tmp_path], headers)

    def lines(known) -> list[str]:
        text = loader_source.inlined(gathered, headers.values(), known)
        return [line for line in text.split("\n") if line and line[:2] != "//"]

    cpu = ["int b;", "#ifdef X", "#else", "int x;", "#endif", "int cpu;"]
    rest = ["#if Y", "#endif"]
    assert lines({"GPU": False}) == ["#include <math.h>", *cpu, "int host;", "int a;", *rest]
    assert lines({"GPU": True}) == ["#include <math.h>", "int gpu;", "int a;", "int b;", *rest]
    both = ["int gpu;", *cpu, "#ifdef GPU", "#else", "#endif", "#ifndef GPU", "int host;", "#endif", "int a;"]
    assert lines({}) == ["#include <math.h>", *both, *rest]


def test_what_is_not_used_is_left_out():
    headers = """// ---- a.h
// Of the header.

#pragma once
#define TWICE(x) (2 * (x))
#define UNUSED 1
namespace a {

// Gone, with this.
template <class T, int kOf = (1 > 0)>
__device__ void gone(T x) {
#pragma unroll
  for (int i = 0; i < 3; i++) x = TWICE(x);
}

enum { kOne = 1, kTwo };
MAKE(gone)
MAKE(other) MAKE(deep, deeper)
MAKE(dee)
constexpr int kGone = 3;
struct alignas(2 * sizeof(int)) Aligned {};
struct Gone {};
struct Used { int at = deep(); };
template <> struct Used<int> {};
using Also __attribute__((aligned(4))) = int;
}  // namespace a
namespace b {
int unused();
}  // namespace b
int deep() { return kTwo + sizeof(a::Aligned); }
"""
    found = used.used(headers, "a::Used f(); // gone")
    assert found.split("\n") == [
        "// ---- a.h", "// Of the header.", "", "#pragma once", "namespace a {", "", "enum { kOne = 1, kTwo };", "MAKE(other) MAKE(deep, deeper)", "MAKE(dee)",
        "struct alignas(2 * sizeof(int)) Aligned {};", "struct Used { int at = deep(); };", "template <> struct Used<int> {};", "}  // namespace a", "int deep() { return kTwo + sizeof(a::Aligned); }", "",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ files, and the command

FILE = """import torch
import torch.nn as nn

batch_size, channels = 3, 4


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(2, channels, 3)
        self.other = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)
        self.shift = nn.Parameter(torch.randn(channels, 1, 1))
        self.scaled = Scaled(0.5)

    def forward(self, x):
        return self.scaled(torch.tanh(self.conv(x) + self.shift))


def get_inputs():
    return [torch.rand(batch_size, 2, 9, 12)]


def get_init_inputs():
    return [channels]
"""


def command(*arguments) -> subprocess.CompletedProcess:
    call = [sys.executable, "export.py", *map(str, arguments)]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")


def test_a_file_as_a_cell(tmp_path):
    """By the command, which reads it in a process of its own. Two parameters with the same gradient have it both."""
    path, out, main = tmp_path / "my model.py", tmp_path / "cell.py", importlib.import_module("export").main
    path.write_text(FILE)
    assert main([str(path), "--device", "cpu", "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text == cell_of(str(path), "cpu") and FILE.strip() in text
    names = ran(text)
    names["check"]()
    ours, theirs, x = pair(names)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    assert torch.allclose(ours(x), theirs(x), atol=1e-6) and torch.allclose(
        ours.shift.grad, theirs.shift.grad, rtol=1e-4
    )
    assert ours.shift.grad.shape == (4, 1, 1) and ours.conv.bias.grad.shape == (4,)
    assert torch.equal(ours.shift.grad.flatten(), ours.conv.bias.grad)
    path.write_text(FILE + "\nimport os\nos.abort()\n")
    assert main([str(path)]) == 6


@pytest.mark.parametrize("old, new, message", [
    ("self.scaled(TAIL)", "torch.relu(self.other(TAIL))", "its first convolution's kernels leave to PyTorch: the convolution other"),
    ("self.scaled(TAIL)", "torch.cumsum(TAIL, 1)", "its first convolution's kernels leave to PyTorch: cumsum"),
    ("2, channels, 3)", '2, channels, 3, padding=1, padding_mode="reflect")', "a cell can't have padding that isn't of zeros"),
    ("self.scaled(TAIL)", "x", "no kernels serve it: "),
    ("[torch.rand(batch_size, 2, 9, 12)]", "[torch.rand(2), 3]", "expected get_inputs to give one tensor, got Tensor, int"),
], ids=["convolution", "operation", "padding", "none", "inputs"])  # fmt: skip
def test_what_a_cell_can_t_hold_is_named(old, new, message, tmp_path):
    old, new = (each.replace("TAIL", "torch.tanh(self.conv(x) + self.shift)") for each in (old, new))
    assert FILE.count(old) == 1
    (tmp_path / "a.py").write_text(FILE.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        cell_of(str(tmp_path / "a.py"), "cpu")


def test_command(tmp_path, capsys):
    name = FUSED[0]
    done = command(name, "--device", "cuda")
    assert done.stdout == text_of(name)
    path, main = tmp_path / "a.ipynb", importlib.import_module("export").main
    assert main([name, "--device", "cuda", "--variant", "epilogue", "-o", str(path)]) == 0
    assert len(json.loads(path.read_text())["cells"]) == 3
    for arguments in (["nonsense", "--here"], [name, "--device", "cpu", "--variant", "nonsense"]):
        assert main(arguments) == 1
        assert re.match("export.py: (expected|there is no nonsense variant)", capsys.readouterr().err)


def test_few_samples_at_a_time():
    """On a CPU, as many as stay in its caches, where nobody keeps v."""
    ours, theirs, x = pair(
        names := ran(
            text_of("engine").replace(
                "_SAMPLES, _CONVOLUTION = [3, 10, 12], ", "_SAMPLES, _CONVOLUTION = [3, 10, 12], 3 or "
            )
        )
    )
    convolve, counts = torch.ops.aten.convolution, []

    def counted(x, *rest):
        return counts.append(len(x)) or convolve(x, *rest)

    counted.default = convolve.default  # which PyTorch asks for, if it hasn't before
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "convolution", counted)
        assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert counts == [3, 1] and names["_SAMPLES"] == 3


# ------------------------------------------------------------------------------------------------------------ that it runs

ALONE = """
import sys, torch
names = {"__name__": "__main__"}
exec(open(sys.argv[1], encoding="utf-8").read(), names)
assert not {"inline_kernels", "inline_loader", "models"} & set(sys.modules)
for _ in range(3):
    names["check"]()
model, [x] = names["ModelNew"](*names["get_init_inputs"]()), names["get_inputs"](batch_size=2)
model(x)
with torch.no_grad():
    print(tuple(model(x).shape))
"""


@pytest.mark.parametrize("name", ["engine, pooled"])
def test_alone_it_computes_and_trains_what_model_does(name, tmp_path):
    (tmp_path / "cell.py").write_text(text_of(name), encoding="utf-8")
    command = [sys.executable, "-I", "-c", ALONE, "cell.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shape = (2, 4, 3, 4) if "pooled" in name else (2, 8, 8, 10)
    assert done.stdout.splitlines()[-1] == str(shape)
    assert re.search(r"compiling backward\w* … \d+\.\d s\n", done.stdout)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "compiling" not in done.stdout, "built once"


ON_A_GPU = """
import sys, torch
names = {"__name__": "__main__"}
exec(open(sys.argv[1], encoding="utf-8").read(), names)
for allowed in (True, False):
    torch.backends.cudnn.allow_tf32 = allowed
    for batch_size in (2, 16):
        names["check"](batch_size)
model, [x] = names["ModelNew"](*names["get_init_inputs"]()).cuda(), names["get_inputs"](batch_size=2, device="cuda")
y = model.eval()(x)
with torch.no_grad():
    assert torch.equal(model(x), y)
gradients = {}
for frozen in ("", "x", "weight"):
    model.zero_grad()
    model.conv.weight.requires_grad_(frozen != "weight")
    given = x.clone().requires_grad_(frozen != "x")
    model(given).sum().backward()
    gradients[frozen] = given.grad, model.conv.weight.grad
dx, dw = gradients[""]
assert gradients["x"][0] is None and gradients["weight"][1] is None
assert torch.equal(gradients["weight"][0], dx) and torch.allclose(gradients["x"][1], dw, rtol=1e-3, atol=1e-3)
print(tuple(y.shape))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_alone_on_a_gpu(name, tmp_path):
    """check() says that it computes and trains what Model does, with TF32 and without."""
    (tmp_path / "cell.py").write_text(text_of(name), encoding="utf-8")
    command = [sys.executable, "-I", "-c", ON_A_GPU, "cell.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "name, frozen",
    [("direct", ()), ("direct", ("x",)), ("direct", ("x", "conv.weight")), ("load", ("conv.weight",))]
    + [("load", ("conv.weight", "conv.bias", "bias")), ("engine, pooled", ()), ("engine, pooled", ("x",))]
    + [("engine, doubles", ())],
    ids=str,
)
def test_gradients_that_are_asked_for(name, frozen):
    ours, theirs, x = pair(names := ran(text_of(name)))
    for model in (ours, theirs, copy.deepcopy(theirs).double()):
        dtype = next(model.parameters()).dtype
        given = x.to(dtype, copy=True).requires_grad_("x" not in frozen)
        for path, p in model.named_parameters():
            p.requires_grad_(path not in frozen)
        y = model.eval()(given)  # a mask isn't Model's
        torch.manual_seed(1)
        y.backward(torch.randn(y.shape).transpose(2, 3).contiguous().transpose(2, 3).to(dtype))
        model.found = {"y": y.detach(), "x": given.grad} | {
            path: p.grad for path, p in model.named_parameters()
        }
        exact = model.found
    for what, right in exact.items():
        assert (right is None) == (ours.found[what] is None), what
        if right is not None:
            error, limit = ((model.found[what].double() - right).norm() for model in (ours, theirs))
            assert error <= 2 * limit + 1e-7 * right.norm(), what


ALTERNATIVES = """
EXPORT void forward(Out<value_t> y, In<value_t> x, In<value_t> weight) { y[0] = x[0] * weight[0]; }

EXPORT void backward(Out<value_t> d_weight, In<value_t> dy, In<value_t> x, In<value_t> weight) {
  d_weight[0] = 1;
}

EXPORT void backward_input(Out<value_t> dx, In<value_t> dy, In<value_t> x, In<value_t> weight) {
  dx[0] = 2;
}

EXPORT void backward_both(Out<value_t> dx, Out<value_t> d_weight, In<value_t> dy, In<value_t> x, In<value_t> weight) {
  dx[0] = d_weight[0] = 3;
}
"""


@pytest.mark.parametrize("wanted, expected", [("x", (2, None)), ("w", (None, 1)), ("xw", (3, 3))])
def test_of_two_launchers_that_give_the_same_one_runs(wanted, expected):
    source = ALTERNATIVES.replace("{ y[0]", "{\n  y[0]").replace("[0]; }", "[0];\n}")
    ours, _, x = pair(ran(exported(DroppedConv, (1, 0.0), (1, 1, 3, 3), source)))
    x.requires_grad_("x" in wanted), ours.conv.weight.requires_grad_("w" in wanted)
    ours(x).sum().backward()
    found = [t.grad if t.grad is None else t.grad.flatten()[0] for t in (x, ours.conv.weight)]
    assert (*found,) == expected


@pytest.mark.parametrize("name", ["direct", "engine"])
def test_parameters_are_read_at_each_call(name):
    ours, theirs, x = pair(ran(text_of(name)))
    for model in (ours, theirs):
        model.scale = -2
        model.conv.weight.data.mul_(3)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert torch.allclose(
        ours(x[:1, :, :, :].expand(2, -1, -1, -1)), theirs(x[:1].expand(2, -1, -1, -1)), atol=1e-5
    )


def test_halves():
    ours, theirs, x = pair(ran(text_of("halves")))
    y = ours(x)
    exact = copy.deepcopy(theirs).double()(x.double())
    assert y.dtype == torch.bfloat16 and (y - exact).norm() <= 2 * (theirs(x) - exact).norm()
    y.sum().backward()
    assert ours.bias.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["dropped", "engine, dropped"])
def test_dropout_draws_anew_and_follows_the_seed(name):
    ours, theirs, x = pair(ran(text_of(name)))
    v = ours.conv(x)
    torch.manual_seed(5)
    y, other = ours(x), ours(x)
    torch.manual_seed(5)
    assert torch.equal(ours(x), y) and not torch.equal(y, other)
    kept = y != 0
    assert abs(kept.float().mean() - 0.75) < 0.03 and torch.allclose(y[kept], (v / 0.75)[kept])
    (found,) = torch.autograd.grad(y.sum(), ours.conv.weight)
    (right,) = torch.autograd.grad((v / 0.75)[kept].sum(), ours.conv.weight)
    assert torch.allclose(found, right, atol=1e-4)
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-6)
    for model in (ours, theirs):
        model.drop.p = 1.5
        with pytest.raises(ValueError, match="between 0 and 1, but got 1.5"):
            model.train()(x)


@pytest.mark.parametrize(
    "dtype, step", [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)], ids=str
)
def test_running_statistics_are_written_where_they_lie(dtype, step):
    """Of 16 bits, or with strides; nothing beside them."""
    name = "engine, statistics" + " of 16 bits" * (dtype != torch.float32)
    ours, theirs, x = pair(ran(text_of(name)))
    around = torch.full((4 * step + 8,), 7.0, dtype=dtype)
    ours.norm.running_mean = around[: 4 * step : step].zero_()
    ours(x), theirs(x)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=2e-2, atol=2e-2)
    assert (around[4 * step :] == 7).all() and (around[1 : 4 * step : step] == 7).all() or step == 1


def test_check_looks_at_running_statistics():
    text = text_of("engine, statistics")
    assert "* 0.9;" in text
    names = ran(text.replace("* 0.9;", "* 0.3;"))
    with pytest.raises(AssertionError, match="norm.running_mean is not Model's"):
        names["check"]()


def test_what_may_change_and_stays_the_same_object_is_looked_at_again():
    begin = "super().__init__()\n"
    text = text_of("engine").replace(
        begin, f"{begin}        self.own = __import__('types').SimpleNamespace(s=2.0)\n", 1
    )
    ours, _, x = pair(ran(text))
    ours(x)
    assert "_seen" not in vars(ours)
    ours.own.s = 3.0
    with pytest.raises(RuntimeError, match="can't run: own is"):
        ours(x)
    ours, _, x = pair(ran(text_of("engine")))
    ours(x)
    assert "_seen" in vars(ours)
    assert "_seen" not in ours.__getstate__() and "_seen" not in vars(copy.deepcopy(ours))


class Swapped(models.PROBLEMS["conv2d_min_add_multiply"].Model):
    """The two numbers stand in one another's place."""

    def forward(self, x):
        return (torch.min(self.conv(x), torch.tensor(self.scaling_factor)) + self.bias) * self.constant_value


class Summed(models.PROBLEMS["conv2d_min_add_multiply"].Model):
    """Something follows."""

    def forward(self, x):
        return torch.cumsum(super().forward(x), 1)


@pytest.mark.parametrize(
    "Model, message", [(Swapped, "no fused kernels for its formula"), (Summed, "leave to PyTorch: cumsum")]
)
def test_a_written_source_stands_for_its_own_formula_alone(Model, message):
    problem = models.PROBLEMS["conv2d_min_add_multiply"]
    file = SimpleNamespace(Model=Model, get_init_inputs=problem.get_init_inputs)
    x = torch.empty(problem.input_shape, device="meta")
    export.composed(problem, x, "cuda")
    with pytest.raises(ValueError, match=message):
        export.composed(file, x, "cuda")


# ----------------------------------------------------------------------------------------------------- what stands in its way


def replaced(path: str, value):
    def change(model, x):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


HINDRANCES = {
    "a hook": (lambda m, x: m.conv.register_forward_hook(lambda *_: None), "conv.hooks is True"),
    "a pre-hook": (lambda m, x: m.conv.register_full_backward_pre_hook(lambda *_: None), "conv.hooks is True"),
    "a module": (replaced("conv", nn.Sequential()), "conv.class is .*Sequential"),
    "a class": (replaced("conv", type("Own", (nn.Conv2d,), {})(3, 8, 3)), "conv.class is .*Own"),
    "a forward": (replaced("conv.forward", lambda x: x), "conv.forward is"),
    "padding": (replaced("conv.padding", (1, 1)), r"conv.padding is \(1, 1\), its kernels are for \(0, 0\)"),
    "no bias": (replaced("conv.bias", None), "conv.bias is None"),
    "another bias": (replaced("bias", nn.Parameter(torch.ones(1))), r"bias is \(torch.float32, \(1,\)\), its kernels are for \(torch.float32, \(8, 1, 1\)\)"),
    "a constant": (replaced("scale", None), "scale is None, its kernels are for a number"),
    "NaN": (replaced("scale", float("nan")), "scale is nan"),
    "doubles": (lambda m, x: m.double(), r"\w+ is .*torch.float64, .* are for .*torch.float32"),
    "parametrized": (lambda m, x: nn.utils.parametrizations.weight_norm(m.conv), "conv.class is .*Parametrized"),
}  # fmt: skip


@pytest.mark.parametrize("what", HINDRANCES)
def test_what_stands_in_its_way_is_told(what):
    change, message = HINDRANCES[what]
    names = ran(text_of("direct"))
    model, _, x = pair(names)
    model(x)
    change(model, x)
    with pytest.raises((RuntimeError, AttributeError), match=message):
        model(x)


@pytest.mark.parametrize("x, message", [
    (torch.rand(4, 3, 10, 11), r"x is \(torch.float32, \(1, 3, 10, 11\)\), its kernels are for \(torch.float32, \(1, 3, 10, 12\)\)"),
    (torch.rand(4, 3, 10, 12).double(), "x is .*float64"),
    (torch.rand(0, 3, 10, 12), "x is without elements"),
    (torch.rand(4, 3, 10, 12, device="meta"), "the device of all is {.*}, its kernels are for cpu"),
], ids=["sizes", "dtype", "empty", "device"])  # fmt: skip
def test_inputs_that_its_kernels_are_not_for(x, message):
    model, _, _ = pair(ran(text_of("direct")))
    with pytest.raises(RuntimeError, match=f"ModelNew can't run: {message}"):
        model(x)


@pytest.mark.parametrize("x", [None, [1.0], torch.rand(4, 3, 10, 12).numpy()], ids=["None", "list", "numpy"])
def test_what_is_no_tensor_raises_as_in_eager(x):
    model, reference, _ = pair(ran(text_of("direct")))
    for each in (model, reference):
        with pytest.raises(TypeError):
            each(x)


def test_what_stands_around_the_model_is_asked_at_each_call(monkeypatch):
    model, _, x = pair(ran(text_of("direct")))
    model(x)
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="hooks on all modules is True"):
        model(x)
    handle.remove()
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="torch.func or forward-mode AD is True"):
            model(torch.autograd.forward_ad.make_dual(x, x))
    with torch.no_grad(), pytest.raises(RuntimeError, match="torch.func or forward-mode AD is True"):
        torch.func.vmap(model)(x[None])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast is True"):
        model(x)
    model(x)
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: x)
    with pytest.raises(RuntimeError, match="conv.forward is"):
        model(x)


# ------------------------------------------------------------------------------------------------------------------- edits

FORMULA, MODEL, GRADIENT = (
    ("* scale + bias[c];", "* scale - bias[c];"), ("* self.scale + self.bias", "* self.scale - self.bias"),
    ("sums[2 * c + 1] += dy[at]", "sums[2 * c + 1] -= dy[at]"),
)  # fmt: skip


def edited(*edits: tuple[str, str]) -> dict:
    text = text_of("direct")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return ran(text)


def test_an_edited_formula_trains_once_it_was_compared(capsys):
    names = edited(FORMULA, MODEL, GRADIENT)
    ours, theirs, x = pair(names)
    y = ours(x)
    assert torch.allclose(y, theirs(x), atol=1e-6)
    with pytest.raises(RuntimeError, match="formula was edited: .* call check"):
        y.sum().backward()
    names["check"]()
    assert "bias.grad: error" in capsys.readouterr().out
    ours(x).sum().backward(), theirs(x).sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "edits, wrong", [([FORMULA], "y"), ([FORMULA, MODEL], "bias.grad"), ([GRADIENT], "bias.grad")]
)
def test_a_wrong_edit_does_not_train(edits, wrong):
    names = edited(*edits)
    with pytest.raises(AssertionError, match=f"^{wrong} is not Model's"):
        names["check"]()
    ours, _, x = pair(names)
    with pytest.raises(RuntimeError, match="formula was edited"):
        ours(x).sum().backward()


def test_a_comment_is_no_edit():
    ours, _, x = pair(edited((FORMULA[0], FORMULA[0] + "  // as it was /* here */")))
    ours(x).sum().backward()


@pytest.mark.parametrize("part, edit", [
    ("formula", (FORMULA[0], "* scale + bias[c] + oops;")), ("headers", ("using value_t = VALUE_T;", "using value_t = oops;")),
])  # fmt: skip
def test_an_error_is_told_at_its_line(part, edit, capsys):
    names = edited(edit)
    ours, _, x = pair(names)
    with pytest.raises(RuntimeError, match=f"^{part}, line .* of the cell: .*oops") as raised:
        ours(x)
    line = (
        text_of("direct").replace(*edit).split("\n")[int(re.search(r"line (\d+)", str(raised.value))[1]) - 1]
    )
    assert edit[1] in line and line in str(raised.value)
    assert raised.value.__suppress_context__ and raised.value._render_traceback_() == [
        f"BuildError: {raised.value}"
    ]
    assert "compiling forward_saving … " in capsys.readouterr().out


COMPILER = """#!/bin/sh
case "$SIGNAL $*" in [A-Z]*" -c "*) kill -$SIGNAL $VICTIM; sleep 0.5; exit 1;; esac
exec c++ "$@"
"""
BUILD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and what they start
names = {"__name__": "__main__"}
exec(open("cell.py", encoding="utf-8").read(), names)
model, [x] = names["ModelNew"](*names["get_init_inputs"]()), names["get_inputs"](batch_size=1)
os.environ["VICTIM"] = str(os.getpid())
for each in sys.argv[1:]:
    os.environ["SIGNAL"] = each
    try:
        model(x)
    except (KeyboardInterrupt, RuntimeError) as error:
        print("\\n" + type(error).__name__)
os.environ["SIGNAL"] = ""
print("\\n", tuple(model(x).shape))
"""


def test_an_interrupted_build_is_begun_anew(tmp_path):
    """Whether the notebook's process is killed, the cell is interrupted, or the compiler fails."""
    (tmp_path / "cell.py").write_text(text_of("direct"), encoding="utf-8")
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o755)
    places = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "builds"), "CXX": str(tmp_path / "c++")}

    def build(*signals):
        command = [sys.executable, "-c", BUILD, *signals]
        environment = {**os.environ, **places}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    assert build("KILL").returncode == -9
    done = build("INT", "CONT")
    told = [line for line in done.stdout.splitlines() if line.strip() and "compiling" not in line]
    assert told == ["KeyboardInterrupt", "RuntimeError", " (1, 8, 8, 10)"], done.stderr[-2000:]


def test_flags_are_the_loader_s(monkeypatch):
    """The same optimisation, whoever builds."""
    names, given = ran(text_of("direct") + "\n# new"), {}
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", lambda *_, **options: given.update(options))
    monkeypatch.setattr("torch.__version__", "another")
    with pytest.raises(FileNotFoundError):
        names["_library"]("forward")
    unit = units.unit_of("f", LOAD, "cpu", {})
    assert given["extra_cflags"] == list(unit.cflags)
