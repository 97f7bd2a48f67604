"""An adapter trained again from its stored pairs by TRL's DPOTrainer, beside the one that was learned while serving."""
