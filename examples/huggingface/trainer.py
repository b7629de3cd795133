"""`transformers.Trainer` with a callback that protects it: a small GPT-2 on the text of Python's own documentation.

    ttprun --nproc-per-node 2 examples/huggingface/trainer.py --steps 40

Lines that end with `# TTP` are all that differs from the program without TTP.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ttp.adopt.transformers_callback import TTPCallback  # TTP

LENGTH = 32


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return `count` runs of bytes as tokens."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    runs = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * LENGTH].long().view(count, LENGTH)
    return [{"input_ids": run, "labels": run} for run in runs]


class Print(TrainerCallback):
    """Prints every step's loss to the last bit."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        if logs and "grad_norm" in logs and state.is_world_process_zero:
            loss, norm = float(logs["loss"]), float(logs["grad_norm"])
            print(
                f"step {state.global_step}: loss {loss.hex()} norm {norm.hex()} rate {logs['learning_rate']}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-dir", default="output/hf_trainer")
    args = parser.parse_args()

    torch.set_num_threads(1)
    settings = TrainingArguments(
        output_dir=f"{args.save_dir}/trainer",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        ddp_find_unused_parameters=True,  # TTP: or the last bit may differ (docs/your_trainer.md)
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    protection = TTPCallback(save_dirs=[args.save_dir])  # TTP
    callbacks = [Print(), protection]
    trainer = Trainer(model=model, args=settings, train_dataset=samples(192), callbacks=callbacks)
    protection.train(trainer)  # TTP: in place of trainer.train()
    if trainer.is_world_process_zero():
        weights = torch.cat([value.double().view(-1) for value in model.parameters()])
        print(f"final weights: {weights.norm().item().hex()}", flush=True)
    protection.close()  # TTP


if __name__ == "__main__":
    main()
