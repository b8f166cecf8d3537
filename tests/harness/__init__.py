"""How tests run code on several ranks: threads, a pool of processes, processes that may die."""
