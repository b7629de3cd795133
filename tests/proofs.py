"""What proves each command that the documents show: it is run as it stands, or a test of its own is named.

Owns the tables `RUN`, `PARSED`, `TESTED` and `WARNED`. A command that stands in a document (`tests/shown.py`) and in no table fails
`tests/unit/house/test_shown_commands.py`; so does an entry that no document shows any more, and a test that does not say the words
of its command.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Proof(NamedTuple):
    """A command that is slow, starts processes, or needs another machine: the test that runs it."""

    test: str
    """`tests/...py::test_name`; it says every decisive word of the command (`tests.reach`)."""
    instead: Mapping[str, str] = MappingProxyType({})
    """What the test says in the place of a word: another script than the reader's own, the module that a target runs."""


RUN: dict[str, str] = {
    "ttp ckpt list output/checkpoints": "",
    "ttp ckpt list /tmp/ttp_killed": "ttp ckpt list output/checkpoints",
    "python -m ttp.doctor.health_check": "",
    "ttp ckpt inspect output/checkpoints": "",
    "ttp ckpt verify output/checkpoints": "",
    "ttp ckpt verify output/checkpoints/iter_0000042": "",
    "ttp ckpt diff output/checkpoints other/checkpoints": "",
    "ttp ckpt diff A B": "ttp ckpt diff output/checkpoints/iter_0000042 other",
    "ttp ckpt export output/checkpoints gpt.safetensors --to safetensors": "",
    "ttp ckpt export output/checkpoints everything.pt --to torch --all": "",
    "ttp ckpt export output model_for_transformers --to hf --dtype bfloat16": "",
    "ttp ckpt prune output/checkpoints --keep 3": "",
    "ttp ckpt prune output/checkpoints --keep 3 --yes": "",
    "ttp ckpt prune nodes/a/checkpoints nodes/b/checkpoints --keep 3": "",
    "ttp ckpt prune PATH --keep N": "ttp ckpt prune output --keep 2",
    "ttp ckpt prune PATH ... --keep N": "ttp ckpt prune nodes/a/checkpoints nodes/b/checkpoints --keep 1",
    "ttp ckpt keygen job7": "ttp ckpt keygen job8",
    "ttp ckpt sign output/checkpoints --sign-key job7.pem": "",
    "ttp ckpt sign --sign-key job7.pem output/checkpoints/iter_0000040": "",
    "ttp ckpt verify --key job7.pub.pem output/checkpoints": "ttp ckpt verify --key job7.pub.pem signed/checkpoints",
    "ttp ckpt COMMAND": "ttp ckpt list output",
    "python -m ttp.checkpoint COMMAND": "python -m ttp.checkpoint list output",
    "python -m ttp.goodput": "",
    "python -m ttp.goodput --ranks 1024 --fault process=5e-6 --fault node=1.5e-5 --fault lost=2e-7 --detect-s 10 --restart-s 300": "",
    "python -m ttp.goodput --ranks 4096 --like byterobust --simulate 20 --days 30": "",
    "python -m ttp.trainer --help": "",
    "python -m ttp.trainer --config gpt_70b --plan --world-size 1024": "",
    "python -m ttp.trainer --config gpt2_13b_mp2_pp4 --plan --world-size 32": "",
    "python -m ttp.trainer --config gpt2_13b --plan --search --world-size 32 --global-batch 96 --memory 31GB": "",
    "ttp ckpt export output merged.pt --to torch": "",
    "python -m ttp.trainer --config NAME --plan --world-size N": "python -m ttp.trainer --config gpt_tiny --plan --world-size 2",
    "python -m ttp.trainer.prepare my_texts/ corpus --tokenizer tokenizer.json": "",
    "python -m ttp.trainer.prepare INPUT OUTPUT [--tokenizer PATH]": "python -m ttp.trainer.prepare my_texts corpus",
    'python -m ttp.trainer.generate --checkpoint output --prompt "The list " --max-new-tokens 300': "",
    "python -m ttp.trainer.generate --checkpoint DIR --prompt TEXT":
        "python -m ttp.trainer.generate --checkpoint output/checkpoints --prompt The --max-new-tokens 2",
    "python -m ttp.trainer.convert to-hf output hf_model": "",
    "python -m ttp.trainer.convert {to-hf,from-hf} INPUT OUTPUT": "python -m ttp.trainer.convert to-hf output/checkpoints hf_model",
    "ttp chaos faults": "",
    "ttp chaos check SCENARIO": "ttp chaos check {examples}/chaos/kinds.yaml",
    "ttp chaos report RESULT.json": "ttp chaos report result.json",
    "ttp chaos matrix --table": "",
    "ttp chaos matrix --nodes": "ttp chaos matrix --nodes --table",
    "python -m ttp.controller.replay output/log/journal_0.jsonl": "",
    "python -m tests.simulation.replay SEED": "python -m tests.simulation.replay 3",
    "python -m tests.simulation.script FILE...": "python -m tests.simulation.script {scenarios}/all_replicas_gone.txt",
    "python -m tests.simulation.mutants --help": "",
    "python -m tests.simulation.mutations": "python -m tests.simulation.mutations 'gate stays open'",
    "python -m tests.model --faults N --steps N --kinds KIND": "python -m tests.model --faults 1 --steps 1 --kinds raise --limit 2000",
    "python -m tests.model --faults 1 --kinds kill": "python -m tests.model --faults 1 --kinds kill --limit 2000",
}  # fmt: skip
"""Run by the test in a folder with a small run's output, as it stands or with what takes the place of its placeholders; status 0 is expected."""

_COMMANDS = "tests/chaos/test_commands.py"
_HARNESS = "tests/chaos/test_harness.py"
_MAKE = "tests/chaos/test_make.py"
_DRAIN = "tests/chaos/test_drain.py::test_a_spare_takes_the_place_of_a_drained_node"
_SICK = "tests/chaos/test_sick_nodes.py"
_OTHERS = "tests/chaos/test_other_trainers.py"
_LOOPS = f"{_OTHERS}::test_the_documents_loops_killed_twice_have_the_baseline_run_s_bits"
_GPT = "tests/chaos/test_mindformers_gpt.py"
_TRANSLATION = "tests/chaos/test_translation.py"
_PAIRS = "tests/unit/examples/test_translation.py"
_SLURM = "tests/chaos/test_slurm.py"
_TABLES = "tests/unit/examples/test_gpt2_13b.py::test_tables_are_made_on_each_machine_and_merged"
_DISTRIBUTED = "tests/chaos/test_gpt2_13b.py::test_two_machines_train_the_documents_split_and_predict"
_OWN = {"train.py": "own_trainer/train.py"}
"""For the reader's own trainer."""
_READ = dict.fromkeys(("--nproc-per-node", "own_trainer/train.py", "--steps", "--save-dir"), "tests.shown.shown")
"""For what a test reads from the document and takes word by word."""
_WORKER = {"train.py": "worker.py"}
"""The same, where the launcher alone is looked at."""

_PAGE = "tests/chaos/test_status_page.py::test_the_page_moves_with_the_lead_and_events_reach_the_command"
_TRAINER = {"train.py": "ttp.trainer"}

PARSED: dict[str, Proof] = {
    "ttprun --help": Proof("tests/chaos/test_installed.py::test_an_installed_copy_has_its_commands", {"ttp.launch": "ttprun"}),
    "ttprun --nproc-per-node 4 train.py": Proof(f"{_COMMANDS}::test_ones_own_trainer_is_protected", _OWN),
    "ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 80 --save-dir /tmp/own_trainer":
        Proof(f"{_COMMANDS}::test_ones_own_trainer_is_protected"),
    "ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 80 --save-dir /tmp/ttp_killed":
        Proof(f"{_COMMANDS}::test_ones_own_trainer_is_protected"),
    "ttprun --nproc-per-node 4 examples/own_trainer/train.py --steps 200 --save-dir /tmp/own_trainer":
        Proof(f"{_COMMANDS}::test_ones_own_trainer_is_protected"),
    "ttprun --secret-file /shared/job.secret --nnodes 4 --rdzv-backend c10d --rdzv-endpoint node-0:29400 train.py":
        Proof("tests/chaos/test_who_gets_in.py::test_two_nodes_with_a_secret_file_survive_a_kill_and_show_the_secret_nowhere", _WORKER),
    "ttprun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400 train.py":
        Proof("tests/chaos/test_launch.py::test_survivors_on_two_nodes_are_held_and_all_restart", _WORKER),
    "ttprun --nnodes 2 --node-rank 0 --master-addr node-a --master-port 29500 --nproc-per-node 8 train.py":
        Proof("tests/chaos/test_launch.py::test_survivors_on_two_nodes_are_held_and_all_restart", _WORKER),
    "ttprun --nnodes 3:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400,node-b:29400 train.py":
        Proof(
            "tests/chaos/test_nodes.py::test_the_job_goes_on_with_fewer_nodes_and_takes_the_lost_one_in_again",
            {"train.py": "ttp.trainer"},
        ),
    "ttprun --spare-node --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400,node-b:29400 train.py":
        Proof("tests/chaos/test_spare_nodes.py::test_a_spare_takes_the_place_of_a_lost_node", _WORKER),
    'ttprun --health-check "builtin --save-dirs output/checkpoints" --nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node-a:29400,node-b:29400 train.py':
        Proof(f"{_SICK}::test_a_node_that_is_sick_after_a_fault_gives_its_place_to_the_spare", _TRAINER),
    "ttprun --health-check builtin --on-event 'sh examples/slurm/drain_sick_node.sh' train.py":
        Proof(
            f"{_SICK}::test_a_node_that_is_sick_after_a_fault_gives_its_place_to_the_spare",
            {**_TRAINER, "sh examples/slurm/drain_sick_node.sh": "--on-event"},
        ),
    "ttp drain node-b --rdzv-endpoint node-a:29400,node-b:29400 --rdzv-id job7 --secret-file job.secret":
        Proof(_DRAIN, {"ttp.launch.drain": "drain", "node-b": "leaves.name"}),
    "ttp drain NODE": Proof(_DRAIN, {"ttp.launch.drain": "drain"}),
    "ttprun --status-port 9105 train.py": Proof(_PAGE, _TRAINER),
    "ttprun --status-port 9105 --status-token-file job.token train.py": Proof(_PAGE, _TRAINER),
    "ttprun --on-event 'python examples/monitoring/slack.py' train.py":
        Proof(_PAGE, {**_TRAINER, "python examples/monitoring/slack.py": "--on-event"}),
    "ttprun [torchrun's arguments] -m ttp.trainer --config gpt_tiny [--section.key value ...]":
        Proof("tests/chaos/test_kills.py::test_kill_at_every_point_of_a_step_loses_nothing"),
    "ttprun --nproc-per-node 8 -m ttp.trainer --config gpt2_124m --dataset_config.dataset_dir corpus":
        Proof(f"{_COMMANDS}::test_text_is_prepared_once_and_trained_on"),
    "ttprun --sign-key job7.pem --verify-key job7.pub.pem --nproc-per-node 4 train.py":
        Proof("tests/chaos/test_signed.py::test_a_killed_job_resumes_what_it_has_signed_and_nothing_else", _WORKER),
    "ttprun --rank_table_file hccl.json train.py":
        Proof("tests/chaos/test_rank_table.py::test_a_rank_table_places_the_ranks_of_two_nodes", _WORKER),
    "ttprun --no-python ./wrap.sh": Proof("tests/chaos/test_wrapped.py::test_ranks_behind_shells_save_at_a_kill_and_at_a_notice"),
    "ttprun --nproc-per-node 2 examples/megatron_style/pretrain_gpt.py --use-distributed-optimizer --save output/megatron_style --train-iters 40":
        Proof("tests/chaos/test_mindio.py::test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote"),
    "ttprun --nproc-per-node 8 examples/megatron_style/pretrain_gpt.py --use-distributed-optimizer --save output/split"
    " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2":
        Proof("tests/chaos/test_mindio_split.py::test_a_split_model_goes_on_bit_for_bit_after_kills_at_every_phase"),
    "ttprun --nproc-per-node 3 loop.py": Proof("tests/chaos/test_mindio.py::test_the_documents_loop_goes_on_bit_for_bit"),
    "ttprun --nproc-per-node 2 examples/your_trainer/nanogpt.py": Proof(_LOOPS),
    "ttprun --nproc-per-node 2 examples/your_trainer/accelerate_loop.py": Proof(_LOOPS),
    "ttprun --nproc-per-node 2 examples/your_trainer/ddp_sampler.py": Proof(_LOOPS),
    "ttprun --nproc-per-node 2 examples/megatron_core/train.py":
        Proof("tests/chaos/test_megatron_core.py::test_a_distributed_optimizer_killed_twice_has_the_bits_of_the_trainer_without_ttp"),
    "ttprun --nproc-per-node 2 train.py":
        Proof("tests/chaos/test_accelerate_launch.py::test_a_script_of_accelerate_killed_twice_has_the_baseline_run_s_bits",
              {"train.py": "your_trainer/accelerate_loop.py"}),
    "ttprun --nproc-per-node 2 examples/lightning/train.py":
        Proof("tests/chaos/test_lightning.py::test_lightnings_trainer_killed_twice_has_the_baseline_run_s_bits"),
    "ttprun --nproc-per-node 2 examples/ddp/shortest.py":
        Proof(f"{_OTHERS}::test_the_shortest_form_has_the_bits_of_the_trainer_without_ttp"),
    "ttprun --nproc-per-node 2 examples/ddp/train.py": Proof(
        "tests/chaos/test_rehearsal.py::test_protected_trainers_give_the_baselines_losses_and_weights"
    ),
    "ttprun --nproc-per-node 2 examples/ddp/train.py --optimizer SGD": Proof(f"{_OTHERS}::test_ddp_survives_with_any_optimizer"),
    "ttprun --nproc-per-node 4 examples/hsdp/train.py --replicate 1 --copies":
        Proof("tests/chaos/test_copies.py::test_the_example_goes_on_a_few_steps_back"),
    "ttprun --nproc-per-node 4 examples/hsdp/train.py --replicate 2": Proof(f"{_OTHERS}::test_hsdp_survives_the_death_of_a_rank"),
    "ttprun --nproc-per-node 2 examples/huggingface/main_hf.py --model_name_or_path PATH --dataset_name_or_path FILE --batch_size 4":
        Proof(
            "tests/chaos/test_main_hf.py::test_kills_within_an_update_and_an_evaluation_change_no_bit",
            {"huggingface/main_hf.py": "main_hf.py", "--dataset_name_or_path": "wikitext", "--nproc-per-node": "--nproc_per_node"},
        ),
    "ttprun --nproc-per-node 2 examples/huggingface/trainer.py --steps 40":
        Proof(f"{_OTHERS}::test_the_trainer_of_transformers_survives_the_death_of_a_rank"),
    "ttprun --nproc-per-node 8 train.py --distribute true --mp 4 --batch_size 64":
        Proof(f"{_TRANSLATION}::test_ttprun_starts_the_program_itself"),
    "ttprun --no-python --nproc-per-node 8 examples/translation/on_device.sh FOLDER train.py --distribute=true":
        Proof(f"{_TRANSLATION}::test_ttprun_starts_the_program_itself", {"translation/on_device.sh": "on_device.sh"}),
}  # fmt: skip
"""Command lines of `ttprun`: its parser takes each as it stands (without what is in brackets), and a test runs one like it."""

_URLS = "tests/unit/mirror/test_urls.py::test_checkpoints_of_a_url_are_listed_inspected_verified_compared_and_exported"

TESTED: dict[str, Proof] = {
    "ttp ckpt list s3://bucket/job7": Proof(_URLS),
    "ttp ckpt verify s3://bucket/job7/iter_0000042": Proof(_URLS),
    "ttp ckpt diff output/checkpoints s3://bucket/job7": Proof(_URLS),
    "ttp ckpt export s3://bucket/job7 gpt.safetensors --to safetensors": Proof(_URLS),
    "make demo": Proof(f"{_COMMANDS}::test_the_demo_survives_the_death_of_rank_0"),
    "make demo KILL_RANK=0": Proof(f"{_COMMANDS}::test_the_demo_survives_the_death_of_rank_0"),
    "make chaos": Proof(f"{_COMMANDS}::test_random_kills_find_nothing", {"make": "ttp.chaos.kills", "chaos": "ttp.chaos.kills"}),
    "make test": Proof("tests/unit/house/test_shown_commands.py::test_make_runs_what_there_is"),
    "make check": Proof("tests/unit/house/test_shown_commands.py::test_make_runs_what_there_is"),
    "make flaky": Proof(
        "tests/unit/house/test_flaky.py::test_a_test_that_fails_once_is_found_and_a_run_that_was_interrupted_goes_on",
        {"make": "flaky.main", "flaky": "flaky.main"},
    ),
    "make docs-site": Proof(
        "tests/unit/house/test_site.py::test_the_site_builds_and_every_link_leads_somewhere", {"make": "mkdocs", "docs-site": "build"}
    ),
    "make newest": Proof("tests/unit/house/test_shown_commands.py::test_make_runs_what_there_is"),
    "make soak": Proof(f"{_MAKE}::test_soak_is_jobs_by_seed_and_pairs_of_faults_and_kills"),
    "make bench BENCH=recovery": Proof(f"{_MAKE}::test_a_benchmark_reports_whether_its_limit_was_kept"),
    "make bench BENCH=peers": Proof(f"{_MAKE}::test_a_benchmark_reports_whether_its_limit_was_kept"),
    "python -m benchmarks.peers --write-docs": Proof("tests/unit/benchmarks/test_peers.py::test_an_earlier_run_is_written_into_the_document"),
    "make bench": Proof(f"{_MAKE}::test_a_benchmark_reports_whether_its_limit_was_kept"),
    "make mutants": Proof(
        "tests/simulation/test_by_seeds.py::test_so_many_in_one_go_and_the_next_ones_in_the_next",
        {"make": "by_seeds.main", "mutants": "by_seeds.main"},
    ),
    "make docs": Proof(
        "tests/unit/house/test_document.py::test_generated_tables_are_not_stale",
        {"make": "tests.document", "docs": "tests.document"},
    ),
    "pip install .": Proof("tests/chaos/test_installed.py::test_an_installed_copy_has_its_commands"),
    "source .venv/bin/activate":
        Proof("tests/unit/house/test_shown_commands.py::test_the_environment_that_make_makes_is_activated"),
    "torchrun --nproc-per-node 4 train.py": Proof("tests/chaos/test_like_torchrun.py::test_the_same_command_line_gives_the_same_job", _WORKER),
    "torchrun --nproc-per-node 2 examples/megatron_style/pretrain_gpt.py --save output/plain":
        Proof("tests/chaos/test_mindio.py::test_enable_ttp_false_is_the_trainer_as_it_was"),
    "python train.py": Proof(f"{_COMMANDS}::test_ones_own_trainer_trains_alone_without_a_launcher"),
    "python examples/own_trainer/train.py": Proof(f"{_COMMANDS}::test_ones_own_trainer_trains_alone_without_a_launcher"),
    "python -m ttp.trainer --config NAME_OR_PATH [--section.key value ...]": Proof(f"{_COMMANDS}::test_checkpoints_can_be_looked_at"),
    "python hccl_tools.py --device_num \"[0,8)\" --server_ip 10.0.0.1": Proof(_TABLES),
    "python tools/hccl_tools.py --device_num \"[0,8)\" --server_ip 10.155.111.140":
        Proof(_TABLES, {"tools/hccl_tools.py": "hccl_tools.py"}),
    "python merge_hccl.py hccl_a.json hccl_b.json": Proof(_TABLES),
    "python tools/merge_hccl.py hccl_8p_01234567_10.155.111.14*.json":
        Proof(_TABLES, {"tools/merge_hccl.py": "merge_hccl.py"}),
    "bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_MODE RANK_SIZE": Proof(_DISTRIBUTED),
    "bash run_distribute.sh ../hccl_4s_32p.json ../configs/gpt2/run_gpt2_13b.yaml [0,8] train 32":
        Proof(_DISTRIBUTED, {"../configs/gpt2/run_gpt2_13b.yaml": "run_gpt2_13b.yaml"}),
    "python preprocess.py": Proof(f"{_PAIRS}::test_wmt14_becomes_pairs_in_both_directions_and_a_tokenizer"),
    "python preprocess.py --source corpus.en --target corpus.fr":
        Proof(f"{_PAIRS}::test_two_aligned_files_and_one_of_pairs_become_the_same"),
    "python preprocess.py --pairs corpus.txt": Proof(f"{_PAIRS}::test_two_aligned_files_and_one_of_pairs_become_the_same"),
    "python preprocess.py --numerals 4000":
        Proof(f"{_TRANSLATION}::test_the_documents_commands_train_on_two_devices"),
    "bash run.sh DATA_PATH RANK_SIZE": Proof(f"{_TRANSLATION}::test_the_documents_commands_train_on_two_devices"),
    "bash run.sh /path/output/wmt14.fr_en.txt 8": Proof(f"{_TRANSLATION}::test_eight_devices_train_the_documents_split"),
    "bash run_cluster.sh DATA_PATH RANK_TABLE_FILE RANK_SIZE RANK_START": Proof(f"{_TRANSLATION}::test_two_machines_train_two_stages"),
    "bash run_parallel_save_ckpt.sh DATA_PATH": Proof(f"{_TRANSLATION}::test_a_checkpoint_is_recovered_under_another_layout"),
    "bash run_parallel_recover_ckpt.sh DATA_PATH": Proof(f"{_TRANSLATION}::test_a_checkpoint_is_recovered_under_another_layout"),
    "python -m ttp.trainer.convert from-hf hf_model output":
        Proof("tests/parity/test_exchange.py::test_their_model_becomes_a_checkpoint_that_training_continues_from"),
    "python -m ttp.controller --job-id J --world-size W --journal PATH":
        Proof(
            "tests/unit/runtime/test_runtime.py::test_a_shutdown_request_ends_the_controller_and_frees_its_port",
            {"--job-id": "job_id", "--world-size": "world_size"},
        ),
    "python -m ttp.launch": Proof(f"{_COMMANDS}::test_ones_own_trainer_is_protected"),
    "python -m ttp.launch.stores --port 29400":
        Proof("tests/chaos/test_partings.py::test_a_node_lost_before_its_ranks_are_known_is_reported_and_the_others_go_on"),
    "bash examples/gpt/pretrain_gpt.sh": Proof(f"{_GPT}::test_the_script_starts_with_its_own_configuration", {"gpt/pretrain_gpt.sh": "pretrain_gpt.sh"}),
    "bash examples/gpt/pretrain_gpt.sh xx.yaml": Proof(f"{_GPT}::test_the_documents_command_goes_on_after_a_kill", {"gpt/pretrain_gpt.sh": "pretrain_gpt.sh"}),
    "bash pretrain_gpt.sh": Proof(f"{_GPT}::test_the_script_starts_with_its_own_configuration"),
    "bash pretrain_gpt.sh xx.yaml": Proof(f"{_GPT}::test_the_documents_command_goes_on_after_a_kill"),
    "python examples/gpt/pretrain_gpt.py --config_path run.yaml": Proof(f"{_GPT}::test_the_python_script_takes_the_documents_arguments", {"gpt/pretrain_gpt.py": "pretrain_gpt.py"}),
    "bash examples/megatron_style/ttprun_gpt.sh": Proof("tests/chaos/test_mindio.py::test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote"),
    "bash examples/megatron_style/ttprun_gpt.sh --train-iters 40": Proof("tests/chaos/test_mindio.py::test_two_ranks_go_on_from_the_checkpoint_that_the_trainers_handlers_wrote"),
    "bash examples/megatron_style/ttprun_gpt.sh --local-copy-os": Proof("tests/chaos/test_mindio.py::test_four_ranks_with_local_copies_in_bf16_meet_three_faults"),
    "srun ttprun": Proof(
        "tests/chaos/test_schedulers.py::test_a_slurm_job_that_is_taken_away_is_saved_and_requeued",
        {"ttp.launch": "slurm/train.sbatch"},
    ),
    "sbatch examples/slurm/train.sbatch --config gpt_7b --training_config.output_dir /shared/run1":
        Proof(f"{_SLURM}::test_a_killed_rank_comes_back_and_a_cancelled_job_is_saved"),
    "scancel --batch --signal=TERM": Proof(f"{_SLURM}::test_a_job_that_is_taken_away_is_saved_requeued_and_goes_on"),
    "scancel --signal=TERM": Proof(f"{_SLURM}::test_a_job_that_is_taken_away_is_saved_requeued_and_goes_on"),
    "kubectl apply -f examples/kubernetes/job.yaml": Proof(
        "tests/unit/examples/test_kubernetes.py::test_every_document_follows_the_schema_of_its_kind",
        {"kubectl": "kubernetes_validate"},
    ),
    "kubectl apply -f examples/kubernetes/trainjob.yaml": Proof(
        "tests/unit/examples/test_trainjob.py::test_the_api_takes_both_documents_whole",
        {"kubectl": "kubernetes_validate"},
    ),
    "ttp chaos run examples/chaos/kills.yaml -- ttprun --nproc-per-node 2 examples/own_trainer/train.py --steps 4000 --save-dir {output}":
        Proof(f"{_HARNESS}::test_the_documents_campaign_holds", _READ),
    "ttp chaos run examples/chaos/kinds.yaml -- ttprun --nproc-per-node 4 --max-restarts 100 -m ttp.trainer --config gpt_tiny"
    " --training_config.output_dir {output} --training_config.training_iters 400":
        Proof(f"{_HARNESS}::test_one_of_each_kind_is_survived_and_reported"),
    "ttp chaos run examples/chaos/full_disk.yaml -- ttprun --nproc-per-node 4 -m ttp.trainer --config gpt_tiny"
    " --training_config.output_dir {output} --training_config.save_dirs=[{disk},{output}/second]":
        Proof(f"{_HARNESS}::test_a_disk_that_is_full_for_real_falls_through_to_the_next"),
    "ttp chaos run examples/chaos/nodes.yaml -- ttprun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id job"
    " --rdzv-endpoint {endpoints} --rdzv-conf join_timeout=240,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
    " --max-restarts 100 --ttp-futile-starts 0 -m ttp.trainer --config gpt_tiny --training_config.output_dir {output}"
    " --training_config.training_iters 500": Proof(f"{_HARNESS}::test_every_fault_of_two_nodes_costs_no_step_and_no_bit"),
    "ttp chaos matrix": Proof(f"{_HARNESS}::test_a_part_of_the_matrix_is_run_and_goes_on_where_it_was"),
    "ttp chaos matrix --in-place": Proof(f"{_HARNESS}::test_a_part_of_the_matrix_in_place_needs_no_restart"),
    "ttp chaos matrix [--output DIR] [--repeat 2] [--per-job 8] [--shard I/N] [--limit CELLS] [--minutes M] [--kinds A,B]":
        Proof(f"{_HARNESS}::test_a_part_of_the_matrix_is_run_and_goes_on_where_it_was"),
    "python -m ttp.chaos.demo [--kill-rank R] [--seed S] [--ranks 4] [--steps 60] [--text FILE_OR_FOLDER] [--output DIR]":
        Proof(f"{_COMMANDS}::test_the_demo_survives_the_death_of_rank_0", {"ttp.chaos.demo": "demo"}),
    "python -m ttp.selftest": Proof("tests/device/test_selftest.py::test_selftest_passes_on_a_hostile_device"),
    "python -m ttp.selftest --device cuda": Proof("tests/device/test_selftest.py::test_selftest_passes_on_a_hostile_device"),
    "python -m ttp.selftest --device cuda [--ranks N] [--kills 3] [--minutes 5] [--seed S] [--output DIR] [trainer overrides]":
        Proof("tests/device/test_selftest.py::test_selftest_passes_on_a_hostile_device"),
    "ttp status [JOB]": Proof("tests/chaos/test_status.py::test_a_job_shows_its_training_its_fault_and_its_end", {"ttp.status.main": "status"}),
    "python -m ttp.trainer --config gpt_tiny --training_config.tensorboard output/tensorboard":
        Proof(_PAGE),
    "ttp status --login": Proof("tests/unit/status_page/test_live_page.py::test_status_prints_where_the_page_is_and_a_link_that_lets_one_browser_in", {"ttp.status.main": "status"}),
    "ttp status --login output": Proof(_PAGE, {"ttp.status.main": "status"}),
    "ttp status output": Proof("tests/chaos/test_status.py::test_a_job_shows_its_training_its_fault_and_its_end", {"ttp.status.main": "status"}),
    "python -m ttp.goodput --job output --ranks 64":
        Proof("tests/unit/goodput/test_main.py::test_times_of_a_job_of_ones_own_count", {"ttp.goodput": "main"}),
    "python -m ttp.goodput --ranks 4096 --plot shares.svg": Proof("tests/unit/goodput/test_main.py::test_a_picture_is_drawn", {"ttp.goodput": "main"}),
    "ttp doctor": Proof("tests/unit/doctor/test_main.py::test_a_node_that_serves_passes_and_is_left_as_it_was", {"ttp.doctor.main": "doctor"}),
    "ttp doctor --config gpt_7b --nproc-per-node 8 --nnodes 4 --save-dirs output/checkpoints":
        Proof("tests/unit/doctor/test_main.py::test_the_layout_is_what_plan_says", {"ttp.doctor.main": "run"}),
    "ttp doctor --listen PORT": Proof("tests/unit/doctor/test_main.py::test_two_nodes_ask_each_other"),
    "ttp doctor --peer HOST:PORT": Proof("tests/unit/doctor/test_main.py::test_two_nodes_ask_each_other"),
    "ttp doctor --listen 29500": Proof("tests/unit/doctor/test_main.py::test_two_nodes_ask_each_other"),
    "ttp doctor --peer node-a:29500": Proof("tests/unit/doctor/test_main.py::test_two_nodes_ask_each_other"),
    "ttp selftest": Proof("tests/unit/selftest/test_main.py::test_the_command_ttp_has_it", {"ttp.selftest.main": "selftest"}),
    "python -m ttp.chaos.kills [--kills 20] [--ranks 4] [--seed S] [--output DIR] [trainer overrides]":
        Proof(f"{_COMMANDS}::test_random_kills_find_nothing"),
    "python -m ttp.chaos.kills --in-place [--twice EVERY] [--spare RANK] [--median-s S] [--p99-s S] [--least-in-place SHARE]":
        Proof(f"{_COMMANDS}::test_random_kills_in_place_find_nothing"),
    "python -m ttp.chaos.kills --in-place --kills 2000 --ranks 3 --median-s 0.5 --p99-s 1.5 --least-in-place 0.98":
        Proof(f"{_COMMANDS}::test_random_kills_in_place_find_nothing"),
    "python -m ttp.chaos.kills --in-place": Proof(f"{_COMMANDS}::test_random_kills_in_place_find_nothing"),
    "python -m ttp.chaos.kills --in-place --kills 200 --ranks 3 --twice 6": Proof(f"{_COMMANDS}::test_random_kills_in_place_find_nothing"),
    "python -m ttp.chaos.kills --in-place --ranks 3 --kills 14": Proof(f"{_COMMANDS}::test_random_kills_in_place_find_nothing"),
    "python slow_cable.py PORT TAP MILLISECONDS":
        Proof(f"{_HARNESS}::test_every_fault_of_two_nodes_costs_no_step_and_no_bit", {"slow_cable.py": "delay"}),
    "python -m tests.fuzz": Proof("tests/unit/cli/test_fuzz_command.py::test_the_fuzz_tests_are_run_with_a_seed"),
    "python -m tests.model.pairs": Proof("tests/model/test_model.py::test_a_pair_is_searched_from_the_command_line"),
    "python -m tests.model.pairs --in-place": Proof("tests/model/test_in_place.py::test_pairs_are_searched_from_the_command_line"),
}  # fmt: skip

TESTED |= {
    f"python -m benchmarks{rest}": Proof(f"{_MAKE}::test_every_benchmark_runs_small")
    for rest in (
        " [NAME ...]",
        " scale",
        ".gradient_accumulation --rounds 3 --length 8",
        ".split_models",
        " gate",
        ".peers --runs 1 --systems ttp_in_place,ttp,torchrun",
        ".restart",
        " death_watch",
        ".death_watch --kills 20",
        ".death_watch --kills 100 100 12 --minutes 3 --poll 0.002 0.01",
        ".false_alarms",
        ".lost_node",
        ".lost_node --cases in-place spare",
        ".lost_node --times 7 --cases in-place spare",
        ".lost_node --against TREE",
        ".stragglers",
        ".step_time",
        ".step_time --world 2x2 --rounds 14 --steps 2",
        ".step_time --world 2x1 --rounds 14 --steps 2",
        ".step_time --world 2x2 --alone --rounds 300 --steps 1 --length 64",
    )
}

WARNED = ("scancel --full", "scancel --full --signal=TERM")
"""Commands that must not be given, as every document says where it names them: no test of ours gives them either."""
