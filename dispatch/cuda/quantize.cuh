// ELEM to e4m3, with a scale for each 128 elements, in the registers of a warp that has a segment of
// UNITS x 32 units of 8 elements.
#pragma once
#include "group.cuh"
#include "numbers.cuh"
#include <cuda_fp8.h>

constexpr int FP8_BLOCK = 128;
constexpr int BLOCK_LANES = FP8_BLOCK / 16; // a lane quantises two units side by side
constexpr int COUPLES = UNITS / 2;
static_assert(UNITS % 2 == 0, "units are quantised two by two");
constexpr int BLOCKS_OF_COUPLE = WARP / BLOCK_LANES;

// The largest magnitude as bits, which are ordered as the numbers are, infinity and NaN above them.
// Two at a time where two are in a word.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  return sizeof(ELEM) == 4 ? max(a, b) : __vmaxu2(a, b);
}

__device__ __forceinline__ unsigned largest(const Eight<ELEM>& numbers) {
  constexpr unsigned MAGNITUDE = sizeof(ELEM) == 4 ? 0x7fffffff : 0x7fff7fff;
  constexpr int WORDS = sizeof(Eight<ELEM>) / sizeof(unsigned);
  union { Eight<ELEM> eight; unsigned words[WORDS]; };
  eight = numbers;
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) most = larger(most, words[i] & MAGNITUDE);
  return most;
}

// Rounded to nearest for any normal number but the largest: a guess and one Newton step.
__device__ __forceinline__ float reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return isfinite(x) ? __fmaf_rn(__fmaf_rn(-x, guess, 1.f), guess, guess) : guess;
}

// x / divisor as IEEE division rounds it, from a rounded reciprocal and one correction: exact as long
// as nothing under- or overflows (Markstein 1990). Written so that zeros keep their sign.
__device__ __forceinline__ float divided(float x, float divisor, float inverse) {
  const float guess = __fmul_rn(x, inverse);
  return __fmaf_rn(-__fmaf_rn(guess, divisor, -x), inverse, guess);
}

// Sixteen elements of a lane: scale = amax / 448, payload = x / scale. Quotients that underflow are too
// small for e4m3 anyhow.
__device__ __forceinline__ uint4 quantize(const Eight<ELEM> (&numbers)[2], float& scale) {
  constexpr float SMALLEST = 1.17549435e-38f; // normal number
  unsigned most = larger(largest(numbers[0]), largest(numbers[1]));
#pragma unroll
  for (int apart = BLOCK_LANES / 2; apart > 0; apart /= 2) {
    most = larger(most, __shfl_xor_sync(ALL_LANES, most, apart));
  }
  union { ELEM number; unsigned bits; };
  bits = sizeof(ELEM) == 4 ? most : max(most >> 16, most & 0xffff);
  const float amax = widen(number);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = widen(numbers[i / 8].at[i % 8]);
  float divisor;
  if (amax > 1e-20f && amax < 1e30f) {
    scale = divisor = divided(amax, 448.f, 1.f / 448.f);
  } else if (amax == 0.f) {
    scale = divisor = 1.f;
  } else if (isfinite(amax)) { // worked on nearer to 1, which changes no digit
    const float factor = amax < 1.f ? 0x1p64f : 0x1p-64f, back = amax < 1.f ? 0x1p-64f : 0x1p64f;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] *= factor;
    scale = fmaxf(divided(amax * factor, 448.f, 1.f / 448.f) * back, SMALLEST);
    divisor = scale * factor;
  } else { // infinity makes zeros of finite numbers, NaN makes NaN of all
    scale = divisor = amax;
  }
  const float inverse = reciprocal(divisor);
  if (!isfinite(amax)) divisor = 0.f;
  unsigned words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float quotient[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) quotient[i] = divided(x[4 * w + i], divisor, inverse);
    const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(quotient[0], quotient[1]),
                                                  __NV_SATFINITE, __NV_E4M3);
    const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(quotient[2], quotient[3]),
                                                   __NV_SATFINITE, __NV_E4M3);
    words[w] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
