#pragma once
#include "operands.cuh"  // the name that this header has now
