"""Federations in virtual time: stand-in boxes and campaigns, and the real device scheduler between them."""
