"""Conditioners of the published methods, one family per file; their base class is `Conditioner`.

`encode` and `decode` define the saved form of an input; `lab.conditioner_cost` counts FLOPs.
"""
