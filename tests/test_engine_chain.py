"""Segments that run one after the other as one operator: a chain computes what its parts do, bit for bit; and when parts are called by themselves."""

from __future__ import annotations

import weakref
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import inline_loader
from benchmarks.networks import NETWORKS
from inline_kernels import fuse
from inline_kernels.bench import compare
from inline_kernels.engine import chain, gradients, library, precision, schedule
from inline_kernels.engine import layouts as turning
from test_emulated import folder, gpu, guarded, remembers_nothing  # noqa: F401
from test_engine_between import MODELS, layouts  # noqa: F401


class Skips(nn.Module):
    """Convolutions in a chain that gives two results, one of them from its middle; filters and a norm that are used twice; a residual by way of
    nn.Identity."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.again = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.shortcut = nn.BatchNorm2d(channels), nn.Identity()

    def forward(self, x):
        x = F.relu(self.first(x))
        y = F.relu(self.norm(self.again(x)))
        z = F.relu(self.norm(self.again(y)) + self.shortcut(x))
        return F.max_pool2d(y, 2), z


CASES = {**MODELS, "skips": (Skips, (2, 3, 9, 10))}


def two(make, monkeypatch) -> tuple[nn.Module, nn.Module]:
    """The same model fused, and fused without chains."""
    torch.manual_seed(0)
    model = make().train()
    compare.randomize(model)
    alone, runs = fuse(deepcopy(model)), chain._runs

    def called(*given):  # whatever is captured meanwhile has no chains
        monkeypatch.setattr(chain, "_runs", lambda *_: [])
        try:
            return alone(*given)
        finally:
            monkeypatch.setattr(chain, "_runs", runs)

    called.parameters, called.buffers, called.train = alone.parameters, alone.buffers, alone.train
    return fuse(model), called


def step_of(model, x: torch.Tensor, asked=lambda name: True) -> list[torch.Tensor]:
    """Results, gradients, buffers."""
    found = model(x)
    found = [*found] if isinstance(found, tuple) else [found]
    total = sum((y * torch.linspace(0.5, 2, y.numel()).view(y.shape)).sum() for y in found if y.requires_grad)
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    gradients = torch.autograd.grad(total, [t for i, t in enumerate(wanted) if asked(i)], allow_unused=True)
    return [*found, *[g for g in gradients if g is not None], *[b.clone() for b in model.buffers()]]


def assert_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype


def chains(model: nn.Module) -> list[chain.Chain]:
    return model._kept[0].chains


@pytest.mark.parametrize("name", CASES)
def test_computes_what_its_parts_do(name, monkeypatch):
    make, shape = CASES[name]
    fast, alone = two(make, monkeypatch)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(shape, requires_grad=step > 0)
        assert_alike(step_of(fast, x), step_of(alone, x))
    assert chains(fast) or name == "before"
    assert all(situation.run for each in chains(fast) for situation in each.situations)
    for model in (fast.eval(), alone):
        model.train(False)
    with torch.no_grad():
        for _ in range(2):
            assert_alike(*[[*y] if isinstance(y := m(x), tuple) else [y] for m in (fast, alone)])


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("resnet18", "unet")])
def test_filters_are_turned_together(name, layouts, monkeypatch):  # noqa: F811
    """On a GPU, where a library convolves channels last: by few launches, once backward has run, with the same bits."""
    make, shape = CASES[name]
    fast, alone = two(make, monkeypatch)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(shape, requires_grad=True)
        assert_alike(step_of(fast, x), step_of(alone, x))
    runs = [situation.run.args[0] for each in chains(fast) for situation in each.situations]
    backs = [back for run in runs for back in run.backs.values()]
    assert any(run.turns for run in runs) and any(back.turns and back.turns_back for back in backs)


@pytest.mark.parametrize("name, own", [("before", "one"), ("branches", "left")])
def test_some_gradients_of_filters_are_ours(name, own, layouts, monkeypatch):  # noqa: F811
    """Those lie as filters do, and only the library's are turned back, by few launches."""
    asked = []

    def obstacle(segment, x, weight):
        asked.append(segment.conv.name)
        return None if segment.conv.name == own else "the library is to give it"

    monkeypatch.setattr(gradients, "packs_obstacle", obstacle)
    contiguous, copied = torch.Tensor.contiguous, []

    def noted(t, **given):
        layout = given.get("memory_format", torch.contiguous_format)
        copied.extend([[*t.shape]] * (t.dim() == 4 and not t.is_contiguous(memory_format=layout)))
        return contiguous(t, **given)

    make, shape = CASES[name]
    fast, alone = two(make, monkeypatch)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(shape, requires_grad=True)
        if step == 2:
            monkeypatch.setattr(torch.Tensor, "contiguous", noted)
        ours = step_of(fast, x)
        monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
        assert_alike(ours, step_of(alone, x))
    assert own in asked and not [each for each in copied if each[2:] == [3, 3]]
    runs = [situation.run.args[0] for each in chains(fast) for situation in each.situations]
    assert any(back.turns for run in runs for back in run.backs.values())


def test_kernels_for_gradients_are_built_side_by_side(layouts, monkeypatch):  # noqa: F811
    """Those of all parts at once, when backward runs for the first time, and none of them later."""
    monkeypatch.setattr(gradients, "packs_obstacle", lambda *_: None)
    make, shape = CASES["before"]
    fast, alone = two(make, monkeypatch)
    at_once, load = [], inline_loader.load
    monkeypatch.setattr(inline_loader, "load_all", lambda requests: at_once.append([*requests]))
    later: list[dict] = []
    monkeypatch.setattr(inline_loader, "load", lambda **request: later.append(request) or load(**request))
    x = torch.randn(shape, requires_grad=True)
    y = fast(x)
    at_once.clear(), later.clear()
    y.sum().backward()
    (together,) = at_once
    own = [request for request in later if request["name"].startswith("gradient_of_")]
    assert len(own) >= 2 and all(request in together for request in own)
    fast(x).sum().backward()
    assert len(at_once) == 1


def test_shares_of_a_launch():
    """Eight, four, two and one at once; each kind by itself."""
    weights = [torch.empty(4 + i, 5, 3, 3) for i in range(15)]
    known = [turning.Turning.of(w, True, rounds=i == 3) for i, w in enumerate(weights)]
    known[2] = None
    launched = []

    class Kernels:
        def __getattr__(self, name):
            def bound(*numbers, **_):
                return lambda *given: launched.append((name, numbers[-1], len(given)))

            return type("", (), {"bound": staticmethod(bound)})

    load = turning.inline_loader.load
    turning.inline_loader.load = lambda **_: Kernels()
    try:
        jobs, found = turning.turning_all(known), [None] * 15
        for run in jobs.values():
            run(weights, found)
    finally:
        turning.inline_loader.load = load
    assert sorted(jobs) == [0, 3, 10, 14] and [i for i, t in enumerate(found) if t is None] == [2]
    assert launched == [
        ("turn_8", False, 16),
        ("turn_4", False, 8),
        ("turn_1", False, 2),
        ("turn_1", True, 2),
    ]
    assert all(library.is_channels_last(t) for t in found if t is not None)


@pytest.mark.parametrize("frozen", [("first",), ("again", "norm"), ("norm",)], ids=str)
def test_frozen(frozen, monkeypatch):
    def make():
        model = Skips()
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        return model

    fast, alone = two(make, monkeypatch)
    for _ in range(3):
        x = torch.randn(2, 3, 9, 10)
        assert_alike(step_of(fast, x), step_of(alone, x))


def test_results_of_frozen_parts_have_no_gradient():
    model = Skips()
    model.first.requires_grad_(False)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            early = F.relu(self.inner.first(x))
            return F.max_pool2d(early, 2), F.relu(self.inner.again(early))

    fast = fuse(Both())
    for _ in range(2):
        early, late = fast(torch.randn(2, 3, 9, 10))
        assert not early.requires_grad and late.requires_grad


@pytest.mark.parametrize("modulo", [2, 3])
def test_only_some_gradients(modulo, monkeypatch):
    fast, alone = two(NETWORKS["resnet18"].small_model, monkeypatch)
    for step in range(3):
        x = torch.randn(2, 3, 64, 64, requires_grad=True)
        some = lambda i, step=step: i % modulo == step % modulo  # noqa: E731
        assert_alike(step_of(fast, x, some), step_of(alone, x, some))


def test_one_result_is_used(monkeypatch):
    fast, alone = two(Skips, monkeypatch)
    for used in (0, 1, 0):
        x = torch.randn(2, 3, 9, 10, requires_grad=True)
        found = [
            torch.autograd.grad(m(x)[used].square().sum(), [x, *m.parameters()], allow_unused=True)
            for m in (fast, alone)
        ]
        assert_alike(*[[g for g in gradients if g is not None] for gradients in found])


def test_graphs_that_are_retained_and_batches_of_gradients(monkeypatch):
    fast, alone = two(Skips, monkeypatch)
    x = torch.randn(2, 3, 9, 10, requires_grad=True)
    for m in (fast, alone):
        m(x)
    y, z = fast(x)
    first = torch.autograd.grad(z.sum(), x, retain_graph=True)
    assert_alike([*first], [*torch.autograd.grad(z.sum(), x, retain_graph=True)])
    dys = torch.randn(3, *z.shape)
    (batched,) = torch.autograd.grad(z, x, dys, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(z, x, dy, retain_graph=True)[0] for dy in dys]
    assert_alike([*batched], single)
    (gradient,) = torch.autograd.grad(z.sum() + y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.grad(gradient.sum(), x, retain_graph=True)
    z.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        z.sum().backward()


def test_many_gradients_at_once_free_nothing():
    """Without the graph being retained: each of a batch reads what was saved."""
    fast, x = fuse(Skips()), torch.randn(1, 3, 5, 6, requires_grad=True)

    def whole(m):
        return lambda x: m(x)[1].mean((2, 3))

    fast(x)
    ours = torch.autograd.functional.jacobian(whole(fast), x, vectorize=True)
    torch.testing.assert_close(ours, torch.autograd.functional.jacobian(whole(fast), x))


def test_what_nobody_reads(monkeypatch):
    """Statistics of a norm are written all the same."""

    class Unread(Skips):
        def forward(self, x):
            F.relu(self.norm(self.again(F.relu(self.first(x)))))
            return x * 2

    class Beside(Skips):
        def forward(self, x):
            x = F.relu(self.first(x))
            F.relu(self.norm(self.again(x)))
            return F.relu(self.again(x))

    for make in (Unread, Beside):
        fast, alone = two(make, monkeypatch)
        for _ in range(2):
            x = torch.randn(2, 3, 9, 10)
            assert_alike([fast(x), *fast.buffers()], [alone(x), *alone.buffers()])


def test_tensors_without_memory():
    fast = fuse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()))
    x = torch.randn(2, 3, 9, 10)
    for _ in range(2):
        assert fast(x.to("meta")).shape == fast(x).shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, monkeypatch):
    """From the first call on what is saved is the same."""
    fast, alone = two(Skips, monkeypatch)
    for _ in range(3):
        x = torch.randn(2, 3, 9, 10, requires_grad=True)
        of = [checkpoint(m, x, use_reentrant=reentrant) for m in (fast, alone)]
        assert_alike(
            *[[*torch.autograd.grad(z.square().sum(), x, retain_graph=True)] for _, z in of]
            if not reentrant
            else [[z] for _, z in of]
        )
        for _, z in of:
            z.square().sum().backward()


def test_what_changes_between_forward_and_backward():
    """A filter written to in place is an error, as in eager; one written to past autograd counts, as in eager."""
    fast, x = fuse(Skips()), torch.randn(2, 3, 9, 10, requires_grad=True)
    for _ in range(2):
        z = fast(x)[1]
    with torch.no_grad():
        fast.again.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    model = deepcopy(Skips())
    fast, found = fuse(model), []
    for each in (model.eval(), fast.eval()):
        z = each(x)[1]
        each.again.weight.data.mul_(2)
        found.append(torch.autograd.grad(z.sum(), x)[0])
        each.again.weight.data.div_(2)
    torch.testing.assert_close(found[1], found[0])


def test_changes_of_the_model():
    """Other parameters, an Identity that somebody hooks or replaces, another mode: seen at the next call."""
    torch.manual_seed(0)
    model, x = Skips().eval(), torch.randn(2, 3, 9, 10)
    fast = fuse(model)

    def agree() -> None:
        with torch.no_grad():
            for one, other in zip(fast(x), model(x)):
                torch.testing.assert_close(one, other)

    agree()
    fast.first.weight = model.first.weight = nn.Parameter(torch.randn_like(model.first.weight))
    agree()
    seen = []
    handle = model.shortcut.register_forward_hook(
        lambda module, given, y: seen.append(y.device.type) or y * 2
    )
    agree()
    assert seen.count("cpu") == 2
    handle.remove()
    agree()
    fast.shortcut = model.shortcut = nn.Hardtanh(-0.1, 0.1)
    agree()


def test_parts_are_called_where_gradients_shall_be_on_their_way(monkeypatch):
    fast, x = fuse(Skips()), torch.randn(2, 3, 9, 10)
    fast(x)
    (own,) = chains(fast)
    called = []
    call = own._one_by_one
    monkeypatch.setattr(own, "_one_by_one", lambda given: called.append(1) or call(given))
    fast(x)
    assert not called
    monkeypatch.setattr(chain, "_is_distributed", lambda: True)
    fast(x)
    with torch.no_grad():
        fast(x)
    monkeypatch.undo()
    monkeypatch.setattr(own, "_one_by_one", lambda given: called.append(2) or call(given))
    with torch.autocast("cpu", torch.bfloat16):
        fast(x)
    assert called == [1, 2]


def test_one_tensor_for_two_parts(monkeypatch):
    """What stands for two of a chain's tensors is decided by its parts; a module's that is used twice is one."""
    model = Skips()
    other = nn.Conv2d(8, 8, 3, padding=1)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.other = model, other

        def forward(self, x):
            return F.relu(self.other(F.relu(self.inner.again(F.relu(self.inner.first(x))))))

    two_ = Two()
    fast, x = fuse(two_), torch.randn(2, 3, 9, 10)
    torch.testing.assert_close(fast(x), two_(x))
    fast.other.weight = other.weight = model.again.weight
    for _ in range(2):
        torch.testing.assert_close(fast(x), two_(x))


def test_memory_is_free_as_soon_as_it_was_read(monkeypatch):
    """Without gradients a result lives until it was read; in backward what was saved does."""
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.SiLU())])
    fast, x = fuse(model), torch.randn(2, 8, 5, 6)
    alive, most, read = [], [], []
    fast(x)
    (own,) = chains(fast)
    (run,) = [situation.run.args[0] for situation in own.situations]
    shared = {id(step.shared): step.shared for step in run.steps}.values()

    def count() -> int:
        return sum(each() is not None for each in alive)

    for each in shared:
        back = each.backward

        def noted(*given, back=back, **more):
            most.append(count())
            return back(*given, **more)

        monkeypatch.setattr(each, "backward", noted)

        def kept(*given, call=each.forward, **more):
            found = call(*given, **more)
            read.append(count())
            alive.extend(weakref.ref(t) for t in found[:1])
            return found

        monkeypatch.setattr(each, "forward", kept)
    y = fast(x)
    saved = count()
    assert saved >= 11
    y.sum().backward()
    assert most[0] >= 11 and most[-1] <= 2 and most == sorted(most, reverse=True)
    alive.clear()
    with torch.no_grad():
        fast(x)
        read.clear()
        fast(x)
    assert count() == 0 and 1 <= max(read) <= 2


@pytest.mark.parametrize("apart", [False, True])
def test_running_statistics_are_neither_kept_nor_told(apart):
    """Backward reads none, so that they may be written to meanwhile; autograd doesn't know that they are written."""
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(2, 3, 9, 10)
    if apart:  # then a copy is written, and copied back
        model.norm.running_mean, model.norm.running_var = torch.zeros(16)[::2], torch.ones(16)[::2]
    fast, ours = fuse(deepcopy(model)), []
    mine = [fast.norm.running_mean, fast.norm.running_var]
    versions = [t._version for t in mine]
    for _ in range(3):
        z = fast(x)[1]
        assert [t._version for t in mine] == versions
        kept = {t.data_ptr() for t in z.grad_fn.saved_tensors}
        assert not kept & {t.data_ptr() for t in mine} and fast.again.weight.data_ptr() in kept
        before = [t.clone() for t in mine]
        ours.append(torch.autograd.grad(z.square().sum(), fast.again.weight, retain_graph=True)[0])
        mine[0].data.mul_(3)
        assert torch.equal(torch.autograd.grad(z.square().sum(), fast.again.weight)[0], ours[-1])
        mine[0].data.copy_(before[0])
        theirs = torch.autograd.grad(model(x)[1].square().sum(), model.again.weight)[0]
        torch.testing.assert_close(ours[-1], theirs, rtol=1e-4, atol=1e-4)
        assert all(map(torch.allclose, before, (model.norm.running_mean, model.norm.running_var)))


def test_settings_that_change_between_forward_and_backward(layouts, monkeypatch):  # noqa: F811
    """What is asked of the library hangs on those of backward: what a chain turned for others isn't taken."""
    make, shape = CASES["chain"]
    fast, alone = two(make, monkeypatch)
    now = ["as forward"]
    for each in (chain, schedule):
        monkeypatch.setattr(each, "precision", lambda x: now[0])
    monkeypatch.setattr(precision, "runs_tf32", lambda *given, **settings: now[0] == "as forward")
    for then in ("as forward", "as forward", "other", "other", "as forward"):
        x, found = torch.randn(shape, requires_grad=True), []
        for m in (fast, alone):
            now[0] = "as forward"
            y = m(x)
            now[0] = then
            found.append([*torch.autograd.grad(y.square().sum(), [x, *m.parameters()])])
        assert_alike(*found)
    (run,) = [situation.run.args[0] for each in chains(fast) for situation in each.situations]
    assert {settings for _, settings in run.backs} == {"as forward", "other"}


def test_counts_batches(monkeypatch):
    fast, alone = two(Skips, monkeypatch)
    for _ in range(3):
        x = torch.randn(2, 3, 9, 10)
        fast(x), alone(x)
    assert fast.norm.num_batches_tracked == 6
    assert_alike([*fast.buffers()], [*alone.buffers()])


def test_backward_that_is_watched(monkeypatch):
    """By a mode that was not there in forward; of batch norms in training, whose running statistics nobody keeps."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fast, alone = two(Skips, monkeypatch)
    x, seen = torch.randn(2, 3, 9, 10), []
    fast(x)
    for step in [step for each in chains(fast) for run in each.situations for step in run.run.args[0].steps]:
        operator, count = step.shared.operator, len(step.shared.names.updated)

        def noted(dy, a, *rest, registered=operator.backward_registered, count=count):
            tensors = [t for t in a if isinstance(t, torch.Tensor)]
            seen.extend(t.dim() for t in tensors[len(tensors) - count :])
            return registered(dy, a, *rest)

        monkeypatch.setattr(operator, "backward_registered", noted)
    for model in (fast, alone):
        found = model(x)
        with Watching():
            sum(y.sum() for y in found).backward()
        sum(y.sum() for y in model(x)).backward()
    assert seen and {*seen} == {1}  # what stands for statistics has their shapes
    assert_alike(*[[p.grad for p in model.parameters()] for model in (fast, alone)])


class Told(nn.Module):
    """A label for each sample, by a layer of its own, beside each convolution but the first."""

    def __init__(self, label):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.layer, self.label, self.drop, self.gate = nn.Linear(3, 4), label, nn.Dropout(0.5), nn.SiLU()
        self.norm, self.other, self.of_channels = nn.BatchNorm2d(4), nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x, t):
        y = F.relu(self.norm(self.first(x)))
        label = self.label(self, t, y, x)
        z = F.silu(self.second(y) + label[:, :, None, None])
        return F.relu(self.third(z) * self.other(t).unsqueeze(-1).unsqueeze(-1))


def _behind(function):
    """A label whose layer's result is read, and written by `function` behind that."""
    return lambda model, t, y, x: function(model.layer(t))


LABELS = {  # and the lengths of what follows one another
    "a layer": (lambda model, t, y, x: model.layer(model.gate(t)), [3]),
    "of a result": (lambda model, t, y, x: model.layer(y[:, 1:, 0, 0]), [1, 2]),
    "in place": (_behind(lambda label: F.relu(label, True)), [1, 2]),
    "in place, a number": (_behind(lambda label: F.relu(label, 1)), [1, 2]),
    "in place, by name": (_behind(lambda label: F.silu(label, inplace=True)), [1, 2]),
    "a method in place": (_behind(lambda label: label.relu_()), [1, 2]),
    "out": (_behind(lambda label: torch.add(label.detach(), 1, out=torch.empty_like(label))), [1, 2]),
    "random": (lambda model, t, y, x: model.drop(model.layer(t)), [1, 2]),
    "a buffer": (lambda model, t, y, x: model.layer(t) + model.norm.running_mean, [1, 2]),
    "a view of a buffer": (
        lambda model, t, y, x: model.layer(t) * model.norm.running_mean.view(1, -1),
        [1, 2],
    ),
    "a layer of a buffer": (lambda model, t, y, x: model.of_channels(model.norm.running_mean)[None], [1, 2]),
    "an image": (lambda model, t, y, x: model.layer(t) + torch.cat([x, x], 1)[:, :4, 0, 0], [1, 2]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_what_needs_no_segment_runs_first(kind, monkeypatch):
    label, lengths = LABELS[kind]
    model, x, t, found, runs = Told(label), torch.randn(2, 3, 9, 10), torch.randn(2, 3), [], chain._runs
    monkeypatch.setattr(chain, "_runs", lambda *given: found.append(runs(*given)) or found[-1])
    fast, steps = fuse(deepcopy(model)), []
    for each in (fast, model):
        for _ in range(2):
            torch.manual_seed(1)
            y = each(x, t)
        gradients = torch.autograd.grad(y.square().sum(), each.parameters(), allow_unused=True)
        steps.append([y, *[g for g in gradients if g is not None], *each.buffers()])
    torch.testing.assert_close(*steps)
    assert [len(run) for run in found[0] if run] == lengths


class Gated(Told):
    def forward(self, x, t):
        label = self.layer(t)
        y = F.silu(self.second(F.relu(self.first(x))) + label[:, :, None, None])
        return F.relu(self.third(y) * self.gate(label)[:, :, None, None])


def test_a_layer_that_becomes_one_in_place():
    model, x, t = Gated(None), torch.randn(2, 3, 9, 10), torch.randn(2, 3)
    fast = fuse(deepcopy(model))
    with torch.no_grad():
        for inplace in (False, True):
            fast.gate.inplace = model.gate.inplace = inplace
            torch.testing.assert_close(fast(x, t), model(x, t))


class Watched(Told):
    def forward(self, x, t):
        y = F.relu(self.norm(self.first(x)))
        label = self.layer(t)
        return F.relu(self.second(y)), label


@pytest.mark.parametrize("watched", [False, True])
def test_a_layer_that_somebody_watches_keeps_its_place(watched, monkeypatch):
    model, seen, found, runs = Watched(None), [], [], chain._runs
    monkeypatch.setattr(chain, "_runs", lambda *given: found.append(runs(*given)) or found[-1])
    if watched:
        model.layer.register_forward_hook(lambda *_: seen.append(float(model.norm.running_mean.abs().sum())))
    fuse(model)(torch.randn(2, 3, 9, 10), torch.randn(2, 3))
    assert [len(run) for run in found[0] if run] == ([1, 1] if watched else [2])
    assert not watched or seen[0] > 0  # the norm has run
