"""The generator of the dialogues that the embedded demo model was trained on."""
