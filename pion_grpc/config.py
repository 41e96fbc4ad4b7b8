"""The configuration: one dataclass that is also the table of flags, variables and defaults.

Each setting is a flag (`disk_budget` is `--disk-budget`) and an environment variable
(`PION_DISK_BUDGET`; `variable_of` knows the exceptions). A flag wins over the environment, which wins
over the default. An empty variable counts as not set.
"""

import dataclasses
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

AttendChoice = Literal["auto", "mlx", "numpy", "off"]
"""What computes attention. auto is MLX on a Mac with Apple silicon and NumPy elsewhere, but off with
several workers."""
AttendDtype = Literal["f32", "f16"]

ONE_OWNER = "--workers above 1 and attend exclude each other: one compute device has one owner"

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Returns the bytes of a size such as `20GiB`, `512m` or `1000000`.

    Raises:
        ValueError: it is not a size.
    """
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    digits = number.removesuffix(unit)
    if unit not in _UNITS or not digits.replace(".", "", 1).isdigit():
        raise ValueError(f"{text!r} is not a size: write 20GiB, 512MiB or a number of bytes")
    return int(float(digits) * _UNITS[unit])


def parse_count(text: str) -> int:
    """Returns a whole number.

    Raises:
        ValueError: it is not a whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number such as 64") from None


SOCKET_PATH_BYTES_MAX = 103
"""What works on every system: macOS has room for 104 bytes, including the 0 at the end."""


class Address(NamedTuple):
    """Where a server listens: a host and a port, or else the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """As it is written."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """Of the sockets that listen there."""
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Returns what `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH` names.

    Raises:
        ValueError: it is not an address, or the path is too long for a socket.
    """
    if text.startswith("unix:"):
        return Address(path=_socket_path(text.removeprefix("unix:")))
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    is_name = bool(host) and not set(host) & set("[]:/ ")
    if not (_is_ipv6(host) if bracketed else is_name) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is not an address: write HOST:PORT, [IPv6]:PORT or unix:PATH")
    if len(port) > 5 or int(port) > 65_535:
        raise ValueError(f"{text!r}: a port is a number from 0 to 65535")
    return Address(host, int(port))


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def _socket_path(path: str) -> str:
    size = len(os.fsencode(path))
    if not path:
        raise ValueError("'unix:' names no path: write unix:PATH")
    if size > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"{path} has {size} bytes: the path of a Unix socket has at most {SOCKET_PATH_BYTES_MAX}"
        )
    return path


def _listen(text: str) -> str:
    parse_address(text)
    return text


def _listen_or_not(text: str) -> str:
    return _listen(text) if text else text


def parse_bool(text: str) -> bool:
    """Returns whether a text such as `1`, `true` or `yes` means yes.

    Raises:
        ValueError: it means neither yes nor no.
    """
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
        "": False,
    }
    if text.strip().lower() not in known:
        raise ValueError(f"{text!r} is neither yes nor no")
    return known[text.strip().lower()]


def parse_path(text: str) -> Path:
    """Returns a path, a leading `~` being the user's home directory.

    Raises:
        ValueError: it is empty, as a variable is that was not set; it would mean the working directory.
    """
    if not text:
        raise ValueError("the path is empty")
    return Path(text).expanduser()


def default_data() -> Path:
    """Returns the data directory that is used unless another is named."""
    if sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "pion-grpc"


def parse_pairs(text: str) -> tuple[str, ...]:
    """Returns `NAME=PASSWORD` pairs, separated by commas.

    Raises:
        ValueError: one is not such a pair. The message does not show it: it may be a password.
    """
    pairs = tuple(filter(None, text.split(",")))
    if not all("=" in pair for pair in pairs):
        raise ValueError("a tenant is written NAME=PASSWORD")
    return pairs


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    text: str,
    metavar: str = "",
    *,
    variable: str = "",
) -> Any:
    metadata = {"parse": parse, "help": text, "metavar": metavar, "variable": variable}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set about a server."""

    data: Path = _setting(default_data, parse_path, "data directory", "DIR")
    listen: str = _setting(
        "127.0.0.1:50051", _listen, "HOST:PORT or unix:PATH; port 0 picks one", "ADDRESS"
    )
    resp: str = _setting(
        "",
        _listen_or_not,
        "HOST:PORT or unix:PATH for clients of the RESP wire; port 0 picks one",
        "ADDRESS",
    )
    workers: int = _setting(1, parse_count, "processes that serve one data directory", "N")
    max_sessions: int = _setting(
        0,
        parse_count,
        "sides that RESP clients may declare; beyond that the least recently used goes; 0: no limit",
        "N",
    )
    ns_prefix: str = _setting(
        "", str, "what names of prefixes must begin with on the RESP wire", "TEXT"
    )
    no_wal: bool = _setting(
        False,
        parse_bool,
        "tell RESP clients that commits promise nothing; writes survive all the same",
    )
    disk_budget: int = _setting(
        20 << 30, parse_bytes, "bytes on disk; every file of the directory counts", "SIZE"
    )
    tenant_budget: int = _setting(0, parse_bytes, "bytes on disk per tenant; 0: no quota", "SIZE")
    resident_budget: int = _setting(
        2 << 30, parse_bytes, "bytes of K/V that attend keeps in memory", "SIZE"
    )
    attend: AttendChoice = _setting(
        "auto",
        str,
        "what computes attention here: mlx, numpy, off, or auto (off with several workers)",
        "BACKEND",
    )
    attend_dtype: AttendDtype = _setting(
        "f32", str, "data type in which attend keeps K and V: f32 or f16", "TYPE"
    )
    fa_window: int = _setting(
        0,
        parse_count,
        "attend queries see this many rows at the end unless they ask for others; 0: all",
        "ROWS",
    )
    streams_max: int = _setting(
        64, parse_count, "streams served at once, plus as many streams of attend queries", "N"
    )
    stall_ms: int = _setting(
        60_000,
        parse_count,
        "a stream is cut off when its peer has done nothing for this long; 0: never",
        "MS",
    )
    drain_ms: int = _setting(1_000, parse_count, "at shutdown, time for proxies to notice", "MS")
    grace_ms: int = _setting(10_000, parse_count, "at shutdown, time for calls to end", "MS")
    no_export: bool = _setting(
        False, parse_bool, "never answer Export: clients on this host receive streams, too"
    )
    insecure_bind: bool = _setting(
        False, parse_bool, "listen beyond this host without a password; anyone may read and write"
    )
    password_file: Path | None = _setting(
        None,
        parse_path,
        "file with the password that clients must give",
        "FILE",
    )

    tls_cert: Path | None = _setting(
        None,
        parse_path,
        "PEM certificate of the gRPC address, which then speaks TLS; reloaded when it changes "
        "(PION_SERVER_TLS_CERT)",
        "FILE",
        variable="PION_SERVER_TLS_CERT",
    )
    tls_key: Path | None = _setting(
        None,
        parse_path,
        "PEM key of that certificate (PION_SERVER_TLS_KEY)",
        "FILE",
        variable="PION_SERVER_TLS_KEY",
    )
    tls_client_ca: Path | None = _setting(
        None,
        parse_path,
        "mutual TLS: clients must have a certificate of this CA (PION_SERVER_TLS_CLIENT_CA)",
        "FILE",
        variable="PION_SERVER_TLS_CLIENT_CA",
    )

    tenants: tuple[str, ...] = _setting(
        (),
        parse_pairs,
        "a tenant and its password; may be repeated (PION_TENANTS takes several, separated by commas)",
        "NAME=PASSWORD",
    )

    password_text: str = dataclasses.field(default="", repr=False)
    """The password itself, for command lines with a flag for it. Not a setting: `serve` has none."""

    def __post_init__(self) -> None:
        for name in ("listen", "resp") if self.resp else ("listen",):
            try:
                address = parse_address(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name}: {error}") from error
            directory = Path(address.path).parent
            if address.path and directory != self.data and not directory.is_dir():
                raise ValueError(f"--{name}: there is no directory {directory} to put a socket in")
        if self.disk_budget < 16 << 20:
            raise ValueError("--disk-budget: at least 16 MiB, for the catalogue")
        if not 1 <= self.streams_max <= 1_024:
            raise ValueError("--streams-max: 1 to 1024")
        for name, choices in (("attend", AttendChoice), ("attend_dtype", AttendDtype)):
            if getattr(self, name) not in get_args(choices):
                flag, known = name.replace("_", "-"), ", ".join(get_args(choices))
                raise ValueError(f"--{flag}: {getattr(self, name)!r} is not one of {known}")
        if not 1 <= self.workers <= 64:
            raise ValueError("--workers: 1 to 64")
        if self.workers > 1 and self.attend not in ("auto", "off"):
            raise ValueError(f"--attend {self.attend}: {ONE_OWNER}")
        if self.max_sessions == 1 or self.max_sessions < 0:
            raise ValueError("--max-sessions: 0, or at least 2: a prefix has two sides")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca: the server needs a certificate, too: --tls-cert")
        if self.tls_cert is not None and self.grpc_address.path:
            raise ValueError("--tls-cert: a Unix socket has no TLS: listen on HOST:PORT")
        if self.fa_window < 0:
            raise ValueError("--fa-window: 0 or more")
        for name in ("stall_ms", "drain_ms", "grace_ms"):
            if not 0 <= getattr(self, name) <= 3_600_000:
                raise ValueError(f"--{name.replace('_', '-')}: 0 to 3600000")

    @property
    def grpc_address(self) -> Address:
        """Where the gRPC side listens."""
        return parse_address(self.listen)

    @property
    def resp_address(self) -> Address | None:
        """Where the RESP side listens; None without one."""
        return parse_address(self.resp) if self.resp else None

    @property
    def exports(self) -> bool:
        """Whether clients on this host may learn the names of files: not if tenants share the server."""
        return not (self.no_export or self.tenants)

    @property
    def knows_clients(self) -> bool:
        """Whether the gRPC address lets in only clients with a certificate (mutual TLS)."""
        return self.tls_client_ca is not None

    def access(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the passwords by tenant, the administrator's under an empty name; none: all may call.

        Raises:
            ValueError: as `password` does, or there are tenants without an administrator, or one twice.
        """
        password = self.password(environment)
        if not password and not self.tenants:
            return {}
        if not password:
            raise ValueError(
                "--tenant: tenants need an administrator's password: PION_PASSWORD or --password-file "
                "(pion-server: --requirepass or --requirepass-file)"
            )
        passwords = {"": password}
        for pair in self.tenants:
            name, _, secret = pair.partition("=")
            if name in passwords:
                raise ValueError(f"--tenant: {name!r} is there twice")
            passwords[name] = secret
        return passwords

    def password(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns the password as given, from its file, or from PION_PASSWORD; empty: none is needed.

        Raises:
            ValueError: the file cannot be read, or is empty.
        """
        if self.password_text:
            return self.password_text
        if self.password_file is None:
            return environment.get("PION_PASSWORD", "")
        try:
            password = self.password_file.read_text().rstrip()
        except OSError as error:
            raise ValueError(
                f"the password file {self.password_file} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"the password file {self.password_file} is no text") from error
        if not password:
            raise ValueError(f"the password file {self.password_file} is empty")
        return password


SETTINGS = tuple(field for field in dataclasses.fields(Config) if field.metadata)
"""The fields that are flags and environment variables."""


def variable_of(field: "dataclasses.Field[Any]") -> str:
    """Returns the environment variable of a setting.

    It is `PION_` and its name, except for a server's certificates: PION_TLS_CERT is that of a client,
    which may run in the same environment.
    """
    return field.metadata["variable"] or f"PION_{field.name.upper()}"


def environment_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the settings that the environment gives.

    Raises:
        ValueError: one cannot be read; names it.
    """
    settings = {}
    for field in SETTINGS:
        name = variable_of(field)
        if environment.get(name):
            try:
                settings[field.name] = field.metadata["parse"](environment[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return settings
