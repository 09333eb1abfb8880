"""Text to chunked training sequences, filtered as in arXiv:2509.00404: see docs/data.md.

python recipes/prepare_data.py --tokenizer meta-llama/Meta-Llama-3-8B --output-dir data/dclm \
    --seq-len 1024 --max-tokens 100000000000 --num-proc 32
python recipes/prepare_data.py --tokenizer path --output-dir data/mine --files 'text/*.jsonl.gz'
"""

from transformers import HfArgumentParser

from metis_hf.data import PrepareArguments, prepare


def main() -> None:
    parser = HfArgumentParser(PrepareArguments, description=__doc__)
    try:
        (arguments,) = parser.parse_args_into_dataclasses()
        report = prepare(arguments)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"prepare_data.py: {error}\n")
    read = report["read"]["documents"]
    for name, entry in report["filters"].items():
        dropped = entry["dropped"]
        print(
            f"{name:<12} dropped {dropped['documents']:>9} of {read} documents, "
            f"{100 * dropped['share_of_characters']:.2f} % of the characters"
        )
    for split in ("train", "validation"):
        counts = report[split]
        print(
            f"{split:<12} {counts['documents']} documents, {counts['sequences']} sequences of "
            f"{arguments.seq_len} tokens"
        )
    print(f"in {arguments.output_dir}; details in report.json there")


if __name__ == "__main__":
    main()
