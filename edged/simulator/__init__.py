"""The scheduler and the lives of requests in virtual time."""
