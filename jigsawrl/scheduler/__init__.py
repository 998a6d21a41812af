"""The one scheduler core: events in, validated actions out. Pure: no clock, no I/O, no torch.

The real runtime, the simulator, `jigsaw replay` and the groups of a cluster all call `SchedulerCore.handle(now,
events)`.

    events      what drivers, processes and users report
    state       pipelines, their phases, lanes on workers, and what each of them holds
    layout      where the actors of a pipeline live
    memory      whose state is awake on which worker
    learning    how long phases are predicted to take, corrected by what they took
    colocation  how much phases on one worker slow each other down, learned likewise
    invariants  what must hold, numbered; every action is checked before any of them is applied
    core        hears the events, asks the policy, applies what it answers
"""
