"""Make the demo's model and data: a Qwen2 of about a million parameters that half knows how to divide.

The folder has what a real run has: `model/`, a Hugging Face folder that transformers and vLLM load, and the
prompt files `train.jsonl` and `val.jsonl`. The model is warm-started in about a minute on one core by
imitating a careless teacher of `demo_task`: sampled, about half of its responses are right, so RL has
something to start from and to gain. `demo_model.json` beside them holds the settings and what was measured.

Invariants: a folder is complete or absent; the same settings give the same folder on machines of one kind
(the warm start is a number of optimizer steps, and one thread does all the sums).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import demo_task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

# torch and transformers take seconds to import, so the functions that need them do it: --help, and a folder
# that is there already, answer at once.

# Raise it when a change to this file or to demo_task makes other weights or rows from the same settings.
RECIPE = 2

REPORT = "demo_model.json"
OUTPUTS = {"model", "train.jsonl", "val.jsonl", REPORT}

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 32
MAX_POSITION_EMBEDDINGS = 512
# The usual 0.02 is meant for wide models; at a width of 128 it costs the warm start about 200 steps more.
INITIALIZER_RANGE = 0.05

ROW_TOKENS = 128  # of a packed row of the warm start: exactly the longest problem with its solution
ROWS_PER_BATCH = 4
LEARNING_RATE = 2e-3
ADAM_BETAS = (0.9, 0.98)
RAMP_STEPS = 30
MAX_GRAD_NORM = 1.0
IGNORED_LABEL = -100  # cross_entropy's default

MAX_RESPONSE_TOKENS = 160  # when measuring; right responses have at most 122

Say = Callable[[str], None]  # takes a progress line


class Batch(TypedDict):
    """Packed rows: the model's inputs by name, and what each position should predict.

    The attention mask [rows, 1, tokens, tokens] is True where a token may look: back, inside its own problem.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the character tokenizer: encoding puts <bos> in front, as Llama's does; decoding adds nothing.

    Byte-level BPE without merges: AutoTokenizer reads the vocabulary of any Qwen2 folder into just that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS + list(demo_task.CHARACTERS)
    # Any id that an untrained model samples can be decoded; not special tokens, so that the reward sees them.
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<pad>",  # else the Qwen2 class adds one of its own, outside the model's vocabulary
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
    """Give batches of problems and careless solutions, packed tightly: padding would cost half the time."""
    import torch

    shape = (ROWS_PER_BATCH, ROW_TOKENS)
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    waiting: list[tuple[list[int], int]] = []  # examples that found no room; they go first in the next batch
    while True:
        ids = torch.full(shape, PAD_ID)
        labels = torch.full(shape, IGNORED_LABEL)
        positions, owner = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        filled = [0] * ROWS_PER_BATCH
        pending, waiting = waiting, []
        number = 0
        while len(waiting) < ROWS_PER_BATCH - 1:  # the next batch has a row for each: none is ever dropped
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
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None]}
        yield Batch(inputs=inputs, labels=labels)


def _encoded_example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """Give the tokens of a prompt and a careless solution, and how many of them are the prompt's."""
    problem = demo_task.draw_problem(rng)
    solution = demo_task.solution_text(*problem, rng, demo_task.CARELESS)
    prompt_ids: list[int] = tokenizer.encode(demo_task.prompt_text(*problem))
    solution_ids: list[int] = tokenizer.encode(solution, add_special_tokens=False)
    return [*prompt_ids, *solution_ids, EOS_ID], len(prompt_ids)


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: dict[str, Any],
    say: Say,
) -> None:
    """Train on the teacher's solutions for `max_steps` steps or `seconds`; say now and then how it goes."""
    import torch
    from torch.nn.functional import cross_entropy

    max_steps, seconds = settings["max_steps"], settings["seconds"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0)
    batches = packed_batches(tokenizer, random.Random(settings["seed"]))
    measured_s = 0.0  # spent on progress lines, which is not training time
    begin, next_report, mean_loss = time.monotonic(), 0.1, math.nan
    for step, batch in enumerate(batches):
        elapsed_s = time.monotonic() - begin - measured_s
        done = elapsed_s / seconds if seconds is not None else step / max_steps
        if done >= next_report:
            num_samples = min(128, settings["eval_samples"])
            accuracy = measure(model, tokenizer, num_samples=num_samples, seed=1)["accuracy"]
            measured_s = time.monotonic() - begin - elapsed_s
            say(f"step {step}, {elapsed_s:.0f} s: loss {mean_loss:.3f}, sampled accuracy {accuracy:.2f}")
            next_report += 0.2
        if done >= 1.0:
            break
        # A short ramp, half the time at the full rate, then down in a line.
        rate = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, max(0.05, 2.0 * (1.0 - done)))
        optimizer.param_groups[0]["lr"] = rate
        logits = model(**batch["inputs"], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.item() if step == 0 else 0.9 * mean_loss + 0.1 * loss.item()


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
    """Answer drawn problems; give the accuracy and the response lengths in tokens, EOS included."""
    rows = list(demo_task.data_rows(num_samples, seed))
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    responses = generate(model, prompts, is_greedy=is_greedy, seed=seed)
    rewards = [
        demo_task.score(
            tokenizer.decode(tokens, skip_special_tokens=True),
            prompt=row["prompt"],
            ground_truth=row["answer"],
            finish_reason="stop" if tokens[-1] == EOS_ID else "length",
        )
        for row, tokens in zip(rows, responses, strict=True)
    ]
    lengths = sorted(map(len, responses))
    return {
        "accuracy": sum(rewards) / num_samples,
        "length_p50_tokens": lengths[num_samples // 2],
        "length_p95_tokens": lengths[int(0.95 * num_samples)],
        "length_max_tokens": lengths[-1],
    }


def fill(folder: Path, settings: dict[str, Any], say: Say) -> str:
    """Make everything in the empty `folder`; return the line that sums it up."""
    import torch
    import transformers

    demo_task.write_files(folder, settings["train_rows"], settings["val_rows"], settings["seed"])
    torch.set_num_threads(1)  # a second one would change the order of the sums, for no speed at this size
    transformers.utils.logging.disable_progress_bar()
    begin = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(settings)
    num_parameters = model.num_parameters()
    report: dict[str, Any] = {"settings": settings, "num_parameters": num_parameters, "measured": None}
    summary = f"{num_parameters:,} parameters, no warm start"
    if settings["max_steps"] != 0:
        warm_start(model, tokenizer, settings, say)
        warm_start_s = time.monotonic() - begin
        num_samples = settings["eval_samples"]
        sampled = measure(model, tokenizer, num_samples=num_samples, seed=2)
        greedy = measure(model, tokenizer, num_samples=num_samples, seed=2, is_greedy=True)["accuracy"]
        report["measured"] = {**sampled, "greedy_accuracy": greedy, "warm_start_s": round(warm_start_s, 1)}
        summary = (
            f"accuracy sampled {sampled['accuracy']:.2f}, greedy {greedy:.2f}; response length "
            f"p50 {sampled['length_p50_tokens']}, p95 {sampled['length_p95_tokens']}, "
            f"max {sampled['length_max_tokens']} tokens ({num_samples} samples); "
            f"{num_parameters:,} parameters, warm start {warm_start_s:.0f} s"
        )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # safetensors writes for the owner alone; the others may read the weights where they may read the rest.
    (folder / "model" / "model.safetensors").chmod((folder / "model" / "config.json").stat().st_mode)
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


def make(out: Path, settings: dict[str, Any], say: Say) -> str:
    """Make the folder `out` under another name beside it and rename it when complete; return the summary.

    An older result of this tool is replaced. Raises ValueError where `out` holds anything else.
    """
    found = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"} if out.exists() else set()
    if foreign := sorted(found - OUTPUTS):
        raise ValueError(
            f"--out {out}: making the model would replace it, and it holds what this tool did not make "
            f"({', '.join(foreign[:3])}). Name a new folder, or move this one away."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    half_made = out.with_name(f".{out.name}.partial-{os.getpid()}")
    replaced = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    try:
        for left_over in (half_made, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        half_made.mkdir()
        summary = fill(half_made, settings, say)
        if out.exists():
            out.rename(replaced)
        half_made.rename(out)
    finally:
        for left_over in (half_made, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
    return summary


def parse_arguments(arguments: list[str] | None) -> tuple[Path, dict[str, Any]]:
    """Read the command line; return the folder and the settings that its content depends on."""
    parser = argparse.ArgumentParser(
        description="Make the demo's tiny Qwen2 model, a Hugging Face folder, and its prompt files.",
        epilog="Takes a minute or two; where DIR holds the result of the same settings, nothing is done.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, default = parser.add_argument, argparse.SUPPRESS
    add("--out", type=Path, required=True, metavar="DIR", default=default, help="the folder to make")
    add("--seed", type=int, default=0, help="of weights, warm start and prompt files")
    add("--train-rows", type=int, default=2048, help="rows of train.jsonl")
    add("--val-rows", type=int, default=64, help="rows of val.jsonl, a quarter of them not in train.jsonl")
    add("--eval-samples", type=int, default=512, help="problems on which the result is measured")
    add = parser.add_argument_group("warm start (one of)").add_mutually_exclusive_group().add_argument
    add("--max-steps", type=int, default=500, metavar="N", help="N optimizer steps")
    add("--seconds", type=float, metavar="S", help="S seconds; what comes out then depends on the machine")
    add("--no-warm-start", action="store_true", help="none: random weights, for tests")
    add = parser.add_argument_group("shape (2 ranks need even layers, heads and kv-heads)").add_argument
    add("--hidden", type=int, default=128, help="hidden size")
    add("--intermediate", type=int, help="MLP size; None: 2.75 x hidden, a multiple of 8")
    add("--layers", type=int, default=4, help="transformer layers")
    add("--heads", type=int, default=4, help="attention heads")
    add("--kv-heads", type=int, default=2, help="key-value heads")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out").absolute()
    if options.pop("no_warm_start"):
        options["max_steps"] = 0
    if options["seconds"] is not None:
        options["max_steps"] = None
    options["intermediate"] = options["intermediate"] or options["hidden"] * 11 // 32 * 8
    for name, value in options.items():
        lowest = 0 if name in ("seed", "max_steps") else 1
        if value is not None and value < lowest:
            parser.error(f"--{name.replace('_', '-')} {value}: expected {lowest} or more.")
    if options["heads"] % options["kv_heads"] or options["hidden"] % (2 * options["heads"]):
        got = f"--hidden {options['hidden']} --heads {options['heads']} --kv-heads {options['kv_heads']}"
        parser.error(f"{got}: expected hidden in multiples of 2 x heads, and heads in multiples of kv-heads.")
    return out, {"recipe": RECIPE, **options}


def main(arguments: list[str] | None = None) -> None:
    """Make the folder, unless it is there already."""
    out, settings = parse_arguments(arguments)
    if is_done(out, settings):
        print(f"{out} already holds the model and data of these settings; nothing to do")
        return
    say = partial(print, flush=True)
    say(f"making {out}")
    try:
        say(f"done: {make(out, settings, say)}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise, so that the half-made folder is removed
    main()
