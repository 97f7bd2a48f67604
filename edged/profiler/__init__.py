"""What `edged profile` measures."""
