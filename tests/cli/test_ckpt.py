"""`outlast ckpt ls, show, verify, prune`: results, refusals and remaining checkpoints."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make
from tests.cli.ckpt_command import Ckpt, checkpoint, flip, place, tree

from outlast.checkpoint.stores.folder_store import Folder
from outlast.cli.ckpt.target_argument import check_room
from outlast.controller.inputs import CopiesBarred
from outlast.errors import EXIT_USAGE, EXIT_USER_ERROR, StorageError
from outlast.launch import run_directory
from outlast.telemetry.segment_files import SegmentWriter

NAMES = [place(step).directory for step in range(4)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    made = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        checkpoint(made, step)
    return made


def test_ls(ckpt: Ckpt, root: Path) -> None:
    flip(root / NAMES[2] / "commit.json", 30)
    make(root, place(4), {"w": np.zeros(4, np.uint8)}, 2, commit=False)
    (root / place(4).directory / "rank-00001.failed").write_text("No space left on device\n")
    (root / "step-000000009-n9").mkdir()
    (root / "somebody else's").mkdir()
    found = ckpt("ls", root, "--json")
    assert found.code == 0
    assert [(each["step"], each["state"], each["newest"]) for each in found.json] == [
        (4, "uncommitted", False), (3, "committed", True), (2, "damaged", False),
        (1, "committed", False), (0, "older", False),
    ]  # fmt: skip
    assert (found.json[1]["world"], found.json[1]["job"]) == (2, "job")
    assert found.json[1]["size_bytes"] == sum(
        path.stat().st_size for path in (root / NAMES[3]).glob("shard-*")
    )
    text = ckpt("ls", root).out
    assert re.search(r"4 .* uncommitted: rank-00001 failed: No space left on device", text)
    assert re.search(r"3 .* newest", text) and re.search(r"2 .* damaged: .*commit\.json", text)
    assert "step-000000009-n9" in text and "format 1" in text and "somebody" not in text


def test_ls_lists_shared_bytes(ckpt: Ckpt, root: Path) -> None:
    (root / NAMES[1] / "frozen-00000").write_bytes(bytes(1 << 20))
    (root / NAMES[3] / "frozen-00000").hardlink_to(root / NAMES[1] / "frozen-00000")
    assert [each["shared_bytes"] for each in ckpt("ls", root, "--json").json] == [
        1 << 20,
        0,
        1 << 20,
    ]
    assert re.search(r"3 .* newest: 1.0 MiB shared", ckpt("ls", root).out)


def test_a_run_directory_and_one_checkpoint_are_understood(ckpt: Ckpt, root: Path) -> None:
    (root.parent / "run.json").write_text("{}")
    for target in (root, f"{root}/", root.parent, f"file://{root}"):
        assert [each["step"] for each in ckpt("ls", target, "--json").json] == [3, 2, 1]
    assert [each["step"] for each in ckpt("ls", root / NAMES[2], "--json").json] == [2]
    assert ckpt("show", root / NAMES[2], "--json").json["step"] == 2
    assert ckpt("show", root.parent, "--step", 1, "--json").json["step"] == 1
    assert ckpt("show", root.parent, "--json").json["step"] == 3


def test_a_name_gives_a_terminal_no_orders(ckpt: Ckpt, tmp_path: Path) -> None:
    evil = "w\x1b]0;x\x07\r\n\x9b2J\u202e[red]"
    escaped = r"w\x1b]0;x\x07\r\n\x9b2J\u202e[red]"
    a, b = tmp_path / "a", tmp_path / "b"
    for side, value in ((a, 0), (b, 1)):
        checkpoint(side, 1, **{evil: np.full(40_000, value, np.uint8)})
    said = [ckpt("show", a), ckpt("show", a, "--tensors", "w*"), ckpt("diff", a, b)]
    for shard in (b / NAMES[1]).glob("shard-*"):
        flip(shard, 0)
    said.append(ckpt("verify", b))
    for each in said:
        assert escaped in each.out
        assert each.out.replace("\n", "").isprintable()


def test_an_empty_directory_is_no_error_to_list(ckpt: Ckpt, tmp_path: Path) -> None:
    found = ckpt("ls", tmp_path)
    assert found.code == 0 and "holds no checkpoints" in found.out
    assert ckpt("ls", tmp_path, "--json").json == []
    found = ckpt("verify", tmp_path, "--all", "--json")
    assert found.code == EXIT_USAGE and "nothing was verified" in found.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ls", "{root}/nowhere"), "does not exist"),
        (("ls", "{root}/latest"), "is not a directory"),
        (("ls", "ftp://host/x"), "cannot store there"),
        (("ls", "file://x"), "three slashes"),
        (("show", "{dcp}"), "outlast ckpt import"),
        (("verify", "{safetensors}"), "outlast ckpt import"),
        (("verify", "{older}"), "format 1"),
        (("verify", "{older}/step-000000001-n1"), "format 1"),
        (("verify", "{older}", "--all"), "format 1"),
        (("show", "{root}", "--step", "7"), "no checkpoint of step 7 (there are 3, 2, 1)"),
        (("show", "{root}/{name}", "--step", "7"), "is not of step 7"),
        (("show", "{root}/step-000000004-n4-a1"), "no commit record"),
        (("show", "{root}/step-000000008-n8-a1"), "does not exist"),
        (("show", "{root}", "--tensors", "optimizer.*"), "none of its 3 tensors"),
        (("verify", "{root}", "--all", "--step", "1"), "exclude each other"),
        (("verify", "{root}/{name}", "--all"), "is one checkpoint"),
        (("prune", "{root}/{name}", "--keep", "last=1"), "is one checkpoint"),
        (("prune", "{root}", "--keep", "last=0"), "the newest checkpoint is always kept"),
        (("prune", "{root}", "--keep", "first=2"), "cannot read 'first=2'"),
        (("prune", "{root}"), "outlast ckpt prune --help"),
        (("copy", "{root}", "{root}/."), "the same place"),
        (("copy", "{root}", "{root}/{name}"), "is one checkpoint"),
        (("copy", "{root}", "{root}/latest"), "is not a directory"),
        (("copy", "{root}", "{root}x", "--limit-rate", "fast"), "--limit-rate fast"),
        (("copy", "{root}", "{root}x", "--all", "--step", "1"), "exclude each other"),
        (("export", "{root}", "{dcp}", "--format", "dcp"), "exists already"),
        (("export", "{root}", "{root}/x", "--format", "pt"), "--format"),
        (("export", "{root}", "{root}/x", "--format", "dcp", "--tied", "a=b"), "for safetensors"),
        (("export", "{root}", "{root}/x", "--format", "dcp", "--rename", "a"), "old=new"),
        (("export", "{root}", "{root}/x", "--format", "dcp", "--prefix", "z"), "prefix 'z'"),
        (("import", "{root}/nowhere", "{root}"), "does not exist"),
        (("import", "{root}", "{root}"), "neither a directory of torch.distributed.checkpoint"),
        (("import", "{dcp}", "{root}", "--step", "-1"), "--step -1: must be 0 or more"),
        (("diff", "{root}", "{root}", "--tolerance", "-1"), "--tolerance -1.0: must be 0 or more"),
        (("diff", "{root}", "{root}", "--tensors", "z*"), "no tensor of either checkpoint matches"),
        (("now", "{root}", "--timeout", "0"), "above 0"),
        (("frobnicate",), "outlast ckpt --help"),
    ],
)  # fmt: skip
def test_a_refused_command_changes_no_file(
    words: tuple[str, ...], says: str, ckpt: Ckpt, root: Path
) -> None:
    tmp_path = root.parent
    make(root, place(4), {"w": np.zeros(4, np.uint8)}, 1, commit=False)
    there = {name: tmp_path / name for name in ("dcp", "safetensors", "older")}
    for directory in (*there.values(), there["older"] / "step-000000001-n1"):
        directory.mkdir()
    (there["dcp"] / ".metadata").write_bytes(b"")
    (there["safetensors"] / "model.safetensors").write_bytes(b"")
    (there["older"] / "step-000000001-n1" / "manifest.json").write_bytes(b"{}")
    before = tree(tmp_path)
    found = ckpt(*(word.format(root=root, name=NAMES[1], **there) for word in words))
    assert (found.code, found.out) == (EXIT_USAGE, "")
    assert says in found.err
    assert tree(tmp_path) == before


def test_show(ckpt: Ckpt, root: Path) -> None:
    found = ckpt("show", root, "--json").json
    assert found["origin"] == {"outlast": "test"} and found["time_ns"] == 3
    assert found["tensors"]["model.1.weight"] == {
        "dtype": "float32", "shape": [60, 80], "size_bytes": 19200, "ranks": [0, 1],
    }  # fmt: skip
    assert found["tensors"]["model.0.weight"]["ranks"] == [0]
    assert found["values"] == {}
    assert sum(shard["tensor_bytes"] for shard in found["shards"]) == 2 * 19200 + 320
    text = ckpt("show", root).out
    assert "3 tensors, 38 KiB" in text and "2 ranks" in text
    assert re.search(r"1 +bias float32 80; weight float32 60 x 80, 19 KiB", text)
    text = ckpt("show", root, "--tensors", "model.1.*").out
    assert "model.1.bias" in text and "model.0" not in text


def test_layers_that_are_alike_are_one_line(ckpt: Ckpt, tmp_path: Path) -> None:
    tensors = {f"m.layers.{i}.w": np.zeros((2, 3), np.float32) for i in range(12)}
    tensors["m.layers.12.w"] = np.zeros((9, 9), np.float32)
    tensors |= {f"m.layers.{i}.a": np.zeros(5, np.float32) for i in range(12)}
    checkpoint(tmp_path, 1, world=3, **tensors)  # in another order
    text = ckpt("show", tmp_path).out
    assert re.search(r"0 to 11 \(12 alike\) +a float32 5; w float32 2 x 3, 528 B", text)
    assert re.search(r"12\.w +float32 9 x 9", text)


def test_verify(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("verify", root, "--all").code == 0
    flip(root / NAMES[2] / "shard-00001", 5000)
    flip(root / NAMES[1] / "commit.json", 40)
    assert ckpt("verify", root).code == 0  # the newest one
    found = ckpt("verify", root, "--step", 2)
    assert found.code == EXIT_USER_ERROR
    assert "shard-00001: chunk 1 (bytes 4096 to 8192; holds model.1.weight)" in found.out
    found = ckpt("verify", root, "--all", "--json")
    assert found.code == EXIT_USER_ERROR
    assert [len(each["damages"]) for each in found.json] == [0, 1, 1]
    damage = found.json[1]["damages"][0]
    assert damage["file"].endswith("shard-00001") and damage["chunk"] == 1
    assert damage["tensors"] == ["model.1.weight"]
    assert found.json[2]["damages"][0]["file"].endswith("commit.json")


def test_nothing_outside_of_the_root_is_read(ckpt: Ckpt, root: Path) -> None:
    shard, outside = root / NAMES[3] / "shard-00000", root.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)
    found = ckpt("verify", root)
    assert found.code == EXIT_USER_ERROR and "no regular file" in found.out
    (root / place(5).directory).symlink_to(root / NAMES[2])
    found = ckpt("show", root, "--step", 5)
    assert found.code == EXIT_USER_ERROR and "no directory of this root" in found.err


def test_prune(ckpt: Ckpt, root: Path) -> None:
    before = tree(root)
    found = ckpt("prune", root, "--keep", "last=1", "--dry-run", "--json")
    assert [each["keep"] for each in found.json] == [True, False, False]
    assert all(each["why"] for each in found.json)
    assert "would go" in ckpt("prune", root, "--keep", "last=1", "--dry-run").out
    assert tree(root) == before
    flip(root / NAMES[3] / "shard-00000", 1)
    found = ckpt("prune", root, "--keep", "last=1")  # the newest whole one is step 2
    assert found.code == 0 and "2 kept, 1 deleted" in found.out
    assert sorted(path.name for path in root.glob("step-*")) == NAMES[2:]
    flip(root / NAMES[2] / "shard-00000", 1)
    assert "2 kept, 0 deleted" in ckpt("prune", root, "--keep", "last=1").out  # none is whole


def test_prune_leaves_a_run_that_lives_alone(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    run_dir = run_directory.take(tmp_path, "s", (), 1)
    try:
        # As its own launcher's, then as one's on another host, whose number says nothing here.
        for words in ((tmp_path / "lock").read_text(), f"{1 << 30} 1\n"):
            (tmp_path / "lock").write_text(words)
            for target in (tmp_path, root):
                found = ckpt("prune", target, "--keep", "last=1")
                assert found.code == EXIT_USER_ERROR and "belongs to a running job" in found.err
                assert len(list(root.glob("step-*"))) == 3
        assert ckpt("prune", tmp_path, "--keep", "last=1", "--dry-run").code == 0
    finally:
        run_dir.release()
    assert "1 kept, 2 deleted" in ckpt("prune", tmp_path, "--keep", "last=1").out


def test_prune_of_a_run_that_was_copied_without_its_lock(
    ckpt: Ckpt, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "1 kept, 2 deleted" in ckpt("prune", root, "--keep", "last=1").out


def test_a_barred_checkpoint_is_not_the_newest(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    """Steps 2 and 3 were saved between the last agreement of replicas and the one that failed."""
    (tmp_path / "run.json").write_text("{}")
    journal = SegmentWriter(tmp_path / "journal", "controller", durable=True)
    journal.append(msgspec.msgpack.encode(CopiesBarred(after_n=1, generation=1)))
    journal.close()
    listed = ckpt("ls", tmp_path, "--json").json
    assert [each["state"] for each in listed] == ["barred", "barred", "committed"]
    assert [each["newest"] for each in listed] == [False, False, True]
    assert "no run starts from it" in ckpt("ls", root).out
    assert ckpt("show", tmp_path, "--json").json["step"] == 1
    assert ckpt("show", tmp_path, "--step", 3, "--json").json["step"] == 3
    found = ckpt("prune", root, "--keep", "last=2", "--json").json
    assert [(each["keep"], each["why"]) for each in found[1:]] == [
        (False, "barred by an audit"), (False, "barred by an audit"),
    ]  # fmt: skip
    assert [path.name for path in root.glob("step-*")] == [NAMES[1]]


def test_free_space_is_checked_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing was written"):
        check_room(Folder(tmp_path / "not" / "there"), 1 << 60)
    check_room(Folder(tmp_path / "not" / "there"), 1)


@pytest.mark.process
def test_only_what_computes_imports_torch(root: Path) -> None:
    """A login node may have none: then `show` says what it leaves out."""
    code = (
        "import sys; from outlast.cli.main import main\n"
        "root = sys.argv[1]\n"
        "codes = [main(['ckpt', *words]) for words in (\n"
        "    ['ls', root], ['verify', root], ['prune', root, '--keep', 'last=2', '--dry-run'],\n"
        "    ['copy', root, root + '2'], ['now', root])]\n"
        "heavy = {'torch', 'numpy', 'obstore'} & set(sys.modules)\n"
        "sys.modules['torch'] = None\n"
        "codes.append(main(['ckpt', 'show', root]))\n"
        "codes.append(main(['ckpt', 'diff', root, root]))\n"
        "sys.exit(f'{heavy} {codes}' if heavy or codes != [0, 0, 0, 0, 1, 0, 2] else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not shown: pip install 'outlast[run]'" in done.stdout
    assert "pip install 'outlast[run]'" in done.stderr  # of diff, framed


@pytest.mark.process
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_output_pipe_changes_no_exit_code(root: Path, form: tuple[str, ...]) -> None:
    flip(root / NAMES[2] / "shard-00000", 30)
    for step, code in (("1", 0), ("2", EXIT_USER_ERROR)):
        command = [sys.executable, "-m", "outlast", "ckpt", "verify", str(root), "--step", step]
        with subprocess.Popen([*command, *form], stdout=subprocess.PIPE, stderr=-1) as process:
            assert process.stdout and process.stderr
            process.stdout.close()
            said = process.stderr.read()
        assert (process.returncode, said) == (code, b"")


def test_names_are_printed_as_they_are(ckpt: Ckpt, tmp_path: Path) -> None:
    make(tmp_path, place(1), {"[b]:key:": np.zeros(4, np.uint8)}, 1)
    assert "[b]:key:" in ckpt("show", tmp_path).out
    assert "[b]:key:" in ckpt("show", tmp_path, "--tensors", "*key*").out


@pytest.mark.process
def test_a_terminal_sees_a_bar_and_a_pipe_does_not(root: Path) -> None:
    command = [sys.executable, "-m", "outlast", "ckpt", "verify", str(root)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        assert process.stdout is not None
        out, seen = process.stdout.read(), b""
        with suppress(OSError):  # EIO: the other end is closed, and all of it was read
            while part := os.read(ours, 1 << 16):
                seen += part
    os.close(ours)
    assert process.returncode == 0
    assert b"step 3" in seen and b"\x1b" in seen and b"\x1b" not in out
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stderr == b"" and b"\x1b" not in done.stdout
