"""What the lessons share: the machine in a line, the picture of a record, checks that show progress, and the ladder of kernels.

A *pass* is a pair (bytes read, bytes written). A *rung* is a way to compute a problem: checked against float64 beside eager, timed in
turn with eager, set beside its prediction, and drawn. Where there is no GPU, the rungs recorded on one stand beside.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import html
import inspect
import io
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import pygments
import torch
from IPython.display import HTML, display
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from torch import nn

import inline_loader
from benchmarks import report
from inline_kernels.bench import charts, checks, compare, honesty, records, timing
from inline_kernels.loader import toolchain

LADDERS = report.RESULTS / "ladders"  # what notebooks/execute.py finds in the lessons' outputs
RUNGS = "application/vnd.rungs+json"  # the kind of output in which it finds them

# ------------------------------------------------------------------------------------------------------- the machine


def environment() -> str:
    """Prints what this notebook runs on, in a line; returns the device, "cuda" or "cpu"."""
    device, why = compare.pick_device()
    commit = records.output_of("git", "rev-parse", "HEAD") or os.environ.get("COMMIT", "")
    compilers = [toolchain.host_compiler()] + ([toolchain.nvcc()] if device == "cuda" else [])
    versions = [toolchain.version_of(compiler).strip().splitlines() for compiler in compilers]
    lines = [next((line for line in version if "release" in line), version[0]) for version in versions]
    stamp = [f"driver {records.driver()}"] * (device == "cuda") + [f"commit {commit[:10]}"] * bool(commit)
    print(" · ".join([why, f"torch {torch.__version__}", *lines, *stamp]))
    return device


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else charts.cpu_name()


def measured(device: str) -> str:
    """This machine and today's date, for the titles of pictures."""
    return f"{_machine(device)}, {datetime.date.today().isoformat()}"


def batch_size(problem, device: str) -> int:
    """On a CPU the problem's batch for small machines, or LESSON_BATCH; on a GPU its own, halved until training fits into free memory."""
    if device == "cpu":
        return min(problem.cpu_batch_size, int(os.environ.get("LESSON_BATCH", problem.cpu_batch_size)))
    batch, weight = problem.input_shape[0], problem.get_model().conv.weight
    sample = (
        weight.shape[0] * 4 * torch.Size(problem.input_shape[2:]).numel()
    )  # of the convolution's output, about
    while batch > 1 and 16 * batch * sample > torch.cuda.mem_get_info()[0]:
        batch //= 2
    return batch


def ours(problem, device: str) -> list[str]:
    """The variants of ours that a comparison on `device` shows."""
    return [name for name in compare.variants_of(problem, device) if name not in compare.PEERS]


def rate(device: str, size: float) -> float:
    """Bytes per millisecond of simple passes over `size` bytes, three in a row as eager PyTorch runs them."""
    tensor = torch.rand(int(size) // 4, device=device)
    passes = {"three additions": lambda: tensor.add(1).add(1).add(1)}
    return 3 * 2 * size / timing.time(passes, device, seconds=1)["three additions"].median


@functools.cache
def roofs(device: str) -> dict[str, float]:
    """What this machine does per millisecond, measured: bytes of passes over memory, under "memory"; operations of large products of
    matrices, under their kinds."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    with checks.without_tf32():
        times = timing.time({"float32": lambda: a @ b}, device, seconds=0.5)
    if device == "cuda":
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        halves = a.half(), b.half()
        products = {"TF32": lambda: a @ b, "float16": lambda: halves[0] @ halves[1]}
        found = timing.time(products, device, seconds=0.5)
        times |= {f"{name}, tensor cores": timing for name, timing in found.items()}
        torch.backends.cuda.matmul.allow_tf32 = before
    memory = rate(device, 1 << 29 if device == "cuda" else 1 << 27)
    return {"memory": memory} | {name: 2 * size**3 / timing.median for name, timing in times.items()}


# ------------------------------------------------------------------------------------------------------- what is shown


def show(kernel: str, device: str, *, cpp: str, cuda: str) -> HTML:
    """The function of the kernel's source for `device` whose first line contains `cpp` or `cuda`, and the comment above it.

    Raises ValueError if there is none.
    """
    language, start = ("cuda", cuda) if device == "cuda" else ("cpp", cpp)
    path = inline_loader.KERNELS / (kernel if "." in kernel else f"{kernel}.cu")
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if start in line), None)
    if first is None:
        raise ValueError(f"expected a line with {start!r} in {path}")
    indent = lines[first][: -len(lines[first].lstrip())]
    last = next(i for i in range(first, len(lines)) if lines[i] in (f"{indent}}}", f"{indent}}};"))
    while first and lines[first - 1].lstrip().startswith(("//", "template", "__global__")):
        first -= 1
    text = "\n".join(
        line.removeprefix(indent) for line in lines[first : last + 1]
    )  # pragmas stand at the margin
    return _highlighted(text, language, f"kernels/{path.relative_to(inline_loader.KERNELS)}")


def python(function) -> HTML:
    """A Python function's source."""
    path = Path(inspect.getsourcefile(function))
    title = f"{path.parent.name}/{path.name}"
    return _highlighted(textwrap.dedent(inspect.getsource(function)), "python", title)


def _highlighted(code: str, language: str, title: str) -> HTML:
    """Code in colours that read on a light and on a dark page, because they bring their own background."""
    box = "background: #f8f8f8; padding: 0.5em 1em; overflow-x: auto"
    text = "background: #f8f8f8; color: #222222; font-family: monospace; line-height: 1.3; margin: 0; white-space: pre"
    formatter = HtmlFormatter(noclasses=True, cssstyles=box, prestyles=text)
    return HTML(f"<p>{title}</p>" + pygments.highlight(code, get_lexer_by_name(language), formatter))


def status() -> Callable[[str], None]:
    """A function that shows a text in a line of its own, in place of the text before; an empty one takes the line away."""
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)


def picture(figure, **more) -> None:
    """Shows a matplotlib figure as a PNG of one size everywhere; more: other kinds of the same output."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    display({"image/png": png.getvalue(), "text/plain": "picture"} | more, raw=True)


def total(passes: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Bytes read and written by all passes."""
    return tuple(map(sum, zip(*passes.values())))


def passes(variants: dict[str, dict[str, tuple[float, float]]]) -> None:
    """The passes of several variants, by their lines, as a picture."""
    picture(charts.passes(variants))


# ------------------------------------------------------------------------------------------------------------- records


def record(name: str | None = None) -> dict:
    """A record of benchmarks/results/ by its file's name, or of those that have the most, by problem and phase, the newest of a GPU; its
    `name` and `machine` (what ran, and when) beside."""
    records = {path.stem: item for path, item in report.records_in()}
    extent = {
        key: len({(row["problem"], row["phase"]) for row in item["rows"]})
        for key, item in records.items()
        if item["gpu"]
    }
    name = name or next(key for key in reversed(extent) if extent[key] == max(extent.values()))
    item = records[name]
    return item | {"name": name, "machine": f"{item['gpu'] or item['cpu']}, {item['date'][:10]}"}


def front(problem=None, phases: tuple[str, ...] = ("forward_grad", "train")) -> None:
    """The recorded speed-ups as a picture: of every variant of `problem`, or of all problems beside their best peers."""
    item = record()
    rows, title = item["rows"], f"{item['machine']} (record {item['name']})"
    if problem is None:
        return picture(charts.overview(rows, phases, title))
    of_problem = [row for row in rows if row["problem"] == problem.name and row["phase"] in phases]
    picture(charts.plot(of_problem, title))


def errors(problem=None, phase: str = "train_dx") -> None:
    """How far every recorded variant is from float64, as a multiple of what eager is, as a picture."""
    item = record()
    wanted = {"phase": phase, "inputs": "default"} | ({} if problem is None else {"problem": problem.name})
    rows = [row for row in item["rows"] if wanted.items() <= row.items() and row["error_vs_eager"]]
    rows = [row for row in rows if row["variant"] != "eager"]
    picture(charts.errors(rows, f"{phase}, {item['machine']} (record {item['name']})"))


def cold_build() -> None:
    """The recorded seconds of a first build, by the usual way and by ours, as a picture."""
    path = max((report.RESULTS / "loader").glob("*-h200.json"))  # the newest: names begin with the date
    item = json.loads(path.read_text(encoding="utf-8"))
    picture(charts.builds(item["rows"], f"{item['device']}, {item['date'][:10]} (record loader/{path.stem})"))


def batches(problem, device: str, sizes: tuple[int, ...] | None = None) -> None:
    """Times eager and ours at several batch sizes, as called and on the GPU alone, and draws them."""
    sizes = sizes or ((1, 4, 16, 64, 128) if device == "cuda" else (1, 2, 4))
    tell, found = status(), {}
    for size in sizes:
        tell(f"timing a batch of {size} …")
        model, inputs = compare.contest_of(problem, device=device, batch_size=size).drawn(0)
        both = {"eager": model, "fused": problem.ModelNew.from_eager(model)}
        calls = {
            name: timing.Call.of(checks.as_contestant(each, model), inputs, "forward", None)
            for name, each in both.items()
        }
        kinds = (
            {"on the GPU": timing.time, "as called": timing.call_times}
            if device == "cuda"
            else {"": timing.time}
        )
        for kind, clock in kinds.items():
            for name, times in clock(calls, device, seconds=0.2).items():
                found.setdefault(", ".join(filter(None, (name, kind))), {})[size] = times.median
    tell("")
    picture(
        charts.against(
            found, "batch size", "ms", f"Time against batch size · {measured(device)} · {problem.name}"
        )
    )


# -------------------------------------------------------------------------------------------------------------- checks


def right(problem, device: str, phases=("forward", "train_dx"), variants=None) -> list[compare.Check]:
    """Checks variants of ours against float64 and for honesty (all of them by default), and shows progress, then one line, with the
    details folded. On a CPU with images of half the extents. train_dx: with the gradients of all parameters and of x. Raises AssertionError
    if one fails."""
    tell, found, size = status(), [], batch_size(problem, device)
    if device == "cpu":
        batch, channels, *extents = problem.input_shape
        problem = dataclasses.replace(
            problem, input_shape=(batch, channels, *[extent // 2 for extent in extents])
        )
    for variant in variants or ours(problem, device):
        for phase in phases:
            tell(f"checking {variant}, {phase} …")
            found.append(compare.check(problem, variant, device=device, batch_size=size, phase=phase, seed=0))
    tell("")
    failures = [f"{result.variant}: {text}" for result in found for text in result.failures]
    assert not failures, "\n".join(failures)
    errors = sorted((error for result in found for error in result.errors), key=lambda error: -error.share)
    line = (
        f"✓ {', '.join(dict.fromkeys(result.variant for result in found))}: {len(errors)} results and gradients compared with float64; "
        f"the limit is 2 × eager’s error, the nearest to it is at {2 * errors[0].share:.2f} ×"
    )
    folded = "".join(
        f"<li>{2 * error.share:.2f} × eager’s: {html.escape(str(error))}</li>" for error in errors
    )
    style = "background: #e9f7ec; color: #14532d; font-weight: bold"  # its own background: pages are light or dark
    box = f'<details><summary style="{style}">{line}</summary><ul>{folded}</ul></details>'
    display({"text/plain": line, "text/html": box}, raw=True)
    return found


# -------------------------------------------------------------------------------------------------------------- rungs


AS_DRAWN = "random parameters", lambda *given: None


class Ladder:
    """Ways to compute one problem, climbed: `rung` checks and times one, and draws all so far.

    model and x are the reference, with random parameters, and the input: what a kernel of the reader's own may take its arguments from.
    cases: situations beside random parameters in which rungs are checked; by default those of the problem. A rung that needs a GPU where
    there is none is given as None: its recorded time stands for it.

    within, where the result is a single value, which proves nothing: a pair of functions, of_reference(model, x), what the result hides, and
    of_rung(module), a module that gives this by the rung's own kernels, made anew of the sources in its `parts`.
    """

    def __init__(
        self, problem, device: str, *, phase: str = "forward", batch: int | None = None, cases=None,
        within: tuple[Callable, Callable] | None = None, seed=0
    ):  # fmt: skip
        self.problem, self.device, self.phase, self.seed = problem, device, phase, seed
        self.contest = compare.contest_of(
            problem, device=device, batch_size=batch or batch_size(problem, device)
        )
        self.within = within
        self.cases = [AS_DRAWN, *(problem.cases if cases is None else cases)]
        self.model, self.inputs = self.contest.drawn(seed)
        self.x = self.inputs[0]
        self.rows: list[dict] = []

    def rung(
        self,
        name: str,
        module: Callable | None,
        predicted_ms: float | None = None,
        *,
        bytes: float | None = None,
        exact: bool = True,
    ) -> dict | None:
        """Checks `module` against float64, times it in turn with eager, and draws it with all rungs so far; returns the row.

        module: a module (it gets the reference's parameters, by name), a class with the problem's constructor, or a function of x. bytes:
        what it reads and writes, for the roofline. Raises AssertionError where the error is more than twice eager's, but for exact=False,
        which draws it hatched; and, where the reference gives a single value, which proves nothing, if NaN in x does not reach
        the result, or if what is within it is wrong or isn't there to be seen (see `_within`).
        """
        tell = status()
        if module is None:
            self.rows.append({"name": name, "predicted_ms": predicted_ms, "bytes": bytes, "ms": None})
            tell(f"{name}: " + ("this GPU can’t run it" if self.device == "cuda" else "needs a GPU"))
            return self.draw()
        if isinstance(module, type):
            module = module(*self.problem.get_init_inputs()).to(self.device)
        contestant = checks.as_contestant(compare.with_parameters_of(module, self.model), self.model) \
            if isinstance(module, nn.Module) else checks.as_contestant(module, self.model)  # fmt: skip
        errors = []
        for case in self.cases:
            tell(f"{name}: checking, {case[0]} …")
            errors += checks.judged_on_draws(functools.partial(self._errors, self.model, contestant, case))
        worst = max(errors, key=lambda error: error.share)
        assert worst.share <= 1 or not exact, f"{name}: {2 * worst.share:.3g} × eager’s error\n{worst}"
        if not compare.tells(self.contest, self.seed):
            probe = honesty.Probe(contestant.module, self.model, self.inputs, self.phase)
            found = next(honesty.passes_nan(probe), "")
            assert not found, f"{name} {found}"
            errors += self._within(name, contestant.module)
            worst = max(errors, key=lambda error: error.share)
            assert worst.share <= 1 or not exact, f"{name}: {2 * worst.share:.3g} × eager’s error\n{worst}"
        tell(f"{name}: timing …")
        row = {"name": name, "predicted_ms": predicted_ms, "bytes": bytes, **self._times(contestant)}
        row |= {"error": 2 * worst.share if math.isfinite(worst.share) else None, "ok": worst.share <= 1}
        row |= {"norm": worst.norm, "eager_norm": worst.eager_norm}
        self.rows = [other for other in self.rows if other["name"] != name] + [row]
        said = "" if predicted_ms is None else f", predicted {predicted_ms:.3g} ms"
        factor = over_one_eager(self.rows)[-1]["eager_ms"] / row["ms"]
        tell(
            f"{name}: {row['ms']:.3g} ms{said}; {factor:.2f} × eager; {math.nan if row['error'] is None else row['error']:.2f} × eager’s error "
            f"(limit 2; {len(errors)} results)"
        )
        self.draw()
        return row

    def _within(self, name: str, module) -> list[checks.Error]:
        """The errors of what a result of a single value hides. Of what the repository ships, which has no `parts`, gradients tell: those of one
        sample. Raises AssertionError for a rung that can't show it."""
        if type(module) is self.problem.ModelNew:
            with torch.no_grad():
                variant = module.plan(self.x).variant  # which another batch may not be worth
            options = {"device": self.device, "phase": "train", "batch_size": 1, "seed": self.seed}
            found = compare.check(self.problem, variant, **options)
            assert not found.complaints, "\n".join(found.complaints)
            return found.errors
        given = [
            next((kind for kind in type(module).__mro__ if part in vars(kind)), None) for part in ("parts", "kernels")
        ]  # fmt: skip
        assert self.within and given[0], f"{name} has no `parts`: nothing shows what its result hides"
        assert given[0] is given[1], f"{name}: `kernels` and the `parts` they are made of stand in one class"
        of_reference, of_rung = self.within
        inner = copy.copy(self.model)
        inner.__class__ = type("Within", (type(self.model),), {"forward": of_reference})
        twin = checks.as_contestant(compare.with_parameters_of(of_rung(module), self.model), self.model)
        with honesty.evaluation(self.model, twin.module):  # nothing is dropped, which would look like a mask
            errors = functools.partial(self._errors, inner, twin, ("what the result hides", AS_DRAWN[1]))
            return checks.judged_on_draws(errors)

    def _errors(self, model, contestant, case, number: int, cancelling: bool) -> list[checks.Error]:
        """Of one draw of parameters and input, in a case, `model` being the reference; its parameters are then as before."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        torch.manual_seed(self.seed + number)
        inputs = [t.clone() for t in self.inputs]
        if number:
            compare.randomize(self.model)
        case[1](self.model, *inputs)
        try:
            found, complaints = checks.errors_of(
                case[0], contestant, model, inputs, self.phase, cancelling=cancelling
            )
        finally:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(before[name])
        assert not complaints, "\n".join(complaints)
        return found

    def _times(self, contestant) -> dict[str, float]:
        g = None
        if checks.has_backward(self.phase):
            with torch.no_grad():
                g = torch.randn_like(self.model(*self.inputs))
        pair = {"eager": checks.as_contestant(self.model, self.model), "rung": contestant}
        calls = {name: timing.Call.of(each, self.inputs, self.phase, g) for name, each in pair.items()}
        times = timing.time(calls, self.device, seconds=0.6)
        rung = times["rung"]
        return {
            "ms": rung.median,
            "low_ms": rung.low,
            "high_ms": rung.high,
            "eager_ms": times["eager"].median,
        }

    @functools.cached_property
    def recorded(self) -> dict | None:
        """The ladder of the same name that was climbed on a GPU."""
        path = LADDERS / f"{self.problem.name}-{self.phase}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _peers(self) -> dict[str, float]:
        """The best exact peer's speed-up over eager in the newest record of this GPU, by its name."""
        item, batch = record(), len(self.x)
        phase = "forward_grad" if self.phase == "forward" else self.phase  # what records have
        rows = [
            row for row in item["rows"] if (row["problem"], row["phase"]) == (self.problem.name, phase)
            and row["shape"][0] == batch and row.get("inputs", "default") == "default" and row["ok"] and row["median_ms"]
            and charts.is_peer(row)
        ]  # fmt: skip
        if self.device != "cuda" or item["gpu"] != torch.cuda.get_device_name() or not rows:
            return {}
        best = min(rows, key=lambda row: row["median_ms"])
        return {f"{best['variant']} (record {item['name']})": best["speedup_vs_eager"]}

    def draw(self) -> None:
        """All rungs so far: speed-up over one eager, the median of what eager took beside each, with its prediction; beside it the recorded
        rungs where this machine can't run all of them. Says so where eager's times drifted."""
        situation = f"{self.phase}, batch {len(self.x)}"
        timed = over_one_eager(self.rows)
        ladders = [(f"{measured(self.device)}, {situation}{_eager_of(timed)}", timed, self._peers())]
        if self.recorded and (self.device == "cpu" or len(timed) < len(self.rows)):
            names = [row["name"] for row in self.rows]
            rows = over_one_eager(row for row in self.recorded["rows"] if row["name"] in names)
            title = f"{self.recorded['title']}, {self.recorded['date'][:10]}{_eager_of(rows)}"
            ladders.append((title, rows, {}))
        if (drift := drift_of(self.rows)) > DRIFT:
            print(
                f"eager drifted by {drift:.0%} between steps: factors are over its median; run again on a quiet machine"
            )
        title = f"{_machine(self.device)}, {situation}"  # the record has a date
        data = {"name": f"{self.problem.name}-{self.phase}", "title": title, "rows": self.rows}
        picture(charts.ladder(ladders), **({RUNGS: data} if self.device == "cuda" else {}))

    def roofline(self) -> None:
        """Every rung whose bytes are known under this machine's roofs, as measured; or under the recorded ones."""
        work = self.problem.operations(self.model, self.x)
        points = [row | {"operations": work} for row in self.rows if row["ms"] and row["bytes"]]
        picture(charts.roofline(points, roofs(self.device), measured(self.device)))


DRIFT = 0.05  # of eager's times between steps, above which a ladder says so


def over_one_eager(rows: Iterable[dict]) -> list[dict]:
    """The rungs that were timed, each beside the same eager: the median of what it took in turn with each."""
    timed = [row for row in rows if row["ms"]]
    eager = statistics.median(row["eager_ms"] for row in timed) if timed else None
    return [row | {"eager_ms": eager} for row in timed]


def drift_of(rows: Iterable[dict]) -> float:
    """By how much eager's longest time between steps exceeds its shortest, as a share."""
    eager = [row["eager_ms"] for row in rows if row["ms"]]
    return max(eager) / min(eager) - 1 if eager else 0.0


def _eager_of(rows: list[dict]) -> str:
    return f", eager {rows[0]['eager_ms']:.3g} ms" if rows else ""
