"""`rallypoint run`: its flags, the sources of their values, and the values that it refuses."""

import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.cli.run_settings import FLAGS, SettingValue, collect, count_gpus, job_of, needs_detection, settings_of
from rallypoint.errors import SettingsError
from rallypoint.launcher.logs import Std


def values(environ: dict[str, str] | None = None, detected: dict[str, SettingValue] | None = None, **flags: str):
    return collect({name.replace("_", "-"): value for name, value in flags.items()}, environ or {}, detected or {})


def settings(environ: dict[str, str] | None = None, detected: dict[str, SettingValue] | None = None, **flags: str):
    return settings_of(values(environ, detected, **flags))


def refused(*words: str, code: int = 2) -> str:
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def shown(*words: str, env: dict[str, str] | None = None) -> dict[str, list[str]]:
    """`--show-config`: flag -> [value, source...]."""
    result = CliRunner().invoke(main, ["run", *words, "--show-config", "train.py"], env=env or {})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line.startswith("--")]
    return {line[0]: line[1:] for line in lines}


def test_torchruns_flags_are_all_there():
    wanted = """nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts
        monitor-interval node-rank master-addr master-port local-addr role redirects tee log-dir module no-python"""
    assert set(wanted.split()) <= {flag.name for flag in FLAGS}


def test_flags_may_be_written_with_underscores_as_for_torchrun():
    assert shown("--nproc_per_node", "2", "--rdzv_id=x", "--standalone")["--nproc-per-node"] == ["2", "flag"]


def test_each_value_is_shown_with_where_it_came_from():
    env = {"RALLYPOINT_NNODES": "1:1", "PET_NNODES": "3", "PET_MAX_RESTARTS": "7", "RALLYPOINT_ROLE": ""}
    found = shown("--standalone", "--tee", "0", env=env)
    assert found["--nnodes"] == ["1:1", "RALLYPOINT_NNODES"]
    assert found["--max-restarts"] == ["7", "PET_MAX_RESTARTS"]
    assert found["--tee"] == ["0", "flag"]
    assert found["--role"] == ["default", "default"]
    assert found["--rdzv-id"] == ["-", "default"]


def test_flag_overrides_environment_and_environment_overrides_scheduler():
    detected = {"nnodes": SettingValue("8:8", "detected: slurm"), "rdzv-id": SettingValue("job-7", "detected: slurm")}
    found = values({"PET_NNODES": "4"}, detected, rdzv_endpoint="head")
    assert (found.text("nnodes"), found.text("rdzv-id")) == ("4", "job-7")
    assert found.found["rdzv-id"].source == "detected: slurm"
    assert values({"RALLYPOINT_NNODES": "5", "PET_NNODES": "4"}, detected, nnodes="6").text("nnodes") == "6"
    run = settings_of(found)
    assert (run.min_nodes, run.max_nodes, run.run_id, run.where) == (4, 4, "job-7", "tcp://head:29400")


def test_scheduler_is_asked_only_if_a_setting_is_missing():
    assert needs_detection(values())
    assert needs_detection(values(rdzv_endpoint="head", rdzv_id="x"))
    assert not needs_detection(values(rdzv_endpoint="head", rdzv_id="x", nnodes="2"))
    assert not needs_detection(values({"PET_RDZV_ID": "x", "PET_NNODES": "2"}, rdzv_endpoint="head"))
    assert not needs_detection(values(standalone="true"))
    assert not needs_detection(values(url="tcp://head/x?min_nodes=1"))


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "head:1"}, "tcp://head:1"),
        ({"rdzv_endpoint": "head"}, "tcp://head:29400"),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "e1,e2:9"}, "etcd://e1:2379,e2:9"),
        ({"rdzv_backend": "file", "rdzv_endpoint": "/mnt/x"}, "file:///mnt/x"),
        ({"master_addr": "head", "node_rank": "1"}, "static://head:29500"),
        ({"rdzv_backend": "static", "rdzv_endpoint": "head:7", "node_rank": "0"}, "static://head:7"),
    ],
)
def test_backends_have_the_names_that_torchrun_gives_them(flags, where):
    assert settings(nnodes="2", rdzv_id="x", **flags).where == where


def test_url_replaces_backend_endpoint_and_id():
    run = settings(url="tcp://head/my-run?min_nodes=2&max_nodes=4&labels=zone=a", name="me")
    assert (run.run_id, run.min_nodes, run.max_nodes, run.name, run.labels) == ("my-run", 2, 4, "me", {"zone": "a"})
    assert settings(url="tcp://head/my-run", nnodes="2:3").max_nodes == 3
    with pytest.raises(SettingsError, match="--url and --rdzv-id exclude each other"):
        settings(url="tcp://head/my-run?min_nodes=1", rdzv_id="x")


def test_conf_takes_every_option_of_the_run_and_refuses_others():
    run = settings(rdzv_endpoint="head", rdzv_id="x", rdzv_conf="join_timeout=9,last_call_timeout=0.5")
    assert (run.join_timeout_s, run.last_call_timeout_s) == (9.0, 0.5)
    with pytest.raises(SettingsError, match="did you mean timeout"):
        settings(rdzv_endpoint="head", rdzv_id="x", rdzv_conf="tiemout=9")
    with pytest.raises(SettingsError, match="'join_timeout' is not of the form"):
        settings(rdzv_endpoint="head", rdzv_id="x", rdzv_conf="join_timeout")


def test_node_rank_selects_the_node_rank_policy():
    run = settings(nnodes="2", rdzv_endpoint="head", rdzv_id="x", node_rank="1")
    assert (run.node_rank, run.ranks) == (1, "node_rank")
    assert settings(nnodes="2", rdzv_endpoint="head", rdzv_id="x").ranks == "sticky"


def test_one_node_without_an_endpoint_is_standalone():
    one, two = settings(), settings(standalone="true")
    assert (one.scheme, two.scheme) == ("memory", "memory")
    assert one.run_id != two.run_id
    assert one.local_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nnodes": "2"}, "--rdzv-endpoint is missing"),
        ({"nnodes": "2", "rdzv_endpoint": "head"}, "--rdzv-id is missing"),
        ({"nnodes": "0"}, r"nnodes='0' \(from flag\): 0 is less than 1"),
        ({"nnodes": "4:2", "rdzv_endpoint": "h", "rdzv_id": "x"}, "max_nodes=2 is below min_nodes=4"),
        ({"nnodes": "two"}, "'two' is not a whole number; give a number, or MIN:MAX"),
        ({"standalone": "true", "nnodes": "2"}, "--standalone runs on one node only"),
        ({"rdzv_backend": "redis", "rdzv_endpoint": "h", "rdzv_id": "x"}, "no such backend; choose one of c10d, etcd"),
        ({"rdzv_endpoint": "h:99999", "rdzv_id": "x"}, "h:99999"),
    ],
)
def test_missing_or_contradictory_values_are_refused_with_advice(flags, words):
    with pytest.raises(SettingsError, match=words):
        settings(**flags)


def test_invalid_value_from_the_environment_is_refused_with_the_variable():
    with pytest.raises(SettingsError, match=r"max-restarts='many' \(from PET_MAX_RESTARTS\)"):
        job_of(values({"PET_MAX_RESTARTS": "many"}), ("x",))


def test_unknown_flag_is_refused_with_the_nearest_one():
    assert "--nproc-per-node" in refused("--nproc-per-nod", "2", "train.py")
    assert "--max-restarts" in refused("--max-restart", "2", "train.py")


def test_missing_program_is_an_error():
    assert "the program is missing" in refused("--standalone")
    assert "--module and --no-python exclude each other" in refused("--standalone", "-m", "--no-python", "x")


def test_log_files_need_a_directory_and_a_directory_alone_implies_all_output(tmp_path):
    with pytest.raises(SettingsError, match="give their directory, --log-dir"):
        job_of(values(tee="3"), ("x",))
    job = job_of(values(log_dir=str(tmp_path)), ("x",))
    assert (job.tee.of(0), job.redirects.of(0)) == (Std.ALL, Std.NONE)


def test_gpus_are_counted_as_workers_see_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "0000:01").touch()
    (tmp_path / "0000:02").touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,GPU-abc,-1"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({}, tmp_path / "none") == 0
    with pytest.raises(SettingsError, match="no visible NVIDIA GPU"):
        job_of(values(nproc_per_node="gpu"), ("x",))
    assert job_of(values(nproc_per_node="cpu"), ("x",)).workers >= 1


def test_token_file_is_a_flag_and_its_variable_is_ignored_by_runs_that_have_no_token(tmp_path):
    (path := tmp_path / "token").write_text("secret")
    variable = {"RALLYPOINT_TOKEN_FILE": str(path)}
    run = {"rdzv_endpoint": "head", "rdzv_id": "x"}
    assert settings(token_file=str(path), **run).token_file == str(path)
    assert settings(variable, **run).token_file == str(path)
    assert settings(variable, rdzv_conf="token_file=/other", **run).token_file == "/other"
    assert settings(variable, url="tcp://head/x?min_nodes=1&token_file=/other").token_file == "/other"
    assert settings(variable, url="tcp://head/x?min_nodes=1").token_file == str(path)
    assert settings(variable, url="etcd://head/x?min_nodes=1").token_file is None
    assert settings(variable, standalone="true").token_file is None
    assert "token_file is for tcp://" in refused("--standalone", "--token-file", str(path), "--", "true")


def test_flags_override_the_variable_with_a_url():
    variable = {"RALLYPOINT_URL": "tcp://head:1/from-variable?min_nodes=1"}
    assert settings(variable).run_id == "from-variable"
    found = settings(variable, rdzv_endpoint="other:2", rdzv_id="from-flags")
    assert (found.run_id, found.where) == ("from-flags", "tcp://other:2")


def test_time_outs_of_a_job_are_taken_from_their_flags():
    job = job_of(values(standalone="true", stall_timeout="60", finished_timeout="5"), ("true",))
    assert (job.stall_timeout_s, job.finished_timeout_s) == (60.0, 5.0)
    job = job_of(values(standalone="true"), ("true",))
    assert (job.stall_timeout_s, job.finished_timeout_s) == (None, 120.0)
    with pytest.raises(SettingsError) as error:
        job_of(values(standalone="true", stall_timeout="0"), ("true",))
    assert "stall-timeout='0' (from flag): '0' is not a number of seconds above 0" in str(error.value)
