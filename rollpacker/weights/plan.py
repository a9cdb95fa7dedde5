"""The refit as data: which rank copies which block of which Megatron parameter into which vLLM parameter of which rank.

Both sides are known from metadata alone (weights/layout.py), so every rank computes the same plan and none has to ask.
Ranks repeat with a *period*: the least common multiple of a training replica, a rollout replica and a node. Within one
lie whole replicas of both kinds and all copies of a shard that share a node with a rank of it; the plan is made for one
period, and all others do the same at the same time.

Invariants: every element of a vLLM parameter but its vocabulary padding is written exactly once, and padding never. What
a rank holds it takes from itself; what shares its node it takes from there; among equals the rank that has sent the least
sends. So the bytes that travel are the fewest possible without forwarding. Offsets and sizes count elements, since the
dtypes of both sides may differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollpacker.model_shape import ModelShape
from rollpacker.weights.layout import TIED_HEAD, ParameterLayout, engine_layout, megatron_layout, stage_of


@dataclass(frozen=True)
class TrainingGrid:
    """How Megatron spreads a model: rank order tp-cp-pp-dp. Context parallelism copies the weights, as DP does."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1

    @property
    def replica_size(self) -> int:
        """Ranks that hold the model once for each context-parallel rank."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` runs of `row_elements` consecutive elements, the starts of the runs a pitch apart; offsets in elements."""

    source_offset: int
    destination_offset: int
    rows: int
    row_elements: int
    source_pitch: int
    destination_pitch: int

    @property
    def num_elements(self) -> int:
        """What is copied."""
        return self.rows * self.row_elements


@dataclass(frozen=True, slots=True)
class TransferOp:
    """One block, from the Megatron parameter `source_name` of rank `source` (both shards seen as flat memory)."""

    source: int
    destination: int
    source_name: str
    destination_name: str
    block: Block


@dataclass
class Traffic:
    """Elements that a rank copies to itself, and sends and receives over each kind of link."""

    local: int = 0
    sent_in_node: int = 0
    sent_between_nodes: int = 0
    received_in_node: int = 0
    received_between_nodes: int = 0

    @property
    def sent(self) -> int:
        """Over both kinds of link."""
        return self.sent_in_node + self.sent_between_nodes

    @property
    def received(self) -> int:
        """Over both kinds of link."""
        return self.received_in_node + self.received_between_nodes


@dataclass(frozen=True)
class ReshardPlan:
    """The copies of the ranks 0 to `period` - 1, in the order in which both ends of a pair carry them out."""

    period: int
    ranks_per_node: int
    ops: tuple[TransferOp, ...]

    def involving(self, rank: int) -> list[TransferOp]:
        """What a rank of the world sends, receives and copies to itself, under the numbers of the world."""
        base, member = divmod(rank, self.period)
        mine = (op for op in self.ops if member in (op.source, op.destination))
        shift = base * self.period
        return [replace(op, source=op.source + shift, destination=op.destination + shift) for op in mine]

    def traffic(self) -> list[Traffic]:
        """Of each rank of a period."""
        ranks = [Traffic() for _ in range(self.period)]
        for op in self.ops:
            source, destination, size = ranks[op.source], ranks[op.destination], op.block.num_elements
            if op.source == op.destination:
                source.local += size
            elif _share_a_node(op.source, op.destination, self.ranks_per_node):
                source.sent_in_node += size
                destination.received_in_node += size
            else:
                source.sent_between_nodes += size
                destination.received_between_nodes += size
        return ranks


@functools.cache
def reshard_plan(
    shape: ModelShape, training: TrainingGrid, rollout_tensor_model_parallel_size: int, ranks_per_node: int
) -> ReshardPlan:
    """The plan for parallel sizes that have been found to fit the model and the world (check_shapes).

    `ranks_per_node` must divide the world, as both replica sizes do; then the period does. Raises ValueError where vLLM
    could not cut the vocabulary.
    """
    period = math.lcm(training.replica_size, rollout_tensor_model_parallel_size, ranks_per_node)
    sources = _Sources(shape, training, period)
    senders = _Senders(period, ranks_per_node)
    ops: list[TransferOp] = []
    for destination in engine_layout(shape, rollout_tensor_model_parallel_size):
        source = sources.layout_of(destination)
        holders_of = {s: sources.holders(source, s) for s in sources.shards_of(source)}
        blocks = {
            (s, d): _blocks(source, s, destination, d)
            for s in holders_of
            for d in range(rollout_tensor_model_parallel_size)
        }
        for rank in range(period):
            for s, holders in holders_of.items():
                pieces = blocks[s, rank % rollout_tensor_model_parallel_size]
                if pieces:
                    sender = senders.choose(holders, rank, sum(b.num_elements for b in pieces))
                    ops.extend(TransferOp(sender, rank, holders[sender], destination.name, b) for b in pieces)
    return ReshardPlan(period, ranks_per_node, tuple(ops))


class _Sources:
    """Megatron's side: which ranks of a period hold a shard, and under which name."""

    def __init__(self, shape: ModelShape, training: TrainingGrid, period: int) -> None:
        self._shape = shape
        self._training = training
        self._by_hf_name = {
            hf_name: layout
            for layout in megatron_layout(shape, training.tensor_model_parallel_size)
            for hf_name in layout.hf_names
        }
        tp, per_stage = (
            training.tensor_model_parallel_size,
            training.replica_size // training.pipeline_model_parallel_size,
        )
        self._ranks: dict[tuple[int, int], list[int]] = {}
        for rank in range(period):
            stage = rank // per_stage % training.pipeline_model_parallel_size
            self._ranks.setdefault((stage, rank % tp), []).append(rank)

    def layout_of(self, destination: ParameterLayout) -> ParameterLayout:
        """The one Megatron parameter that holds all of a vLLM parameter."""
        return self._by_hf_name[destination.hf_names[0]]

    def shards_of(self, source: ParameterLayout) -> range:
        """Tensor-parallel ranks whose shards differ."""
        return range(1 if source.dim is None else self._training.tensor_model_parallel_size)

    def holders(self, source: ParameterLayout, shard: int) -> dict[int, str]:
        """Ranks that hold the shard, in order, and its name there."""
        pp, tp = self._training.pipeline_model_parallel_size, self._training.tensor_model_parallel_size
        num_chunks = self._training.virtual_pipeline_model_parallel_size
        names = {stage_of(source, self._shape.num_layers, pp, num_chunks): source.name}
        if self._shape.tie_word_embeddings and source.is_on_first_stage:
            names.setdefault(pp - 1, TIED_HEAD)
        tp_ranks = range(tp) if source.dim is None else (shard,)
        held = ((rank, name) for stage, name in names.items() for t in tp_ranks for rank in self._ranks[stage, t])
        return dict(sorted(held))


class _Senders:
    """Picks who sends: the rank itself, else a holder on its node, else any; of these the least busy, then the nearest."""

    def __init__(self, period: int, ranks_per_node: int) -> None:
        self._period = period
        self._ranks_per_node = ranks_per_node
        self._sent_in_node = [0] * period
        self._sent_between_nodes = [0] * period

    def choose(self, holders: Iterable[int], receiver: int, num_elements: int) -> int:
        """The sender of so many elements, which are booked on it."""
        holders = list(holders)
        if receiver in holders:
            return receiver
        near = [rank for rank in holders if _share_a_node(rank, receiver, self._ranks_per_node)]
        sent = self._sent_in_node if near else self._sent_between_nodes
        sender = min(near or holders, key=lambda rank: (sent[rank], (rank - receiver) % self._period))
        sent[sender] += num_elements
        return sender


def _share_a_node(a: int, b: int, ranks_per_node: int) -> bool:
    return a // ranks_per_node == b // ranks_per_node


def _blocks(source: ParameterLayout, s: int, destination: ParameterLayout, d: int) -> tuple[Block, ...]:
    """What of shard `s` of one side lies in shard `d` of the other, in few blocks."""
    width, runs = source.width, _common_runs(source, s, destination, d)
    if source.dim != 1:
        return tuple(
            Block(a * width, b * width, rows, num * width, a_pitch * width, b_pitch * width)
            for a, b, rows, num, a_pitch, b_pitch in _strided(runs)
        )
    pitches = source.num_rows(s), destination.num_rows(d)
    if runs == [(0, 0, num := min(pitches))] and num == max(pitches):  # the whole of both
        return (Block(0, 0, 1, num * width, num * width, num * width),)
    return tuple(Block(a, b, width, num, *pitches) for a, b, num in runs)


def _common_runs(source: ParameterLayout, s: int, destination: ParameterLayout, d: int) -> list[tuple[int, int, int]]:
    """Rows (columns) that both shards hold: runs (first row there, first row here, number), joined where they touch."""
    runs: list[tuple[int, int, int]] = []
    at_destination = 0
    for wanted in destination.shards[d]:
        at_source = 0
        for held in source.shards[s]:
            start, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
            if wanted.hf_name == held.hf_name and start < stop:
                a, b, num = at_source + start - held.start, at_destination + start - wanted.start, stop - start
                if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (a, b):
                    a, b, joined = runs.pop()
                    num += joined
                runs.append((a, b, num))
            at_source += held.stop - held.start
        at_destination += wanted.stop - wanted.start
    return runs


def _strided(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int, int]]:
    """Runs of one length at constant distances as one: (first row there and here, runs, rows of a run, both distances)."""
    found: list[tuple[int, int, int, int, int, int]] = []
    for a, b, num in runs:
        if found:
            a_first, b_first, rows, length, a_pitch, b_pitch = found[-1]
            a_step, b_step = a - a_first, b - b_first
            if num == length and (rows == 1 or (a_step, b_step) == (rows * a_pitch, rows * b_pitch)):
                found[-1] = (a_first, b_first, rows + 1, num, a_step // rows, b_step // rows)
                continue
        found.append((a, b, 1, num, num, num))
    return found
