"""The files of accelerate beside the recipes, as accelerate reads them."""

from __future__ import annotations

import os

import pytest
import yaml
from paths import ROOT


@pytest.mark.parametrize("name", ["1gpu", "8gpu_fsdp2", "multinode_fsdp2", "cpu"])
def test_accelerate_reads_them(name):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(ROOT / f"recipes/accelerate/{name}.yaml"))
    assert loaded.num_processes == {"8gpu_fsdp2": 8, "multinode_fsdp2": 32}.get(name, 1)
    assert loaded.use_cpu == (name == "cpu")


@pytest.mark.parametrize("name", ["8gpu_fsdp2", "multinode_fsdp2"])
def test_the_launcher_makes_fsdp2_of_them(name, monkeypatch):
    """Through the launcher's own parser and the environment that it hands to processes."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = ROOT / f"recipes/accelerate/{name}.yaml"
    given = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    given, *_ = _validate_launch_command(given)
    for key, value in prepare_multi_gpu_env(given).items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading
    assert "FULL" in str(plugin.state_dict_type)
    options = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(yaml.safe_load(path.read_text())["fsdp_config"]) <= set(options)
