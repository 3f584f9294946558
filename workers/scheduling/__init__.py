"""Who runs next: skip-the-line batching over variants (DeltaZip, section 5.4) as vLLM's scheduler.

`policy` and `residency` are pure; `bus` carries messages between scheduler and ranks; `scheduler` is
the class vLLM runs.
"""
