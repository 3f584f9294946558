// The common parts of the kernels on digits of two bits (for their layout see layout.py). Compiled with BF16 (1:
// bfloat16, 0: float16), WARPS, ROWS (8 or 16, of a block of threads), STAGES, FIELDS, PLACES, MAX_SLICES.

#pragma once

#include "shared_memory.cuh"

#define PANEL 128  // columns with one scale
#define GROUP 16   // digits of one product
#define WORD_BYTES 32
#define PLANES 8
#define THREADS (32 * WARPS)

// Codes keep an excess that depends on their plane.
#if BF16
#define KIND "bf16"
#define ONES 0x3f803f80u
#define MAGIC_0 0x43004300u
#define MAGIC_1 0x42004200u
#define MAGIC_2 0x41004100u
#define EXCESS_0 128.f
#define EXCESS_1 32.f
#define EXCESS_2 8.f
#else
#define KIND "f16"
#define ONES 0x3c003c00u
#define MAGIC_0 0x64006400u
#define MAGIC_1 0x5c005c00u
#define MAGIC_2 0x54005400u
#define EXCESS_0 1024.f
#define EXCESS_1 256.f
#define EXCESS_2 64.f
#endif

struct Slices { int count; int outputs[MAX_SLICES]; };

// Round up to a multiple of `of`.
__device__ __forceinline__ int filled(int count, int of) { return (count + of - 1) / of * of; }

// Wait until all earlier launches have ended, and their writes are visible.
__device__ __forceinline__ void wait_for_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next launch to begin as soon as there is room.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ u32 shared_2(u32 from) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

// c += a b: a has 16 rows, b 8 columns; 16 are summed over.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two codes of plane `place` (0, 1 or 2), plus its excess.
__device__ __forceinline__ u32 picked(u32 words, int place) {
  u32 d;
  const u32 mask = 0x00030003u << (2 * place);
  const u32 magic = place == 0 ? MAGIC_0 : place == 1 ? MAGIC_1 : MAGIC_2;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(words), "r"(mask), "r"(magic));
  return d;
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float half_value(u32 half) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)half));
  return f;
}

// Convert float16 to the type of the products.
__device__ __forceinline__ u32 converted(u32 low, u32 high) {
#if BF16
  return rounded(half_value(low), half_value(high));
#else
  return low | high << 16;
#endif
}

__device__ __forceinline__ float widened(u16 half) {
#if BF16
  return __uint_as_float((u32)half << 16);
#else
  return half_value(half);
#endif
}

__device__ __forceinline__ u16 narrowed(float value) {
  u16 half;
  asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
