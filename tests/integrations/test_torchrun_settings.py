"""The arguments of torchrun become settings, or a ValueError with advice."""

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rallypoint.errors import SettingsError
from rallypoint.integrations.torchrun.settings import settings_of


def params(endpoint="head:29400", run_id="my-run", nodes=(2, 4), local_addr=None, **config):
    config.setdefault("timeout", 900)  # torchrun always gives it
    return RendezvousParameters("rallypoint", endpoint, run_id, *nodes, local_addr, **config)


def settings(*args, environ=None, **kwargs):
    return settings_of(params(*args, **kwargs), environ or {})


@pytest.mark.parametrize(
    ("endpoint", "scheme", "endpoints"),
    [
        ("head:29401", "tcp", ("head:29401",)),
        ("head", "tcp", ("head:29400",)),
        ("", "tcp", ("localhost:29400",)),
        ("[fd00::7]:29400", "tcp", ("[fd00::7]:29400",)),
        ("tcp://head:29400", "tcp", ("head:29400",)),
        ("TCP://head/", "tcp", ("head:29400",)),
        ("etcd://e1,e2:2380", "etcd", ("e1:2379", "e2:2380")),
        ("file:///mnt/shared", "file", ("/mnt/shared",)),
        ("memory://here", "memory", ("here",)),
    ],
)
def test_endpoint_is_an_address_or_a_url(endpoint, scheme, endpoints):
    made = settings(endpoint)
    assert (made.scheme, made.endpoints, made.run_id) == (scheme, endpoints, "my-run")
    assert (made.min_nodes, made.max_nodes) == (2, 4)


def test_token_and_certificates_are_taken_from_rdzv_conf():
    given = {"token_file": "/t", "tls_ca": "/ca.pem", "tls_cert": "/c.pem", "tls_key": "/k.pem"}
    made = settings(**given)
    assert {name: getattr(made, name) for name in given} == given
    made = settings("tcp://head?tls_ca=/other.pem&token_file=/u")
    assert (made.tls_ca, made.token_file) == ("/other.pem", "/u")


def test_run_id_may_hold_any_character():
    assert settings("tcp://head", run_id="a/b?c=d&e%20f").run_id == "a/b?c=d&e%20f"


def test_rdzv_conf_overrides_options_of_the_endpoint():
    made = settings("tcp://head?join_timeout=7&step=2", step="1")
    assert (made.join_timeout_s, made.step) == (7.0, 1)


@pytest.mark.parametrize(
    ("endpoint", "config", "words"),
    [
        ("tcp://head:1/other", {}, ["contains a run id (other)", "--rdzv-id"]),
        ("tcp://head:1?min_nodes=3", {}, ["min_nodes", "--nnodes"]),
        ("head", {"max_workers": "3"}, ["max_workers", "--nnodes"]),
        ("head", {"last_cal_timeout": "3"}, ["did you mean last_call_timeout?"]),
        ("head", {"store_type": "file"}, ["unknown option 'store_type'"]),
        ("head", {"join_timeout": "soon"}, ["join_timeout='soon'"]),
        ("head", {"cacert": "x"}, ["cacert is for etcd://"]),
        ("head:0", {}, ["port '0'"]),
        ("ftp:", {}, ["port after the colon is missing"]),
    ],
)
def test_invalid_argument_is_a_value_error_that_names_it(endpoint, config, words):
    with pytest.raises(SettingsError) as caught:
        settings(endpoint, **config)
    assert isinstance(caught.value, ValueError)
    assert [word for word in words if word not in str(caught.value)] == []


def test_timeout_of_torchrun_is_the_default_of_join_timeout():
    assert settings().join_timeout_s == 900
    assert settings(join_timeout="5").join_timeout_s == 5


def test_local_addr_of_torchrun_is_used():
    assert settings(local_addr="10.0.0.7").local_addr == "10.0.0.7"
    assert settings(local_addr="10.0.0.7", name="n").name == "n"


@pytest.mark.parametrize(
    ("config", "environ", "rank", "policy"),
    [
        ({}, {}, None, "sticky"),
        ({}, {"PET_NODE_RANK": "3"}, 3, "node_rank"),
        ({}, {"PET_NODE_RANK": ""}, None, "sticky"),
        ({"node_rank": "1"}, {"PET_NODE_RANK": "3"}, 1, "node_rank"),
        ({"rank": "1"}, {}, 1, "node_rank"),
        ({"node_rank": "1", "ranks": "natural"}, {}, 1, "natural"),
    ],
)
def test_node_rank_comes_from_rdzv_conf_or_the_environment(config, environ, rank, policy):
    made = settings(environ=environ, **config)
    assert (made.node_rank, made.ranks) == (rank, policy)


def test_run_without_an_id_is_refused_by_backends_that_serve_many_runs():
    with pytest.raises(ValueError, match="two jobs with this id would become one"):
        settings("etcd://e1", run_id="none")
    assert settings("head", run_id="none").run_id == "none"
