"""`python -m bench.gpu --compile` and `--kernels`: what is compiled here is found by Triton elsewhere, or refused."""

import io
import json
import os
import shutil
import tarfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import build, keys, machine, packed
from bench.gpu.part import Room
from bench.gpu.subjects import SUBJECTS
from tests.test_bench_gpu import NOW, part, states
from tests.test_bench_gpu_processes import died, wait_until

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets, and compiles nothing")
ROTARY = next(subject for subject in SUBJECTS if subject.stem == "rotary")


def kernels_in(folder, patch):
    """From here on Triton's cache is that folder, and no kernel is in memory."""
    from tfm_kernels.triton import _rotary

    patch.setenv("TRITON_CACHE_DIR", str(folder))
    kernel = _rotary.rotary_kernel
    patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return folder


def few(patch):
    """Three of the calls of rotary, each of which compiles a kernel or two, by two processes."""
    calls = build.calls
    patch.setattr(build, "calls", lambda subject, device: [*calls(subject, device)][::80])
    patch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What --compile writes; the folder "cache" beside it is what Triton had compiled."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        kernels_in(folder / "cache", patch)
        assert compile_into(folder / "kernels.tar.xz") == 0
    return folder / "kernels.tar.xz"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Triton's, which is empty."""
    few(monkeypatch)
    return kernels_in(tmp_path / "cache", monkeypatch)


def compile_into(file, *words):
    return gpu.main(["--compile", str(file), "--op", "rotary", *words])


def contents(file):
    with tarfile.open(file) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def manifest(capability="9.0", **changes):
    key = packed._key(capability) if capability in packed.ARCHITECTURES else ""
    found = {"format": packed.FORMAT, "key": key, "capability": capability, "kernels": 1, "sources": "abc"}
    return json.dumps({**found, "triton": "3", "python": "3.12", **changes}).encode()


def archive(file, members):
    """A tar.xz of name -> content, or where another file lies."""
    with tarfile.open(file, "w:xz") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                header.size = len(content)
            else:
                header.type, header.linkname = tarfile.SYMTYPE, content
            tar.addfile(header, io.BytesIO(content) if isinstance(content, bytes) else None)
    return file


def never(*_, **__):
    raise RuntimeError("compiled anew")


def test_what_was_compiled_is_found_elsewhere(tmp_path, monkeypatch, cache, whole, capsys):
    """Where nothing can be compiled, its kernels are loaded from the two files each that it brings."""
    again, found = tmp_path / "again.tar.xz", contents(whole)
    count = json.loads(found["manifest.json"])["kernels"]
    assert len(found) == 1 + 2 * count and count >= 3
    aside = whole.with_name("aside")
    whole.with_name("cache").rename(aside)  # so that no path into it leads anywhere
    monkeypatch.setattr(triton.compiler.compiler.ASTSource, "make_ir", never)
    assert compile_into(again) == 1 and "RuntimeError: compiled anew" in capsys.readouterr().out, "the test sees it"
    assert compile_into(again, "--kernels", str(whole)) == 0
    assert f"{count} kernels, 0 of them compiled now" in capsys.readouterr().out
    aside.rename(whole.with_name("cache"))
    assert {**contents(again), "manifest.json": 0} == {**found, "manifest.json": 0}
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".json", ".cubin"}
    with packed._gpu_of(90):
        record = build.compile_all(ROTARY, Room(tmp_path, NOW, time.monotonic() + 60, device="cpu"), 2)
    assert (record["state"], record["kernels"], record["compiled"]) == ("green", count, 0)


def test_a_run_finds_them_before_it_begins(tmp_path, cache, whole, capsys):
    look = part(a=lambda: {"there": len([*cache.rglob("*.cubin")])})
    words = ["--out", str(tmp_path / "out"), "--kernels", str(whole)]
    assert gpu.main(words, [look], lambda: {**NOW, "capability": [9, 0]}) == 0
    files = {"contract": json.loads((tmp_path / "out" / "contract.json").read_text())}
    count = files["contract"]["groups"][0]["there"]
    assert states(files) == {"a": "green"} and count >= 3
    assert f"{count} kernels are in Triton's cache" in capsys.readouterr().out


def test_what_is_in_the_cache_stays(cache, whole):
    """With PTX and all, which others may want to see; where it has become useless, the file's take its place."""
    shutil.copytree(whole.with_name("cache"), cache)
    first = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    packed.unpack(whole, "9.0")
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == first
    for path in cache.rglob("__grp__*"):
        path.write_text(path.read_text().replace(str(whole.parent), "/nonexistent"))
    packed.unpack(whole, "9.0")
    groups = [json.loads(path.read_text())["child_paths"] for path in cache.rglob("__grp__*")]
    assert groups and all(Path(path).is_relative_to(cache) for group in groups for path in group.values())


def test_a_kernel_has_one_key_whatever_came_before(monkeypatch):
    """Triton 3.6 by itself finds another one for the kernel that comes second."""
    from tfm_kernels.triton import _int8

    keys.settle()
    keys.settle()
    functions = [value for value in vars(_int8).values() if isinstance(value, triton.runtime.jit.JITFunction)]
    kernels = [_int8.round_rows_kernel, _int8.round_pieces_kernel]
    found = []
    for order in (kernels, kernels[::-1]):
        for function in functions:
            monkeypatch.setattr(function, "hash", None)
            monkeypatch.setattr(function, "used_global_vals", {})
        found.append({kernel.fn.__name__: kernel.cache_key for kernel in order})
    assert found[0] == found[1]


def test_another_capability_has_launches_and_code_of_its_own(tmp_path, cache, whole):
    from tfm_kernels.triton import _launch

    assert compile_into(tmp_path / "file", "--capability", "8.0") == 0
    assert [packed.check(file)["capability"] for file in (tmp_path / "file", whole)] == ["8.0", "9.0"]
    assert {*contents(tmp_path / "file")} & {*contents(whole)} == {"manifest.json"}
    with packed._gpu_of(86):
        assert _launch.capability(None) == (8, 6) and triton.compiler.compiler.max_shared_mem(86) == 99 * 1024


@pytest.mark.parametrize(
    "members, sentence",
    [
        ({"README": b"hello"}, "was not written by this tree's --compile"),
        ({"manifest.json": b"[]"}, "was not written by this tree's --compile"),
        ({"manifest.json": b"{"}, "was not written by this tree's --compile"),
        ({"manifest.json": {"format": 0}}, "was not written by this tree's --compile"),
        ({"manifest.json": {"capability": "1.0"}}, "was not written by this tree's --compile"),
        ({"manifest.json": {"key": "0"}}, "was compiled by triton 3 of Python 3.12, and this is triton"),
        ({"manifest.json": {"capability": "8.0"}}, "for compute capability 8.0, and this GPU has 9.0"),
        ({"manifest.json": {}}, "ends early: it holds 0 of 1 kernels"),
        ({"manifest.json": {}, f"{'a' * 64}/../../k.cubin": b"x"}, "which is no kernel's file"),
        ({"manifest.json": {}, f"/{'a' * 64}/k.cubin": b"x"}, "which is no kernel's file"),
        ({"manifest.json": {}, f"{'a' * 64}/__grp__k.so": b"x"}, "which is no kernel's file"),
        ({"manifest.json": {}, f"{'a' * 64}/k.cubin": "/etc/passwd"}, "k.cubin is no plain file"),
    ],
)
def test_refusals(tmp_path, cache, capsys, members, sentence):
    made = {name: manifest(**value) if isinstance(value, dict) else value for name, value in members.items()}
    file = archive(tmp_path / "kernels.tar.xz", made)
    before = sorted(tmp_path.rglob("*"))
    out = ["--out", str(tmp_path / "out"), "--kernels", str(file)]
    assert gpu.main(out, [part(a=dict)], lambda: {**NOW, "capability": [9, 0]}) == 1
    err = capsys.readouterr().err
    assert sentence in err and str(file) in err and err.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before


def test_files_that_cannot_be_read(tmp_path, cache, whole):
    cut, other = tmp_path / "cut.tar.xz", tmp_path / "other.tar.xz"
    cut.write_bytes(whole.read_bytes()[:-2000])
    other.write_text("hello")
    for file in (cut, other, tmp_path, tmp_path / "none"):
        with pytest.raises(packed.PackError, match="cannot be read: "):
            packed.unpack(file, "9.0")


def test_other_sources_are_told(monkeypatch, cache, whole, capsys):
    monkeypatch.setattr(packed.record, "sources", lambda where: "other")
    packed.unpack(whole, "9.0")
    assert "compiled from other sources" in capsys.readouterr().out


def test_what_does_not_compile_is_named_and_the_rest_is_packed(tmp_path, cache, monkeypatch, capsys):
    calls = build.calls
    monkeypatch.setattr(build, "calls", lambda *of: [*calls(*of), ("last", lambda: int("x"))])
    assert compile_into(tmp_path / "file") == 1
    assert "last: ValueError: invalid literal" in capsys.readouterr().out
    assert packed.check(tmp_path / "file")["kernels"] >= 3


def test_a_file_of_the_kernels_that_wait(tmp_path, monkeypatch):
    from tfm_kernels.triton import _gemm, _gemm_ahead, attention_bwd, attention_fwd

    modules, asked = (attention_fwd, attention_bwd, _gemm), []
    for module in modules:
        monkeypatch.setattr(module, "AHEAD", False)
    monkeypatch.setattr(_gemm_ahead, "LEAST", _gemm_ahead.LEAST)
    make = lambda *given: asked.append((given, [module.AHEAD for module in modules])) or []
    monkeypatch.setattr(packed, "make", make)
    assert compile_into(tmp_path / "file") == compile_into(tmp_path / "file", "--ahead") == 0
    assert asked == [
        ((tmp_path / "file", [ROTARY], "9.0", False), [False] * 3),
        ((tmp_path / "file", [ROTARY], "9.0", True), [True] * 3),
    ]


def test_interrupted(tmp_path, cache, monkeypatch, capsys):
    """No process goes on, no file is there, and what was compiled is not compiled again."""
    pids, real = tmp_path / "pids", build.calls
    pids.mkdir()

    def calls(subject, device):
        first, *rest = real(subject, device)
        return [first, *(("", lambda: (pids / str(os.getpid())).touch() or time.sleep(60)) for _ in rest)]

    def stop(self, kernels):
        if len([*pids.iterdir()]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "calls", calls)
        patch.setattr(packed._Told, "every", stop)
        assert compile_into(tmp_path / "file") == 75
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert all(died(path.name) for path in pids.iterdir()) and not [*tmp_path.glob("file*")]
    assert compile_into(tmp_path / "file") == 0
    words = capsys.readouterr().out.partition("-- rotary: ")[2].split()  # 5 kernels, 3 of them compiled now
    assert 0 < int(words[2]) < int(words[0])


def test_without_who_leads_they_end(tmp_path, monkeypatch):
    wait = lambda: (tmp_path / str(os.getpid())).touch() or time.sleep(0.1)
    monkeypatch.setattr(build, "calls", lambda subject, device: [("", wait)] * 1000)
    room = Room(tmp_path, NOW, time.monotonic() + 60)
    pids = lambda: [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    leader = build.multiprocessing.get_context("fork").Process(target=build.shared_out, args=(ROTARY, room, 3))
    leader.start()
    wait_until(lambda: len(pids()) == 3)
    leader.kill()
    wait_until(lambda: all(map(died, pids())))
    leader.join()


def test_machines_that_compile_nothing(tmp_path, monkeypatch, capsys):
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        assert compile_into(tmp_path / "file") == 1
    assert "cannot run with TRITON_INTERPRET set" in capsys.readouterr().err
    monkeypatch.setattr(machine, "package", lambda name: None)
    for words in (["--compile", str(tmp_path / "file")], ["--kernels", str(tmp_path / "file")]):
        assert gpu.main(words) == 1 and capsys.readouterr().err == f"bench.gpu: {machine.NO_TRITON}\n"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--compile", "/nonexistent/file"], "--compile must name a file in a folder that can be written, got /non"),
        (["--compile", "/"], "--compile must name a file in a folder that can be written, got /"),
        (["--compile", "file", "--capability", "7.5"], "--capability must be one of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"),
        (["--capability", "9.0"], "--capability needs --compile FILE"),
        (["--kernels", "a", "--kernels", "b", "c"], "a cannot be read: "),
    ],
)
def test_bad_arguments(words, sentence, capsys):
    assert gpu.main(words) == 1
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
