"""What every test gets: the `gpu` marker, which skips where no kernel can be built for a GPU, random numbers that repeat (also
hypothesis's), and none of what torch.compile kept on disk: it knows an operator by name alone, not by what it returns now.
"""

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.cpp_extension import CUDA_HOME

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


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() and CUDA_HOME:
        return
    missing = "nvcc" if torch.cuda.is_available() else "GPU that this torch can use"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"there is no {missing}"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
