"""The dialogues that the embedded demo model was trained on."""
