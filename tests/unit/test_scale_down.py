"""When half of the GPUs begin to train, what moves, and what forbids it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_rollout import Reward, Setting, VirtualRollout, Workload

from rollpacker.loop import run
from rollpacker.messages import LaunchRequests, ScaleDown
from rollpacker.model_shape import ModelShape
from rollpacker.policy.controller import StepController
from rollpacker.policy.kv_cache import projected_peak_tokens
from rollpacker.policy.offload import plan_resident_layers
from rollpacker.policy.routing import RunningRequest
from rollpacker.policy.scale_down import MILESTONES, ScaleDownPolicy, scale_down_refusal


def shape(num_layers: int, num_kv_heads: int) -> ModelShape:
    return ModelShape("Qwen2ForCausalLM", num_layers, 1, 1, 64, num_kv_heads, 128, 1, 1, 1.0, 1.0, False, True)


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "num_bytes"), [(28, 4, 57_344), (48, 8, 196_608), (64, 8, 262_144)]
)
def test_kv_bytes_per_token_of_qwen2_5(num_layers: int, num_kv_heads: int, num_bytes: int) -> None:
    model = shape(num_layers, num_kv_heads)
    assert model.kv_bytes_per_token(1, 2) == num_bytes
    assert model.kv_bytes_per_token(2, 2) == num_bytes // 2
    assert model.kv_bytes_per_token(4 * num_kv_heads, 2) == num_bytes // num_kv_heads


def running(*rows: tuple[int, int, float]) -> list[RunningRequest]:
    return [RunningRequest(i, replica, n, predicted) for i, (replica, n, predicted) in enumerate(rows)]


def test_the_projected_peak_lies_at_an_end() -> None:
    """100 + 100 tokens now; both at 150 when the first ends; the second alone reaches 400."""
    assert projected_peak_tokens(running((0, 100, 150.0), (0, 100, 400.0))) == 400
    assert projected_peak_tokens(running((0, 100, 250.0), (0, 100, 400.0))) == 500
    assert projected_peak_tokens(running((0, 100, 10.0))) == 100
    assert projected_peak_tokens([]) == 0


@given(st.lists(st.tuples(st.just(0), st.integers(1, 50), st.integers(1, 80).map(float)), max_size=12))
def test_the_projected_peak_is_that_of_a_replay(rows: list[tuple[int, int, float]]) -> None:
    requests = running(*rows)
    peak = 0.0
    for tick in range(100):
        alive = [r for r in requests if r.num_tokens + tick <= r.peak_tokens]
        peak = max(peak, sum(r.num_tokens + tick for r in alive))
    assert projected_peak_tokens(requests) == peak


@pytest.mark.parametrize(
    ("gpus", "rollout_tp", "training", "is_moe", "reason"),
    [
        (16, 2, 4, False, None),
        (8, 8, 1, False, "8 GPUs make 1 rollout replicas of 8"),
        (12, 2, 4, False, "12 GPUs make 3 training replicas of 4"),
        (16, 1, 2, True, "mixture of experts"),
    ],
)
def test_no_rollout_group_and_no_training_replica_is_split(gpus, rollout_tp, training, is_moe, reason) -> None:
    found = scale_down_refusal(gpus, rollout_tp, training, is_moe=is_moe)
    assert found is None if reason is None else found is not None and reason in found


def policy(capacity: int, num_gpus: int = 4, training: int = 1, **options) -> ScaleDownPolicy:
    return ScaleDownPolicy(
        num_gpus=num_gpus,
        training_replica_size=training,
        capacity_tokens=lambda tp: capacity,
        expect=lambda n: 100.0,
        **options,
    )


def test_the_half_with_less_to_move_is_freed() -> None:
    requests = running((0, 10, 20.0), (1, 10, 20.0), (2, 500, 600.0), (3, 400, 500.0))
    assert policy(10_000).plan(1, requests) == ScaleDown((0, 1), ((0, 3), (1, 3)))
    assert policy(10_000).plan(2, running((0, 500, 600.0), (1, 10, 20.0))) == ScaleDown((1,), ((1, 0),))


def test_it_scales_down_only_if_the_peak_fits_on_the_gpus_that_stay() -> None:
    requests = running((0, 100, 300.0), (1, 100, 300.0), (2, 100, 200.0), (3, 100, 200.0))
    # each staying replica holds one of 300 and one of 200: 400 when the shorter ends
    assert policy(400).plan(1, requests) is not None
    assert policy(399).plan(1, requests) is None


def test_where_it_need_not_fit_the_first_milestone_decides() -> None:
    requests = running((0, 100, 300.0), (1, 100, 300.0), (2, 100, 200.0), (3, 100, 200.0))
    assert policy(399, must_fit=False).plan(1, requests) == policy(400).plan(1, requests)
    assert scaled(1, milestones=(0.4,), must_fit=False).updates[0].stats.scale_down_progress == 0.4


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 300), st.floats(1, 900)), max_size=40), st.integers(0, 3000)
)
def test_every_staying_replica_stays_within_its_cache(rows, capacity: int) -> None:
    requests = running(*rows)
    plan = policy(capacity, num_gpus=8, training=2).plan(1, requests)
    if plan is None:
        return
    assert plan.freed_replicas in (tuple(range(4)), tuple(range(4, 8)))
    moved = dict(plan.migrations)
    assert moved.keys() == {r.index for r in requests if r.replica in plan.freed_replicas}
    for replica in set(range(8)) - set(plan.freed_replicas):
        held = [r for r in requests if moved.get(r.index, r.replica) == replica]
        assert projected_peak_tokens(held) <= capacity


def scaled(capacity: int, **options) -> VirtualRollout:
    """One LONG round of 20 prompts, 2 responses each, that finish one after the other."""
    _, scheduler, _ = (setting := Setting(num_prompts=20, batch=30)).build()
    controller = StepController(
        scheduler, scheduler, reward_timeout_s=1.0, scale_down=policy(capacity, setting.num_gpus, **options)
    )
    rollout = VirtualRollout(Workload(lambda step, request: 10 + request.index))
    run(1, controller, rollout)
    return rollout


def test_milestones_are_tried_until_one_succeeds() -> None:
    """With room it frees at 20 %; with less it waits until the rest fits; with none it never does."""
    assert MILESTONES == (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
    progress = [scaled(n).updates[0].stats.scale_down_progress for n in (100_000, 1500, 1300, 100)]
    assert progress[0] == 0.2
    assert 0.2 < progress[1] <= progress[2] <= 0.5
    assert progress[3] is None


def test_a_round_scales_down_once_and_loses_nothing() -> None:
    log = scaled(100_000).rounds[0]
    assert sum(isinstance(a, ScaleDown) for a in log.actions) == 1
    assert log.update is not None and len(log.update.groups) == 20


def test_after_migration_requests_name_their_new_replica() -> None:
    log = scaled(100_000).rounds[0]
    (down,) = (a for a in log.actions if isinstance(a, ScaleDown))
    replica_of = {r.request.index: r.request.replica for g in log.update.groups for r in g.responses}
    assert down.migrations and all(replica_of[index] == replica for index, replica in down.migrations)


def test_short_rounds_scale_down_only_if_asked() -> None:
    for all_rounds in (False, True):
        _, scheduler, _ = Setting(num_prompts=40).build()
        down = policy(10**6, all_rounds=all_rounds)
        controller = StepController(scheduler, scheduler, reward_timeout_s=1.0, scale_down=down)
        rollout = VirtualRollout(Workload(lambda step, request: 10 + request.index))
        run(1, controller, rollout)
        assert any(isinstance(a, ScaleDown) for a in rollout.rounds[0].actions) is all_rounds


def test_what_a_filter_launches_after_a_scale_down_stays_off_the_freed_replicas() -> None:
    """The scale-down is at a fifth of the requests, the rejections that ask for more come after it."""
    setting = Setting(num_prompts=60, batch=8, has_filter=True, kv_capacity_tokens=10**6)
    rollout = setting.run(Workload(lambda step, request: 10 + request.index, lambda s, r: Reward(1.0, ticks=40)))
    log = rollout.rounds[0]
    kinds = [type(a) for a in log.actions if isinstance(a, ScaleDown | LaunchRequests)]
    assert kinds[0] is ScaleDown and kinds.count(LaunchRequests) > 4  # the rollout checks the replicas


def test_a_race_migrates_nothing_that_it_has_just_aborted() -> None:
    """One response of two ends a prompt here, so the milestone's own event aborts a request."""
    setting = Setting(num_prompts=20, batch=8, n=1, eta_prompts=1.0, eta_responses=2.0, kv_capacity_tokens=10**6)
    rollout = setting.run(Workload(lambda step, request: 10 + request.index))  # the rollout checks the migrations
    assert any(isinstance(a, ScaleDown) and a.migrations for a in rollout.rounds[0].actions)


@pytest.mark.parametrize(("free", "resident"), [(10_000, 10), (100, 10), (99, 7), (70, 4), (28, 0)])
def test_as_many_judge_layers_stay_as_fit_beside_two_buffers(free: int, resident: int) -> None:
    assert plan_resident_layers(10, layer_bytes=9, input_bytes=10, free_bytes=free) == resident


def test_a_judge_that_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"27 bytes are free, its longest input takes 10, and 2 layer buffers of 9"):
        plan_resident_layers(10, layer_bytes=9, input_bytes=10, free_bytes=27)


@given(st.integers(1, 80), st.integers(1, 50), st.integers(0, 500), st.integers(0, 5000))
def test_what_stays_and_the_buffers_never_exceed_the_memory(layers: int, size: int, taken: int, free: int) -> None:
    try:
        resident = plan_resident_layers(layers, size, taken, free)
    except ValueError:
        assert taken + 2 * size > free
        return
    buffers = 0 if resident == layers else 2
    assert taken + (resident + buffers) * size <= free
