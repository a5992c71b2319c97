"""What every test gets: the `gpu` marker, which skips where no kernel can be built for a GPU, random numbers that repeat (also
hypothesis's), and none of what torch.compile kept on disk: it knows an operator by name alone, not by what it returns now.
"""

import gc
import os
import shutil
import tempfile
import warnings
from pathlib import Path

# Before torch starts its threads, which would keep a core from the other test process while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A pool of processes, each of which imports torch, is not worth it for what a test process compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Nor is what it asks a compiler of the processor first, for code that is fast; the same code without it is compiled sooner.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Most of the time is the compilers'.
os.environ.setdefault("CXX", str(Path(__file__).with_name("quick_g++")))

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.cpp_extension import CUDA_HOME

import inline_loader
from inline_kernels.bench import honesty, timing
from inline_kernels.engine import choice
from inline_kernels.engine import library as engine_library
from inline_kernels.loader import library, units
from inline_kernels.loader import toolchain as loader_toolchain
from loading import ROOT, making_poisoned, wait_until

_compiled = tempfile.TemporaryDirectory(prefix="torchinductor-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

settings.register_profile(
    "tests",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("tests")


# Those that take twenty seconds of a processor or more, the longest first: at last, one of them would keep one process busy while the others have
# nothing left.
LONG = (
    "notebooks engine_source models kernels_compile engine_gradients emulated judge backward_min_add engine_between engine_direct "
    "engine_few_channels engine_layouts export depthwise engine_sinks planning_min_add semantics engine_stored engine_chain engine_cpu "
    "loader_cache compare export_gpu engine_strips stream backward_conv3d distributed engine_joining operators fifth_problem "
    "backward_pool checks inline_loader"
).split()


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem.removeprefix("test_"), len(LONG)))
    if torch.cuda.is_available() and CUDA_HOME:
        return
    missing = "nvcc" if torch.cuda.is_available() else "GPU that this torch can use"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"there is no {missing}"))


gc.disable()  # until all is imported


def pytest_collection_finish():
    """What is imported stays: a garbage collection that looks through it all took a quarter of Python's time. Later ones are rare, but on a GPU,
    whose memory garbage holds."""
    gc.freeze()
    gc.enable()
    if not torch.cuda.is_available():
        gc.set_threshold(20_000, 10, 20)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch):
    """What torch.empty returns is NaN, or the largest integer, and so is what kernels are given to write to: what nobody writes is seen."""
    monkeypatch.setattr(engine_library, "making", making_poisoned)
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def optimised():
    """Kernels are compiled as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["CXX"].endswith("quick_g++"):
            patch.setenv("CXX", f"{os.environ['CXX']} --as-users")
        yield


# ----------------------------------------------------------------------------------------------------------- the loader


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder for the test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("INLINE_LOADER_CACHE", str(folder))
    inline_loader._loaded.clear()
    return folder


@pytest.fixture(scope="session")
def host_sides(tmp_path_factory) -> Path:
    """PyTorch's side of all builds, by compiler."""
    return tmp_path_factory.mktemp("host-sides")


@pytest.fixture
def warm(cache, host_sides, monkeypatch) -> Path:
    """`cache`, with PyTorch's side of all builds in it, which is compiled once for all tests."""
    built = host_sides / Path(os.environ.get("CXX", "default")).name
    if not built.exists():
        with monkeypatch.context() as patch:
            patch.setenv("INLINE_LOADER_CACHE", str(built))
            library.library_of(units.host_unit("cpu"), inline_loader._compile)
    return shutil.copytree(built, cache)


NOTING_COMPILER = """#!/bin/sh
case " $* " in *host_side_*) exec c++ "$@";; *" -c "*) ;; *) exec c++ "$@";; esac
echo begin >> "$NOTES/calls"
while [ -e "$NOTES/hold" ]; do sleep 0.05; done
c++ "$@"; status=$?
echo end >> "$NOTES/calls"
exit $status
"""


@pytest.fixture(scope="session")
def noting_compiler(host_sides) -> Path:
    script = host_sides / "compiler" / "g++-that-waits"
    script.parent.mkdir()
    script.write_text(NOTING_COMPILER)
    script.chmod(0o755)
    return script


@pytest.fixture
def compiler(noting_compiler, tmp_path, monkeypatch, request):
    """A compiler that notes its calls in `calls` and waits while the file `hold` exists; but not for PyTorch's side of all builds, which is
    in the cache."""

    class Compiler:
        calls, hold = tmp_path / "calls", tmp_path / "hold"

        def count(self, what: str = "begin") -> int:
            return self.calls.read_text().split().count(what) if self.calls.exists() else 0

        def wait_for_call(self) -> None:
            wait_until(lambda: self.count() > 0)

    monkeypatch.setenv("CXX", str(noting_compiler))
    monkeypatch.setenv("NOTES", str(tmp_path))
    request.getfixturevalue("warm")
    return Compiler()


@pytest.fixture
def kernels_folder(tmp_path, monkeypatch) -> Path:
    """In the place of kernels/."""
    folder = tmp_path / "kernels"
    for name in ("core", "host"):
        shutil.copytree(ROOT / "kernels" / name, folder / name)
    monkeypatch.setattr(units, "KERNELS", folder)
    return folder


@pytest.fixture
def fresh_versions():
    loader_toolchain.version_of.cache_clear()
    yield
    loader_toolchain.version_of.cache_clear()


@pytest.fixture
def few_rounds(monkeypatch):
    """As few as timing takes, where no time is looked at, and few repeats; what many find is looked at in test_checks.py and test_judge.py."""
    monkeypatch.setattr(honesty, "REPEATS", 5)
    timings = timing._timings
    monkeypatch.setattr(timing, "_timings", lambda calls, measure, seconds: timings(calls, measure, 0.0))


@pytest.fixture
def most_fused(monkeypatch):
    """What "auto" runs is the most fused variant that can, with sizes that rules would leave to another, too."""
    monkeypatch.setattr(choice, "instead", lambda *given: None)
