"""Counting the size of the code: toolkit.benchmark.code_size."""

from toolkit.benchmark.code_size import count_packages, import_closure

SOURCE = '''"""A module."""

from package.other import shared


def _called_once():
    """Return one."""
    return 1


def _called_twice():
    return 2


def public():
    return _called_once() + _called_twice() + _called_twice() + shared()
'''


def test_files_functions_and_helpers_are_counted(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "one.py").write_text(SOURCE)
    (tmp_path / "package" / "other.py").write_text("def shared():\n    return 3\n")
    (tmp_path / "top.py").write_text("value = 1\n")
    package, top, total = count_packages(tmp_path)
    assert (package.name, package.files, package.lines, package.statements) == ("package", 2, 18, 9)
    assert sorted(package.lengths) == [2, 2, 2, 3]
    assert package.called_once == [3]
    assert (top.name, top.files, top.statements) == ("(top level)", 1, 1)
    assert total.row()[:5] == ["total", "3", "19", "10", "4"]


def test_a_closure_has_what_a_program_loads():
    closure = import_closure("import mindllm.units")
    assert {"mindllm", "mindllm.units"} <= set(closure)
    assert all(lines >= 0 for lines in closure.values())
    assert not any(name.startswith("mindllm.train") for name in closure)
