"""What the loader reads in a source and does with it: launchers of any name, headers, macros; and what autograd sees of a call."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch

import inline_loader
from inline_kernels.loader import source as loader_source
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
    for source, defines in (code, {"T": T}), (f"using T = {T};\n{code}", {}):
        y = torch.empty_like(x)
        inline_loader.load("twice", source=source, defines=defines)(y, x, 2)
        assert y.tolist() == [1.0, -6.0]


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
    unit = inline_loader._unit("scale", source + scale(" EXTRA"), "cpu", {})
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


@pytest.mark.parametrize("stable", sorted({False, inline_loader.STABLE_ABI}))
def test_macros_reach_the_users_source_alone(monkeypatch, stable):
    monkeypatch.setattr(inline_loader, "STABLE_ABI", stable)
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
