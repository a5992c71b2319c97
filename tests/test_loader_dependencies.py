"""What compilers read beyond what the loader gives them: headers that they find by themselves, files that the assembler takes in. A
change of any of them is a build."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import inline_loader
from inline_kernels.loader import library
from inline_kernels.loader import toolchain as loader_toolchain
from inline_loader import BuildError
from loading import builds, finish, run, scale, start
from test_inline_loader import cuda_scale, needs_gpu

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "their headers"
    folder.mkdir()
    return folder


@pytest.fixture
def host_side(monkeypatch):
    """PyTorch's side, as it was before the test sets a variable that compilers read."""
    host = inline_loader._host_side("cpu")
    monkeypatch.setattr(inline_loader, "_host_side", lambda device: host)


def reloaded(source: str, **arguments) -> float:
    """The first result, as in the next cell of a notebook."""
    inline_loader.forget()
    return run(inline_loader.load("scale", source=source, **arguments))[0]


INCLUDES = """#include <a.h>
# include /* a word */ "b.h"
#include \\
    <c.h>
#import <d.h>
#define HEADER <e.h>
#include HEADER
"""


@pytest.mark.parametrize("variable", loader_toolchain.INCLUDE_VARIABLES)
def test_headers_by_the_environment(variable, folder, host_side, monkeypatch):
    """However they are included; in a process that has loaded the code with the old ones."""
    monkeypatch.setenv(variable, f"{folder}{os.pathsep}/nowhere")
    values = dict.fromkeys("abcde", 0)

    def write(name: str) -> None:
        (folder / f"{name}.h").write_text(f"#pragma once\n#define {name.upper()} {values[name]}\n")

    for name in values:
        write(name)
    source = INCLUDES + scale(" + A + 10 * B + 100 * C + 1000 * D + 10000 * E")
    assert reloaded(source) == 2
    for place, name in enumerate("abcde" if variable == "CPATH" else "a"):
        values[name] = 1
        write(name)
        assert reloaded(source) == 2 + sum(10**each for each in range(place + 1)), name


def test_a_header_by_a_macro_in_other_processes(warm, folder, capfd):
    """Touched it is no other one; edited it is told; back again it is the old one."""
    header = folder / "found.h"
    source = f'#define HEADER "{header}"\n#include HEADER\n' + scale(" + EXTRA")
    for text, result, told in [
        ("1", "[3.0, -5.0]", "first build"),
        ("1", "[3.0, -5.0]", "scale (cpu): cached"),
        ("20", "[22.0, 14.0]", f"{header} changed: built"),
        (None, "No such file", f"{header} changed"),
        ("1", "[3.0, -5.0]", f"{header} changed: built"),
    ]:
        header.write_text(f"#define EXTRA {text}\n") if text else header.unlink()
        out, err = finish(start(source))
        assert result in out and told in err
    assert len(builds(warm)) == 0 and len(list(warm.glob("scale_*/kernels-*.so"))) == 1


def test_a_header_that_is_written_to_while_it_is_compiled(folder, compiler):
    """Nobody knows which text was read."""
    header = folder / "found.h"
    header.write_text("#define EXTRA 1\n")
    source = f'#define HEADER "{header}"\n#include HEADER\n' + scale(" + EXTRA")
    compiler.hold.touch()
    builder = start(source)
    compiler.wait_for_call()
    header.write_text("#define EXTRA 2\n")
    compiler.hold.unlink()
    finish(builder)
    assert finish(start(source))[0] == "[4.0, -4.0]" and compiler.count() == 2
    assert "cached" in finish(start(source))[1] and compiler.count() == 2


def test_headers_of_a_version_cost_no_look(warm):
    inline_loader.load("scale", source="#include <vector>\n#include <Python.h>\n" + scale())
    (folder,) = warm.glob("scale_*/kernels.so")
    found = library._load_cached(folder.parent)
    assert found.dependencies == {}


ASSEMBLY = r"""asm(".section .rodata\nblob: .incbin %s\n.text");
extern "C" const char blob[];
"""


def test_what_the_assembler_takes_in(folder):
    """Named by the source, and by a header that only the compiler finds."""
    blob, header = folder / "blob", folder / "found.h"
    assembly = ASSEMBLY % rf"\"{blob}\""
    header.write_text(f"#pragma once\n{assembly}")
    for source in (assembly, f'#define HEADER "{header}"\n#include HEADER\n'):
        source += "// .incbin in a comment\n" + scale(" + blob[0]")
        for value in (1, 2):
            blob.write_bytes(bytes([value]))
            assert reloaded(source) == 2 + value
    blob.unlink()
    with pytest.raises(BuildError, match=f"^.*Error: file not found: {blob}"):
        reloaded(source)


@pytest.mark.parametrize("named", [r"\"blob\"", r'\"" NAME "\"', r'\"/a/" "blob\"', "BLOB"])
def test_what_the_assembler_takes_in_has_to_be_named(named):
    with pytest.raises(
        BuildError, match=r"^<scale>:2:30: error: expected .incbin with an absolute path .*, got `.incbin"
    ):
        inline_loader.load("scale", source="\n" + ASSEMBLY % named + scale())


@needs_gpu
def test_headers_of_cuda_sources(folder, monkeypatch):
    monkeypatch.setenv("CPATH", str(folder))
    source = "#define HEADER <found.h>\n#include HEADER\n" + cuda_scale(" + EXTRA")
    import torch

    x = torch.ones(2, device="cuda")
    for extra in (1, 2):
        (folder / "found.h").write_text(f"#define EXTRA {extra}\n")
        inline_loader.forget()
        y = torch.empty_like(x)
        inline_loader.load("scale", source=source, device="cuda")(y, x, 2.0, 2)
        assert y.tolist() == [2.0 + extra] * 2
