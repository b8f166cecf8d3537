// What the CUDA headers want of a compiler, for a plain one; the wheels leave this file out.
#pragma once
#define __host__
#define __device__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __cudart_builtin__
#define __CUDA_HOSTDEVICE__
#define CUDARTAPI
