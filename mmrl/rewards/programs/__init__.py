"""Rewards of a program in the response: it is run in a confined process, and what it computes or draws is compared.

The process never holds the gold answer, so no program can look it up. A new kind of program is a function of
`executors.py`, which the process runs, and a reward beside `charts.py`, which compares; tests/rewards/programs runs
forty hostile programs against each.
"""
