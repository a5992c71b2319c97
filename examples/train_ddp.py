"""Trains a model with DistributedDataParallel for a few steps, and compares its gradients with those of a single process.

    torchrun --nproc-per-node 2 examples/train_ddp.py      # over NCCL where each process has a GPU, else over gloo on the CPU
    torchrun --nproc-per-node 8 --nnodes 2 --rdzv-endpoint HOST:PORT examples/train_ddp.py      # on each of two machines

It learns what another model of the same kind computes. The status is 1 if the gradients differ by more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import models  # noqa: E402


def loss_of(module, x, target):
    return nn.functional.mse_loss(module(x), target)


def gradients(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def train(name: str, steps: int, batch: int, device: torch.device) -> float:
    """Prints the loss of each step. Gives the distance of the first gradients from a single process's, as a share of their norm."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(
        0
    )  # the same models and the same batch everywhere, of which each process takes its part
    model, teacher = (models.get_model(name, device=device) for _ in range(2))
    (x,) = models.get_inputs(name, device=device, batch_size=batch * world)
    with torch.no_grad():
        target = teacher.eval()(x)
    single = copy.deepcopy(model)
    loss_of(single, x, target).backward()

    part = slice(rank * batch, (rank + 1) * batch)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimiser = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(steps):
        optimiser.zero_grad()
        loss = loss_of(parallel, x[part], target[part])
        loss.backward()
        if step == 0:
            difference = (gradients(model) - gradients(single)).norm() / gradients(single).norm().clamp(
                min=1e-30
            )
        optimiser.step()
        distributed.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step}: loss {loss.item() / world:.6f}", flush=True)
    if rank == 0:
        print(f"{world} processes on {device.type}, {model.plan(x)}")
    return difference.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "name", nargs="?", choices=list(models.PROBLEMS), default="conv2d_groupnorm_scale_maxpool_clamp"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="samples per process")
    options = parser.parse_args()

    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.device_count() >= here else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    difference = train(options.name, options.steps, options.batch, device)
    if distributed.get_rank() == 0:
        verdict = "equal" if difference < 1e-3 else "DIFFER FROM"
        print(
            f"gradients {verdict} a single process's: ‖difference‖/‖gradients‖ = {difference:.1e}", flush=True
        )
    distributed.destroy_process_group()  # after the model is gone: what outlives the group may wait for it for ever
    return int(difference >= 1e-3)


if __name__ == "__main__":
    sys.exit(main())
