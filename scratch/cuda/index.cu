// Which pair each (row, k) becomes: a stable counting sort of the local ids, remote ones dropped.
//
//   count_tiles   how many ids of each expert lie in each tile of consecutive slots (row * K + k)
//   place_pairs   offsets; per tile, what lies before it; per id, its rank inside the tile
//
// A tile is a run of slots that one block owns, so ties keep slot order. EXPERTS is the number of
// local experts rounded up to a power of two from 32 to 1024.
#include "common.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int ITEMS = 2;               // ids of a thread in one chunk
constexpr int CHUNK = THREADS * ITEMS; // ids of a block at a time; a tile is a multiple of it

static_assert(EXPERTS >= 32 && EXPERTS <= 1024 && (EXPERTS & (EXPERTS - 1)) == 0);

extern "C" __global__ void __launch_bounds__(THREADS)
count_tiles(const i64* __restrict__ topk_idx, const i64* device_num_rows, i64 num_rows, i64 top_k,
            i64 num_experts, i64 tile, int* __restrict__ counts) {
  __shared__ int histogram[EXPERTS];
  start_dependents();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) histogram[e] = 0;
  __syncthreads();
  const i64 num_slots = count_of(device_num_rows, num_rows) * top_k;
  const i64 begin = blockIdx.x * tile;
  const i64 end = min(begin + tile, num_slots);
  const int lane = threadIdx.x % WARP;
#pragma unroll 4
  for (i64 first = begin; first < end; first += THREADS) {
    const i64 slot = first + threadIdx.x;
    const i64 id = slot < end ? topk_idx[slot] : -1;
    const bool local = is_local(id, num_experts);
    // One addition for all equal ids of a warp: real routing is skewed.
    const unsigned peers = __match_any_sync(ALL_LANES, local ? static_cast<int>(id) : -1);
    if (local && (peers & lanes_below(lane)) == 0) atomicAdd(&histogram[id], __popc(peers));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
    counts[static_cast<i64>(blockIdx.x) * EXPERTS + e] = histogram[e];
  }
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

extern "C" __global__ void __launch_bounds__(THREADS)
place_pairs(const i64* __restrict__ topk_idx, const i64* device_num_rows, i64 num_rows, i64 top_k,
            i64 num_experts, i64 num_pairs, i64 tile, const int* __restrict__ counts,
            i64* __restrict__ offsets, int* __restrict__ inverse, int* __restrict__ source) {
  __shared__ unsigned short in_warp[WARPS][EXPERTS]; // counts, then what lies in earlier warps
  __shared__ int next[EXPERTS];                      // the next free pair of each expert
  __shared__ int total[EXPERTS];
  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  start_dependents();

  const i64 num_slots = count_of(device_num_rows, num_rows) * top_k;
  const i64 begin = blockIdx.x * tile;
  const i64 end = min(begin + tile, num_slots);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) next[e] = total[e] = 0;
  for (int e = lane; e < EXPERTS; e += WARP) in_warp[warp][e] = 0;
  __syncwarp();
  int id[ITEMS], rank[ITEMS];
  rank_in_warp(topk_idx, begin + warp * ITEMS * WARP, end, num_experts, in_warp[warp], lane, id,
               rank);
  __syncthreads();

  // Up to here nothing came from count_tiles. A thread adds up four experts of every so many tiles.
  await_predecessor();
  int4 all = {0, 0, 0, 0}, before = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < static_cast<int>(gridDim.x) * EXPERTS; i += THREADS * 4) {
    const int4 count = __ldcg(reinterpret_cast<const int4*>(counts + i));
    const bool earlier = i / EXPERTS < static_cast<int>(blockIdx.x);
    all.x += count.x, all.y += count.y, all.z += count.z, all.w += count.w;
    if (earlier) {
      before.x += count.x, before.y += count.y, before.z += count.z, before.w += count.w;
    }
  }
  const int mine = threadIdx.x * 4 % EXPERTS;
  static_assert(THREADS * 4 % EXPERTS == 0, "a thread's experts stay the same from step to step");
  atomicAdd(&total[mine], all.x), atomicAdd(&next[mine], before.x);
  atomicAdd(&total[mine + 1], all.y), atomicAdd(&next[mine + 1], before.y);
  atomicAdd(&total[mine + 2], all.z), atomicAdd(&next[mine + 2], before.z);
  atomicAdd(&total[mine + 3], all.w), atomicAdd(&next[mine + 3], before.w);
  __syncthreads();

  if (warp == 0) { // exclusive sums of the totals; a lane has EXPERTS / 32 consecutive experts
    constexpr int SHARE = EXPERTS / WARP;
    int sum = 0;
    for (int j = 0; j < SHARE; ++j) sum += total[lane * SHARE + j];
    int inclusive = sum;
    for (int step = 1; step < WARP; step *= 2) {
      const int lower = __shfl_up_sync(ALL_LANES, inclusive, step);
      if (lane >= step) inclusive += lower;
    }
    int running = inclusive - sum;
    for (int j = 0; j < SHARE; ++j) {
      const int e = lane * SHARE + j;
      if (blockIdx.x == 0 && e < num_experts) offsets[e] = min(static_cast<i64>(running), num_pairs);
      next[e] += running;
      running += total[e];
    }
    if (blockIdx.x == 0 && lane == WARP - 1) {
      offsets[num_experts] = min(static_cast<i64>(running), num_pairs);
    }
  }
  __syncthreads();

  for (i64 chunk = begin; chunk < end; chunk += CHUNK) {
    const i64 first = chunk + warp * ITEMS * WARP;
    if (chunk != begin) {
      for (int e = lane; e < EXPERTS; e += WARP) in_warp[warp][e] = 0;
      __syncwarp();
      rank_in_warp(topk_idx, first, end, num_experts, in_warp[warp], lane, id, rank);
      __syncthreads();
    }
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) { // counts of warps to what lies before
      int running = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const int count = in_warp[w][e];
        in_warp[w][e] = static_cast<unsigned short>(running);
        running += count;
      }
      total[e] = running;
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
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) next[e] += total[e];
    __syncthreads();
  }
}
