"""A group: the TP x PP ranks that serve one model, each on the device and within the memory of its plan.

`members` splits a group into launches of vLLM, one or more to a node, and says what each is started with;
`plan` hands every rank its part; `rank`, `cpu` and `gpu` are vLLM's workers that keep to it and say what they
take; `journal` is what each rank writes of its start, for the error when one fails; `follower` runs the ranks
of another node; `processes` ends what is left.
"""
