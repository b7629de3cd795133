"""Translation, data parallel and protected: an encoder-decoder on sentence pairs.

    ttprun --nproc-per-node 2 examples/translation/train.py
    ttprun --nproc-per-node 8 examples/translation/train.py --source corpus.en --target corpus.fr --width 512 --layers 6

Without files it learns English numerals to German ones, which are generated. Lines that end with `# TTP` are all that differs
from the trainer without TTP.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from model import Translator
from pairs import PAD, Characters, aligned, numerals, padded
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ttp  # TTP

HELD_OUT = 64
"""Pairs that are never trained on."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a sentence a line; with --target")
    parser.add_argument("--target", type=Path, help="its translation, in the same line")
    parser.add_argument("--pairs", type=int, default=4000, help="how many to generate, without files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    parser.add_argument("--length", type=int, default=64, help="characters of a sentence; longer ones are cut")
    parser.add_argument("--save-dir", default="output/translation")
    args = parser.parse_args()
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target belong together")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # it uses a prototype of torch's, and warns of it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = aligned(args.source, args.target) if args.source else numerals(args.pairs)
    if len(pairs) <= 2 * HELD_OUT:
        raise SystemExit(f"{len(pairs)} sentence pairs: wanted more than {2 * HELD_OUT}")
    source, target = (Characters([pair[side] for pair in pairs]) for side in (0, 1))

    def batch_of(chosen: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return source_BS and target_BT."""
        return (
            padded([source.encode(a, args.length) for a, _ in chosen]),
            padded([target.encode(b, args.length) for _, b in chosen]),
        )

    trained, held_out = pairs[HELD_OUT:], pairs[:HELD_OUT]
    sampler = DistributedSampler(trained, shuffle=True, seed=1)  # type: ignore[arg-type]
    loader = DataLoader(trained, args.batch_size, sampler=sampler, collate_fn=batch_of)  # type: ignore[arg-type]
    torch.manual_seed(0)
    net = Translator(source.size, target.size, args.width, args.heads, args.layers, args.length + 2)
    model = DistributedDataParallel(net, find_unused_parameters=True)  # TTP: or the last bit may differ
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader) + 1)
    guard = ttp.protect(  # TTP
        model, optimizer, schedulers=[scheduler], clip=ttp.ClipNorm(1.0), save_dirs=[args.save_dir]
    )

    @ttp.ttp_to_persist  # TTP
    def train() -> None:
        for epoch in guard.epochs(args.epochs):  # TTP: in place of range(args.epochs)
            sampler.set_epoch(epoch)
            for source_BS, target_BT in guard.batches(loader):  # TTP: in place of loader
                optimizer.zero_grad()
                logits_BTV = model(source_BS, target_BT[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits_BTV.flatten(0, 1), target_BT[:, 1:].flatten(), ignore_index=PAD
                )
                loss.backward()
                optimizer.step()
                scheduler.step()
                if rank == 0:
                    print(f"step {guard.step}: loss {loss.item().hex()} = {loss.item():.4f}", flush=True)
            with guard.pause():  # TTP: an evaluation is no hang
                net.eval()
                source_BS, target_BT = batch_of(held_out)
                got = [target.decode(tokens) for tokens in net.translate(source_BS)]
                net.train()
            right = sum(a == b for a, (_, b) in zip(got, held_out, strict=True))
            if rank == 0:
                print(f"epoch {epoch}: {right} of {HELD_OUT} held-out sentences right; {held_out[0][0]} -> {got[0]}")
        guard.save()  # TTP: the last step is on disk before anybody leaves

    train()
    if rank == 0:
        weights = torch.cat([value.double().view(-1) for value in net.state_dict().values()])
        print(f"final weights: {weights.norm().item().hex()}", flush=True)
    guard.close()  # TTP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
