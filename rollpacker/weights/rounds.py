"""A refit's plan, cut into rounds for one rank: what it packs, sends, receives, unpacks and copies to itself in each.

The blocks that one rank sends to another form a stream, in the order of the plan. Every stream is cut into as many parts of
equal length as there are rounds, so that all links are busy to the end and a round's buffers hold what the bucket allows.
Both ends cut alike, because all of it follows from the plan.

Blocks start and parts end at multiples of `ALIGNMENT` elements of the stream, so that 16-byte vectors fit; the gaps before
them (some bytes a block) travel too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollpacker.weights.plan import ReshardPlan, TransferOp

ALIGNMENT = 8
"""Elements: 16 bytes of bf16."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `begin` to `end` of a block, counted along its runs; the first lies at `offset` of the round's buffer."""

    op: TransferOp
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a stream: `size` elements at `offset` of the round's send or receive buffer."""

    peer: int
    is_send: bool
    offset: int
    size: int


@dataclass
class Round:
    """What a rank does in one round; local pieces use no buffer."""

    packed: list[Piece] = field(default_factory=list)
    local: list[Piece] = field(default_factory=list)
    unpacked: list[Piece] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def buffer_elements(self, *, is_send: bool) -> int:
        """Size of the buffer that this round needs in one direction."""
        return sum(m.size for m in self.messages if m.is_send == is_send)


def cut_into_rounds(plan: ReshardPlan, rank: int, bucket_elements: int) -> list[Round]:
    """The rounds of one rank of the world, as many on every rank; its buffers hold about `bucket_elements` at most."""
    busiest = max(max(t.sent, t.received) for t in plan.traffic())
    rounds = [Round() for _ in range(max(1, math.ceil(busiest / bucket_elements)))]
    sends: dict[int, list[TransferOp]] = {}
    receives: dict[int, list[TransferOp]] = {}
    local: list[TransferOp] = []
    for op in plan.involving(rank):
        if op.source == op.destination:
            local.append(op)
        elif op.source == rank:
            sends.setdefault(op.destination, []).append(op)
        else:
            receives.setdefault(op.source, []).append(op)
    for part, (pieces, _) in zip(rounds, _parts(local, len(rounds)), strict=True):
        part.local = list(pieces)
    for is_send, streams in ((True, sends), (False, receives)):
        for peer, ops in sorted(streams.items()):
            for part, (pieces, size) in zip(rounds, _parts(ops, len(rounds)), strict=True):
                offset = part.buffer_elements(is_send=is_send)
                placed = [Piece(p.op, p.begin, p.end, offset + p.offset) for p in pieces]
                (part.packed if is_send else part.unpacked).extend(placed)
                if size:
                    part.messages.append(Message(peer, is_send, offset, size))
    return rounds


def _parts(ops: list[TransferOp], num_parts: int) -> Iterator[tuple[list[Piece], int]]:
    """The pieces of each part of a stream, offsets counted from the part's start, and the part's length."""
    starts = [0]
    for op in ops:
        starts.append(starts[-1] + _aligned(op.block.num_elements))
    units, first = starts[-1] // ALIGNMENT, 0
    for part in range(num_parts):
        begin, end = (units * n // num_parts * ALIGNMENT for n in (part, part + 1))
        pieces = []
        while first < len(ops) and starts[first] < end:
            op, start = ops[first], starts[first]
            low, high = max(begin - start, 0), min(end - start, op.block.num_elements)
            if low < high:
                pieces.append(Piece(op, low, high, start + low - begin))
            if starts[first + 1] > end:
                break  # the rest of this block belongs to the next part
            first += 1
        yield pieces, end - begin


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
