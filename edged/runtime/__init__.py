"""The process: its log, heap and service manager."""
