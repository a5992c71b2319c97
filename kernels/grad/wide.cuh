// The gradients of a wide convolution and of its tail's parameters.
#pragma once
#include "grad/wide_input.cuh"
#include "grad/wide_sums.cuh"
#include "grad/wide_weight.cuh"
