"""Federated campaigns of adapters: which box takes part in which round, when (Venn, dissertation ch. 4)."""
