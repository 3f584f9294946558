// The second half of singular-value deltas: out[rows of a slot] += t[rows] U^T, for all variants and slices. It serves
// batches of few rows, and of many; expand_many.cu serves those between.
//
// A block of threads has PANELS panels of 128 outputs of a slice, for at most ROWS rows of one slot. Its warps divide
// the slice's digits, 16 at a time. Their sums are added in their order, which depends on the digits alone. So a row's
// result depends neither on the rest of the batch, nor on PANELS.
//
// Outputs are the rows of a product: 16 for each plane of the words. The inner products times the digits' scales are
// rounded; the excess of codes, and zero points, are subtracted from the sums.
//
// Compiled with the constants in digits.cuh.

#include "digits.cuh"

#define GROUPS (WARPS * AT_ONCE)              // of digits, in a stage
#define SCALES (GROUPS * GROUP * WORD_BYTES)  // the scales' offset in a stage
#define ZEROS (SCALES + GROUPS * 32)
#define INNER (ZEROS + GROUPS * 32)
#define INNER_PITCH (GROUPS * GROUP * 4 + 32)
#define STAGE (INNER + ROWS * INNER_PITCH)
#define LEFT 128  // the offset of the sums, after the barriers
#define FIRST_STAGE (LEFT + WARPS * 8 * PITCH * 4)
#define PITCH (PANEL + 4)
#define EACH (8 * PANEL / THREADS)  // outputs of a thread, of eight rows

#include "expand.cuh"

// A block's part of one slice.
struct Work {
  const u8 *digits_of, *halves_of;  // U
  const float *inner, *inner_halves;
  int digits, halves, outputs, panels;
};

// A block's stages. Each has GROUPS groups of a panel's digits, in order, or the panel's last groups.
struct Ring {
  u32 base, stage, parity;  // the next stage

  __device__ __forceinline__ Ring(u32 base) : base(base), stage(0), parity(0) {}
  __device__ __forceinline__ u32 filled_barrier() const { return base + 8 * stage; }
  __device__ __forceinline__ u32 read_barrier() const { return base + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 at() const { return base + FIRST_STAGE + stage * STAGE; }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The warp that fills stages.
struct Filling {
  const Work &work;
  i64 panel_words;
  int line, groups, panel, until, group, rows;
  const float *inner;  // a lane's row

  __device__ __forceinline__ Filling(const Work &work, int panel, int until, const float *inner, int rows)
      : work(work), panel(panel), until(until), group(0), rows(rows), inner(inner) {
    groups = (work.digits + GROUP - 1) / GROUP;
    panel_words = (i64)work.digits * WORD_BYTES;
    line = groups * GROUP * 2;
  }

  __device__ __forceinline__ bool more() const { return panel < until && groups > 0; }
  __device__ __forceinline__ int count() const { return min(GROUPS, groups - group); }

  __device__ __forceinline__ void next() {
    group += GROUPS;
    if (group >= groups) group = 0, panel++;
  }

  __device__ __forceinline__ void weights(const Ring &ring) const {
    const u32 word_bytes = min(GROUPS * GROUP, work.digits - group * GROUP) * WORD_BYTES, line_bytes = count() * 32;
    const u32 to = ring.at(), barrier = ring.filled_barrier();
    const u8 *scales = work.digits_of + work.panels * panel_words + group * 32;
    if ((threadIdx.x & 31) == 0) {
      expect(barrier, word_bytes + 2 * line_bytes + rows * count() * 64);
      copy(to, work.digits_of + panel * panel_words + group * GROUP * WORD_BYTES, word_bytes, barrier);
      copy(to + SCALES, scales + (i64)panel * line, line_bytes, barrier);
      copy(to + ZEROS, scales + (i64)(work.panels + (panel >> 3)) * line, line_bytes, barrier);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void inner_products(const Ring &ring) const {
    const int lane = threadIdx.x & 31;
    if (lane < rows)
      copy(ring.at() + INNER + lane * INNER_PITCH, inner + group * GROUP, count() * 64, ring.filled_barrier());
    __syncwarp();
  }

  __device__ __forceinline__ void run(u32 base) {
    Filling ahead = *this;
    Ring first(base), ring(base);
    for (int i = 0; i < STAGES && ahead.more(); i++, ahead.next(), first.next()) ahead.weights(first);
    wait_for_others();
    for (int i = 0; more(); i++, next(), ring.next()) {
      if (i >= STAGES) {
        wait_for(ring.read_barrier(), ring.parity ^ 1);
        weights(ring);
      }
      inner_products(ring);
    }
  }
};

// Add a warp's share of the ranks of 16 bits, read from global memory, to its sums of eight rows.
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

// All warps except the one that fills stages.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

template <int TO>
__device__ __forceinline__ void run(const Work &work, u16 *out, i64 out_stride, i64 places, const int *numbers, int rows,
                                    int panel, int until) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float *left = (float *)(shared + LEFT);
  Ring ring((u32)__cvta_generic_to_shared(shared));
  const int groups = (work.digits + GROUP - 1) / GROUP;
  u32 inner_at[TO];
#pragma unroll
  for (int n = 0; n < TO; n++)
    inner_at[n] = INNER + (n * 8 + g < rows ? n * 8 + g : 0) * INNER_PITCH + 8 * t + warp * GROUP * 4;
  const u32 word_at =
      warp * GROUP * WORD_BYTES + (lane & 7) * WORD_BYTES + (lane >> 3 & 1) * 16 + (lane >> 4) * 8 * WORD_BYTES;
  wait_for_others();
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
    for (int group = 0; group < groups; group += GROUPS) {
      wait_for(ring.filled_barrier(), ring.parity);
      u32 words = ring.at() + word_at, lines = ring.at() + SCALES + warp * 32 + 4 * t, place = ring.at();
      const int stop = min(GROUPS, groups - group);
#pragma unroll 1
      for (int at = warp; at < stop; at += WARPS) {
        Inner now[TO];
#pragma unroll
        for (int n = 0; n < TO; n++) {
          now[n].low = shared_floats(place + inner_at[n]);
          now[n].high = shared_floats(place + inner_at[n] + 32);
        }
        add<TO>(sums, more, now, words, lines, 2 * (panel & 7));
        words += WARPS * GROUP * WORD_BYTES, lines += WARPS * 32, place += WARPS * GROUP * 4;
      }
      __syncwarp();
      if (lane == 0) arrive(ring.read_barrier());
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
      meet();
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int eighth = i * (THREADS / PANEL) + threadIdx.x / PANEL, row = n * 8 + eighth;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += left[(w * 8 + eighth) * PITCH + output];
        if (row < rows && column < work.outputs) out[numbers[row] * out_stride + column] = narrowed(widened(old[n][i]) + total);
      }
      meet();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS)
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
    wait_for_others();  // a later launch that waits for this launch also waits for those before it
    return;
  }
  const int *numbers = order + tile[1] + skipped, panel = block * panels_each;
  const int until = min(panel + panels_each, work.panels);
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(base + 8 * i, 1), make_barrier(base + 8 * (STAGES + i), WARPS);
    barriers_are_made();
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    const int lane = threadIdx.x & 31;
    Filling(work, panel, until, work.inner + numbers[lane < rows ? lane : 0] * places, rows).run(base);
    return;
  }
#if ROWS > 8
  if (rows > 8)
    run<2>(work, out + column, out_stride, places, numbers, rows, panel, until);
  else
#endif
    run<1>(work, out + column, out_stride, places, numbers, rows, panel, until);
}
