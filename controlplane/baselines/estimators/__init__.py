"""Estimators that predict from measured tables; the tables' reader; and how well each predicts."""
