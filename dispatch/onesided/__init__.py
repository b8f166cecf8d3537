"""Moving rows by writing and reading the memory of other ranks.

    signals    counters with one writer each: what was posted is there for whoever saw the counter
    board      records of all ranks, double-buffered by parity
    transport  what a one-sided transport adds to the others: shared memory and arrival
    mover      rows straight to their final place, results read where they lie

Who writes where is ``crossdock.dispatch.slots``; nothing here knows how bytes travel.
"""
