"""Ostinato's estimator: the time of each pipeline stage's steps, learnt from fingerprints, and the resulting
times of a plan. Pure.

`curves` fits step times to measurements. `calibration` keeps one such fit for each way to cut and store a
layer. `pipeline` computes TTFT and TPOT from stages' steps, `memory` adds up bytes.
"""
