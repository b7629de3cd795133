"""The replica optimizer on real gloo ranks. One launch runs many claims: see claims_*.py, whose functions are the claims."""

from __future__ import annotations

from collections.abc import Callable

import pytest

EVERYWHERE = ("replicas_stay_bit_identical",)
IN_DEPTH = (
    "replicas_stay_bit_identical",
    "a_rank_without_state_is_filled_by_its_replica",
    "equals_adamw_under_ddp",
    "parameters_of_16_bits_are_rounded_masters",
    "fp32_gradients_of_bf16_parameters_accumulate_in_fp32",
    "overflow_skips_the_step_everywhere_and_lowers_the_scale",
    "a_step_that_is_skipped_is_reported_with_rank_and_step",
    "clip_by_value_clamps_the_average",
    "roll_forward_gives_the_bits_of_the_main_path",
    "a_step_rolled_forward_at_the_gate_is_not_applied_twice",
    "the_phases_are_reported_in_order",
    "the_local_copy_is_the_step_before",
    "gradients_survive_careless_clearing",
    "silent_corruption_of_one_replica_is_found_and_named_once",
    "ranks_that_disagree_raise",
    "the_wire_carries_what_theory_says",
    "memory_is_what_theory_says",
    "parameters_in_fp32_are_their_own_masters",
    "reduced_gradients_are_void_once_somebody_asks_for_a_gradient",
    "a_state_moves_to_another_size",
)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.long), 4])
def test_all_claims_hold_in_the_even_and_in_the_ring_layout(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(world, *IN_DEPTH)


ACCUMULATION = (
    "accumulating_in_shards_trains_the_same",
    "the_sums_are_those_of_all_passes_exactly",
    "an_overflow_of_one_pass_skips_the_step",
    "no_whole_gradient_exists_between_passes",
    "the_wire_carries_one_reduce_scatter_a_pass",
    "passes_of_parts_of_the_model_are_reduced_each_for_itself",
    "passes_out_of_order_are_refused",
)


def test_gradients_that_accumulate_in_shards(run_ranks: Callable[..., None]) -> None:
    run_ranks(4, *ACCUMULATION)


@pytest.mark.parametrize("world", [2, 3, 5, 6])
@pytest.mark.long
def test_gradients_that_accumulate_in_shards_at_other_sizes(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(world, *ACCUMULATION[:3])


@pytest.mark.parametrize("world", [2, 5, 8])
@pytest.mark.long
def test_replicas_are_identical_at_other_sizes(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(world, *EVERYWHERE, "parameters_of_16_bits_are_rounded_masters", "the_wire_carries_what_theory_says")


def test_barrier_mode(run_ranks: Callable[..., None]) -> None:
    run_ranks(4, "a_barrier_spans_what_the_group_does_not")


@pytest.mark.parametrize("world", [3, 4])
def test_mindios_interface(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(
        world,
        "the_facades_step_is_the_cores",
        "the_whole_state_is_gathered_on_one_rank_and_goes_on_anywhere",
        "the_shard_group_counts_every_shard_once",
        "the_shards_of_the_group_have_the_unsharded_norm",
        "on_nodes_in_turn_they_have_it_too",
        "the_examples_clipping_over_the_shard_group_is_torchs",
    )


def test_mindios_interface_where_the_model_is_split(run_ranks: Callable[..., None]) -> None:
    run_ranks(
        4,
        "tensor_parallel_duplicates_are_counted_and_saved_once",
        "zeros_of_a_split_model_are_counted_once",
        "a_split_parameter_without_its_mark_is_refused",
        "tied_embeddings_are_summed_counted_and_saved_once",
        "experts_have_a_replica_group_of_their_own",
    )


def test_numbers_that_are_not_finite(run_ranks: Callable[..., None]) -> None:
    run_ranks(2, "each_choice_holds_under_ddp_and_fsdp_in_both_modes")


@pytest.mark.long
def test_a_process_does_not_grow(run_ranks: Callable[..., None]) -> None:
    """In a fresh process: where larger pieces of memory have been freed before, nothing is to be seen."""
    run_ranks(4, "a_process_does_not_grow")


def test_ranks_that_reach_other_parameters(run_ranks: Callable[..., None]) -> None:
    run_ranks(2, "backward_waits_for_no_peer_and_received_slots_have_room_for_three_buckets")


def test_three_replicas(run_ranks: Callable[..., None]) -> None:
    run_ranks(3, "three_replicas_are_identical")


def test_a_corrupt_replica_of_three_is_distinguished_from_the_others(run_ranks: Callable[..., None]) -> None:
    run_ranks(3, "the_odd_one_out_of_three_replicas_is_named")


def test_what_follows_when_replicas_differ(run_ranks: Callable[..., None]) -> None:
    run_ranks(
        3,
        "most_holders_prove_a_replica_wrong",
        "without_a_majority_the_step_ends",
        "a_copy_of_one_of_two_that_differ_proves_nothing",
        "who_asks_for_an_end_has_one",
        "what_was_only_misread_ends_nothing",
        "a_report_is_all_that_follows_by_default",
    )


@pytest.mark.parametrize("world", [5, pytest.param(6, marks=pytest.mark.long)])
def test_holders_on_different_hosts(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(world, "every_row_order_trains_the_same")


def test_models_that_are_split_over_ranks(run_ranks: Callable[..., None]) -> None:
    run_ranks(
        4,
        "a_tensor_parallel_model_trains_as_the_whole_one",
        "stages_and_tied_copies_count_once",
        "experts_have_replicas_of_their_own",
    )
