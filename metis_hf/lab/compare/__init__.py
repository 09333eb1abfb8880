"""Comparing schemes with error bars: every variant trained with the same seeds on the same data.

`plan` says what is compared. Its `tasks`, a variant with a seed each, are trained by `dispatch`, in
one process each (`worker`). `statistics`, `loss_table` and `loss_figures` show the result.
`metis-hf compare` is the command.
"""
