"""HTTP without torch: callers, sockets, connections, errors and checks, for the daemon and the ingress of a fleet."""
