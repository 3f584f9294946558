"""Our changes to other packages: `target` replaces a part of a package, and each other file is one change.

`workers/patches` and `controlplane/runtime/patches` hold theirs in the same form.
"""
