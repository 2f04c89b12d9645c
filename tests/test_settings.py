"""Settings from URLs, keywords and parameters: accepted values and errors."""

from datetime import timedelta
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import SettingsError
from rallypoint.parameters import RendezvousParameters
from rallypoint.settings import OPTIONS, EtcdProtocol, Kind, LastCallMode, Settings, Timing, parse_endpoint


def build(scheme="memory", **options):
    """Settings of a small run; every argument can be replaced."""
    return Settings.build(**({"scheme": scheme, "endpoints": (), "run_id": "r", "min_nodes": 2} | options))


def refused(**options):
    """The error that these options give."""
    with pytest.raises(SettingsError) as caught:
        build(**options)
    return caught.value


def refused_url(url, **overrides):
    with pytest.raises(SettingsError) as caught:
        Settings.from_url(url, **overrides)
    return str(caught.value)


# The table


def test_every_option_has_one_field_and_every_field_one_option():
    fields = [field.name for field in msgspec.structs.fields(Settings)]
    assert fields[:3] == ["scheme", "endpoints", "run_id"]
    assert fields[3:] == [option.field for option in OPTIONS]


def test_every_name_belongs_to_one_option():
    names = [name for option in OPTIONS for name in option.names]
    assert len(names) == len(set(names))


def test_every_meaning_is_a_sentence():
    assert all(option.meaning.endswith(".") and len(option.meaning) < 140 for option in OPTIONS)


def test_sessions_on_etcd_are_short_unless_a_value_is_given():
    def built(**options):
        return Settings.build(scheme="etcd", endpoints="e", run_id="r", min_nodes=2, **options)

    assert (built().keep_alive_interval_s, built().keep_alive_max_attempt, built().session_ttl_s) == (1.25, 4, 5.0)
    assert built(keep_alive_interval=5).session_ttl_s == 20
    assert built(keep_alive_interval=5, keep_alive_max_attempt=3).session_ttl_s == 15
    assert Settings.build(scheme="file", endpoints="/tmp", run_id="r", min_nodes=2).session_ttl_s == 15


def test_fields_of_durations_end_in_their_unit():
    assert all(option.field.endswith("_s") == (option.kind is Kind.SECONDS) for option in OPTIONS)


def test_shared_returns_exactly_the_shared_options():
    assert set(build().shared()) == {option.name for option in OPTIONS if option.shared}


def test_defaults_are_those_of_the_documentation():
    settings = build()
    assert (settings.min_nodes, settings.max_nodes, settings.step) == (2, 2, 1)
    assert (settings.join_timeout_s, settings.last_call_timeout_s, settings.close_timeout_s) == (600, 30, 30)
    assert (settings.heartbeat_timeout_s, settings.read_timeout_s, settings.confirm_timeout_s) == (5, 60, 10)
    assert (settings.last_call_mode, settings.admission_window_s) == (LastCallMode.ADAPTIVE, 1)
    assert (settings.keep_alive_interval_s, settings.keep_alive_max_attempt) == (5, 3)
    assert (settings.disconnect_grace_s, settings.reopen_after_s) == (0.3, 60)
    assert (settings.hold_back_losses, settings.hold_back_window_s, settings.hold_back_s) == (3, 600, 30)
    assert (settings.name, settings.labels, settings.local_addr, settings.node_rank) == (None, {}, None, None)
    assert (settings.ranks, settings.rank0, settings.is_host) == ("sticky", None, None)
    assert (settings.token_file, settings.tls_ca, settings.tls_cert, settings.tls_key) == (None,) * 4
    assert (settings.etcd_prefix, settings.protocol) == ("rallypoint", EtcdProtocol.HTTP)
    assert (settings.cert, settings.key, settings.cacert, settings.user, settings.password_file) == (None,) * 5


def test_labels_of_two_nodes_are_two_dictionaries():
    assert build().labels is not build().labels


# Shared options and timing


def test_time_to_live_is_interval_times_attempts():
    assert build().session_ttl_s == 15
    assert build(keep_alive_interval=0.5, keep_alive_max_attempt=4).session_ttl_s == 2


def test_shared_options_are_plain_values():
    settings = build(max_nodes=4, step=2, last_call_mode="fixed", ranks="topology:zone")
    assert settings.shared() == {
        "min_nodes": 2,
        "max_nodes": 4,
        "step": 2,
        "last_call_mode": "fixed",
        "ranks": "topology:zone",
        "rank0": "",
    }
    assert build(rank0="head").shared()["rank0"] == "head"


def test_default_timing_is_that_of_default_settings():
    assert build().timing() == Timing()


def test_timing_follows_the_options():
    settings = build(
        last_call_timeout=1,
        confirm_timeout=2,
        admission_window=0,
        keep_alive_interval=4,
        keep_alive_max_attempt=2,
        reopen_after=5,
        hold_back_losses=6,
        hold_back_window=7,
        hold_back=9,
    )
    assert settings.timing() == Timing(
        last_call_timeout_s=1,
        confirm_timeout_s=2,
        admission_window_s=0,
        session_ttl_s=8,
        reopen_after_s=5,
        hold_back_losses=6,
        hold_back_window_s=7,
        hold_back_s=9,
    )


# URLs


def test_a_url_gives_scheme_endpoint_run_id_and_options():
    settings = Settings.from_url("tcp://head:29400/my-run?min_nodes=2&max_nodes=4&labels=zone=a+rack=7")
    assert settings == Settings.build(
        scheme="tcp",
        endpoints=["head:29400"],
        run_id="my-run",
        min_nodes=2,
        max_nodes=4,
        labels={"zone": "a", "rack": "7"},
    )


@pytest.mark.parametrize(
    ("location", "endpoints", "run_id"),
    [
        ("tcp://head/r", ("head:29400",), "r"),
        ("TCP://head/r", ("head:29400",), "r"),
        (" tcp://head/r\n", ("head:29400",), "r"),
        ("tcp:///r", ("localhost:29400",), "r"),
        ("tcp://:7/r", ("localhost:7",), "r"),
        ("tcp://[fd00::7]/r", ("[fd00::7]:29400",), "r"),
        ("static://head/r", ("head:29500",), "r"),
        ("etcd://e1,e2:99, [::1] /r", ("e1:2379", "e2:99", "[::1]:2379"), "r"),
        ("memory:///r", ("",), "r"),
        ("memory://here/r", ("here",), "r"),
        ("memory://a,b%2Fc/r", ("a,b/c",), "r"),
        ("file:///mnt/shared/my-run", ("/mnt/shared",), "my-run"),
        ("file:///mnt/my%20dir,1/r", ("/mnt/my dir,1",), "r"),
        ("file:///mnt//r", ("/mnt",), "r"),
        ("file:///r", ("/",), "r"),
        ("plugin+x://Some Where,b:1:2/r", ("Some Where", "b:1:2"), "r"),
        ("tcp://head/a%2Fb%20c%3F", ("head:29400",), "a/b c?"),
        ("tcp://head/a+b#c", ("head:29400",), "a+b#c"),
    ],
)
def test_location_is_split_and_normalised(location, endpoints, run_id):
    settings = Settings.from_url(location, min_nodes=1)
    assert settings.endpoints == endpoints
    assert settings.run_id == run_id
    assert settings.scheme == location.strip().partition(":")[0].lower()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (None, "not a string"),
        (b"tcp://h/r", "not a string"),
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("head:29400/my-run", "no scheme"),
        ("://head/r", "no scheme"),
        ("head/r?name=tcp://x", "no scheme"),
        ("tcp:/head/r", "no scheme"),
        ("tcp://head", "no run id"),
        ("tcp://head/", "no run id"),
        ("tcp://head?min_nodes=1", "no run id"),
        ("tcp://", "no run id"),
        ("memory://", "no run id"),
        ("file:///mnt/shared/", "no run id"),
        ("file://r", "no run id"),
        ("file://mnt/shared/r", "three slashes"),
        ("tcp://head/a/b", "write it as %2F"),
        ("tcp://head/r/", "write it as %2F"),
        ("tcp://head/r?min_nodes", "'min_nodes' is not of the form option=value"),
        ("tcp://head/r?=1", "'=1' is not of the form option=value"),
        ("tcp://head/%ff", "'%ff' is not UTF-8"),
        ("tcp://head/r?name=%ff", "'%ff' is not UTF-8"),
    ],
)
def test_a_malformed_url_is_refused_with_an_example(url, problem):
    message = refused_url(url, min_nodes=1)
    assert problem in message
    assert "tcp://head:29400/my-run?min_nodes=2&max_nodes=4" in message


def test_an_option_given_twice_in_the_url_is_refused():
    assert "option step is given twice" in refused_url("memory:///r?min_nodes=2&step=1&step=1")


def test_overrides_win_over_the_url():
    settings = Settings.from_url("memory:///r?min_nodes=2&join_timeout=1", min_nodes=3, join_timeout="7")
    assert (settings.min_nodes, settings.join_timeout_s) == (3, 7)


def test_overrides_win_under_any_name():
    assert Settings.from_url("memory:///r?min_workers=2", min_nodes=3).min_nodes == 3
    assert Settings.from_url("memory:///r?min_nodes=2", min_workers=3).min_nodes == 3


def test_overrides_of_none_are_ignored():
    assert Settings.from_url("memory:///r?min_nodes=2&rank0=a", rank0=None, labels=None).rank0 == "a"


def test_empty_parts_of_the_query_are_ignored():
    assert Settings.from_url("memory:///r?&min_nodes=2&&").min_nodes == 2


# Endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("", ("localhost", 1000)),
        ("  ", ("localhost", 1000)),
        ("head", ("head", 1000)),
        ("head:1", ("head", 1)),
        ("head:65535", ("head", 65535)),
        (":80", ("localhost", 80)),
        ("10.0.0.7:80", ("10.0.0.7", 80)),
        ("a_b-c.example.org.", ("a_b-c.example.org.", 1000)),
        ("[::1]", ("::1", 1000)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_endpoints_are_host_and_port(text, endpoint):
    assert parse_endpoint(text, 1000) == endpoint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "not a string"),
        ("head:", "port after the colon is missing"),
        ("head:0", "port '0' is not in 1..65535"),
        ("head:65536", "port '65536' is not in 1..65535"),
        ("head:" + "9" * 5000, "is not in 1..65535"),
        ("head:-1", "port '-1' is not a number"),
        ("head:http", "port 'http' is not a number"),
        ("head:+80", "port '+80' is not a number"),
        ("head:8_0", "port '8_0' is not a number"),
        ("head:٨", "is not a number"),
        ("head: 80", "port ' 80' is not a number"),
        ("::1", "brackets"),
        ("fd00::7:29400", "brackets"),
        ("http://head:80", "more than one colon"),
        ("[::1", "closing bracket is missing"),
        ("[::1]80", "'80' follows the closing bracket"),
        ("[::1]:", "port after the colon is missing"),
        ("[head]:80", "'head' is not an IPv6 address"),
        ("[]:80", "'' is not an IPv6 address"),
        ("two hosts:80", "host contains ' '"),
        ("me@head", "host contains '@'"),
        ("head/x", "host contains '/'"),
        ("a,b", "host contains ','"),
        ("a..b", "not a valid name"),
        ("a" * 64, "not a valid name"),
        ("\ud800", "not a valid name"),
        ("a." * 200, "longer than 253"),
    ],
)
def test_a_bad_endpoint_is_refused_with_an_example(text, problem):
    with pytest.raises(SettingsError) as caught:
        parse_endpoint(text, 1000)
    assert problem in str(caught.value)
    assert "head:29400 or [fd00::7]:29400" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "endpoints", "problem"),
    [
        ("tcp", "a,b", "a tcp:// run takes exactly one endpoint"),
        ("static", ["a", "b"], "a static:// run takes exactly one endpoint"),
        ("file", ["/a", "/b"], "a file:// run takes exactly one endpoint"),
        ("etcd", "a,,b", "one of the endpoints is empty"),
        ("etcd", "a,b:0", "port '0'"),
        ("etcd", [1], "not a string"),
        ("file", "", "needs a directory"),
    ],
)
def test_endpoints_that_do_not_fit_the_scheme_are_refused(scheme, endpoints, problem):
    error = refused(scheme=scheme, endpoints=endpoints)
    assert problem in str(error)
    assert error.option == "endpoint"


@pytest.mark.parametrize(
    ("scheme", "given_as", "endpoints"),
    [
        ("tcp", (), ("localhost:29400",)),
        ("tcp", "head", ("head:29400",)),
        ("etcd", "a,b", ("a:2379", "b:2379")),
        ("etcd", ["a", "b:1"], ("a:2379", "b:1")),
        ("memory", (), ("",)),
        ("file", "rel/dir/", ("rel/dir",)),
    ],
)
def test_endpoints_are_given_as_text_or_list(scheme, given_as, endpoints):
    assert build(scheme=scheme, endpoints=given_as).endpoints == endpoints


# Values


@pytest.mark.parametrize(
    ("option", "value", "field", "expected"),
    [
        ("min_nodes", " 3 ", "min_nodes", 3),
        ("join_timeout", "2.5", "join_timeout_s", 2.5),
        ("join_timeout", " 1e3 ", "join_timeout_s", 1000.0),
        ("join_timeout", timedelta(minutes=1), "join_timeout_s", 60.0),
        ("keep_alive_interval", 1, "keep_alive_interval_s", 1.0),
        ("admission_window", 0, "admission_window_s", 0),
        ("reopen_after", "0", "reopen_after_s", 0),
        ("disconnect_grace", 0.0, "disconnect_grace_s", 0),
        ("hold_back", timedelta(0), "hold_back_s", 0),
        ("hold_back_losses", "0", "hold_back_losses", 0),
        ("last_call_mode", "fixed", "last_call_mode", LastCallMode.FIXED),
        ("last_call_mode", " Adaptive ", "last_call_mode", LastCallMode.ADAPTIVE),
        ("last_call_mode", LastCallMode.FIXED, "last_call_mode", LastCallMode.FIXED),
        ("node_rank", 0, "node_rank", 0),
        ("rank", "5", "node_rank", 5),
        ("labels", "", "labels", {}),
        ("labels", " a = 1 + b = 2=3 ", "labels", {"a": "1", "b": "2=3"}),
        ("labels", {"a": "1"}, "labels", {"a": "1"}),
        ("ranks", "natural", "ranks", "natural"),
        ("ranks", "node_rank", "ranks", "node_rank"),
        ("ranks", " Sticky ", "ranks", "sticky"),
        ("ranks", "topology: Zone + rack", "ranks", "topology:Zone+rack"),
        ("rank0", "head", "rank0", "head"),
    ],
)
def test_values_are_read_as_text_or_already_typed(option, value, field, expected):
    assert getattr(build(**{option: value}), field) == expected


@pytest.mark.parametrize(("value", "expected"), [("y", True), ("FALSE", False), (1, True), (0, False), (True, True)])
def test_booleans_are_read_in_every_spelling(value, expected):
    assert build(scheme="tcp", is_host=value).is_host is expected


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("min_nodes", "0", "not positive: give 1 or more"),
        ("min_nodes", -1, "not positive"),
        ("min_nodes", "two", "not an integer"),
        ("min_nodes", True, "not an integer"),
        ("min_nodes", 2.0, "not an integer"),
        ("max_nodes", 2**31, "too large: give at most 2147483647"),
        ("max_nodes", 1, "is below min_nodes=2: give 2 or more"),
        ("step", "0", "not positive"),
        ("join_timeout", "0", "not positive: give more than 0 seconds"),
        ("join_timeout", "soon", "not a number of seconds"),
        ("join_timeout", "30s", "plain number, such as 30 or 0.5"),
        ("join_timeout", "1_000", "not a number of seconds"),
        ("join_timeout", "", "not a number of seconds"),
        ("join_timeout", True, "not a number of seconds"),
        ("join_timeout", "nan", "not finite"),
        ("join_timeout", float("inf"), "not finite"),
        ("join_timeout", 1e10, "too large: give at most 1000000000"),
        ("timeout", "-1", "not positive"),
        ("last_call_timeout", -1, "not positive"),
        ("close_timeout", timedelta(0), "not positive"),
        ("heartbeat_timeout", 0, "not positive"),
        ("read_timeout", 0, "not positive"),
        ("confirm_timeout", 0, "not positive"),
        ("keep_alive_interval", 0, "not positive"),
        ("keep_alive_max_attempt", 0, "not positive: give 1 or more"),
        ("hold_back_window", 0, "not positive"),
        ("admission_window", "-0.5", "negative: give 0 or more"),
        ("disconnect_grace", -1, "negative"),
        ("reopen_after", -1, "negative"),
        ("hold_back", -1, "negative"),
        ("hold_back_losses", -1, "negative"),
        ("node_rank", -1, "negative"),
        ("rank", "first", "not an integer"),
        ("last_call_mode", "lazy", "unknown: write adaptive or fixed"),
        ("last_call_mode", 1, "unknown: write adaptive or fixed"),
        ("ranks", "random", "not a rank policy: write sticky, node_rank, natural or topology:label+label"),
        ("ranks", "sticky:zone", "not a rank policy"),
        ("ranks", 7, "not a rank policy"),
        ("ranks", "topology", "no label or an empty one"),
        ("ranks", "topology:", "no label or an empty one"),
        ("ranks", "topology:a+", "write it like topology:zone+rack"),
        ("labels", "zone", "has no '=' in 'zone'"),
        ("labels", "a=1+", "has no '=' in ''"),
        ("labels", "=1", "without name or value"),
        ("labels", "a=", "without name or value"),
        ("labels", "a=1+a=2", "has the label 'a' twice"),
        ("labels", {"a": 1}, "not text to text, 'a': 1"),
        ("labels", {1: "a"}, "not text to text"),
        ("labels", {"a=b": "c"}, "reserved character in 'a=b=c'"),
        ("labels", {"a": "b+c"}, "reserved character in 'a=b+c'"),
        ("labels", 7, "are not labels"),
        ("name", "", "is empty"),
        ("name", "  ", "is empty"),
        ("rank0", 0, "is not text"),
        ("rank0", "\ud800", "cannot be written as UTF-8"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(option, value, problem):
    error = refused(**{option: value})
    assert str(error).startswith(f"{option}={value!r} ")
    assert problem in str(error)
    assert error.option == option


@pytest.mark.parametrize(
    ("scheme", "option", "value", "problem"),
    [
        ("tcp", "is_host", "01", "not a boolean: write true or false"),
        ("tcp", "is_host", 2, "not a boolean"),
        ("etcd", "protocol", "grpc", "unknown: write http or https"),
        ("etcd", "etcd_prefix", "", "is empty"),
        ("etcd", "etcd_prefix", "//", "is empty"),
    ],
)
def test_a_bad_value_for_one_backend_is_refused_by_name_and_value(scheme, option, value, problem):
    error = refused(scheme=scheme, **{option: value})
    assert f"{option}={value!r}" in str(error)
    assert problem in str(error)


@pytest.mark.parametrize("value", [10**5000, "9" * 5000, -(10**5000)], ids=["int", "text", "negative"])
@pytest.mark.parametrize("option", ["min_nodes", "join_timeout"])
def test_an_enormous_number_is_refused_with_a_short_message(option, value):
    assert len(str(refused(**{option: value}))) < 300


@pytest.mark.parametrize(
    ("run_id", "problem"),
    [
        ("", "run_id='' is empty"),
        (" \t", "is empty"),
        ("x" * 257, "has 257 characters: use at most 256"),
        (None, "run_id=None is not text"),
        (7, "run_id=7 is not text"),
        ("\ud800", "cannot be written as UTF-8"),
    ],
)
def test_a_bad_run_id_is_refused(run_id, problem):
    error = refused(run_id=run_id)
    assert problem in str(error)
    assert error.option == "run_id"


def test_a_run_id_of_blanks_in_a_url_is_refused():
    assert "run_id='  ' is empty" in refused_url("memory:///%20%20", min_nodes=1)


def test_the_longest_run_id_is_accepted():
    assert build(run_id="x" * 256).run_id == "x" * 256


@pytest.mark.parametrize("scheme", ["", " ", None])
def test_an_empty_scheme_is_refused(scheme):
    assert refused(scheme=scheme).option == "scheme"


# Options together


def test_min_nodes_must_be_given():
    error = refused(min_nodes=None)
    assert error.option == "min_nodes"
    assert "min_nodes is missing" in str(error)


@pytest.mark.parametrize(("least", "most", "step"), [(3, 4, 2), (4, 5, 2), (2, 2, 4)])
def test_sizes_that_are_no_multiples_of_the_step_are_refused(least, most, step):
    message = str(refused(min_nodes=least, max_nodes=most, step=step))
    assert f"min_nodes={least} and max_nodes={most}" in message
    assert f"step={step}" in message


def test_an_unknown_option_suggests_the_nearest_name():
    assert str(refused(join_timout=3)) == "unknown option 'join_timout': did you mean join_timeout?"
    assert "did you mean min_nodes?" in refused_url("memory:///r?Min-Nodes=3")
    assert refused(lastcall_mode=3).option == "lastcall_mode"


def test_an_option_like_no_other_lists_those_of_the_scheme():
    message = str(refused(scheme="tcp", qqq=1))
    assert "the options are min_nodes, max_nodes" in message
    assert "tls_cert" in message
    assert "etcd_prefix" not in message


@pytest.mark.parametrize(
    ("scheme", "option", "problem"),
    [
        ("tcp", "etcd_prefix", "option etcd_prefix is for etcd:// runs and this is a tcp:// run"),
        ("tcp", "ssl_cert", "option ssl_cert is for etcd:// runs"),
        ("etcd", "tls_ca", "option tls_ca is for tcp:// and static:// runs"),
        ("static", "is_host", "option is_host is for tcp:// runs"),
        ("plugin", "user", "option user is for etcd:// runs"),
    ],
)
def test_an_option_of_another_backend_is_refused_with_its_schemes(scheme, option, problem):
    error = refused(scheme=scheme, **{option: "x"})
    assert problem in str(error)
    assert error.option == option


@pytest.mark.parametrize(
    ("scheme", "alias", "name", "value"),
    [
        ("memory", "min_workers", "min_nodes", "2"),
        ("memory", "max_workers", "max_nodes", "4"),
        ("memory", "rank", "node_rank", "1"),
        ("etcd", "ssl_cert", "cert", "c.pem"),
        ("etcd", "ca_cert", "cacert", "ca.pem"),
    ],
)
def test_an_alias_is_the_option(scheme, alias, name, value):
    query = f"{scheme}:///r?protocol=https&" if scheme == "etcd" else f"{scheme}:///r?"
    filling = "" if "min" in alias else "&min_nodes=2"
    by_alias = Settings.from_url(f"{query}{alias}={value}{filling}")
    assert by_alias == Settings.from_url(f"{query}{name}={value}{filling}")
    assert by_alias == Settings.from_url(f"{query}{name}={value}&{alias}={value}{filling}")


def test_an_alias_that_contradicts_its_option_is_refused_naming_both():
    message = refused_url("memory:///r?min_nodes=2&min_workers=3")
    assert "min_nodes='2' and min_workers='3' are the same option" in message


def test_an_alias_written_differently_is_no_contradiction():
    assert build(max_nodes=4, max_workers=" 4 ").max_nodes == 4


@pytest.mark.parametrize(
    ("query", "overrides", "expected"),
    [
        ("timeout=900", {}, 900),
        ("timeout=900&join_timeout=5", {}, 5),
        ("join_timeout=5&timeout=900", {}, 5),
        ("timeout=900", {"join_timeout": 5}, 5),
        ("join_timeout=5", {"timeout": 900}, 5),
        ("timeout=900", {"timeout": 7}, 7),
        ("timeout=900", {"join_timeout": None}, 900),
    ],
)
def test_timeout_counts_only_where_join_timeout_is_absent(query, overrides, expected):
    assert Settings.from_url(f"memory:///r?min_nodes=1&{query}", **overrides).join_timeout_s == expected


@pytest.mark.parametrize("option", ["cert", "ssl_cert", "cacert", "ca_cert"])
@pytest.mark.parametrize("protocol", [None, "http"])
def test_certificates_with_http_are_refused(option, protocol):
    message = str(refused(scheme="etcd", protocol=protocol, **{option: "x.pem"}))
    assert "'x.pem' has no effect with protocol=http: give protocol=https too" in message


def test_a_certificate_without_a_key_is_fine():
    settings = build(scheme="etcd", protocol="https", cert="both.pem")
    assert (settings.cert, settings.key, settings.protocol) == ("both.pem", None, "https")
    assert build(scheme="tcp", tls_cert="both.pem").tls_cert == "both.pem"


def test_a_key_without_a_certificate_is_refused():
    assert "key='k.pem' comes without cert" in str(refused(scheme="etcd", protocol="https", key="k.pem"))
    assert "tls_key='k.pem' comes without tls_cert" in str(refused(scheme="tcp", tls_key="k.pem"))


@pytest.mark.parametrize("prefix", ["a/b", "/a/b", "a/b/", " //a/b// "])
def test_slashes_around_the_etcd_prefix_do_not_matter(prefix):
    assert build(scheme="etcd", etcd_prefix=prefix).etcd_prefix == "a/b"


# Parameters


def test_parameters_give_the_same_settings_as_a_url():
    params = RendezvousParameters(
        "rallypoint", "head", "my-run", 2, 4, local_addr="10.0.0.7", timeout=900, is_host="1", rank=1, read_timeout=None
    )
    url = "tcp://head/my-run?min_nodes=2&max_nodes=4&local_addr=10.0.0.7&join_timeout=900&is_host=true&node_rank=1"
    assert Settings.from_parameters(params, "tcp") == Settings.from_url(url)


def test_several_endpoints_in_parameters_are_separated_by_commas():
    params = RendezvousParameters("etcd", "e1,e2:99", "r", 1, 1)
    assert Settings.from_parameters(params, "etcd").endpoints == ("e1:2379", "e2:99")


def test_an_empty_local_address_in_parameters_is_none():
    params = RendezvousParameters("rallypoint", "", "r", 1, 1, local_addr="")
    assert Settings.from_parameters(params, "tcp").local_addr is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"join_timout": 1}, "did you mean join_timeout?"),
        ({"min_workers": 3}, "min_workers=3 and min_nodes=2 are the same option"),
        ({"step": 2}, "max_nodes=3"),
    ],
)
def test_bad_options_in_parameters_are_refused(config, problem):
    params = RendezvousParameters("rallypoint", "", "r", 2, 3, **config)
    with pytest.raises(SettingsError) as caught:
        Settings.from_parameters(params, "tcp")
    assert problem in str(caught.value)


# For all inputs

letters = st.characters(exclude_categories=["Cc", "Cs"])
words = st.text(letters, min_size=1).filter(str.strip)
seconds = st.floats(min_value=0.001, max_value=1e6)
label_words = st.text(letters, min_size=1).map(str.strip).filter(lambda text: text and not set("+=") & set(text))
good_options = st.fixed_dictionaries(
    {"min_nodes": st.integers(1, 1000)},
    optional={
        "max_nodes": st.integers(1000, 2000),
        "join_timeout": seconds,
        "keep_alive_interval": seconds,
        "admission_window": st.just(0.0) | seconds,
        "last_call_mode": st.sampled_from(LastCallMode),
        "name": words,
        "rank0": words,
        "labels": st.dictionaries(label_words, label_words),
        "node_rank": st.integers(0, 1000),
        "ranks": st.sampled_from(["sticky", "natural", "topology:a+b"]),
        "is_host": st.booleans(),
        "token_file": words,
    },
)


def as_text(value):
    match value:
        case LastCallMode():
            return value.value
        case dict():
            return "+".join(f"{name}={content}" for name, content in value.items())
    return str(value)


@given(run_id=st.text(letters, min_size=1, max_size=256).filter(str.strip), options=good_options)
def test_options_survive_a_round_trip_through_a_url(run_id, options):
    query = "&".join(f"{name}={quote(as_text(value), safe='+=')}" for name, value in options.items())
    built = Settings.build(scheme="tcp", endpoints=["head"], run_id=run_id, **options)
    assert Settings.from_url(f"tcp://head/{quote(run_id, safe='')}?{query}") == built
    assert Settings.from_url(f"tcp://head/{quote(run_id, safe='')}", **options) == built


url_like = st.builds(
    "{}://{}/{}?{}={}".format,
    st.sampled_from(["tcp", "etcd", "file", "memory", "static", "other"]),
    st.text(),
    st.text(),
    st.sampled_from([name for option in OPTIONS for name in option.names]) | st.text(),
    st.text(),
)


@given(url=st.text() | url_like)
def test_any_url_gives_settings_or_a_settings_error(url):
    try:
        settings = Settings.from_url(url, min_nodes=1)
    except SettingsError:
        return
    assert settings.run_id.strip()


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.text(st.characters(categories=["Cs", "L"])),
    st.binary(),
    st.timedeltas(),
    st.lists(st.integers()),
    st.dictionaries(st.text() | st.integers(), st.text() | st.integers()),
)


@given(
    scheme=st.sampled_from(["tcp", "etcd"]),
    options=st.dictionaries(st.sampled_from([name for option in OPTIONS for name in option.names]), anything),
)
def test_any_values_give_consistent_settings_or_a_settings_error(scheme, options):
    try:
        settings = Settings.build(scheme=scheme, endpoints="head", run_id="r", **options)
    except SettingsError:
        return
    assert 1 <= settings.min_nodes <= settings.max_nodes
    assert settings.session_ttl_s > 0


@given(text=st.text() | st.from_regex(r"\[?[a-z0-9:.%]*\]?:[0-9]{1,6}", fullmatch=True))
def test_any_endpoint_round_trips_through_its_normal_form_or_is_refused(text):
    try:
        host, port = parse_endpoint(text, 29400)
    except SettingsError:
        return
    assert 1 <= port <= 65535
    [normal] = build(scheme="tcp", endpoints=[text]).endpoints
    assert parse_endpoint(normal, 1) == (host, port)


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nends with code 0", "a\x9b31m", "\x07a", "a\x7f"])
def test_names_and_labels_contain_no_control_characters(text):
    for option in ({"name": text}, {"labels": {"zone": text}}, {"labels": {text: "x"}}, {"local_addr": text}):
        with pytest.raises(SettingsError, match="has a control character"):
            build(**option)
