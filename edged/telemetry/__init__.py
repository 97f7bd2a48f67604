"""Telemetry: readings of the box's processor, memory, power, temperature."""
