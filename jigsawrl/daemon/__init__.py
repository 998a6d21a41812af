"""A small real cluster on this machine: nodes are sets of its cores, groups are runs of several pipelines.

    jigsaw submit -> ledger (SQLite) -> Daemon -> cluster.Scheduler -> orders -> `jigsaw run`, one for each group
                        ^                 |                                        |
                        +-- all it knows -+------------- events of the runs <------+

Jobs are written to the ledger by whoever submits them, so none is lost while nobody runs the cluster. The daemon
asks the scheduler that also plans and simulates, and brings the runs in line with what it answers. What it knows is
in the ledger before anything is done about it, and jobs keep their checkpoints in folders of their own: after a kill
the next daemon places all unfinished jobs anew. The store of a run outlives it, so a job whose run dies, or whose
daemon, goes on from its last step in another run, which takes over what was remembered (`store/heirs.py`); only if
the whole machine was down, from its last checkpoint. Nothing here imports torch.
"""
