"""Make the demo's model and data: a Qwen2 of about a million parameters that half knows how to divide.

The folder has what a real run has: `model/`, a Hugging Face folder that transformers and vLLM load, and the prompt files
`train.jsonl` and `val.jsonl`. The model is warm-started in about a minute on one core by imitating a careless teacher of
`demo_task`: sampled, about half of its responses are right, so RL has something to gain and something to start from.
`demo_model.json` beside them holds the settings and what was measured.

Invariants: a folder is complete or absent; the same settings give the same folder on machines of one kind (the warm
start stops after a number of optimizer steps, and one thread does all the sums).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from demo_task import CARELESS, CHARACTERS, Problem, answer_text, draw_problem, prompt_text, score, solution_text
from demo_task import write_rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

# torch and transformers take seconds to import, so the functions that need them do it: --help and a folder that is
# there already answer at once.

REPORT = "demo_model.json"
OUTPUTS = {"model", "train.jsonl", "val.jsonl", REPORT}

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]  # ids 0 to 3
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 32
MAX_POSITION_EMBEDDINGS = 512
# 0.02, the usual value, is meant for wide models; at a width of 128 it costs the warm start 200 steps more.
INITIALIZER_RANGE = 0.05

ROW_TOKENS = 128  # of a packed row of the warm start; the longest problem with its solution is exactly 128 tokens
ROWS_PER_BATCH = 4
LEARNING_RATE = 2e-3
ADAM_BETAS = (0.9, 0.98)
RAMP_STEPS = 30
MAX_GRAD_NORM = 1.0
IGNORED_LABEL = -100  # cross_entropy's default

MAX_RESPONSE_TOKENS = 160  # when measuring; right responses have at most 122
DATA_SEED_OFFSET = {"train.jsonl": 1_000_003, "val.jsonl": 2_000_003}  # apart from each other and from the warm start


class Batch(TypedDict):
    """Packed rows; `mask` [rows, 1, tokens, tokens] is True where a token may look: back, inside its own problem."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the character-level tokenizer. Encoding puts <bos> in front, as Llama's does; decoding adds nothing."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS + list(CHARACTERS)
    # Named, so that whatever id an untrained model samples can be decoded; not special, so that the reward sees it.
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION_EMBEDDINGS,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(settings: dict[str, Any]) -> Qwen2ForCausalLM:
    """Make the untrained model, in fp32, drawn from the seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=settings["hidden"],
        intermediate_size=settings["intermediate"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        num_key_value_heads=settings["kv_heads"],
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    torch.manual_seed(settings["seed"])
    return Qwen2ForCausalLM(config)


def packed_batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """Give batches of problems with a careless teacher's solutions, packed tightly: padding would cost half the time."""
    import torch

    shape = (ROWS_PER_BATCH, ROW_TOKENS)
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    waiting: list[tuple[list[int], int]] = []  # (tokens, length of the prompt): they found no room, and go first next
    while True:
        ids = torch.full(shape, PAD_ID)
        labels = torch.full(shape, IGNORED_LABEL)
        positions, owner = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        filled = [0] * ROWS_PER_BATCH
        pending, waiting = waiting, []
        number = 0
        while len(waiting) < 3:
            tokens, num_prompt = pending.pop(0) if pending else _encoded_example(tokenizer, rng)
            row = next((r for r in range(ROWS_PER_BATCH) if filled[r] + len(tokens) <= ROW_TOKENS), None)
            if row is None:
                waiting.append((tokens, num_prompt))
                continue
            begin, end = filled[row], filled[row] + len(tokens)
            number += 1
            ids[row, begin:end] = torch.tensor(tokens)
            labels[row, begin + num_prompt - 1 : end - 1] = torch.tensor(tokens[num_prompt:])
            positions[row, begin:end] = torch.arange(len(tokens))
            owner[row, begin:end] = number
            filled[row] = end
        mask = (owner[:, :, None] == owner[:, None, :]) & causal
        yield Batch(input_ids=ids, position_ids=positions, labels=labels, mask=mask[:, None])


def _encoded_example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """Give the tokens of a prompt and a careless teacher's solution, and how many of them are the prompt's."""
    problem = draw_problem(rng)
    prompt: list[int] = tokenizer.encode(prompt_text(*problem))
    solution: list[int] = tokenizer.encode(solution_text(*problem, rng, CARELESS), add_special_tokens=False)
    return [*prompt, *solution, EOS_ID], len(prompt)


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Train on the teacher's solutions for `max_steps` steps or for `seconds`, and say now and then how it goes."""
    import torch
    from torch.nn.functional import cross_entropy

    max_steps, seconds = settings["max_steps"], settings["seconds"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0)
    batches = packed_batches(tokenizer, random.Random(settings["seed"]))
    measured_s = 0.0  # spent on progress lines, which is not training time
    begin, next_report, mean_loss = time.monotonic(), 0.1, None
    for step, batch in enumerate(batches):
        elapsed_s = time.monotonic() - begin - measured_s
        done = elapsed_s / seconds if seconds is not None else step / max_steps
        if done >= next_report:
            accuracy = measure(model, tokenizer, num_samples=128, seed=1)["accuracy"]
            measured_s = time.monotonic() - begin - elapsed_s
            say(f"warm start: step {step}, {elapsed_s:.0f} s, loss {mean_loss:.3f}, sampled accuracy {accuracy:.2f}")
            next_report += 0.2
        if done >= 1.0:
            break
        # A short ramp, half the time at the full rate, then down in a line.
        rate = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, max(0.05, 2.0 * (1.0 - done)))
        optimizer.param_groups[0]["lr"] = rate
        logits = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=batch["mask"],
            use_cache=False,
        ).logits
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.item() if mean_loss is None else 0.9 * mean_loss + 0.1 * loss.item()


def generate(
    model: Qwen2ForCausalLM, prompts: list[list[int]], *, is_greedy: bool = False, seed: int = 0
) -> list[list[int]]:
    """Sample one response a prompt at temperature 1, EOS included. All prompts have one length."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    responses: list[list[int]] = [[] for _ in prompts]
    unfinished = torch.arange(len(prompts))
    cache = DynamicCache(config=model.config)
    inputs = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(MAX_RESPONSE_TOKENS):
            logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[:, -1]
            if is_greedy:
                tokens = logits.argmax(-1)
            else:
                tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            for index, token in zip(unfinished.tolist(), tokens.tolist(), strict=True):
                responses[index].append(token)
            (alive,) = (tokens != EOS_ID).nonzero(as_tuple=True)
            if len(alive) == 0:
                break
            if len(alive) < len(tokens):  # finished rows leave the batch: the tail is long and thin
                cache.batch_select_indices(alive)
                unfinished, tokens = unfinished[alive], tokens[alive]
            inputs = tokens[:, None]
    return responses


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_samples: int,
    seed: int,
    is_greedy: bool = False,
) -> dict[str, Any]:
    """Answer `num_samples` drawn problems; give the accuracy and the response lengths in tokens, EOS included."""
    rng = random.Random(seed)
    problems: list[Problem] = [draw_problem(rng) for _ in range(num_samples)]
    prompts = [tokenizer.encode(prompt_text(*problem)) for problem in problems]
    responses = generate(model, prompts, is_greedy=is_greedy, seed=seed)
    rewards = [
        score(
            tokenizer.decode(tokens, skip_special_tokens=True),
            prompt=prompt_text(*problem),
            ground_truth=answer_text(*problem),
            finish_reason="stop" if tokens[-1] == EOS_ID else "length",
        )
        for problem, tokens in zip(problems, responses, strict=True)
    ]
    lengths = sorted(map(len, responses))
    return {
        "accuracy": sum(rewards) / num_samples,
        "length_p50_tokens": lengths[num_samples // 2],
        "length_p95_tokens": lengths[int(0.95 * num_samples)],
        "length_max_tokens": lengths[-1],
    }


def fill(folder: Path, settings: dict[str, Any], say: Callable[[str], None]) -> str:
    """Make everything in the empty `folder`; return the line that sums it up."""
    import torch
    import transformers

    torch.set_num_threads(1)  # a thread more would change the order of the sums, and is slower for so small a model
    transformers.utils.logging.disable_progress_bar()
    begin = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(settings)
    report: dict[str, Any] = {"settings": settings, "num_parameters": model.num_parameters(), "measured": None}
    summary = f"{model.num_parameters():,} parameters, no warm start"
    if settings["max_steps"] != 0:
        warm_start(model, tokenizer, settings, say)
        warm_start_s = time.monotonic() - begin
        say("measuring: sampled and greedy")
        num_samples = settings["eval_samples"]
        sampled = measure(model, tokenizer, num_samples=num_samples, seed=2)
        greedy = measure(model, tokenizer, num_samples=num_samples, seed=2, is_greedy=True)["accuracy"]
        report["measured"] = {**sampled, "greedy_accuracy": greedy, "num_samples": num_samples}
        report["warm_start_s"] = round(warm_start_s, 1)
        summary = (
            f"accuracy sampled {sampled['accuracy']:.2f}, greedy {greedy:.2f}; response length "
            f"p50 {sampled['length_p50_tokens']}, p95 {sampled['length_p95_tokens']}, "
            f"max {sampled['length_max_tokens']} tokens ({num_samples} samples); "
            f"{model.num_parameters():,} parameters, warm start {warm_start_s:.0f} s"
        )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, num_rows in (("train.jsonl", settings["train_rows"]), ("val.jsonl", settings["val_rows"])):
        write_rows(folder / name, num_rows, DATA_SEED_OFFSET[name] + settings["seed"])
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return summary


def is_done(out: Path, settings: dict[str, Any]) -> bool:
    """Tell whether `out` holds the result of these very settings."""
    if not all((out / name).exists() for name in OUTPUTS):
        return False
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(report, dict) and report.get("settings") == settings


def make(out: Path, settings: dict[str, Any], say: Callable[[str], None]) -> str:
    """Make the folder `out` under another name beside it and rename it when complete; return the summary.

    An older result of this tool is replaced. Raises ValueError where `out` holds anything else.
    """
    foreign = sorted(set(os.listdir(out)) - OUTPUTS) if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()):
        raise ValueError(
            f"--out {out}: it is not a folder of this tool ({', '.join(foreign[:3]) or 'a file'} is in the way), "
            "and making the model would replace it. Name a new folder, or move this one away."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    replaced = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    try:
        for left_over in (partial, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        partial.mkdir()
        summary = fill(partial, settings, say)
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        for left_over in (partial, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
    return summary


def parse_arguments(arguments: list[str] | None) -> tuple[Path, dict[str, Any]]:
    """Read the command line; return the folder and the settings that its content depends on."""
    parser = argparse.ArgumentParser(
        description="Make the demo's tiny Qwen2 model (Hugging Face format) and its prompt files. Takes about a minute.",
        epilog="Run again with the same settings, it finds the result and returns at once.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to make: DIR/model, DIR/train.jsonl, ...")
    add("--seed", type=int, default=0, help="of weights, warm start and prompt files (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--max-steps", type=int, default=500, metavar="N", help="warm start of N optimizer steps (default: %(default)s)"
    )
    length.add_argument(
        "--seconds", type=float, metavar="S", help="warm start of S seconds instead; how good it gets varies by machine"
    )
    length.add_argument("--no-warm-start", action="store_true", help="leave the weights random, for tests")
    shape = parser.add_argument_group("model shape (the demo runs up to 2 ranks: keep the counts even)")
    shape.add_argument("--hidden", type=int, default=128, help="hidden size (default: %(default)s)")
    shape.add_argument("--intermediate", type=int, help="MLP size (default: 2.75 x hidden, in eights)")
    shape.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    shape.add_argument("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    shape.add_argument("--kv-heads", type=int, default=2, help="key-value heads (default: %(default)s)")
    add("--train-rows", type=int, default=2048, help="rows of train.jsonl (default: %(default)s)")
    add("--val-rows", type=int, default=256, help="rows of val.jsonl (default: %(default)s)")
    add("--eval-samples", type=int, default=512, help="problems to measure the result on (default: %(default)s)")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out").absolute()
    if options.pop("no_warm_start"):
        options["max_steps"] = 0
    if options["seconds"] is not None:
        options["max_steps"] = None
    options["intermediate"] = options["intermediate"] or options["hidden"] * 11 // 32 * 8
    for name, lowest in (("train_rows", 1), ("val_rows", 1), ("eval_samples", 1), ("layers", 1), ("kv_heads", 1)):
        if options[name] < lowest:
            parser.error(f"--{name.replace('_', '-')} {options[name]}: expected {lowest} or more.")
    if options["heads"] % options["kv_heads"] or options["hidden"] % (2 * options["heads"]):
        parser.error(
            f"--hidden {options['hidden']} --heads {options['heads']} --kv-heads {options['kv_heads']}: expected heads "
            "to be a multiple of kv-heads and hidden one of 2 x heads (RoPE turns pairs)."
        )
    return out, options
