"""The refit's plan carried out: Megatron's shards straight into the engine's parameters (weights.refit=csrc).

Packing, unpacking and local copies are csrc/'s kernels, on the GPU's stream or the CPU's threads; the exchange is NCCL or
MPI. Tensors go down as addresses, so this module checks what C++ cannot see: dtype, layout and length of every parameter.
docs/design/005-refit-streams.md says who waits for whom on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollpacker.comm.transfers import BufferTransfers
from rollpacker.comm.world import World
from rollpacker.config import ConfigError
from rollpacker.weights.layout import engine_layout
from rollpacker.weights.plan import ReshardPlan, TransferOp, reshard_plan
from rollpacker.weights.refit import MegatronWeights
from rollpacker.weights.rounds import Piece, cut_into_rounds

_ROW_WORDS = 256
"""Of a checksum's matrix: its columns' sums stay in the cache."""


def load_kernels() -> Any:
    """The module built from csrc/. Raises ConfigError where it was not built: no other path is taken instead."""
    try:
        from rollpacker.weights import _reshard
    except ImportError as error:
        raise ConfigError(
            f"weights.refit=csrc needs the extension rollpacker.weights._reshard, which cannot be imported ({error}). Build "
            "it (pip install cmake ninja nanobind, then pip install --no-build-isolation -e .), or set weights.refit=golden."
        ) from error
    return _reshard


@torch.no_grad()
def bind_engine(
    weights: MegatronWeights, engine_parameters: Mapping[str, Tensor], size: int, world: World, *, bucket_bytes: int
) -> Resharder:
    """The refit of this rank's engine, of tensor-parallel size `size`. Collective.

    The padding of vLLM's vocabulary is zeroed here, once: no refit writes it. Raises RuntimeError where the engine's
    parameters are not those of the layout table.
    """
    rank = world.rank % size
    layout = {p.name: p for p in engine_layout(weights.shape, size)}
    if different := layout.keys() ^ engine_parameters.keys():
        raise RuntimeError(f"the layout table and vLLM's model disagree about the parameters {sorted(different)[:4]}")
    for name, parameter in layout.items():
        tensor, expected = engine_parameters[name], math.prod(parameter.size_of(rank))
        if tensor.numel() != expected:
            raise RuntimeError(
                f"vLLM's {name} has {tensor.numel()} elements on rank {world.rank}, the layout table {expected}"
            )
        if padding := parameter.padding_rows(rank):
            tensor[len(tensor) - padding :].zero_()
    plan = reshard_plan(weights.shape, weights.grid, size, world.ranks_per_node)
    return Resharder(plan, weights.tensors(), engine_parameters, world.comm, bucket_bytes=bucket_bytes)


class Resharder:
    """One rank's part of a plan, bound to its parameters: `run()` whenever they have changed. Collective over the world."""

    def __init__(
        self,
        plan: ReshardPlan,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        comm: Any,
        *,
        bucket_bytes: int,
    ) -> None:
        self.kernels = load_kernels()
        self._comm = comm
        self._ops = plan.involving(comm.Get_rank())
        self.sources, self.destinations = dict(sources), dict(destinations)
        self._source_dtype = _common_dtype(sources, "Megatron's")
        self._destination_dtype = _common_dtype(destinations, "the engine's")
        self._travel_dtype = min(self._source_dtype, self._destination_dtype, key=lambda dtype: dtype.itemsize)
        self._check_bounds()
        item = self._travel_dtype.itemsize
        self.rounds = cut_into_rounds(plan, comm.Get_rank(), max(bucket_bytes // item, 1))
        self._buffer_bytes = [
            item * max(r.buffer_elements(is_send=is_send) for r in self.rounds) for is_send in (True, False)
        ]
        self._device = next(iter(destinations.values())).device
        self._addresses: list[int] = []
        self.tables: list[Any] = []
        self._cuda_refit: Any = None
        self._communicator = 0 if self._device.type == "cpu" else self._join_nccl()

    @torch.no_grad()
    def run(self) -> None:
        """Write every parameter of the engine. On a GPU this only enqueues: what the current stream does next sees them."""
        self.bind()
        buffers = [[self._buffer(size) for _ in range(2)] for size in self._buffer_bytes]
        send, receive = ([b.data_ptr() for b in pair] for pair in buffers)
        if self._cuda_refit is not None:
            self._cuda_refit.run(send, receive, torch.cuda.current_stream(self._device).cuda_stream)
            return
        transfers = BufferTransfers(self._comm)
        arrays = [[b.numpy() for b in pair] for pair in buffers]

        def start(k: int) -> None:
            sends, receives = (self._slices(k, arrays[side][k % 2], is_send=side == 0) for side in (0, 1))
            transfers.start(k, sends, receives)

        threads = torch.get_num_threads()
        self.kernels.run_on_host(*self.tables, send, receive, threads, start, transfers.finish)
        transfers.end()

    @torch.no_grad()
    def check(self) -> None:
        """Compare a checksum of every block at its source and at its destination. Raises RuntimeError where they differ.

        Collective. It reads all weights twice on each side.
        """
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        outgoing: list[list[int]] = [[] for _ in range(size)]
        sent = [op for op in self._ops if op.source == rank]
        for op, checksum in zip(sent, self._checksums(sent, at_source=True), strict=True):
            outgoing[op.destination].append(checksum)
        expected = [iter(sums) for sums in self._comm.alltoall(outgoing)]
        received = [op for op in self._ops if op.destination == rank]
        found = self._checksums(received, at_source=False)
        wrong = [op for op, f in zip(received, found, strict=True) if next(expected[op.source]) != f]
        if wrong:
            names = ", ".join(dict.fromkeys(f"{op.destination_name} (from rank {op.source})" for op in wrong[:4]))
            raise RuntimeError(
                f"rank {rank}: after a refit {len(wrong)} of {len(received)} blocks of the engine's weights are not the "
                f"trainer's: {names}. The engine would decode with stale or mixed weights, so the job ends here."
            )

    def bind(self) -> None:
        """Make the tables, anew if a parameter has moved."""
        addresses = [t.data_ptr() for t in (*self.sources.values(), *self.destinations.values())]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        pairs = (
            (self._source_dtype, self._travel_dtype),
            (self._source_dtype, self._destination_dtype),
            (self._travel_dtype, self._destination_dtype),
        )
        columns = zip(*((r.packed, r.local, r.unpacked) for r in self.rounds), strict=True)
        kinds = ("packed", "local", "unpacked")
        self.tables = [
            self._table(kind, pieces, *dtypes) for kind, pieces, dtypes in zip(kinds, columns, pairs, strict=True)
        ]
        if self._device.type == "cuda":
            item = self._travel_dtype.itemsize
            rows = [(m.peer, m.is_send, m.offset * item, m.size * item) for r in self.rounds for m in r.messages]
            messages = np.array(rows, dtype=np.int64).reshape(-1, 4)
            bounds = _bounds([r.messages for r in self.rounds])
            self._cuda_refit = self.kernels.CudaRefit(*self.tables, messages, bounds, self._communicator)

    def _table(
        self, kind: str, pieces_of_rounds: Sequence[list[Piece]], source: torch.dtype, destination: torch.dtype
    ) -> Any:
        rows = [self._segment(kind, piece) for pieces in pieces_of_rounds for piece in pieces]
        segments = np.array(rows, dtype=np.int64).reshape(-1, 7)
        return self.kernels.Table(segments, _bounds(pieces_of_rounds), *map(self._code, (source, destination)))

    def _segment(self, kind: str, piece: Piece) -> tuple[int, ...]:
        """A row of a table (csrc/copy.h); in a buffer a block's element 0 would lie `begin` elements before the piece."""
        block, op = piece.op.block, piece.op
        in_buffer = ((piece.offset - piece.begin) * self._travel_dtype.itemsize, block.row_elements)
        source = destination = in_buffer
        if kind != "unpacked":
            source = (_address(self.sources[op.source_name], block.source_offset), block.source_pitch)
        if kind != "packed":
            tensor = self.destinations[op.destination_name]
            destination = (_address(tensor, block.destination_offset), block.destination_pitch)
        return source[0], destination[0], block.row_elements, source[1], destination[1], piece.begin, piece.end

    def _slices(self, k: int, buffer: NDArray[np.uint8], *, is_send: bool) -> list[tuple[int, NDArray[np.uint8]]]:
        item = self._travel_dtype.itemsize
        return [
            (m.peer, buffer[m.offset * item : (m.offset + m.size) * item])
            for m in self.rounds[k].messages
            if m.is_send == is_send
        ]

    def _buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _code(self, dtype: torch.dtype) -> int:
        kernels = self.kernels
        codes = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
        return int(codes[dtype])

    def _join_nccl(self) -> int:
        """A communicator of all ranks, whose address it returns; the first rank's id makes them find each other."""
        mine = self.kernels.nccl_unique_id() if self._comm.Get_rank() == 0 else None
        torch.cuda.set_device(self._device)
        return int(self.kernels.nccl_communicator(self._comm.bcast(mine), self._comm.Get_size(), self._comm.Get_rank()))

    def _check_bounds(self) -> None:
        """C++ sees addresses alone: every block must lie inside its parameters."""
        rank = self._comm.Get_rank()
        for op in self._ops:
            b = op.block
            ends = []
            if op.source == rank:
                ends.append((op.source_name, self.sources, b.source_offset, b.source_pitch))
            if op.destination == rank:
                ends.append((op.destination_name, self.destinations, b.destination_offset, b.destination_pitch))
            for name, tensors, offset, pitch in ends:
                needed = offset + (b.rows - 1) * pitch + b.row_elements
                if name not in tensors or tensors[name].numel() < needed:
                    found = f"has {tensors[name].numel()} elements" if name in tensors else "is not there"
                    raise RuntimeError(
                        f"the plan of the refit needs {needed} elements of {name}, which {found} on rank {rank}. The layout "
                        "table (rollpacker/weights/layout.py) does not describe this model."
                    )

    def _checksums(self, ops: Sequence[TransferOp], *, at_source: bool) -> list[int]:
        """Of each block as the engine has it."""
        sums = []
        for op in ops:
            b = op.block
            if at_source:
                tensor, offset, pitch = self.sources[op.source_name], b.source_offset, b.source_pitch
            else:
                tensor, offset, pitch = (
                    self.destinations[op.destination_name],
                    b.destination_offset,
                    b.destination_pitch,
                )
            view = tensor.as_strided((b.rows, b.row_elements), (pitch, 1), tensor.storage_offset() + offset)
            sums.append(_checksum(view.to(self._destination_dtype)))
        return torch.stack(sums).tolist() if sums else []


def _checksum(block: Tensor) -> Tensor:
    """Of a block's bits: its words of eight bytes, then what is left over element by element, the i-th times 2 i + 1.

    Modulo 2**64. The weights are odd, so one wrong word is always found; several, or words in another order, but for chance.
    """
    flat = block.reshape(-1)
    in_word = 8 // flat.element_size()
    if flat.storage_offset() % in_word:
        flat = flat.clone()
    num_words = flat.numel() // in_word
    words = flat[: num_words * in_word].view(torch.int64)
    left_over = flat[num_words * in_word :].view(torch.int32 if in_word == 2 else torch.int16).long()
    # As a matrix whose rows and columns are summed and then weighted: weighting each word would take as much memory again.
    matrix = words[: num_words // _ROW_WORDS * _ROW_WORDS].view(-1, _ROW_WORDS)
    rest = torch.cat([words[matrix.numel() :], left_over])
    starts = 2 * _ROW_WORDS * torch.arange(len(matrix), device=flat.device)
    odd = 2 * torch.arange(max(_ROW_WORDS, len(rest)), device=flat.device) + 1
    of_matrix = (matrix.sum(1) * starts).sum() + (matrix.sum(0) * odd[:_ROW_WORDS]).sum()
    return of_matrix + (rest * (odd[: len(rest)] + 2 * matrix.numel())).sum()


def _common_dtype(tensors: Mapping[str, Tensor], whose: str) -> torch.dtype:
    """The one dtype of a side, all of whose tensors must be contiguous."""
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise RuntimeError(f"{whose} parameters are {dtypes}; weights.refit=csrc moves one of fp32, bf16 and fp16")
    if strided := [name for name, t in tensors.items() if not t.is_contiguous()]:
        raise RuntimeError(f"{whose} parameters {strided[:3]} are not contiguous; weights.refit=csrc cannot write them")
    return dtypes.pop()


def _address(tensor: Tensor, offset: int) -> int:
    return tensor.data_ptr() + offset * tensor.element_size()


def _bounds(items_of_rounds: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
    return np.array([0, *itertools.accumulate(len(items) for items in items_of_rounds)], dtype=np.int64)
