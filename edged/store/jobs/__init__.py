"""The tables of fine-tuning by file, and the files themselves."""
