"""What a CUDA kernel is made of: registers, spills, shared memory, occupancy, and the machine code under each line of its source.

    report(kernels)                              # kernels that inline_loader.load or %%cuda built; in a notebook a folded listing
    report(kernels, threads=128, dynamic=48 << 10)   # occupancy for such a launch

The source is compiled once more, with line numbers: nvcc says what each kernel takes, nvdisasm lists its instructions. Occupancy
follows from CUDA's rules. No GPU is asked, and no profiler's privileges are needed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import html
import re
import shutil
import site
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from inline_kernels.loader import toolchain
from inline_kernels.loader.messages import BuildError


class Limits(NamedTuple):
    """What a multiprocessor has: threads, blocks, and bytes of shared memory; and what of that each block takes beside its own."""

    threads: int
    blocks: int
    shared: int
    reserved: int


REGISTERS, REGISTERS_AT_ONCE, WARP = 65536, 256, 32  # of a multiprocessor; as they are given to a warp
# By compute capability; from the CUDA programming guide's table of technical specifications.
LIMITS = {
    (7, 5): Limits(1024, 16, 64 << 10, 0),
    (8, 0): Limits(2048, 32, 164 << 10, 1 << 10),
    (8, 6): Limits(1536, 16, 100 << 10, 1 << 10),
    (8, 7): Limits(1536, 16, 164 << 10, 1 << 10),
    (8, 9): Limits(1536, 24, 100 << 10, 1 << 10),
    (9, 0): Limits(2048, 32, 228 << 10, 1 << 10),
    (10, 0): Limits(2048, 32, 228 << 10, 1 << 10),
    (12, 0): Limits(1536, 24, 100 << 10, 1 << 10),
}


def limits_of(architecture: str) -> Limits:
    """Of "75", "90a", …. Raises ValueError where they aren't known."""
    number = int(architecture.rstrip("af"))
    if (limits := LIMITS.get(divmod(number, 10))) is None:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in LIMITS)
        raise ValueError(f"expected one of {known}, got sm_{number}")
    return limits


@dataclass
class Kernel:
    """One kernel: what a thread and a block of it take, and its instructions by the line of the source that they come from."""

    name: str
    registers: int = 0  # of a thread
    stack: int = 0  # bytes of a thread, in local memory
    spilled: int = 0  # bytes of a thread that don't fit in registers: stored and loaded
    shared: int = 0  # bytes of a block, static
    lines: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # (file, line): instructions

    @property
    def instructions(self) -> int:
        return sum(map(len, self.lines.values()))

    def occupancy(self, architecture: str, threads: int, dynamic: int = 0) -> tuple[int, str]:
        """How many blocks of `threads` threads and `dynamic` bytes of shared memory a multiprocessor holds, and what bounds that.

        Raises ValueError for an architecture whose limits aren't known.
        """
        limits = limits_of(architecture)
        warps = -(-threads // WARP)
        of_warp = -(-self.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        bounds = {
            "threads": limits.threads // (warps * WARP),
            "blocks": limits.blocks,
            "registers": REGISTERS // (of_warp * warps) if of_warp else limits.blocks,
            "shared memory": limits.shared // max(1, self.shared + dynamic + limits.reserved),
        }
        bound = min(bounds, key=bounds.get)
        return bounds[bound], bound


@dataclass
class Report:
    """What `report` found; shown as text by print, as a folded listing by a notebook."""

    kernels: list[Kernel]
    architecture: str
    sources: Mapping[str, str]  # file, as the listing names it: its text
    threads: int
    dynamic: int
    missing: str = ""  # why there is no machine code

    def _summary(self) -> list[str]:
        launch = f"{self.threads} threads" + f" and {self.dynamic} bytes of dynamic shared memory" * bool(
            self.dynamic
        )
        limits = limits_of(self.architecture)
        lines = [
            f"sm_{self.architecture}, blocks of {launch}; bytes of a thread: stack, spilled; of a block: static shared"
        ]
        lines.append(
            f"{'registers':>9}{'stack':>7}{'spilled':>9}{'shared':>8}{'instr.':>8}  {'occupancy':<34}kernel"
        )
        for each in self.kernels:
            blocks, bound = each.occupancy(self.architecture, self.threads, self.dynamic)
            share = f"{100 * blocks * self.threads / limits.threads:.0f} %: {blocks} blocks, by {bound}"
            numbers = (
                f"{each.registers:>9}{each.stack:>7}{each.spilled:>9}{each.shared:>8}{each.instructions:>8}"
            )
            lines.append(f"{numbers}  {share:<34}{each.name}")
        return lines + [self.missing] * bool(self.missing)

    def _listing(self, kernel: Kernel) -> list[tuple[str, list[str]]]:
        """Lines of source, in order, each with its instructions; files in the order in which they first appear."""
        files = list(dict.fromkeys(file for file, _ in kernel.lines))
        found = []
        for (file, line), code in sorted(
            kernel.lines.items(), key=lambda item: (files.index(item[0][0]), item[0][1])
        ):
            text = self.sources.get(file, "").splitlines()
            shown = text[line - 1].strip() if 0 < line <= len(text) else ""
            found.append((f"{Path(file).name}:{line}: {shown}", code))
        return found

    def __str__(self) -> str:
        lines = self._summary()
        for kernel in self.kernels:
            lines += ["", kernel.name] * bool(kernel.lines)
            for place, code in self._listing(kernel):
                lines += [place, *[f"    {instruction}" for instruction in code]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<pre>{html.escape(chr(10).join(self._summary()))}</pre>"]
        for kernel in self.kernels:
            if kernel.lines:
                rows = "".join(
                    f"<tr><td><pre>{html.escape(place)}</pre></td><td><pre>{html.escape(chr(10).join(code))}</pre></td></tr>"
                    for place, code in self._listing(kernel)
                )
                parts.append(
                    f"<details><summary><code>{html.escape(kernel.name)}</code></summary>"
                    f'<table style="text-align: left">{rows}</table></details>'
                )
        return "".join(parts)


def report(kernels, *, architecture: str | None = None, threads: int = 256, dynamic: int = 0) -> Report:
    """What the CUDA kernels of `kernels` are made of: what inline_loader.load or a %%cuda cell gave.

    architecture: "75", "80", "90a", …; by default this GPU's. threads, dynamic: of a launch, for the occupancy.
    Raises TypeError for other objects, ValueError for kernels of the CPU and for an architecture whose limits aren't known, BuildError
    if they can't be compiled.
    """
    unit = getattr(
        kernels, "_Operators__unit", None
    )  # inline_loader.Operators leaves all plain names to launchers
    if unit is None:
        raise TypeError(f"expected what load or %%cuda gave, got a {type(kernels).__name__}")
    if unit.device != "cuda":
        raise ValueError(f"expected CUDA kernels, got {unit.name}, which is for the CPU")
    flags = [flag for flag in unit.cuda_cflags if "-gencode" not in flag]
    texts = {unit.origin: unit.text_of(unit.origin), **{each.path: each.text for each in unit.headers}}
    compiler, architecture = toolchain.nvcc(), architecture or toolchain.cuda_architectures()[0]
    limits_of(architecture)
    return examine(unit.files(), texts, flags, architecture, compiler, threads, dynamic)


def examine(
    files: Mapping[str, str],
    texts: Mapping[str, str],
    flags: Sequence[str],
    architecture: str,
    nvcc: str,
    threads,
    dynamic,
) -> Report:
    """The report on files["kernels.cu"]. texts: what `#line` calls the sources, to their texts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
        cubin = folder / "kernels.cubin"
        command = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-std=c++17", "--expt-relaxed-constexpr"]
        command += [
            "-lineinfo",
            "-Xptxas=-v",
            *flags,
            f"-I{folder}",
            "-o",
            str(cubin),
            str(folder / "kernels.cu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise BuildError(f"nvcc failed: {done.stdout}{done.stderr}", done.stdout + done.stderr)
        kernels, missing = _usage(done.stdout + done.stderr), ""
        if tool := _nvdisasm(nvcc):
            listing = subprocess.run(
                [tool, "-g", "-c", str(cubin)], capture_output=True, text=True, errors="replace"
            )
            missing = listing.stderr.strip()
            _add_code(kernels, listing.stdout, texts)
        else:
            missing = "no machine code: nvdisasm is missing; pip install nvidia-cuda-nvdisasm brings it"
        for mangled, kernel in kernels.items():
            kernel.name = _demangled(mangled)
    return Report(
        sorted(kernels.values(), key=lambda each: each.name), architecture, texts, threads, dynamic, missing
    )


def _usage(log: str) -> dict[str, Kernel]:
    """What ptxas says that each kernel takes, by mangled name."""
    found, kernel = {}, Kernel("")
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = found[entry[1]] = Kernel(entry[1])
        elif stack := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            kernel.stack, kernel.spilled = int(stack[1]), int(stack[2]) + int(stack[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernel.registers, kernel.shared = int(used[1]), int(shared[1]) if shared else 0
    return found


def _add_code(kernels: Mapping[str, Kernel], listing: str, texts: Mapping[str, str]) -> None:
    """Adds the instructions of nvdisasm's listing to the kernels, under the files that `texts` names."""
    code: dict[tuple[str, int], list[str]] = {}
    place = "", 0
    for line in listing.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^\s,]+)", line):
            code = kernels[section[1]].lines if section[1] in kernels else {}
        elif marker := re.search(r'//## File "(.+)", line (\d+)', line):
            file = next(
                (name for name in texts if marker[1] == name or marker[1].endswith("/" + name)), marker[1]
            )
            place = file, int(marker[2])
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", line):
            code.setdefault(place, []).append(re.sub(r"\s+", " ", instruction[1]))


def _nvdisasm(nvcc: str) -> str | None:
    """Beside nvcc, on PATH, or from the package nvidia-cuda-nvdisasm."""
    beside = Path(nvcc).resolve().parent / "nvdisasm"
    packages = [path for root in site.getsitepackages() for path in Path(root).glob("nvidia/*/bin/nvdisasm")]
    candidates = [str(beside), shutil.which("nvdisasm"), *map(str, packages)]
    return next((path for path in candidates if path and Path(path).is_file()), None)


def _demangled(name: str) -> str:
    """A C++ name as it was written, without the parameters."""
    try:
        demangle = ctypes.CDLL(ctypes.util.find_library("stdc++") or "libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return name
    demangle.restype, status = ctypes.c_void_p, ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    text = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return re.sub(r"\(anonymous namespace\)::|^void ", "", text).split("(")[0]
