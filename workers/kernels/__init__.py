"""The operations that variants add to a base's layers, one folder per operation.

Every operation works on the same three things. One launch serves all variants of a batch, and nothing is
copied per request:

- `arena`: uint8 [bytes], the weights of all resident variants, as each operation's `layout` packed them. Most
  embeddings are not in it: they stay in host memory;
- `table`: int64 [slots, WIDTH], one row per slot and layer. A row holds the byte offsets of the slot's arrays
  in the arena, and their shapes. Offsets of host memory lie before or behind the arena. A row of zeros means
  that the slot adds nothing here;
- `rows`: the slot of each row of the batch (`workers.kernels.rows.Rows`).

An operation's folder holds `layout` (the stored arrays and their bytes), `reference` (torch: the CPU's path,
and the GPU tests' reference) and `kernel` (Triton). Tables, rows and arena keep their addresses for the life
of an engine, so a captured CUDA graph reads later updates, too.
"""
