"""Rewards of programs in responses: a program runs in a confined process, and what it computes or draws is compared.

The process never gets the gold answer, so that no program can look it up. A new kind of program is a function of
`executors.py`, which runs in the process, and a reward beside `charts.py`, which compares. tests/rewards/programs runs
forty hostile programs against each.
"""
