"""The facade's names, argument orders and defaults are MindIO's, and what has no counterpart says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ttp.mindio
from ttp.errors import ConfigError
from ttp.mindio import job, modellink
from ttp.mindio.job import forget_job
from ttp.mindio.modellink import os_shard_parallel

SIGNATURES = {
    "ttp_init_controller": "rank, world_size, replica=2, enable_local_copy=False",
    "ttp_start_controller": "ip, port=8000",
    "ttp_init_processor": "rank, dp_ranks, dp_size, world_size, replica=2, enable_local_copy=False",
    "ttp_start_processor": "ip, port=8000",
    "ttp_register_save_ckpt_handler": "handler",
    "ttp_register_rename_handler": "handler",
    "ttp_set_ckpt_args": "args",
    "ttp_start_updating_os": "backup_step",
    "ttp_end_updating_os": "step",
    "ttp_to_persist": "func",
    "tft_init_controller": "rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False",
    "tft_start_controller": "bind_ip, port, enable_tls=True, tls_info=''",
    "tft_init_processor": "rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, enable_arf=False,"
    " enable_zit=False",
    "tft_start_processor": "master_ip, port, local_ip=''",
    "tft_start_updating_os": "backup_step",
    "tft_start_copy_os": "",
    "tft_end_updating_os": "step",
    "tft_set_optimizer_replica": "rank, replica_info",
    "tft_set_dp_group_info": "rank, dp_rank_list",
    "tft_exception_handler": "func",
    "tft_set_step_args": "args",
    "tft_register_save_ckpt_handler": "func, ctx=None",
    "tft_register_rename_handler": "func, ctx=None",
    "tft_destroy_controller": "",
    "tft_destroy_processor": "",
    "tft_is_reboot_node": "",
    "tft_query_high_availability_switch": "",
    **dict.fromkeys(
        (
            "tft_register_exit_handler",
            "tft_register_stop_handler",
            "tft_register_clean_handler",
            "tft_register_rebuild_group_handler",
            "tft_register_repair_handler",
            "tft_register_rollback_handler",
            "tft_register_stream_sync_handler",
            "tft_register_zit_upgrade_rollback_handler",
            "tft_register_zit_upgrade_repair_handler",
            "tft_register_zit_upgrade_rebuild_handler",
            "tft_register_zit_downgrade_rebuild_handler",
        ),
        "func, ctx=None",
    ),
    "tft_register_exception_handler": "fault_pattern, fault_type, fault_handle",
    "tft_register_decrypt_handler": "decryptor",
    "tft_report_error": "error_type",
    "tft_wait_next_action": "",
    "tft_get_repair_step": "",
    "tft_get_repair_type": "",
    "tft_get_reboot_type": "",
    "tft_reset_limit_step": "",
    "tft_report_load_ckpt_step": "step",
    "tft_notify_controller_dump": "",
    "tft_notify_controller_stop_train": "fault_ranks, stop_type='stop', timeout=None",
    "tft_notify_controller_on_global_rank": "fault_ranks, time=1",
    "tft_notify_controller_prepare_action": "action, fault_ranks=None",
    "tft_notify_controller_change_strategy": "strategy, params=''",
    "tft_register_mindx_callback": "action, func",
    "tft_can_do_uce_repair": "hbm_error_time, start_time=None, end_time=None",
    "tft_set_update_start_time": "start_time=None",
    "tft_set_update_end_time": "end_time=None",
    "tft_pause_train": "cur_step",
}

REGISTERED = sorted(
    name
    for name, given in SIGNATURES.items()
    if given == "func, ctx=None" and "ckpt" not in name and "rename" not in name
)
"""Handlers of repair in place: taken, never called."""

ENUMERATIONS = ("Action", "RepairType", "ReportState")
"""Of repair in place: trainers import them beside `OptimizerType`."""

OPTIMIZER = (
    "optimizer, clip_grad, log_num_zeros_in_grad, params_have_main_grad, use_contiguous_buffers_in_local_ddp, fp16, bf16,"
    " params_dtype, grad_scaler, models, local_copy=False"
)


@pytest.fixture(autouse=True)
def forgets_every_job() -> Iterator[None]:
    """No test leaves what it declared to the next."""
    yield
    forget_job()


def arguments(function: Callable[..., object]) -> str:
    """Return names and defaults, in order, without types."""
    parameters = inspect.signature(function).parameters.values()
    reported = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in parameters if p.name != "self"
    ]
    return ", ".join(reported)


def test_names_orders_and_defaults_are_mindios() -> None:
    """A patched trainer calls by position as well as by name."""
    assert {name: arguments(getattr(ttp.mindio, name)) for name in SIGNATURES} == SIGNATURES
    assert set(ttp.mindio.__all__) == {*SIGNATURES, "OptimizerType", *ENUMERATIONS}


def test_modellink_has_what_the_patch_imports() -> None:
    """Optimizers, groups, and the module path of the group's getter."""
    for kind in (modellink.TTPReplicaOptimizer, modellink.TTPOddReplicaOptimizer):
        assert arguments(kind) == f"{OPTIMIZER}, on_divergence='report'", "MindIO's, and one of our own"
        assert inspect.signature(kind).parameters["on_divergence"].kind is inspect.Parameter.KEYWORD_ONLY
        for method in ("begin_to_update", "end_to_update", "set_dump_args", "need_write_file", "state_dict"):
            assert callable(getattr(kind, method))
        assert arguments(kind.set_dump_args) == "rank, step, rank_list"
        assert arguments(kind.begin_to_update) == "iteration"
    assert arguments(modellink.build_optimizer_replica_group) == "ranks"
    assert arguments(modellink.set_parallel_state) == "parallel_state"
    assert os_shard_parallel.get_os_shard_group is modellink.get_os_shard_group


@pytest.mark.parametrize("name", REGISTERED)
def test_a_handler_of_repair_is_taken_and_something_else_is_not(name: str) -> None:
    """A trainer registers them all; in a cluster without repair none is called."""
    register = getattr(ttp.mindio, name)
    register(lambda *_: pytest.fail("called"), "context")
    with pytest.raises(ConfigError, match=f"^invalid handler of {name}: got 7, expected a function"):
        register(7)


def test_what_asks_for_repair_is_answered_as_without_the_feature(caplog: pytest.LogCaptureFixture) -> None:
    """The values are MindIO's: 0 and 1 for done and not, 0 for no step, `unknown` for no repair."""
    api = ttp.mindio
    assert (api.tft_get_repair_step(), api.tft_get_repair_type(), api.tft_get_reboot_type()) == (
        0,
        "unknown",
        "unknown",
    )
    assert not api.tft_is_reboot_node() and not api.tft_can_do_uce_repair(17, 1, 2)
    nothing: list[Callable[[], object]] = [
        api.tft_reset_limit_step,
        api.tft_set_update_start_time,
        api.tft_set_update_end_time,
        lambda: api.tft_pause_train(3),
        lambda: api.tft_report_load_ckpt_step(3),
        lambda: api.tft_register_exception_handler("FORCE STOP", "RS_UNKNOWN", str),
        lambda: api.tft_register_decrypt_handler(str),
    ]
    assert [call() for call in nothing] == [None] * len(nothing)
    assert (
        api.tft_notify_controller_on_global_rank({1: 1}) == 0 == api.tft_notify_controller_change_strategy("continue")
    )
    refused = [
        api.tft_notify_controller_stop_train({1: 0}),
        api.tft_notify_controller_prepare_action("hot switch"),
        api.tft_notify_controller_change_strategy("recover"),
        api.tft_register_mindx_callback("report_result", print),
        api.tft_notify_controller_dump(),
    ]
    assert refused == [1] * 5, "nothing is protected in this process, so that there is no dump either"
    assert "tft_notify_controller_prepare_action returned 1: 'hot switch' is not available" in caplog.text
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: api.tft_report_error(99), "invalid error_type: got 99"),
        (lambda: api.tft_report_load_ckpt_step(-1), "invalid step: got -1"),
        (lambda: api.tft_notify_controller_change_strategy("none"), "invalid strategy: got 'none'"),
        (lambda: api.tft_register_mindx_callback("none", print), "invalid action: got 'none'"),
        (lambda: api.tft_register_exception_handler("text", "RS_NONE", str), "invalid fault_type: got 'RS_NONE'"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()


def test_the_enumerations_have_mindios_members() -> None:
    """`Action` with MindIO's values, which a trainer compares with what `tft_wait_next_action` returned."""
    assert (ttp.mindio.Action.RETRY.value, ttp.mindio.Action.EXIT.value) == (0, 1)
    states = [
        "RS_NORMAL",
        "RS_UCE",
        "RS_UCE_CORRUPTED",
        "RS_HCCL_FAILED",
        "RS_UNKNOWN",
        "RS_INIT_FINISH",
        "RS_PREREPAIR_FINISH",
        "RS_STEP_FINISH",
    ]
    assert set(states) <= set(ttp.mindio.ReportState.__members__)
    repairs = [
        "RT_SEND",
        "RT_UCE_HIGHLEVEL",
        "RT_UCE_LOWLEVEL",
        "RT_ROLLBACK",
        "RT_RECV_REPAIR",
        "RT_LOAD_CKPT",
        "RT_LOAD_REBUILD",
    ]
    assert set(ttp.mindio.RepairType.__members__) == set(repairs)


def test_encryption_costs_a_warning_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """MindIO's defaults ask for it."""
    ttp.mindio.tft_start_controller("127.0.0.1", 8000)
    ttp.mindio.tft_init_processor(0, 1, False)
    assert caplog.text.count("enable_tls=True, and the connection to the controller is plain") == 1
    assert "repaired" not in caplog.text


@pytest.mark.parametrize(("tls_info", "warned"), [("", False), ("tlsCert: cert.pem", True)])
def test_with_ttpruns_certificates_only_other_ones_are_warned_of(
    tls_info: str, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_IDENTITY", "/some/socket")
    ttp.mindio.tft_start_controller("127.0.0.1", 8000, True, tls_info)
    assert ("tls_info is not read" in caplog.text) == warned
    assert "plain" not in caplog.text


def test_repair_in_place_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ttp.mindio.tft_init_processor(0, 1, False, enable_tls=False, enable_arf=True)
    assert "enable_arf=True: nothing is repaired in place" in caplog.text
    assert "enable_tls" not in caplog.text


def test_what_contradicts_the_job_is_refused_at_the_start() -> None:
    """Ranks, sizes, ports, the order of the calls, and handlers that are none."""
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ttp.mindio.ttp_init_processor(1, [0, 1], 2, 2), "got rank 1 of 2, expected 0 of 1"),
        (lambda: ttp.mindio.ttp_init_processor(0, [0, 1], 1, 1), "as many ranks"),
        (
            lambda: ttp.mindio.ttp_init_processor(0, [0, 1], 2, 1),
            "invalid data-parallel group: got ranks .0, 1., expected .0. as parallel_state reports",
        ),
        (lambda: ttp.mindio.ttp_init_controller(0, 1, -1), "replica: got -1"),
        (lambda: ttp.mindio.ttp_start_controller("127.0.0.1", 80), "port 80"),
        (lambda: ttp.mindio.ttp_start_controller("127.0.0.1", "8000"), "port '8000'"),  # type: ignore[arg-type]
        (lambda: ttp.mindio.ttp_start_processor("127.0.0.1", 8000), "before ttp_init_processor"),
        (lambda: ttp.mindio.ttp_register_save_ckpt_handler(None), "expected a function"),  # type: ignore[arg-type]
        (lambda: ttp.mindio.ttp_set_ckpt_args((1,)), "without an optimizer"),
        (lambda: ttp.mindio.ttp_start_updating_os(-1), "without an optimizer"),
        (modellink.get_dp_rank_list, "no data-parallel group is known"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()
    ttp.mindio.ttp_init_processor(0, [0], 1, 1)
    with pytest.raises(ConfigError, match="without an optimizer"):
        ttp.mindio.ttp_start_processor("127.0.0.1", 8000)


def build(**changes: object) -> modellink.TTPReplicaOptimizer:
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    settings: dict[str, object] = {
        "log_num_zeros_in_grad": False,
        "fp16": False,
        "bf16": False,
        "params_dtype": torch.float32,
        "grad_scaler": None,
        "models": [model],
        **changes,
    }
    given: dict[str, Any] = {"optimizer": adam, "clip_grad": 1.0, "params_have_main_grad": False} | settings
    return modellink.TTPReplicaOptimizer(use_contiguous_buffers_in_local_ddp=False, **given)


def test_what_the_optimizer_cannot_do_is_refused_when_it_is_built() -> None:
    """Each with the argument's name."""

    class Scaler:
        scale, growth_interval, growth_factor, backoff_factor = torch.tensor([1024.0]), 100, torch.tensor([2.0]), 1.5

    wrong: list[tuple[dict[str, object], str]] = [
        ({"bf16": True}, "contradict"),
        ({"bf16": True, "fp16": True}, "contradict"),
        ({"models": [torch.nn.Linear(1, 1)]}, "of which the models name 0"),
        ({"grad_scaler": object()}, "without a number"),
        ({"params_have_main_grad": True}, "'weight' has no main_grad"),
        ({"grad_scaler": Scaler()}, "backoff_factor 1.5"),
        ({"on_divergence": "repair"}, "expected 'report' or 'stop'. Two ranks hold each shard here"),
        ({"on_divergence": "Stop"}, "invalid on_divergence: got 'Stop', expected 'report' or 'stop'"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            build(**changes)


@pytest.mark.parametrize("kind", [modellink.TTPReplicaOptimizer, modellink.TTPOddReplicaOptimizer])
def test_zeros_in_the_gradient_are_counted_where_it_is_asked_for(kind: type[modellink.TTPReplicaOptimizer]) -> None:
    """`--log-num-zeros-in-grad`: the third answer of `step`, without the padding of the buckets."""
    model = torch.nn.Linear(4, 3)
    adam = torch.optim.AdamW(model.parameters())
    optimizer = kind(adam, 1.0, True, False, False, False, False, torch.float32, None, model)
    model(torch.tensor([[1.0, 0.0, 0.0, 2.0]])).square().sum().backward()
    assert model.weight.grad is not None and (model.weight.grad == 0).sum() == 6
    assert optimizer.count_zeros() == 6, "what a trainer's own step asks"
    assert optimizer.step()[2] == 6


def test_without_fp32_gradients_they_have_the_parameters_type() -> None:
    """`--release-fp32-grad`: masters and moments stay FP32, and a `main_grad` of 16 bits is taken as it is."""
    model = torch.nn.Linear(4, 2).to(torch.bfloat16)
    for param in model.parameters():
        param.main_grad = torch.ones_like(param)  # type: ignore[attr-defined]
    adam = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().float().clone()
    optimizer = modellink.DistributedOptimizerWithoutFP32Grad(
        adam, 0.0, False, True, False, False, True, torch.bfloat16, None, model
    )
    assert optimizer.core.gradient("weight").dtype == torch.bfloat16
    assert optimizer.step() == (True, None, None)
    optimizer.zero_grad()
    assert torch.equal(model.weight.float(), (before - 0.5).bfloat16().float())
    assert optimizer.state_dict()["masters"]["weight"].dtype == torch.float32
    assert issubclass(modellink.OddDistributedOptimizerWithoutFP32Grad, modellink.TTPOddReplicaOptimizer)


def test_a_grad_scaler_keeps_its_hysteresis_and_its_least_scale() -> None:
    """Megatron's defaults for FP16 are hysteresis 2 and a scale that does not fall below 1."""

    class Scaler:
        scale, min_scale = torch.tensor([4.0]), torch.tensor([1.0])
        growth_interval, growth_factor, backoff_factor, hysteresis = 1000, torch.tensor([2.0]), torch.tensor([0.5]), 2

    optimizer = build(grad_scaler=Scaler())
    scales = []
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.models[0](torch.full((1, 4), float("inf"))).sum().backward()
        assert optimizer.step() == (False, None, None)
        scales.append(optimizer.get_loss_scale().item())
    assert scales == [4.0, 2.0, 1.0, 1.0, 1.0]


def test_the_base_optimizers_own_settings_are_kept() -> None:
    """Class, learning rate and betas are those of the torch optimizer that Megatron built."""
    optimizer = build()
    assert optimizer.param_groups[0]["lr"] == 0.1 and tuple(optimizer.param_groups[0]["betas"]) == (0.8, 0.9)
    assert set(optimizer.core.expected_tensors()) >= {"model.weight", "optim.state.bias.exp_avg"}


def test_a_schedule_of_torch_on_the_given_optimizer_acts_on_the_update() -> None:
    """Megatron's optimizer has the param groups of the one that it was given, so a schedule may be built on either, before or after."""
    model = torch.nn.Linear(4, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.25}]
    given = torch.optim.SGD(groups, lr=0.5)
    before = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 0.5**step)
    optimizer = modellink.TTPReplicaOptimizer(given, 0.0, False, False, False, False, False, torch.float32, None, model)
    after = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 0.1**step)
    for rates in ((0.5, 0.25), (0.25, 0.125), (0.05, 0.025)):
        old = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        assert optimizer.step()[0]
        moved = [(was - param).mean().item() for was, param in zip(old, model.parameters(), strict=True)]
        assert moved == pytest.approx(rates)
        (before if rates[0] == 0.5 else after).step()


def test_the_shard_group_of_odd_sizes_needs_no_declaration() -> None:
    """MindIO's patch for odd sizes calls no `build_optimizer_replica_group`, and its patch of clip_grads.py asks for the group."""
    with pytest.raises(ConfigError, match="no data-parallel group is known"):
        modellink.get_os_shard_group()
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters())
    modellink.TTPOddReplicaOptimizer(adam, 1.0, False, False, False, False, False, torch.float32, None, model)
    assert modellink.get_dp_rank_list() == [0]
    modellink.get_os_shard_group()  # all ranks: here there is no process group at all


def test_shard_groups_follow_the_nodes_of_their_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two data-parallel groups, on nodes a and b in turn: each of its shard groups is on one node. The other's nodes count nothing."""
    hosts = ["y", "a", "z", "b", "y", "a", "z", "b"]
    made: list[list[int]] = []

    def gather(found: list[str], own: str) -> None:
        found[:] = hosts

    def new_group(ranks: list[int]) -> tuple[int, ...]:
        made.append(ranks)
        return tuple(ranks)

    monkeypatch.setattr(job, "world", lambda: (5, len(hosts)))
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("torch.distributed.new_group", new_group)
    groups = job.make_groups((1, 3, 5, 7))
    assert made == [[1, 5], [3, 7]] and groups is not None
    assert (groups.dp_ranks, groups.shard_group) == ((1, 3, 5, 7), (1, 5))
    assert job.make_groups((0, 2, 4, 6)) is None, "this rank is not in it, and takes part in making it"


def test_the_enumeration_has_mindios_values() -> None:
    """`save_info[0]["type"]` is compared with it."""
    assert (ttp.mindio.OptimizerType.ATTENTION, ttp.mindio.OptimizerType.MOE) == (0, 1)
