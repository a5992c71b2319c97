"""What the tests of the loader share: a kernel that is new each time, processes that load it, file systems with faults; and new memory that is poisoned."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import inline_loader

ROOT = Path(inline_loader.__file__).resolve().parent
PATIENCE = 120  # seconds after which something hangs

SCALE = """// build {}
EXPORT void scale(float* y, const float* x, double a, int64_t n) {{
  host::parallel_for(n, 1024, [=](int64_t begin, int64_t end) {{
    for (int64_t i = begin; i < end; i++) y[i] = x[i] * float(a){};
  }});
}}
"""
numbers = itertools.count()


def scale(extra: str = "", number: int | None = None) -> str:
    """y = x * a, then `extra`. No two texts are equal, so that none is loaded already."""
    return SCALE.format(next(numbers) if number is None else number, extra)


def run(kernels, a: float = 2.0) -> list[float]:
    x = torch.tensor([1.0, -3.0])
    y = torch.empty_like(x)
    (kernels.scale if hasattr(kernels, "scale") else kernels)(y, x, a, 2)
    return y.tolist()


def making_poisoned(like: torch.Tensor):
    """As inline_kernels.engine.library.making, but by what fills new memory in deterministic mode."""
    kind = {"dtype": like.dtype, "device": like.device}
    return functools.partial(torch.empty_strided, (*like.shape,), like.stride(), **kind)


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without it
sys.path.insert(0, {root!r})
{before}
import torch, inline_loader
try:
    kernels = inline_loader.load("scale", source={source})
except inline_loader.BuildError as error:
    sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))
    sys.exit(3)
x = torch.tensor([1.0, -3.0])
y = torch.empty_like(x)
kernels(y, x, 2.0, 2)
print(y.tolist(), flush=True)
"""


def program(source: str, before: str = "") -> str:
    """Loads `source` and prints the result of a call, or the BuildError."""
    return PROGRAM.format(root=str(ROOT), before=before, source=ascii(source))


# Forks of a process that has imported torch, which takes longer than all else that they do.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch"])


def be(program: str, environment: dict[str, str], *outputs) -> None:
    for descriptor, pipe in enumerate(outputs, 1):
        os.dup2(pipe.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    exec(program, {"__name__": "__main__"})


class Fork:
    """A process that runs `program`, with its outputs in pipes."""

    def __init__(self, program: str, environment: dict[str, str]):
        pipes = [forks.Pipe(duplex=False) for _ in range(2)]
        self.process = forks.Process(target=be, args=(program, environment, *(writer for _, writer in pipes)))
        self.process.start()
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), errors="replace") for reader, _ in pipes
        )
        self.pid, self.kill = self.process.pid, self.process.kill

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.process.exitcode is not None, "it hangs"
        return self.stdout.read(), self.stderr.read()


def start(source: str, **environment: str) -> Fork:
    return Fork(program(source), {**os.environ, **environment})


def start_python(source: str, before: str, after: str = "", **environment: str) -> subprocess.Popen:
    """The same from Python's own start on; `before` is run first, `after` last."""
    return subprocess.Popen(
        [sys.executable, "-c", program(source, before) + after],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        cwd="/",
    )


def finish(process: Fork | subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return out.strip(), err


def wait_for_line(process: Fork, text: str) -> str:
    """The line of `process`'s progress that holds `text`."""
    for line in process.stderr:
        if text in line:
            return line
    pytest.fail(f"the process ended without {text!r}")


def builds(cache: Path) -> list[Path]:
    """But PyTorch's side of all."""
    folders = [library.parent for library in cache.glob("*/kernels.so")]
    return [folder for folder in folders if not folder.name.startswith("host_side_")]


def only_build(cache: Path) -> Path:
    (build,) = builds(cache)
    return build


def mounted(
    options: str, folder: Path, command: list[str], then: str = "true"
) -> subprocess.CompletedProcess:
    """Runs `command` in a mount namespace where `folder` is a tmpfs with `options`; `then` is run before it, mounted."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    folder.mkdir(exist_ok=True)
    script = f"mount -t tmpfs -o mode=0700,{options} none {shlex.quote(str(folder))} && {then} && exec {shlex.join(command)}"
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run(
        [*unshare, f"mount -t tmpfs none {shlex.quote(str(folder))}"], capture_output=True
    ).returncode:
        pytest.skip("this machine does not allow a mount namespace")
    return subprocess.run(
        [*unshare, script], capture_output=True, text=True, timeout=PATIENCE, env=os.environ
    )


def loading(source: str) -> list[str]:
    return [sys.executable, "-c", program(source)]
