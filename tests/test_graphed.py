"""`graphed(step, example)`: a training step as one CUDA graph. Without a GPU, what it asks of torch.cuda, on stand-ins that note it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inline_kernels import fuse, graphed
from inline_kernels.engine import library


@pytest.fixture
def noted(monkeypatch) -> list[str]:
    """A GPU's streams and graphs in words. What is captured computes, as on a CPU it must, but writes to no parameter; replayed, it runs."""
    notes: list[str] = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other):
            notes.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            notes.append("replay")

    class Generator:
        def clone_state(self):
            return "before"

        def graphsafe_set_state(self, state):
            notes.append(f"generator as {state}")

    @contextlib.contextmanager
    def entered(what, *given, **keywords):
        notes.append(f"in {what}")
        yield
        notes.append(f"out of {what}")

    monkeypatch.setattr(library, "device_type", lambda t: "cuda")
    monkeypatch.setattr(torch.cuda, "default_generators", {None: Generator()})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered(stream.name))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: entered(f"capture on {stream.name}"))
    return notes


def test_the_first_calls_are_steps_aside_then_one_captures(noted):
    def step(x, y):
        noted.append(f"step {x.sum().item():g}")
        return x + y

    x = torch.ones(2, 3)
    run = graphed(step, (x, x), warmup=2)
    assert not noted and all(t is not x for t in run.inputs)
    found = [run(i * x, x.clone()) for i in range(1, 5)]
    aside = ["side waits for current", "in side", "step {}", "out of side", "current waits for side"]
    expected = [line.format(6 * i) for i in (1, 2) for line in aside]
    capture = ["in capture on side", "step 18", "out of capture on side", "replay"]
    assert noted == [*expected, *capture, "replay"]
    assert torch.equal(found[0], 2 * x) and found[2] is found[3], "the graph's own result"
    assert torch.equal(run.inputs[0], 4 * x), "what is replayed reads the last"
    run.inputs[0].zero_()
    run(*run.inputs)
    assert noted[-1] == "replay" and torch.equal(run.inputs[0], 0 * x)


def test_inputs_keep_whether_they_have_gradients(noted):
    x = torch.ones(2, 3, requires_grad=True)
    run = graphed(lambda x, y: torch.autograd.grad(x.square().sum(), x), [x, torch.ones(1)])
    assert [t.requires_grad for t in run.inputs] == [True, False] and run.inputs[0].is_leaf
    (dx,) = run(3 * x, torch.ones(1))
    assert torch.equal(dx, torch.full((2, 3), 6.0)) and x.grad is None


@pytest.mark.parametrize("example, error, says", [
    (torch.ones(2), RuntimeError, "expected an example on one GPU, got torch.float32 \\[2\\] on cpu; elsewhere call step itself"),
    ((torch.ones(2), 3), TypeError, "tensors on a GPU, as an example, got torch.float32 \\[2\\] on cpu, 3"),
    ((), TypeError, "expected step's arguments"),
    (None, TypeError, "got None"),
], ids=str)  # fmt: skip
def test_examples_that_no_graph_takes(example, error, says):
    with pytest.raises(error, match=says):
        graphed(lambda *given: None, example)


@pytest.mark.parametrize("given, error, says", [
    ((torch.ones(3),), RuntimeError, "expected torch.float32 \\[2\\] on cpu, as in the example, got torch.float32 \\[3\\] on cpu"),
    ((torch.ones(1),), RuntimeError, "got torch.float32 \\[1\\]"),  # which copy_ would spread
    ((torch.ones(2).double(),), RuntimeError, "got torch.float64"),
    ((), TypeError, "got $"),
    ((torch.ones(2), torch.ones(2)), TypeError, "got torch.float32 \\[2\\] on cpu, torch.float32"),
    ((2.0,), TypeError, "got 2.0"),
], ids=str)  # fmt: skip
def test_arguments_of_calls(given, error, says, noted):
    calls = []
    run = graphed(calls.append, torch.ones(2), warmup=0)
    for _ in range(2):  # before there is a graph, and then
        with pytest.raises(error, match=says):
            run(*given)
        assert torch.equal(run.inputs[0], torch.ones(2))
        run(torch.ones(2))
    assert len(calls) == 1


def test_a_step_that_can_t_be_captured(noted):
    def step(x):
        if "in capture on side" in noted:
            raise torch.AcceleratorError("operation not permitted when stream is capturing")

    run = graphed(step, torch.ones(2), warmup=1)
    run(torch.ones(2))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="step can't be captured: operation not(.|\n)*Expected no .item()"
        ):
            run(torch.ones(2))
        assert noted.pop() == "generator as before"
    assert "replay" not in noted


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Dropout(0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.drop(F.gelu(self.norm(self.conv(x)))).mean((2, 3)))


OPTIMIZERS = {
    "none": lambda model: None,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-2, capturable=True),
}


def step_of(model: nn.Module, optimizer: str):
    optimizer = OPTIMIZERS[optimizer](model)

    def step(x, target):
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        if optimizer:
            optimizer.step()
        return loss

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [fuse, copy.deepcopy], ids=["fused", "eager"])
def test_a_graph_s_steps_are_the_steps(make, optimizer):
    """Loss by loss, each gradient, parameter and buffer; on a stream of the user's, too."""
    model = Net().cuda()
    ours, theirs = make(copy.deepcopy(model)), make(copy.deepcopy(model))
    data = [
        (torch.randn(8, 3, 12, 12, device="cuda"), torch.randint(4, (8,), device="cuda")) for _ in range(8)
    ]
    run, step = graphed(step_of(ours, optimizer), data[0]), step_of(theirs, optimizer)
    for i, given in enumerate(data):
        stream = torch.cuda.Stream() if i % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = run(*given).clone()
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(found, step(*given), rtol=1e-4, atol=1e-5, msg=f"step {i}")
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
            torch.testing.assert_close(
                a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=f"gradient of {name}, step {i}"
            )
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=f"{name}, step {i}")
    assert run.graph is not None
    for a, b in zip(ours.buffers(), theirs.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_masks_are_other_ones_at_each_replay():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Dropout(0.5)).cuda()
    run = graphed(fuse(model), torch.ones(2, 3, 8, 8, device="cuda"))
    masks = [run(*run.inputs).clone() == 0 for _ in range(6)]
    assert len({mask.cpu().numpy().tobytes() for mask in masks}) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.Adam(p), None], ids=["not capturable", "item"])
def test_what_a_gpu_can_t_capture(optimizer):
    model, x = nn.Conv2d(3, 4, 3).cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    optimizer = optimizer and optimizer(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step() if optimizer else loss.item()
        return loss

    run = graphed(step, x, warmup=1)
    run(x)
    with pytest.raises(RuntimeError, match="step can't be captured: (.|\n)*Expected no .item()"):
        run(x)
    assert len(torch.rand(100, device="cuda").unique()) > 50, "PyTorch draws as before"
    torch.cuda.synchronize()
