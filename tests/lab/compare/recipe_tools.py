"""Recipes as modules, and their arguments as a command line gives them."""

from __future__ import annotations

import importlib.util

from paths import ROOT

from metis_hf.lab.recipe_arguments import parse_arguments

NAMES = ("llama3_8b", "gpt2_1b1", "gpt2_130m")


def recipe(name):
    """Return the recipe of a script."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RECIPE


def config_of(name, smoke=False):
    """Return the config of its model."""
    return recipe(name).config(smoke=smoke)


def arguments(name, *argv):
    """Return the arguments of its command line."""
    found = recipe(name)
    return parse_arguments(found.defaults, found.smoke, argv=list(argv))
