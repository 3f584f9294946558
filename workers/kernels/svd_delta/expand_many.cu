// The second half of singular-value deltas, like expand.cu, for batches of some rows.
//
// Blocks of threads are persistent: each has an equal share of all the work, panels of 128 outputs in the order of
// tiles and slices. So little time is lost where one ends and the next begins. A warp takes every WARPS-th 16 digits of
// a panel, as in expand.cu, and the warps' sums are added in the same order: a row's result is the same to the bit. One
// more warp only copies weights, and inner products: those of up to ROWS rows stay for all panels.
//
// Compiled with AT_ONCE (groups of 16 digits of a warp, in a stage), INNER_BYTES, and the constants in digits.cuh.

#include "digits.cuh"

#define GROUPS (WARPS * AT_ONCE)              // of digits, in a stage
#define SCALES (GROUPS * GROUP * WORD_BYTES)  // the scales' offset in a stage
#define ZEROS (SCALES + GROUPS * 32)
#define STAGE (ZEROS + GROUPS * 32)
#define PASS 128  // after the barriers: the current pass
#define LEFT 256  // the offset of the sums
#define INNER (LEFT + WARPS * PLANES * 32 * 16)
#define FIRST_STAGE (INNER + INNER_BYTES)

#include "expand.cuh"

extern __shared__ __align__(128) u8 shared[];

// Some panels of one slice of a tile.
struct Run {
  const u8 *digits_of, *halves_of;  // U
  const float *inner, *inner_halves;
  const int *numbers;
  int rows, digits, halves, outputs, column, panels, panel, until;

  __device__ __forceinline__ int groups() const { return (digits + GROUP - 1) / GROUP; }
  // Bytes from a row's inner products to the next row's: those of four rows use different banks.
  __device__ __forceinline__ int pitch() const { return filled(groups(), 2) * 64 + 32; }
  // The number of rows whose inner products fit at once.
  __device__ __forceinline__ int at_once() const { return min(ROWS, INNER_BYTES / pitch()); }
};

// The message to the multiplying warps in shared memory: some rows of a run. No rows: the end.
struct Pass {
  const u8 *halves_of;
  const float *inner_halves;
  int rows, groups, pitch, halves, outputs, column, panel, until;
  int numbers[ROWS];
};

// A block's share, run after run.
struct Runs {
  const u8 *arena;
  const i64 *table;
  const int *tiles, *order;
  const float *shrunk;
  const Slices &slices;
  int units, at, until;  // `units`: panels of a tile

  // False: there are no more runs.
  __device__ __forceinline__ bool next(Run &run) {
    while (at < until) {
      const int *tile = tiles + 3 * (at / units);
      const i64 *fields = table + (i64)tile[0] * slices.count * FIELDS;
      run.panel = at % units;
      run.column = 0;
      int place = 0;
#pragma unroll
      for (int s = 0; s < MAX_SLICES; s++) {
        run.outputs = slices.outputs[s];
        run.panels = (run.outputs + PANEL - 1) / PANEL;
        run.digits = (int)fields[0];
        run.halves = (int)fields[5];
        if (s + 1 >= slices.count || run.panel < run.panels) break;
        run.panel -= run.panels;
        run.column += run.outputs;
        place += filled(run.digits, PLACES) + filled(run.halves, PLACES);
        fields += FIELDS;
      }
      run.until = min(run.panels, run.panel + until - at);
      at += run.until - run.panel;
      if (run.digits + run.halves == 0) continue;
      run.numbers = order + tile[1];
      run.rows = tile[2];
      run.digits_of = arena + fields[4];
      run.halves_of = arena + fields[7];
      run.inner = shrunk + place;
      run.inner_halves = run.inner + filled(run.digits, PLACES);
      return true;
    }
    return false;
  }
};

// Stages: each has GROUPS groups of a panel's digits, in order, or the panel's last groups.
struct Ring {
  u32 base, stage, parity;  // the next stage

  __device__ __forceinline__ Ring(u32 base) : base(base), stage(0), parity(0) {}
  __device__ __forceinline__ u32 filled_barrier() const { return base + 8 * stage; }
  __device__ __forceinline__ u32 read_barrier() const { return base + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 offset() const { return FIRST_STAGE + stage * STAGE; }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ u32 pass_barrier(u32 base) { return base + 8 * (2 * STAGES); }
__device__ __forceinline__ u32 done_barrier(u32 base) { return base + 8 * (2 * STAGES + 1); }
__device__ __forceinline__ u32 left_barrier(u32 base) { return base + 8 * (2 * STAGES + 2); }

// Walks through all passes of a block's runs, and the stages of each.
struct Cursor {
  Runs runs;
  Run run;
  bool more;
  int skipped, panel, group, groups;
  const u8 *lane_from;  // of the first panel: words (lane 0), scales (1) and zero points (2)
  // bytes from a panel to the next (for zero points, to the panel after eight), and from a group to the next
  int lane_panel, lane_group;
  int lane_shift, lane_to;

  __device__ __forceinline__ Cursor(const Runs &runs) : runs(runs) { open(); }

  __device__ __forceinline__ void open() {
    more = runs.next(run);
    skipped = group = 0;
    panel = run.panel;
    groups = run.groups();
    const int lane = threadIdx.x & 31, panel_words = run.digits * WORD_BYTES;
    lane_from = run.digits_of;
    if (lane > 0) lane_from += (i64)run.panels * (panel_words + (lane > 1 ? groups * 32 : 0));
    lane_panel = lane > 0 ? groups * 32 : panel_words;
    lane_group = lane > 0 ? 32 : GROUP * WORD_BYTES;
    lane_shift = lane > 1 ? 3 : 0;
    lane_to = lane > 1 ? ZEROS : lane > 0 ? SCALES : 0;
  }

  // Move to the next pass; its stages begin with the first.
  __device__ __forceinline__ void next_pass() {
    panel = run.panel;
    skipped += run.at_once();
    if (skipped >= run.rows) open();
  }

  // Skip passes without stages: ranks of 16 bits are not copied.
  __device__ __forceinline__ void to_stage() {
    while (more && run.digits == 0) open();
  }

  __device__ __forceinline__ void next_stage() {
    group += GROUPS;
    if (group < groups) return;
    group = 0;
    if (++panel < run.until) return;
    next_pass();
    to_stage();
  }

  // Copy words, scales and zero points, each by one lane.
  __device__ __forceinline__ void weights(const Ring &ring) const {
    const int lane = threadIdx.x & 31, taken = min(GROUPS, groups - group);
    const u32 barrier = ring.filled_barrier(), word_bytes = min(taken * GROUP, run.digits - group * GROUP) * WORD_BYTES;
    if (lane == 0) expect(barrier, word_bytes + taken * 64);
    __syncwarp();
    if (lane < 3)
      copy(ring.base + ring.offset() + lane_to, lane_from + (i64)(panel >> lane_shift) * lane_panel + group * lane_group,
           lane == 0 ? word_bytes : taken * 32, barrier);
    __syncwarp();
  }

  __device__ __forceinline__ int rows() const { return more ? min(run.at_once(), run.rows - skipped) : 0; }

  // Write the next pass to shared memory.
  __device__ __forceinline__ void write() const {
    Pass &pass = *(Pass *)(shared + PASS);
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
      pass.halves_of = run.halves_of, pass.inner_halves = run.inner_halves;
      pass.rows = rows(), pass.groups = groups, pass.pitch = run.pitch(), pass.halves = run.halves;
      pass.outputs = run.outputs, pass.column = run.column, pass.panel = run.panel, pass.until = run.until;
    }
    if (lane < rows()) pass.numbers[lane] = run.numbers[skipped + lane];
    __syncwarp();
  }

  // Start the pass, and copy its inner products.
  __device__ __forceinline__ void begin(u32 base, i64 places) const {
    const int lane = threadIdx.x & 31, bytes = groups * 64, number = ((const Pass *)(shared + PASS))->numbers[lane % ROWS];
    if (lane == 0) expect(pass_barrier(base), rows() * bytes);
    __syncwarp();
    if (lane < rows() && bytes) copy(base + INNER + lane * run.pitch(), run.inner + number * places, bytes, pass_barrier(base));
    __syncwarp();
  }
};

// The warp that copies. Earlier launches do not write the weights, so it need not wait for them first.
__device__ __forceinline__ void fill(const Runs &runs, u32 base, i64 places) {
  Cursor ahead(runs), now = ahead;
  Ring first(base), ring(base);
  ahead.to_stage();
  for (int i = 0; i < STAGES && ahead.more; i++, ahead.next_stage(), first.next()) ahead.weights(first);
  now.write();
  wait_for_others();
  for (u32 passes = 0;; passes++) {
    now.begin(base, places);
    if (!now.more) return;
    const int stages = (now.run.until - now.run.panel) * ((now.groups + GROUPS - 1) / GROUPS);
    for (int i = 0; i < stages; i++, ring.next()) {
      wait_for(ring.read_barrier(), ring.parity);
      if (ahead.more) ahead.weights(ring), ahead.next_stage();
    }
    wait_for(done_barrier(base), passes & 1);
    now.next_pass();
    now.write();
  }
}

// Add a warp's share of the ranks of 16 bits, read from global memory, to its sums of eight rows.
__device__ __forceinline__ void add_halves(float4 *left, const Pass &run, i64 row_at, int panel, int warp) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int groups = (run.halves + GROUP - 1) / GROUP;
#pragma unroll 1
  for (int j = 0; j < PLANES; j++) {
    const int column = panel * PANEL + 16 * j + g;
    const int outputs[2] = {min(column, run.outputs - 1), min(column + 8, run.outputs - 1)};
    float sums[4] = {};
#pragma unroll 2
    for (int group = warp * groups / WARPS; group < (warp + 1) * groups / WARPS; group++) {
      const int rank = group * GROUP + 2 * t;
      const float2 low = *(const float2 *)(run.inner_halves + row_at + rank);
      const float2 high = *(const float2 *)(run.inner_halves + row_at + rank + 8);
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u16 *u = (const u16 *)run.halves_of + outputs[i & 1];
        const int first = rank + 8 * (i >> 1), last = run.halves - 1;
        a[i] = converted(u[(i64)min(first, last) * run.outputs], u[(i64)min(first + 1, last) * run.outputs]);
      }
      multiply(sums, a[0], a[1], a[2], a[3], rounded(low.x, low.y), rounded(high.x, high.y));
    }
    float4 &all = left[j * 32 + lane];
    all.x += sums[0], all.y += sums[1], all.z += sums[2], all.w += sums[3];
  }
}

// All warps except the one that copies.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// A thread's outputs: of rows 2t and 2t + 1, outputs g and g + 8 of the warp's plane.
struct Outputs {
  u32 row[2];  // the rows' offsets
  bool given[2];

  __device__ __forceinline__ Outputs(const Pass &pass, i64 stride) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int number = 2 * (lane & 3) + i;
      given[i] = number < pass.rows;
      row[i] = (u32)(pass.numbers[given[i] ? number : 0] * stride) + pass.column + 16 * (threadIdx.x >> 5) + (lane >> 2);
    }
  }

  // Whether the i-th of four values exists. `left`: outputs from the panel's first to the slice's end.
  __device__ __forceinline__ bool is(int i, int left) const {
    return given[i & 1] && 16 * (int)(threadIdx.x >> 5) + ((int)(threadIdx.x & 31) >> 2) + 8 * (i >> 1) < left;
  }

  __device__ __forceinline__ u32 at(int i, int panel) const { return row[i & 1] + panel * PANEL + 8 * (i >> 1); }
};

// A warp's part of a pass. `used`: how often sums have been left.
__device__ __forceinline__ void work(const Pass &pass, Ring &ring, u16 *out, i64 out_stride, i64 places, u32 &used) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int groups = pass.groups, row = g < pass.rows ? g : 0;
  const Outputs to(pass, out_stride);
  const u32 inner = ring.base + INNER + row * pass.pitch + 8 * t + warp * GROUP * 4;
  const u32 word_at =
      warp * GROUP * WORD_BYTES + (lane & 7) * WORD_BYTES + (lane >> 3 & 1) * 16 + (lane >> 4) * 8 * WORD_BYTES;
#pragma unroll 1
  for (int panel = pass.panel; panel < pass.until; panel++) {
    const int outputs = pass.outputs - panel * PANEL;
    u16 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) old[i] = to.is(i, outputs) ? out[to.at(i, panel)] : 0;
    float sums[PLANES][1][4] = {}, more[1][4] = {};
#pragma unroll 1
    for (int group = 0; group < groups; group += GROUPS) {
      wait_for(ring.filled_barrier(), ring.parity);
      const u32 stage = ring.base + ring.offset(), words = stage + word_at, lines = stage + SCALES + warp * 32 + 4 * t;
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        if (group + warp + k * WARPS >= groups) break;
        const u32 from = inner + (group + k * WARPS) * GROUP * 4;
        const Inner now[1] = {{shared_floats(from), shared_floats(from + 32)}};
        add<1>(sums, more, now, words + k * WARPS * GROUP * WORD_BYTES, lines + k * WARPS * 32, 2 * (panel & 7));
      }
      __syncwarp();
      if (lane == 0) arrive(ring.read_barrier());
      ring.next();
    }
    float4 *left = (float4 *)(shared + LEFT), *own = left + warp * PLANES * 32;
    wait_for(left_barrier(ring.base), used++ & 1 ^ 1);
#pragma unroll
    for (int j = 0; j < PLANES; j++) {
      const float excess = j % 3 == 0 ? 0.f : j % 3 == 1 ? EXCESS_0 - EXCESS_1 : EXCESS_0 - EXCESS_2;
      float sum[4];
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] = fmaf(excess, more[0][i & 1], sums[j][0][i] - more[0][2 + (i & 1)]);
      own[j * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    if (pass.halves) add_halves(own, pass, pass.numbers[row] * places, panel, warp);
    meet();
    float total[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float4 each = left[(w * PLANES + warp) * 32 + lane];
      total[0] += each.x, total[1] += each.y, total[2] += each.z, total[3] += each.w;
    }
    __syncwarp();
    if (lane == 0) arrive(left_barrier(ring.base));
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (to.is(i, outputs)) out[to.at(i, panel)] = narrowed(widened(old[i]) + total[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS)
expand_many(u16 *out, const u8 *arena, const i64 *table, const int *tiles, const int *order, const float *shrunk,
            i64 out_stride, i64 places, int most_tiles, int units, Slices slices) {
  let_next_begin();
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(base + 8 * i, 1), make_barrier(base + 8 * (STAGES + i), WARPS);
    make_barrier(pass_barrier(base), 1), make_barrier(done_barrier(base), WARPS), make_barrier(left_barrier(base), WARPS);
    barriers_are_made();
  }
  int total = 0;  // existing tiles, which come first
  for (int i = 0; i < most_tiles; i += THREADS + 32) {
    const int tile = i + threadIdx.x;
    total += __syncthreads_count(tile < most_tiles && tiles[3 * tile] >= 0);
  }
  total *= units;
  const int from = (int)((i64)blockIdx.x * total / gridDim.x), until = (int)((i64)(blockIdx.x + 1) * total / gridDim.x);
  if (threadIdx.x >= THREADS) {
    fill(Runs{arena, table, tiles, order, shrunk, slices, units, from, until}, base, places);
    return;
  }
  Ring ring(base);
  const Pass &pass = *(const Pass *)(shared + PASS);
  u32 used = 0;
  wait_for_others();
  for (u32 passes = 0;; passes++) {
    wait_for(pass_barrier(base), passes & 1);
    if (pass.rows == 0) break;
    work(pass, ring, out, out_stride, places, used);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(done_barrier(base));
  }
}
