"""Attacks mmrl's client of vLLM by servers on loopback that give bad answers.

    python scripts/attack/servers.py [--only PATTERN]

Each kind of bad answer is tried with this server alone, and with a good server beside it. Alone, the run has to end by
one line that names the server. With a good server, the batch has to be right, or the bad server has to be named. No bad
answer may be accepted, and nothing may hang or repeat requests without end.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.whole_runs.bad_servers import Outcome, tried  # noqa: E402
from tests.whole_runs.stand_in_server import FIRST_TABLE, KINDS, ON_THE_WIRE  # noqa: E402

GOOD = {"named", "corrected"}


def row(kind: str, alone: Outcome, beside: Outcome) -> str:
    counts = f"{alone.asked:>3} in {alone.seconds:4.1f} s"
    return f"| {kind} | {alone.how}, {counts} | {beside.how}, {beside.asked} | {alone.words[:160]} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="try the kinds of answers whose name matches this pattern")
    only = parser.parse_args().only
    kinds = [*FIRST_TABLE, *(kind for kind in (*KINDS, *ON_THE_WIRE) if kind not in FIRST_TABLE)]
    kinds = [kind for kind in kinds if re.search(only, kind)]
    print("| a server that answers with | alone, requests | beside a good one, requests | what is said |")
    print("| --- | --- | --- | --- |")
    counted: Counter[str] = Counter()
    for kind in kinds:
        alone, beside = tried(kind), tried(kind, beside_a_good_one=True)
        counted.update((alone.how, beside.how))
        print(row(kind, alone, beside), flush=True)
    print(f"\n{len(kinds)} kinds: {dict(counted)}")
    return 0 if set(counted) <= GOOD else 1


if __name__ == "__main__":
    sys.exit(main())
