"""What the RollPacker paper reports (arXiv 2509.21009), number by number: (table, row) -> column -> value.

Ranges ("up to") stand in the notes of the rows. Fig. 10c's middle bars carry labels that can be paired in two ways; one is
taken here, the other is in its note.
"""

from __future__ import annotations

Published = dict[tuple[str, str], dict[str, float]]

FIG_11_COLUMNS = (
    "baseline",
    "prompts 1.125",
    "prompts 1.25",
    "prompts 1.5",
    "responses 1.125",
    "responses 1.25",
    "responses 1.5",
    "both 1.25",
)

PUBLISHED: Published = {
    ("Table 1", "maths"): {"rollout": 72, "reward": 5, "training": 23},
    ("Table 1", "code"): {"rollout": 66, "reward": 13, "training": 21},
    ("Table 1", "judge"): {"rollout": 71, "reward": 7, "training": 22},
    ("Table 2", "7B/8k"): {"tail batching": 1.30, "+ reward": 2.01, "+ parallelism": 2.01, "+ trainer": 2.03},
    ("Table 2", "14B/16k"): {"tail batching": 1.48, "+ reward": 1.99, "+ parallelism": 2.02, "+ trainer": 2.22},
    ("Table 2", "32B/32k"): {"tail batching": 2.21, "+ reward": 2.48, "+ parallelism": 2.52, "+ trainer": 2.56},
    ("Table 3", "LONG round"): {
        "no scaling": 124.2,
        "fixed 20 %": 122.7,
        "fixed 30 %": 118.2,
        "fixed 40 %": 119.8,
        "adaptive": 115.2,
    },
    ("Table 4", "LONG round"): {
        "streaming": 115.2,
        "one fetch 20 %": 129.5,
        "one fetch 30 %": 133.8,
        "one fetch 40 %": 132.0,
        "one fetch 50 %": 128.6,
    },
    ("Fig. 6", "TP 1"): {
        "SHORT preemptions": 5199,
        "LONG preemptions": 2900,
        "SHORT seconds": 1029,
        "LONG seconds": 1172,
    },
    ("Fig. 6", "TP 2"): {
        "SHORT preemptions": 4102,
        "LONG preemptions": 2601,
        "SHORT seconds": 768,
        "LONG seconds": 1284,
    },
    ("Fig. 9", "7B/8k"): {"over veRL": 2.03, "over RLHFuse": 1.14},
    ("Fig. 9", "14B/16k"): {"over veRL": 2.22, "over RLHFuse": 1.68},
    ("Fig. 9", "32B/32k"): {"over veRL": 2.56, "over RLHFuse": 2.24},
    ("Fig. 10", "7B/8k"): {"SHORT step s": 100, "LONG step s": 129},
    ("Fig. 10", "14B/16k"): {"SHORT step s": 106, "LONG step s": 302},
    ("Fig. 10", "32B/32k"): {"SHORT step s": 261, "LONG step s": 771},
    ("Fig. 11", "7B/8k"): dict(zip(FIG_11_COLUMNS, (82, 77, 72, 60, 77, 71, 54, 47), strict=True)),
    ("Fig. 11", "14B/16k"): dict(zip(FIG_11_COLUMNS, (277, 244, 169, 143, 260, 232, 115, 88), strict=True)),
    ("Fig. 11", "32B/32k"): dict(zip(FIG_11_COLUMNS, (673, 636, 259, 279, 658, 655, 265, 170), strict=True)),
    ("Fig. 12", "8k to 32k"): {"over TP 1": 1.9, "SHORT preemptions, %": -13.8},
    ("Fig. 13", "judge, MPS over time slices"): {"speed-up": 1.25},
    ("Fig. 13", "judge, pipelined over blocking, 32k"): {"speed-up": 1.4},
    ("Fig. 13", "code, adaptive over fixed timeout"): {"speed-up": 1.6},
    ("Fig. 14", "batch 128, 32 GPUs"): {"over veRL": 2.2},
    ("Fig. 14", "batch 256, 64 GPUs"): {"over veRL": 2.2, "per doubling": 1.5},
    ("Fig. 14", "batch 512, 128 GPUs"): {"over veRL": 2.2, "per doubling": 1.5},
}
