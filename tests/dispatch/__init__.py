"""Dispatch, as its specification says it behaves."""
