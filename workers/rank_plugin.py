"""The plug-in in each rank of our engines, whether or not vLLM finds it.

vLLM imports this module in a rank (`--worker-extension-cls`) before it builds the rank's part of the model.
It finds no plug-ins where VLLM_PLUGINS names others, or where Ostinato is on the path without being
installed. It would then load adapters with a manager of its own, and our scheduler would wait for ever.
"""

from __future__ import annotations

from workers import plugin

plugin.register()


class PluggedIn:
    """What vLLM adds to its worker's bases; it brings nothing itself."""
