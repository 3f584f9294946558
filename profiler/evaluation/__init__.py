"""What a model's quality is measured with: tasks, answerers, scores, results with intervals.

Pure. The same code scores what deployed engines answer and what a checkpoint answers in this process;
docs/evaluation.md says how to use it.
"""
