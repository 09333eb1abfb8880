"""Arguments of a preparation, checked once; and which of them decide the output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Where the result goes and how many processes make it changes no byte of it.
NOT_IN_RESULT = ("output_dir", "num_proc")


@dataclass
class PrepareArguments:
    """Options of `metis_hf.data.prepare`; the fields of `recipes/prepare_data.py --help`.

    Raises:
        ValueError: If a number is out of range, or `files` is no list of paths.
    """

    output_dir: str = field(
        metadata={"help": "Where the shards go; a run that was stopped continues there."}
    )
    tokenizer: str = field(
        metadata={"help": "Tokenizer of the model to train: a path or a hub name."}
    )
    dataset: str = field(
        default="mlfoundations/dclm-baseline-1.0",
        metadata={"help": "Hub name of the dataset, read as a stream."},
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    files: list[str] | None = field(
        default=None,
        metadata={
            "help": "Local files instead of --dataset: paths or glob patterns of one kind, "
            ".jsonl or .txt (one document per line or per file; also .gz, .zst, .xz, .bz2) or "
            ".parquet.",
            "nargs": "+",
        },
    )
    text_column: str = field(
        default="text", metadata={"help": "Column with the text; not used for .txt."}
    )
    seq_len: int = field(default=4096, metadata={"help": "Tokens per sequence."})
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Stop reading when this many tokens have passed the text filters; the "
            "perplexity filter then removes its share. Default: read everything."
        },
    )
    validation_share: float = field(
        default=0.005,
        metadata={
            "help": "Share of documents, chosen by a hash of their text, that goes to validation/."
        },
    )
    perplexity_filter: bool = field(
        default=True,
        metadata={
            "help": "Whether documents are dropped whose perplexity is more than two standard "
            "deviations from the mean; --no-perplexity-filter keeps them."
        },
    )
    reference_model: str = field(
        default="Qwen/Qwen3-0.6B",
        metadata={"help": "Causal LM that measures perplexity: a path or a hub name."},
    )
    perplexity_tokens: int = field(
        default=1024,
        metadata={"help": "A document is scored on at most this many of its first tokens."},
    )
    perplexity_batch_size: int = field(
        default=8, metadata={"help": "Documents per forward pass of the scorer."}
    )
    documents_per_part: int = field(
        default=10_000,
        metadata={
            "help": "Documents handled at a time: what a kill can lose, and what memory must hold."
        },
    )
    sequences_per_shard: int = field(default=8192, metadata={"help": "Sequences per output file."})
    num_proc: int = field(default=1, metadata={"help": "Processes that filter and tokenize."})

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            raise ValueError(f"files={self.files!r} is one string; give a list, [{self.files!r}]")
        if self.files is not None and not self.files:
            raise ValueError("files is empty; give paths, or None to read the dataset")
        minimum = {
            "seq_len": 2,
            "max_tokens": 1,
            "perplexity_tokens": 1,
            "perplexity_batch_size": 1,
            "documents_per_part": 1,
            "sequences_per_shard": 1,
            "num_proc": 1,
        }
        for name, least in minimum.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}; choose at least {least}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(
                f"validation_share={self.validation_share}; choose at least 0 and less than 1"
            )

    def in_result(self) -> dict[str, Any]:
        """Return the arguments that decide the output, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_IN_RESULT}
