"""Schemes from outside: a user's file or module, and the entry points of installed packages."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from forked import python
from paths import ROOT

from metis_hf import MetisConfig, get_metis_model, scheme_names
from metis_hf.numerics import Quantizer, formats
from metis_hf.operands import HIGH_PRECISION
from metis_hf.schemes import (
    Role,
    Scheme,
    absolute_source,
    build_scheme,
    import_schemes,
    register_scheme,
    registry,
    scheme_info,
    source_digests,
)

SCHEME = """
from metis_hf.schemes.parts import (
    Hadamard, MetisConfig, Operand, Scheme, in_mode, nearest_forward, register_scheme,
)

@register_scheme("{name}", summary="rotated inputs", source="a test")
def build(config: MetisConfig, rank: int) -> Scheme:
    forward, backward = nearest_forward(config)
    scheme = Scheme(
        fprop_input=Operand(forward, Hadamard()),
        fprop_weight=Operand(forward, Hadamard()),
        dgrad_grad_output=Operand(backward),
    )
    return in_mode(scheme, config.operand_mode or "shared")
"""


FORMAT = """
from metis_hf.numerics import SCALE_FP32, BlockFormat, CodebookFormat, register_format

register_format(BlockFormat("own", CodebookFormat("own", (-1, 0, {top})), SCALE_FP32, 16))
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tmp_path):
    """The registry, the modules and the path of a fresh process, before and after a test."""
    schemes = dict(registry.SCHEMES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield
    registry.SCHEMES.clear()
    registry.SCHEMES.update(schemes)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def written(path, text):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    return written


class TestImportSchemes:
    def test_a_file(self, write, tmp_path, monkeypatch):
        """Once, by whatever path; a second run of the file would find the name taken."""
        file = write("schemes/mine.py", SCHEME.format(name="mine"))
        assert import_schemes(file) == ["mine"]
        assert "mine" in scheme_names()
        assert build_scheme(MetisConfig(scheme="mine"), 64, 64).fprop_input.quantizer is not None
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link.py").symlink_to(file)
        for same in (str(file), "schemes/mine.py", "./schemes/../schemes/mine.py", "link.py"):
            assert import_schemes(same) == ["mine"]
            assert absolute_source(same) == str(file)

    def test_a_module(self, write):
        write("package_of_mine/__init__.py", "from package_of_mine import first, second\n")
        for name in ("first", "second"):
            write(f"package_of_mine/{name}.py", SCHEME.format(name=name))
        assert import_schemes("package_of_mine") == ["first", "second"]
        assert import_schemes("package_of_mine.second") == ["second"]
        assert absolute_source("package_of_mine") == "package_of_mine"

    def test_what_is_imported_already(self, write):
        """By the user's own code, or as the same file under another kind of name."""
        file = write("by_hand.py", SCHEME.format(name="by-hand"))
        importlib.import_module("by_hand")
        assert import_schemes("by_hand") == ["by-hand"]
        assert import_schemes(file) == ["by-hand"]
        other = write("as_file.py", SCHEME.format(name="as-file"))
        assert import_schemes(other) == ["as-file"]
        assert import_schemes("as_file") == ["as-file"]

    def test_the_study_of_metis_in_parts(self):
        """Every variant is another scheme, of rank 9, and runs."""
        names = import_schemes(ROOT / "eval/studies/metis_parts.py")
        assert len(names) == 13
        x = torch.randn(32, 64)
        found = {}
        for name in names:
            config = MetisConfig(scheme=name)
            layer = get_metis_model(torch.nn.Sequential(torch.nn.Linear(64, 48)), config)
            layer(x).sum().backward()
            found[name] = build_scheme(config, 64, 48)
            assert found[name].fprop_input.conditioner.rank == 9
        schemes = list(found.values())
        assert all(a != b for n, a in enumerate(schemes) for b in schemes[:n])

    def test_the_study_of_operands_alone(self):
        """Operands that a name leaves out are exact, in both GEMMs or in the one it leaves out."""
        names = import_schemes(ROOT / "eval/studies/training_parts.py")
        assert len(names) == 8
        for name in names:
            scheme = build_scheme(MetisConfig(scheme=name), 64, 48)
            whole = build_scheme(MetisConfig(scheme="nvfp4-rne"), 64, 48)
            parts = name.split("-")[1:]
            gemms = {"fprop", "dgrad", "wgrad"} & set(parts) or {"fprop", "dgrad", "wgrad"}
            for role in Role:
                gemm, operand = role.name.lower().split("_", 1)
                kind = {"input": "x", "weight": "w", "grad_output": "dy"}[operand]
                wanted = whole if kind in parts and gemm in gemms else None
                expected = HIGH_PRECISION if wanted is None else wanted.resolve(role)[1]
                assert scheme.resolve(role)[1] == expected
            # Both places hold one copy, but where they differ.
            assert scheme.reuses(Role.WGRAD_INPUT) == (name not in ("rne-x-fprop", "rne-x-wgrad"))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("notes/text.txt", "cannot import schemes from .*text.txt: the file does not exist"),
            ("no_such.module", "schemes from no_such.module: Python finds no module"),
            ("", "cannot import schemes from .*: Python finds no module"),
        ],
    )
    def test_missing(self, name, message):
        with pytest.raises(ValueError, match=message):
            import_schemes(name)

    def test_nothing_registered(self, write):
        file = write("empty.py", "x = 1\n")
        with pytest.raises(
            ValueError, match=r"empty.py: it registers no scheme. Decorate a function"
        ):
            import_schemes(file)
        file.write_text(SCHEME.format(name="repaired"))
        assert import_schemes(file) == ["repaired"]
        with pytest.raises(ValueError, match=r"text.txt: it is not a Python file"):
            import_schemes(write("text.txt", "").parent / "text.txt")

    def test_a_name_that_is_taken(self, write):
        """Says by whom; the file's other schemes are not left behind, and it can be repaired."""
        text = SCHEME.format(name="fine")
        file = write("clash.py", text + SCHEME.format(name="metis"))
        with pytest.raises(ValueError, match=r"'metis' is already registered, by metis_hf.schemes"):
            import_schemes(file)
        assert "fine" not in scheme_names()
        assert scheme_info("metis").module == "metis_hf.schemes.metis"
        file.write_text(text)
        assert import_schemes(file) == ["fine"]

    def test_code_that_fails(self, write):
        file = write("broken.py", SCHEME.format(name="half") + "1 / 0\n")
        with pytest.raises(ValueError, match=r"broken.py: its code raised ZeroDivisionError"):
            import_schemes(file)
        assert "half" not in scheme_names()
        assert not [name for name in sys.modules if name.startswith("metis_hf_user_broken")]

    def test_a_repaired_file_may_define_its_format_in_another_way(self, write, monkeypatch):
        monkeypatch.setattr(formats, "FORMATS", known := dict(formats.FORMATS))
        monkeypatch.setattr(registry, "FORMATS", known)
        text = FORMAT + SCHEME.format(name="mine")
        file = write("mine.py", text.format(top=1) + "1 / 0\n")
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            import_schemes(file)
        file.write_text(text.format(top=2))
        assert import_schemes(file) == ["mine"]
        assert formats.get_format("own").element.values == (-1, 0, 2)
        with pytest.raises(ValueError, match="'own' already exists"):
            formats.register_format(replace(formats.get_format("own"), block_size=8))

    def test_a_package_with_a_broken_module_can_be_repaired(self, write):
        """Its other modules, which Python has kept, register their schemes again."""
        package = "metis_two_modules"
        write(f"{package}/__init__.py", f"import {package}.sound\nimport {package}.broken\n")
        write(f"{package}/sound.py", SCHEME.format(name="sound"))
        broken = write(f"{package}/broken.py", "1 / 0\n")
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            import_schemes(package)
        write(broken, SCHEME.format(name="repaired"))
        assert sorted(import_schemes(package)) == ["repaired", "sound"]

    def test_digest_is_of_the_file(self, write):
        file = write("mine.py", SCHEME.format(name="mine"))
        import_schemes(file)
        first = source_digests(["mine"])
        assert list(first) == ["mine"]
        file.write_text(SCHEME.format(name="mine") + "# changed\n")
        assert source_digests(["mine"]) != first
        assert source_digests(["metis"]) == {}

    def test_digest_of_a_format_is_of_its_definition(self, write, monkeypatch):
        found = []
        for top in (1, 2):
            monkeypatch.setattr(formats, "FORMATS", known := dict(formats.FORMATS))
            monkeypatch.setattr(registry, "FORMATS", known)
            known.pop("own", None)
            text = FORMAT.format(top=top) + SCHEME.format(name=f"mine{top}")
            import_schemes(write(f"mine{top}.py", text))
            found.append(source_digests(["nvfp4-rne"], "own"))
        first, second = found
        assert first.keys() == second.keys() == {"format own"}
        assert first != second
        assert source_digests(["nvfp4-rne"], "mxfp4") == {}
        assert source_digests(["nvfp4-rne"], "unknown") == {}

    def test_a_format_may_be_registered_before_any_scheme_is_imported(self):
        code = """
from metis_hf.numerics import SCALE_FP32, BlockFormat, CodebookFormat, register_format
register_format(BlockFormat("own", CodebookFormat("own", (-1.0, 0.0, 1.0)), SCALE_FP32, 16, "here"))
from metis_hf.schemes import source_digests
assert source_digests([], "own").keys() == {"format own"}
"""
        python("-c", code)


class TestMistakes:
    """What a builder returns is looked at, so that the error names it."""

    def test_no_scheme(self):
        register_scheme("none", summary="", source="")(lambda config, rank: None)
        message = (
            r"scheme 'none' \(in schemes.test_discovery\) returned None; it must return a Scheme"
        )
        with pytest.raises(TypeError, match=message):
            build_scheme(MetisConfig(scheme="none"), 64, 64)

    def test_a_quantizer_in_place_of_an_operand(self):
        with pytest.raises(TypeError, match=r"fprop_input of a scheme is Quantizer.*an Operand"):
            Scheme(fprop_input=Quantizer())


class TestEntryPoints:
    @pytest.fixture
    def install(self, write):
        """A package with a module, and the metadata that pip would have written beside it."""

        def installed(package, code):
            write(f"{package}.py", code)
            info = f"{package}-1.0.dist-info"
            write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            write(f"{info}/entry_points.txt", f"[metis_hf.schemes]\nfrom-{package} = {package}\n")

        return installed

    def test_found_when_looked_up(self, install):
        """By its name or by a list of names; not by a look-up of a scheme that is there."""
        install("apples", SCHEME.format(name="apple"))
        scheme_info("metis")
        assert "apples" not in sys.modules
        assert scheme_info("apple").module == "apples"
        assert scheme_names()[-1] == "apple"
        assert MetisConfig(scheme="apple").scheme == "apple"

    def test_a_broken_package_is_named_and_stops_nobody(self, install):
        install("plums", SCHEME.format(name="plum"))
        install("pears", SCHEME.format(name="pear") + "import no_such_module\n")
        with pytest.warns(UserWarning, match="schemes of package 'pears' are missing") as caught:
            names = scheme_names()
        assert "plum" in names
        assert "pear" not in names
        (warning,) = caught
        for part in ("from-pears", "ModuleNotFoundError", "no_such_module"):
            assert part in str(warning.message)
        with pytest.raises(ValueError, match=r"scheme 'pear' is not registered.* package 'pears'"):
            scheme_info("pear")
        assert scheme_names() == names  # without another warning

    def test_a_name_that_is_taken(self, install):
        install("quinces", SCHEME.format(name="metis"))
        with pytest.warns(UserWarning, match="'quinces' .*'metis' is already registered"):
            scheme_names()
        assert scheme_info("metis").module == "metis_hf.schemes.metis"
