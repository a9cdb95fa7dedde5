"""The order of fresh prompts: each once an epoch, the same however it is drawn, resumable."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.config import ConfigError
from rollpacker.data.prompts import PromptOrder
from rollpacker.data.tasks import Example

patient = settings(deadline=None)  # a busy machine is no failure


def rows(n):
    return [(f"p{i}", (i, i + 1), "even" if i % 2 == 0 else "odd") for i in range(n)]


def order(n, seed=0, shuffle=True, total_epochs=None):
    return PromptOrder(rows(n), seed=seed, shuffle=shuffle, total_epochs=total_epochs)


def test_known_order_is_the_same_on_every_machine():
    assert "".join(p.prompt_id for p in order(5).draw(10)) == "p3p2p0p1p4p2p1p3p0p4"
    assert [p.prompt_id for p in order(3, shuffle=False).draw(5)] == ["p0", "p1", "p2", "p0", "p1"]


def test_drawn_prompts_carry_tokens_domain_and_epoch():
    examples = [Example("a", "text", (1, 2), "4", "maths")]
    prompts = PromptOrder(examples, seed=0, shuffle=True, total_epochs=2).draw(5)
    assert [(p.prompt_id, p.token_ids, p.domain, p.epoch) for p in prompts] == [
        ("a", (1, 2), "maths", 0),
        ("a", (1, 2), "maths", 1),
    ]


@patient
@given(n=st.integers(1, 12), seed=st.integers(0, 9), shuffle=st.booleans(), splits=st.lists(st.integers(0, 15)))
def test_no_prompt_lost_or_twice_in_an_epoch_however_draws_are_split(n, seed, shuffle, splits):
    split, whole = order(n, seed, shuffle), order(n, seed, shuffle)
    drawn = [p for size in splits for p in split.draw(size)]
    assert drawn == whole.draw(sum(splits))
    assert len(drawn) == sum(splits)
    for start in range(0, len(drawn), n):
        epoch = drawn[start : start + n]
        assert {p.epoch for p in epoch} == {start // n}
        assert len({p.prompt_id for p in epoch}) == len(epoch)


@patient
@given(n=st.integers(1, 8), total_epochs=st.integers(1, 3), sizes=st.lists(st.integers(0, 10)))
def test_fewer_come_only_when_total_epochs_are_used_up(n, total_epochs, sizes):
    prompts = order(n, total_epochs=total_epochs)
    left = n * total_epochs
    for size in sizes:
        assert prompts.num_left() == left
        got = prompts.draw(size)
        assert len(got) == min(size, left)
        left -= len(got)


def test_epochs_and_seeds_differ_in_order():
    ids = [p.prompt_id for p in order(20).draw(40)]
    assert ids[:20] != ids[20:]
    assert ids[:20] != [p.prompt_id for p in order(20, seed=1).draw(20)]


@st.composite
def histories(draw):
    """A list of ("draw", n) and ("push", indices of prompts drawn so far and not put back)."""
    return draw(st.lists(st.tuples(st.sampled_from(["draw", "push"]), st.integers(0, 7)), max_size=20))


def replay(prompts, history, held):
    """Carry out a history; `push k` puts the last k held prompts back. Returns what each draw gave."""
    given_out = []
    for name, k in history:
        if name == "draw":
            got = prompts.draw(k)
            held += got
            given_out.append(got)
        else:
            back = held[len(held) - k :] if k else []
            del held[len(held) - len(back) :]
            prompts.push_front(back)
    return given_out


@patient
@given(n=st.integers(1, 6), total_epochs=st.sampled_from([None, 1, 3]), history=histories())
def test_pushed_prompts_come_first_in_their_order(n, total_epochs, history):
    prompts, reference = order(n, total_epochs=total_epochs), order(n, total_epochs=total_epochs).draw(500)
    held = []
    replay(prompts, history, held)
    # What is held, plus all that is still to come, is the undisturbed sequence.
    assert held + prompts.draw(500 - len(held)) == reference


@patient
@given(n=st.integers(1, 6), total_epochs=st.sampled_from([None, 3]), before=histories(), after=histories())
def test_state_round_trip_is_exact(n, total_epochs, before, after):
    original, restored = order(n, total_epochs=total_epochs), order(n, total_epochs=total_epochs)
    held = []
    replay(original, before, held)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.state_dict() == original.state_dict()
    assert restored.num_left() == original.num_left()
    assert replay(restored, after, list(held)) == replay(original, after, list(held))


def test_state_of_other_prompts_is_refused():
    state = order(4).state_dict()
    changed = rows(4)
    changed[2] = ("p2", (9,), "even")
    for other in (changed, rows(3), rows(5), [(i + "x", t, d) for i, t, d in rows(4)], list(reversed(rows(4)))):
        with pytest.raises(ConfigError, match=r"prompts changed since the checkpoint: it was saved with 4 prompts"):
            PromptOrder(other, seed=0, shuffle=True, total_epochs=None).load_state_dict(state)


def test_state_of_another_order_is_refused():
    with pytest.raises(ConfigError, match=r"data\.seed=1, but the checkpoint was saved with 0"):
        order(4, seed=1).load_state_dict(order(4).state_dict())
    with pytest.raises(ConfigError, match=r"data\.shuffle=False, but the checkpoint was saved with True"):
        order(4, shuffle=False).load_state_dict(order(4).state_dict())


def test_resume_with_more_or_fewer_epochs():
    finished = order(3, total_epochs=2)
    finished.draw(6)
    longer, shorter = order(3, total_epochs=3), order(3, total_epochs=1)
    longer.load_state_dict(finished.state_dict())
    shorter.load_state_dict(finished.state_dict())
    assert (finished.num_left(), longer.num_left(), shorter.num_left()) == (0, 3, 0)
    assert [p.epoch for p in longer.draw(9)] == [2, 2, 2]
    assert shorter.draw(9) == []


def test_impossible_arguments():
    with pytest.raises(ValueError, match="at least one prompt"):
        order(0)
    with pytest.raises(ValueError, match="distinct ids"):
        PromptOrder(rows(2) + rows(1), seed=0, shuffle=True, total_epochs=None)
    with pytest.raises(ValueError, match="total_epochs=0"):
        order(2, total_epochs=0)
    with pytest.raises(ValueError, match="negative"):
        order(2).draw(-1)
    with pytest.raises(ValueError, match="'p2' was not drawn"):
        order(2).push_front(order(8, shuffle=False).draw(8))
