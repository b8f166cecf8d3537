// What rows cost at least: the same bytes by plain 16-byte loads and stores, nothing else. For
// measurements. Macros as in rows.cu and combine.cu, but units are of 16 bytes.
#include "group.cuh"

constexpr int SEGMENT = UNITS * WARP;

// Reads each token once, `units` words long, and writes `out_units` of it to its rows; `first` [T + 1]
// says which.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fan_out(const uint4* __restrict__ from, uint4* __restrict__ to, const i64* __restrict__ first,
        i64 num_tokens, i64 units, i64 out_units) {
  const int segments = static_cast<int>((units + SEGMENT - 1) / SEGMENT);
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 item = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  for (; item < num_tokens * segments; item += warps) {
    const i64 token = item / segments;
    const int begin = static_cast<int>(item % segments) * SEGMENT + threadIdx.x % WARP;
    uint4 words[UNITS] = {};
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = begin + j * WARP;
      if (unit < units) words[j] = __ldcs(from + token * units + unit);
      // Words that are not written are read all the same.
      asm volatile("" ::"r"(words[j].x), "r"(words[j].y), "r"(words[j].z), "r"(words[j].w));
    }
    const i64 end = first[token + 1];
    for (i64 row = first[token]; row < end; ++row) {
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = begin + j * WARP;
        if (unit < out_units) __stcs(to + row * out_units + unit, words[j]);
      }
    }
  }
}

// Reads the rows of each token and writes one.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fan_in(const uint4* __restrict__ from, uint4* __restrict__ to, const i64* __restrict__ first,
       i64 num_tokens, i64 units) {
  const int segments = static_cast<int>((units + SEGMENT - 1) / SEGMENT);
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 item = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  for (; item < num_tokens * segments; item += warps) {
    const i64 token = item / segments;
    const int begin = static_cast<int>(item % segments) * SEGMENT + threadIdx.x % WARP;
    uint4 sum[UNITS] = {};
    const i64 end = first[token + 1];
    for (i64 row = first[token]; row < end; ++row) {
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = begin + j * WARP;
        if (unit < units) {
          const uint4 word = __ldcs(from + row * units + unit);
          sum[j] = make_uint4(sum[j].x ^ word.x, sum[j].y ^ word.y, sum[j].z ^ word.z,
                              sum[j].w ^ word.w);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = begin + j * WARP;
      if (unit < units) __stcs(to + token * units + unit, sum[j]);
    }
  }
}
