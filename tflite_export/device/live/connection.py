"""A device's connection to the server. It stays open between requests, since a new one costs both sides time."""

import os
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tflite_export.device.errors import InvalidInput
from tflite_export.device.live.wire import WireError

_TIMEOUT = 60.0  # seconds until an answer must have come
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NOT_YET, _EXPIRED = 9, 10  # OpenSSL's numbers of certificates whose time is not now: a clock may still be set
_NO_URLLIB3 = "live rounds need the package urllib3: pip install urllib3"


def check_way(url: str) -> None:
    """Checks that nobody on the way to a server can read the token, or answer in the server's place.

    Raises:
        InvalidInput: it is no address, or of another machine and without TLS.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"the server's address begins with http:// or https://, found {url!r}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # such as a bracket that is not closed, or a port above 65535
        host = None
    if not host:
        raise InvalidInput(f"a server's address is such as https://example.org:8443, found {url!r}")
    if url.startswith("http://") and host not in _LOOPBACK:
        raise InvalidInput(
            f"http is for a server on this machine alone ({', '.join(_LOOPBACK)}): others could read the enrolment "
            f"token on its way to {host}, or answer in its place. Give the server --tls, and the device its address "
            f"with https://, found {url!r}"
        )


def trusting(ca: str | Path) -> ssl.SSLContext:
    """A context that trusts the certificates in this file.

    Raises:
        InvalidInput: it cannot be read, or has none.
    """
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # also ssl.SSLError; neither names the file
        raise InvalidInput(f"the certificate {ca} cannot be used: {error}") from error


class NotTrusted(InvalidInput):
    """The certificate of a server is not one that this device trusts; to ask again would not help."""


class Connection:
    """Sends requests to one server, through the proxy that the environment names for it (https_proxy, no_proxy).

    To a server on this machine there is none: the proxy is elsewhere, and would get the token. A proxy's address may be
    without http://, as for curl.

    Args:
        url: the server's address, such as 'https://example.org', without a slash at the end.
        context: for https, with the server's certificate; None: those that Python trusts.

    Raises:
        WireError: the package urllib3 is missing.
        InvalidInput: the environment names a proxy that cannot be one.
    """

    def __init__(self, url: str, context: ssl.SSLContext | None):
        try:
            import urllib3
        except ImportError as error:
            raise WireError(_NO_URLLIB3) from error
        self._url, self._errors = url, urllib3.exceptions.HTTPError
        parts = urlsplit(url)
        proxy = urllib.request.getproxies().get(parts.scheme)
        how: dict[str, Any] = {"retries": False, "timeout": _TIMEOUT}
        if parts.scheme == "https":
            how["ssl_context"] = context or ssl.create_default_context()
        if proxy is None or parts.hostname in _LOOPBACK or urllib.request.proxy_bypass(parts.hostname or ""):
            self._http = urllib3.PoolManager(**how)
        else:
            try:
                self._http = urllib3.ProxyManager(proxy if "://" in proxy else f"http://{proxy}", **how)
                usable = bool(self._http.proxy and self._http.proxy.host)
            except (urllib3.exceptions.ProxySchemeUnknown, ValueError):  # its texts may have the proxy's password
                usable = False
            if not usable:
                raise InvalidInput(
                    f"{_variable(parts.scheme)} names a proxy that cannot be used: it must be http://HOST:PORT or "
                    f"https://HOST:PORT, found {proxy.rpartition('@')[2]!r}"
                )

    def send(self, method: str, target: str, body: bytes, headers: dict) -> tuple[int, bytes, Mapping[str, str]]:
        """Sends a request. No redirect is followed.

        Args:
            method, target: such as 'PUT' and '/v1/update/3', with the query.
            body: empty if there is none.
            headers: {name: text}.

        Returns:
            (status, body, headers) of the answer.

        Raises:
            NotTrusted: the server's certificate is not one that is trusted.
            OSError: there is no answer.
        """
        try:
            found = self._http.request(method, self._url + target, body=body or None, headers=headers, redirect=False)
        except self._errors as error:
            if (why := _not_trusted(error)) is not None:
                raise NotTrusted(
                    f"the certificate of {self._url} is not trusted: {why}. If it is signed by one of your own, give "
                    "that one with --ca"
                ) from error
            raise ConnectionError(str(error)) from error
        return found.status, found.data, found.headers

    def close(self) -> None:
        """Closes the connection to the server, and to the proxy. A later `send` works: it opens a new one."""
        self._http.clear()


def _variable(scheme: str) -> str:
    """The variable of the environment that names the proxy; lower case goes first, as for curl."""
    name = f"{scheme}_proxy"
    return name.upper() if name not in os.environ and name.upper() in os.environ else name


def _not_trusted(error: BaseException | None) -> str | None:
    """Why a certificate is not trusted, if this is the cause of an error."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return None if error is None or error.verify_code in (_NOT_YET, _EXPIRED) else error.verify_message
