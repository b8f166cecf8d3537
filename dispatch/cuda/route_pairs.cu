// Of the expert-major layout: every pair's place among those of its expert, and whether ids and
// weights can be used at all; nothing is indexed by an id that was not checked.
//
// One block takes CHUNK consecutive tokens, its threads take pairs. An expert's tokens are bits in
// shared memory, so a pair's place in the chunk is the number of bits below its own, whichever
// thread came first. The last block to finish turns the chunks' counts into prefix sums and gives the
// record to the other ranks; in an eager step also everybody's to the host.
//
// Macro: ID, the type of expert ids.
#include "pairs.cuh"
#include "routing.cuh"

constexpr int THREADS = 256;
constexpr int WINDOW = 1024; // experts whose bits fit in shared memory at a time
constexpr int WORDS = CHUNK / WARP;
constexpr int AT_ONCE = 8; // chunks whose counts are loaded before the first is added
constexpr int MAX_TOP_K = 64;
constexpr unsigned char NOBODY = 255; // owner of no expert

// The first column that names an expert again.
__device__ int find_repeated(const ID* ids, int top_k) {
  for (int k = 1; k < top_k; ++k) {
    for (int i = 0; i < k; ++i) {
      if (ids[k] >= 0 && ids[i] == ids[k]) return k;
    }
  }
  return 0;
}

__device__ void sum_up(const Group& group, const PairWay& way, const ID* ids, const float* weights) {
  const int chunks = gridDim.x, num_experts = static_cast<int>(group.num_experts);
  __shared__ u64 pairs_of_rank[MAX_RANKS];
  for (int rank = threadIdx.x; rank < MAX_RANKS; rank += THREADS) pairs_of_rank[rank] = 0;
  const bool fine = record_worst(group, way.record, ids, weights);
  for (int expert = threadIdx.x; expert < num_experts; expert += THREADS) {
    int total = 0;
    for (int begin = 0; begin < chunks; begin += AT_ONCE) {
      int* at = way.base + static_cast<i64>(begin) * num_experts + expert;
      int pairs[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        pairs[j] = begin + j < chunks ? __ldcg(at + static_cast<i64>(j) * num_experts) : 0;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (begin + j < chunks) at[static_cast<i64>(j) * num_experts] = total;
        total += pairs[j];
      }
    }
    way.experts[expert] = fine ? total : 0;
    if (fine && total) {
      atomicAdd(pairs_of_rank + (group.code[expert] >> CODE_BITS), static_cast<u64>(total));
    }
  }
  __syncthreads();
  for (int rank = threadIdx.x; rank < group.ranks; rank += THREADS) {
    way.record[HEADER + rank] = way.record[HEADER + group.ranks + rank] = pairs_of_rank[rank];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
route_pairs(const Group* __restrict__ shared_group, const ID* __restrict__ ids,
            const float* __restrict__ weights, void* memory, i64 num_tokens, i64 call, i64 slot,
            i64 pair_limit) {
  const Group& group = *shared_group;
  const PairWay way(memory, group, num_tokens);
  const int top_k = static_cast<int>(group.top_k), num_experts = static_cast<int>(group.num_experts);
  const i64 first_token = static_cast<i64>(blockIdx.x) * CHUNK;
  const int tokens = static_cast<int>(min(static_cast<i64>(CHUNK), num_tokens - first_token));
  const int pairs = tokens * top_k; // columns that name no expert included
  const i64 first_pair = first_token * top_k;

  __shared__ unsigned seen[WINDOW][WORDS];
  __shared__ unsigned char owners[CHUNK * MAX_TOP_K];
  u64 worst = ~0ull;
  for (int pair = threadIdx.x; pair < pairs; pair += THREADS) {
    const i64 id = static_cast<i64>(ids[first_pair + pair]);
    const float weight = weights[first_pair + pair];
    const i64 token = first_token + pair / top_k;
    const bool is_expert = id >= 0 && id < group.num_experts;
    owners[pair] = is_expert ? group.code[id] >> CODE_BITS : NOBODY;
    if (!is_expert && id != -1) worst = min(worst, rating(OUTSIDE, token, pair % top_k));
    if (is_expert && !isfinite(weight)) worst = min(worst, rating(NOT_FINITE, token, pair % top_k));
  }
  for (int window = 0; window < num_experts; window += WINDOW) {
    const int end = min(window + WINDOW, num_experts);
    for (int i = threadIdx.x; i < (end - window) * WORDS; i += THREADS) {
      seen[i / WORDS][i % WORDS] = 0;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += THREADS) {
      const i64 id = static_cast<i64>(ids[first_pair + pair]);
      if (id < window || id >= end) continue;
      const int token = pair / top_k;
      const unsigned bit = 1u << token % WARP;
      if (atomicOr(&seen[id - window][token / WARP], bit) & bit) {
        const int column = find_repeated(ids + (first_token + token) * top_k, top_k);
        worst = min(worst, rating(REPEATED, first_token + token, column));
      }
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += THREADS) {
      const i64 id = static_cast<i64>(ids[first_pair + pair]);
      if (id < window || id >= end) continue;
      const int token = pair / top_k, column = pair % top_k;
      const unsigned char* others = owners + token * top_k;
      const int owner = others[column];
      int before = 0; // of the token's pairs, in its list
      for (int k = 0; k < top_k; ++k) before += others[k] < owner || (others[k] == owner && k < column);
      const unsigned* bits = seen[id - window];
      int ordinal = __popc(bits[token / WARP] & ((1u << token % WARP) - 1));
      for (int word = 0; word < token / WARP; ++word) ordinal += __popc(bits[word]);
      const i64 at = (first_token + token) * top_k + before;
      way.expert[at] = static_cast<int>(id);
      way.column[at] = column;
      way.weight[at] = weights[first_pair + pair];
      way.ordinal[at] = ordinal;
    }
    for (int i = threadIdx.x; i < end - window; i += THREADS) {
      int count = 0;
      for (int word = 0; word < WORDS; ++word) count += __popc(seen[i][word]);
      way.base[static_cast<i64>(blockIdx.x) * num_experts + window + i] = count;
    }
    __syncthreads();
  }
  for (int token = threadIdx.x; token < tokens; token += THREADS) {
    int count = 0;
    for (int k = 0; k < top_k; ++k) count += owners[token * top_k + k] != NOBODY;
    way.count[first_token + token] = count;
  }
  if (worst != ~0ull) atomicMin(reinterpret_cast<u64*>(group.state + WORST), worst);

  __threadfence();
  if (!is_last_block(group.state, ROUTE_TICKET)) return;
  sum_up(group, way, ids, weights);
  give_record(group, way.record, call, slot, pair_limit);
}
