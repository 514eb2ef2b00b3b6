"""Let a phone in: the address of this machine in its network, a certificate for it, and a QR code."""

import socket
import ssl
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from io import StringIO
from ipaddress import ip_address
from pathlib import Path

LIFETIME = timedelta(days=30)
"""The time for which a certificate is valid."""


def find_address() -> str:
    """Return the address of this machine in its network. Raises OSError if it is in none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the system only chooses the way
        return str(probe.getsockname()[0])


def make_context(addresses: Sequence[str]) -> tuple[ssl.SSLContext, str]:
    """Make a key and a certificate for these addresses, which live in memory alone; return its fingerprint, too."""
    from cryptography import x509  # imported here because few share
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "crow web")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(one)) for one in addresses]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="crow-web-") as folder:  # the only way into a context is a file
        file = Path(folder, "key.pem")
        file.touch(0o600)
        file.write_bytes(private + certificate.public_bytes(pem))
        context.load_cert_chain(file)
    return context, certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def draw_code(address: str) -> str:
    """Draw a QR code for a terminal."""
    import segno  # imported here because few share

    drawn = StringIO()
    segno.make(address, micro=False).terminal(drawn, compact=True)
    return drawn.getvalue()
