"""Is what `fuse` runs at any size slower than eager or torch.compile? The layers of sizes.csv, on a GPU. One run, one table, one JSON file.

    python benchmarks/sizes.py [--rows 3,17-20] [--peers eager,compile] [--seconds 0.3] [--json FILE] [--picture FILE]
    python benchmarks/sizes.py --seed 7      # 24 layers that nobody tuned for
    python benchmarks/sizes.py --alone       # our convolutions beside the library's, without tails
    python benchmarks/sizes.py --draw RECORD --picture FILE

A row of sizes.csv is a convolution with a tail (TAILS) as a layer of a real model has it. dtype tf32 is float32 where the library may round
to TF32, float32 is where it may not; layout is the model's and x's. `forward` is under no_grad, in training mode; `train` is forward and
backward to the parameters. All contestants of a row run in one process and take turns, in three rounds; times are the GPU's, by events,
medians of a round. A row fails where ours is not as exact as eager, then it isn't timed, or takes longer than the best peer by more than
SLACK in all rounds.

A row of the record: the layer's columns, `times` (by contestant, of each round; ms), `plan` (what ours runs, and why), `factor` (the best
peer's median over ours), `intensity` (FLOP a byte, with v never written), `ok`; `failed`: what was raised instead.

With --alone a row has its convolution only, forward: ours with its bias, of an x in the row's layout and with all that packs it, wherever it can
run, whatever rules expect; and the library's without a bias, of an x that lies channels last already. `times` are the least of up to 25 calls of
each; where ours can't run, `factor` is 0, and counts in what is printed last.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from inline_kernels import fuse  # noqa: E402
from inline_kernels.bench import checks, records, timing  # noqa: E402
from inline_kernels.engine import timed  # noqa: E402

LAYERS = Path(__file__).with_name("sizes.csv")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDS, SLACK = 3, 0.03


def _instance_norm(v, scale=None):
    return F.instance_norm(v if scale is None else v * scale)


# Functions of a layer and v, its convolution with a bias.
TAILS = {
    "none": lambda m, v: v,
    "relu": lambda m, v: F.relu(v),
    "group_norm_silu": lambda m, v: F.silu(m.norm(v)),
    "batch_norm_relu": lambda m, v: F.relu(m.batch_norm(v)),
    "instance_norm_leaky": lambda m, v: F.leaky_relu(_instance_norm(v) * m.scale + m.shift, 0.01),
    "min_add_multiply": lambda m, v: (torch.clamp(v, max=0.5) + m.shift) * 2.0,
    "group_norm_scale_pool_clamp": lambda m, v: torch.clamp(
        F.max_pool2d(F.group_norm(v, m.groups) * m.scale, 4), 0.0, 1.0
    ),
    "multiply_instance_norm_clamp_multiply_max": lambda m, v: torch.max(
        torch.clamp(_instance_norm(v, m.scale), -1.0, 1.0) * m.scale, dim=1
    )[0],
    "group_norm_min_clamp_dropout": lambda m, v: F.dropout(
        torch.clamp(torch.clamp(F.group_norm(v, m.groups), max=0.1), -1.0, 1.0), 0.2, m.training
    ),
    "mish_mish": lambda m, v: F.mish(F.mish(v)),
    "scale_min": lambda m, v: torch.min(v * 2.0, dim=1, keepdim=True)[0],
    "multiply_gelu": lambda m, v: F.gelu(F.leaky_relu(v * m.scale)),
}


class Layer(nn.Module):
    """A convolution and a tail; scale and shift, by channel, and a norm are there for tails."""

    def __init__(self, row: dict):
        super().__init__()
        nd, C = len(row["image"]), row["channels_out"]
        settings = {key: row[key] for key in ("stride", "padding", "dilation")}
        self.conv = (nn.Conv2d, nn.Conv3d)[nd - 2](row["channels_in"], C, row["filter"], **settings)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(C, *[1] * nd))
        self.shift = nn.Parameter(0.1 * torch.randn(C, *[1] * nd))
        self.groups, self.tail = math.gcd(C, 32) if C % 32 == 0 else math.gcd(C, 8), TAILS[row["tail"]]
        self.norm = nn.GroupNorm(self.groups, C)
        self.batch_norm = (nn.BatchNorm2d, nn.BatchNorm3d)[nd - 2](C)

    def forward(self, x):
        return self.tail(self, self.conv(x))


def layers() -> list[dict]:
    with LAYERS.open() as file:
        rows = list(csv.DictReader(file))
    words = ("layer", "image", "dtype", "layout", "phase", "tail")
    return [
        {key: value if key in words else int(value) for key, value in row.items()}
        | {"image": [int(extent) for extent in row["image"].split("x")]}
        for row in rows
    ]


def drawn(seed: int, count: int = 24) -> list[dict]:
    """Rows that a seed draws: 16 MB to 256 MB of results in float32, two thirds of them images."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        nd, kernel, stride = draw.choice((2, 2, 3)), draw.choice((1, 3, 3, 3, 5)), draw.choice((1, 1, 1, 2))
        narrow = draw.random() < 0.25
        channels = [
            draw.choice((3, 8, 16) if narrow else (24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
            for _ in range(2)
        ]
        row = {"layer": "drawn", "batch": draw.choice((1, 2, 8, 16, 32, 64)), "channels_in": channels[0]}
        row |= {
            "channels_out": max(16, channels[1]),
            "image": [draw.randint(7, 300 if nd == 2 else 64) for _ in range(nd)],
        }
        row |= {
            "filter": min(kernel, 3) if nd == 3 else kernel,
            "stride": stride,
            "padding": draw.choice((0, kernel // 2)),
        }
        row |= {"dilation": 1, "dtype": draw.choice(("tf32", "bfloat16", "float32", "float16"))}
        row |= {
            "layout": draw.choice(("contiguous", "contiguous", "channels_last")),
            "phase": draw.choice(("forward", "train")),
        }
        row["tail"] = draw.choice(
            (
                "relu",
                "relu",
                "none",
                "group_norm_silu",
                "instance_norm_leaky",
                "mish_mish",
                "scale_min",
                "multiply_gelu",
            )
        )
        results = row["batch"] * row["channels_out"] * math.prod(n // stride for n in row["image"])
        if 1 << 22 <= results <= 1 << 26 and min(row["image"]) > row["filter"]:
            found.append(row)
    return found


def build(row: dict, device: str) -> tuple[Layer, torch.Tensor]:
    """The layer and an x, in the row's dtype and layout."""
    torch.manual_seed(0)
    dtype = DTYPES.get(row["dtype"], torch.float32)
    x = torch.randn(row["batch"], row["channels_in"], *row["image"], device=device, dtype=dtype)
    model = Layer(row).to(device, dtype)
    if row["layout"] == "channels_last":
        layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model.conv.to(memory_format=layout)
        x = x.to(memory_format=layout)
    return model, x


def call(model, row: dict, x: torch.Tensor):
    """What is timed: a function of nothing."""
    if row["phase"] == "forward":
        return lambda: torch.no_grad()(model)(x)
    with torch.no_grad():
        g = torch.randn_like(model(x))
    return lambda: torch.autograd.grad(
        model(x), [p for p in model.parameters()], g, allow_unused=True
    )  # the tail may use neither scale nor shift


def check(model: nn.Module, ours: nn.Module, row: dict, x: torch.Tensor) -> None:
    """Raises AssertionError where our result, or a gradient, is more than twice as far from float64 as eager's: of the whole batch's first
    and last samples, alone in having a gradient of their results. Dropout is left out, whose mask is not eager's."""
    drops, ends = "dropout" in row["tail"], sorted({0, len(x) - 1})
    exact = copy.deepcopy(model).double()

    def of(each: nn.Module, x: torch.Tensor, g: torch.Tensor | None) -> list[torch.Tensor]:
        each.train(not drops)
        with torch.set_grad_enabled(g is not None):
            y = each(x)
        y = y[ends] if len(y) > len(ends) else y
        found = [y.detach()]
        if g is not None:
            found += [
                t
                for t in torch.autograd.grad(y, [*each.parameters()], g.to(y.dtype), allow_unused=True)
                if t is not None
            ]
        each.train()
        return found

    def errors(number: int, cancelling: bool) -> list[checks.Error]:
        if number:
            x.normal_()
        with torch.no_grad():
            g = torch.randn_like(model(x[ends])) if row["phase"] == "train" else None
        found = zip(of(exact, x[ends].double(), g), of(model, x, g), of(ours, x, g), strict=True)
        return [checks.judged("", row["layer"], *t, x.dtype) for t in found]

    for error in checks.judged_on_draws(errors):
        assert error.share <= 1, str(error)


def intensity(row: dict, y: torch.Tensor, x: torch.Tensor) -> float:
    taps, extents = row["filter"] ** len(row["image"]), row["image"]
    reach = row["dilation"] * (row["filter"] - 1) + 1
    positions = math.prod([(e + 2 * row["padding"] - reach) // row["stride"] + 1 for e in extents])
    weights = row["channels_in"] * row["channels_out"] * taps
    return 2 * row["batch"] * positions * weights / (x.nbytes + y.nbytes + weights * x.itemsize)


def measure(row: dict, peers: list[str], device: str, seconds: float) -> dict:
    torch.backends.cudnn.allow_tf32 = row["dtype"] != "float32"
    try:
        model, x = build(row, device)
        ours = fuse(model)
        check(model, ours, row, x)
        peer_of = {"eager": lambda: model, "compile": lambda: torch.compile(model)}
        calls = {name: call(peer_of[name](), row, x) for name in peers} | {"ours": call(ours, row, x)}
        rounds = [timing.time(calls, device, seconds) for _ in range(ROUNDS)]
        with torch.no_grad():
            reached = intensity(row, model(x), x)
    except Exception as error:  # whatever it is, it is the finding
        return row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0], "ok": False}
    times = {name: [each[name].median for each in rounds] for name in calls}
    factors = [min(times[name][i] for name in peers) / times["ours"][i] for i in range(ROUNDS)]
    with torch.set_grad_enabled(row["phase"] == "train"):
        plan = str(ours.plan(x))
    found = {"times": times, "plan": plan, "factor": statistics.median(factors)}
    return row | found | {"intensity": reached, "ok": any(each >= 1 - SLACK for each in factors)}


def alone(row: dict, device: str) -> dict:
    """Ours is the candidate `direct` of a plan that is timed."""
    torch.backends.cudnn.allow_tf32 = row["dtype"] != "float32"
    row = row | {"tail": "none", "phase": "forward"}
    model, x = build(row, device)
    ours = fuse(model, tune=True)
    with torch.no_grad():
        ours(x), ours(x)
        plan = str(ours.plan(x))
        found = re.search(r"direct ([\d.e-]+) ms", plan)
        layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x, weight, conv = (
            x.to(memory_format=layout),
            model.conv.weight.to(memory_format=layout),
            model.conv,
        )
        convolve = F.conv2d if x.dim() == 4 else F.conv3d
        of = x, weight, None, conv.stride, conv.padding, conv.dilation
        library = timed.least({"library": lambda: convolve(*of)}, True)["library"]
    times = {"library": [library]} | ({"ours": [float(found[1])]} if found else {})
    factor = library / times["ours"][0] if found else 0.0
    return row | {"times": times, "plan": plan, "factor": factor, "ok": found is not None}


def in_short(rows: list[dict]) -> str:
    """Of what --alone measured: by dtype, of rows with at least 64 channels in."""
    words = []
    for dtype in MARKERS:
        factors = sorted(r["factor"] for r in rows if r["dtype"] == dtype and r["channels_in"] >= 64)
        if factors:
            tenth, middle = factors[len(factors) // 10], statistics.median(factors)
            words.append(f"{dtype}: median {middle:.2f}, tenth percentile {tenth:.2f} of {len(factors)}")
    return "; ".join(words)


def line(number: int, row: dict) -> str:
    shape = f"{row['batch']}x{row['channels_in']}->{row['channels_out']} {row['filter']} {'x'.join(map(str, row['image']))}"
    head = f"{number:3} {row['layer'][:14]:15}{shape:34}{row['dtype'][:8]:9}{row['layout'][9:] or 'NCHW':6}{row['phase']:8}"
    if "failed" in row:
        return f"{head}failed: {row['failed'][:60]}"
    cells = "".join(f"{statistics.median(ms):9.4f}" for ms in row["times"].values())
    return f"{head}{cells}{row['factor']:7.2f}{'' if row['ok'] else ' slower'}"


MARKERS = {"tf32": "o", "float32": "^", "bfloat16": "s", "float16": "D"}


def picture(rows: list[dict], path: Path) -> None:
    """Our factor over the best peer against arithmetic intensity. Hollow: slower by more than SLACK."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (dtype, marker) in enumerate(MARKERS.items()):
        for ok in (True, False):
            points = [
                (r["intensity"], r["factor"])
                for r in rows
                if r.get("times") and (r["dtype"], r["ok"]) == (dtype, ok)
            ]
            style = {
                "color": f"C{number}",
                "marker": marker,
                "s": 22,
                "facecolors": f"C{number}" if ok else "none",
            }
            axes.scatter(*zip(*points or [(math.nan, math.nan)]), label=dtype if ok else None, **style)
    hollow = {"color": "grey", "marker": "o", "s": 22, "facecolors": "none"}
    axes.scatter(math.nan, math.nan, label=f"> {SLACK:.0%} slower", **hollow)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP a byte, log axis)")
    axes.set_ylabel("times as fast as the faster of\neager and torch.compile (log axis)")
    axes.set_yticks([0.5, 0.7, 1, 1.5, 2, 3, 4, 6], ["0.5", "0.7", "1", "1.5", "2", "3", "4", "6"])
    axes.minorticks_off()
    axes.axhline(1, color="grey", lw=0.8)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def chosen(text: str | None, count: int) -> list[int]:
    """Numbers of rows, from 1 on."""
    if not text:
        return list(range(1, count + 1))
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for span in spans for number in range(span[0], span[-1] + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="numbers from 1 on, default: all")
    parser.add_argument("--seed", type=int, help="rows that it draws, in place of the table's")
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each round, all contestants together")
    parser.add_argument("--alone", action="store_true", help="our convolutions beside the library's")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--picture", metavar="FILE", type=Path)
    parser.add_argument("--draw", metavar="RECORD", type=Path, help="draw that record; nothing is timed")
    options = parser.parse_args()
    if options.draw:
        return picture(json.loads(options.draw.read_text())["rows"], options.picture)
    rows, peers = [], ["library"] if options.alone else options.peers.split(",")
    every = layers() if options.seed is None else drawn(options.seed)
    print(f"{'':75}{''.join(f'{name:>9}' for name in [*peers, 'ours'])}  factor")
    for number in chosen(options.rows, len(every)):
        row = every[number - 1]
        rows.append(alone(row, "cuda") if options.alone else measure(row, peers, "cuda", options.seconds))
        print(line(number, rows[-1]), flush=True)
        torch._dynamo.reset()
        if options.json:
            records.write(options.json, rows)
    if options.alone:
        return print(in_short(rows))
    factors = [row["factor"] for row in rows if "factor" in row]
    mean = statistics.geometric_mean(factors) if factors else math.nan
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} rows hold; geometric mean {mean:.2f}")
    if options.picture:
        picture(rows, options.picture)


if __name__ == "__main__":
    main()
