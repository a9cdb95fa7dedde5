"""From the names of ranges to stages and steps: RollPacker, verl, NeMo-RL, Megatron-core, vLLM, SGLang, torch.profiler.

A stage has one name in the report whatever program marked it (verl's words, as in docs/metrics.md). Two levels: what the
RL loop marks, and what a framework marks inside it; the second counts only where the first says nothing.
Sources: verl `marked_timer` and `DistProfiler.annotate` names, NeMo-RL `wrap_with_nvtx_name` names, Megatron-core
`nvtx_range_push` (module.function.suffix), vLLM `execute_...` and `gpu_model_runner: ...`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_STAGE_WORDS = {
    "gen": "gen gen_max generate generate_async generate_sequences generate_text rollout rollout_generate generation "
    "dispatch_generate",
    "reward": "reward compute_reward compute_rm_score rm_score reward_calculation calculate_rewards",
    "old_log_prob": "old_log_prob old_log_probs compute_log_prob actor_compute_log_prob get_logprobs "
    "policy_and_reference_logprobs logprob_inference",
    "ref": "ref ref_log_prob compute_ref_log_prob ref_compute_log_prob get_reference_policy_logprobs",
    "values": "values compute_values",
    "adv": "adv advantage compute_advantage advantage_calculation",
    "update_critic": "update_critic critic_update",
    "update_actor": "update_actor actor_update update_policy policy_training train_presharded",
    "update_weights": "update_weights weight_sync sync_weights refit weight_update param_sync prepare_refit_info "
    "broadcast_weights_for_collective update_weights_from_collective update_weights_via_ipc_zmq "
    "update_weights_from_ipc_handles stream_weights_via_ipc_zmq transfer_and_update_weights",
    "testing": "testing validation validate",
    "save_checkpoint": "save_checkpoint checkpointing",
    "exchange": "exchange",
}
_STAGE_OF_WORD = {word: stage for stage, words in _STAGE_WORDS.items() for word in words.split()}

# Range names of the frameworks, where they mean a stage of their own.
_FRAMEWORK = (
    (re.compile(r"^execute_(context_|new_|model|\d)"), "gen"),
    (re.compile(r"^gpu_model_runner: "), "gen"),
    (re.compile(r"^step\[(DECODE|EXTEND|PREFILL|MIXED)", re.IGNORECASE), "gen"),
    (re.compile(r"^(## )?forward[-_ ]?(compute|step)?( ##)?$", re.IGNORECASE), "forward"),
    (re.compile(r"^(## )?backward[-_ ]?(compute|step)?( ##)?$", re.IGNORECASE), "backward"),
    (re.compile(r"^forward[-_]backward$"), "forward_backward"),
    (re.compile(r"\.schedules\.forward_step(\.|$)"), "forward"),
    (re.compile(r"\.schedules\.backward_step(\.|$)"), "backward"),
    (re.compile(r"\.schedules\.forward_backward_\w+\.(warmup|steady|cooldown)$"), "forward_backward"),
    (re.compile(r"^(## )?optimizer([-_ ]step)?( ##)?$", re.IGNORECASE), "optimizer"),
    (re.compile(r"^Optimizer\.step#"), "optimizer"),
)

# Best first: where several kinds of step names occur, only the best kind counts steps.
_STEPS = (
    re.compile(r"^rollpacker/step_(\d+)$"),
    re.compile(r"^(?:train(?:ing)?[ _]|global[ _]?|rl[ _])?step[ _:#=-]*(\d+)(?: ?(?:to|-) ?(\d+))?$", re.IGNORECASE),
    re.compile(r"^(?:train(?:ing)?[ _]|global[ _]?|rl[ _])?step$", re.IGNORECASE),
    re.compile(r"^(?:train(?:ing)?[ _])?iter(?:ation)?[ _:#=-]*(\d+)$", re.IGNORECASE),
    re.compile(r"^ProfilerStep\*?#(\d+)$"),
)
_PYTORCH_TAIL = re.compile(r", (?:op_id|seq) = .*$")

RL_LEVEL = 0
FRAMEWORK_LEVEL = 1


@dataclass(frozen=True)
class StageName:
    """A range is (part of) a stage, marked by the RL loop (level 0) or by a framework (level 1)."""

    stage: str
    level: int


@dataclass(frozen=True)
class StepName:
    """A range is a step. `number` is None where the name has none; `kind` says which pattern, best is 0."""

    number: int | str | None
    kind: int


class StageNamer:
    """Gives range names their meaning; the user's `REGEX=NAME` rules come before the built-in ones.

    Raises ValueError for a rule without `=`, or with a regular expression that does not compile.
    """

    def __init__(self, rules: Sequence[str] = ()) -> None:
        self._rules = [_parse_rule(rule) for rule in rules]
        self._known: dict[str, StageName | StepName | None] = {}

    @property
    def has_rules(self) -> bool:
        """Whether the user gave any: then any range may matter."""
        return bool(self._rules)

    def meaning(self, name: str) -> StageName | StepName | None:
        """What a range of this name is; None for one that is neither a stage nor a step."""
        if name not in self._known:
            if len(self._known) > 200_000:  # names with sequence numbers in them: do not keep them all
                self._known.clear()
            self._known[name] = self._look_up(_PYTORCH_TAIL.sub("", name).strip())
        return self._known[name]

    def _look_up(self, name: str) -> StageName | StepName | None:
        for pattern, stage in self._rules:
            if pattern.search(name):
                return StageName(stage, RL_LEVEL)
        for kind, pattern in enumerate(_STEPS):
            if match := pattern.match(name):
                numbers = [n for n in match.groups() if n is not None]
                if len(numbers) == 2:
                    return StepName(f"{int(numbers[0])}-{int(numbers[1])}", kind)
                return StepName(int(numbers[0]) if numbers else None, kind)
        word = re.split(r"[/.:]", name)[-1].strip().lower()
        if word in _STAGE_OF_WORD and "::" not in name:
            return StageName(_STAGE_OF_WORD[word], RL_LEVEL)
        if re.search(r"policy_worker(_v2)?/train$", name):
            return StageName("update_actor", RL_LEVEL)
        for pattern, stage in _FRAMEWORK:
            if pattern.search(name):
                return StageName(stage, FRAMEWORK_LEVEL)
        return None


def _parse_rule(rule: str) -> tuple[re.Pattern[str], str]:
    pattern, separator, stage = rule.rpartition("=")
    if not separator or not pattern or not stage:
        raise ValueError(f"--stages {rule!r}: expected REGEX=NAME, such as --stages '^rollout_.*=gen'.")
    try:
        return re.compile(pattern), stage
    except re.error as error:
        raise ValueError(f"--stages {rule!r}: {pattern!r} is not a regular expression ({error}).") from None
