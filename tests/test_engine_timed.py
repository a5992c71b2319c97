"""`fuse(model, tune=True)`: what is timed, what of it is kept, when nothing is, and that timing leaves nothing behind.

But for tests of kernels, the graph evaluated by torch stands for kernels, and a made-up clock says which candidate is fastest."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import inline_loader
import numerics
from engine_stand_in import stand_in  # noqa: F401
from fused_pairs import Dropping, Pointwise, Residual, results
from inline_kernels.engine import chain, choice, direct, timed
from inline_kernels.engine.edited import Edit
from inline_kernels.engine.fuse import fuse, structure_of
from inline_kernels.loader import toolchain

EAGER, LOAD = {"eager": 1.0, "load": 2.0}, {"load": 1.0, "eager": 2.0}


@pytest.fixture(autouse=True)
def folder(request, tmp_path, monkeypatch) -> Path:
    """The loader's, for this test alone; in tests of kernels that of all."""
    inline_loader.forget(), choice.able.cache_clear(), timed._known.clear()
    if not request.node.originalname.startswith("test_kernels"):
        request.getfixturevalue("stand_in")
        monkeypatch.setenv("INLINE_LOADER_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    inline_loader.forget(), choice.able.cache_clear(), timed._known.clear()


@pytest.fixture
def clock(monkeypatch):
    """clock.says: the times that candidates take; clock.asked: which were timed, timing by timing. Each of them runs."""
    made = SimpleNamespace(says=EAGER, asked=[])

    def least(trials, on_gpu):
        made.asked.append([*trials])
        for run in trials.values():
            run()
        return dict(made.says)

    monkeypatch.setattr(timed, "least", least)
    return made


def another_process() -> None:
    timed._known.clear()
    inline_loader.forget()


def ways(fast: nn.Module, x: torch.Tensor) -> list[str]:
    return [each.runs for each in fast.plan(x)]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("timed_*"))


# ------------------------------------------------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize("says", [EAGER, LOAD], ids=lambda says: min(says, key=says.get))
@pytest.mark.parametrize("training", [False, True])
def test_the_fastest_runs(says, training, clock, monkeypatch):
    clock.says = says
    model = Residual().train(training)
    fast, x = fuse(copy.deepcopy(model), tune=True), torch.randn(2, 3, 6, 5)
    assert ways(fast, x) == ["load"] * 4 and "not timed yet; the graph" in str(fast.plan(x))
    for _ in range(2):
        ours, theirs = results(fast, x), results(model, x)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4)
    assert clock.asked == [["load", "eager"]] * 3, "once for two that are equal"
    assert ways(fast, x) == [min(says, key=says.get)] * 4
    order = "eager 1 ms, load 2 ms" if says is EAGER else "load 1 ms, eager 2 ms"
    assert all(each.reason.startswith(f"timed: {order}") for each in fast.plan(x))
    calls = []
    monkeypatch.setattr(
        nn.Conv2d,
        "forward",
        lambda self, x: calls.append(self) or self._conv_forward(x, self.weight, self.bias),
    )
    assert "replaced" in str(fast.plan(x)), "somebody's forward is looked at first"


def test_what_nobody_wants_timed_is_not(clock, folder):
    fast, x = fuse(Pointwise()), torch.randn(2, 3, 5, 7)
    fast(x)
    assert not clock.asked and "timed" not in str(fast.plan(x)) and not kept(folder)


def test_copies_are_tuned(clock):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    fast(x)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        again(x)
        assert ways(again, x) == ["eager"] and len(clock.asked) == 1


def test_an_edited_formula_is_not_timed(clock):
    """Eager computes another."""
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    fast._renew({"conv": Edit("load", False, "a text", "another")})
    (part,) = structure_of(fast, (x,), {}).parts
    assert not part.able and [*part.by_schedule] == ["load"]


def test_a_choice_is_for_one_kind_of_call(clock):
    """Sizes, strides, dtype, gradients of x and of parameters, threads, TF32 and whose they are."""
    model = Pointwise()
    fast, x = fuse(model, tune=True), torch.randn(2, 3, 8, 8)
    last = x.to(memory_format=torch.channels_last)
    calls = [
        lambda: fast(x),
        lambda: fast(x[:1]),
        lambda: fast(last),
        lambda: fast(x.clone().requires_grad_()),
        torch.no_grad()(lambda: fast(x)),
        torch.inference_mode()(lambda: fast(x[:1])),
        torch.autocast("cpu", torch.bfloat16)(lambda: fast(x)),
        lambda: fast.conv.requires_grad_(False) and fast(x),
        lambda: fast.double()(x.double()),
    ]
    for count, call in enumerate(calls, 1):
        call()
        assert len(clock.asked) == count, count
        call(), another_process(), call()
        assert len(clock.asked) == count, "what is kept serves"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        calls[-1]()
        assert len(clock.asked) == len(calls) + 1
    finally:
        torch.set_num_threads(threads)
    calls[-1]()
    assert len(clock.asked) == len(calls) + 1


def test_plan_says_what_was_timed_for_gradients_of_x(clock):
    """Of an inner segment it doesn't know whether its input has gradients."""
    fast, x = fuse(Residual(), tune=True), torch.randn(2, 3, 6, 5)
    fast(x)
    assert ways(fast, x) == ["eager"] * 4
    assert ways(fast, x.clone().requires_grad_())[0] == "load", "not timed yet"
    with torch.no_grad():
        assert ways(fast, x) == ["load"] * 4


# -------------------------------------------------------------------------------------------------------------- what is kept


def test_the_file(clock, folder):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    fast(x)
    (path,) = kept(folder)
    found = json.loads(path.read_text())
    assert found["ms"] == EAGER and folder.stat().st_mode & 0o077 == 0
    assert found["of"]["tensors"][0] == ["torch.float32", [2, 3, 5, 7], [105, 35, 7, 1]]
    assert found["of"]["device"] == toolchain.cpu_name() and torch.__version__ in found["of"]["versions"]
    assert found["of"]["sources"].keys() == {"load", "eager"}
    inline_loader.clear_cache()
    assert not kept(folder)


@pytest.mark.parametrize("what", ["driver", "torch", "cudnn", "device", "source"])
def test_of_another_machine_or_source(what, clock, monkeypatch):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    request = {"name": "a", "source": "EXPORT void forward(Out<float> y) {}", "device": "cpu", "defines": {}}
    monkeypatch.setattr("inline_kernels.engine.structure.inline_loader.load_all", lambda requests: None)
    monkeypatch.setattr("inline_kernels.engine.schedule.requests", lambda *_: [request])
    choice.able.cache_clear()
    fast(x)
    another_process()
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif what == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 99)
    elif what == "device":
        monkeypatch.setattr(toolchain, "cpu_name", lambda: "another")
    elif what == "source":
        request["source"] += "  // edited"
    else:
        monkeypatch.setattr(toolchain, "driver", lambda device: ["another"])
    fast(x)
    assert len(clock.asked) == 2
    another_process()
    fast(x)
    assert len(clock.asked) == 2


BROKEN = {
    "half": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "no object": lambda text: "[]",
    "no times": lambda text: json.dumps(json.loads(text) | {"ms": {}}),
    "no numbers": lambda text: json.dumps(json.loads(text) | {"ms": {"load": "1", "eager": 2.0}}),
    "NaN": lambda text: json.dumps(json.loads(text) | {"ms": {"load": float("nan"), "eager": 2.0}}),
    "a negative time": lambda text: json.dumps(json.loads(text) | {"ms": {"load": -1.0, "eager": 2.0}}),
    "a candidate that isn't one": lambda text: json.dumps(json.loads(text) | {"ms": {"direct": 0.1, **LOAD}}),
    "another's": lambda text: json.dumps(json.loads(text) | {"of": {"segment": "another"}}),
    "deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_not_right_is_written_anew(how, clock, folder):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    fast(x)
    (path,) = kept(folder)
    whole = path.read_text()
    path.write_text(BROKEN[how](whole))
    another_process()
    assert "not timed yet" in str(fast.plan(x))
    fast(x)
    assert len(clock.asked) == 2 and ways(fast, x) == ["eager"]
    assert path.read_text() == whole and kept(folder) == [path]


@pytest.mark.parametrize("how", ["a folder stands there", "a full disk", "no folder"])
def test_times_that_can_t_be_written_are_the_process_s(how, clock, folder, monkeypatch):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    if how == "no folder":
        folder.write_text("a file")
    elif how == "a full disk":
        write = Path.write_text

        def half(self, text, **keywords):
            write(self, text[: len(text) // 2], **keywords)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", half)
    else:
        fast(x)
        (path,) = kept(folder)
        path.unlink(), path.mkdir(), another_process(), clock.asked.clear()
    for _ in range(2):
        fast(x), inline_loader.forget()
    assert len(clock.asked) == 1 and ways(fast, x) == ["eager"]
    assert not [path for path in kept(folder) if path.suffix == ".json" and path.is_file()], "half a file"


def test_threads_time_once(clock):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    start = threading.Barrier(4)

    def call():
        start.wait(), fast(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    [each.start() for each in threads], [each.join() for each in threads]
    assert len(clock.asked) == 1


# ---------------------------------------------------------------------------------------------------------- when nothing is


def test_deterministic_mode(clock):
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    for count, mode in enumerate([True, False, True, False]):
        torch.use_deterministic_algorithms(mode)
        try:
            fast(x)
            assert ways(fast, x) == ["load" if mode else "eager"]
            assert ("deterministic mode takes no timed choice" in str(fast.plan(x))) is mode
            (situation, *_) = fast._kept[0].parts[0].situations
            assert ("_run_eager" in str(situation.run)) is not mode, "the call itself"
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(clock.asked) == min(count, 1)


def test_nothing_is_timed_where_something_watches(clock):
    fast, x = fuse(Pointwise().eval(), tune=True), torch.randn(2, 3, 5, 7)
    expected = fast._unfused.forward(fast, x)
    for run in (
        torch.compile(fast, backend="eager"),
        make_fx(fast),
        torch.vmap(lambda each: fast(each[None])[0]),
    ):
        found = run(x)
        found = found(x) if isinstance(found, nn.Module) else found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.func.jvp(fast, (x,), (x,)), torch.func.grad(lambda x: fast(x).sum())(x)
    assert not clock.asked
    fast(x)
    assert clock.asked, "and then it is"
    graph = make_fx(fast)(x).graph
    assert any("fused_load" in str(node.target) for node in graph.nodes), "rules decide"


def test_nothing_is_timed_under_capture(clock, monkeypatch):
    """Nor is what ran then kept."""
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7)
    monkeypatch.setattr(timed.support, "capturing", lambda: True)
    fast(x), fast(x)
    assert not clock.asked and not fast._kept[0].parts[0].situations
    monkeypatch.setattr(timed.support, "capturing", lambda: False)
    fast(x)
    assert len(clock.asked) == 1 and ways(fast, x) == ["eager"]


def test_nothing_is_timed_in_backward(clock):
    """Where a checkpoint computes again, by rules if it must."""
    fast, x = fuse(Pointwise(), tune=True), torch.randn(2, 3, 5, 7, requires_grad=True)
    checkpoint(fast, x, use_reentrant=True).sum().backward()
    assert len(clock.asked) == 1, "forward, without gradients"
    expected = results(fast, x)["x"]
    assert len(clock.asked) == 2
    (found,) = torch.autograd.grad(checkpoint(fast, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------- what timing leaves behind


def test_timing_leaves_nothing_behind(clock, monkeypatch):
    monkeypatch.setattr(chain, "_runs", lambda *_: [])  # a chain saves less than the parts that are timed
    model = Residual().train()
    fast, x = fuse(copy.deepcopy(model), tune=True), torch.randn(2, 3, 6, 5, requires_grad=True)
    seen, packed = [], []
    for p in fast.parameters():
        p.register_hook(lambda g: seen.append(g))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    versions = [t._version for t in (x, *fast.parameters())]
    clock.says = LOAD
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = fast(x)
    assert len(clock.asked) == 3 and not seen and all(p.grad is None for p in (x, *fast.parameters()))
    assert versions == [t._version for t in (x, *fast.parameters())]
    count = len(packed)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        fast(x)
    assert len(packed) == 2 * count, "of the user's own pass"
    expected = model(x)
    model(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(fast.get_buffer(name), buffer, rtol=1e-4, atol=1e-4)


def test_timing_draws_no_random_number(clock):
    fast, x = fuse(Dropping(), tune=True), torch.randn(2, 3, 7, 6)
    torch.manual_seed(5)
    expected = fast._unfused.forward(fast, x), torch.rand(3)
    torch.manual_seed(5)
    found = fast(x), torch.rand(3)
    assert clock.asked and torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])


def test_checkpoints_of_a_first_call(clock):
    """Whose own hooks count what is saved."""
    fast, x = fuse(Residual(), tune=True), torch.randn(2, 3, 6, 5, requires_grad=True)
    checkpoint(fast, x, use_reentrant=False).sum().backward()
    assert clock.asked and x.grad is not None


def test_a_model_is_free_again(clock):
    fast = fuse(Pointwise(), tune=True)
    fast(torch.randn(2, 3, 5, 7))
    known = weakref.ref(fast)
    del fast
    assert known() is None


# --------------------------------------------------------------------------------------------------------- what can be timed


def test_rules_are_silent_for_candidates_alone(monkeypatch):
    def chosen(case):
        if case == "slower" and not choice.is_silent():
            raise direct.Unsupported("slower")
        return choice.is_silent()

    monkeypatch.setattr(direct, "_chosen", chosen)
    monkeypatch.setattr(direct, "_build", lambda written, *_: written)
    assert choice.able(direct).requests("slower") == [True]
    assert choice.able(direct).requests("faster") == direct.requests("faster") == [False]
    with pytest.raises(direct.Unsupported):
        direct.requests("slower")
    monkeypatch.setattr(direct, "_build", lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        choice.able(direct).requests(None)
    assert not choice.is_silent()


def test_the_least_of_alternating_rounds(monkeypatch):
    times, called = iter([9.0, 2.0, 3.0, 5.0, 4.0, 1.0]), []

    def clocked(run, on_gpu):
        run()
        return next(times)

    def without_memory():
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(timed, "_clock", clocked)
    monkeypatch.setattr(timed, "SECONDS", 0.0)
    trials = {"a": lambda: called.append("a"), "none": without_memory, "b": lambda: called.append("b")}
    assert timed.least(trials, False) == {"a": 3.0, "b": 1.0}
    assert called == ["a", "a", "b", "b", *"ababab"]


def choices_in(folder: Path, monkeypatch) -> None:
    """Builds stay where they are."""
    folder.mkdir()
    own = {"cache_folder": lambda: folder, "whole": timed.cache.whole, "replace": timed.cache.replace}
    monkeypatch.setattr(timed, "cache", SimpleNamespace(**own))


def test_kernels_are_timed_once(folder, monkeypatch):
    model = Residual().train()
    fast, x = fuse(copy.deepcopy(model), tune=True), torch.randn(2, 3, 6, 5)
    choices_in(folder, monkeypatch)
    numerics.assert_module_follows_rule(fast, model, x)
    fast(x)
    assert len(kept(folder)) >= 6, "with gradients of x, and without"
    for path in kept(folder):
        found = json.loads(path.read_text())
        assert {*found["ms"]} == {"load", "eager"} and found["of"]["sources"]["load"][0]
    another_process()
    monkeypatch.setattr(timed, "least", None)
    fast(x)
    assert all("ms" in each.reason and each.reason.startswith("timed: ") for each in fast.plan(x))


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_kernels_are_timed_on_a_gpu(training, folder, monkeypatch):
    """More than two candidates, the model's values, and nothing under capture."""
    choices_in(folder, monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.GELU()).cuda().requires_grad_(training)
    fast, x = fuse(copy.deepcopy(model), tune=True), torch.randn(16, 3, 128, 128, device="cuda")
    graph, state = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
    fuse(model)(x)  # builds what rules choose
    with torch.cuda.graph(graph):
        fast(x)
    assert not kept(folder)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    (path,) = kept(folder)
    assert len(json.loads(path.read_text())["ms"]) >= 3, path.read_text()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert str(fast.plan(x)).startswith("0: ") and "timed: " in str(fast.plan(x))
