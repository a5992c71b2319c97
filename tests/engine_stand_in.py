"""In the place of generated kernels, the graph evaluated by torch: what tests of `fuse` that are about everything else run on. And what torch says
of GPUs (`PROPERTIES`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import reference_graph as reference
from inline_kernels.engine import schedule


def _gpu(capability, multiprocessors, **clocks) -> SimpleNamespace:
    """clocks in kHz, and a bus's width in bits; torch may not know them."""
    major, minor = capability
    own = {"shared_memory_per_block_optin": 227 << 10, **clocks}
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=multiprocessors, **own)


PROPERTIES = {
    "H200": _gpu((9, 0), 132, clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6016),
    "H100": _gpu((9, 0), 132, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120),
    "H100 PCIe": _gpu((9, 0), 114, clock_rate=1755000, memory_clock_rate=1593000, memory_bus_width=5120),
    "an older torch": _gpu((9, 0), 66),
    "no memory clock": _gpu((8, 9), 132, clock_rate=990000, memory_clock_rate=0, memory_bus_width=384),
    "of no table": _gpu((12, 1), 132),
    "too old": _gpu((7, 5), 132),
}


def _plan(case):
    return SimpleNamespace(segment=case.segment, saving=case.saving, dtype=case.dtype)


def _leaves(segment, a, z):
    """In the dtype of sums."""
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    count = len(segment.inputs) + len(segment.parameters) + len(segment.buffers)
    tensors = [t.to(wide) for t in a[:count]]
    numbers = dict(zip(segment.scalars, a[len(a) - 1 - len(segment.scalars) :]))
    sizes = reference.Sizes(segment.graph, z.shape[0], z.shape[1], z.shape[2:])
    generator = torch.Generator()
    if segment.random:
        seed, number = a[count + 2 * len(segment.updates) :][:2]
        generator.manual_seed(int(seed) % 2**62 if seed.numel() else number)

    def mask_of(p):
        return lambda shape: (torch.rand(shape, generator=generator) >= p).to(wide)

    masks = [mask_of(each.p) for each in segment.random]
    return reference._leaves(segment, z.to(wide), numbers, masks, tensors, sizes), sizes


def _forward(plan, a):
    segment = plan.segment
    z = reference.convolve(segment, a[0].detach(), a[len(segment.inputs)].detach())
    leaves, sizes = _leaves(segment, [t.detach() if isinstance(t, torch.Tensor) else t for t in a], z)
    roots = [*segment.outputs, *(n for u in segment.updates for n in (u.mean, u.variance, u.count))]
    y, *statistics = reference.evaluate(roots, leaves, sizes)
    y = y.expand(sizes.shape(segment.outputs[0].space)).to(plan.dtype).contiguous().clone()
    _update(segment, a, statistics)
    return [y, *([z] if plan.saving else [])]


def _update(segment, a, statistics):
    """The running statistics; as launches that are trusted do, past autograd."""
    for i, update in enumerate(segment.updates):
        mean, variance, count = statistics[3 * i : 3 * i + 3]
        for name, value in zip(update[:2], (mean, variance * count / (count - 1))):
            running = a[segment.tensors.index(name)].data
            running.lerp_(value.to(running.dtype).view_as(running), update.momentum)


def _saved(case):
    positions = case.sizes.levels["e"][3 - (case.x.dim() - 2) :]
    return [((case.sizes.N, case.sizes.C, *positions), case.x.dtype, torch.contiguous_format)]


def _backward(plan, dy, a, saved, needs, *_):
    segment = plan.segment
    graph, (y,) = segment.graph, segment.outputs
    leaves, sizes = _leaves(segment, a, saved[0])
    own = {n.attr[0]: n for n in reference.order([y]) if n.op == "leaf"}
    names = reference._names(segment)
    wanted = [own[name] for name in ("z", *names) if name in own]
    nodes = dict(zip([w.attr[0] for w in wanted], graph.adjoints(y, graph.leaf("dy", y.space, "dy"), wanted)))
    computed = {name: node for name, node in nodes.items() if node is not None}
    given = {**leaves, "dy": dy.to(leaves["z"].dtype).reshape(sizes.shape(y.space))}
    values = dict(zip(computed, reference.evaluate([*computed.values()], given, sizes)))
    values = {name: value.expand(sizes.shape(own[name].space)) for name, value in values.items()}
    weight_at = len(segment.inputs)
    with torch.enable_grad():
        x, weight = (t.detach().requires_grad_() for t in (a[0], a[weight_at]))
        z = reference.convolve(segment, x, weight)
    dz = values.get("z", torch.zeros_like(z)).to(z.dtype)
    found = [
        values[n].reshape(t.shape).to(t.dtype) if n in values else torch.zeros_like(t)
        for n, t in zip(names, a)
    ]
    found[0], found[weight_at] = torch.autograd.grad(z, (x, weight), dz.contiguous())
    return [gradient if need else None for gradient, need in zip(found, needs)]


def replace_kernels(monkeypatch) -> None:
    monkeypatch.setattr(schedule, "plan", _plan)
    monkeypatch.setattr(schedule, "forward", _forward)
    monkeypatch.setattr(schedule, "backward", _backward)
    monkeypatch.setattr(schedule, "saved", _saved)
    monkeypatch.setattr(schedule, "spends", lambda plan: ())
    monkeypatch.setattr(schedule, "requests", lambda *given: [])
    monkeypatch.setattr(schedule, "describe", lambda *given: "the graph by torch")


@pytest.fixture
def stand_in(monkeypatch):
    """No kernels are built."""
    replace_kernels(monkeypatch)
