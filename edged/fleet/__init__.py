"""Several boxes behind one address: the ingress of a fleet, without torch."""
