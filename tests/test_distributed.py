"""Several processes: DistributedDataParallel and fully_shard (FSDP2) have the gradients of one process; cold ranks build once.

On the CPU over gloo, and over NCCL where there are two GPUs. A model with gradients at ties only gets some.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import numerics
from inline_kernels.engine import choice
from numerics import NAMES, every_name

PROCESSES = 2
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_ddp.py"

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.usefixtures("most_fused"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="there are not two GPUs")
every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])]
)


def whole_batch(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = numerics.small(name, device=device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # else each rank drops elements of its own
    numerics.give_gradients(model, x)
    return numerics.twin_of(model.train(), "auto"), x.repeat_interleave(2, 0)[:4]


def gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss that is the mean over the batch, in the whole."""
    module.zero_grad()
    module(x).square().flatten(1).mean(1).mean().backward()
    whole = {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu() for name, t in whole.items()}


def data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    return torch.distributed.fsdp.fully_shard(model)


def sharded_in_parts(model):
    """The convolution's parameters are there only inside its own forward."""
    torch.distributed.fsdp.fully_shard(model.conv)
    return torch.distributed.fsdp.fully_shard(model)


# And the variant that "auto" then runs; None: the one without a wrapper.
WRAPPERS = {data_parallel: None, sharded: None, sharded_in_parts: "eager"}


def rank_main(rank: int, folder: str, device: str, modules: list[str]) -> None:
    """modules: of problems from outside, which a new process does not know of yet."""
    for module in modules:
        models.register(importlib.import_module(module).PROBLEM)
    torch.set_num_threads(1)
    choice.instead = lambda *given: None  # as in the process that started this one
    torch.backends.cudnn.allow_tf32 = False
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    torch.save(rank_answers(rank, device), f"{folder}/{rank}.pt")
    gc.collect()  # what outlives the group may wait for it for ever
    torch.distributed.destroy_process_group()


def rank_answers(rank: int, device: str) -> dict:
    """Of each wrapper around each model, on this rank's part of the batch: the variant that ran, the one expected, gradients."""
    answers = {}
    for name in models.PROBLEMS:
        for wrap, variant in WRAPPERS.items():
            model, x = whole_batch(name, device)
            part, ran = x.chunk(PROCESSES)[rank], []
            expected = variant or model.plan(part).variant
            module = wrap(model)
            # A plan for the parameters as forward finds them: gathered.
            model.register_forward_pre_hook(lambda model, given: ran.append(model.plan(*given).variant))
            found = gradients(module, part)
            answers[name, wrap.__name__] = *ran, expected, found
    return answers


@every_device
def test_two_processes_have_the_gradients_of_one(device, tmp_path):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = {
            name: gradients(*whole_batch(name, device)) for name in NAMES
        }  # compiles, so that the ranks need not
    modules = {problem.Model.__module__ for problem in models.PROBLEMS.values()} - {"models"}
    torch.multiprocessing.spawn(rank_main, args=(str(tmp_path), device, [*modules]), nprocs=PROCESSES)
    for rank in range(PROCESSES):
        answers = torch.load(tmp_path / f"{rank}.pt")
        assert len(answers) == 3 * len(NAMES)
        for (name, wrapper), (ran, variant, found) in answers.items():
            assert ran == variant, f"{name}, {wrapper}: {ran} ran, expected {variant}"
            torch.testing.assert_close(
                found, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}, {wrapper}: {text}"
            )


@every_device
def test_example_with_cold_ranks(device, tmp_path):
    """Both ranks of examples/train_ddp.py find an empty cache: one builds, the other waits; then they agree with one process."""
    environment = {**os.environ, "INLINE_LOADER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={PROCESSES}",
        str(EXAMPLE),
    ]
    done = subprocess.run(
        [*command, "--steps=3"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    variant = {"cpu": "epilogue", "cuda": "fused"}[device]
    assert f"{PROCESSES} processes on {device}, {variant}" in done.stdout
    assert "gradients equal a single process's" in done.stdout
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3 and losses[2] < losses[0]
    records = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*/build.json")]
    builds = [(each["name"], each["parts"]["source"]) for each in records]
    assert builds and len({*builds}) == len(builds), "the same source twice"
    names = [name for name, _ in builds]
    assert max(map(names.count, names)) <= 2  # a segment's, with gradients and without
    assert done.stderr.count(": built, ") == len(builds) and "built by another process" in done.stderr


@every_name
def test_tensors_of_a_device_mesh(name, tmp_path):
    """Our operators have no rule for sharding, so a DTensor goes to eager, which has one."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, x = whole_batch(name, "cpu")
        expected = models.PROBLEMS[name].Model.forward(model, x)
        model, x = (
            tensor.distribute_module(model, mesh),
            tensor.distribute_tensor(x, mesh, [tensor.Replicate()]),
        )
        assert model.plan(x).variant == "eager" and "subclass of Tensor" in model.plan(x).reason
        torch.testing.assert_close(model(x).full_tensor(), expected)
    finally:
        torch.distributed.destroy_process_group()
