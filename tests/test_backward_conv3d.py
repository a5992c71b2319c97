"""The backward passes with a 3-D convolution inside, without a GPU (tests/test_emulated.py), against float64."""

from __future__ import annotations

import pytest
import torch
from test_emulated import folder, gpu, pytestmark, remembers_nothing, small  # noqa: F401

import numerics
import tiling
from numerics import DROPOUT

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def whole_numbers_that_tie(shape, arguments, dtype=torch.float32):
    """A dropout problem with ties among other values: whole numbers, the channels of a group in pairs of opposite sign, so that its mean is
    exactly 0, and where the convolution is 0, z is exactly norm.bias = min_value."""
    model = numerics.build(DROPOUT, arguments, dtype=dtype)
    x = torch.randint(-2, 3, shape).to(dtype)
    with torch.no_grad():
        weight = torch.randint(-1, 2, model.conv.weight.shape)
        model.conv.weight.copy_(weight), model.conv.bias.zero_()
        model.conv.weight[1::2] = -model.conv.weight[::2]
        model.norm.bias.fill_(model.min_value)
    return model, x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_has_gradients_where_some_elements_tie(dtype, gpu):
    model, x = whole_numbers_that_tie((3, 3, 6, 9, 11), (3, 16, 3, 4, 0.25, 1.0, 0.2), dtype)
    gpu()
    numerics.assert_rule(model, x, "fused")
