"""The distribution: its name, its one version, what it brings along."""

import importlib.metadata
import inspect
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import gyre

ROOT = pathlib.Path(__file__).parents[2]
DISTRIBUTION = "gyre-kv"


def test_there_is_one_version():
    (cmake,) = re.findall(r"^project\(gyre VERSION ([0-9.]+) ", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    header = re.findall(r"^#define GYRE_VERSION_\w+ (\d+)$", (ROOT / "include/gyre/version.h").read_text(), re.MULTILINE)
    assert ".".join(header) == cmake
    assert gyre._gyre.__version__ == cmake  # gyre::version()
    assert gyre.__version__ == cmake
    assert importlib.metadata.version(DISTRIBUTION) == cmake


def test_all_lists_the_public_names():
    public = {name for name in vars(gyre._gyre) if not name.startswith("_")}
    assert set(gyre.__all__) == public and sorted(gyre.__all__) == gyre.__all__
    assert all(getattr(gyre, name) is getattr(gyre._gyre, name) for name in gyre.__all__)


def test_the_stub_describes_the_module():
    stub = (pathlib.Path(gyre.__file__).parent / "_gyre.pyi").read_text()
    for name in gyre.__all__:
        assert re.search(rf"^(class|def) {name}\b", stub, re.MULTILINE), name
    assert re.search(r"def attention\(encoder: Encoder, q: gyre.types.SupportsDLPack.*out: gyre.types.SupportsDLPack \| None = None", stub)


def documented(owner, name, thing):
    """Every function, class, method and property below `thing`, with what help() prints of it."""
    yield f"{owner}.{name}", inspect.cleandoc(thing.__doc__ or "")
    if isinstance(thing, type):
        for member, value in vars(thing).items():
            if member == "__init__" or not member.startswith("_"):
                if not isinstance(value, str):  # `code` of an error
                    yield from documented(f"{owner}.{name}", member, value)


def test_every_public_object_has_a_docstring_in_sentences():
    wrong = []
    for name in gyre.__all__:
        for where, text in documented("gyre", name, getattr(gyre, name)):
            # The signature comes first; what an argument is may begin with its name.
            sentences = "\n".join(line for line in text.split("\n") if not re.match(r"\w+\(.*\) -> |\(self\)", line)).strip()
            if not re.match(r"[A-Z]|\w+(, \w+)*( and \w+)? (is|are|names?|holds?|counts|has|matrix)\b|\w+, \w+", sentences):
                wrong.append((where, text))
            elif not sentences.endswith("."):
                wrong.append((where, text))
    assert not wrong


def test_it_imports_without_the_metadata_of_an_installed_package(tmp_path):
    package = pathlib.Path(gyre.__file__).parent
    shutil.copytree(package, tmp_path / "gyre", ignore=shutil.ignore_patterns("__pycache__"))
    # A wheel that auditwheel repaired keeps its libraries beside the package.
    for libraries in package.parent.glob("gyre_kv.libs"):
        shutil.copytree(libraries, tmp_path / libraries.name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gyre; print(gyre.__file__, gyre.__version__)"
    got = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.split() == [str(tmp_path / "gyre" / "__init__.py"), gyre.__version__]


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="needs nm, on Linux")
def test_the_module_exports_its_init_function_alone():
    listed = subprocess.run(["nm", "-D", "--defined-only", gyre._gyre.__file__], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__gyre"]


def test_vllm_finds_the_plugin():
    (plugin,) = (
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.dist.name == DISTRIBUTION
    )
    assert (plugin.name, plugin.value) == ("gyre", "gyre.integrations.vllm:register")


def test_licenses_of_what_is_compiled_in_are_in_the_package():
    files = {file.name: file for file in importlib.metadata.files(DISTRIBUTION) if "licenses" in file.parts}
    assert "Apache License" in files["LICENSE"].read_text()
    third_party = files["THIRD_PARTY_LICENSES"].read_text()
    for project in ("Highway", "xxHash", "nanobind", "robin-map"):
        assert re.search(rf"^{project}\b.*https://", third_party, re.MULTILINE), project
