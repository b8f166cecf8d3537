"""Measurements: correctness first, then times beside their ceilings, in one run."""
