"""Is this tree as fast as another? The problems' fused variants of both, in processes that take turns.

    git worktree add /tmp/base COMMIT; python benchmarks/alternate.py /tmp/base --rounds 3 --json FILE

A process times what its tree runs by default, phase by phase: on a GPU between events, the cache overwritten before each call, and the
host's time for a call at batch 1, in bursts that the GPU's queue holds; on a CPU wall and processor time. Of the rounds the least median
counts. The last column is this tree's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHILD = r"""
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch, models
device, phases, calls = sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])
found = {}
flush = torch.empty(64 << 20, device=device) if device == "cuda" else None

def timed(run):
    if device == "cpu":
        wall, processor = time.perf_counter(), time.process_time()
        run()
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(2_000_000)  # so that the launches wait for one another, and not for the host
    start.record(); run(); end.record(); end.synchronize()
    return (start.elapsed_time(end),) * 2

for name, problem in models.PROBLEMS.items():
    torch.manual_seed(0)
    model = problem.get_model(device=device).train()
    for phase in phases:
        x = problem.get_inputs(device=device, batch_size=problem.cpu_batch_size if device == "cpu" else None)[0]
        x.requires_grad_(phase == "train_dx")
        with torch.set_grad_enabled(phase != "forward"):
            g = torch.randn_like(model(x))
        def run():
            with torch.set_grad_enabled(phase != "forward"):
                y = model(x)
            if phase.startswith("train"):
                model.zero_grad(); x.grad = None
                y.backward(g)
        for _ in range(3): run()
        times = [timed(run) for _ in range(calls)]
        found[f"{problem.number} {phase}"] = [sorted(each)[len(times) // 2] for each in zip(*times)]
        if device == "cpu":
            found[f"{problem.number} {phase}"] = [min(each) for each in zip(*times)]
            continue
        x = problem.get_inputs(device=device, batch_size=1)[0].requires_grad_(phase == "train_dx")
        with torch.set_grad_enabled(phase != "forward"):
            g = torch.randn_like(model(x))
        bursts = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(16): run()
            bursts.append((time.perf_counter() - start) / 16 * 1e3)
        found[f"{problem.number} {phase}, host"] = [sorted(bursts)[len(bursts) // 2]] * 2
print(json.dumps(found))
"""


def run(tree: Path, device: str, phases: str, calls: int) -> dict[str, list[float]]:
    command = [sys.executable, "-c", CHILD, str(tree), device, phases, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree)
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path, help="a checkout of the other commit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--phases", default="forward,forward_grad,train,train_dx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trees = {"base": options.base.resolve(), "here": ROOT}
    rounds = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            rounds[name].append(run(tree, options.device, options.phases, options.calls))
    print(
        f"{'':24}{'base':>10}{'here':>10}{'ratio':>8}"
        + ("   processor time" if options.device == "cpu" else "")
    )
    rows = []
    for key in rounds["base"][0]:
        base, here = ([min(each[key][i] for each in rounds[name]) for i in range(2)] for name in trees)
        rows.append(
            {
                "what": key,
                "base_ms": base[0],
                "here_ms": here[0],
                "base_cpu_ms": base[1],
                "here_cpu_ms": here[1],
            }
        )
        more = f"{base[1]:10.3f}{here[1]:10.3f}{here[1] / base[1]:8.3f}" if options.device == "cpu" else ""
        print(f"{key:24}{base[0]:10.4f}{here[0]:10.4f}{here[0] / base[0]:8.3f}{more}")
    print(f"geometric mean {statistics.geometric_mean(row['here_ms'] / row['base_ms'] for row in rows):.3f}")
    if options.json:
        sys.path.insert(0, str(ROOT))
        from inline_kernels.bench import records

        records.write(options.json, rows)


if __name__ == "__main__":
    main()
