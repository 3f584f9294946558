"""What Ostinato is compared with: other routing policies, other placement policies, an exact program, and
estimators that predict from tables.

Only `ostinato simulate`, `ostinato plan`, `ostinato evaluate-estimator`, benchmarks and tests use it. Nothing
that serves imports it (pyproject.toml has the contract).
"""
