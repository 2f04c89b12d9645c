"""Hosting: what is refused rather than done halfway."""

import pytest

import quorate
from quorate.api import free_port


@pytest.mark.parametrize("option", ["tls_ca", "tls_cert"])
def test_tls_is_refused_rather_than_left_out(option):
    handler = quorate.create_handler(f"tcp://127.0.0.1:{free_port()}/run?min_nodes=1&{option}=/some/file.pem")
    with pytest.raises(quorate.RendezvousConnectionError, match="does not speak TLS yet"):
        handler.next_rendezvous()
    handler.close()
