// Rows read once, changed in fp32, written once (or once for each pair): what would otherwise be a
// pass of its own over all rows between two kernels.
//
// SOURCE  PLAIN   IN [width]
//         SWIGLU  IN [2 * width], gate then up: silu(gate) * up
//         SCALED  fp8 e4m3 [width] times scales, one a row or one for each 128
// TARGET  PLAIN   OUT [width], rounded once
//         BLOCK   fp8 e4m3 and one scale for each 128: amax / 448, 1 where all are zero
//         ROW     the same with one scale a row
// Rows go to their own place, or by `inverse` to their pairs. One block a row; a thread has ITEMS
// groups of eight numbers, so that sixteen neighbours hold a block of 128.
// IN_ALIGNED, OUT_ALIGNED: eight numbers may be read, written as words.
#include <cuda_fp8.h>

#include "common.cuh"
#include "numbers.cuh"

#define PLAIN 0
#define SWIGLU 1
#define SCALED 2
#define BLOCK 3
#define ROW 4

constexpr int GROUP = 8;
constexpr int SCALE_BLOCK = 128;
constexpr float FP8_MAX = 448.0f;
constexpr float SMALLEST = 1.17549435e-38f; // of the normal fp32 numbers

__device__ __forceinline__ float from_fp8(unsigned char byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

template <class T>
__device__ __forceinline__ void load_group(const T* from, i64 column, i64 width, T (&to)[GROUP]) {
  if (IN_ALIGNED && column + GROUP <= width) {
    const auto pack = *reinterpret_cast<const Pack<T, GROUP>*>(from + column);
#pragma unroll
    for (int n = 0; n < GROUP; ++n) to[n] = pack.at[n];
  } else {
#pragma unroll
    for (int n = 0; n < GROUP; ++n) to[n] = column + n < width ? from[column + n] : T();
  }
}

template <class T>
__device__ __forceinline__ void store_group(T* to, i64 column, i64 width, const T (&from)[GROUP]) {
  if (OUT_ALIGNED && column + GROUP <= width) {
    Pack<T, GROUP> pack;
#pragma unroll
    for (int n = 0; n < GROUP; ++n) pack.at[n] = from[n];
    *reinterpret_cast<Pack<T, GROUP>*>(to + column) = pack;
  } else {
#pragma unroll
    for (int n = 0; n < GROUP; ++n) {
      if (column + n < width) to[column + n] = from[n];
    }
  }
}

// Eight numbers from `column` on in fp32, zeros past `width`.
__device__ __forceinline__ void read_group(const IN* row, i64 column, i64 width, const float* scales,
                                           i64 num_scales, float (&value)[GROUP]) {
  IN first[GROUP];
  load_group(row, column, width, first);
#if SOURCE == SCALED
  const float scale = column < width ? scales[num_scales > 1 ? column / SCALE_BLOCK : 0] : 0.0f;
#pragma unroll
  for (int n = 0; n < GROUP; ++n) value[n] = from_fp8(first[n]) * scale;
#elif SOURCE == SWIGLU
  IN second[GROUP];
  load_group(row + width, column, width, second);
#pragma unroll
  for (int n = 0; n < GROUP; ++n) {
    const float gate = widen(first[n]);
    value[n] = __fdividef(gate, 1.0f + __expf(-gate)) * widen(second[n]); // within a few ulp
  }
#else
#pragma unroll
  for (int n = 0; n < GROUP; ++n) value[n] = widen(first[n]);
#endif
}

__device__ __forceinline__ float largest(const float (&value)[GROUP]) {
  float amax = 0.0f;
#pragma unroll
  for (int n = 0; n < GROUP; ++n) amax = fmaxf(amax, fabsf(value[n]));
  return amax;
}

__device__ __forceinline__ float scale_of(float amax) {
  return amax > 0.0f ? fmaxf(amax / FP8_MAX, SMALLEST) : 1.0f;
}

#if TARGET == PLAIN
using Element = OUT;
#else
using Element = unsigned char;
#endif

// x / y, correctly rounded as by the division itself, from r = 1 / y correctly rounded: one step of
// Newton (Markstein, IBM J. Res. Dev. 34, 1990).
__device__ __forceinline__ float quotient(float x, float y, float r) {
  const float q = x * r;
  const float rest = fmaf(-q, y, x);
  return rest == 0.0f ? q : fmaf(rest, r, q); // exact already; and -0 stays what it is
}

__device__ __forceinline__ void round_group(const float (&value)[GROUP], float scale,
                                            Element (&rounded)[GROUP]) {
#if TARGET == PLAIN
#pragma unroll
  for (int n = 0; n < GROUP; ++n) narrow(value[n], rounded[n]);
#else
  const float r = __frcp_rn(scale);
#pragma unroll
  for (int n = 0; n < GROUP; n += 2) {
    const float2 two = {quotient(value[n], scale, r), quotient(value[n + 1], scale, r)};
    const unsigned bytes = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    rounded[n] = bytes & 0xff;
    rounded[n + 1] = bytes >> 8;
  }
#endif
}

extern "C" __global__ void __launch_bounds__(512, 2)
convert(const IN* __restrict__ from, i64 from_stride, const float* __restrict__ from_scale,
        i64 from_scale_stride, i64 num_from_scales, Element* __restrict__ to, i64 to_stride,
        float* __restrict__ to_scale, i64 to_scale_stride, i64 width,
        const int* __restrict__ inverse, i64 top_k, const i64* device_num_rows, i64 num_rows) {
  const i64 row = blockIdx.x;
  const int lane = threadIdx.x % WARP;
  start_dependents();
  if (row >= count_of(device_num_rows, num_rows)) return;
  // Places of the first 32 columns of `inverse`, one a lane; more than that are rare.
  auto place_of = [&](i64 k) -> int {
    if (inverse == nullptr) return k == 0 ? static_cast<int>(row) : -1;
    return k < top_k ? inverse[row * top_k + k] : -1;
  };
  const int place = place_of(lane);
  bool any = place >= 0;
  for (i64 k = lane + WARP; k < top_k; k += WARP) any |= place_of(k) >= 0;
  if (!__any_sync(ALL_LANES, any)) return;
  from += row * from_stride;
  from_scale += row * from_scale_stride;
  const i64 round = static_cast<i64>(blockDim.x) * ITEMS * GROUP; // columns that a block holds
  float value[ITEMS][GROUP];
  auto read_round = [&](i64 start) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const i64 column = start + (j * static_cast<i64>(blockDim.x) + threadIdx.x) * GROUP;
      read_group(from, column, width, from_scale, num_from_scales, value[j]);
    }
  };

  float row_scale = 1.0f;
#if TARGET == ROW
  __shared__ float amax_of_warp[WARP];
  float amax = 0.0f;
  for (i64 start = 0; start < width; start += round) {
    read_round(start);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) amax = fmaxf(amax, largest(value[j]));
  }
  for (int step = WARP / 2; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, step));
  }
  if (lane == 0) amax_of_warp[threadIdx.x / WARP] = amax;
  __syncthreads();
  for (int w = 0; w < blockDim.x / WARP; ++w) amax = fmaxf(amax, amax_of_warp[w]);
  row_scale = scale_of(amax);
#endif

  for (i64 start = 0; start < width; start += round) {
    if (TARGET != ROW || round < width) read_round(start); // else they are in registers already
    float scale[ITEMS];
    Element rounded[ITEMS][GROUP];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      scale[j] = row_scale;
#if TARGET == BLOCK
      float amax = largest(value[j]);
      for (int step = SCALE_BLOCK / GROUP / 2; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, step));
      }
      scale[j] = scale_of(amax);
#endif
      round_group(value[j], scale[j], rounded[j]);
    }
    for (i64 k0 = 0; k0 < top_k; k0 += WARP) {
      const int mine = k0 == 0 ? place : place_of(k0 + lane);
      for (unsigned left = __ballot_sync(ALL_LANES, mine >= 0); left != 0; left &= left - 1) {
        const i64 target = __shfl_sync(ALL_LANES, mine, __ffs(left) - 1);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
          const i64 column = start + (j * static_cast<i64>(blockDim.x) + threadIdx.x) * GROUP;
          if (column >= width) continue;
          store_group(to + target * to_stride, column, width, rounded[j]);
          if (TARGET == BLOCK && column % SCALE_BLOCK == 0) {
            to_scale[target * to_scale_stride + column / SCALE_BLOCK] = scale[j];
          }
          if (TARGET == ROW && column == 0) to_scale[target * to_scale_stride] = scale[j];
        }
      }
    }
  }
}
