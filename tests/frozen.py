"""Imported last where processes are forked from: no process searches what was imported for garbage."""

import gc

gc.collect()
gc.freeze()
