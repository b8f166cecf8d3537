"""Transports beyond threads and process groups."""
