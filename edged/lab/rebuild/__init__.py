"""Rebuilding of an adapter: training by TRL's DPOTrainer on its stored pairs, beside the one learned while serving."""
