// Which pair each (row, k) becomes: a stable counting sort of the local ids, remote ones dropped.
//
//   count_tiles   how many ids of each expert lie in each tile of consecutive slots (row * K + k)
//   place_pairs   offsets; per tile, what lies before it; per id, its rank inside the tile
//
//   place_chunk   the same where all ids are one chunk (decode): by comparing, in one launch
//
// A tile is a run of slots that one block owns, so ties keep slot order. EXPERTS is the number of
// local experts rounded up to a power of two from 32 to 1024.
#include "common.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int ITEMS = 2;               // ids of a thread in one chunk
constexpr int CHUNK = THREADS * ITEMS; // ids of a block at a time; a tile is a multiple of it
constexpr int CHUNK_THREADS = 256;     // of place_chunk

static_assert(EXPERTS >= 32 && EXPERTS <= 1024 && (EXPERTS & (EXPERTS - 1)) == 0);

// Experts by threads. The trip count is a constant, which threadIdx.x as a start would hide.
template <class F> __device__ __forceinline__ void for_my_experts(F&& work) {
#pragma unroll
  for (int first = 0; first < EXPERTS; first += THREADS) {
    const int e = first + threadIdx.x;
    if (EXPERTS % THREADS == 0 || e < EXPERTS) work(e);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_tiles(const i64* __restrict__ topk_idx, const i64* device_num_rows, i64 num_rows, i64 top_k,
            i64 num_experts, i64 tile, int* __restrict__ counts) {
  __shared__ int histogram[EXPERTS];
  start_dependents();
  for_my_experts([&](int e) { histogram[e] = 0; });
  __syncthreads();
  const i64 num_slots = count_of(device_num_rows, num_rows) * top_k;
  const i64 begin = blockIdx.x * tile;
  const i64 end = min(begin + tile, num_slots);
  const int lane = threadIdx.x % WARP;
  for (i64 first = begin + threadIdx.x; first < end + threadIdx.x; first += CHUNK) {
    int id[ITEMS];
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) { // all on their way before the first is counted
      const i64 slot = first + j * THREADS;
      const i64 wide = slot < end ? topk_idx[slot] : -1;
      id[j] = is_local(wide, num_experts) ? static_cast<int>(wide) : -1;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      // One addition for all equal ids of a warp: real routing is skewed.
      const unsigned peers = __match_any_sync(ALL_LANES, id[j]);
      if (id[j] >= 0 && (peers & lanes_below(lane)) == 0) {
        atomicAdd(&histogram[id[j]], __popc(peers));
      }
    }
  }
  __syncthreads();
  int* mine = counts + static_cast<i64>(blockIdx.x) * EXPERTS;
  for_my_experts([&](int e) { mine[e] = histogram[e]; });
}

// Ids of one thread and their rank among the equal ids of its warp's part of the chunk. A warp owns
// ITEMS * 32 consecutive slots; `mine` are its counts, left at the totals of the part.
__device__ __forceinline__ void rank_in_warp(const i64* __restrict__ topk_idx, i64 first, i64 end,
                                             i64 num_experts, unsigned short* mine, int lane,
                                             int (&id)[ITEMS], int (&rank)[ITEMS]) {
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const i64 slot = first + j * WARP + lane;
    const i64 wide = slot < end ? topk_idx[slot] : -1;
    id[j] = is_local(wide, num_experts) ? static_cast<int>(wide) : -1;
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const unsigned peers = __match_any_sync(ALL_LANES, id[j]);
    const int before = __popc(peers & lanes_below(lane));
    if (id[j] >= 0) rank[j] = mine[id[j]] + before;
    __syncwarp();
    if (id[j] >= 0 && before == 0) mine[id[j]] += __popc(peers);
    __syncwarp();
  }
}

// Counts of warps to what lies before each; a chunk's count of each expert to `total`.
__device__ __forceinline__ void sum_over_warps(unsigned short (&in_warp)[WARPS][EXPERTS],
                                               int (&total)[EXPERTS]) {
  for_my_experts([&](int e) {
    int running = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int count = in_warp[w][e];
      in_warp[w][e] = static_cast<unsigned short>(running);
      running += count;
    }
    total[e] = running;
  });
}

// Adds up count_tiles' rows: all of them to `all`, those of earlier tiles to `before`, both zero at
// the start. A thread reads four experts of every so many tiles.
__device__ __forceinline__ void sum_over_tiles(const int* __restrict__ counts, int (&all)[EXPERTS],
                                               int (&before)[EXPERTS]) {
  static_assert(THREADS * 4 % EXPERTS == 0, "a thread's experts stay the same from step to step");
  int4 sum = {0, 0, 0, 0}, earlier = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < static_cast<int>(gridDim.x) * EXPERTS; i += THREADS * 4) {
    const int4 count = __ldcg(reinterpret_cast<const int4*>(counts + i));
    sum.x += count.x, sum.y += count.y, sum.z += count.z, sum.w += count.w;
    if (i / EXPERTS < static_cast<int>(blockIdx.x)) {
      earlier.x += count.x, earlier.y += count.y, earlier.z += count.z, earlier.w += count.w;
    }
  }
  const int e = threadIdx.x * 4 % EXPERTS;
  atomicAdd(&all[e], sum.x), atomicAdd(&before[e], earlier.x);
  atomicAdd(&all[e + 1], sum.y), atomicAdd(&before[e + 1], earlier.y);
  atomicAdd(&all[e + 2], sum.z), atomicAdd(&before[e + 2], earlier.z);
  atomicAdd(&all[e + 3], sum.w), atomicAdd(&before[e + 3], earlier.w);
}

// Adds to `next` where each expert's pairs start; the first block writes these as offsets.
__device__ __forceinline__ void sum_over_experts(const int (&all)[EXPERTS], int (&next)[EXPERTS],
                                                 i64 num_experts, i64 num_pairs,
                                                 i64* __restrict__ offsets, int lane, int warp) {
  constexpr int SHARE = (EXPERTS + THREADS - 1) / THREADS; // consecutive experts of a thread
  __shared__ int sum_of_warp[WARPS];
  const int first = threadIdx.x * SHARE;
  int sum = 0;
  if (first < EXPERTS) {
    for (int j = 0; j < SHARE; ++j) sum += all[first + j];
  }
  int inclusive = sum;
  for (int step = 1; step < WARP; step *= 2) {
    const int lower = __shfl_up_sync(ALL_LANES, inclusive, step);
    if (lane >= step) inclusive += lower;
  }
  if (lane == WARP - 1) sum_of_warp[warp] = inclusive;
  __syncthreads();
  int running = inclusive - sum + __reduce_add_sync(ALL_LANES, lane < warp ? sum_of_warp[lane] : 0);
  if (first < EXPERTS) {
    for (int e = first; e < first + SHARE; ++e) {
      if (blockIdx.x == 0 && e < num_experts) offsets[e] = min(static_cast<i64>(running), num_pairs);
      next[e] += running;
      running += all[e];
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == THREADS - 1) { // past the last expert there are no pairs
    offsets[num_experts] = min(static_cast<i64>(running), num_pairs);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
place_pairs(const i64* __restrict__ topk_idx, const i64* device_num_rows, i64 num_rows, i64 top_k,
            i64 num_experts, i64 num_pairs, i64 tile, const int* __restrict__ counts,
            i64* __restrict__ offsets, int* __restrict__ inverse, int* __restrict__ source) {
  alignas(16) __shared__ unsigned short in_warp[WARPS][EXPERTS]; // then: what lies in earlier warps
  __shared__ int next[EXPERTS];                                  // the next free pair of an expert
  __shared__ int in_chunk[EXPERTS];
  __shared__ int all[EXPERTS];
  start_dependents();
  const i64 num_slots = count_of(device_num_rows, num_rows) * top_k;
  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const i64 begin = blockIdx.x * tile;
  const i64 end = min(begin + tile, num_slots);
  for_my_experts([&](int e) { next[e] = all[e] = 0; });
  int id[ITEMS], rank[ITEMS];
  for (i64 chunk = begin;; chunk += CHUNK) {
    const i64 first = chunk + warp * ITEMS * WARP;
    uint4* mine = reinterpret_cast<uint4*>(in_warp[warp]);
    for (int i = lane; i < EXPERTS / 8; i += WARP) mine[i] = {0, 0, 0, 0};
    __syncwarp();
    rank_in_warp(topk_idx, first, end, num_experts, in_warp[warp], lane, id, rank);
    __syncthreads();
    sum_over_warps(in_warp, in_chunk);
    if (chunk == begin) { // up to here nothing came from count_tiles
      await_predecessor();
      sum_over_tiles(counts, all, next);
      __syncthreads();
      sum_over_experts(all, next, num_experts, num_pairs, offsets, lane, warp);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const i64 slot = first + j * WARP + lane;
      if (slot >= end) continue;
      int pair = -1;
      if (id[j] >= 0) {
        pair = next[id[j]] + in_warp[warp][id[j]] + rank[j];
        if (pair >= num_pairs) pair = -1; // the caller promised that this does not happen
        else source[pair] = static_cast<int>(static_cast<unsigned>(slot) / static_cast<unsigned>(top_k));
      }
      inverse[slot] = pair;
    }
    if (chunk + CHUNK >= end) break;
    __syncthreads();
    for_my_experts([&](int e) { next[e] += in_chunk[e]; });
  }
}

__device__ __forceinline__ unsigned is_negative(int x) { return static_cast<unsigned>(x) >> 31; }

// A warp finds one offset or one pair: as many keys are smaller than its own. This is more work than
// counting, but less to wait for, and that decides here: one barrier, a third of the code to fetch.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
place_chunk(const i64* __restrict__ topk_idx, const i64* device_num_rows, i64 num_rows, i64 top_k,
            i64 num_experts, i64 num_pairs, i64* __restrict__ offsets, int* __restrict__ inverse,
            int* __restrict__ source) {
  constexpr int SHARE = CHUNK / CHUNK_THREADS; // ids of a thread
  constexpr int NONE = 0x7fffffff;             // above every key
  alignas(16) __shared__ int keys[CHUNK];      // by id, then by slot
  start_dependents();
  const int num_slots = static_cast<int>(count_of(device_num_rows, num_rows) * top_k);
  i64 id[SHARE];
#pragma unroll
  for (int j = 0; j < SHARE; ++j) { // all on their way before the first is used
    const int slot = j * CHUNK_THREADS + threadIdx.x;
    id[j] = slot < num_slots ? topk_idx[slot] : -1;
  }
#pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    const int slot = j * CHUNK_THREADS + threadIdx.x;
    keys[slot] = is_local(id[j], num_experts) ? static_cast<int>(id[j]) * CHUNK + slot : NONE;
  }
  __syncthreads();
  // The grid's first num_experts + 1 warps are for offsets, the others for slots.
  const int lane = threadIdx.x % WARP;
  const int expert = (blockIdx.x * CHUNK_THREADS + threadIdx.x) / WARP;
  const int slot = expert - static_cast<int>(num_experts) - 1;
  if (slot >= num_slots) return;
  const int key = slot < 0 ? expert * CHUNK : keys[slot];
  unsigned smaller = 0;
#pragma unroll
  for (int i = 0; i < CHUNK / (4 * WARP); ++i) {
    const int4 other = reinterpret_cast<const int4*>(keys)[i * WARP + lane];
    smaller += is_negative(other.x - key) + is_negative(other.y - key) +
               is_negative(other.z - key) + is_negative(other.w - key);
  }
  int pair = static_cast<int>(__reduce_add_sync(ALL_LANES, smaller));
  if (lane > 0) return;
  if (slot < 0) {
    offsets[expert] = min(static_cast<i64>(pair), num_pairs);
    return;
  }
  if (key == NONE || pair >= num_pairs) { // the caller promised that there is room
    pair = -1;
  } else { // slot / top_k, exact: no other row is nearer than half a slot
    const float slots_of_row = static_cast<float>(static_cast<unsigned>(top_k));
    source[pair] = static_cast<int>(__fdividef(slot + 0.5f, slots_of_row));
  }
  inverse[slot] = pair;
}
