"""Our changes to Ray and to Serve's HTTP server: a folder for each package, a file for each thing changed.

As in `workers/patches`. The same tests read them (`tests/controlplane/runtime/test_patches.py`).
"""
