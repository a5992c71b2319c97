"""What a build needs of the machine: compilers that fit this torch, ninja, the GPU's architecture, memory.

Each function returns what it found, or raises a BuildError that says in a sentence what is missing and what mends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from inline_kernels.loader.messages import BuildError

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# The stable ABI's headers are complete from torch 2.10 on; older releases get the ATen host side.
STABLE_ABI = TORCH >= (2, 10)
MINIMUM_CAPABILITY = (7, 5)
MINIMUM_GCC = 11 if TORCH >= (2, 12) else 9  # C++20 from torch 2.12 on, C++17 before
USUAL_CUDA_HOME = "/usr/local/cuda"
# What nvcc takes; PyTorch's side of all builds, where it is on ATen.
MEMORY_PER_BUILD = (1 if STABLE_ABI else 3) << 30


def host_compiler() -> str:
    """The C++ compiler, a program or a command (CXX="ccache g++"). Raises BuildError where it is missing or too old."""
    compiler = os.environ.get("CXX") or "c++"
    version = re.search(r"(\d+)\.\d+\.\d+", version_of(compiler))
    if version and "clang" not in version_of(compiler) and int(version[1]) < MINIMUM_GCC:
        raise BuildError(
            f"the C++ compiler {compiler} is version {version[0]}, too old for torch {torch.__version__}: install g++ "
            f"{MINIMUM_GCC} or later (apt-get install g++-{MINIMUM_GCC}) and set CXX to it"
        )
    return compiler


def nvcc() -> str:
    """CUDA's compiler, <CUDA's folder>/bin/nvcc. Raises BuildError where it is missing or of another CUDA than torch's."""
    if not torch.version.cuda:
        raise BuildError(
            f'torch {torch.__version__} is built without CUDA: use device="cpu", or install a torch with CUDA'
        )
    major = torch.version.cuda.split(".")[0]
    compilers = [os.path.join(home, "bin", "nvcc") for home in _cuda_homes(major)]
    releases = {}
    for compiler in [each for each in compilers if os.path.exists(each)] or compilers[:1]:
        releases[compiler] = re.search(r"release (\d+)\.(\d+)", version_of(compiler))
        if not releases[compiler] or releases[compiler][1] == major:
            return compiler
    compiler, release = next(iter(releases.items()))
    raise BuildError(
        f"{compiler} is of CUDA {release[1]}.{release[2]} but torch {torch.__version__} of CUDA {torch.version.cuda}: "
        f"{_install_nvcc()}, or a torch for CUDA {release[1]}"
    )


def _cuda_homes(major: str) -> list[str]:
    """Where the CUDA toolkit may be: where torch looks for it, and where pip installs it."""
    if chosen := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return [chosen]
    on_path = shutil.which("nvcc")
    packages = importlib.util.find_spec("nvidia")  # a namespace of many folders
    installed = packages.submodule_search_locations if packages else []
    homes = [os.path.join(folder, f"cu{major}") for folder in installed or []]
    return [*([os.path.dirname(os.path.dirname(on_path))] if on_path else []), USUAL_CUDA_HOME, *homes]


def _install_nvcc() -> str:
    cuda = torch.version.cuda
    toolkit = f"install the CUDA toolkit {cuda} and set CUDA_HOME to its folder"
    if int(cuda.split(".")[0]) < 13:  # before, pip's packages had no nvcc
        return toolkit
    packages = shlex.join([f"nvidia-cuda-{what}=={cuda}.*" for what in ("nvcc", "cccl")])
    return f"{toolkit}, or unset that and run: {sys.executable} -m pip install {packages}"


INCLUDE_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH")


def named_folders() -> list[Path]:
    """The user's folders of headers."""
    folders = [os.environ.get(variable, "").split(os.pathsep) for variable in INCLUDE_VARIABLES]
    return [Path(folder).resolve() for each in folders for folder in each if folder]


def include_folders(device: str) -> list[Path]:
    """Where headers change with a version alone: those of the compilers, of the system, of Python, torch and CUDA."""
    folders = ["/usr/include", "/usr/lib", "/usr/lib64", sysconfig.get_path("include")]
    folders.append(os.path.join(os.path.dirname(torch.__file__), "include"))
    if device == "cuda":
        home = os.path.dirname(os.path.dirname(os.path.realpath(nvcc())))
        folders += [os.path.join(home, "include"), os.path.join(home, "targets")]
    return [Path(folder).resolve() for folder in folders]


@functools.lru_cache(None)
def version_of(compiler: str) -> str:
    try:
        command = [compiler] if os.path.exists(compiler) else shlex.split(compiler)
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=True
        )
        return result.stdout
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        what, fix = "C++", "install one with apt-get install g++ (or dnf install gcc-c++), or set CXX to it"
        if os.path.basename(compiler) == "nvcc":
            what, fix = "CUDA", _install_nvcc()
        raise BuildError(f"no {what} compiler: {compiler} does not run ({error}); {fix}") from None


def find_ninja() -> str:
    """Where ninja is; PATH is extended to it where only this environment has it. Raises BuildError where none is."""
    if not shutil.which("ninja"):
        folders = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
        folder = next((folder for folder in folders if shutil.which("ninja", path=folder)), None)
        if folder is None:
            raise BuildError(f"ninja is missing: {sys.executable} -m pip install ninja")
        os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + folder
    return str(shutil.which("ninja"))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def driver(device: torch.device) -> list | None:
    """Of a GPU: the CUDA that its driver serves, and the driver's own version where the system tells it."""
    if device.type != "cuda":
        return None
    serves, known = ctypes.c_int(), Path("/sys/module/nvidia/version")
    ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuDriverGetVersion(ctypes.byref(serves))
    return [serves.value, *(known.read_text().split() if known.exists() else ())]


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.lru_cache(None)
def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


def cuda_architectures() -> list[str]:
    """Of the visible GPUs: "75", "80", "90a"; from TORCH_CUDA_ARCH_LIST where there is none.

    Raises BuildError where neither says one, or the driver or every GPU is too old.
    """
    if torch.cuda.is_available():
        capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    else:
        check_driver()
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("+PTX", "").replace(";", " ").split()
        capabilities = {tuple(int(part) for part in text.rstrip("af").split(".")) for text in listed}
        if not capabilities:
            raise BuildError(
                "no GPU is visible: set TORCH_CUDA_ARCH_LIST to the compute capability to build for, e.g. 9.0"
            )
    supported = sorted(capability for capability in capabilities if capability >= MINIMUM_CAPABILITY)
    if not supported:
        got = ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
        raise BuildError(
            f"expected a GPU of compute capability 7.5 or later (7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0), got {got}"
        )
    return [f"{major}{minor}" + ("a" if (major, minor) >= (9, 0) else "") for major, minor in supported]


def check_driver() -> None:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        found = re.search(r"driver .*too old \(found version (\d+)\)", str(error))
        if found:
            version = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
            raise BuildError(
                f"the NVIDIA driver is too old: it serves CUDA {version}, torch {torch.__version__} needs {torch.version.cuda}; "
                f"update the driver, or install a torch for CUDA {version}"
            ) from None


def builds_at_once() -> int:
    """How many builds this machine's processors and free memory carry at the same time; MAX_JOBS lowers it."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = int(os.environ["MAX_JOBS"]) if os.environ.get("MAX_JOBS", "").isdigit() else processors
    return max(1, min(processors, limit, free_memory() // MEMORY_PER_BUILD))


def free_memory() -> int:
    """Bytes that a new process may use: of the machine, and of the container where that has a limit."""
    free = 1 << 62
    with contextlib.suppress(OSError, AttributeError, TypeError):
        free = (
            int(re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), flags=re.M)[1]) << 10
        )
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), flags=re.M)
        free = min(free, int((group / "memory.max").read_text()) - used + int(cached[1] if cached else 0))
    return free


# -------------------------------------------------------------------------------------------------------- for doctor()


def _check_torch() -> str:
    if TORCH < (2, 8):
        raise BuildError(
            f"expected torch 2.8 or later, got {torch.__version__}: {sys.executable} -m pip install --upgrade torch"
        )
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _check_compiler() -> str:
    compiler, standard = host_compiler(), "c++20" if TORCH >= (2, 12) else "c++17"
    command = [
        *([compiler] if os.path.exists(compiler) else shlex.split(compiler)),
        f"-std={standard}",
        "-fsyntax-only",
        "-x",
        "c++",
        "-",
    ]
    result = subprocess.run(command, check=False, input="#include <vector>\n", text=True, capture_output=True)
    if result.returncode:
        fix = f"install g++ {MINIMUM_GCC} or later and set CXX to it"
        raise BuildError(f"{compiler} does not compile {standard}: {fix}\n{result.stderr}")
    return f"{version_of(compiler).splitlines()[0]}, {standard}"


def _check_memory() -> str:
    return f"{free_memory() >> 20} MB free, {MEMORY_PER_BUILD >> 20} MB per build: {builds_at_once()} at once"


def _check_gpu() -> str:
    if not torch.cuda.is_available():
        check_driver()
        return "none is visible to this torch: the CPU kernels run"
    names = ", ".join({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    version = re.search(r"release ([\d.]+)", version_of(nvcc()))
    return f"{names}, architecture {', '.join(cuda_architectures())}, nvcc {version[1] if version else '?'} ({nvcc()})"


def _check_torch_locks() -> str:
    root = os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions")
    locks = [os.path.join(folder, "lock") for folder, _, names in os.walk(root) if "lock" in names]
    stale = shlex.join(lock for lock in locks if time.time() - os.stat(lock).st_mtime > 3600)
    return (
        f"torch's own load_inline, not this loader, may wait for ever for one of: rm {stale}"
        if stale
        else "none"
    )


CHECKS = {
    "torch": _check_torch,
    "C++ compiler": _check_compiler,
    "ninja": find_ninja,
    "memory": _check_memory,
    "GPU": _check_gpu,
    "stale locks": _check_torch_locks,
}
