"""Comparing schemes with error bars: every variant trained with the same seeds on the same data.

`plan` says what is compared, `run` trains it (each run in a process of its own, `worker`), and
`statistics`, `table` and `figures` say what came out. `metis-hf compare` is the command.
"""
