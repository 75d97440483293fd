"""Faults of weights that are broadcast to vLLM's servers. Each entry has a name, a file, a string that occurs once in
the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

B, T, S, P = (
    f"mmrl/generation/{name}.py"
    for name in ("weight_sync/buckets", "weight_sync/transfer", "vllm/servers", "vllm/processes")
)
F = "generation/test_transfer.py::test_"
PACKED = (f"{F}what_comes_out_of_buckets_is_what_went_in",)
SHARED = (f"{F}small_tensors_share_a_bucket_and_a_large_one_has_its_own",)
VERSIONS = (f"{F}all_servers_have_each_version_through_one_group",)
RESTARTED = (f"{F}a_server_that_was_started_again_is_in_the_next_broadcast",)
BETWEEN = (f"{F}one_that_was_started_again_between_broadcasts_gets_what_was_sent_last",)
MIDDLE = (f"{F}a_server_that_is_lost_in_the_middle_costs_no_weights",)
SILENT = (f"{F}a_server_that_keeps_silent_is_named_in_time",)
STUCK = (f"{F}a_server_that_falls_silent_in_the_middle_is_named_with_what_it_has",)
OTHERS = (f"{F}other_ranks_take_part_in_gathering_alone_and_wait_for_rank_0",)
MEETING = (f"{F}the_meeting_place_is_an_address_that_other_hosts_reach",)
STARTED = (f"{F}servers_that_are_started_here_are_told_to_wait_for_their_weights",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("bucket: tensors lie at any byte", B, "-(-entry.bytes // ALIGNED) * ALIGNED", "entry.bytes", PACKED),
    ("bucket: of any size", B, "if entries and filled + padded_bytes(entry) > size:", "if False:", SHARED),
    ("broadcast: the old group serves one that was started again", T, "last is not None and {state",
     "last is not None or {state", RESTARTED),
    ("broadcast: what an engine missed is not given again", T, 'if all(state["base"] == weights.base for state in '
     "standings):", "if standings:", BETWEEN),
    ("broadcast: every engine gets it twice", T, 'if all(state["base"] == weights.base for state in standings):',
     "if False:", VERSIONS),
    ("broadcast: the copy ends where the broadcast broke off", T,
     "        for _ in buckets:  # stores those that an error has left\n            pass\n", "", MIDDLE),
    ("broadcast: the copy grows with each version", T, "        self.last_sent = []\n        buckets", "        buckets",
     VERSIONS),
    ("broadcast: other ranks give what they have not", T, "if self.rank != 0:", "if False:", OTHERS),
    ("broadcast: members wait for a trainer that gave up", T, "for number in (sent, sent + 1):",
     "for number in (sent,):", STUCK),
    ("broadcast: the first server is always the silent one", T, "key=lambda i: (receiving[i].done(), firsts[i] not in "
     "absent, reached[i])", "key=lambda i: i", SILENT),
    ("broadcast: workers have ranks of others", T, "initial=1))[:-1]", "initial=0))[:-1]", VERSIONS),
    ("broadcast: announcements stay", T, "        nccl.remove_headers(group, base, sent)\n", "", VERSIONS),
    ("broadcast: the meeting place is the first server's", T,
     " if not ipaddress.ip_address(address).is_loopback), ", "), ", MEETING),
    ("broadcast: the key is not heard", S, 'settings.transfer == "broadcast"', 'settings.transfer == "broadcasts"',
     STARTED),
    ("broadcast: engines look for weights where none are", P, " | self.loading", "", STARTED),
]
