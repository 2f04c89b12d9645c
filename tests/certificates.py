"""Certificates for tests: authorities, and what they sign, as PEM files."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert: Path
    key: Path


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


class Authority:
    """Signs certificates; its own is in `path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.pem"
        self._certificate = self._build(_name(name), self._key, [], None, is_authority=True)
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *hosts: str,
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
        self_signed: bool = False,
        password: bytes | None = None,
    ) -> Pair:
        """A certificate for these hosts; without any, for a client only by its name."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(_name(name), key, list(hosts), None if self_signed else self, begins, ends)
        pair = Pair(self.folder / f"{name}-cert.pem", self.folder / f"{name}-key.pem")
        pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(_pem(key, password))
        pair.key.chmod(0o600)
        return pair

    def expired(self, name: str, *hosts: str) -> Pair:
        return self.issue(name, *hosts, begins=now() - 10 * DAY, ends=now() - DAY)

    def _build(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        hosts: list[str],
        issuer: "Authority | None",
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
        is_authority: bool = False,
    ) -> x509.Certificate:
        signer = key if issuer is None else issuer._key
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins or now() - DAY)
            .not_valid_after(ends or now() + 10 * DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if is_authority:
            usage = dict.fromkeys(
                ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"), False
            )
            usage |= dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
            builder = builder.add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_san, hosts))), critical=False)
        return builder.sign(signer, hashes.SHA256())
