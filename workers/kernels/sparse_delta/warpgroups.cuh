// Products of whole warpgroups with weights in registers (PTX ISA, "wgmma"), for kernels on squares. Compiled with BF16.

#pragma once

#include "squares.cuh"

typedef unsigned long long u64;

#define SUMS_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 \
  SUMS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 \
  SUMS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_96 \
  SUMS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_128 \
  SUMS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define C8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define C32(i) C8(i), C8(i + 8), C8(i + 16), C8(i + 24)
#define MULTIPLY(rows, sums, a, x)                                                                                  \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" rows "k16.f32." KIND "." KIND " {" sums \
  "}, {" a "}, " x ", add, 1, 1, 0;\n}"
#define INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)

// c += a x: 64 outputs of four warps, 16 columns, and twice as many rows as sums. `x`: the columns' address.
__device__ __forceinline__ void multiply(float (&c)[16], const u32 (&a)[4], u64 x) {
  asm volatile(MULTIPLY("32", SUMS_16, "%16, %17, %18, %19", "%20") : C8(0), C8(8) : INPUTS);
}

__device__ __forceinline__ void multiply(float (&c)[32], const u32 (&a)[4], u64 x) {
  asm volatile(MULTIPLY("64", SUMS_32, "%32, %33, %34, %35", "%36") : C32(0) : INPUTS);
}

__device__ __forceinline__ void multiply(float (&c)[64], const u32 (&a)[4], u64 x) {
  asm volatile(MULTIPLY("128", SUMS_64, "%64, %65, %66, %67", "%68") : C32(0), C32(32) : INPUTS);
}

__device__ __forceinline__ void multiply(float (&c)[96], const u32 (&a)[4], u64 x) {
  asm volatile(MULTIPLY("192", SUMS_96, "%96, %97, %98, %99", "%100") : C32(0), C32(32), C32(64) : INPUTS);
}

__device__ __forceinline__ void multiply(float (&c)[128], const u32 (&a)[4], u64 x) {
  asm volatile(MULTIPLY("256", SUMS_128, "%128, %129, %130, %131", "%132") : C32(0), C32(32), C32(64), C32(96) : INPUTS);
}

// Wait until all groups of products have ended except the last UNDER_WAY.
template <int UNDER_WAY>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
}

__device__ __forceinline__ void begin_product() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// How a product finds rows of 128 bytes, swizzled: their address, and the distance from eight rows to the next eight
// (PTX ISA, "Shared Memory Matrix Layout").
__device__ __forceinline__ u64 described(u32 at) {
  return (u64)(at >> 4) | (u64)1 << 16 | (u64)(8 * 128 >> 4) << 32 | (u64)1 << 62;
}

// Load four matrices of 8 x 8, whose rows are at the lanes' addresses.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(at));
}

// Store the same from registers, each with rows and columns exchanged.
__device__ __forceinline__ void store_turned(u32 at, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]),
               "r"(a[2]), "r"(a[3])
               : "memory");
}
