// Everything that calls NVSHMEM while a step runs: records, rows and signals to distant ranks, and
// results from them. Kernels of their own, so that those that move and sum rows are the same whether
// ranks are distant or not, and are not linked with NVSHMEM's library, its registers and its stack.
// `arrive`, `ready` and `ring` take the place of those of signals.cu.
//
// NVSHMEM names memory of another rank by the address that this rank's own copy has.
#include "records.cuh"

constexpr int PUT_THREADS = 512;
constexpr int RECORD_THREADS = 256;

// A signal that this rank posts elsewhere, as NVSHMEM names it.
__device__ __forceinline__ uint64_t* own_signal(const Group& group, Signal signal) {
  return reinterpret_cast<uint64_t*>(signal_on(group, group.rank, signal, group.rank));
}

__device__ __forceinline__ void post_nearby(const Group& group, Signal signal, i64 value, i64 rank) {
  __threadfence_system();
  store_release(signal_on(group, rank, signal, group.rank), value);
}

// Call behind `nvshmem_quiet`: everything that this rank has put is there then, and none of its
// signals can be overtaken.
__device__ __forceinline__ void post_distant(const Group& group, Signal signal, i64 value, i64 rank) {
  nvshmemx_signal_op(own_signal(group, signal), value, NVSHMEM_SIGNAL_SET, static_cast<int>(rank));
}

// `post` for all ranks. Call with all threads.
__device__ void post_everywhere(const Group& group, Signal signal, i64 value) {
  if (threadIdx.x == 0) nvshmem_quiet();
  __syncthreads();
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    if (is_distant(group, group.rank, rank)) {
      post_distant(group, signal, value, rank);
    } else {
      post_nearby(group, signal, value, rank);
    }
  }
}

// What NVSHMEM wants before that which was put is read; its signal has come.
__device__ __forceinline__ void settle(const i64* at, i64 value) {
  auto* word = reinterpret_cast<uint64_t*>(const_cast<i64*>(at));
  nvshmem_signal_wait_until(word, NVSHMEM_CMP_GE, value);
}

// `await` for all ranks. Call with all threads.
__device__ bool await_puts(const Group& group, Signal signal, i64 epoch) {
  const bool came = await(group, signal, epoch);
  if (came) {
    for (int source = threadIdx.x; source < group.ranks; source += blockDim.x) {
      if (!is_distant(group, group.rank, source)) continue;
      settle(signal_on(group, group.rank, signal, source), epoch);
    }
  }
  __syncthreads();
  return came;
}

// Bring this rank's record to every rank and post a signal of `signals` behind it. No earlier post of
// that signal may be under way. Call with all threads, behind a barrier.
__device__ void send_record(const Group& group, i64 page, const Group& signals, Signal signal,
                            i64 value) {
  __threadfence_system(); // what other threads wrote is the network's to read
  for (int rank = threadIdx.x / WARP; rank < group.ranks; rank += blockDim.x / WARP) {
    if (is_distant(group, group.rank, rank)) {
      nvshmemx_putmem_signal_nbi_warp(record_on(group, group.rank, group.rank, page),
                                      record_on(group, rank, group.rank, page),
                                      record_words(group) * sizeof(i64),
                                      own_signal(signals, signal), value, NVSHMEM_SIGNAL_SET, rank);
    } else if (threadIdx.x % WARP == 0) {
      post_nearby(signals, signal, value, rank);
    }
  }
  __syncthreads();
}

// Exchanges records of an eager step, after `route`. One block.
extern "C" __global__ void __launch_bounds__(RECORD_THREADS)
consult(const Group* __restrict__ shared_group, void* memory, i64 num_tokens, i64 call, i64 slot,
        i64 pair_limit) {
  const Group& group = *shared_group;
  const Way way(memory, group, num_tokens);
  if (threadIdx.x == 0) nvshmem_quiet();
  agree(
      group, way.record, call, slot, pair_limit,
      [&](i64 page) { send_record(group, page, *group.calls, BEGUN, begun(call)); },
      [&](int source, const i64* at) {
        const i64 value = begun(call);
        if (is_distant(group, group.rank, source) && load_acquire(at) >= value) settle(at, value);
      });
}

// Exchanges records of any other step, before `rows` judges them. One block.
extern "C" __global__ void __launch_bounds__(RECORD_THREADS)
record(const Group* __restrict__ shared_group, void* memory, i64 num_tokens, i64 pair_limit) {
  const Group& group = *shared_group;
  const Way way(memory, group, num_tokens);
  const i64 epoch = group.state[DISPATCHES] + 1;
  write_record(group, way.record, page_of_epoch(epoch), pair_limit, 0, 0);
  __syncthreads();
  // `put` has been quiet since the record before.
  send_record(group, page_of_epoch(epoch), group, RECORD, epoch);
  await_puts(group, RECORD, epoch);
}

// A block brings a distant rank its rows, which lie side by side here and there.
__device__ void put_rows(const Group& group, const Slot& slot, const Way& way, i64 rank,
                         i64 payload_bytes, i64 scale_bytes) {
  const i64 rows = way.record[HEADER + rank], first = way.first[rank], there = way.there[rank];
  if (rows == 0) return;
  const i64 at[] = {0, slot.scale_at, slot.ids_at, slot.weights_at, slot.source_at};
  const i64 row_bytes[] = {payload_bytes, scale_bytes, group.top_k * i64(sizeof(i64)),
                           group.top_k * i64(sizeof(float)), 2 * i64(sizeof(i64))};
#pragma unroll
  for (int part = 0; part < 5; ++part) {
    if (row_bytes[part] == 0) continue;
    nvshmemx_putmem_nbi_block(slot.bucket[group.rank] + at[part] + there * row_bytes[part],
                              slot.bucket[rank] + at[part] + first * row_bytes[part],
                              rows * row_bytes[part], static_cast<int>(rank));
  }
}

// Brings distant ranks their rows of the slot's step, announces this rank's to all, and unless
// `staged` waits for everybody's. After `rows`; as many blocks as there are ranks, or fewer.
extern "C" __global__ void __launch_bounds__(PUT_THREADS)
put(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
    i64 num_tokens, i64 payload_bytes, i64 scale_bytes, i64 staged) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  const i64 epoch = slot.state[STEP];
  const bool moves = !slot.state[REFUSED];
  __threadfence_system();
  for (i64 rank = blockIdx.x; rank < group.ranks; rank += gridDim.x) {
    if (!is_distant(group, group.rank, rank)) {
      if (threadIdx.x == 0) post_nearby(group, ARRIVED, epoch, rank);
      continue;
    }
    if (moves) put_rows(group, slot, way, rank, payload_bytes, scale_bytes);
    __syncthreads();
    if (threadIdx.x == 0) {
      nvshmem_quiet();
      post_distant(group, ARRIVED, epoch, rank);
    }
  }
  // The last block waits: it keeps nobody from writing.
  if (staged || !is_last_block(group.state, ROWS_TICKET)) return;
  if (!await_puts(group, ARRIVED, epoch) && threadIdx.x == 0) slot.state[REFUSED] = 1;
}

extern "C" __global__ void __launch_bounds__(MAX_RANKS)
arrive(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot) {
  const Slot& slot = *shared_slot;
  const bool came = await_puts(*shared_group, ARRIVED, slot.state[STEP]);
  if (!came && threadIdx.x == 0) slot.state[REFUSED] = 1;
}

extern "C" __global__ void __launch_bounds__(MAX_RANKS) ready(const Group* __restrict__ shared_group) {
  const Group& group = *shared_group;
  const i64 epoch = group.state[COMBINES] + 1;
  post_everywhere(group, READY, epoch);
  if (threadIdx.x == 0) group.state[COMBINES] = epoch;
}

extern "C" __global__ void __launch_bounds__(MAX_RANKS)
ring(const Group* __restrict__ calls, i64 call) {
  post_everywhere(*calls, BEGUN, begun_on_host(call));
}

// Brings home what distant ranks have for this one, `row_bytes` a row, to where `combine` reads it.
// After `ready`; as many blocks as there are ranks, or fewer.
extern "C" __global__ void __launch_bounds__(PUT_THREADS)
fetch(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
      i64 num_tokens, i64 row_bytes) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  if (!await_puts(group, READY, group.state[COMBINES]) || slot.state[REFUSED]) return;
  for (i64 rank = blockIdx.x; rank < group.ranks; rank += gridDim.x) {
    const i64 rows = way.record[HEADER + rank];
    if (rows == 0 || !is_distant(group, group.rank, rank)) continue;
    nvshmemx_getmem_block(slot.bucket[rank] + slot.y_at + way.first[rank] * row_bytes,
                          slot.bucket[group.rank] + slot.y_at + way.there[rank] * row_bytes,
                          rows * row_bytes, static_cast<int>(rank));
  }
}
