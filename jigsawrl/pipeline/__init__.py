"""One RL job: its loop, algorithms, tasks, rewards and environments."""
