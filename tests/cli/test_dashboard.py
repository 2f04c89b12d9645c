"""`rallypoint dashboard` and `rallypoint serve --http`: errors in a call are reported before anything is served."""

import socket

import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.dashboard import child


def said(*words: str, code: int) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("words", [("serve", "--bind", "127.0.0.1:0"), ("dashboard", "tcp://127.0.0.1:1")])
def test_page_that_others_reach_needs_a_token_or_is_told_that_it_does_not(words):
    output = said(*words, "--http", "0.0.0.0:0", code=1)
    assert "--token-file" in output
    assert "--insecure" in output


@pytest.mark.parametrize("words", [("serve", "--bind", "127.0.0.1:0"), ("dashboard", "tcp://127.0.0.1:1")])
def test_address_of_the_page_that_is_in_use_is_an_error(words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = said(*words, "--http", f"127.0.0.1:{port}", code=1)
    assert f"127.0.0.1:{port} is taken" in output
    assert "listening" not in output


@pytest.mark.parametrize("words", [("serve", "--bind", "127.0.0.1:0"), ("dashboard", "tcp://127.0.0.1:1")])
def test_page_without_its_packages_is_an_error(words, monkeypatch):
    monkeypatch.setattr(child, "PACKAGES", ("starlette", "there_is_no_such_package"))
    output = said(*words, "--http", "127.0.0.1:0", code=2)
    assert "the page needs there_is_no_such_package: pip install 'rallypoint[dashboard]'" in output


def test_names_without_a_page_are_refused():
    assert "--http" in said("serve", "--http-name", "page.example", code=2)


def test_page_of_an_etcd_member_is_another_command():
    output = said("serve", "--engine", "etcd", "--http", "127.0.0.1:0", code=2)
    assert "--http is not for --engine etcd" in output


def test_directory_of_files_is_not_a_place():
    assert "give the URL of one run" in said("dashboard", "file:///tmp/runs/", code=2)


def test_unknown_option_of_the_url_is_said():
    assert "min_node" in said("dashboard", "tcp://head/my-run?min_node=2", code=2)


def test_certificate_of_the_page_is_needed_for_its_authority():
    assert "--tls-cert" in said("dashboard", "tcp://head", "--tls-ca", __file__, code=2)


def test_token_file_that_is_empty_is_said(tmp_path):
    empty = tmp_path / "token"
    empty.write_text("")
    assert "is empty" in said(
        "dashboard", "tcp://127.0.0.1:1", "--token-file", str(empty), "--http", "127.0.0.1:0", code=5
    )
