"""The token file: its format, its errors, and changes of its content."""

import os

import pytest

from rallypoint.backends.token import LONGEST_TOKEN, MOST_TOKENS, TokenFile
from rallypoint.errors import Rejected
from rallypoint.events import Emitter, SecurityNotice, ServerTrouble
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.hosting import open_tcp
from rallypoint.settings import Settings
from tests.server.kit import client_of, eventually, put, run, serving


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("secret", ("secret",)),
        ("secret\n", ("secret",)),
        ("  secret \r\n\n", ("secret",)),
        ("new\nold\n", ("new", "old")),
        ("open sesame", ("open sesame",)),
        ("geheim: ä", ("geheim: ä",)),
    ],
)
def test_every_line_is_a_token_without_its_surrounding_blanks(tmp_path, text, tokens):
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    file = TokenFile(str(path))
    assert file.tokens == tokens
    assert file.first == tokens[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xff\xfe\x00", "is not text"),
        (b"a\n" * (MOST_TOKENS + 1), "holds 17 tokens"),
        (b"x" * (LONGEST_TOKEN + 1), "holds a token of more than"),
    ],
)
def test_file_without_a_usable_token_is_refused_with_its_name(tmp_path, data, words):
    path = tmp_path / "token"
    path.write_bytes(data)
    with pytest.raises(Rejected) as caught:
        TokenFile(str(path))
    assert f"token_file {str(path)!r} {words}" in str(caught.value)


def test_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(Rejected) as caught:
        TokenFile(str(tmp_path / "none"))
    assert f"token_file {str(tmp_path / 'none')!r} cannot be read: No such file" in str(caught.value)


@pytest.mark.parametrize(("mode", "words"), [(0o600, None), (0o640, None), (0o644, "read"), (0o666, "changed")])
def test_world_readable_file_causes_a_warning(tmp_path, mode, words):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    warnings = TokenFile(str(path)).warnings()
    assert len(warnings) == (words is not None)
    if words is not None:
        assert f"token_file {str(path)!r} can be {words} by everybody on this machine" in warnings[0]


def test_server_reloads_its_tokens_and_keeps_the_last_ones_if_the_file_becomes_unusable(tmp_path, monkeypatch):
    """A rotation: no client with a valid token is refused, and connected clients stay connected."""
    monkeypatch.setattr("rallypoint.server.admission.credentials.POLL_S", 0.05)
    path = tmp_path / "token"
    path.write_text("sesame-1\n")

    def write(text: str) -> None:
        (tmp_path / "next").write_text(text)
        os.replace(tmp_path / "next", path)

    async def comes_in(server, token: str) -> bool:
        async with client_of(server.addresses[0], token=token) as backend:
            try:
                await put(backend, "/a")
            except Rejected:
                return False
            return True

    async def main():
        seen = []
        credentials = Credentials(str(path))
        async with serving(token=credentials.tokens, emit=Emitter(seen.append)) as server:
            task = credentials.watch_files(server)
            async with client_of(server.addresses[0], token="sesame-1") as inside:
                await put(inside, "/a")
                write("sesame-1\nsesame-2\n")
                await eventually(lambda: server.tokens == ("sesame-1", "sesame-2"), "both are accepted")
                assert await comes_in(server, "sesame-1")
                assert await comes_in(server, "sesame-2")
                write("sesame-2\n")
                await eventually(lambda: server.tokens == ("sesame-2",), "only the new one is accepted")
                assert not await comes_in(server, "sesame-1")
                assert await comes_in(server, "sesame-2")
                await put(inside, "/a")
                write("")

                def trouble():
                    return [event for event in seen if isinstance(event, ServerTrouble)]

                await eventually(trouble, "it says that the file is empty")
                assert "is empty" in str(trouble()[0])
                assert "the token that was read before still counts" in str(trouble()[0])
                assert await comes_in(server, "sesame-2")
                path.unlink()
                await eventually(lambda: len(trouble()) == 2, "it says that the file is gone")
                write("sesame-3")
                await eventually(lambda: server.tokens == ("sesame-3",), "it goes on")
            task.cancel()
        notices = [event for event in seen if isinstance(event, SecurityNotice)]
        assert len(notices) == 3
        assert not any("sesame" in str(event) for event in seen)

    run(main())


def test_reconnecting_node_sends_the_token_that_is_in_its_file_now(tmp_path):
    path = tmp_path / "token"
    path.write_text("sesame-1\n")

    async def main():
        async with serving(token="sesame-1") as server:
            url = f"tcp://{server.addresses[0]}/run?min_nodes=1&token_file={path}&is_host=false"
            backend = await open_tcp(Settings.from_url(url))
            await backend.get("/a")
            server.token = "brand new"
            path.write_text("brand new\n")
            for connection in list(server.connections):
                connection.abort()
            await put(backend, "/a")
            await backend.close()

    run(main())
