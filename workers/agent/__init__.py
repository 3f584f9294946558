"""The agent of a node: what its devices hold and how busy they are, sampled every second.

`gpus` and `host` read NVML and the kernel, `sampling` (pure) makes samples of what they read, `agent` keeps
the samples, `reports` has the messages.
"""
