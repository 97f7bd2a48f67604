"""An adapter trained again from its stored pairs by TRL's DPOTrainer, beside the one that was learned while serving.

Owns that second opinion. Must not know the engine's way of training, nor sockets: it reads the data folder, of a daemon
that runs or does not.
"""
