"""What "auto" runs on a GPU: rules, fitted to a record of sizes and said by `plan`. On GPUs that are made up, and on recorded times."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from torch import nn

import models
import numerics
from benchmarks import fit, grid
from engine_stand_in import PROPERTIES
from generated import arguments_of
from inline_kernels.engine import (
    again,
    choice,
    composed,
    costs,
    direct,
    inside,
    library,
    load_plan,
    mainloops,
    precision,
    schedule,
    sinks,
    stored,
    tiling,
)
from inline_kernels.engine.capture import capture
from inline_kernels.engine.cases import Case
from inline_kernels.engine.plane_text import Last
from loading import ROOT
from numerics import DROPOUT, MIN_ADD, POOL
from test_emulated import Emulated, folder, guarded, library_of  # noqa: F401
from test_kernels_compile import H200

fused_names = pytest.mark.parametrize(
    "name", [name for name, problem in models.PROBLEMS.items() if "fused" in problem.variants]
)


def _rules() -> dict:
    return {
        (name, phase): choice.rule(name, phase) for name in models.PROBLEMS for phase in ("forward", "train")
    }


IMAGE, FILTERS = (2, 64, 30, 20), (128, 64, 3, 5)
RULE = ("channels in", 64, ("taps", 9, "fused", ("taps", 49, "epilogue", "fused")), "eager")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name, train=…, forward=…) makes the CPU's tensors those of an H200, and gives a problem its rules."""

    def make_up(name, **rules):
        monkeypatch.setattr(library, "device_type", lambda x: "cuda")
        monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
        own = vars(composed)["known"]()
        monkeypatch.setattr(choice, "known", lambda: {**own, name: {**own[name], "faster": rules}})

    return make_up


@pytest.mark.parametrize("image, filters, found", [
    (IMAGE, FILTERS, ("epilogue", "at most 64 channels in, more than 9 taps, at most 49 taps")),
    (IMAGE, (128, 64, 3, 3), ("fused", "at most 64 channels in, at most 9 taps")),
    ((2, 65, 30, 20), (128, 65, 3, 5), ("eager", "more than 64 channels in")),
], ids=str)  # fmt: skip
def test_a_rule_says_what_leads_to_a_variant(image, filters, found):
    assert choice.fastest(RULE, image, filters, 4) == found
    assert choice.fastest("fused", image, filters, 4) == ("fused", "")


def test_properties():
    """By hand: 2 samples of 28 × 16 positions."""
    found = {name: of(IMAGE, FILTERS, 2) for name, of in choice.PROPERTIES.items()}
    assert found == {
        "channels in": 64, "channels out": 128, "taps": 15, "bytes a value": 2, "columns": 16,
        "positions": 896, "results": 896 * 128, "products": 896 * 128 * 64 * 15,
    }  # fmt: skip


@pytest.mark.parametrize("name, scale", [
    ("H200", (1, 1, 1)),
    ("H100", (1, 1, 0.697)),
    ("H100 PCIe", (0.886, 0.766, 0.424)),
    ("an older torch", (1, 0.5, 0.707)),
    ("no memory clock", (0.5, 0.5, 0.187)),
    ("of no table", (1.313, 1.313, 0.312)),
    ("too old", (0.712, 0.712, 0.395)),
])  # fmt: skip
def test_scale_of_a_gpu(name, scale, monkeypatch):
    """Clock rate, multiprocessors times that, memory bandwidth: as torch has them, else as is usual."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: PROPERTIES[name])
    device = tiling.device_properties(0)
    assert device.scale == pytest.approx(scale, rel=2e-3)
    assert (device.scale == costs.H200) is (name == "H200")
    assert device.multiprocessors == PROPERTIES[name].multi_processor_count


def test_bounds_of_rules_are_scaled():
    """Of what there is to do; not those of shapes."""
    half = costs.Scale(0.5, 0.25, 0.5)
    image, filters = (2, 64, 30, 20), (128, 64, 3, 5)
    for name, factor in {"products": 4, "results": 2, "positions": 2, "channels in": 1, "taps": 1}.items():
        most = factor * choice.PROPERTIES[name](image, filters, 4)
        for bound, variant in ((most, "fused"), (most - 1, "eager")):
            rule = (name, bound, "fused", "eager")
            assert choice.fastest(rule, image, filters, 4, half)[0] == variant, name
            assert choice.fastest((name, most // factor, "fused", "eager"), image, filters, 4)[0] == "fused"


def test_stream_s_times_are_scaled():
    sizes = costs.Shapes((32, 256, 28, 28), (256, 256, 3, 3), 32 * 26 * 26, 2, H200)
    how = costs.Streamed(packs=False, last=True, inside=True)

    def on(*scale: float) -> costs.Shapes:
        return sizes._replace(device=H200._replace(scale=costs.Scale(*scale)))

    columns, _, time = costs.stream_tile(sizes, how)
    start = costs.STREAM_TILES[2][columns][0]
    assert costs.stream_tile(on(0.5, 0.5, 1), how) == (
        columns,
        1,
        pytest.approx(start + 2 * (time - start)),
    )
    assert "faster at such sizes" in choice.stream_loses(sizes, how)
    for scale in ((1, 0.05, 1), (1, 1, 0.05)):  # the library's products; v's way
        assert choice.stream_loses(on(*scale), how) is None


def test_plan_says_that_times_are_scaled(gpu, monkeypatch):
    model, x = sized(MIN_ADD, 3)
    products = choice.PROPERTIES["products"](x.shape, model.conv.weight.shape, 4)
    gpu(MIN_ADD, forward=["products", products, "fused", "epilogue"])
    with torch.no_grad():
        for scale, variant in ((costs.H200, "fused"), (costs.Scale(1, 0.5, 1), "epilogue")):
            monkeypatch.setattr(tiling, "device_properties", lambda index: H200._replace(scale=scale))
            plan = numerics.twin_of(model, "auto").plan(x)
            assert plan.variant == variant
            assert ("by timings of an H200, scaled to this GPU" in plan.reason) is (variant == "epilogue")


def sized(name: str, channels_in: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A problem with 32 channels out, and an input of 20 in each direction."""
    _, channels_out, side, *tail = models.PROBLEMS[name].init_inputs
    tail = [(32, *a[1:]) if isinstance(a, tuple) and a[0] == channels_out else a for a in tail]
    dimensions = len(models.PROBLEMS[name].input_shape) - 2
    return numerics.build(name, (channels_in, 32, side, *tail)), torch.rand(
        2, channels_in, *[20] * dimensions
    )


@fused_names
def test_plan_says_which_variant_was_faster(name, gpu, monkeypatch):
    model, x = sized(name, 3)
    new = numerics.twin_of(model, "auto")
    here = new.plan(x)
    gpu(name, forward=["channels in", 2, "fused", "epilogue"], train=["positions", 10, "fused", "eager"])
    monkeypatch.setattr(choice, "RECORD", "a record")
    with torch.no_grad():
        assert new.plan(x).variant == "epilogue"
        assert (
            new.plan(x)
            .reason.partition(";")[0]
            .endswith("was faster with more than 2 channels in (a record)")
        )
    assert str(new.plan(x)) == "eager: eager was faster with more than 10 positions (a record)"
    for variant in new.variants():  # asked for by name
        new.variant = variant
        assert new.plan(x) == (variant, "asked for")
    monkeypatch.undo()
    new.variant = "auto"
    assert new.plan(x) == here, "on a CPU there are no rules"


def test_rules_see_what_runs_without_them(gpu, monkeypatch):
    """What can't be fused keeps its reason, unless eager was faster; what eager must compute is not asked about."""
    model, x = sized(DROPOUT, 5)
    gpu(DROPOUT, train="fused", forward="eager")
    monkeypatch.setattr(choice, "stream_loses", lambda *_: "slower")
    new = numerics.twin_of(model, "auto")
    assert new.plan(x).variant == "epilogue" and "up to 4 channels in" in new.plan(x).reason
    with torch.no_grad():
        assert str(new.plan(x)).startswith("eager: eager was faster with any sizes")
    monkeypatch.setattr(choice, "fastest", None)
    new.conv.register_forward_hook(lambda *given: None)
    assert new.plan(x).variant == "eager"


FEW = json.loads((ROOT / "benchmarks/results/trials/few_channels.json").read_text(encoding="utf-8"))["rows"]
# Of filters of one tap the records are older than one_tap.
RECORDED = [each for each in mainloops.MAINLOOPS if each.name != "one_tap"]
MOST_FEW = 1.5  # of the fastest's time, or so many microseconds more
A_LITTLE = 8


@pytest.mark.parametrize("mode", ["tf32", "float32", "bf16"])
def test_of_few_channels_in_the_fastest_runs(mode, monkeypatch):
    """… by the record, of a convolution and relu: narrow2d or narrow3d, stream, or the library's and a pass."""
    monkeypatch.setattr(mainloops, "MAINLOOPS", RECORDED)
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(inside, "_asked", lambda *_: False)
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    for row in (each for each in FEW if each["mode"] == mode):
        nd = len(row["image"])
        # What cuDNN said there.
        least = 16 if nd == 2 else 4
        tf32 = mode == "tf32" and row["channels_in"] % least == 0
        monkeypatch.setattr(precision, "runs_tf32", lambda *_, tf32=tf32, **__: tf32)
        convolution = (nn.Conv2d, nn.Conv3d)[nd - 2]
        filters = row["channels_in"], row["channels_out"], row["filter"]
        model = nn.Sequential(convolution(*filters, padding=row["padding"]), nn.ReLU()).to(dtype)
        x = torch.empty(row["batch"], row["channels_in"], *row["image"], device="meta", dtype=dtype)
        (segment,) = capture(model, True, x.dim()).segments
        case = Case(segment, [x, model[0].weight, model[0].bias, 0], False, dtype)
        names, times = {"narrow2d": "narrow", "narrow3d": "narrow", "stream": "stream"}, []
        try:
            words = direct.describe(case)
            runs = next(kind for name, kind in names.items() if name in words)
        except direct.Unsupported:
            runs = "library"
        times = [row[kind] for kind in ("narrow", "stream", "library") if row[kind]]
        assert row[runs] <= max(MOST_FEW * min(times), min(times) + A_LITTLE), (row, runs)


SHORT = json.loads((ROOT / "benchmarks/results/trials/short_rows.json").read_text(encoding="utf-8"))["rows"]
MOST_SHORT = 1.1


@pytest.mark.parametrize("row", SHORT, ids=lambda row: f"{row['channels_in']}x{row['image']}-{row['mode']}")
def test_of_short_rows_the_fastest_runs(row, monkeypatch):
    """… by the record, of a convolution and relu, through wide, whose tiles are rows, or through stream."""
    monkeypatch.setattr(mainloops, "MAINLOOPS", RECORDED)
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(inside, "_asked", lambda *_: False)
    monkeypatch.setattr(choice, "stream_loses", lambda *_: None)  # the library's time isn't recorded
    monkeypatch.setattr(choice, "fastest", lambda *_: ("fused", ""))
    monkeypatch.setattr(choice, "inside_loses", lambda *_: False)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: not row["split"])
    dtype = torch.bfloat16 if row["mode"] == "bf16" else torch.float32
    filters = row["channels_in"], row["channels_out"], row["filter"]
    model = nn.Sequential(nn.Conv2d(*filters), nn.ReLU()).to(dtype)
    x = torch.empty(row["batch"], row["channels_in"], *row["image"], device="meta", dtype=dtype)
    (segment,) = capture(model, True, x.dim()).segments
    case = Case(segment, [x, model[0].weight, model[0].bias, 0], False, dtype)
    runs, *_ = direct.describe(case).split()
    assert row[runs.rstrip(",")] <= MOST_SHORT * min(row["wide"], row["stream"])


ONE_TAP = json.loads((ROOT / "benchmarks/results/trials/one_tap.json").read_text(encoding="utf-8"))["rows"]
WAYS = {
    "as they lie": "planes",
    "one_tap": "one_tap",
    "narrow2d": "narrow2d",
    "wide": "wide",
    "views": "views",
    "stream": "packed",
}


@pytest.mark.parametrize(
    "row", ONE_TAP, ids=lambda row: f"{row['channels_in']}x{row['image']}-{row['dtype']}"
)
def test_of_one_tap_the_fastest_runs(row, monkeypatch):
    """… of what the record has, behind which stands a tail that is like a ReLU in what it moves."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(inside, "_asked", lambda *_: False)
    monkeypatch.setattr(
        precision, "runs_tf32", lambda *_, **__: row["dtype"] == "tf32" and row["channels_in"] > 16
    )
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(row["dtype"], torch.float32)
    convolution = (nn.Conv2d, nn.Conv3d)[len(row["image"]) - 2]
    model = nn.Sequential(convolution(row["channels_in"], row["channels_out"], 1), nn.ReLU()).to(dtype)
    x = torch.empty(row["batch"], row["channels_in"], *row["image"], device="meta", dtype=dtype)
    (segment,) = capture(model, True, x.dim()).segments
    words = words_of(Case(segment, [x, model[0].weight, model[0].bias, 0], False, dtype))
    runs = next((way for says, way in WAYS.items() if says in words), "load")
    times = [row[way] for way in (*WAYS.values(), "load") if way in row]
    if runs == "views" and runs not in row:
        pytest.skip("what runs since 16 bits are packed by matrices isn't timed")
    assert runs in row or runs == "load"  # which isn't recorded of all
    assert runs not in row or row[runs] <= max(1.1 * min(times), min(times) + A_LITTLE), runs


@pytest.mark.parametrize(
    "filters, size, dtype, saving, last, runs",
    [
        ((1, 16, 5), (16, 1, 57, 63), torch.float32, True, False, "narrow2d"),
        ((64, 256, 1), (128, 64, 56, 56), torch.bfloat16, False, True, "stream"),
    ],
    ids=str,
)
def test_of_what_can_run_the_fastest_is_timed(filters, size, dtype, saving, last, runs, monkeypatch):
    """… of this schedule's: to write v and read it is another candidate; and none copies an x that lies channels last."""
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(inside, "_asked", lambda *_: False)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: False)
    model = nn.Sequential(nn.Conv2d(*filters, padding=filters[-1] // 4), nn.ReLU()).to(dtype)
    x = torch.empty(size, device="meta", dtype=dtype)
    if last:
        x, model = (each.to(memory_format=torch.channels_last) for each in (x, model))
    (segment,) = capture(model, True, x.dim()).segments
    case = Case(segment, [x, model[0].weight, model[0].bias, 0], saving, dtype, last=last)
    assert choice.able(direct).describe(case).startswith(runs)


BEHIND = {
    "relu": lambda m, v: torch.relu(v),
    "group norm": lambda m, v: torch.nn.functional.group_norm(v, 1) * m.scale,
    "most of channels": lambda m, v: v.amax(1),
}


class Behind(nn.Module):
    def __init__(self, filters, tail):
        super().__init__()
        self.conv, self.tail, self.scale = nn.Conv2d(*filters), BEHIND[tail], nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.tail(self, self.conv(x))


def words_of(case) -> str:
    """The plan of the first schedule that can."""
    for each in (again, direct, sinks, stored, schedule):
        try:
            return each.describe(case)
        except direct.Unsupported:
            pass


@pytest.mark.parametrize("tf32", [False, True], ids=["float32", "tf32"])
@pytest.mark.parametrize(
    "tail, saving", [("relu", False), ("relu", True), ("group norm", False), ("most of channels", False)]
)
def test_wide_gives_way_to_stream_and_to_nobody_else(tail, saving, tf32, monkeypatch):
    monkeypatch.setattr(tiling, "device_properties", lambda index: H200)
    monkeypatch.setattr(library, "device_type", lambda x: "cuda")
    monkeypatch.setattr(inside, "_asked", lambda *_: False)
    monkeypatch.setattr(precision, "runs_tf32", lambda *_, **__: tf32)
    loses, draw, gave_way = choice.wide_loses, random.Random(tail), 0
    for _ in range(40):
        channels_in, channels_out = (draw.randrange(20, 100, 4) for _ in range(2))
        kernel, side, batch = draw.choice((1, 3, 5)), draw.randrange(12, 150), draw.choice((8, 32, 128))
        x = torch.empty(batch, channels_in, side, side, device="meta")
        model = Behind((channels_in, channels_out, kernel), tail)
        (segment,) = capture(model, True, 4).segments
        case = Case(segment, arguments_of(model, segment, x), saving, torch.float32)
        monkeypatch.setattr(choice, "wide_loses", lambda *_: False)
        before = words_of(case)
        monkeypatch.setattr(choice, "wide_loses", loses)
        if (now := words_of(case)) != before:
            gave_way += 1
            assert "wide" in before and "stream" in now, (x.shape, before, now)
    assert gave_way


def test_rules_see_the_dtype_in_which_eager_convolves(gpu):
    model, x = sized(MIN_ADD, 3)
    gpu(MIN_ADD, forward=["bytes a value", 2, "epilogue", "fused"])
    with torch.no_grad():
        assert numerics.twin_of(model, "auto").plan(x).variant == "fused"
        half = numerics.twin_of(model.bfloat16(), "auto")
        assert half.plan(x.bfloat16()).variant == "epilogue"


def test_a_choice_is_kept(gpu, monkeypatch):
    """A situation is decided once, other sizes anew."""
    model, x = sized(MIN_ADD, 3)
    gpu(MIN_ADD, train="eager")
    fastest, asked = choice.fastest, []
    monkeypatch.setattr(choice, "fastest", lambda *given: asked.append(given) or fastest(*given))
    new = numerics.twin_of(model, "auto")
    new(x)  # what is built at the first call is asked about, too
    asked.clear()
    for _ in range(3):
        assert torch.equal(new(x), model(x))
    assert not asked
    new(x[..., 1:])
    assert len(asked) == 1


# ----------------------------------------------------------------------------------------------------------- as recorded


def recorded(sizes, us, called=None, name=POOL) -> dict:
    """A row with the times of `us`, and as called."""
    N, channels_in, side = sizes
    row = {
        "problem": name, "number": models.PROBLEMS[name].number, "N": N, "channels_in": channels_in, "channels_out": 64, "filter": side,
        "image": [32, 32], "dtype": "float32", "phase": "forward",
    }  # fmt: skip
    us = us | {"left": us["eager"]}
    called = called or us
    row |= {f"{way}_us": us.get(way) for way in ("eager", "epilogue", "fused", "left")}
    row |= {f"{way}_call_us": called.get(way) for way in ("eager", "epilogue", "fused", "left")}
    return row | {"auto_us": us["fused"], "auto_call_us": called["fused"]}


def made_up() -> list[dict]:
    """Fused is fast up to 64 channels in and 9 taps; beyond it the epilogue, but eager with 49 taps."""
    rows = []
    for N, channels_in, side in itertools.product((1, 8, 64), (3, 16, 64, 128, 512), (1, 3, 7)):
        eager = N * channels_in * side**2
        few = channels_in <= 64 and side <= 3
        epilogue = eager * (1.2 if side == 7 else 0.8)
        rows.append(
            recorded(
                (N, channels_in, side),
                dict(eager=eager, epilogue=epilogue, fused=eager * (0.5 if few else 2)),
            )
        )
    return rows


def test_what_counts_is_the_slower_of_the_gpu_and_the_call():
    us, called = (
        dict(eager=10.0, epilogue=5.0, fused=2.0),
        dict(eager=60.0, epilogue=50.0, fused=80.0, left=66.0),
    )
    row = recorded((1, 3, 3), us, called)
    assert fit.speeds(row) == {"fused": 0.75, "epilogue": 1.2, "eager": pytest.approx(60 / 66)}
    assert fit.on_gpu(row) == {"fused": 5, "epilogue": 2, "eager": 1}
    row |= {"fused_us": None, "fused_call_us": None}
    assert fit.speeds(row)["fused"] == 1.2, "the most fused that runs"


def test_rules_fit_a_record():
    rows = made_up()
    rules = fit.fitted(rows)
    for row in rows:
        assert fit.speeds(row)[fit.chosen(rules, row)] == max(fit.speeds(row).values())
    assert fit.shown(rules[POOL, "forward"]).count('"fused"') == 1, "with no more questions than it takes"
    assert json.loads(fit.shown(rules[POOL, "forward"]))[:2] == [*rules[POOL, "forward"][:2]]
    text = fit.report(rows)
    assert f"{POOL}, forward: [" in text and "lost most" in text


def test_the_promise_is_on_the_gpu_s_time():
    """What is slower than eager there runs nowhere, though it be the fastest as called; of the others the fastest as called does."""
    us = dict(eager=10.0, epilogue=11.0, fused=5.0)
    rows = [
        recorded((1, 3, 3), us, dict(eager=60.0, epilogue=30.0, fused=80.0, left=200.0)),
        recorded((1, 512, 3), us | {"fused": 10.5}, dict(eager=60.0, epilogue=30.0, fused=80.0, left=70.0)),
    ]
    rules = fit.fitted(rows)
    assert [fit.chosen(rules, row) for row in rows] == ["fused", "eager"]
    assert not any(fit.too_slow(rules, row) for row in rows)
    assert fit.too_slow({(POOL, "forward"): "fused"}, rows[1])


@pytest.mark.parametrize("name", [MIN_ADD, DROPOUT])
def test_what_no_graph_captures_is_not_left_to_eager(name):
    rows = [row | {"problem": name, "number": models.PROBLEMS[name].number} for row in made_up()]
    assert all("eager" not in fit.speeds(row) for row in rows)
    assert '"eager"' not in fit.shown(fit.fitted(rows)[name, "forward"])


@pytest.mark.parametrize("low, high", [(3, 16), (1, 2), (98, 101), (403_000, 404_000), (1e9, 3e9)])
def test_bounds_lie_between_the_values_they_part(low, high):
    found = fit.between(low, high)
    assert type(found) is int and low <= found < high


@pytest.fixture(scope="module")
def rows():
    return json.loads((ROOT / choice.RECORD).read_text(encoding="utf-8"))["rows"]


def figures(row: dict) -> str:
    """A row, and the speeds in it by the GPU's time and as called."""
    speeds = fit.on_gpu(row), fit.speeds(row, ("_call_us",))
    shown = [", ".join(f"{way} {each:.2f}" for way, each in found.items()) for found in speeds]
    return f"{grid.described(row)}: {fit.chosen(_rules(), row)}; × eager on the GPU: {shown[0]}; as called: {shown[1]}"


def test_nothing_that_runs_by_default_was_slower_than_eager(rows):
    """By the record's own times of the GPU, in each of its sizes, but where our kernels were slower and eager may not run in their place."""
    assert len(rows) > 600 and {row["problem"] for row in rows} == set(models.PROBLEMS)
    slow = [row for row in rows if fit.on_gpu(row)[fit.chosen(_rules(), row)] < fit.ENOUGH]
    excepted = [row for row in slow if not fit.too_slow(_rules(), row)]
    assert slow == excepted, "\n".join(figures(row) for row in slow)
    sizes = {(row["number"], row["phase"], *fit.sizes(row)[:2]) for row in excepted}
    assert sizes == {(83, "forward", (64, 512, 4, 7, 7), (512, 512, 1, 1, 1))}


def test_rules_name_what_ran_and_may_run(rows):
    for row in rows:
        assert fit.on_gpu(row)[fit.chosen(_rules(), row)] > 0, figures(row)
    for (name, phase), rule in _rules().items():
        assert models.PROBLEMS[name].number in fit.LEFT or "eager" not in repr(rule), (name, phase)


@fused_names
@pytest.mark.parametrize("phase", ["forward", "train"])
def test_rules_leave_the_default_sizes_to_the_fused_kernels(name, phase):
    """At the size in which a problem is given, and at an eighth of its batch and twice it, in every dtype; training in float32 from one sample on."""
    problem = models.PROBLEMS[name]
    weight = problem.Model(*problem.init_inputs).conv.weight
    samples, *rest = problem.input_shape
    cases = itertools.product((samples // 8, samples, 2 * samples), (2, 4))
    for batch, itemsize in [*cases, *((batch, 4) for batch in range(1, samples) if phase == "train")]:
        assert choice.fastest(choice.rule(name, phase), (batch, *rest), weight.shape, itemsize)[0] == "fused"


# What kernels of a batch norm with a ReLU are, in 16 bits.
TIMED = {
    "apply": Last(False, True, False, held=4, sums=0, instructions=5),
    "dz": Last(False, True, False, held=8, sums=0, instructions=12),
    "sums": Last(False, False, False, held=0, sums=1, instructions=0),
    "sums of dz": Last(False, False, False, held=5, sums=2, instructions=8),
}


@pytest.mark.parametrize("what", TIMED)
def test_as_many_blocks_as_were_fastest(what):
    """Channels last, of passes that were timed by their number: at most 8 % from the fastest."""
    timed = json.loads((ROOT / "benchmarks/results/trials/batch_norms.json").read_text(encoding="utf-8"))
    rows = [row for row in timed["passes"] if f"{what} by blocks" in row]
    for row in rows:
        N, S, C = row["N"], row["S"], row["C"]
        parts, times = (
            load_plan.parts_across(TIMED[what], N, C, S, 8, 132),
            row[f"{what} by blocks"],
        )
        channels = TIMED[what].channels(8)
        lanes = (load_plan._lanes_across if TIMED[what].sums else load_plan._lanes_of_points)(C // channels)
        blocks = str(N * -(-C // channels // lanes) * parts)
        assert times[blocks] <= 1.08 * min(times.values()), (N, S, C, parts)
    assert rows


@pytest.mark.parametrize("dtype", ["float", "bfloat16_t"])
def test_kernels_go_over_channels_as_is_planned(dtype, folder):
    """kernels/load/last.cuh decides what `Last` says."""
    few = itertools.product((False, True), (False, True), (False, True), (0, 4, 5, 9, 17), (0, 1, 3), (3, 30))
    passes = [Last(*each) for each in few]
    text = ['#include "load/load.h"\n']
    for number, (single, writes, windows, *counts) in enumerate(passes):
        flags = f"kSingle = {single:d}, kWrites = {writes:d}" + f", kWindows = {windows:d}" * windows
        numbers = "kHeld = {}, kSums = {}, kInstructions = {}".format(*counts)
        text.append(
            f"struct P{number} {{ static constexpr bool {flags}; static constexpr int {numbers}; }};\n"
        )
    text.append("EXPORT void decide(int64_t* out, cudaStream_t stream) {\n")
    for number in range(len(passes)):
        of = f"load::Last<P{number}>"
        text.append(f"  *out++ = {of}::channels, *out++ = {of}::at_once, *out++ = {of}::blocks;\n")
    source = "".join([*text, "}\n"])
    defines = dict.fromkeys(("VALUE_T", "OUTPUT_T", "PARAMETER_T"), dtype)
    found = torch.zeros(len(passes), 3, dtype=torch.int64)
    Emulated(source, library_of(source, 800, defines, (), folder)).decide(found)
    pack = 8 if dtype == "bfloat16_t" else 4
    assert found.tolist() == [[each.channels(pack), each.at_once, each.blocks(pack)] for each in passes]
