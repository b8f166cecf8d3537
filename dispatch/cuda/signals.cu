// The small ends of a step. One block each: a wait must not take the place of a writer.
#include "group.cuh"

// Returns when every rank's rows of the slot's step are there. A step that somebody did not finish
// in time becomes a refused one.
extern "C" __global__ void __launch_bounds__(MAX_RANKS)
arrive(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot) {
  const Slot& slot = *shared_slot;
  const bool came = await(*shared_group, ARRIVED, slot.state[STEP]);
  if (!came && threadIdx.x == 0) slot.state[REFUSED] = 1;
}

// Tells every rank that this one's results are there to be read.
extern "C" __global__ void __launch_bounds__(MAX_RANKS) ready(const Group* __restrict__ shared_group) {
  const Group& group = *shared_group;
  const i64 epoch = group.state[COMBINES] + 1;
  __syncthreads();
  post(group, READY, epoch);
  if (threadIdx.x == 0) group.state[COMBINES] = epoch;
}

// Returns when every rank has said so.
extern "C" __global__ void __launch_bounds__(MAX_RANKS) meet(const Group* __restrict__ shared_group) {
  await(*shared_group, READY, shared_group->state[COMBINES]);
}

// Tells every rank that this one has begun a call and goes to the exchange of the hosts.
extern "C" __global__ void __launch_bounds__(MAX_RANKS)
ring(const Group* __restrict__ calls, i64 call) {
  post(*calls, BEGUN, begun_on_host(call));
}
