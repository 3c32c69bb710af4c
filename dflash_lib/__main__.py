"""The same things from a shell: ``python -m dflash_lib COMMAND``.

Exit codes: 0 done, 1 the run failed or a threshold was hit, 2 the user's error, 130 / 143 for signals.
"""
