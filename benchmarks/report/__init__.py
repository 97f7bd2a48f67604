"""The report of comparisons: the paper's figures from raw runs, each beside the paper's number."""
