// Records: what every rank says of a step before a row moves, the same matrix on all.
//
// A record lies in a page of each rank it is for. Pages 0 and 1 take turns by epoch: steps in graphs,
// whose `route` posts records, and on a handle's way, whose `rows` does. Pages 2 and 3 take turns by
// call: eager steps, whose `route` has waited for them.
#pragma once
#include "group.cuh"

// What a step has instead of the number of a call, in which ranks have agreed on its records already:
// `rows` is to post this rank's, or `route` has.
constexpr i64 HERE = 0, BY_ROUTE = -1;

__device__ __forceinline__ i64 page_of_epoch(i64 epoch) { return epoch & 1; }
__device__ __forceinline__ i64 page_of_call(i64 call) { return 2 + (call & 1); }

// Write this rank's record, behind which the pairs of all experts lie, on every rank. Call with all
// threads, and post a signal after a barrier.
__device__ void write_record(const Group& group, const i64* mine, i64 page, i64 pair_limit, i64 call,
                             i64 slot) {
  const int words = static_cast<int>(record_words(group));
  const int all = static_cast<int>(group.ranks) * words;
  const int given = HEADER + 2 * static_cast<int>(group.ranks);
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const int rank = i / words, word = i % words;
    i64 value = 0;
    if (word == PAIR_LIMIT) {
      value = pair_limit;
    } else if (word == CALL) {
      value = call;
    } else if (word == SLOT) {
      value = slot;
    } else if (word < given) {
      value = mine[word];
    } else {
      const int expert = group.told_at[rank * group.num_told + word - given];
      if (expert >= 0) value = mine[given + expert];
    }
    record_on(group, rank, group.rank, page)[word] = value;
  }
}

// Give this rank's record of a step to every rank, where nobody asks the host. Call with all threads.
__device__ void post_record(const Group& group, const i64* mine, i64 epoch, i64 pair_limit) {
  write_record(group, mine, page_of_epoch(epoch), pair_limit, 0, 0);
  __syncthreads();
  post(group, RECORD, epoch);
}

// Whether all records of a call are there, name the slot that this rank's does, and tell of no trouble.
// The same on all ranks whose `route` waited for them, and never so after a wait in vain, for what
// comes too late is read while it is written. Call with all threads.
__device__ bool agrees(const Group& group, i64 page, i64 call) {
  const i64 slot = __ldcg(record_on(group, group.rank, group.rank, page) + SLOT);
  bool is_unusual = *static_cast<volatile i64*>(group.state + BROKEN);
  for (int source = threadIdx.x; source < group.ranks; source += blockDim.x) {
    const i64* record = record_on(group, group.rank, source, page);
    is_unusual |= __ldcg(record + KIND) != FINE || __ldcg(record + CALL) != call ||
                  __ldcg(record + SLOT) != slot;
  }
  return !__syncthreads_or(is_unusual);
}

// Give the host what it needs of the records of a call, if ranks agree: that they do, rows and pairs
// that each rank receives, limits of pairs. Then it looks at none of the records, which follow. One
// block, all threads.
__device__ void give_host(const Group& group, i64 page, i64 call) {
  const int ranks = static_cast<int>(group.ranks), given = HEADER + 2 * ranks;
  i64 *sums = group.matrix + 2, *limits = sums + 2 * ranks, *records = limits + ranks;
  for (int source = threadIdx.x; source < ranks; source += blockDim.x) {
    limits[source] = __ldcg(record_on(group, group.rank, source, page) + PAIR_LIMIT);
  }
  for (int i = threadIdx.x; i < 2 * ranks; i += blockDim.x) {
    i64 sum = 0;
#pragma unroll 8
    for (int source = 0; source < ranks; ++source) {
      sum += __ldcg(record_on(group, group.rank, source, page) + HEADER + i);
    }
    sums[i] = sum;
  }
  for (int i = threadIdx.x; i < ranks * given; i += blockDim.x) {
    records[i] = __ldcg(record_on(group, group.rank, i / given, page) + i % given);
  }
  const bool is_agreed = agrees(group, page, call);
  if (threadIdx.x == 0) group.matrix[1] = is_agreed;
}

// Give this rank's record of an eager step to every rank, and everybody's to this rank's host, which
// waits for the number of the call, negative if a rank did not come. A rank that has trouble of its
// own, or is in another call, goes to the exchange of the hosts; then there is nothing to wait for
// here, and its record does not bear the number of this call. One block, all threads.
//
// `send(page)` posts BEGUN behind the record that was written; `settle(source, at)` makes sure that
// what is behind the signal of a rank can be read, if it has come.
template <class Send, class Settle>
__device__ void agree(const Group& group, const i64* mine, i64 call, i64 slot, i64 pair_limit,
                      const Send& send, const Settle& settle) {
  const Group& calls = *group.calls;
  const int ranks = static_cast<int>(group.ranks);
  const i64 page = page_of_call(call);
  __shared__ int elsewhere;
  if (threadIdx.x == 0) elsewhere = 0;
  // A rank whose rows of the last step have arrived reads no page of that step any more.
  bool came = await(group, ARRIVED, group.state[DISPATCHES]);
  if (came) {
    write_record(group, mine, page, pair_limit, call, slot);
    __syncthreads();
    send(page);
    for (int source = threadIdx.x; source < ranks; source += blockDim.x) {
      const i64* at = signal_on(calls, group.rank, BEGUN, source);
      came &= reaches(group, at, begun(call), source, 1 + BEGUN, &elsewhere);
      settle(source, at);
      if (load_acquire(at) == begun_on_host(call)) *static_cast<volatile int*>(&elsewhere) = 1;
    }
    came = __syncthreads_and(came);
    give_host(group, page, call);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile i64*>(group.matrix) = came ? call : -call;
}

// The same where every rank has an address for every other's memory.
__device__ __forceinline__ void agree(const Group& group, const i64* mine, i64 call, i64 slot,
                                      i64 pair_limit) {
  agree(
      group, mine, call, slot, pair_limit,
      [&](i64) { post(*group.calls, BEGUN, begun(call)); }, [](int, const i64*) {});
}

// What the records come to, for each rank.
struct Judgement {
  i64 first[MAX_RANKS];    // place of this rank's first row there, or in its outbox
  i64 received[MAX_RANKS]; // rows
  i64 pairs[MAX_RANKS];    // for which its experts need room
  i64 limit[MAX_RANKS];    // of pairs
  i64 outbox[MAX_RANKS];   // rows that it keeps for distant ranks
  int kind[MAX_RANKS];     // what is wrong
};

// Rows of `source` that wait in its outbox for ranks below `end`, by its record.
__device__ __forceinline__ i64 rows_in_outbox(const Group& group, const i64* record, i64 source,
                                              i64 end) {
  i64 rows = 0;
  for (i64 rank = 0; rank < end; ++rank) {
    if (is_distant(group, source, rank)) rows += __ldcg(record + HEADER + rank);
  }
  return rows;
}

constexpr int RECORDS_AT_ONCE = 8; // that are read before the first is looked at

// Where some rank is distant: this rank's places, `there` and in its own outbox, and what the outbox of
// a rank has to hold. Out of the way, as most groups have none.
__device__ __noinline__ void count_outbox(const Group& group, i64* there, i64 page, int rank,
                                          Judgement& judgement) {
  const i64* own = record_on(group, group.rank, group.rank, page);
  there[rank] = judgement.first[rank];
  if (is_distant(group, group.rank, rank)) {
    judgement.first[rank] = rows_in_outbox(group, own, group.rank, rank);
  }
  const i64* record = record_on(group, group.rank, rank, page);
  judgement.outbox[rank] = rows_in_outbox(group, record, rank, group.ranks);
}

// Each thread counts for the ranks that it judges below.
__device__ void count_rows(const Group& group, i64* there, i64 page, Judgement& judgement) {
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    const i64* own = record_on(group, group.rank, rank, page);
    const i64 kind = __ldcg(own + KIND), limit = __ldcg(own + PAIR_LIMIT);
    i64 rows = 0, pairs = 0;
    for (int begin = 0; begin < group.ranks; begin += RECORDS_AT_ONCE) {
      i64 rows_from[RECORDS_AT_ONCE], pairs_from[RECORDS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < RECORDS_AT_ONCE; ++i) {
        const i64* record = record_on(group, group.rank, begin + i, page) + HEADER;
        const bool is_rank = begin + i < group.ranks;
        rows_from[i] = is_rank ? __ldcg(record + rank) : 0;
        pairs_from[i] = is_rank ? __ldcg(record + group.ranks + rank) : 0;
      }
#pragma unroll
      for (int i = 0; i < RECORDS_AT_ONCE; ++i) {
        if (begin + i == group.rank) judgement.first[rank] = rows;
        rows += rows_from[i];
        pairs += pairs_from[i];
      }
    }
    judgement.received[rank] = rows;
    judgement.pairs[rank] = pairs;
    judgement.limit[rank] = limit;
    judgement.kind[rank] = static_cast<int>(kind);
    judgement.outbox[rank] = 0;
    if (group.has_distant) count_outbox(group, there, page, rank, judgement);
  }
}

// The same on all ranks, for it sees the same records on all.
__device__ bool refuses(const Group& group, i64 capacity, const Judgement& judgement) {
  bool bad = false;
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    const i64 limit = judgement.limit[rank];
    bad |= judgement.kind[rank] != FINE || judgement.received[rank] > capacity ||
           (limit >= 0 && judgement.pairs[rank] > limit) || judgement.outbox[rank] > capacity;
  }
  return __syncthreads_or(bad);
}

// The first refusal stays until the host has taken note of it.
__device__ void report(const Group& group, i64 capacity, i64 page, const Judgement& judgement) {
  volatile i64* note = group.report;
  if (note[WHAT] != FINE) return;
  i64 what = FINE;
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64* record = record_on(group, group.rank, rank, page);
    what = judgement.kind[rank];
    if (what == FINE) continue;
    note[RANK] = rank;
    note[FIRST] = __ldcg(record + TOKEN);
    note[SECOND] = __ldcg(record + COLUMN);
    note[THIRD] = __ldcg(record + VALUE);
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    if (judgement.received[rank] <= capacity) continue;
    what = TOO_MANY_ROWS;
    note[RANK] = rank;
    note[FIRST] = judgement.received[rank];
    note[SECOND] = capacity;
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64 limit = judgement.limit[rank];
    if (limit < 0 || judgement.pairs[rank] <= limit) continue;
    what = TOO_MANY_PAIRS;
    note[RANK] = rank;
    note[FIRST] = judgement.pairs[rank];
    note[SECOND] = limit;
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    if (judgement.outbox[rank] <= capacity) continue;
    what = TOO_MANY_PUTS;
    note[RANK] = rank;
    note[FIRST] = judgement.outbox[rank];
    note[SECOND] = capacity;
  }
  __threadfence_system();
  note[WHAT] = what;
}
