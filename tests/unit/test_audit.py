"""The audit's estimators against known laws: they show a race where there is one, and none where there is none."""

from __future__ import annotations

import json
import math
import random

import pytest
from virtual_rollout import Setting, Workload, hashed_random

from rollpacker.messages import RequestFinished
from rollpacker.policy.audit import MIN_GROUPS, SampleAudit
from rollpacker.types import Group, Prompt, Request, RoundKind, ScoredResponse

R0 = 8


def group(name: str, lengths: list[int]) -> Group:
    prompt = Prompt(name)
    return Group(
        prompt,
        tuple(
            ScoredResponse(Request(i, prompt, i, 0, 0, 10**6), n, "stop", 1.0, False, 0.0)
            for i, n in enumerate(lengths)
        ),
    )


def lognormal_groups(n: int, sigma_b: float, sigma_w: float, seed: int, cap: int = 10**6) -> list[Group]:
    noise = random.Random(seed)
    groups = []
    for i in range(n):
        mean = noise.gauss(6.0, sigma_b)
        lengths = [min(max(round(math.exp(noise.gauss(mean, sigma_w))), 1), cap) for _ in range(R0)]
        groups.append(group(f"p{i}", lengths))
    return groups


@pytest.mark.parametrize(("sigma_b", "sigma_w"), [(0.0, 1.0), (0.5, 1.0), (1.0, 0.5)])
def test_icc_is_the_share_of_variance_between_prompts(sigma_b: float, sigma_w: float) -> None:
    audit = SampleAudit(fraction=1.0, seed=0)
    audit.add_trained(lognormal_groups(3000, sigma_b, sigma_w, seed=1))
    assert audit.icc() == pytest.approx(sigma_b**2 / (sigma_b**2 + sigma_w**2), abs=0.02)


def test_nothing_is_reported_from_fewer_than_32_audit_groups() -> None:
    audit = SampleAudit(fraction=1.0, seed=0)
    groups = lognormal_groups(MIN_GROUPS, 1.0, 1.0, seed=2)
    audit.add_trained(groups[:-1])
    report = audit.report()
    assert (report.num_groups, report.icc, report.coverage_p95, report.own_coverage_p95) == (31, None, None, None)
    audit.add_trained(groups[-1:])
    report = audit.report()
    assert report.num_groups == 32 and report.icc is not None and report.own_coverage_p95 is not None


def test_an_own_prompt_deviation_is_from_the_mean_of_the_others() -> None:
    """By hand: of 1, 1 and 64 tokens the last is log 64 above the others, which are log 8 below theirs."""
    audit = SampleAudit(fraction=1.0, seed=0)
    audit.add_trained([group("p", [1, 1, 64])])
    bins = audit.state_dict()["trained"]["deviations"]
    assert bins == [(-round(math.log(8) * 256), 2), (round(math.log(64) * 256), 1)]


def test_one_response_a_prompt_has_neither_icc_nor_own_coverage() -> None:
    audit = SampleAudit(fraction=1.0, seed=0)
    audit.add_trained([group(f"p{i}", [1 + i]) for i in range(40)])
    report = audit.report()
    assert (report.icc, report.own_coverage_p95) == (None, None)
    assert report.coverage_p95 == pytest.approx(1.0)


def test_where_every_group_is_audited_every_coverage_is_1() -> None:
    """So the rule for ties and bins adds nothing of its own; half of the responses are at the cap here."""
    for cap in (10**6, 400):
        audit = SampleAudit(fraction=1.0, seed=0)
        audit.add_trained(lognormal_groups(100, 0.5, 1.0, seed=3, cap=cap))
        report = audit.report()
        for value in (report.coverage_p50, report.coverage_p90, report.coverage_p95, report.coverage_p99):
            assert value == pytest.approx(1.0, abs=1e-9)
        assert report.own_coverage_p95 == pytest.approx(1.0, abs=1e-9)
        assert report.warning is None


def test_ties_count_with_the_fraction_that_makes_the_audits_own_coverage_1() -> None:
    """By hand: 10 % of the audit's responses are at the cap of 9, so of q = .95 half of the capped ones count."""
    audit = SampleAudit(fraction=0.0, seed=0)
    for i in range(40):
        capped = i % 10 == 0
        audit._audited.add([9] * R0 if capped else [1] * R0)
        audit._trained.add([9] * R0 if i % 20 == 0 else [1] * R0)  # training sees half of them
    coverage = audit.coverage(0.95)
    assert coverage is not None and coverage.value == pytest.approx(0.5)


def test_the_draw_of_the_audit_is_a_seeded_hash_of_prompt_and_epoch() -> None:
    audit, again, other = (SampleAudit(fraction=0.02, seed=s) for s in (0, 0, 1))
    prompts = [Prompt(f"p{i}", epoch=e) for i in range(10_000) for e in range(2)]
    drawn = [audit.is_audited(p) for p in prompts]
    assert 330 <= sum(drawn) <= 470
    assert drawn == [again.is_audited(p) for p in prompts] != [other.is_audited(p) for p in prompts]
    assert [p for p in prompts if SampleAudit(fraction=0.0, seed=0).is_audited(p)] == []
    assert all(SampleAudit(fraction=1.0, seed=0).is_audited(p) for p in prompts)


def test_a_fraction_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        SampleAudit(fraction=1.5, seed=0)


def test_a_saved_audit_goes_on_bit_for_bit() -> None:
    audit, copy = SampleAudit(fraction=0.3, seed=0), SampleAudit(fraction=0.3, seed=0)
    groups = lognormal_groups(300, 0.5, 1.0, seed=4)
    audit.add_trained(groups[:200])
    copy.load_state_dict(json.loads(json.dumps(audit.state_dict())))
    for a in (audit, copy):
        a.add_trained(groups[200:])
    assert audit.report() == copy.report()
    assert audit.state_dict() == copy.state_dict()


# --- the laws of a race (docs/spec.md, 1.1), through the very scheduler that runs ---


def race(num_prompts: int, *, eta_prompts: float, eta_responses: float, sigma_b: float, audit_fraction: float = 0.1):
    """Trained groups and audit groups of one epoch; lengths are lognormal, 1 - sigma_b**2 of the variance within prompts."""
    setting = Setting(
        num_prompts=num_prompts,
        batch=64,
        n=R0,
        eta_prompts=eta_prompts,
        eta_responses=eta_responses,
        max_tokens=10**9,
        audit_fraction=audit_fraction,
    )
    sigma_w = math.sqrt(1 - sigma_b**2)

    def length(step: int, request: Request) -> int:
        mean = hashed_random("mean", request.prompt.prompt_id).gauss(12.0, sigma_b)
        return round(math.exp(mean + sigma_w * hashed_random(step, request.seed).gauss(0, 1)))

    return setting.run(Workload(length))


def quantile_of(num_tokens: int) -> float:
    """F of a response where lengths are i.i.d. (sigma_b = 0)."""
    return 0.5 * math.erfc(-(math.log(num_tokens) - 12.0) / math.sqrt(2))


def at_most(most: int, n: int, low: float, high: float) -> float:
    """P(Bin(n, F) <= most), averaged over F from low to high."""
    grid = [low + (high - low) * (i + 0.5) / 200 for i in range(200)]
    return sum(math.comb(n, k) * f**k * (1 - f) ** (n - k) for f in grid for k in range(most + 1)) / 200


def within(share: float, expected: float, n: int) -> bool:
    """Four standard errors of a share of n."""
    return abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / n) + 1e-9


def test_the_response_race_includes_a_response_by_the_known_law() -> None:
    """Keep 8 of 10: a response at quantile F is trained with probability P(Bin(9, F) <= 7)."""
    rollout = race(1500, eta_prompts=1.0, eta_responses=1.25, sigma_b=0.0, audit_fraction=0.0)
    launched = {}
    kept = set()
    for log in rollout.rounds:
        if log.plan.kind is RoundKind.LONG:
            continue
        launched.update({(log.plan.step, r.index): r for r in log.plan.requests})
        kept |= {(log.plan.step, r.request.index) for g in log.update.groups for r in g.responses}
    lengths = {
        key: rollout.workload.length(key[0], request) for key, request in launched.items()
    }  # also of those that were aborted
    for low, high in ((0.0, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 0.95), (0.95, 0.99), (0.99, 1.0)):
        found = [key for key, n in lengths.items() if low <= quantile_of(n) < high]
        law = at_most(7, 9, low, high)
        assert within(sum(key in kept for key in found) / len(found), law, len(found)), (low, high)


def test_the_prompt_race_weighs_winners_2_minus_p_and_losers_1_minus_p() -> None:
    """64 of 80 groups win, so p = .8. A group whose longest response is at quantile F of that law wins with probability
    a(F) = P(Bin(79, F) <= 63) and is trained with weight a(F) + 1 - p: 1.2 if it would win, .2 if it would lose.
    """
    rollout = race(4000, eta_prompts=1.25, eta_responses=1.0, sigma_b=0.0, audit_fraction=0.0)
    longest = [quantile_of(max(r.num_tokens for r in g.responses)) ** R0 for u in rollout.updates for g in u.groups]
    assert len(longest) == 4000
    for low, high in ((0.0, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0)):
        weight = at_most(63, 79, low, high) + 1 - 0.8
        found = sum(low <= f < high for f in longest) / len(longest)
        assert within(found, weight * (high - low), len(longest)), (low, high)
    assert at_most(63, 79, 0.0, 0.6) > 0.999 and at_most(63, 79, 0.95, 1.0) < 0.001  # the ends are 2 - p and 1 - p


def test_audit_groups_show_neither_race() -> None:
    rollout = race(3000, eta_prompts=1.25, eta_responses=1.25, sigma_b=0.0, audit_fraction=0.2)
    audit = SampleAudit(fraction=0.2, seed=0)
    lengths = [
        r.num_tokens for u in rollout.updates for g in u.groups if audit.is_audited(g.prompt) for r in g.responses
    ]
    assert len(lengths) > 500 * R0
    for q in (0.5, 0.9, 0.95, 0.99):
        assert within(sum(quantile_of(n) > q for n in lengths) / len(lengths), 1 - q, len(lengths)), q


@pytest.mark.parametrize("sigma_b", [0.4, 0.9])
def test_coverage_and_own_coverage_measure_the_truth(sigma_b: float) -> None:
    """Both races; the truth is known to the simulation: quantiles of the true law, own-prompt deviations of fresh groups."""
    rollout = race(3000, eta_prompts=1.25, eta_responses=1.25, sigma_b=sigma_b, audit_fraction=0.2)
    trained = [g for u in rollout.updates for g in u.groups]
    true_groups = lognormal_groups(20_000, sigma_b, math.sqrt(1 - sigma_b**2), seed=5, cap=10**9)
    report = rollout.updates[-1].stats.audit

    def share_above(groups: list[Group], values, threshold: float) -> float:
        found = [v for g in groups for v in values([math.log(r.num_tokens) for r in g.responses])]
        return sum(v > threshold for v in found) / len(found)

    def pooled(logs: list[float]) -> list[float]:
        return logs

    def own(logs: list[float]) -> list[float]:
        return [x - (sum(logs) - x) / (len(logs) - 1) for x in logs]

    quantile = 12.0 + 1.6449  # of the true law, whose variance is 1
    truth = share_above(trained, pooled, quantile) / 0.05
    assert report.coverage_p95 == pytest.approx(truth, abs=0.12)
    deviations = sorted(v for g in true_groups for v in own([math.log(r.num_tokens) for r in g.responses]))
    own_truth = share_above(trained, own, deviations[int(0.95 * len(deviations))]) / 0.05
    assert report.own_coverage_p95 == pytest.approx(own_truth, abs=0.08)
    assert own_truth < 0.6  # what the pooled coverage hides where prompts differ much
    assert report.icc == pytest.approx(sigma_b**2, abs=0.06)
    assert report.warning is not None and "audit/own_coverage_p95" in report.warning


def test_without_a_race_both_coverages_are_1_within_their_interval() -> None:
    rollout = race(3000, eta_prompts=1.0, eta_responses=1.0, sigma_b=0.7, audit_fraction=0.2)
    report = rollout.updates[-1].stats.audit
    assert report.coverage_p95 == pytest.approx(1.0, abs=0.2)
    assert report.own_coverage_p95 == pytest.approx(1.0, abs=0.15)
    assert report.warning is None


def test_the_warning_is_not_raised_by_chance() -> None:
    """60 unbiased runs of 40 to 200 audit groups, with prompts that differ and a cap that some of them hit."""
    warnings = 0
    for seed in range(60):
        audit = SampleAudit(fraction=(0.12, 0.25, 0.5)[seed % 3], seed=seed)
        audit.add_trained(lognormal_groups(400, 0.8, 0.6, seed=100 + seed, cap=2000))
        warnings += audit.report().warning is not None
    assert warnings <= 3


def test_a_filter_does_not_look_like_a_race() -> None:
    """A filter that rejects prompts by length (here all short ones) changes what is trained, and no coverage."""
    audit = SampleAudit(fraction=0.2, seed=0)
    groups = [g for g in lognormal_groups(4000, 0.7, 0.7, seed=6) if max(r.num_tokens for r in g.responses) > 600]
    audit.add_trained(groups)
    report = audit.report()
    assert report.coverage_p95 == pytest.approx(1.0, abs=0.15)


def test_finished_lengths_are_those_of_the_events() -> None:
    rollout = race(200, eta_prompts=1.25, eta_responses=1.25, sigma_b=0.5)
    log = rollout.rounds[0]
    ended = {e.request_index: e.num_tokens for e in log.events if isinstance(e, RequestFinished)}
    assert all(ended[r.request.index] == r.num_tokens for g in log.update.groups for r in g.responses)
