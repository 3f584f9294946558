// What singular-value deltas add: out[rows of a slot] += t[rows] U^T, for all variants and slices.
//
// A block of threads has PANELS panels of 128 outputs of a slice, for at most ROWS rows of one slot. Its warps share the
// slice's digits out, 16 at a time; their sums are added in their order, which follows from the digits alone: a row's
// result does not depend on who else is in the batch, nor on PANELS.
//
// Outputs are the rows of a product: 16 for each plane of the words. The inner
// products times the digits' scales are rounded; the excess of codes, and zero points, are subtracted from the sums.
//
// Compiled as digits.cuh says.

#include "digits.cuh"

#define SCALES (AT_ONCE * GROUP * WORD_BYTES)  // where they lie in it
#define ZEROS (SCALES + AT_ONCE * 32)
#define INNER (ZEROS + AT_ONCE * 32)
#define INNER_PITCH (AT_ONCE * GROUP * 4 + 32)
#define STAGE (INNER + ROWS * INNER_PITCH)
#define PITCH (PANEL + 4)
#define EACH (8 * PANEL / THREADS)  // outputs of a thread, of eight rows

#define ROWS_AT_ONCE (32 / (4 * AT_ONCE))
#define EACH_ROWS (ROWS / ROWS_AT_ONCE)  // of them that a lane copies from
#define NONE 0xffffffffu

// A block's part of one slice.
struct Work {
  const u8 *digits_of, *halves_of;  // U
  const float *inner, *inner_halves;
  int digits, halves, outputs, panels;
};

// A warp's groups of digits [first, last), panel after panel; AT_ONCE are fetched at once.
struct Digits {
  const u8 *words, *scales, *zeros;
  i64 panel_words;
  int line, first, last, digits;
  int panel, group;  // what is fetched next
  int inner_group;   // whose inner products

  __device__ __forceinline__ Digits(const Work &work, int from) {
    const int warp = threadIdx.x >> 5, groups = (work.digits + GROUP - 1) / GROUP;
    first = warp * groups / WARPS;
    last = (warp + 1) * groups / WARPS;
    digits = work.digits;
    panel_words = (i64)work.digits * WORD_BYTES;
    line = groups * GROUP * 2;
    words = work.digits_of;
    scales = work.digits_of + work.panels * panel_words;
    zeros = scales + (i64)work.panels * line;
    panel = from;
    group = inner_group = first;
  }

  __device__ __forceinline__ void fetch(const Ring &ring, u32 stage, int until) {
    if (panel >= until || first == last) return;
    const int count = min(AT_ONCE, last - group);
    if ((threadIdx.x & 31) == 0) {
      const u32 word_bytes = min(count * GROUP, digits - group * GROUP) * WORD_BYTES, line_bytes = count * 32;
      ring.expect(stage, word_bytes + 2 * line_bytes);
      ring.copy(stage, 0, words + panel * panel_words + group * GROUP * WORD_BYTES, word_bytes);
      ring.copy(stage, SCALES, scales + (i64)panel * line + group * 32, line_bytes);
      ring.copy(stage, ZEROS, zeros + (i64)(panel >> 3) * line + group * 32, line_bytes);
    }
    group += count;
    if (group == last) group = first, panel++;
  }

  // Inner products: of each row AT_ONCE * 64 bytes, a lane 16 of them at a time. Those of a slice's last digits are
  // followed by others, which are not used.
  __device__ __forceinline__ void fetch_inner(u32 to, const float *inner, const u32 (&row_at)[EACH_ROWS]) {
    const int lane = threadIdx.x & 31, chunk = lane % (4 * AT_ONCE);
#pragma unroll
    for (int i = 0; i < EACH_ROWS; i++) {
      if (row_at[i] != NONE && inner_group + chunk / 4 < last)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to + (i * ROWS_AT_ONCE + lane / (4 * AT_ONCE)) *
                                                                                INNER_PITCH +
                                                                       chunk * 16),
                     "l"(inner + row_at[i] + inner_group * GROUP + chunk * 4)
                     : "memory");
    }
    inner_group = inner_group + AT_ONCE >= last ? first : inner_group + AT_ONCE;
    commit();
  }
};

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

// What a thread multiplies of 16 inner products of a row.
struct Inner { float2 low, high; };

// Add the products of 16 digits, whose words are at `words`, and their scales and zero points at `lines` and ZEROS -
// SCALES further. `more`: the sums of what is multiplied, and of that times its zero points.
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

// A warp's share of the ranks of 16 bits, as they lie in global memory, is added to what it left of eight rows.
__device__ __forceinline__ void add_halves(float *left, const Work &work, i64 row_at, int panel) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int groups = (work.halves + GROUP - 1) / GROUP;
#pragma unroll 1
  for (int j = 0; j < PLANES; j++) {
    const int column = panel * PANEL + 16 * j + g;
    const int outputs[2] = {min(column, work.outputs - 1), min(column + 8, work.outputs - 1)};
    float sums[4] = {};
#pragma unroll 2
    for (int group = warp * groups / WARPS; group < (warp + 1) * groups / WARPS; group++) {
      const int rank = group * GROUP + 2 * t;
      const float2 low = *(const float2 *)(work.inner_halves + row_at + rank);
      const float2 high = *(const float2 *)(work.inner_halves + row_at + rank + 8);
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u16 *u = (const u16 *)work.halves_of + outputs[i & 1];
        const int first = rank + 8 * (i >> 1), last = work.halves - 1;
        a[i] = converted(u[(i64)min(first, last) * work.outputs], u[(i64)min(first + 1, last) * work.outputs]);
      }
      multiply(sums, a[0], a[1], a[2], a[3], rounded(low.x, low.y), rounded(high.x, high.y));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) left[(2 * t + (i & 1)) * PITCH + 16 * j + g + 8 * (i >> 1)] += sums[i];
  }
}

extern __shared__ __align__(128) u8 shared[];

template <int TO>
__device__ __forceinline__ void run(const Work &work, u16 *out, i64 out_stride, i64 places, const int *numbers, int rows,
                                    int panel, int until) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 base = (u32)__cvta_generic_to_shared(shared), first_stage = FIRST_STAGE + WARPS * 8 * PITCH * 4;
  float *left = (float *)(shared + FIRST_STAGE);
  Ring ring(base + warp * STAGES * 8, base + first_stage + warp * STAGES * STAGE, STAGE);
  Digits digits(work, panel);
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) digits.fetch(ring, i, until);
  wait_for_others();

  u32 copied[EACH_ROWS];
#pragma unroll
  for (int i = 0; i < EACH_ROWS; i++) {
    const int row = i * ROWS_AT_ONCE + lane / (4 * AT_ONCE);
    copied[i] = row < rows ? (u32)(numbers[row] * places) : NONE;
  }
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) digits.fetch_inner(base + first_stage + (warp * STAGES + i) * STAGE + INNER, work.inner, copied);
  u32 inner_at[TO];
#pragma unroll
  for (int n = 0; n < TO; n++) inner_at[n] = INNER + (n * 8 + g < rows ? n * 8 + g : 0) * INNER_PITCH + 8 * t;
  const u32 word_at = (lane & 7) * WORD_BYTES + (lane >> 3 & 1) * 16 + (lane >> 4) * 8 * WORD_BYTES;
#pragma unroll 1
  for (; panel < until; panel++) {
    u16 old[TO][EACH];
    const int output = threadIdx.x % PANEL, column = panel * PANEL + output;
#pragma unroll
    for (int n = 0; n < TO; n++)
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int row = n * 8 + i * (THREADS / PANEL) + threadIdx.x / PANEL;
        old[n][i] = row < rows && column < work.outputs ? out[numbers[row] * out_stride + column] : 0;
      }
    float sums[PLANES][TO][4] = {}, more[TO][4] = {};
#pragma unroll 1
    for (int group = digits.first; group < digits.last;) {
      ring.wait();
      wait_for_rows<STAGES - 1>();
      __syncwarp();
      u32 words = ring.at() + word_at, lines = ring.at() + SCALES + 4 * t, place = ring.at();
      const int stop = min(group + AT_ONCE, digits.last);
#pragma unroll 1
      for (; group < stop; group++, words += GROUP * WORD_BYTES, lines += 32, place += GROUP * 4) {
        Inner now[TO];
#pragma unroll
        for (int n = 0; n < TO; n++) {
          now[n].low = shared_floats(place + inner_at[n]);
          now[n].high = shared_floats(place + inner_at[n] + 32);
        }
        add<TO>(sums, more, now, words, lines, 2 * (panel & 7));
      }
      __syncwarp();
      digits.fetch_inner(ring.at() + INNER, work.inner, copied);
      digits.fetch(ring, ring.stage, until);
      ring.next();
    }
#pragma unroll
    for (int n = 0; n < TO; n++) {
      if (n * 8 >= rows) break;
      float *own = left + warp * 8 * PITCH;
#pragma unroll
      for (int j = 0; j < PLANES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float excess = j % 3 == 0 ? 0.f : j % 3 == 1 ? EXCESS_0 - EXCESS_1 : EXCESS_0 - EXCESS_2;
          const float sum = fmaf(excess, more[n][i & 1], sums[j][n][i] - more[n][2 + (i & 1)]);
          own[(2 * t + (i & 1)) * PITCH + 16 * j + g + 8 * (i >> 1)] = sum;
        }
      if (work.halves) add_halves(own, work, numbers[n * 8 + g < rows ? n * 8 + g : 0] * places, panel);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int eighth = i * (THREADS / PANEL) + threadIdx.x / PANEL, row = n * 8 + eighth;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += left[(w * 8 + eighth) * PITCH + output];
        if (row < rows && column < work.outputs) out[numbers[row] * out_stride + column] = narrowed(widened(old[n][i]) + total);
      }
      __syncthreads();
    }
  }
  wait_for_rows<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
expand(u16 *out, const u8 *arena, const i64 *table, const int *tiles, const int *order, const float *shrunk, i64 out_stride,
       i64 places, int panels_each, int cuts, Slices slices) {
  let_next_begin();
  const int *tile = tiles + 3 * (blockIdx.y / cuts), skipped = blockIdx.y % cuts * ROWS;
  const int slot = tile[0], rows = min(tile[2] - skipped, ROWS);
  int block = blockIdx.x, index = 0, column = 0;
  int outputs = slices.outputs[0];
#pragma unroll
  for (int s = 0; s < MAX_SLICES - 1; s++) {
    const int blocks = (slices.outputs[s] + PANEL * panels_each - 1) / (PANEL * panels_each);
    if (index == s && s + 1 < slices.count && block >= blocks) {
      block -= blocks;
      column += slices.outputs[s];
      outputs = slices.outputs[s + 1];
      index = s + 1;
    }
  }
  Work work = {};
  if (slot >= 0 && rows > 0) {
    const i64 *fields = table + (i64)slot * slices.count * FIELDS;
    int place = 0;
#pragma unroll
    for (int s = 0; s < MAX_SLICES; s++)
      if (s < index) place += filled((int)fields[s * FIELDS], PLACES) + filled((int)fields[s * FIELDS + 5], PLACES);
    fields += index * FIELDS;
    work.digits = (int)fields[0];
    work.halves = (int)fields[5];
    work.digits_of = arena + fields[4];
    work.halves_of = arena + fields[7];
    work.inner = shrunk + place;
    work.inner_halves = work.inner + filled(work.digits, PLACES);
    work.outputs = outputs;
    work.panels = (outputs + PANEL - 1) / PANEL;
  }
  if (work.digits + work.halves == 0) {
    wait_for_others();  // who waits for this launch waits for those before, too
    return;
  }
  const int *numbers = order + tile[1] + skipped, panel = block * panels_each;
  const int until = min(panel + panels_each, work.panels);
#if ROWS > 8
  if (rows > 8)
    run<2>(work, out + column, out_stride, places, numbers, rows, panel, until);
  else
#endif
    run<1>(work, out + column, out_stride, places, numbers, rows, panel, until);
}
