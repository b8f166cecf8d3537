from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from crossdock.launch.config import load_job
from crossdock.launch.models import Config
from crossdock.launch.problems import problems_of
from crossdock.launch.schema import schema_text
from crossdock.launch.trace import Trace, write_trace
from crossdock.launch.yaml_file import YamlDocument
from crossdock.scratch.errors import ConfigError
from tests.launch.conftest import CONFIGS, SMALL

SHIPPED = sorted(CONFIGS.glob("*.yaml"))


def errors_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides)
    return str(caught.value).splitlines()


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_for_us_and_for_editors(path):
    job = load_job(path)
    assert job.config.name == path.stem
    assert job.topology.world_size == job.config.cluster.num_ranks
    assert job.placement.num_experts == job.dispatch_config.num_experts
    schema = json.loads((CONFIGS / "config.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_the_promised_configs_are_there():
    names = {path.stem for path in SHIPPED}
    assert names >= {
        "laptop",
        "ragged-dp",
        "pcp-decode",
        "sequence-parallel",
        "allgather",
        "one-node-8gpu",
        "two-node-16gpu",
        "wide-ep-64",
    }


def test_committed_schema_is_what_the_models_say():
    assert (CONFIGS / "config.schema.json").read_text() == schema_text(), (
        "regenerate it: crossdock schema > configs/config.schema.json"
    )


def test_all_errors_come_at_once_with_line_and_key(tmp_path):
    text = (
        SMALL.replace("pcp: 2", "pcpp: 2")
        .replace("num_experts: 6", "num_experts: -6")
        .replace("hidden: 16", "hidden: wide")
        .replace("steps: 3", "steps: no")
    )
    path = write(tmp_path, text)
    assert errors_of(path) == [
        f"{path}:4: parallel.pcpp: unknown key; did you mean pcp?",
        f"{path}:5: moe.num_experts: at least 1 is wanted, not -6",
        f"{path}:5: moe.hidden: a whole number is wanted, not wide (text)",
        f"{path}:7: run.steps: a whole number is wanted, not no (YAML reads no as false)",
    ]


def test_a_section_that_is_wrong_does_not_hide_a_grid_that_does_not_fit(small):
    lines = errors_of(small, "moe.top_k=0", "parallel.dp=3")
    assert any("moe.top_k" in line for line in lines)
    assert any("dp 3 x pcp 2 x tp 1 = 6 ranks" in line for line in lines)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("parallel.epp=3", "parallel.epp: unknown key"),
        ("dispatch.transport=glooo", "did you mean gloo?"),
        ("dispatch.transport=nccl", "needs cluster.device cuda"),
        ("dispatch.bucket=0", "at least 1"),
        ("dispatch.timeout_s=.inf", "timeout_s"),
        ("dispatch.timeout_s=0.49", "at least 0.5"),
        ("dispatch.timeout_s=true", "a number is wanted, not true"),
        ("dispatch.symmetric_heap=8GiB", "needs transport nvshmem; transport is auto"),
        ("dispatch.symmetric_heap=8GB", "such as 8GiB, up to 64TiB is wanted, not 8GB"),
        ("dispatch.layout=expert", "needs transport nvshmem"),
        ("dispatch.expert_alignment=0", "at least 1"),
        ("moe.top_k=7", "num_experts is 6"),
        ("moe.placement=[0, 1, 2, 3, 4, 0]", "moe.placement[4]: rank 4 does not exist"),
        ("moe.placement=[0, 1]", "2 owners for num_experts 6"),
        ("run.batch.decode=[1]", "1 entries for 2 DP ranks"),
        ("run.batch.prefill.0.1=-1", "run.batch.prefill[0][1]: at least 0"),
        ("run.batch.tokens_per_rank=[1, 2, 3, 4]", "instead of prefill and decode"),
        ("run.batch={}", "give prefill, decode or both"),
        ("run.batch={tokens_per_rank: [1]}", "1 entries for 4 ranks"),
        ("run.routing.uniform=true", "not zipf and uniform"),
        ("run.routing={}", "not none of them"),
        ("run.routing={trace: nowhere.safetensors}", "no such file; looked for"),
        ("run.lock_after=4", "after step 4 of 3"),
        ("version=2", "1 is wanted, not 2"),
        ("name=7", "text is wanted"),
        ("experts=", "a mapping of keys is wanted"),
    ],
)
def test_an_override_that_is_wrong_is_one_line_that_names_it(small, override, expected):
    (line,) = errors_of(small, override)
    assert line.startswith(f"override {override}: ")
    assert expected in line


@pytest.mark.parametrize(
    "override",
    [
        "dp",
        "=3",
        "parallel..dp=2",
        "name.x=1",
        "run.steps=[",
        "run.batch.decode.9=1",
        "run.batch.decode.\u00b2=1",
        "run=&a [*a]",
        "run={<<: {steps: 1}}",
        'name="\\ud800"',
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(small, override):
    (line,) = errors_of(small, override)
    assert line.startswith(f"override {override}: ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"run.batch.decode.{'1' * 5000}=1", "there is no"),
        (f"run.batch.decode.0={'1' * 5000}", "a number of 5000 digits"),
        (f"moe.hidden=0x{'f' * 5000}", "a number of 5002 digits"),
        (f"run.routing={{trace: {'x' * 5000}}}", "no such file"),
        ("name\x1b[31m=1", "override name\\x1b[31m=1"),
    ],
    ids=["index", "digits", "hex", "trace", "escape"],
)
def test_an_override_that_nobody_can_read_is_told_in_short(small, override, expected):
    (line,) = errors_of(small, override)
    assert line.startswith("override ")
    assert expected in line
    assert len(line) < 1000
    assert line.isprintable()


def test_overrides_replace_values_and_whole_sections(small):
    job = load_job(small, ["run.seed=7", "run.batch={tokens_per_rank: [4, 0, 1, 2]}"])
    assert job.config.run.seed == 7
    assert job.config.run.batch.tokens_per_rank == [4, 0, 1, 2]
    assert job.config.run.batch.prefill is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- 1\n- 2\n", "a mapping of keys is wanted"),
        ("a: [1,\nb: 2\n", "not YAML"),
        ("a: !!python/object:os.system {}\n", "not YAML"),
        ("a: &x {b: *x}\n", "aliases are not supported"),
        ("a: 1\nb: 2020-13-45\n", ":2: 2020-13-45 is no usable timestamp (month must be in 1..12)"),
        ('a: !!int "1\n\nfoo"\n', ":1: 1 foo is no usable int"),
        (f"a: !!float {'x' * 5000}\n", "is no usable float"),
        ('a: "\\UFFFFFFFF"\n', "not usable YAML"),
        ("a: [1,\n 0x_]\n", ":2: 0x_ is no usable int (invalid literal"),
        ("? [1]\n: 2\n", "a key is text"),
        ("3: 2\n", "a key is text, not 3"),
        ("!!set {a, b}\n", "a mapping of keys is wanted"),
        ("a: 1\n<<: 3\n", ":2: merge keys (<<) are not supported"),
        ('"a\\e[31m": 3\n', "cannot be shown, in a\\x1b[31m"),
        ('a: "\\ud800"\n', "cannot be shown, in \\ud800"),
        (f"a: {'1' * 5000}\n", ":1: a number of 5000 digits"),
        (f"a: 0x{'f' * 5000}\n", ":1: a number of 5002 digits"),
        ("[" * 1000, "nested too deeply"),
        (b"\x7fELF\x02\x01\x00", "not a YAML text file"),
        (bytes(range(256)) * 8, "not a text file"),
        (b"\xde\xad" * 5_000_000, "larger than 1 MiB"),
        (b"a" * 10_000_000, "larger than 1 MiB"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_file_that_is_no_configuration_is_one_clear_line(tmp_path, content, expected):
    (line,) = errors_of(write(tmp_path, content))
    assert line.startswith(str(tmp_path))
    assert expected in line
    assert len(line) < 400


def test_a_directory_and_a_missing_file_are_refused(tmp_path):
    assert "is a directory" in errors_of(tmp_path)[0]
    assert "no such file" in errors_of(tmp_path / "x.yaml")[0]


def test_a_duplicate_key_names_both_lines(tmp_path):
    path = write(tmp_path, SMALL + "name: again\n")
    assert errors_of(path) == [f"{path}:10: name: duplicate key, first in line 2"]


def test_thousands_of_problems_are_counted_not_listed(tmp_path):
    entries = ", ".join(["[-1]"] * 4000)
    path = write(tmp_path, SMALL.replace("[[7, 0], [5]]", f"[{entries}]"))
    lines = errors_of(path)
    assert len(lines) == 51
    assert lines[0] == f"{path}:8: run.batch.prefill[0][0]: at least 0 is wanted, not -1"
    assert lines[-1] == "and 3950 more"


def test_twice_as_many_problems_take_about_twice_the_work():
    def work(count: int) -> int:
        document = YamlDocument(Path("c.yaml"), {}, yaml.compose("{}"))
        document.data = {"run": {"batch": {"decode": ["a"] * count}}}
        with pytest.raises(ValidationError) as caught:
            Config.model_validate(document.data)
        calls = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count_call)
        try:
            problems_of(caught.value, document, 50)
        finally:
            sys.setprofile(None)
        return calls

    assert work(2000) < 3 * work(1000)


def test_missing_keys_are_named_where_their_section_begins(tmp_path):
    path = write(tmp_path, SMALL.replace("hidden: 16, ", ""))
    assert errors_of(path) == [f"{path}:5: moe.hidden: missing"]


def test_a_trace_of_another_model_is_refused(tmp_path, small):
    trace = Trace(
        topk_idx=torch.tensor([[[0, 1, 2]]]),
        topk_weights=torch.ones(1, 1, 3),
        num_experts=9,
        metadata={},
    )
    (tmp_path / "traces").mkdir()
    write_trace(trace, tmp_path / "traces" / "t.safetensors")
    lines = errors_of(small, "run.routing={trace: t.safetensors, layer: 1}")
    assert len(lines) == 3
    assert "recorded with 9 experts, but num_experts is 6" in lines[1]
    assert "recorded with top_k 3, but moe.top_k is 2" in lines[2]
    assert "layers 0 to 0" in lines[0]


def test_a_file_that_is_no_trace_is_refused(tmp_path, small):
    (tmp_path / "t.safetensors").write_bytes(b"garbage" * 100)
    (line,) = errors_of(small, "run.routing={trace: t.safetensors}")
    assert "not a safetensors file" in line


@pytest.mark.parametrize("command", ["run", "check", "render"])
def test_the_command_line_ends_with_status_2_and_no_traceback(small, command, monkeypatch, capsys):
    from crossdock.launch import cli

    arguments = [command, str(small), "parallel.tp=3"]
    if command == "render":
        arguments += ["--for", "torchrun"]
    monkeypatch.setattr("sys.argv", ["crossdock", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "parallel" in said


def test_usage_errors_end_with_status_2():
    from crossdock.launch.cli import app

    assert CliRunner().invoke(app, ["run"]).exit_code == 2
    assert CliRunner().invoke(app, ["rum"]).exit_code == 2


@pytest.mark.parametrize("size", ["8GiB", "8589934592", "8192 MiB"])
def test_a_symmetric_heap_is_a_size_for_nvshmem_alone(small, size):
    job = load_job(
        small,
        ["cluster.device=cuda", "dispatch.transport=nvshmem", f"dispatch.symmetric_heap={size}"],
    )
    assert job.config.dispatch.symmetric_heap == 8 * 2**30
    assert not hasattr(job.dispatch_config, "symmetric_heap")
    document = yaml.safe_load(SMALL)
    document["dispatch"] = {"transport": "nvshmem", "symmetric_heap": yaml.safe_load(size)}
    jsonschema.validate(document, json.loads(schema_text()))


def test_the_last_of_two_overrides_of_one_key_counts(small_job):
    assert small_job("run.steps=1", "run.steps=2").config.run.steps == 2
    assert small_job("dispatch.wire=fp8", "dispatch={}").config.dispatch.wire == "payload"
