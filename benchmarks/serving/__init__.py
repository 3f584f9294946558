"""Many fine-tuned variants on one GPU: compressed deltas in one batch, against swapping whole models.

    python -m benchmarks.serving --traces FOLDER --out RESULT.json

DeltaZip's evaluation (its section 6) on our engine. Both sides are vLLM with the same flags, KV cache and
requests at the same times, one after the other on one machine, each in a process of its own:

- `ours`: deltas of 2:4 sparse codes in slots on the GPU, requests of all variants in one batch;
- `baseline`: the paper's vLLM-SCB; `whole_models` says exactly what it does;

The real parts and the made-up parts:

- Weights and prompts are random; no time depends on their values. Traces' prompts have no tokenizer to count
  them: a token is taken for 4 characters. Every request generates exactly the tokens its trace says.
- Every delta is read, verified and packed for itself, into page-locked memory of its own, before the first
  case, several at once (`prepare_s`; `prepare_gb_per_s` counts the files' bytes). Only a few distinct ones
  lie on disk, so the files come from the page cache. Where host memory does not hold all of them (`in_host`),
  the others are read again when they are asked for.
- Whole models are in page-locked memory from the start. There are a few distinct copies, which many models
  share as if the machine had 13.5 GB for each, and `baseline` reads none from disk. This favours the
  baseline.
- From host memory to the GPU both sides copy all bytes of what they load.
- Cases follow each other in one engine: each begins with what the one before has left in the slots. What does
  not fit into `--budget` is left out, the last cases first; results are written after every case.

`workload`, `metrics` and `taking_turns` are pure; `deltas` writes variants; `engines` starts
vLLM; `playing` sends the requests; `one_engine` is what runs in each process.
"""
