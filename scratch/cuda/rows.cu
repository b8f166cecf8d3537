// Copies rows to their pairs, after place_pairs. Work goes by source row: a warp reads its part of
// one once and writes it to each of the row's pairs.
//
// A row is bytes. WIDTH is the alignment of starts and strides, 1 to 16; a row's last bytes, less
// than WIDTH, are copied one by one. Scales are a second, narrow row of 4-byte words.
#include "common.cuh"

using Word = WordOf<WIDTH>::type;

constexpr int UNROLL = 4;            // words of a thread in flight
constexpr int PART = UNROLL * WARP;  // words that a warp of move_rows copies

struct Rows {
  const unsigned char* from;
  unsigned char* to;
  i64 from_stride, to_stride; // bytes
  i64 num_bytes;              // of a row
};

// Words `first + j * step` of one row, held in registers between one load and many stores.
struct Words {
  Word word[UNROLL];

  __device__ __forceinline__ void load(const Rows& rows, i64 row, int first, int step) {
    const Word* from = reinterpret_cast<const Word*>(rows.from + row * rows.from_stride);
    const int count = static_cast<int>(rows.num_bytes / WIDTH);
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const int at = first + j * step;
      if (at < count) word[j] = __ldg(from + at);
    }
  }

  __device__ __forceinline__ void store(const Rows& rows, i64 pair, int first, int step) const {
    Word* to = reinterpret_cast<Word*>(rows.to + pair * rows.to_stride);
    const int count = static_cast<int>(rows.num_bytes / WIDTH);
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      const int at = first + j * step;
      if (at < count) to[at] = word[j];
    }
  }
};

// What is left of a row after its last whole word.
__device__ __forceinline__ void copy_tail(const Rows& rows, i64 row, i64 pair, int lane) {
  const i64 at = rows.num_bytes / WIDTH * WIDTH + lane;
  if (at < rows.num_bytes) {
    rows.to[pair * rows.to_stride + at] = rows.from[row * rows.from_stride + at];
  }
}

__device__ __forceinline__ void copy_scales(const float* from, i64 from_stride, float* to,
                                            i64 to_stride, i64 num_scales, i64 row, i64 pair,
                                            int thread, int threads) {
  for (i64 s = thread; s < num_scales; s += threads) {
    to[pair * to_stride + s] = from[row * from_stride + s];
  }
}

extern "C" __global__ void __launch_bounds__(256)
move_rows(const unsigned char* from, unsigned char* to, i64 from_stride, i64 to_stride,
          i64 num_bytes, const float* scale_from, float* scale_to, i64 scale_from_stride,
          i64 scale_to_stride, i64 num_scales, const i64* __restrict__ topk_idx,
          const int* __restrict__ inverse, const i64* device_num_rows, i64 num_rows, i64 top_k,
          i64 num_experts, i64 num_parts) {
  const Rows rows = {from, to, from_stride, to_stride, num_bytes};
  const int lane = threadIdx.x % WARP;
  const unsigned item = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  const i64 row = item / static_cast<unsigned>(num_parts);
  const int part = item % static_cast<unsigned>(num_parts);
  start_dependents();
  // Ids and rows are inputs of the whole permute: they are read while the index is being made.
  bool any = false;
  if (row < count_of(device_num_rows, num_rows)) {
    for (i64 k = lane; k < top_k; k += WARP) any |= is_local(topk_idx[row * top_k + k], num_experts);
  }
  any = __any_sync(ALL_LANES, any);
  const int first = part * PART + lane;
  Words words;
  if (any) words.load(rows, row, first, WARP);
  await_predecessor(); // by every warp, so that whatever follows this kernel follows the index too
  if (!any) return;
  for (i64 k0 = 0; k0 < top_k; k0 += WARP) {
    const int mine = k0 + lane < top_k ? inverse[row * top_k + k0 + lane] : -1;
    for (unsigned left = __ballot_sync(ALL_LANES, mine >= 0); left != 0; left &= left - 1) {
      const i64 pair = __shfl_sync(ALL_LANES, mine, __ffs(left) - 1);
      words.store(rows, pair, first, WARP);
      if (part == num_parts - 1) {
        copy_tail(rows, row, pair, lane);
        copy_scales(scale_from, scale_from_stride, scale_to, scale_to_stride, num_scales, row, pair,
                    lane, WARP);
      }
    }
  }
}
