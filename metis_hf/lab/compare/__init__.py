"""Compare schemes with error bars: every variant is trained with the same seeds on the same data.

`plan` defines the comparison. `dispatch` trains its `tasks`, one per variant and seed, each in its
own process (`worker`). `statistics`, `loss_table` and `loss_figures` present the results.
`metis-hf compare` is the command.
"""
