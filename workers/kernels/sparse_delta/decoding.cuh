// Copies of squares to shared memory, and decoding of their codes. Compiled with BF16.

#pragma once

#include "squares.cuh"

#if BF16
#define MAGIC 0x43004300u  // 128: its last bit is worth 1
#define ONE 0x3f803f80u
#define QUARTER 0x3e803e80u
#define SIXTEENTH 0x3d803d80u
#define LESS_4 0xc308c308u   // -(128 + 8)
#define LESS_2A 0xc302c302u  // -(128 + 2), -(128 / 4 + 2), -(128 / 16 + 2)
#define LESS_2B 0xc208c208u
#define LESS_2C 0xc120c120u
#else
#define MAGIC 0x64006400u  // 1024
#define ONE 0x3c003c00u
#define QUARTER 0x34003400u
#define SIXTEENTH 0x2c002c00u
#define LESS_4 0xe408e408u
#define LESS_2A 0xe402e402u
#define LESS_2B 0xdc08dc08u
#define LESS_2C 0xd420d420u
#endif

__device__ __forceinline__ void copy_16(u32 to, const void *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copy_16_once(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 with_magic(u32 word, u32 mask) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(MAGIC));
  return d;
}

// Eight codes of 4 bits: those of register r are nibbles r and 4 + r.
__device__ __forceinline__ void four_bits(u32 word, u32 *a) {
#pragma unroll
  for (int r = 0; r < 4; r++) a[r] = times_plus(with_magic(word >> (4 * r), 0x000f000fu), ONE, LESS_4);
}

// Sixteen codes of 2 bits: those of register r are bits 2r and 16 + 2r. Three in a row fit a mantissa.
__device__ __forceinline__ void two_bits(u32 word, u32 *a) {
#pragma unroll
  for (int r = 0; r < 8; r++) {
    const int place = r % 3;
    u32 made = with_magic(word >> (6 * (r / 3)), 0x00030003u << (2 * place));
    a[r] = place == 0 ? times_plus(made, ONE, LESS_2A)
         : place == 1 ? times_plus(made, QUARTER, LESS_2B)
                      : times_plus(made, SIXTEENTH, LESS_2C);
  }
}
