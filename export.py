"""One problem, or several or none, as one self-contained notebook cell.

    python export.py conv2d_min_add_multiply > cell.py     # paste it into any notebook, or run it
    python export.py --refresh                             # bring the first code cell of every notebook up to date

The cell holds every file that the problem needs, verbatim: compare.py and notebooks/walkthrough.py with all modules of this
folder that they import, and the problem's kernels (kernels/<name>.* and <name>_*.*) with all headers that they include.
Run, it writes them into a folder of the user's cache that is named by their content, and imports them from there. Run
again, it finds them there.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from pathlib import Path

import models

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = FOLDER / "notebooks"
CELL_ID = "sources"  # of the cell in each notebook that this file writes
MODULES = ("compare.py", "notebooks/walkthrough.py")
HOST_SIDE = "host.h"  # what inline_loader.py includes itself


# ------------------------------------------------------------------------------------------------------ what it holds


def sources(names: list[str]) -> dict[str, str]:
    """The files that the problems `names` need: name in the exported folder to text. Raises KeyError for an unknown name."""
    unknown = [name for name in names if name not in models.PROBLEMS]
    if unknown:
        raise KeyError(f"expected names out of {', '.join(models.PROBLEMS)}, got {', '.join(unknown)}")
    kernels = [
        path
        for name in names
        for pattern in (f"{name}.*", f"{name}_*.*")
        for path in (FOLDER / "kernels").glob(pattern)
    ]
    kernels.append(FOLDER / "kernels" / HOST_SIDE)
    found = _closure([FOLDER / module for module in MODULES], _imported) + _closure(
        sorted(set(kernels)), _included
    )
    return {("kernels/" if path.parent.name == "kernels" else "") + path.name: _read(path) for path in found}


def _closure(paths: list[Path], needs) -> list[Path]:
    """`paths` and, before each, what it needs."""
    found: list[Path] = []
    for path in paths:
        for other in [*_closure(needs(path), needs), path]:
            if other not in found:
                found.append(other)
    return found


def _imported(path: Path) -> list[Path]:
    """The modules of this folder that a Python file imports."""
    nodes = list(ast.walk(ast.parse(_read(path))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [FOLDER / f"{name}.py" for name in names if (FOLDER / f"{name}.py").is_file()]


def _included(path: Path) -> list[Path]:
    """The files of kernels/ that a kernel or a header includes."""
    names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', _read(path), flags=re.M)
    return [path.with_name(name) for name in names if path.with_name(name).is_file()]


def _read(path: Path) -> str:
    return path.read_bytes().decode()


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

    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("INLINE_LOADER_CACHE") or Path(cache) / "inline_kernels")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache / ("sources_" + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16])
    for name, text in files.items():
        path, mine = folder / name, folder / f"{name}.{os.getpid()}"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != text.encode():
            mine.write_bytes(text.encode())
            os.replace(mine, path)  # in one step: another notebook may be reading
    for name in [name for name in files if name.endswith(".py")]:
        module = sys.modules.get(name[:-3])
        if module is not None and Path(getattr(module, "__file__", None) or "").parent != folder:
            del sys.modules[name[:-3]]  # of another export, or the user's own
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Write problems as one self-contained notebook cell.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(models.PROBLEMS)}")
    parser.add_argument(
        "--refresh", action="store_true", help="bring notebooks/*.ipynb up to date and strip their outputs"
    )
    arguments = parser.parse_args()
    if not arguments.names and not arguments.refresh:
        parser.error("expected a NAME or --refresh")
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")) if arguments.refresh else []:
        text = refreshed(notebook)
        if text != notebook.read_text(encoding="utf-8"):
            notebook.write_text(text, encoding="utf-8")
            print(f"refreshed {notebook.relative_to(FOLDER)}")
    if arguments.names:
        try:
            print(cell(arguments.names))
        except KeyError as error:
            sys.exit(f"export.py: {error.args[0]}")


if __name__ == "__main__":
    main()
