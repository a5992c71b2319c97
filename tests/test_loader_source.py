"""What the loader reads in a source and does with it: launchers of any name, headers, macros; and what autograd sees of a call."""

from __future__ import annotations

import os
import re
import types
from pathlib import Path

import pytest
import torch

import inline_loader
from inline_kernels.loader import source as loader_source
from inline_kernels.loader import units
from inline_kernels.loader.operators import declare
from inline_loader import BuildError
from loading import run, scale

pytestmark = pytest.mark.usefixtures("cache")

BODY = "{ for (int64_t i = 0; i < n; i++) y[i] = x[i] * 2; }\n"
DOUBLE = "EXPORT void twice(float* y, const float* x, int64_t n) " + BODY


def doubled(call) -> bool:
    y = torch.zeros(2)
    call(y, torch.tensor([1.0, 3.0]), 2)
    return y.tolist() == [2.0, 6.0]


# ------------------------------------------------------------------------------------------------------------ launchers

# Names of Python, of PyTorch, of the C library, and of what stands around a launcher in the code.
NAMES = [
    "name",
    "unit",
    "load",
    "call",
    "stream",
    "launch",
    "launcher_0",
    "library",
    "operators",
    "is",
    "lambda",
    "print",
]
NAMES += ["exp", "read", "index", "Call", "_single", "_operator", "Tensor", "schema", "self", "y0"]
PARAMETERS = [
    ("call", "stream"),
    ("in", "out"),
    ("None", "self"),
    ("_operator", "_is_compiling"),
    ("name", "stack"),
]


def test_launchers_and_parameters_of_any_name():
    names = [(f"p{i}", y, x) for i, (y, x) in enumerate(PARAMETERS)] + [(name, "y", "x") for name in NAMES]
    launchers = [
        f"EXPORT void {name}(float* {y}, const float* {x}, int64_t n) "
        + BODY.replace("y[", f"{y}[").replace("x[", f"{x}[")
        for name, y, x in names
    ]
    kernels = inline_loader.load(
        "names", source="#include <math.h>\n#include <unistd.h>\n" + "".join(launchers)
    )
    for name, _, x in names:
        assert doubled(getattr(kernels, name)), name
        with pytest.raises(RuntimeError, match=f"{name}: {x}: expected a float32 tensor, got float64"):
            getattr(kernels, name)(torch.zeros(2), torch.zeros(2).double(), 2)
    assert "cpp_in" in repr(kernels) and "<names for cpu: " in repr(kernels)


NO_LAUNCHERS = r"""
const char* text = "EXPORT void in_a_string(float* y)";
const char* raw = R"raw(
EXPORT void in_a_raw_string(float* y)
#if 0
" )raw";
#if 0  // never
EXPORT void in_dead_code(float* y) {}
#if X
EXPORT void deeper(float* y) {}
#else
#endif
#elif 1
const int number = 1'000'000; const char quote = '"';
#else
EXPORT void after_the_branch_that_is_taken(float* y) {}
#endif
/* EXPORT void in_a_comment(float* y) {}
*/ // EXPORT void behind_slashes(float* y) {} \
EXPORT void in_a_comment_that_goes_on(float* y) {}
#define MACRO \
  EXPORT void in_a_macro(float* y) {}
"""


def test_what_is_no_code_has_no_launchers():
    (launcher,) = loader_source.parse_launchers(NO_LAUNCHERS + DOUBLE)
    assert launcher.name == "twice"
    assert doubled(inline_loader.load("twice", source=NO_LAUNCHERS + DOUBLE))
    code = loader_source.code_of(NO_LAUNCHERS + DOUBLE)
    assert [len(line) for line in code.split("\n")] == [
        len(line) for line in (NO_LAUNCHERS + DOUBLE).split("\n")
    ]


def test_types_as_C_writes_them():
    source = """EXPORT void twice(float * __restrict y, float const* __restrict__ x, const int64_t n);
EXPORT
void twice(float *__restrict y, const float*x, int64_t n) // as declared above
"""
    (launcher,) = loader_source.parse_launchers(source)
    assert launcher.schema == "twice(Tensor(y!) y, Tensor x, int n)"
    assert doubled(
        inline_loader.load("twice", source=source.replace("const float*x", "float const*const x") + BODY)
    )
    (launcher,) = loader_source.parse_launchers("EXPORT void f(half_t* stream, const cudaStream_t name)")
    assert launcher.stream and [p.name for p in launcher.parameters] == ["stream"]


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "EXPORT float f() { return 1; }",
            r"2:1: error: expected `EXPORT void name.*got `EXPORT float f\(\)`",
        ),
        ("EXPORT int n;", r"2:1: error: expected `EXPORT void name.*got `EXPORT int n`"),
        ("static EXPORT void f(float*)", r"2:20: error: expected parameters like .* got `float\*`"),
        ("EXPORT void f(float& y)", r"2:13: error: expected parameters like .* got `float& y`"),
        ("EXPORT void f(float* y, int64_t)", r"2:13: error: expected parameters like .* got `int64_t`"),
        (
            "EXPORT void twice(double* y)",
            r"2:13: error: twice is exported a second time, with other parameters",
        ),
        (
            "namespace a::b { namespace { void g() {} } EXPORT void f(float* y) {} }",
            r"2:56: error: f: expected a launcher outside of namespaces, got it in `namespace a::b`\n *2 \| namespace",
        ),
        (
            "template <class T> EXPORT void f(T* y) {}",
            r"2:32: error: f: expected .* no template, got `template <class T>` before it\n *2 \| template",
        ),
        (
            "EXPORT void f(float* y);",
            r"2:13: error: f: expected a body, `EXPORT void f\(...\) \{ ... \}`, got a declaration alone",
        ),
        (
            "EXPORT void f(int8_t* y) {}",
            r"2:13: error: .*f: y: expected a pointer to float, double, .* bool, got int8_t\*\W*\n *2 \| EXPORT.*\n.{20}\^",
        ),
        (
            "struct Pair {}; EXPORT void f(float* y, const Pair* x) {}",
            r"2:29: error: .*f: x: expected a pointer to float, .* got const Pair\*",
        ),
        ("EXPORT void f(float* y, int n) {}", "2:13: error: expected .*got `int n`: write `int64_t n`\n"),
        (
            "EXPORT void f(float* y, const std::uint32_t n) {}",
            "2:13: error: .*t n`: write `int64_t n`\n",
        ),
        ("EXPORT void f(float* y, float a) {}", "2:13: error: expected .*got `float a`: write `double a`\n"),
        (
            "EXPORT void f(const In<float>& x) {}",
            "2:13: error: expected parameters like `Out<float> y`, .* got `const In<float>& x`",
        ),
        (
            "EXPORT void f(In<const float> x) {}",
            "2:13: error: expected parameters like .* got `In<const float> x`",
        ),
        ("EXPORT void f(In<> x) {}", "2:13: error: expected parameters like .* got `In<> x`"),
        (
            "EXPORT void f(Out<float> y, In<int8_t> x) {}",
            r"2:13: error: .*f: x: expected elements of float, double, .* bool, got In<int8_t>\W*\n *2 \| EXPORT.*\n.{20}\^",
        ),
        (
            "EXPORT int64_t f(Out<float> y, int64_t n) { return n; }",
            "2:16: error: f: expected `In<T>` tensors and numbers where an int64_t is returned, got Out<float>",
        ),
        (
            "EXPORT int64_t f(const float* x) { return 1; }",
            "2:16: error: f: expected .* returned, got const float\\*",
        ),
        (
            "EXPORT int64_t f(cudaStream_t s) { return 1; }",
            "2:16: error: f: expected .* returned, got cudaStream_t",
        ),
        ("EXPORT int64_t f(int64_t n);", r"2:16: error: f: expected a body, `EXPORT int64_t f\(...\) \{"),
    ],
)
def test_what_can_be_no_launcher_is_refused_beside_a_good_one(line, message):
    with pytest.raises(BuildError, match="^<f>:" + message):
        inline_loader.load("f", source=f"{DOUBLE.strip()}\n{line}\n")


def test_launchers_beside_namespaces_and_with_bodies_elsewhere(tmp_path):
    header = tmp_path / "body.h"
    header.write_text("void f(float* y, const float* x, int64_t n) " + BODY)
    source = f"""EXPORT void f(float* y, const float* x, int64_t n);
#include "{header}"
namespace a {{ template <class T> T one() {{ return 1; }} }}
#if 1 + 1 == 3
namespace b {{
#else
#ifdef B
namespace b {{
#else
extern "C" {{
#endif
#endif
{DOUBLE}
}}
"""
    kernels = inline_loader.load("f", source=source)
    assert doubled(kernels.f) and doubled(kernels.twice)


def test_wrong_arguments_are_told():
    twice = inline_loader.load("twice", source=DOUBLE)
    x = torch.ones(2)
    for arguments, message in [
        ((None, x, 2), "twice: y: expected a tensor, got None"),
        ((None, None, 2), "twice: y: expected a tensor, got None"),
        ((x, [1.0], 2), r"twice: x: expected a tensor, got \[1.0\]"),
        ((x, x), r"twice\(\) missing 1 required positional argument: 'n'"),
        ((x, x, 2, 2), r"twice\(\) takes 3 positional arguments but 4 were given"),
    ]:
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode(), pytest.raises(TypeError, match=message):
                twice(*arguments)
    for call in (twice, twice.twice):
        with pytest.raises(
            TypeError, match=r"twice\(\) got some positional-only arguments passed as keyword arguments: 'n'"
        ):
            call(x, x, n=2)


@pytest.mark.parametrize("types", ["", "half_t", "bfloat16_t", "c10::Half"])
def test_types_of_16_bits(types):
    """Their headers are there for who names them, in the source or in a macro."""
    code = "EXPORT void twice(T* y, const T* x, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = x[i] + x[i]; }\n"
    dtypes = {"": torch.float32, "bfloat16_t": torch.bfloat16}
    x = torch.tensor([0.5, -3.0], dtype=dtypes.get(types, torch.float16))
    T = types or "float"
    for source, defines in [(code, {"T": T}), (f"using T = {T};\n{code}", {})][: 2 if "_t" in T else 1]:
        y = torch.empty_like(x)
        inline_loader.load("twice", source=source, defines=defines)(y, x, 2)
        assert y.tolist() == [1.0, -6.0]


# ------------------------------------------------------------------------------------------------- tensors with their sizes

SIZED = """
EXPORT void describe(Out<int64_t> sizes, In< T > x, const In<T> other, int64_t at) {
  if (!sizes) return;
  for (int64_t i = 0; i < x.dims; i++) sizes[i] = x.size(i - (at < 0 ? x.dims : 0));
  sizes[7] = x.numel(), sizes[8] = other ? 1 : other.empty() ? 0 : -1, sizes[9] = x.size(at);
}
EXPORT int64_t room(In<T> x, double share, bool twice) { return x.numel() * share * (twice ? 2 : 1) + x.size(0); }
EXPORT int64_t version() { return -3; }
"""


@pytest.mark.parametrize(
    "dtype, T, stable",
    [
        (torch.float32, "float", units.STABLE_ABI),
        (torch.bfloat16, "bfloat16_t", False),
        (torch.bool, "bool", units.STABLE_ABI),
    ],
)
def test_tensors_with_their_sizes(stable, dtype, T, monkeypatch):
    """By the operator and by what is bound, with no name of tensor.h included. Where not `stable`, by the other half of host.h, which serves
    torch below 2.10."""
    monkeypatch.setattr(units, "STABLE_ABI", stable)
    kernels = inline_loader.load("sized", source=SIZED, defines={"T": T})
    assert (
        "describe(Tensor(sizes!) sizes, Tensor x, Tensor other, int at), room(Tensor x, float share"
        in repr(kernels)
    )
    bound, version = kernels.describe.bound(-1), torch.zeros(())._version
    for shape in ((2, 3, 5), (2, 3, 5), (7,), (2, 0, 3), (1,) * 7, (7,)):
        x = torch.zeros(shape, dtype=dtype)
        for call in (lambda *tensors: kernels.describe(*tensors, -1), bound):
            for other in (x[:0], torch.ones((), dtype=dtype)):
                sizes = torch.full((10,), -7)
                call(sizes, x, other)
                expected = [*shape, *[-7] * (7 - len(shape)), x.numel(), other.numel(), shape[-1]]
                assert sizes.tolist() == expected and sizes._version == version + 1
        bound(sizes[:0], x, other)
    x, sizes = torch.zeros(2, 3, dtype=dtype), torch.zeros(10, dtype=torch.int64)
    for wrong, message in [
        ((sizes, x.t(), x), "describe: x: expected a contiguous tensor"),
        ((sizes.int(), x, x), "describe: sizes: expected a int64 tensor, got int32"),
        ((sizes, x[(None,) * 7], x), "describe: x: expected at most 8 dimensions, got 9"),
        ((sizes, x[0, 0], x), "expected a tensor with a dimension -1, got one of 0 dimensions"),
    ]:
        for call in (lambda *tensors: kernels.describe(*tensors, -1), bound):
            with pytest.raises((RuntimeError, IndexError), match=message):
                call(*wrong)
    if not stable:
        assert_pointers_are_launched()


def assert_pointers_are_launched():
    kernels = inline_loader.load("scale", source=scale())
    assert run(kernels) == [2.0, -6.0]
    with pytest.raises(RuntimeError, match="scale: x: expected a float32 tensor, got float64"):
        kernels(torch.ones(2), torch.ones(2).double(), 2.0, 2)
    y, launch = torch.zeros(2), kernels.scale.bound(3.0, 2)
    launch(y, torch.ones(2)), launch(y, torch.full((2,), 2.0))
    assert y.tolist() == [6.0, 6.0]


def test_what_depends_on_sizes_is_asked_of_tensors_anywhere():
    kernels = inline_loader.load("sized", source=SIZED, defines={"T": "float"})
    assert kernels.version() == -3 and type(kernels.version()) is int
    for x in (torch.ones(4, 3), torch.ones(3, 4).t(), torch.ones(4, 3, device="meta", requires_grad=True)):
        assert kernels.room(x, 0.5, False) == 10 and kernels.room(x, 0.5, True) == 16
    with pytest.raises(TypeError, match="room: x: expected a tensor, got 5"):
        kernels.room(5, 0.5, True)
    with pytest.raises(RuntimeError, match="room: x: expected a float32 tensor, got float64"):
        kernels.room(torch.ones(2).double(), 0.5, True)
    assert inline_loader.load("alone", source="EXPORT int64_t two() { return 2; }")() == 2


SCRATCH = """
#include "host/tensor.h"
EXPORT void reversed(Out<double> y, In<double> x, int64_t count) {
  Scratch<double> made(count);
  const Scratch<double> between = std::move(made), none(0);
  if (made.data || none.data) return;
  host::parallel_for(x.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) between[x.numel() - 1 - i] = x[i];
  });
  for (int64_t i = 0; i < x.numel(); i++) y[i] = between[i];
}
"""


@pytest.mark.parametrize("stable", sorted({False, units.STABLE_ABI}))
def test_scratch_memory(stable, monkeypatch):
    monkeypatch.setattr(units, "STABLE_ABI", stable)
    reverse, x = inline_loader.load("reversed", source=SCRATCH), torch.randn(1000).double()
    launch = reverse.reversed.bound(1000)
    for call in (lambda y: reverse(y, x, 1000), lambda y: launch(y, x), lambda y: launch(y, x)):
        y = torch.zeros_like(x)
        call(y)
        assert torch.equal(y, x.flip(0))
    with pytest.raises(RuntimeError, match="expected scratch memory for a number of values, got -1"):
        reverse(y, x, -1)
    with pytest.raises(RuntimeError, match="scratch" if stable else "memory"):
        reverse(y, x, 2**58)
    reverse(y, x, 1000)


ROOM = r"""#include "host/room.h"
int64_t allocated[8], count, released;
struct Counting {
  static void* allocate(int64_t bytes, void** memory) {
    allocated[count++] = bytes;
    return *memory = new char[bytes];
  }
  static void release(void* memory) { released++, delete[] static_cast<char*>(memory); }
};
using Room = inline_loader::Room<Counting>;
static int64_t taken = 0;

// Writes what is allocated for pieces of `bytes`, and how many are released when all are given back; and fills each piece.
EXPORT void call(int64_t* found, bool* apart, const int64_t* bytes, int64_t pieces, bool roomy) {
  count = released = 0;
  char* at[8];
  void* memory[8];
  {
    int64_t none = 0;
    Room room(roomy ? taken : none);
    for (int i = 0; i < pieces; i++) at[i] = static_cast<char*>(Room::allocate(bytes[i], memory + i));
    for (int i = 0; i < pieces; i++) std::fill_n(at[i], bytes[i], char(i));
    *apart = true;
    for (int i = 0; i < pieces; i++) *apart &= at[i][0] == i && at[i][bytes[i] - 1] == i;
    for (int i = 0; i < pieces; i++)
      if (memory[i]) Counting::release(memory[i]);
  }
  std::copy_n(allocated, 8, found), found[count] = -released;
}
"""


def test_scratch_shares_an_allocation():
    """From the second call on, and no more than the last call took; what is large is by itself."""
    kernels = inline_loader.load("room", source="#include <algorithm>\n" + ROOM)

    def allocated(*sizes: int, roomy: bool = True) -> list[int]:
        found, apart = torch.zeros(9, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
        kernels(found, apart, torch.tensor(sizes), len(sizes), roomy)
        *made, released = found[: (found < 0).nonzero().item() + 1].tolist()
        assert apart and released == -len(made)
        return made

    assert allocated(100, 600, 512) == [100, 600, 512]
    assert allocated(100, 600, 512) == [512 + 1024 + 512]
    assert allocated(100, 600, 512, roomy=False) == [100, 600, 512]
    assert allocated(100, 5 << 20, 600) == [2048, 5 << 20]
    assert allocated(100, 600, 700) == [1536, 700]
    assert allocated(100, 600, 700) == [2560]
    assert allocated(3 << 20, 3 << 20) == [3 << 20, 3 << 20]
    assert allocated(3 << 20, 3 << 20) == [3 << 20, 3 << 20]


def test_tensors_with_sizes_under_torch_compile():
    scale = inline_loader.load(
        "scale",
        source="EXPORT void scale(Out<float> y, In<float> x) { for (int64_t i = 0; i < x.numel(); i++) y[i] = 2 * x[i]; }",
    )

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def twice(x):
        y = torch.empty_like(x)
        scale(y, x)
        return y + 1

    for n in (3, 5):
        assert torch.equal(twice(torch.full((n,), 2.0)), torch.full((n,), 5.0))


# ------------------------------------------------------------------------------------------------- some of the launchers

SEVERAL = r"""#define A 1
template <int n> struct Checked { static_assert(n == ALLOWED, "only what is built"); static constexpr int value = n; };
EXPORT void one(float* y) {
  *y = Checked<1>::value;
}
static int helper() { return 5; }
// before two {
[[maybe_unused]] static int keeps() { return 1; } EXPORT void two(Out<float> y) /* } */ { const char* text = "}";
#if A
#define HERE 10
  if (text) {
#else
  if (!text) {
#endif
    y[0] = Checked<2>::value; }
#if 0
  }
#endif
} EXPORT int64_t three(int64_t n) { return Checked<3>::value * n + helper() + HERE; }
EXPORT void declared(float* y);
void declared(float* y) { *y = __LINE__; }
"""


def test_some_of_the_launchers(cache):
    for name, allowed in {"one": 1, "two": 2}.items():
        y, kernels = (
            torch.zeros(1),
            inline_loader.load("several", source=SEVERAL, launchers=[name], defines={"ALLOWED": allowed}),
        )
        getattr(kernels, name)(y), kernels(y)
        assert y == allowed and repr(kernels) == f"<several for cpu: {name}(Tensor(y!) y)>"
    three = inline_loader.load(
        "several", source=SEVERAL, launchers={"three", "declared"}, defines={"ALLOWED": 3}
    )
    assert three.three(2) == 6 + 5 + 10
    three.declared(y)
    assert y == SEVERAL[: SEVERAL.index("__LINE__")].count("\n") + 1
    with pytest.raises(BuildError, match=r"<several>:2:\d+: error: .*only what is built"):
        inline_loader.load("several", source=SEVERAL, defines={"ALLOWED": 3})
    for wrong in (["four"], ["one", "One"], ()):
        with pytest.raises(
            ValueError, match="several: expected launchers out of one, two, three, declared, got "
        ):
            inline_loader.load("several", source=SEVERAL, launchers=wrong)
    with pytest.raises(TypeError, match="expected a sequence of launchers' names, got 'one'"):
        inline_loader.load("several", source=SEVERAL, launchers="one")


def test_a_launcher_is_built_again_for_an_edit_of_its_own(cache, capfd):
    """Not for one of another launcher; and the progress names it."""
    first, edited = HELD.format("x[i] * a", "g"), HELD.format("x[i] + a", "g")
    keys = [
        units.unit_of("held", each, "cpu", {}, only=(name,)).key for name in "fg" for each in (first, edited)
    ]
    assert keys[0] != keys[1] and keys[2] == keys[3] and len({*keys}) == 3
    inline_loader.load("held", source=first, launchers=["f"])
    inline_loader.load("held", source=first, launchers=["g"])
    told = capfd.readouterr().err
    assert "held.f (cpu), first build: compiling" in told and "held.g (cpu), first build: compiling" in told
    inline_loader.load("held", source=edited, launchers=["f"])
    assert "held.f (cpu), source changed: compiling" in capfd.readouterr().err


@pytest.mark.parametrize("names", [[], ["one"], ["two"], ["one", "two", "three"]])
def test_what_is_not_built_is_blank(names):
    left = loader_source.without(SEVERAL, names)
    assert [len(line) for line in left.split("\n")] == [len(line) for line in SEVERAL.split("\n")]
    assert "".join(re.findall("#.*", left)) == "".join(re.findall("#.*", SEVERAL))
    for name in ("one", "two", "three"):
        assert (f" {name}(" in left) == (name not in names)
    assert (
        "static int helper() { return 5; }\n// before two {\n[[maybe_unused]] static int keeps() { return 1; }"
        in left
    )


# -------------------------------------------------------------------------------------------------------------- headers


def test_a_header_by_its_absolute_path_is_compiled_hashed_and_not_touched(tmp_path):
    (tmp_path / "my headers").mkdir()
    header, inner = [tmp_path / "my headers" / name for name in ("own.h", "inner.h")]
    header.write_text('#pragma once\n#include "inner.h"\n#include "../other/inner.h"\n')
    inner.write_text("#define FACTOR 2\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "inner.h").write_text("#define OFFSET 0\n")  # of the same name
    before = header.stat(), header.read_bytes()
    source = f'#include "{header}"\n' + scale(" * FACTOR + OFFSET")
    assert run(inline_loader.load("scale", source=source)) == [4.0, -12.0]
    assert (header.stat().st_mtime_ns, header.read_bytes()) == (before[0].st_mtime_ns, before[1])
    assert sorted(os.listdir(header.parent)) == ["inner.h", "own.h"]
    (tmp_path / "other" / "inner.h").write_text("#define OFFSET 1\n")
    inline_loader.forget()
    assert run(inline_loader.load("scale", source=source)) == [5.0, -11.0]
    header.write_text("\n#error not now\n")
    inline_loader.forget()
    with pytest.raises(BuildError, match=f"^{header}:2:2: error: #error not now"):
        inline_loader.load("scale", source=source)


def test_names_of_headers_in_text_stay(kernels_folder):
    (kernels_folder / "extra.h").write_text("#define EXTRA + 1\n")
    source = 'const char* text = R"(\n#include "extra.h"\n)";\n#if __has_include("extra.h")\n#include <extra.h>\n#endif\n'
    unit = units.unit_of("scale", source + scale(" EXTRA"), "cpu", {})
    assert unit.source.count('"extra.h"') == 1 and unit.source.count("headers/0/extra.h") == 2
    assert run(inline_loader.load("scale", source=source + scale(" EXTRA"))) == [3.0, -5.0]


def test_a_header_takes_what_it_includes_from_its_own_folder(tmp_path):
    """A part of ours has ours, though the user's folder has one of the same path, which the user's source has."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "numerics.h").write_text("#define EXTRA + 1\n")
    (tmp_path / "k.cpp").write_text(
        '#include "core/numerics.h"\n#include "norm/formulas.h"\n'
        + scale(" + 0 * GroupShape(1, 1, 1, 1).G EXTRA")
    )
    assert run(inline_loader.load("k", folder=tmp_path)) == [3.0, -5.0]


def test_a_byte_order_mark_and_other_encodings(kernels_folder):
    (kernels_folder / "extra.h").write_bytes("\ufeff#define EXTRA + 1 // é\n".encode())
    (kernels_folder / "k.cpp").write_bytes(
        ('\ufeff#include "extra.h"\n' + scale(" EXTRA")).encode() + b"// \xe9 in Latin-1\n"
    )
    assert run(inline_loader.load("k")) == [3.0, -5.0]
    assert doubled(inline_loader.load("twice", source="\ufeff" + DOUBLE))


# --------------------------------------------------------------------------------------------------------------- macros


def test_equal_numbers_of_other_types_are_builds_of_their_own():
    source = scale(" + sizeof(F)")
    found = [
        run(inline_loader.load("scale", source=source, defines={"F": F}))[0] for F in (1, 1.0, True, "1", 1)
    ]
    assert found == [2.0 + size for size in (4, 8, 1, 4, 4)]
    assert loader_source.macros({"A": True, "B": 1e-7, "C": -0.0, "D": "x y"}) == {
        "A": "true",
        "B": "1e-07",
        "C": "-0.0",
        "D": "x y",
    }


@pytest.mark.parametrize(
    "defines, error, message",
    [
        ({"F": [1]}, TypeError, r"a line of text, a finite number or a bool for the macro F, got \[1\]"),
        ({"F": None}, TypeError, "for the macro F, got None"),
        ({"F": float("nan")}, ValueError, "a finite number .* for the macro F, got nan"),
        ({"F": "1\n#undef EXPORT"}, ValueError, "a line of text"),
        ({"F G": 1}, ValueError, "expected a macro's name in defines, got 'F G'"),
        ({1: 1}, ValueError, "expected a macro's name in defines, got 1"),
    ],
)
def test_what_is_no_macro(defines, error, message):
    with pytest.raises(error, match=message):
        inline_loader.load("scale", source=scale(), defines=defines)


# Words of torch's headers, of C++'s, of host.h and of the generated code.
TAKEN = [
    "T",
    "N",
    "A",
    "B",
    "type",
    "value",
    "size",
    "index",
    "name",
    "stack",
    "call",
    "count",
    "launcher",
    "names",
    "library",
]


@pytest.mark.parametrize("stable", sorted({False, units.STABLE_ABI}))
def test_macros_reach_the_users_source_alone(monkeypatch, stable):
    monkeypatch.setattr(units, "STABLE_ABI", stable)
    defines = dict.fromkeys(TAKEN, 4) | {"T": "float", "F(a)": "a + N"}
    source = "EXPORT void plus(T* y, T const* x, int64_t n) { for (int64_t i = 0; i < n; i++) y[i] = F(x[i]) + index; }\n"
    y = torch.zeros(1)
    inline_loader.load("plus", source=source, defines=defines)(y, y, 1)
    assert y.item() == 8


def test_an_error_in_a_macro_names_it():
    with pytest.raises(
        BuildError,
        match=r"^macros of scale:2:15: error: .*nonsense.*\n *2 \| #define EXTRA nonsense\n *\| +\^",
    ):
        inline_loader.load("scale", source=scale(" + EXTRA"), defines={"A": 1, "EXTRA": "nonsense"})


# ------------------------------------------------------------------------------------------------------------- autograd


def test_what_a_launcher_writes_to_gets_a_new_version():
    twice = inline_loader.load("twice", source=DOUBLE)
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    y = torch.zeros(2)
    loss = (w * y).sum()  # saves y
    versions = x._version, y._version
    twice(y, x, 2)
    assert x._version == versions[0] and y._version > versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        twice(torch.zeros(2), x, 2)


def test_an_argument_that_requires_a_gradient_is_refused_where_it_would_be_lost():
    twice = inline_loader.load("twice", source=DOUBLE)
    x = torch.ones(2, requires_grad=True)
    for arguments in [(torch.zeros(2), x, 2), (x.clone(), torch.ones(2), 2)]:
        with pytest.raises(
            RuntimeError, match=r"^twice: .* requires a gradient.*inline_kernels.declare\(.*torch.no_grad"
        ):
            twice(*arguments)
    with torch.no_grad():
        assert doubled(twice)
        twice(torch.zeros(2), x, 2)
    twice(torch.zeros(2), x.detach(), 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        twice(y, x, x.numel())
        return y

    def backward(dy, x, *, needs):
        return [2 * dy]

    operator = declare("test_twice", forward, shapes=torch.empty_like, backward=backward)
    operator(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


# ----------------------------------------------------------------------------------------------------------- cell magics


class Shell:
    """As much of IPython's shell as the magics need."""

    def __init__(self, **names):
        self.user_ns, self.magics = names, {}
        self.events = types.SimpleNamespace(register=lambda *_: None)

    def register_magic_function(self, function, kind, name):
        self.magics[name] = function

    def push(self, names):
        self.user_ns.update(names)


@pytest.mark.parametrize(
    "name, what", [("print", "Python's own"), ("numpy", "an imported module"), ("lambda", "Python's own")]
)
def test_a_cell_hides_no_builtin_and_no_module(name, what):
    shell = Shell(numpy=os)
    inline_loader.load_ipython_extension(shell)
    with pytest.raises(ValueError, match=f"{name} is {what}"):
        shell.magics["cpp"](name, DOUBLE)
    assert shell.user_ns == {"numpy": os}


def test_a_cell_makes_its_name():
    shell = Shell(twice=3)
    inline_loader.load_ipython_extension(shell)
    shell.magics["cpp"]("twice A=1", DOUBLE)
    assert doubled(shell.user_ns["twice"])


HELD = """EXPORT void f(float* y, const float* x, double a, int64_t n) {{ for (int64_t i = 0; i < n; i++) y[i] = {0}; }}
EXPORT void {1}(float* y, int64_t n) {{ y[0] = n; }}
"""


def test_what_was_taken_of_a_cell_runs_the_edited_one():
    """Its launchers, and what was bound of them, over several edits; of a launcher that is no more it says so."""
    shell = Shell()
    inline_loader.load_ipython_extension(shell)
    cell = shell.magics["cpp"]
    cell("held", HELD.format("x[i] * a", "g"))
    f, g = shell.user_ns["held"].f, shell.user_ns["held"].g
    bound, bound_g, x, y = f.bound(2.0, 2), g.bound(5), torch.ones(2), torch.zeros(2)
    compiled = torch.compile(lambda x, y: f(y, x, 2.0, 2), fullgraph=True, backend="aot_eager")

    def seen() -> list[float]:
        results = []
        for call in (
            lambda: f(y, x, 2.0, 2),
            lambda: bound(y, x),
            lambda: bound(y, x),
            lambda: compiled(x, y),
        ):
            y.zero_(), call()
            results.append(y[0].item())
        return results

    assert seen() == [2.0] * 4
    cell("held", HELD.format("x[i] + a", "h"))
    assert seen() == [3.0] * 4 and shell.user_ns["held"].f is f
    for call in (g, bound_g):
        with pytest.raises(AttributeError, match="held has no launcher g any more"):
            call(y, 5) if call is g else call(y)
    cell("held", HELD.format("x[i] - a", "g"))
    assert seen() == [-1.0] * 4
    bound_g(y), bound_g(y)
    assert y[0] == 5
    cell("held", HELD.format("x[i] * z[i] * a", "g").replace("x,", "x, const float* z,"))  # with one more
    z = torch.full((2,), 3.0)
    for _ in range(2):
        y.zero_(), bound(y, x, z)
        assert y.tolist() == [6.0] * 2
    cell("held", DOUBLE.replace("twice", "f"))  # with other parameters
    assert doubled(f) and doubled(shell.user_ns["held"])
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        bound(y, x)


# --------------------------------------------------------------------------------------------------------------- folders


def test_a_relative_folder_is_of_the_current_one(tmp_path, monkeypatch):
    for place, factor in (("a", 1), ("b", 2)):
        (tmp_path / place / "mine").mkdir(parents=True)
        (tmp_path / place / "mine" / "k.h").write_text(f"#define EXTRA * {factor}\n")
        (tmp_path / place / "mine" / "k.cpp").write_text('#include "k.h"\n' + scale(" EXTRA"))
        for folder in (Path("mine"), "mine"):
            monkeypatch.chdir(tmp_path / place)
            kernels = inline_loader.load("k", folder=folder)
            assert run(kernels) == [2.0 * factor, -6.0 * factor]
        monkeypatch.chdir(tmp_path)
        assert inline_loader.load("k", folder=tmp_path / place / "mine") is kernels
