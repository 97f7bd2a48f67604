"""The tables of a federation: who agreed to take part, and what has left this box."""
