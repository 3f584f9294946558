"""A group: the TP x PP ranks that serve one model, each on the device and within the memory of its plan.

`members` splits a group into launches of vLLM, one or more per node, with their arguments. `plan` gives every
rank its part. `rank`, `cpu` and `gpu` are vLLM's workers that keep to the plan and report their memory.
`journal` is each rank's record of its start, for the error if one fails. `follower` runs the ranks of another
node; `processes` ends all remaining processes.
"""
