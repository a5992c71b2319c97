// The problem that a source of pool with the convolution inside is for, unless a build says another: the
// default one.
#pragma once

#ifndef CHANNELS_IN
#define CHANNELS_IN 8
#define CHANNELS_OUT 64
#define KERNEL_H 3
#define KERNEL_W 3
#define POOL_H 4
#define POOL_W 4
#endif
