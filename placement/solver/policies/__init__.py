"""Policies: each finds one layout for a request on a cluster, behind one interface (`base.Policy`)."""
