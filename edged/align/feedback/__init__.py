"""Users' signals, and the preference pairs that follow from them."""
