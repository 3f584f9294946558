"""What variants add to a base's layers, one folder per operation.

Every operation works on the same three things, so that one launch serves all variants of a batch and
nothing is copied per request:

- `arena`: uint8 [bytes], all resident variants' weights, as each operation's `layout` packed them, but for
  most embeddings, which stay in host memory;
- `table`: int64 [slots, WIDTH], one row per slot and layer: at which bytes of the arena this slot's arrays
  lie (host memory is before or behind it) and what shape they have; a row of zeros means that the slot adds
  nothing here;
- `rows`: which slot each row of the batch belongs to (`workers.kernels.rows.Rows`).

An operation's folder holds `layout` (what is stored, and its bytes), `reference` (torch: the CPU's
path, and what the GPU's is tested against) and `kernel` (Triton). Tables, rows and arena keep their
addresses for the life of an engine, so a captured CUDA graph sees what is written to them later.
"""
