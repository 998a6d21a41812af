"""Fuzzers: what a user can hand to jigsawrl, damaged at random, must end well or in one clear message.

A module of targets has a list `TARGETS`. A target is a function of a random generator and an empty folder: it writes
what it needs into the folder, and returns what is to be called. The call may return, or raise a JigsawError of one to
three lines; anything else is a failure, and so is a call that takes too long. `check.py` judges one case, `soak.py`
runs all targets for minutes, and tests run some hundred cases of each.
"""
