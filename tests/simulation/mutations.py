"""The checker can fail: every wrong variant of the protocol, and within how many jobs it must be caught, by which invariant.

`python -m tests.simulation.mutations [NAME...]` tries them. A variant that is not caught is a defect of the checker.
Mutants that no one thought of are made by `mutants`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.simulation import arranged_diverged as diverged
from tests.simulation import arranged_in_place as in_place
from tests.simulation import arranged_published_first as published_first
from tests.simulation import arranged_seats as in_seats
from tests.simulation import losing_controllers as losing
from tests.simulation import unled
from tests.simulation import wrong_adapters as adapters
from tests.simulation import wrong_answers as answers
from tests.simulation import wrong_controllers as controllers
from tests.simulation import wrong_divergence as divergence
from tests.simulation import wrong_liveness as liveness
from tests.simulation import wrong_memories as memories
from tests.simulation import wrong_pieces as pieces
from tests.simulation import wrong_ranks as ranks
from tests.simulation import wrong_recoveries as recoveries
from tests.simulation import wrong_seats as seats
from tests.simulation.arranged import (
    aborted_collectives,
    another_publishes_later,
    attaches_again_late_in_a_round,
    attaches_again_late_with_the_newest_step,
    back_and_forth,
    calm_with_relayed_beats,
    deaf_while_its_clock_leaps,
    died_between_two_tries,
    died_in_a_dump,
    disk_full_at_publish,
    each_publishes_its_piece,
    false_alarm_under_a_dying_controller,
    false_alarms_before_a_takeover,
    holders_die_with_the_controller,
    host_dies_with_its_files,
    idle_controller_dies,
    late_reports,
    only_the_step_before_fits,
    order_said_again,
    parts_handed_on,
    pauses_for_longer_than_a_hang,
    preempted_on_a_slow_network,
    published_comes_again,
    publisher_comes_back,
    publisher_dies,
    raised_in_the_update,
    reported_and_died,
    rolls_after_a_long_freeze,
    silent_until_the_roll_forward,
    slow_disks,
    slow_step,
    slower_than_the_limit,
    step_changes_in_the_dump,
    stopped_about_a_lease,
    stuck_and_alone,
    torn_in_the_only_directory,
    words_come_again,
    work_goes_on,
)
from tests.simulation.arranged_losses import in_a_dump, in_a_false_alarm, in_training, of_the_first_welcome
from tests.simulation.checks import run_and_check
from tests.simulation.scenario import Scenario, build
from tests.simulation.unasked import (
    exit_with_another_status,
    publish_another_steps_record,
    published_by_another,
    roll_forward_with_an_impossible_record,
    write_into_a_published_checkpoint,
)
from tests.simulation.vouched import (
    held_for_longer_than_a_lease,
    host_lost,
    interpreter_held_for_good,
    process_stopped,
)
from ttp.errors import ProtocolError
from ttp.proto.messages import Exit, Finished, Freeze, Thaw, WriteOrder

RAISED = "raised"
"""The machines refuse what the wrong variant makes happen."""


@dataclass(frozen=True)
class Mutation:
    """One wrong variant. `jobs` makes the job of a seed: random faults, unless a rare turn of events is needed."""

    wrong: str
    patch: Callable[[pytest.MonkeyPatch], None]
    caught_by: tuple[str, ...]
    """How a violation begins that shows it."""
    jobs: Callable[[int], Scenario] = build
    base: int = 0
    """The first seed: 0, or one somewhat before the first that shows it, where earlier ones would take seconds."""
    within: int = 200
    """Seeds, from `base` on."""

    @property
    def name(self) -> str:
        return self.patch.__name__.replace("_", " ")


MUTATIONS = (
    # Who is a holder, and of what.
    Mutation("a rank whose update raised half-way writes its share", controllers.torn_counts, ("I3",), raised_in_the_update),
    Mutation("a replica is chosen that is stuck in UPDATING", controllers.stuck_counts, ("I3",), stuck_and_alone),
    Mutation("S is the step that a dead rank reported", controllers.step_of_a_dead_rank, ("I3", "I9")),
    Mutation("coverage ignores the pipeline axis", controllers.one_axis_of_coverage, ("I5",)),
    # Which step.
    Mutation("ranks roll forward without a record", controllers.invented_record, ("I3",)),
    Mutation("an older step is chosen although a record proves the newer", controllers.forgotten_records, ("I6", "I9")),
    Mutation("a record that a rank reported before it died is forgotten", controllers.records_of_the_decided_round_only, ("I6", "I9"), reported_and_died),
    Mutation("a rank rolls forward that is not READY", controllers.rolls_who_is_not_ready, ("I3",), within=600),
    Mutation("the record of the step before is used for rolling forward", controllers.record_of_an_older_step, ("I3",)),
    Mutation("not all that must roll forward are asked to", controllers.rolls_only_the_first, ("I3", "I6")),
    Mutation("a dump is refused although every shard is covered", controllers.refuses_when_somebody_is_missing, ("I9",)),
    Mutation("what an aborted collective returns is believed", ranks.aborted_collectives_are_believed, ("I6",), aborted_collectives, within=20),
    Mutation("an earlier step's result is believed", ranks.only_participants_are_counted, ("I6",), aborted_collectives, within=20),
    # Writing and publishing.
    Mutation("published before every part is written", controllers.publishes_before_all_is_written, ("I5",)),
    Mutation("published under the number of the step before", controllers.publishes_as_an_older_step, ("I12",), base=160),
    Mutation("the checkpoint has another step's record", controllers.publishes_an_older_record, ("I12",), within=20),
    Mutation("a replaced writer's late answer counts as well", controllers.lost_writers_answer_counts, ("I5",)),
    Mutation("a part is ordered from two holders", controllers.shard_written_twice, ("I5",)),
    Mutation("the parts of a writer that died are not written", controllers.lost_writers_parts_are_dropped, ("I5",)),
    Mutation("a publisher that died is not replaced", controllers.failed_publisher_is_not_replaced, ("I9", "I11"), publisher_dies),
    Mutation("an order that progresses slowly counts as stuck", controllers.working_renews_nothing, ("I9",), slow_disks, within=20),
    # What is given up, and what not.
    Mutation("slow work is never passed over", controllers.no_rank_is_passed_over, ("I9",), work_goes_on, within=20),
    Mutation("one torn file costs its directory", controllers.torn_file_costs_its_directory, ("I9",), torn_in_the_only_directory, within=20),
    Mutation("the end of an update is not waited for", controllers.updates_are_not_waited_for, ("I9",), rolls_after_a_long_freeze, within=20),
    Mutation("no older step is tried when no directory takes the newer", controllers.no_older_step_is_tried, ("I9",), only_the_step_before_fits, within=20),
    Mutation("the leap of a deaf controller's clock counts as silence", controllers.a_leap_of_the_clock_counts_as_silence, ("I9",), deaf_while_its_clock_leaps, within=20),
    Mutation("one rank's disk vetoes the directory", controllers.one_ranks_disk_vetoes_the_directory, ("I9: /a serves",), within=600),
    # Directories of each host's own.
    Mutation("a refusal takes the directory from a rank that has another step", pieces.refusal_takes_the_directory, ("I9",), base=4500646563, within=1),
    Mutation("published when the first of several hosts has", pieces.published_after_the_first_place, ("I1",), each_publishes_its_piece, within=20),
    Mutation("what a lost host had written is not written again", pieces.lost_hosts_files_are_not_written_again, ("I1",), host_dies_with_its_files, within=20),
    Mutation("a host's piece is ordered from another host", pieces.publisher_of_another_host, ("I9", "I11", RAISED), each_publishes_its_piece, within=20),
    Mutation("a piece of an earlier write counts", pieces.piece_of_an_earlier_write_counts, ("I1",), host_dies_with_its_files, within=20),
    Mutation("a piece is removed for a later one", ranks.earlier_piece_is_removed, ("I8",), host_dies_with_its_files, within=20),
    Mutation("a lower term's piece takes the place of a higher one's", ranks.late_publisher_of_a_lower_term_supersedes, ("I8",), publisher_comes_back, within=20),
    Mutation("a piece is published with a torn file", ranks.piece_without_looking_at_sizes, ("I5",), base=160),
    # Reports, suspicions, thaws.
    Mutation("the freeze's number is not checked on reports", controllers.old_reports_count, ("I3", "I5", "I6"), late_reports, base=290),
    Mutation("the step is decided before all have reported", controllers.decides_without_all_reports, ("I9", "I6", "I3")),
    Mutation("only some ranks are thawed", controllers.thaws_some, ("I7", "I11")),
    Mutation("a rank that never began is welcomed before the takeover", controllers.who_never_began_is_welcomed_while_ranks_are_gathered, ("I9",), of_the_first_welcome, within=60),
    Mutation("a silent rank is never dead", controllers.never_sees_silence, ("I11",)),
    Mutation("a suspicion is taken for a death", controllers.suspicion_is_death, ("I7",), base=120),
    Mutation("a slow rank is taken for a hang", controllers.one_lease_for_a_hang, ("I7",), slow_step),
    Mutation("a job never assembles", controllers.no_job_assembles, ("I11",), within=20),
    Mutation("a hang is not disproved by a rank that progressed", controllers.hang_without_proof, ("I7",), slower_than_the_limit, base=350),
    Mutation("a pause that was announced is taken for a hang", controllers.pauses_are_ignored, ("I7",), pauses_for_longer_than_a_hang, within=20),
    Mutation("relayed heartbeats renew no lease", controllers.beats_renew_no_lease, ("I7",), calm_with_relayed_beats, within=20),
    Mutation("a new process is taken for the old", controllers.new_process_is_taken_for_the_old, ("I11: rank",), base=160),
    # Ranks that are silent.
    Mutation("a rank that came back late in a round has less time to answer", liveness.who_attached_late_is_not_waited_for, ("I9",), attaches_again_late_in_a_round, within=60),
    Mutation("local copies of an older step are taken at once", liveness.an_older_step_is_taken_at_once, ("I6",), attaches_again_late_with_the_newest_step, base=2, within=15),
    Mutation("a rank that compiles is taken for dead", liveness.vouches_are_not_believed, ("I7",), held_for_longer_than_a_lease, within=20),
    Mutation("a lost host has the vouched lease", liveness.vouches_never_age, ("I11",), host_lost, within=20),
    Mutation("an interpreter that is held for good is waited for as long as its process runs", liveness.vouches_count_for_ever, ("I11",), interpreter_held_for_good, within=20),
    Mutation("a silent rank's agent is not waited for", liveness.silent_ranks_are_lost_nodes, ("I11",), process_stopped, within=20),
    Mutation("a lost node is waited for at the end", liveness.lost_nodes_have_the_time_of_silent_ranks, ("I11",), host_lost, within=20),
    Mutation("a process that is stopped has the vouched lease", liveness.stopped_processes_are_vouched_for, ("I11",), process_stopped, within=20),
    Mutation("a vouch counts as a word of the rank", liveness.a_vouch_is_taken_for_a_word_of_the_rank, ("I11",), interpreter_held_for_good, within=20),
    Mutation("only live ranks show that a controller receives", liveness.only_live_ranks_show_that_a_controller_receives, ("I9",), base=4900, within=50),
    Mutation("a new controller does not wait for a rank that compiles", liveness.vouched_ranks_are_not_waited_for_after_a_takeover, ("I7",), held_for_longer_than_a_lease, within=40),
    # Takeovers.
    Mutation("a standby takes over without a freeze", controllers.takes_over_without_a_freeze, ("I11", RAISED), false_alarm_under_a_dying_controller),
    Mutation("a standby thaws ranks that were rolled forward", controllers.thaws_what_another_ordered, ("I11",), silent_until_the_roll_forward),
    Mutation("every controller counts its freezes from one", controllers.freezes_counted_from_one, ("I7", "I9", "I11", RAISED), false_alarms_before_a_takeover),
    Mutation("a standby forgets the shards that no rank reported to it", controllers.unknown_shards_forgotten, ("I5",), holders_die_with_the_controller),
    Mutation("ranks never learn of the standbys", controllers.standbys_kept_secret, ("I11", "I9"), died_in_a_dump),
    Mutation("launchers never learn of the standbys", controllers.launchers_never_learn_of_the_standbys, ("I11",)),
    Mutation("an earlier controller keeps its ranks", controllers.earlier_controller_keeps_its_ranks, ("I7", "I9", "I11"), stopped_about_a_lease),
    # What was lost on a stream that lives.
    Mutation("a thaw that was lost is not sent again", answers.thaws_are_not_sent_again, ("I7", "I11"), partial(in_a_false_alarm, kind=Thaw), within=20),
    Mutation("a freeze that was lost is not sent again", answers.freezes_are_not_sent_again, ("I6", "I9"), partial(in_a_dump, kind=Freeze), within=20),
    Mutation("an order that was lost is not given again", answers.orders_are_not_sent_again, ("I9",), partial(in_a_dump, kind=WriteOrder), within=20),
    Mutation("an exit that was lost is not sent again", answers.exit_is_not_sent_again, ("I11",), partial(in_a_dump, kind=Exit), within=20),
    Mutation("heartbeats of a rank that has finished finish no rank", answers.heartbeats_finish_no_rank, ("I11",), partial(in_training, kind=Finished), within=20),
    # Answers and orders outside the protocol.
    Mutation("an answer to an order that was never given is believed", answers.unasked_answers_are_believed, ("I4",), published_by_another, within=20),
    Mutation("an exit with any status is obeyed", answers.any_exit_is_obeyed, ("I7", "I11"), exit_with_another_status, within=20),
    Mutation("an update is done with any record", answers.any_record_is_applied, ("I3",), roll_forward_with_an_impossible_record, within=20),
    Mutation("a share is written into any directory", answers.any_directory_is_written_into, ("I9",), write_into_a_published_checkpoint, within=20),
    Mutation("a manifest takes any record", answers.any_record_is_published, ("I12",), publish_another_steps_record, within=20),
    # The gate.
    Mutation("a freeze is acknowledged, and the gate not closed", ranks.gate_stays_open, ("I7",)),
    Mutation("READY is not held up by the closed gate", ranks.ready_passes_a_closed_gate, ("I6",), preempted_on_a_slow_network, within=600),
    Mutation("a shard is read from a holder that changes meanwhile", ranks.reports_before_the_update_ends, ("I3", "I5", "I6", "I9")),
    Mutation("the gate opens while its rank writes", ranks.gate_opens_for_a_writer, ("I7", "I5")),
    Mutation("a thaw opens nothing", ranks.thaw_opens_nothing, ("I11",)),
    Mutation("the gate opens by itself", ranks.gate_opens_by_itself, ("I7",)),
    Mutation("the record of a step that all give up is kept", ranks.keeps_the_record_of_a_step_given_up, ("I15", "I6", "I9"), died_between_two_tries),
    Mutation("one rank does the step that all others give up", ranks.one_rank_gives_no_step_up, ("I6",), died_between_two_tries),
    # The adapters: the gate, the handlers and the work thread as they are shipped.
    Mutation("an update that an exception left is taken for whole", adapters.an_update_that_was_left_is_whole, ("I3", RAISED), within=60),
    Mutation("a thaw comes with the ticket of the first freeze", adapters.the_gate_opens_with_an_older_ticket, ("I11",)),
    Mutation("an order is answered before it is carried out", adapters.an_answer_comes_before_the_work, ("I9",), within=60),
    Mutation("a task that failed has no answer", adapters.a_failed_task_is_not_answered, ("I9", "I11")),
    Mutation("the late end of an update is not reported", adapters.a_late_end_of_an_update_is_not_reported, ("I9",), rolls_after_a_long_freeze, within=20),
    Mutation("a controller goes on after its end", adapters.a_finished_controller_goes_on, ("I11",), within=20),
    Mutation("a controller does not beat", adapters.controllers_do_not_beat, ("I7",)),
    Mutation("a written share is linked for another step", adapters.shares_of_another_step_are_linked, ("I3",), step_changes_in_the_dump, within=20),
    Mutation("a written share is linked with parts that are another rank's now", adapters.shares_with_other_parts_are_linked, ("I5",), base=120),
    Mutation("linked shares are not reported", adapters.linked_shares_are_not_reported, ("I5",), within=60),
    # Two orders, two freezes, two controllers.
    Mutation("of a writer with two orders the second one's parts are not written", memories.second_order_is_lost_with_its_writer, ("I5",), parts_handed_on, within=20),
    Mutation("an answer that comes twice settles another order", memories.repeated_answer_settles_another_order, ("I5",), parts_handed_on, within=20),
    Mutation("an older freeze is obeyed", memories.older_freeze_is_obeyed, ("I9", "I11"), words_come_again, within=20),
    Mutation("an older thaw is obeyed", memories.older_thaw_is_obeyed, ("I7", "I9", RAISED), words_come_again, within=20),
    Mutation("what was published of a staging directory that was given up counts", memories.published_of_an_earlier_freeze_counts, ("I1",), published_comes_again, within=20),
    Mutation("roll-forwards are waited for from the fault's beginning", memories.rolls_are_waited_for_from_the_fault_on, ("I9",), rolls_after_a_long_freeze, within=20),
    Mutation("a torn rank counts for its local copy", memories.torn_ranks_local_copy_counts, ("I3",), raised_in_the_update),
    Mutation("a fault that was reported before a takeover is forgotten, and not reported again", memories.reported_faults_are_forgotten_at_a_takeover, ("I11",), losing.raises_as_the_leader_dies, within=20),
    Mutation("ranks that never came to a standby are not causes", memories.ranks_that_never_came_are_not_causes, ("I11",), holders_die_with_the_controller, within=20),
    Mutation("a standby goes on with a dump only if all had begun it", memories.a_dump_is_gone_on_with_when_all_had_begun_it, ("I11",), silent_until_the_roll_forward),
    # Recoveries without a checkpoint.
    Mutation("a process is ended that is the last holder of a shard", recoveries.last_holder_is_ended, ("I18",), in_place.last_holder_dies_while_another_rolls_forward, within=20),
    Mutation("a process is ended that holds a shard", recoveries.process_is_ended_that_holds_a_shard, ("I9",), in_place.raises_and_the_other_holder_dies, within=40),
    Mutation("a silent process is ended before the step is on disk", recoveries.silent_process_is_ended_before_the_step_is_on_disk, ("I19",), in_place.one_stands_still, within=20),
    Mutation("a silent process is replaced, and runs on", recoveries.silent_process_is_replaced_and_runs_on, ("I17",), in_place.stopped_in_front_of_its_update, within=20),
    Mutation("recoveries at one step never end", recoveries.recoveries_at_one_step_never_end, ("I11",), in_place.dies_again_and_again, within=5),
    Mutation("ranks regroup before the step is published", recoveries.regroups_before_the_step_is_published, ("I20", "I15"), published_first.one_dies, within=5),
    Mutation("what was published is forgotten while all regroup", recoveries.published_step_is_forgotten_while_all_regroup, ("I15", "I9"), published_first.all_die_when_it_is_published, within=20),
    Mutation("gates open before all have regrouped", recoveries.gates_open_before_all_have_regrouped, ("I18",), in_place.one_dies, within=20),
    Mutation("a death while all regroup is not noticed", recoveries.deaths_while_all_regroup_are_not_noticed, ("I9", "I11"), in_place.dies_when_it_has_regrouped, within=20),
    Mutation("what a replacement was given is not compared", recoveries.fills_are_not_compared, ("I18",), in_place.fills_differ, within=20),
    Mutation("training is entered before the gate opens", recoveries.training_is_entered_before_the_gate_opens, ("I7",), in_place.the_last_step_is_rolled_forward, within=20),
    Mutation("ranks that have rolled forward are not asked to regroup", recoveries.rolled_ranks_are_not_asked_to_regroup, ("I7",), in_place.the_last_step_is_rolled_forward, within=20),
    Mutation("what a training thread had begun is gone on with behind a recovery", recoveries.old_turn_goes_on_in_the_new_generation, ("I7",), in_place.one_dies, within=20),
    Mutation("a standby thaws ranks that are half way", recoveries.half_way_is_not_reported_as_final, ("I9", "I11", "I17", "I18"), in_place.one_has_no_order_when_the_controller_dies, within=40),
    Mutation("a rank that is half way is thawed", recoveries.half_way_rank_obeys_a_thaw, ("I17", "I18"), in_place.one_has_no_order_when_the_controller_dies, within=40),
    Mutation("a vacant rank counts as a holder", recoveries.vacant_rank_counts_as_a_holder, ("I3",), in_place.last_holder_dies_beside_a_replacement, within=20),
    Mutation("an order to write is lost while a rank regroups", recoveries.write_order_is_lost_while_a_rank_regroups, ("I9",), in_place.cannot_be_regrouped, within=20),
    Mutation("faults are forgotten when a rank has regrouped", recoveries.faults_are_forgotten_when_a_rank_has_regrouped, ("I14",), in_place.noticed_meanwhile, within=20),
    Mutation("orders to write are forgotten when a rank has regrouped", recoveries.orders_are_forgotten_when_a_rank_has_regrouped, ("I21",), in_place.regroups_after_all_beside_its_write, within=20),
    Mutation("a rank regroups beside its work", recoveries.ranks_regroup_beside_their_work, ("I21",), published_first.slow_publisher_is_passed_over, within=20),
    Mutation("an order to regroup that was lost is not given again", recoveries.order_to_regroup_is_not_said_again, ("I7",), in_place.order_is_lost, within=20),
    Mutation("a training that has returned is entered again", recoveries.training_that_has_returned_is_entered_again, (RAISED,), in_place.training_returns_in_front_of_it, within=5),
    Mutation("agents repeat the exit of a replaced process", recoveries.agents_repeat_the_exit_of_a_replaced_process, ("I7",), in_place.controller_dies_behind_it, within=100),
    # Lost nodes, and spare ones in their places.
    Mutation("rank 0's node is given up like any other", seats.rank_0s_node_is_given_up, ("I22",), in_seats.rank_0s_node_is_lost, within=20),
    Mutation("a rank that comes to a new controller while others write holds nothing", seats.rank_that_comes_while_others_write_holds_nothing, ("I9",), base=4900, within=50),
    Mutation("one spare node takes the places of two", seats.one_spare_node_takes_every_place, ("I22",), in_seats.two_nodes_and_one_spare, within=5),
    Mutation("a node that takes a place stays lost", seats.node_that_takes_a_place_stays_lost, ("I7",), in_seats.a_node_that_is_back_is_a_spare, within=20),
    Mutation("processes of a node that was given up are let in", seats.earlier_processes_are_let_in, ("I11", "I15", "I7"), in_seats.node_is_back_later, within=20),
    Mutation("processes of a node that was given up stay where they came first", seats.earlier_processes_that_came_first_stay, ("I22",), in_seats.those_in_its_place_die_with_the_controller, within=40),
    Mutation("a recovery leaves the generation as it was", seats.recovery_leaves_the_generation_as_it_was, ("I11", "I15", "I7"), in_seats.node_is_back_later, within=20),
    Mutation("ranks of an earlier controller have no time to come", seats.ranks_of_an_earlier_controller_have_no_time_to_come, ("I9",), in_seats.network_is_back_as_the_others_are_given_up, within=100),
    Mutation("one that cannot save ends an earlier controller", seats.one_that_cannot_save_ends_an_earlier_controller, ("I9", "I11"), in_seats.network_is_back_as_the_others_are_given_up, within=100),
    Mutation("orders to end are obeyed however late", seats.orders_to_end_are_obeyed_however_late, ("I9",), in_seats.order_to_end_is_held_by_the_network, within=40),
    Mutation("a standby keeps the ranks of a lost node", seats.standby_keeps_the_ranks_of_a_lost_node, ("I13",), in_seats.controller_dies_behind_a_standby_that_lost_processes_came_to, within=20),
    Mutation("a controller is ended by one that only earlier processes have come to", seats.any_controller_of_a_later_term_takes_over, ("I22",), in_seats.standby_is_on_its_side, within=5),
    # Replicas that differ.
    Mutation("digests are not looked at", divergence.digests_are_not_looked_at, ("I19",), diverged.one_of_two, within=20),
    Mutation("of two that differ the first is right", divergence.first_of_two_is_right, ("I19",), diverged.one_of_two, within=20),
    Mutation("holders that are dead do not count for a majority", divergence.majority_of_those_that_report, ("I19",), diverged.a_right_one_dies, within=40),
    Mutation("holders that never came to a standby do not count for a majority", divergence.holders_that_never_came_do_not_count, ("I18", "I19"), diverged.holders_die_with_the_controller, within=40),
    Mutation("a replica that is proven wrong stays a source", divergence.wrong_replica_stays, ("I19",), diverged.one_of_three, within=20),
    Mutation("a replica that is proven wrong writes", divergence.wrong_replica_writes, ("I19",), diverged.is_never_replaced, within=20),
    Mutation("a step is repaired whose ranks have asked for an end", divergence.repaired_without_being_asked, ("I19",), diverged.stopped, within=20),
    Mutation("a right replica is replaced", divergence.right_replica_is_replaced, ("I19",), diverged.one_of_three, within=20),
    Mutation("digests pass a closed gate", divergence.digests_pass_a_closed_gate, ("I19",), diverged.frozen_as_they_compare, within=100),
    Mutation("a holder without a digest stays a source", divergence.holder_without_a_digest_stays, ("I18", "I19"), diverged.shut_before_its_second_reading, within=20),
    Mutation("what a fill shows is written without another round", divergence.written_without_being_asked_again, ("I19",), diverged.found_by_a_fill, within=20),
    Mutation("digests of a fill are not reported", divergence.fills_are_not_disputed, ("I19",), diverged.found_by_a_fill, within=20),
    Mutation("digests of a fill pass a later freeze", divergence.digests_of_a_fill_pass_a_later_freeze, ("I19",), diverged.asked_again_before_they_compare, within=60),
    Mutation("digests are not reported", divergence.digests_are_not_reported, ("I19",), diverged.one_of_two, within=20),
    # The number of standbys.
    Mutation("lost controllers are not replaced", losing.lost_controllers_are_not_replaced, ("I13",), losing.leader_dies, within=20),
    Mutation("ranks never learn of a new standby", losing.new_standbys_are_sent_to_agents_only, ("I13",), losing.leader_dies, within=20),
    Mutation("no rank sees a standby end", losing.standbys_end_unseen, ("I13",), losing.idle_standby_dies, within=20),
    Mutation("a rank that does not answer is asked alone", losing.mute_ranks_are_waited_for, ("I13",), losing.first_asked_rank_is_mute, within=20),
    Mutation("a rank that cannot start a standby is asked alone", losing.unable_ranks_are_asked_again, ("I13",), losing.first_asked_rank_is_unable, within=20),
    Mutation("ranks look for no controllers", losing.ranks_look_for_no_controllers, ("I13", "I9", "I11", "I7"), losing.word_of_a_standby_is_missed, within=20),
    Mutation("a rank turns to a standby as soon as it has started it", losing.new_standby_is_turned_to_at_once, ("I7",), losing.standby_comes_as_the_leader_dies, within=20),
    Mutation("rank 0 starts no controller", losing.rank_0_starts_no_controller, ("I13",), losing.all_controllers_die, within=20),
    # A notice without a controller.
    Mutation("ranks save together where only some have no controller", unled.some_ranks_without_a_controller_are_enough, ("I14",), unled.some_are_led, within=20),
    Mutation("ranks save together although they have a controller", unled.ranks_with_a_controller_save_alone, ("I14",), unled.some_are_led, within=20),
    Mutation("a rank saves a step that the others go on from", unled.a_rank_saves_where_it_alone_knows, ("I14",), unled.killed, within=20),
    Mutation("a failed save without a controller ends as a good one", unled.a_failed_save_counts, ("I14",), unled.full_disks, within=20),
    Mutation("no rank contributes that every controller is lost", unled.lost_controllers_are_waited_for, ("I14",), unled.killed, within=20),
    Mutation("ranks wait for ever for a controller behind a step", unled.ranks_wait_behind_a_step_for_lost_controllers, ("I14",), unled.killed_in_the_notice, within=20),
    Mutation("ranks that save alone obey a controller", unled.ranks_that_save_alone_obey_a_controller, ("I14",), unled.comes_back, base=180, within=20),
    Mutation("a save without a controller is waited for for ever", unled.a_save_alone_has_no_bound, ("I11",), unled.a_rank_stops_in_the_save, within=20),
    Mutation("ranks that save alone are led by a controller that is back", unled.ranks_that_save_alone_turn_to_controllers, ("I14",), unled.comes_back, within=100),
    # The report of a fault.
    Mutation("faults that are refused are not reported", memories.refused_faults_are_not_reported, ("I15",), within=60),
    Mutation("a report counts steps as lost that were saved", memories.steps_before_the_saved_one_count_as_lost, ("I15",), within=60),
    Mutation("a report of a restart names no checkpoint of an earlier recovery", recoveries.published_step_is_forgotten_behind_a_recovery, ("I15",), published_first.all_die_behind_it, within=20),
    Mutation("a report of a restart names no checkpoint that was reported in an earlier round", memories.checkpoints_of_an_earlier_round_are_forgotten, ("I15",), base=80),
    Mutation("ranks report no checkpoint", adapters.reports_name_no_checkpoint, ("I15",), within=60),
    # Orders.
    Mutation("an order that is said again is carried out again", ranks.orders_are_carried_out_twice, (RAISED,), order_said_again),
    Mutation("a lower term is obeyed", ranks.term_is_not_checked, ("I7", "I9", "I11", RAISED), back_and_forth),
    # The disk.
    Mutation("a write is answered before its fsync", ranks.answers_before_fsync, ("I1",)),
    Mutation("the tracker is replaced before the rename", ranks.tracker_before_rename, ("I4",), disk_full_at_publish),
    Mutation("the tracker goes back", ranks.tracker_goes_back, ("I4",), another_publishes_later),
    Mutation("a published directory is overwritten", ranks.published_directory_is_overwritten, ("I1", "I4", "I8"), idle_controller_dies),
)  # fmt: skip


class NotCaught(AssertionError):
    """No job showed what is wrong."""


def first_caught(mutation: Mutation) -> tuple[int, str]:
    """Return the first seed whose job shows the mutation, and by what. Raises NotCaught."""
    others: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        mutation.patch(patch)
        for seed in range(mutation.base, mutation.base + mutation.within):
            for text in _found(mutation.jobs(seed)):
                if text.startswith(mutation.caught_by):
                    return seed, text
                others.add(text[:60])
    raise NotCaught(
        f"{mutation.name}: no job of {mutation.within} violated {mutation.caught_by}; seen: {sorted(others)[:5]}"
    )


def _found(scenario: Scenario) -> list[str]:
    try:
        return run_and_check(scenario)
    except (AssertionError, KeyError, IndexError, ProtocolError, ValueError) as error:
        return [*scenario.job.violations, f"{RAISED}: {error!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - {mutation.name for mutation in MUTATIONS}):
        parser.error(f"no variant {', '.join(unknown)}: there are {', '.join(m.name for m in MUTATIONS)}")
    failed, began = 0, time.monotonic()
    for mutation in MUTATIONS:
        if names and mutation.name not in names:
            continue
        started = time.monotonic()
        try:
            seed, text = first_caught(mutation)
            print(f"{mutation.name:45} seed {seed:4} in {time.monotonic() - started:4.1f} s  {text[:90]}", flush=True)
        except NotCaught as error:
            failed += 1
            print(error, flush=True)
    print(f"{time.monotonic() - began:.1f} s, {failed} not caught")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
