"""Each rule of tail batching (docs/spec.md, 1), on rollouts in virtual time that are small enough to work out by hand."""

from __future__ import annotations

import pytest
from virtual_rollout import Reward, Setting, VirtualRollout, Workload, hashed_random

from rollpacker.messages import (
    AbortRequest,
    EndRound,
    LaunchRequests,
    RejectGroup,
    RequestFinished,
    RewardDone,
)
from rollpacker.types import Prompt, Request, RoundKind


def number(request: Request) -> int:
    return int(request.prompt.prompt_id[1:])


def slow(*numbers: int):
    """Lengths: prompts of these numbers take 100 tokens and more, the others 10 and more; all differ."""
    return lambda step, request: (100 if number(request) in numbers else 10) + request.response_index


def trained(rollout: VirtualRollout) -> list[list[str]]:
    return [[g.prompt.prompt_id for g in u.groups] for u in rollout.updates]


def launched(rollout: VirtualRollout, index: int) -> list[Prompt]:
    return list(dict.fromkeys(r.prompt for r in rollout.rounds[index].plan.requests))


def kinds(rollout: VirtualRollout) -> list[RoundKind]:
    return [r.plan.kind for r in rollout.rounds]


def test_a_short_round_launches_eta_times_the_prompts_and_the_responses() -> None:
    controller, _, _ = Setting(batch=128, n=8, eta_prompts=1.25, eta_responses=1.25, num_prompts=200).build()
    plan = controller.begin_step(1)
    assert plan is not None and plan.kind is RoundKind.SHORT
    assert len(plan.requests) == 160 * 10
    assert plan.num_groups == 128


@pytest.mark.parametrize(
    ("eta", "size", "launched"), [(1.1, 10, 11), (1.25, 8, 10), (1.25, 4, 5), (1.01, 4, 5), (1.0, 4, 4)]
)
def test_counts_are_rounded_up_and_not_by_binary_fractions(eta: float, size: int, launched: int) -> None:
    controller, _, _ = Setting(batch=size, n=size, eta_prompts=eta, eta_responses=eta, num_prompts=50).build()
    plan = controller.begin_step(1)
    assert plan is not None and len(plan.requests) == launched * launched


def test_launch_is_prompt_major() -> None:
    controller, _, _ = Setting().build()
    plan = controller.begin_step(1)
    assert plan is not None
    assert [(number(r), r.response_index) for r in plan.requests] == [(p, i) for p in range(6) for i in range(3)]
    assert [r.index for r in plan.requests] == list(range(18))


def test_a_prompt_finishes_with_its_r0th_response_and_its_others_are_aborted() -> None:
    rollout = Setting(num_prompts=4, eta_prompts=1.0).run(Workload(slow()))
    first = rollout.rounds[0]
    aborted = [a.request for a in first.actions if isinstance(a, AbortRequest)]
    assert sorted((number(r), r.response_index) for r in aborted) == [(p, 2) for p in range(4)]
    assert all([r.request.response_index for r in g.responses] == [0, 1] for g in first.update.groups)
    assert first.update.stats.num_aborted_responses == 4


def test_a_short_round_ends_with_the_p0th_prompt_and_queues_the_unfinished() -> None:
    controller, scheduler, _ = Setting().build()
    rollout = VirtualRollout(Workload(slow(1, 3)))
    plan = controller.begin_step(1)
    rollout.launch(plan)
    for event in rollout.events():
        for action in controller.on(event):
            rollout.apply(action)
    update = controller.finish_step()
    assert [g.prompt.prompt_id for g in update.groups] == ["p0", "p2", "p4", "p5"]
    assert scheduler.state_dict()["queue"] == [["p1", 0, "unfinished"], ["p3", 0, "unfinished"]]
    assert (update.stats.num_aborted_prompts, update.stats.long_queue_len) == (2, 2)
    # all that was decoded and is not trained: 11 tokens each of 6 requests, and of the third responses up to the abort
    assert update.stats.num_tokens_wasted == update.stats.num_tokens_generated - update.num_tokens == 6 * 11 + 4 * 11


def test_a_long_round_begins_when_the_queue_fills_it_and_nothing_races_in_it() -> None:
    rollout = Setting(num_prompts=16).run(Workload(slow(1, 3, 7, 9)))
    assert kinds(rollout) == [RoundKind.SHORT, RoundKind.SHORT, RoundKind.LONG, RoundKind.SHORT]
    assert set(trained(rollout)[2]) == {"p1", "p3", "p7", "p9"}
    long_round = rollout.rounds[2]
    assert len(long_round.plan.requests) == 4 * 2
    assert not any(isinstance(a, AbortRequest) for a in long_round.actions)


def test_the_queue_is_first_in_first_out() -> None:
    """LONG rounds take prompts in the order in which they were queued, whatever their predicted lengths."""
    late = {1, 3, 7, 9, 12, 13}
    rollout = Setting(num_prompts=20).run(Workload(slow(*late)))
    long_rounds = [set(t) for t, kind in zip(trained(rollout), kinds(rollout), strict=True) if kind is RoundKind.LONG]
    assert long_rounds[0] == {"p1", "p3", "p7", "p9"}
    assert long_rounds[1] == {"p12", "p13", "p18", "p19"}  # the last two by the end of the data


def test_a_slow_reward_does_not_select_samples() -> None:
    """A response finishes when its generation ends: what is trained is the same, however long a verifier takes."""

    def lagging(step: int, request: Request) -> Reward:
        return Reward(1.0, ticks=500 if number(request) % 2 == 0 else 1)

    at_once = Setting().run(Workload(slow(1, 3, 8)))
    late = Setting().run(Workload(slow(1, 3, 8), reward=lagging))
    assert trained(at_once) == trained(late)


def test_the_others_are_aborted_before_the_rewards_are_in() -> None:
    rollout = Setting().run(Workload(slow(1, 3), reward=lambda s, r: Reward(1.0, ticks=50)))
    log = rollout.rounds[0]
    assert max(e.time_s for e in log.events if isinstance(e, RequestFinished)) == 11
    assert max(e.time_s for e in log.events if isinstance(e, RewardDone)) == 61
    assert isinstance(log.actions[-1], EndRound)


def test_a_prompt_that_finished_too_late_is_not_long() -> None:
    """It ended in the same batch of events as the P0-th prompt, after it: back to the front of the fresh prompts."""
    rollout = Setting().run(Workload(lambda step, request: 10, quantum=5))
    assert all(kind is RoundKind.SHORT for kind in kinds(rollout))
    first, second = trained(rollout)[:2]
    assert {f"p{i}" for i in range(6)} - set(first) <= {g.prompt_id for g in launched(rollout, 1)[:2]}
    assert len(first) == len(second) == 4


def races_on_8_slots_and_more(num_slots: int) -> list[RoundKind]:
    """6 prompts of 2 requests; the first 8 requests take 10 tokens, so they end the round, the others take longer."""
    length = lambda step, request: 10 if request.index < 8 else 20  # noqa: E731
    return kinds(Setting(num_gpus=1, eta_responses=1.0).run(Workload(length, num_slots=num_slots)))


def test_a_prompt_that_waited_for_a_slot_is_not_long() -> None:
    """One response never got a token, so nothing is known of the prompt: back to the front of the fresh prompts."""
    assert races_on_8_slots_and_more(8) == [RoundKind.SHORT] * 10
    assert races_on_8_slots_and_more(9) == [RoundKind.SHORT] * 10  # p4 has only one of its two responses running
    assert RoundKind.LONG in races_on_8_slots_and_more(12)  # the control: with slots for all, they are queued


def test_losers_return_to_the_front_in_their_order() -> None:
    controller, _, order = Setting(num_gpus=1, eta_responses=1.0).build()
    rollout = VirtualRollout(Workload(lambda step, request: 10, num_slots=8))
    rollout.launch(controller.begin_step(1))
    for event in rollout.events():
        for action in controller.on(event):
            rollout.apply(action)
    controller.finish_step()
    assert [p.prompt_id for p in order.draw(4)] == ["p4", "p5", "p6", "p7"]


def test_nothing_is_trained_that_another_round_generated() -> None:
    rollout = Setting(num_prompts=60).run(
        Workload(lambda s, r: 5 + hashed_random(s, r.prompt.key, r.index).randrange(50))
    )
    for log in rollout.rounds:
        launched = {r.seed for a in log.actions if isinstance(a, LaunchRequests) for r in a.requests}
        launched |= {r.seed for r in log.plan.requests}
        ended = {e.request_index for e in log.events if isinstance(e, RequestFinished)}
        for group in log.update.groups:
            assert {r.request.seed for r in group.responses} <= launched
            assert {r.request.index for r in group.responses} <= ended


# --- drains and the end of the data ---


def test_drain_training_empties_the_queue_at_the_end_of_the_data() -> None:
    """11 prompts, two rounds of 4: the last 3 fresh ones are too few, so they join the queue."""
    rollout = Setting(num_prompts=11, eta_prompts=1.0).run(Workload(slow()))
    assert kinds(rollout) == [RoundKind.SHORT, RoundKind.SHORT, RoundKind.LONG]
    assert trained(rollout)[2] == ["p8", "p9", "p10"]
    assert rollout.updates[2].num_sequences == 3 * 2


def test_fewer_prompts_than_a_batch_are_one_long_round() -> None:
    rollout = Setting(num_prompts=3).run(Workload(slow()))
    assert (kinds(rollout), trained(rollout)) == ([RoundKind.LONG], [["p0", "p1", "p2"]])


def test_drain_none_leaves_the_queue_and_says_so() -> None:
    rollout = Setting(num_prompts=10, drain="none").run(Workload(slow(1, 3)))
    assert trained(rollout) == [["p0", "p2", "p4", "p5"], ["p6", "p7", "p8", "p9"]]
    assert rollout.updates[-1].stats.long_queue_len == 2


def test_drain_epoch_trains_every_prompt_of_an_epoch_before_the_next() -> None:
    rollout = Setting(num_prompts=10, total_epochs=3, drain="epoch").run(Workload(slow(1, 3)))
    epochs = [{g.prompt.epoch for g in u.groups} for u in rollout.updates]
    assert all(len(e) == 1 for e in epochs)
    assert [min(e) for e in epochs] == sorted(min(e) for e in epochs)
    assert sorted(p for u in rollout.updates for p in (g.prompt.key for g in u.groups)) == sorted(
        (f"p{i}", e) for i in range(10) for e in range(3)
    )


def test_a_prompt_still_queued_when_the_next_epoch_starts_is_legal() -> None:
    """Its epoch is the one in which it was drawn; both of its groups may even be queued at once."""
    rollout = Setting(num_prompts=6, total_epochs=4).run(Workload(slow(1)))
    keys = [g.prompt.key for u in rollout.updates for g in u.groups]
    assert sorted(keys) == sorted((f"p{i}", e) for i in range(6) for e in range(4))
    assert any(len({g.prompt.epoch for g in u.groups}) > 1 for u in rollout.updates)


def test_the_step_cap_includes_the_drain() -> None:
    """LONG rounds start once the steps left are what the queue needs."""
    rollout = Setting(num_prompts=1000, total_epochs=None, total_steps=6).run(Workload(slow(1, 7, 20)))
    assert len(rollout.rounds) == 6
    assert kinds(rollout)[-1] is RoundKind.LONG
    assert set(trained(rollout)[-1]) == {"p1", "p7", "p20"}
    assert rollout.updates[-1].stats.long_queue_len == 0


def test_what_is_still_queued_at_the_cap_is_reported_and_saved() -> None:
    setting = Setting(num_prompts=1000, total_epochs=None, total_steps=3, drain="none")
    controller, scheduler, _ = setting.build()
    rollout = VirtualRollout(Workload(slow(1, 7)))
    from rollpacker.loop import run

    run(3, controller, rollout)
    assert rollout.updates[-1].stats.long_queue_len == 2
    assert [q[0] for q in scheduler.state_dict()["queue"]] == ["p1", "p7"]


# --- filters, domains, rewards that fail ---


def mixed(*equal: int):
    """Rewards: prompts of these numbers score alike, the others do not."""
    return lambda step, request: Reward(float(number(request) not in equal and request.response_index == 0))


def test_a_filtered_prompt_is_counted_and_replaced_in_the_same_round() -> None:
    rollout = Setting(has_filter=True, eta_responses=1.0).run(Workload(slow(), reward=mixed(0, 2)))
    first = rollout.rounds[0]
    assert [p for p, _ in first.keys(RejectGroup)] == ["p0", "p2"]
    assert first.update.stats.num_rejected_groups == 2
    launched = [number(r) for a in first.actions if isinstance(a, LaunchRequests) for r in a.requests]
    assert launched == [6, 6, 7, 7]
    assert [g.prompt.prompt_id for g in first.update.groups] == ["p1", "p3", "p4", "p5"]


def test_groups_that_wait_for_a_reward_neither_count_nor_block() -> None:
    """With a filter the round ends with P0 accepted groups; one whose verifier hangs goes back to the fresh prompts."""

    def reward(step: int, request: Request) -> Reward:
        hangs = step == 1 and number(request) == 0
        return Reward(float(request.response_index == 0), ticks=10**6 if hangs else 1)

    rollout = Setting(has_filter=True, eta_responses=1.0).run(Workload(slow(), reward=reward))
    assert trained(rollout)[0] == ["p1", "p2", "p3", "p4"]
    assert trained(rollout)[1][0] == "p0"


def test_launches_stay_within_max_launched_ratio_and_the_round_ends() -> None:
    rollout = Setting(has_filter=True, max_launched_ratio=2.0, num_prompts=64).run(
        Workload(slow(), reward=mixed(*range(0, 64, 2), *range(1, 64, 4)))
    )
    for log in rollout.rounds:
        if log.plan.kind is RoundKind.SHORT:
            launched = {r.prompt.key for r in log.plan.requests}
            launched |= {r.prompt.key for a in log.actions if isinstance(a, LaunchRequests) for r in a.requests}
            assert len(launched) <= 8
        assert isinstance(log.actions[-1], EndRound)


def test_the_launch_is_divided_by_the_acceptance_rate() -> None:
    rollout = Setting(has_filter=True, num_prompts=400, batch=8, eta_prompts=1.25, eta_responses=1.0).run(
        Workload(slow(), reward=mixed(*range(0, 400, 2)))
    )
    counts = [log.plan.requests[-1].index // 2 + 1 for log in rollout.rounds[:12]]
    assert counts[0] == 10
    assert all(16 <= c <= 24 for c in counts[2:])


def test_a_filter_shrinks_a_long_round() -> None:
    rollout = Setting(has_filter=True, eta_responses=1.0, num_prompts=16).run(
        Workload(slow(1, 3, 7, 9), reward=mixed(3, 9))
    )
    long_round = next(log for log in rollout.rounds if log.plan.kind is RoundKind.LONG)
    assert {g.prompt.prompt_id for g in long_round.update.groups} == {"p1", "p7"}
    assert not any(isinstance(a, LaunchRequests) for a in long_round.actions)
    assert long_round.update.stats.num_rejected_groups == 2


def test_where_a_filter_lets_nothing_pass_the_rejected_are_trained() -> None:
    rollout = Setting(has_filter=True, num_prompts=8, max_launched_ratio=2.0).run(
        Workload(slow(), reward=mixed(*range(8)))
    )
    assert all(len(u.groups) for u in rollout.updates)


def test_a_long_round_takes_the_queue_in_order_whatever_the_domains_are() -> None:
    """All queued prompts are of one domain, and its data are used up: neither can hang a round."""
    late = [i for i in range(32) if i % 4 == 0]
    rollout = Setting(num_prompts=32, num_domains=4).run(Workload(slow(*late)))
    keys = [p for t in trained(rollout) for p in t]
    assert sorted(keys) == sorted(f"p{i}" for i in range(32))
    long_round = next(log for log in rollout.rounds if log.plan.kind is RoundKind.LONG)
    assert {g.prompt.domain for g in long_round.update.groups} == {"d0"}


def failing(*numbers: int):
    return lambda step, request: Reward(0.0, is_error=number(request) in numbers and request.response_index == 1)


def test_a_failed_reward_scores_0_and_never_stops_the_round() -> None:
    rollout = Setting(num_prompts=4, eta_prompts=1.0, eta_responses=1.0).run(Workload(slow(), reward=failing(2)))
    assert trained(rollout) == [["p0", "p1", "p2", "p3"]]
    assert rollout.updates[0].stats.num_reward_errors == 1


def test_drop_group_drops_the_group_of_a_failed_reward() -> None:
    rollout = Setting(num_prompts=4, eta_prompts=1.0, eta_responses=1.0, drops_failed=True).run(
        Workload(slow(), reward=failing(2))
    )
    assert trained(rollout) == [["p0", "p1", "p3"]]
    assert rollout.updates[0].stats.num_dropped_groups == 1
    assert [a.reason for a in rollout.rounds[0].actions if isinstance(a, RejectGroup)] == ["reward_error"]


def test_a_failed_reward_of_an_aborted_prompt_drops_nothing() -> None:
    rollout = Setting(drops_failed=True, num_prompts=6).run(
        Workload(lambda s, r: 100 if number(r) == 1 and r.response_index else 10, reward=failing(1))
    )
    assert sum(u.stats.num_dropped_groups for u in rollout.updates) == 1  # in its own round, the LONG one


# --- audit groups and routing ---


def test_audit_groups_go_straight_to_the_queue_and_are_trained_unraced() -> None:
    setting = Setting(num_prompts=80, audit_fraction=0.3)
    rollout = setting.run(Workload(lambda s, r: 5 + hashed_random(s, r.prompt.key, r.index).randrange(40)))
    _, scheduler, _ = setting.build()
    audited = 0
    for log in rollout.rounds:
        for group in log.update.groups:
            if scheduler._audit.is_audited(group.prompt):
                audited += 1
                assert log.plan.kind is RoundKind.LONG and len(log.plan.requests) % setting.n == 0
    assert audited == rollout.updates[-1].stats.audit.num_groups
    assert 12 <= audited <= 36
    assert sum(len(u.groups) for u in rollout.updates) == 80


def test_long_rounds_launch_the_predicted_longest_first_and_spread_them() -> None:
    """In the second epoch the lengths of the first are known."""
    setting = Setting(num_prompts=8, total_epochs=2, batch=8, eta_prompts=1.0, eta_responses=1.0, num_gpus=4)
    controller, scheduler, _ = setting.build()
    rollout = VirtualRollout(Workload(lambda s, r: 100 * (number(r) + 1)))
    rollout.launch(controller.begin_step(1))
    for event in rollout.events():
        for action in controller.on(event):
            rollout.apply(action)
    controller.finish_step()
    for prompt in scheduler._source.draw(8):
        scheduler._queue.push(prompt, "unfinished")
    plan = controller.begin_step(2)
    assert plan is not None and plan.kind is RoundKind.LONG
    assert [number(r) for r in plan.requests[::2]] == [7, 6, 5, 4, 3, 2, 1, 0]
    load = [sum(100 * (number(r) + 1) for r in plan.requests if r.replica == k) for k in range(4)]
    assert max(load) / min(load) < 1.1
    assert len({r.replica for r in plan.requests[:4]}) == 4


def test_a_lost_race_is_evidence_of_length() -> None:
    controller, scheduler, _ = Setting().build()
    rollout = VirtualRollout(Workload(slow(1, 3)))
    rollout.launch(controller.begin_step(1))
    for event in rollout.events():
        for action in controller.on(event):
            rollout.apply(action)
    controller.finish_step()
    assert scheduler._launcher.history.predict("p1") > scheduler._launcher.history.predict("p0")


def test_the_planners_size_sets_the_replicas_of_the_round() -> None:
    rollout = Setting(schedule=(1, 2, 1, 4)).run(Workload(slow()))
    plans = [log.plan for log in rollout.rounds[:4]]
    assert [p.tensor_model_parallel_size for p in plans] == [1, 2, 1, 4]
    assert [len({r.replica for r in p.requests}) for p in plans] == [4, 2, 4, 1]
    assert [u.stats.has_switched_tensor_parallel for u in rollout.updates[:5]] == [False, True, True, True, False]
