"""`rollpacker convert`: checkpoints between Hugging Face and Megatron, in one process, without MPI."""

from __future__ import annotations

import argparse
import os
import sys
import time

HELP = "Convert a checkpoint between a Hugging Face folder and a Megatron distributed checkpoint (any TP x PP)."
_NOTE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf"))
    parser.add_argument("source", metavar="IN", help="the folder to read")
    parser.add_argument("target", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then compare the logits of both sides in fp32 on the CPU (needs memory for one whole model); "
        "exit code 1 if they differ",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback for configuration errors too")


def run(arguments: argparse.Namespace) -> int:
    """Convert, then verify if asked to; the exit code."""
    _prepare_process()
    from rollpacker.weights.convert import hf_to_megatron, megatron_to_hf

    is_to_megatron = arguments.direction == "hf-to-megatron"
    start = time.monotonic()
    progress = _ProgressLine()
    (hf_to_megatron if is_to_megatron else megatron_to_hf)(arguments.source, arguments.target, progress)
    print(f"{arguments.target}: written in {time.monotonic() - start:.1f} s")
    if not arguments.verify:
        return 0
    hf, megatron = (arguments.source, arguments.target) if is_to_megatron else (arguments.target, arguments.source)
    return _verify(hf, megatron, arguments.target)


def _verify(hf: str, megatron: str, target: str) -> int:
    from rollpacker.runtime.verify import TOLERANCE, compare_logits

    result = compare_logits(hf, megatron)
    print(
        f"logits of Megatron against transformers: max difference {result.max_difference:.2e} over {result.num_logits:,} "
        f"of up to {result.max_logit:.3g} (at most {TOLERANCE:g} of that)"
    )
    if result.is_equal:
        return 0
    sys.stderr.write(
        f"rollpacker convert: the two sides do not compute the same, do not use {target}. It was left there to look at; "
        "please report the model's config.json.\n"
    )
    return 1


class _ProgressLine:
    """One line that is redrawn on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """Show how far the conversion is."""
        now, is_last = time.monotonic(), done_bytes == total_bytes
        if now - self._shown_s < (_REDRAW_EVERY_S if self._is_terminal else _NOTE_EVERY_S) and not is_last:
            return
        self._shown_s = now
        text = f"{done_bytes / total_bytes:4.0%} of {total_bytes / 2**30:.2f} GiB  {name}"
        if self._is_terminal:
            print(f"\r{text:<79.79}", end="\n" if is_last else "", flush=True)
        else:
            print(text, flush=True)


def _prepare_process() -> None:
    """Silence from libraries that talk about themselves; every core may work, there is one process."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import logging
    import warnings

    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
