// The common products of both expand kernels. SCALES and ZEROS are the offsets in a stage; for the other constants see
// digits.cuh.

#pragma once

#include "digits.cuh"

__device__ __forceinline__ void transposed(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from));
}

__device__ __forceinline__ float2 shared_floats(u32 from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from));
  return v;
}

// A thread's 16 inner products of a row.
struct Inner { float2 low, high; };

// Add the products of 16 digits, whose words are at `words`, and their scales and zero points at `lines` and ZEROS -
// SCALES further. `more`: the sums of the right operand, and of that times its zero points.
template <int TO>
__device__ __forceinline__ void add(float (&sums)[PLANES][TO][4], float (&more)[TO][4], const Inner (&t)[TO], u32 words,
                                    u32 lines, int shift) {
  const u32 low = shared_4(lines), high = shared_4(lines + 16);
  const u32 z0 = picked(shared_4(lines + ZEROS - SCALES) >> shift, 0);
  const u32 z1 = picked(shared_4(lines + ZEROS - SCALES + 16) >> shift, 0);
  u32 b[TO][2], a[4];
  transposed(a, words);
#pragma unroll
  for (int n = 0; n < TO; n++) {
    b[n][0] = rounded(t[n].low.x * half_value(low), t[n].low.y * half_value(low >> 16));
    b[n][1] = rounded(t[n].high.x * half_value(high), t[n].high.y * half_value(high >> 16));
  }
#pragma unroll
  for (int n = 0; n < TO; n++) multiply(more[n], ONES, z0, ONES, z1, b[n][0], b[n][1]);
#pragma unroll
  for (int j = 0; j < PLANES; j++) {
    if (j == 3 || j == 6)
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] >>= 6;
    const u32 a0 = picked(a[0], j % 3), a1 = picked(a[1], j % 3), a2 = picked(a[2], j % 3), a3 = picked(a[3], j % 3);
#pragma unroll
    for (int n = 0; n < TO; n++) multiply(sums[j][n], a0, a1, a2, a3, b[n][0], b[n][1]);
  }
}
