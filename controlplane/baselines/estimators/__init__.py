"""Estimators that predict from measured tables, the tables' reader, and the evaluation of the predictions."""
