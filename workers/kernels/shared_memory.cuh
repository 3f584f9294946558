// Shared memory, and asynchronous copies to it, for kernels of all folders here.

#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

// Barriers in shared memory, one for the copies to a stage or for its readers. Their memory must have no other use.
__device__ __forceinline__ void make_barrier(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_are_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// Called by one thread; `bytes` is a multiple of 16.
__device__ __forceinline__ void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ u32 shared_4(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ uint2 shared_8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}

__device__ __forceinline__ uint4 shared_16(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
