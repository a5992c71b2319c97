"""The CUDA kernels without a GPU: their sources, run by tests/emulation on the CPU, against float64.

Operators are told that CPU tensors are on a GPU, with a device that is made up, and do all that they do there; the library's
convolutions are the CPU's. Small problems alone: a product of tensor cores takes microseconds.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import filelock
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import trace_rules
from torch.utils.cpp_extension import CUDA_HOME

import inline_loader
import numerics
from inline_kernels.bench import checks, honesty
from inline_kernels.engine import choice, composed, library, tiling
from inline_kernels.engine.fuse import structure_of
from inline_kernels.engine.source import TRANSPOSE
from inline_kernels.loader import guarded as guarded_launches
from inline_kernels.loader import launch as loader_launch
from inline_kernels.loader import source as loader_source
from numerics import DROPOUT, INSTANCE_NORM, MIN_ADD, POOL, Recorder

EMULATION = Path(__file__).resolve().parent / "emulation"
HEADERS = Path(CUDA_HOME or "/usr/local/cuda") / "include"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NAN, INF = float("nan"), float("inf")
MOST_KEPT = 3  # folders of builds

pytestmark = pytest.mark.skipif(
    not (COMPILER and (HEADERS / "cuda_fp16.h").is_file()),
    reason="there is no C++ compiler, or CUDA's headers are missing",
)
every_name = pytest.mark.parametrize("name", [MIN_ADD, INSTANCE_NORM, DROPOUT, POOL])
every_convolution_in_3d = pytest.mark.parametrize("name", [INSTANCE_NORM, DROPOUT])

# The dropout problem's result is known beforehand. Instead of it, its fused kernel may show the normalised value.
FAITHFUL, SHOWN = (
    "const float value = min_nan(max_nan(min_nan(z, low), low), high);",
    "const float value = z;",
)


# --------------------------------------------------------------------------------------------------------------- building


@functools.cache
def translated(text: str, replaced: tuple = ()) -> str:
    """A source with what C++ does not know in the words of emulation/cuda.h; replaced: what stands there, and what shall."""
    dynamic = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];")
    text = dynamic.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulation::dynamic_shared);", text)
    static = re.compile(r"__shared__ ((?:__align__\(\d+\) )?(?:[\w:]+(?:<\w+>)? )+)(\w+)((?:\[[^\]]+\])*);")
    text = static.sub(r"static \1\2\3; emulation::shared_at_first(&\2, sizeof \2);", text)
    launch = re.compile(r"(\w+(?:<[\w,\s]+>)?)\s*<<<(.*?),\s+stream>>>\((.*?)\);", re.S)
    text = launch.sub(r"emulation::launch(\2, [&] { \1(\3); });", text)
    for word, other in (
        ("#ifdef __CUDACC__", "#if 1"),
        ('#define EXPORT extern "C"', ""),
        ("inline __global__", "__global__"),
    ):
        text = text.replace(word, other)
    return text.replace(*replaced) if replaced else text


# What the loader adds to a source, with a host that the emulation is.
RUN = """
static const inline_loader::Host emulated_host{
    [](const char*, const char*, const inline_loader::Launcher* const*, int) {}, nullptr,
    [](int64_t count, int64_t, void (*body)(const void*, int64_t, int64_t), const void* context) { body(context, 0, count); },
    emulation::allocate, emulation::release};
static const auto* const emulated_launchers = inline_loader_register(&emulated_host, "");
EXPORT int64_t emulation_run(int index, const inline_loader::Argument* arguments, const inline_loader::Sizes* sizes) try {
  return emulated_launchers[index]->run(arguments, sizes);
} catch (const std::exception& error) {
  static std::string what;
  emulation::failure = (what = error.what()).c_str();
  return 0;
}
"""


parse_launchers = functools.cache(loader_source.parse_launchers)
TURNING = {launcher.name for launcher in parse_launchers(TRANSPOSE)}


class Emulated:
    """The launchers of a source, as operators on CPU tensors. They raise AssertionError for a deadlock, an access that is not aligned,
    something written outside of tensors or scratch memory, or with the words of what a launcher throws."""

    def __init__(self, source: str, library: ctypes.CDLL):
        self.library = library
        self.launchers = {launcher.name: launcher for launcher in parse_launchers(source)}

    def __getattr__(self, name: str):
        launcher, turning = self.launchers[name], TURNING if self.library.turning else ()
        library = self.library.turning() if name in turning else self.library
        index = [each for each in self.launchers if (each in turning) == (name in turning)].index(name)
        formats = {"double": "d", "int64_t": "q", "bool": "?7x"}
        packed = struct.Struct(
            "".join("Q" if p.tensor else formats[p.ctype] for p in launcher.parameters) + "Q"
        )

        def run(*arguments):
            given = [_argument(*pair) for pair in zip(launcher.parameters, arguments, strict=True)]
            sizes = b"".join(
                loader_launch._sizes([a] if torch.is_tensor(a) else []).ljust(72) for a in arguments
            )
            result = library.emulation_run(index, packed.pack(*given, 0), sizes)
            failure = library.emulation_failure()
            assert not failure, failure.decode()
            return result if launcher.asked else None

        between_zones = guarded_launches.between_zones(name, launcher, run, damage := [])

        def call(*arguments):
            result = between_zones(*arguments)
            assert not damage, damage
            return result

        def bound(*numbers, last=(), **how):
            return lambda *first: call(
                *[a.movedim(1, -1) if i in last else a for i, a in enumerate(first)], *numbers
            )

        call.bound = bound
        return call


def _argument(parameter: loader_source.Parameter, value):
    if parameter.tensor:
        assert value.is_contiguous(), parameter.name
        return value.data_ptr() if value.numel() else 0
    return value


# What is called once is inlined: a compiler has a tenth less to do.
FLAGS = [
    "-std=c++17",
    "-Og",
    "-finline-functions-called-once",
    "-U_FORTIFY_SOURCE",
    "-w",
    "-fPIC",
    "-fvisibility=hidden",
    "-isystem",
    str(HEADERS),
]


def once(made: Path, make) -> Path:
    """`made`, by `make(where)` in the first of the test processes that asks for it."""
    with filelock.FileLock(f"{made}.lock"):
        if not made.exists():
            make(unfinished := made.parent / f"unfinished-{made.name}")
            unfinished.rename(made)
    return made


@functools.cache
def linker() -> list[str]:
    """gold links in half of the time, where it finds the compiler's libraries."""
    gold = "-fuse-ld=gold"
    with tempfile.TemporaryDirectory() as folder:
        command = [COMPILER, gold, "-shared", "-x", "c++", os.devnull, "-o", Path(folder, "empty.so")]
        return [gold] * (subprocess.run(command, capture_output=True).returncode == 0)


def compile_with(*arguments: str | Path) -> None:
    command = [COMPILER, *FLAGS, *linker(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def translate_headers(replaced: tuple, headers: Path) -> None:
    """Writes all that the kernels include, translated."""
    headers.mkdir()
    for path in inline_loader.KERNELS.rglob("*.*h"):
        header = headers / path.relative_to(inline_loader.KERNELS)
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(translated(path.read_text(), replaced))
    for emulated in ("tensor_core.cuh", "tensor_map.cuh", "wgmma.cuh"):
        shutil.copy(EMULATION / emulated, headers / "core")
    shutil.copy(EMULATION / "cooperative_groups.h", headers)


def precompile(architecture: int, headers: Path) -> None:
    """Copies emulation/cuda.h, and compiles it: it takes as long as what includes it."""
    headers.mkdir()
    for header in ("cuda.h", "emulation.h"):
        shutil.copy(EMULATION / header, headers)
    define = f"-D__CUDA_ARCH__={architecture}"
    compile_with(define, "-x", "c++-header", headers / "cuda.h", "-o", headers / "cuda.h.gch")


def library_of(
    source: str, architecture: int, defines: dict, replaced: tuple, folder: Path, alone: bool = False
) -> ctypes.CDLL:
    """A source's own, which may include what kernels/ has. alone: its functions are called by themselves, not by `Emulated`.

    What turns whole arrays stands in the engine's sources, and few tests call it: it is a library of its own, `turning`, made once it is called."""
    turning, rest = None, source.replace(TRANSPOSE, "")
    if rest != source and "EXPORT" in rest:
        text = '#include "load/load.h"\n#include "load/turned.cuh"\n' + TRANSPOSE
        turning = functools.partial(library_of, text, architecture, defines, replaced, folder)
        source = rest

    def key(*parts) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    parts = [translated(source, replaced)]
    if not alone:
        registered = loader_source.registration(parse_launchers(source), "cuda")
        parts += ['#include "host/sized.h"', registered, RUN]

    def make(library: Path) -> None:
        included = once(folder / f"included-{key(replaced)}", functools.partial(translate_headers, replaced))
        headers = once(folder / f"headers-{architecture}", functools.partial(precompile, architecture))
        emulation = EMULATION / "emulation.cpp"
        runs = once(
            folder / "emulation.so",
            lambda so: compile_with("-O2", "-march=native", emulation, "-shared", "-o", so),
        )
        macros = [f"-D{key}={value}" for key, value in {"__CUDA_ARCH__": architecture, **defines}.items()]
        text = library.with_suffix(".cpp")
        text.write_text("\n".join(parts))
        compile_with(
            *macros, "-I", included, "-include", headers / "cuda.h", text, runs, "-shared", "-o", library
        )
        text.unlink()

    name = key(parts, architecture, sorted(defines.items()), replaced)
    library = ctypes.CDLL(str(once(folder / f"{name}.so", make)))
    library.turning = turning
    library.emulation_failure.restype = ctypes.c_char_p
    if not alone:
        library.emulation_run.restype = ctypes.c_int64
    return library


def build(
    name: str,
    architecture: int,
    defines: dict,
    replaced: tuple,
    folder: Path,
    launchers: tuple = (),
    source: str | None = None,
) -> Emulated:
    source = source or (inline_loader.KERNELS / f"{name}.cu").read_text()
    if launchers:
        others = {launcher.name for launcher in parse_launchers(source)}.difference(launchers)
        source = loader_source.without(source, others)
    return Emulated(source, library_of(source, architecture, defines, replaced, folder))


def made_by() -> str:
    """A digest of all that builds are made of and by, but their own sources: headers, the emulation, the compiler, the processor, this file."""
    own = [*sorted(inline_loader.KERNELS.rglob("*.*h")), *sorted(EMULATION.iterdir()), Path(__file__)]
    parts = [path.read_bytes() for path in (*own, HEADERS / "cuda_fp16.h")]
    parts.append(subprocess.run([COMPILER, "--version"], capture_output=True).stdout)
    parts += re.findall(rb"^flags.*", Path("/proc/cpuinfo").read_bytes(), re.M)[:1]  # for -march=native
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


@pytest.fixture(scope="session")
def folder():
    """Where the builds are, of all files, test processes and runs that make them alike."""
    builds = inline_loader.KERNELS.parent / "build" / "emulated"
    own = builds / made_by()
    own.mkdir(parents=True, exist_ok=True)
    os.utime(own)
    for older in sorted(builds.iterdir(), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
        shutil.rmtree(older, ignore_errors=True)
    return own


@pytest.fixture
def remembers_nothing():
    yield
    inline_loader.forget()


class Generator:
    """A GPU's, of which PyTorch keeps seed and offset on the host."""

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0, "what PyTorch asks for"
        self.offset = offset


@pytest.fixture
def guarded(monkeypatch):
    """Allocations by new_empty, empty_like and the engine hold NaN, and launchers run between guard zones."""
    trace_rules.get_torch_obj_rule_map()  # kept once made, and torch.compile would know the guarded functions for ever
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def guarded_empty(self, *size, dtype=None):
        if type(self) not in (torch.Tensor, torch.nn.Parameter) or self.is_meta:  # fake ones
            return new_empty(self, *size, dtype=dtype)
        found = new_empty(self, *size, dtype=dtype)
        found.view(-1).view(torch.uint8).fill_(255)
        return found

    def guarded_like(t, **options):
        if options or not t.is_contiguous():
            return empty_like(t, **options)
        return guarded_empty(t, t.shape, dtype=t.dtype)

    making = library.making

    def guarded_making(like):
        make = making(like)

        def made():
            found = make()
            found.untyped_storage().fill_(255)
            return found

        return made

    monkeypatch.setattr(library, "making", guarded_making)
    monkeypatch.setattr(torch.Tensor, "new_empty", guarded_empty)
    monkeypatch.setattr(torch, "empty_like", guarded_like)
    with guarded_launches.zones() as damage:
        yield
    assert not damage


@pytest.fixture
def gpu(remembers_nothing, guarded, monkeypatch, folder):
    """gpu(…) makes a GPU of the CPU, with so many multiprocessors, so much shared memory and so large an L2 cache."""
    builds = folder

    def become(*, architecture=800, multiprocessors=4, shared=None, cache=1 << 16, replaced=()):
        shared = shared or (227 if architecture >= 900 else 163) << 10

        def load(name, *, device, defines, source=None, folder=None, launchers=None):
            assert folder in (None, inline_loader.KERNELS) and device == "cuda"
            kernels = build(name, architecture, defines, replaced, builds, launchers, source)
            kernels.library.emulation_device(multiprocessors, shared)
            kernels.library.emulation_cache(cache)
            return kernels

        device = tiling.Device((architecture // 100, 0), shared, multiprocessors)
        monkeypatch.setattr(inline_loader, "load", load)
        monkeypatch.setattr(inline_loader, "load_all", lambda requests: [load(**each) for each in requests])
        monkeypatch.setattr(library, "device_type", lambda x: "cuda")
        monkeypatch.setattr(tiling, "device_properties", lambda index: device)
        monkeypatch.setattr(choice, "instead", lambda *given: None)  # sizes are too large here
        generator = Generator()
        generator.manual_seed(torch.initial_seed())
        monkeypatch.setattr(torch.cuda, "manual_seed_all", generator.manual_seed)  # as torch.manual_seed does
        monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})  # no index: the CPU's
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        inline_loader.forget()

    return become


@pytest.fixture
def emulated(gpu):
    """emulated(name, model, x, …): what the fused kernels give, and for the dropout problem the normalised value."""

    def run(name, model, x, **device):
        gpu(**{"replaced": (FAITHFUL, SHOWN) if name == DROPOUT else (), **device})
        with torch.no_grad():
            return numerics.twin_of(model, "fused")(x)

    return run


def reference(name, model, x):
    with torch.no_grad():
        return model.norm(model.conv(x)) if name == DROPOUT else model(x)


def assert_rule(name, model, x, ours):
    """As exact as eager, by checks.py's limits, in one draw, sample by sample: the largest one's errors would hide the others'."""
    eager, exact = reference(name, model, x), reference(name, copy.deepcopy(model).double(), x.double())
    assert ours.dtype == eager.dtype and ours.shape == eager.shape
    assert torch.equal(ours.isnan(), exact.isnan()), "NaN where float64 has it"
    for n, (y, theirs, r) in enumerate(zip(*(t.nan_to_num(0.0) for t in (ours, eager, exact)))):
        error = checks.judged(name, f"output of sample {n}", r, theirs, y, x.dtype)
        assert error.share <= 1, error


def small(name, variant="fused", **options):
    """As numerics.small, but for the pool's fused kernel, which takes longest."""
    if name != POOL or variant != "fused":
        return numerics.small(name, variant, **options)
    arguments, shape = (5, 16, 3, 4, (16, 1, 1), (2, 3), -0.5, 1.0), (3, 5, 9, 13)
    return numerics.build(name, arguments, **options), numerics.random_input(shape, **options)


# ------------------------------------------------------------------------------------------------------- sums, roundings, ties


def test_min_add_sums_what_cancels(gpu):
    """The gradients of both biases: whole numbers, whose sums float32 does not hold before positions far apart cancel."""
    model = numerics.build(MIN_ADD, (2, 3, 1, 100.0, (3, 1, 1), 1.0))
    x, g = numerics.random_input((1, 2, 80, 80)), (torch.randn(1, 3, 80, 80) * 2**21).round()
    g[..., 40:, :] = torch.randint(-3, 4, (1, 3, 40, 80)) - g[..., :40, :].flip(2)
    gpu()
    found = numerics.results(numerics.twin_of(model, "epilogue"), x, g)
    for name in ("conv.bias", "bias"):
        assert torch.equal(found[name].flatten().double(), g.double().sum((0, 2, 3)))


def around_ties(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of either sign, exact in TF32, in the middle between two such or one unit of float32 beside it; and what TF32 makes of them:
    the nearest, ties away from zero, as the library does it."""
    exact = torch.randint(2**10, 2**11, shape) / 2**10
    beside = torch.tensor([0.0, 2**-11 - 2**-23, 2**-11, 2**-11 + 2**-23])[torch.randint(4, shape)]
    sign = torch.randint(2, shape) * 2.0 - 1
    return sign * (exact + beside), sign * (exact + (beside >= 2**-11) * 2**-10)


LAST_BIT = "__float_as_uint(product) | 1"


def test_min_add_rounds_the_operands_of_the_fused_kernel(emulated):
    """Likewise, where eager runs TF32, under the first scale and under others. All sums are exact: a few products of eleven digits each."""
    model = numerics.build(MIN_ADD, (64, 128, (1, 2), INF, (128, 1, 1), 1.0))
    x, x_rounded = around_ties(3, 64, 3, 5)
    weight, weight_rounded = around_ties(128, 128)
    nonzero = (torch.rand(128, 128).argsort(1) < 4) * torch.exp2(torch.randint(-40, 40, (128, 1)))
    magnitudes = torch.tensor([1.0, 2.0**-45, 2.0**60]).view(3, 1, 1, 1)
    with torch.no_grad():
        model.conv.weight.copy_((weight * nonzero).view(128, 64, 1, 2))
        model.conv.bias.zero_(), model.bias.zero_()
    filters = (weight_rounded * nonzero).view(128, 64, 1, 2).double()
    expected = torch.conv2d((x_rounded * magnitudes).double(), filters)
    with numerics.steady_library(allow_tf32=True):
        assert torch.equal(emulated(MIN_ADD, model, x * magnitudes).double(), expected)
        to_even = emulated(MIN_ADD, model, x * magnitudes, replaced=(LAST_BIT, "__float_as_uint(product)"))
    assert all((to_even != expected).flatten(1).any(1))


@pytest.fixture
def newer_setting():
    """torch's setting of TF32 for convolutions; the older, torch.backends.cudnn.allow_tf32, must not be read where they differ."""
    setting = getattr(torch.backends.cudnn, "conv", None) or pytest.skip(
        "this torch has the older setting alone"
    )
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_min_add_reads_the_newer_setting_of_tf32(precision, gpu, newer_setting, monkeypatch):
    newer_setting.fp32_precision = precision
    model, x = small(MIN_ADD)
    gpu()
    new = numerics.twin_of(model, "fused")
    assert new.plan(x).variant == "fused" and library.allows_tf32() == (precision == "tf32")
    numerics.assert_rule(model, x, "fused")
    monkeypatch.setattr(honesty, "REPEATS", 2)
    assert not list(honesty._repeats(honesty.Probe(new, model, x, "train", None).on(x)))


def test_dropout_has_gradients_where_elements_tie(gpu):
    model, x = small(DROPOUT, "fused")
    with torch.no_grad():
        model.norm.weight.zero_(), model.norm.bias.fill_(model.min_value)
    gpu()
    numerics.assert_rule(model, x, "fused")


# ---------------------------------------------------------------------------------------------------------- the fused variant


@every_name
def test_saved_tensors_that_come_back_in_other_strides(name, gpu):
    """As a user's hooks may give them back, from another device, say."""
    model, x = small(name)
    gpu()
    twin, found = numerics.twin_of(model, "fused"), []
    x.requires_grad_()
    for unpack in (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = twin(x)
        found.append(torch.autograd.grad(y.square().sum(), [x, *twin.parameters()]))
    for ours, again in zip(*found):
        torch.testing.assert_close(again, ours, rtol=0, atol=0)


@pytest.mark.parametrize("name, dtype", [(DROPOUT, torch.float16)], ids=str)
def test_opcheck(name, dtype, gpu):
    """What the fused operators return has the dtypes and layouts that they announce. (The others', with gradients: test_backward_*.py.)"""
    model, x = small(name, dtype=dtype)
    gpu()
    with Recorder() as recorder, torch.no_grad():
        numerics.twin_of(model, "fused")(x)
    ((forward, arguments),) = recorder.calls.items()
    torch.library.opcheck(forward, tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments))


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rule_in_every_dtype(name, dtype, emulated):
    model, x = small(name, dtype=dtype)
    assert_rule(name, model, x, emulated(name, model, x))


@every_convolution_in_3d
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape, multiprocessors",
    [((2, 3, 9, 14, 16), 9), ((1, 3, 30, 6, 11), 1), ((3, 3, 4, 5, 68), 9), ((1, 3, 3, 20, 9), 9)],
    ids=str,
)
def test_other_sizes_and_shares_of_blocks(name, shape, dtype, multiprocessors, emulated):
    """Hopper's way: planes come by the copy engine, where rows are aligned. One multiprocessor leaves a sample to a block."""
    model, _ = small(name, dtype=dtype)
    x = numerics.random_input(shape, dtype=dtype)
    assert_rule(name, model, x, emulated(name, model, x, architecture=900, multiprocessors=multiprocessors))


# Channels in and out, kernel size, dtype, architecture: each is compiled for, and all problems have these kernels.
BUILDS = {
    INSTANCE_NORM: [
        (1, 32, (1, 2, 4), torch.bfloat16, 800),
        (4, 16, (5, 1, 2), torch.float32, 900),
    ],
    DROPOUT: [
        (1, 16, (5, 1, 2), torch.float32, 800),
        (4, 32, (1, 2, 4), torch.float32, 900),
    ],
}


@every_convolution_in_3d
def test_random_sizes_and_devices(name, emulated):
    @settings(max_examples=12)
    @given(st.data())
    def run(data):
        size, one_of = (
            lambda low, high: data.draw(st.integers(low, high)),
            lambda *values: data.draw(st.sampled_from(values)),
        )
        inputs, outputs, kernel, dtype, architecture = one_of(*BUILDS[name])
        shape = size(1, 3), inputs, *(extent - 1 + size(4, 16) for extent in kernel)
        tail = {INSTANCE_NORM: ((outputs, 1, 1, 1), -1.0, 1.0), DROPOUT: (4, 0.0, 1.0, 0.2)}[name]
        model = numerics.build(name, (inputs, outputs, kernel, *tail), dtype=dtype)
        device = dict(
            architecture=architecture, multiprocessors=size(1, 12), cache=one_of(0, 1 << 14, 1 << 20)
        )
        x = numerics.random_input(shape, dtype=dtype)
        assert_rule(name, model, x, emulated(name, model, x, **device))

    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [0, 1 << 16, 1 << 30])
def test_instance_norm_holds_sums(cache, dtype, emulated):
    """None, some and most of those that shared memory has no room for, in scratch."""
    model = numerics.build(INSTANCE_NORM, numerics.HELD[0], dtype=dtype)
    x = numerics.random_input((2, 3, 12, 26, 30), dtype=dtype)
    assert_rule(
        INSTANCE_NORM,
        model,
        x,
        emulated(INSTANCE_NORM, model, x, architecture=900, multiprocessors=1, cache=cache),
    )


MEETING = "cooperative_groups::this_grid().sync();"


@pytest.mark.parametrize(
    "channels, cache, shape",
    [
        (16, 0, (2, 3, 9, 14, 16)),
        (16, 1 << 20, (3, 3, 7, 11, 9)),
        (32, 0, (3, 3, 7, 11, 9)),
        (32, 1 << 20, (2, 3, 9, 14, 16)),
    ],
    ids=str,
)
def test_instance_norm_meets_in_one_launch(shape, cache, channels, emulated):
    """A sample's parts, unequal ones too, wait for one another's statistics; without that, they read what has not been written."""
    model = numerics.build(INSTANCE_NORM, (3, channels, (2, 3, 3), (channels, 1, 1, 1), -1.0, 1.0))
    x = numerics.random_input(shape)
    device = dict(architecture=900, multiprocessors=12, cache=cache)
    assert_rule(INSTANCE_NORM, model, x, emulated(INSTANCE_NORM, model, x, **device))
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        assert emulated(INSTANCE_NORM, model, x, **device).isfinite().all()
        assert emulated(INSTANCE_NORM, model, x, **device, replaced=(MEETING, ";")).isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("low, high", [(-INF, 0.5), (-0.5, INF), (-INF, INF), (1.0, -1.0), (0.5, 0.5)])
def test_instance_norm_open_and_swapped_bounds(low, high, emulated):
    model, x = small(INSTANCE_NORM)
    model.clamp_min, model.clamp_max = low, high
    with torch.no_grad():
        model.multiplier[::3], model.multiplier[1] = 0, -1
    assert_rule(INSTANCE_NORM, model, x, emulated(INSTANCE_NORM, model, x))


@every_name
@pytest.mark.parametrize(
    "change",
    [
        "large mean",
        "1e15",
        "1e-15",
        "channels apart",
        "late and large",
        "second and large",
        "early and zero",
        "constant",
        "samples apart",
    ],
)
def test_rule_at_any_magnitude(name, change, emulated):
    """A scale that a block guesses from its first rows or planes has to be found out as wrong."""
    model, x = small(name)
    half = x.shape[2] // 2
    if change == "large mean":
        x += 1e3
    elif change in ("1e15", "1e-15"):
        x *= float(change)
    elif change == "channels apart":
        x[:, 0] *= 1e4
    elif change == "late and large":
        x[:, :, half:] *= 1e6
    elif change == "second and large":
        x[:, :, 1] *= 1e6
    elif change == "samples apart":
        large = 1e20 if name == MIN_ADD else 1e15
        x *= torch.tensor([large, 1, 1 / large]).view(-1, *[1] * (x.dim() - 1))
        if name == MIN_ADD:  # or they hide the smallest
            with torch.no_grad():
                model.conv.bias.zero_(), model.bias.zero_()
    elif change == "early and zero":
        x[:, :, :half] = 0
    else:
        x[:] = 3
    assert_rule(name, model, x, emulated(name, model, x))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-40, 1e-38, 1e-36])
def test_instance_norm_keeps_values_that_are_hardly_any(magnitude, emulated):
    """Far below eps; the convolution's bias would hide them."""
    model, x = small(INSTANCE_NORM)
    with torch.no_grad():
        model.conv.bias.zero_()
    assert_rule(INSTANCE_NORM, model, x * magnitude, emulated(INSTANCE_NORM, model, x * magnitude))


@pytest.mark.parametrize(
    "magnitude, multiprocessors, variant",
    [(2.0**63, 1, "fused"), (2.0**63, 12, "fused"), (2.0**70, 12, "fused"), (2.0**110, 1, "fused")]
    + [(2.0**70, 1, "epilogue")],
)
def test_instance_norm_of_values_whose_squares_overflow(magnitude, multiprocessors, variant, gpu):
    """They count where the multiplier is small; gradients, too, while float32 has any digits of dv: 2^-140 of dy at 2^70."""
    model, x = small(INSTANCE_NORM, variant)
    with torch.no_grad():
        model.multiplier /= magnitude
    gpu(architecture=900, multiprocessors=multiprocessors)
    twin = numerics.twin_of(model, variant)
    for phase in ("forward", "train_dx") if magnitude <= 2.0**70 else ("forward",):
        numerics.assert_within_limits(
            lambda x, phase=phase: checks.errors_of("", twin, model, x, phase), x * magnitude
        )


@pytest.mark.parametrize("size", [(4, 6, 7), (3, 3, 7), (9, 16, 16)], ids=str)
def test_small_planes_and_larger_ones(size, gpu):
    """By a warp, of whole vectors or not, or by a block each."""
    model = numerics.build(INSTANCE_NORM, (5, 20, 1, (20, 1, 1, 1), -1.0, 1.0))
    x = numerics.random_input((3, 5, *size))
    gpu()
    numerics.assert_rule(model, x, "epilogue")


@pytest.mark.parametrize("name, factor", [(INSTANCE_NORM, 1e8), (DROPOUT, 1e8), (MIN_ADD, 1e3), (POOL, 1e3)])
@pytest.mark.parametrize("up", [True, False])
def test_weights_that_make_up_for_magnitudes(name, factor, up, emulated):
    """A channel that is so many times larger or smaller than the others, and counts for as much. Min-add and pool scale all channels alike."""
    model, x = small(name)
    factor = factor if up else 1 / factor
    x[:, 1] *= factor
    with torch.no_grad():
        model.conv.weight[:, 1] /= factor
    assert_rule(name, model, x, emulated(name, model, x, architecture=900))


@every_convolution_in_3d
def test_channels_that_are_far_apart_on_their_own(name, emulated):
    """The first channels out read one channel in, the others another, which is larger by far."""
    model, x = small(name)
    x[:, 0] *= 1e-6
    with torch.no_grad():
        model.conv.weight[:8, 1:], model.conv.weight[8:, 0] = 0, 0
    if name == INSTANCE_NORM:
        model.instance_norm.eps = 0.0
    assert_rule(name, model, x, emulated(name, model, x))


@pytest.mark.parametrize(
    "name, magnitude, variant",
    [
        (INSTANCE_NORM, 1e35, "fused"),
        (DROPOUT, 1e35, "fused"),
        (POOL, 1e30, "fused"),
        (POOL, 1e37, "fused"),
        (POOL, 1e30, "epilogue"),
    ],
)
def test_variance_that_overflows(name, magnitude, variant, gpu, emulated):
    """It is infinite, and what it divides becomes zero, so that the affine's bias is left.

    So it is in eager on a GPU: Welford's update of a group adds up products that are not negative, in float32, and 1 / sqrt(inf) = 0;
    values themselves overflow only from 1e38 or so on, and make a group NaN. On a CPU eager merges pieces of a large group, of which
    the first meets nothing: inf · 0 is NaN there, from about 1e20 on; these groups are too small for that.
    """
    model, x = small(name, variant)
    x = x.abs() * magnitude
    gpu()
    with torch.no_grad():
        ours = emulated(name, model, x) if variant == "fused" else numerics.twin_of(model, variant)(x)
        torch.testing.assert_close(ours, reference(name, model, x))
        if name == POOL:
            model.group_norm.weight.zero_()
            torch.testing.assert_close(ours, model(x / magnitude))


def test_dropout_with_many_channels(emulated):
    model = numerics.build(DROPOUT, (3, 512, 3, 8, -0.3, 1.0, 0.2))
    x = numerics.random_input((1, 3, 6, 7, 9))
    assert_rule(DROPOUT, model, x, emulated(DROPOUT, model, x))
    obstacle = tiling.volume_obstacle(
        x, x.new_empty(976, 3, 3, 3, 3), x.dtype, composed.known()[DROPOUT]["shared"]
    )
    assert "960" in obstacle


@every_name
def test_one_special_value(name, emulated):
    """It spoils what it spoils in eager; a sample without one doesn't notice. As a channel's bias it does so in all."""
    model, x = small(name)
    x = x[[0, 1, 2, 0]]
    spoilt = x.clone()
    for sample, value in zip(spoilt, (NAN, INF, -INF)):
        sample.view(-1)[17] = value

    def assert_as_exact(x):
        ours, exact = emulated(name, model, x), reference(name, copy.deepcopy(model).double(), x.double())
        assert torch.equal(*[torch.where(t.isnan(), 2, t.sgn() * t.isinf()) for t in (ours, exact)])
        return ours

    assert torch.equal(assert_as_exact(spoilt)[3], emulated(name, model, x)[3])
    for value in (NAN, INF, -INF):
        with torch.no_grad():
            model.conv.bias[1] = value
        assert_as_exact(x[:3])


@every_name
def test_repeats_are_bitwise_equal(name, emulated):
    """Whichever warp comes first: the emulation's order is another one each time."""
    model, x = small(name)
    results = [emulated(name, model, x, architecture=architecture) for architecture in (800, 800, 900, 900)]
    assert all(torch.equal(result, results[0]) for result in results)


# --------------------------------------------------------------------------------------------------------- the dropout mask


def test_dropout_draws_by_the_seed_or_the_number(gpu):
    """Every variant, and every way to give the same 63 bits; the number counts where there is no seed."""
    model, x = small(DROPOUT)
    model.train().min_value = 0.25
    nothing = torch.empty(0, dtype=torch.int64)
    gpu()
    (part,) = structure_of(numerics.twin_of(model, "auto"), (x,), {}).parts

    def run(variant, seed, number):
        operator = part.by_schedule[{"epilogue": "load"}.get(variant, variant)].operator
        with torch.no_grad():
            return operator(x, *part.tensors(), seed, number, *part.numbers(), 0)

    for bits in (2024, 2**63 - 1, 2**32 + 5):
        ways = [(torch.tensor([bits]), 0), (torch.tensor([bits]), 7), (nothing, bits)]
        found = [run(variant, *way) for way in ways for variant in ("fused", "epilogue")]
        assert all(torch.equal(y, found[0]) for y in found) and 0.7 < (found[0] != 0).double().mean() < 0.9
        assert not torch.equal(run("fused", nothing, bits ^ 1 << 40), found[0])


@pytest.fixture
def dropping(gpu):
    """dropping(variant, …) is a module whose elements all tie, its input, and the made-up GPU's generator."""

    def make(variant, dtype=torch.float32):
        model, x = small(DROPOUT, dtype=dtype)  # of one size
        with torch.no_grad():
            model.norm.weight.zero_(), model.norm.bias.fill_(0.25)
        model.min_value, model.dropout.p = 0.25, 0.2
        gpu()
        return numerics.twin_of(model.train(), variant), x, torch.cuda.default_generators[None]

    return make


def random_on_the_device(*arguments):
    raise AssertionError("a launch")


def mask_and_gradient(new, x):
    """Which elements are kept, and those that the gradient says were: half a factor each, summed over a channel."""
    y = new(x)
    (gradient,) = torch.autograd.grad(y, new.norm.bias, torch.ones_like(y))
    return y != 0, gradient * 2 * (1 - new.dropout.p)


@pytest.mark.parametrize("variant", ["epilogue", "fused"])
def test_dropout_draws_on_the_host(variant, dropping, monkeypatch):
    """One step of the generator for each call, and nothing of the device; the same state gives the same mask, whatever else changes."""
    new, x, generator = dropping(variant)
    monkeypatch.setattr(torch.Tensor, "random_", random_on_the_device)
    torch.manual_seed(0)
    masks = []
    for call in range(3):
        kept, in_gradient = mask_and_gradient(new, x)
        masks.append(kept)
        assert generator.offset == 4 * (call + 1), "backward draws nothing"
        torch.testing.assert_close(in_gradient, kept.sum((0, 2, 3, 4)).to(in_gradient))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))
    generator.offset = 4  # as fork_rng and checkpoint do
    assert torch.equal(mask_and_gradient(new, x)[0], masks[1])
    with torch.no_grad():
        assert torch.equal(new(x) != 0, masks[2])
        torch.manual_seed(1)
        assert not torch.equal(new(x) != 0, masks[0])
    for other, dtype in itertools.product(["epilogue", "fused"], [torch.float32, torch.float16]):
        twin, x, _ = dropping(other, dtype)
        torch.manual_seed(0)
        with torch.no_grad():
            assert torch.equal(twin(x) != 0, masks[0]), (other, dtype)


@pytest.mark.parametrize("variant", ["fused"])
def test_dropout_that_drops_nothing_leaves_the_generator(variant, dropping, monkeypatch):
    new, x, generator = dropping(variant)
    monkeypatch.setattr(torch.Tensor, "random_", random_on_the_device)
    with torch.inference_mode():  # whose tensors could not be saved
        new.eval()(x)
    new(x).sum().backward()
    new.train().dropout.p = 0.0
    new(x).sum().backward()
    assert generator.offset == 0 and new(x).ne(0).all()


@pytest.mark.parametrize("variant", ["epilogue", "fused"])
def test_dropout_draws_on_the_device_under_capture(variant, dropping, monkeypatch):
    """A replay draws what was launched, so the host's state must not be in it; decisions kept before the capture and after it serve both."""
    new, x, generator = dropping(variant)
    torch.manual_seed(0)
    before, _ = mask_and_gradient(new, x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        kept, in_gradient = mask_and_gradient(new, x)
        masks.append(kept)
        torch.testing.assert_close(in_gradient, kept.sum((0, 2, 3, 4)).to(in_gradient))
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    assert generator.offset == 0, "no call since it was seeded"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch.manual_seed(0)
    assert torch.equal(mask_and_gradient(new, x)[0], before)


@pytest.mark.parametrize("variant", ["fused"])
def test_dropout_draws_on_the_device_where_something_watches(variant, dropping):
    """A dispatch mode, and a compiler, whose code would keep a number."""
    new, x, generator = dropping(variant)
    with Recorder() as recorder, torch.no_grad():
        new(x)
    ((_, *arguments),) = recorder.calls.values()
    assert arguments[4].numel() == 1 and arguments[5] == 0
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert not torch.equal(compiled(x), compiled(x))
    assert generator.offset == 0


# -------------------------------------------------------------------------------------------------------------- launchers

SIZED = """
#include "core/scalar.h"
#include "host/tensor.h"
__global__ void scale_kernel(float* y, float* between, const value_t* x, float a, int64_t n) {
  if (int64_t i = threadIdx.x; i < n) between[i] = x[i] * a, y[i] = between[i] + between[AT];
}
EXPORT void scale(Out<float> y, In<value_t> x, double a, cudaStream_t stream) {
  const Scratch<float> between(x.size(1) + 1, stream);
  scale_kernel<<<1, 64, 0, stream>>>(y, between, x, float(a), x.numel());
}
EXPORT int64_t fits(In<value_t> x, int64_t n) { return x.numel() <= n; }
"""


def test_launchers_take_sizes_and_scratch(folder):
    """Whose values are NaN until they are written, and which nothing may write behind."""

    def kernels(at: str) -> Emulated:
        return Emulated(SIZED, library_of(SIZED, 800, {"AT": at}, (), folder))

    x, y = torch.randn(1, 5), torch.zeros(1, 5)
    kernels("i").scale(y, x, 2.0)
    assert torch.equal(y, 4 * x)
    kernels("n").scale(y, x, 2.0)
    assert y.isnan().all()
    assert (kernels("i").fits(x, 5), kernels("i").fits(x, 4)) == (1, 0)
    with pytest.raises(AssertionError, match="expected a tensor with a dimension 1, got one of 1 dimensions"):
        kernels("i").scale(y, x[0], 2.0)
    with pytest.raises(AssertionError, match="written outside of a launcher's scratch"):
        kernels("i").scale(y.new_empty(3, 3), x.new_ones(3, 3), 2.0)
