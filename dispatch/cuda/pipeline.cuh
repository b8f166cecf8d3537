// Copies into shared memory that are under way while earlier ones are worked on. A lane reads only
// the words that it fetched itself, so lanes never wait for each other, and what is under way takes
// no registers.
#pragma once

extern __shared__ uint4 stages[];

__device__ __forceinline__ void fetch(uint4* to, const uint4* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}

// Ends a group of fetches.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the LATEST.
template <int LATEST> __device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
}
