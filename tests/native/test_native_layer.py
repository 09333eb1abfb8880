"""Layers whose GEMMs run natively, with a slow `scaled_mm`: they compute as in emulation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import llama
from design import cases
from layers.layer_tools import layer_of
from tensors import assert_same

from metis_hf import MetisConfig, get_metis_model, metis_layers, set_precision
from metis_hf.conversion.hub import MetisConfigLoader
from metis_hf.lab.fidelity.layer_errors import only
from metis_hf.lab.fidelity.subject import converted, running
from metis_hf.layers import native as layer_native
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.make import convert_linear
from metis_hf.layers.native import obstacle
from metis_hf.numerics import Tile, native
from metis_hf.numerics.native import use_gemm
from metis_hf.operands import Hadamard, Operand, RandomHadamard
from metis_hf.schemes import Role, build_scheme
from metis_hf.training.weight_reuse import reuse_weights
from native.slow_gemm import SlowGemm
from native.test_native_matrix import NATIVE

EPS = 2.0**-23


def call(layer, x, dy):
    """y and the gradients of a call."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def norms(plan: GemmPlan, role: Role, matrix) -> torch.Tensor:
    """Of the rows that a GEMM multiplies, float64."""
    weight = role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
    hat = plan.weight_operand(role, matrix) if weight else plan.matrix_operand(role, matrix)
    across = role in (Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)
    return hat.values.double().norm(dim=0 if across else 1)


@cases(
    {"scheme": [scheme for scheme in NATIVE if "mxfp4" not in scheme]},
    rotated={"shape": [(64, 64, 32), (37, 40, 24)]},
)
def test_forward_and_backward_are_those_of_emulation(scheme, shape):
    """Up to the order of sums, in fp32."""
    t, i, o = shape
    changes = {"rank": 3} if scheme == "metis" else {}
    _, layer = layer_of(scheme, "contraction", i=i, o=o, **changes)
    x, dy = torch.randn(t, i), torch.randn(t, o) * 1e-3
    emulated = call(layer, x, dy)
    layer.set_config(layer.config.replace(backend="native"))
    for buffer in layer.state_buffers().values():
        buffer.zero_()
    slow = SlowGemm()
    with use_gemm(slow):
        computed = call(layer, x, dy)
    # Split inputs and gradients: fprop and dgrad two products, wgrad four.
    assert len(slow.calls) == (2 + 2 + 4 if scheme == "metis" else 3)

    keys = layer.call_keys(x)
    plan = GemmPlan(
        layer.scheme,
        layer.weight_form,
        torch.float32,
        keys,
        state=layer.call_state(x, keys),
    )
    params = layer.weight_params()
    sizes = {
        "y": (norms(plan, Role.FPROP_INPUT, x), norms(plan, Role.FPROP_WEIGHT, params), i),
        "x": (norms(plan, Role.DGRAD_GRAD_OUTPUT, dy), norms(plan, Role.DGRAD_WEIGHT, params), o),
        "weight": (norms(plan, Role.WGRAD_GRAD_OUTPUT, dy), norms(plan, Role.WGRAD_INPUT, x), t),
    }
    for name, (left, right, n) in sizes.items():
        # The corrections of metis are of coordinates that emulation has to the bit.
        bound = (n + 32) * EPS * left[:, None] * right
        difference = (computed[name] - emulated[name]).double().abs()
        if scheme == "omniquant" and name == "weight":
            bound = bound + 4 * bound.amax(1, keepdim=True)  # clipped gradients go to one element
        assert (difference <= bound).all(), (name, (difference / bound).max())
    assert torch.equal(computed["bias"], emulated["bias"])


@pytest.mark.parametrize("mode", [{}, {"conv1d": True}])
def test_mxfp4_in_bf16_is_equal_to_the_bit(mode):
    """Scales are powers of two and sums short: nothing is rounded but the result, to BF16."""
    o, i = 32, 64
    weight = torch.randn(i, o) if mode else torch.randn(o, i)
    module = transformers.pytorch_utils.Conv1D(o, i) if mode else torch.nn.Linear(i, o)
    module.weight.data = weight
    module.to(torch.bfloat16)
    config = MetisConfig(scheme="mxfp4", operand_mode="contraction")
    layer = convert_linear(module, config, name="layer").train()
    x = torch.randn(2, 32, i, dtype=torch.bfloat16)
    dy = torch.randn(2, 32, o, dtype=torch.bfloat16)
    emulated = call(layer, x, dy)
    layer.set_config(config.replace(backend="native"))
    with use_gemm(slow := SlowGemm()):
        computed = call(layer, x, dy)
    assert len(slow.calls) == 3
    assert_same(computed, emulated)


@pytest.mark.parametrize("scheme", ["metis", "nvidia", "quartet2"])
def test_evaluation_and_autocast(scheme):
    _, layer = layer_of(scheme, "contraction", rank=3, backend="native")
    layer.eval()
    x = torch.randn(2, 5, 48)
    with use_gemm(SlowGemm()), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outs = [layer(x) for _ in range(3)]  # from the second on of codes that are held
        assert layer(x[:0]).shape == (0, 5, 32)
    with use_gemm(SlowGemm()):
        assert not call(layer.train(), x[0, :0], x[0, :0, :32])["weight"].any()
    layer.eval()
    layer.set_config(layer.config.replace(backend="emulated"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        emulated = layer(x)
    assert outs[0].dtype is torch.bfloat16
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    # Three roundings to BF16 against two.
    assert (outs[0] - emulated).float().norm() < 3 * 2.0**-8 * emulated.float().norm()


def test_weights_are_packed_once_a_step(monkeypatch):
    """Both layouts, at the first micro-batch; other weights, others."""
    made = []
    form = type(layer_of("nvidia")[1].weight_form)
    encode = form.encode
    monkeypatch.setattr(
        form, "encode", lambda *args, **kw: made.append(kw["dim"]) or encode(*args, **kw)
    )
    _, layer = layer_of("nvfp4-rne", "contraction", backend="native")
    x, dy = torch.randn(32, 48), torch.randn(32, 32)
    with use_gemm(SlowGemm()):
        plain = call(layer, x, dy)
        made.clear()
        with reuse_weights(torch.nn.Sequential(layer)):
            first = call(layer, x, dy)
            assert made == [-1, -1]  # square tiles, laid out for fprop and for dgrad
            second = call(layer, x, dy)
            assert made == [-1, -1]
            with torch.no_grad():
                layer.weight.mul_(2)
            call(layer, x, dy)
            assert made == [-1] * 4
    assert_same(first, plain)
    assert_same(second, plain)


def test_a_frozen_weight_is_rounded_anew_in_each_micro_batch():
    """As under adapters, for dgrad: in emulation, too."""
    _, layer = layer_of("tetrajet2", "contraction", backend="native")
    layer.weight.requires_grad_(False)
    dy, batches = torch.randn(32, 32), [torch.randn(32, 48) for _ in range(2)]
    with use_gemm(SlowGemm()):
        plain = [call(layer, x, dy)["x"] for x in batches]
        with reuse_weights(torch.nn.Sequential(layer)):
            assert all(map(torch.equal, [call(layer, x, dy)["x"] for x in batches], plain))
    assert not torch.equal(*plain)


class TestWhatCannotRun:
    @pytest.mark.parametrize(
        ("scheme", "changes", "said"),
        [
            ("nvfp4", {}, 'dgrad uses the copy of its weight .* operand_mode="contraction"'),
            ("metis", {}, "dgrad uses the copy of its weight"),
            ("nvidia", {"format": "mxfp8-e4m3"}, "fprop takes its input in mxfp8-e4m3"),
            ("w4a4", {}, "dgrad takes its grad_output in high precision, but the other operand"),
            ("w4a16", {}, "fprop takes its input in high precision"),
            ("metis-paper", {}, "its weight is stored as factors .* split_weight=False"),
            (
                "occ",
                {"operand_mode": "contraction"},
                "fprop is not a product .* Clamped of its input",
            ),
            ("smoothquant", {"operand_mode": "contraction"}, "PerChannel of its input and"),
            (
                "halo",
                {"operand_mode": "contraction"},
                r"dgrad uses the copy of its weight that is rotated .* contracts\. backend=",
            ),
        ],
    )
    def test_is_refused_by_name(self, scheme, changes, said):
        config = MetisConfig(scheme=scheme, backend="native", **changes)
        model = llama()
        before = {name: type(module) for name, module in model.named_modules()}
        match = rf"q_proj: backend=\"native\" cannot run scheme '{scheme}' on FP4 units: .*{said}"
        with use_gemm(SlowGemm()), pytest.raises(ValueError, match=match):
            get_metis_model(model, config)
        assert {name: type(module) for name, module in model.named_modules()} == before
        report = get_metis_model(model, config.replace(backend="auto")).metis_report
        assert all(layer.emulated and not layer.native for layer in report.layers)

    def test_without_such_a_gpu(self):
        config = MetisConfig(scheme="nvidia", backend="native")
        with pytest.raises(ValueError, match=r"not on an NVIDIA GPU|compute capability"):
            get_metis_model(llama(), config)

    def test_a_call_elsewhere(self):
        """The model was converted where there was a GPU, and is called on a CPU."""
        _, layer = layer_of("nvidia", backend="native")
        x = torch.randn(4, 48)
        said = r"layer: backend=\"native\" .* the tensors are on 'cpu'"
        with pytest.raises(ValueError, match=said):
            layer(x)
        auto, emulated = (layer_of("nvidia")[1] for _ in range(2))
        auto.set_config(auto.config.replace(backend="auto"))
        auto.load_state_dict(emulated.state_dict())
        assert torch.equal(auto(x), emulated(x))

    @pytest.mark.parametrize(
        ("scheme", "dtype", "gives"),
        [
            ("nvidia", torch.float64, "nvfp4 GEMM returns bfloat16 or float16 or float32"),
            ("mxfp4", torch.float32, "mxfp4 GEMM returns bfloat16"),
        ],
    )
    def test_in_another_precision(self, scheme, dtype, gives):
        _, layer = layer_of(scheme, "contraction", dtype=dtype, backend="native")
        with use_gemm(SlowGemm()), pytest.raises(ValueError, match=f"{gives}, but the model needs"):
            layer(torch.randn(4, 48, dtype=dtype))

    @pytest.mark.parametrize(
        ("capability", "fmt", "runs"),
        [
            ((12, 0), "nvfp4", True),
            ((9, 0), "nvfp4", False),
            ((10, 0), "mxfp4", True),
            ((12, 0), "mxfp4", False),
        ],
    )
    def test_capabilities(self, monkeypatch, capability, fmt, runs):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU of a test")
        # Answers are kept by device: one that no machine has.
        device = torch.device("cuda", 100 + capability[0])
        reason = native.obstacle_of_device(device, fmt)
        assert (reason is None) is runs
        if not runs:
            assert reason.startswith("GPU of a test has compute capability")

    def test_a_model_is_converted_for_the_gpu_that_it_will_be_moved_to(self, monkeypatch):
        """On the CPU, or before there is storage."""
        for device in ("cpu", "meta"):
            assert native.device_to_be(torch.device(device)).type == "cpu"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        for device, wanted in (("cpu", "cuda:3"), ("meta", "cuda:3"), ("cuda:1", "cuda:1")):
            assert native.device_to_be(torch.device(device)) == torch.device(wanted)
        asked = []
        monkeypatch.setattr(layer_native, "obstacle_of_device", lambda *of: asked.append(of))
        scheme = build_scheme(config := MetisConfig(scheme="nvidia", backend="auto"), 64, 64)
        assert layer_native.why_emulated(config, scheme, torch.device("cpu")) is None
        assert asked == [(torch.device("cuda:3"), "nvfp4")]

    def test_a_torch_without_the_gemm(self, monkeypatch):
        monkeypatch.delattr(torch.nn.functional, "scaled_mm")
        report = get_metis_model(llama(), MetisConfig(scheme="nvidia", backend="auto")).metis_report
        assert "GEMMs emulated in 14 layers: torch 2." in str(report)
        with pytest.raises(
            ValueError, match=r"has no torch.nn.functional.scaled_mm, which needs torch 2.13"
        ):
            get_metis_model(llama(), MetisConfig(scheme="nvidia", backend="native"))

    def test_a_copy_shared_between_gemms(self):
        """Square tiles let a weight be shared, and no other tensor."""
        scheme = build_scheme(MetisConfig(scheme="nvidia"), 64, 64)
        assert scheme.dgrad_weight is None
        assert obstacle(scheme) is None
        square = replace(scheme.fprop_input.quantizer, tile=Tile.SQUARE)
        shared = replace(scheme, fprop_input=Operand(square), wgrad_input=None)
        assert "wgrad uses the copy of its input" in obstacle(shared)
        rotated = replace(
            scheme,
            fprop_input=replace(scheme.fprop_input, conditioner=Hadamard()),
            fprop_weight=replace(scheme.fprop_weight, conditioner=Hadamard()),
            dgrad_grad_output=replace(scheme.dgrad_grad_output, conditioner=Hadamard()),
        )
        assert rotated.reuses(Role.DGRAD_WEIGHT)
        assert "dgrad uses the copy of its weight that is rotated along a different" in obstacle(
            rotated
        )

    def test_rotations_with_signs_of_their_own(self):
        """They cancel only where one operand takes the other's."""
        scheme = build_scheme(MetisConfig(scheme="quartet2"), 64, 64)
        assert obstacle(scheme) is None
        operand = scheme.wgrad_grad_output
        alone = replace(operand, conditioner=RandomHadamard(operand.conditioner.seed))
        assert "wgrad is not a product of codes" in obstacle(
            replace(scheme, wgrad_grad_output=alone)
        )


def test_report_says_what_runs_where():
    config = MetisConfig(scheme="nvidia", backend="auto", scheme_pattern={"down_proj": "occ"})
    with use_gemm(SlowGemm()):
        report = get_metis_model(llama(), config).metis_report
    lines = str(report).splitlines()
    assert "  GEMMs on FP4 units: 12 layers" in lines
    (emulated,) = [line for line in lines if "emulated" in line]
    assert emulated.startswith("  GEMMs emulated in 2 layers: fprop is not a product of codes")
    data = json.loads(json.dumps(report.to_dict()))
    assert sum(layer["native"] for layer in data["layers"]) == 12
    report = get_metis_model(llama(), MetisConfig(scheme="nvidia")).metis_report
    assert "FP4 units" not in str(report)
    assert "emulated" not in str(report)


def test_products_of_attention_are_emulated_and_said_so():
    config = MetisConfig(scheme="nvidia", backend="auto", attention="nvidia")
    with use_gemm(SlowGemm()):
        lines = str(get_metis_model(llama(), config).metis_report).splitlines()
        assert any(line.startswith("  attention products emulated: FP4 units") for line in lines)
        with pytest.raises(ValueError, match=r'backend="native" .*attention=.*which emulates'):
            get_metis_model(llama(), config.replace(backend="native"))


def test_one_operand_alone_is_measured_in_emulation():
    """As `metis-hf fidelity` does: FP4 units do not multiply four bits by sixteen."""
    model, rows = llama(), torch.arange(16).reshape(1, -1)
    config = MetisConfig(scheme="nvidia", backend="auto")
    with use_gemm(SlowGemm()), converted(model, config) as layers:
        alone = {n: only(layer.scheme, "input") for n, layer in layers.items()}
        with running(layers, alone):
            found = model(rows).logits
        with running(layers):
            exact = model(rows).logits
    assert found.isfinite().all()
    assert not torch.equal(found, exact)


def test_layers_in_high_precision_are_no_obstacle():
    config = MetisConfig(scheme="nvidia", backend="native", scheme_pattern={"o_proj": "bf16"})
    with use_gemm(slow := SlowGemm()):
        model = get_metis_model(llama(), config)
        ids = torch.randint(0, 64, (1, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(slow.calls) == 12 * 3
        (line,) = [line for line in str(model.metis_report).splitlines() if "GEMMs" in line]
        assert line == "  GEMMs on FP4 units: 12 layers"
        set_precision(model, high_precision=("forward", "backward"))
        model(input_ids=ids)
    assert len(slow.calls) == 12 * 3
    assert "GEMMs" not in str(model.metis_report)  # neither there nor emulated


@pytest.mark.parametrize(("passes", "gemms"), [(("forward",), 2), (("backward",), 1)])
def test_gemms_in_high_precision_stay_there(passes, gemms):
    """As towards the end of a run, with PrecisionSchedule."""
    _, layer = layer_of("nvidia", high_precision=passes)
    x, dy = torch.randn(32, 48), torch.randn(32, 32)
    emulated = call(layer, x, dy)
    layer.set_config(layer.config.replace(backend="native"))
    with use_gemm(slow := SlowGemm()):
        computed = call(layer, x, dy)
    assert len(slow.calls) == gemms
    exact = {"forward": ["y"], "backward": ["x", "weight"]}[passes[0]]
    for name, value in emulated.items():
        assert torch.allclose(computed[name], value, rtol=1e-4, atol=1e-4 * value.abs().max())
        assert torch.equal(computed[name], value) or name not in exact


def test_a_scheme_that_cannot_run_is_refused_before_a_switch():
    with use_gemm(SlowGemm()):
        model = get_metis_model(llama(), MetisConfig(scheme="nvidia", backend="native"))
    with pytest.raises(ValueError, match=r"fprop is not a product .*; nothing was changed"):
        set_precision(model, scheme="occ", operand_mode="contraction")
    assert {layer.config.scheme for _, layer in metis_layers(model)} == {"nvidia"}


def test_a_checkpoint_asks_for_no_hardware(tmp_path):
    config = MetisConfig(scheme="nvidia", backend="native")
    assert MetisConfig.from_json(config.to_json()) == config
    assert "backend" not in MetisConfig().to_dict()
    with use_gemm(SlowGemm()):
        get_metis_model(llama(), config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.config.backend for _, layer in metis_layers(model)} == {"auto"}
    assert MetisConfigLoader.from_dict(config.to_dict()).backend == "auto"
    model(input_ids=torch.randint(0, 64, (1, 8)))
