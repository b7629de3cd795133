"""The example has the code of MindIO's patch for ModelLink, statement for statement, with nothing changed but the names of modules."""

from __future__ import annotations

import ast
import importlib
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.megatron import ROOT, odd_trainer

EXAMPLE = ROOT / "examples" / "megatron_style"
RENAMED = (
    ("mindio_ttp.framework_ttp", "ttp.mindio"),
    ("mindio_ttp.modellink", "ttp.mindio.modellink"),
    ("ascendspeed", "minilink"),
)
SWITCH = """
from ascendspeed import get_ttp_switch
---
enable_ttp = get_ttp_switch()
"""

# Pieces are separated by ---; a header ends in `...`, which stands for what is in its body besides the patch.
BOTH: dict[str, str] = {
    "__init__.py": "from .utils import get_ttp_switch",
    "utils.py": """
def get_ttp_switch():
    enable_ttp = os.getenv('ENABLE_TTP', 'True')
    enable_ttp = enable_ttp.lower() in ('true', '1')
    return enable_ttp
""",
    "optimizer/__init__.py": f"""
{SWITCH}
---
if args.use_distributed_optimizer:
    if args.release_fp32_grad:
        opt_ty = DistributedOptimizerWithoutFP32Grad
    else:
        opt_ty = TTPReplicaOptimizer if enable_ttp else DistributedOptimizer
if enable_ttp:
    return opt_ty(optimizer,
                  args.clip_grad,
                  args.log_num_zeros_in_grad,
                  params_have_main_grad,
                  args.use_contiguous_buffers_in_local_ddp,
                  args.fp16,
                  args.bf16,
                  args.params_dtype,
                  grad_scaler,
                  model, args.local_copy_os)
else:
    return opt_ty(optimizer,
                  args.clip_grad,
                  args.log_num_zeros_in_grad,
                  params_have_main_grad,
                  args.use_contiguous_buffers_in_local_ddp,
                  args.fp16,
                  args.bf16,
                  args.params_dtype,
                  grad_scaler,
                  model)
""",
    "optimizer/clip_grads.py": f"""
{SWITCH}
if enable_ttp:
    from mindio_ttp.modellink.os_shard_parallel import get_os_shard_group
---
torch.distributed.all_reduce(total_norm,
                             op=torch.distributed.ReduceOp.SUM,
                             group=get_os_shard_group() if enable_ttp else parallel_state.get_data_parallel_group())
""",
    "optimizer/optimizer.py": f"""
{SWITCH}
if enable_ttp:
    import mindio_ttp.framework_ttp as ttp
---
if enable_ttp and hasattr(self, 'begin_to_update'):
    self.begin_to_update(args.iteration)
self.optimizer.step()
if enable_ttp and hasattr(self, 'end_to_update'):
    self.end_to_update()
""",
    "checkpointing.py": f"""
{SWITCH}
---
def get_checkpoint_name(checkpoints_path, iteration,
                        release=False, model_name='model_optim_rng.pt', tmp=False): ...
---
if tmp:
    directory = directory + "_tmp"
---
def ttp_save_checkpoint(save_rank, step, rank_list, args):
    iteration, model, optimizer, opt_param_scheduler = args
    if hasattr(optimizer, 'set_dump_args'):
        optimizer.set_dump_args(save_rank, step, rank_list)
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
---
if enable_ttp and args.local_copy_os and optimizer.error_dump and hasattr(optimizer, "save_args") and optimizer.current_step > optimizer.save_args['step']:
    iteration = optimizer.save_args['step']
if enable_ttp:
    tmp = True if optimizer.error_dump else False
    checkpoint_name = get_checkpoint_name(args.save, iteration, tmp=tmp)
else:
    checkpoint_name = get_checkpoint_name(args.save, iteration)
cur_rank = torch.distributed.get_rank()
---
save_flag = optimizer.need_write_file() if enable_ttp else parallel_state.get_data_parallel_rank() == 0
---
if save_flag: ...
---
if not torch.distributed.is_initialized() or save_flag or args.deepspeed: ...
---
if enable_ttp and optimizer.error_dump:
    print('rank {{}} successfully saved checkpoint at iteration {{:7d}} to {{}}'.format(
        cur_rank, iteration, args.save))
else:
    save_checkpoint_post_process(iteration)
---
def rename_save_result(args):
    iteration = args[0]
    optimizer = args[2]
    args = get_args()
    src_path = None
    dst_path = None

    if args.local_copy_os and hasattr(optimizer, "save_args") and optimizer.current_step > optimizer.save_args['step']:
        iteration = optimizer.save_args['step']
    try:
        tmp_dir = 'iter_{{:07d}}_tmp'.format(iteration)
        fin_dir = 'iter_{{:07d}}'.format(iteration)
        src_path = os.path.join(args.save, tmp_dir)
        dst_path = os.path.join(args.save, fin_dir)
        os.rename(src_path, dst_path)
    except Exception:
        print(f"rename from {{src_path}} to {{dst_path}} failed.")
        traceback.print_exc()
        return 1

    # And update the latest iteration
    tracker_filename = get_checkpoint_tracker_filename(args.save)
    with open(tracker_filename, 'w') as f:
        f.write(str(iteration))
    return 0
""",
    "training.py": f"""
{SWITCH}
if enable_ttp:
    import mindio_ttp.framework_ttp as ttp
    from mindio_ttp.modellink import get_dp_rank_list
    from ascendspeed.checkpointing import ttp_save_checkpoint, rename_save_result
---
if enable_ttp and hasattr(optimizer, "current_step"):
    optimizer.current_step = args.iteration
    print(f"optimizer current step has been set to {{optimizer.current_step}}")
---
if enable_ttp and (not args.local_copy_os):
    torch.distributed.barrier()
---
if enable_ttp:
    # init processor and controller
    cur_rank = torch.distributed.get_rank()
    world_size: int = torch.distributed.get_world_size()
    dp_ranks = DP_RANKS

    import os
    masterIp = os.getenv('MASTER_ADDR', '127.0.0.1')
    port = 8000
    if cur_rank == 0:
        ttp.ttp_init_controller(cur_rank, world_size, replica=REPLICA, enable_local_copy=args.local_copy_os)
        ttp.ttp_start_controller(masterIp, port)
    ttp.ttp_init_processor(cur_rank, dp_ranks, len(dp_ranks), world_size, replica=REPLICA, enable_local_copy=args.local_copy_os)
    ttp.ttp_start_processor(masterIp, port)
    ttp.ttp_register_save_ckpt_handler(ttp_save_checkpoint)
    ttp.ttp_register_rename_handler(rename_save_result)
---
iteration += 1
if enable_ttp:
    if hasattr(optimizer, "current_step") and iteration != optimizer.current_step:
        print_rank_0(f"refresh optimizer step {{iteration}}")
    ttp.ttp_set_ckpt_args((iteration, model, optimizer, lr_scheduler))
---
if enable_ttp:
    train = ttp.ttp_to_persist(train)
""",
    "arguments.py": """
group.add_argument('--local-copy-os',
                   action='store_true',
                   default=False,
                   help='barrier or local copy os, suggest barrier on small cluster')
""",
}
EVEN: dict[str, str] = {
    "optimizer/__init__.py": """
if enable_ttp:
    from mindio_ttp.modellink import TTPReplicaOptimizer
""",
    "core/parallel_state.py": f"""
{SWITCH}
if enable_ttp:
    from mindio_ttp.modellink import build_optimizer_replica_group
---
group = torch.distributed.new_group(ranks)
if enable_ttp:
    build_optimizer_replica_group(list(ranks))
""",
}
ODD: dict[str, str] = {
    "optimizer/__init__.py": """
if enable_ttp:
    from mindio_ttp.modellink import TTPOddReplicaOptimizer as TTPReplicaOptimizer
""",
    "core/parallel_state.py": """
def get_data_parallel_all_rank():
    assert _DATA_PARALLEL_GLOBAL_RANKS is not None, \\
        "Data parallel group is not initialized"
    return _DATA_PARALLEL_GLOBAL_RANKS
""",
}
CHOSEN = {
    "even": {"DP_RANKS": "get_dp_rank_list()", "REPLICA": "len(dp_ranks)//2"},
    "odd": {"DP_RANKS": "parallel_state.get_data_parallel_all_rank()", "REPLICA": "2"},
}
SCRIPT = """
ttprun $DISTRIBUTED_ARGS
export TTP_OT=${TTP_OT:-360}
export ENABLE_TTP=${ENABLE_TTP:-True}
DISTRIBUTED_ARGS="--nproc_per_node $NPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
--use-distributed-optimizer
--save $CHECKPOINT_PATH
"""


class _Plain(ast.NodeTransformer):
    """Takes off annotations, and one import has one name, in the order of their texts: how a linter sorts them is not part of the patch."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.ImportFrom]:
        return [ast.ImportFrom(node.module, [name], node.level) for name in node.names]


def lines_of(code: str) -> list[str]:
    """Return the lines of the code as Python itself writes them, without indentation, runs of imports sorted."""
    lines = [line.strip() for line in ast.unparse(_Plain().visit(ast.parse(code))).splitlines() if line.strip()]
    found: list[str] = []
    imports: list[str] = []
    for line in [*lines, ""]:
        if line.startswith(("import ", "from ")):
            imports.append(line)
        else:
            found += [*sorted(imports), line]
            imports = []
    return found[:-1]


def missing(folder: Path, patch: dict[str, str], chosen: dict[str, str]) -> list[str]:
    """Return the patch's pieces that the trainer in `folder` has not."""
    found = []
    for file, blocks in patch.items():
        has = lines_of((folder / "minilink" / file).read_text())
        for block in blocks.split("\n---\n"):
            for old, new in (*RENAMED, *chosen.items()):
                block = block.replace(old, new)
            code = textwrap.dedent(block).strip().removesuffix("...")
            piece = lines_of(block) if code == textwrap.dedent(block).strip() else lines_of(code + "pass")[:-1]
            # `from x import y` may be one of several there, sorted between others
            loose = all(line.startswith("from ") for line in piece)
            starts = range(len(has) - len(piece) + 1)
            if not (set(piece) <= set(has) if loose else any(has[at : at + len(piece)] == piece for at in starts)):
                found.append(f"{file}: {block.strip()}")
    return found


@pytest.mark.parametrize("size", ["even", "odd"])
def test_the_example_is_the_documents_patch(size: str, tmp_path: Path) -> None:
    """Steps 1 to 9, for even sizes and with `odd_sizes.patch` for odd ones."""
    folder = EXAMPLE if size == "even" else Path(odd_trainer(tmp_path)).parent
    own, other = (EVEN, ODD) if size == "even" else (ODD, EVEN)
    assert missing(folder, BOTH, CHOSEN[size]) == [] == missing(folder, own, {})
    assert len(missing(folder, other, {})) >= 2, "one of the two is in force"


def test_a_piece_that_is_not_there_is_missed(tmp_path: Path) -> None:
    """The comparison can fail: one statement of the save handler is another."""
    path = Path(odd_trainer(tmp_path)).parent / "minilink" / "checkpointing.py"
    path.write_text(path.read_text().replace("set_dump_args(save_rank, step", "set_dump_args(save_rank, iteration"))
    (reported,) = missing(path.parents[1], BOTH, CHOSEN["odd"])
    assert reported.startswith("checkpointing.py: def ttp_save_checkpoint")


def test_the_launch_script_is_the_documents() -> None:
    """Step 10: ttprun for torchrun, the variables that are exported, and the arguments."""
    script = [line.split(" #")[0].strip(" \\") for line in (EXAMPLE / "ttprun_gpt.sh").read_text().splitlines()]
    assert [line for line in SCRIPT.strip().splitlines() if line not in script] == []
    assert any(line.startswith("export MASTER_ADDR=") for line in script)


@pytest.mark.parametrize(("options", "step"), [((), 5), (("--local-copy-os",), 4)])
def test_the_rename_handler_prints_the_documents_line_or_moves_directory_and_tracker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    step: int,
) -> None:
    """Steps 7 and 9: 1, a line and a traceback while there is nothing to rename; with local copies the step that was saved is the older one."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    arguments: Any = importlib.import_module("minilink.arguments")
    with pytest.raises(SystemExit):
        arguments.parse_args(["--save", str(tmp_path)])
    assert "TTP needs --use-distributed-optimizer" in capsys.readouterr().err
    assert arguments.parse_args(["--use-distributed-optimizer", "--save", str(tmp_path)]).local_copy_os is False
    arguments.parse_args(["--use-distributed-optimizer", "--save", str(tmp_path), *options])
    checkpointing: Any = importlib.import_module("minilink.checkpointing")
    given = (5, None, SimpleNamespace(current_step=5, save_args={"step": 4}), None)
    before, behind = tmp_path / f"iter_{step:07d}_tmp", tmp_path / f"iter_{step:07d}"
    assert checkpointing.rename_save_result(given) == 1
    output = capsys.readouterr()
    assert output.out == f"rename from {before} to {behind} failed.\n" and "FileNotFoundError" in output.err
    before.mkdir()
    assert checkpointing.rename_save_result(given) == 0
    assert behind.is_dir() and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
