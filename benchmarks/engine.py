"""Compare vLLM on a CPU with the project's own forward pass, on exported checkpoints.

    make engine                                     # tiny models
    make engine ARGS="--smollm2 DIR --piqa FILE"    # and SmolLM2-135M, a transformers checkpoint

vLLM has its own environment, `.engine`, and runs `in_engine.py` there. Its log-probabilities for
sixteen prompts are compared with our fp32 forward pass on the same files. vLLM computes in BF16, so
the yardstick is the effect of BF16 on our own forward pass. Writes results/engine.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from answers import ENGINE, WRITER, ask, beside, greedy, holds, logprobs, served
from safetensors.torch import load_file
from timing import Row, before_start, parse, program_arguments, table, write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from writers import over_models, written

from metis_hf import MetisConfig, calibrate, get_metis_model, load_packed
from metis_hf.data.corpus import stdlib_documents
from metis_hf.deploy import export_checkpoint

MISSING = "vLLM is not installed in .engine; run `make engine` to install it"
SMOLLM2, LORA_BASE = "SmolLM2-135M", "Llama"
PROMPTS, LENGTH = 16, 256  # prompts, tokens of each
STEPS, ITEMS = 150, 50  # training steps, items of PIQA
E4M3 = torch.float8_e4m3fn
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# name -> (architecture, changes to SIZES, fields of MetisConfig)
MODELS: dict[str, tuple[str, Row, Row]] = {
    "Llama": ("Llama", {}, {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "Qwen2": ("Qwen2", {}, {}),
    "Qwen3": ("Qwen3", {}, {}),
    "Gemma": ("Gemma", {"tie_word_embeddings": True}, {}),
    "Phi-3": ("Phi3", {}, {}),
    "Qwen3-MoE, experts in BF16": (
        "Qwen3Moe", EXPERTS, {"modules_to_not_convert": [".*experts.*"]}
    ),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS, {}),
}  # fmt: skip


def prose() -> str:
    """Return the Python reference, English text that every Python installation has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def sources() -> str:
    """Return two modules of the standard library, text that every Python installation has."""
    return "\n\n".join(document.text for document in stdlib_documents()[:2])


def cut(ids: Sequence[int]) -> Tensor:
    """Cut token ids into rows of LENGTH."""
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def tiny(name: str, rows: Tensor) -> PreTrainedModel:
    """Train a small model for a few seconds on rows of bytes, so that its losses are not flat."""
    family, own, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | own)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in rows[: 8 * STEPS].split(8):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def case(
    name: str, model: PreTrainedModel, folder: Path, rows: Tensor, prompts: Tensor, **own: Any
) -> Row:
    """Export a dense model in W4A4, calibrated on rows [b n], and compare implementations on it.

    `own` goes to MetisConfig. Writes the checkpoints "dense", "metis" and "packed" to the folder.
    """
    dense, packed = folder / "dense", folder / "packed"
    model.bfloat16().save_pretrained(dense)  # the reference has the BF16 values of the files
    exact = logprobs(model.float(), prompts)
    get_metis_model(model, MetisConfig(scheme="w4a4", **own))
    calibrate(model, rows.split(4))
    model.save_pretrained(folder / "metis")
    row: Row = {"model": name, "tokens": exact.numel()}
    try:
        export_checkpoint(folder / "metis", packed, format="compressed-tensors")
        export_checkpoint(folder / "metis", folder / "modelopt", format="modelopt")
    except ValueError as error:
        return row | {"refused": str(error)}
    layers, paths = folder / "layers.safetensors", (packed, dense, folder / "modelopt")
    try:
        answered = served(prompts, [[path, None] for path in paths], layers)
    except RuntimeError as error:
        return row | {"refused": said_last(error)}
    of_packed, of_dense, of_modelopt = answered["answers"]
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    ours = load_packed(packed, dtype=torch.float32)
    quantized = logprobs(ours, prompts)
    others = {
        "vllm": torch.tensor(of_packed["logprobs"]),
        "ours_bf16": logprobs(load_packed(packed), prompts),
        "inputs_dense": logprobs(
            load_packed(packed, dtype=torch.float32, activations="high precision"), prompts
        ),
    }
    try:
        theirs = load(packed)
        others["compressed_tensors"] = logprobs(theirs, prompts)
    except RuntimeError:  # transformers 5.23 cannot load fused experts along with packed layers
        theirs = None
    return row | {
        "vllm_version": answered["vllm"],
        "loss": -quantized.mean().item(),
        "w4a4": {key: beside(found, quantized) for key, found in others.items()},
        "dense": {
            "vllm": beside(torch.tensor(of_dense["logprobs"]), exact),
            "transformers_bf16": beside(logprobs(load(dense), prompts), exact),
        },
        "modelopt_equal": of_modelopt == of_packed,
        "greedy": greedy(ours, prompts[0], of_packed["greedy"]),
        "layers": layer_errors(packed, theirs, load_file(layers)),
    }


def said_last(error: RuntimeError) -> str:
    """Return the error that ended vLLM, the last error line of its output."""
    lines = [line for line in str(error).splitlines() if "Error" in line]
    return lines[-1].removeprefix("[rank0]: ")


def weights_alone(folder: Path, prompts: Tensor) -> str:
    """Serve a folder's dense model in W4A16 with vLLM; return "runs" or vLLM's error."""
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    get_metis_model(model, MetisConfig(scheme="w4a16"))
    calibrate(model, prompts.split(4))
    model.save_pretrained(folder / "metis-w4a16")
    export_checkpoint(folder / "metis-w4a16", folder / "w4a16", format="compressed-tensors")
    try:
        served(prompts, [[folder / "w4a16", None]])
    except RuntimeError as error:
        return said_last(error)
    return "runs"


# vLLM's name of a fused layer -> the names of its parts in the checkpoint.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@torch.no_grad()
def layer_errors(packed: Path, theirs: PreTrainedModel | None, calls: dict[str, Tensor]) -> Row:
    """Compare single layers' outputs with fp32 arithmetic, on the BF16 inputs recorded in vLLM.

    `theirs` is the model as computed by the compressed-tensors library, or None if it cannot.
    """
    exact = dict(load_packed(packed, dtype=torch.float32).named_modules())
    ours = dict(load_packed(packed).named_modules())
    names = [name.removesuffix(".x") for name in calls if name.endswith(".x")]
    errors: dict[str, list[float]] = defaultdict(list)
    same, scales = 0, []
    for name in names:
        x, y = calls[f"{name}.x"], calls[f"{name}.y"]
        parent, _, last = name.rpartition(".")
        parts = [last] if name in exact else JOINED[last]
        members = [f"{parent}.{part}" for part in parts]
        expected = torch.cat([exact[member](x.float()) for member in members], -1)
        found = torch.cat([ours[member](x) for member in members], -1)
        outputs = {"vllm": y, "ours_bf16": found}
        if theirs is not None:
            library = [theirs.get_submodule(member)(x) for member in members]
            outputs["compressed_tensors"] = torch.cat(library, -1)
        same += torch.equal(found, y)
        for key, value in outputs.items():
            errors[key].append(((value - expected).norm() / expected.norm()).item())
        # The library divides by 6 in the input's dtype; vLLM and metis_hf divide in fp32.
        amax = x.unflatten(-1, (-1, 16)).abs().amax(-1)
        encode = exact[members[0]].input_global_scale
        twice, once = (amax / 6 * encode).to(E4M3), (amax.float() / 6 * encode).to(E4M3)
        scales.append((twice.float() != once.float()).float().mean().item())
    found = {key: statistics.median(values) for key, values in errors.items()}
    moved = statistics.mean(scales)
    return found | {"count": len(names), "ours_equal_vllm": same, "scales_moved": moved}


def adapter_case(folder: Path, rows: Tensor, prompts: Tensor) -> Row:
    """Train a LoRA adapter over a folder's packed model, and serve both together."""
    from peft import LoraConfig, PeftModel, get_peft_model

    packed, adapter = folder / "packed", folder / "adapter"
    torch.manual_seed(0)
    model = get_peft_model(load_packed(packed), LoraConfig(target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    for batch in rows[-176:-PROMPTS].split(8):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(adapter)
    answered = served(prompts, [[packed, adapter]])["answers"][0]
    exact, ours = (
        logprobs(PeftModel.from_pretrained(load_packed(packed, dtype=dtype), adapter), prompts)
        for dtype in (torch.float32, torch.bfloat16)
    )
    alone = logprobs(load_packed(packed, dtype=torch.float32), prompts)
    theirs = torch.tensor(answered["logprobs"])
    others = {"vllm": theirs, "ours_bf16": ours, "without": alone}
    return {
        "loss": -exact.mean().item(),
        "w4a4": {key: beside(found, exact) for key, found in others.items()},
    }


def piqa(packed: Path, file: Path) -> Row:
    """Run PIQA in lm-eval, with its vLLM backend and with our own model, and count answers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    task = {
        "task": "piqa_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(file.resolve())}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{goal}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "metric_list": [{"metric": "acc"}],
    }
    answers = ask({"evaluate": packed, "task": task, "limit": ITEMS})["answers"]
    theirs = torch.tensor(answers).argmax(1)
    right = torch.tensor([json.loads(line)["label"] for line in file.open()][:ITEMS])
    chosen = {"vllm": theirs}
    tokenizer = AutoTokenizer.from_pretrained(packed)
    for name, dtype in (("ours_fp32", torch.float32), ("ours_bf16", torch.bfloat16)):
        model = HFLM(load_packed(packed, dtype=dtype), tokenizer=tokenizer, batch_size=16)
        found = lm_eval.simple_evaluate(model=model, tasks=[task], limit=ITEMS, bootstrap_iters=0)
        samples = sorted(found["samples"]["piqa_local"], key=lambda sample: sample["doc_id"])
        ours = [[choice[0] for choice in one["filtered_resps"]] for one in samples]
        chosen[name] = torch.tensor(ours).argmax(1)
    return {
        "task": "piqa",
        "items": ITEMS,
        "right": {name: (each == right).sum().item() for name, each in chosen.items()},
        "chosen_as_vllm": {name: (each == theirs).sum().item() for name, each in chosen.items()},
    }


def markdown(record: Row) -> str:
    """Return the record's table."""
    cells = []
    for row in record["rows"]:
        if "refused" in row:
            cells.append([row["model"], "not run", *[""] * 7])
            continue
        found, own = row["w4a4"]["vllm"], row["w4a4"]["ours_bf16"]
        library, greedy = row["w4a4"].get("compressed_tensors"), row["greedy"]
        cells.append(
            [
                row["model"],
                f"{row['loss']:.3f}",
                f"{found['difference']:+.4f} ± {found['error']:.4f}",
                f"{library['difference']:+.4f} ± {library['error']:.4f}" if library else "",
                *(f"{each['rms']:.3f}" if each else "" for each in (found, own, library)),
                f"{greedy['same']} of {greedy['of']}",
                "yes" if holds(found, own) else "no",
            ]
        )
    columns = ["W4A4 of", "loss, ours in fp32", "vLLM", "compressed-tensors"]
    columns += [f"a token: {name}" for name in ("vLLM", "ours in BF16", "compressed-tensors")]
    return table([*columns, "greedy tokens", "within the bound"], cells)


def main() -> None:
    parser = program_arguments(__doc__)
    parser.add_argument(
        "--smollm2", type=Path, help="directory of SmolLM2-135M as a transformers checkpoint"
    )
    parser.add_argument("--piqa", type=Path, help="JSON Lines file of PIQA, to evaluate SmolLM2 on")
    args = parse(parser)
    if not (ENGINE.exists() and WRITER.exists()):
        sys.exit(MISSING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record: Row = {"machine": before_start(), "rows": []}
    rows, code = (cut(list(text().encode("utf-8"))) for text in (prose, sources))
    prompts = rows[-PROMPTS:]
    compared: list[Row] = []
    record["llm-compressor"] = {"models": compared}

    def compare(name: str, folder: Path, rows: Tensor, texts: dict[str, Tensor]) -> None:
        compared.append({"model": name, **written(folder, rows, texts)})
        write(args.out, "engine", record)

    with tempfile.TemporaryDirectory() as work:
        for name, (family, _, own) in MODELS.items():
            if args.quick and name != LORA_BASE:
                continue
            folder = Path(work) / name
            record["rows"].append(case(name, tiny(name, rows), folder, rows[:32], prompts, **own))
            write(args.out, "engine", record)
            if name == LORA_BASE:
                record["adapter"] = adapter_case(folder, rows, prompts)
                record["w4a16"] = weights_alone(folder, prompts)
            if family != "Qwen3Moe":
                compare(name, folder, rows[:32], {"prose": prompts, "code": code[:PROMPTS]})
        record["llm-compressor"]["over_tiny"] = over_models(compared)
        if args.smollm2 is not None:
            tokenizer = AutoTokenizer.from_pretrained(args.smollm2)
            rows, code = (
                cut(tokenizer(text)["input_ids"]) for text in (prose()[-200_000:], sources())
            )
            prompts = rows[-PROMPTS:]
            model = AutoModelForCausalLM.from_pretrained(args.smollm2, dtype=torch.float32)
            folder = Path(work) / SMOLLM2
            record["rows"].append(case(SMOLLM2, model, folder, rows[:4], prompts))
            write(args.out, "engine", record)
            compare(SMOLLM2, folder, rows[:4], {"prose": prompts, "code": code[:PROMPTS]})
            if args.piqa is not None:
                tokenizer.save_pretrained(folder / "packed")
                record["lm-eval"] = piqa(folder / "packed", args.piqa)
    print(markdown(record))
    write(args.out, "engine", record)


if __name__ == "__main__":
    main()
