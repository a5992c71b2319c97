"""Launchers between guard zones: what writes past its tensors is found and named, what doesn't gives what it gave."""

import pytest
import torch

import inline_loader
from inline_kernels.bench import compare
from inline_kernels.loader import guarded
from test_checks import DROPOUT, MIN_ADD, small

CPU = """
EXPORT void shifted(float* y, const float* x, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) y[i] = x[i] + 1;
}
EXPORT void both(float* y, float* z, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = x[i] + 1, z[i] = y[i] + x[i];
}
"""
CUDA = """
__global__ void shifted_kernel(float* y, const float* x, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) y[i] = x[i] + 1;
}
EXPORT void shifted(float* y, const float* x, int64_t first, int64_t last, cudaStream_t stream) {
  shifted_kernel<<<1, 1, 0, stream>>>(y, x, first, last);
}
"""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def loaded(device: str):
    return inline_loader.load("edges", source={"cpu": CPU, "cuda": CUDA}[device], device=device)


@devices
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    "first, last, damage",
    [
        (0, 5, []),
        (0, 6, ["edges.shifted wrote 4 bytes past the end of y"]),
        (-2, 5, ["edges.shifted wrote 8 bytes before the start of y"]),
    ],
)
def test_what_is_written_outside_is_found(device, bound, first, last, damage):
    shifted, (memory, x) = loaded(device).shifted, torch.zeros(2, 16, device=device)
    y, x = memory[4:9], x[4:9]
    run = shifted.bound(first, last) if bound else lambda *tensors: shifted(*tensors, first, last)
    for _ in range(2):  # what is bound launches by itself from the second call on
        run(y, x)
    assert memory.sum() == last - first
    memory.zero_()
    with guarded.zones() as found:
        for _ in range(2):
            run(y, x)
    assert found == damage
    assert (y == 1).all() and memory.sum() == 5, "and the neighbours are as they were"
    run(y, x)
    assert found == damage and memory.sum() == last - first


def test_what_shares_memory_shares_it_there():
    both, memory = loaded("cpu").both, torch.arange(12.0)
    expected = memory.clone()
    both(expected[2:8], expected[6:12], expected[0:6], 6)
    with guarded.zones() as found:
        both(memory[2:8], memory[6:12], memory[0:6], 6)
    assert torch.equal(memory, expected) and found == []
    with guarded.zones() as found:
        both(memory[:4], memory[4:], memory[:4], 5)  # z's first value lies behind y, but not in its copy
    assert found == ["edges.both wrote 4 bytes past the end of y"]


def test_what_is_read_outside_is_nan_there():
    shifted, memory, y = loaded("cpu").shifted, torch.ones(7), torch.zeros(6)
    with guarded.zones():
        shifted(y, memory[:5], 0, 6)
    assert y[:5].isfinite().all() and y[5].isnan()


@pytest.mark.parametrize("name", [MIN_ADD, DROPOUT])
@devices
def test_a_check_names_the_launcher(name, device):
    """Also of a problem whose results are all zero."""

    for past in (0, 1):

        def forward(self, x, right, past=past):
            y, ones = torch.zeros(2, 8, device=x.device)
            loaded(device).shifted(y[:7], ones, 0, 7 + past)
            return right(x)

        result = compare.check(small(name, forward), "epilogue", device=device, seed=1)
        expected = ["edges.shifted wrote 4 bytes past the end of y"] * past
        assert [text for text in result.complaints if "wrote" in text] == expected, str(result)
        assert result.ok is not bool(past)


def test_a_check_finds_what_is_read_outside():
    """Of a launcher that is right wherever ones lie behind its tensor."""

    def forward(self, x, right):
        y = torch.zeros(8)
        loaded("cpu").shifted(y, torch.ones(9)[:7], 0, 8)
        return right(x) + (y[7] - 2)

    result = compare.check(small(MIN_ADD, forward), "epilogue", seed=1)
    assert any("output: error nan" in text for text in result.failures), str(result)
