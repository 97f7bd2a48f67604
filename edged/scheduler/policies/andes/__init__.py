"""The Andes policy: readers' requests take turns in memory where it is short."""
