"""The measurements of `edged profile`."""
