"""The input of an evaluation: held-out text, the batch size."""

from __future__ import annotations

from metis_hf.evaluation import plan


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ("marked.txt", "marked.jsonl"):
        text = "Nine." if name.endswith("txt") else '{"text": "Nine."}'
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert plan.read_text(tmp_path / name).documents == ["Nine."]


def test_largest_batch_that_fits():
    tried = []

    def fits(size):
        tried.append(size)
        return size <= 40

    assert plan.largest_batch_size(fits, start=256) == 32
    assert tried == [256, 128, 64, 32]
    assert plan.largest_batch_size(lambda size: False) == 1
