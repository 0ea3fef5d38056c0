"""Languages besides Python: only those that the host has, each compiled and run in a locked child."""

import asyncio
from pathlib import Path

import pytest
from conftest import Start, raw
from launching import IS_ROOT, Running

from sandbox_client import languages

PROGRAMS = {
    "bash": "read x; echo $((x + 1))",
    "c": '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x + 1); }',
    "cpp": "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x + 1 << std::endl; }",
    "nodejs": "console.log(+require('fs').readFileSync(0) + 1)",
    "java": "class A { public static void main(String[] a) { "
    "System.out.println(new java.util.Scanner(System.in).nextInt() + 1); } }",
    "go": 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(x + 1) }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); "
    'println!("{}", s.trim().parse::<i32>().unwrap() + 1) }',
    "perl": 'print <> + 1, "\\n"',
    "ruby": "puts gets.to_i + 1",
    "php": '<?php echo intval(fgets(STDIN)) + 1, "\\n";',
    "lua": "print(math.floor(io.read('n')) + 1)",
    "R": "cat(as.integer(readLines(file('stdin'))) + 1, '\\n')",
}
TIME = {"compile_timeout": 60, "run_timeout": 60}


def test_every_language_known_is_tried() -> None:
    assert {language.name for language in languages._KNOWN} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_in_every_language_that_readiness_names(server: Running, name: str) -> None:
    async def run() -> None:
        there = (await raw(server, "GET", "/readyz"))[1]["languages"]
        body = {"code": PROGRAMS[name], "language": name, "stdin": "41\n", **TIME}
        status, reply, _ = await raw(server, "POST", "/run_code", body)
        if name not in there:
            assert (status, reply["error"]["code"]) == (422, "language_unknown")
            return
        assert (reply["status"], reply["run_result"]["stdout"].strip()) == ("Success", "42"), reply
        assert reply["level"] == server.ready["level"]

    asyncio.run(run())


def test_a_program_that_does_not_compile_is_told_why_and_is_not_run(server: Running) -> None:
    async def run() -> None:
        if "c" not in (await raw(server, "GET", "/readyz"))[1]["languages"]:
            pytest.skip("no C compiler here")
        _, reply, _ = await raw(server, "POST", "/run_code", {"code": "int main() { return x; }", "language": "c", **TIME})
        assert (reply["status"], reply["run_result"], reply["outcome"]) == ("Failed", None, "program_error")
        assert reply["compile_result"]["return_code"] == 1
        assert "undeclared" in reply["compile_result"]["stderr"]
        bomb = '#include "/dev/zero"\nint main() {}'
        _, reply, _ = await raw(server, "POST", "/run_code", {"code": bomb, "language": "c", "compile_timeout": 0.3})
        assert (reply["status"], reply["run_result"]) == ("Failed", None)

    asyncio.run(run())


def test_a_language_is_found_only_with_all_its_tools_where_children_can_see_them(tmp_path: Path) -> None:
    for tool in ("gcc", "as", "node", "g++"):
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    path = str(tmp_path)
    assert set(languages.find(path, [path], 8 << 30)) == {"nodejs", "javascript", "node"}  # no ld: no C
    assert not languages.find(path, [path], 512 << 20)  # too little address space for node
    assert not languages.find(path, [f"{path}/bin"], 8 << 30)  # not to be seen from there
    (tmp_path / "ld").symlink_to("as")
    found = languages.find(path, [path], 512 << 20)
    assert set(found) == {"c", "cpp", "c++"}
    assert found["c"].compile[0] == f"{path}/gcc"
    assert found["c"].run == ("./main",)


def test_what_is_imported_beforehand_is_there_for_programs_that_import_it(start: Start) -> None:
    running = start("--imports=decimal,fractions", "--imports=wave", user="root" if IS_ROOT else "ordinary")
    if not running.ready["code"]:
        pytest.skip("no jail here")
    here = "import sys\nprint('decimal' in sys.modules, 'wave' in sys.modules)"

    async def run() -> None:
        assert (await raw(running, "GET", "/readyz"))[1]["imports"] == ["decimal,fractions", "wave"]
        for first, told in (
            ("", "False False"),
            ("import os, fractions", "True False"),
            ("from wave import open as o", "False True"),
        ):
            _, reply, _ = await raw(running, "POST", "/run_code", {"code": f"{first}\n{here}", "language": "python"})
            assert reply["run_result"]["stdout"] == f"{told}\n"
        head = {"key": "set", "imports": "wave"}
        _, opened, _ = await raw(running, "POST", "/v1/sessions", head)
        body = {"seq": 1, "code": here, "language": "python", "timeout_s": 5}
        _, reply, _ = await raw(running, "POST", f"/v1/sessions/{opened['session']}/exec", body)
        assert reply["stdout"] == "False True\n"
        status, reply, _ = await raw(running, "POST", "/v1/sessions", {"key": "no set", "imports": "os"})
        assert (status, reply["error"]["code"]) == (422, "unknown_imports")

    asyncio.run(run())
