"""What the user is told of a machine that lacks something, and that what is there is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inline_loader
from inline_kernels.loader import toolchain as loader_toolchain
from inline_loader import BuildError
from loading import (
    ROOT,
    finish,
    run,
    scale,
    start,
)

pytestmark = pytest.mark.usefixtures("cache")


# ------------------------------------------------------------------------------------------------------- missing tools


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def cuda_torch(monkeypatch, fresh_versions):
    """A torch that believes in CUDA 13.0 and sees no GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


CUDA_SOURCE = """EXPORT void scale(float* y, const float* x, double a, int64_t n, cudaStream_t stream) {}"""


def test_no_host_compiler(monkeypatch, fresh_versions):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler: /nowhere/g\+\+ .*apt-get install g\+\+"):
        inline_loader.load("scale", source=scale())


@pytest.mark.parametrize("command", ["{folder}/ccache g++", ""])
def test_a_host_compiler_of_several_words(monkeypatch, fresh_versions, tmp_path, capsys, command):
    called = tmp_path / "called"
    (tmp_path / "ccache").write_text(f'#!/bin/sh\ntouch {called}\nexec "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    assert run(inline_loader.load("scale", source=scale())) == [2.0, -6.0]
    assert called.exists() or not command
    assert inline_loader.main(["doctor"]) == 0
    assert "ok    C++ compiler: " in capsys.readouterr().out


def test_old_host_compiler(monkeypatch, fresh_versions, tmp_path):
    old = program(tmp_path / "g++", "g++ (GCC) 4.8.5 20150623")
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(
        BuildError, match=rf"{re.escape(str(old))} is version 4.8.5, too old .*install g\+\+ \d+"
    ):
        inline_loader.load("scale", source=scale())


def test_no_ninja(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tools(tmp_path)))
    monkeypatch.setattr(loader_toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BuildError, match=r"^ninja is missing: .*pip install ninja"):
        inline_loader.load("scale", source=scale())


def tools(tmp_path: Path) -> Path:
    """A folder with what a compiler needs and no ninja."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("c++", "g++", "as", "ld", "sh", "rm"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    return folder


def test_ninja_is_found_beside_python(warm, tmp_path):
    """As in a notebook server that was started by its absolute path: the environment's bin folder is not on PATH."""
    if not shutil.which("ninja", path=os.path.dirname(sys.executable)):
        pytest.skip("this environment has no ninja of its own")
    out, err = finish(start(scale(), PATH=str(tools(tmp_path))))
    assert out == "[2.0, -6.0]", err


def test_no_nvcc(cuda_torch, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(
        BuildError, match=r"^no CUDA compiler: /nowhere/bin/nvcc .*install the CUDA toolkit 13.0"
    ):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


@pytest.mark.parametrize(
    "cuda, packages",
    [("13.0", "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-cccl==13.0.*'"), ("12.8", None)],
)
def test_a_gpu_without_nvcc_names_what_brings_it(cuda_torch, monkeypatch, capsys, tmp_path, cuda, packages):
    """In the error of a build and in doctor's. Before CUDA 13 pip's packages bring no nvcc."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(loader_toolchain, "USUAL_CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tools(tmp_path)))
    with pytest.raises(BuildError, match=f"no CUDA compiler: .*install the CUDA toolkit {cuda} ") as caught:
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")
    assert inline_loader.main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL  GPU")]
    for text in (str(caught.value), line):
        assert packages in text if packages else "pip install" not in text


CUDA_HOMES = [Path("/usr/local/cuda"), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
CUDA = next((home for home in CUDA_HOMES if (home / "bin/nvcc").exists() and (home / "lib").is_dir()), None)


@pytest.fixture
def pips_cuda(tmp_path) -> Path:
    """The folder for packages as pip leaves it: the CUDA toolkit, of which no linker finds a library."""
    site = tmp_path / "site"
    home = site / "nvidia" / "cu13"
    (home / "lib").mkdir(parents=True)
    for part in ("bin", "include", "nvvm"):
        (home / part).symlink_to(CUDA / part)
    (home / "lib" / "libcudart.so.13").symlink_to(CUDA / "lib" / "libcudart.so.13")
    return site


@pytest.mark.skipif(
    CUDA is None or torch.version.cuda is not None or not list(CUDA.glob("lib/libcudart.so.13")),
    reason="needs the CUDA toolkit 13 and a torch without CUDA",
)
def test_nvcc_of_pip_is_found_and_builds(pips_cuda, tmp_path):
    """For a torch without CUDA, stubs stand for the libraries of one with CUDA."""
    stub = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 0; }'
    for library in ("libc10_cuda.so", "libtorch_cuda.so"):
        command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(tmp_path / library)]
        subprocess.run(command, input=stub, text=True, check=True)
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(pips_cuda)!r}]
import torch
torch.version.cuda = "13.0"
import inline_loader
from inline_kernels.loader import toolchain
toolchain.USUAL_CUDA_HOME = "/nowhere"
print(toolchain.nvcc())
print(inline_loader.load("scale", source={CUDA_SOURCE.replace("scale", "exp").replace("float*", "T*")!r}, device="cuda", defines=dict(T="float", N=4)))
"""
    libraries = os.pathsep.join(map(str, (tmp_path, pips_cuda / "nvidia/cu13/lib")))
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CUDA_PATH")}
    environment |= {"PATH": "/usr/bin:/bin", "TORCH_CUDA_ARCH_LIST": "9.0"}
    environment |= {"LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH": libraries}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.stdout.splitlines() == [
        f"{pips_cuda}/nvidia/cu13/bin/nvcc",
        "<scale for cuda: exp(Tensor(y!) y, Tensor x, float a, int n)>",
    ], result.stderr


def test_wrong_cuda(cuda_torch, monkeypatch, tmp_path):
    program(tmp_path / "bin" / "nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"nvcc is of CUDA 11.8 but torch .* of CUDA 13.0: install"):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


@pytest.fixture
def nvcc13(cuda_torch, monkeypatch, tmp_path):
    program(tmp_path / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


def test_old_driver(nvcc13, monkeypatch):
    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
        )

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        BuildError, match=r"driver is too old: it serves CUDA 11.4, torch .* needs 13.0; update"
    ):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


def test_no_gpu_and_no_architecture(nvcc13):
    with pytest.raises(BuildError, match="no GPU is visible: set TORCH_CUDA_ARCH_LIST"):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


def test_old_gpu(nvcc13, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (6, 1))
    with pytest.raises(BuildError, match=r"compute capability 7.5 or later \(7.5, 8.0.*got 6.1"):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


def test_architectures(nvcc13, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.1;7.5 8.6+PTX 9.0a 12.0")
    assert loader_toolchain.cuda_architectures() == ["75", "86", "90a", "120a"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_torch_without_cuda():
    with pytest.raises(BuildError, match="is built without CUDA: use device="):
        inline_loader.load("scale", source=CUDA_SOURCE, device="cuda")


def test_doctor(monkeypatch, capsys, cache, fresh_versions):
    assert inline_loader.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"ok    cache folder: {cache}" in out and "FAIL" not in out and "at once" in out
    monkeypatch.setenv("CXX", "/nowhere/g++")
    cache.chmod(0o777)
    assert inline_loader.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  C++ compiler: no C++ compiler" in out and f"chmod 700 {cache}" in out


def test_command_line(warm, cache):
    finish(start(scale()))
    command = [sys.executable, str(ROOT / "inline_loader.py")]
    result = subprocess.run([*command, "clear"], capture_output=True, text=True, check=True)
    assert re.match(r"removed \d+ kB", result.stdout) and not list(cache.glob("*/build.json"))
    assert inline_loader.main(["nonsense"]) == 2
