"""Fetching models and adapters from a hub, object stores and web servers into a folder of this node.

`remote_source.py` and `eviction.py` decide and are pure. `remotes/` reads from each kind of source.
`fetch.py` carries out one request, in a process of its own (`process.py`).
"""
