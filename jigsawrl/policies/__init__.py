"""Who runs where, with what share of a worker: pure functions from what is known to what is to be done.

A policy sees a `State` and the events since it was last asked, and answers with actions. It has no clock, does no
I/O and keeps nothing in between: the simulator and the real runtime ask the same objects, and a log can be replayed.
"""
