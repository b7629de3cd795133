"""What is tried on real ranks: each function here is run by all ranks of one world, joined over a TCP store."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.errors import AbortedCollective, CheckpointError, ConfigError, ControllerError, ProtocolError
from ttp.exchange import agreed as agreed_module
from ttp.exchange.agreed import Agreements
from ttp.exchange.json_collectives import broadcast_json, exchange_json, receive_bytes, send_bytes
from ttp.groups.polled_wait import wait_for
from ttp.groups.process_groups import GROUPS, ProcessGroups, generation_of, recipes
from ttp.groups.vacancy import init_process_group, vacant
from ttp.optim.assembly import check_agreement, hosts_of
from ttp.proto.messages import CommitRecord
from ttp.regroup.wrappers import buckets, renew_model

c10d: Any = distributed_c10d


def main(name: str, given: tuple[int, ...], rank: int, world: int, port: int, folder: str) -> None:
    """Run the function of that name; leave `done_<rank>` or `error_<rank>` in `folder`."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, world, is_master=False
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        run: Callable[..., None] = globals()[name]
        run(store, *given)
        if name not in WITHOUT_RANK_1:
            dist.barrier()
        Path(folder, f"done_{rank}").touch()
    except BaseException:
        Path(folder, f"error_{rank}").write_text(traceback.format_exc())
    os._exit(0)


def summed(group: object = None) -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=group)
    return value.item()


def everything_has_its_name_and_members_again(store: Any) -> None:
    """Groups of all kinds of makers: named by a counter or by their members, of other ranks too, by a mesh, with a timeout of their own."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, others = halves[rank // 2], halves[1 - rank // 2]
    local = (
        dist.new_group([0, 3], use_local_synchronization=True, timeout=timedelta(seconds=77))
        if rank in (0, 3)
        else None
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    matrix: Any = distribute_tensor(torch.arange(16.0).view(4, 4), mesh["tensor"], [Shard(0)])
    before = [(r.name, r.ranks, r.backend, r.timeout, r.tag, r.description) for r in recipes()]
    objects = [r.group for r in recipes()]
    hook, groups, count = sys.excepthook, ProcessGroups(), _world.group_count
    for _ in range(2):
        successor = groups.make_again()
        assert [(r.name, r.ranks, r.backend, r.timeout, r.tag, r.description) for r in recipes()] == before
        assert [successor(group) for group in objects] == [r.group for r in recipes()]
        assert not {id(group) for group in objects} & {id(r.group) for r in recipes()}
        objects = [successor(group) for group in objects]
        mine, local = successor(mine), successor(local)
        assert successor(mine) is mine and successor(others) == others and successor(None) is None
        assert summed() == 6 and summed(mine) == (1 if rank < 2 else 5) and (local is None or summed(local) == 3)
        assert summed(mesh["data"].get_group()) == (2 if rank % 2 == 0 else 4)
        assert (matrix @ matrix.T).full_tensor().equal(torch.arange(16.0).view(4, 4) @ torch.arange(16.0).view(4, 4).T)
    assert sys.excepthook is hook, "torch hangs one more on it at each init_process_group"
    assert local is None or next(r.timeout for r in recipes() if r.group is local) == timedelta(seconds=77)
    assert dist.new_group(list(range(4))).group_name == str(count), "as if nothing had been made again"


def a_group_of_an_earlier_generation_is_refused(store: Any) -> None:
    first, groups = dist.group.WORLD, ProcessGroups()
    groups.make_again()
    successor = groups.make_again()
    try:
        successor(first)
    except ConfigError as error:
        assert "earlier generation" in str(error)
    else:
        raise AssertionError("a group that was closed long ago was taken for one of now")


def a_program_that_joins_anew_keeps_its_keys(store: Any) -> None:
    """Another session of the process: its first generation is numbered on, under the store that it has joined with."""
    groups = ProcessGroups()
    groups.make_again()
    groups.make_again()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=c10d.PrefixStore("again", store), rank=rank, world_size=world)
    for generation in (3, 4, 5):
        groups.make_again()
        assert summed() == 1
        dist.barrier()
        keys = [key for key in store.list_keys() if "ttp_generation_" in key and "again" in key]
        assert keys and all(
            f"ttp_generation_0.{generation}/" in key and key.count("ttp_generation_") == 1 for key in keys
        ), keys
        dist.barrier()


def nothing_grows(store: Any, switches: int) -> None:
    """Descriptors, threads, store keys, and memory within a few MB: over so many switches."""
    dist.new_group([0, 1])
    dist.new_group([0, 1], use_local_synchronization=True)
    groups = ProcessGroups()

    def switch() -> None:
        groups.make_again()
        assert summed() == 1
        dist.barrier()  # rank 0 has taken the earlier keys out

    def counts() -> tuple[int, int, int]:
        dist.barrier()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), store.num_keys()

    def resident_mb() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    for _ in range(5):
        switch()
    before, memory = counts(), resident_mb()
    for _ in range(switches):
        switch()
    assert counts() == before, (counts(), before)
    assert resident_mb() <= memory + 8 + switches // 50, (resident_mb(), memory)
    assert threading.active_count() == 1 and groups.generation == switches + 5


def ddp_and_fsdp2_give_the_bits_that_they_gave(store: Any) -> None:
    """The same step before and after; gradients of three buckets, and of shards with replicas."""

    def net() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = net()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    plain = DistributedDataParallel(net(), bucket_cap_mb=0.005)
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))

    def gradients(model: torch.nn.Module) -> list[bytes]:
        model.zero_grad()
        torch.autograd.backward(model(batch).square().sum())
        grads = [param.grad for param in model.parameters()]
        return [getattr(grad, "to_local", lambda g=grad: g)().numpy().tobytes() for grad in grads]

    class Holder(torch.nn.Module):
        """A module that keeps a group, as experts do."""

        def __init__(self) -> None:
            super().__init__()
            self.group, self.inner = dist.group.WORLD, sharded

    holder = Holder()
    for _ in range(3):  # DDP orders its buckets anew after the first
        gradients(plain)
    expected = gradients(plain), gradients(sharded)
    groups = ProcessGroups()
    for _ in range(3):
        successor = groups.make_again()
        for model in (plain, holder):
            renew_model(model, successor)
        assert holder.group is dist.group.WORLD is plain.process_group
        assert (gradients(plain), gradients(sharded)) == expected


def a_new_process_is_given_what_the_others_hold(store: Any) -> None:
    """Rank 1 of three goes on with a model that has made no step, as one does that takes a lost one's place. The next step has every rank's bits: on three ranks
    a sum is rounded as the gradients lie in buckets."""
    rank = dist.get_rank()

    def make(seed: int, kind: Any = torch.optim.AdamW) -> tuple[Any, AdoptedOptimizer, Any]:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32))))
        average = torch.optim.swa_utils.AveragedModel(net)
        model = DistributedDataParallel(net, bucket_cap_mb=0.005)
        optimizer = kind(model.parameters(), lr=0.1)
        return model, AdoptedOptimizer(model, optimizer, averages={"ema": average}), optimizer

    def step(number: int, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * number + rank))
        torch.autograd.backward(model(batch).square().sum())
        optimizer.step()

    def bits(adopted: AdoptedOptimizer) -> dict[str, bytes]:
        return {key: tensor.numpy().tobytes() for key, tensor in adopted._state.memory().items()}

    model, adopted, optimizer = make(0)
    fresh_model, fresh, fresh_optimizer = make(1)
    *_, other, _ = make(2, torch.optim.SGD)
    assert adopted.why_not_filled() == ""
    for number in range(3):
        step(number, model, optimizer)
    assert bits(fresh) != bits(adopted) and buckets(fresh_model) != buckets(model)
    host_state = adopted.host_state()
    for lost, asked, said in (
        ({0, 1, 2}, adopted, "no rank that stays holds what rank 0 held"),
        ({1}, other if rank == 1 else adopted, "rank 1, which is new, has other tensors than rank 0"),
    ):
        try:
            asked.fill(lost)
            raise AssertionError(f"expected {said}")
        except CheckpointError as error:
            assert said in str(error), error
    before = bits(adopted)
    if rank == 1:
        fresh.load_begin()
        fresh.fill({1})
        fresh.load_end(3, host_state, adopted.last_record)
        assert fresh.current_step == 3 and fresh.last_record == adopted.last_record
        assert bits(fresh) == bits(adopted) and buckets(fresh_model) == buckets(model)
        buffers = [dict(each.module.named_buffers()) for each in (fresh_model, model)]
        assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[1])
        assert fresh.compare_replicas() == ()
    else:
        adopted._steps._ready = 4  # its gradients of a step that is given up
        adopted.fill({1})
        adopted.keep(3, adopted.last_record)
        try:
            adopted._steps.expect(CommitRecord(4, 1.0, 1.0, False, 1.0, (0.1,), ()))
            raise AssertionError("expected that the step is given up")
        except ProtocolError as error:
            assert "not ready" in str(error)
        assert bits(adopted) == before and adopted.compare_replicas() == ()
    mine = (fresh_model, fresh, fresh_optimizer) if rank == 1 else (model, adopted, optimizer)
    step(3, mine[0], mine[2])
    whole_model, whole, whole_optimizer = make(0)
    for number in range(4):
        step(number, whole_model, whole_optimizer)
    assert bits(mine[1]) == bits(whole)


def in_place(index: int, world: int, rounds: int, port: int, folder: str) -> None:
    """One of `world` ranks, or (index from `world` on) a process that takes the place of one that was killed. In each round a rank is killed in the
    middle of collectives of several groups; the others come out, and all make their groups again."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False)  # type: ignore[attr-defined]
        groups, first = GROUPS, index - world
        groups.pollable = True
        groups.meeting = c10d.PrefixStore("in place", store)
        if first < 0:
            rank = index
            dist.init_process_group("gloo", store=c10d.PrefixStore("start", store), rank=rank, world_size=world)
            pairs = _pairs(world)
            successor = groups.make_again()
        else:
            store.wait([f"dying {first}"], timedelta(seconds=120))
            rank = first % world
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            pairs = _pairs(world)
            groups.backend = "gloo"
            successor = groups.make_again(first + 2)
            assert summed() == world * (world - 1) / 2
        pairs = [successor(pair) for pair in pairs]
        counts: tuple[int, int] | None = None
        keys: tuple[int, int] | None = None
        for number in range(max(0, first + 1), rounds):
            _until_killed(store, groups, pairs, rank, number, world)
            successor = groups.make_again(number + 2)
            pairs = [successor(pair) for pair in pairs]
            del successor
            groups.let_go()
            assert summed() == world * (world - 1) / 2
            now = len(os.listdir("/proc/self/fd")), threading.active_count()
            assert counts is None or (now[0] <= counts[0] + 400 and now[1] <= counts[1] + 60), (
                f"descriptors and threads: {counts}, now {now}"
            )
            counts = counts or now
            older, *kept = _keys(store, (number + 2, 0))
            assert not older and (keys is None or keys == tuple(kept)), (
                f"keys of earlier generations: {older}; {keys}, now {kept}"
            )
            keys = keys or (kept[0], kept[1])
        dist.barrier()
        Path(folder, f"done_{rank}").touch()
    except BaseException:
        Path(folder, f"error_{index}").write_text(traceback.format_exc())
    os._exit(0)


def _keys(store: Any, generation: tuple[int, int]) -> tuple[list[str], int, int]:
    """Return the store's keys of earlier generations, and how many there are of this one and of none. Another rank may be in a later one already."""
    of = {key: generation_of(key) for key in store.list_keys() if "dying" not in key}
    older = [key for key, its in of.items() if its is not None and its < generation]
    return older, list(of.values()).count(generation), list(of.values()).count(None)


def _pairs(world: int) -> list[Any]:
    return [dist.new_group([rank, (rank + 1) % world]) for rank in range(world)]


def _until_killed(store: Any, groups: ProcessGroups, pairs: list[Any], rank: int, number: int, world: int) -> None:
    """Train, in a way, until the connections are shut down; the rank whose turn it is ends itself after a while."""
    key, out = f"dying {number}", threading.Event()
    rng = random.Random(f"{number} {rank}")

    def die() -> None:
        store.set(key, "")
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        own = dist.TCPStore(store.host, store.port, is_master=False)  # type: ignore[attr-defined]  # one that waits serves no other thread
        own.wait([key], timedelta(seconds=120))
        while not out.wait(0.02):  # a connection that is shut down just as an operation begins on it may be missed
            groups.leave()

    if number % world == rank:
        threading.Timer(rng.uniform(0.0, 0.1), die).start()
    watcher = threading.Thread(target=watch)
    watcher.start()
    mine = [pairs[rank], pairs[rank - 1]]
    try:
        while True:
            works = [
                dist.all_reduce(torch.ones(50_000), group=pair, async_op=True) for pair in sorted(mine, key=pairs.index)
            ]
            wait_for([*works, dist.all_reduce(torch.ones(100_000), async_op=True)])
    except (RuntimeError, AbortedCollective):
        out.set()
        watcher.join()
        groups.close()


def a_new_process_reads_what_the_others_have_agreed_on(store: Any) -> None:
    """Rank 1 then does as one does that takes a lost one's place: its groups have no peers, and nothing is asked of the others."""
    place = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "RANK": str(dist.get_rank())}
    os.environ.update(place | {"TTP_LAUNCHED": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    half = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    asked: list[str] = []
    agreed_module.READ_AT_MOST = timedelta(seconds=2)  # for what is not there

    def agreed(name: str, value: Any, group: Any = None) -> Any:
        def make() -> Any:
            asked.append(name)
            return value

        return Agreements().agree(name, make, group)

    agreed("kept by no program that a new process could join", 1)
    assert Agreements().of_this_rank("program", "a") == "a"
    assert not [key for key in store.list_keys() if "ttp/" in key]
    dist.barrier()
    GROUPS.replaceable = True  # as ttp.init_process_group says
    assert agreed("shards", ["a", "b"]) == ["a", "b"] and agreed("own", dist.get_rank(), half) == dist.get_rank()
    assert Agreements().of_this_rank("program", [dist.get_rank()]) == [dist.get_rank()]
    dist.barrier()
    if (rank := dist.get_rank()) == 1:
        dist.destroy_process_group()
        os.environ["TTP_VACANT"] = "7"
        init_process_group("gloo")
        half = dist.new_group([1], use_local_synchronization=True)
        assert dist.get_backend() == "fake" and (dist.get_rank(), dist.get_world_size()) == (1, 2) and vacant() == 7
        assert GROUPS.backend == "gloo", "what the groups are made with once there are peers"
        asked.clear()
        assert agreed("shards", ["wrong"]) == ["a", "b"] and agreed("own", -1, half) == 1 and not asked
        assert Agreements().of_this_rank("program", "another") == [1], "that of the rank's first process"
        agree = partial(Agreements().agree, "nothing", lambda: asked.extend(["nothing"]))
        for ask, whose in ((agree, ""), (partial(Agreements().of_this_rank, "nothing", 0), "that one's ")):
            try:
                ask()
                raise AssertionError("expected that an unknown value is refused")
            except ControllerError as error:
                assert f"takes a lost one's place, and {whose}nothing is not in the job's store" in str(error)
        assert not asked
        os.environ["TTP_VACANT"] = ""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=c10d.PrefixStore("again", store), rank=rank, world_size=2)


def a_message_that_nothing_reads_any_more_writes_nothing(store: Any) -> None:
    """Rank 1 is killed half way through a message whose memory rank 0 has let go of: gloo keeps that connection open, and reads it never again."""
    pid = _of_rank_1(store)
    while dist.get_rank() == 1:
        dist.send(torch.ones(_LARGE, dtype=torch.uint8), 0)
    for _ in range(20):  # a rank 0 that is not scheduled for a moment gets a message as a whole
        memory = torch.zeros(_LARGE, dtype=torch.uint8)
        work: Any = dist.irecv(memory, 1)
        while not memory[_LARGE // 100]:
            time.sleep(0.0005)
        os.kill(pid, signal.SIGSTOP)
        if not memory[-1]:
            break
        os.kill(pid, signal.SIGCONT)
        work.wait()
    assert not memory[-1], "each message came as a whole"
    del work
    os.kill(pid, signal.SIGKILL)
    GROUPS.close()
    assert GROUPS.leave() == 1, "gloo has closed the connection: nothing was tried"
    came = memory.count_nonzero()
    time.sleep(0.2)  # what came later would be seen
    assert memory.count_nonzero() == came


def a_group_that_was_left_ends_in_a_thread_of_its_own(store: Any) -> None:
    """Its destructor waits for an operation that rank 1 never enters. What refers to it, a frame that an exception keeps, say, may go in any thread."""
    pid = _of_rank_1(store)
    if dist.get_rank() == 1:
        signal.pause()
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    GROUPS._closed, GROUPS._left_before, GROUPS._made = [group], True, None
    kept: list[Any] = [group]
    kept.append(kept)  # only a collection ends it
    gone = weakref.ref(group)
    del group
    GROUPS.let_go()
    del kept
    gc.collect()
    while gone() is not None:
        time.sleep(0.01)
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "ttp-group-gone"]
    waiting.join(0.2)
    assert waiting.is_alive(), "its destructor has not waited: nothing was tried"
    os.kill(pid, signal.SIGKILL)


def every_wait_can_be_left(store: Any) -> None:
    """Rank 1 enters none of these collectives."""
    pid = _of_rank_1(store)
    if dist.get_rank() == 1:
        signal.pause()
    cpu, chunk, group = torch.device("cpu"), memoryview(bytearray(8)), dist.group.WORLD
    layout: Any = SimpleNamespace(world=2, digest=lambda: "0" * 15)
    waits: tuple[Callable[[], object], ...] = (
        lambda: exchange_json(1, cpu),
        lambda: broadcast_json(1, cpu),
        lambda: send_bytes(chunk, 1, cpu),
        lambda: receive_bytes(chunk, 1, cpu),
        lambda: hosts_of(group, 2, cpu),
        lambda: check_agreement(layout, group, 0, cpu),
    )
    for wait in waits:
        threading.Timer(0.05, setattr, (GROUPS, "_left", True)).start()
        try:
            wait()
            raise AssertionError("expected that the wait ends")
        except AbortedCollective:
            GROUPS._left = False
    os.kill(pid, signal.SIGKILL)


WITHOUT_RANK_1 = {
    each.__name__
    for each in (
        every_wait_can_be_left,
        a_message_that_nothing_reads_any_more_writes_nothing,
        a_group_that_was_left_ends_in_a_thread_of_its_own,
    )
}
_LARGE = 200_000_000


def _of_rank_1(store: Any) -> int:
    """Make the groups again, so that their connections are known; return rank 1's process."""
    GROUPS.pollable = True
    GROUPS.make_again()
    if dist.get_rank() == 1:
        store.set("pid", str(os.getpid()))
    return int(store.get("pid"))
