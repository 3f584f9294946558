"""Policies and estimators to compare Ostinato with: other routing policies, other placement policies, an
exact program, and estimators that predict from tables.

Only `ostinato simulate`, `ostinato plan`, `ostinato evaluate-estimator`, benchmarks and tests use this
package. Nothing that serves imports it (pyproject.toml has the contract).
"""
