"""Settings of all tests."""

from hypothesis import settings

# No timing assertions: a busy machine must not fail a property.
settings.register_profile("edged", deadline=None)
settings.load_profile("edged")
