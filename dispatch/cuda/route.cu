// Which ranks each token goes to, its exact place among the rows to each of them, and whether ids and
// weights can be used at all; nothing is indexed by an id that was not checked.
//
// One block takes CHUNK consecutive tokens, one thread a token. The last block to finish turns the
// chunks' counts into prefix sums and gives the record to the other ranks; in an eager step also
// everybody's to the host.
//
// Macro: ID, the type of expert ids.
#include "routing.cuh"

constexpr int WARPS = CHUNK / WARP;
constexpr int AT_ONCE = 8;           // columns that are loaded before the first is looked at
constexpr int SHARED_EXPERTS = 1024; // counted in shared memory; more are counted in global memory

__device__ void sum_up(const Group& group, const Way& way, const ID* ids, const float* weights) {
  const int lane = threadIdx.x % WARP;
  const i64 ranks = group.ranks, chunks = gridDim.x;
  i64* state = group.state;
  const bool fine = record_worst(group, way.record, ids, weights);
  for (i64 rank = threadIdx.x / WARP; rank < ranks; rank += WARPS) {
    int total = 0;
    for (i64 begin = 0; begin < chunks; begin += WARP) {
      const i64 chunk = begin + lane;
      const int rows = chunk < chunks ? __ldcg(way.base + chunk * ranks + rank) : 0;
      int sum = rows;
      for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += below;
      }
      if (chunk < chunks) way.base[chunk * ranks + rank] = total + sum - rows;
      total += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane == 0) {
      const u64 pairs = atomicExch(reinterpret_cast<u64*>(state + PAIRS + rank), 0ull);
      way.record[HEADER + rank] = fine ? total : 0;
      way.record[HEADER + ranks + rank] = fine ? pairs : 0;
    }
  }
  for (i64 expert = threadIdx.x; expert < group.num_experts; expert += CHUNK) {
    u64* count = reinterpret_cast<u64*>(state + PAIRS + ranks + expert);
    const u64 pairs = atomicExch(count, 0ull);
    way.experts[expert] = fine ? pairs : 0;
  }
}

extern "C" __global__ void __launch_bounds__(CHUNK)
route(const Group* __restrict__ shared_group, const ID* __restrict__ ids,
      const float* __restrict__ weights, void* memory, i64 num_tokens, i64 everywhere, i64 call,
      i64 slot, i64 pair_limit) {
  const Group& group = *shared_group;
  const Way way(memory, group, num_tokens);
  const i64 top_k = group.top_k, ranks = group.ranks;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const i64 token = static_cast<i64>(blockIdx.x) * CHUNK + threadIdx.x;
  const bool is_token = token < num_tokens;

  __shared__ int shared_count[SHARED_EXPERTS];
  __shared__ int rows_of_warp[WARPS][MAX_RANKS];
  __shared__ unsigned pairs_of_rank[MAX_RANKS];
  const bool in_shared = group.num_experts <= SHARED_EXPERTS;
  if (in_shared) {
    for (int i = threadIdx.x; i < group.num_experts; i += CHUNK) shared_count[i] = 0;
  }
  for (int i = threadIdx.x; i < ranks; i += CHUNK) pairs_of_rank[i] = 0;
  __syncthreads();

  u64 mask = 0, worst = ~0ull;
  if (is_token) {
    const ID* mine = ids + token * top_k;
    for (int begin = 0; begin < top_k; begin += AT_ONCE) {
      i64 id[AT_ONCE];
      float weight[AT_ONCE];
      int code[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int k = begin + j;
        id[j] = k < top_k ? static_cast<i64>(mine[k]) : -1;
        weight[j] = k < top_k ? weights[token * top_k + k] : 0.f;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const bool is_expert = id[j] >= 0 && id[j] < group.num_experts;
        code[j] = is_expert ? group.code[id[j]] : -1;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int k = begin + j;
        if (k >= top_k) continue;
        way.code[token * top_k + k] = code[j];
        way.weight[token * top_k + k] = weight[j];
        if (code[j] < 0) {
          if (id[j] != -1) worst = min(worst, rating(OUTSIDE, token, k));
          continue;
        }
        bool is_repeated = false;
#pragma unroll
        for (int i = 0; i < j; ++i) is_repeated |= id[i] == id[j];
        for (int i = 0; i < begin; ++i) is_repeated |= mine[i] == id[j];
        if (is_repeated) worst = min(worst, rating(REPEATED, token, k));
        if (!isfinite(weight[j])) worst = min(worst, rating(NOT_FINITE, token, k));
        const int owner = code[j] >> CODE_BITS;
        mask |= 1ull << owner;
        atomicAdd(pairs_of_rank + owner, 1u);
        if (in_shared) {
          atomicAdd(shared_count + id[j], 1);
        } else {
          atomicAdd(reinterpret_cast<u64*>(group.state + PAIRS + ranks + id[j]), 1ull);
        }
      }
    }
    if (everywhere) mask = ranks == MAX_RANKS ? ~0ull : (1ull << ranks) - 1;
    way.mask[token] = mask;
    if (worst != ~0ull) atomicMin(reinterpret_cast<u64*>(group.state + WORST), worst);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const unsigned going = __ballot_sync(ALL_LANES, mask >> rank & 1);
    if (lane == 0) rows_of_warp[warp][rank] = __popc(going);
  }
  __syncthreads();
  for (int rank = 0; rank < ranks; ++rank) {
    const unsigned going = __ballot_sync(ALL_LANES, mask >> rank & 1);
    int before = 0;
    for (int w = 0; w < warp; ++w) before += rows_of_warp[w][rank];
    if (is_token) {
      way.ordinal[token * ranks + rank] = before + __popc(going & ((1u << lane) - 1));
    }
    if (threadIdx.x == CHUNK - 1) {
      way.base[blockIdx.x * ranks + rank] = before + rows_of_warp[warp][rank];
    }
  }
  for (int i = threadIdx.x; i < ranks; i += CHUNK) {
    if (pairs_of_rank[i]) {
      atomicAdd(reinterpret_cast<u64*>(group.state + PAIRS + i), static_cast<u64>(pairs_of_rank[i]));
    }
  }
  if (in_shared) {
    for (int i = threadIdx.x; i < group.num_experts; i += CHUNK) {
      const u64 count = shared_count[i];
      if (count) atomicAdd(reinterpret_cast<u64*>(group.state + PAIRS + ranks + i), count);
    }
  }

  __threadfence();
  if (!is_last_block(group.state, ROUTE_TICKET)) return;
  sum_up(group, way, ids, weights);
  give_record(group, way.record, call, slot, pair_limit);
}
