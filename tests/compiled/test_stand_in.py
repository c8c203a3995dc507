"""Stand-in device software: made once, whole or absent, for simulations only, and not where the real one is."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from simulations import needs_compiler

from mindllm.compiled.device import stand_in, wheel
from mindllm.compiled.device.elf import NotElf, read_shared_library
from mindllm.compiled.device.stand_in_names import names_to_offer

LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('loaded')"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in stand_in.HOMES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "mindllm"


@needs_compiler
def test_several_at_once_make_it_once(own_cache):
    with ThreadPoolExecutor(max_workers=3) as pool:
        made = set(pool.map(lambda _: stand_in.stand_ins(), range(3)))
    (latest,) = made
    assert [path.name for path in own_cache.iterdir()] == [latest.parent.name]
    library = latest / "lib64" / stand_in.EVERYTHING
    written = library.stat().st_mtime_ns
    environment = stand_in.device_software()
    assert library.stat().st_mtime_ns == written
    assert environment["LD_LIBRARY_PATH"].startswith(str(latest / "lib64"))
    for level, code, said in (("1", 0, "loaded"), ("0", 2, "only pretend"), (None, 2, "only pretend")):
        variables = {name: value for name, value in os.environ.items() if name != "MS_SIMULATION_LEVEL"}
        variables |= {} if level is None else {"MS_SIMULATION_LEVEL": level}
        command = [sys.executable, "-c", LOAD, str(library)]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert result.returncode == code
        assert said in result.stdout + result.stderr


def test_without_a_compiler(own_cache, monkeypatch):
    monkeypatch.setenv("PATH", str(own_cache))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(stand_in.StandInUnavailable, match=r"requires a C compiler .*pip install 'mindllm\[compiler\]'"):
        stand_in.stand_ins()
    assert not list(own_cache.iterdir())


def test_the_extra_brings_a_compiler(own_cache, monkeypatch):
    pytest.importorskip("ziglang", reason="pip install 'mindllm[compiler]'")
    monkeypatch.setenv("PATH", str(own_cache))
    library = stand_in.stand_ins() / "lib64" / stand_in.EVERYTHING
    variables = {**os.environ, "MS_SIMULATION_LEVEL": "1"}
    result = subprocess.run([sys.executable, "-c", LOAD, str(library)], env=variables, capture_output=True, text=True)
    assert result.stdout == "loaded\n", result.stderr
    names = names_to_offer(wheel.own_wheel().package)[0]
    assert set(names) <= read_shared_library(library).defined
    assert [path.name for path in own_cache.iterdir()] == [library.parents[2].name]


def test_a_compiler_that_fails(own_cache, monkeypatch, tmp_path):
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'disk full' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    with pytest.raises(stand_in.StandInUnavailable, match=r"compiler .*/cc failed:\ndisk full"):
        stand_in.stand_ins()
    assert not list(own_cache.iterdir())


def test_another_version_of_mindspore(own_cache, monkeypatch):
    monkeypatch.setattr(wheel.metadata, "version", lambda name: "2.3.0")
    with pytest.raises(stand_in.StandInUnavailable, match=r"verified with MindSpore .*, not 2\.3\.0; pip install"):
        stand_in.stand_ins()


def test_a_wheel_without_its_back_end(own_cache, monkeypatch, tmp_path):
    package = tmp_path / "mindspore"
    (package / "lib" / "plugin").mkdir(parents=True)

    class Specification:
        origin = str(package / "__init__.py")

    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: Specification)
    with pytest.raises(stand_in.StandInUnavailable, match="stripped of its Ascend back end"):
        stand_in.stand_ins()


def test_real_software_is_used_where_it_is(own_cache, monkeypatch, tmp_path):
    library = tmp_path / "ascend" / "lib64" / stand_in.EVERYTHING
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "ascend"))
    assert stand_in.device_software() == {}
    assert not own_cache.exists()


def test_a_home_that_libraries_are_not_found_in(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/a:b")
    with pytest.raises(stand_in.StandInUnavailable, match="colon"):
        stand_in.stand_ins()


def test_names_come_from_the_wheel():
    import mindspore

    names, files = names_to_offer(Path(mindspore.__file__).parent)
    assert names["aclrtGetSocName"] == "stand_in_soc_name"
    assert names["aclnnMatmul"] == names["aclnnMatmulGetWorkspaceSize"] == "stand_in_zero"
    assert "libge_runner.so" in files
    assert "libmindspore_core.so" not in files
    assert not any(name.startswith(("Py", "pthread", "_ZNSs")) for name in names)


@example(cut=62, change=b"\x00\x00\x00\x80", place=44)  # a table of sections beyond any offset
@given(cut=st.integers(0, 4000), change=st.binary(max_size=8), place=st.integers(0, 200))
def test_a_damaged_library_is_said_to_be_one(tmp_path_factory, cut, change, place):
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    content = Path(sys.modules["_ctypes"].__file__).read_bytes()[:cut]
    path.write_bytes(content[:place] + change + content[place + len(change) :])
    with pytest.raises(NotElf):
        read_shared_library(path)


@needs_compiler
def test_cann_version_has_numbers_that_fusion_parses():
    libraries = Path(stand_in.device_software()["ASCEND_HOME_PATH"]) / "lib64"
    program = f"""
import ctypes
text, library = ctypes.create_string_buffer(512), ctypes.CDLL("{libraries / stand_in.EVERYTHING}")
library.aclsysGetCANNVersion(0, text)
print(int(text[128:192].rstrip(b"\\0")) > 0, int(text[192:256].rstrip(b"\\0")) >= 0)
"""
    variables = {**os.environ, "MS_SIMULATION_LEVEL": "1"}
    printed = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert printed.stdout == "True True\n"


@needs_compiler
def test_a_program_finds_a_larger_machine():
    count = "import os; print(os.sysconf('SC_NPROCESSORS_ONLN'), os.sysconf('SC_PAGE_SIZE'))"
    variables = {**os.environ, "LD_PRELOAD": str(stand_in.many_cores(wheel.own_wheel()))}
    printed = subprocess.run([sys.executable, "-c", count], env=variables, capture_output=True, text=True, check=True)
    cores, page = map(int, printed.stdout.split())
    assert cores >= 16
    assert page == os.sysconf("SC_PAGE_SIZE")
