"""A cluster of jobs, as RollMux has it: which share a group of nodes, where their state stays, at what price.

    jobs -> Scheduler (arrive, depart, fail, measured) -> groups of nodes -> Permits inside each group -> phases

Two pools of nodes, one for rollouts and one for training (or one pool for both), rented by the hour. A group is some
nodes of either pool and the jobs pinned to them; groups share no node. What always holds: the state of every job fits
into the host memory of each node it is pinned to, and every job is planned to take at most its `max_slowdown` times
what it would take alone. Nothing here imports torch, reads a clock or a file.
"""
