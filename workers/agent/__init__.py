"""The agent of a node: what its devices hold and how busy they are, sampled every second.

`reports` has the messages, `sampling` the pure part, `gpus` and `host` ask NVML and the kernel, `agent` keeps
the samples.
"""
