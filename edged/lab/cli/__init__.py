"""The commands `edged bench` and `edged align`, which come in by entry points `edged.commands`."""
