"""Domain weights: shares, epochs, resumption; which names are refused; what the opening lines say."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_files import PLAIN, load, write

from rollpacker.cli.train import _describe_domains
from rollpacker.config import ConfigError
from rollpacker.data.domains import first_exhausted, interleave
from rollpacker.data.prompts import PromptDataset, PromptOrder
from rollpacker.data.tasks import Example

patient = settings(deadline=None)  # a busy machine is no failure
# The (number of prompts, weight) of each domain; the domains are called a, b, c, ...
MIXTURES = st.lists(st.tuples(st.integers(1, 12), st.floats(0.01, 100)), min_size=1, max_size=5)


def names_of(mixture):
    return "abcdefgh"[: len(mixture)]


def order_of(mixture, *, seed=0, shuffle=True, total_epochs=None):
    """A PromptOrder of the prompts a0, a1, ..., b0, b1, ...; the domains take turns in the file."""
    counts = {name: count for name, (count, _) in zip(names_of(mixture), mixture, strict=True)}
    weights = {name: weight for name, (_, weight) in zip(names_of(mixture), mixture, strict=True)}
    rows = [(f"{d}{r}", (r,), d) for r in range(max(counts.values())) for d in counts if r < counts[d]]
    return PromptOrder(rows, seed=seed, shuffle=shuffle, total_epochs=total_epochs, domains=weights)


def ids(prompts):
    return " ".join(p.prompt_id for p in prompts)


def test_known_orders():
    assert ids(order_of([(6, 2.0), (3, 1.0)], shuffle=False).draw(9)) == "a0 b0 a1 a2 b1 a3 a4 b2 a5"
    assert ids(order_of([(2, 0.5), (5, 0.5)], shuffle=False).draw(8)) == "a0 b0 a1 b1 b2 b3 b4 a0"
    assert ids(order_of([(4, 3), (2, 1)]).draw(12)) == "a3 b1 a1 a0 a2 b0 a3 a1 b1 a0 a2 b0"


@patient
@given(mixture=MIXTURES, seed=st.integers(0, 9), splits=st.lists(st.integers(0, 15)))
def test_nothing_lost_or_twice_in_an_epoch_however_draws_are_split(mixture, seed, splits):
    n = sum(count for count, _ in mixture)
    split, whole = order_of(mixture, seed=seed), order_of(mixture, seed=seed).draw(sum(splits) + 2 * n)
    assert [p for size in [*splits, 2 * n] for p in split.draw(size)] == whole
    for start in range(0, len(whole) - n + 1, n):
        epoch = whole[start : start + n]
        assert {p.epoch for p in epoch} == {start // n}
        assert len({p.prompt_id for p in epoch}) == n


@patient
@given(mixture=MIXTURES, shuffle=st.booleans())
def test_shares_follow_the_weights_until_a_domain_is_used_up(mixture, shuffle):
    """Within (1 + share * (k - 2)) / 2 prompts of the share, at every point; less than 1 for two domains."""
    drawn = order_of(mixture, shuffle=shuffle).draw(sum(count for count, _ in mixture))
    left = {name: count for name, (count, _) in zip(names_of(mixture), mixture, strict=True)}
    weights = {name: weight for name, (_, weight) in zip(names_of(mixture), mixture, strict=True)}
    given_out: Counter[str] = Counter()
    for n, prompt in enumerate(drawn, start=1):
        given_out[prompt.domain] += 1
        left[prompt.domain] -= 1
        for name, weight in weights.items():
            share = weight / sum(weights.values())
            assert abs(given_out[name] - n * share) <= (1 + share * (len(mixture) - 2)) / 2 + 1e-6
        if not all(left.values()):
            break


@patient
@given(mixture=MIXTURES)
def test_when_a_domain_is_used_up_the_others_go_on_among_themselves(mixture):
    """What the others give is what they would give if the domain had never been there."""
    drawn = order_of([*mixture, (1, 50.0)], shuffle=False).draw(1 + sum(count for count, _ in mixture))
    others = [p for p in drawn if p.domain != "abcdefgh"[len(mixture)]]
    assert ids(others) == ids(order_of(mixture, shuffle=False).draw(len(others)))


@patient
@given(mixture=MIXTURES, seed=st.integers(0, 9))
def test_within_a_domain_the_order_is_that_without_weights(mixture, seed):
    weighted = order_of(mixture, seed=seed)
    plain = PromptOrder(weighted._rows, seed=seed, shuffle=True, total_epochs=None)
    n = sum(count for count, _ in mixture)
    with_weights, without = weighted.draw(2 * n), plain.draw(2 * n)
    for name in names_of(mixture):
        assert [p for p in with_weights if p.domain == name] == [p for p in without if p.domain == name]


@patient
@given(mixture=MIXTURES, before=st.integers(0, 80), back=st.integers(0, 5), after=st.integers(0, 80))
def test_resumption_anywhere_gives_the_same_sequence(mixture, before, back, after):
    original, restored = order_of(mixture), order_of(mixture)
    drawn = original.draw(before)
    original.push_front(drawn[len(drawn) - min(back, before) :])
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.draw(after) == original.draw(after)


def test_weights_of_another_sum_give_the_same_order():
    mixture = [(70, 0.7), (30, 0.3), (20, 0.1)]
    tenfold = [(count, 10 * weight) for count, weight in mixture]
    assert order_of(mixture).draw(240) == order_of(tenfold).draw(240)


def test_a_hundred_thousand_prompts_follow_the_weights_in_every_batch():
    domains = ["a"] * 50_000 + ["b"] * 30_000 + ["c"] * 20_000
    order = interleave(range(100_000), domains, {"a": 0.2, "b": 0.5, "c": 0.3})
    batches = [Counter(domains[i] for i in order[start : start + 128]) for start in range(0, 51_200, 128)]
    assert {name: {b[name] for b in batches} for name in "abc"} == {"a": {25, 26}, "b": {64}, "c": {38, 39}}


def test_a_state_of_other_weights_is_refused():
    state = order_of([(3, 1.0), (3, 2.0)]).state_dict()
    with pytest.raises(ConfigError, match=r"data\.domains=\{'a': 1\.0, 'b': 3\.0\}, but the checkpoint was saved with"):
        order_of([(3, 1.0), (3, 3.0)]).load_state_dict(state)


def test_a_prompt_without_a_weight_is_refused():
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 0.0}):
        with pytest.raises(ValueError, match="'y' is of the domain 'b', which has no weight above 0"):
            PromptOrder([("x", (1,), "a"), ("y", (1,), "b")], seed=0, shuffle=True, total_epochs=None, domains=weights)


# The names in data.domains against those in the data


@pytest.fixture
def file(tmp_path):
    rows = [PLAIN | {"domain": domain, "prompt": text} for domain, text in zip("aabc", ["p", "p", "p", "long"])]  # noqa: B905
    return write(tmp_path / "a.jsonl", *rows)


def test_weight_0_leaves_a_domain_out_and_counts_it(file):
    data = load(file, domains={"a": 0.0, "b": 1.0, "c": 2.0})
    assert [e.domain for e in data.examples] == ["b", "c"]
    assert list(data.by_id) == ["a:3", "a:4"]
    assert (data.num_unweighted, data.num_overlong) == (2, 0)
    data = load(file, domains={"a": 0.0, "b": 1.0}, max_prompt_length=4)
    assert (data.num_unweighted, data.num_overlong, data.num_by_domain) == (2, 1, {"b": 1})


def test_no_weights_take_every_domain(file):
    for domains in (None, {}):
        assert load(file, domains=domains).num_by_domain == {"a": 2, "b": 1, "c": 1}


def test_names_must_be_those_of_the_data(file):
    with pytest.raises(
        ConfigError, match=r"data\.domains names 'd', but no prompt of data\.train_files.*'a' \(2 prompts\)"
    ):
        load(file, domains={"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
    with pytest.raises(ConfigError, match=r"data\.domains names 'c', but no prompt .* short enough"):
        load(file, domains={"a": 1.0, "b": 1.0, "c": 1.0}, max_prompt_length=4)
    with pytest.raises(
        ConfigError, match=r"data\.domains does not name 'a', the domain of 2 prompts.* 0 leaves it out"
    ):
        load(file, domains={"b": 1.0, "c": 1.0})


# What the user sees


def dataset_of(counts, num_unweighted=0):
    examples = [Example(f"{d}{i}", "p", (1,), "1", d) for d, n in counts.items() for i in range(n)]
    return PromptDataset(examples, {e.prompt_id: e for e in examples}, 0, num_unweighted)


def test_the_opening_lines_name_the_domains_where_there_is_more_than_one():
    assert _describe_domains(dataset_of({"a": 3}), {}) == []
    assert _describe_domains(dataset_of({"a": 3, "b": 7}), {}) == ["domains   b 7, a 3"]
    many = _describe_domains(dataset_of({f"d{i}": 20 - i for i in range(15)}), {})
    assert many == ["domains   " + ", ".join(f"d{i} {20 - i}" for i in range(10)) + ", 5 more"]


def test_the_opening_lines_tell_shares_and_how_long_they_last():
    lines = _describe_domains(dataset_of({"math": 70, "code": 10}, 4), {"math": 2.0, "code": 0.5, "chat": 0.0})
    assert lines == [
        "domains   math 70 (80%), code 10 (20%)",
        "          code is used up after 48 prompts of an epoch",
        "          4 prompts of weight 0 in data.domains left out",
    ]


@patient
@given(mixture=MIXTURES.filter(lambda m: len(m) > 1))
def test_the_first_domain_to_be_used_up_is_foretold(mixture):
    counts = {name: count for name, (count, _) in zip(names_of(mixture), mixture, strict=True)}
    weights = {name: weight for name, (_, weight) in zip(names_of(mixture), mixture, strict=True)}
    name, num_prompts = first_exhausted(counts, weights)
    drawn = order_of(mixture).draw(sum(counts.values()))
    left, n = Counter(counts), 0
    while all(left.values()):
        left[drawn[n].domain] -= 1
        n += 1
    num_tied = len(mixture) - 1  # prompts that may come at the same time, before or after
    assert left[name] <= 1
    assert n <= num_prompts <= n + num_tied
