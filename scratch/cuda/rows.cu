// Copies rows to their pairs. Work goes by source row: it is read once and written to each pair.
//
//   move_rows      after place_pairs, one warp for each part of a row
//   permute_small  for few ids, in one launch: every block counts for itself where its row goes
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
      if (at < count) word[j] = __ldcs(from + at);
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

constexpr int SMALL_THREADS = 256;
constexpr int MAX_IDS = 2048; // SMALL_IDS in permute_cuda.py
constexpr int MAX_EXPERTS = 1024;
constexpr int NEVER = 0x7fffffff; // the key of a remote id: after all others

// Offsets, by a histogram and its sums; one block does this beside the others.
__device__ void write_offsets(const i64* __restrict__ topk_idx, int num_slots, i64 num_experts,
                              i64 num_pairs, i64* __restrict__ offsets) {
  __shared__ int histogram[MAX_EXPERTS];
  __shared__ int sum_of_warp[SMALL_THREADS / WARP];
  for (int e = threadIdx.x; e < MAX_EXPERTS; e += SMALL_THREADS) histogram[e] = 0;
  __syncthreads();
  for (int slot = threadIdx.x; slot < num_slots; slot += SMALL_THREADS) {
    const i64 id = topk_idx[slot];
    if (is_local(id, num_experts)) atomicAdd(&histogram[id], 1);
  }
  __syncthreads();
  constexpr int SHARE = MAX_EXPERTS / SMALL_THREADS;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int sum = 0;
  for (int j = 0; j < SHARE; ++j) sum += histogram[threadIdx.x * SHARE + j];
  int inclusive = sum;
  for (int step = 1; step < WARP; step *= 2) {
    const int lower = __shfl_up_sync(ALL_LANES, inclusive, step);
    if (lane >= step) inclusive += lower;
  }
  if (lane == WARP - 1) sum_of_warp[warp] = inclusive;
  __syncthreads();
  int running = inclusive - sum;
  for (int w = 0; w < warp; ++w) running += sum_of_warp[w];
  for (int j = 0; j < SHARE; ++j) {
    const i64 e = threadIdx.x * SHARE + j;
    if (e <= num_experts) offsets[e] = min(static_cast<i64>(running), num_pairs);
    running += histogram[e];
  }
  if (threadIdx.x == SMALL_THREADS - 1 && num_experts == MAX_EXPERTS) {
    offsets[num_experts] = min(static_cast<i64>(running), num_pairs);
  }
}

// Block (row, part) moves one part of one row. The pair of (row, k) is the number of local ids that
// sort before it, by expert, then by slot: few enough that each block counts them for its own row.
extern "C" __global__ void __launch_bounds__(SMALL_THREADS)
permute_small(const unsigned char* from, unsigned char* to, i64 from_stride, i64 to_stride,
              i64 num_bytes, const float* scale_from, float* scale_to, i64 scale_from_stride,
              i64 scale_to_stride, i64 num_scales, const i64* __restrict__ topk_idx,
              const i64* device_num_rows, i64 num_rows, i64 top_k, i64 num_experts, i64 num_pairs,
              i64* __restrict__ offsets, int* __restrict__ inverse, int* __restrict__ source) {
  constexpr int KEYS = MAX_IDS / SMALL_THREADS;
  __shared__ int before[WARP]; // top_k is at most 32 here
  const Rows rows = {from, to, from_stride, to_stride, num_bytes};
  const int row = blockIdx.x;
  const int lane = threadIdx.x % WARP;
  const int first = blockIdx.y * SMALL_THREADS * UNROLL + threadIdx.x;
  start_dependents();
  const i64 valid_rows = count_of(device_num_rows, num_rows);
  const int num_slots = static_cast<int>(valid_rows * top_k);
  if (row == num_rows) {
    if (blockIdx.y == 0) write_offsets(topk_idx, num_slots, num_experts, num_pairs, offsets);
    return;
  }
  if (row >= valid_rows) return;

  Words words;
  words.load(rows, row, first, SMALL_THREADS);
  if (threadIdx.x < WARP) before[threadIdx.x] = 0;
  const i64 id = lane < top_k ? topk_idx[row * top_k + lane] : -1;
  const bool local = is_local(id, num_experts);
  const int mine = local ? static_cast<int>(id) * MAX_IDS + row * static_cast<int>(top_k) + lane : NEVER;
  const unsigned wanted = __ballot_sync(ALL_LANES, local); // the same in every warp
  int key[KEYS];
#pragma unroll
  for (int j = 0; j < KEYS; ++j) {
    const int slot = j * SMALL_THREADS + threadIdx.x;
    const i64 other = slot < num_slots ? topk_idx[slot] : -1;
    key[j] = is_local(other, num_experts) ? static_cast<int>(other) * MAX_IDS + slot : NEVER;
  }
  __syncthreads();
  for (unsigned left = wanted; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const int bound = __shfl_sync(ALL_LANES, mine, k);
    int count = 0;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) count += key[j] < bound;
    count = __reduce_add_sync(ALL_LANES, count);
    if (lane == 0) atomicAdd(&before[k], count);
  }
  __syncthreads();

  if (blockIdx.y == 0 && threadIdx.x < top_k) {
    const int pair = local && before[lane] < num_pairs ? before[lane] : -1;
    inverse[row * top_k + lane] = pair;
    if (pair >= 0) source[pair] = row;
  }
  for (unsigned left = wanted; left != 0; left &= left - 1) {
    const i64 pair = before[__ffs(left) - 1];
    if (pair >= num_pairs) continue;
    words.store(rows, pair, first, SMALL_THREADS);
    if (blockIdx.y == gridDim.y - 1) {
      copy_tail(rows, row, pair, threadIdx.x);
      copy_scales(scale_from, scale_from_stride, scale_to, scale_to_stride, num_scales, row, pair,
                  threadIdx.x, SMALL_THREADS);
    }
  }
}
