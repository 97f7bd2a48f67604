"""The process: its log, heap and service manager; the token bucket."""
