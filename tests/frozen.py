"""Imported last where processes are forked from: what was imported is garbage in none of them, and is searched in none."""

import gc

gc.collect()
gc.freeze()
