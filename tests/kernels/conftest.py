"""The shared parts of the kernels' tests. Triton's kernels run here in its interpreter, on the CPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before any is imported
