// Dispatch of the expert-major layout: as in rows.cu, but each token is written to its final place in
// the group of each of its experts.
//
// Block 0 alone reads the records and finds the places of this rank's pairs; the others wait for it.
//
// Macros: as in rows.cu.
#include "pairs.cuh"
#include "segments.cuh"

// Places of this rank's first pairs, and where groups begin in its own bucket. A warp takes a rank.
__device__ void find_places(const Group& group, const Slot& slot, const PairWay& way, i64 alignment,
                            i64 page, Judgement& judgement) {
  const i64 counts_at = HEADER + 2 * group.ranks;
  for (i64 expert = threadIdx.x; expert < group.num_experts; expert += blockDim.x) {
    i64 before = 0, total = 0;
    for (i64 source = 0; source < group.ranks; ++source) {
      if (source == group.rank) before = total;
      total += __ldcg(record_on(group, group.rank, source, page) + counts_at + expert);
    }
    way.first[expert] = static_cast<int>(before);
    way.total[expert] = total;
  }
  __syncthreads();
  const int lane = threadIdx.x % WARP;
  for (i64 rank = threadIdx.x / WARP; rank < group.ranks; rank += blockDim.x / WARP) {
    const i64* own = record_on(group, group.rank, rank, page);
    const i64 kind = __ldcg(own + KIND), limit = __ldcg(own + PAIR_LIMIT);
    i64 begin = 0, pairs = 0, num_local = 0;
    for (i64 local = lane; local - lane < group.most_local; local += WARP) {
      const int expert = local < group.most_local ? group.expert_at[rank * group.most_local + local] : -1;
      const i64 total = expert < 0 ? 0 : way.total[expert];
      const i64 aligned = (total + alignment - 1) / alignment * alignment;
      i64 end = aligned;
      for (int step = 1; step < WARP; step *= 2) {
        const i64 below = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += below;
      }
      if (expert >= 0) {
        way.first[expert] += static_cast<int>(begin + end - aligned);
        if (rank == group.rank) {
          slot.rows_per_expert[local] = total;
          group_offsets(group, slot)[local + 1] = begin + end;
        }
      }
      begin += __shfl_sync(ALL_LANES, end, WARP - 1);
      pairs += total;
      num_local += __popc(__ballot_sync(ALL_LANES, expert >= 0));
    }
    for (int apart = WARP / 2; apart > 0; apart /= 2) pairs += __shfl_xor_sync(ALL_LANES, pairs, apart);
    if (lane == 0) {
      // What a host can say without knowing the experts' counts, so that both judge alike.
      const i64 rows = pairs + min(pairs, num_local) * (alignment - 1);
      judgement.received[rank] = judgement.pairs[rank] = rows;
      judgement.limit[rank] = limit;
      judgement.kind[rank] = static_cast<int>(kind);
      judgement.outbox[rank] = 0;
      if (rank == group.rank) {
        slot.state[NUM_ROWS] = rows;
        slot.state[NUM_PAIRS] = pairs;
      }
    }
  }
  __syncthreads();
}

// What block 0 does before any pair moves. Whether they move.
__device__ bool begin(const Group& group, const Slot& slot, const PairWay& way, i64 call,
                      i64 pair_limit, i64 alignment, i64 epoch) {
  __shared__ Judgement judgement;
  const i64 page = call > 0 ? page_of_call(call) : page_of_epoch(epoch);
  if (call == HERE) post_record(group, way.record, epoch, pair_limit);
  const bool came = call > 0 ? agrees(group, page, call) : await(group, RECORD, epoch);
  find_places(group, slot, way, alignment, page, judgement);
  const bool moves = came && !refuses(group, slot.capacity, judgement);
  i64* offsets = group_offsets(group, slot);
  for (i64 local = threadIdx.x; !moves && local < group.num_local; local += blockDim.x) {
    slot.rows_per_expert[local] = offsets[local + 1] = 0;
  }
  if (threadIdx.x == 0) {
    offsets[0] = 0;
    slot.state[STEP] = epoch;
    slot.state[REFUSED] = !moves;
    if (!moves) slot.state[NUM_ROWS] = slot.state[NUM_PAIRS] = 0;
    if (came && !moves && call <= 0) report(group, slot.capacity, page, judgement);
    group.state[MOVES] = moves;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    store_release(group.state + PLACED, epoch);
  }
  return moves;
}

// Rows that hold no pair: ids that say so, and NaN if `poison`.
__device__ void clear_rows(const Group& group, const Slot& slot, i64 begin, i64 end, bool poison,
                           i64 thread, i64 threads) {
  unsigned char* bucket = slot.bucket[group.rank];
  i64* ids = reinterpret_cast<i64*>(bucket + slot.ids_at);
  for (i64 i = begin + thread; i < end; i += threads) ids[i] = -1;
  if (!poison) return;
  // All ones are NaN in every dtype that travels.
  const i64 row_words = group.hidden * (FP8 ? 1 : sizeof(ELEM)) / 8;
  uint2* rows = reinterpret_cast<uint2*>(bucket);
  for (i64 i = begin * row_words + thread; i < end * row_words; i += threads) {
    rows[i] = make_uint2(~0u, ~0u);
  }
  unsigned* weights = reinterpret_cast<unsigned*>(bucket + slot.weights_at);
  for (i64 i = begin + thread; i < end; i += threads) weights[i] = ~0u;
}

__device__ void prepare_bucket(const Group& group, const Slot& slot, i64 alignment, bool poison) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  const i64* offsets = group_offsets(group, slot);
  for (i64 local = thread / WARP; alignment > 1 && local < group.num_local; local += threads / WARP) {
    const i64 end = __ldcg(offsets + local) + __ldcg(slot.rows_per_expert + local);
    clear_rows(group, slot, end, __ldcg(offsets + local + 1), poison, threadIdx.x % WARP, WARP);
  }
  const i64 end = __ldcg(offsets + group.num_local);
  clear_rows(group, slot, end, slot.capacity, poison, thread, threads);
}

// The place of a token's pair of that number, in ascending (rank, column) order.
__device__ __forceinline__ i64 find_place(const PairWay& way, int num_experts, int token, i64 pair) {
  const int expert = way.expert[pair];
  return __ldcg(way.first + expert) +
         way.base[static_cast<i64>(token / CHUNK) * num_experts + expert] + way.ordinal[pair];
}

// Ids, weights and origin of every pair, and for this rank its place. Pairs are spread over the
// blocks, and over the lanes of a warp.
__device__ void write_metadata(const Group& group, const Slot& slot, const PairWay& way,
                               i64 num_tokens) {
  const int top_k = static_cast<int>(group.top_k), num_experts = static_cast<int>(group.num_experts);
  const int end = static_cast<int>(num_tokens) * top_k;
  const int first = static_cast<int>(blockIdx.x * WARP + threadIdx.x % WARP);
#pragma unroll 4
  for (int i = first; i < end; i += gridDim.x * WARP) {
    const int token = i / top_k;
    if (i % top_k >= way.count[token]) continue;
    const int code = group.code[way.expert[i]];
    const i64 row = find_place(way, num_experts, token, i);
    unsigned char* bucket = slot.bucket[code >> CODE_BITS];
    reinterpret_cast<i64*>(bucket + slot.ids_at)[row] = code & ((1 << CODE_BITS) - 1);
    reinterpret_cast<float*>(bucket + slot.weights_at)[row] = way.weight[i];
    i64* source = reinterpret_cast<i64*>(bucket + slot.source_at) + row * SOURCE_WORDS;
    source[0] = group.rank;
    source[1] = token;
    source[2] = way.column[i];
    way.place[i] = static_cast<int>(row);
  }
}

// Where a token goes: the place of the pair of this lane's number.
struct Places {
  int token;
  int count; // the token's pairs
  int row;
  unsigned char* bucket;
};

__device__ __forceinline__ void find_pair(const Group& group, const Slot& slot, const PairWay& way,
                                          int number, Places& places) {
  if (number >= places.count) return;
  const i64 pair = places.token * group.top_k + number;
  const int num_experts = static_cast<int>(group.num_experts);
  places.row = static_cast<int>(find_place(way, num_experts, places.token, pair));
  places.bucket = slot.bucket[group.code[way.expert[pair]] >> CODE_BITS];
}

__device__ void move_pairs(const Group& group, const Slot& slot, const PairWay& way,
                           Reader& reader) {
  const int lane = threadIdx.x % WARP;
  const auto find = [&](int token) {
    Places places = {token, way.count[token], 0, nullptr};
    find_pair(group, slot, way, lane, places);
    return places;
  };
  const auto send = [&](Places places, const Segment& segment) {
    for (int pair = 0; pair < places.count; ++pair) {
      if (pair > 0 && pair % WARP == 0) find_pair(group, slot, way, pair + lane, places);
      const i64 row = __shfl_sync(ALL_LANES, places.row, pair % WARP);
      unsigned char* bucket = reinterpret_cast<unsigned char*>(
          __shfl_sync(ALL_LANES, reinterpret_cast<u64>(places.bucket), pair % WARP));
      segment.store(bucket, slot, row);
    }
  };
  move_segments(reader, find, send);
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, BLOCKS)
pairs(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
      const ELEM* __restrict__ x, void* memory, i64 num_tokens, i64 call, i64 pair_limit,
      i64 alignment, i64 poison, i64 staged) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const PairWay way(memory, group, num_tokens);
  // The last block to finish counts on, so all blocks of a launch see the same.
  const i64 epoch = group.state[DISPATCHES] + 1;
  const bool moves_pairs = threadIdx.x < THREADS; // else metadata
  Reader reader(x, static_cast<int>(group.hidden), static_cast<int>(num_tokens));
  if (moves_pairs) reader.begin();
  bool moves;
  // Block 0 is there whenever any block is, and its waits end.
  if (blockIdx.x == 0) {
    moves = begin(group, slot, way, call, pair_limit, alignment, epoch);
  } else {
    if (threadIdx.x == 0) {
      while (load_acquire(group.state + PLACED) < epoch) {
      }
    }
    __syncthreads();
    moves = __ldcg(group.state + MOVES);
  }
  prepare_bucket(group, slot, alignment, poison);
  if (moves) {
    if (moves_pairs) {
      move_pairs(group, slot, way, reader);
    } else {
      write_metadata(group, slot, way, num_tokens);
    }
  }

  wait_for_all_but<0>(); // of a refused step
  if (!is_last_block(group.state, ROWS_TICKET)) return;
  if (call > 0 && !moves) {
    if (threadIdx.x == 0) group.state[PLACED] = epoch - 1; // the next launch is of this epoch
    return;
  }
  if (threadIdx.x == 0) group.state[DISPATCHES] = epoch;
  post(group, ARRIVED, epoch);
  // One block of one launch: it keeps nobody from writing.
  if (!staged && !await(group, ARRIVED, epoch) && threadIdx.x == 0) slot.state[REFUSED] = 1;
}
