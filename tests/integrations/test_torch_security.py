"""Token and certificates from `--rdzv-conf`, as torchrun passes it on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests.ports import free_port
from tests.server.tls_kit import Certificates

PATIENCE_S = 60.0


def test_agents_with_token_and_certificates_form_a_round_and_one_without_is_told_what_is_missing(tmp_path: Path):
    certificates = Certificates(tmp_path)
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    pair, endpoint = certificates.server, f"127.0.0.1:{free_port()}"
    conf = {"tls_ca": certificates.authority.path, "tls_cert": pair.cert, "tls_key": pair.key, "token_file": token}

    def handler(**config: Any) -> Any:
        given = {name: str(value) for name, value in config.items()}
        given |= {"timeout": "900", "last_call_timeout": "1"}
        return get_rendezvous_handler(RendezvousParameters("rallypoint", endpoint, "safe", 2, 2, "127.0.0.1", **given))

    handlers = [handler(**conf), handler(**conf)]
    try:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(one.next_rendezvous) for one in handlers]
            assert sorted(call.result(PATIENCE_S).rank for call in calls) == [0, 1]
        outside = handler(tls_ca=certificates.authority.path)
        handlers.append(outside)
        with pytest.raises(RendezvousConnectionError) as caught:
            outside.next_rendezvous()
        assert "asks for a certificate (mutual TLS) and none was given" in str(caught.value)
    finally:
        for one in reversed(handlers):
            one._handler.close()
            one._stores.close()
