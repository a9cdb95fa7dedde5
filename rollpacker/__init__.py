"""RollPacker: synchronous RL post-training without rollout bubbles. Importing the package imports nothing else."""

__version__ = "0.1.0"
