"""Is the machine code the same as it was at another commit? Asked when sources move, or are written otherwise, and nothing is to change.

    python tests/machine_code_gate.py --base main      # every CUDA build of TESTS, of that commit and of here

Each tree's own tests run, with this file in nvcc's place, which keeps what nvcc makes. Two builds are alike where they have the same
kernels, of the same instructions, registers and memory; what functions, labels and namespaces are called does not count. It takes
minutes, and no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    *(f"tests/test_{name}.py" for name in ("kernels_compile", "engine_gradients", "engine_direct")),
    "-k",
    "test_kernels_compile or nvcc_finds_room or registers_spilled",
]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def keep(nvcc: str, folder: str, arguments: list[str]) -> int:
    """Runs `nvcc`; what it makes goes to `folder` as well, with its source, architecture and macros in a file beside it."""
    # Neither the host's half is asked for, nor what the front end alone makes of a source.
    arguments = ["-cubin" if a in ("-c", "-ptx") else a for a in arguments if a not in ("-Xcicc", "-O0")]
    code = subprocess.run([nvcc, *arguments]).returncode
    if code == 0 and "-o" in arguments:
        what = [Path(arguments[-1]).name, *sorted(a for a in arguments if re.match("-arch|-D", a))]
        kept = Path(folder, hashlib.sha256(" ".join(what).encode()).hexdigest()[:16])
        shutil.copy(arguments[arguments.index("-o") + 1], kept)
        kept.with_suffix(".txt").write_text(" ".join(what))
    return code


def build(tree: Path, folder: Path) -> None:
    """All that the tests of `tree` compile, into `folder`."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wrapper = Path(name, "nvcc")
        wrapper.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --keep "{NVCC}" "{folder}" "$@"\n'
        )
        wrapper.chmod(0o755)
        environment = {**os.environ, "PATH": f"{name}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        subprocess.run(command, cwd=tree, env=environment, check=True)


def kernels(path: Path) -> Counter:
    """Of each section of code or of memory in `path`: which kernel's, without scopes, and its text without names."""
    from inline_kernels.loader import (
        machine_code as loader_machine_code,  # not in nvcc's place: it takes torch along
    )

    listing = subprocess.run(
        [loader_machine_code._nvdisasm(NVCC), str(path)], capture_output=True, text=True, check=True
    )
    found = Counter()
    for section in re.split(r"^\s*\.section\s+", listing.stdout, flags=re.M)[1:]:
        mangled, text = section.split(",", 1)
        if re.match(r"\.(text|nv\.(shared|constant|global))", mangled):
            kernel = ".".join(
                [re.match(r"\.(\w+\.)?[a-z]+", mangled)[0], *re.findall(r"\d([a-z_]+_kernel)", mangled)[-1:]]
            )
            text = re.sub(r"//.*|/\*.*?\*/", "", re.sub(r"(_Z|\$_N)\w+", "_", text))
            numbers: dict[str, str] = {}
            text = re.sub(
                r"(\.L_x|__internal)_\d+", lambda m: numbers.setdefault(m[0], f"{m[1]}_{len(numbers)}"), text
            )
            found[kernel, " ".join(text.split())] += 1
    return found


def compare(base: Path, own: Path) -> bool:
    """Says which builds differ. Are there none?"""
    texts = {path.stem: path.read_text() for folder in (base, own) for path in folder.glob("*.txt")}
    there = [
        name for name in sorted(texts, key=texts.get) if (base / name).is_file() and (own / name).is_file()
    ]
    with ThreadPoolExecutor(2) as pool:
        before, after = (list(pool.map(lambda name: kernels(folder / name), there)) for folder in (base, own))
    wrong = [f"only in one: {texts[name]}" for name in texts.keys() - there]
    for name, one, other in zip(there, before, after):
        wrong += [f"differs: {texts[name]}: {kernel}" for kernel, _ in (one - other) + (other - one)]
    code = [text for each in before for kernel, text in each.elements() if kernel.startswith(".text")]
    instructions = sum(text.count(" ;") for text in code)
    print(
        *wrong,
        f"{len(there)} builds, {len(code)} kernels, {instructions} instructions: {len(wrong)} differences",
        sep="\n",
    )
    return not wrong and bool(instructions)


def main() -> None:
    if sys.argv[1:2] == ["--keep"]:
        sys.exit(keep(sys.argv[2], sys.argv[3], sys.argv[4:]))
    sys.path[:0] = [str(ROOT)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument(
        "--folder", type=Path, help="where builds are kept; those of `base` are taken from it if it has them"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tree = (options.folder or Path(name)).resolve(), Path(name, "tree")
        folder.mkdir(exist_ok=True)
        if not (folder / "base").is_dir():
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "--detach", str(tree), options.base], check=True)
            try:
                build(tree, folder / "base")
            finally:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        shutil.rmtree(folder / "own", ignore_errors=True)
        build(ROOT, folder / "own")
        sys.exit(not compare(folder / "base", folder / "own"))


if __name__ == "__main__":
    main()
