"""The house: imports run one way, in few layers; the root holds what README names."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inline_kernels.loader.operators import constant_to_tracers

ROOT = Path(__file__).resolve().parent.parent
MOST_LAYERS, MOST_ENTRIES, MOST_LINES = 7, 19, 300


def modules() -> dict[str, Path]:
    """What a user imports, by name: the package's modules, and those at the root."""
    paths = [*ROOT.glob("*.py"), *(ROOT / "inline_kernels").rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that it imports, wherever it does so; not for the sake of types alone."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in known else node.module for each in inner}
    # A package's __init__ that only says what there is, is no layer.
    return {each for each in found if each in known and each != name}


@functools.cache
def graph() -> dict[str, frozenset[str]]:
    known = modules()
    return {name: frozenset(imports(name, path, known)) for name, path in known.items()}


def test_no_tracer_is_imported():
    """torch._dynamo takes as long as all of torch."""
    code = "import sys, compare, export, models, inline_kernels; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_tracers_take_for_constant_is_marked_as_torch_does():
    def own():
        pass

    def torchs():
        pass

    assert constant_to_tracers(own) is own and vars(own)
    assert vars(own) == vars(torch.compiler.assume_constant_result(torchs))


def test_imports_make_no_circle():
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle of imports: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for each in sorted(graph()[name]):
                visit(each, (*way, name))
            done.add(name)

    for name in graph():
        visit(name, ())


def layer(module: str) -> str:
    """A module's room: a folder of the package, or a file at the root; inline_loader is its folder's face."""
    parts = module.replace("inline_loader", "inline_kernels.loader").split(".")
    return ".".join(parts[:2]) if parts[0] == "inline_kernels" else parts[0]


def test_the_rooms_have_few_layers():
    rooms: dict[str, set[str]] = {}
    for name, others in graph().items():
        rooms.setdefault(layer(name), set()).update(
            layer(each) for each in others if layer(each) != layer(name)
        )

    @functools.cache
    def height(room: str) -> int:
        return 1 + max((height(each) for each in rooms[room]), default=0)

    heights = {room: height(room) for room in rooms}
    assert max(heights.values()) <= MOST_LAYERS, sorted(heights.items(), key=lambda pair: pair[1])


def test_the_root_is_small():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("git knows nothing of this folder")
    entries = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@pytest.mark.parametrize("name", ["inline_loader.py", "models.py"])
def test_the_faces_are_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES
