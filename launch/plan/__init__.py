"""What a job will move and hold, without starting its ranks.

Job -> loads    rows and pairs of every rank in every step, from its own routing
-> traffic  bytes between ranks and nodes, for each way of moving them, and their time
-> memory   what each rank holds for it
-> plan     all of it together, as JSON and as tables
"""
