"""Train a model of transformers, data parallel and protected, in a loop of one's own.

    ttprun --nproc-per-node 2 examples/huggingface/main_hf.py --model_name_or_path PATH --dataset_name_or_path FILE --batch_size 4

PATH: a model saved by transformers (gpt2, bert, mixtral, ...), or a folder with nothing but its config.json: then the weights
are random and text is read as bytes. `override_config.json` in the working directory changes values of the configuration
(`{"num_hidden_layers": 2}`), which must keep their types. Lines that end with `# TTP` are all that differs from the program
without TTP. All options, line by line with those of the original: docs/from/musa_huggingface.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from typing import Any

import datasets
import torch
import torch.distributed as dist
from pretrained import build_model, load_config, load_tokenizer, mask_token_of, tokens_of_a_sequence
from texts import build_sequences, collate, collate_masked
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_scheduler

import ttp  # TTP
from ttp.errors import ConfigError
from ttp.trainer.devices.binding import bind, choose_device, synchronize
from ttp.trainer.devices.device_table import DEVICES
from ttp.trainer.world import joined, world_from_env


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", default="gpt2", help="a folder, or a name that the hub has")
    add("--dataset_name_or_path", default="wikitext", help="a file, a folder, or a name that the hub has")
    add("--dataset_config_name", default="wikitext-103-raw-v1", help="which one of several; empty: none")
    add("--batch_size", type=int, default=2, help="of each rank")
    add("--epochs", type=int, default=100)
    add("--block_size", type=int, default=1024, help="tokens of a sequence, if model and tokenizer take as many")
    add("--masked", action="store_true", help="train to fill in masked tokens, in place of the next token")
    add("--max_sequences", type=int, default=0, help="train on so many at most; 0: on all")
    add("--learning_rate", type=float, default=1e-4, help="times the number of ranks")
    add("--warmup_steps", type=int, default=100)
    add("--log_every", type=int, default=10, help="steps")
    add("--device", default="auto", choices=["auto", *DEVICES])
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    add("--save_dir", default="output/main_hf")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    world = world_from_env()
    kind = choose_device(args.device, "--device")
    device = bind(kind, world.local_rank, "--device")
    if kind.is_host:
        torch.set_num_threads(1)
    with joined(world, kind, device):
        run(args, device, lambda: synchronize(kind))


def run(args: argparse.Namespace, device: torch.device, wait_for_device: Any) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if rank:
        datasets.disable_progress_bars()
    torch.manual_seed(123)
    trust: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    config = load_config(args.model_name_or_path, say, **trust)
    tokenizer = load_tokenizer(args.model_name_or_path, say, **trust)
    net = build_model(args.model_name_or_path, config, tokenizer, masked=args.masked, **trust)
    say(str(net))
    block = tokens_of_a_sequence(net, config, tokenizer, args.block_size)
    sequences = build_sequences(args.dataset_name_or_path, args.dataset_config_name or None, tokenizer, block)
    if args.max_sequences:
        sequences["train"] = sequences["train"].take(min(args.max_sequences, len(sequences["train"])))
    say(f"seq_len = {block}; {len(sequences['train'])} sequences to train on, {len(sequences['test'])} to evaluate on")
    batch_of = collate
    if args.masked:
        mask_token = mask_token_of(config, tokenizer)
        batch_of = partial(collate_masked, mask_token=mask_token, vocab_size=config.vocab_size)
    samplers = {name: DistributedSampler(each, shuffle=name == "train") for name, each in sequences.items()}
    loaders = {
        name: DataLoader(each, args.batch_size, sampler=samplers[name], collate_fn=batch_of)
        for name, each in sequences.items()
    }
    steps = len(loaders["train"])
    net = net.to(device)
    devices = None if device.type == "cpu" else [device]
    model = DistributedDataParallel(net, devices, find_unused_parameters=True)  # TTP: or the last bit may differ
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate * world_size, weight_decay=0.1)
    scheduler = get_scheduler("cosine", optimizer, args.warmup_steps, args.epochs * steps)
    train_loss = MeanLoss(device)
    guard = ttp.protect(  # TTP
        model,
        optimizer,
        schedulers=[scheduler],
        clip=ttp.ClipNorm(1.0),
        state={"train_loss": train_loss},
        save_dirs=[args.save_dir],
    )

    def evaluate() -> float:
        """Return the mean loss over the held-out sequences of all ranks."""
        eval_loss = MeanLoss(device)
        model.eval()
        with torch.no_grad():
            for index, batch in enumerate(loaders["test"]):
                torch.manual_seed(index)  # the same masks at every evaluation
                eval_loss.add(net(**on(batch, device)).loss)
        model.train()
        return eval_loss.value()

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        model.train()
        for epoch in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
            samplers["train"].set_epoch(epoch)
            train_loss.begin(epoch)
            pace = Pace(args.batch_size * block * world_size, wait_for_device)
            for batch_idx, batch in guard.enumerate(loaders["train"]):  # TTP: in place of enumerate(loaders["train"])
                loss = model(**on(batch, device)).loss
                train_loss.add(loss)  # before the update: it is saved with the step
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                pace.count()
                if batch_idx % args.log_every == 0:
                    say(
                        f"epoch[{epoch}/{args.epochs - 1}], step[{batch_idx}/{steps - 1}]: train_loss:"
                        f" {train_loss.value()}, train_tokens_throughput: {pace.tokens_per_s()} tokens/s"
                    )
            with guard.pause():  # TTP: an evaluation is not a hang
                loss = evaluate()
            say(f"validation in train epoch {epoch}: eval_loss: {loss}, val_perplexity: {math.exp(min(loss, 700))}")
        guard.save()  # TTP: the last step is on disk before anybody leaves

    train()
    guard.close()  # TTP


def on(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


class MeanLoss:
    """The mean of an epoch's losses so far, over all ranks; saved with each step, so a restart goes on with it."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._count, self._epoch = 0, -1

    def begin(self, epoch: int) -> None:
        """Forget the losses of another epoch."""
        if epoch != self._epoch:
            self._sum.zero_()
            self._count, self._epoch = 0, epoch

    def add(self, loss: torch.Tensor) -> None:
        """Add the losses of one batch of each rank (all ranks call)."""
        of_all = loss.detach().float().clone()
        dist.all_reduce(of_all)
        self._sum += of_all / dist.get_world_size()
        self._count += 1

    def value(self) -> float:
        return self._sum.item() / self._count

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum.item(), "count": self._count, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.fill_(state["sum"])
        self._count, self._epoch = state["count"], state["epoch"]


class Pace:
    """Tokens per second of all ranks since it was last asked."""

    def __init__(self, tokens_per_step: int, wait_for_device: Any) -> None:
        self._tokens_per_step, self._wait = tokens_per_step, wait_for_device
        self._wait()
        self._steps, self._since = 0, time.monotonic()

    def count(self) -> None:
        self._steps += 1

    def tokens_per_s(self) -> float:
        self._wait()
        now = time.monotonic()
        rate = self._steps * self._tokens_per_step / max(now - self._since, 1e-9)
        self._steps, self._since = 0, now
        return rate


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"main_hf.py: {error}", file=sys.stderr, flush=True)
        sys.exit(2)  # ttprun does not restart what stays wrong
