"""The graph of phases: what every pipeline has to run, in which order, and where that leads.

A phase instance is what is permitted, paused, moved, lost and repeated. A small pure function for each kind of
pipeline says which phases a step has and what each of them needs (`graph`). Nothing here knows a clock, a file or
torch.
"""
