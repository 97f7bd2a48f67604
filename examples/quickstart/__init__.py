"""The first look at edged: a daemon in a temporary folder and two users with opposite tastes who teach it."""
