// What kernels/core/wgmma.cuh offers is beside the rest of tensor cores' here.
#pragma once
#include "core/tensor_core.cuh"
