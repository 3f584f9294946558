"""The plug-in in each rank of our engines, whether or not vLLM finds it.

vLLM imports this module in a rank (`--worker-extension-cls`) before it builds the rank's part of the model.
vLLM finds no plug-ins if VLLM_PLUGINS names others, or if Ostinato is on the path without being installed. It
would then load adapters with its own manager, and our scheduler would wait forever.
"""

from __future__ import annotations

from workers import plugin

plugin.register()


class PluggedIn:
    """The class that vLLM adds to its worker's bases; it adds nothing itself."""
