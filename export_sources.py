"""The sources that a notebook carries: all files for one problem, or several or none, in one self-contained cell.

    python export.py --refresh                             # bring the first code cell of every notebook up to date

The cell holds every file that the problem needs, verbatim: its module, and what notebooks use, `MODULES`, with all
modules of ours that they import, and the problem's kernels (<name>.* and <name>_*.* in its folder of kernels) with all headers
that they include. Run, it writes them into a folder of the user's cache that is named by their content, and imports them from
there. Run again, it finds them there. A problem of one's own (`models.register`) is exported like ours: its module and its
kernels keep their places relative to each other.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import models
from inline_loader import KERNELS
from problems import Problem

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = FOLDER / "notebooks"
CELL_ID = "sources"  # of the cell in each notebook that this file writes
MODULES = (  # what the cells of a notebook import
    *[FOLDER / name for name in ("models.py", "loader_operators.py", "compare.py")],
    NOTEBOOKS / "walkthrough.py",
)
HOST_SIDE = [
    KERNELS / name for name in ("host.h", "pytorch.h", "scalar.h")
]  # what inline_loader.py includes itself


# ------------------------------------------------------------------------------------------------------ what it holds


def sources(names: list[str]) -> dict[str, str]:
    """The files that the problems `names` need: name in the exported folder to text. Raises KeyError for an unknown name, ValueError for
    a problem that isn't in a module of its own, above or beside its kernels."""
    unknown = [name for name in names if name not in models.PROBLEMS]
    if unknown:
        raise KeyError(f"expected names out of {', '.join(models.PROBLEMS)}, got {', '.join(unknown)}")
    problems = [models.PROBLEMS[name] for name in names]
    files, roots = zip(*map(_module, problems)) if problems else ((), ())
    roots = FOLDER, NOTEBOOKS, *roots
    modules = _closure([*MODULES, *files], lambda path: _imported(path, roots))
    kernels = _closure([*HOST_SIDE, *[path for problem in problems for path in _kernels(problem)]], _included)
    return {_name(path, roots): path.read_bytes().decode() for path in [*modules, *kernels]}


def _module(problem: Problem) -> tuple[Path, Path]:
    """The file of the problem's module, and the folder from which it is imported."""
    name = problem.ModelNew.__module__
    path = Path(getattr(sys.modules[name], "__file__", None) or "").resolve()
    if name == "__main__" or not path.is_file():
        raise ValueError(f"expected {problem.name} in a module of its own, got one in {name}")
    return path, path.parents[name.count(".")]


def _kernels(problem: Problem) -> list[Path]:
    """The sources of the problem's kernels."""
    found = [path for pattern in (".c*", "_*.c*") for path in problem.kernels.glob(problem.name + pattern)]
    return sorted(path.resolve() for path in found)


def _name(path: Path, roots: tuple[Path, ...]) -> str:
    """The name of a file in the exported folder: relative to the innermost of `roots` that has it."""
    inside = [root for root in roots if root in path.parents]
    if not inside:
        raise ValueError(
            f"expected the kernels below the folder that their problem is imported from, got {path}"
        )
    return path.relative_to(max(inside, key=lambda root: len(root.parts))).as_posix()


def _closure(paths: list[Path], needs: Callable[[Path], list[Path]]) -> list[Path]:
    """`paths` and all that they need, directly or not."""
    found: dict[Path, None] = {}
    pending = paths[::-1]
    while pending:
        if (path := pending.pop()) not in found:
            found[path] = None
            pending += needs(path)[::-1]
    return list(found)


def _imported(path: Path, roots: tuple[Path, ...]) -> list[Path]:
    """The modules below `roots` that a Python file imports, and the packages that they are in."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *[f"{node.module}.{alias.name}" for alias in node.names]}
    names |= {name.rpartition(".")[0] for name in names if "." in name}
    places = [root / name.replace(".", "/") for name in sorted(names) for root in roots]
    found = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return [file for file in found if file.is_file()]


def _included(path: Path) -> list[Path]:
    """The files that a kernel or a header includes, of its own folder or of ours."""
    names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_bytes().decode(), flags=re.M)
    candidates = [
        [folder / name for folder in (path.parent, KERNELS) if (folder / name).is_file()] for name in names
    ]
    return [found[0] for found in candidates if found]


# ----------------------------------------------------------------------------------------------------------- the cell


def cell(names: list[str]) -> str:
    """The Python text of the cell for the problems `names`."""
    parts = [
        f"# @title The sources{' of ' * bool(names)}{', '.join(names)}: run this cell, there is no need to read it",
        *[f"# {line}" for line in requirements()],
        "FILES = {}",
    ]
    parts += [f"FILES[{json.dumps(name)}] = {literal(text)}" for name, text in sources(names).items()]
    parts += [
        f"\n{inspect.getsource(unpack)}",
        "SOURCES = unpack(FILES)",
        "import compare, inline_loader, models, walkthrough",
    ]
    for module in [models.PROBLEMS[name].ModelNew.__module__ for name in names]:
        if not module.startswith("problems."):  # those models.py finds
            parts += [f"import {module}", f"models.register({module}.PROBLEM)"]
    return "\n".join(parts)


def requirements() -> list[str]:
    """What the cell needs, as lines: the first section of requirements.txt."""
    section = (FOLDER / "requirements.txt").read_text(encoding="utf-8").split("\n\n")[0]
    packages = " ".join(f'"{line}"' for line in section.splitlines() if not line.startswith("#"))
    return [f"Needs: pip install {packages}", "and a C++ compiler; for a GPU also nvcc."]


def literal(text: str) -> str:
    """`text` as a Python expression, with its lines as they are wherever Python allows that."""
    for quotes in ("'''", '"""'):
        raw = f"r{quotes}{text}{quotes}"
        try:
            if "\r" not in text and ast.literal_eval(raw) == text:
                return raw
        except (SyntaxError, ValueError):
            pass
    return repr(text)


def unpack(files):
    """Writes `files` (name to text) into a folder named by their content and makes Python import from there."""
    import hashlib
    import os
    import sys
    from pathlib import Path

    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.environ.get("INLINE_LOADER_CACHE") or f"{cache}/inline_kernels").expanduser()
    for missing in [each for each in (cache, *cache.parents) if not each.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)
    folder = cache / ("sources_" + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16])
    for name, text in files.items():
        path, mine = folder / name, folder / f"{name}.{os.getpid()}"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != text.encode():
            mine.write_bytes(text.encode())
            os.replace(mine, path)  # in one step: another notebook may be reading
    ours = {name.removesuffix(".py").split("/")[0] for name in files if name.endswith(".py")}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        if name.split(".")[0] in ours and folder not in Path(place).parents:
            del sys.modules[name]  # of another export, or the user's own
    sys.path[:] = [str(folder)] + [entry for entry in sys.path if entry != str(folder)]
    return folder


# -------------------------------------------------------------------------------------------------------- the notebooks


def problems_of(cells: list[dict]) -> list[str]:
    """The problems that a notebook's cells name, but for the cell of sources."""
    text = "".join("".join(part["source"]) for part in cells if part.get("id") != CELL_ID)
    return [name for name in models.PROBLEMS if name in text]


def refreshed(notebook: Path) -> str:
    """The text of `notebook` with its cell of sources up to date, without outputs."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for part in content["cells"]:
        if part["cell_type"] == "code":
            part.update(outputs=[], execution_count=None)
        if part.get("id") == CELL_ID:
            part["source"] = cell(problems_of(content["cells"])).splitlines(keepends=True)
            # Folded in Jupyter and VS Code, and in Colab.
            part["metadata"] = {"jupyter": {"source_hidden": True}, "cellView": "form", "tags": ["sources"]}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def refresh() -> None:
    """Brings every notebook up to date."""
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = refreshed(notebook)
        if text != notebook.read_text(encoding="utf-8"):
            notebook.write_text(text, encoding="utf-8")
            print(f"refreshed {notebook.relative_to(FOLDER)}")
