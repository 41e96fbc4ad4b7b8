"""Who may do what: the administrator's password and those of tenants, the same for every wire.

A tenant's name is what its prefixes, states and keys are stored under; the administrator's is empty.
Knows no wire. The one decision: passwords are compared in constant time, and an unknown name takes as
long as a known one.
"""

import hmac
import re
from collections.abc import Mapping

from pion_wire.limits import TENANT_BYTES_MAX

TENANTS_MAX = 64
PASSWORD_BYTES_MAX = 128
TENANT_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{TENANT_BYTES_MAX}}}")


class Access:
    """The passwords of a server; without any, everybody is the administrator."""

    def __init__(self, passwords: Mapping[str, str]) -> None:
        """Takes passwords by tenant, the administrator's under an empty name.

        Raises:
            ValueError: a tenant's name or password cannot be used.
        """
        self._password = passwords.get("", "").encode()
        self._tenants = {name: secret.encode() for name, secret in passwords.items() if name}
        if len(self._tenants) > TENANTS_MAX:
            raise ValueError(f"--tenant: more than {TENANTS_MAX}")
        for tenant, secret in self._tenants.items():
            if not TENANT_NAME.fullmatch(tenant):
                raise ValueError(
                    f"--tenant: {tenant!r} is not a name of 1 to {TENANT_BYTES_MAX} letters, digits, - "
                    "and _"
                )
            if not 1 <= len(secret) <= PASSWORD_BYTES_MAX:
                raise ValueError(
                    f"--tenant: the password of {tenant!r} must have 1 to {PASSWORD_BYTES_MAX} bytes"
                )
        assert self._password or not self._tenants, "tenants have an administrator"

    @property
    def required(self) -> bool:
        """Whether a client must say who it is."""
        return bool(self._password)

    @property
    def tenants(self) -> frozenset[str]:
        """Names of the tenants."""
        return frozenset(self._tenants)

    def tenant(self, user: str | None, password: bytes, *, strict: bool = False) -> str | None:
        """Returns the tenant that these credentials belong to, empty for the administrator.

        None if they are wrong. The name of a tenant goes with that tenant's password only. Any other
        name goes with the administrator's, as clients of the RESP wire send names of their own; with
        `strict`, only the empty name or None does.
        """
        tenant = user if user in self._tenants else ""
        known = self._tenants.get(tenant, self._password)
        right = hmac.compare_digest(password, known)
        is_known = not (strict and user and user not in self._tenants)
        return tenant if right and known and is_known else None
