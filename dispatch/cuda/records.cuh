// Records: what every rank says of a step before a row moves, the same matrix on all.
//
// A record lies in a page of each rank it is for. Pages 0 and 1 take turns by epoch: steps in graphs,
// whose `route` posts records, and on a handle's way, whose `rows` does. Pages 2 and 3 take turns by
// call: eager steps on which `route` and the hosts have agreed before.
#pragma once
#include "group.cuh"

// Instead of the number of a call: `rows` posts the record; or `route` has.
constexpr i64 HERE = 0, BY_ROUTE = -1;

__device__ __forceinline__ i64 page_of_epoch(i64 epoch) { return epoch & 1; }
__device__ __forceinline__ i64 page_of_call(i64 call) { return 2 + (call & 1); }

// Write this rank's record on every rank. Call with all threads, and post a signal after a barrier.
__device__ void write_record(const Group& group, const Way& way, i64 page, i64 pair_limit, i64 call,
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
      value = way.record[word];
    } else {
      const int expert = group.expert_at[rank * group.most_local + word - given];
      if (expert >= 0) value = way.experts[expert];
    }
    record_on(group, rank, group.rank, page)[word] = value;
  }
}

// Give this rank's record of a step to every rank, where nobody asks the host. Call with all threads.
__device__ void post_record(const Group& group, const Way& way, i64 epoch, i64 pair_limit) {
  write_record(group, way, page_of_epoch(epoch), pair_limit, 0, 0);
  __syncthreads();
  post(group, RECORD, epoch);
}

// Give this rank's record of an eager step to every rank, and everybody's to this rank's host, which
// waits for the number of the call, negative if a rank did not come. A rank that has trouble of its
// own, or is in another call, goes to the exchange of the hosts; then there is nothing to wait for
// here, and its record does not bear the number of this call. One block, all threads.
//
// `send(page)` posts BEGUN behind the record that was written; `settle(source, at)` makes sure that
// what is behind the signal of a rank can be read, if it has come.
template <class Send, class Settle>
__device__ void agree(const Group& group, const Way& way, i64 call, i64 slot, i64 pair_limit,
                      const Send& send, const Settle& settle) {
  const Group& calls = *group.calls;
  const int ranks = static_cast<int>(group.ranks), given = HEADER + 2 * ranks;
  const i64 page = page_of_call(call);
  __shared__ int elsewhere;
  if (threadIdx.x == 0) elsewhere = 0;
  // A rank whose rows of the last step have arrived reads no page of that step any more.
  bool came = await(group, ARRIVED, group.state[DISPATCHES]);
  if (came) {
    write_record(group, way, page, pair_limit, call, slot);
    __syncthreads();
    send(page);
    for (int source = threadIdx.x; source < ranks; source += blockDim.x) {
      const i64* at = signal_on(calls, group.rank, BEGUN, source);
      came &= reaches(group, at, begun(call), source, 1 + BEGUN, &elsewhere);
      settle(source, at);
      if (load_acquire(at) == begun_on_host(call)) *static_cast<volatile int*>(&elsewhere) = 1;
    }
    came = __syncthreads_and(came);
    for (int i = threadIdx.x; i < ranks * given; i += blockDim.x) {
      const i64* record = record_on(group, group.rank, i / given, page);
      group.matrix[1 + i] = __ldcg(record + i % given);
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *static_cast<volatile i64*>(group.matrix) = came ? call : -call;
}
