"""Rollout dumps: each round's trained samples on disk (`trainer.rollout_data_dir`), and training on them again
(`rollout.replay`). Exactness tests, benchmarks and bug reports stand on them.

`DIR/step_000001/rank_00000.safetensors` holds flat arrays (prompt_ids, response_ids int32; rollout_logprobs float32;
prompt_lengths, response_lengths int32; rewards float64); its metadata names each sample. One file per rank that
leads a replica, so that nobody needs another's samples to write.

`trainer.validation_data_dir` holds the responses of a validation as text, `DIR/<step>.jsonl`, as verl has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from rollpacker.comm.samples import Sample
from rollpacker.config import ConfigError
from rollpacker.messages import Action, EndRound, Event, RequestFinished, RewardDone, RoundPlan, UpdatePlan
from rollpacker.profiling.trace import Span
from rollpacker.runtime.rollout import RoundFacts
from rollpacker.types import Prompt

EVAL_DUMP = "eval.jsonl"


def write_dump(folder: str, rank: int, update: UpdatePlan, samples: Mapping[int, Sample]) -> None:
    """Write the samples that this rank answers for and the step trains."""
    facts, chosen, rewards = [], [], []
    for group in update.groups:
        for response in group.responses:
            request = response.request
            if request.index not in samples:
                continue
            chosen.append(samples[request.index])
            rewards.append(response.reward)
            facts.append(
                {
                    "prompt_id": request.prompt.prompt_id,
                    "response_index": request.response_index,
                    "request_index": request.index,
                    "domain": request.prompt.domain,
                    "epoch": request.prompt.epoch,
                    "finish_reason": response.finish_reason,
                }
            )
    empty = [np.empty(0, np.int32)]
    arrays = {
        "prompt_lengths": np.array([len(s.prompt_ids) for s in chosen], np.int32),
        "response_lengths": np.array([len(s.response_ids) for s in chosen], np.int32),
        "prompt_ids": np.concatenate(empty + [s.prompt_ids for s in chosen]),
        "response_ids": np.concatenate(empty + [s.response_ids for s in chosen]),
        "rollout_logprobs": np.concatenate([np.empty(0, np.float32)] + [s.rollout_logprobs for s in chosen]),
        "rewards": np.array(rewards, np.float64),
    }
    target = _step_folder(folder, update.step) / f"rank_{rank:05d}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".partial")
    save_file(arrays, str(aside), metadata={"samples": json.dumps(facts), "step": str(update.step)})
    aside.replace(target)


def _step_folder(folder: str, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}"


def check_validation_dump(folder: str | None, pattern: str) -> None:
    """Refuse a folder that holds such files of an earlier validation. Raises ConfigError."""
    if folder is not None and any(Path(folder).glob(pattern)):
        raise ConfigError(
            f"trainer.validation_data_dir={folder} holds the responses of an earlier validation. Remove them, or choose "
            "another folder."
        )


def write_validation_dump(folder: str, step: int | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the responses of a validation, one JSON object a line; complete or absent."""
    target = Path(folder) / (EVAL_DUMP if step is None else f"{step}.jsonl")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.replace(target)


class ReplayRollout:
    """Plays a dump: the prompts in their order, every response finished and scored as it was. No engine, no verifier.

    It is the prompt source of the run as well, since the dump decides what each step trains.
    """

    def __init__(self, folder: str, *, rank: int, world_size: int, num_responses: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._num_responses = num_responses
        self._steps = sorted(int(p.name.removeprefix("step_")) for p in Path(folder).glob("step_*") if p.is_dir())
        if not self._steps:
            raise ConfigError(
                f"rollout.replay={folder}: no step_* folder there. Give the folder that a run wrote as "
                "trainer.rollout_data_dir."
            )
        self._next = 0
        self._recorded: dict[tuple[tuple[str, int], int], _Recorded] = {}
        self._plan: RoundPlan | None = None
        self._is_open = False
        self.facts = RoundFacts()
        self.num_virtual_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved position."""
        self._next = state["next"]

    @property
    def num_steps(self) -> int:
        """Steps in the dump."""
        return len(self._steps)

    def draw(self, n: int) -> list[Prompt]:
        """The prompts of the next recorded step, in their launch order; [] at the end of the dump."""
        if self._next == len(self._steps):
            return []
        folder = _step_folder(self._folder, self._steps[self._next])
        self._next += 1
        recorded = sorted(
            (r for path in sorted(folder.glob("rank_*.safetensors")) for r in _read_dump(path)),
            key=lambda r: r.request_index,
        )
        self._recorded = {(r.prompt.key, r.response_index): r for r in recorded}
        prompts = list(dict.fromkeys(r.prompt for r in recorded))
        if not prompts or len(prompts) > n or len(recorded) != len(prompts) * self._num_responses:
            raise ConfigError(
                f"rollout.replay: {folder} holds {len(recorded)} responses of {len(prompts)} prompts, but "
                f"data.train_batch_size={n} and rollout.n={self._num_responses}. Set them to what was dumped."
            )
        return prompts

    def launch(self, plan: RoundPlan) -> None:
        """Open the round of the prompts drawn last."""
        self._plan, self._is_open = plan, True

    def events(self, digest: Callable[[], int]) -> Iterator[Event]:  # noqa: ARG002 (nothing is exchanged)
        """Every response finishes in launch order, then its reward is in."""
        assert self._plan is not None, "launch() comes before events()"
        for request in self._plan.requests:
            recorded = self._recorded[request.prompt.key, request.response_index]
            yield RequestFinished(0.0, 0, request.index, len(recorded.sample.response_ids), recorded.finish_reason)
            yield RewardDone(0.0, 0, request.index, recorded.reward, False, 0.0)
        if self._is_open:
            raise RuntimeError("the dump is played out, but the round has not ended")

    def apply(self, action: Action) -> None:
        """Only the end of the round matters to a replay."""
        if isinstance(action, EndRound):
            self._is_open = False

    def take_spans(self) -> tuple[list[Span], list[str]]:
        """Nothing happened that a trace could show."""
        return [], []

    def take_samples(self) -> dict[int, Sample]:
        """Samples dealt out over the ranks, as if each had decoded some."""
        assert self._plan is not None, "launch() comes before take_samples()"
        samples = {}
        for request in self._plan.requests[self._rank :: self._world_size]:
            s = self._recorded[request.prompt.key, request.response_index].sample
            samples[request.index] = Sample(request.index, s.prompt_ids, s.response_ids, s.rollout_logprobs)
        return samples


class _Recorded:
    """One sample of a dump."""

    def __init__(self, fact: Mapping[str, Any], sample: Sample, reward: float) -> None:
        token_ids = tuple(int(t) for t in sample.prompt_ids)
        self.prompt = Prompt(fact["prompt_id"], token_ids, fact["domain"], fact["epoch"])
        self.request_index = int(fact["request_index"])
        self.response_index = int(fact["response_index"])
        self.finish_reason = str(fact["finish_reason"])
        self.sample = sample
        self.reward = reward


def _read_dump(path: Path) -> list[_Recorded]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            facts = json.loads(file.metadata()["samples"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:
        raise ConfigError(f"rollout.replay: {path} cannot be read: {error}.") from error
    prompt_ends = np.cumsum(arrays["prompt_lengths"])
    response_ends = np.cumsum(arrays["response_lengths"])
    recorded = []
    for i, fact in enumerate(facts):
        prompt = slice(prompt_ends[i] - arrays["prompt_lengths"][i], prompt_ends[i])
        response = slice(response_ends[i] - arrays["response_lengths"][i], response_ends[i])
        sample = Sample(
            int(fact["request_index"]),
            arrays["prompt_ids"][prompt],
            arrays["response_ids"][response],
            arrays["rollout_logprobs"][response],
        )
        recorded.append(_Recorded(fact, sample, float(arrays["rewards"][i])))
    return recorded
