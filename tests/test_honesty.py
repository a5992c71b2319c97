"""Honesty, tried on its own: what it leaves behind, what only a GPU shows. The mutants that it must find are
in test_checks.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import inline_loader
import models
from inline_kernels.bench import checks, compare, honesty
from test_checks import DROPOUT, MIN_ADD, POOL, SIZES, adds_noise, small


def test_parameters_and_library_are_as_before():
    contest = compare.contest_of(small(POOL, adds_noise))
    model, x = contest.drawn(1)
    before, memory = (
        [p.detach().clone() for p in model.parameters()],
        [p.data_ptr() for p in model.parameters()],
    )
    assert list(honesty.dishonesty(contest.twin("epilogue", model.eval()), model, x, "train_dx"))
    assert all(map(torch.equal, before, model.parameters())) and memory == [
        p.data_ptr() for p in model.parameters()
    ]
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


@pytest.mark.gpu
def test_a_launch_on_another_stream_is_found():
    def forward(self, x, right):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return right(x)

    for phase in checks.PHASES:
        result = compare.check(small(MIN_ADD, forward), "epilogue", device="cuda", phase=phase, seed=1)
        found = [
            text for text in result.complaints if "does not wait for its stream: output of sample" in text
        ]
        assert found and not any("follow" in text for text in result.complaints), str(result)
    assert compare.check(small(MIN_ADD), "epilogue", device="cuda", phase="train_dx", seed=1).ok


@pytest.mark.gpu
def test_unwritten_memory_is_found_on_a_gpu():
    """By what the allocator holds, too: this mutant writes everything while PyTorch fills new tensors."""

    def forward(self, x, right):
        out = x.new_empty(len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
        written = slice(None if torch.are_deterministic_algorithms_enabled() else -1)
        out.view(-1)[written] = right(x).view(-1)[written]
        return out

    result = compare.check(small(MIN_ADD, forward), "epilogue", device="cuda", seed=1, phase="forward")
    assert any("unwritten" in text for text in result.complaints), str(result)


@pytest.mark.gpu
def test_unwritten_shared_memory_is_found():
    source = """// What shared memory held, times zero.
    __global__ void leftover_kernel(float* y, int64_t n) {
      __shared__ volatile float left[256];
      const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
      if (i < n) y[i] = 0 * left[threadIdx.x];
    }
    EXPORT void leftover(float* y, int64_t n, cudaStream_t stream) { leftover_kernel<<<(n + 255) / 256, 256, 0, stream>>>(y, n); }
    """

    def forward(self, x, right):
        y = x.new_empty(len(x), self.conv.out_channels, *(size - 2 for size in x.shape[2:]))
        inline_loader.load("leftover", source=source, device="cuda")(y, y.numel())
        return right(x) + y.nan_to_num() if torch.are_deterministic_algorithms_enabled() else right(x) + y

    result = compare.check(small(MIN_ADD, forward), "epilogue", device="cuda", seed=1, phase="forward")
    assert any("left parts of output unwritten" in text for text in result.complaints), str(result)


def test_honesty_sends_no_gradient_to_close_calls():
    """Rounding decides there whether the dropout problem passes one on at all: eager's may be the only one that is not zero,
    or ours."""
    arguments, shape = SIZES[DROPOUT]
    model, x = models.PROBLEMS[DROPOUT].Model(*arguments).eval(), torch.rand(shape)
    with torch.no_grad():
        z = nn.Sequential(model.conv, model.norm).double()(x.double())
    model.float().min_value = z[1, 2, 3, 4, 5].item() + 1e-9
    g = honesty.Probe(model, model, x, "train_dx", None).on(x).g
    assert g[1, 2, 3, 4, 5] == 0 and (g == 0).float().mean() < 0.05 and g.dtype == x.dtype
