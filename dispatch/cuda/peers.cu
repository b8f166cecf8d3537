// What crossing costs at least: parts of one GPU's memory go to its peers, all at once, by plain
// 16-byte loads and stores, and nothing else. For measurements. Macros as in ceiling.cu.
#include "group.cuh"

constexpr int SEGMENT = UNITS * WARP;

// Part p lies at `from` + begin[p], is length[p] units of 16 bytes long, and goes to address to[p].
// Warps take segments of the parts in turns, so that every link is busy until its part is done.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
copy_parts(const uint4* __restrict__ from, const i64* __restrict__ begin,
           const i64* __restrict__ length, uint4* const* __restrict__ to, i64 parts, i64 longest) {
  const i64 items = (longest + SEGMENT - 1) / SEGMENT * parts;
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 item = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  for (; item < items; item += warps) {
    const i64 part = item % parts;
    const i64 first = item / parts * SEGMENT + threadIdx.x % WARP;
    const i64 end = length[part];
    const uint4* source = from + begin[part];
    uint4* target = to[part];
    uint4 words[UNITS] = {};
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const i64 unit = first + j * WARP;
      if (unit < end) words[j] = __ldcs(source + unit);
    }
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const i64 unit = first + j * WARP;
      if (unit < end) __stcs(target + unit, words[j]);
    }
  }
}
