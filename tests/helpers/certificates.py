"""Certificates that are signed by themselves, for tests of https."""

from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def made_certificate(path, days=0, address="127.0.0.1"):
    """A certificate for an address, good from a day before to a day after so many days from now, and its key."""
    key, now, pem = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), serialization.Encoding.PEM
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    first, last = now + timedelta(days - 1), now + timedelta(days + 1)
    made = made.serial_number(1).not_valid_before(first).not_valid_after(last)
    names = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(address))])
    signed = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    kind, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(signed.public_bytes(pem) + key.private_bytes(pem, kind, bare))
    return path
