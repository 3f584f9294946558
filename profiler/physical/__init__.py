"""Ostinato's estimator: how long a step of each pipeline stage takes, learnt from fingerprints, and what
follows for a plan. Pure.

`curves` fits times of steps to measurements, `calibration` keeps one such fit for each way to cut and store
a layer, `pipeline` turns steps of stages into TTFT and TPOT, `memory` adds up bytes.
"""
