"""Measuring a model's quality: tasks, answerers, scores, results with intervals.

Pure. The same code scores the answers of deployed engines and of a checkpoint in this process;
docs/evaluation.md explains its use.
"""
