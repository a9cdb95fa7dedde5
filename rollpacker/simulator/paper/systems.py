"""The systems that the paper compares, as overrides of configs/sim: each is a choice of policies, not code of its own."""

from __future__ import annotations

VERL = ("tail_batching.mode=off", "cluster.rewards_after_rollout=true")
"""verl: synchronous, responses spread evenly over the replicas, rewards after the last response, then training."""

RLHFUSE = ("tail_batching.mode=off", "stream.enabled=on", "stream.rounds=all", "stream.scale_down_at=0.8")
"""RLHFuse-like, strengthened: rewards overlap with decoding; when four in five responses are complete the tail moves to half
of the GPUs, and the others begin to train what is complete. Lossless."""

# The paper's system neither drains its queue at the end of an epoch nor audits itself.
TAIL_BATCHING = (
    "tail_batching.mode=paper",
    "tail_batching.drain=none",
    "tail_batching.audit_fraction=0",
)
PLUS_TAIL_BATCHING = (*TAIL_BATCHING, "cluster.rewards_after_rollout=true")
PLUS_REWARD = (*TAIL_BATCHING, "reward.adaptive_timeout=true")
PLUS_PARALLELISM = (*PLUS_REWARD, "planner.policy=preemption")
PLUS_TRAINER = (*PLUS_PARALLELISM, "stream.enabled=on")
ROLLPACKER = PLUS_TRAINER

CODE = ("workload.reward=code", "reward.timeout_s=30", "reward.num_workers=16")
"""The paper does not say which tasks its end-to-end runs mix. Here all of them score code in sandboxes of 30 s at most, 16
at a time on each replica; nothing about it is calibrated."""
