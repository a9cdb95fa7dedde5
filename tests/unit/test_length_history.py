"""What past responses, and a lost race, say about the next length."""

from __future__ import annotations

import json
import math

import pytest

from rollpacker.policy.length_history import LengthDistribution, LengthHistory


def test_a_prediction_is_the_prompts_own_running_mean_of_log_length() -> None:
    history = LengthHistory(1000, decay=0.5)
    assert history.predict("a") == pytest.approx(1000)  # nothing is known: the cap
    history.add_trained("a", [10, 40])
    assert history.predict("a") == pytest.approx(20)  # the geometric mean
    history.add_trained("a", [80, 80])
    assert history.predict("a") == pytest.approx(math.sqrt(20 * 80))
    history.add_trained("b", [80])
    assert history.predict("new") == pytest.approx((20 * 80 * 80) ** (1 / 3))


def test_the_reason_a_prompt_was_queued_counts_as_evidence() -> None:
    """An unfinished response counts one standard deviation beyond the longest that finished, and no more than the cap."""
    history = LengthHistory(1000)
    history.add_trained("a", [10, 100])
    sigma = math.log(10) / math.sqrt(2)
    history.add_censored("lost", [20], num_unfinished=1, cutoff_tokens=40)
    assert history.predict("lost") == pytest.approx(math.sqrt(20 * 40 * math.exp(sigma)))
    history.add_censored("capped", [], num_unfinished=3, cutoff_tokens=900)
    assert history.predict("capped") == pytest.approx(1000)


def test_a_trained_group_corrects_the_guess_of_a_lost_race() -> None:
    history = LengthHistory(1000)
    history.add_trained("other", [10, 20])
    history.add_censored("a", [], num_unfinished=2, cutoff_tokens=100)
    guess = history.predict("a")
    history.add_trained("a", [400, 400])
    assert guess < history.predict("a") < 400


def test_a_saved_history_predicts_the_same_bit_for_bit() -> None:
    history, copy = LengthHistory(1000), LengthHistory(1000)
    for i in range(50):
        history.add_trained(f"p{i % 7}", [3 + i, 5 + i * i % 91])
        history.add_censored(f"q{i % 3}", [7], 2, 11 + i)
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for name in ("p1", "q2", "new"):
        assert copy.predict(name) == history.predict(name)
    history.add_trained("p1", [9])
    copy.add_trained("p1", [9])
    assert copy.state_dict() == history.state_dict()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        LengthHistory(0)


def test_a_distribution_knows_the_mean_of_what_is_longer() -> None:
    """Against a sort, to the width of a bin: 96 of them over five decades are 13 % each."""
    lengths = [int(3 * 1.11**i) for i in range(80)]
    law = LengthDistribution(100_000)
    law.add(lengths)
    for n in (1, 10, 100, 1000, 5000):
        longer = [x for x in lengths if x > n]
        assert law.mean_beyond(n) == pytest.approx(sum(longer) / len(longer), rel=0.13)
    assert law.mean_beyond(90_000) == 100_000  # nobody was that long: the cap
    assert LengthDistribution(50).mean_beyond(1) == 50
    copy = LengthDistribution(100_000)
    copy.load_state_dict(json.loads(json.dumps(law.state_dict())))
    assert copy.mean_beyond(77) == law.mean_beyond(77)
