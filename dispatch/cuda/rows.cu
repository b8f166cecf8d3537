// Dispatch: give this rank's record to everybody and wait for everybody's (`call` says which of that
// `route` has done, see records.cuh); judge them as every rank does, and write each row once, to its
// final place on each of its ranks; then announce that this rank's rows are there, and unless `staged`
// wait for everybody's. A step of a call that ranks do not agree on, or that does not fit, is none:
// their hosts go on with it. A warp takes a segment of a token: fetches it once and stores it for every
// destination. One more warp of each block writes metadata meanwhile.
//
// Macros: ELEM, the type of hidden states; FP8, whether they travel as e4m3 with a scale for each
// 128 elements; UNITS, of 8 elements that a lane takes at a time; STAGES, segments of a warp that are
// under way or worked on; THREADS, of a block, which move rows; BLOCKS, on a multiprocessor.
#include "records.cuh"
#include "segments.cuh"

// What the receiver has to know besides the rows, and ids that say "no row" behind them.
__device__ void prepare_bucket(const Group& group, const Slot& slot, const Way& way, i64 epoch,
                               i64 page, bool moves, const Judgement& judgement, bool poison) {
  const i64 num_rows = moves ? judgement.received[group.rank] : 0;
  if (blockIdx.x == 0) {
    for (i64 rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
      way.first[rank] = judgement.first[rank];
    }
    for (i64 expert = threadIdx.x; expert < group.num_local; expert += blockDim.x) {
      i64 pairs = 0;
      for (i64 source = 0; moves && source < group.ranks; ++source) {
        const i64* record = record_on(group, group.rank, source, page);
        pairs += __ldcg(record + HEADER + 2 * group.ranks + expert);
      }
      slot.rows_per_expert[expert] = pairs;
    }
    if (threadIdx.x == 0) {
      slot.state[STEP] = epoch;
      slot.state[REFUSED] = !moves;
      slot.state[NUM_ROWS] = num_rows;
      slot.state[NUM_PAIRS] = moves ? judgement.pairs[group.rank] : 0;
    }
  }
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  unsigned char* bucket = slot.bucket[group.rank];
  i64* ids = reinterpret_cast<i64*>(bucket + slot.ids_at);
  const i64 end = slot.capacity * group.top_k;
#pragma unroll 1
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) ids[i] = -1;
  if (!poison) return;
  // All ones are NaN in every dtype that travels.
  const i64 row_bytes = group.hidden * (FP8 ? 1 : sizeof(ELEM));
  uint2* rows = reinterpret_cast<uint2*>(bucket);
#pragma unroll 1
  for (i64 i = num_rows * row_bytes / 8 + thread; i < slot.capacity * row_bytes / 8; i += threads) {
    rows[i] = make_uint2(~0u, ~0u);
  }
  unsigned* weights = reinterpret_cast<unsigned*>(bucket + slot.weights_at);
#pragma unroll 1
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) weights[i] = ~0u;
}

// The place of a token's row on a rank, if it has one there.
__device__ __forceinline__ int find_row(const Way& way, const Judgement& judgement, int token,
                                        int rank, int ranks) {
  return static_cast<int>(judgement.first[rank]) + way.base[token / CHUNK * ranks + rank] +
         way.ordinal[static_cast<i64>(token) * ranks + rank];
}

// Ids, weights and origin of every row. A lane takes a column of a row, so that a row is written in a
// few whole pieces; rows are spread over the blocks.
__device__ void write_metadata(const Group& group, const Slot& slot, const Way& way, i64 num_tokens,
                               const Judgement& judgement) {
  const int ranks = static_cast<int>(group.ranks), top_k = static_cast<int>(group.top_k);
  const int end = static_cast<int>(num_tokens) * ranks * top_k;
  const int first = static_cast<int>(blockIdx.x * WARP + threadIdx.x % WARP);
#pragma unroll 4
  for (int i = first; i < end; i += gridDim.x * WARP) {
    const int pair = i / top_k, k = i % top_k, token = pair / ranks, rank = pair % ranks;
    const bool goes_there = way.mask[token] >> rank & 1;
    const i64 row = find_row(way, judgement, token, rank, ranks);
    const int code = way.code[token * top_k + k];
    const float weight = way.weight[token * top_k + k];
    if (!goes_there) continue;
    unsigned char* bucket = slot.bucket[rank];
    const bool lives_there = code >= 0 && code >> CODE_BITS == rank;
    const i64 at = row * top_k + k;
    reinterpret_cast<i64*>(bucket + slot.ids_at)[at] =
        lives_there ? code & ((1 << CODE_BITS) - 1) : -1;
    reinterpret_cast<float*>(bucket + slot.weights_at)[at] = lives_there ? weight : 0.f;
    if (k == 0) {
      reinterpret_cast<longlong2*>(bucket + slot.source_at)[row] = make_longlong2(group.rank, token);
    }
  }
}

// Where a token goes: its ranks, and its row on the rank of this lane's number and on the one 32 above.
struct Destinations {
  u64 mask;
  int row[2];
};

// Rows on ranks that want nothing are found all the same: one wait less.
__device__ __forceinline__ Destinations find(const Way& way, const Judgement& judgement, int token,
                                             int ranks) {
  Destinations found = {way.mask[token], {}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = threadIdx.x % WARP + half * WARP;
    if (rank < ranks) found.row[half] = find_row(way, judgement, token, rank, ranks);
  }
  return found;
}

__device__ void move_rows(const Group& group, const Slot& slot, const Way& way, Reader& reader,
                          const Judgement& judgement) {
  const int lane = threadIdx.x % WARP, ranks = static_cast<int>(group.ranks);
  unsigned char* bucket[2] = {}; // of the ranks that this lane finds rows on
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) bucket[half] = slot.bucket[lane + half * WARP];
  }
  const auto find_destinations = [&](int token) { return find(way, judgement, token, ranks); };
  const auto send = [&](const Destinations& found, const Segment& segment) {
    for (u64 left = found.mask; left; left &= left - 1) {
      const int rank = __ffsll(left) - 1;
      const bool is_low = rank < WARP;
      const i64 row = __shfl_sync(ALL_LANES, is_low ? found.row[0] : found.row[1], rank % WARP);
      unsigned char* there = reinterpret_cast<unsigned char*>(__shfl_sync(
          ALL_LANES, reinterpret_cast<u64>(is_low ? bucket[0] : bucket[1]), rank % WARP));
      segment.store(there, slot, row);
    }
  };
  move_segments(reader, find_destinations, send);
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, BLOCKS)
rows(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
     const ELEM* __restrict__ x, void* memory, i64 num_tokens, i64 call, i64 pair_limit, i64 poison,
     i64 staged) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  // The last block to finish counts on, so all blocks of a launch see the same.
  const i64 epoch = group.state[DISPATCHES] + 1;
  __shared__ Judgement judgement;

  const bool moves_rows = threadIdx.x < THREADS; // else metadata
  Reader reader(x, static_cast<int>(group.hidden), static_cast<int>(num_tokens));
  if (moves_rows) reader.begin();
  const i64 page = call > 0 ? page_of_call(call) : page_of_epoch(epoch);
  // Block 0 is there whenever any block is, so it cannot be kept from posting by those that wait.
  if (call == HERE && blockIdx.x == 0) post_record(group, way.record, epoch, pair_limit);
  const bool came = call > 0 ? agrees(group, page, call) : await(group, RECORD, epoch);
  count_rows(group, way.there, page, judgement);
  const bool refused = refuses(group, slot.capacity, judgement);
  const bool moves = came && !refused;
  prepare_bucket(group, slot, way, epoch, page, moves, judgement, poison);
  if (moves) {
    if (moves_rows) {
      move_rows(group, slot, way, reader, judgement);
    } else {
      write_metadata(group, slot, way, num_tokens, judgement);
    }
  } else if (came && call <= 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    report(group, slot.capacity, page, judgement);
  }

  wait_for_all_but<0>(); // of a refused step
  if (!is_last_block(group.state, ROWS_TICKET)) return;
  if (call > 0 && !moves) return;
  if (threadIdx.x == 0) group.state[DISPATCHES] = epoch;
  if (group.has_distant) return; // `put` goes on from here
  post(group, ARRIVED, epoch);
  // One block of one launch: it keeps nobody from writing.
  if (!staged && !await(group, ARRIVED, epoch) && threadIdx.x == 0) slot.state[REFUSED] = 1;
}
