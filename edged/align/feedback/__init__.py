"""What users did, and the preference pairs that follow from it."""
