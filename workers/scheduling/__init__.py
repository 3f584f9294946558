"""The choice of the next requests: skip-the-line batching over variants (DeltaZip, section 5.4). Pure.

vLLM runs the class in `workers/engine/scheduler.py`, which calls this folder.
"""
