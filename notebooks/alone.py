"""Copies of the notebooks that run alone, in an empty folder, with only the requirements installed.

    python notebooks/alone.py FOLDER

In the repository a notebook imports from it. In a copy the first cell, hidden, holds the repository's sources instead, compressed: run,
it unpacks them into a folder of the user's cache that is named by their content, and imports from there.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_ID = "sources"  # of the cell, in each notebook, that finds the repository
PARTS = ("*.py", "LICENSE", "requirements.txt", "inline_kernels/**/*.py", "kernels/**/*.*", "notebooks/*.py", "benchmarks/*.py")  # fmt: skip
RECORDS = ("benchmarks/results/*.json", "benchmarks/results/loader/*.json", "benchmarks/results/ladders/*.json")  # fmt: skip
NAMED = re.compile(r"benchmarks/results/[\w./-]+\.json")  # records that a notebook names


def archive() -> bytes:
    """The repository's sources and records as a tar file, compressed, that depends on nothing but their content."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:xz", preset=9) as into:
        for path in sorted({path for pattern in (*PARTS, *RECORDS, *named()) for path in ROOT.glob(pattern)}):
            entry, content = tarfile.TarInfo(path.relative_to(ROOT).as_posix()), path.read_bytes()
            entry.size = len(content)
            into.addfile(entry, io.BytesIO(content))
    return found.getvalue()


def named() -> set[str]:
    """The records that the notebooks name."""
    texts = [path.read_text(encoding="utf-8") for path in NOTEBOOKS.glob("*.ipynb")]
    return {name for text in texts for name in NAMED.findall(text)}


def requirements() -> str:
    """What the notebooks need, for pip: the first section of requirements.txt."""
    section = (ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n\n")[0]
    lines = [line.split("#")[0].strip() for line in section.splitlines()]
    return " ".join(f'"{line}"' for line in lines if line)


def cell(archive: bytes) -> str:
    """The text of the first cell of a copy."""
    text = base64.b85encode(archive).decode()
    text = "\n".join(text[i : i + 2000] for i in range(0, len(text), 2000))
    return f"""\
# @title The sources of this notebook: run this cell, there is no need to read it
# Colab: everything is there but what this installs: !pip install ninja "filelock>=3.4". A T4 (compute capability 7.5) runs the epilogue
# variants, float32 and float16; the fused kernels need 8.0 (an L4, an A100). Without a GPU the CPU's kernels run.
# Elsewhere: pip install {requirements()}
# and a C++ compiler; for a GPU also nvcc.
{inspect.getsource(unpack)}

root = unpack(r'''
{text}
''')
"""


def unpack(text):
    """Writes the files of `text`, a tar file in base 85, into a folder named by its content and makes Python import from there."""
    import base64
    import hashlib
    import io
    import os
    import sys
    import tarfile
    import tempfile
    from pathlib import Path

    cache = (
        os.environ.get("INLINE_LOADER_CACHE")
        or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/inline_kernels"
    )
    cache = Path(cache).expanduser()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = base64.b85decode(text.replace("\n", ""))
    folder = cache / f"sources_{hashlib.sha256(content).hexdigest()[:16]}"
    if not folder.is_dir():
        fresh = Path(tempfile.mkdtemp(dir=cache))
        tarfile.open(fileobj=io.BytesIO(content)).extractall(fresh, filter="data")
        try:
            fresh.rename(folder)  # in one step: another notebook may do the same
        except OSError:
            pass  # it has
    sys.path[:0] = [str(folder), str(folder / "notebooks")]
    return folder


def copy(path: Path, first: str) -> str:
    """The text of the copy of a notebook, with `first` as its first cell."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    [sources] = [each for each in notebook["cells"] if each["id"] == CELL_ID]
    # Folded in Jupyter and VS Code, and in Colab.
    sources["metadata"] = {"jupyter": {"source_hidden": True}, "cellView": "form"}
    sources["source"] = first.splitlines(keepends=True)
    notebook["cells"] = [sources] + [each for each in notebook["cells"] if each is not sources]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python notebooks/alone.py FOLDER")
    folder, first = Path(sys.argv[1]), cell(archive())
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        (folder / path.name).write_text(copy(path, first), encoding="utf-8")
        print(folder / path.name)


if __name__ == "__main__":
    main()
