"""Launchers with their last arguments known (`kernels.launcher.bound`): what is launched again without another check is right, and
what differs from the call before is checked."""

from __future__ import annotations

import threading

import pytest
import torch

import inline_loader

SOURCE = """
EXPORT void affine(float* y, float* largest, const float* x, int64_t add, double a, bool negate, int64_t n) {
  for (int64_t i = 0; i < n && x; i++) y[i] = (negate ? -1 : 1) * x[i] * float(a) + float(add);
  *largest = x ? x[n - 1] : -1;
}
EXPORT void mixed(float* y, int64_t n, const float* x) { *y = x[n]; }
"""
CUDA_SOURCE = """
__global__ void affine_kernel(float* y, const float* x, float a, int64_t add, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * a + add;
}
EXPORT void affine(float* y, const float* x, int64_t add, double a, int64_t n, int64_t threads, cudaStream_t stream) {
  affine_kernel<<<1, threads, 0, stream>>>(y, x, a, add, n);
}
"""


def affine(device: str = "cpu"):
    source = CUDA_SOURCE if device == "cuda" else SOURCE
    return inline_loader.load("affine", source=source, device=device).affine


def outputs(n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((n,), 9.0), torch.full((1,), 9.0)


def test_launches_what_was_bound_with_what_is_given():
    launch = affine().bound(-0.5, True, 2)
    for add in (0, 7, -3, 2**40):
        (y, largest), x = outputs(), torch.randn(2)
        assert launch(y, largest, x, add) is None
        assert torch.equal(y, x * 0.5 + float(add)) and largest == x[1]


@pytest.mark.parametrize(
    "x, error",
    [
        (torch.ones(2, dtype=torch.float64), "affine: x: expected a float32 tensor, got float64"),
        (torch.ones(4)[::2], "affine: x: expected a contiguous tensor"),
        (torch.ones(2, device="meta"), "(?s).*"),
        (torch.ones(2, requires_grad=True), "affine: an argument requires a gradient"),
    ],
    ids=["dtype", "strides", "device", "gradient"],
)
def test_what_differs_is_checked(x, error):
    launch, (y, largest) = affine().bound(1.0, False, 2), outputs()
    for _ in range(2):
        launch(y, largest, torch.zeros(2), 1)
        with pytest.raises((RuntimeError, NotImplementedError), match=error):
            launch(y, largest, x, 2)
        assert y.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("trusting", [False, True])
def test_what_lies_channels_last_is_given_as_it_is(trusting):
    """The launcher's array is (N, ..., C), contiguous; of a tensor that lies otherwise the check at the first call tells."""
    n = 2 * 3 * 4 * 5
    launch = affine().bound(2.0, False, n, trusting=trusting, new=1, last=(0, 2))
    for add in (1, 2):
        y = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        x = torch.randn_like(y)
        launch(y, torch.zeros(1), x, add)
        assert torch.equal(y, 2 * x + add)
        with torch.profiler.profile():  # each call is the operator's then
            launch(y, torch.zeros(1), x, 7)
        assert torch.equal(y, 2 * x + 7)
    with pytest.raises(RuntimeError, match="affine: x: expected a contiguous tensor"):
        affine().bound(2.0, False, n, trusting=trusting, last=(0, 2))(y, torch.zeros(1), x.contiguous(), 1)


def test_memory_that_was_freed_is_not_read():
    """Of a whole storage and of a view behind its start, by the operator and by what is bound."""
    kernel, (y, largest) = affine(), outputs()
    launch = kernel.bound(1.0, False, 2)
    for x in (torch.zeros(2), torch.zeros(5)[3:]):
        launch(y, largest, x, 1)
        x.untyped_storage().resize_(0)
        for call in (lambda x: kernel(y, largest, x, 2, 1.0, False, 2), lambda x: launch(y, largest, x, 2)):
            with pytest.raises(RuntimeError, match="affine: x: expected a tensor with memory"):
                call(x)
        assert y.tolist() == [1.0, 1.0]


def test_a_gradient_is_refused_where_one_is_recorded_only():
    launch, (y, largest), x = affine().bound(1.0, False, 2), outputs(), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        launch(y, largest, x, 1), launch(y, largest, x, 2)
    assert y.tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="an argument requires a gradient"):
        launch(y, largest, x, 3)
    with pytest.raises(TypeError, match="affine: x: expected a tensor, got 5"):
        launch(y, largest, 5, 3)
    assert y.tolist() == [3.0, 3.0]


def test_other_sizes_are_seen():
    launch = affine().bound(1.0, False, 2)
    for n in (2, 0, 2):  # no elements: no address
        y, largest = outputs(n)
        launch(y, largest, torch.ones(n), 1)
        assert (y.tolist(), largest.item()) == (([2.0, 2.0], 1.0) if n else ([], -1.0))


def test_autograd_sees_what_is_written_to():
    launch, (y, largest), x = affine().bound(1.0, False, 2), outputs(), torch.ones(2)
    squared = (x.clone().requires_grad_() * y).sum()
    for count in (1, 2, 3):
        launch(y, largest, x, 1)
        assert (y._version, largest._version, x._version) == (count, count, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_autograd_isn_t_told_by_who_is_trusted():
    """At no call, the first and a profiler's neither; of what nobody has seen there is nothing to tell."""
    (y, largest), x = outputs(), torch.ones(2)
    launch = affine().bound(1.0, False, 2, trusting=True, new=1)
    for _ in range(3):
        launch(torch.empty(2), largest, x, 1)
    with torch.profiler.profile():
        launch(y, largest, x, 2)
    assert (largest._version, x._version, largest.item()) == (0, 0, 1)


def test_a_profiler_sees_the_operator():
    launch, (y, largest), x = affine().bound(1.0, False, 2), outputs(), torch.ones(2)
    launch(y, largest, x, 1)
    with torch.profiler.profile() as profile:
        launch(y, largest, x, 1)
    assert any(event.key.endswith("::affine") for event in profile.key_averages())


def test_an_error_of_a_later_call():
    """Past the check of the first call: the launcher's own words arrive all the same."""
    source = '#include <stdexcept>\nEXPORT void f(float* y, int64_t n) { if (n) throw std::runtime_error("late"); *y = 1; }'
    launch, y = inline_loader.load("late", source=source).f.bound(), torch.zeros(1)
    launch(y, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^late$"):
            launch(y, 1)
    launch(y, 0)
    source = source.replace('std::runtime_error("late")', "1")
    launch = inline_loader.load("late", source=source).f.bound()
    launch(y, 0)
    with pytest.raises(RuntimeError, match="f: an exception that is no std::exception"):
        launch(y, 1)


def test_only_numbers_can_be_bound():
    kernels = inline_loader.load("affine", source=SOURCE)
    with pytest.raises(TypeError, match="affine: expected its tensors first, and only numbers to bind"):
        kernels.affine.bound(torch.ones(2), 1, 1.0, False, 2)
    with pytest.raises(TypeError, match="mixed: expected its tensors first, and only numbers to bind"):
        kernels.mixed.bound(torch.ones(2))


def test_a_library_that_another_copy_of_the_loader_has_loaded(monkeypatch):
    affine()
    inline_loader.forget()
    monkeypatch.setattr(inline_loader, "_addresses", {})
    launch, (y, largest) = affine().bound(2.0, False, 2), outputs()
    for add in (1, 2):
        launch(y, largest, torch.ones(2), add)
        assert y.tolist() == [2.0 + add] * 2
    inline_loader.forget()


def test_threads_share_one():
    launch, failures = affine().bound(1.0, False, 2), []

    def work(add: int) -> None:
        for i in range(2000):
            (y, largest), x = outputs(), torch.ones(2, dtype=torch.float32)
            launch(y, largest, x, add + i)
            if y.tolist() != [1.0 + add + i] * 2:
                failures.append((add, i, y))

    threads = [threading.Thread(target=work, args=(10_000 * k,)) for k in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert not failures


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_runs_it():
    """While that one is captured, nothing runs; the graph then does, with what x holds by then."""
    launch, x = affine("cuda").bound(2.0, 2**20, 256), torch.ones(2**20, device="cuda")
    launch(y := torch.empty_like(x), x, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(y, x, 9)
    assert (y == 2).all()
    x.fill_(3), graph.replay()
    assert (y == 15).all()


@pytest.mark.gpu
def test_on_a_gpu_a_launch_that_fails_says_so():
    launch, x = affine("cuda").bound(1.0, 4, 256), torch.ones(4, device="cuda")
    launch(torch.empty_like(x), x, 1)
    wrong = affine("cuda").bound(1.0, 4, 4096)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="affine: the launch failed"):
            wrong(torch.empty_like(x), x, 1)
    launch(y := torch.empty_like(x), x, 1)
    assert y.tolist() == [2.0] * 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    launch = affine("cuda").bound(2.0, 4, 4)
    for index in (1, 1, 0, 1):
        x = torch.ones(4, device=f"cuda:{index}")
        launch(y := torch.empty_like(x), x, index)
        assert torch.cuda.current_device() == 0 and y.tolist() == [2.0 + index] * 4
