"""Validator: the prompts of data.val_files, answered by the engine as it is, and what that says of the model.

A validation is a round of the one loop (`run_round`): the controller, the plain composer and selection, the rollout, the
engine and the rewards of training, with a controller and a rollout of its own. So nothing of the training knows of it:
not the order of its prompts, its seeds, its digest, its virtual clock; the engine stays awake and keeps its weights.

Every validation draws the same noise (the seeds depend on trainer.seed, the prompt and the response index alone), so that
two of them differ by the weights, and `rollpacker eval` on an exported model repeats the run's own numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.comm.world import World
from rollpacker.config import Config
from rollpacker.data.prompts import PromptDataset
from rollpacker.loop import run_round
from rollpacker.messages import Action, Event, RequestFinished, RoundPlan
from rollpacker.policy.controller import StepController
from rollpacker.policy.launch import RoundLauncher
from rollpacker.policy.plain import PlainRollout
from rollpacker.policy.planner import FixedPlanner
from rollpacker.profiling.rows import length_metrics
from rollpacker.profiling.trace import Span
from rollpacker.rollout.engine import RolloutEngine
from rollpacker.runtime.dump import write_validation_dump
from rollpacker.runtime.rollout import LiveRollout
from rollpacker.runtime.val_core import Attempt, val_core
from rollpacker.types import Group, Prompt

Row = dict[str, float | int | str | None]


@dataclass(frozen=True)
class ValidationReport:
    """What rank 0 knows of a validation: its row of validation.jsonl, trace spans, messages of failed rewards."""

    row: Row
    spans: list[Span]
    reward_messages: list[str]


@dataclass(frozen=True)
class _RankReport:
    """What travels to rank 0: by request index the answers, and the texts where they are dumped."""

    answers: dict[int, str | None]
    texts: dict[int, str]
    spans: list[Span]
    reward_messages: list[str]


class Validator:
    """Runs validations on this rank; all ranks call `run` together. It is the `Round` of its own loop.

    `on_progress` is told responses finished, responses asked for, tokens generated.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        rollout: LiveRollout,
        engine: RolloutEngine,
        dataset: PromptDataset,
        tokenizer: Any,
        on_progress: Callable[[int, int, int], None],
    ) -> None:
        self._config = config
        self._world = world
        self._rollout = rollout
        self._engine = engine
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._controller = self._build_controller()
        self._num_requests = self._num_finished = self._num_tokens = 0

    def run(self, step: int | None, weight_version: int | None) -> ValidationReport | None:
        """Validate the engine's weights; the report on rank 0. Collective; the engine must be awake and empty.

        Both are None where the weights are not those of a run's step.
        """
        start_s = self._world.now()
        self._controller = self._build_controller()
        run_round(step or 0, self._controller, self)
        self._engine.forget_prefixes()
        groups = self._controller.finish_step().groups
        gathered = self._world.comm.gather(self._report())
        if gathered is None:
            return None
        answers = {index: answer for rank in gathered for index, answer in rank.answers.items()}
        if self._config.trainer.validation_data_dir is not None:
            texts = {index: text for rank in gathered for index, text in rank.texts.items()}
            rows = self._dump_rows(step, groups, answers, texts)
            write_validation_dump(self._config.trainer.validation_data_dir, step, rows)
        row: Row = {"step": step, "weight_version": weight_version, "model_path": self._config.model.path}
        row |= self._metrics(groups, answers)
        row["timing_s/testing"] = self._world.now() - start_s
        return ValidationReport(
            row, [s for rank in gathered for s in rank.spans], [m for rank in gathered for m in rank.reward_messages]
        )

    def launch(self, plan: RoundPlan) -> None:
        """Hand all validation requests to the engines."""
        self._num_requests, self._num_finished, self._num_tokens = len(plan.requests), 0, 0
        self._rollout.launch(plan)

    def events(self) -> Iterator[Event]:
        """Decode, score and exchange until every response has its score."""
        for event in self._rollout.events(lambda: self._controller.digest):
            if isinstance(event, RequestFinished):
                self._num_finished += 1
                self._num_tokens += event.num_tokens
                self._on_progress(self._num_finished, self._num_requests, self._num_tokens)
            yield event

    def apply(self, action: Action) -> None:
        """Carry out an action on this rank's replica."""
        self._rollout.apply(action)

    def _build_controller(self) -> StepController:
        config = self._config
        rollout = PlainRollout(
            _EveryPrompt([Prompt(e.prompt_id, e.token_ids, e.domain) for e in self._dataset.examples]),
            RoundLauncher(
                FixedPlanner(config.rollout.tensor_model_parallel_size),
                num_gpus=self._world.size,
                max_tokens=config.data.max_response_length,
                seed=config.trainer.seed,
            ),
            train_batch_size=len(self._dataset.examples),
            num_responses=config.rollout.val_kwargs.n,
        )
        return StepController(_SameNoise(rollout), rollout, reward_timeout_s=config.reward.timeout_s)

    def _report(self) -> _RankReport:
        answers = self._rollout.take_answers()
        samples = self._rollout.take_samples()
        texts = {}
        if self._config.trainer.validation_data_dir is not None:
            decode = self._tokenizer.decode
            texts = {i: decode(s.response_ids.tolist(), skip_special_tokens=True) for i, s in samples.items()}
        return _RankReport(answers, texts, *self._rollout.take_spans())

    def _metrics(self, groups: Sequence[Group], answers: dict[int, str | None]) -> Row:
        responses = [r for g in groups for r in g.responses]
        attempts = [
            (g.prompt.domain, [Attempt(r.reward, answers[r.request.index]) for r in g.responses]) for g in groups
        ]
        counts: Row = {}
        for domain, _ in attempts:
            counts[f"val-aux/{domain}/num_prompts"] = int(counts.get(f"val-aux/{domain}/num_prompts") or 0) + 1
        return {
            **val_core(attempts, self._config.rollout.val_kwargs.n),
            **counts,
            "num_prompts": len(groups),
            "num_overlong_prompts": self._dataset.num_overlong,
            "num_responses": len(responses),
            "reward/error_count": sum(r.is_reward_error for r in responses),
            **length_metrics([r.num_tokens for r in responses], self._config.data.max_response_length),
        }

    def _dump_rows(
        self, step: int | None, groups: Sequence[Group], answers: dict[int, str | None], texts: dict[int, str]
    ) -> Iterator[dict[str, Any]]:
        for group in groups:
            example = self._dataset.by_id[group.prompt.prompt_id]
            for r in group.responses:
                yield {
                    "step": step,
                    "prompt_id": example.prompt_id,
                    "response_index": r.request.response_index,
                    "domain": example.domain,
                    "prompt": example.text,
                    "response": texts[r.request.index],
                    "answer": answers[r.request.index],
                    "ground_truth": example.ground_truth,
                    "score": r.reward,
                    "num_response_tokens": r.num_tokens,
                    "finish_reason": r.finish_reason,
                }


class _EveryPrompt:
    """A prompt source that gives all of its prompts in each draw."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def draw(self, n: int) -> list[Prompt]:
        """The first `n` prompts."""
        return self._prompts[:n]


class _SameNoise:
    """Composes every round with the seeds of step 0, which no training step has."""

    def __init__(self, composer: PlainRollout) -> None:
        self._composer = composer

    def compose(self, step: int) -> RoundPlan | None:
        """The round of step 0 under the number `step`."""
        plan = self._composer.compose(0)
        return None if plan is None else dataclasses.replace(plan, step=step)

    def long_queue_len(self) -> int:
        """Nothing is ever deferred."""
        return 0
