"""Whole networks through fuse: as eager within the rule, in training, and what of them runs in kernels."""

from __future__ import annotations

import pytest
import torch

import numerics
from benchmarks.networks import NETWORKS
from inline_kernels import fuse
from inline_kernels.engine.capture import capture

CONVOLUTIONS = {
    "resnet18": 20,
    "unet": 10,
    "vae_block": 2,
    "volume_block": 2,
    "bottlenecks": 3,
    "inverted": 3,
    "dense": 2,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_is_right(name):
    network = NETWORKS[name]
    assert not numerics.wrong_of(network.small_model, network.small_input_shape, "train_dx")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_convolution_with_a_tail_is_a_segment(name):
    network = NETWORKS[name]
    model, (x,) = network.small_model().eval(), network.small_inputs()
    with torch.no_grad():
        plans = fuse(model).plan(x)
    assert sum(plan.runs == "load" for plan in plans) == CONVOLUTIONS[name], str(plans)


def test_a_stems_pool_is_part_of_its_segment():
    captured = capture(NETWORKS["resnet18"].small_model(), True, 4)
    assert "stem.3" in captured.segments[0].modules
    called = [node.target for node in captured.module.graph.nodes if node.op == "call_module"]
    assert not any("stem" in name for name in called), called
