"""The agent of a node: samples its devices' memory and utilisation every second.

`gpus` and `host` read NVML and the kernel, `sampling` (pure) makes samples of their readings, `agent` keeps
the samples, `reports` has the messages.
"""
