"""Conditioners of the published methods, a family per file; their base class is `Conditioner`.

Each brings `encode` and `decode` (what is saved of an input), and `work` (what it costs).
"""
