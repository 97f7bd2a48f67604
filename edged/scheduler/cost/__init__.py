"""The cost model: predicted seconds of a bin, learned prices, and their errors."""
