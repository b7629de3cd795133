"""Trains an encoder-decoder that is split over ranks, on the pairs of `preprocess.py`.

    python train.py                                       alone, as one rank
    ttprun --nproc-per-node 8 train.py --distribute true --mp 4 --batch_size 64

Ranks are data x model x pipeline parallel: what `--mp` and `--pipeline_stage` leave of them is data parallel. A batch is `--batch_size` pairs
over all of them. A restart goes on where the job was; so does the same command again, with the same `--output_dir`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataset import Tokenizer, ToyDataset
from model import net, pipeline_func

import ttp
from ttp.errors import CheckpointError, ConfigError
from ttp.trainer.__main__ import run_as_program, status_of
from ttp.trainer.config.schema import Config, DatasetConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from ttp.trainer.data.batches import OpenedText
from ttp.trainer.metrics import StepMetrics
from ttp.trainer.parallel.op_parallel import TransformerOpParallelConfig, load_pipeline_func
from ttp.trainer.train import started
from ttp.trainer.world import World, world_from_env

OPTIONS = {
    "encoder_layers": "--encoder_layer",
    "hidden_size": "--d_model",
    "num_attention_heads": "--num_heads",
    "embedding_dropout": "--dropout",
    "learning_rate": "--lr",
    "training_iters": "--epochs",
    "save_interval": "--save_checkpoint_steps",
    "model_parallel": "--mp",
}
"""A key of the configuration -> the option that sets it, where they have other names."""


def true_or_false(text: str) -> bool:
    if text not in ("true", "1", "false", "0"):
        raise argparse.ArgumentTypeError(f"got {text}, expected true, false, 1 or 0")
    return text in ("true", "1")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(name: str, default: object, about: str, *more: str) -> None:
        kind = true_or_false if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{name}", *more, type=kind, default=default, help=f"{about} (%(default)s)")

    add("train", True, "1: train; 0: the loss of the newest checkpoint on the pairs")
    add("file_path", "./output/wmt14.fr_en.txt", "a pair a line; its tokenizer is tokenizer.json beside it")
    add("distribute", False, "as ttprun's ranks; false: alone")
    add("micro_batch_num", 1, "parts of a rank's batch, computed one after the other")
    add("src_len", 10, "tokens of a source sentence, its end included; longer ones are cut")
    add("tgt_len", 10, "tokens of a target sentence, its end included; longer ones are cut")
    add("vocab_size", 20000, "rows of each embedding")
    add("d_model", 128, "width of the layers")
    add("num_heads", 8, "attention heads")
    add("ffn_hidden_size", 0, "width inside the feed-forward; 0: d_model")
    add("dropout", 0.1, "of the embeddings")
    add("tied", False, "source embedding, target embedding and output are one matrix; with --vocab_emb_dp false")
    add("encoder_layer", 1, "layers of the encoder")
    add("decoder_layer", 1, "layers of the decoder")
    add("pipeline_stage", 1, "stages that the layers are divided into")
    parser.add_argument(
        "--pipeline_func", metavar="FILE", help="a Python file whose pipeline_func gives each layer its stage"
    )
    add("batch_size", 32, "pairs of a step, over all ranks")
    add("lr", 0.0001, "learning rate")
    add("mp", 1, "ranks that share each layer's matrices")
    add(
        "optimizer_shard",
        True,
        "the optimizer's state is divided over data-parallel ranks",
        "--enable_parallel_optimizer",
    )
    add(
        "gradient_accumulation_shard",
        True,
        "so are accumulated gradients, where there are data-parallel ranks and stages",
    )
    add("gradient_aggregation_group", 4, "messages that a rank's gradients are sent in, about")
    add("vocab_emb_dp", True, "every model-parallel rank has the whole embeddings")
    add("recompute", False, "backward computes the layers' activations again")
    add("epochs", 1, "times that all pairs are taken")
    add("save_checkpoint_steps", 1, "a checkpoint every so many steps")
    add("keep_checkpoint_max", 4, "the newest so many checkpoints stay")
    add("ckpt_file", "", "a checkpoint, or a folder of them, to go on from; of any layout")
    add("output_dir", "output/train", "checkpoints, logs and metrics")
    add("seed", 42, "of weights, order and dropout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return status_of(lambda: run(args), "train.py")


def run(args: argparse.Namespace) -> None:
    world = world_from_env() if args.distribute else World(0, 1, 0, launched=False)
    parallel = parallel_config_of(args, world)
    if args.distribute:
        print(f"rank_id is {world.rank}, device_num is {world.size}, dp is {parallel.data_parallel}", flush=True)
    tokenizer_path = Path(args.file_path).parent / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path)
    if tokenizer.vocab_size > args.vocab_size:
        raise ConfigError(
            f"--vocab_size: got {args.vocab_size}, expected {tokenizer.vocab_size} or more, the tokens of {tokenizer_path}. Raise it"
        )
    dataset = ToyDataset(args.file_path, (args.src_len, args.tgt_len), tokenizer, args.seed)
    steps_per_epoch = dataset.count // args.batch_size
    if not steps_per_epoch:
        raise ConfigError(
            f"--batch_size: got {args.batch_size}, expected at most {dataset.count}, the pairs of {args.file_path}. Lower it"
        )
    begun = 0
    if args.ckpt_file:  # epochs are counted from it, also after a restart
        checkpoint = ttp.open_checkpoint(args.ckpt_file)
        args.ckpt_file, begun = str(checkpoint.path), checkpoint.step
    config = config_of(args, parallel, begun + args.epochs * steps_per_epoch)
    monitor = LossMonitor(steps_per_epoch)
    with started(config, world, lambda _: OpenedText(dataset, dataset, None, str(tokenizer_path)), monitor) as trainer:
        if args.train:
            monitor.begin()
            trainer.train()
        elif trainer.step == 0:
            raise CheckpointError(
                f"--train 0: got no checkpoint in {args.output_dir}, expected one. Train first, or name --ckpt_file"
            )
        else:
            loss = trainer.evaluation.loss_of(dataset, dataset.count)
            print(f"step: {trainer.step}, loss is {loss:.4f}", flush=True)
        trainer.close()


@contextmanager
def options_named() -> Iterator[None]:
    """Name this program's option in an error about the key that it sets."""
    try:
        yield
    except ConfigError as error:
        key, _, rest = str(error).partition(": ")
        option = OPTIONS.get(key.rpartition(".")[2])
        raise ConfigError(f"{option}: {rest}" if option else str(error)) from None


@options_named()
def parallel_config_of(args: argparse.Namespace, world: World) -> TransformerOpParallelConfig:
    """Return the global settings of this job. Raises ConfigError."""
    data_parallel, rest = divmod(world.size, max(1, args.mp * args.pipeline_stage))
    if rest or not data_parallel:
        raise ConfigError(
            f"--mp {args.mp} x --pipeline_stage {args.pipeline_stage}: got {world.size} ranks, expected a multiple of the product."
            f" Start other ranks{'' if args.distribute else ' with --distribute true'}, or change either"
        )
    return TransformerOpParallelConfig(
        data_parallel=data_parallel,
        model_parallel=args.mp,
        pipeline_stage=args.pipeline_stage,
        micro_batch_num=args.micro_batch_num,
        optimizer_shard=args.optimizer_shard,
        gradient_aggregation_group=args.gradient_aggregation_group,
        recompute=args.recompute,
        vocab_emb_dp=args.vocab_emb_dp,
    )


@options_named()
def config_of(args: argparse.Namespace, parallel: TransformerOpParallelConfig, steps: int) -> Config:
    """Return the trainer's settings. Raises ConfigError."""
    each, rest = divmod(args.batch_size, parallel.data_parallel * parallel.micro_batch_num)
    if rest or not each:
        raise ConfigError(
            f"--batch_size: got {args.batch_size}, expected a multiple of {parallel.data_parallel} data-parallel ranks x"
            f" {parallel.micro_batch_num} micro-batches. Change either"
        )
    return Config(
        model_config=net(
            src_len=args.src_len,
            tgt_len=args.tgt_len,
            hidden_size=args.d_model,
            vocab_size=args.vocab_size,
            en_layer=args.encoder_layer,
            de_layer=args.decoder_layer,
            parallel_config=parallel,
            num_heads=args.num_heads,
            ffn_hidden_size=args.ffn_hidden_size or None,
            embedding_dropout=args.dropout,
            tied=args.tied,
            place=load_pipeline_func(args.pipeline_func) if args.pipeline_func else pipeline_func,
        ),
        training_config=TrainingConfig(
            seed=args.seed,
            output_dir=args.output_dir,
            training_iters=steps,
            save_interval=args.save_checkpoint_steps,
            keep_checkpoint_max=args.keep_checkpoint_max,
            grad_clip_kwargs=None,
            use_distributed_optimizer=parallel.optimizer_shard,
            gradient_accumulation_shard=(
                args.gradient_accumulation_shard and parallel.data_parallel > 1 and parallel.pipeline_stage > 1
            ),
            recompute="full" if parallel.recompute else "none",
            resume=args.ckpt_file or "auto",
        ),
        parallel_config=ParallelConfig(
            tensor_model_parallel_size=parallel.model_parallel,
            pipeline_model_parallel_size=parallel.pipeline_stage,
            gradient_buckets=parallel.gradient_aggregation_group,
        ),
        dataset_config=DatasetConfig(
            batch_size=each, micro_batch_num=parallel.micro_batch_num, dataset_dir=str(args.file_path)
        ),
        optimizer_config=OptimizerConfig(betas=(0.9, 0.999), eps=1e-6, learning_rate=args.lr, weight_decay=0.1),
    )


class LossMonitor:
    """Prints the loss of each step, and the time of each epoch."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._each, self._first = steps_per_epoch, 0
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._began = time.monotonic()

    def __call__(self, metrics: StepMetrics) -> None:
        epoch, step = divmod(metrics.step - 1, self._each)
        print(f"epoch: {epoch + 1} step: {step + 1}, loss is {metrics.loss:.4f}", flush=True)
        self._first = self._first or metrics.step
        if step + 1 == self._each:
            now, steps = time.monotonic(), metrics.step - self._first + 1
            each_ms = 1000 * (now - self._began) / steps
            print(f"epoch time: {each_ms * steps:.3f} ms, per step time: {each_ms:.3f} ms", flush=True)
            self._first = 0
            self.begin()


if __name__ == "__main__":
    run_as_program(None, main)
