"""The commands that the documents show, and what proves each: it is run as it stands, or a test of its own is named.

Owns the collecting of commands from README.md and docs/*.md, and the tables `RUN`, `PARSED` and `TESTED`. A command that stands in a document
and in no table fails `tests/unit/house/test_shown_commands.py`; so does an entry that no document shows any more.

A command is a line of a fenced or indented block, or a piece of inline code, that begins with one of PROGRAMS. Comments behind `  # ` are
left out, and so are settings before it (`ENABLE_TTP=False python ...`). The beginning of another command (`ttp ckpt`) needs no entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (
    "bash",
    "kubectl",
    "make",
    "pip",
    "python",
    "python3",
    "sbatch",
    "source",
    "srun",
    "torchrun",
    "ttp",
    "ttprun",
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_SHELL = ("", "bash", "console", "sh", "shell")
_SETTING = re.compile(r"[A-Z_]+=\S*")


class Proof(NamedTuple):
    """A command that is slow, starts processes, or needs another machine: the test that runs it, and what shows that it does."""

    test: str
    """`tests/...py::test_name`."""
    evidence: str
    """Words of the command that stand in that test's file."""


RUN: dict[str, str] = {
    "ttp ckpt list output/checkpoints": "",
    "ttp ckpt inspect output/checkpoints": "",
    "ttp ckpt verify output/checkpoints": "",
    "ttp ckpt verify output/checkpoints/iter_0000042": "",
    "ttp ckpt diff output/checkpoints other/checkpoints": "",
    "ttp ckpt export output/checkpoints gpt.safetensors --to safetensors": "",
    "ttp ckpt export output/checkpoints everything.pt --to torch --all": "",
    "ttp ckpt export output model_for_transformers --to hf --dtype bfloat16": "",
    "ttp ckpt prune output/checkpoints --keep 3": "",
    "ttp ckpt prune output/checkpoints --keep 3 --yes": "",
    "ttp ckpt prune nodes/a/checkpoints nodes/b/checkpoints --keep 3": "",
    "ttp ckpt COMMAND": "ttp ckpt list output",
    "python -m ttp.checkpoint COMMAND": "python -m ttp.checkpoint list output",
    "python -m ttp.trainer --help": "",
    "python -m ttp.trainer --config gpt_70b --plan --world-size 1024": "",
    "python -m ttp.trainer.prepare my_texts/ corpus --tokenizer tokenizer.json": "",
    'python -m ttp.trainer.generate --checkpoint output --prompt "The list " --max-new-tokens 300': "",
    "python -m ttp.trainer.generate --checkpoint DIR --prompt TEXT":
        "python -m ttp.trainer.generate --checkpoint output/checkpoints --prompt The --max-new-tokens 2",
    "python -m ttp.trainer.convert to-hf output hf_model": "",
    "ttp chaos faults": "",
    "ttp chaos check SCENARIO": "ttp chaos check {examples}/chaos/kinds.yaml",
    "ttp chaos report RESULT.json": "ttp chaos report result.json",
    "python -m ttp.controller.replay output/log/journal_0.jsonl": "",
    "python -m tests.simulation.replay SEED": "python -m tests.simulation.replay 3",
    "python -m tests.simulation.script FILE...": "python -m tests.simulation.script {scenarios}/all_replicas_gone.txt",
    "python -m tests.simulation.mutants --help": "",
    "python -m tests.model --faults N --steps N --kinds KIND ...": "python -m tests.model --faults 1 --steps 1 --kinds raise --limit 2000",
}  # fmt: skip
"""Run by the test in a folder with a small run's output, as it stands or with what takes the place of its placeholders; status 0 is wanted."""

PARSED: dict[str, Proof] = {
    "ttprun --help": Proof(
        "tests/chaos/test_installed.py::test_an_installed_copy_has_its_commands", '"ttprun"), "--help"'
    ),
    "ttprun --nproc-per-node 4 train.py": Proof(
        "tests/chaos/test_commands.py::test_ones_own_trainer_is_protected", "--nproc-per-node"
    ),
    "ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 80 --save-dir /tmp/own_trainer": Proof(
        "tests/chaos/test_commands.py::test_ones_own_trainer_is_protected", '"--steps", "80"'
    ),
    "ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 80 --save-dir /tmp/ttp_killed": Proof(
        "tests/chaos/test_commands.py::test_ones_own_trainer_is_protected", "kill:rank=1,step=50,point=updating"
    ),
    "ttprun --nproc-per-node 2 examples/ddp/shortest.py": Proof(
        "tests/chaos/test_other_trainers.py::test_the_shortest_form_has_the_bits_of_the_trainer_without_ttp",
        '"ddp" / "shortest.py"',
    ),
    "ttprun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400 train.py": Proof(
        "tests/chaos/test_launch.py::test_survivors_on_two_nodes_are_held_and_all_restart", '"--rdzv-backend", "c10d"'
    ),
    "ttprun --nnodes 2 --node-rank 0 --master-addr node-a --master-port 29500 --nproc-per-node 8 train.py": Proof(
        "tests/chaos/test_launch.py::test_survivors_on_two_nodes_are_held_and_all_restart", '"--master-addr"'
    ),
    "ttprun --nnodes 3:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400,node-b:29400 train.py": Proof(
        "tests/chaos/test_nodes.py::test_the_job_goes_on_with_fewer_nodes_and_takes_the_lost_one_in_again", "NodesJob"
    ),
    "ttprun [torchrun's arguments] -m ttp.trainer --config gpt_tiny [--section.key value ...]": Proof(
        "tests/chaos/test_schedulers.py::test_the_usual_script_pretrains_a_gpt", "gpt"
    ),
    "ttprun --nproc-per-node 8 -m ttp.trainer --config gpt2_124m --dataset_config.dataset_dir corpus": Proof(
        "tests/unit/trainer/test_train.py::test_other_text_than_the_checkpoints_is_said", "dataset_config.dataset_dir"
    ),
    "ttprun --rank_table_file hccl.json train.py": Proof(
        "tests/chaos/test_rank_table.py::test_a_rank_table_places_the_ranks_of_two_nodes", "--rank_table_file"
    ),
}
"""Command lines of `ttprun`: its parser takes each as it stands (without what is in brackets), and a test runs one like it."""

TESTED: dict[str, Proof] = {
    "make demo": Proof(
        "tests/chaos/test_commands.py::test_the_demo_survives_the_death_of_rank_0", "ttp.chaos.demo"
    ),
    "make demo KILL_RANK=0": Proof(
        "tests/chaos/test_commands.py::test_the_demo_survives_the_death_of_rank_0", "--kill-rank"
    ),
    "make chaos": Proof("tests/chaos/test_commands.py::test_random_kills_find_nothing", "ttp.chaos.kills"),
    "make test": Proof("tests/unit/house/test_shown_commands.py::test_make_runs_what_there_is", "not long"),
    "make soak": Proof("tests/simulation/test_soak.py::test_ten_thousand_jobs_violate_no_invariant", "tests.simulation.soak"),
    "make mutants": Proof("tests/simulation/test_mutants.py::test_what_a_test_knows_of_is_caught", "tests.simulation.mutants"),
    "make docs": Proof("tests/unit/house/test_document.py::test_generated_tables_are_not_stale", "document.render"),
    "make bench": Proof("tests/chaos/test_installed.py::test_a_benchmark_tells_whether_its_limit_was_kept", '"benchmarks"'),
    "pip install .": Proof("tests/chaos/test_installed.py::test_an_installed_copy_has_its_commands", '"install", "."'),
    "source .venv/bin/activate": Proof(
        "tests/unit/house/test_shown_commands.py::test_the_environment_that_make_makes_is_activated", ".venv/bin/activate"
    ),
    "torchrun --nproc-per-node 4 train.py": Proof(
        "tests/chaos/test_like_torchrun.py::test_the_same_command_line_gives_the_same_job", "TORCHRUN"
    ),
    "python train.py": Proof(
        "tests/chaos/test_commands.py::test_ones_own_trainer_trains_alone_without_a_launcher", '"own_trainer" / "train.py"'
    ),
    "srun ttprun": Proof("tests/chaos/test_schedulers.py::test_a_slurm_job_that_is_taken_away_is_saved_and_requeued", "sbatch"),
    "python -m ttp.trainer.convert from-hf hf_model output": Proof(
        "tests/parity/test_exchange.py::test_their_model_becomes_a_checkpoint_that_training_goes_on_from", "from-hf"
    ),
    "python -m ttp.launch.stores --port 29400": Proof(
        "tests/chaos/test_partings.py::test_a_node_lost_before_its_ranks_are_known_is_told_and_the_others_go_on",
        '"-m", "ttp.launch.stores", "--port"',
    ),
    "python -m tests.model.pairs": Proof(
        "tests/model/test_model.py::test_pairs_of_kinds_are_all_ways_to_have_two_faults", "shape_of("
    ),
    "python -m tests.model --faults 1 --kinds kill": Proof(
        "tests/model/test_model.py::test_no_order_of_faults_and_messages_violates_an_invariant", "faults=1"
    ),
    "python -m tests.simulation.mutations": Proof(
        "tests/simulation/test_mutations.py::test_wrong_variant_is_caught", "tests.simulation.mutations"
    ),
}  # fmt: skip


OF_PARTS: dict[str, dict[str, Proof]] = {
    "docs/chaos.md": {
        "ttp chaos run examples/chaos/kills.yaml -- ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 4000 --save-dir {output}": Proof(
            "tests/chaos/test_harness.py::test_the_documents_campaign_holds", "examples/chaos/kills.yaml"
        ),
        "ttp chaos matrix": Proof(
            "tests/chaos/test_harness.py::test_a_part_of_the_matrix_is_run_and_goes_on_where_it_was", '"matrix"'
        ),
    },
    "docs/mindio.md": {
        "ttprun --nproc-per-node 2 examples/megatron_style/pretrain_gpt.py --save output/megatron_style --train-iters 40": Proof(
            "tests/chaos/test_mindio.py::test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote",
            '"megatron_style" / "pretrain_gpt.py"',
        ),
        "bash examples/megatron_style/ttprun_gpt.sh": Proof(
            "tests/chaos/test_mindio.py::test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote",
            '"ttprun_gpt.sh"',
        ),
        "ttprun --nproc-per-node 3 loop.py": Proof(
            "tests/chaos/test_mindio.py::test_the_documents_loop_goes_on_bit_for_bit", '"loop.py"'
        ),
    },
}  # fmt: skip
"""Commands of a part that has a document of its own; asked for where that document is there."""

for _document, _proofs in OF_PARTS.items():
    if (ROOT / _document).exists():
        for _command, _proof in _proofs.items():
            (PARSED if _command.startswith("ttprun") else TESTED)[_command] = _proof


def documents() -> list[Path]:
    """Return README.md and docs/*.md."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(text: str) -> list[str]:
    """Return the commands that a document shows, each once, in order."""
    found: dict[str, None] = {}
    prose = _FENCE.sub("\n", text)
    for language, block in _FENCE.findall(text):
        if language in _SHELL:
            found |= dict.fromkeys(_lines(block))
    for block in _INDENTED.findall(prose):
        found |= dict.fromkeys(_lines(block))
    for code in _CODE.findall(_INDENTED.sub("\n", prose)):
        found |= dict.fromkeys(_lines(" ".join(code.split())))
    return list(found)


def _lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = re.sub(r"\s+# .*", "", line.strip().removeprefix("$ "))
        words = line.split()
        while words and _SETTING.fullmatch(words[0]):
            words = words[1:]
        if len(words) > 1 and words[0] in PROGRAMS:
            yield line[line.index(words[0]) :].strip()


def all_shown() -> dict[str, list[str]]:
    """Return every command of all documents, with the documents that show it."""
    found: dict[str, list[str]] = {}
    for document in documents():
        for command in shown(document.read_text(encoding="utf-8")):
            found.setdefault(command, []).append(document.relative_to(ROOT).as_posix())
    return found


def is_beginning(command: str, others: list[str]) -> bool:
    """True for `ttp ckpt` where `ttp ckpt list ...` is there: a name, not a command."""
    return any(other.startswith(command + " ") for other in others)
