"""Scripts with drawing loaders, resumed from a memory copy and from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts.plain_ranks import PlainRanks
from tests.scripts.script_catalogue import FOLDER, read_script
from tests.scripts.script_runs import differences, digests_of_run, run_outlast, run_plainly

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(700)]
ALL_LOST = [f"--fault=kill:rank={rank},step=8,phase=forward" for rank in (0, 1)]


@pytest.mark.parametrize("name", ["episodes", "generator_of_the_module", "stateful_stream"])
def test_a_loader_goes_on_from_a_copy_and_from_the_disk(name: str, tmp_path: Path) -> None:
    script = read_script(FOLDER / "data" / f"{name}.py")
    plain = PlainRanks()
    expected = run_plainly(script, tmp_path / "plain", plain)
    plain.close()
    ended = run_outlast(script, tmp_path / "run", "--checkpoint-every=3", *ALL_LOST)
    assert "rollback" in ended.output, ended.output
    assert differences(digests_of_run(ended, script.ranks), expected) == []
    again = run_outlast(script, tmp_path / "run")
    assert "resumed at step 9" in again.output, again.output
    assert differences(digests_of_run(again, script.ranks), expected) == []
