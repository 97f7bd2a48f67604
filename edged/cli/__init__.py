"""The `edged` command: a thin layer over the daemon's socket."""
