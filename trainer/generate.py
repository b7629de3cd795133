"""`python -m ttp.trainer.generate --checkpoint DIR --prompt TEXT`: a trained model continues a text.

Owns the choice of the next token, and the command line. One process, any checkpoint: the layout that wrote it does not matter.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ttp.errors import ConfigError, TTPError

from .config.schema import LARGEST, check
from .data.tokenizer import BYTES, Tokenizer, open_tokenizer
from .devices.binding import bind, choose_device
from .devices.device_table import DEVICES
from .model.gpt import GPT
from .model.weights import model_of, open_trained


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the model's logits."""

    temperature: float = 0.0
    """0: always the most likely one; larger: more even chances."""
    top_k: int | None = None
    """Only the K most likely ones; None: all."""
    top_p: float = 1.0
    """Only the most likely ones that together have this probability."""

    def __post_init__(self) -> None:
        ok = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        check(ok, "--temperature", self.temperature, "0, or 1e-06 to 1e+06")
        check(self.top_k is None or self.top_k >= 1, "--top-k", self.top_k, "1 or more")
        check(0 < self.top_p <= 1, "--top-p", self.top_p, "more than 0, at most 1")


def next_token(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token drawn from `logits_V` (on the CPU, float32)."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scores, tokens = (logits_V / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        scores, tokens = scores[: sampling.top_k], tokens[: sampling.top_k]
    chances = scores.softmax(-1)
    before = chances.cumsum(-1) - chances
    kept = int((before < sampling.top_p).sum())  # the first one always
    drawn = torch.multinomial(chances[:kept], 1, generator=generator)
    return int(tokens[drawn])


@torch.no_grad()
def continue_tokens(
    model: GPT, prompt: Sequence[int], count: int, sampling: Sampling, seed: int, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `count` tokens after `prompt`, without `stop`, at which it ends. The model sees its last seq_length tokens."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        seen = torch.tensor([tokens[-model.config.seq_length :]], device=device)
        logits_V = model(seen)[0, -1].float().cpu()
        token = next_token(logits_V, sampling, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def print_continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Iterator[int]) -> None:
    """Print the text token by token, a character when it is whole."""
    tokens, shown = list(prompt), 0
    text = tokenizer.decode(tokens)
    for token in (None, *new):
        if token is not None:
            tokens.append(token)
            text = tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(text[shown:], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Generate as the command line says; return the exit status: 0 done, 2 refused. argparse itself exits with 2."""
    given = _parser().parse_args(argv)
    try:
        sampling = Sampling(0.0 if given.greedy else given.temperature, given.top_k, given.top_p)
        check(0 <= given.max_new_tokens <= LARGEST, "--max-new-tokens", given.max_new_tokens, f"0 to {LARGEST}")
        check(-(2**63) <= given.seed < 2**64, "--seed", given.seed, "a number of 64 bits")
        trained = open_trained(given.checkpoint)
        tokenizer = _tokenizer(given.tokenizer or trained.tokenizer)
        (prompt,) = tokenizer.encode([given.prompt])
        check(len(prompt) > 0, "--prompt", given.prompt, "one token of text at least")
        largest = max(prompt)
        check(largest < trained.config.vocab_size, "--tokenizer", tokenizer.name, "the tokenizer of the training")
        device = bind(choose_device(given.device, "--device"), 0, "--device")
        model = model_of(trained.config, trained.checkpoint.weights(), device, trained.checkpoint.path)
    except TTPError as exc:
        print(f"ttp.trainer.generate: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2
    for skipped in trained.checkpoint.skipped:
        print(f"ttp.trainer.generate: skipping {skipped}", file=sys.stderr)
    print(f"{trained.checkpoint.path}: step {trained.checkpoint.step}", file=sys.stderr)
    new = continue_tokens(model, prompt, given.max_new_tokens, sampling, given.seed, tokenizer.end_of_text)
    print_continuation(tokenizer, prompt, new)
    return 0


def _tokenizer(path: str | None) -> Tokenizer:
    if path is None:
        raise ConfigError(
            "the model was trained on token ids, and the checkpoint does not say whose: name the tokenizer with"
            f" --tokenizer PATH, or {BYTES} where the text was prepared without one"
        )
    return open_tokenizer(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ttp.trainer.generate", description="Continue a text.")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="an output folder, a folder of checkpoints (the newest valid one), or one of them",
    )
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="at most so many (default: 200)")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token: --temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 or more (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the K most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--tokenizer", help="a tokenizer, or bytes; default: the one that the checkpoint names")
    parser.add_argument("--device", default="auto", choices=["auto", *DEVICES])
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as any filter
    sys.exit(main())
