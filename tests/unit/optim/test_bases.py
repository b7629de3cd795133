"""Any element-wise base: the same bits as the base alone, from its very first step. One process, no group."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ttp.errors import CheckpointError, CheckpointMismatch, ConfigError
from ttp.optim.base_state import base_defaults, create_state, described
from ttp.optim.replica_optimizer import ClipNorm, ClipValue, LossScale, TTPOddReplicaOptimizer, TTPReplicaOptimizer
from ttp.optim.step_agreement.step_result import ScaleState, clip_factor

CPU = torch.device("cpu")


class Lion(Optimizer):
    """A third-party optimizer as people write them: state made inside step, no _init_group."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * group["beta"] + p.grad * (1 - group["beta"])).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


class StartsAtOne(Lion):
    """Its fresh state is not zero, and it does not say so."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("level", torch.ones_like(p)).add_(p.grad)


class CountsRows(Lion):
    """Its state is not one value an element."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("rows", torch.zeros(3))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and other tests may be running."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": False}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": False}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (Lion, {"weight_decay": 0.1}),
]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 31), nn.LayerNorm(31), nn.Tanh(), nn.Linear(31, 3))


def new_seed() -> int:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def make(model: nn.Module, base: type[Optimizer] = torch.optim.AdamW, **kwargs: Any) -> TTPReplicaOptimizer:
    return TTPReplicaOptimizer(model.named_parameters(), base, **{"replicas": 1, "bucket_bytes": 512, **kwargs})


def run(model: nn.Module, optimizer: Any, seed: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed + step))
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()


def whole_state(optimizer: TTPReplicaOptimizer) -> dict[str, torch.Tensor]:
    return {h.key: h.values.clone() for part in optimizer.holdings().values() for h in part}


@pytest.mark.parametrize(("base", "kwargs"), BASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_base_has_the_bits_that_it_has_alone(base: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Parameters and state equal the base's own over five steps, so its fresh state was fresh."""
    seed = new_seed()
    model, twin = net(seed), net(seed)
    ours, alone = make(model, base, **kwargs), base(twin.parameters(), **kwargs)
    for step in range(1, 6):
        run(model, ours, seed, range(step, step + 1))
        run(twin, alone, seed, range(step, step + 1))
        held = whole_state(ours)
        for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(param, other), (step, name)
            for key, value in alone.state[other].items():
                if torch.is_tensor(value):
                    assert torch.equal(held[f"optim.state.{name}.{key}"], value.view(-1)), (step, name, key)


@pytest.mark.parametrize(("base", "kwargs"), BASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_loaded_state_goes_on_with_the_same_bits(base: type[Optimizer], kwargs: dict[str, Any]) -> None:
    """Every base can be filled before its first step, from any step (0 too), and continues as the original does."""
    seed = new_seed()
    for at in (0, 2):
        model, fresh = net(seed), net(seed + 1)
        ours, loaded = make(model, base, **kwargs), make(fresh, base, **kwargs)
        run(model, ours, seed, range(1, at + 1))
        state, host = whole_state(ours), ours.host_state()
        assert set(state) == set(ours.expected_tensors())
        for target in loaded.load_begin():
            target.values.copy_(state.pop(target.key))
        assert not state
        with pytest.raises(CheckpointError, match="in the middle of a load"):
            loaded.holdings()
        loaded.load_end(at, host)
        run(model, ours, seed, range(at + 1, at + 4))
        run(fresh, loaded, seed, range(at + 1, at + 4))
        assert loaded.current_step == ours.current_step == at + 3
        for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a, b)


def test_fused_kernels_round_each_element_the_same_wherever_the_cuts_fall() -> None:
    """A fused kernel treats a ragged tail differently; pieces are whole registers, so that no element is in one."""
    seed = new_seed()
    model = net(seed)
    chosen, _ = base_defaults(torch.optim.AdamW, {"lr": 1e-2}, CPU)
    assert chosen["fused"] is True
    grads = [[torch.randn_like(p) for p in model.parameters()] for _ in range(4)]
    results = []
    for bucket_bytes in (1, 3000, 1 << 20):
        clone = copy.deepcopy(model)
        optimizer = make(clone, lr=1e-2, bucket_bytes=bucket_bytes)
        for step in grads:
            optimizer.zero_grad()
            torch.autograd.backward(
                torch.stack([(p * g).sum() for p, g in zip(clone.parameters(), step, strict=True)]).sum()
            )
            optimizer.step()
        # Cut once more at places of another layout: pieces of 64 elements each, state and all.
        pieces = [
            nn.Parameter(nn.functional.pad(p.detach().flatten(), (0, -p.numel() % 64))) for p in model.parameters()
        ]
        halves = [nn.Parameter(h.clone()) for p in pieces for h in torch.split(p.detach(), 64)]
        alone = torch.optim.AdamW(halves, lr=1e-2, fused=True)
        for step in grads:
            flat = [h for g in step for h in torch.split(nn.functional.pad(g.flatten(), (0, -g.numel() % 64)), 64)]
            for half, grad in zip(halves, flat, strict=True):
                half.grad = grad.clone()
            alone.step()
        joined = iter(halves)
        cut = [
            torch.cat([next(joined).detach() for _ in range(len(p) // 64)])[: q.numel()].view(q.shape)
            for p, q in zip(pieces, model.parameters(), strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(clone.parameters(), cut, strict=True))
        results.append([p.detach().clone() for p in clone.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("base", "kwargs", "expected"),
    [
        (torch.optim.LBFGS, {}, "not element-wise"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "dampening"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable"),
        (StartsAtOne, {}, "fresh value of its state 'level'"),
        (CountsRows, {}, r"state 'rows': got .*shape \(3,\)"),
    ],
)
def test_a_base_that_cannot_be_cut_or_started_is_refused(
    base: type[Optimizer], kwargs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        make(net(0), base, **kwargs)


def test_the_probe_of_an_unknown_base_leaves_no_trace() -> None:
    param = nn.Parameter(torch.arange(5.0))
    param.grad = torch.ones(5)
    base = Lion([param], lr=0.1, weight_decay=0.3)
    create_state(base)
    assert torch.equal(param, torch.arange(5.0)) and torch.equal(param.grad, torch.ones(5))
    assert base.param_groups[0]["lr"] == 0.1 and base.param_groups[0]["weight_decay"] == 0.3
    assert torch.equal(base.state[param]["exp_avg"], torch.zeros(5))


@pytest.mark.parametrize("family", [TTPReplicaOptimizer, TTPOddReplicaOptimizer])
def test_a_lone_rank_has_all_state_and_no_copy(family: type[TTPReplicaOptimizer]) -> None:
    """A script that asks for replicas trains on a laptop, too."""
    optimizer = family(net(0).named_parameters(), replicas=2)
    assert optimizer.layout.replicas == 1 and [len(optimizer.layout.holders(s)) for s in range(1)] == [1]


def test_parameters_that_cannot_be_trained_are_refused_by_name() -> None:
    model = net(0)
    model.get_parameter("0.weight").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'0\.weight' takes no gradient"):
        make(model)
    with pytest.raises(ConfigError, match="named_parameters"):
        TTPReplicaOptimizer(net(0).parameters(), replicas=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float64"):
        make(net(0).double())
    with pytest.raises(ConfigError, match="no parameters"):
        TTPReplicaOptimizer([], replicas=1)
    with pytest.raises(ConfigError, match=r"copies names \['0\.weight'\] without a span"):
        TTPReplicaOptimizer(net(0).named_parameters(), copies=["0.weight"], replicas=1)


def test_what_needs_whole_state_is_refused_with_the_way_out() -> None:
    optimizer = make(net(0))
    with pytest.raises(CheckpointError, match="holdings"):
        optimizer.state_dict()
    with pytest.raises(CheckpointError, match="load_begin"):
        optimizer.load_state_dict({})
    with pytest.raises(ConfigError, match="built layout"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(CheckpointMismatch, match="1 param groups, the optimizer has 2"):
        groups = [{"params": [(n, p)]} for n, p in nn.Linear(2, 2).named_parameters()]
        TTPReplicaOptimizer(groups, replicas=1).load_end(3, optimizer.host_state())


def test_a_non_finite_gradient_is_skipped_without_a_loss_scale_too() -> None:
    model = net(0)
    optimizer = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    torch.autograd.backward(model(torch.ones(2, 7)).sum() * float("nan"))
    result = optimizer.step(sums=torch.tensor([2.5, 1.0]))
    assert result.skipped and result.grad_norm == float("inf") and result.sums == (2.5, 1.0)
    assert optimizer.current_step == 1 and optimizer.loss_scale == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_weights_written_into_the_model_are_taken_over_on_request() -> None:
    model, other = net(0), net(1)
    optimizer = make(model)
    model.load_state_dict(other.state_dict())
    optimizer.masters_from_params()
    held = whole_state(optimizer)
    assert all(torch.equal(held[f"model.{n}"], p.detach().view(-1)) for n, p in other.named_parameters())


def test_a_gradient_that_backward_does_not_bring_can_be_put_there() -> None:
    """What a caller writes into `gradient` counts, although the parameter's own grad was None."""
    model, expected = net(0), net(0)
    optimizer, plain = make(model, torch.optim.SGD, lr=1.0), torch.optim.SGD(expected.parameters(), lr=1.0)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in (model, expected):
            torch.autograd.backward(part.get_submodule("0")(torch.ones(2, 7)).sum())
        optimizer.gradient("3.bias").add_(float(step + 1))
        expected.get_parameter("3.bias").grad = torch.full((3,), float(step + 1))
        optimizer.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_scheduler_that_is_made_behind_a_load_goes_on_with_its_schedule() -> None:
    """It takes the rate that it began with from the group, as after torch's load_state_dict."""
    first, second = make(net(0), torch.optim.SGD, lr=1.0), make(net(0), torch.optim.SGD, lr=1.0)

    def schedule(of: TTPReplicaOptimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(of, lambda step: 0.5**step, last_epoch=of.current_step - 1)

    scheduler = schedule(first)
    for _ in range(2):
        first.step()
        scheduler.step()
    first.step()
    list(second.load_begin())
    second.load_end(first.current_step, first.host_state())
    again = schedule(second)
    scheduler.step()
    assert again.get_last_lr() == scheduler.get_last_lr() == [0.125]
    assert second.host_state()["param_groups"][0]["initial_lr"] == 1.0


def _replace(params: list[nn.Parameter]) -> None:
    assert params[-1].grad is not None
    params[-1].grad = params[-1].grad.clone()


def _clear(params: list[nn.Parameter]) -> None:
    params[0].grad = None


@pytest.mark.parametrize(
    "change",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 1e-3),
        lambda params: nn.utils.clip_grad_norm_(params, 1e-3, foreach=True),
        lambda params: nn.utils.clip_grad_value_(params, 1e-3),
        _replace,
        _clear,
    ],
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_gradient_that_is_changed_behind_backward_is_refused(
    change: Callable[[list[nn.Parameter]], object], accumulates: bool
) -> None:
    """It is being reduced: ranks would have different ones. Nothing has changed, and the next step is as it would have been."""
    model, expected = net(0), net(0)
    optimizer, straight = make(model, micro_batches=2), make(expected, micro_batches=2)
    for of, own, refused in ((optimizer, model, True), (straight, expected, False)):
        for bad in (True, False) if refused else (False,):
            of.zero_grad()
            with of.no_sync() if accumulates else contextlib.nullcontext():
                torch.autograd.backward(own(torch.ones(2, 7)).sum())
                if accumulates:
                    change(list(own.parameters()))  # nothing is on the wire yet
                    torch.autograd.backward(own(torch.ones(2, 7)).sum())
            if accumulates:
                torch.autograd.backward(own(torch.ones(2, 7)).sum())
            if bad:
                change(list(own.parameters()))
                with pytest.raises(ConfigError, match=r"was changed between backward and step.* clip=ClipNorm"):
                    of.step()
            else:
                of.step()
    assert optimizer.current_step == straight.current_step == 1
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("unscales", [True, False])
def test_torchs_grad_scaler_is_refused_before_the_update(unscales: bool) -> None:
    """It divides gradients in place, without counting their changes up, while they are being reduced."""
    model = net(0)
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu")
    loss = scaler.scale(model(torch.ones(2, 7)).sum())
    torch.autograd.backward(loss)
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(
        ConfigError, match=r"GradScaler: got a TTPReplicaOptimizer.* build the optimizer with loss_scale=LossScale\(\)"
    ):
        scaler.step(optimizer)
    assert optimizer.current_step == 0
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert optimizer.current_step == 1, "one that is switched off does nothing"


def test_a_backward_that_raised_half_way_leaves_nothing_behind() -> None:
    """After `zero_grad` the next one counts alone."""
    model, expected = net(0), net(0)
    optimizer, straight = make(model), make(expected)
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        hook = model.get_submodule("0").register_full_backward_hook(lambda *_: 1 // 0)
        torch.autograd.backward(model(torch.ones(2, 7, requires_grad=True)).sum())
    hook.remove()
    for each, stepped in ((model, optimizer), (expected, straight)):
        run(each, stepped, 5, range(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_other_memory_of_a_parameter_is_noticed_and_swapping_there_and_back_is_not_minded() -> None:
    """Averaged weights may take the model's place between two steps; an update that would not reach the model is refused."""
    model = net(0)
    optimizer = make(model)
    run(model, optimizer, 3, range(2))
    held = {key: value.clone() for key, value in whole_state(optimizer).items()}
    trained = [p.data for p in model.parameters()]
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    assert all(torch.equal(value, held[key]) for key, value in whole_state(optimizer).items())
    with pytest.raises(ConfigError, match=r"'3\.bias' has got other memory"):
        run(model, optimizer, 3, range(2, 3))
    assert optimizer.current_step == 2
    for param, values in zip(model.parameters(), trained, strict=True):
        param.data = values
    run(model, optimizer, 3, range(2, 3))
    assert optimizer.current_step == 3


def test_the_loss_scale_backs_off_grows_and_stays_finite() -> None:
    rule = LossScale(8.0, growth_interval=2)
    state = ScaleState(8.0)
    scales = []
    for skipped in (True, False, True, False, False, False):
        state = state.after(skipped, rule)
        scales.append((state.scale, state.good_steps))
    assert scales == [(4.0, 0), (4.0, 1), (2.0, 0), (2.0, 1), (4.0, 0), (4.0, 1)]
    assert ScaleState(2.0**127).after(False, LossScale(growth_interval=1)).scale == 2.0**127
    assert ScaleState(8.0).after(True, LossScale(8.0, dynamic=False)) == ScaleState(8.0)
    assert clip_factor(ClipNorm(1.0), 4.0) == 1.0 / (4.0 + 1e-6)
    assert clip_factor(ClipNorm(1.0), 0.5) == clip_factor(None, 9.0) == clip_factor(ClipValue(0.1), 9.0) == 1.0


class MegatronScaler:
    """What Megatron-LM 23.06's DynamicGradScaler does, written down anew."""

    def __init__(self, hysteresis: int) -> None:
        self.scale, self.hysteresis, self.tracker, self.good = 64.0, hysteresis, hysteresis, 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.good = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.scale = max(self.scale * 0.5, 4.0)
            return
        self.good += 1
        if self.good == 3:
            self.good, self.tracker = 0, self.hysteresis
            self.scale *= 2.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_and_the_least_scale_are_megatrons(hysteresis: int) -> None:
    """Scales of 400 steps with overflows at random are those of its rule, also when the state is written and read on the way."""
    rule = LossScale(64.0, growth_interval=3, hysteresis=hysteresis, least=4.0)
    theirs, ours = MegatronScaler(hysteresis), ScaleState(64.0)
    overflows = torch.rand(400, generator=torch.Generator().manual_seed(hysteresis)) < 0.3
    for skipped in overflows.tolist():
        theirs.update(skipped)
        reported = described(0, ours.after(skipped, rule), [], [])["loss_scale"]
        ours = ScaleState(reported["scale"], reported["good_steps"], reported.get("forgiven", 0))
        assert ours.scale == theirs.scale


def test_the_overflows_that_were_let_pass_are_part_of_the_state() -> None:
    """A run that goes on after one of them lowers the scale at the next, as an uninterrupted one does."""

    def optimizer() -> TTPReplicaOptimizer:
        rule = LossScale(2.0**20, hysteresis=2)
        return TTPReplicaOptimizer(torch.nn.Linear(2, 1).named_parameters(), loss_scale=rule, lr=0.1)

    def overflow(of: TTPReplicaOptimizer) -> float:
        of.zero_grad()
        of.gradient("weight").fill_(float("inf"))
        assert of.step().skipped
        return of.loss_scale

    first, second = optimizer(), optimizer()
    assert overflow(first) == 2.0**20
    list(second.load_begin())
    second.load_end(first.current_step, first.host_state())
    assert overflow(first) == overflow(second) == 2.0**19


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ClipNorm(0.0),
        lambda: ClipValue(-1.0),
        lambda: LossScale(float("inf")),
        lambda: LossScale(1.0, growth_interval=0),
        lambda: LossScale(1.0, backoff_factor=2.0),
    ],
)
def test_impossible_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        wrong()
