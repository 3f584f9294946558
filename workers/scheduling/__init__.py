"""Who runs next: skip-the-line batching over variants (DeltaZip, section 5.4). Pure.

`workers/engine/scheduler.py` is the class vLLM runs; it asks this folder.
"""
