"""The quickstart: a daemon in a temporary folder and two users with opposite tastes who teach it."""
