"""The comparison: what of ours fails its check gets no time, a peer that misses the rule is shown as such,
any pair can be compared.

Sizes are small; times are never asserted. What the checks find is tested in test_checks.py.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compare as command
import models
from benchmarks import peers
from benchmarks.level2 import PROBLEMS
from inline_kernels.bench import charts, checks, compare, timing
from test_checks import DROPOUT, MIN_ADD, POOL, small

ROW = (
    "problem number variant peer auto device dtype phase inputs shape ok reason median_ms low_ms high_ms runs call_ms host_us memory_mb "
    "speedup_vs_eager quantity case error_norm error_max eager_error_norm eager_error_max error_vs_eager bytes floor_ms plan seed"
)


pytestmark = pytest.mark.usefixtures("few_rounds")


def test_what_fails_gets_no_time():
    wrong = small(MIN_ADD, lambda self, x, right: right(x) + 1)
    eager, ours = compare.compare(wrong, device="cpu", variants=["eager", "epilogue"], seed=1)
    assert eager["ok"] and eager["median_ms"] > 0 and eager["speedup_vs_eager"] == 1
    assert ours["ok"] is False and "output" in ours["reason"] and ours["auto"]
    assert ours["median_ms"] is None and ours["call_ms"] is None and ours["speedup_vs_eager"] is None
    text = charts.table([eager, ours])
    assert (
        "epilogue     fails its check" in text
        and "as fast as" not in text
        and max(map(len, text.splitlines())) < 230
    )


def test_a_peer_that_cannot_run_is_a_row(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler\nand so on")

    monkeypatch.setattr(torch, "compile", broken)
    peer = compare.compare(small(POOL), device="cpu", variants=["eager", "compile"], seed=1)[1]
    assert (
        peer["ok"] is None
        and peer["reason"] == "raised RuntimeError: no compiler"
        and peer["median_ms"] is None
    )


def test_a_peer_says_why_it_is_not_there():
    options = dict(device="cpu", variants=["cudnn"], peers=peers.PEERS[MIN_ADD], seed=1)
    (row,) = compare.compare(small(MIN_ADD), **options)
    assert row["ok"] is None and row["reason"] == "raised RuntimeError: cuDNN needs a GPU"


class Place:
    """A tensor of a stand-in for cuDNN's graph; `value(given)`: what it is of those that are given."""

    def __init__(self, value=None, size=None, strides=None):
        self.is_given = value is None
        self.value, self.size, self.strides = value or (lambda given: given[self]), size, strides
        self.get_dim, self.set_output, self.set_data_type = lambda: size, lambda _: None, lambda _: None

    def set_dim(self, size):
        self.size = size

    def set_stride(self, strides):
        self.strides = strides


class CudnnStandIn:
    """cuDNN's graph by PyTorch's operations, of tensors that lie as was said."""

    data_type, heur_mode = types.SimpleNamespace(FLOAT=0), types.SimpleNamespace(A=0, FALLBACK=1)
    NAMES = ("add", "sub", "mul", "div", "minimum", "maximum", "relu", "sigmoid", "tanh")
    OPERATIONS = {name.removesuffix("imum"): getattr(torch, name) for name in NAMES}
    OPERATIONS |= {
        "gelu": F.gelu,
        "softplus": F.softplus,
        "leaky_relu": F.leaky_relu,
        "gelu_approx_tanh": None,
    }

    def pygraph(self, **_):
        return self

    def __getattr__(self, name):
        operation = self.OPERATIONS[name]

        def call(*operands):
            of = lambda given: [each.value(given) if isinstance(each, Place) else each for each in operands]  # noqa: E731
            return Place(lambda given: operation(*of(given)))

        return call

    def tensor(self, dim, stride, data_type):
        return Place(None, dim, stride)

    def conv_fprop(self, image, weight, padding, stride, dilation):
        convolve, how = (F.conv2d if len(stride) == 2 else F.conv3d), (None, stride, padding, dilation)
        return Place(lambda given: convolve(image.value(given), weight.value(given), *how))

    def build(self, _):
        pass

    def get_workspace_size(self):
        return 0

    def execute(self, given, workspace, handle):
        for place, t in given.items():
            steps = zip(t.shape, t.stride(), place.strides)
            assert [*t.shape] == [*place.size] and all(ours == said for size, ours, said in steps if size > 1)
        (y,) = (place for place in given if not place.is_given)
        given[y].copy_(y.value(given))


@pytest.mark.parametrize("number", [1, 4, 7, 31, 47, 48, 54, 57, 69, 71, 87, 90])
def test_cudnns_graph_of_a_pointwise_problem(number):
    problem = PROBLEMS[number]
    model, x = problem.small_model(), checks.channels_last(torch.randn(problem.small_input_shape))
    compare.randomize(model)
    with torch.no_grad():
        graph = peers._Graph(CudnnStandIn(), None, torch.fx.symbolic_trace(model), x)
        torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("number", [6, 24, 85])
def test_what_cudnns_graph_has_not(number):
    traced = torch.fx.symbolic_trace(PROBLEMS[number].small_model())
    with pytest.raises(RuntimeError, match="none of this graph's operations"):
        [peers._written(traced, node) for node in traced.graph.nodes if node.op.startswith("call_")]


class Rounded(nn.Module):
    """A peer that rounds its input as TF32 does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model((x.view(torch.int32) & ~0x1FFF).view(torch.float32))

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)


def test_a_less_exact_peer_is_shown_with_its_time_and_its_error():
    names = ["eager", "rounded", "epilogue"]
    rows = compare.compare(small(POOL), device="cpu", variants=names, peers={"rounded": Rounded}, seed=1)
    eager, rounded, ours = rows
    assert (
        rounded["ok"] is False
        and rounded["peer"]
        and rounded["median_ms"] > 0
        and rounded["error_vs_eager"] > 100
    )
    eager["call_ms"], rounded["call_ms"], ours["call_ms"] = 4.0, 2.0, 1.0
    assert [row["variant"] for row in charts.standing(rows)] == ["eager", "eager", "rounded", "epilogue"]
    (text,) = charts.factors(rows)
    assert (
        "4.00 × as fast as eager, the best peer that keeps the rule" in text
        and "2.00 × as fast as rounded" in text
    )
    line = next(line for line in charts.table(rows).splitlines() if line.strip().startswith("rounded"))
    assert f"{rounded['error_vs_eager']:,.0f}  less exact than the rule asks: output, " in line


def test_the_table_says_of_what_an_error_is():
    """One number for each, its error as a multiple of eager's: two modules that are alike may be nearest to their limits in different results."""
    rows = compare.compare(small(POOL), device="cpu", phase="train", variants=["eager", "epilogue"], seed=1)
    eager, ours = (charts._line(row, rows[0], on_gpu=False) for row in rows)
    assert f"{rows[1]['error_vs_eager']:.2f}  {rows[1]['quantity']}, {rows[1]['case']}" in ours
    assert eager.endswith(f"{rows[0]['low_ms']:.3g}–{rows[0]['high_ms']:.3g}"), (
        "others' errors are multiples of its own"
    )
    assert {eager.strip(), ours.strip()} <= {line.strip() for line in charts.table(rows).splitlines()}


def test_a_constant_output_proves_nothing_of_a_peer():
    """On the default output, one value whatever the operands are, a peer passes that rounds them; the
    gradients of ties tell."""
    contest = compare.contest_of(small(DROPOUT), peers={"rounded": Rounded})
    check = compare.check(contest, "rounded", phase="forward", seed=1)
    assert not check.ok and all("ties, training" in text and "gradient" in text for text in check.failures), (
        str(check)
    )
    assert any(error.case.startswith("random parameters") for error in check.errors)


def test_a_peer_is_judged_on_the_mean_of_draws():
    made = []

    class Unlucky(Rounded):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

        def forward(self, x):
            return self.model(x) * (1 + 1e-6 * (self is made[0]))  # in one draw of several

    result = compare.check(
        compare.contest_of(small(MIN_ADD), peers={"unlucky": Unlucky}), "unlucky", seed=1, phase="forward"
    )
    assert result.ok and "mean of" in result.errors[0].case and len(made) >= checks.DRAWS, str(result)


def test_peers_lie_in_memory_as_they_are_said_to():
    model = models.PROBLEMS[MIN_ADD].Model(4, 8, 3, 0.5, (8, 1, 1), 2.0)
    peer = compare.Peer(lambda model: model, channels_last=True).contestant(model)
    call = timing.Call.of(peer, [torch.rand(2, 4, 9, 9)], "train", torch.rand(2, 8, 7, 7))
    tensors = call.inputs[0], call.g, peer.module.conv.weight
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    assert model.conv.weight.is_contiguous() and not any(t.is_contiguous() for t in tensors)
    assert list(call()[1]) == [name for name, _ in model.named_parameters()]

    before = torch.backends.cudnn.allow_tf32
    with compare.Peer(lambda model: model, tf32=False).contestant(model).settings():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.parametrize("compiled, runs", [(Rounded, True), (lambda model: model, False)])
def test_compile_without_tf32_runs_where_another_peer_misses(compiled, runs, monkeypatch):
    peers = {"compile": compare.Peer(compiled), "compile-fp32": compare.Peer(lambda model: model)}
    contest = compare.contest_of(small(POOL), peers=peers)
    rows = compare._rows(contest, "forward", ["eager", "compile", "compile-fp32", "epilogue"], False, 1, None)
    assert [row["variant"] for row in rows] == ["eager", "compile", *["compile-fp32"] * runs, "epilogue"]


def test_special_cases_are_timed_where_there_is_a_backward():
    for phase, expected in (("forward_grad", ["default"] * 2), ("train", ["default"] * 2 + ["all ties"] * 2)):
        rows = compare.compare(
            small(DROPOUT), device="cpu", phase=phase, variants=["eager", "epilogue"], seed=1
        )
        assert [row["inputs"] for row in rows] == expected and all(row["median_ms"] for row in rows)
    assert "train (all ties)" in charts.table(rows)


# --------------------------------------------------------------------------------------------------- any pair


class Gate(nn.Module):
    """Two inputs, one of them integers; no image."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(6, 5), nn.Embedding(4, 5)

    def forward(self, x, rows):
        return torch.relu(self.linear(x)) * self.table(rows)


class FasterGate(Gate):
    def forward(self, x, rows):
        return torch.addmm(self.linear.bias, x, self.linear.weight.t()).relu() * self.table.weight[rows]


class WrongGate(Gate):
    def forward(self, x, rows):
        return torch.relu(x @ self.linear.weight.t()) * self.table(rows)


class PackedGate(FasterGate):
    """Takes its weight when it is first called."""

    def forward(self, x, rows):
        weight = vars(self).setdefault("packed", self.linear.weight.detach().clone())
        return torch.relu(x @ weight.t() + self.linear.bias + 0 * self.linear.weight.sum()) * self.table(rows)


def gate_inputs():
    return [torch.randn(8, 6), torch.randint(4, (8,))]


@pytest.mark.parametrize("phase", compare.PHASES)
def test_any_pair(phase):
    reference, candidate = Gate(), FasterGate()
    before = [p.clone() for p in (*reference.parameters(), *candidate.parameters())]
    options = dict(device="cpu", phases=[phase], variants=["eager", "candidate"], seed=1)
    eager, ours = compare.compare_pair(reference, candidate, gate_inputs, **options)
    assert eager["ok"] and ours["ok"] and ours["median_ms"] > 0, ours["reason"]
    assert set(ours) == set(ROW.split()) and ours["problem"] == "FasterGate" and ours["auto"]
    assert ours["bytes"] == 8 * (6 * 4 + 8 + 5 * 4)
    assert all(map(torch.equal, before, (*reference.parameters(), *candidate.parameters())))
    for wrong, complaint in ((WrongGate(), "output: error"), (PackedGate(), "does not follow")):
        (row,) = compare.compare_pair(reference, wrong, gate_inputs, **options | {"variants": ["candidate"]})
        assert row["ok"] is False and complaint in row["reason"] and row["median_ms"] is None


@pytest.mark.parametrize("ticks_of_calls, in_a_row", [(5, 5), (1, 1)])
def test_short_calls_are_timed_in_a_row(ticks_of_calls, in_a_row, monkeypatch):
    """None pays for what another contestant left in the caches; long ones are not repeated."""
    made, ticks = [], itertools.count()
    monkeypatch.setattr(timing, "clock", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(timing, "IN_A_ROW", ticks_of_calls)
    calls = {name: functools.partial(made.append, name) for name in ("a", "b")}
    timing._cpu_rounds(calls, 2)
    assert made == (["a"] * in_a_row + ["b"] * in_a_row) * 2


def test_a_pair_is_shown_as_problems_are(tmp_path):
    options = dict(device="cpu", variants=["eager", "candidate"], name="gate", seed=1)
    rows = compare.compare_pair(Gate(), FasterGate(), gate_inputs, **options)
    assert [row["phase"] for row in rows] == ["forward_grad"] * 2 + ["train"] * 2
    assert charts.table(rows).startswith("gate: forward_grad, float32, 8×6, cpu")
    charts.plot(rows).savefig(tmp_path / "plot.png")


def test_a_pair_without_parameters():
    class Square(nn.Module):
        def forward(self, x):
            return x * x

    options = dict(
        device="cpu", phases=["forward", "forward_grad", "train_dx"], variants=["candidate"], seed=1
    )
    rows = compare.compare_pair(Square(), lambda x: x.pow(2), lambda: [torch.rand(3, 4)], **options)
    assert all(row["ok"] for row in rows), [row["reason"] for row in rows]
    rows = compare.compare_pair(Square(), nn.Identity(), lambda: [torch.rand(3, 4)], **options)
    assert not any(row["ok"] for row in rows)


def test_a_pair_with_statistics_of_its_batch():
    def normalised():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    options = dict(device="cpu", phases=["train"], variants=["candidate"], seed=1)
    (row,) = compare.compare_pair(normalised(), normalised(), lambda: [torch.randn(20, 3, 6, 6)], **options)
    assert row["ok"], row["reason"]


def other_shape():
    gate = Gate()
    gate.linear = nn.Linear(6, 7)
    return gate


@pytest.mark.parametrize(
    "candidate, message",
    [
        (nn.Linear(6, 5), "linear.weight is missing.*; bias is no parameter of the reference"),
        (lambda x, rows: x, "expected a torch.nn.Module with the parameters linear.weight"),
        (other_shape(), r"linear.weight has the shape \(7, 6\), expected \(5, 6\)"),
    ],
)
def test_a_pair_whose_parameters_do_not_match(candidate, message):
    with pytest.raises(ValueError, match=message):
        compare.compare_pair(Gate(), candidate, gate_inputs, device="cpu")


class Both(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    "reference, message",
    [
        (torch.relu, "expected a module as the reference, got <built-in"),
        (Both(), "return one tensor, got a tuple"),
    ],
)
def test_a_pair_that_cannot_be_compared(reference, message):
    with pytest.raises(TypeError, match=message):
        compare.compare_pair(reference, nn.Identity(), lambda: [torch.rand(3, 4)], device="cpu")


def test_inputs_are_drawn_by_a_function():
    with pytest.raises(TypeError, match="expected make_inputs to be a function, got a Tensor"):
        compare.compare_pair(nn.Identity(), nn.Identity(), torch.rand(3, 4), device="cpu")


@pytest.mark.parametrize("name", ["checks", "honesty", "compare"])
def test_imports_no_model_and_no_problem(name):
    text = (Path(compare.__file__).parent / f"{name}.py").read_text()
    top = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top for alias in node.names} | {
        getattr(node, "module", "") for node in top
    }
    assert not names & {"models", "problems", "twin", "operators", "library", "fused"}
    assert text.count("import models") == (name == "compare")


# ---------------------------------------------------------------------------------------------------- command


def test_command(tmp_path, monkeypatch, capsys):
    """The command writes a record that is valid JSON with every promised field, plots, and says by its status
    what failed."""
    problems = {MIN_ADD: small(MIN_ADD), DROPOUT: small(DROPOUT)}
    monkeypatch.setattr(compare, "variants_of", lambda problem, device, peers: ("eager", "epilogue"))
    monkeypatch.setattr(compare, "registry", lambda: problems)
    monkeypatch.setattr(models, "PROBLEMS", problems)
    path = tmp_path / "new" / "times.json"
    arguments = "--device cpu --batch 3 --phase forward_grad,train".split()
    assert command.main([*arguments, "--json", str(path), "--plots", str(tmp_path)]) == 0
    item = json.loads(path.read_text(), parse_constant=pytest.fail)
    machine = "date command gpu driver cpu threads torch cuda python allow_tf32 commit dirty sources rows"
    assert set(machine.split()) == set(item) and all(set(row) == set(ROW.split()) for row in item["rows"])
    assert [row["shape"][0] for row in item["rows"]] == [3] * 10  # two of them with ties
    assert (tmp_path / "forward_grad.png").stat().st_size and (tmp_path / "train.png").stat().st_size
    assert "epilogue" in capsys.readouterr().out

    problems[MIN_ADD] = small(MIN_ADD, lambda self, x, right: right(x) + 1)
    assert command.main([MIN_ADD, "--device", "cpu"]) == 1
    with pytest.raises(SystemExit, match="2"):
        command.main(["nothing"])


def test_the_command_shows_eager_and_ours_first(tmp_path, monkeypatch, capsys):
    """Checked on one sample, timed with the whole batch; then all of it, unless it is to be quick. A table and a picture each time."""
    monkeypatch.setattr(compare, "variants_of", lambda problem, device, peers: ("eager", "peer", "epilogue"))
    monkeypatch.setattr(command, "_others", lambda name, device: {"peer": lambda model: model})
    problems = {MIN_ADD: small(MIN_ADD)}
    monkeypatch.setattr(compare, "registry", lambda: problems)
    monkeypatch.setattr(models, "PROBLEMS", problems)
    told, drawn, check = [], [], compare.check

    def told_check(contest, variant, **options):
        told.append((variant, len(contest.inputs()[0])))
        return check(contest, variant, **options)

    monkeypatch.setattr(compare, "check", told_check)
    monkeypatch.setattr(command, "plot", lambda rows: drawn.append([(row["variant"], row["shape"][0]) for row in rows]) or charts.plot(rows))  # fmt: skip
    arguments = ["--device", "cpu", "--batch", "3", "--plots", str(tmp_path)]
    assert command.main([*arguments, "--quick"]) == 0
    assert told == [("eager", 1), ("epilogue", 1)] and drawn == [[("eager", 3), ("epilogue", 3)]]
    assert command.main(arguments) == 0
    assert told[2:] == [("eager", 1), ("epilogue", 1), ("eager", 3), ("peer", 3), ("epilogue", 3)]
    assert drawn[1:] == [[("eager", 3), ("epilogue", 3)], [("eager", 3), ("peer", 3), ("epilogue", 3)]]
    assert capsys.readouterr().out.count("plot: ") == 3


def test_the_time_to_the_end_counts_down(monkeypatch):
    """By what steps took for what was expected of them; a turn may leave steps out, and a step may take longer than expected."""
    now = [0.0]
    monkeypatch.setattr(command, "GUESSED", 0.001)
    monkeypatch.setattr(command, "clock", types.SimpleNamespace(monotonic=lambda: now[0]))
    with command.Countdown([[10.0, 20.0], [10.0, 10.0]]) as countdown:
        left = [countdown.left(now[0])]
        for text, seconds in (("a", 5.0), ("b", 5.0), (None, 0.0), ("c", 4.0)):
            countdown.step(text) if text else countdown.turn()
            left.append(countdown.left(now[0]))
            now[0] += seconds
            left.append(countdown.left(now[0]))
        now[0] += 100.0
        assert countdown.left(now[0]) == left[-1], "the step after it is still to come"
    # 50 s expected; 10 s took 5; 20 s took 5, so 30 s took 10
    expected = [50.0, 50.0, 45.0, 20.0, 15.0, 20 / 3, 20 / 3, 20 / 3, 20 / 3 - 10 / 3]
    assert left == pytest.approx(expected, rel=1e-3)


CANDIDATE = """
import os, torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features))
    def forward(self, x):
        return torch.relu(x * self.scale)

def get_inputs():
    return [torch.rand(64, 32)]

def get_init_inputs():
    return [32]
"""
RIGHT = """
class ModelNew(Model):
    def forward(self, x):
        return (x * self.scale).clamp_min(0)
"""


def candidate(file: str, folder: Path) -> list[str]:
    """The command's arguments for a file with that text."""
    (folder / "mine.py").write_text(file)
    return ["--candidate", str(folder / "mine.py"), "--device", "cpu", "--phase", "forward"]


@pytest.mark.parametrize(
    "file, status, told",
    [
        (CANDIDATE + RIGHT, 0, "forward: right and honest; "),
        (CANDIDATE + "os.kill(os.getpid(), 9)\n", 9, "SIGKILL"),
    ],
    ids=["right", "ends its process"],
)
def test_a_candidate_in_a_file(file, status, told, tmp_path):
    command_line = [sys.executable, str(Path(command.__file__)), *candidate(file, tmp_path)]
    own = {"TORCHDYNAMO_DISABLE": "1"}  # below torch.compile compiles
    done = subprocess.run(
        command_line, capture_output=True, text=True, timeout=300, env={**os.environ, **own}
    )
    assert (done.returncode, told in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr
    assert ("fast_1" in done.stdout) == (status == 0)


@pytest.mark.parametrize(
    "file, status, told",
    [
        (CANDIDATE, 0, "forward: right and honest; "),  # fused; without a convolution that is eager's
        (CANDIDATE + RIGHT.replace("x * self", "1.001 * x * self"), 1, "forward: fails: "),
    ],
    ids=["without ModelNew", "wrong"],
)
def test_what_is_said_of_a_candidate(file, status, told, tmp_path, capsys):
    """In this process, as in the command's child."""
    assert command.main([*candidate(file, tmp_path), "--here"]) == status
    found = capsys.readouterr().out
    assert told in found and "fast_1" in found


def test_a_candidate_that_lacks_a_name(tmp_path):
    with pytest.raises(ValueError, match="found no get_inputs"):
        command.main([*candidate(CANDIDATE.replace("def get_inputs", "def inputs"), tmp_path), "--here"])


@pytest.mark.gpu
def test_floor_of_a_known_gpu():
    floor = compare.floor_of(compare.contest_of(POOL, device="cuda", batch_size=2), 10**9, 10**9)
    assert (floor is None) == (torch.cuda.get_device_name() not in compare.GPUS)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", compare.PHASES)
@pytest.mark.parametrize("name", models.PROBLEMS)
def test_variants_pass_on_a_gpu(name, phase):
    for variant in models.PROBLEMS[name].variants_on("cuda"):
        result = compare.check(name, variant, device="cuda", phase=phase, batch_size=4)
        assert result.ok, str(result)
