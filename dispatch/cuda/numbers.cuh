// Eight numbers side by side: what a lane moves at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> struct alignas(16) Eight { T at[8]; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// Memory that is used once: past the first-level cache, and first to leave the second. Not the
// read-only path, because ranks write while kernels run.
template <class T> __device__ __forceinline__ Eight<T> load_eight(const T* from) {
  constexpr int WORDS = sizeof(Eight<T>) / sizeof(uint4);
  union { Eight<T> numbers; uint4 words[WORDS]; };
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  return numbers;
}

template <class T> __device__ __forceinline__ void store_eight(T* to, const Eight<T>& value) {
  constexpr int WORDS = sizeof(Eight<T>) / sizeof(uint4);
  union { Eight<T> numbers; uint4 words[WORDS]; };
  numbers = value;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) __stcs(reinterpret_cast<uint4*>(to) + i, words[i]);
}
