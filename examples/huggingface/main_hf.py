"""Train a model of transformers, data parallel and protected, in a loop of one's own.

    ttprun --nproc-per-node 2 examples/huggingface/main_hf.py --model_name_or_path PATH --dataset_name_or_path FILE --batch_size 4

PATH: a model saved by transformers (gpt2, bert, mixtral, ...), or a folder with nothing but its config.json: then the weights
are random and text is read as bytes. `override_config.json` in the working directory changes values of the configuration
(`{"num_hidden_layers": 2}`), which must keep their types. Lines that end with `# TTP` are all that differs from the program
without TTP.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from model_and_text import (
    build_model,
    build_sequences,
    collate,
    is_masked,
    load_config,
    load_tokenizer,
    mask_token_of,
    tokens_of_a_sequence,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_scheduler

import ttp  # TTP
from ttp.trainer.devices import bind, choose_device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="gpt2")
    parser.add_argument(
        "--dataset_name_or_path", default="wikitext", help="a text file, a folder of them, a saved `datasets`"
    )
    parser.add_argument(
        "--dataset_config_name",
        default="wikitext-103-raw-v1",
        help="for a name that `datasets` loads, which may have several; empty: none",
    )
    parser.add_argument("--batch_size", type=int, default=2, help="of each rank")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--block_size", type=int, default=1024, help="tokens of a sequence, if the model takes as many")
    parser.add_argument("--max_sequences", type=int, default=0, help="train on so many at most; 0: on all")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="times the number of ranks")
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--log_every", type=int, default=10)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, npu or musa")
    parser.add_argument("--save_dir", default="output/main_hf")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    kind = choose_device(args.device, "--device")
    device = bind(kind, int(os.environ["LOCAL_RANK"]))
    if kind.is_host:
        torch.set_num_threads(1)
    dist.init_process_group(kind.backends)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    torch.manual_seed(123)
    config = load_config(args.model_name_or_path, say)
    tokenizer = load_tokenizer(args.model_name_or_path, say)
    net = build_model(args.model_name_or_path, config, tokenizer).to(device)
    devices = None if kind.is_host else [device]
    model = DistributedDataParallel(net, devices, find_unused_parameters=True)  # TTP: or the last bit may differ
    block = tokens_of_a_sequence(net, config, args.block_size)
    sequences = build_sequences(args.dataset_name_or_path, args.dataset_config_name or None, tokenizer, block)
    if args.max_sequences:
        sequences["train"] = sequences["train"][: args.max_sequences]
    say(f"{len(sequences['train'])} sequences of {block} tokens to train on, {len(sequences['test'])} to evaluate on")
    mask = mask_token_of(config, tokenizer)
    batch_of = partial(collate, masked=is_masked(config), mask_token=mask, vocab_size=config.vocab_size)
    samplers = {name: DistributedSampler(each, shuffle=name == "train") for name, each in sequences.items()}
    loaders = {
        name: DataLoader(each, args.batch_size, sampler=samplers[name], collate_fn=batch_of)
        for name, each in sequences.items()
    }
    steps = len(loaders["train"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate * world_size, weight_decay=0.1)
    scheduler = get_scheduler("cosine", optimizer, args.warmup_steps, args.epochs * steps)
    guard = ttp.protect(  # TTP
        model, optimizer, schedulers=[scheduler], clip=ttp.ClipNorm(1.0), save_dirs=[args.save_dir]
    )

    def evaluate() -> float:
        """Return the mean loss over the held-out sequences of all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=device)
        model.eval()
        with torch.no_grad():
            for index, batch in enumerate(loaders["test"]):
                torch.manual_seed(index)  # the same masks at every evaluation
                loss = net(**on(batch, device)).loss
                total += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])
        model.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        model.train()
        for epoch in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
            samplers["train"].set_epoch(epoch)
            pace = Pace(args.batch_size * block * world_size)
            for batch in guard.batches(loaders["train"]):  # TTP: in place of loaders["train"]
                loss = model(**on(batch, device)).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                pace.count()
                if guard.step % args.log_every == 0:
                    say(
                        f"epoch[{epoch}/{args.epochs - 1}], step[{guard.step}/{args.epochs * steps}]: train_loss:"
                        f" {loss.item()!r}, train_tokens_throughput: {pace.tokens_per_s():.0f} tokens/s"
                    )
            with guard.pause():  # TTP: an evaluation is no hang
                loss = evaluate()
            say(
                f"validation in train epoch {epoch}: eval_loss: {loss!r}, val_perplexity: {math.exp(min(loss, 700)):.3f}"
            )
        guard.save()  # TTP: the last step is on disk before anybody leaves

    train()
    guard.close()  # TTP
    dist.destroy_process_group()


def on(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


class Pace:
    """Tokens per second since it was last asked."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._steps, self._since = 0, time.monotonic()

    def count(self) -> None:
        self._steps += 1

    def tokens_per_s(self) -> float:
        now = time.monotonic()
        rate = self._steps * self._tokens_per_step / max(now - self._since, 1e-9)
        self._steps, self._since = 0, now
        return rate


if __name__ == "__main__":
    main()
