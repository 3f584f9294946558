"""Our changes to packages that workers use: a folder for each package, a file for each thing that is changed.

A file says what its patch is for. Its targets (`profiler.patches.target`) say what is replaced, and in which
versions a developer read it. `tests/unit/test_patches.py` fails when an installed target is another than the
one that was read, and when a module outside of these folders replaces a part of a package.
"""
