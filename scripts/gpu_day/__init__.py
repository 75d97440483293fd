"""The first hour on a GPU; see scripts/gpu_day.sh."""
