// Rings of stages in shared memory, which the copying engine fills (PTX ISA, "Tensors" and "mbarrier").

#pragma once

#include "squares.cuh"

// How to copy boxes of a matrix (CUtensorMap).
struct alignas(64) Map { unsigned long long words[16]; };

// Called by one thread: copy a box that begins at this column and row; zeros beyond the matrix.
__device__ __forceinline__ void copy_box(u32 to, const Map &map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// A ring. Its writer and its readers each have an own copy of this object, and take the same steps. A stage is full
// when its copies have arrived, and free when all warps that read it have reported that.
template <int STAGES, int BYTES>
struct Ring {
  u32 memory, barriers;
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ Ring(u32 memory, u32 barriers) : memory(memory), barriers(barriers) {}
  __device__ __forceinline__ void make(int readers) const {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      make_barrier(barriers + 8 * i, 1);
      make_barrier(barriers + 8 * (STAGES + i), readers);
    }
  }
  __device__ __forceinline__ u32 at() const { return memory + stage * BYTES; }
  __device__ __forceinline__ u32 full() const { return barriers + 8 * stage; }
  __device__ __forceinline__ u32 free() const { return barriers + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 free_before() const {
    return barriers + 8 * (STAGES + (stage == 0 ? STAGES - 1 : stage - 1));
  }
  __device__ __forceinline__ void wait_until_full() const { wait_for(full(), parity); }
  __device__ __forceinline__ void wait_until_free() const { wait_for(free(), parity ^ 1); }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
