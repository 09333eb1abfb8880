"""Conditioners of the published methods, a family per file; the protocol is in `operands`.

Each brings `encode` and `decode` (what is saved of an input), and `work` (what it costs).
"""
