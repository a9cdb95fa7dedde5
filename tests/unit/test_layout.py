"""The layout table: every row of every Hugging Face tensor is in exactly one shard."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.model_shape import ModelShape
from rollpacker.weights.layout import megatron_layout, stage_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from resharding import models

CASES = st.sampled_from([1, 2, 4]).flatmap(lambda tp: st.tuples(models(tp, 1, 1), st.just(tp)))


@given(CASES)
def test_segments_cover_every_row_exactly_once(case: tuple[ModelShape, int]) -> None:
    shape, tp = case
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for parameter in megatron_layout(shape, tp):
        assert len(parameter.shards) == tp
        shards = parameter.shards if parameter.dim is not None else parameter.shards[:1]
        for shard in shards:
            for segment in shard:
                if segment.start < segment.stop:
                    covered[segment.hf_name].append((segment.start, segment.stop))
    for hf_name, spans in covered.items():
        spans.sort()
        assert spans[0][0] == 0, hf_name
        assert all(a[1] == b[0] for a, b in pairwise(spans)), hf_name


@given(CASES)
def test_shards_of_a_parameter_have_one_size(case: tuple[ModelShape, int]) -> None:
    shape, tp = case
    for parameter in megatron_layout(shape, tp):
        sizes = {
            sum(s.stop - s.start for s in shard) + parameter.padding_rows(rank)
            for rank, shard in enumerate(parameter.shards)
        }
        assert len(sizes) == 1, parameter.name


def test_stages_split_the_layers_evenly() -> None:
    shape = ModelShape("Qwen2ForCausalLM", 4, 16, 8, 2, 2, 8, 10, 64, 1e4, 1e-6, False, True)
    stages = {p.name: stage_of(p, 4, 2) for p in megatron_layout(shape, 1)}
    assert stages["embedding.word_embeddings.weight"] == 0
    assert stages["decoder.layers.1.mlp.linear_fc2.weight"] == 0
    assert stages["decoder.layers.2.mlp.linear_fc2.weight"] == 1
    assert stages["decoder.final_layernorm.weight"] == stages["output_layer.weight"] == 1


def test_parameter_count_of_a_known_model() -> None:
    """Qwen2.5-0.5B has 494,032,768 parameters (its model card says 0.49 B, 0.36 B without embeddings)."""
    shape = ModelShape("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 64, 151936, 32768, 1e6, 1e-6, True, True)
    assert shape.num_parameters() == 494_032_768


def test_parameter_count_of_qwen3() -> None:
    """Qwen3-0.6B has 596,049,920 parameters: 16 heads of 128 on a hidden size of 1024, and a norm per head's channels."""
    shape = ModelShape("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, True, False, True)
    assert shape.num_parameters() == 596_049_920
