"""Changes to vLLM 0.26 to 0.32.

vLLM has options for another scheduler, for other ranks and parsers: ours need no patch.
"""
